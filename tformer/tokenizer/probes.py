"""Texts that reveal what a tokenizer loses: each is encoded, decoded and compared."""

from __future__ import annotations

from dataclasses import dataclass

from tformer.tokenizer.tokenizer import Tokenizer

PROBES: dict[str, str] = {
    "plain": "The quick brown fox jumps over the lazy dog.",
    "double spaces": "one  two   three",
    "leading spaces": "   indented",
    "trailing spaces": "ends in spaces   ",
    "tab": "a\tb\t\tc",
    "newline": "line\n\nparagraph\n",
    "carriage return": "dos\r\nline\r\n",
    "null": "a\x00b",
    "contractions": "I'm sure they'll say IT'S we've",
    "digits": "3.14159 and 1,000,000",
    "accents": "café naïve Ångström",
    "combining marks": "e\u0301 a\u030a n\u0303 क्षि",
    "no-break and thin spaces": "a\u00a0b\u2009c\u3000d",
    "emoji with joiner": "👩\u200d👩\u200d👧 🏳\ufe0f\u200d🌈 👍🏽",
    "CJK": "日本語の文章と한국어와中文",
    "right to left": "שלום עולם مرحبا",
    "code": "def f(x):\n    return x**2  # {a: [1]}",
    "lower one eighth block": "a▁b",
    "word of 150 characters": "x" * 150,
    "special tokens as text": "[CLS] [SEP] <s></s><pad><unk> <|endoftext|> <extra_id_0> <0x41> <mask>",
}


@dataclass(frozen=True)
class ProbeFailure:
    probe: str
    text: str
    decoded: str


def probe_losslessness(tokenizer: Tokenizer) -> list[ProbeFailure]:
    """The probes whose decoded text differs from the normalised text; also the vocabulary's own special tokens."""
    own = "".join(tokenizer.token(i) for i in range(tokenizer.vocab_size) if tokenizer.is_special(i))
    failures = []
    for probe, text in {**PROBES, "its own special tokens as text": own}.items():
        ids = tokenizer.encode(text)
        decoded = tokenizer.decode(ids)
        if decoded != tokenizer.normalize(text):
            failures.append(ProbeFailure(probe, text, decoded))
    return failures
