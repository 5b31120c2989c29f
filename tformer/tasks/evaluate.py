"""The work of `tformer evaluate`: load a model, choose the task of its data, and make the report."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tformer.decoding.inference import inference_dtype, prepare_inference
from tformer.decoding.prompts import task_prefix
from tformer.evaluation.options import COMMON, DataOptions, EvaluationOptions, flag_of
from tformer.loading import Loaded, load
from tformer.nn.positions import POSITIONS, Positions
from tformer.objectives import OBJECTIVES
from tformer.recipe.model import layer_sections
from tformer.support.device import resolve_device
from tformer.support.errors import InputError
from tformer.support.files import refuse_to_replace
from tformer.tasks import TASKS, task_of
from tformer.tasks.base import ChosenData, EvenlySpread, HeldOut, Task, choose_data
from tformer.tasks.baselines import baseline_lines
from tformer.workers.work import Work

HEADS = {objective.head.kind for objective in OBJECTIVES.values()}


def evaluate_model(options: EvaluationOptions, work: Work) -> tuple[Task, dict[str, Any]]:
    """The task of the model's data and the evaluation report: run, step, data and the task's metrics.

    Raises InputError for a model or data that cannot be evaluated, and for options that do not apply to them.
    """
    loaded = load(options.run, device=resolve_device(options.device), which=options.checkpoint, kinds=HEADS)
    return evaluate_loaded(loaded, options, work)


def evaluate_loaded(loaded: Loaded, options: EvaluationOptions, work: Work) -> tuple[Task, dict[str, Any]]:
    """`evaluate_model` for a loaded model, which may be packed for inference: use it for nothing else afterwards."""
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
    data = choose_data(loaded, options)
    _note_prefix(loaded, data, options, work)
    read = [path for spec in data.specs for path in (spec.path, spec.target_path) if path is not None]
    refuse_to_replace(options.mistakes, read, option="--mistakes")
    report = task.evaluate(loaded, data, options, work)
    return task, {"run": str(loaded.path), "step": loaded.step, **report}


def report_lines(task: Task, report: dict[str, Any]) -> list[str]:
    """The report as lines of text; those of the baselines stand after the metrics, before any table."""
    lines = list(task.lines({name: value for name, value in report.items() if name != "baseline"}))
    end = lines.index("") if "" in lines else len(lines)
    return [*lines[:end], *baseline_lines(report), *lines[end:]]


def held_out_data(loaded: Loaded, options: DataOptions, work: Work, *, max_examples: int | None) -> HeldOut:
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
    name = f"{max_examples:,} of {total:,} examples of {held_out.name}"
    return replace(held_out, name=name, samples=EvenlySpread(held_out.samples, max_examples))


def evaluation_task(loaded: Loaded, options: DataOptions) -> Task:
    """The task of the model's data. Raises InputError for an option that does not apply to it."""
    task, continuations = task_of(loaded.recipe), TASKS["continuations"]
    if task is TASKS["text"] and getattr(options, "score", False):
        task = continuations
    for name in options.given():
        if name not in task.options | COMMON:
            reads_continuations = task is TASKS["text"] and name in continuations.options
            raise InputError(
                f"{flag_of(name)} has no meaning here: {loaded.path} is {task.description}",
                hint="--score reads continuations" if reads_continuations else None,
            )
    return task


def _note_prefix(loaded: Loaded, data: ChosenData, options: DataOptions, work: Work) -> None:
    """Note the prefix of the sources; not for the run's own data, which has the prefixes of its tasks."""
    prefix, note = task_prefix(loaded.recipe, options.prefix)
    if note is not None and (prefix or data.given is not None):
        work.note(note)


def at_length(loaded: Loaded, seq_len: int) -> Loaded:
    """The model for sequences (of pairs: each side) of up to `seq_len` tokens, special tokens included.

    Positions without a maximum encode any length; the evaluation then measures how well the model extrapolates
    (arXiv 2108.12409). `seq_len` above the model's `max_seq_len` raises that; data is cut at `seq_len` in any case.

    Raises InputError for positions and kinds of attention with a smaller maximum length.
    """
    if seq_len > loaded.model.max_seq_len:
        _require_length(loaded, seq_len)
        loaded.model.max_seq_len = seq_len
    recipe = loaded.recipe
    target_seq_len = seq_len if recipe.model.is_encoder_decoder else None
    data = recipe.data.model_copy(update={"seq_len": seq_len, "target_seq_len": target_seq_len})
    model = recipe.model.model_copy(update={"max_seq_len": loaded.model.max_seq_len})
    return replace(loaded, recipe=recipe.model_copy(update={"data": data, "model": model}))


def _require_length(loaded: Loaded, seq_len: int) -> None:
    positions = [module for module in loaded.model.modules() if isinstance(module, Positions)]
    learned = [module.max_positions for module in positions if module.max_positions is not None]
    generator = loaded.recipe.generator  # which replaces tokens of the same sequences
    if generator is not None and generator.encoder is not None and generator.encoder.positions.module.fixed_length:
        learned.append(generator.max_seq_len)
    if learned and seq_len > min(learned):
        unlimited = (kind for kind, module in POSITIONS.items() if not module.fixed_length)
        raise InputError(
            f"--seq-len: found {seq_len:,}, the model has {min(learned):,} learned positions",
            hint=f"positions without a maximum: {', '.join(unlimited)}",
        )
    model = loaded.recipe.model
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        sections = () if stack is None else layer_sections(stack, path=f"model.{side}")
        for kind in (section.attention.kind for section in sections if section.attention.mechanism.fixed_length):
            raise InputError(
                f"--seq-len: found {seq_len:,}, the {kind} attention of model.{side} was made for "
                f"{loaded.model.max_seq_len:,} tokens"
            )
