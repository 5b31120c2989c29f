"""`bench tokenize`: the same ids for everybody, from a file, a vocabulary that there is, or one trained here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tformer.bench.peers import PEERS
from tformer.bench.workloads import Task
from tformer.bench.workloads.tokenize import TOKENIZE, check, cost, texts_of, tokenizer_of
from tformer.recipe import load_recipe
from tformer.support.errors import InputError


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contender sets these variables in its process; in this one they end with the test."""
    for name in ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "1")


@pytest.fixture
def task(tmp_path: Path) -> Task:
    (tmp_path / "text.txt").write_text("".join(f"line {number} of a text\n" for number in range(20_000)))
    sets = ["tokenizer.train.vocab_size=300"]
    recipe = load_recipe(arch="gpt", preset="tiny", sets=sets, flags={}, device="cpu").recipe
    options = {"data": str(tmp_path / "text.txt"), "megabytes": 0.1, "tokenizer": None}
    return Task("tokenize", recipe, 2, 16, "fp32", torch.device("cpu"), options=options)


def test_all_contenders_make_the_same_number_of_tokens(task: Task) -> None:
    contenders = [TOKENIZE.contender(task, "fp32")]
    if pytest.importorskip("transformers"):
        contenders.append(PEERS["tokenize", "transformers"].make(task, "fp32"))
    for contender in contenders:
        contender.prepare()
    tokens = [contender.run() for contender in contenders]
    ids = [len(ids) for texts in texts_of(task) for ids in tokenizer_of(task).encode_batch(texts)]
    assert tokens == [sum(ids)] * len(tokens)


def test_a_step_is_a_batch_of_texts_and_nothing_is_multiplied(task: Task) -> None:
    found, batches = cost(task, ""), texts_of(task)
    assert (found.steps, found.examples) == (len(batches), sum(map(len, batches))) and found.flops == 0
    assert TOKENIZE.step == "batch" and TOKENIZE.product is None


def test_no_more_text_than_was_asked_for(task: Task) -> None:
    batches = texts_of(task)
    sizes = [len(text) for texts in batches for text in texts]
    assert 100_000 <= sum(sizes) < 100_000 + 2**16 and all(len(texts) <= 2 for texts in batches)


def test_a_vocabulary_that_there_is(task: Task, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(task)
    tokenizer.save(tmp_path / "tokenizer.json")
    given = replace(task, options={**task.options, "tokenizer": str(tmp_path / "tokenizer.json")})
    assert tokenizer_of(given).sha256 == tokenizer.sha256


@pytest.mark.parametrize("option", ["data", "tokenizer"])
def test_what_cannot_be_read_is_refused_ahead(task: Task, tmp_path: Path, option: str) -> None:
    with pytest.raises(InputError, match="missing"):
        check(replace(task, options={**task.options, option: str(tmp_path / "missing")}))
