"""`tformer viz-pe`: positional encodings as an interactive page, a picture, text or numbers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tformer.cli.command import examples, takes_options
from tformer.cli.process import uncollected
from tformer.cli.report import emit, emit_document, show_notes
from tformer.support.errors import InputError
from tformer.support.options import Panel, PictureFormat, comma_list
from tformer.support.rules import Checked, needs

if TYPE_CHECKING:
    from tformer.viz.pe.settings import EncodingSettings

WHAT, SIZES, RESULT = Panel("What to show"), Panel("Sizes"), Panel("Result")
NAMES = "sinusoidal, learned, rope, alibi, t5_bias, learned_t5_bias, shaw or patch2d"

EPILOG = examples(
    "`tformer viz-pe`",
    "`tformer viz-pe --encoding rope -o rope.png`",
    "`tformer viz-pe --compare sinusoidal,rope,alibi --format terminal`",
    "`tformer viz-pe --run runs/gpt-small-1 -o learned.svg`",
)


@dataclass(frozen=True)
class PositionsOptions(Checked):
    """The options of `tformer viz-pe`."""

    RULES = (needs(("--stack", "--layer"), "--run"),)

    encoding: Annotated[
        str | None, WHAT("--encoding", metavar="KIND", help=f"{NAMES}. Default: sinusoidal, or the run's.")
    ] = None
    view: Annotated[
        str | None,
        WHAT(
            "--view",
            metavar="NAME",
            help="Plot of the kind: traces, heatmap or waves of sinusoidal, buckets or bias of t5_bias; a page opens "
            "with it.",
            default="the first plot of the kind",
        ),
    ] = None
    compare: Annotated[
        str | None,
        WHAT(
            "--compare",
            metavar="KIND,...",
            help="Compare these kinds over the distance; `all`: every kind that has such a curve.",
        ),
    ] = None
    run: Annotated[
        str | None,
        WHAT(
            "--run",
            metavar="RUN",
            help="A run, checkpoint or Hugging Face folder: show its kind, its sizes and its learned values.",
        ),
    ] = None
    stack: Annotated[
        str | None, WHAT("--stack", metavar="SIDE", help="Stack of the run: encoder or decoder.", rare=True)
    ] = None
    layer: Annotated[
        int,
        WHAT(
            "--layer",
            metavar="N",
            help="Layer whose positions are shown, from 0.",
            rare=True,
        ),
    ] = 0
    d_model: Annotated[int, SIZES("--d-model", metavar="D", help="Width of the embeddings.")] = 512
    positions: Annotated[
        int | None,
        SIZES(
            "--positions",
            metavar="N",
            help="Number of tokens. Default: depends on the view; pictures of traces: 50 and 500.",
        ),
    ] = None
    base: Annotated[float, SIZES("--base", metavar="B", help="Base of the wavelengths.")] = 10000.0
    layout: Annotated[
        str | None,
        SIZES(
            "--layout",
            metavar="NAME",
            help="Columns of sinusoidal: interleaved, halves or fairseq.",
        ),
    ] = None
    dims: Annotated[
        str | None,
        SIZES("--dims", metavar="N,...", help="Dimensions to draw as waves; for rope pairs, for alibi heads (from 1)."),
    ] = None
    heads: Annotated[
        int, SIZES("--num-heads", metavar="H", help="Number of heads (for alibi; rope rotates d_model / H dimensions).")
    ] = 8
    output: Annotated[
        Path | None,
        RESULT(
            "--output",
            "-o",
            metavar="FILE",
            help="The file to write: .html, .png, .svg, .txt, .json or .csv.",
            default="a page named after the kind",
        ),
    ] = None
    format: Annotated[PictureFormat, RESULT] = None

    def settings(self) -> EncodingSettings:
        """The options as settings of `tformer.viz.pe`."""
        from tformer.viz.pe.settings import EncodingSettings

        return EncodingSettings(
            encoding=self.encoding or "sinusoidal",
            d_model=self.d_model,
            positions=self.positions,
            base=self.base,
            dims=None if self.dims is None else _numbers(self.dims),
            heads=self.heads,
            layout=self.layout,
            compare=() if self.compare is None else tuple(part.strip() for part in self.compare.split(",")),
        )


@takes_options
def viz_pe(options: PositionsOptions) -> None:
    """Draw positional encodings (page, PNG, SVG or terminal).

    A model is needed only for learned encodings (--run). All numbers come from the modules that training
    uses.
    """
    with uncollected():  # imports torch
        from tformer.viz.output import choose_output
        from tformer.viz.pe.selection import read_run
        from tformer.viz.pe.settings import check_encoding, check_settings

    settings, table = options.settings(), None
    stem = f"viz-pe-{'compare' if settings.compare else settings.encoding}"
    chosen = choose_output(options.output, options.format, stem=stem)
    check_settings(settings)
    if options.run is not None:
        if options.encoding is not None:
            check_encoding(options.encoding)
        settings, table = read_run(
            options.run, settings, stack=options.stack, layer=options.layer, encoding=options.encoding
        )
        check_settings(settings)
    with uncollected():
        from tformer.viz.pe.page import view_of

        command = " ".join(["tformer", *sys.argv[1:]]) if sys.argv[1:2] == ["viz-pe"] else "tformer viz-pe"
        view = view_of(settings, options.view, table, command=command)
        content = view.render(chosen.format, to_file=chosen.path is not None)
    emit_document(chosen, content, says=False)
    if chosen.path is not None:
        show_notes([f"note: {table.note}"] if table is not None and not table.trained else [])
        emit(str(chosen.path))


def _numbers(text: str) -> tuple[int, ...]:
    def read(word: str) -> int | None:
        try:
            return int(word)
        except ValueError:
            return None

    wrong = InputError(f"--dims {text}: expected whole numbers with commas between, for example 0,8,16")
    return comma_list(text, read, lambda _: wrong)
