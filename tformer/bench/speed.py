"""Speed benchmarks (`bench train`, `generate`, `translate`): from the request to measured rows.

At each batch size one process measures what the machine can do at most, and ends; then every contender gets a
process, and their rounds alternate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch

from tformer.bench.machine import Ceilings, Roofline, measure_ceilings
from tformer.bench.options import ModelOptions, SpeedOptions, words_of
from tformer.bench.processes import race, run_isolated
from tformer.bench.worker import named
from tformer.bench.workloads import OURS, BenchTask, Contender, Workload
from tformer.bench.workloads.decoding import GenerationWorkload, TranslationWorkload
from tformer.bench.workloads.train import TrainingSteps
from tformer.build import count_parameters
from tformer.decoding.inference import require_quantize
from tformer.interop.opening import open_checkpoint
from tformer.recipe import load_recipe, recipe_from_yaml, recipe_to_yaml
from tformer.recipe.recipe import Recipe
from tformer.support.device import DTYPES, keep_freed_memory, resolve_device, resolve_precision
from tformer.support.errors import InputError
from tformer.support.options import flag_of

WORKS: dict[str, type[Workload]] = {
    "train": TrainingSteps,
    "generate": GenerationWorkload,
    "translate": TranslationWorkload,
}
"""The workloads of the command by name."""

CHARACTERS = 65
"""Assumed size of a vocabulary of characters: tinyshakespeare's."""

LABELS = ("0", "1")  # of a classifier whose recipe names none


class ContenderSpec(NamedTuple):
    """A contender by name.

    maker: `module:name` of what makes its `Contender` from a task and a precision; ours is made by its `Workload`.
    """

    name: str
    precision: str
    maker: str = ""

    @property
    def label(self) -> str:
        return f"{self.name} {self.precision}"


@dataclass(frozen=True)
class SpeedBench:
    """A resolved measurement; it is sent to other processes as JSON.

    Attributes:
        model: the model's name in a report.
        recipe_yaml: with every size decided.
        precision: of our products, `auto` resolved.
        entries: the contenders, ours first.
        options: the workload's own.
        max_seconds: of one measuring process, starting Python included, other contenders' rounds not.
    """

    work: str
    model: str
    recipe_yaml: str
    entries: tuple[ContenderSpec, ...]
    batch_sizes: tuple[int, ...]
    length: int
    precision: str
    device: str
    compile: bool = False
    threads: int | None = None
    repeats: int = 10
    max_seconds: float = 600.0
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SpeedBench:
        entries = tuple(ContenderSpec(*entry) for entry in document["entries"])
        return cls(**{**document, "entries": entries, "batch_sizes": tuple(document["batch_sizes"])})

    @property
    def recipe(self) -> Recipe:
        return recipe_from_yaml(self.recipe_yaml, name="the recipe")

    @property
    def workload(self) -> type[Workload]:
        """Our contender's class, which knows what the work costs."""
        found: type[Workload] = named(self.entries[0].maker)
        return found

    def task(self, batch_size: int) -> BenchTask:
        """The work at one of its batch sizes."""
        names = ("work", "recipe", "length", "precision", "compile", "options")
        given = {name: getattr(self, name) for name in names}
        return BenchTask(batch_size=batch_size, device=torch.device(self.device), **given)


@dataclass(frozen=True)
class Measurement:
    """One contender at one size: what was measured, or why nothing was.

    Attributes:
        seconds, minimum: of a round, median and minimum; spread: its quartile distance as a share of the median.
        tokens: of a round; cost: its `Cost` as a mapping.
        memory: `peak_rss_bytes` of its process, on a GPU `peak_gpu_bytes`, of attention `peak_bytes` beyond the inputs.
        ceilings: `Ceilings` of the machine as a mapping; None where they could not be measured.
        alone: memory was too small beside the others, so that its rounds did not alternate with theirs.
    """

    entry: ContenderSpec
    batch_size: int
    length: int = 0
    seconds: float = 0.0
    minimum: float = 0.0
    spread: float = 0.0
    repeats: int = 0
    tokens: int = 0
    cost: Mapping[str, Any] | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    ceilings: Mapping[str, Any] | None = None
    failed: str | None = None
    alone: bool = False

    @property
    def is_ours(self) -> bool:
        return self.entry.name == OURS

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def step_ms(self) -> float | None:
        return None if self.cost is None or self.failed else 1000 * self.seconds / self.cost["steps"]

    @property
    def roofline(self) -> Roofline | None:
        """Shares of the ceilings, of products in the contender's own number format."""
        if self.ceilings is None:
            return None
        return self._against(Ceilings(**self.ceilings).arithmetic(self.entry.precision))

    @property
    def share_of_peak(self) -> float | None:
        """Share of the nearer ceiling, of products in the fastest format: the same machine for all contenders."""
        found = None if self.ceilings is None else self._against(Ceilings(**self.ceilings).best)
        return None if found is None else found.share

    @property
    def share_of_data_sheet(self) -> float | None:
        """The same share of a known GPU's data sheet."""
        sheet = None if self.ceilings is None else self.ceilings["data_sheet"]
        found = None if sheet is None else self._against(sheet["bf16_flops"], sheet["bytes_per_second"])
        return None if found is None else found.share

    def _against(self, flops_per_second: float, bytes_per_second: float | None = None) -> Roofline | None:
        if self.cost is None or self.ceilings is None or self.failed is not None:
            return None
        bandwidth = bytes_per_second or self.ceilings["bytes_per_second"]
        return Roofline(
            self.cost["flops"] / self.seconds / flops_per_second, self.cost["bytes_read"] / self.seconds / bandwidth
        )


def resolve(options: SpeedOptions, work: type[Workload] | None = None) -> tuple[SpeedBench, list[str]]:
    """The benchmark, and notes on what was decided. Raises InputError before anything is measured.

    work: the workload; None: that of the command.
    """
    options.check()
    work, formats = work or WORKS[options.work], words_of("--quantize", options.quantize)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = resolve_device(options.device)
    for kind in formats:
        require_quantize(kind, device, DTYPES.get(options.precision))
    recipe, name = _recipe_of(options.model, options.sets, default_arch=work.arch)
    recipe, notes = _with_sizes(recipe, name)
    length = options.length or work.length(recipe)
    if length > recipe.model.max_seq_len:
        raise InputError(
            f"{flag_of(type(options), 'length')}: found {length}, the model reads {recipe.model.max_seq_len} positions "
            "at most"
        )
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"seq_len": length})})
    bench = SpeedBench(
        work=options.work,
        model=name,
        recipe_yaml=recipe_to_yaml(recipe),
        entries=(),
        batch_sizes=options.batch_sizes or work.batch_sizes,
        length=length,
        precision="fp32",
        device=str(device),
        compile=options.compile,
        threads=torch.get_num_threads(),
        repeats=options.repeats,
        max_seconds=options.max_seconds,
        options=options.own,
    )
    largest = bench.task(max(bench.batch_sizes))
    work.check(largest)
    rows, d_model, d_ff = work.product(largest)
    precision = resolve_precision(options.precision, device, rows=rows, d_model=d_model, d_ff=d_ff).name
    maker = f"{work.__module__}:{work.__qualname__}"
    entries = tuple(ContenderSpec(OURS, precision if kind == "none" else kind, maker) for kind in formats)
    bench = replace(bench, precision=precision, entries=entries)
    parameters = count_parameters(recipe.model, num_labels=len(recipe.data.labels) or None)
    return bench, [*notes, f"model: {name}, {parameters:,} parameters"]


def _recipe_of(model: ModelOptions, sets: Sequence[str], *, default_arch: str) -> tuple[Recipe, str]:
    """The recipe of a shipped preset, of a file or of a run, and its name.

    Raises InputError for unknown names and for two models at once.
    """
    if model.run is not None:
        checkpoint = open_checkpoint(model.run)
        stored = load_recipe(
            base_yaml=checkpoint.recipe_text, base_name=str(checkpoint.path / "recipe.yaml"), sets=sets
        ).recipe
        return stored, model.run
    arch = model.arch or (None if model.config or "/" in (model.preset or "") else default_arch)
    recipe = load_recipe(arch=arch, preset=model.preset, config=model.config, sets=sets).recipe
    name = f"{recipe.arch}/{recipe.preset}" if recipe.preset is not None else str(model.config or recipe.arch)
    return recipe, " ".join([name, *sets])


def _with_sizes(recipe: Recipe, name: str) -> tuple[Recipe, list[str]]:
    """The recipe with its vocabularies and labels decided, and notes on what was assumed."""
    model, notes = recipe.model, []
    if model.patches is not None:
        raise InputError(f"{name}: image models cannot be benchmarked")
    train = recipe.tokenizer.train
    size = CHARACTERS if train.model == "char" else train.vocab_size
    sides = ["vocab_size", *(["target_vocab_size"] if recipe.separate_vocabularies else [])]
    missing = {side: size for side in sides if getattr(model, side) is None}
    if missing:
        notes.append(f"vocabulary: {size:,} tokens (--set model.vocab_size=N for another)")
    changes: dict[str, Any] = {"model": model.model_copy(update=missing)}
    if any(getattr(head, "num_labels", 1) is None for head in model.heads) and not recipe.data.labels:
        changes["data"] = recipe.data.model_copy(update={"labels": LABELS})
    return recipe.model_copy(update=changes), notes


def run_speed(
    bench: SpeedBench, *, on_row: Callable[[Measurement], None], should_stop: Callable[[], bool]
) -> list[Measurement]:
    """Every row, batch size after batch size, in the order of the entries. Raises Interrupted.

    on_row: called with each row.
    """
    limits: dict[str, Any] = {"max_seconds": bench.max_seconds, "should_stop": should_stop}
    rows: list[Measurement] = []
    for batch_size in bench.batch_sizes:
        given = {"bench": asdict(bench), "batch_size": batch_size}
        known = run_isolated(f"{__name__}:measure_limits", given, **limits)
        if "failed" in known:
            failed = f"{known['failed']} (ceilings)"
            found = [Measurement(entry, batch_size, bench.length, failed=failed) for entry in bench.entries]
        else:
            contenders = [{**given, "entry": entry} for entry in bench.entries]
            raced = race(f"{__name__}:start_contender", contenders, repeats=bench.repeats, **limits)
            found = [
                Measurement(entry, batch_size, bench.length, cost=cost, ceilings=known["ceilings"], **row)
                for entry, row, cost in zip(bench.entries, raced, known["costs"], strict=True)
            ]
        for row in found:
            on_row(row)
        rows += found
    return rows


# --- in a measuring process -------------------------------------------------------------------------------------------


def measure_limits(*, bench: dict[str, Any], batch_size: int) -> dict[str, Any]:
    """`ceilings` of the machine, and `costs` of each entry's round."""
    keep_freed_memory()
    asked, task = _start(bench, batch_size)
    work, formats = asked.workload, [entry.precision for entry in asked.entries]
    ceilings = measure_ceilings([task.precision, *formats], task.device, product=work.product(task))
    return {"ceilings": asdict(ceilings), "costs": [asdict(work.cost(task, precision)) for precision in formats]}


def start_contender(*, bench: dict[str, Any], entry: Sequence[str], batch_size: int) -> Contender:
    """The contender of a measuring process."""
    name, precision, maker = entry
    if name == OURS:  # other libraries are measured as their users would run them
        keep_freed_memory()
    _, task = _start(bench, batch_size)
    contender: Contender = named(maker)(task, precision)
    return contender


def _start(bench: dict[str, Any], batch_size: int) -> tuple[SpeedBench, BenchTask]:
    asked = SpeedBench.from_json(bench)
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    return asked, asked.task(batch_size)
