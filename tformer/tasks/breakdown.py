"""Evaluation at other lengths than the training's, and by position and by length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from tformer.evaluation.options import EvaluationOptions
from tformer.evaluation.predict import sums_by_position
from tformer.loading import Loaded
from tformer.nn.positions import POSITIONS, Positions
from tformer.recipe.model import layer_sections
from tformer.support.errors import InputError
from tformer.support.files import STANDARD_INPUT
from tformer.tasks.base import ChosenData, HeldOut, Task
from tformer.workers.work import Work

POSITION_ROWS, LENGTH_ROWS = 32, 10  # at most
LEAST_EXAMPLES = 2  # of a part: a correlation needs two
SHORTEST_WINDOW, WINDOW_LENGTHS = 4, 6
# Of the table, those that a model has.
METRICS = ("loss", "accuracy", "f1_macro", "f1_micro", "exact_match", "f1", "mae")


def breakdown(task: Task, loaded: Loaded, data: ChosenData, options: EvaluationOptions, work: Work) -> dict[str, Any]:
    """{axis, rows}: of ranges of positions or lengths, `from` and `to`, how many there are, and the metrics.

    Examples are divided by their length into parts of about equal size, pairs by the length of the source. Running text
    is cut into windows of the model's length, of half of it, and so on.

    Raises InputError for standard input, and for a model without positions or lengths.
    """
    if any(spec.path == STANDARD_INPUT for spec in data.specs):
        raise InputError(f"--by {options.by} reads the data twice, standard input is read once", hint="give a file")
    quiet = replace(work, note=lambda _: None)  # the evaluation has shown the notes

    def held_out(model: Loaded) -> HeldOut:
        found = task.held_out(model, data, quiet)
        return replace(found, batch_size=options.batch_size or found.batch_size)

    whole = held_out(loaded)
    if options.by == "position":
        rows = _by_position(loaded, whole, work)
    else:
        lengths = getattr(whole.samples, "source_lengths", whole.samples.lengths)
        if lengths is None:
            raise InputError(f"--by length: {loaded.path} is {task.description}: all have one length")
        if hasattr(whole.samples, "subset"):
            groups = _parts(whole, lengths)
        else:
            longest = loaded.recipe.seq_len
            windows = [longest >> n for n in range(WINDOW_LENGTHS) if longest >> n >= SHORTEST_WINDOW or n == 0]
            groups = ((size, size, held_out(at_length(loaded, size))) for size in reversed(windows))
        rows = []
        for low, high, part in groups:
            with work.part(f"length {low} to {high}", unit="examples") as shown:
                metrics = part.measure(loaded.model, shown)
            work.raise_if_stopped("before every example was read")
            row = {"from": low, "to": high, "examples": len(part.samples)}
            rows.append(row | {name: metrics[name] for name in METRICS if name in metrics})
    return {"axis": options.by, "rows": rows}


def _by_position(loaded: Loaded, held_out: HeldOut, work: Work) -> list[dict[str, Any]]:
    if not held_out.objective.members[0].predicts_tokens:
        raise InputError(f"--by position: {loaded.path} predicts no tokens", hint="--by length divides its examples")
    with work.part("loss by position", unit="examples") as part:
        sums_3T = sums_by_position(
            loaded.model,
            held_out.objective,
            held_out.samples,
            batch_size=held_out.batch_size,
            seed=held_out.recipe.seed,
            work=part,
        )
    work.raise_if_stopped("before the whole text was read")
    width = -(-sums_3T.shape[1] // POSITION_ROWS)
    starts = range(0, sums_3T.shape[1], width)
    counts, losses, correct = np.add.reduceat(sums_3T, starts, axis=1).tolist()
    return [
        {"from": start, "to": min(start + width, sums_3T.shape[1]) - 1, "tokens": int(count)}
        | {"loss": loss / count, "accuracy": right / count}
        for start, count, loss, right in zip(starts, counts, losses, correct, strict=True)
        if count
    ]


def _parts(held_out: HeldOut, lengths: np.ndarray) -> Iterator[tuple[int, int, HeldOut]]:
    """(shortest, longest, examples) of parts of about equal size; examples of one length are in one part."""
    sizes, counts = np.unique(lengths, return_counts=True)
    least = max(LEAST_EXAMPLES, len(lengths) / LENGTH_ROWS)
    first, gathered, left = 0, 0, len(lengths)
    for last, count in enumerate(counts.tolist()):
        gathered, left = gathered + count, left - count
        if (gathered >= least and left >= LEAST_EXAMPLES) or not left:
            low, high = int(sizes[first]), int(sizes[last])
            chosen = np.flatnonzero((lengths >= low) & (lengths <= high))
            yield low, high, replace(held_out, samples=held_out.samples.subset(chosen))
            first, gathered = last + 1, 0


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
    target_seq_len = min(seq_len, recipe.model.max_target_len or seq_len) if recipe.model.is_encoder_decoder else None
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
