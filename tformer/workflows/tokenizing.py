"""Tokenizers at the paths that a user names, and reports of how they read texts (`tformer tokenize`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tformer.data.encoding import EncodedText, TextReader, token_text
from tformer.data.shards.template import TextTemplate
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.special import SpecialIds

if TYPE_CHECKING:
    from tformer.checkpoint.read import Checkpoint

UNLIMITED = 10**9  # transformers writes a larger model_max_length where there is none
Side = Literal["source", "target"]


@dataclass(frozen=True)
class NamedTokenizer:
    """A tokenizer with the reading of its model, and the path it came from."""

    name: str
    reader: TextReader
    notes: tuple[str, ...] = ()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.reader.tokenizer


def open_subject(path: Path | None, *, checkpoint: str = "best", side: Side | None = None) -> NamedTokenizer:
    """The tokenizer at a path: a tokenizer.json, a run, a checkpoint, or a Hugging Face folder. No weights are read.

    path: None is the newest run. side: of an encoder-decoder; by default the source, or the only one.

    Raises InputError: nothing there, no tokenizer, a damaged file, or `side` for what has no sides.
    """
    if path is not None and path.is_file():
        _require_no_side(path, side)
        return NamedTokenizer(str(path), TextReader.of_tokenizer(Tokenizer.load(path)))
    # Reading runs needs torch, which takes a second to load.
    from tformer.checkpoint.read import read_checkpoint
    from tformer.checkpoint.resolve import newest_checkpoint, resolve_checkpoint
    from tformer.checkpoint.run import is_run
    from tformer.support.files import MANIFEST

    path = newest_checkpoint() if path is None else path
    if path.is_dir() and not is_run(path) and not (path / MANIFEST).is_file():
        _require_no_side(path, side)
        return _of_folder(path)
    return _of_checkpoint(read_checkpoint(resolve_checkpoint(path, checkpoint)), str(path), side)


def _require_no_side(path: Path, side: Side | None) -> None:
    if side is not None:
        raise InputError(
            f"--side {side}: {path} is not a run and has no sides", hint="name the side's own tokenizer.json"
        )


def _of_folder(folder: Path) -> NamedTokenizer:
    from tformer.interop.read_model import read_config
    from tformer.interop.tokenizer_config import read_tokenizer_config
    from tformer.interop.tokenizer_files import read_tokenizer
    from tformer.interop.weight_files import CONFIG

    found = read_tokenizer(folder, read_config(folder) if (folder / CONFIG).is_file() else {})
    tokenizer = Tokenizer.from_json(found.json, name=str(folder))
    roles: dict[str, Any] = dict(found.roles)
    tokenizer = tokenizer.with_special(replace(tokenizer.special, **roles))
    options = read_tokenizer_config(folder).options
    longest = options.get("model_max_length")
    reader = TextReader.of_tokenizer(
        tokenizer,
        max_length=int(longest) if isinstance(longest, int) and 0 < longest < UNLIMITED else None,
        padding_side="left" if options.get("padding_side") == "left" else "right",
    )
    return NamedTokenizer(str(folder), reader, found.notes)


def _of_checkpoint(checkpoint: Checkpoint, name: str, side: Side | None) -> NamedTokenizer:
    from tformer.loading import load_tokenizers, target_reader, text_reader

    recipe = checkpoint.recipe
    if checkpoint.tokenizer_json is None:
        raise InputError(f"{name} is a model of images: it has no tokenizer")
    source, target = load_tokenizers(checkpoint)
    assert source is not None
    if side == "target":
        reads = f"{name}: the decoder reads every id but the last and predicts every id but the first"
        return NamedTokenizer(f"{name} (target)", target_reader(recipe, target or source), (reads,))
    if side == "source" and not recipe.model.is_encoder_decoder:
        raise InputError(f"--side source: {name} is not an encoder-decoder", hint="leave --side out")
    if not recipe.model.is_encoder_decoder:
        return NamedTokenizer(name, text_reader(recipe, source))
    vocabulary = "another vocabulary" if target is not None else "the same vocabulary"
    note = f"{name}: this is the source's reading; the target has {vocabulary} and another template (--side target)"
    return NamedTokenizer(f"{name} (source)", text_reader(recipe, source), () if side else (note,))


# --- reports ----------------------------------------------------------------------------------------------------------


def template_of(template: TextTemplate, tokenizer: Tokenizer, *, pair: bool = False) -> str:
    """A template as text: `[CLS] A [SEP]`, for a pair `[CLS] A [SEP] B [SEP]`."""

    def named(ids: Sequence[int]) -> list[str]:
        return [token_text(tokenizer, token) for token in ids]

    middle = [*named(template.middle), "B"] if pair else []
    return " ".join([*named(template.prefix), "A", *middle, *named(template.suffix)])


def special_tokens(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """Token and id of every role: pad, bos, eos, unk, cls, sep, mask; the number of sentinels."""
    roles = {field.name: getattr(tokenizer.special, field.name) for field in fields(SpecialIds)}
    sentinels = roles.pop("sentinels")
    if sentinels:
        roles["sentinels"] = sentinels[0]
    found: dict[str, dict[str, Any]] = {
        role: {"token": tokenizer.token(token), "id": token} for role, token in roles.items() if token is not None
    }
    if sentinels:
        found["sentinels"]["count"] = len(sentinels)
    return found


def described(subject: NamedTokenizer) -> dict[str, Any]:
    """The facts of a tokenizer and of its model's reading, as JSON data."""
    reader, tokenizer = subject.reader, subject.tokenizer
    pair = None if reader.pair is None else template_of(reader.pair(tokenizer), tokenizer, pair=True)
    return {
        "path": subject.name,
        "model": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "template": template_of(reader.single, tokenizer),
        "pair_template": pair,
        "special_tokens": special_tokens(tokenizer),
        "max_length": reader.max_length,
        "padding_side": reader.padding_side,
        "truncation": reader.truncation,
        "sha256": tokenizer.sha256,
    }


@dataclass(frozen=True)
class TokenizedText:
    """One text, or a pair, and its tokens."""

    texts: tuple[str, ...]
    encoded: EncodedText

    def num_bytes(self) -> int:
        """UTF-8 bytes of the texts."""
        return sum(len(text.encode("utf-8")) for text in self.texts)

    def num_tokens(self) -> int:
        """Number of the texts' own tokens, cut ones included."""
        return self.encoded.from_template.count(False) + self.encoded.num_cut

    def document(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """The tokens as JSON data. `start` and `end` count characters of the token's text."""
        encoded = self.encoded
        columns = zip(encoded.ids, encoded.types, encoded.parts, encoded.spans, strict=True)
        tokens = [
            {
                "id": token,
                "piece": tokenizer.token(token),
                "text": token_text(tokenizer, token),
                "start": None if span is None else span[0],
                "end": None if span is None else span[1],
                "text_number": part,
                "type": kind,
                "special": span is None,
            }
            for token, kind, part, span in columns
        ]
        size, count = self.num_bytes(), self.num_tokens()
        return {
            "text": self.texts[0],
            **({"text2": self.texts[1]} if len(self.texts) == 2 else {}),
            "tokens": tokens,
            "decoded": tokenizer.decode(encoded.ids),
            "bytes": size,
            "num_tokens": count,
            "num_cut": encoded.num_cut,
            "bytes_per_token": bytes_per_token(size, count),
        }


def bytes_per_token(num_bytes: int, num_tokens: int) -> float | None:
    return num_bytes / num_tokens if num_tokens else None


class Totals:
    """Sums over texts, template excluded: bytes, tokens, unknown tokens, distinct tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._unk, self._seen = tokenizer.special.unk, set[int]()
        self.texts = self.bytes = self.tokens = self.unknown = 0

    def add(self, reading: TokenizedText) -> None:
        """Count a text or a pair; cut tokens count by their number only."""
        encoded = reading.encoded
        ids = [token for token, span in zip(encoded.ids, encoded.spans, strict=True) if span is not None]
        self.texts += 1
        self.bytes += reading.num_bytes()
        self.tokens += reading.num_tokens()
        self.unknown += ids.count(-1 if self._unk is None else self._unk)
        self._seen.update(ids)

    def document(self) -> dict[str, Any]:
        """The sums as JSON data."""
        counted = {name: getattr(self, name) for name in ("texts", "bytes", "tokens")}
        rate = bytes_per_token(self.bytes, self.tokens)
        return {**counted, "bytes_per_token": rate, "unknown": self.unknown, "distinct": len(self._seen)}


def full_document(subject: NamedTokenizer, readings: Sequence[TokenizedText]) -> dict[str, Any]:
    """A tokenizer, its sums, every token of every text, and the padded batch, as JSON data."""
    totals = Totals(subject.tokenizer)
    for reading in readings:
        totals.add(reading)
    batch = subject.reader.batch([reading.encoded for reading in readings])
    return {
        **described(subject),
        "totals": totals.document(),
        "texts": [reading.document(subject.tokenizer) for reading in readings],
        "batch": {name: values.tolist() for name, values in batch.items()},
    }


def decoded_document(subject: NamedTokenizer, ids: Sequence[int]) -> dict[str, Any]:
    """Given ids as pieces and as text. Raises InputError for an id that the vocabulary lacks."""
    tokenizer = subject.tokenizer
    try:
        pieces = [tokenizer.token(token) for token in ids]
    except ValueError as error:
        raise InputError(f"--ids: {subject.name}: {error}", hint=f"ids are 0 to {tokenizer.vocab_size - 1}") from error
    return {
        "path": subject.name,
        "ids": list(ids),
        "pieces": pieces,
        "text": tokenizer.decode(ids),
        "text_with_special": tokenizer.decode(ids, skip_special=False),
    }
