"""Known kinds of file that are no plain text, by their first bytes or their ending, and what to do with them.

Text that begins with "<", "#" or "{" stays text: the openings are those that only such a file has.
"""

from __future__ import annotations

import codecs
import re
from typing import NamedTuple

HEAD_BYTES = 8192  # of a file, by which its kind is known

_ZIP = rb"PK\x03\x04.{22}"
_XML = rb"\s*+(?><\?.*?\?>|<!--.*?-->|<!DOCTYPE[^>\[]*+(?:\[.*?\]\s*+)?>|\s++)*+"  # before the first element
_CELLS = rb"[^\t\n]+\t[^\t\n]+\t"
_NUMBERS = "it holds numbers, no text: tformer import reads the folder of a model"
_DOCUMENT = "save it as plain text (.txt)"
_TRANSLATIONS = "write its texts into a table with the columns source and target (.tsv)"
_TAGS = "train --objective token_classification reads it; write texts for other commands one a line into a .txt file"
_MARKUP = "only running text may have markup: write its texts one a line into a .txt file"


class FileKind(NamedTuple):
    """A kind of file.

    Attributes:
        key: its short name in code.
        name: for messages.
        opening: a pattern of its first bytes.
        hint: what to do with such a file where text is expected.
        endings: one of which the file's name has; (): any.
        is_running_text: it may be learned as running text, but its lines are no texts.
    """

    key: str
    name: str
    opening: bytes
    hint: str
    endings: tuple[str, ...] = ()
    is_running_text: bool = False


KINDS = (
    FileKind("gguf", "a GGUF model", rb"GGUF(?:[\x01-\x03]\0\0\0|\0\0\0[\x01-\x03])", "tformer import reads it"),
    FileKind("safetensors", "weights (safetensors)", rb'.{5}\0\0\0\{\s*"', _NUMBERS),
    FileKind("sentencepiece", "a SentencePiece model", rb"\n[\x03-\x7f]\n[\0-\x40][^\n]{0,64}?\x15.{4}", _NUMBERS),
    FileKind("tekken", "tekken.json", rb'\s*\{\s*"(?:config|vocab)".*?"(?:default_vocab_size|token_bytes)"', _NUMBERS),
    FileKind("tiktoken", "a vocabulary of tiktoken", rb"IQ== 0\n", _NUMBERS),
    FileKind("tokenizer", "a tokenizer", rb'\s*\{\s*"version"\s*:\s*"1\.0",\s*"truncation"', "--tokenizer reads it"),
    FileKind("numpy", "arrays of NumPy", rb"\x93NUMPY|" + _ZIP + rb".{0,60}?\.npy", _NUMBERS),
    FileKind("torch", "weights of PyTorch", _ZIP + rb".{0,200}?/(?:data\.pkl|\.format_version)", _NUMBERS),
    FileKind("pickle", "a pickle", rb"\x80[\x02-\x05]", _NUMBERS),
    FileKind("hdf5", "HDF5", rb"\x89HDF\r\n", _NUMBERS),
    FileKind("sqlite", "an SQLite database", rb"SQLite format 3\0", "write the rows of a table into a .csv file"),
    FileKind("parquet", "Parquet", rb"PAR1[\0-\x1f]", "name it with the ending .parquet"),
    FileKind("arrow", "an Arrow table", rb"ARROW1\0", "write it as .parquet"),
    FileKind("xlsx", "an Excel spreadsheet", _ZIP + rb".*?\bxl/", "name it with the ending .xlsx"),
    FileKind("ods", "a spreadsheet", _ZIP + rb".{4}mimetype.*?nt\.spreadsheet", "name it with the ending .ods"),
    FileKind("office", "a document of Word or PowerPoint", _ZIP + rb".*?\b(?:word|ppt)/", _DOCUMENT),
    FileKind("odt", "an OpenDocument text or an e-book", _ZIP + rb".{4}mimetype.{0,9}application/", _DOCUMENT),
    FileKind(
        "ole", "an old file of Word or Excel", rb"\xd0\xcf\x11\xe0", "save it as .txt, of a table as .xlsx or .csv"
    ),
    FileKind("pdf", "a PDF document", rb"%PDF-\d", f"{_DOCUMENT}, for example with pdftotext"),
    FileKind("document", "a formatted document (RTF, PostScript)", rb"\{\\rtf\d|%!PS-Adobe", _DOCUMENT),
    FileKind("zip", "a zip archive", rb"PK\x03\x04", "unpack it and give the folder"),
    FileKind("gzip", "gzip data", rb"\x1f\x8b", "name it with the ending .gz"),
    FileKind("zstd", "Zstandard data", rb"\x28\xb5\x2f\xfd", "name it with the ending .zst"),
    FileKind("archive", "an archive", rb"BZh\d1AY&|\xfd7zXZ\0|7z\xbc\xaf|Rar!\x1a|.{257}ustar", "unpack it"),
    FileKind(
        "image",
        "an image",
        rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a|RIFF.{4}WEBP|II\*\0|MM\0\*|BM.{4}\0{4}",
        "train --arch vit learns from a folder of images for each label, classify --image reads one",
    ),
    FileKind(
        "media",
        "sound or video",
        rb"RIFF.{4}(?:WAVE|AVI )|ID3[\x02-\x04]|OggS\0|fLaC\0|\0\0\0.ftyp|\x1aE\xdf\xa3",
        "tformer reads no sound or video",
    ),
    FileKind("program", "a compiled program", rb"\x7fELF|MZ.\0|\xca\xfe\xba\xbe|\0asm", "give its source"),
    FileKind("lfs", "a pointer of Git LFS", rb"version https://git-lfs\.github\.com/spec/", "git lfs pull fetches it"),
    FileKind("notebook", "a notebook", rb'\s*\{\s*\n\s*"\w+":.*?"cell_type"\s*:', "save it as .py or .md"),
    FileKind("tmx", "a translation memory (TMX)", _XML + rb"<tmx\b", _TRANSLATIONS),
    FileKind("xliff", "XLIFF", _XML + rb"<(?:\w+:)?xliff\b", _TRANSLATIONS),
    FileKind("terms", "translations of Qt or a term base (TBX)", _XML + rb"<(?:TS|martif|tbx)\b", _TRANSLATIONS),
    FileKind(
        "gettext",
        "translations of gettext",
        rb'(?>#[^\n]*\n|\s++)*+(?:msgctxt ".*?"\s+)?msgid "|\xde\x12\x04\x95|\x95\x04\x12\xde',
        _TRANSLATIONS,
    ),
    FileKind(
        "conllu",
        "words with tags (CoNLL-U)",
        rb"(?>#[^\n]*\n|\s++)*+1(?:-\d+)?\t" + _CELLS + rb"(?:[A-Z]+|_)\t" + _CELLS + rb"(?:\d+|_)\t" + _CELLS,
        _TAGS,
    ),
    FileKind("conll", "words with tags (CoNLL)", b"", _TAGS, endings=(".conll", ".conllu", ".iob", ".bio")),
    FileKind("json", "JSON", rb"\s*(?:\[|\{\s*\n)", "write each entry as a line of a .jsonl file", endings=(".json",)),
    FileKind(
        "jsonl", "JSON", rb'\s*\{\s*"', "if each line is an entry, name it with the ending .jsonl", endings=(".json",)
    ),
    FileKind("html", "HTML", rb"\s*(?i:<!doctype html)|" + _XML + rb"(?i:<html\b)", _MARKUP, is_running_text=True),
    FileKind("xml", "XML", rb"\s*<\?xml\s", _MARKUP, is_running_text=True),
    FileKind("subtitles", "subtitles", rb"WEBVTT\s|1\r?\n\d\d:\d\d:\d\d,\d{3} -->", _MARKUP, is_running_text=True),
)
RUNNING_TEXT = frozenset(kind.key for kind in KINDS if kind.is_running_text)
_PATTERNS = [(kind, re.compile(kind.opening, re.DOTALL)) for kind in KINDS]


def kind_of(head: bytes, ending: str = "") -> FileKind | None:
    """The kind of a file with these first bytes (at most `HEAD_BYTES` count) and this ending; None: it may be text."""
    head = head[:HEAD_BYTES]
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        head = head[: len(head) & ~1].decode("utf-16", "ignore").encode("utf-8", "ignore")
    head = head.removeprefix(codecs.BOM_UTF8)
    return next(
        (kind for kind, known in _PATTERNS if ending in (kind.endings or (ending,)) and known.match(head)), None
    )
