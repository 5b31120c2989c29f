"""How `tformer classify` writes an answer: a line for people and pipes, or a JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tformer.formatting import as_cell

if TYPE_CHECKING:
    import numpy as np

Kind = Literal["classes", "labels", "score"]
"""One class of several; any number of labels; or a score."""


@dataclass(frozen=True)
class AnswerFormat:
    """How answers look.

    Attributes:
        kind: of the model.
        names: of its labels.
        top: how many labels to give, the most probable first; None: the best class, or the labels that hold.
        threshold: a label of several holds above this probability.
    """

    kind: Kind
    names: tuple[str, ...]
    top: int | None = None
    threshold: float = 0.5

    def line(self, values_L: np.ndarray) -> str:
        """Label, probability, label, probability ... parted by tabs; of several labels those that hold, joined by
        commas, and their probabilities likewise; or the score. `values_L`: probabilities, or the score [1]."""
        if self.kind == "score":
            return f"{values_L[0]:.4f}"
        if self.kind == "labels" and self.top is None:
            held = self._holding(values_L)
            return ",".join(self._names(held)) + "\t" + ",".join(f"{values_L[index]:.4f}" for index in held)
        return "\t".join(f"{as_cell(self.names[index])}\t{values_L[index]:.4f}" for index in self._best(values_L))

    def document(self, values_L: np.ndarray) -> dict[str, Any]:
        """`label` (or `labels`) and `probabilities`, the highest first; or `score`."""
        if self.kind == "score":
            return {"score": float(values_L[0])}
        best = self._best(values_L, default=len(self.names))
        probabilities = {self.names[index]: float(values_L[index]) for index in best}
        if self.kind == "labels":
            return {"labels": [self.names[index] for index in self._holding(values_L)], "probabilities": probabilities}
        return {"label": self.names[best[0]], "probabilities": probabilities}

    def _best(self, values_L: np.ndarray, default: int = 1) -> list[int]:
        order_L = (-values_L).argsort(kind="stable")
        return [int(index) for index in order_L[: self.top or default]]

    def _holding(self, values_L: np.ndarray) -> list[int]:
        return [index for index in self._best(values_L, default=len(self.names)) if values_L[index] > self.threshold]

    def _names(self, indices: Sequence[int]) -> list[str]:
        return [as_cell(self.names[index]) for index in indices]
