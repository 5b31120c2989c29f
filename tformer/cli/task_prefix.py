"""Which prefix goes before the sources that `generate` and `evaluate` read: what the run's tasks were trained with."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tformer.recipe.recipe import Recipe

SHOWN = 5  # prefixes that are listed
OPTION = "--prefix TEXT"


def task_prefix(recipe: Recipe, asked: str | None) -> tuple[str, str | None]:
    """(prefix, note): what goes before each source ("": nothing), and what a person should be told of it.

    That is what was asked for, else the prefix that all training data of the run has. Where tasks have different ones,
    there is none: only the person knows which task is meant.
    """
    if asked is not None:
        return asked, None
    prefixes = list(dict.fromkeys(spec.prefix for spec in recipe.data.train))
    if len(prefixes) == 1 and prefixes[0]:
        [prefix] = prefixes
        return prefix, f"sources get the prefix of the run's task, '{prefix}' ({OPTION} gives another or none)"
    if len(prefixes) > 1:
        listed = ", ".join(f"'{prefix}'" for prefix in prefixes[:SHOWN])
        more = len(prefixes) - SHOWN
        return "", (
            f"the run's tasks have different prefixes, sources get none of them: {listed}"
            f"{f' and {more} more' if more > 0 else ''} ({OPTION} chooses)"
        )
    return "", None
