"""`tformer viz-embeddings`: neighbours and principal components of vectors of tokens, labels and positions."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tformer.cli.command import examples, takes_options
from tformer.cli.report import emit_document, show_notes
from tformer.inside.options import EmbeddingOptions
from tformer.support.files import refuse_to_replace

if TYPE_CHECKING:
    from tformer.inside.embeddings import EmbeddingReport
    from tformer.viz.output import Output

EPILOG = examples(
    "`tformer viz-embeddings`",
    '`tformer viz-embeddings runs/first --token " king" --token " river" --format terminal`',
    '`tformer viz-embeddings --tokens "one,two,three,four" --centred -o numbers.svg`',
    "`tformer viz-embeddings runs/classifier --table labels -o labels.png`",
    "`tformer viz-embeddings runs/first --table positions --tokens 0-99 --format csv`",
)


@takes_options
def viz_embeddings(options: EmbeddingOptions) -> None:
    """Draw vectors of tokens, labels or positions: nearest neighbours and principal components.

    Neighbours are by cosine among the whole table. The principal components are those of the vectors that are drawn:
    all of them, or --tokens. The page has pan, zoom, search and names. Words between commas are taken as they are: with
    byte-bpe a word inside a text begins with a space.
    """
    options.check()
    from tformer.viz.output import choose_output

    chosen = choose_output(options.output, options.format, stem="embeddings")
    lists = [options.tokens] if options.tokens is not None and os.path.isfile(options.tokens) else []
    refuse_to_replace(chosen.path, lists, option="-o")
    from tformer.inside.embeddings import embedding_report
    from tformer.loading import load
    from tformer.viz.embeddings import described

    loaded = load(options.run, which=options.checkpoint)
    show_notes((f"model: {loaded.path}", *loaded.notes), dim=True)
    report = embedding_report(loaded, options)
    show_notes([described(report)], dim=True)
    emit_document(chosen, _content(report, chosen, str(loaded.path)))


def _content(report: EmbeddingReport, chosen: Output, path: str) -> str | bytes:
    from tformer.viz.attention.scene import run_name
    from tformer.viz.embeddings import as_csv, as_json, neighbour_lines, plots_of, render
    from tformer.viz.picture import render_plots

    if chosen.format == "json":
        return as_json(report, run=path)
    if chosen.format == "csv":
        return as_csv(report)
    if chosen.format == "terminal" and len(report.asked):
        return "\n".join(neighbour_lines(report))
    title = f"Vectors of {run_name(Path(path))}"
    if chosen.format == "html":
        notes = f"Model: {path}.", f"Command: {shlex.join(['tformer', *sys.argv[1:]])}"
        return render(report, title=title, notes=notes)
    return render_plots(plots_of(report), chosen.format, title=title, to_file=chosen.path is not None)
