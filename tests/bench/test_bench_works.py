"""Each work of ours and of transformers on tiny models: the tokens of a round, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tformer.bench.peers import PEERS
from tformer.bench.speed import WORKS
from tformer.bench.workloads import SEED, Task
from tformer.bench.workloads import train as work_train
from tformer.bench.workloads.classify import SHORTEST, Texts
from tformer.build import count_parameters
from tformer.decoding.generate import generate
from tformer.recipe import recipe_from_yaml
from tformer.support.errors import InputError

GPT = """
model: {d_model: 16, max_seq_len: 32, vocab_size: 40, tie: {output: true}, decoder: {num_layers: 2, num_heads: 2,
        positions: {kind: learned}, feedforward: {d_ff: 32}, final_norm: true}}
"""
BERT = """
model: {d_model: 16, max_seq_len: 32, vocab_size: 40, encoder: {num_layers: 2, num_heads: 2, feedforward: {d_ff: 32}},
        heads: [{kind: HEAD}]}
objectives: [{kind: OBJECTIVE}]
"""
MASKED = BERT.replace("HEAD", "masked_lm").replace("OBJECTIVE", "masked_lm")
CLASSES = BERT.replace("HEAD", "classifier, num_labels: 2").replace("OBJECTIVE", "classification")
PAIRS = """
model: {d_model: 16, max_seq_len: 32, vocab_size: 40, encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 32}},
        decoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 32}}}
objectives: [{kind: seq2seq}]
"""
Make = Callable[..., Task]


@pytest.fixture
def make_task() -> Make:
    def make(work: str, recipe: str = GPT, **changes: Any) -> Task:
        values: dict[str, Any] = {"batch_size": 2, "length": 8, "precision": "fp32", "device": torch.device("cpu")}
        parsed = recipe_from_yaml("schema: 1\n" + recipe, name="test")
        return Task(work, parsed, **{**values, **changes})

    return make


def prepared(task: Task, library: str | None = None, precision: str = "fp32") -> Any:
    if library is not None:
        pytest.importorskip(library)
        contender = PEERS[task.work, library].make(task, precision)
    else:
        contender = WORKS[task.work].contender(task, precision)
    contender.prepare()
    return contender


@pytest.mark.parametrize("recipe", [GPT, MASKED, CLASSES], ids=["gpt", "masked", "classes"])
def test_training_does_a_step_a_round(make_task: Make, recipe: str) -> None:
    ours = prepared(make_task("train", recipe))
    before = ours._trainer.state.step
    assert ours.run() == ours.run() == 16
    assert ours._trainer.state.step == before + 2


def test_training_on_pairs_counts_both_sides(make_task: Make) -> None:
    task = make_task("train", PAIRS)
    assert prepared(task).run() == 2 * 2 * 8
    cost = work_train.cost(task, "fp32")
    assert cost.examples == 2 and cost.flops > 0


def test_an_objective_without_random_data_is_refused(make_task: Make) -> None:
    recipe = PAIRS.replace("seq2seq", "span_corruption")
    with pytest.raises(InputError, match="span_corruption cannot be benchmarked"):
        WORKS["train"].check(make_task("train", recipe))


def test_training_changes_the_weights_as_the_command_does(make_task: Make) -> None:
    """Every step goes through the loop: forward, backward, clipping, optimizer."""
    ours = prepared(make_task("train"))
    weight = ours._trainer.parts.model.main.embedding.weight.detach().clone()
    ours.run()
    assert not torch.equal(weight, ours._trainer.parts.model.main.embedding.weight)


def test_cost_of_training(make_task: Make) -> None:
    """6 N + 12 L d T a token; 16 bytes a parameter."""
    cost = work_train.cost(make_task("train"), "fp32")
    layer = 4 * 16 * 16 + 2 * 16 * 32
    assert cost.flops == 16 * (6 * (2 * layer + 40 * 16) + 12 * 2 * 16 * 8)
    assert cost.bytes_read == 16 * count_parameters(make_task("train").recipe.model)
    assert (cost.steps, cost.examples) == (1, 2)
    assert cost.memory["total_bytes"] > cost.memory["weights_bytes"] > 0


def test_cost_of_masked_training_counts_the_head_for_hidden_tokens(make_task: Make) -> None:
    cost = work_train.cost(make_task("train", MASKED), "fp32")
    layer, head = 4 * 16 * 16 + 2 * 16 * 32, 16 * 16 + 40 * 16
    assert cost.flops == pytest.approx(16 * (6 * (2 * layer + 0.15 * head) + 12 * 2 * 16 * 8))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_generation_writes_every_token(make_task: Make, precision: str) -> None:
    task = make_task("generate", precision=precision, options={"new_tokens": 5})
    assert prepared(task, precision=precision).run() == 2 * 5


def test_generation_is_what_decoding_generates(make_task: Make) -> None:
    task = make_task("generate", options={"new_tokens": 5})
    ours = prepared(task)
    torch.manual_seed(SEED)
    again = generate(ours._model, ours._prompts, ours._settings)
    assert [len(row[0].ids) for row in again] == [5, 5] and ours._settings.greedy


def test_cost_of_generation(make_task: Make) -> None:
    """Each of the steps reads all matrices, and the keys and values so far of both rows."""
    task = make_task("generate", options={"new_tokens": 3})
    cost = WORKS["generate"].cost
    layer = 4 * 16 * 16 + 2 * 16 * 32
    matrices = 2 * layer + 40 * 16
    cached = sum(2 * (8 + step) * 2 * 2 * 16 for step in range(3))
    assert cost(task, "fp32").bytes_read == 4 * (3 * matrices + cached)
    assert cost(task, "bf16").bytes_read == 2 * (3 * matrices + cached)
    assert cost(task, "int8").bytes_read == 3 * matrices + 2 * cached
    assert cost(task, "fp32").steps == 3
    passes, keys = 8 + 3 - 1, 8 + 2 / 2  # the head reads of a prompt its last token
    assert cost(task, "fp32").flops == 2 * (passes * (2 * 2 * layer + 4 * 2 * 16 * keys) + 3 * 2 * 40 * 16)


@pytest.mark.parametrize(
    ("recipe", "length", "told"),
    [(PAIRS, 8, "has an encoder"), (MASKED, 8, "has no decoder"), (GPT, 30, "the model reads 32")],
)
def test_generation_refuses_what_it_cannot_do(make_task: Make, recipe: str, length: int, told: str) -> None:
    with pytest.raises(InputError, match=told):
        WORKS["generate"].check(make_task("generate", recipe, length=length, options={"new_tokens": 5}))


def test_classification_reads_every_token(make_task: Make) -> None:
    task = make_task("classify", CLASSES, options={"texts": 20})
    assert prepared(task).run() == Texts(task).tokens


def test_cost_of_classification_counts_the_head_once_a_text(make_task: Make) -> None:
    task = make_task("classify", CLASSES, options={"texts": 20})
    lengths = Texts(task).lengths
    layer, head = 4 * 16 * 16 + 2 * 16 * 32, 16 * 16 + 2 * 16
    cost = WORKS["classify"].cost(task, "fp32")
    attention = 4 * 2 * 16 * (lengths**2).sum()
    assert cost.flops == pytest.approx(lengths.sum() * 2 * 2 * layer + attention + 20 * 2 * head)
    assert cost.bytes_read == 4 * (2 * layer + head) and cost.examples == 20


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_classification_reads_every_token_with_plain_matrices(make_task: Make, precision: str) -> None:
    """The compiler cannot look into packed ones; one graph serves batches of all shapes."""
    task = make_task("classify", CLASSES, length=32, precision=precision, compile=True, options={"texts": 300})
    ours = prepared(task, precision=precision)
    assert not any(parameter.isnan().any() for parameter in ours._model.parameters())
    assert ours.run() == Texts(task).tokens


def test_texts_vary_in_length_and_are_the_same_each_time(make_task: Make) -> None:
    task = make_task("classify", CLASSES, length=30, options={"texts": 200})
    texts = Texts(task)
    assert len(set(texts.lengths.tolist())) > 10 and texts.lengths.min() >= SHORTEST and texts.lengths.max() <= 30
    assert np.array_equal(texts.lengths, Texts(task).lengths)
    assert [len(one) for one in texts.examples(0, np.array([5, 2]))] == texts.lengths[[5, 2]].tolist()


def test_classification_refuses_a_model_without_its_head(make_task: Make) -> None:
    with pytest.raises(InputError, match="no classification head"):
        WORKS["classify"].check(make_task("classify", MASKED, options={"texts": 2}))


@pytest.mark.parametrize(
    ("work", "recipe", "options", "precision"),
    [
        ("train", GPT, {}, "bf16"),
        ("train", MASKED, {}, "fp32"),
        ("generate", GPT, {"new_tokens": 5}, "fp32"),
        ("classify", CLASSES, {"texts": 20}, "bf16"),
    ],
)
def test_transformers_does_as_many_tokens(
    make_task: Make, work: str, recipe: str, options: dict[str, int], precision: str
) -> None:
    task = make_task(work, recipe, options=options)
    assert prepared(task, "transformers", precision).run() == prepared(task).run()


def test_the_peer_has_the_sizes_of_ours(make_task: Make) -> None:
    """GPT-2 with biases: as many parameters as our recipe of it."""
    recipe = GPT.replace("positions:", "attention: {qkv_bias: true, out_bias: true}, positions:")
    recipe = recipe.replace("d_ff: 32", "d_ff: 32, bias: true")
    task = make_task("train", recipe)
    peer = prepared(task, "transformers")
    assert peer._model.num_parameters() == count_parameters(task.recipe.model)


def test_a_peer_refuses_what_it_cannot_do(make_task: Make) -> None:
    with pytest.raises(InputError, match="--peer transformers"):
        prepared(make_task("train", PAIRS), "transformers")
