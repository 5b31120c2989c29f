"""What a person asked of `tformer prune`, read from its options and refused where it makes no sense by itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tformer.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from tformer.workflows.prune import Plan

STRATEGIES = ("every-other", "search", "learned")
STACKS = ("encoder", "decoder", "both")
PER_LAYER = ("even", "free")
WAYS = "--keep-layers, --drop-layers, --keep or --rate, and --heads"


def read_plan(
    *,
    out: Path | None,
    stack: str | None,
    keep_layers: str | None,
    drop_layers: str | None,
    keep: int | None,
    rate: float | None,
    strategy: str | None,
    max_trials: int | None,
    heads: str | None,
    heads_per_layer: str | None,
) -> Plan:
    """The plan. Raises InputError for options that contradict each other or are out of range."""
    if out is None:
        raise InputError("--out is missing: where shall the smaller model go?", hint="--out runs/NAME-pruned")
    ways = {"--keep-layers": keep_layers, "--drop-layers": drop_layers, "--keep": keep, "--rate": rate}
    given = [option for option, value in ways.items() if value is not None]
    if len(given) > 1:
        raise InputError(f"{given[0]} and {given[1]} exclude each other: give one way to say which layers stay")
    if not given and heads is None:
        raise InputError(f"nothing to prune: give one of {WAYS}", hint="--rate 0.5 drops every other layer")
    _require_known("--stack", stack, STACKS)
    _require_known("--strategy", strategy, STRATEGIES)
    _require_known("--heads-per-layer", heads_per_layer, PER_LAYER)
    if strategy is not None and given[:1] not in (["--keep"], ["--rate"]):
        raise InputError(f"--strategy {strategy} needs --keep N or --rate P, which say how many layers stay")
    if max_trials is not None and strategy != "search":
        raise InputError("--max-trials bounds --strategy search, which is not asked for")
    if heads_per_layer is not None and heads is None:
        raise InputError("--heads-per-layer says how --heads spreads, which is not given")
    for option, count in (("--keep", keep), ("--max-trials", max_trials)):
        if count is not None and count < 1:
            raise InputError(f"{option} must be at least 1, found {count}")
    if rate is not None and not 0 < rate < 1:
        raise InputError(f"--rate must be above 0 and below 1, found {rate:g}: the share of layers that go")

    from tformer.workflows.prune import Plan

    return Plan(
        stack=stack,
        keep_layers=_layers("--keep-layers", keep_layers),
        drop_layers=_layers("--drop-layers", drop_layers),
        keep=keep,
        rate=rate,
        strategy=strategy or "every-other",
        max_trials=max_trials or Plan.max_trials,
        heads=_heads(heads),
        heads_per_layer=heads_per_layer or "even",
    )


def _require_known(option: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise InputError(f"{option} must be {', '.join(known[:-1])} or {known[-1]}, found '{value}'",
                         hint=did_you_mean(value, known))  # fmt: skip


def _layers(option: str, text: str | None) -> tuple[int, ...] | None:
    """`0,2,4` as numbers."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not (word.isascii() and word.removeprefix("-").isdigit()):
            raise InputError(f"{option}: expected numbers of layers such as 0,2,4, found '{word}' in '{text}'")
    return tuple(int(word) for word in words)


def _heads(text: str | None) -> float | None:
    """A share below 1, or a whole number of heads."""
    if text is None:
        return None
    try:
        amount = float(text)
    except ValueError:
        amount = 0.0
    if not (0 < amount < 1 or (amount >= 1 and amount.is_integer())):
        raise InputError(f"--heads: expected a share between 0 and 1, or how many heads go, found '{text}'")
    return amount
