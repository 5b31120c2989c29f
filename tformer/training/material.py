"""What a run is trained and validated on, whatever it is made of: windows of text, sentences, labels, images, pairs.

Each kind of data has a file of its own that turns a recipe into `Material`: `text_material`, `sentence_material`,
`labelled_material`, `image_material`, `pair_material`. The loop and the session know this interface alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tformer.objectives.base import Objective, ObjectiveContext
from tformer.recipe.recipe import Recipe
from tformer.tokenizer import Tokenizer
from tformer.training.request import Start

Progress = Callable[..., AbstractContextManager[Callable[..., None]]]
ShouldStop = Callable[[], bool]


class Samples(Protocol):
    """Training samples: `examples(epoch, indices)` is a pure function."""

    @property
    def seq_len(self) -> int: ...

    @property
    def lengths(self) -> np.ndarray | None:
        """Tokens of each sample; None: all have `seq_len`."""

    def __len__(self) -> int: ...
    def examples(self, epoch: int, indices: np.ndarray | list[int], /) -> Sequence[Any]: ...


Validate = Callable[[Any, Objective, ShouldStop], dict[str, Any] | None]
"""(model, objective, should_stop) -> the figures of a validation, `loss` among them; None: interrupted."""


WriteSample = Callable[[Any, ShouldStop], str | None]
"""(model, should_stop) -> a sample of its output; empty: it has none to show; None: interrupted."""


@dataclass(frozen=True)
class Material:
    """What a run learns from.

    Attributes:
        recipe: with everything that the data decided: label names, columns, image statistics.
        tokenizer: None for images.
        target_tokenizer: of the target side, where it has a vocabulary of its own.
        samples: to train on; `packed` when all are windows of one length, which `samples.windows` cuts at once.
        validate: measures a model on what was held out.
        context: what the objective needs to know.
        fingerprint: of all that is trained and validated on.
        label_mean: of the training scores (regression): where the head starts.
        sample: writes what the model makes of a held-out example, for people to read; None: it continues text.
        tokens_per_sample: positions that the model computes for one sample at most.
    """

    recipe: Recipe
    tokenizer: Tokenizer | None
    samples: Samples
    validate: Validate
    context: ObjectiveContext
    fingerprint: str
    notes: tuple[str, ...] = ()
    packed: bool = False
    label_mean: float | None = None
    target_tokenizer: Tokenizer | None = None
    sample: WriteSample | None = None
    tokens_per_sample: int = 1


@dataclass(frozen=True)
class Sources:
    """What every kind of material is made from."""

    start: Start
    cache_dir: Path | None
    progress: Progress
    should_stop: ShouldStop

    @property
    def recipe(self) -> Recipe:
        return self.start.recipe
