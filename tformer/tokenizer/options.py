"""What can be chosen when a tokenizer is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TokenizerModel = Literal["byte-bpe", "bpe", "wordpiece", "unigram", "word", "char"]
TemplateName = Literal["none", "gpt", "bert", "roberta", "t5", "seq2seq"]
UnicodeForm = Literal["none", "nfc", "nfkc"]

MAX_VOCAB_SIZE = 2**32  # ids are stored as uint16 or uint32
BYTE_FALLBACK_MODELS = ("bpe", "unigram")


@dataclass(frozen=True)
class TokenizerOptions:
    model: TokenizerModel = "byte-bpe"
    vocab_size: int = 4096  # special tokens included; ignored by char, which keeps every character
    template: TemplateName = "gpt"
    unicode: UnicodeForm = "none"
    lowercase: bool = False
    strip_accents: bool = False
    digits: bool = False  # split numbers into single digits
    byte_fallback: bool = False  # bpe, unigram: unseen characters become <0xNN> bytes instead of [UNK]
    min_frequency: int = 2  # byte-bpe, bpe, wordpiece, word
    max_word_length: int = 100  # characters; longer words are cut (wordpiece: become [UNK])
    sentinels: int | None = None  # <extra_id_N> tokens; null: the template's own number (t5 100, others 0)
    sample_mb: int | None = None  # train on an evenly spread sample of this size; null: the model's own limit

    def __post_init__(self) -> None:
        for name in ("vocab_size", "min_frequency", "max_word_length", "sample_mb"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, found {value}")
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(f"vocab_size must be at most {MAX_VOCAB_SIZE} (ids are uint32), found {self.vocab_size}")
        if self.sentinels is not None and self.sentinels < 0:
            raise ValueError(f"sentinels must be at least 0, found {self.sentinels}")
        if self.byte_fallback and self.model not in BYTE_FALLBACK_MODELS:
            raise ValueError(f"byte_fallback needs model {' or '.join(BYTE_FALLBACK_MODELS)}, found {self.model}")
