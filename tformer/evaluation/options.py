"""Options of an evaluation: which data is read, what is measured, and on which machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from tformer.errors import InputError
from tformer.output_files import refuse_to_replace, require_writable

ENDINGS = (".tsv", ".jsonl")  # of the file of mistakes


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The data that a model is measured on; None: not given."""

    data: str | None = None
    text_column: str | None = None
    text2_column: str | None = None
    label_column: str | None = None
    invalid_utf8: Literal["strict", "replace"] | None = None
    source: str | None = None
    target: str | None = None
    source_column: str | None = None
    target_column: str | None = None
    prefix: str | None = None
    batch_size: int | None = None

    def given(self) -> Iterator[str]:
        """The names of the options that differ from their defaults."""
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                yield field.name

    def check(self) -> None:
        """Raise InputError for what can be refused before anything is loaded."""
        require_positive("--batch-size", self.batch_size)
        if self.invalid_utf8 not in (None, "strict", "replace"):
            raise InputError(f"--invalid-utf8 must be strict or replace, found '{self.invalid_utf8}'")
        if (self.source is None) != (self.target is None):
            given, missing = ("--source", "--target") if self.target is None else ("--target", "--source")
            raise InputError(f"{given} without {missing}", hint="two aligned files: --source FILE --target FILE")
        if self.source is not None and self.data is not None:
            raise InputError("--data and --source exclude each other", hint="--data is one table with both sides")


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(DataOptions):
    """The options of `tformer evaluate`."""

    run: str | None = None
    score: bool = False
    no_decode: bool = False
    beam_size: int | None = None
    max_new_tokens: int | None = None
    length_penalty: float | None = None
    length_penalty_type: str | None = None
    bleu_tokenize: str | None = None
    lowercase: bool = False
    errors_file: Path | None = None
    seq_len: int | None = None
    stride: int | None = None
    pseudo_perplexity: bool = False
    max_tokens: int | None = None
    checkpoint: str = "best"
    device: str = "auto"
    precision: str = "auto"
    quantize: str = "none"

    def check(self) -> None:
        super().check()
        require_positive("--seq-len", self.seq_len)
        require_positive("--max-tokens", self.max_tokens)
        if self.max_tokens is not None and not self.pseudo_perplexity:
            raise InputError("--max-tokens bounds --pseudo-perplexity, which is not asked for")
        if self.score and self.no_decode:
            raise InputError("--score and --no-decode exclude each other")
        if self.score or self.no_decode:
            for name in self.given():
                if name in DECODING:
                    without = "--score" if self.score else "--no-decode"
                    raise InputError(f"{flag_of(name)} has no meaning with {without}")
        if self.bleu_tokenize is not None:
            from tformer.metrics.text import require_tokenizer

            require_tokenizer(self.bleu_tokenize)
        if self.errors_file is not None:
            _check_errors_file(self.errors_file)
            named = [path for path in (self.data, self.source, self.target) if path is not None]
            refuse_to_replace(self.errors_file, named, option="--errors")


COMMON = frozenset({"run", "data", "batch_size", "checkpoint", "device", "precision", "quantize"})
"""Options that apply to every kind of data."""

DECODING = frozenset(
    (
        "beam_size",
        "max_new_tokens",
        "length_penalty",
        "length_penalty_type",
        "bleu_tokenize",
        "lowercase",
        "errors_file",
    )
)
"""Options that apply only where the model decodes outputs of its own."""


def flag_of(name: str) -> str:
    """The flag of an option on the command line."""
    return "--errors" if name == "errors_file" else "--" + name.replace("_", "-")


def require_positive(flag: str, value: int | None) -> None:
    """Raise InputError for a number below 1."""
    if value is not None and value < 1:
        raise InputError(f"{flag} must be at least 1, found {value}")


def _check_errors_file(path: Path) -> None:
    if path.suffix.lower() not in ENDINGS:
        hint = "invalid UTF-8 is accepted with --invalid-utf8 replace" if str(path) in ("strict", "replace") else None
        raise InputError(f"--errors writes a file that ends in {' or '.join(ENDINGS)}, found '{path}'", hint=hint)
    require_writable(path, option="--errors")
