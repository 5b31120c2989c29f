"""`tformer viz-embeddings`: neighbours and principal components of the vectors of tokens and labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer.cli.command import examples, takes_options
from tformer.cli.look_inside import command_line, looking_inside
from tformer.cli.report import emit_document, show_notes
from tformer.inside.options import EmbeddingOptions

if TYPE_CHECKING:
    from tformer.inside.embeddings import EmbeddingReport
    from tformer.loading import Loaded
    from tformer.viz.output import Output

EPILOG = examples(
    "`tformer viz-embeddings`",
    "`tformer viz-embeddings runs/first --token king --token river --format terminal`",
    '`tformer viz-embeddings --tokens "one,two,three,four" --centred -o numbers.svg`',
    "`tformer viz-embeddings runs/classifier --table labels -o labels.png`",
)


@takes_options
def viz_embeddings(options: EmbeddingOptions) -> None:
    """Draw vectors of tokens and labels; find the nearest of each.

    Neighbours are by cosine among the whole table. The principal components are those of the vectors that are drawn:
    all of them, or --tokens. The page has pan, zoom, search and names. Words between commas are taken as they are: with
    byte-bpe a word inside a text begins with a space.
    """
    with looking_inside(options, "embeddings", ()) as (chosen, loaded, _):
        from tformer.inside.embeddings import embedding_report
        from tformer.viz.embeddings import described

        report = embedding_report(loaded, options)
        show_notes([described(report)], dim=True)
        emit_document(chosen, _content(report, chosen, loaded))


def _content(report: EmbeddingReport, chosen: Output, loaded: Loaded) -> str | bytes:
    from tformer.viz import embeddings as viz
    from tformer.viz.attention.scene import run_name
    from tformer.viz.picture import render_plots

    if chosen.format in ("json", "csv"):
        return viz.as_json(report, model=loaded.identity) if chosen.format == "json" else viz.as_csv(report)
    if chosen.format == "terminal" and (len(report.asked) or len(report.shown) <= viz.MOST_NAMED):
        return viz.as_text(report)
    title = f"Vectors of {run_name(loaded.path)}"
    if chosen.format == "html":
        return viz.render(report, title=title, notes=(f"Model: {loaded.path}.", f"Command: {command_line()}"))
    return render_plots(viz.plots_of(report), chosen.format, title=title, to_file=chosen.path is not None)
