"""Beam search against an exhaustive reference, and against force-decoding on real models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.decoding.beam_reference import ScriptedStepper, enumerate_all, penalty, random_rule, slow_beam_search
from tformer.build import build_model
from tformer.decoding.beam_search import beam_search
from tformer.decoding.generate import generate
from tformer.decoding.settings import BeamSettings, GenerationSettings, Hypothesis
from tformer.decoding.stepper import EnsembleStepper, ModelStepper
from tformer.model import Transformer
from tformer.recipe.model import Model

EOS = 1
seeds = st.integers(0, 2**32 - 1)
penalties = pytest.mark.parametrize(
    ("kind", "alpha"),
    [("none", 1.0), *((kind, alpha) for kind in ("avg", "gnmt") for alpha in (-0.7, 0.0, 0.6, 1.0, 2.0))],
)


@st.composite
def searches(draw: st.DrawFn) -> BeamSettings:
    """Settings of all sorts for a vocabulary of at least 6."""
    eos_id, forced_eos = draw(st.sampled_from([EOS, EOS, EOS, None])), draw(st.sampled_from([None, None, EOS, 3]))
    can_end = eos_id is not None and forced_eos in (None, eos_id)
    return BeamSettings(
        beam_size=draw(st.integers(1, 6)),
        length_penalty=draw(st.sampled_from([-1.0, 0.0, 0.6, 1.0, 3.0])),
        length_penalty_type=draw(st.sampled_from(["avg", "gnmt", "none"])),
        max_new_tokens=draw(st.integers(2, 6)),
        min_new_tokens=draw(st.integers(0, 2)),
        eos_id=eos_id,
        stopping=draw(st.sampled_from(["beam", "heuristic", "exhaustive"])),
        forced_eos=forced_eos,
        at_limit=draw(st.sampled_from(["cut", "end"])) if can_end else "cut",
        counted_start=draw(st.sampled_from([0, 0, 1])),
        no_repeat_ngram=draw(st.sampled_from([0, 0, 1, 2, 3])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.8])),
    )


@penalties
@pytest.mark.parametrize("stopping", ["beam", "heuristic", "exhaustive"])
@pytest.mark.parametrize(("tokens", "limit", "beam"), [(3, 4, 24), (4, 3, 36), (5, 4, 320)])
def test_a_beam_wide_enough_is_exhaustive_search(
    kind: Any, alpha: float, stopping: Any, tokens: int, limit: int, beam: int
) -> None:
    """The search keeps all that there is; tokens of probability zero make room for a beam so wide."""
    options = BeamSettings(
        beam_size=beam,
        length_penalty=alpha,
        length_penalty_type=kind,
        max_new_tokens=limit,
        eos_id=EOS,
        stopping=stopping,
    )
    rule = random_rule(tokens, vocab_size=tokens, pad_to=beam)
    (found,) = beam_search(ScriptedStepper([rule]), options)
    expected = enumerate_all(rule, options, limit=limit, tokens=tokens)
    assert [h.score for h in found] == pytest.approx([h.score for h in expected], rel=1e-12)
    assert [h.ids for h in found] == [h.ids for h in expected]
    assert [h.finish_reason for h in found] == [h.finish_reason for h in expected]
    assert len(found) == sum((tokens - 1) ** length for length in range(limit + 1))


@penalties
@pytest.mark.parametrize("minimum", [0, 2])
def test_exhaustive_stopping_finds_the_best_of_everything(kind: Any, alpha: float, minimum: int) -> None:
    """Every prefix of the longest length has a beam (27 of 3 tokens), and the search may stop before that length."""
    options = BeamSettings(
        beam_size=27,
        length_penalty=alpha,
        length_penalty_type=kind,
        max_new_tokens=4,
        min_new_tokens=minimum,
        eos_id=EOS,
        stopping="exhaustive",
    )
    rules = [random_rule(seed, vocab_size=4, pad_to=27) for seed in range(8)]
    for rule, found in zip(rules, beam_search(ScriptedStepper(rules), options), strict=True):
        best = enumerate_all(rule, options, limit=4, tokens=4)[0]
        assert found[0].ids == best.ids
        assert found[0].score == pytest.approx(best.score, rel=1e-12)


@given(
    options=searches(),
    seed=seeds,
    levels=st.sampled_from([None, 2, 5]),
    suppressed=st.sampled_from([(), (0,), (2, 5)]),
    sentences=st.lists(st.tuples(st.integers(1, 7), st.lists(st.integers(0, 5), max_size=4)), min_size=1, max_size=3),
)
def test_the_search_is_the_slow_search_of_each_sentence_alone(
    options: BeamSettings,
    seed: int,
    levels: int | None,
    suppressed: tuple[int, ...],
    sentences: list[tuple[int, list[int]]],
) -> None:
    """Hypotheses, sums and scores to the last bit, ties included, whatever else is in the batch."""
    rules = [random_rule(seed + place, vocab_size=6, levels=levels) for place in range(len(sentences))]
    limits, histories = [limit for limit, _ in sentences], [history for _, history in sentences]
    found = beam_search(ScriptedStepper(rules), options, limits=limits, histories=histories, suppressed=suppressed)
    for rule, limit, history, hypotheses in zip(rules, limits, histories, found, strict=True):
        assert hypotheses == slow_beam_search(rule, options, limit=limit, history=history, suppressed=suppressed)


@given(options=searches(), seed=seeds, order=st.permutations(range(5)))
def test_results_do_not_depend_on_the_batch_or_its_order(options: BeamSettings, seed: int, order: list[int]) -> None:
    rules = [random_rule(seed + place, vocab_size=7) for place in range(5)]
    together = beam_search(ScriptedStepper(rules), options)
    shuffled = beam_search(ScriptedStepper([rules[place] for place in order]), options)
    assert shuffled == [together[place] for place in order]
    for rule, hypotheses in zip(rules, together, strict=True):
        assert beam_search(ScriptedStepper([rule]), options) == [hypotheses]


@given(
    seed=seeds,
    beam=st.integers(1, 4),
    alpha=st.sampled_from([-1.0, 0.0, 0.6, 1.0, 2.0]),
    kind=st.sampled_from(["avg", "gnmt", "none"]),
)
def test_exhaustive_stopping_loses_nothing_and_is_never_worse(seed: int, beam: int, alpha: float, kind: Any) -> None:
    """The `beam_size` best are those of a search that never stops, and the best is no worse than `beam` stopping's."""
    common: dict[str, Any] = {
        "beam_size": beam,
        "length_penalty": alpha,
        "length_penalty_type": kind,
        "max_new_tokens": 8,
        "eos_id": EOS,
    }
    rule = random_rule(seed, vocab_size=5)
    patient = BeamSettings(stopping="exhaustive", **common)
    (exhaustive,) = beam_search(ScriptedStepper([rule]), patient)
    (quick,) = beam_search(ScriptedStepper([rule]), BeamSettings(stopping="beam", **common))
    unending = slow_beam_search(rule, patient, never_stop=True)
    assert [h.score for h in exhaustive[:beam]] == [h.score for h in unending[:beam]]
    assert exhaustive[0].score >= quick[0].score
    assert {h.ids for h in quick if h.finish_reason == "eos"} <= {h.ids for h in exhaustive}


@given(options=searches(), seed=seeds)
def test_sums_are_those_of_the_tokens_and_scores_those_of_the_sums(options: BeamSettings, seed: int) -> None:
    rule = random_rule(seed, vocab_size=8)
    (found,) = beam_search(ScriptedStepper([rule]), options)
    assert found == sorted(found, key=lambda hypothesis: -hypothesis.score)
    assert len({hypothesis.ids for hypothesis in found}) == len(found) >= options.beam_size
    for hypothesis in found:
        steps = [rule(hypothesis.ids[:place])[token] for place, token in enumerate(hypothesis.ids)]
        assert hypothesis.logprobs == tuple(steps)
        assert hypothesis.logprob == pytest.approx(sum(steps), abs=1e-12)
        assert (hypothesis.ids[-1] == options.eos_id) == (hypothesis.finish_reason == "eos")
        assert options.eos_id not in hypothesis.ids[:-1]
        if options.repetition_penalty == 1.0 and (options.forced_eos is None or options.at_limit == "end"):
            assert hypothesis.score == hypothesis.logprob / penalty(options, len(hypothesis.ids))


@given(seed=seeds, limit=st.integers(1, 8), levels=st.sampled_from([None, 3]))
def test_a_beam_of_one_is_greedy(seed: int, limit: int, levels: int | None) -> None:
    rule = random_rule(seed, vocab_size=6, levels=levels)
    ids: tuple[int, ...] = ()
    while len(ids) < limit and EOS not in ids:
        row = rule(ids)
        ids = (*ids, row.index(max(row)))
    options = BeamSettings(beam_size=1, max_new_tokens=limit, eos_id=EOS)
    assert beam_search(ScriptedStepper([rule]), options)[0][0].ids == ids


MODEL_START, MODEL_EOS, MODEL_VOCAB, MODEL_STEPS = 1, 2, 23, 7
SOURCES = [[5, 6, 7, 2], [8, 9, 10, 11, 12, 13, 2], [14, 2], [15, 16, 17, 2]]
PREFIXES = [[MODEL_START], [MODEL_START, 20, 21], [MODEL_START], [MODEL_START, 4]]


def make(*, encoder: bool, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    side: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "feedforward": {"d_ff": 24}, "final_norm": True}
    sides = {"encoder": side, "decoder": side} if encoder else {"decoder": side}
    model = build_model(Model.model_validate({"d_model": 16, "max_seq_len": 24, "vocab_size": MODEL_VOCAB} | sides))
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
    stepper = ModelStepper(model, prefixes, sources=sources, capacity=MODEL_STEPS)
    return beam_search(
        stepper, BeamSettings(**{"eos_id": MODEL_EOS, "max_new_tokens": MODEL_STEPS} | options), histories=prefixes
    )


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
        {"beam_size": 3, "no_repeat_ngram": 2, "repetition_penalty": 1.2, "min_new_tokens": 3},
    ],
)
def test_batch_size_order_and_composition_do_not_matter(translator: Transformer, options: dict[str, Any]) -> None:
    together = translate(translator, [0, 1, 2, 3], **options)
    for rows in ([0], [1], [2], [3], [3, 1, 0, 2], [2, 0]):
        for row, hypotheses in zip(rows, translate(translator, rows, **options), strict=True):
            assert_alike(hypotheses, together[row])


def test_a_beam_of_one_is_greedy_decoding_of_an_encoder_decoder(translator: Transformer) -> None:
    settings = GenerationSettings(max_new_tokens=MODEL_STEPS, temperature=0.0, eos_id=MODEL_EOS)
    greedy = generate(translator, PREFIXES, settings, sources=SOURCES)
    beams = translate(translator, [0, 1, 2, 3], beam_size=1)
    assert [found[0].ids for found in beams] == [found[0].ids for found in greedy]


def test_a_beam_of_one_is_greedy_decoding_of_a_decoder(writer: Transformer) -> None:
    prompts = [[5, 6, 7], [8], [9, 10]]
    settings = GenerationSettings(max_new_tokens=MODEL_STEPS, temperature=0.0, eos_id=MODEL_EOS)
    stepper = ModelStepper(writer, prompts, capacity=MODEL_STEPS)
    beams = beam_search(stepper, BeamSettings(beam_size=1, max_new_tokens=MODEL_STEPS, eos_id=MODEL_EOS))
    assert [found[0].ids for found in beams] == [found[0].ids for found in generate(writer, prompts, settings)]


def test_ids_beyond_the_tokenizer_are_never_chosen(writer: Transformer) -> None:
    stepper = ModelStepper(writer, [[3], [4, 5]], capacity=MODEL_STEPS, vocab_size=6)
    hypotheses = beam_search(stepper, BeamSettings(beam_size=6, max_new_tokens=MODEL_STEPS, eos_id=MODEL_EOS))
    assert all(token < 6 for found in hypotheses for hypothesis in found for token in hypothesis.ids)


def test_an_ensemble_of_one_model_twice_is_that_model(translator: Transformer) -> None:
    steppers = [ModelStepper(translator, PREFIXES, sources=SOURCES, capacity=MODEL_STEPS) for _ in range(2)]
    settings = BeamSettings(beam_size=3, max_new_tokens=MODEL_STEPS, eos_id=MODEL_EOS)
    alone = translate(translator, [0, 1, 2, 3], beam_size=3)
    for found, expected in zip(beam_search(EnsembleStepper(steppers), settings), alone, strict=True):
        assert_alike(found, expected)
