"""Import from and export to Hugging Face: equal logits, or an error that names the unsupported feature."""

from __future__ import annotations

from tformer.interop.exporting import ExportReport, export_checkpoint
from tformer.interop.importing import ForeignCheckpoint, ImportReport, import_folder, open_checkpoint, open_folder

__all__ = [
    "ExportReport",
    "ForeignCheckpoint",
    "ImportReport",
    "export_checkpoint",
    "import_folder",
    "open_checkpoint",
    "open_folder",
]
