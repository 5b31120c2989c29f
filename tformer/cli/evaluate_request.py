"""What a person asked of `tformer evaluate`, and which data that means: shared by every family's file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tformer.errors import InputError

if TYPE_CHECKING:
    from tformer.data.sources.files import Errors
    from tformer.loading import Loaded
    from tformer.recipe.sections import (
        Columns,
        SourceSpec,
    )


@dataclass(frozen=True)
class Request:
    """The options of the command; None: not given."""

    data: str | None = None
    text_column: str | None = None
    text2_column: str | None = None
    label_column: str | None = None
    invalid_utf8: str | None = None
    errors_file: Path | None = None
    seq_len: int | None = None
    stride: int | None = None
    pseudo_perplexity: bool = False
    max_tokens: int | None = None
    batch_size: int | None = None
    source: str | None = None
    target: str | None = None
    source_column: str | None = None
    target_column: str | None = None
    prefix: str | None = None
    score: bool = False
    no_decode: bool = False
    beam_size: int | None = None
    max_new_tokens: int | None = None
    length_penalty: float | None = None
    length_penalty_type: str | None = None
    bleu_tokenize: str | None = None
    lowercase: bool = False
    quantize: str = "none"

    @property
    def reads_files(self) -> bool:
        """Whether data was named; else it is the run's own."""
        return self.data is not None or self.source is not None

    def inputs(self) -> list[str]:
        """Every file that was named to be read."""
        return [path for path in (self.data, self.source, self.target) if path is not None]

    def specs(self, loaded: Loaded) -> tuple[SourceSpec, ...]:
        """The data to read: what was named, else the run's validation data, else its training data, to be split.

        Raises InputError for a run that was trained on standard input.
        """
        from tformer.data.sources.files import STANDARD_INPUT
        from tformer.decoding.prompts import task_prefix
        from tformer.recipe.sections import SourceSpec

        prefix, _ = task_prefix(loaded.recipe, self.prefix)
        if self.data is not None:
            return (SourceSpec(path=self.data, prefix=prefix),)
        if self.source is not None:
            return (SourceSpec(path=self.source, target_path=self.target, prefix=prefix),)
        if loaded.imported:
            raise InputError(
                f"{loaded.path} was imported: it has no data of its own",
                hint="name what to evaluate on with --data, or --source and --target",
            )
        specs = loaded.recipe.data.valid or loaded.recipe.data.train
        if any(spec.path == STANDARD_INPUT for spec in specs):
            raise InputError(
                f"{loaded.path} was trained on standard input, which cannot be read again",
                hint="name what to evaluate on with --data",
            )
        return tuple(self._prefixed(spec, prefix, loaded) for spec in specs)

    def note(self, loaded: Loaded) -> str | None:
        """What a person should know of the prefix of sources. The run's own data has those of its tasks."""
        from tformer.decoding.prompts import task_prefix

        prefix, note = task_prefix(loaded.recipe, self.prefix)
        return note if prefix or self.reads_files else None

    def _prefixed(self, spec: SourceSpec, prefix: str, loaded: Loaded) -> SourceSpec:
        """Data of the run behind the prefix that was asked for, else its own, else that of all tasks."""
        chosen = prefix if self.prefix is not None else spec.prefix or prefix
        if chosen != spec.prefix and self.held_out(loaded):
            raise InputError(
                f"--prefix '{chosen}' would change which pairs of {spec.path} are held out: it was split behind "
                f"'{spec.prefix}'",
                hint="name what to evaluate on with --data or --source",
            )
        return spec.model_copy(update={"prefix": chosen})

    def held_out(self, loaded: Loaded) -> bool:
        """Whether the data is the part of the training data that was never trained on."""
        return not self.reads_files and not loaded.recipe.data.valid

    def errors(self, loaded: Loaded) -> Errors:
        """What to do with invalid UTF-8: as asked, else as in training for the run's own data."""
        chosen = self.invalid_utf8 or ("strict" if self.reads_files else loaded.recipe.data.errors)
        return "replace" if chosen == "replace" else "strict"

    def columns(self, loaded: Loaded) -> Columns:
        """The columns named on the command line over those of the run."""
        from tformer.data.sources.columns import parse_column

        given = {
            "text": self.text_column,
            "text2": self.text2_column,
            "label": self.label_column,
            "source": self.source_column,
            "target": self.target_column,
        }
        updates = {name: parse_column(column) for name, column in given.items() if column is not None}
        return loaded.recipe.data.columns.model_copy(update=updates)


def describe(loaded: Loaded) -> dict[str, Any]:
    """What every report begins with."""
    return {"run": str(loaded.path), "step": loaded.step}
