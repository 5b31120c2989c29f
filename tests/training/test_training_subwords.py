"""Batches with sampled subwords: processes share the rows of one, resumed batches are equal, validation is plain."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tformer
from tformer.data.batching.batch import Batch
from tformer.data.shards.pair_tokens import PairExample
from tformer.evaluation.predict import GivenSamples
from tformer.objectives.base import ObjectiveContext
from tformer.recipe import load_recipe
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError
from tformer.tasks.base import TrainingData
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer
from tformer.tokenizer.special import decoder_tokens
from tformer.training.assemble import PlannedBatches, make_objective

TEXTS = [f"the {colour} {thing} is under the {other} bridge" for colour in ("yellow", "purple", "brown")
         for thing in ("carpet", "mirror") for other in ("wooden", "broken")]  # fmt: skip


@cache
def tokenizer(model: str = "bpe") -> Tokenizer:
    options = TokenizerOptions(model=model, vocab_size=90, template="seq2seq")  # type: ignore[arg-type]
    return train_tokenizer(lambda: iter([" ".join(TEXTS)]), options)


def batches_of(rate: float, *, rank: int = 0, world_size: int = 1, cursor: Any = None, model: str = "bpe") -> Any:
    sets = [f"data.subword_sampling={rate}", "training.batch_size=3", "training.batch_tokens=null",
            "training.grad_accum=2", "objectives.0.word_dropout=0"]  # fmt: skip
    recipe: Recipe = load_recipe(arch="transformer", preset="tiny", sets=sets).recipe
    own = tokenizer(model)
    end = own.special.eos
    ids = [np.array([*own.encode(text), end], dtype=np.int64) for text in TEXTS]
    samples = GivenSamples([PairExample(one, one) for one in ids], 60, np.array([len(one) for one in ids]))
    context = ObjectiveContext(own.special, seq_len=60, vocab_size=own.vocab_size, target=decoder_tokens(own.special),
                               target_seq_len=60)  # fmt: skip
    data = TrainingData(tokenizer=own, samples=samples, validate=lambda *_: {}, context=context,
                        fingerprint="")  # fmt: skip
    objective = make_objective(recipe, context)
    device = torch.device("cpu")
    return PlannedBatches(recipe, data, objective, cursor=cursor, device=device, rank=rank, world_size=world_size)


def rows(batch: Batch) -> list[list[int]]:
    """The real ids of each source and its labels."""
    assert batch.input_ids is not None and batch.labels is not None
    masks = batch.attention_mask if batch.attention_mask is not None else torch.ones_like(batch.input_ids)
    sources = [ids[mask.bool()].tolist() for ids, mask in zip(batch.input_ids, masks, strict=True)]
    return [[*one, *(label for label in labels.tolist() if label >= 0)]
            for one, labels in zip(sources, batch.labels, strict=True)]  # fmt: skip


def test_two_processes_read_the_rows_of_one_with_the_same_segmentations() -> None:
    one, *two = batches_of(0.3), batches_of(0.3, rank=0, world_size=2), batches_of(0.3, rank=1, world_size=2)
    for _ in range(5):
        for whole, *parts in zip(one.next(), *(each.next() for each in two), strict=True):
            expected = rows(whole)
            assert [rows(part) for part in parts] == [expected[0::2], expected[1::2]]


@pytest.mark.parametrize("model", ["bpe", "unigram"])
def test_batches_from_a_cursor_are_those_of_the_run_without_interruption(model: str) -> None:
    first, plain = batches_of(0.3, model=model), batches_of(0.0, model=model)
    assert [rows(batch) for batch in first.next()] != [rows(batch) for batch in plain.next()]
    for _ in range(2):
        first.next()
    again = batches_of(0.3, cursor=first.cursor(), model=model)
    for _ in range(3):
        assert [rows(batch) for batch in first.next()] == [rows(batch) for batch in again.next()]


def test_epochs_differ_in_segmentations_but_not_in_texts() -> None:
    sampled, plain = batches_of(0.3), batches_of(0.0)
    epochs = [sorted(tuple(row) for _ in range(2) for batch in sampled.next() for row in rows(batch)) for _ in range(2)]
    assert epochs[0] != epochs[1]
    decoded = [sorted(tokenizer().decode(row) for row in rows_of_epoch) for rows_of_epoch in epochs]
    expected = sorted(tokenizer().decode(row) for _ in range(2) for batch in plain.next() for row in rows(batch))
    assert decoded == [expected, expected]


def test_a_tokenizer_with_one_segmentation_is_refused_before_anything_is_written() -> None:
    with pytest.raises(InputError, match=r"data\.subword_sampling: found 0.3 with a word tokenizer"):
        batches_of(0.3, model="word")


def test_evaluation_of_a_classifier_is_that_of_its_best_validation(tmp_path: Path) -> None:
    """Trained with sampled subwords and averaged weights; an evaluation does not sample."""
    rows = [(text, text.split()[1]) for text in TEXTS] * 4
    small = {"model.d_model": 16, "model.encoder.num_heads": 2, "model.encoder.num_layers": 1}
    regularized = {
        "data.subword_sampling": 0.5,
        "training.ema_decay": 0.5,
    }
    tokens = {"tokenizer.train.model": "bpe", "tokenizer.train.vocab_size": 90}
    keys = {**small, **regularized, **tokens}
    run = tformer.train(rows, arch="bert", max_steps=4, out=tmp_path / "run", set=keys, quiet=True)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    best = [record for record in records if record["split"] == "valid" and record["is_best"]][-1]
    report = run.evaluate()
    assert report["loss"] == pytest.approx(best["loss"], rel=1e-5) and report["accuracy"] == best["accuracy"]
