"""tformer: train and use any classical Transformer from the command line or from Python.

>>> import tformer
>>> run = tformer.load("runs/gpt-tiny-1")  # .model, .tokenizer, .recipe; .generate(), .classify(), ...
>>> run = tformer.train("mytext.txt", arch="gpt")
>>> found = tformer.cross_validate("labels.csv", folds=5, arch="bert")  # .mean, .interval, .predictions

Importing the package loads nothing heavy: torch comes with the first use of `load`, `train` or `Run`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tformer.support import __version__
from tformer.support.errors import InputError, TformerError

if TYPE_CHECKING:
    from tformer.api import Run as Run
    from tformer.api import cross_validate as cross_validate
    from tformer.api import load as load
    from tformer.api import train as train

__all__ = ["InputError", "Run", "TformerError", "__version__", "cross_validate", "load", "train"]


def __getattr__(name: str) -> Any:
    if name in ("Run", "cross_validate", "load", "train"):
        from tformer import api

        return getattr(api, name)
    raise AttributeError(f"module 'tformer' has no attribute '{name}'")
