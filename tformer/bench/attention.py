"""`bench attention`: time and memory of every attention kind at every length, one process for each.

Lengths are measured in rising order, all kinds at each, so that kinds which are compared are measured close in time.
A kind that runs out of memory or time at a length is not tried at greater ones.

Times are compared with the highest rates at which the machine multiplies and reads. The rate of products is measured at
the start of the same run, at the shape of the block around attention, [B T, D] x [D, 4 D], in the number format of the
benchmark.
Operations are those of forward and backward by the convention of training (three times forward; what a fused backward
computes again is not counted): 4 h per head for each query and key, or what the kind counts (`Mechanism.flops`). Causal
full attention needs half of the keys. Bytes are the minimum: queries, keys, values, outputs and their gradients, each
read once where it is needed, and the mask of dense-masked attention.

Shape legend: B batch, T positions, H heads, K heads of keys and values, h head_dim, D = H h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from tformer.bench.machine import measure_ceilings
from tformer.bench.options import AttentionOptions, ModelOptions, whole_numbers, words_of
from tformer.bench.peers import choose_peers
from tformer.bench.processes import OUT_OF_MEMORY, TOO_LONG, RacedRow, race, run_isolated
from tformer.bench.speed import Entry, Row, recipe_of
from tformer.bench.workloads import Cost
from tformer.bench.workloads.attention import (
    ATTENTION_PEERS,
    DENSE_MASKED,
    FULL,
    KINDS,
    AttentionBench,
)
from tformer.build import layer_sizes
from tformer.nn.attention import ProjectionOptions
from tformer.nn.attention.mechanism import BACKWARD_AND_FORWARD
from tformer.recipe.model import layer_sections
from tformer.recipe.recipe import Recipe
from tformer.recipe.yaml_text import parse_value
from tformer.support.bounds import mistake_of
from tformer.support.device import DTYPES, resolve_device
from tformer.support.errors import InputError, did_you_mean

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
MAX_LENGTH = 2**24
MOST_ROWS = 8192  # of the product whose rate is the ceiling
NOT_TRIED = "not tried"
HALVED = frozenset({FULL, *ATTENTION_PEERS})
"""Kinds that skip the later half of the keys, or could, where attention is causal."""

NOT_MEASURED = frozenset(field.name for field in fields(ProjectionOptions))
"""Options of the projections around a kind, and the factor of the scores, which costs nothing."""

RECIPE_SECTIONS = frozenset(Recipe.model_fields)

OnRow = Callable[[Row, int, int], None]
"""Called after each row with its number and how many there are."""


def choose_kinds(names: Sequence[str] | None, *, causal: bool) -> tuple[list[str], list[str]]:
    """The kinds to measure, full attention first as the reference of all others; and notes for the user.

    names: the kinds that were asked for; None stands for all.

    Raises InputError for an unknown kind, and for a named one without a causal mode.
    """
    notes: list[str] = []
    if names is None:
        left_out = [kind for kind in KINDS if causal and not KINDS[kind].mechanism.causal]
        notes += [f"{kind} is left out: it has no causal mode" for kind in left_out]
        return [kind for kind in KINDS if kind not in left_out], notes
    for name in names:
        if name not in KINDS:
            raise InputError(f"--kinds: unknown kind '{name}'", hint=did_you_mean(name, KINDS))
        if causal and not KINDS[name].mechanism.causal:
            raise InputError(f"--kinds: {name} has no causal mode", hint="leave it or --causal out")
    if FULL not in names:
        notes.append("full attention is measured too: the others are compared with it")
    return list(dict.fromkeys([FULL, *names])), notes


def read_settings(texts: Sequence[str], kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options by kind from each `--set KIND.OPTION=VALUE`. InputError names what is wrong with one."""
    settings: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    for text in texts:
        path, equals, value = (part.strip() for part in text.partition("="))
        kind, _, option = path.partition(".")
        if not equals or not option:
            raise InputError(
                f"--set: found '{text}', expected KIND.OPTION=VALUE", hint="--set sliding_window.window=256"
            )
        if kind not in KINDS:
            raise InputError(f"--set {path}: unknown kind '{kind}'", hint=did_you_mean(kind, KINDS))
        if kind not in kinds:
            raise InputError(f"--set {path}: {kind} is not measured", hint=f"add {kind} to --kinds")
        known = [field.name for field in fields(KINDS[kind]) if field.name not in NOT_MEASURED]
        if option not in known:
            hint = did_you_mean(option, known) if known else f"{kind} has no options here"
            raise InputError(f"--set {path}: {kind} has no such option here", hint=hint)
        settings[kind][option] = parse_value(value, name=f"--set {path}")
        _check_options(kind, settings[kind])
    if DENSE_MASKED in kinds and "window" in settings.get("sliding_window", {}):
        settings[DENSE_MASKED].setdefault("window", settings["sliding_window"]["window"])
    return settings


def _check_options(kind: str, options: Mapping[str, Any]) -> None:
    """Check types and values as a recipe's are checked."""
    try:
        TypeAdapter(KINDS[kind]).validate_python(dict(options))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join([kind, *map(str, problem["loc"][:1])])
        raise InputError(f"--set {where}: {mistake_of(problem)}") from None


def attention_of(recipe: Recipe, name: str) -> tuple[AttentionBench, list[str]]:
    """The benchmark of the attention of a model, and notes on differences from the model.

    The layer is the first one of the encoder; without an encoder it is the decoder's, and causal. The options are what
    differs from the kind's defaults. The lengths are the usual ones below the model's longest input, and that one.

    Raises InputError when the model's sizes do not fit together.
    """
    side = "decoder" if recipe.model.encoder is None else "encoder"
    layers = layer_sections(getattr(recipe.model, side), path=f"model.{side}")
    sizes, first = layer_sizes(recipe.model, side), layers[0].attention
    notes = [f"the attention of the {side}"] if recipe.model.encoder and recipe.model.decoder else []
    if any(layer.attention != first for layer in layers) or len(set(sizes)) > 1:
        notes.append("its layers differ: the attention of the first is measured")
    if sizes[0].value_dim != sizes[0].head_dim:
        notes.append(f"values have {sizes[0].value_dim} numbers a head: measured as {sizes[0].head_dim}")
    usual = type(first)()
    given = {field.name: getattr(first, field.name) for field in fields(first) if field.name not in NOT_MEASURED}
    bench = AttentionBench(
        kinds=(first.kind,),
        lengths=(*(length for length in LENGTHS if length < recipe.seq_len), recipe.seq_len),
        options={first.kind: {key: value for key, value in given.items() if value != getattr(usual, key)}},
        heads=sizes[0].num_heads,
        kv_heads=None if sizes[0].num_kv_heads == sizes[0].num_heads else sizes[0].num_kv_heads,
        head_dim=sizes[0].head_dim,
        causal=side == "decoder",
        model=name,
    )
    return bench, notes


def add_options(settings: dict[str, dict[str, Any]], own: AttentionBench) -> None:
    """Complete the options of kinds from --set by those of a model's own kind."""
    for kind, options in own.options.items():
        if kind in settings:
            settings[kind] = {**options, **settings[kind]}
        if DENSE_MASKED in settings and "window" in options:
            settings[DENSE_MASKED].setdefault("window", options["window"])


def resolve_attention(options: AttentionOptions) -> tuple[AttentionBench, list[str]]:
    """The benchmark, and notes on what was decided. Raises InputError before anything is measured."""
    options.check()
    dtype = options.precision or "fp32"
    if dtype not in DTYPES:
        raise InputError(f"--precision: found '{dtype}'", hint=did_you_mean(dtype, DTYPES))
    device = resolve_device(options.device)
    kind_sets = list(options.sets)
    own, own_notes = AttentionBench((), LENGTHS, {}), list[str]()
    kinds = None if options.kinds is None else words_of("--kinds", options.kinds)
    if options.model != ModelOptions():
        recipe_sets = [
            text for text in kind_sets if text.partition("=")[0].partition(".")[0].strip() in RECIPE_SECTIONS
        ]
        kind_sets = [text for text in kind_sets if text not in recipe_sets]
        recipe, name = recipe_of(options.model, recipe_sets, bench="attention")
        own, own_notes = attention_of(recipe, name)
        kinds = own.kinds if kinds is None else kinds
    causal = options.causal or own.causal
    chosen, notes = choose_kinds(kinds, causal=causal)
    peers = ["-".join(found) for found in choose_peers("attention", options.peer, None, device=device)]
    settings = read_settings(kind_sets, chosen)
    add_options(settings, own)
    bench = replace(
        own,
        kinds=(*chosen, *peers),
        lengths=own.lengths
        if options.lengths is None
        else tuple(sorted(whole_numbers("--lengths", options.lengths, least=1, most=MAX_LENGTH))),
        options={**settings, **{peer: {} for peer in peers}},
        batch_size=options.batch_size,
        heads=options.heads or own.heads,
        head_dim=options.head_dim or own.head_dim,
        kv_heads=own.kv_heads if options.heads is None else None,
        causal=causal,
        dtype=dtype,
        device=str(device),
        repeats=options.repeats,
        max_seconds=options.max_seconds,
        compile=options.compile,
    )
    check(bench)
    return bench, [*notes, *own_notes]


def check(bench: AttentionBench) -> None:
    """Raise InputError for options that fit no length."""
    for kind in bench.kinds:
        if kind in ATTENTION_PEERS:
            continue
        try:
            with torch.device("meta"):
                bench.mechanism(kind, bench.lengths[-1])
        except ValueError as error:
            raise InputError(f"{kind}.{error}", hint=f"--set {kind}.OPTION=VALUE, or leave {kind} out") from None


def run_attention(
    bench: AttentionBench, *, on_row: OnRow, should_stop: Callable[[], bool]
) -> tuple[dict[str, Any], list[Row]]:
    """The ceilings (a `Ceilings` as a mapping, or {"failed": reason}), and a row for each kind and length in order.

    Each is measured alone: at great lengths it may need the memory of the whole machine. Raises Interrupted.
    """
    given = {"bench": asdict(bench)}
    limits: dict[str, Any] = {"max_seconds": bench.max_seconds, "should_stop": should_stop}
    ceilings = run_isolated("attention ceilings", given, **limits)
    rows: list[Row] = []
    given_up: dict[str, Row] = {}
    for length in bench.lengths:
        for kind in bench.kinds:
            if kind in given_up:
                failed = f"{NOT_TRIED}: {given_up[kind].failed} at {given_up[kind].length:,}"
                row = Row(Entry(kind, bench.dtype), bench.batch_size, length=length, failed=failed)
            else:
                place = {**given, "kind": kind, "length": length}
                [raced] = race("attention", [place], repeats=bench.repeats, **limits)
                row = row_of(bench, kind, length, raced, None if "failed" in ceilings else ceilings)
            if (row.failed or "").startswith((OUT_OF_MEMORY, TOO_LONG)):
                given_up[kind] = row
            rows.append(row)
            on_row(row, len(rows), len(bench.kinds) * len(bench.lengths))
    return ceilings, rows


def row_of(bench: AttentionBench, kind: str, length: int, raced: RacedRow, ceilings: Mapping[str, Any] | None) -> Row:
    """The row of one measurement, with the seconds and tokens of one forward and backward pass."""
    cost = Cost(flops(bench, kind, length), bytes_read(bench, kind, length), steps=1, examples=bench.batch_size)
    row = Row(Entry(kind, bench.dtype), bench.batch_size, length, cost=asdict(cost), ceilings=ceilings, **raced)
    if row.failed is not None:
        return row
    tokens = bench.batch_size * length
    calls = row.tokens // tokens  # in a round
    return replace(row, seconds=row.seconds / calls, minimum=row.minimum / calls, tokens=tokens)


def measure_attention_ceilings(*, bench: Mapping[str, Any]) -> dict[str, Any]:
    """A `Ceilings` as a mapping; runs in a measuring process."""
    asked = AttentionBench(**bench)
    rows, width = min(MOST_ROWS, asked.batch_size * asked.lengths[-1]), asked.heads * asked.head_dim
    return asdict(measure_ceilings([asked.dtype], torch.device(asked.device), product=(rows, width, 4 * width)))


def flops(bench: AttentionBench, kind: str, length: int) -> float:
    """Operations of forward and backward of all positions of all sequences."""
    if kind in HALVED or kind == DENSE_MASKED:
        keys = (length + 1) / 2 if bench.causal and kind in HALVED else length
        forward = 4.0 * bench.heads * bench.head_dim * length * keys
    else:
        with torch.device("meta"):
            forward = bench.mechanism(kind, length).flops(length, length)
    return BACKWARD_AND_FORWARD * forward * bench.batch_size


def bytes_read(bench: AttentionBench, kind: str, length: int) -> float:
    """Forward reads q, k and v; backward these, the outputs and their gradient."""
    kv_heads = bench.heads if bench.kv_heads is None else bench.kv_heads
    numbers = bench.batch_size * length * bench.head_dim * (4 * bench.heads + 4 * kv_heads)
    mask = 2.0 * length**2 if kind == DENSE_MASKED else 0.0
    return numbers * DTYPES[bench.dtype].itemsize + mask
