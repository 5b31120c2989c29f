"""Greedy and sampled generation by encoder-decoders: the cached engine does what a pass without a cache does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tformer.build import build_model
from tformer.decoding.generate import generate
from tformer.decoding.settings import Generated, GenerationSettings
from tformer.decoding.uncached import uncached_generate
from tformer.errors import InputError
from tformer.model import Transformer
from tformer.recipe.model import Model

VOCAB = 29
START = 1
STACKS: dict[str, dict[str, Any]] = {
    "sinusoidal-post": {"positions": {"kind": "sinusoidal"}, "norm": {"place": "post"}},
    "learned-offset-post": {"positions": {"kind": "learned", "offset": 2}, "norm": {"place": "post"}},
    "t5_bias-rms": {"positions": {"kind": "t5_bias", "buckets": 8, "max_distance": 16}, "norm": {"kind": "rmsnorm"}},
    "rope-grouped": {"positions": {"kind": "rope"}, "num_kv_heads": 2},
}
SOURCES = [[5, 6, 7, 2], [8, 9, 10, 11, 12, 13, 2], [14, 2], [15, 16, 17, 2]]
PREFIXES = [[START], [START, 20, 21, 22], [START, 23], [START, 24]]
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"num_samples": 3, "seed": 3},
    "restrained": {"num_samples": 2, "top_k": 9, "repetition_penalty": 1.3, "no_repeat_ngram": 2, "eos_id": 4},
}
every_stack = pytest.mark.parametrize("stack", list(STACKS.values()), ids=list(STACKS))
every_choice = pytest.mark.parametrize("choice", list(CHOICES.values()), ids=list(CHOICES))


def make(
    stack: dict[str, Any] = STACKS["sinusoidal-post"], *, max_seq_len: int = 32, target_vocab_size: int | None = None
) -> Transformer:
    torch.manual_seed(0)
    side = {"num_layers": 2, "num_heads": 4, "feedforward": {"d_ff": 24}, "final_norm": True, **stack}
    section = {"d_model": 24, "max_seq_len": max_seq_len, "vocab_size": VOCAB, "encoder": side, "decoder": side}
    section["tie"] = {"output": False}  # a tied output would repeat what it reads
    if target_vocab_size is not None:
        section |= {"target_vocab_size": target_vocab_size, "tie": {"source_target": False, "output": True}}
    model = build_model(Model.model_validate(section))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.eval()


def assert_same(left: Sequence[list[Generated]], right: Sequence[list[Generated]]) -> None:
    for some, others in zip(left, right, strict=True):
        for one, other in zip(some, others, strict=True):
            assert (one.ids, one.finish_reason) == (other.ids, other.finish_reason)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@every_stack
@every_choice
@pytest.mark.parametrize("max_seq_len", [32, 7], ids=["within", "sliding"])
def test_cached_equals_uncached_with_sources(stack: dict[str, Any], choice: dict[str, Any], max_seq_len: int) -> None:
    model = make(stack, max_seq_len=max_seq_len)
    settings = GenerationSettings(max_new_tokens=14, logprobs=True, **choice)
    cached = generate(model, PREFIXES, settings, sources=SOURCES)
    assert_same(cached, uncached_generate(model, PREFIXES, settings, sources=SOURCES))
    assert len({completions[0].logprobs for completions in cached}) == 4, "every source says something else"


@every_stack
@every_choice
def test_a_batch_of_sources_equals_one_by_one(stack: dict[str, Any], choice: dict[str, Any]) -> None:
    model, settings = make(stack), GenerationSettings(max_new_tokens=12, logprobs=True, **choice)
    alone = [
        generate(model, [prefix], settings, sources=[source], first_row=row)[0]
        for row, (source, prefix) in enumerate(zip(SOURCES, PREFIXES, strict=True))
    ]
    assert_same(generate(model, PREFIXES, settings, sources=SOURCES), alone)
    uncached = uncached_generate(model, PREFIXES[2:], settings, sources=SOURCES[2:], first_row=2)
    assert_same(uncached, alone[2:])


@pytest.mark.parametrize("max_seq_len", [32, 7], ids=["within", "sliding"])
def test_sources_are_encoded_once(max_seq_len: int) -> None:
    model = make(max_seq_len=max_seq_len)
    assert model.encoder is not None and model.decoder is not None
    cross = model.decoder.layers[0].cross_attention
    assert cross is not None
    calls: list[int] = []
    for module in (model.encoder, cross.kv):
        module.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0].shape[0]))
    generate(model, PREFIXES, GenerationSettings(max_new_tokens=14, num_samples=2), sources=SOURCES)
    assert calls == [4, 4]


def test_the_target_side_has_its_own_vocabulary() -> None:
    model, settings = make(target_vocab_size=40), GenerationSettings(max_new_tokens=30, seed=1, logprobs=True)
    found = generate(model, [[39]] * 4, settings, sources=SOURCES)
    assert_same(found, uncached_generate(model, [[39]] * 4, settings, sources=SOURCES))
    assert max(max(completion.ids) for [completion] in found) >= VOCAB


def test_no_sources_no_work() -> None:
    assert generate(make(), [], GenerationSettings(), sources=[]) == []


def test_what_cannot_be_read_is_said() -> None:
    model, settings = make(max_seq_len=6), GenerationSettings(max_new_tokens=2, context="error")
    for engine in (generate, uncached_generate):
        with pytest.raises(InputError, match="source 12 has no tokens"):
            engine(model, [[START]] * 2, settings, sources=[[3], []], first_row=10)
        with pytest.raises(InputError, match="prompt 1 has 7 tokens, but the model's context holds 6"):
            engine(model, [[START] * 7], settings, sources=[[3]])
        with pytest.raises(ValueError, match="2 sources and 1 decoder prefixes"):
            engine(model, [[START]], settings, sources=[[3], [4]])
        with pytest.raises(ValueError, match="needs decoder_input_ids"):
            engine(model, [[START]], settings)


def test_only_an_encoder_decoder_reads_sources() -> None:
    section = {"d_model": 8, "max_seq_len": 8, "vocab_size": VOCAB, "decoder": {"num_layers": 1, "num_heads": 2}}
    with pytest.raises(ValueError, match="an encoder and a decoder"):
        generate(build_model(Model.model_validate(section)), [[START]], GenerationSettings(), sources=[[3]])
