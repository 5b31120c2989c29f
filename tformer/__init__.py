"""tformer: train and use any classical Transformer from the command line.

>>> import tformer
>>> run = tformer.load("runs/gpt-tiny-1")  # .model, .tokenizer, .recipe

Importing the package loads nothing heavy: `load` brings torch with it when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tformer.loading import load as load

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    if name == "load":
        from tformer.loading import load

        return load
    raise AttributeError(f"module 'tformer' has no attribute '{name}'")
