"""Tokenizer files (also those that would turn a little text into much), decoding, and tokens that begin a word."""

from __future__ import annotations

import base64
import json
import os
import random
import stat
import struct
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers

from tformer.interop.tokenizer_files import read_tokenizer
from tformer.support.errors import InputError, StorageError
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer
from tformer.tokenizer import tokenizer as files
from tformer.tokenizer.decoding import STARTS_WORD, byte_level_alphabet, concatenating_reader, word_starts
from tformer.tokenizer.growth import growth_problem

BAD = {
    "empty": "",
    "no JSON": "hello",
    "a list": "[]",
    "null": "null",
    "no model": "{}",
    "a recipe": '{"model": "gpt"}',
    "unknown model": '{"version": "1.0", "model": {"type": "Magic", "vocab": {}}}',
    "merge of unknown": '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}',
    "negative id": '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "a"}}',
    "shared id": '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 0}, "unk_token": "a"}}',
    "huge id": '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 4294967295}, "unk_token": "a"}}',
    "empty vocabulary": '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {}, "unk_token": "a"}}',
    "deep": '{"model": ' + "[" * 100_000,
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_or_foreign_file_is_an_input_error(tmp_path, name):
    path = tmp_path / "tokenizer.json"
    path.write_text(BAD[name])
    with pytest.raises(InputError, match=r"tokenizer\.json is not a usable tokenizer\.json") as caught:
        Tokenizer.load(path)
    assert str(path) in caught.value.message and caught.value.hint and caught.value.exit_code == 2


def test_a_file_truncated_anywhere_is_an_input_error(make, tmp_path):
    content = make("bpe").to_json().encode()
    path = tmp_path / "tokenizer.json"
    for size in range(0, len(content) - 1, max(1, len(content) // 60)):
        path.write_bytes(content[:size])
        with pytest.raises(InputError):
            Tokenizer.load(path)


@pytest.mark.parametrize("model", ["byte-bpe", "unigram", "wordpiece", "word"])
def test_a_file_with_random_damage_is_refused_or_works(make, model):
    """Whatever passes as a tokenizer can be used: no hole is left to be fallen into later."""
    draw = random.Random(0)
    content = make(model, template="bert").to_json()
    for _ in range(150):
        place, length = draw.randrange(len(content)), draw.choice([0, 1, 1, 5, 20])
        damaged = content[:place] + draw.choice(["", "7", "x", '"', "]"]) + content[place + length :]
        try:
            tokenizer = Tokenizer.from_json(damaged)
        except InputError:
            continue
        tokenizer.decode(tokenizer.encode("hello [CLS] low \u2603", template=True))
        tokenizer.encode_pair("low", "fox")


def test_a_template_without_its_tokens_is_refused(make):
    document = json.loads(make("wordpiece", template="bert").to_json())
    document["post_processor"]["special_tokens"] = {}
    with pytest.raises(InputError, match="not a usable"):
        Tokenizer.from_json(json.dumps(document))


def test_missing_binary_and_directory(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        Tokenizer.load(tmp_path / "none.json")
    with pytest.raises(InputError):
        Tokenizer.load(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"\xc0\x04\xff\xfe")
    with pytest.raises(InputError, match="byte 0 is not UTF-8"):
        Tokenizer.load(tmp_path / "model.bin")


OTHERS = {
    "gguf": (b"GGUF\3\0\0\0" + bytes(16), "a GGUF model", "tformer import {path} --out RUN"),
    "sentencepiece": (
        b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\2",
        "a SentencePiece model",
        "tformer tokenize {path.parent} ",
    ),
    "tekken": (
        b'{"config": {"pattern": "x", "default_vocab_size": 9}}',
        "tekken.json",
        "AutoTokenizer.from_pretrained",
    ),
    "tiktoken": (b"IQ== 0\nIg== 1\n", "tiktoken", "tformer train-tokenizer"),
    "pickle": (b"\x80\4\xff", "a pickle", "tformer train-tokenizer"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_kind_of_file_is_told_by_its_first_bytes(kind, tmp_path):
    content, name, command = OTHERS[kind]
    path = tmp_path / "vocabulary"
    path.write_bytes(content)
    for read in (Tokenizer.load, lambda path: read_tokenizer(tmp_path, {}, path=path)):
        with pytest.raises(InputError) as error:
            read(path)
        assert str(path) in error.value.message and name in error.value.message
        assert command.format(path=path) in error.value.hint


def test_a_foreign_file_does_not_truncate_or_pad():
    rust = RustTokenizer(models.WordLevel({"a": 0, "[UNK]": 7, "[PAD]": 2}, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.enable_truncation(max_length=2)
    rust.enable_padding(length=8, pad_id=2, pad_token="[PAD]")
    tokenizer = Tokenizer.from_json(rust.to_str())
    assert tokenizer.encode("a a a x") == [0, 0, 0, 7]
    assert tokenizer.vocab_size == 8  # the highest id counts, holes or not: an embedding needs that many rows
    assert tokenizer.kind == "word"


def test_save_and_load_are_the_identity(make, tmp_path):
    for model in ("byte-bpe", "unigram", "char"):
        tokenizer = make(model)
        path = tokenizer.save(tmp_path / model / "tokenizer.json")
        again = Tokenizer.load(path)
        assert again.to_json() == tokenizer.to_json()
        assert again.sha256 == tokenizer.sha256


def test_the_hash_ignores_layout_and_sees_content(make):
    tokenizer = make("byte-bpe")
    compact = json.dumps(json.loads(tokenizer.to_json()))
    assert compact != tokenizer.to_json()
    assert Tokenizer.from_json(compact).sha256 == tokenizer.sha256
    assert make("byte-bpe", lowercase=True).sha256 != tokenizer.sha256


def test_a_different_file_is_kept_unless_forced(make, tmp_path):
    path = tmp_path / "tokenizer.json"
    make("byte-bpe").save(path)
    make("byte-bpe").save(path)  # the same again is no overwriting
    before = path.read_bytes()
    with pytest.raises(InputError, match="already exists and differs") as caught:
        make("char").save(path)
    assert "--force" in (caught.value.hint or "")
    assert path.read_bytes() == before
    make("char").save(path, force=True)
    assert Tokenizer.load(path).kind == "char"
    with pytest.raises(InputError, match="is a directory"):
        make("char").save(tmp_path)


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_refused_write_leaves_everything_as_it_was(make, tmp_path, monkeypatch, call):
    path = tmp_path / "tokenizer.json"
    make("byte-bpe").save(path)
    before = path.read_bytes()

    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, call, refuse)
    with pytest.raises(StorageError, match=r"No space left on device \([\d,]+ bytes needed\)") as caught:
        make("char").save(path, force=True)
    assert caught.value.exit_code == 3
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["tokenizer.json"]


def test_the_file_is_synced_before_it_gets_its_name(make, tmp_path, monkeypatch):
    calls: list[str] = []
    for name in ("fsync", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(files.os, name, lambda *a, name=name, real=real: (calls.append(name), real(*a))[1])
    make("char").save(tmp_path / "tokenizer.json")
    assert calls == ["fsync", "rename", "fsync"]  # the file, the name, the folder


def test_umask_is_honoured_and_links_are_followed(make, tmp_path):
    old = os.umask(0o022)
    try:
        (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
        make("char").save(tmp_path / "link.json")
    finally:
        os.umask(old)
    assert (tmp_path / "link.json").is_symlink()
    assert stat.S_IMODE((tmp_path / "real.json").stat().st_mode) == 0o644


TEXT = "The low dog, lower; newest 日本語 👩‍👩‍👧 é!\n"


@cache
def _tokenizer(model: str) -> Tokenizer:
    options = TokenizerOptions(model=model, vocab_size=340, byte_fallback=model in ("bpe", "unigram"))
    return train_tokenizer(lambda: iter([TEXT * 30]), options)


def _stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(i) for i in ids), stream.finish()]


MODELS = ["byte-bpe", "bpe", "wordpiece", "unigram", "word", "char"]


@given(text=st.text(max_size=40), model=st.sampled_from(["byte-bpe", "bpe", "unigram"]))
def test_stream_equals_decode_and_never_shows_half_a_character(text, model):
    tokenizer = _tokenizer(model)
    ids = tokenizer.encode(text)
    pieces = _stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""


@given(model=st.sampled_from(MODELS), data=st.data())
def test_stream_equals_decode_for_any_ids(model, data):
    """Also for what an untrained model writes: broken bytes, special tokens, continuations without a start."""
    tokenizer = _tokenizer(model)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    assert "".join(_stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_an_emoji_appears_only_when_it_is_whole():
    tokenizer = _tokenizer("byte-bpe")
    ids = tokenizer.encode("😀")
    assert len(ids) > 1
    pieces = _stream(tokenizer, ids)
    assert pieces[: len(ids) - 1] == [""] * (len(ids) - 1)
    assert pieces[len(ids) - 1] == "😀"


def test_an_unfinished_character_shows_at_the_end_only():
    tokenizer = _tokenizer("byte-bpe")
    ids = tokenizer.encode("😀")[:-1]
    assert _stream(tokenizer, ids) == [""] * len(ids) + ["\ufffd"]


@pytest.mark.parametrize("model", MODELS)
def test_stream_of_words_keeps_their_spaces(model):
    tokenizer = _tokenizer(model)
    ids = tokenizer.encode("The low dog, lower")
    assert "".join(_stream(tokenizer, ids)) == "The low dog, lower".replace(",", " ," if model == "wordpiece" else ",")


def test_decoding_equals_the_library(make):
    for model in MODELS:
        tokenizer = make(model)
        ids = tokenizer.encode("The quick brown fox,\n again\t12!") + tokenizer.encode("x", template=True)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special=skip) == tokenizer._rust.decode(ids, skip_special_tokens=skip)


def test_the_byte_alphabet_is_gpt2s():
    alphabet = byte_level_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["Ġ"], alphabet["Ċ"], alphabet["A"]) == (0x20, 0x0A, 0x41)


@pytest.mark.parametrize(
    ("kind", "tokens", "expected"),
    [
        ("wordpiece", ["[CLS]", "run", "##ning", "."], [True, True, False, True]),
        ("byte-bpe", ["<s>", "run", "Ġrun", "ning", "."], [False, False, True, False, False]),
        ("bpe", ["run", "▁run", "ning"], [False, True, False]),
        ("unigram", ["run", "▁run", "▁"], [False, True, True]),
        ("word", ["run", "##x"], [True, True]),
        ("char", ["r", "▁"], [True, True]),
    ],
)
def test_each_kind_marks_words_its_own_way(kind: str, tokens: list[str], expected: list[bool]) -> None:
    found = word_starts(kind, tokens)  # type: ignore[arg-type]
    assert found.dtype == bool and found.tolist() == expected


@pytest.mark.parametrize("kind", list(STARTS_WORD))
def test_a_trained_tokenizer_begins_as_many_words_as_the_text_has(make: Callable[..., Tokenizer], kind: str) -> None:
    tokenizer = make(kind, template="bert", **({} if kind == "char" else {"vocab_size": 400}))
    starts = word_starts(tokenizer.kind, [tokenizer.token(i) for i in range(tokenizer.vocab_size)])
    ids = tokenizer.encode(" the brown dog jumps")
    assert len(starts) == tokenizer.vocab_size
    assert starts[ids].sum() == (len(ids) if kind == "char" else 4)
    if kind != "char":
        assert starts[tokenizer.encode(" lazydogoverfox")].sum() <= 1 or kind == "word"


# -- files that would turn a little text into much --------------------------------------------------------------------


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


@pytest.mark.parametrize("keys", [("padding",), ("truncation",), ("padding", "truncation")])
def test_padding_and_truncation_of_a_file_are_never_applied(document: dict[str, Any], keys: tuple[str, ...]) -> None:
    padding = {
        "strategy": {"Fixed": 1000}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<unk>",
    }  # fmt: skip
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    both = {"padding": padding, "truncation": truncation}
    text = json.dumps(document | {key: both[key] for key in keys})
    tokenizer = Tokenizer.from_json(text)
    plain = Tokenizer.from_json(json.dumps(document))
    assert tokenizer.encode("aaa bbb ab") == plain.encode("aaa bbb ab")
    assert tokenizer.reading_special().encode("aaa bbb ab") == plain.encode("aaa bbb ab")
    assert tokenizer.to_json() == text


def test_a_damaged_map_of_characters_is_one_clear_error(
    document: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """The library would print its panic: the map has a replacement for z that begins after the last one."""
    units = [0] * 256  # of the trie; 256 marks a place that ends a key
    units[ord("z")] = 256 | ord("z")
    data = struct.pack("<I", 4 * len(units)) + struct.pack("<256I", *units) + b"x\0"
    normalizer = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}
    tokenizer = Tokenizer.from_json(json.dumps(document | {"normalizer": normalizer, "pre_tokenizer": None}))
    with pytest.raises(InputError, match="it fails on a text"):
        tokenizer.encode("z")
    assert capfd.readouterr().err == ""


def test_entries_have_bytes_where_a_decoder_reads_each_alone() -> None:
    fallback, fuse = {"type": "ByteFallback"}, {"type": "Fuse"}
    read = concatenating_reader(sequence("decoders", replace("▁", " "), fallback, fuse))
    assert read is not None
    assert [read(entry) for entry in ("▁the", "<0xE6>", "<0x>")] == [b" the", b"\xe6", b"<0x>"]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    assert concatenating_reader(sequence("decoders", strip, fuse)) is None
