"""Beam search over the real model: beam 1 is greedy, sums are force-decoded sums, neighbours do not matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tformer.build import build_model
from tformer.decoding.beam import beam_search
from tformer.decoding.beam_settings import BeamSettings, Hypothesis
from tformer.decoding.ensemble import EnsembleStepper
from tformer.decoding.generate import generate
from tformer.decoding.settings import GenerationSettings
from tformer.decoding.stepper import DecoderStepper, EncoderDecoderStepper
from tformer.model import Transformer
from tformer.recipe.model import Model

START, EOS, VOCAB, STEPS = 1, 2, 23, 7
SOURCES = [[5, 6, 7, 2], [8, 9, 10, 11, 12, 13, 2], [14, 2], [15, 16, 17, 2]]
PREFIXES = [[START], [START, 20, 21], [START], [START, 4]]


def make(*, encoder: bool, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    side: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "feedforward": {"d_ff": 24}, "final_norm": True}
    sides = {"encoder": side, "decoder": side} if encoder else {"decoder": side}
    model = build_model(Model.model_validate({"d_model": 16, "max_seq_len": 24, "vocab_size": VOCAB} | sides))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return model.eval()


@pytest.fixture(scope="module")
def translator() -> Transformer:
    return make(encoder=True)


@pytest.fixture(scope="module")
def writer() -> Transformer:
    return make(encoder=False)


def translate(model: Transformer, rows: list[int], **options: Any) -> list[list[Hypothesis]]:
    sources, prefixes = [SOURCES[row] for row in rows], [PREFIXES[row] for row in rows]
    stepper = EncoderDecoderStepper(model, sources, prefixes, capacity=STEPS)
    return beam_search(stepper, BeamSettings(**{"eos_id": EOS, "max_new_tokens": STEPS} | options), histories=prefixes)


def assert_alike(found: list[Hypothesis], expected: list[Hypothesis]) -> None:
    assert [(h.ids, h.finish_reason) for h in found] == [(h.ids, h.finish_reason) for h in expected]
    assert [h.score for h in found] == pytest.approx([h.score for h in expected], abs=1e-4)


@pytest.mark.parametrize("stopping", ["beam", "exhaustive"])
def test_sums_are_force_decoded_sums(translator: Transformer, stopping: str) -> None:
    for row, hypotheses in enumerate(translate(translator, [0, 1, 2, 3], beam_size=4, stopping=stopping)):
        for hypothesis in hypotheses:
            ids = [*PREFIXES[row], *hypothesis.ids]
            with torch.inference_mode():
                logits = translator(torch.tensor([SOURCES[row]]), decoder_input_ids=torch.tensor([ids[:-1]])).logits[0]
            logprobs = logits.log_softmax(-1)[-len(hypothesis.ids) :]
            expected = logprobs[torch.arange(len(hypothesis.ids)), list(hypothesis.ids)].sum()
            assert hypothesis.logprob == pytest.approx(float(expected), abs=1e-4)
            assert hypothesis.score == pytest.approx(hypothesis.logprob / len(hypothesis.ids))


@pytest.mark.parametrize(
    "options",
    [
        {"beam_size": 1},
        {"beam_size": 4, "stopping": "exhaustive"},
        {"beam_size": 4, "beam_groups": 2, "diversity_penalty": 0.5},
        {"beam_size": 3, "no_repeat_ngram": 2, "repetition_penalty": 1.2, "min_new_tokens": 3},
    ],
)
def test_batch_size_order_and_composition_do_not_matter(translator: Transformer, options: dict[str, Any]) -> None:
    together = translate(translator, [0, 1, 2, 3], **options)
    for rows in ([0], [1], [2], [3], [3, 1, 0, 2], [2, 0]):
        for row, hypotheses in zip(rows, translate(translator, rows, **options), strict=True):
            assert_alike(hypotheses, together[row])


def test_a_beam_of_one_is_greedy_decoding_of_an_encoder_decoder(translator: Transformer) -> None:
    settings = GenerationSettings(max_new_tokens=STEPS, temperature=0.0, eos_id=EOS)
    greedy = generate(translator, PREFIXES, settings, sources=SOURCES)
    beams = translate(translator, [0, 1, 2, 3], beam_size=1)
    assert [found[0].ids for found in beams] == [found[0].ids for found in greedy]


def test_a_beam_of_one_is_greedy_decoding_of_a_decoder(writer: Transformer) -> None:
    prompts = [[5, 6, 7], [8], [9, 10]]
    settings = GenerationSettings(max_new_tokens=STEPS, temperature=0.0, eos_id=EOS)
    stepper = DecoderStepper(writer, prompts, capacity=STEPS)
    beams = beam_search(stepper, BeamSettings(beam_size=1, max_new_tokens=STEPS, eos_id=EOS))
    assert [found[0].ids for found in beams] == [found[0].ids for found in generate(writer, prompts, settings)]


def test_ids_beyond_the_tokenizer_are_never_chosen(writer: Transformer) -> None:
    stepper = DecoderStepper(writer, [[3], [4, 5]], capacity=STEPS, vocab_size=6)
    hypotheses = beam_search(stepper, BeamSettings(beam_size=6, max_new_tokens=STEPS, eos_id=EOS))
    assert all(token < 6 for found in hypotheses for hypothesis in found for token in hypothesis.ids)


def test_an_ensemble_of_one_model_twice_is_that_model(translator: Transformer) -> None:
    steppers = [EncoderDecoderStepper(translator, SOURCES, PREFIXES, capacity=STEPS) for _ in range(2)]
    settings = BeamSettings(beam_size=3, max_new_tokens=STEPS, eos_id=EOS)
    alone = translate(translator, [0, 1, 2, 3], beam_size=3)
    for found, expected in zip(beam_search(EnsembleStepper(steppers), settings), alone, strict=True):
        assert_alike(found, expected)
