"""Open the checkpoint at a path: of tformer, or a Hugging Face folder, whose reader is imported only then."""

from __future__ import annotations

from pathlib import Path

from tformer.checkpoint.read import Checkpoint, read_checkpoint
from tformer.checkpoint.resolve import resolve_checkpoint
from tformer.checkpoint.run import is_run
from tformer.interop.hub import is_hub_name
from tformer.interop.weight_files import CONFIG, INDEX, SINGLE
from tformer.support.errors import InputError
from tformer.support.files import MANIFEST

RECIPE = "recipe.yaml"  # only checkpoints of tformer have one


def open_checkpoint(path: str | Path, which: str = "best", *, runs_dir: str | Path = "runs") -> Checkpoint:
    """The checkpoint at `path`: of a run, a checkpoint directory, or a Hugging Face folder; adapters with their base.

    Args:
        path: see above.
        which: `latest`, `best` or `step-N`; only for runs.
        runs_dir: where to look for names to suggest.

    Raises:
        InputError: nothing there, or nothing that can be read.
    """
    folder = Path(path)
    if is_hub_name(str(path)):
        raise InputError(f"{path} is a name on the hub, not a folder", hint=f"tformer import {path} --out DIR")
    if folder.suffix == ".gguf" and folder.is_file():
        raise InputError(f"{path} is a GGUF file, not a run", hint=f"tformer import {path} --out DIR")
    if is_foreign(folder):
        from tformer.interop.foreign_checkpoint import open_folder

        return open_folder(folder)
    if (folder / "adapter_config.json").is_file():
        hint = f"tformer import {path} --base MODEL --out DIR"
        raise InputError(f"{path} is an adapter of peft, not a run", hint=hint)
    checkpoint = read_checkpoint(resolve_checkpoint(path, which, runs_dir=runs_dir))
    if checkpoint.recipe.lora is None:
        return checkpoint
    from tformer.interop.adapters import with_base

    return with_base(checkpoint)


def is_foreign(folder: Path) -> bool:
    """Whether a folder has the layout of Hugging Face: a config.json, or weights without a manifest or recipe."""
    if (folder / MANIFEST).is_file() or is_run(folder):
        return False
    weights = any((folder / name).is_file() for name in (SINGLE, INDEX)) and not (folder / RECIPE).is_file()
    return (folder / CONFIG).is_file() or weights
