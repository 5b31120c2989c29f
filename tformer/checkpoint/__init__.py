"""A directory in, a directory out: run directories and checkpoints, atomic, verified, never unpickled."""

from __future__ import annotations

from tformer.checkpoint.average import Average, average_checkpoints
from tformer.checkpoint.catalog import Entry
from tformer.checkpoint.read import Checkpoint, read_checkpoint
from tformer.checkpoint.resolve import last_checkpoints, newest_checkpoint, resolve_checkpoint
from tformer.checkpoint.run import RunDirectory, list_runs
from tformer.checkpoint.save import checkpoint_bytes, save_checkpoint, write_checkpoint
from tformer.checkpoint.tensor_files import find_tied

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
