"""Values that a shell completes: runs, families, presets, topics of the guide and the choices that an option shows.

`tformer --install-completion` makes the shell run `tformer` with the line so far in its environment. Typer completes
the names of commands and options itself. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import typer

from tformer.support.files import RUNS
from tformer.support.shipped import list_presets

Completer = Callable[[typer.Context, str], list[str]]

LITERAL = re.compile(r"[a-z0-9][a-z0-9-]*")  # a choice within `best|latest|step-N`


def completer(flags: Sequence[str], metavar: str | None) -> Completer | None:
    """The function that completes an option (by its first flag) or an argument (by the name of its value); None: typer
    completes it by its type."""
    name = flags[0] if flags else (metavar or "").strip("[].")
    if name in COMPLETERS:
        return COMPLETERS[name]
    literals = [word for word in (metavar or "").split("|") if LITERAL.fullmatch(word)]
    return _choices(literals) if literals else None


def _choices(words: Sequence[str]) -> Completer:
    def matching(context: typer.Context, incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return matching


def _archs(context: typer.Context, incomplete: str) -> list[str]:
    return [arch for arch in list_presets() if arch.startswith(incomplete)]


def _presets(context: typer.Context, incomplete: str) -> list[str]:
    """The presets of --arch; without it ARCH/PRESET of every family."""
    presets, arch = list_presets(), context.params.get("arch")
    every = presets.get(arch, []) if arch else [f"{arch}/{name}" for arch, names in presets.items() for name in names]
    return [preset for preset in every if preset.startswith(incomplete)]


def _runs(context: typer.Context, incomplete: str) -> list[str]:
    """The runs under runs/, by path; none for another beginning, which the shell completes as a file."""
    runs = sorted(path.parent.as_posix() for path in RUNS.glob("*/recipe.yaml"))
    return [run for run in runs if run.startswith(incomplete)]


def _topics(context: typer.Context, incomplete: str) -> list[str]:
    from tformer.guide import TOPICS

    return [topic for topic in TOPICS if topic.startswith(incomplete)]


COMPLETERS: dict[str, Completer] = {
    "--arch": _archs,
    "--preset": _presets,
    "TOPIC": _topics,
    **dict.fromkeys(("RUN", "RUN2", "CHECKPOINT", "--run", "--init-from", "--teacher", "--ensemble"), _runs),
}
"""By flag, or by the name of an argument's value."""
