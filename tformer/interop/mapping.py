"""Links between tensors of tformer and of a Hugging Face file: names, layouts, conversion in both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tformer.support.errors import InputError


@dataclass(frozen=True)
class TensorLayout:
    """Conversion between tensors on disk and one tensor of tformer; `split(join(x)) == x` for the right shapes."""

    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], tuple[Tensor, ...]]


SAME = TensorLayout(join=lambda parts: parts[0], split=lambda ours: (ours,))
TRANSPOSED = TensorLayout(join=lambda parts: parts[0].t(), split=lambda ours: (ours.t(),))
"""GPT-2's Conv1D: matrices are [in, out], biases as usual."""


def rows(*sizes: int) -> TensorLayout:
    """The layout of several matrices or vectors stacked by rows, as in a fused q, k, v projection."""
    return TensorLayout(join=lambda parts: torch.cat(list(parts)), split=lambda ours: ours.split(sizes))


def grouped_rows(*, groups: int, heads: int) -> TensorLayout:
    """The layout of fused q, k, v with a group of queries beside their key and value, in rows [group, q k v, d].

    BLOOM and GPT-NeoX have a group for each head, Falcon also fewer.
    """

    def join(parts: Sequence[Tensor]) -> Tensor:
        found = parts[0].unflatten(0, (groups, heads // groups + 2, -1))
        q, k, v = found[:, :-2].flatten(0, 2), found[:, -2].flatten(0, 1), found[:, -1].flatten(0, 1)
        return torch.cat([q, k, v])

    def split(ours: Tensor) -> tuple[Tensor, ...]:
        size = ours.shape[0] // (heads + 2 * groups)
        parts = ours.split([heads * size, groups * size, groups * size])
        return (torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1),)

    return TensorLayout(join, split)


def reshaped(*, ours: Sequence[int], theirs: Sequence[int]) -> TensorLayout:
    """The layout of a tensor with another shape on disk; -1 is an inferred size, as in `Tensor.reshape`."""
    return TensorLayout(
        join=lambda parts: parts[0].reshape(*ours),
        split=lambda tensor: (tensor.reshape(*theirs),),
    )


@dataclass(frozen=True)
class Link:
    """One tensor of tformer and the tensors on disk that form it.

    ours: a name in `model.state_dict()`; for tied tensors the name of the owner.
    theirs: names on disk, in the order in which `layout` joins them.
    also: further names under which a file may repeat the first of `theirs` (tied weights); never written.
    """

    ours: str
    theirs: tuple[str, ...]
    layout: TensorLayout = SAME
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fixed:
    """A tensor on disk that a formula gives, not a weight. A file may hold it, and must then agree with the formula.

    make: computes it; written: whether an export writes it.
    """

    name: str
    make: Callable[[], Tensor]
    written: bool = False


def link(ours: str, *theirs: str, layout: TensorLayout = SAME, also: Iterable[str] = ()) -> Link:
    return Link(ours, theirs, layout, tuple(also))


def both(ours: str, theirs: str, *, layout: TensorLayout = SAME) -> list[Link]:
    """Links of a module's weight and bias. `layout` applies to the weight."""
    return [link(f"{ours}.weight", f"{theirs}.weight", layout=layout), link(f"{ours}.bias", f"{theirs}.bias")]


def check_fixed(fixed: Iterable[Fixed], theirs: Mapping[str, Tensor]) -> None:
    """Raise InputError for a stored tensor that differs from its formula by more than the rounding of its type."""
    for entry in fixed:
        if entry.name not in theirs:
            continue
        found, expected = theirs[entry.name].float(), entry.make()
        if found.shape != expected.shape:
            shapes = f"{list(found.shape)}, expected {list(expected.shape)}"
            raise InputError(f"tensor {entry.name} has the shape {shapes}")
        error = float((found - expected).abs().max())
        if not error <= max(1e-5, 2 * torch.finfo(theirs[entry.name].dtype).eps):
            raise InputError(
                f"tensor {entry.name} differs from the formula that tformer computes in its place, by up to {error:.2g}"
            )


def to_ours(links: Iterable[Link], theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """tformer's tensors from those on disk, whose presence and shapes were checked before.

    Raises InputError for a repeated tensor (`also`) that differs from the one it repeats.
    """
    weights = {}
    for entry in links:
        weights[entry.ours] = entry.layout.join([theirs[name] for name in entry.theirs]).contiguous()
        for name in entry.also:
            if name in theirs and not torch.equal(theirs[name], theirs[entry.theirs[0]]):
                raise InputError(
                    f"{name} and {entry.theirs[0]} are one tensor in this architecture, but differ in the file",
                    hint="if they are meant to be two, set tie_word_embeddings: false in config.json",
                )
    return weights
