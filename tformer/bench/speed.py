"""Speed benchmarks (`bench train`, `generate`, `translate`, `classify`, `tokenize`): from the request to measured
rows.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tformer.bench.machine import measure_ceilings, peak_of_process
from tformer.bench.peers import PEERS, choose_peers
from tformer.bench.processes import Contender, race, run_isolated
from tformer.bench.workloads import (
    OURS,
    Task,
    Work,
)
from tformer.bench.workloads.classify import CLASSIFY
from tformer.bench.workloads.decoding import GENERATE, TRANSLATE
from tformer.bench.workloads.tokenize import TOKENIZE
from tformer.bench.workloads.train import TRAIN
from tformer.build import count_parameters
from tformer.decoding.inference import require_quantize
from tformer.device import (
    DTYPES,
    keep_freed_memory,
    resolve_device,
    resolve_precision,
)
from tformer.errors import InputError
from tformer.interop.importing import open_checkpoint
from tformer.objectives import OBJECTIVES
from tformer.recipe import load_recipe, recipe_from_yaml, recipe_to_yaml
from tformer.recipe.recipe import Recipe

WORKS: dict[str, Work] = {work.name: work for work in (TRAIN, GENERATE, TRANSLATE, CLASSIFY, TOKENIZE)}


def recipe_of(
    *,
    arch: str | None,
    preset: str | None,
    config: Path | None,
    run: str | None,
    sets: Sequence[str],
    device: torch.device,
    bench: str,
    usual_arch: str = "gpt",
    objective: str | None = None,
) -> tuple[Recipe, str]:
    """The recipe, and what to call it.

    Args:
        run: a run, checkpoint or Hugging Face folder, whose sizes are taken, not its weights.
        bench: the command, for messages.
        usual_arch: where nothing is named.
        objective: the kind that the recipe gets where it has another; None: its own stand.

    Raises:
        InputError: unknown names, two models at once, a model that cannot have the objective.
    """
    if run is not None:
        if any(value is not None for value in (arch, preset, config)):
            raise InputError("--run is a model already", hint="leave --arch, --preset and --config out")
        checkpoint = open_checkpoint(run)
        stored = load_recipe(
            base_yaml=checkpoint.recipe_text, base_name=str(checkpoint.path / "recipe.yaml"), sets=sets
        ).recipe
        objectives = [options.kind for options in stored.objectives]
        if objective is not None and objective not in objectives:
            raise InputError(f"--run {run}: it was trained for {objectives[0]}, expected {objective}")
        return stored, run
    named: dict[str, Any] = {
        "arch": arch or (None if config or "/" in (preset or "") else usual_arch),
        "preset": preset,
        "config": config,
        "device": device.type,
    }
    if objective is not None:
        _require_parts(load_recipe(**named).recipe, objective, bench)
    flags = {} if objective is None else {"objectives": [{"kind": objective}]}
    recipe = load_recipe(**named, sets=sets, flags=flags).recipe
    name = f"{recipe.arch}/{recipe.preset}" if recipe.preset is not None else str(config or recipe.arch)
    return recipe, " ".join([name, *sets])


def _require_parts(recipe: Recipe, objective: str, bench: str) -> None:
    """Before the objective is set, which would be blamed for what the family lacks."""
    for part in OBJECTIVES[objective].parts:
        if getattr(recipe.model, part) is None:
            raise InputError(
                f"bench {bench}: {recipe.arch} has no {part}, which {objective} needs", hint="use --arch bert"
            )


class Entry(NamedTuple):
    """A contender by name. precision: empty where nothing is multiplied."""

    name: str
    precision: str

    @property
    def label(self) -> str:
        return f"{self.name} {self.precision}".strip()


@dataclass(frozen=True)
class SpeedBench:
    """What to measure; it travels to other processes as JSON.

    Attributes:
        model: what the model is called in a report.
        recipe_yaml: with every size decided.
        precision: of our products, `auto` resolved; entries: who runs.
        options: the work's own.
        max_seconds: of one measuring process, starting Python included, others' turns not.
    """

    work: str
    model: str
    recipe_yaml: str
    entries: tuple[Entry, ...]
    batch_sizes: tuple[int, ...]
    length: int
    precision: str
    device: str
    compile: bool = False
    threads: int | None = None
    repeats: int = 10
    max_seconds: float = 600.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SpeedBench:
        entries = tuple(Entry(*entry) for entry in document["entries"])
        return cls(**{**document, "entries": entries, "batch_sizes": tuple(document["batch_sizes"])})

    @property
    def recipe(self) -> Recipe:
        return recipe_from_yaml(self.recipe_yaml, name="the recipe")


@dataclass(frozen=True)
class Row:
    """One contender at one batch size: what was measured, or why nothing was.

    Attributes:
        seconds, spread, repeats: of a round (median; quartile distance as a share of it).
        tokens: of a round; cost: its `task.Cost` as a mapping.
        memory: peak_rss_bytes, and on a GPU peak_gpu_bytes, of its process.
        ceilings: of the machine, measured just before; None where nothing is multiplied.
        alone: memory was too small beside the others, so that its rounds were not in turn with theirs.
    """

    entry: Entry
    batch_size: int
    seconds: float = 0.0
    spread: float = 0.0
    repeats: int = 0
    tokens: int = 0
    cost: Mapping[str, Any] | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    ceilings: Mapping[str, Any] | None = None
    failed: str | None = None
    alone: bool = False

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def is_ours(self) -> bool:
        return self.entry.name == OURS


Told = Callable[[Row], None]
"""Called with each row when it is known."""


def task_of(bench: SpeedBench, batch_size: int) -> Task:
    """The work at one of its batch sizes, for the process that does it."""
    return Task(
        work=bench.work,
        recipe=bench.recipe,
        batch_size=batch_size,
        length=bench.length,
        precision=bench.precision,
        device=torch.device(bench.device),
        compile=bench.compile,
        options=bench.options,
    )


def run_speed(bench: SpeedBench, *, told: Told, should_stop: Callable[[], bool]) -> list[Row] | None:
    """Every row, batch size after batch size, in the order of the entries; None when stopped."""
    rows: list[Row] = []
    for batch_size in bench.batch_sizes:
        found = _at(bench, batch_size, should_stop)
        if found is None:
            return None
        for row in found:
            told(row)
        rows += found
    return rows


def _at(bench: SpeedBench, batch_size: int, should_stop: Callable[[], bool]) -> list[Row] | None:
    given = {"bench": bench.to_json(), "batch_size": batch_size}
    bounds = run_isolated("bounds", given, max_seconds=bench.max_seconds, should_stop=should_stop)
    if bounds is None:
        return None
    if "failed" in bounds:
        return [Row(entry, batch_size, failed=f"{bounds['failed']} (ceilings)") for entry in bench.entries]
    raced = race(
        [{**given, "name": entry.name, "precision": entry.precision} for entry in bench.entries],
        repeats=bench.repeats,
        max_seconds=bench.max_seconds,
        should_stop=should_stop,
    )
    if raced is None:
        return None
    return [
        Row(entry, batch_size, failed=row["failed"])
        if "failed" in row
        else Row(
            entry,
            batch_size,
            seconds=row["median"],
            spread=row["spread"],
            repeats=row["repeats"],
            tokens=row["tokens"],
            cost=cost,
            memory=row["memory"],
            ceilings=bounds["ceilings"],
            alone=row.get("alone", False),
        )
        for entry, row, cost in zip(bench.entries, raced, bounds["costs"], strict=True)
    ]


CHARACTERS = 65
"""What a vocabulary of characters is taken to be: tinyshakespeare's."""

LENGTH_OPTIONS = {"generate": "--prompt-length", "translate": "--source-length"}  # of the others: --length

LABELS = ("0", "1")  # of a classifier whose recipe names none


@dataclass(frozen=True)
class SpeedRequest:
    """The flags. `run`: a run, checkpoint or Hugging Face folder, whose sizes are taken, not its weights.

    quantize: formats of our matrices to measure: `none` (as the precision says) and `int8`.
    """

    work: str
    arch: str | None = None
    preset: str | None = None
    config: Path | None = None
    run: str | None = None
    sets: Sequence[str] = ()
    batch_sizes: Sequence[int] = ()
    length: int | None = None
    precision: str = "auto"
    compile: bool = False
    device: str = "auto"
    threads: int | None = None
    peers: Sequence[str] = ()
    peer_precisions: Sequence[str] | None = None
    quantize: Sequence[str] = ("none",)
    repeats: int = 10
    max_seconds: float = 600.0
    options: Mapping[str, Any] = field(default_factory=dict)


def resolve(request: SpeedRequest) -> tuple[SpeedBench, list[str]]:
    """The bench and what was decided for the user. Raises InputError before anything is measured."""
    work = WORKS[request.work]
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    device = resolve_device(request.device)
    for kind in request.quantize:
        require_quantize(kind, device, DTYPES.get(request.precision))
        if request.compile and kind != "none":
            raise InputError(f"--compile and --quantize {kind} exclude each other", hint="measure them in turn")
    entries = choose_peers(request.work, request.peers, request.peer_precisions, device=device)
    recipe, name, notes = _recipe_of(request, work, device)
    length = request.length or work.length(recipe)
    if length > recipe.model.max_seq_len:
        option = LENGTH_OPTIONS.get(request.work, "--length")
        raise InputError(f"{option}: found {length}, the model reads {recipe.model.max_seq_len} positions at most")
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"seq_len": length})})
    bench = SpeedBench(
        work=work.name,
        model=name,
        recipe_yaml=recipe_to_yaml(recipe),
        entries=(),
        batch_sizes=tuple(request.batch_sizes or work.batch_sizes),
        length=length,
        precision="fp32",
        device=str(device),
        compile=request.compile,
        threads=torch.get_num_threads(),
        repeats=request.repeats,
        max_seconds=request.max_seconds,
        options=dict(request.options),
    )
    work.check(task_of(bench, max(bench.batch_sizes)))
    precision = _precision(bench, request.precision, work, device)
    own = [Entry(OURS, precision if kind == "none" else kind) for kind in dict.fromkeys(request.quantize)]
    peers = [Entry(*entry) for entry in entries]
    settled = {**bench.to_json(), "precision": precision, "entries": [*own, *peers]}
    parameters = count_parameters(recipe.model, num_labels=len(recipe.data.labels) or None)
    return SpeedBench.from_json(settled), [*notes, f"model: {name}, {parameters:,} parameters"]


def peer_versions(bench: SpeedBench) -> dict[str, str]:
    """Of every library that ours is compared with."""
    return {entry.name: metadata.version(entry.name) for entry in bench.entries if entry.name != OURS}


def _precision(bench: SpeedBench, asked: str, work: Work, device: torch.device) -> str:
    if work.product is None:
        return ""
    if asked not in ("auto", "fp32", "bf16", "fp16"):
        raise InputError(f"--precision: found '{asked}', expected auto, fp32, bf16 or fp16")
    rows, d_model, d_ff = work.product(task_of(bench, max(bench.batch_sizes)))
    return resolve_precision(asked, device, rows=rows, d_model=d_model, d_ff=d_ff).name


def _recipe_of(request: SpeedRequest, work: Work, device: torch.device) -> tuple[Recipe, str, list[str]]:
    """The recipe, what to call it, and notes."""
    recipe, name = recipe_of(
        arch=request.arch,
        preset=request.preset,
        config=request.config,
        run=request.run,
        sets=request.sets,
        device=device,
        usual_arch=work.arch,
        objective=work.objective,
        bench=work.name,
    )
    return _sized(recipe, name)


def _sized(recipe: Recipe, name: str) -> tuple[Recipe, str, list[str]]:
    """The recipe with its vocabularies decided, and what was assumed."""
    model, notes = recipe.model, []
    if model.patches is not None:
        raise InputError(f"{name}: models of images are not benched")
    train = recipe.tokenizer.train
    size = CHARACTERS if train.model == "char" else train.vocab_size
    sides = ["vocab_size", *(["target_vocab_size"] if recipe.separate_vocabularies else [])]
    missing = {side: size for side in sides if getattr(model, side) is None}
    if missing:
        notes.append(f"vocabulary: {size:,} tokens (--set model.vocab_size=N for another)")
    changes: dict[str, Any] = {"model": model.model_copy(update=missing)}
    if any(getattr(head, "num_labels", 1) is None for head in model.heads) and not recipe.data.labels:
        changes["data"] = recipe.data.model_copy(update={"labels": LABELS})
    return recipe.model_copy(update=changes), name, notes


def bounds(*, bench: dict[str, Any], batch_size: int) -> dict[str, Any]:
    """`ceilings` of the machine (None where nothing is multiplied), and `costs`: of each entry's round, in order."""
    keep_freed_memory()
    asked = SpeedBench.from_json(bench)
    task, work = _start(asked, batch_size), WORKS[asked.work]
    ceilings: dict[str, Any] | None = None
    if work.product is not None:
        formats = [task.precision, *(entry.precision for entry in asked.entries)]
        ceilings = asdict(measure_ceilings(formats, task.device, product=work.product(task)))
    costs = [asdict(work.cost(task, entry.precision)) for entry in asked.entries]
    return {"ceilings": ceilings, "costs": costs}


def contend(
    *, bench: dict[str, Any], name: str, precision: str, batch_size: int
) -> Callable[[str], dict[str, int | float]]:
    """Prepare a contender and warm it up by a round; returns what answers the questions that follow.

    `round` does one: {"seconds", "tokens"}. `peak` is that of the process so far, preparing included:
    {"peak_rss_bytes"}, and on a GPU {"peak_gpu_bytes"} of PyTorch's allocator.
    """
    if name == OURS:  # the others are measured as their users would run them
        keep_freed_memory()
    task = _start(SpeedBench.from_json(bench), batch_size)
    contender = make_contender(task, Entry(name, precision))
    contender.prepare()
    gc.collect()
    contender.run()

    def round_() -> dict[str, int | float]:
        start = time.perf_counter()
        tokens = contender.run()
        return {"seconds": time.perf_counter() - start, "tokens": tokens}

    def peak() -> dict[str, int | float]:
        found: dict[str, int | float] = {"peak_rss_bytes": peak_of_process()}
        if task.device.type == "cuda":
            found["peak_gpu_bytes"] = torch.cuda.max_memory_allocated(task.device)
        return found

    answers = {"round": round_, "peak": peak}
    return lambda question: answers[question]()


def make_contender(task: Task, entry: Entry) -> Contender:
    """Ours, or a peer's."""
    if entry.name == OURS:
        return WORKS[task.work].make(task, entry.precision)
    return PEERS[task.work, entry.name].make(task, entry.precision)


def _start(asked: SpeedBench, batch_size: int) -> Task:
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    return task_of(asked, batch_size)
