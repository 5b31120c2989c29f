"""A trained tokenizer: text to ids and back, read from and written to `tokenizer.json`.

Text is data: a string that spells a special token stays text; special tokens come from templates only.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from tokenizers import Tokenizer as RustTokenizer

from tformer.support.errors import InputError
from tformer.support.file_kinds import HEAD_BYTES, kind_of
from tformer.support.files import make_folders, open_regular, read_bounded, storage_errors, write_file
from tformer.support.processes import process_lock
from tformer.tokenizer.decoding import PieceStream, PieceTable, StreamDecoder, WindowStream, concatenating_reader
from tformer.tokenizer.growth import growth_problem
from tformer.tokenizer.options import TokenizerModel
from tformer.tokenizer.pieces import Truncation, batches_of, ends_of, is_long, pieces_of
from tformer.tokenizer.sentences import SENTENCEPIECE, SentencePieces
from tformer.tokenizer.special import SpecialIds, find_special_ids, opening_ids


def canonical_sha256(tokenizer_json: str) -> str:
    """The hash of a tokenizer's JSON with keys sorted and without spaces. Raises ValueError for invalid JSON."""
    try:
        value = json.loads(tokenizer_json)
    except ValueError as error:
        raise ValueError(f"the tokenizer is not JSON: {error}") from None
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()


_LANGUAGE = re.compile(r"__([a-z]{2,3})__|[a-z]{2}_[A-Z]{2}|[a-z]{3}_[A-Z][a-z]{3}")
_SURROGATE = re.compile("[\ud800-\udfff]")
MAX_FILE_BYTES = 512 * 2**20  # a vocabulary of a million entries takes about 100 MB


class Tokenizer:
    """A tokenizer; made by `load`, `from_json` or `train_tokenizer`.

    Attributes: `kind` (the model), `vocab_size` (highest id + 1), `special` (SpecialIds), `opening` (`opening_ids`),
    `dtype` (uint16 or uint32, the smallest that holds every id), `sha256` (of the canonical JSON: equal for equal
    tokenizers, whatever `with_special` names), `sentencepiece` (the section of a model of SentencePiece, or None).
    """

    def __init__(self, rust: RustTokenizer, document: dict[str, Any], text: str, name: str) -> None:
        self._rust = rust
        self._text, self._name = text, name
        self.sentencepiece: dict[str, Any] | None = document.get(SENTENCEPIECE)
        self._sentences = SentencePieces(document) if self.sentencepiece else None
        # A pattern may take exponential time, a map of characters may be damaged: the library panics, and prints it.
        self._may_panic = '"Regex"' in text or '"Precompiled"' in text
        self._rust.encode_special_tokens = True  # in data they are text
        vocabulary = rust.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self._tokens: list[str | None] = [None] * self.vocab_size
        for token, token_id in vocabulary.items():
            self._tokens[token_id] = token
        added = rust.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        self._added_tokens = frozenset(i for i, token in added.items() if not token.special)
        self._special_tokens = frozenset(special.values())
        self.special: SpecialIds = find_special_ids(special, document.get("post_processor"))
        self.opening: tuple[int, ...] = opening_ids(document.get("post_processor"))
        self.kind: TokenizerModel = _kind(rust, document) if self._sentences is None else self._sentences.kind
        self._table: PieceTable | None = None
        if (read := concatenating_reader(document.get("decoder"))) is not None:
            pieces = [b"" if token is None else read(token) for token in self._tokens]
            self._table = PieceTable(pieces, self._special_tokens)
        is_our_char = self.kind == "char" and self.special.unk is not None and not self._added_tokens
        self._characters = _CharacterTable(vocabulary, self.special.unk) if is_our_char else None

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read `tokenizer.json`. Raises InputError for a missing or damaged file, or one of another format."""
        return cls.from_json(read_tokenizer_file(Path(path)), name=str(path))

    @classmethod
    def from_json(cls, text: str, *, name: str = "tokenizer.json") -> Tokenizer:
        """Read a tokenizer from its JSON; `name`: of the file in error messages."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _not_a_tokenizer(name, f"no valid JSON ({error})") from error
        if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
            raise _not_a_tokenizer(name, "it has no `model` section")
        for part in ("decoder", "post_processor"):  # the library takes lists for some
            if not isinstance(document.get(part) or {}, dict):
                raise _not_a_tokenizer(name, f"its `{part}` is no object")
        read = text
        if document.get("padding") or document.get("truncation") or SENTENCEPIECE in document:
            # The first two would fill memory or lose text; the library does not know the third.
            known = {key: value for key, value in document.items() if key != SENTENCEPIECE}
            read = json.dumps(known | {"padding": None, "truncation": None}, ensure_ascii=False)
        try:
            if problem := growth_problem(document):
                raise ValueError(problem)
            with _without_panics():
                rust = RustTokenizer.from_str(read)
                vocabulary = rust.get_vocab(with_added_tokens=True)
                # Encoding shows what is missing: a template's token or the unknown token in the vocabulary.
                encodings = rust.encode_batch_fast([("a \U0010ffff", "b"), "a"], add_special_tokens=True)
                rust.decode(encodings[0].ids)
            if SENTENCEPIECE in document:
                SentencePieces(document)
        except BaseException as error:
            # The library raises plain Exception for bad files, and its panics do not derive from Exception.
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            raise _not_a_tokenizer(name, str(error)) from error
        if not vocabulary:
            raise _not_a_tokenizer(name, "its vocabulary is empty")
        if strangers := {token for each in encodings for token in each.ids}.difference(vocabulary.values()):
            raise _not_a_tokenizer(name, f"its template gives the id {min(strangers)}, which no token has")
        if len(set(vocabulary.values())) != len(vocabulary):
            raise _not_a_tokenizer(name, "two entries share one id")
        if max(vocabulary.values()) >= max(2 * len(vocabulary), 2**20):
            raise _not_a_tokenizer(name, f"id {max(vocabulary.values())} in a vocabulary of {len(vocabulary)}")
        return cls(rust, document, text, name)

    def with_special(self, special: SpecialIds) -> Tokenizer:
        """The same tokenizer with these ids as its special ids; `sha256` stays the file's."""
        other = copy.copy(self)
        other.special = special
        other._special_tokens = self._special_tokens.union(special.all)
        if self._table is not None:
            other._table = PieceTable(self._table.pieces, other._special_tokens)
        return other

    def reading_special(self) -> Tokenizer:
        """The same tokenizer for prompts: text that spells a special token becomes that token."""
        other = copy.copy(self)
        other._rust = RustTokenizer.from_str(self._rust.to_str())
        other._sentences = self._sentences and self._sentences.reading_special()
        other._characters = None
        return other

    @property
    def languages(self) -> dict[str, int]:
        """Code -> id of the tokens that name a language: `__en__` (M2M100), `eng_Latn` (NLLB), `en_XX` (mBART)."""
        others = self._special_tokens - set(self.special.all)
        found = {self.token(i): i for i in sorted(others)}
        return {match[1] or name: i for name, i in found.items() if (match := _LANGUAGE.fullmatch(name))}

    def in_language(self, token_id: int) -> Tokenizer | None:
        """The same tokenizer with this language in its template; None if the template has no language."""
        document, known = json.loads(self._text), set(self.languages.values())
        template = document.get("post_processor") or {}
        named = template.get("special_tokens", {})
        old = next((name for name, token in named.items() if known.issuperset(token["ids"])), None)
        if old is None:
            return None
        name = self.token(token_id)
        for piece in (*template["single"], *template["pair"]):
            if piece.get("SpecialToken", {}).get("id") == old:
                piece["SpecialToken"]["id"] = name
        del named[old]
        named[name] = {"id": name, "ids": [token_id], "tokens": [name]}
        text = json.dumps(document, ensure_ascii=False)
        return Tokenizer.from_json(text, name=self._name).with_special(self.special)

    def to_json(self) -> str:
        """The JSON it was read from, unchanged."""
        return self._text

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write `tokenizer.json` atomically. Replaces a different file only with `force`.

        Raises InputError for the different file, StorageError when the file system refuses.
        """
        path = Path(path)
        content = self._text.encode()
        if path.is_dir():
            raise InputError(f"{path} is a directory, expected the name of a file", hint=f"try {path}/tokenizer.json")
        if not force and path.exists():
            if path.read_bytes() == content:
                return path
            raise InputError(f"{path} already exists and differs", hint="--force replaces it")
        with storage_errors(path, bytes_needed=len(content)):
            make_folders(Path(os.path.realpath(path)).parent)
            write_file(path, [content], bytes_needed=len(content))
        return path

    @cached_property
    def sha256(self) -> str:
        return canonical_sha256(self._text)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    def encode(
        self, text: str, *, template: bool = False, most: int | None = None, keep: Truncation = "head"
    ) -> list[int]:
        """Ids of one text; with `template`, the special tokens of the template around it. See `encode_batch`."""
        return self.encode_batch([text], template=template, most=most, keep=keep)[0]

    def encode_batch(
        self, texts: Sequence[str], *, template: bool = False, most: int | None = None, keep: Truncation = "head"
    ) -> list[list[int]]:
        """Ids of many texts, on all processors. Raises InputError for text that is not Unicode.

        Args:
            most: the caller uses at most this number of tokens of a text. Of a long text with more tokens, only more
                than `most` of the part that is kept are given: its first, its last, or both.
        """
        try:
            result: list[list[int]] = []
            for batch in batches_of(texts, len):
                if template or not any(map(is_long, batch)):
                    result += self._encode_whole(batch, template=template)
                    continue
                short = iter(self._encode_whole([text for text in batch if not is_long(text)]))
                result += [self._encode_long(text, most, keep) if is_long(text) else next(short) for text in batch]
            return result
        except (TypeError, UnicodeEncodeError) as error:
            raise _not_unicode(texts, error) from error

    def _encode_whole(self, texts: list[str], *, template: bool = False) -> list[list[int]]:
        if self._characters is not None and not template:
            return [self._characters.encode(self.normalize(text)) for text in texts]
        if self._sentences is not None and not template:
            return self._sentences.encode_all(texts)
        encode, given = self._rust.encode_batch_fast, self._given(texts)
        encodings = self._call(encode, given, add_special_tokens=template, is_pretokenized=given is not texts)
        return [encoding.ids for encoding in encodings]

    def _given(self, texts: list[str]) -> list[Any]:
        """The library's input for texts: SentencePiece's pieces, or the texts themselves."""
        return texts if self._sentences is None else self._sentences.cut_all(texts)

    def _call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function of the library. If it fails on a text, raise InputError with the tokenizer's file."""
        try:
            with _without_panics() if self._may_panic else nullcontext():
                return function(*arguments, **options)
        except BaseException as error:
            # The library raises plain Exception, and panics, whose type it does not export, with a BaseException.
            if type(error) is Exception or type(error).__name__ == "PanicException":
                raise _not_a_tokenizer(self._name, f"it fails on a text ({error})") from error
            raise

    def _encode_long(self, text: str, most: int | None, keep: Truncation) -> list[int]:
        if most is None:
            batches = batches_of((piece for _, piece in pieces_of(text, at_lines=self._starts_at_lines)), len)
            return [token for batch in batches for ids in self._encode_whole(batch) for token in ids]
        parts = ends_of(text, most, keep, self._encode_piece, len, at_lines=self._starts_at_lines)
        return [token for _, ids in parts for token in ids]

    @cached_property
    def _starts_at_lines(self) -> bool:
        """Whether a newline separates tokens: the text after it has the same tokens alone and inside a longer text."""
        both, first, second = self._encode_whole(["x\nx", "x\n", "x"])
        if both != first + second or self._rust.pre_tokenizer is None:
            return False
        words = self._call(self._rust.pre_tokenizer.pre_tokenize_str, self.normalize("x\nx"))
        return any(start == 2 for _, (start, _) in words)

    def _encode_piece(self, piece: str) -> list[int]:
        return self._encode_whole([piece])[0]

    def count(self, text: str) -> int:
        """The number of tokens of one text."""
        return sum(len(self._encode_piece(piece)) for _, piece in pieces_of(text, at_lines=self._starts_at_lines))

    def encode_spans(
        self, text: str, *, most: int | None = None, keep: Truncation = "head"
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and offsets of one text without special tokens; an offset is (first character, end).

        `most` and `keep` mean what they mean in `encode_batch`.
        """
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        try:
            parts = ends_of(
                text,
                most,
                keep,
                self._encode_at,
                lambda encoding: len(encoding[0]),
                at_lines=self._starts_at_lines,
            )
            for place, (found, offsets) in parts:
                ids += found
                spans += offsets if place == 0 else [(place + a, place + b) for a, b in offsets]
        except (TypeError, UnicodeEncodeError) as error:
            raise _not_unicode([text], error) from error
        return ids, spans

    def _encode_at(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        if self._sentences is not None:
            return self._encode_whole([text])[0], self._sentences.spans(text)
        encoding = self._call(self._rust.encode, text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Two texts in the pair template: (ids, token type ids)."""
        try:
            given, cut = self._given([first, second]), self._sentences is not None
            encoding = self._call(self._rust.encode, *given, add_special_tokens=True, is_pretokenized=cut)
        except (TypeError, UnicodeEncodeError) as error:
            raise _not_unicode([first, second], error) from error
        return encoding.ids, encoding.type_ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        if self._table is not None:
            return self._table.decode(ids, skip_special=skip_special)
        shown = [i for i in ids if not (skip_special and i in self._special_tokens)]
        text: str = self._call(self._rust.decode, shown, skip_special_tokens=skip_special)
        return text.strip() if self._sentences is not None and self._sentences.trims else text

    def written(self, text: str) -> str:
        """The text as a model writes it: encoded and decoded; unchanged where it has unknown tokens."""
        ids = self.encode(text)
        return text if self.special.unk in ids else self.decode(ids)

    def stream(self, *, skip_special: bool = True) -> StreamDecoder:
        """A decoder for single ids that never returns part of a character."""
        if self._table is not None:
            return PieceStream(self._table, skip_special=skip_special)
        return WindowStream(lambda ids: self.decode(ids, skip_special=skip_special))

    def normalize(self, text: str) -> str:
        """The text as the model sees it: after the Unicode form, case and accent options."""
        normalizer = self._rust.normalizer
        if self._sentences is not None:
            return self._sentences.normalize(text)
        return text if normalizer is None else self._call(normalizer.normalize_str, text)

    def token(self, token_id: int) -> str:
        """The token of this id as in the vocabulary. Raises ValueError for an unknown id."""
        token = self._tokens[token_id] if 0 <= token_id < self.vocab_size else None
        if token is None:
            raise ValueError(f"id {token_id} is not in the vocabulary of {self.vocab_size}")
        return token

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that an id stands for in a text; None where they depend on its neighbours."""
        return None if self._table is None else self._table.read(token_id, skip_special=False)

    @property
    def tokens(self) -> list[str]:
        """The token of every id as in the vocabulary; empty where an id has none."""
        return [token or "" for token in self._tokens]

    def token_id(self, token: str) -> int | None:
        return self._rust.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_tokens

    def is_whole(self, token_id: int) -> bool:
        """Whether the token is a special or an added one, whose text is never cut or merged."""
        return token_id in self._special_tokens or token_id in self._added_tokens


class _CharacterTable:
    """Characters to ids by one table look-up: a hundred times as fast as the library for this kind."""

    def __init__(self, vocabulary: dict[str, int], unk: int | None) -> None:
        characters = {ord(token): i for token, i in vocabulary.items() if len(token) == 1}
        self._ids = np.full(max(characters, default=0) + 2, unk, dtype=np.int64)  # last entry: all characters beyond
        self._ids[list(characters)] = list(characters.values())

    def encode(self, text: str) -> list[int]:
        points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
        return self._ids[np.minimum(points, len(self._ids) - 1)].tolist()


def _kind(rust: RustTokenizer, document: dict[str, Any]) -> TokenizerModel:
    """The kind of a tokenizer of any origin, by its parts: `tokenizer.json` has no field for it."""
    model = type(rust.model).__name__
    if model == "BPE":
        parts = json.dumps([document.get("pre_tokenizer"), document.get("normalizer"), document.get("decoder")])
        if '"ByteLevel"' in parts:
            return "byte-bpe"
        return "bpe" if document["model"].get("merges") or document.get("pre_tokenizer") else "char"
    kinds: dict[str, TokenizerModel] = {"WordPiece": "wordpiece", "Unigram": "unigram", "WordLevel": "word"}
    return kinds[model]


_STANDARD_ERROR = process_lock()


@contextmanager
def _without_panics() -> Iterator[None]:
    """Hide the library's messages about a panic from stderr; other output appears at the end.

    One thread of a process at a time: stderr is the process's.
    """
    if sys.__stderr__ is None:  # closed when the program began: another file may have its number
        yield
        return
    with _STANDARD_ERROR, TemporaryFile() as printed:
        shown = os.dup(2)
        os.dup2(printed.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(shown, 2)
            os.close(shown)
        printed.seek(0)
        with suppress(OSError):  # the reader went away
            os.write(2, printed.read())


_HINT = "make one with `tformer train-tokenizer`, or use the tokenizer.json of a Hugging Face model"
_CONVERT = "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers writes a tokenizer.json"
OTHER_FILES = {
    "gguf": "tformer import {path} --out RUN makes a run with its tokenizer.json",
    "sentencepiece": f"tformer tokenize {{path.parent}} reads it beside its configuration; {_CONVERT}",
    "tekken": f"in the folder of its model: {_CONVERT}",
}
"""`FileKind.key` of other files with a vocabulary -> how their vocabulary is used."""


def read_tokenizer_file(path: Path) -> str:
    """The text of a tokenizer.json. Raises InputError for a missing file, one of another kind, and one too large."""
    with open_regular(path) as file:
        kind = kind_of(file.read(HEAD_BYTES))
    if kind is not None and kind.key != "tokenizer":
        hint = OTHER_FILES.get(kind.key, _HINT).format(path=path)
        raise InputError(f"{path} is no tokenizer.json: it is {kind.name}", hint=hint)
    try:
        return read_bounded(path, max_bytes=MAX_FILE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_a_tokenizer(str(path), f"byte {error.start} is not UTF-8") from error


def _not_a_tokenizer(name: str, reason: str) -> InputError:
    return InputError(f"{name} is not a usable tokenizer.json: {reason}", hint=_HINT)


def require_unicode(texts: Iterable[str | tuple[str | None, ...]]) -> None:
    """Raise InputError for half a surrogate pair, with the number of the text or pair, from 1."""
    for number, each in enumerate(texts, start=1):
        for text in each if isinstance(each, tuple) else (each,):
            if text and (half := _SURROGATE.search(text)):
                raise InputError(
                    f"text {number} holds half a surrogate pair (U+{ord(half[0]):04X}) at character {half.start()}",
                    hint="the text was not valid UTF-8 where it came from",
                )


def _not_unicode(texts: Sequence[str], error: Exception) -> Exception:
    if all(isinstance(text, str) for text in texts):
        require_unicode(texts)
    return error
