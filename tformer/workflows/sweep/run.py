"""A sweep from its plan to its tables: resolve every recipe, train the cells one after another, write the results.

OUT/sweep.json holds the plan of the folder: a later call continues that plan and refuses another.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Protocol

from tformer.checkpoint.run import LOCK_NAME, RunLock
from tformer.metrics import lower_is_better
from tformer.recipe import recipe_to_data
from tformer.support.errors import InputError, Interrupted, TformerError
from tformer.support.files import make_folders, parse_object, read_bounded, remove_tree, write_text
from tformer.support.formatting import fitted, plural
from tformer.workers.work import QUIET, ShouldStop, Work
from tformer.workflows.sweep.cells import CELLS, DONE, INVALID, ONE_SLOT, REFUSED, RUNS, Result, Slot, Stopped, Sweeper
from tformer.workflows.sweep.grid import (
    EVAL_EVERY,
    LEAST_POINTS,
    Cell,
    check_model,
    eval_every_for_a_curve,
    number_of_variants,
    start_of,
    variants_of,
)
from tformer.workflows.sweep.halving import Ladder, Rung, best_variants, rungs_of
from tformer.workflows.sweep.pictures import draw
from tformer.workflows.sweep.plan import Plan
from tformer.workflows.sweep.table import Table, make_table, write_tables

PLAN_FILE = "sweep.json"
MAX_PLAN_BYTES = 1 << 20
MAX_TRAININGS = 10_000


Tabulate = Callable[[Plan, Sequence[Result], Sequence[Ladder]], Table]


class Observer(Protocol):
    """Called as a sweep goes on: when a training begins, and when it has ended."""

    def begins(self, cell: Cell, number: int, total: int, log: Path) -> None: ...
    def ended(self, result: Result, number: int, total: int, *, seconds: float | None) -> None:
        """seconds: duration; None: it was finished before."""


@dataclass(frozen=True)
class Grid:
    """The resolved cells of a plan in order of their training, and results of cells that their recipe refuses.

    order: names of all cells in the order of the table's rows, then of the seeds.
    ladders: of successive halving, one of each task.
    """

    cells: tuple[Cell, ...]
    invalid: tuple[Result, ...]
    order: tuple[str, ...]
    notes: tuple[str, ...]
    ladders: tuple[Ladder, ...] = ()

    @property
    def trainings(self) -> int:
        """Number of trainings, with halving each to one rung."""
        return sum(ladder.trainings for ladder in self.ladders) if self.ladders else len(self.cells)


def resolve_plan(plan: Plan, *, skip_invalid: bool = False) -> Grid:
    """Resolve every cell's recipe, before anything is trained.

    Raises InputError for the first cell that its recipe refuses (skip_invalid: such cells are left out), for a task
    that is wrong without its axes, and when no cell is left or too many are asked for.
    """
    total = plan.seeds * sum(number_of_variants(task, plan.draws) for task in plan.tasks)
    if total > MAX_TRAININGS:
        raise InputError(f"axes and seeds give {total:,} trainings, expected at most {MAX_TRAININGS:,}")
    cells: list[Cell] = []
    invalid: list[Result] = []
    order: list[str] = []
    notes: dict[str, None] = {}
    for task in plan.tasks:
        prefix = task.name if len(plan.tasks) > 1 else ""
        try:
            base = start_of(task, (), max_steps=plan.max_steps)
        except TformerError as error:
            raise InputError(f"{_of_task(plan, task.name)}{error.message}", hint=error.hint) from None
        notes |= dict.fromkeys(base.notes)
        first = base.recipe.seed
        variants = variants_of(task, recipe=recipe_to_data(base.recipe), prefix=prefix, draws=plan.draws, seed=first)
        seeds = range(first, first + plan.seeds)
        order += [variant.cell_name(seed) for variant in variants for seed in seeds]
        for seed, variant in product(seeds, variants):  # all variants with the first seed, then all with the second
            try:
                start = start_of(task, variant.sets, max_steps=plan.max_steps, seed=seed)
                recipe = start.recipe
                check_model(recipe)
            except InputError as error:
                if not skip_invalid:
                    shown = ", ".join(f"{key} {value}" for key, value in variant.choices.items())
                    raise InputError(
                        f"{_of_task(plan, task.name)}{shown or 'the recipe'}: {error.message}",
                        hint=error.hint or "--skip-invalid leaves such variants out",
                    ) from None
                invalid.append(
                    Result(
                        cell=variant.cell_name(seed),
                        task=task.name,
                        choices=dict(variant.choices),
                        seed=seed,
                        status=INVALID,
                        message=" ".join(error.message.split()),
                        metric=base.recipe.training.best_metric,
                    )
                )
                continue
            notes |= dict.fromkeys(start.notes)
            every = eval_every_for_a_curve(task, variant.sets, recipe)
            if every is not None:
                notes[f"validating {LEAST_POINTS} times in each training (--set {EVAL_EVERY}=N: every N steps)"] = None
            cells.append(Cell(variant, seed, recipe, plan.max_steps, every))
    if not cells:
        raise InputError(f"no variant is left: {invalid[0].cell}: {invalid[0].message}")
    ladders = [] if plan.halving is None else [_ladder(plan, plan.halving, task.name, cells) for task in plan.tasks]
    return Grid(tuple(cells), tuple(invalid), tuple(order), tuple(notes), tuple(ladders))


def _ladder(plan: Plan, eta: int, task: str, cells: Sequence[Cell]) -> Ladder:
    """The rungs of a task. Raises InputError where its variants do not train for one known number of steps."""
    own = [cell for cell in cells if cell.variant.task.name == task]
    limits = {(cell.recipe.training.max_steps, cell.recipe.training.max_epochs) for cell in own}
    steps = sorted({number for number, _ in limits})
    variants, place = len({cell.variant.slug for cell in own}), _of_task(plan, task)
    if any(epochs is not None for _, epochs in limits):
        raise InputError(
            f"{place}halving: found a training by epochs, expected one by steps", hint="--max-steps N says how many"
        )
    if any(cell.recipe.training.max_minutes is not None for cell in own):
        raise InputError(
            f"{place}halving: found a limit of minutes, expected one of steps", hint="leave --max-minutes out"
        )
    if len(steps) > 1:
        raise InputError(
            f"{place}halving: found trainings of {steps[0]:,} and of {steps[-1]:,} steps, expected one number",
            hint="--max-steps N, and no axis over training.max_steps",
        )
    if variants < eta:
        raise InputError(
            f"{place}halving: found {plural(variants, 'variant')}, expected at least {eta}",
            hint="fewer are trained as fast without --halving",
        )
    return Ladder(task, eta, plan.seeds, rungs_of(variants, max_steps=steps[0], eta=eta))


def run_sweep(
    plan: Plan,
    grid: Grid,
    out: Path,
    *,
    observer: Observer,
    tolerant: bool = False,
    work: Work = QUIET,
    slots: Sequence[Slot] = (ONE_SLOT,),
    tabulate: Tabulate = make_table,
) -> tuple[Table, list[Result]]:
    """Train what is not finished yet, and write the tables and plots into `out`. Results are in the table's order.

    tolerant: go on where the first training of a task is refused; the cause is often its data, common to all cells.
    slots: of trainings at the same time. tabulate: makes the table of the results so far.

    Raises InputError when `out` belongs to another plan, and for such a refusal; Interrupted once the running cells
    have ended after `work` was stopped.
    """
    make_folders(out)
    lock = RunLock(out)
    try:
        _claim(out, plan)
        together = Together(work.should_stop)
        sweepers = [Sweeper(out, together.should_stop, slot) for slot in slots]
        found = {result.cell: result for result in grid.invalid}
        number, done, total = 0, 0, grid.trainings

        def train(cells: Sequence[Cell], rung: Rung | None = None) -> None:
            finished = {cell.name: sweepers[0].finished(cell, rung) for cell in cells}

            def train_one(cell: Cell, sweeper: Sweeper) -> None:
                nonlocal number, done
                with together.lock:
                    number, result, began = number + 1, finished[cell.name], time.monotonic()
                    own, seconds = number, None
                    if result is None:
                        observer.begins(cell, own, total, sweeper.log(cell))
                if result is None:
                    result, seconds = sweeper.run(cell, rung), time.monotonic() - began
                with together.lock:
                    observer.ended(result, own, total, seconds=seconds)
                    done += 1
                    first = not any(other.task == result.task for other in found.values())
                    if result.status == REFUSED and first and not tolerant:
                        hint = "--skip-invalid goes on with the others"
                        raise InputError(f"{result.cell}: {result.message}", hint=hint)
                    found[cell.name] = result
                    _write(plan, grid, found, out, tabulate, last=False)

            together.each(cells, train_one, sweepers)

        if not grid.ladders:
            train(grid.cells)
        for ladder in grid.ladders:
            _climb(ladder, grid.cells, found, train)
        return _write(plan, grid, found, out, tabulate, last=True)
    except Stopped:
        raise Interrupted(
            f"interrupted: {done} of {total} trainings are finished",
            signal_number=signal.SIGINT,
            hint="run the same command again to go on",
        ) from None
    finally:
        lock.release()


def require_success(results: Sequence[Result], out: Path, *, tolerant: bool = False) -> None:
    """Raise TformerError where a training or its evaluation failed; tolerant: refused ones do not count."""
    if not any(result.status == DONE for result in results):
        raise TformerError("every training failed", hint=f"see the logs in {out}/cells")
    failed = [result for result in results if result.failed and not (tolerant and result.status == REFUSED)]
    if failed:
        named = ", ".join(result.cell for result in failed[:8]) + (", ..." if len(failed) > 8 else "")
        raise TformerError(
            f"{len(failed)} of {plural(len(results), 'training')} failed: {named}",
            hint=f"the table says why, and the logs in {out}/cells; the same command tries them again",
        )


class Together:
    """Trainings at the same time, each in a thread that waits for its process; the first error stops all."""

    def __init__(self, should_stop: ShouldStop) -> None:
        self.lock = threading.Lock()
        self._asked, self._failed, self._abandoned = should_stop, threading.Event(), threading.Event()

    def should_stop(self) -> bool:
        """Whether a training has to save and end. Raises Stopped where it has to end at once."""
        if self._abandoned.is_set():
            raise Stopped
        return self._failed.is_set() or self._asked()

    def each(self, cells: Sequence[Cell], train: Callable[[Cell, Sweeper], None], sweepers: Sequence[Sweeper]) -> None:
        """Train all cells in their order, as many at a time as there are sweepers."""
        waiting = iter(cells)

        def work_off(sweeper: Sweeper) -> None:
            try:
                while not self._failed.is_set():
                    with self.lock:
                        cell = next(waiting, None)
                    if cell is None:
                        return
                    train(cell, sweeper)
            except BaseException:
                self._failed.set()
                raise

        if len(sweepers) == 1:  # in this thread, as signals reach it
            work_off(sweepers[0])
            return
        with ThreadPoolExecutor(len(sweepers), thread_name_prefix="training") as pool:
            try:
                errors = [future.exception() for future in [pool.submit(work_off, sweeper) for sweeper in sweepers]]
            except BaseException:  # a second signal
                self._abandoned.set()
                raise
        for error in sorted(filter(None, errors), key=lambda error: isinstance(error, Stopped)):
            raise error


Train = Callable[[Sequence[Cell], Rung], None]
"""Trains these cells to a rung."""


def _climb(ladder: Ladder, cells: Sequence[Cell], found: Mapping[str, Result], train: Train) -> None:
    """Train the variants of a task rung by rung, the best of each going on to the next. found: results so far."""
    own = [cell for cell in cells if cell.variant.task.name == ladder.task]
    for rung, above in zip(ladder.rungs, (*ladder.rungs[1:], None), strict=True):
        train(own, rung)
        if above is not None:
            scores: dict[str, list[float | None]] = {}
            for cell in own:
                result = found[cell.name]
                value = dict(result.rungs).get(rung.steps)
                score = None if value is None else lower_is_better(result.metric, value)
                scores.setdefault(cell.variant.slug, []).append(score)
            best = best_variants(scores, above.variants)
            own = [cell for cell in own if cell.variant.slug in best]


def _write(
    plan: Plan, grid: Grid, found: Mapping[str, Result], out: Path, tabulate: Tabulate, *, last: bool
) -> tuple[Table, list[Result]]:
    """Write the tables; after the last cell also the plots, which take a second. Results are in the table's order."""
    results = sorted(found.values(), key=lambda result: grid.order.index(result.cell))
    table = tabulate(plan, results, grid.ladders)
    write_tables(plan, table, results, out)
    if last:
        draw(plan, results, out)
    return table, results


def _claim(out: Path, plan: Plan) -> None:
    """Reserve the folder for this plan. Raises InputError with the difference when it belongs to another."""
    file, asked = out / PLAN_FILE, json.loads(plan.model_dump_json())
    if file.is_file():
        stored = parse_object(read_bounded(file, max_bytes=MAX_PLAN_BYTES), name=str(file))
        difference = _difference(stored, asked)
        for name in (RUNS, CELLS):  # they may have been deleted
            make_folders(out / name)
        if difference is None:
            return
        if any((out / RUNS).iterdir()):
            raise InputError(
                f"{out} holds another sweep: {difference}", hint="choose another --out, or give the plan it began with"
            )
        remove_tree(out / CELLS)  # only refusals: nothing was trained
    elif found := sorted(entry.name for entry in out.iterdir() if entry.name != LOCK_NAME):
        raise InputError(f"{out} is not empty (it holds {found[0]})", hint="choose another folder with --out")
    for name in (RUNS, CELLS):
        make_folders(out / name)
    write_text(file, json.dumps(asked, ensure_ascii=False, indent=1) + "\n")


def _difference(stored: Any, asked: Any, path: tuple[str, ...] = ()) -> str | None:
    """Description of the first difference of two documents; None: they are equal."""
    if isinstance(stored, dict) and isinstance(asked, dict):
        pairs: list[tuple[str, Any, Any]] = [
            (key, stored.get(key), asked.get(key)) for key in dict.fromkeys([*stored, *asked])
        ]
    elif isinstance(stored, list) and isinstance(asked, list) and len(stored) == len(asked):
        pairs = [(str(index), left, right) for index, (left, right) in enumerate(zip(stored, asked, strict=True))]
    else:
        if stored == asked and type(stored) is type(asked):
            return None
        here, there = (fitted(json.dumps(value, ensure_ascii=False), 100) for value in (asked, stored))
        return f"{'.'.join(path)} is {there} in the folder, {here} in this command"
    differences = (_difference(left, right, (*path, key)) for key, left, right in pairs)
    return next((difference for difference in differences if difference is not None), None)


def _of_task(plan: Plan, name: str) -> str:
    return f"task {name}: " if len(plan.tasks) > 1 else ""
