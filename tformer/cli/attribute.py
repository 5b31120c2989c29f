"""`tformer attribute`: how much each token or patch of the input mattered for an answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tformer.cli.command import examples, takes_options
from tformer.cli.look_inside import command_line, looking_inside
from tformer.cli.report import emit_document, show_notes
from tformer.inside.options import ANSWERING_HEADS, AttributeOptions
from tformer.support.formatting import aligned

if TYPE_CHECKING:
    from tformer.inside.attribution import AttributionReport
    from tformer.viz.output import Output

EPILOG = examples(
    '`tformer attribute --text "The cat sat on the" -o attribute.html`',
    '`tformer attribute --text "The keys are" --target-token " are" --against " is"`',
    '`tformer attribute runs/translator --text "Ein Hund." -o hund.html`',
    "`tformer attribute runs/vit-mnist-1 --image three.png --methods integrated,occlusion -o three.svg`",
)


@takes_options
def attribute(options: AttributeOptions) -> None:
    """Show which token or patch mattered for an answer.

    Gradient x input, integrated gradients, occlusion and attention rollout side by side: of a language model for the
    next token or for those of --max-new-tokens, of a translator for each token of the target (by source and target),
    of a masked language model for every [MASK], of a classifier or regression for its label or score. Integrated
    gradients add up to the change from a baseline without the text; the gap that --steps leave is shown.
    """
    with looking_inside(options, "attribute", [options.image], kinds=ANSWERING_HEADS) as (chosen, loaded, work):
        from tformer.viz.attribution import attribution_lines
        from tformer.workflows.attribution import attribute_inputs

        report = attribute_inputs(loaded, options, work)
    show_notes((*report.notes, *attribution_lines(report)), dim=True)
    emit_document(chosen, _content(report, chosen, str(loaded.path)))


def _content(report: AttributionReport, chosen: Output, path: str) -> str | bytes:
    from tformer.viz import attribution as viz
    from tformer.viz.attention.scene import run_name
    from tformer.viz.picture import render_plots

    if chosen.format in ("json", "csv"):
        return viz.attribution_json(report, run=path) if chosen.format == "json" else viz.attribution_csv(report)
    title = f"What mattered for {run_name(Path(path))}"
    if chosen.format == "terminal" and len(report.targets) == 1 and report.pixels is None:
        lines = [title, "", *viz.attribution_lines(report), ""]
        for side in report.tokens:
            rows = viz.attribution_table(report, side)
            lines += [*aligned(rows, right=rows[0][1:]), ""]
        return "\n".join(lines)
    texts = (f"{k.capitalize()}: {v}" for k, v in report.texts.items())
    notes = (viz.CAUTION, *report.notes, f"Model: {path}.", *texts, f"Command: {command_line()}")
    plots, to_file = viz.attribution_plots(report), chosen.path is not None
    return render_plots(plots, chosen.format, title=title, to_file=to_file, notes=notes)
