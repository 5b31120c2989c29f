"""Baselines of a run: what its model must beat, as `train` stores them and `evaluate` reports them.

A baseline is {"guess": how it guesses, metric: value, ...}, by the name of its kind:

    unigram, bigram  tokens guessed by how often they occur in the training data, alone or after the token before
    constant         one answer for every example; "scores" are those of a model that always gives it
    positive         the second of two classes for every example, where the first is more frequent: its F1 alone
    copy             the source as the output

They are made from the first tokens, or from evenly spread samples, of the training and the validation data. Nothing
is drawn from a random stream of the training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from tformer.checkpoint.run import CHECKPOINTS
from tformer.data.batching.mixture import Samples
from tformer.data.shards.corpus import TokenCorpus
from tformer.evaluation.reports import VALIDATION_METRICS, report_of
from tformer.evaluation.scored import Scored
from tformer.loading import Loaded
from tformer.metrics.baselines import bigram, constant_scores, unigram
from tformer.metrics.classification import f1_binary
from tformer.metrics.text import bits_per_byte, bleu, sequence_accuracy
from tformer.nn.classification_heads import LabelKind
from tformer.objectives.base import Objective
from tformer.support.errors import InputError, visible
from tformer.support.files import read_object, write_text
from tformer.support.formatting import fitted, json_text, listed
from tformer.tasks.base import Baselines, ChosenData, EvenlySpread

FILE = "baseline.json"  # of a run
MAX_FILE_BYTES = 16 << 20
_FORM = TypeAdapter(dict[str, dict[str, str | float | list[float] | None]])

MAX_TOKENS = 2_000_000  # of the training and of the validation data, where all of them are counted
MAX_LABELLED_TOKENS = 1 << 19  # of samples whose labels an objective makes
BATCH_SAMPLES = 64
LABEL_WIDTH, MAX_LABELS = 24, 3

BY_FREQUENCY = "guessing by frequency alone"
BY_LAST_TOKEN = "a bigram table"


def text_baselines(train: Sequence[TokenCorpus], held_out: Sequence[TokenCorpus], *, num_ids: int) -> Baselines:
    """Unigram and bigram for running text: each token after the first is predicted, as in `evaluate_lm`."""
    train_2N, found_2M = (_neighbours(_beginnings(corpora)) for corpora in (train, held_out))
    counts_V, found_V = (np.bincount(pairs[1], minlength=num_ids) for pairs in (train_2N, found_2M))
    found = {
        "unigram": {"guess": BY_FREQUENCY, **unigram(counts_V, found_V)},
        "bigram": {"guess": BY_LAST_TOKEN, **bigram(train_2N, found_2M, num_ids=num_ids)},
    }
    num_bytes = max(1, sum(corpus.num_bytes for corpus in _beginnings(held_out)))
    for baseline in found.values():
        baseline["bits_per_byte"] = bits_per_byte(baseline["loss"] * found_2M.shape[1], num_bytes)
    return found


def _beginnings(corpora: Sequence[TokenCorpus]) -> list[TokenCorpus]:
    """The first part of each corpus, together at most about `MAX_TOKENS`."""
    share = min(1.0, MAX_TOKENS / sum(map(len, corpora)))
    return [corpus.subset(0, math.ceil(share * len(corpus))) for corpus in corpora]


def _neighbours(corpora: Sequence[TokenCorpus]) -> np.ndarray:
    ids = [corpus.slice(0, len(corpus)) for corpus in corpora]
    return np.concatenate([np.stack([each[:-1], each[1:]]) for each in ids], axis=1)


def label_baselines(objective: Objective, train: Samples, held_out: Samples, *, num_ids: int) -> Baselines:
    """Unigram for the tokens that an objective predicts: masked ones, or a target; {} for one that predicts none.

    It has no loss: that of several objectives is another sum.
    """
    if not objective.members[0].predicts_tokens:
        return {}
    counts_V, found_V = (_label_counts(objective, samples, num_ids) for samples in (train, held_out))
    figures = unigram(counts_V, found_V)
    return {"unigram": {"guess": BY_FREQUENCY, "perplexity": figures["perplexity"], "accuracy": figures["accuracy"]}}


def _label_counts(objective: Objective, samples: Samples, num_ids: int) -> np.ndarray:
    count = min(len(samples), max(BATCH_SAMPLES, MAX_LABELLED_TOKENS // samples.seq_len))
    chosen, counts_V = EvenlySpread(samples, count), np.zeros(num_ids, dtype=np.int64)
    for start in range(0, count, BATCH_SAMPLES):
        examples = chosen.examples(0, np.arange(start, min(start + BATCH_SAMPLES, count)))
        labels = objective.collate(examples, rng=np.random.default_rng([0, start]), training=False).labels
        assert labels is not None
        counts_V += np.bincount(labels[labels >= 0].numpy(), minlength=num_ids)
    return counts_V


def constant_baselines(kind: LabelKind, names: Sequence[str], train_labels: Any, labels: Any) -> Baselines:
    """The best constant answer by the training labels, measured on others; arguments as for a report."""
    scores = constant_scores(np.asarray(train_labels), num_labels=len(names))
    return constant_of(kind, names, scores, labels)


def constant_of(kind: LabelKind, names: Sequence[str], scores: Any, labels: Any) -> Baselines:
    """The baseline of these scores on some labels; {} for scores of other labels, as a damaged file may have."""
    if not isinstance(scores, list) or len(scores) != max(1, len(names)) or not np.isfinite(scores).all():
        return {}
    labels = np.asarray(labels)
    constant_NL = np.tile(np.array(scores), (len(labels), 1))
    report = report_of(Scored(kind, names, labels, constant_NL), intervals=False)
    if kind == "score":
        guess = f"always answering {scores[0]:.4g}"
    else:
        chosen = [int(np.argmax(scores))] if kind == "classes" else [n for n, score in enumerate(scores) if score > 0]
        guess = _answering(chosen, names) if chosen else "never giving a label"
    metrics = {name: report[name] for name in VALIDATION_METRICS if name in report and name != "examples"}
    found = {"constant": {"guess": guess, "scores": scores, **metrics}}
    if "f1_binary" in report and chosen == [0]:  # whose F1 is 0: the other answer is a guess too
        always = f1_binary(labels, np.ones_like(labels))
        found["positive"] = {"guess": _answering([1], names), "f1_binary": always}
    return found


def _answering(chosen: Sequence[int], names: Sequence[str]) -> str:
    shown = [f"'{fitted(visible(names[number]), LABEL_WIDTH)}'" for number in chosen]
    return f"always answering {listed(shown, MAX_LABELS)}"


def copy_baselines(sources: Sequence[str], references: Sequence[str], **options: Any) -> Baselines:
    """BLEU and exact matches of sources as outputs; options: `tokenize` of BLEU, and `lowercase`."""
    exact = sequence_accuracy(sources, references, lowercase=options.get("lowercase", False))
    score = bleu(sources, references, **options).score
    return {"copy": {"guess": "copying the source", "bleu": score, "sequence_accuracy": exact}}


# Of a run, and in a report.


def write_baselines(run: Path, baselines: Baselines) -> None:
    """Store the baselines in a run directory."""
    write_text(run / FILE, json_text(baselines, indent=1))


def stored_baselines(run: Path) -> Baselines:
    """The baselines in a run directory; {} where there are none, and for a file that cannot be read."""
    with suppress(InputError, ValueError):  # a file that is not of this form
        if (run / FILE).is_file():
            found = _FORM.validate_python(read_object(run / FILE, max_bytes=MAX_FILE_BYTES))
            return {kind: {**each, "guess": str(each.get("guess", kind))} for kind, each in found.items()}
    return {}


def baselines_of_checkpoint(checkpoint: Path) -> Baselines:
    """The stored baselines of the run that a checkpoint lies in; {} for a checkpoint alone."""
    return stored_baselines(checkpoint.parent.parent) if checkpoint.parent.name == CHECKPOINTS else {}


def baselines_on_own_data(loaded: Loaded, data: ChosenData) -> Baselines:
    """The stored baselines of the model's run, where its own validation data is evaluated; else {}."""
    return baselines_of_checkpoint(loaded.path) if data.given is None else {}


def baseline_lines(report: dict[str, Any]) -> Iterator[str]:
    """One line for each baseline of an evaluation: the metrics that the report has too, and how it guesses."""
    for baseline in report.get("baseline", {}).values():
        shared = [name for name in baseline if isinstance(baseline[name], float) and name in report]
        if shared:
            values = ", ".join(f"{name} {baseline[name]:.4f}" for name in shared)
            yield f"baseline {values} ({baseline['guess']})"
