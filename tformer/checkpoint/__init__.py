"""Run directories and checkpoints: atomic, verified, never unpickled.

What reads and writes tensors loads torch, which takes a second; who writes a file whole or looks at a log need not wait
for that. So each name is fetched from its file when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tformer.checkpoint.average import Average, average_checkpoints
    from tformer.checkpoint.catalog import Entry
    from tformer.checkpoint.read import Checkpoint, read_checkpoint
    from tformer.checkpoint.resolve import last_checkpoints, newest_checkpoint, resolve_checkpoint
    from tformer.checkpoint.run import RunDirectory, list_runs
    from tformer.checkpoint.save import checkpoint_bytes, save_checkpoint, write_checkpoint
    from tformer.checkpoint.tensor_files import find_tied

FILES = {
    "Average": "average",
    "Checkpoint": "read",
    "Entry": "catalog",
    "RunDirectory": "run",
    "average_checkpoints": "average",
    "checkpoint_bytes": "save",
    "find_tied": "tensor_files",
    "last_checkpoints": "resolve",
    "list_runs": "run",
    "newest_checkpoint": "resolve",
    "read_checkpoint": "read",
    "resolve_checkpoint": "resolve",
    "save_checkpoint": "save",
    "write_checkpoint": "save",
}
"""The module of each public name."""

__all__ = [
    "Average",
    "Checkpoint",
    "Entry",
    "RunDirectory",
    "average_checkpoints",
    "checkpoint_bytes",
    "find_tied",
    "last_checkpoints",
    "list_runs",
    "newest_checkpoint",
    "read_checkpoint",
    "resolve_checkpoint",
    "save_checkpoint",
    "write_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{FILES[name]}"), name)
