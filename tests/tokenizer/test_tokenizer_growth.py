"""A tokenizer.json that would turn a little text into much is refused before it is given any."""

from __future__ import annotations

import base64
import json
import struct
import time
from typing import Any

import pytest

from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer
from tformer.tokenizer.growth import growth_problem


def replace(pattern: str, content: str, *, regex: bool = False) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex" if regex else "String": pattern}, "content": content}


def sequence(name: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: list(steps)}


def charsmap(*replacements: bytes) -> dict[str, Any]:
    data = struct.pack("<I", 4) + b"\0" * 4 + b"\0".join(replacements)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


BOMBS = {
    "forty doublings": {"normalizer": sequence("normalizers", *[replace("a", "aa")] * 40)},
    "nested sequences": {"normalizer": sequence("normalizers", *[sequence("normalizers", replace("a", "a" * 20))] * 3)},
    "one long replacement": {"normalizer": replace("a", "x" * 100_000)},
    "between all characters": {"normalizer": replace("", "x" * 1000, regex=True)},
    "a decoder that doubles": {"decoder": sequence("decoders", *[replace("a", "aa")] * 20)},
    "a map of characters": {"normalizer": charsmap(b"a", b"x" * 5000)},
    "a template of many texts": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 1000,
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {},
        }
    },
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    tokenizer = train_tokenizer(lambda: iter(["aaa bbb ab"]), TokenizerOptions(model="bpe", vocab_size=20))
    return dict(json.loads(tokenizer.to_json()))


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_file_that_multiplies_text_is_refused_at_once(document: dict[str, Any], bomb: str) -> None:
    began = time.process_time()
    with pytest.raises(InputError, match=r"times as long|repeats a text"):
        Tokenizer.from_json(json.dumps(document | BOMBS[bomb]))
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "harmless",
    [
        {"normalizer": sequence("normalizers", replace(" ", "▁"), replace(" {2,}", "▁", regex=True))},
        {"normalizer": {"type": "Prepend", "prepend": "▁"}},
        {"normalizer": charsmap("ﬁ".encode(), b"fi")},
        {"decoder": sequence("decoders", replace("▁", " "), {"type": "Fuse"})},
        {"normalizer": None, "post_processor": None},
    ],
)
def test_the_steps_of_published_tokenizers_are_within_the_bound(harmless: dict[str, Any]) -> None:
    assert growth_problem(harmless) is None


def test_padding_and_truncation_of_a_file_are_never_applied(document: dict[str, Any]) -> None:
    padding = {
        "strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<unk>",
    }  # fmt: skip
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    text = json.dumps(document | {"padding": padding, "truncation": truncation})
    tokenizer = Tokenizer.from_json(text)
    plain = Tokenizer.from_json(json.dumps(document))
    assert tokenizer.encode("aaa bbb ab") == plain.encode("aaa bbb ab")
    assert tokenizer.reading_special().encode("aaa bbb ab") == plain.encode("aaa bbb ab")
    assert tokenizer.to_json() == text
