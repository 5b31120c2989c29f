"""Values that a shell completes: runs, families, presets, topics of the guide and the choices that an option shows.

`tformer --install-completion` makes the shell run `tformer` with the line so far in its environment. Typer completes
the names of commands and options itself. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import typer

from tformer.support.files import RUNS
from tformer.support.shipped import list_presets

Completer = Callable[[typer.Context, str], list[str]]

LITERAL = re.compile(r"[a-z0-9][a-z0-9-]*")  # a choice within `best|latest|step-N`


def completer(flags: Sequence[str], metavar: str | None) -> Completer | None:
    """The function that completes an option (by its first flag) or an argument (by the name of its value); None: typer
    completes it by its type."""
    name = flags[0] if flags else (metavar or "").strip("[].")
    literals = [word for word in (metavar or "").split("|") if LITERAL.fullmatch(word)]
    words = WORDS.get(name, lambda context: literals)
    if name not in WORDS and not literals:
        return None

    def matching(context: typer.Context, incomplete: str) -> list[str]:
        return [word for word in words(context) if word.startswith(incomplete)]

    return matching


def _presets(context: typer.Context) -> list[str]:
    """The presets of --arch; without it ARCH/PRESET of every family."""
    presets, arch = list_presets(), context.params.get("arch")
    return presets.get(arch, []) if arch else [f"{arch}/{name}" for arch, names in presets.items() for name in names]


def _runs(context: typer.Context) -> list[str]:
    """The runs under runs/, by path; none for another beginning, which the shell completes as a file."""
    return sorted(path.parent.as_posix() for path in RUNS.glob("*/recipe.yaml"))


def _topics(context: typer.Context) -> Iterable[str]:
    from tformer.guide import TOPICS

    return TOPICS


WORDS: dict[str, Callable[[typer.Context], Iterable[str]]] = {
    "--arch": lambda context: list_presets(),
    "--preset": _presets,
    "TOPIC": _topics,
    **dict.fromkeys(("RUN", "RUN2", "CHECKPOINT", "--run", "--init-from", "--teacher", "--ensemble"), _runs),
}
"""All words of an option, by flag, or of an argument, by the name of its value."""
