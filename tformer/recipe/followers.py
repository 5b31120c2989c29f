"""Keys of a recipe that change automatically when a layer (a file, or flags and `--set`) sets another key.

    limits   training.max_steps, max_epochs, minutes and max_minutes: a layer that gives steps, epochs or minutes drops
             the limits of the layers below; if it gives two, the first one reached ends the training
    clock    training.minutes make the schedule `timed`; steps in their place make it `wsd` again
    sizes    feedforward.d_ff, num_heads and num_kv_heads of a stack follow its d_model in proportion: the numbers of a
             recipe state the ratio of d_ff to d_model and the size of a head
    scale    where a layer chooses positions that are added to much smaller token vectors (sinusoidal), these are scaled
    kinds    another `kind` drops the options of the former one; a kind that is set alone (`--set ….kind=`) keeps those
             that both inherit from one class, as the biases of all kinds of attention

A value that the layer itself gives is never changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

from tformer.nn.init import InitOptions
from tformer.nn.positions import POSITIONS
from tformer.recipe.overrides import Draft, Origin
from tformer.recipe.schema import default_kind, fields_of, inherited_keys, section_of_kind, value_at
from tformer.recipe.sections import MAX_SIZE
from tformer.recipe.yaml_text import KeyPath, flow

UNLIMITED_STEPS = 10**9
"""Value of training.max_steps where only the number of epochs limits the training."""

NO_LIMIT: dict[str, Any] = {"max_steps": UNLIMITED_STEPS, "max_epochs": None, "minutes": None, "max_minutes": None}
"""Keys of `training` that limit its length, with the value of each that limits nothing."""

LENGTHS = ("max_steps", "max_epochs", "minutes")
"""The limits that define the length of the learning-rate schedule; max_minutes only ends it early."""


def follow(draft: Draft, below: Draft) -> list[str]:
    """Change what follows the values that the last layer of `draft` gives; a note for each change.

    below: the draft before that layer.
    """
    notes = [*_kinds(draft, below), *_limits(draft, below)]
    _time_schedule(draft, below)
    for stack in (("model", "encoder"), ("model", "decoder"), ("generator", "encoder"), ("generator", "decoder")):
        if isinstance(value_at(stack, below.data), dict) and isinstance(value_at(stack, draft.data), dict):
            notes += _follow_width(draft, below, stack)
    return [*notes, *_scaled_embeddings(draft, below)]


def _gives(draft: Draft, below: Draft, path: KeyPath) -> bool:
    """Whether the last layer gave the value at `path`."""
    return path in draft.origins and draft.origins[path] != below.origins.get(path)


def _kinds(draft: Draft, below: Draft) -> Iterator[str]:
    """Drop the options of former kinds; one note for the same options in several places, whatever the new kind is."""
    places: dict[str, list[str]] = {}
    for path, old in _replaceable(below.data, draft, below):
        new, before = value_at(path, draft.data), old.get("kind") or default_kind(path, below.data)
        if not isinstance(new, dict) or new.get("kind", before) == before:
            continue
        former, now = (section_of_kind(path, kind, below.data) for kind in (before, new["kind"]))
        if former is None or now is None:
            continue  # validation reports an unknown kind, and options of single layers
        same = inherited_keys(former, now)
        for key in [key for key in new if key not in same and not _gives(draft, below, (*path, key))]:
            draft.drop(new, (*path, key))
        defaults = {key: fields_of(now if key in same else former).get(key) for key in old if key not in new}
        dropped = {key: old[key] for key, field in defaults.items() if field is None or old[key] != field.default}
        if dropped:
            label = below.origin_of((*path, next(iter(dropped)))).label
            places.setdefault(f"{flow(dropped)} of {before} ({label})", []).append(".".join(path))
    for options, paths in places.items():
        yield f"another kind of {' and '.join(paths)}: {options} is dropped"


def _replaceable(
    value: Any, draft: Draft, below: Draft, path: KeyPath = ()
) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """The mappings in `value`, of `below` at `path`, outside lists that the last layer of `draft` gave."""
    if isinstance(value, dict):
        yield path, value
    elif not isinstance(value, list) or _gives(draft, below, path):
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _replaceable(item, draft, below, (*path, str(key)))


def _limits(draft: Draft, below: Draft) -> Iterator[str]:
    paths = [("training", name) for name in LENGTHS]
    given = [path for path in paths if _gives(draft, below, path) and value_at(path, draft.data) is not None]
    if not given:
        return
    winner = given[0]
    for name, unlimited in NO_LIMIT.items():
        path = ("training", name)
        if _gives(draft, below, path) or value_at(path, draft.data) == unlimited:
            continue
        is_plan = winner[-1] == "minutes" and draft.origin_of(path).label.startswith("preset ")  # the plan is noted
        if path in draft.origins and not is_plan:
            yield f"{_named(draft, winner)} is the limit: {_named(draft, path)} is dropped"
        draft.assign(".".join(path), unlimited, draft.origin_of(winner))


TIMED_DECAY = 0.5
"""Part of the steps in which a timed rate decays, where the replaced schedule states none."""


def _time_schedule(draft: Draft, below: Draft) -> None:
    """Set the schedule whose end the clock decides, in place of one that needs the number of steps; and back."""
    kind, minutes = ("schedule", "kind"), ("training", "minutes")
    old, timed = value_at(kind, draft.data) or "cosine", value_at(minutes, draft.data) is not None
    if _gives(draft, below, kind) or timed == (old == "timed") or not (_gives(draft, below, minutes) or not timed):
        return
    origin = draft.origin_of(minutes)
    if not timed:
        draft.assign("schedule.kind", "wsd", origin)
        draft.assign("schedule.points", None, origin)
        return
    draft.assign("schedule.kind", "timed", origin)
    if old != "wsd" and not _gives(draft, below, ("schedule", "decay_fraction")):
        draft.assign("schedule.decay_fraction", TIMED_DECAY, origin)
    if old == "noam":  # its factor of the learning rate is d_model^-1/2 warmup^-1/2 at the peak
        width, warmup = value_at(("model", "d_model"), draft.data), value_at(("schedule", "warmup_steps"), draft.data)
        rate = ("optimizer", "lr")
        if not _gives(draft, below, rate) and _is_size(width) and _is_size(warmup):
            draft.assign("optimizer.lr", value_at(rate, draft.data) * (width * warmup) ** -0.5, origin)
    for name in ("eval_every", "save_every"):
        if not _gives(draft, below, ("training", name)):
            draft.assign(f"training.{name}", None, origin)


def _named(draft: Draft, path: KeyPath) -> str:
    """A value with its key and origin, for a note."""
    return f"{'.'.join(path)} {value_at(path, draft.data)} ({draft.origin_of(path).label})"


def _follow_width(draft: Draft, below: Draft, stack: KeyPath) -> Iterator[str]:
    """Scale the sizes of one stack that a layer below gave."""
    old_width, width = (_width(data, stack) for data in (below.data, draft.data))
    if not (_is_size(old_width) and _is_size(width)) or old_width == width:
        return
    ratio, changes = width / old_width, []

    def change(key: KeyPath, rule: Callable[[int], int]) -> None:
        path = (*stack, *key)
        old = value_at(path, draft.data)
        if _is_size(old) and not _gives(draft, below, path) and rule(old) != old:
            origin = draft.origin_of(path)
            draft.assign(".".join(path), rule(old), Origin(f"{origin.label}, in proportion to d_model", origin.where))
            changes.append(f"{'.'.join(key)} {old} -> {rule(old)}")

    old_head_dim, head_dim = (value_at((*stack, "head_dim"), data) for data in (below.data, draft.data))
    old_heads = value_at((*stack, "num_heads"), draft.data)
    change(("feedforward", "d_ff"), lambda d_ff: max(1, round(d_ff * ratio)))
    if old_head_dim is None and _is_size(head_dim):  # the layer gives the size of a head
        change(("num_heads",), lambda heads: fitting_heads(width / head_dim, width, head_dim))
    else:
        change(("num_heads",), lambda heads: fitting_heads(heads * ratio, width, head_dim))
    heads = value_at((*stack, "num_heads"), draft.data)
    if _is_size(old_heads) and heads != old_heads:
        change(("num_kv_heads",), lambda shared: nearest_divisor(heads, shared * heads / old_heads))
    if changes:
        yield f"{'.'.join(stack)} follows d_model {old_width} -> {width}: {', '.join(changes)}"


def _width(data: Mapping[str, Any], stack: KeyPath) -> Any:
    own = value_at((*stack, "d_model"), data)
    return value_at((stack[0], "d_model"), data) if own is None else own


def _is_size(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_SIZE


def fitting_heads(wanted: float, width: int, head_dim: int | None) -> int:
    """The number of heads nearest to `wanted`; without `head_dim` one that divides the width, into even sizes if any.

    Rotary positions need heads of an even size.
    """
    if head_dim is not None:
        return max(1, round(wanted))
    return nearest_divisor(width if width % 2 else width // 2, wanted)


def nearest_divisor(number: int, wanted: float) -> int:
    """The divisor of `number` with the smallest ratio to `wanted`, or the smaller one of two."""
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    return min(divisors, key=lambda divisor: (abs(math.log(divisor / wanted)), divisor))


FAINT = 0.2
"""Token vectors that start with a smaller share of the size of added positions are scaled.

On tinyshakespeare (gpt/char-cpu, 300 steps) tokens of standard deviation 0.02 beside sinusoids of 0.71 have a loss of
3.35, and 2.39 when they are scaled by the root of the width; learned positions have 2.38.
"""


def _scaled_embeddings(draft: Draft, below: Draft) -> Iterator[str]:
    """Beside much larger positions a model hardly sees the tokens."""
    scale, data = ("model", "embedding", "scale"), draft.data
    if _gives(draft, below, scale) or value_at(("model", "patches"), data) is not None:
        return
    if value_at(scale, data) or value_at(("model", "embedding", "fixnorm"), data):
        return
    stds = (value_at(("model", "init", name), data) for name in ("embedding_std", "std"))
    std = next((std for std in stds if isinstance(std, int | float)), InitOptions.std)
    for path in (("model", side, "positions", "kind") for side in ("encoder", "decoder")):
        kind = value_at(path, data)
        size = POSITIONS[kind].added_size if isinstance(kind, str) and kind in POSITIONS else None
        if size is not None and std < FAINT * size and _gives(draft, below, path):
            draft.assign(".".join(scale), True, draft.origin_of(path))
            yield (
                f"model.embedding.scale is true: beside {kind} positions of size {size:.2g} the model would not see "
                f"token vectors of standard deviation {std:g}"
            )
            return
