"""Common beginning and end of the commands that look inside a model: checked options, loaded model, output."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tformer.cli.process import StopFlag
from tformer.cli.report import emit_document, progress_reporter, show_notes
from tformer.support.files import refuse_to_replace

if TYPE_CHECKING:
    from tformer.loading import Loaded
    from tformer.viz.output import OutputTarget
    from tformer.viz.picture import ReportView
    from tformer.workers.work import Work


@contextmanager
def looking_inside(
    options: Any, stem: str, reads: Iterable[str | Path | None], *, kinds: tuple[str, ...] | None = None
) -> Iterator[tuple[OutputTarget, Loaded, Work]]:
    """(where the output goes, the model, the work, which an interruption stops), after all checks that need no model.

    Args:
        options: with `run`, `checkpoint`, `device`, `output`, `format` and `check`.
        stem: of an unnamed output. reads: files that the output may not replace.
        kinds: heads that the command can use; None: any.
    """
    from tformer.viz.output import choose_output

    chosen = choose_output(options.output, options.format, stem=stem)
    refuse_to_replace(chosen.path, filter(None, reads), option="-o")
    with StopFlag() as flag:
        from tformer.loading import load
        from tformer.support.device import resolve_device
        from tformer.workers.work import Work

        loaded = load(options.run, device=resolve_device(options.device), which=options.checkpoint, kinds=kinds)
        show_notes((f"model: {loaded.path}", *loaded.notes), dim=True)
        yield chosen, loaded, Work(progress_reporter, flag.should_stop, lambda text: show_notes([text], dim=True))


def command_line() -> str:
    """The command as it was called."""
    return shlex.join(["tformer", *sys.argv[1:]])


def emit_view(chosen: OutputTarget, loaded: Loaded, view: ReportView) -> None:
    """Write a report in the chosen format."""
    from tformer.viz.attention.scene import run_name

    notes = (f"Model: {loaded.path}.", f"Command: {command_line()}")
    to_file = chosen.path is not None
    emit_document(chosen, view.render(chosen.format, run=run_name(loaded.path), notes=notes, to_file=to_file))
