"""The work of `tformer evaluate`: load a model, choose the task of its data, and make the report."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tformer.decoding.inference import inference_dtype, prepare_inference
from tformer.decoding.prompts import task_prefix
from tformer.evaluation.options import COMMON, EvaluationDataOptions, EvaluationOptions, flag_of
from tformer.evaluation.reports import breakdown_lines
from tformer.loading import Loaded, load
from tformer.objectives import OBJECTIVES
from tformer.support.device import resolve_device
from tformer.support.errors import InputError
from tformer.support.files import refuse_to_replace
from tformer.tasks.base import NO_DATA, ChosenData, EvenlySpread, HeldOut, Task, choose_data
from tformer.tasks.baselines import baseline_lines
from tformer.tasks.breakdown import at_length, breakdown
from tformer.tasks.table import TASKS, task_of
from tformer.tasks.text_pairs import with_vectors
from tformer.workers.work import Work

HEADS = {objective.head.kind for objective in OBJECTIVES.values()}


def evaluate_model(options: EvaluationOptions, work: Work) -> tuple[Task, dict[str, Any]]:
    """The task of the model's data and the evaluation report: run, step, data and the task's metrics.

    Raises InputError for a model or data that cannot be evaluated, and for options that do not apply to them.
    """
    loaded = load(options.run, device=resolve_device(options.device), which=options.checkpoint,
                  kinds=None if options.pooling is not None else HEADS)  # fmt: skip
    return evaluate_loaded(loaded, options, work)


def evaluate_loaded(loaded: Loaded, options: EvaluationOptions, work: Work) -> tuple[Task, dict[str, Any]]:
    """`evaluate_model` for a loaded model. It may get packed for inference, so do not use it afterwards."""
    if options.pooling is not None:
        loaded = with_vectors(loaded, options.pooling)
    device = next(loaded.model.parameters()).device
    # As in validation: activations in this format, weights in fp32 and cast on use.
    trained_in = loaded.recipe.training.precision
    loaded.model.compute_dtype = inference_dtype(options.precision, trained_in=trained_in, device=device)
    work.note_all(loaded)
    task = evaluation_task(loaded, options)
    if options.seq_len is not None:
        if task is TASKS["pairs"] and options.data is None and options.source is None and not loaded.recipe.data.valid:
            raise InputError(
                f"--seq-len {options.seq_len} would change which pairs are held out: they were split at "
                f"{loaded.recipe.seq_len} tokens",
                hint="name what to evaluate on with --data or --source",
            )
        untrained, loaded = loaded.untrained_positions(options.seq_len), at_length(loaded, options.seq_len)
        for note in untrained:
            work.note(note)
    if options.quantize != "none":
        model = loaded.model
        prepare = partial(prepare_inference, model, model.compute_dtype, quantize=options.quantize)
        if (slow := work.worker.in_turn(prepare)) is not None:
            work.note(slow)
    data = choose_data(loaded, options) if options.tasks is None else NO_DATA
    _note_prefix(loaded, data, options, work)
    read = [path for spec in data.specs for path in (spec.path, spec.target_path) if path is not None]
    refuse_to_replace(options.mistakes, read, option="--mistakes")
    refuse_to_replace(options.plot, read, option="--plot")
    if options.plot is not None and options.by is None and not task.has_curves(loaded.recipe):
        raise InputError(
            f"--plot draws the decisions of a classifier, which {loaded.path} is not",
            hint="--by length, or of models that predict tokens --by position, has a curve to draw",
        )
    report = task.evaluate(loaded, data, options, work)
    if options.by is not None:
        report["by"] = breakdown(task, loaded, data, options, work)
    return task, {"run": str(loaded.path), "step": loaded.step, **report}


def report_lines(task: Task, report: dict[str, Any]) -> list[str]:
    """The report as lines of text: metrics, baselines, tables."""
    lines = list(task.lines({name: value for name, value in report.items() if name not in ("baseline", "by")}))
    end = lines.index("") if "" in lines else len(lines)
    table = breakdown_lines(report["by"]) if "by" in report else ()
    return [*lines[:end], *baseline_lines(report), *lines[end:], *table]


def held_out_data(loaded: Loaded, options: EvaluationDataOptions, work: Work, *, max_examples: int | None) -> HeldOut:
    """The data that the options name, else the run's held-out data, as samples with their objective.

    max_examples: use at most as many of them, evenly spread. Raises InputError for options that do not apply to the
    model, and for data that cannot be read or has no examples.
    """
    task = evaluation_task(loaded, options)
    data = choose_data(loaded, options)
    _note_prefix(loaded, data, options, work)
    held_out = task.held_out(loaded, data, work)
    work.raise_if_stopped("while reading the data, nothing written")
    total = len(held_out.samples)
    if not total:
        raise InputError(f"{held_out.name}: no examples to measure on")
    held_out = replace(held_out, batch_size=options.batch_size or held_out.batch_size)
    if max_examples is None or total <= max_examples:
        return held_out
    samples = EvenlySpread(held_out.samples, max_examples)
    return replace(held_out, name=f"{len(samples):,} of {total:,} examples of {held_out.name}", samples=samples)


def evaluation_task(loaded: Loaded, options: EvaluationDataOptions) -> Task:
    """The task of the model's data. Raises InputError for an option that does not apply to it."""
    task, continuations = task_of(loaded.recipe), TASKS["continuations"]
    if task is TASKS["text"] and getattr(options, "score", False):
        task = continuations
    elif task is TASKS["text"] and getattr(options, "tasks", None) is not None:
        task = TASKS["benchmarks"]
    for name in options.given():
        if name not in task.options | COMMON:
            reads_continuations = task is TASKS["text"] and name in continuations.options
            raise InputError(
                f"{flag_of(name)} has no meaning here: {loaded.path} is {task.description}",
                hint="--score reads continuations" if reads_continuations else None,
            )
    return task


def _note_prefix(loaded: Loaded, data: ChosenData, options: EvaluationDataOptions, work: Work) -> None:
    """Note the prefix of the sources, except for the run's own data, which has the prefixes of its tasks."""
    prefix, note = task_prefix(loaded.recipe, options.prefix)
    if note is not None and (prefix or data.given is not None):
        work.note(note)
