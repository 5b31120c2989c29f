"""`tformer viz-embeddings`: neighbours and principal components of the vectors of tokens and labels."""

from __future__ import annotations

from tformer.cli.command import examples, takes_options
from tformer.cli.look_inside import emit_view, looking_inside
from tformer.cli.report import show_notes
from tformer.inside.options import EmbeddingOptions

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
        from tformer.viz import embeddings as viz

        report = embedding_report(loaded, options)
        show_notes([viz.described(report)], dim=True)
        emit_view(chosen, loaded, viz.view_of(report, loaded.identity))
