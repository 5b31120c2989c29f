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

    def specs(self, loaded: Loaded) -> tuple[SourceSpec, ...]:
        """The data to read: `--data`, else the run's validation data, else its training data, to be split.

        Raises InputError for a run that was trained on standard input.
        """
        from tformer.data.sources import STANDARD_INPUT
        from tformer.recipe.data import SourceSpec

        if self.data is not None:
            return (SourceSpec(path=self.data),)
        specs = loaded.recipe.data.valid or loaded.recipe.data.train
        if any(spec.path == STANDARD_INPUT for spec in specs):
            raise InputError(
                f"{loaded.path} was trained on standard input, which cannot be read again",
                hint="name what to evaluate on with --data",
            )
        return specs

    def held_out(self, loaded: Loaded) -> bool:
        """Whether the data is the part of the training data that was never trained on."""
        return self.data is None and not loaded.recipe.data.valid

    def errors(self, loaded: Loaded) -> Errors:
        """What to do with invalid UTF-8: as asked, else as in training for the run's own data."""
        chosen = self.invalid_utf8 or ("strict" if self.data is not None else loaded.recipe.data.errors)
        return "replace" if chosen == "replace" else "strict"

    def columns(self, loaded: Loaded) -> Columns:
        """The columns named on the command line over those of the run."""
        from tformer.data.tables import parse_column

        given = {"text": self.text_column, "text2": self.text2_column, "label": self.label_column}
        updates = {name: parse_column(column) for name, column in given.items() if column is not None}
        return loaded.recipe.data.columns.model_copy(update=updates)


def describe(loaded: Loaded) -> dict[str, Any]:
    """What every report begins with."""
    return {"run": str(loaded.path), "step": loaded.step}
