"""Mapping between tformer's weights and a Hugging Face architecture's: links between tensors, layouts, and the table
entry of one architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tformer.errors import InputError


@dataclass(frozen=True)
class Layout:
    """How tensors on disk lie in one of ours; `split(join(x)) == x` for every x of the right shapes."""

    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], tuple[Tensor, ...]]


SAME = Layout(join=lambda parts: parts[0], split=lambda ours: (ours,))
TRANSPOSED = Layout(join=lambda parts: parts[0].T, split=lambda ours: (ours.T,))  # GPT-2's Conv1D is [in, out]


def rows(*sizes: int) -> Layout:
    """Several matrices (or vectors), one below the other, as in a fused q, k, v projection."""
    return Layout(join=lambda parts: torch.cat(list(parts)), split=lambda ours: ours.split(sizes))


def interleaved_rows(*, heads: int, parts: int) -> Layout:
    """Rows [part, head, d] here are [head, part, d] there: BLOOM's fused q, k, v."""

    def swapped(tensor: Tensor, first: int, second: int) -> Tensor:
        inner = tensor.shape[0] // (first * second)
        split = tensor.reshape(first, second, inner, *tensor.shape[1:])
        return split.transpose(0, 1).reshape(tensor.shape)

    return Layout(
        join=lambda found: swapped(found[0], heads, parts),
        split=lambda ours: (swapped(ours, parts, heads),),
    )


def reshaped(*, ours: Sequence[int], theirs: Sequence[int]) -> Layout:
    """The same numbers in the same order under another shape; -1 stands for one size as in `Tensor.reshape`."""
    return Layout(
        join=lambda parts: parts[0].reshape(*ours),
        split=lambda tensor: (tensor.reshape(*theirs),),
    )


@dataclass(frozen=True)
class Link:
    """One of our tensors and what it is made of on disk.

    ours: a name in `model.state_dict()`, the owner where several names are one tensor.
    theirs: names on disk, in the order in which `layout` joins them.
    also: further names under which a file may repeat the first of `theirs` (tied weights); never written.
    """

    ours: str
    theirs: tuple[str, ...]
    layout: Layout = SAME
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fixed:
    """A tensor on disk that is no weight: a formula gives its numbers. A file may hold it, and must then agree.

    make: its numbers; written: whether new files hold it.
    """

    name: str
    make: Callable[[], Tensor]
    written: bool = False


def link(ours: str, *theirs: str, layout: Layout = SAME, also: Iterable[str] = ()) -> Link:
    return Link(ours, theirs, layout, tuple(also))


def both(ours: str, theirs: str, *, bias: bool = True, layout: Layout = SAME) -> list[Link]:
    """The weight of a module, and its bias. `layout` is the weight's: vectors need none."""
    links = [link(f"{ours}.weight", f"{theirs}.weight", layout=layout)]
    return [*links, link(f"{ours}.bias", f"{theirs}.bias")] if bias else links


def fused(ours: str, theirs: Sequence[str], sizes: Sequence[int], *, bias: bool = True) -> list[Link]:
    """One projection of ours that is several on disk: `sizes` are the rows of each."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return [link(f"{ours}.{kind}", *(f"{name}.{kind}" for name in theirs), layout=rows(*sizes)) for kind in kinds]


def shapes_on_disk(links: Iterable[Link], ours: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """The shape that every tensor on disk must have, given those of ours."""
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in links:
        parts = entry.layout.split(torch.empty(tuple(ours[entry.ours]), device="meta"))
        shapes |= {name: tuple(part.shape) for name, part in zip(entry.theirs, parts, strict=True)}
    return shapes


def let_copies_stand_in(links: Iterable[Link], names: dict[str, str]) -> None:
    """Where a file holds a tied tensor under the name of a copy alone, that copy is the tensor."""
    for entry in links:
        copy = next((name for name in entry.also if name in names), None)
        if copy is not None and entry.theirs[0] not in names:
            names[entry.theirs[0]] = names.pop(copy)


def check_fixed(fixed: Iterable[Fixed], theirs: Mapping[str, Tensor]) -> None:
    """InputError for a stored tensor that is not what its formula gives, up to the rounding of its type."""
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
    """Our tensors from those on disk, which are known to be there and to have the right shapes.

    Raises InputError for a repeated tensor (`also`) that differs from the one it repeats.
    """
    weights = {}
    for entry in links:
        weights[entry.ours] = entry.layout.join([theirs[name] for name in entry.theirs]).contiguous()
        for name in entry.also:
            if name in theirs and not torch.equal(theirs[name], theirs[entry.theirs[0]]):
                raise InputError(
                    f"{name} and {entry.theirs[0]} are one tensor in this architecture, but differ in the file",
                    hint="say so in config.json (tie_word_embeddings: false) if they are meant to be two",
                )
    return weights


def to_theirs(links: Iterable[Link], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors to write, under the names on disk."""
    tensors: dict[str, Tensor] = {}
    for entry in links:
        parts = entry.layout.split(ours[entry.ours])
        tensors |= {name: part.contiguous() for name, part in zip(entry.theirs, parts, strict=True)}
    return tensors
