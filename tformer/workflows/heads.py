"""The work of `tformer heads`: the model's input, and the scores of one checkpoint or of all of a run."""

from __future__ import annotations

import numpy as np

from tformer.checkpoint import catalog
from tformer.checkpoint.run import CHECKPOINTS
from tformer.data.batching.batch import Batch
from tformer.evaluation.predict import length_sorted_batches
from tformer.inside.heads import HeadReport, Repeated, attention_maps, copying, head_scores, repeated_tokens
from tformer.inside.options import MAX_EXAMPLES, ExampleOptions, HeadOptions, data_of
from tformer.loading import Loaded, load
from tformer.support.errors import InputError
from tformer.tasks.evaluate import held_out_data
from tformer.workers.work import Work

BATCH_TOKENS = 2048  # of a map [B, H, T, T]: 100 MB for 12 heads and windows of 1,024 tokens


def score_heads(loaded: Loaded, options: HeadOptions, work: Work) -> list[HeadReport]:
    """The head scores of a checkpoint, or with `over_training` of every checkpoint of its run, in order.

    An encoder-decoder reads the data that the options name, else the run's validation data. Other models read random
    tokens that repeat, unless an option of the data was given.

    Raises InputError for a model without attention maps over tokens, data that it cannot read, and a run with a single
    checkpoint.
    """
    maps = attention_maps(loaded)
    entries = catalog.scan(loaded.path.parent) if loaded.path.parent.name == CHECKPOINTS else []
    if options.over_training and len(entries) < 2:
        raise InputError(
            f"--over-training: {loaded.path} is the only checkpoint",
            hint="train with --set training.save_every=25 --set training.keep_last=100, or --preset induction",
        )
    repeated: Repeated | None = None
    if options.of_data or "cross" in maps:
        if options.of_random:
            flag = f"--{next(iter(options.of_random))}"
            raise InputError(f"{flag} is for random tokens: {loaded.path} reads pairs of texts")
        examples, read = read_examples(loaded, options, work)
        batches = [batch.model_inputs() for batch in examples]
    else:
        repeated = repeated_tokens(loaded, **options.of_random)
        rows = max(1, BATCH_TOKENS // repeated.ids_BT.shape[1])
        batches, read = [{"input_ids": ids_BT} for ids_BT in repeated.ids_BT.split(rows)], str(repeated)

    def report_of(one: Loaded) -> HeadReport:
        copies = "decoder" in maps and "lm" in one.model.heads
        copied = copying(one.model, repeated) if copies and repeated is not None else {}
        return HeadReport(one.step, read, head_scores(one, batches), copied)

    if not options.over_training:
        return [report_of(loaded)]
    device, reports = next(loaded.model.parameters()).device, []
    with work.part("scoring heads", total=len(entries), unit="checkpoints") as part:
        for entry in entries:
            work.raise_if_stopped("while reading the checkpoints, nothing written")
            reports.append(report_of(load(entry.path, device=device)))
            part.report(len(reports), len(entries))
    return reports


def read_examples(loaded: Loaded, options: ExampleOptions, work: Work) -> tuple[list[Batch], str]:
    """(batches of the named or the run's own data, the longest examples first; what they are in words)."""
    found = held_out_data(loaded, data_of(options), work, max_examples=options.max_examples or MAX_EXAMPLES)
    samples, rng = found.samples, np.random.default_rng(0)
    batches = [
        found.objective.collate(samples.examples(0, indices), rng=rng, training=False)
        for indices in length_sorted_batches(samples, batch_size=options.batch_size, batch_tokens=BATCH_TOKENS)
    ]
    return batches, found.name if " examples of " in found.name else f"{len(samples):,} examples of {found.name}"
