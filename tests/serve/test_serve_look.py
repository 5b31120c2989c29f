"""Where a token or label comes from, over HTTP: as the commands compute it, from the ids of the page."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.serve.conftest import Server
from tformer.api import Run
from tformer.loading import Loaded, load

TEXT = "abc de fa"


@pytest.fixture(scope="module")
def gpt(runs: dict[str, Path]) -> Run:
    found = load(runs["gpt"])
    return Run(**{each.name: getattr(found, each.name) for each in fields(Loaded)})


def ids_of(server: Server, names: dict[str, str]) -> list[int]:
    tokens = server.ask("/tokenize", model=names["gpt"], text=TEXT)["tokens"]
    assert "".join(token["text"] for token in tokens) == TEXT
    return [token["id"] for token in tokens]


def test_attention_is_the_row_that_predicts_the_token(server: Server, names: dict[str, str], gpt: Run) -> None:
    ids = ids_of(server, names)
    found = server.ask("/look", model=names["gpt"], ids=ids, what="attention")
    taps = [f"decoder.{layer}.self_attention.weights" for layer in range(2)]
    with torch.no_grad():
        expected = gpt.model(input_ids=torch.tensor([ids[:-1]]), taps=taps).taps
    assert np.shape(found["layers"]) == (2, 2, len(ids) - 1) and found["target"] == "a" and found["tokens"][0] == "a"
    for layer, tap in zip(found["layers"], taps, strict=True):
        np.testing.assert_allclose(layer, expected[tap][0, :, -1], atol=1e-4)


def test_lens_and_attribution_are_those_of_the_commands(server: Server, names: dict[str, str], gpt: Run) -> None:
    ids = ids_of(server, names)
    lens = gpt.lens(TEXT, positions=str(len(ids) - 2), top_k=5)
    found = server.ask("/look", model=names["gpt"], ids=ids, what="lens")
    np.testing.assert_allclose(found["probability"], lens.lens.probability[:, 0], atol=1e-4)
    assert [row[0][0] for row in found["top"]] == lens.top[:, 0, 0].tolist() and found["rows"] == ["input", "0", "1"]
    report = gpt.attribute(TEXT, positions=str(len(ids) - 2), methods="occlusion")
    found = server.ask("/look", model=names["gpt"], ids=ids, what="attribution")
    np.testing.assert_allclose(found["scores"], report.scores["occlusion"]["decoder"][0][:-1], atol=1e-3)


def test_a_label_is_explained_by_the_tokens_of_its_text(server: Server, names: dict[str, str]) -> None:
    found = server.ask("/look", model=names["labels"], text="ab cd", what="attribution")
    assert found["target"] in ("bad", "good") and len(found["tokens"]) == len(found["scores"])
    assert found["scores"][0] is None, "special tokens stay"


@pytest.mark.parametrize(
    ("family", "body", "param"),
    [
        ("gpt", {"what": "lens"}, "ids"),
        ("gpt", {"ids": [3], "what": "lens"}, "ids"),
        ("gpt", {"ids": [3, 10_000], "what": "attention"}, "ids"),
        ("gpt", {"ids": [3] * 600, "what": "attention"}, "ids"),
        ("gpt", {"ids": [3] * 49, "what": "attention"}, "ids"),
        ("gpt", {"ids": [3] * 49, "what": "attribution"}, "ids"),
        ("gpt", {"ids": [3, 4], "what": "dreams"}, "what"),
        ("gpt", {"ids": [3, 4], "text": "a", "what": "lens"}, "ids"),
        ("labels", {"text": "a", "what": "attention"}, "what"),
        ("masked", {"ids": [3, 4], "what": "attention"}, "model"),
        ("gpt", {"text": "a", "what": "attribution"}, "model"),
    ],
)
def test_what_cannot_be_looked_at_is_named(
    server: Server, names: dict[str, str], family: str, body: dict[str, Any], param: str
) -> None:
    reply = server.send("/look", {"model": names[family], **body})
    assert reply.status in (400, 422) and reply.error["param"] == param, reply.body


def test_generate_takes_ids_and_gives_alternatives(server: Server, names: dict[str, str]) -> None:
    ids = ids_of(server, names)
    [by_text] = server.ask("/generate", model=names["gpt"], prompt=TEXT, temperature=0)["results"]
    [by_ids] = server.ask("/generate", model=names["gpt"], prompt=ids, temperature=0)["results"]
    assert by_text["samples"][0]["ids"] == by_ids["samples"][0]["ids"]
