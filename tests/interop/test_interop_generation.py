"""Imported models write what `transformers`' `generate` writes, token for token: greedy, and the n best of a beam of 4.

Both are given the same sources or prompts, of different lengths in one batch, in fp32. `early_stopping` False, True and
"never" are our `heuristic`, `beam` and `exhaustive`. Weights are large, so that no two candidates are as good as tied.

A length of theirs counts a forced first token, ours does not (`new`). Two rules are ours alone: what looks back leaves
the end of sequence in peace, and does not see the token that the decoder starts from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.interop.writing import EOS, FURTHER, MODELS, PAD, Pair, Written, different_texts, make_pair, ours, theirs
from tformer.decoding.settings import BeamSettings, GenerationSettings

BEAM, FIRST = 4, 7
STOPPING = {False: "heuristic", True: "beam", "never": "exhaustive"}
every = pytest.mark.parametrize("pair", MODELS, indirect=True)
with_an_encoder = pytest.mark.parametrize("pair", ["t5", "bart", "marian"], indirect=True)


@pytest.fixture(scope="module")
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp("model"))


def assert_equal(found: Written, expected: Written) -> None:
    """Ids exactly; scores to rounding, where there are any."""
    assert [[ids for ids, _ in ones] for ones in found] == [[ids for ids, _ in ones] for ones in expected]
    for ones, others in zip(found, expected, strict=True):
        assert [score for _, score in ones] == pytest.approx([score for _, score in others], rel=1e-5, abs=1e-4)


def check_beam(
    pair: Pair, settings: BeamSettings, *, early: bool | str = False, new: int = 0, **options: Any
) -> Written:
    """The four best of a beam of 4. `new`: tokens that a forced start adds to their lengths."""
    forced = {key.removesuffix("_token_id"): options[key] for key in options if key.startswith("forced_")}
    expected = theirs(
        pair,
        first=forced.get("forced_bos"),
        num_beams=BEAM,
        num_return_sequences=BEAM,
        early_stopping=early,
        length_penalty=settings.length_penalty,
        max_new_tokens=settings.max_new_tokens + new,
        min_new_tokens=settings.min_new_tokens + new if settings.min_new_tokens else None,
        **options,
    )
    settings = replace(settings, beam_size=BEAM, n_best=BEAM, stopping=STOPPING[early], eos_id=EOS)
    texts = [different_texts(ones, settings.ends) for ones in expected]
    found = ours(pair, settings, **forced)
    # Of one text with several ends ours lists the best, and more texts for it.
    assert_equal([ones[: len(others)] for ones, others in zip(found, texts, strict=True)], texts)
    return expected


@pytest.mark.parametrize("early", STOPPING, ids=STOPPING.get)
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0, -1.0])
@every
def test_beams_with_every_stopping_rule_and_length_penalty(pair: Pair, early: bool | str, alpha: float) -> None:
    found = check_beam(pair, BeamSettings(length_penalty=alpha, max_new_tokens=12), early=early)
    assert len({len(ids) for ones in found for ids, _ in ones}) > 1 or alpha == 2.0


@pytest.mark.parametrize("early", STOPPING, ids=STOPPING.get)
@pytest.mark.parametrize(("least", "most"), [(0, 1), (3, 3), (4, 7), (6, 16)])
@every
def test_beams_of_least_and_greatest_lengths(pair: Pair, early: bool | str, least: int, most: int) -> None:
    found = check_beam(pair, BeamSettings(min_new_tokens=least, max_new_tokens=most), early=early)
    assert all(EOS not in ids[:least] and len(ids) <= most for ones in found for ids, _ in ones)


@pytest.mark.parametrize("early", STOPPING, ids=STOPPING.get)
@pytest.mark.parametrize("least", [0, 3])
@every
def test_beams_with_several_ends(pair: Pair, early: bool | str, least: int) -> None:
    """The other is what greedy search writes in the middle of a text. Texts that differ in their ends are one to us."""
    [(ids, _)] = theirs(pair, num_beams=1, max_new_tokens=4, min_new_tokens=4)[1]
    settings = BeamSettings(max_new_tokens=9, min_new_tokens=least, stop_tokens=(ids[2],))
    check_beam(pair, settings, early=early, eos_token_id=[EOS, ids[2]])


@pytest.mark.parametrize("n", [2, 3])
@every
def test_beams_without_repeated_ngrams(pair: Pair, n: int) -> None:
    check_beam(pair, BeamSettings(no_repeat_ngram=n, max_new_tokens=12), no_repeat_ngram_size=n)


@pytest.mark.parametrize("penalty", [1.3, 0.8])
@every
def test_beams_with_a_repetition_penalty(pair: Pair, penalty: float) -> None:
    """Theirs has seen the start token: it is ruled out here, or not offered where it is the end (BART)."""
    least = 12 if pair.start == EOS else 0
    settings = BeamSettings(repetition_penalty=penalty, min_new_tokens=least, max_new_tokens=12, suppress_tokens=(PAD,))
    check_beam(pair, settings, repetition_penalty=penalty, bad_words_ids=[[PAD]])


FORCED = [(early, alpha) for early in STOPPING for alpha in (0.6, 2.0, -1.0)]


@pytest.mark.parametrize(("early", "alpha"), FORCED)
@every
def test_beams_with_a_forced_end(pair: Pair, early: bool | str, alpha: float) -> None:
    """It costs nothing."""
    settings = BeamSettings(length_penalty=alpha, max_new_tokens=8)
    found = check_beam(pair, settings, early=early, forced_eos_token_id=EOS)
    assert all(ids[-1] == EOS for ones in found for ids, _ in ones)


@pytest.mark.parametrize(("early", "alpha"), FORCED)
@with_an_encoder
def test_beams_with_a_forced_start_and_end(pair: Pair, early: bool | str, alpha: float) -> None:
    """A forced first token counts in the lengths of the penalty, and nothing in the sum."""
    settings = BeamSettings(length_penalty=alpha, min_new_tokens=1, max_new_tokens=8)
    check_beam(pair, settings, early=early, new=1, forced_bos_token_id=FIRST, forced_eos_token_id=EOS)


@every
def test_beams_that_rule_tokens_out(pair: Pair) -> None:
    """Those with which they would begin."""
    likely = sorted({ids[0] for [(ids, _), *_] in theirs(pair, num_beams=1, max_new_tokens=6)} - {EOS})
    settings = BeamSettings(max_new_tokens=6, suppress_tokens=tuple(likely))
    found = check_beam(pair, settings, suppress_tokens=likely)
    assert not {token for ones in found for ids, _ in ones for token in ids} & set(likely)


RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "least": ({"min_new_tokens": 5}, {"min_new_tokens": 5}),
    "ngrams": ({"no_repeat_ngram": 2}, {"no_repeat_ngram_size": 2}),
    "ruled out": ({"suppress_tokens": (17, 33, 35)}, {"suppress_tokens": [17, 33, 35]}),
}


def check_greedy(pair: Pair, engines: list[Any], *, forced: dict[str, int] | None = None, **options: Any) -> None:
    forced = forced or {}
    options |= {f"{name}_token_id": token for name, token in forced.items()}
    expected = theirs(pair, first=forced.get("forced_bos"), num_beams=1, **options)
    for settings in engines:
        found = ours(pair, settings, **forced)
        assert [[ids for ids, _ in ones] for ones in found] == [[ids for ids, _ in ones] for ones in expected]
        assert all(ids[-1] == EOS for [(ids, _)] in found) or not forced


@pytest.mark.parametrize("rule", RULES)
@every
def test_greedy_by_the_sampler_and_by_a_beam_of_one(pair: Pair, rule: str) -> None:
    settings, options = RULES[rule]
    sampler = GenerationSettings(max_new_tokens=12, temperature=0.0, **settings)
    check_greedy(
        pair, [sampler, BeamSettings(max_new_tokens=12, beam_size=1, **settings)], max_new_tokens=12, **options
    )


@every
def test_greedy_with_a_repetition_penalty(pair: Pair) -> None:
    """By the sampler: without a beam, theirs penalizes logits, not log-probabilities."""
    rules: dict[str, Any] = {"repetition_penalty": 1.3, "min_new_tokens": 12 if pair.start == EOS else 0}
    settings = GenerationSettings(max_new_tokens=12, temperature=0.0, suppress_tokens=(PAD,), **rules)
    check_greedy(pair, [settings], max_new_tokens=12, suppress_tokens=[PAD], **rules)


@every
def test_greedy_with_a_forced_end(pair: Pair) -> None:
    engines = [GenerationSettings(max_new_tokens=5, temperature=0.0), BeamSettings(max_new_tokens=5, beam_size=1)]
    check_greedy(pair, engines, forced={"forced_eos": EOS}, max_new_tokens=5)


@with_an_encoder
def test_greedy_with_a_forced_start_and_end(pair: Pair) -> None:
    engines = [GenerationSettings(max_new_tokens=5, temperature=0.0), BeamSettings(max_new_tokens=5, beam_size=1)]
    check_greedy(pair, engines, forced={"forced_eos": EOS, "forced_bos": FIRST}, max_new_tokens=6)


@pytest.mark.parametrize("pair", ["led"], indirect=True)
def test_a_decoder_with_fewer_positions_than_its_encoder_writes_no_more_tokens_than_those(pair: Pair) -> None:
    for settings in (
        GenerationSettings(max_new_tokens=50, min_new_tokens=45, temperature=0.0),
        BeamSettings(max_new_tokens=50, min_new_tokens=45),
    ):
        assert {len(ids) for ones in ours(pair, settings) for ids, _ in ones} == {pair.ours.longest_target} == {40}


@pytest.mark.parametrize("pair", FURTHER, indirect=True)
def test_relatives_write_the_same_greedily_by_beams_and_from_a_forced_token(pair: Pair) -> None:
    """The forced token is the language of M2M100 and NLLB."""
    engines = [GenerationSettings(max_new_tokens=12, temperature=0.0), BeamSettings(max_new_tokens=12, beam_size=1)]
    check_greedy(pair, engines, max_new_tokens=12)
    check_greedy(pair, engines, forced={"forced_bos": FIRST, "forced_eos": EOS}, max_new_tokens=13)
    for early in STOPPING:
        found = check_beam(pair, BeamSettings(max_new_tokens=12), early=early)
        assert len({ids for ones in found for ids, _ in ones}) > 5
    check_beam(pair, BeamSettings(max_new_tokens=8), new=1, forced_bos_token_id=FIRST, forced_eos_token_id=EOS)
