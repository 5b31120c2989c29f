"""Every known kind of file is told by its first bytes; text that begins alike is text."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import sqlite3
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from tformer.support.file_kinds import HEAD_BYTES, KINDS, kind_of

CONLLU = b"1\tThe\tthe\tDET\tDT\tDefinite=Def\t2\tdet\t_\t_\n2\tend\tend\tNOUN\tNN\t_\t0\troot\t_\t_\n"


def zipped(*files: tuple[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files:
            archive.writestr(name, content)
    return buffer.getvalue()


def office(folder: str) -> bytes:
    return zipped(("[Content_Types].xml", "<Types/>" * 20), ("_rels/.rels", "<a/>"), (f"{folder}/main.xml", "<b/>"))


def written(write: object) -> bytes:
    buffer = io.BytesIO()
    write(buffer)  # type: ignore[operator]
    return buffer.getvalue()


def database(folder: Path) -> bytes:
    with sqlite3.connect(folder / "a.db") as connection:
        connection.execute("create table t (text)")
    return (folder / "a.db").read_bytes()


def open_document(mime: str) -> bytes:
    return zipped(("mimetype", f"application/{mime}"), ("content.xml", "<a/>"))


SAMPLES: dict[str, list[bytes]] = {
    "gguf": [b"GGUF\3\0\0\0" + bytes(16), b"GGUF\0\0\0\3"],
    "safetensors": [safetensors.numpy.save({"a": np.zeros(3)})],
    "sentencepiece": [b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\2\n\x0c\n\x03<s>\x15\0\0\0\0\x18\3"],
    "tekken": [b'{"config":{"pattern":"x","num_vocab_tokens":9,"default_vocab_size":9},"vocab":[]}'],
    "tiktoken": [b"IQ== 0\nIg== 1\n"],
    "tokenizer": [b'{\n  "version": "1.0",\n  "truncation": null,'],
    "numpy": [written(lambda file: np.save(file, np.arange(3))), written(lambda file: np.savez(file, a=np.arange(3)))],
    "torch": [written(lambda file: torch.save({"a": torch.zeros(2)}, file))],
    "pickle": [pickle.dumps({"a": 1})],
    "hdf5": [b"\x89HDF\r\n\x1a\n"],
    "parquet": [b"PAR1\x15\4\x15"],
    "arrow": [b"ARROW1\0\0"],
    "xlsx": [office("xl")],
    "ods": [open_document("vnd.oasis.opendocument.spreadsheet")],
    "office": [office("word"), office("ppt")],
    "odt": [open_document("vnd.oasis.opendocument.text"), open_document("epub+zip")],
    "ole": [b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"],
    "pdf": [b"%PDF-1.7\n"],
    "document": [rb"{\rtf1\ansi", b"%!PS-Adobe-3.0"],
    "zip": [zipped(("a/b.txt", "text"))],
    "gzip": [gzip.compress(b"text")],
    "zstd": [b"\x28\xb5\x2f\xfd\x04"],
    "archive": [b"BZh91AY&SY", b"\xfd7zXZ\0", b"7z\xbc\xaf\x27\x1c", b"Rar!\x1a\7", bytes(257) + b"ustar"],
    "image": [
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff\xe0",
        b"GIF89a",
        b"RIFF\1\2\3\4WEBP",
        b"II*\0",
        b"BM\1\2\3\4\0\0\0\0",
    ],
    "media": [b"RIFF\1\2\3\4WAVE", b"ID3\3", b"OggS\0", b"\0\0\0\x20ftypisom"],
    "program": [b"\x7fELF\2", b"MZ\x90\0"],
    "lfs": [b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"],
    "notebook": [json.dumps({"cells": [{"cell_type": "code", "source": []}], "nbformat": 4}, indent=1).encode()],
    "tmx": [b'<?xml version="1.0"?>\n<!DOCTYPE tmx SYSTEM "tmx14.dtd">\n<!-- a -->\n<tmx version="1.4">', b"<tmx>"],
    "xliff": [b'\xef\xbb\xbf<?xml version="1.0"?><xliff version="1.2">', b"<x:xliff>"],
    "terms": [b'<?xml version="1.0"?><!DOCTYPE TS><TS version="2.1">', b"<martif>"],
    "gettext": [b'# German\n#\nmsgid ""\nmsgstr ""\n', b'msgctxt "menu"\nmsgid "Open"\n', b"\xde\x12\x04\x95"],
    "conllu": [CONLLU, b"# sent_id = 1\n# text = The end\n" + CONLLU, b"1-2" + b"\t_" * 9 + b"\n"],
    "html": [b"<!DOCTYPE html>\n<title>", b"<html lang='en'>", b'<?xml version="1.0"?>\n<html>'],
    "xml": [b'<?xml version="1.0"?>\n<corpus>'],
    "subtitles": [b"WEBVTT\n\n00:01", b"1\r\n00:00:01,000 --> 00:00:02,000\r\nHello\r\n"],
}


@pytest.mark.parametrize("key", SAMPLES)
def test_a_kind_is_told_by_its_first_bytes(key: str) -> None:
    for sample in SAMPLES[key]:
        assert (found := kind_of(sample)) is not None and found.key == key, sample[:80]


def test_every_kind_has_a_sample(tmp_path: Path) -> None:
    assert (found := kind_of(database(tmp_path))) is not None and found.key == "sqlite"
    assert {*SAMPLES, "sqlite", "conll", "json", "jsonl"} == {kind.key for kind in KINDS}


def test_kinds_are_told_in_utf_16_and_by_endings() -> None:
    for encoding in ("utf-16", "utf-8-sig"):
        assert (found := kind_of('<?xml version="1.0"?><tmx>'.encode(encoding))) is not None and found.key == "tmx"
    cases = [(b"Ada B-PER\n", ".conll", "conll"), (b"[1, 2]", ".json", "json"), (b'{\n "a": 1}', ".json", "json")]
    cases.append((b'{"a": 1}\n{"a": 2}\n', ".json", "jsonl"))
    for head, ending, key in cases:
        assert (found := kind_of(head, ending)) is not None and found.key == key
        assert kind_of(head, ".txt") is None


@pytest.mark.parametrize(
    "text",
    [
        *("<s> Hello", "<b>bold</b> text", "<!-- a note -->\nText", "<tag>", "<ts> is a tag", "< 5 is little"),
        *("# Title\n\nText", "#include <stdio.h>", "#!/bin/sh\n", "# msgid\n", "msgid is a key", 'The msgid "a"'),
        *('{"a": 1}\n{"a": 2}\n', '{"config": 1}\n', '{"text": "token_bytes"}', "{\n", "[1] First", "[\n"),
        *("GGUF is a format", "PAR1 is", "ARROW1", "SQLite format 3 is", "PK is", "BM25 ranks", "MZ is", "ID3 tags"),
        *("1\n2\n3\n", "1\t2\t3\t4\t5\t6\t7\t8\t9\t10\n", "1\tA text\tits label\n", "1\n00:00 is midnight", "WEBVTTs"),
        *("The ftyp box", "%PDF is", "IQ== is", "\n\n\nText", "\n", "", "\ufeffText", "version 1.0", "WEB"),
    ],
)
def test_text_that_begins_alike_is_text(text: str) -> None:
    assert kind_of(text.encode()) is None


@pytest.mark.parametrize("kind", [".txt", ".json", ".conll"])
def test_no_opening_takes_long(kind: str) -> None:
    hard = [
        b"<!-- ",
        b"<!-- a -->",
        b"<?a?>",
        b" ",
        b"# a\n",
        b"PK\3\4",
        b'{\n"a":',
        b'{"config"',
        b'msgctxt "" ',
        b"\n",
    ]
    start = time.process_time()
    for part in hard:
        kind_of(part + (part * HEAD_BYTES)[:HEAD_BYTES], kind)
        kind_of(b"PK\3\4" + (part * HEAD_BYTES)[:HEAD_BYTES], kind)
    assert time.process_time() - start < 1
