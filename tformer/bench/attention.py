"""`bench attention`: time and memory of every attention kind at every length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from tformer.bench.attention_peers import ATTENTION_PEERS
from tformer.bench.machine import (
    Ceilings,
    Roofline,
    measure_ceilings,
    roofline,
)
from tformer.bench.processes import (
    OUT_OF_MEMORY,
    TOO_LONG,
    run_isolated,
)
from tformer.bench.workloads.attention import (
    DENSE_MASKED,
    FULL,
    KINDS,
    make_mechanism,
    make_options,
    sizes_of,
)
from tformer.build import layer_sizes
from tformer.cost.flops import BACKWARD_AND_FORWARD, attention_flops
from tformer.device import DTYPES
from tformer.errors import InputError, did_you_mean
from tformer.nn.attention import ProjectionOptions
from tformer.recipe.model import layer_sections
from tformer.recipe.problems import EXPECTED
from tformer.recipe.recipe import Recipe
from tformer.recipe.yaml_text import describe, parse_value

NOT_MEASURED = frozenset(field.name for field in fields(ProjectionOptions))
"""Options of the projections around a kind, and the factor of the scores, which costs nothing."""

SECTIONS = frozenset(Recipe.model_fields)


def choose_kinds(names: Sequence[str] | None, *, causal: bool) -> tuple[list[str], list[str]]:
    """The kinds to measure, full attention first, for everything is compared with it; and what to tell.

    names: None: all. InputError for an unknown name, or one without a causal mode that was asked for by name.
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
        notes.append("full attention is measured too: the rest is compared with it")
    return list(dict.fromkeys([FULL, *names])), notes


def read_settings(texts: Sequence[str], kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`KIND.OPTION=VALUE` for each --set, as options by kind. InputError names what is wrong with one."""
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
        _check(kind, settings[kind])
    if DENSE_MASKED in kinds and "window" in settings.get("sliding_window", {}):
        settings[DENSE_MASKED].setdefault("window", settings["sliding_window"]["window"])
    return settings


def split_settings(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """--set of kinds, and of a model's recipe: those whose first word is a section of recipes."""
    of_recipe = [text for text in texts if text.partition("=")[0].partition(".")[0].strip() in SECTIONS]
    return [text for text in texts if text not in of_recipe], of_recipe


def _check(kind: str, options: Mapping[str, Any]) -> None:
    """Types and values, as a recipe would be checked."""
    try:
        TypeAdapter(KINDS[kind]).validate_python(dict(options))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where, context = ".".join([kind, *map(str, problem["loc"][:1])]), problem.get("ctx", {})
        if problem["type"] == "value_error":
            raise InputError(f"--set {where}: {context['error']}") from None
        expected = EXPECTED[problem["type"]](context) if problem["type"] in EXPECTED else problem["msg"]
        raise InputError(f"--set {where}: found {describe(problem['input'])}, expected {expected}") from None


@dataclass(frozen=True)
class ModelAttention:
    """options: of the kind, those that are not as usual. notes: what of the model is left out."""

    kind: str
    options: Mapping[str, Any]
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    max_length: int
    notes: tuple[str, ...]

    def lengths(self, usual: Sequence[int]) -> tuple[int, ...]:
        """The usual lengths that are less than the longest that the model reads, and that one."""
        return (*(length for length in usual if length < self.max_length), self.max_length)

    def options_beside(self, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Options by kind as --set gives them, with the model's own where they say nothing."""
        found = {kind: dict(options) for kind, options in settings.items()}
        if self.kind in found:
            found[self.kind] = {**self.options, **found[self.kind]}
        if DENSE_MASKED in found and "window" in self.options:
            found[DENSE_MASKED].setdefault("window", self.options["window"])
        return found


def attention_of(recipe: Recipe) -> ModelAttention:
    """Of a model. InputError when its sizes do not fit together."""
    side = "decoder" if recipe.model.encoder is None else "encoder"
    layers = layer_sections(getattr(recipe.model, side), path=f"model.{side}")
    sizes, first = layer_sizes(recipe.model, side), layers[0].attention
    notes = [f"the attention of the {side}"] if recipe.model.encoder and recipe.model.decoder else []
    if any(layer.attention != first for layer in layers) or len(set(sizes)) > 1:
        notes.append("its layers differ: measured is the attention of the first")
    if sizes[0].value_dim != sizes[0].head_dim:
        notes.append(f"values have {sizes[0].value_dim} numbers a head: measured as {sizes[0].head_dim}")
    usual = type(first)()
    given = {field.name: getattr(first, field.name) for field in fields(first) if field.name not in NOT_MEASURED}
    return ModelAttention(
        kind=first.kind,
        options={name: value for name, value in given.items() if value != getattr(usual, name)},
        heads=sizes[0].num_heads,
        kv_heads=sizes[0].num_kv_heads,
        head_dim=sizes[0].head_dim,
        causal=side == "decoder",
        max_length=recipe.seq_len,
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class AttentionBench:
    """What to measure.

    Attributes:
        kinds: the other libraries' ways are among them, last. options: of each, by name.
        kv_heads: None: as many as heads.
        max_seconds: of one cell, starting Python included.
        model: whose attention it is, where it is a model's.
        compile: our kinds go through torch.compile.
    """

    kinds: tuple[str, ...]
    lengths: tuple[int, ...]
    options: Mapping[str, Mapping[str, Any]]
    batch_size: int = 1
    heads: int = 4
    head_dim: int = 64
    causal: bool = False
    dtype: str = "fp32"
    device: str = "cpu"
    repeats: int = 10
    max_seconds: float = 120.0
    kv_heads: int | None = None
    model: str | None = None
    compile: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Cell:
    """One kind at one length: seconds of forward and backward, or why there are none.

    peak_bytes: above the inputs; peak_rss_bytes: of the whole process.
    """

    kind: str
    length: int
    median: float | None = None
    minimum: float | None = None
    spread: float | None = None
    repeats: int | None = None
    peak_bytes: int | None = None
    peak_rss_bytes: int | None = None
    failed: str | None = None


NOT_TRIED = "not tried"

Measured = Callable[[Cell, int, int], None]
"""Called after each cell, with its number and how many there are."""


def check(bench: AttentionBench) -> None:
    """Refuse options that suit no length. Errors: InputError, with the words of the kind."""
    longest = sizes_of(
        heads=bench.heads,
        head_dim=bench.head_dim,
        length=bench.lengths[-1],
        causal=bench.causal,
        kv_heads=bench.kv_heads,
    )
    for kind in bench.kinds:
        if kind in ATTENTION_PEERS:
            continue
        try:
            with torch.device("meta"):
                make_mechanism(kind, bench.options[kind], longest)
        except ValueError as error:
            raise InputError(f"{kind}.{error}", hint=f"--set {kind}.OPTION=VALUE, or leave {kind} out") from None


def bench_attention(bench: AttentionBench, *, measured: Measured, should_stop: Callable[[], bool]) -> list[Cell] | None:
    """Every cell, by length and kind; None when stopped."""
    cells: list[Cell] = []
    given_up: dict[str, Cell] = {}
    total = len(bench.kinds) * len(bench.lengths)
    for length in bench.lengths:
        for kind in bench.kinds:
            if kind in given_up:
                cell = Cell(kind, length, failed=f"{NOT_TRIED}: {given_up[kind].failed} at {given_up[kind].length:,}")
            else:
                found = _measure(bench, kind, length, should_stop)
                if found is None:
                    return None
                cell = found
                if (cell.failed or "").startswith((OUT_OF_MEMORY, TOO_LONG)):
                    given_up[kind] = cell
            cells.append(cell)
            measured(cell, len(cells), total)
    return cells


def _measure(bench: AttentionBench, kind: str, length: int, should_stop: Callable[[], bool]) -> Cell | None:
    arguments: dict[str, Any] = {
        "kind": kind,
        "length": length,
        "options": dict(bench.options[kind]),
        "batch_size": bench.batch_size,
        "heads": bench.heads,
        "head_dim": bench.head_dim,
        "causal": bench.causal,
        "dtype": bench.dtype,
        "device": bench.device,
        "repeats": bench.repeats,
        "max_seconds": bench.max_seconds,
    }
    # What is as usual is not said.
    arguments |= {} if bench.kv_heads is None else {"kv_heads": bench.kv_heads}
    arguments |= {"compile": True} if bench.compile else {}
    found = run_isolated("attention", arguments, max_seconds=bench.max_seconds, should_stop=should_stop)
    return None if found is None else Cell(kind, length, **found)


def succeeded(cells: Sequence[Cell], kind: str) -> dict[int, Cell]:
    """The measured cells of a kind, by length."""
    return {cell.length: cell for cell in cells if cell.kind == kind and cell.failed is None}


MOST_ROWS = 8192
HALVED = frozenset({FULL, *ATTENTION_PEERS})
"""What leaves out the later half of the keys where attention is causal, or could."""


def ceilings(*, dtype: str, device: str, rows: int, width: int) -> dict[str, Any]:
    """In the measuring process: a `Ceilings` as a mapping."""
    return asdict(measure_ceilings([dtype], torch.device(device), product=(rows, width, 4 * width)))


def measure_attention_ceilings(bench: AttentionBench, *, should_stop: Callable[[], bool]) -> dict[str, Any] | None:
    """A `Ceilings` as a mapping, or {"failed": why}; None when stopped."""
    arguments = {
        "dtype": bench.dtype,
        "device": bench.device,
        "rows": min(MOST_ROWS, bench.batch_size * bench.lengths[-1]),
        "width": bench.heads * bench.head_dim,
    }
    return run_isolated("attention_ceilings", arguments, max_seconds=bench.max_seconds, should_stop=should_stop)


def flops(bench: AttentionBench, kind: str, length: int) -> float:
    """Of forward and backward of all positions of all sequences."""
    keys = float(length)
    if kind not in ATTENTION_PEERS and kind != DENSE_MASKED:
        keys = make_options(kind, bench.options[kind]).keys_per_query(length)
    if bench.causal and kind in HALVED:
        keys = (length + 1) / 2
    forward = attention_flops([(bench.heads * bench.head_dim, keys)])
    return BACKWARD_AND_FORWARD * forward * bench.batch_size * length


def bytes_read(bench: AttentionBench, kind: str, length: int) -> float:
    """Forward reads q, k and v; backward these, the outputs and their gradient."""
    kv_heads = bench.heads if bench.kv_heads is None else bench.kv_heads
    numbers = bench.batch_size * length * bench.head_dim * (4 * bench.heads + 4 * kv_heads)
    mask = 2.0 * length**2 if kind == DENSE_MASKED else 0.0
    return numbers * DTYPES[bench.dtype].itemsize + mask


def line_of(bench: AttentionBench, cell: Cell, found: Mapping[str, Any] | None) -> Roofline | None:
    """Shares of the ceilings; None for a cell that holds no number, or without ceilings."""
    if cell.median is None or found is None or "failed" in found:
        return None
    measured = Ceilings(**found)
    return roofline(
        flops(bench, cell.kind, cell.length),
        bytes_read(bench, cell.kind, cell.length),
        cell.median,
        flops_per_second=measured.arithmetic(bench.dtype),
        bytes_per_second=measured.bytes_per_second,
    )
