"""What a person asked of `tformer evaluate`, and which data that means: shared by every family's file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tformer.errors import InputError

if TYPE_CHECKING:
    from tformer.data.text import Errors
    from tformer.loading import Loaded
    from tformer.recipe.data import Columns, SourceSpec


@dataclass(frozen=True)
class Request:
    """The options of the command; None: not given."""

    data: str | None = None
    text_column: str | None = None
    text2_column: str | None = None
    label_column: str | None = None
    invalid_utf8: str | None = None
    errors_file: Path | None = None
    stride: int | None = None
    pseudo_perplexity: bool = False
    max_tokens: int | None = None
    batch_size: int | None = None
    source: str | None = None
    target: str | None = None
    source_column: str | None = None
    target_column: str | None = None
    score: bool = False
    no_decode: bool = False
    beam_size: int | None = None
    length_penalty: float | None = None
    length_penalty_type: str | None = None
    bleu_tokenize: str | None = None
    lowercase: bool = False

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
        from tformer.data.sources import STANDARD_INPUT
        from tformer.recipe.data import SourceSpec

        if self.data is not None:
            return (SourceSpec(path=self.data, prefix=prefix_of(loaded)),)
        if self.source is not None:
            return (SourceSpec(path=self.source, target_path=self.target, prefix=prefix_of(loaded)),)
        specs = loaded.recipe.data.valid or loaded.recipe.data.train
        if any(spec.path == STANDARD_INPUT for spec in specs):
            raise InputError(
                f"{loaded.path} was trained on standard input, which cannot be read again",
                hint="name what to evaluate on with --data",
            )
        return specs

    def held_out(self, loaded: Loaded) -> bool:
        """Whether the data is the part of the training data that was never trained on."""
        return not self.reads_files and not loaded.recipe.data.valid

    def errors(self, loaded: Loaded) -> Errors:
        """What to do with invalid UTF-8: as asked, else as in training for the run's own data."""
        chosen = self.invalid_utf8 or ("strict" if self.reads_files else loaded.recipe.data.errors)
        return "replace" if chosen == "replace" else "strict"

    def columns(self, loaded: Loaded) -> Columns:
        """The columns named on the command line over those of the run."""
        from tformer.data.tables import parse_column

        given = {
            "text": self.text_column,
            "text2": self.text2_column,
            "label": self.label_column,
            "source": self.source_column,
            "target": self.target_column,
        }
        updates = {name: parse_column(column) for name, column in given.items() if column is not None}
        return loaded.recipe.data.columns.model_copy(update=updates)


def prefix_of(loaded: Loaded) -> str:
    """What the run was trained to read before a source: its task's prefix; none where its tasks differ."""
    prefixes = {spec.prefix for spec in loaded.recipe.data.train}
    return prefixes.pop() if len(prefixes) == 1 else ""


def describe(loaded: Loaded) -> dict[str, Any]:
    """What every report begins with."""
    return {"run": str(loaded.path), "step": loaded.step}
