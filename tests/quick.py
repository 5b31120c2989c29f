"""Grids of cases of which the first is quick and the others are slow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def first_is_quick(names: str | Sequence[str], cases: Iterable[Any], *, quick: int = 1, **options: Any) -> Any:
    """`pytest.mark.parametrize` for tests that train or start processes: the first cases are the others' quick twins.

    quick: how many of them; options: of `pytest.mark.parametrize`.
    """
    one = isinstance(names, str) and "," not in names
    found = []
    for number, case in enumerate(cases):
        if number < quick:
            found.append(case)
        elif isinstance(case, type(pytest.param())):
            found.append(pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id))
        else:
            found.append(pytest.param(*((case,) if one else case), marks=pytest.mark.slow))
    return pytest.mark.parametrize(names, found, **options)
