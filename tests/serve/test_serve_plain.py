"""`/generate`, `/translate`, `/classify`, `/fill` and `/score`: what the Python API gives."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import tformer
from tests.serve.conftest import Server
from tests.serve.test_serve_completions import frames

Runs = dict[str, Path]
TEXTS = ["abc", "fed a", "h"]


def test_generate_uses_the_models_own_settings(server: Server, runs: Runs) -> None:
    run = tformer.load(runs["gpt"])
    expected = run.generate(TEXTS, seed=4)
    answer = server.ask("/generate", prompt=TEXTS, seed=4)
    assert [each["text"] for each in answer["results"]] == [each.text for each in expected]
    assert [each["samples"][0]["ids"] for each in answer["results"]] == [list(e.completions[0].ids) for e in expected]
    parts = frames(server, "/generate", prompt=TEXTS, seed=4)
    for index, each in enumerate(expected):
        assert "".join(part["text"] for part in parts if part["index"] == index) == each.text


def test_generate_gives_samples_and_log_probabilities(server: Server, runs: Runs) -> None:
    run = tformer.load(runs["gpt"])
    expected = run.generate("abc", seed=4, num_samples=2, logprobs=True)
    [found] = server.ask("/generate", prompt="abc", seed=4, n=2, logprobs=True)["results"]
    assert [each["text"] for each in found["samples"]] == [each.text for each in expected.completions]
    for sample, each in zip(found["samples"], expected.completions, strict=True):
        assert sample["logprobs"] == pytest.approx(each.logprobs, abs=1e-4)


def test_translate_searches_as_the_command(server: Server, runs: Runs) -> None:
    run, options = tformer.load(runs["pairs"]), {"beam_size": 2, "n_best": 2}
    expected = run.translate(TEXTS, **options)
    answer = server.ask("/translate", text=TEXTS, model=runs["pairs"].name, **options)
    for found, each in zip(answer["results"], expected, strict=True):
        assert found["source"] == each.prompt
        assert [one["text"] for one in found["completions"]] == [one.text for one in each.completions]
        assert found["score"] == pytest.approx(each.completions[0].score, abs=1e-4)


def test_classify_gives_label_and_probabilities(server: Server, runs: Runs) -> None:
    expected = tformer.load(runs["labels"]).classify(TEXTS)
    answer = server.ask("/classify", text=TEXTS, model=runs["labels"].name)
    for found, each in zip(answer["results"], expected, strict=True):
        assert set(found) == {"label", "probabilities"} and found["label"] == each.label
        assert found["probabilities"] == pytest.approx(dict(each.probabilities), abs=1e-5)


def test_classify_gives_the_spans_of_models_that_label_tokens(server: Server, runs: Runs) -> None:
    for family, given in (("tags", {"text": TEXTS}), ("answers", {"text": TEXTS, "text2": ["a b", "", "c"]})):
        texts = list(zip(*given.values(), strict=True)) if len(given) > 1 else TEXTS
        expected = tformer.load(runs[family]).classify(texts)
        answer = server.ask("/classify", model=runs[family].name, **given)
        for found, each in zip(answer["results"], expected, strict=True):
            assert set(found) == {"spans"} and len(found["spans"]) == len(each.spans)
            for one, span in zip(found["spans"], each.spans, strict=True):
                assert one == {**span, "probability": pytest.approx(span["probability"], abs=1e-5)}


def test_fill_gives_the_candidates_of_each_mask(server: Server, runs: Runs) -> None:
    text = "ab[MASK] d[MASK]"
    expected = tformer.load(runs["masked"]).fill_masks(text, top_k=3)
    [found] = server.ask("/fill", text=text, model=runs["masked"].name, top_k=3)["results"]
    for mask, candidates in zip(found["masks"], expected, strict=True):
        for one, candidate in zip(mask, candidates, strict=True):
            assert one == asdict(candidate) | {"probability": pytest.approx(candidate.probability, abs=1e-5)}


@pytest.mark.parametrize("family", ["gpt", "pairs"])
def test_score_is_that_of_evaluation(server: Server, runs: Runs, family: str) -> None:
    run, targets = tformer.load(runs[family]), ["de", "", "gh a"]
    expected = run.score(TEXTS, targets)
    answer = server.ask("/score", source=TEXTS, target=targets, model=runs[family].name)
    assert [each["tokens"] for each in answer["results"]] == [each.tokens for each in expected]
    for found, each in zip(answer["results"], expected, strict=True):
        assert found["logprob"] == pytest.approx(each.logprob, abs=1e-4)


def test_models_say_what_they_can_be_asked_for(server: Server, names: dict[str, str]) -> None:
    uses = {each["id"]: each["uses"] for each in server.send("/v1/models").json["data"]}
    assert uses[names["gpt"]] == ["generate", "chat", "score", "embed"]
    assert uses[names["pairs"]] == ["translate", "score", "embed"]
    assert uses[names["masked"]] == ["fill", "embed"] and uses[names["labels"]] == ["classify", "embed"]


def test_many_texts_are_answered_in_order(server: Server, runs: Runs) -> None:
    texts = ["ab"[: 1 + n % 2] + "cdefgh"[n % 6] for n in range(70)]
    answer: Any = server.ask("/classify", text=texts, model=runs["labels"].name)
    expected = tformer.load(runs["labels"]).classify(texts)
    assert [each["label"] for each in answer["results"]] == [each.label for each in expected]
