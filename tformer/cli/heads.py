"""`tformer heads`: scores of attention heads, of one checkpoint or over a training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer.cli.command import examples, takes_options
from tformer.cli.look_inside import command_line, looking_inside
from tformer.cli.report import emit_document, show_notes
from tformer.inside.options import HeadOptions
from tformer.support.formatting import aligned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tformer.inside.heads import HeadReport
    from tformer.loading import Loaded
    from tformer.viz.output import Output

EPILOG = examples(
    "`tformer heads`",
    "`tformer heads runs/first --format terminal`",
    "`tformer heads runs/induction --over-training -o birth.html`",
    "`tformer heads runs/first --data book.txt -o heads.svg`",
    "`tformer heads runs/translator --source test.en --target test.de -o alignment.html`",
)


@takes_options
def heads(options: HeadOptions) -> None:
    """Score attention heads: induction, previous token, alignment.

    The model reads random tokens that repeat, or --data. A score is the mean attention to the token before, to the
    first token, to other places of the same token, or to the tokens that came after those (induction). An
    encoder-decoder reads pairs; sharpness and coverage of its cross-attention show which heads align. With
    --over-training the page shows in which steps heads of a kind appear: tformer train --arch gpt --preset induction
    trains a model for it.
    """
    with looking_inside(options, "heads", options.files) as (chosen, loaded, work):
        from tformer.viz.heads import best_lines
        from tformer.workflows.heads import score_heads

        reports = score_heads(loaded, options, work)
    show_notes((f"read: {reports[-1].read}", *best_lines(reports[-1])), dim=True)
    emit_document(chosen, _content(reports, chosen, loaded))


def _content(reports: Sequence[HeadReport], chosen: Output, loaded: Loaded) -> str | bytes:
    from tformer.viz.attention.scene import run_name
    from tformer.viz.heads import as_csv, as_json, plots_of, tables_of
    from tformer.viz.picture import render_plots

    if chosen.format == "json":
        return as_json(reports, model=loaded.identity)
    if chosen.format == "csv":
        return as_csv(reports)
    if chosen.format == "terminal" and len(reports) == 1:
        lines = []
        for heading, rows in tables_of(reports[0]):
            lines += [heading, *aligned(rows, right=rows[0][1:]), ""]
        return "\n".join(lines)
    name, notes = run_name(loaded.path), (f"Model: {loaded.path}.", f"Command: {command_line()}")
    title = f"Heads of {name}, " + (f"step {reports[0].step:,}" if len(reports) == 1 else f"{len(reports)} checkpoints")
    return render_plots(plots_of(reports), chosen.format, title=title, to_file=chosen.path is not None, notes=notes)
