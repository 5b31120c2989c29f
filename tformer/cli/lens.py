"""`tformer lens`: the answer after each layer, and the parts of a logit, as a page, a picture, text or numbers."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from tformer.cli.command import examples, takes_options
from tformer.cli.process import StopFlag
from tformer.cli.report import emit_document, progress_reporter, show_notes
from tformer.inside.options import LensOptions
from tformer.support.errors import InputError
from tformer.support.files import refuse_to_replace

if TYPE_CHECKING:
    from tformer.viz.lens.report import LensReport
    from tformer.viz.output import Output

EPILOG = examples(
    '`tformer lens --text "The cat sat on the mat." -o lens.html`',
    '`tformer lens --text "The cat sat" --target-token " on" --format terminal`',
    '`tformer lens --text "The cat sat" --tuned book.txt -o tuned.html`',
    '`tformer lens --text "The keys are" --target-token " are" --against " is" --view parts -o parts.svg`',
    "`tformer lens runs/vit-mnist-1 --image three.png --format csv`",
)


@takes_options
def lens(options: LensOptions) -> None:
    """Show the answer after each layer (logit lens), and what each part adds to a logit.

    Language models: for each position the most probable tokens, with probability and rank of the token that comes next,
    entropy, and KL to the model's answer; masked language models at each [MASK]; classifiers: the labels. Logits are
    divided into embedding, positions, every attention head, biases and feed-forwards, which add up to the logit. The
    page (default) has both. --tuned trains a tuned lens (decoder-only language models), which --lens tuned then reads.
    """
    options.check()
    from tformer.viz.output import choose_output

    chosen = choose_output(options.output, options.format, stem="lens")
    inputs = [each for each in (options.image, options.tuned) if each is not None]
    refuse_to_replace(chosen.path, inputs, option="-o")
    from tformer.loading import load
    from tformer.support.device import resolve_device
    from tformer.viz.lens.report import HEADS, make_report
    from tformer.workers.work import Work

    loaded = load(options.run, device=resolve_device(options.device), which=options.checkpoint, kinds=HEADS)
    show_notes((f"model: {loaded.path}", *loaded.notes), dim=True)
    with StopFlag() as stop:
        command = shlex.join(["tformer", *sys.argv[1:]])
        report = make_report(loaded, options, work=Work(progress_reporter, stop.should_stop), command=command)
    show_notes(report.notes, dim=True)
    if options.view == "parts" and report.parts is None:
        raise InputError(f"--view parts: {report.without_parts}")
    emit_document(chosen, _content(report, options, chosen))


def _content(report: LensReport, options: LensOptions, chosen: Output) -> str | bytes:
    if chosen.format == "html":
        from tformer.viz.lens.page import render

        return render(report)
    from tformer.viz.lens.text import as_csv, as_json, as_text, heading, plots_of

    if chosen.format == "json":
        return as_json(report)
    if chosen.format == "csv":
        return as_csv(report, options.view)
    if chosen.format == "terminal":
        places = range(0 if report.every else len(report.positions) - 1, len(report.positions))
        return as_text(report, options.view, places)
    from tformer.viz.picture import render_plots

    return render_plots(plots_of(report, options.view), chosen.format, title=heading(report, options.view))
