"""Tokenizers: train, load, special tokens and templates, report.

`Tokenizer` and `train_tokenizer` are imported on first use: reading the options alone, as `--help` does, imports no
library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tformer.tokenizer.options import TokenizerOptions

if TYPE_CHECKING:
    from tformer.tokenizer.tokenizer import Tokenizer
    from tformer.tokenizer.train import train_tokenizer

__all__ = ["Tokenizer", "TokenizerOptions", "train_tokenizer"]

_MODULES = {"Tokenizer": "tokenizer", "train_tokenizer": "train"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
