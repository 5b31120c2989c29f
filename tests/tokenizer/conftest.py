"""Small tokenizers of every kind, trained once for the whole folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer

LINES = (
    "The quick brown fox jumps over the lazy dog, and the low dog jumps lower.\n",
    "It's 12 degrees at 345 Main St.; they'll say \"hello\" (again) to café owners!\n",
    "\tdef f(x):\n\t\treturn x ** 2  # naïve\r\n",
    "[CLS] and [MASK] and <s> </s> <pad> <unk> <|endoftext|> <extra_id_0> <0x41> are only words here\n",
)
TEXT = "".join(LINES) * 60


@cache
def _trained(options: TokenizerOptions) -> Tokenizer:
    return train_tokenizer(lambda: iter([TEXT]), options)


@pytest.fixture
def make() -> Callable[..., Tokenizer]:
    """A tokenizer trained on TEXT with these options."""

    def build(model: str = "byte-bpe", **options: Any) -> Tokenizer:
        options.setdefault("vocab_size", 500)
        return _trained(TokenizerOptions(model=model, **options))  # type: ignore[arg-type]

    return build


@pytest.fixture
def text() -> str:
    return TEXT


@pytest.fixture
def data_folder() -> Path:
    """Real data, where it is at hand."""
    if "TFORMER_DATA" not in os.environ:
        pytest.skip("TFORMER_DATA is not set")
    return Path(os.environ["TFORMER_DATA"])
