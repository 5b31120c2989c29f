"""`tformer viz-attention`: which token looks at which, as a page, a figure, in the terminal or in numbers."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tformer.cli.common import console, examples, refuse_to_replace
from tformer.cli.viz_attention_request import MEAN, PICTURES, Request, command_line
from tformer.errors import visible

if TYPE_CHECKING:
    from tformer.loading import Loaded
    from tformer.viz.attention.reshape import Changes
    from tformer.viz.attention.scene import Scene
    from tformer.viz.attention.text import Colour
    from tformer.viz.output import Output

READ, SHOWN, PICTURE, MODEL = "What the model reads", "What is shown", "The picture", "Model and machine"
STEM = "attention"
LINEAR_UP_TO = 24  # tokens up to which a linear scale shows even weights

EPILOG = examples(
    '`tformer viz-attention runs/bert-tiny-1 --text "The cat sat on the mat." -o attention.html`',
    '`tformer viz-attention runs/transformer-tiny-1 --text "A dog." --layers 3 --heads mean -o cross.svg`',
    '`tformer viz-attention runs/gpt-tiny-1 --text "The " --max-new-tokens 12 --format terminal`',
    '`tformer viz-attention runs/bert-tiny-1 --text "The cat sat." --view summary --format csv`',
    "`tformer viz-attention runs/vit-mnist-1 --image three.png -o patches.png`",
)


def viz_attention(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Run, checkpoint or Hugging Face folder; default: the newest run."),
    ] = None,
    text: Annotated[
        str | None, typer.Option("--text", help="A text; of an encoder-decoder the source.", rich_help_panel=READ)
    ] = None,
    text2: Annotated[
        str | None, typer.Option("--text2", help="The second of a pair of texts.", rich_help_panel=READ)
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", help="What the decoder writes; default: its own translation.", rich_help_panel=READ),
    ] = None,
    image: Annotated[Path | None, typer.Option("--image", metavar="FILE", rich_help_panel=READ)] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", metavar="N", help="Read the first N tokens of a text.", rich_help_panel=READ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens", metavar="N", help="Let the model write so many more tokens.", rich_help_panel=READ
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            "--prefix", metavar="TEXT", help="Before the source, in place of the run's.", rich_help_panel=READ
        ),
    ] = None,
    special_tokens: Annotated[
        bool,
        typer.Option(
            "--special-tokens", help="A text that spells a special token means it: [MASK].", rich_help_panel=READ
        ),
    ] = False,
    attention: Annotated[
        str | None,
        typer.Option(
            "--attention",
            metavar="encoder|decoder|cross",
            help="Default: all that there is; of a single picture cross before the others.",
            rich_help_panel=SHOWN,
        ),
    ] = None,
    view: Annotated[
        str | None,
        typer.Option(
            "--view",
            metavar="head|model|rollout|summary",
            help="One head with its tokens; all heads, small; the product over layers; measures of every head.",
            rich_help_panel=SHOWN,
        ),
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="0,3-5", help="Default: all.", rich_help_panel=SHOWN)
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            "--heads", metavar="0,3-5|mean", help="Default: all; mean: of each layer's.", rich_help_panel=SHOWN
        ),
    ] = None,
    top_k: Annotated[
        int,
        typer.Option("--top-k", metavar="K", help="Links of a token that are drawn or listed.", rich_help_panel=SHOWN),
    ] = 3,
    merge_subwords: Annotated[
        bool,
        typer.Option(
            "--merge-subwords",
            help="Tokens of a word as one: sums over keys, means over queries.",
            rich_help_panel=SHOWN,
        ),
    ] = False,
    hide_special: Annotated[
        bool,
        typer.Option(
            "--hide-special", help="Leave special tokens out; rows are divided by what is left.", rich_help_panel=SHOWN
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="A file; its suffix is the format. Default: attention.html.", rich_help_panel=PICTURE
        ),
    ] = None,
    format_: Annotated[
        str | None, typer.Option("--format", metavar="html|png|svg|terminal|json|csv", rich_help_panel=PICTURE)
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            "--scale",
            metavar="row|global|sqrt|log",
            help="Of the colours: each row by itself; linear; square root; logarithm. Default: linear, sqrt when long.",
            rich_help_panel=PICTURE,
        ),
    ] = None,
    colours: Annotated[str, typer.Option("--colours", metavar="viridis|cividis", rich_help_panel=PICTURE)] = "viridis",
    max_megabytes: Annotated[
        float, typer.Option("--max-megabytes", help="Refuse anything larger.", rich_help_panel=PICTURE)
    ] = 20.0,
    checkpoint: Annotated[
        str,
        typer.Option(
            "--which", "--checkpoint", metavar="best|latest|step-N", help="Of the run.", rich_help_panel=MODEL
        ),
    ] = "best",
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda[:i]", rich_help_panel=MODEL)] = "auto",
) -> None:
    """Show which token looks at which: every layer and head, for any model that is trained here or imported.

    The page (default) holds all views, needs no network, and draws 12 layers of 12 heads over 512 tokens. Pictures show
    all heads unless --view, --layers or --heads say otherwise; the terminal shows the last layer's mean. An
    encoder-decoder without --target shows its own translation. Cells that cannot be seen (later tokens, what a sparse
    pattern leaves out) are hatched, and null in JSON. Numbers are those that the model computes with.
    """
    request = Request(text, text2, target, image, attention, view, layers, heads, top_k, scale, colours, max_tokens,
                      max_new_tokens, max_megabytes)  # fmt: skip
    request.check()
    from tformer.viz.output import choose_output, write_output

    chosen = choose_output(output, format_, stem=STEM)
    refuse_to_replace(chosen.path, [] if image is None else [image], option="-o")
    if chosen.path is not None:
        _require_writable(chosen.path)
    from tformer.loading import load
    from tformer.training.precision import resolve_device
    from tformer.viz.attention.reshape import Changes

    loaded = load(run, device=resolve_device(device), which=checkpoint)
    if special_tokens:
        loaded.tokenizer = loaded.text_tokenizer.reading_special()
    for note in (f"looking into {loaded.path}", *loaded.notes):
        console.print(note, style="dim", markup=False)
    changes = Changes(hide_special, merge_subwords)
    scene = _scene(loaded, request, chosen.format, _with_prefix(loaded, text, prefix), changes)
    for note in (*scene.notes, *(scene.changes.notes() if chosen.format != "html" else [])):
        console.print(visible(note), style="dim", markup=False)
    write_output(chosen, _content(scene, request, chosen))
    if chosen.path is not None:
        console.print(f"wrote {chosen.path}", style="dim", markup=False)


def _require_writable(path: Path) -> None:
    """Before long work: a file that cannot be written is told at once. New folders are made when it is."""
    from tformer.decoding.output import require_writable

    if path.parent.is_dir():
        require_writable(path, option="-o")


def _scene(loaded: Loaded, request: Request, format_: str, text: str | None, changes: Changes) -> Scene:
    from tformer.viz.attention.reading import Asked
    from tformer.viz.attention.scene import make_scene

    asked = Asked(text, request.text2, request.target, request.image, request.max_tokens, request.max_new_tokens)
    return make_scene(
        loaded,
        asked,
        request.chosen_in(format_, loaded),
        rollouts=format_ == "html" or request.view_in(format_) == "rollout",
        command=command_line(),
        changes=changes,
        **request.limits_in(format_),
    )


def _with_prefix(loaded: Loaded, text: str | None, asked: str | None) -> str | None:
    """The source behind the prefix of the run's task."""
    from tformer.cli.task_prefix import task_prefix

    if text is None or loaded.model.encoder is None or loaded.model.decoder is None:
        return text
    prefix, note = task_prefix(loaded.recipe, asked)
    if note is not None:
        console.print(note, style="dim", markup=False)
    return prefix + text


def _content(scene: Scene, request: Request, chosen: Output) -> str | bytes:
    format_ = chosen.format
    view: Any = request.view_in(format_)
    longest = max(len(side) for side in scene.reading.sides.values())
    scale: Any = request.scale or ("global" if longest <= LINEAR_UP_TO else "sqrt")
    if format_ == "html":
        from tformer.viz.attention.page import render

        return render(
            scene,
            view=view,
            scale=scale,
            top_k=request.top_k,
            max_bytes=request.max_megabytes * 1e6,
            head=request.heads if request.heads == MEAN else None,
            colours=request.colours,
        )
    if request.wants_mean(format_):
        scene = scene.of_means()
    [kind, *_] = scene.attentions
    if format_ in PICTURES:
        from tformer.viz.attention.figures import draw

        return draw(scene, kind, view, format_=format_, scale=scale, colours=request.colours)
    if format_ == "terminal":
        from tformer.viz.attention.text import as_text

        width, colour = shutil.get_terminal_size((100, 24)).columns, _colour(chosen.path)
        return as_text(scene, kind, view, scale=scale, top_k=request.top_k, width=width, colour=colour)
    from tformer.viz.attention.document import as_csv, as_json

    return (as_json if format_ == "json" else as_csv)(scene, view)


def _colour(path: Path | None) -> Colour:
    """What the terminal can show: letters alone where nobody looks, or where NO_COLOR says so."""
    if path is not None or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return "none"
    return "truecolor" if os.environ.get("COLORTERM", "") in ("truecolor", "24bit") else "256"
