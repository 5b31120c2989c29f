"""A sweep from its plan to its tables: resolve every recipe, train the cells one after another, write the results.

OUT/sweep.json holds the plan of the folder: a later call continues that plan and refuses another.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tformer.checkpoint.run import LOCK_NAME, RunLock
from tformer.recipe import recipe_to_data
from tformer.support.errors import InputError, Interrupted, TformerError
from tformer.support.files import make_folders, read_object, remove_tree, write_text
from tformer.support.formatting import fitted, plural
from tformer.workers.work import QUIET, ShouldStop, Work
from tformer.workflows.sweep.cells import CELLS, DONE, INVALID, ONE_SLOT, REFUSED, RUNS, Result, Slot, Stopped, Sweeper
from tformer.workflows.sweep.grid import (
    EVAL_EVERY,
    LEAST_POINTS,
    Cell,
    all_sets,
    check_model,
    eval_every_for_a_curve,
    start_of,
    variants_of,
)
from tformer.workflows.sweep.pictures import draw
from tformer.workflows.sweep.plan import SweepPlan
from tformer.workflows.sweep.table import SweepTable, ended_line, make_table, write_tables

PLAN_FILE = "sweep.json"
MAX_PLAN_BYTES = 1 << 20
MAX_TRAININGS = 10_000

Tabulate = Callable[[SweepPlan, Sequence[Result]], SweepTable]


@dataclass(frozen=True)
class Grid:
    """The resolved cells of a plan in order of their training, and results of cells that their recipe refuses.

    order: names of all cells in the order of the table's rows, then of the seeds.
    """

    cells: tuple[Cell, ...]
    invalid: tuple[Result, ...]
    order: tuple[str, ...]
    notes: tuple[str, ...]


def resolve_plan(plan: SweepPlan, *, skip_invalid: bool = False) -> Grid:
    """Resolve every cell's recipe, before anything is trained.

    Raises InputError for the first cell that its recipe refuses (skip_invalid: such cells are left out), for a task
    that is wrong without its axes, and when no cell is left or too many are asked for.
    """
    total = plan.seeds * sum(math.prod(map(len, task.vary.values())) for task in plan.tasks)
    if total > MAX_TRAININGS:
        raise InputError(f"axes and seeds give {total:,} trainings, expected at most {MAX_TRAININGS:,}")
    cells: list[Cell] = []
    invalid: list[Result] = []
    order: list[str] = []
    notes: dict[str, None] = {}
    for task in plan.tasks:
        place = plan.place_of(task)
        try:
            base = start_of(task, (), max_steps=plan.max_steps)
        except TformerError as error:
            raise InputError(f"{place}{error.message}", hint=error.hint) from None
        notes |= dict.fromkeys(base.notes)
        first, prefix = base.recipe.seed, task.name if place else ""
        variants = variants_of(task, recipe=recipe_to_data(base.recipe), prefix=prefix)
        seeds = range(first, first + plan.seeds)
        order += [variant.cell_name(seed) for variant in variants for seed in seeds]
        for seed, variant in product(seeds, variants):  # all variants with the first seed, then all with the second
            try:
                start = start_of(task, variant.sets, max_steps=plan.max_steps, seed=seed)
                check_model(start.recipe)
            except InputError as error:
                choices = dict(variant.choices)
                if not skip_invalid:
                    shown = ", ".join(f"{key} {value}" for key, value in choices.items()) or "the recipe"
                    hint = error.hint or "--skip-invalid leaves such variants out"
                    raise InputError(f"{place}{shown}: {error.message}", hint=hint) from None
                refused, metric = " ".join(error.message.split()), base.recipe.training.best_metric
                name = variant.cell_name(seed)
                invalid.append(Result(name, task.name, choices, seed, status=INVALID, message=refused, metric=metric))
                continue
            notes |= dict.fromkeys(start.notes)
            every = eval_every_for_a_curve(task, variant.sets, start.recipe)
            if every is not None:
                notes[f"validating {LEAST_POINTS} times in each training (--set {EVAL_EVERY}=N: every N steps)"] = None
            sets = all_sets(task, variant.sets, max_steps=plan.max_steps, seed=seed, eval_every=every)
            cells.append(Cell(variant, seed, start.recipe, sets))
    if not cells:
        raise InputError(f"no variant is left: {invalid[0].cell}: {invalid[0].message}")
    return Grid(tuple(cells), tuple(invalid), tuple(order), tuple(notes))


def run_sweep(
    plan: SweepPlan,
    grid: Grid,
    out: Path,
    *,
    begins: Callable[[str, str], None] = lambda name, line: None,
    ended: Callable[[Result, str], None] = lambda result, line: None,
    tolerant: bool = False,
    work: Work = QUIET,
    slots: Sequence[Slot] = (ONE_SLOT,),
    tabulate: Tabulate = make_table,
) -> tuple[SweepTable, list[Result]]:
    """Train all unfinished cells, and write tables and plots into `out`. Results are in the table's order.

    begins, ended: called with the name of a training or its result, and a line about it.
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
        number, done, total = 0, 0, len(grid.cells)
        finished = {cell.name: sweepers[0].finished(cell) for cell in grid.cells}

        def train(cell: Cell, sweeper: Sweeper) -> None:
            nonlocal number, done
            with together.lock:
                number, result, began = number + 1, finished[cell.name], time.monotonic()
                own, seconds = number, None
                if result is None:
                    begins(cell.name, f"{own} of {total}  {cell.name}  (its log: {sweeper.log(cell)})")
            if result is None:
                result, seconds = sweeper.run(cell), time.monotonic() - began
            with together.lock:
                ended(result, ended_line(result, own, total, seconds))
                done += 1
                first = not any(other.task == result.task for other in found.values())
                if result.status == REFUSED and first and not tolerant:
                    is_sweep = tabulate is make_table  # folds have no such option
                    hint = "--skip-invalid goes on with the others" if is_sweep else None
                    raise InputError(f"{result.cell}: {result.message}", hint=hint)
                found[cell.name] = result
                write()

        def write() -> tuple[SweepTable, list[Result]]:
            results = sorted(found.values(), key=lambda result: grid.order.index(result.cell))
            table = tabulate(plan, results)
            write_tables(plan, table, results, out)
            return table, results

        together.each(grid.cells, train, sweepers)
        table, results = write()
        draw(plan, results, out)  # only now, as it takes a second
        return table, results
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


def stored_plan(out: Path) -> dict[str, Any] | None:
    """The plan that a folder holds, as plain data; None: it has none."""
    return read_object(out / PLAN_FILE, max_bytes=MAX_PLAN_BYTES) if (out / PLAN_FILE).is_file() else None


def _claim(out: Path, plan: SweepPlan) -> None:
    """Reserve the folder for this plan. Raises InputError with the difference when it belongs to another."""
    stored, asked = stored_plan(out), plan.model_dump(mode="json")
    if stored is None and (found := sorted(entry.name for entry in out.iterdir() if entry.name != LOCK_NAME)):
        raise InputError(f"{out} is not empty (it holds {found[0]})", hint="choose another folder with --out")
    for name in (RUNS, CELLS):  # they may have been deleted
        make_folders(out / name)
    difference = "" if stored is None else _difference(stored, asked)
    if difference:
        if any((out / RUNS).iterdir()):
            raise InputError(
                f"{out} holds another sweep: {difference}", hint="choose another --out, or give the plan it began with"
            )
        remove_tree(out / CELLS)  # only refusals: nothing was trained
        make_folders(out / CELLS)
    if difference is not None:
        write_text(out / PLAN_FILE, json.dumps(asked, ensure_ascii=False, indent=1) + "\n")


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
