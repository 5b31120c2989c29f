"""Each workload on tiny models: the tokens of a round, what it costs, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tformer.bench.speed import WORKS
from tformer.bench.workloads import SEED, BenchTask
from tformer.bench.workloads import decoding as inference
from tformer.bench.workloads.decoding import TranslationWorkload, parameters_by_side, sources_of
from tformer.build import build_model, count_parameters
from tformer.decoding.buckets import CompiledDecoder
from tformer.decoding.compilation import compile_decoding
from tformer.decoding.generate import generate
from tformer.recipe import load_recipe, recipe_from_yaml
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
Make = Callable[..., BenchTask]


@pytest.fixture
def make_task() -> Make:
    def make(work: str, recipe: str = GPT, **changes: Any) -> BenchTask:
        values: dict[str, Any] = {"batch_size": 2, "length": 8, "precision": "fp32", "device": torch.device("cpu")}
        parsed = recipe_from_yaml("schema: 1\n" + recipe, name="test")
        return BenchTask(work, parsed, **{**values, **changes})

    return make


def prepared(task: BenchTask, precision: str = "fp32") -> Any:
    contender = WORKS[task.work](task, precision)
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
    cost = WORKS["train"].cost(task, "fp32")
    assert cost.examples == 2 and cost.flops > 0


def test_an_objective_without_random_data_is_refused(make_task: Make) -> None:
    recipe = PAIRS.replace("seq2seq", "span_corruption")
    with pytest.raises(InputError, match="span_corruption cannot be benchmarked"):
        WORKS["train"].check(make_task("train", recipe))


def test_training_changes_the_weights_as_the_command_does(make_task: Make) -> None:
    """Every step goes through the loop: forward, backward, clipping, optimizer."""
    ours = prepared(make_task("train"))
    weight = ours._trainer.models.main.embedding.weight.detach().clone()
    ours.run()
    assert not torch.equal(weight, ours._trainer.models.main.embedding.weight)


@pytest.mark.parametrize(("precision", "scales"), [("fp32", False), ("bf16", False), ("fp16", True)])
def test_the_loss_is_scaled_in_fp16_alone(make_task: Make, precision: str, scales: bool) -> None:
    task = make_task("train", precision=precision)
    assert prepared(task, precision=precision)._trainer.scaler.enabled == scales


def test_cost_of_training(make_task: Make) -> None:
    """6 N + 12 L d T a token; 16 bytes a parameter."""
    cost = WORKS["train"].cost(make_task("train"), "fp32")
    layer = 4 * 16 * 16 + 2 * 16 * 32
    assert cost.flops == 16 * (6 * (2 * layer + 40 * 16) + 12 * 2 * 16 * 8)
    assert cost.bytes_read == 16 * count_parameters(make_task("train").recipe.model)
    assert (cost.steps, cost.examples) == (1, 2)
    assert cost.memory["total_bytes"] > cost.memory["weights_bytes"] > 0


def test_cost_of_masked_training_counts_the_head_for_hidden_tokens(make_task: Make) -> None:
    cost = WORKS["train"].cost(make_task("train", MASKED), "fp32")
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


OPTIONS = {"generate": {"new_tokens": 6}, "translate": {"new_tokens": 6, "beam_size": 2, "sentences": 4}}


@pytest.mark.parametrize(("work", "recipe", "tokens"), [("generate", GPT, 12), ("translate", PAIRS, 24)])
@pytest.mark.slow
def test_compiled_steps_write_what_a_round_writes(
    make_task: Make, work: str, recipe: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick twin is `test_generation_writes_every_token`."""
    monkeypatch.setattr(inference, "compile_decoding", partial(compile_decoding, backend="eager"))
    task = make_task(work, recipe, length=5, compile=True, options=OPTIONS[work])
    WORKS[work].check(task)
    ours = prepared(task)
    assert isinstance(ours._model.compiled_decoder, CompiledDecoder)
    assert ours.run() == ours.run() == tokens


@pytest.mark.parametrize(("work", "recipe"), [("generate", GPT), ("translate", PAIRS)])
def test_a_kind_that_has_no_compiled_steps_is_refused(make_task: Make, work: str, recipe: str) -> None:
    recipe = recipe.replace("decoder: {", "decoder: {attention: {kind: sliding_window}, ")
    WORKS[work].check(make_task(work, recipe, options=OPTIONS[work]))
    with pytest.raises(InputError, match="--compile: layer 0 of the decoder has SlidingWindowAttention"):
        WORKS[work].check(make_task(work, recipe, compile=True, options=OPTIONS[work]))


SIDE = {"num_layers": 1, "num_heads": 2, "feedforward.d_ff": 24}
SETS = ["model.vocab_size=60", "model.d_model=16", "model.max_seq_len=32", "data.seq_len=32"]
SETS += [f"model.{side}.{key}={value}" for side in ("encoder", "decoder") for key, value in SIDE.items()]


@pytest.fixture(scope="module")
def translation() -> BenchTask:
    recipe = load_recipe(arch="transformer", preset="base", sets=SETS, flags={}).recipe
    options = {"beam_size": 2, "new_tokens": 5, "sentences": 3}
    return BenchTask("translate", recipe, 2, 4, "fp32", torch.device("cpu"), options=options)


def test_a_round_has_whole_batches_of_the_same_sources(translation: BenchTask) -> None:
    sources = sources_of(translation)
    assert [[len(source) for source in batch] for batch in sources] == [[4, 4], [4, 4]]
    together = sources_of(replace(translation, batch_size=4))
    assert together[0] == sources[0] + sources[1]


def test_we_write_every_token(translation: BenchTask) -> None:
    contender = TranslationWorkload(translation, "fp32")
    contender.prepare()
    assert contender.run() == 4 * 5


def test_every_matrix_belongs_to_one_side(translation: BenchTask) -> None:
    model = build_model(translation.recipe.model, device="meta")
    by_source, by_target = parameters_by_side(model)
    d, d_ff, vocabulary = 16, 24, 60
    assert by_source == (4 * d * d + 2 * d * d_ff) + 2 * d * d
    assert by_target == (4 * d * d + 2 * d * d + 2 * d * d_ff) + vocabulary * d
    matrices = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.ndim >= 2}
    assert by_source + by_target == sum(count for name, count in matrices.items() if "positions" not in name)


def test_cost_counts_steps_and_bytes_by_format(translation: BenchTask) -> None:
    full, half = TranslationWorkload.cost(translation, "fp32"), TranslationWorkload.cost(translation, "bf16")
    assert (full.steps, full.examples) == (2 * 5, 4)
    assert half.bytes_read == full.bytes_read / 2 and half.flops == full.flops > 0
    assert TranslationWorkload.cost(translation, "int8_bf16").bytes_read < half.bytes_read


def test_cost_of_translation(translation: BenchTask) -> None:
    """Two batches of two sources of 4 tokens, beams of 2, 5 steps; one layer of 16 values, MLPs of 24, 60 words."""
    source, target = 4 * 16 * 16 + 2 * 16 * 24 + 2 * 16 * 16, 4 * 16 * 16 + 2 * 16 * 16 + 2 * 16 * 24 + 60 * 16
    passes = 4 * (1 + 2 * 4)  # the first step has one hypothesis for each source
    attention = 4 * 16 * (4 * 4 * 4 + passes * (4 + 5 / 2))  # a step has the keys of 4 + 2.5
    cost = TranslationWorkload.cost(translation, "fp32")
    assert cost.flops == 2 * (4 * 4 * source + passes * target) + attention
    cached = 2 * 2 * 16 * (4 + 2 * 5 / 2)  # keys and values of 2 sources, and of half of their hypotheses
    assert cost.bytes_read == 4 * (2 * source + 10 * target + 10 * cached)


@pytest.mark.parametrize(
    ("options", "told"),
    [({"new_tokens": 33}, "--new-tokens: found 33"), ({"beam_size": 61}, "--beam-size: found 61")],
)
def test_sizes_that_do_not_fit_are_refused(translation: BenchTask, options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        TranslationWorkload.check(replace(translation, options={**translation.options, **options}))


def test_a_decoder_alone_does_not_translate(translation: BenchTask) -> None:
    recipe = load_recipe(arch="gpt", preset="tiny", sets=[], flags={}).recipe
    with pytest.raises(InputError, match="not an encoder-decoder"):
        TranslationWorkload.check(replace(translation, recipe=recipe))
