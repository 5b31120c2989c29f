"""The prefix of a text-to-text task: the words before a source that say what is to be done with it."""

from __future__ import annotations


def with_prefix(prefix: str, source: str) -> str:
    """The source behind its prefix. A blank source stays as it is, and so does one that begins with the prefix."""
    blank = not source or source.isspace()
    return source if blank or source.startswith(prefix) else prefix + source
