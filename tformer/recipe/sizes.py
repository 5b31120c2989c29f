"""Sizes of model among which a training by time chooses (`tformer train --minutes`), by family and kind of data.

A model is too large for the time if it sees too few tokens. The table has the minimum of tokens for each parameter,
fitted to trainings of all sizes (configs/README.md). The largest size with at least that number wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tformer.recipe.followers import nearest_divisor
from tformer.recipe.model import Model
from tformer.recipe.recipe import Recipe
from tformer.support.formatting import plural


class Size(NamedTuple):
    """One size of a model.

    Attributes:
        layers, width: of each stack.
        window: maximum of the tokens of a window; None: that of the preset.
        tokens: of a step; None: those of the preset.
        values: other values that suit this size, by dotted path.
        epochs: number of times that it may read its data; None: any.
    """

    layers: int
    width: int
    window: int | None = None
    tokens: int | None = None
    values: tuple[tuple[str, Any], ...] = ()
    epochs: float | None = None


@dataclass(frozen=True)
class Ladder:
    """Sizes from the smallest to the largest.

    Attributes:
        tokens_per_parameter: the minimum of all steps together.
        dropout: of the layers, where the training reads its data more often than this number of times.
    """

    sizes: tuple[Size, ...]
    tokens_per_parameter: float
    dropout: tuple[int, float] = (6, 0.05)


TEXT = Ladder(
    (
        Size(2, 128, window=128, tokens=2048),
        Size(3, 128, window=128, tokens=2048),
        Size(4, 192, window=256, tokens=4096),
        Size(5, 256, window=256, tokens=4096),
        Size(6, 320, window=256, tokens=4096),
        Size(8, 384, window=256, tokens=8192),
        Size(10, 512, window=256, tokens=8192),
        Size(12, 768, window=256, tokens=16384),
    ),
    0.9,
)
NGRAMS = (
    ("model.embedding.ngram", 6),
    ("model.embedding.ngram_rows", 65536),
    ("optimizer.lr", 0.03),
    ("optimizer.adam_lr", 0.012),
)
"""Vectors of up to 6 characters: best where a text is read about once, afterwards they overfit."""

CHARACTERS = Ladder(
    (
        Size(2, 128, window=128, tokens=1024, values=NGRAMS, epochs=1.2),
        Size(3, 192, window=128, tokens=2048, values=NGRAMS, epochs=1.5),
        Size(5, 192, window=256, tokens=4096),
        Size(6, 256, window=512, tokens=4096),
    ),
    1.0,
)
PIECES = (("tokenizer.train.vocab_size", 512), ("optimizer.kind", "normuon"), *NGRAMS, ("model.embedding.ngram", 4))
FEW_PIECES = Ladder(tuple(Size(layers, 128, 128, 1024, PIECES, epochs=1.2) for layers in (2, 3)), 1.0)
"""For few operations: few pieces occur often, and vectors of up to four of them hold what a table of n-grams knows."""

SLOW_OPERATIONS = 1e13
"""Operations of products that fill the training's time, below which 512 pieces are better than 2,048."""

PAIRS = Ladder((Size(2, 128), Size(3, 192), Size(4, 256)), 0.5)

LADDERS: dict[tuple[str, str], Ladder] = {
    **{(arch, "text"): TEXT for arch in ("gpt", "llama")},
    **{(arch, "masked_text"): TEXT for arch in ("roberta", "electra", "t5", "bart")},
    ("transformer", "pairs"): PAIRS,
}
"""The sizes of each family and kind of data; others have one size, that of their preset or of the choice by data."""


def ladder_of(recipe: Recipe, operations: Callable[[], float]) -> Ladder | None:
    """The sizes for a recipe's family, data and tokens.

    operations: of the products that the machine computes in the time; asked only where the number of pieces may follow.
    """
    ladder = LADDERS.get((recipe.arch, recipe.data_kind))
    if ladder is TEXT and recipe.tokenizer.train.model == "char":
        return CHARACTERS
    return FEW_PIECES if ladder is TEXT and recipe.data_kind == "text" and operations() < SLOW_OPERATIONS else ladder


MOST_LENGTH = {"vit": 2.0}
"""Maximum of a training by time, as a multiple of the epochs or steps that the data chooses; others: 1.

Longer trainings overfit: a classifier of TREC's questions is no better after 12 epochs than after 6. Images gain from
twice as many (CIFAR-10: 30 epochs 83.7 %, 60 epochs 84.7 %).
"""

STACKS = ("encoder", "decoder")

DEFAULT_MINUTES = 2.0
"""Time of `tformer train --arch NAME` without data, preset and length."""


def sized(recipe: Recipe, size: Size) -> dict[str, tuple[Any, str]]:
    """The values by dotted path that give a recipe's stacks this size, each with its phrase for a note.

    The ratio of the feed-forward layer to the width, and of the generator to the model, stay those of the recipe.
    """
    layers, width, window, tokens = size[:4]
    ratio = width / recipe.model.d_model
    values: dict[str, tuple[Any, str]] = dict(_values("model", recipe.model, layers, width))
    values |= {path: (value, "") for path, value in size.values}
    if recipe.generator is not None:
        own = max(32, round(recipe.generator.d_model * ratio))
        values |= _values("generator", recipe.generator, layers, own)
        values["generator.embedding.size"] = (width, "")
    values["model.d_model"] = (width, f"{plural(layers, 'layer')} of width {width}")
    if window is not None and recipe.data.seq_len is None:
        values["model.max_seq_len"] = (window, "")
    if tokens is not None and recipe.training.batch_tokens is not None:
        values["training.batch_tokens"] = (tokens, "")
    elif tokens is not None:
        values["training.batch_size"] = (max(1, tokens // min(window or recipe.seq_len, recipe.seq_len)), "")
    return values


def with_dropout(recipe: Recipe, rate: float) -> Recipe:
    """The recipe with at least this dropout in the layers of its model."""
    stacks = {side: stack for side in STACKS if (stack := getattr(recipe.model, side)) is not None}
    changed = {side: stack.model_copy(update={"dropout": max(rate, stack.dropout)}) for side, stack in stacks.items()}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=changed)})


def _values(name: str, model: Model, layers: int, width: int) -> Iterator[tuple[str, tuple[Any, str]]]:
    yield f"{name}.d_model", (width, "")
    for side in STACKS:
        stack = getattr(model, side)
        if stack is None:
            continue
        heads = max(1, width * stack.num_heads // model.d_model)  # each as wide as before
        yield f"{name}.{side}.num_layers", (layers, "")
        yield f"{name}.{side}.num_heads", (heads, "")
        yield f"{name}.{side}.feedforward.d_ff", (round(stack.feedforward.d_ff * width / model.d_model), "")
        if stack.num_kv_heads is not None:
            shared = heads * stack.num_kv_heads / stack.num_heads
            yield f"{name}.{side}.num_kv_heads", (nearest_divisor(heads, shared), "")
