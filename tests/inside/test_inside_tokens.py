"""Losses, ranks and alternatives of tokens against formulas; segments of two tokenizations; calibration."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.viz.attention_models import DECODER, ENCODER, IMAGES, SEQ2SEQ, TEXT, load_of
from tests.viz.token_reports import token_report
from tformer.data.batching.batch import Batch
from tformer.data.shards.corpus import TokenCorpus
from tformer.decoding.score import score_targets
from tformer.evaluation.lm import evaluate_lm, pseudo_perplexity
from tformer.inside.options import TokenOptions
from tformer.inside.tokens import TokenReport, read_tokens, segments
from tformer.loading import Loaded
from tformer.nn.losses import IGNORED_LABEL
from tformer.support.errors import InputError
from tformer.tasks.text import Text
from tformer.workers.work import QUIET
from tformer.workflows.tokens import score_tokens

SHORT = "the brown dog runs"


def report_of(loaded: Loaded, text: str = SHORT, **options: Any) -> TokenReport:
    return score_tokens(loaded, TokenOptions(text=text, **options), QUIET)


def logits_of(loaded: Loaded, **inputs: list[int]) -> torch.Tensor:
    """Logits [T, V] of one example."""
    with torch.inference_mode():
        return loaded.model(**{name: torch.tensor([ids]) for name, ids in inputs.items()}).logits[0].double()


def check_place(report: TokenReport, place: int, logits_V: torch.Tensor) -> None:
    """Loss, rank and alternatives of a token by their definitions."""
    token, shares = int(report.ids[place]), logits_V.softmax(-1)
    assert report.bits[place] == pytest.approx(-math.log2(shares[token]), abs=1e-5)
    assert report.rank[place] == int((logits_V > logits_V[token]).sum())
    best = sorted(range(len(shares)), key=lambda n: -float(shares[n]))[: report.top_ids.shape[1]]
    np.testing.assert_allclose(report.top_probabilities[place], shares[best], atol=1e-6)
    assert report.top_ids[place].tolist() == best


def test_a_decoder_predicts_each_token_from_those_before_it() -> None:
    loaded = load_of(DECODER)
    report = report_of(loaded, top_k=7)
    ids = loaded.encode(SHORT)
    assert report.ids.tolist() == ids and report.top_ids.shape == (len(ids), 7)
    logits = logits_of(loaded, input_ids=ids)
    for place in range(1, len(ids)):
        check_place(report, place, logits[place - 1])
    assert np.isnan(report.bits[0]) and report.rank[0] == -1 and report.predicted.tolist() == list(range(1, len(ids)))
    assert "".join(report.pieces) == report.text == SHORT


def test_a_long_text_is_read_in_windows_that_overlap_by_half() -> None:
    loaded = load_of(DECODER)
    text = f"{TEXT}. " * 4
    report = report_of(loaded, text)
    ids, length = loaded.encode(text), loaded.recipe.seq_len
    assert len(ids) > 3 * length and report.ids.tolist() == ids and len(report.predicted) == len(ids) - 1
    corpus = TokenCorpus.from_ids(ids, num_bytes=len(text))
    expected = evaluate_lm(
        loaded.model, corpus, Text().objective(loaded), seq_len=length, batch_size=2, stride=length // 2
    )
    assert report.bits[1:].mean() * math.log(2) == pytest.approx(expected["loss"], abs=1e-5)
    assert report.summary["accuracy"] == pytest.approx(expected["accuracy"])
    start = length // 2  # of the second window
    check_place(report, start + length, logits_of(loaded, input_ids=ids[start : start + length])[-1])


def test_an_encoder_decoder_predicts_the_target_and_its_end() -> None:
    loaded = load_of(SEQ2SEQ)
    report = report_of(loaded, TEXT, target=SHORT)
    read, labels = loaded.encode_target(SHORT)
    assert report.ids.tolist() == [read[0], *labels] and report.source == TEXT and report.text == SHORT
    source = loaded.encode(TEXT)
    [expected] = score_targets(loaded.model, [source], [labels], start_ids=read[:1])
    np.testing.assert_allclose(report.bits[1:], -np.array(expected.logprobs) / math.log(2), atol=1e-5)
    logits = logits_of(loaded, input_ids=source, decoder_input_ids=read)
    for place in range(1, len(report.ids)):
        check_place(report, place, logits[place - 1])
    assert report.spans[0] is None and report.spans[-1] is None


def test_without_a_target_the_model_translates() -> None:
    report = report_of(load_of(SEQ2SEQ), SHORT)
    assert report.text is not None and report.source == SHORT
    assert report.notes == ("the target is the model's own translation by beam search",)


def test_a_masked_model_predicts_each_token_alone_masked() -> None:
    loaded = load_of(ENCODER)
    report = report_of(loaded)
    ids, special = loaded.encode(SHORT), loaded.text_tokenizer.special
    assert report.ids.tolist() == ids and special.mask is not None
    assert np.flatnonzero(np.isnan(report.bits)).tolist() == [0, len(ids) - 1]  # [CLS] and [SEP]
    for place in report.predicted.tolist():
        masked = [*ids[:place], special.mask, *ids[place + 1 :]]
        check_place(report, place, logits_of(loaded, input_ids=masked)[place])
    expected = pseudo_perplexity(loaded.model, [np.array(ids)], special)
    assert report.summary["perplexity"] == pytest.approx(expected["pseudo_perplexity"], rel=1e-5)


@pytest.mark.parametrize("left", [False, True])
def test_padding_is_left_out(left: bool) -> None:
    loaded = load_of(DECODER)
    rows = [loaded.encode(text) for text in (TEXT, SHORT)]
    alone = [report_of(loaded, text) for text in (TEXT, SHORT)]
    width = len(rows[0])
    ids, labels = torch.zeros(2, width, dtype=torch.long), torch.full((2, width), IGNORED_LABEL)
    mask, places = torch.zeros(2, width, dtype=torch.bool), torch.zeros(2, width, dtype=torch.long)
    for number, row in enumerate(rows):
        start = width - len(row) if left else 0
        part = slice(start, start + len(row))
        ids[number, part], mask[number, part], places[number, part] = torch.tensor(row), True, torch.arange(len(row))
        labels[number, start : start + len(row) - 1] = torch.tensor(row[1:])
    batch = Batch(ids, labels=labels, attention_mask=mask, position_ids=places)
    found = read_tokens(loaded, [batch], top_k=5)
    assert found["ids"].tolist() == [*rows[0], *rows[1]]
    assert found["example"].tolist() == [0] * len(rows[0]) + [1] * len(rows[1])
    np.testing.assert_allclose(found["bits"], np.concatenate([each.bits for each in alone]), atol=1e-4)


def test_labels_that_are_ignored_have_no_loss_and_stay_in_the_context() -> None:
    loaded = load_of(DECODER)
    ids = loaded.encode(SHORT)
    labels = torch.tensor([[*ids[1:-1], IGNORED_LABEL][: len(ids) - 1]])
    labels[0, :3] = IGNORED_LABEL
    found = read_tokens(loaded, [Batch(torch.tensor([ids[:-1]]), labels=labels)], top_k=5)
    assert found["ids"].tolist() == ids[:-1]
    assert np.flatnonzero(found["rank"] >= 0).tolist() == list(range(4, len(ids) - 1))


def test_words_of_wordpieces_stand_apart_in_a_context() -> None:
    report = report_of(load_of(ENCODER), "the unbelievable dog")
    place = report.tokens.index("the")
    assert report.context(place)[1].startswith("un") and "##" not in report.context(place)[1]
    assert report.pieces[place] == "the" and "".join(report.pieces[1:-1]) == "the unbelievable dog"


def test_further_bytes_of_a_character_are_dots() -> None:
    report = token_report(["a", "Ã", "©", "b"], text="aéb", spans=((0, 1), (1, 2), (1, 2), (2, 3)))
    assert report.pieces == ["a", "é", "·", "b"]


# --- calibration ------------------------------------------------------------------------------------------------------


def test_calibration_is_the_share_that_is_right_in_each_of_15_bins() -> None:
    """Guo et al. (1706.04599), equation 3: ECE = sum over bins of n/N |accuracy - confidence|."""
    sure = np.array([0.99, 0.05, 0.06, 0.5, 0.52, 0.9])
    right = np.array([False, True, False, True, True, False])
    report = token_report(
        ["a", "b", "c", "d", "e", "f"],
        rank=np.where(right, 0, 4),
        bits=np.ones(6),
        top_probabilities=sure[:, None],
        top_ids=np.zeros((6, 1), dtype=int),
    )
    bins: dict[int, list[int]] = {}
    for n, value in enumerate(sure):
        bins.setdefault(math.ceil(value * 15) - 1, []).append(n)
    gaps = [abs(right[of].mean() - sure[of].mean()) * len(of) / 6 for of in bins.values()]
    assert len(bins) == 4 and report.summary["ece"] == pytest.approx(sum(gaps))
    order = [bins[number] for number in sorted(bins)]
    assert report.calibration["tokens"] == [len(of) for of in order]
    np.testing.assert_allclose(report.calibration["confidence"], [sure[of].mean() for of in order])
    np.testing.assert_allclose(report.calibration["accuracy"], [right[of].mean() for of in order])


def test_the_hardest_tokens_come_first_with_their_context() -> None:
    report = token_report(list("abcdef"), bits=np.array([np.nan, 3.0, 1.0, 9.0, 9.0, 2.0]))
    assert report.hardest(3) == [3, 4, 1] and len(report.hardest(99)) == 5
    assert report.context(3) == ("abc", "ef")
    two = replace(report, example=np.array([0, 0, 0, 1, 1, 1]))
    assert two.context(3) == ("", "ef") and two.context(2) == ("ab", "")


# --- two tokenizations ------------------------------------------------------------------------------------------------


def test_segments_are_the_shortest_pieces_of_whole_tokens_of_both() -> None:
    one = token_report(["The", " ca", "ts", " sat"], bits=np.array([np.nan, 1.0, 2.0, 4.0]))
    other = token_report(["The", " cat", "s", " s", "at"], bits=np.array([np.nan, 8.0, 16.0, 32.0, 64.0]))
    found, (of_one, of_other) = segments(one, other)
    numbers = [(each["start"], each["end"], each["bits"][0], each["bits"][1]) for each in found[1:]]
    assert numbers == [(3, 8, 3.0, 24.0), (8, 12, 4.0, 96.0)]
    assert np.isnan(found[0]["bits"]).all() and (of_one, of_other) == ([0, 1, 1, 2], [0, 1, 1, 2, 2])


def test_white_space_belongs_to_what_follows_it_in_every_tokenization() -> None:
    with_space = token_report(["a", " bc", " d"])
    apart = token_report(["a", " ", "b", "c", " ", "d"])
    without = token_report(["a", "bc", "d"], text="a bc d", spans=((0, 1), (2, 4), (5, 6)))
    for other in (apart, without):
        found, numbers = segments(with_space, other)
        assert [(each["start"], each["end"]) for each in found] == [(0, 1), (1, 4), (4, 6)] and numbers[0] == [0, 1, 2]
    assert segments(with_space, apart)[1][1] == [0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("seed", range(5))
def test_bits_of_segments_add_up_to_those_of_the_tokens(seed: int) -> None:
    draw, text = np.random.default_rng(seed), "the  brown dog runs\nacross é "
    reports = []
    for number in range(2):
        cuts = sorted({0, len(text), *draw.integers(1, len(text), 9).tolist()})
        pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
        reports.append(token_report(pieces, bits=draw.uniform(0, 9, len(pieces)), rank=np.ones(len(pieces), dtype=int)))
        assert reports[number].text == text
    found, _ = segments(*reports)
    assert [found[0]["start"], found[-1]["end"]] == [0, len(text)]
    assert all(a["end"] == b["start"] for a, b in itertools.pairwise(found))
    for number, report in enumerate(reports):
        assert sum(each["bits"][number] for each in found) == pytest.approx(report.bits.sum())


def test_tokens_of_the_template_are_of_no_segment() -> None:
    masked = report_of(load_of(ENCODER))
    _, (of_masked, of_decoder) = segments(masked, report_of(load_of(DECODER)))
    assert of_masked[0] == of_masked[-1] == -1 and -1 not in of_masked[1:-1] + of_decoder
    with pytest.raises(InputError, match="two reports on the same text"):
        segments(masked, report_of(load_of(DECODER), TEXT))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "options", "words"),
    [
        (DECODER, {"text": ""}, "there is nothing to predict"),
        (ENCODER, {"text": ""}, "there is nothing to predict"),
        (DECODER, {"text": SHORT, "target": "x"}, "target: runs/tiny.* is no encoder-decoder"),
        (ENCODER, {"text": SHORT, "prefix": "x"}, "prefix: runs/tiny.* is no encoder-decoder"),
        (ENCODER, {"text": f"{TEXT} " * 3}, "the text has .* tokens, but the model reads at most 32"),
        (SEQ2SEQ, {"text": f"{TEXT} " * 3}, "the source has .* tokens, but the model reads at most 48"),
        (SEQ2SEQ, {"text": SHORT, "target": f"{TEXT} " * 3}, "the target has .* tokens, but"),
        (IMAGES, {"text": SHORT}, "has no head this command can use: found classifier"),
        (ENCODER.replace("masked_lm", "replaced_token"), {"text": SHORT}, "expected lm or masked_lm"),
    ],
)
def test_texts_and_models_that_cannot_be_read_are_refused(recipe: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        score_tokens(load_of(recipe), TokenOptions(**options), QUIET)
