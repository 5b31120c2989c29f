"""Cross-validation: a sweep over `data.fold`, its table of folds, and the predictions for every example.

Each training leaves one fold out, chooses its best checkpoint on a part of the others as every training does, and is
then measured on its fold, which has decided on nothing. OUT holds the files of a sweep; a row of the table is a fold,
and predictions.csv has what the model that had not read it predicts for each example.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from tformer.data.sources.tables import LabelledRow
from tformer.decoding.answer_table import as_text, delimited_lines, new_names
from tformer.evaluation.mistakes import names_of_rows
from tformer.evaluation.predictions import read_predictions
from tformer.evaluation.reports import SHOWN_METRICS
from tformer.metrics.statistics import Stat
from tformer.recipe import Recipe, recipe_from_yaml
from tformer.support.errors import InputError
from tformer.support.files import RUNS, STANDARD_INPUT, write_text
from tformer.support.options import flag_words
from tformer.tasks.labelled import open_sources
from tformer.training.options import TrainOptions
from tformer.workers.launch import number_of_workers
from tformer.workflows.sweep.cells import DONE, ONE_SLOT, OWN_RUN, Result, Slot
from tformer.workflows.sweep.cells import RUNS as OF_CELLS
from tformer.workflows.sweep.plan import SweepPlan, plan_of_flags
from tformer.workflows.sweep.run import require_success, resolve_plan, run_sweep, stored_plan
from tformer.workflows.sweep.table import Column, SweepRow, SweepTable, show_count, show_metric

FOLD = "fold"
"""The axis of the sweep, and the evaluation of each training."""

MEASURES = ("examples", *SHOWN_METRICS)
PREDICTIONS, TABLE = "predictions.jsonl", "predictions.csv"  # of a run, and of all
FROM_TABLE = "table_"  # before a column of the data whose name the predictions have
ABOUT = (
    "each fold is measured by a model that was trained without it; the 95 % interval is that of the mean over the "
    "folds, by Student's t"
)


@dataclass(frozen=True)
class CrossValidation:
    """The result of `tformer.cross_validate`.

    Attributes:
        out: the folder of the trainings.
        folds: the figures of each fold, by metric; `examples` is the number of examples.
        mean, deviation: over the folds, by metric.
        interval: (low, high) of the 95 % interval of the mean over the folds, by Student's t.
        predictions: a row for each example, in the order of the data: its columns, the fold that it is in, and the
            label (or labels, or score) and the probabilities by the model that has not read it.
        runs: the run of each fold, for `tformer.load`.
    """

    out: Path
    folds: list[dict[str, float]]
    mean: dict[str, float]
    deviation: dict[str, float]
    interval: dict[str, tuple[float, float]]
    predictions: list[dict[str, Any]]
    runs: list[Path]


def train_folds(options: TrainOptions, *, say: Callable[[str], None]) -> CrossValidation:
    """Train and measure all unfinished folds. say: shows a line for each finished training."""
    plan = plan_of_folds(options)
    out, grid = options.out or default_folder(plan), resolve_plan(plan)
    how: dict[str, Any] = {"slots": slots_of(options), "tabulate": fold_table}
    table, results = run_sweep(plan, grid, out, ended=lambda _, line: say(line), **how)
    write_predictions(out, results)
    require_success(results, out)
    figures = table.summary["folds"]
    low, high = figures["95 % low"], figures["95 % high"]
    return CrossValidation(
        out=out,
        folds=[figures[result.choices[FOLD]] for result in results],
        mean=figures["mean"],
        deviation=figures["deviation"],
        interval={name: (low[name], high[name]) for name in low},
        predictions=predictions_of(out, results),
        runs=[out / OF_CELLS / result.cell for result in results],
    )


def plan_of_folds(options: TrainOptions) -> SweepPlan:
    """The sweep of `--folds`. Raises InputError for fewer than 2, and for data that can be read only once."""
    folds = options.folds
    if folds is None or folds < 2:
        raise InputError(f"--folds: found {folds}, expected at least 2")
    if STANDARD_INPUT in (*options.data, *options.valid):
        raise InputError("--folds reads the data several times, standard input only once", hint="save it to a file")
    own = ("arch", "preset", "config", "sets", "seed", "folds", "out", "resume", "dry_run", "as_json", "devices")
    rest = replace(options, **{name: getattr(TrainOptions, name) for name in own})
    return plan_of_flags(
        name="folds",
        config=options.config,
        arch=options.arch,
        preset=options.preset,
        sets=(*options.sets, *([] if options.seed is None else [f"seed={options.seed}"]), f"data.folds={folds}"),
        train=list(flag_words(rest)),
        vary=[f"data.fold={','.join(map(str, range(1, folds + 1)))}"],
        evaluate=[f"{FOLD}=--predictions {OWN_RUN}/{PREDICTIONS}"],
    )


def default_folder(plan: SweepPlan) -> Path:
    """The first folder runs/folds-N that does not exist yet, or holds this plan, which is continued."""
    asked, folders = plan.model_dump(mode="json"), (RUNS / f"folds-{number}" for number in count(1))
    return next(folder for folder in folders if not folder.exists() or stored_plan(folder) == asked)


def slots_of(options: TrainOptions) -> Sequence[Slot]:
    """Environment of each of the `--devices` parallel trainings: a GPU, or its share of the threads."""
    device = options.device or "auto"
    number = number_of_workers(options.devices, device)
    if number == 1:
        return (ONE_SLOT,)
    if device == "cpu" or not torch.cuda.is_available():
        return [{"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // number))}] * number
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(number)))
    return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in visible.split(",")[:number]]


def fold_table(plan: SweepPlan, results: Sequence[Result]) -> SweepTable:
    """A row for each fold that is finished, and rows for mean, deviation and 95 % interval of the mean over the folds.

    A fold that failed says how. `summary` has the figures of each row by its name.
    """
    rows, found = list[SweepRow](), dict[str, list[float]]()
    for result in results:
        tested = result.evaluate.get(FOLD, {})
        own = {name: float(tested["figures"][name]) for name in MEASURES if name in tested.get("figures", {})}
        for name, value in own.items():
            found.setdefault(name, []).append(value)
        failed = tested.get("failure") if result.status == DONE else result.status
        label = result.choices[FOLD] + (f" ({failed})" if failed else "")
        rows.append(_row(plan, label, own, failures={failed: 1} if failed else {}))
    stats = {name: stat for name, values in found.items() if name != "examples" and (stat := Stat.of(values))}
    intervals = {name: stat.interval or (None, None) for name, stat in stats.items()}
    rows.append(_row(plan, "mean", {name: stat.mean for name, stat in stats.items()}))
    rows.append(_row(plan, "deviation", {name: stat.deviation for name, stat in stats.items()}))
    rows.append(_row(plan, "95 % low", {name: low for name, (low, _) in intervals.items()}))
    rows.append(_row(plan, "95 % high", {name: high for name, (_, high) in intervals.items()}))
    shown = {"examples": show_count}
    columns = tuple(Column(name, name, shown.get(name, show_metric)) for name in MEASURES if name in found)
    figures = {row.choices[FOLD]: {name: stat.mean for name, stat in row.stats.items()} for row in rows}
    return SweepTable(plan.name, (FOLD,), columns, tuple(rows), summary={"folds": figures}, about=ABOUT)


def _row(
    plan: SweepPlan, label: str, values: Mapping[str, float | None], failures: dict[str, int] | None = None
) -> SweepRow:
    stats = {name: Stat(value, None, 1) for name, value in values.items() if value is not None}
    return SweepRow(plan.tasks[0].name, {FOLD: label}, 1, failures or {}, stats, {})


def write_predictions(out: Path, results: Sequence[Result]) -> str:
    """Write predictions.csv, and return its name; "" without predictions. The file appears whole."""
    rows = predictions_of(out, results)
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = ([row.get(name) for name in names] for row in rows)
    lines = (["|".join(x) if isinstance(x, list) else as_text(x) for x in row] for row in cells)
    write_text(out / TABLE, delimited_lines([names, *lines], ".csv"))
    return f"{TABLE}, "


def predictions_of(out: Path, results: Sequence[Result]) -> list[dict[str, Any]]:
    """A row for each example, in the order of the data, by the model that has not read it.

    The number of its row from 0 (of several tables the file, too), its fold, its text or image and label, the other
    columns of its table, the prediction, and the probability of every class.
    """
    rows, others = list[tuple[int, dict[str, Any]]](), list[tuple[LabelledRow, dict[str, Any]]]()
    places = list[dict[str, Any]]()
    for result in results:
        run = out / OF_CELLS / result.cell
        if result.status != DONE or not (run / PREDICTIONS).is_file():
            continue
        recipe = recipe_from_yaml((run / "recipe.yaml").read_text(encoding="utf-8"), name=str(run))
        names, others = recipe.data.labels, others or list(_other_columns(recipe))
        places = places or names_of_rows([row for row, _ in others])[1]
        for found in read_predictions(run / PREDICTIONS):
            number = found["example"]
            place = places[number] if places else {"row": number}
            row = {key: place[key] for key in ("file", "row") if key in place} | {FOLD: int(result.choices[FOLD])}
            row |= {key: found[key] for key in ("image", "text", "text2") if key in found} | {"label": found["truth"]}
            probabilities = found.get("probabilities", {})
            prediction = next(found[key] for key in ("label", "labels", "score") if key in found)
            answer = {"prediction": prediction} | (
                {"probability": probabilities[prediction]} if "label" in found else {}
            )
            answer |= {f"probability_{name}": probabilities[name] for name in names}
            cells = others[number][1] if others else {}
            columns = new_names(cells, [*row, *answer], prefix=FROM_TABLE)
            own = dict(zip(columns, cells.values(), strict=True))
            rows.append((number, row | own | answer))
    return [row for _, row in sorted(rows, key=lambda each: each[0])]


def _other_columns(recipe: Recipe) -> Iterator[tuple[LabelledRow, dict[str, Any]]]:
    """Each example with the cells of its other columns (no text, no label) by name; no examples of images."""
    data = recipe.data
    if recipe.model.patches is not None:
        return
    for source in open_sources(recipe, data.train, data):
        for table in source.keeping_records().tables:
            names = table.names or tuple(map(str, range(table.width)))
            read = {number for role in ("text", "text2", "label") for number in table.columns.get(role, ())}
            others = [name for number, name in enumerate(names) if number not in read]
            for row in table.rows():
                record = row.record or ()
                cells = record if isinstance(record, dict) else dict(zip(names, record, strict=True))
                yield row, {name: cells[name] for name in others if name in cells}
