"""What can be chosen when a tokenizer is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TokenizerModel = Literal["byte-bpe", "bpe", "wordpiece", "unigram", "word", "char"]
TemplateName = Literal["none", "gpt", "bert", "roberta", "t5", "seq2seq"]


@dataclass(frozen=True)
class TokenizerOptions:
    model: TokenizerModel = "byte-bpe"
    vocab_size: int = 4096  # ignored by char, which keeps every character
    template: TemplateName = "gpt"
    unicode: Literal["none", "nfc", "nfkc"] = "none"
    lowercase: bool = False
    strip_accents: bool = False
    digits: bool = False  # split numbers into single digits
    byte_fallback: bool = False  # bpe, unigram: unseen characters become <0xNN> bytes instead of [UNK]
    min_frequency: int = 2
    max_word_length: int = 100
    sentinels: int = 100  # template t5 only
    sample_mb: int | None = None  # train on an evenly spread sample of this size; null: the model's own limit

    def __post_init__(self) -> None:
        for name in ("vocab_size", "min_frequency", "max_word_length", "sample_mb"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, found {value}")
        if self.sentinels < 0:
            raise ValueError(f"sentinels must be at least 0, found {self.sentinels}")
