"""Hugging Face in and out: real models with their exact logits, or a refusal that names what one side lacks."""

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
