"""Common beginning and end of the commands that look inside a model: checked options, loaded model, output."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tformer.cli.process import StopFlag
from tformer.cli.report import emit_document, progress_reporter, show_notes
from tformer.support.files import refuse_to_replace

if TYPE_CHECKING:
    from tformer.loading import Loaded
    from tformer.viz.output import Output
    from tformer.viz.plots import Plot
    from tformer.workers.work import Work


@contextmanager
def looking_inside(
    options: Any, stem: str, reads: Iterable[str | Path | None], *, kinds: tuple[str, ...] | None = None
) -> Iterator[tuple[Output, Loaded, Work]]:
    """(where the output goes, the model, the work, which an interruption stops), after all checks that need no model.

    Args:
        options: with `run`, `checkpoint`, `device`, `output`, `format` and `check`.
        stem: of an unnamed output. reads: files that the output may not replace.
        kinds: heads that the command can use; None: any.
    """
    options.check()
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


def emit_views(
    chosen: Output,
    loaded: Loaded,
    title: str,
    plots: Callable[[], Sequence[Plot]],
    *,
    json: Callable[[], str],
    csv: Callable[[], str],
    terminal: Callable[[], str] | None = None,
    html: Callable[..., str] | None = None,
    subtitle: str = "",
) -> None:
    """Write a report in the chosen format: as its own text there, else as its plots.

    Args:
        title: with {} for the name of the run.
        html: called with `title` and the `notes` that stand below a page. subtitle: of a page of plots.
    """
    from tformer.viz.attention.scene import run_name
    from tformer.viz.picture import render_plots

    notes = (f"Model: {loaded.path}.", f"Command: {command_line()}")
    whole: Any = {"title": title.replace("{}", run_name(loaded.path)), "notes": notes}
    if chosen.format == "html" and html is not None:
        return emit_document(chosen, html(**whole))
    own = {"json": json, "csv": csv, "terminal": terminal}.get(chosen.format)
    to_file = chosen.path is not None
    emit_document(
        chosen, own() if own else render_plots(plots(), chosen.format, to_file=to_file, subtitle=subtitle, **whole)
    )
