"""The one helper that option dataclasses share: a check that names the field and the value found.

Options are small frozen dataclasses that stand beside the class they configure. They validate themselves
(`ValueError`), so that a recipe and a direct call from Python are refused with the same words.
"""

from __future__ import annotations


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def require_positive(**values: float | None) -> None:
    """Every value that is given must be greater than zero."""
    for name, value in values.items():
        require(value is None or value > 0, f"{name} must be greater than 0, found {value}")


def require_probability(**values: float) -> None:
    """Every value must lie in [0, 1)."""
    for name, value in values.items():
        require(0.0 <= value < 1.0, f"{name} must be at least 0 and below 1, found {value}")
