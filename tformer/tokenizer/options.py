"""Options of training a tokenizer, declared once for recipes and for `tformer train-tokenizer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tformer.support.bounds import out_of_bounds, within
from tformer.support.options import Panel, facts_of, hints_of

TokenizerModel = Literal["byte-bpe", "bpe", "wordpiece", "unigram", "word", "char"]
TemplateName = Literal["none", "gpt", "chatml", "bert", "roberta", "t5", "seq2seq"]
UnicodeForm = Literal["none", "nfc", "nfkc"]
PreTokenization = Literal["tformer", "gpt-2"]

MOST_ENTRIES, MOST_SENTINELS, MOST = 2**24, 2**16, 2**32
"""Ceilings above any use: the trainers reserve 40 bytes for each entry before they begin."""
BYTE_FALLBACK_MODELS = ("bpe", "unigram")

MODEL, TEXT, TRAINING = Panel("Model"), Panel("Text"), Panel("Training")


@dataclass(frozen=True)
class TokenizerOptions:
    """Kind, size, special tokens, normalization and training of a tokenizer."""

    model: Annotated[TokenizerModel, MODEL("--model", help="Kind of tokenizer.")] = "byte-bpe"
    vocab_size: Annotated[
        int,
        within(1, MOST_ENTRIES),
        MODEL("--vocab-size", help="Number of entries, special tokens included; char keeps every character."),
    ] = 4096
    template: Annotated[
        TemplateName, MODEL("--template", help="Special tokens and where they are placed around a text.")
    ] = "gpt"
    unicode: Annotated[UnicodeForm, TEXT("--unicode", help="Unicode normal form.", rare=True)] = "none"
    lowercase: Annotated[bool, TEXT("--lowercase", help="Lower-case the text.")] = False
    strip_accents: Annotated[bool, TEXT("--strip-accents", help="Remove accents.", rare=True)] = False
    digits: Annotated[bool, TEXT("--digits", help="Split numbers into single digits.")] = False
    pre_tokenization: Annotated[
        PreTokenization,
        MODEL(
            "--pre-tokenization",
            help="byte-bpe: what cuts texts into words. llama.cpp (`export --to gguf`) knows gpt-2, which cuts words "
            "at combining marks, such as those of Hindi.",
            rare=True,
        ),
    ] = "tformer"
    byte_fallback: Annotated[
        bool,
        MODEL("--byte-fallback", help="bpe, unigram: encode unseen characters as `<0xNN>` bytes, not [UNK]."),
    ] = False
    min_frequency: Annotated[
        int,
        within(1, MOST),
        TRAINING(
            "--min-frequency",
            help="byte-bpe, bpe, wordpiece, word: minimum count of a pair or word that gets an entry.",
            rare=True,
        ),
    ] = 2
    sentinels: Annotated[
        int | None,
        within(0, MOST_SENTINELS),
        MODEL("--sentinels", help="Number of `<extra_id_N>` tokens.", default="t5 100, others 0", rare=True),
    ] = None
    added_tokens: Annotated[
        tuple[str, ...],
        MODEL(
            "--added-token",
            metavar="TEXT",
            help="A tag or word that is one token wherever it stands alone, and with punctuation at an end also inside "
            "words; repeatable, as in `--added-token PAST`.",
            rare=True,
        ),
    ] = ()
    sample_mb: Annotated[
        int | None,
        within(1, MOST),
        TRAINING(
            "--sample-mb",
            help="Train on an evenly spread sample of this size.",
            default="unigram 64, char all, others 256",
            rare=True,
        ),
    ] = None

    def __post_init__(self) -> None:
        for name, hint in hints_of(TokenizerOptions).items():
            if wrong := out_of_bounds(getattr(self, name), facts_of(hint)):
                raise ValueError(f"{name} {wrong}")
        object.__setattr__(self, "added_tokens", tuple(dict.fromkeys(self.added_tokens)))
        for token in self.added_tokens:
            if not token or any(map(str.isspace, token)):
                raise ValueError(f"added_tokens: found {token!r}, expected text without spaces")
            if self.model == "byte-bpe" and not token.isascii():
                raise ValueError(f"added_tokens: found {token!r}, expected ASCII characters with model byte-bpe")
        if self.pre_tokenization != "tformer" and self.model != "byte-bpe":
            raise ValueError(f"pre_tokenization {self.pre_tokenization} needs model byte-bpe, found {self.model}")
        if self.byte_fallback and self.model not in BYTE_FALLBACK_MODELS:
            raise ValueError(f"byte_fallback needs model {' or '.join(BYTE_FALLBACK_MODELS)}, found {self.model}")
