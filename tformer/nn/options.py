"""Checks for option dataclasses: ValueError with the name of the field and the value found.

Options are small frozen dataclasses beside the class that they configure. They validate themselves, so that a recipe
and a direct call from Python give the same error.
"""

from __future__ import annotations


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def require_positive(**values: float | None) -> None:
    """Raise ValueError unless every value is None or greater than zero."""
    for name, value in values.items():
        require(value is None or value > 0, f"{name} must be greater than 0, found {value}")


def require_probability(**values: float) -> None:
    """Raise ValueError unless every value lies in [0, 1)."""
    for name, value in values.items():
        require(0.0 <= value < 1.0, f"{name} must be at least 0 and below 1, found {value}")
