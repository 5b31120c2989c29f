"""Functions that a compiled model runs outside its graphs: what they do depends on numbers, or loops in Python.

`torch.compiler.disable` does this, but naming it loads the compiler, which takes longer than the rest of torch; here it
is loaded only by who compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def outside_graphs(function: Callable[Parameters, Result], *, recursive: bool = True) -> Callable[Parameters, Result]:
    """`function`, which a compiler does not look into; with `recursive` false, what it calls may be compiled again."""

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if torch.compiler.is_compiling():
            found: Result = torch.compiler.disable(function, recursive=recursive)(*args, **kwargs)
            return found
        return function(*args, **kwargs)

    return call
