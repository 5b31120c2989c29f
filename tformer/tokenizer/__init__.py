"""Tokenizers: train, load, templates, report.

The names below are imported on first use, so that reading the options (as `--help` does) loads no library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tformer.tokenizer.decoding import StreamDecoder
    from tformer.tokenizer.options import TokenizerOptions
    from tformer.tokenizer.probes import ProbeFailure, probe_losslessness
    from tformer.tokenizer.report import tokenizer_report
    from tformer.tokenizer.special import SpecialIds
    from tformer.tokenizer.tokenizer import Tokenizer
    from tformer.tokenizer.train import Trained, train_tokenizer, train_with_facts

__all__ = [
    "ProbeFailure",
    "SpecialIds",
    "StreamDecoder",
    "Tokenizer",
    "TokenizerOptions",
    "Trained",
    "probe_losslessness",
    "tokenizer_report",
    "train_tokenizer",
    "train_with_facts",
]

_HOMES = {
    "ProbeFailure": "probes",
    "SpecialIds": "special",
    "StreamDecoder": "decoding",
    "Tokenizer": "tokenizer",
    "TokenizerOptions": "options",
    "Trained": "train",
    "probe_losslessness": "probes",
    "tokenizer_report": "report",
    "train_tokenizer": "train",
    "train_with_facts": "train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
