"""`tformer viz-attention`: attention weights as a page, a figure, in the terminal or as numbers."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tformer.cli.command import examples
from tformer.cli.report import console
from tformer.errors import InputError, did_you_mean, visible
from tformer.output_files import refuse_to_replace

if TYPE_CHECKING:
    from tformer.loading import Loaded
    from tformer.viz.attention.scene import Scene
    from tformer.viz.attention.weights import Changes, Chosen
    from tformer.viz.output import Output
    from tformer.viz.terminal import Colour


KINDS = ("encoder", "decoder", "cross")
VIEWS = ("head", "model", "rollout", "summary")
SCALES = ("row", "global", "sqrt", "log")
COLOURS = ("viridis", "cividis")
PICTURES = ("png", "svg")
MEAN = "mean"
LARGEST_NUMBER = 100_000


@dataclass(frozen=True)
class Request:
    """The options that choose what is read and shown; None where one was not given."""

    text: str | None
    text2: str | None
    target: str | None
    image: Path | None
    attention: str | None
    view: str | None
    layers: str | None
    heads: str | None
    top_k: int
    scale: str | None
    colours: str
    max_tokens: int | None
    max_new_tokens: int | None
    max_megabytes: float

    def check(self) -> None:
        """Raises InputError for words and numbers that no model could take."""
        for option, value, known in (
            ("--attention", self.attention, KINDS),
            ("--view", self.view, VIEWS),
            ("--scale", self.scale, SCALES),
            ("--colours", self.colours, COLOURS),
        ):
            if value is not None and value not in known:
                raise InputError(f"{option} {value}: unknown", hint=did_you_mean(value, known))
        for option, number in (("--top-k", self.top_k), ("--max-tokens", self.max_tokens),
                               ("--max-new-tokens", self.max_new_tokens)):  # fmt: skip
            if number is not None and number < 1:
                raise InputError(f"{option} must be at least 1, found {number}")
        if not self.max_megabytes > 0:
            raise InputError(f"--max-megabytes must be above 0, found {self.max_megabytes:g}")
        if self.image is not None and (self.text is not None or self.text2 is not None or self.target is not None):
            other = "--text" if self.text is not None else "--text2" if self.text2 is not None else "--target"
            raise InputError(f"--image and {other} exclude each other")
        if self.text is None and self.image is None:
            raise InputError("nothing to look at", hint="give --text TEXT, or of a model of images --image FILE")
        parse_numbers(self.layers, "--layers")
        self.head_numbers()

    def view_in(self, format_: str) -> str:
        """The view asked for, else the one that suits: a picture shows all heads unless one was chosen."""
        if self.view is not None:
            return self.view
        one = self.heads == MEAN or len(self.head_numbers() or ()) == 1
        return "model" if format_ in PICTURES and not one else "head"

    def head_numbers(self) -> tuple[int, ...] | None:
        """None: all, also where their mean is wanted."""
        return None if self.heads == MEAN else parse_numbers(self.heads, "--heads")

    def wants_mean(self, format_: str) -> bool:
        """Whether each layer is shown as the mean of its heads."""
        return self.heads == MEAN or self._is_brief(format_)

    def _is_brief(self, format_: str) -> bool:
        """Whether one matrix is enough: in a terminal, where nobody asked for more."""
        nothing = self.layers is None and self.heads is None
        return format_ == "terminal" and self.view_in(format_) == "head" and nothing

    def chosen_in(self, format_: str, loaded: Loaded) -> Chosen:
        """Which attentions, layers and heads are needed. A picture, and the terminal, show one kind of attention."""
        from tformer.viz.attention.weights import Chosen, kinds_of, modules_of

        kinds: Any = None if self.attention is None else (self.attention,)
        if kinds is None and format_ in (*PICTURES, "terminal"):
            known = kinds_of(loaded)
            kinds = ("cross",) if "cross" in known else known[:1]
        layers = parse_numbers(self.layers, "--layers")
        if self._is_brief(format_):
            layers = (len(modules_of(loaded, kinds[0])) - 1,) if kinds[0] in kinds_of(loaded) else None
        return Chosen(kinds, layers, self.head_numbers())

    def limits_in(self, format_: str) -> dict[str, Any]:
        """What `make_scene` has to keep to: only pages, and files of numbers, grow without end."""
        from tformer.viz.attention.text import BYTES_PER_WEIGHT

        numbers = format_ in BYTES_PER_WEIGHT and self.view_in(format_) in ("head", "model")
        if not numbers and format_ != "html":
            return {"max_bytes": None}
        sizes = {"bytes_per_cell": BYTES_PER_WEIGHT[format_]} if numbers else {}
        return {"max_bytes": self.max_megabytes * 1e6, **sizes}


def parse_numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    """`0,3-5` as (0, 3, 4, 5), in order, each once; None stays None. InputError for anything else."""
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        if match is None:
            expected = "numbers and ranges like 0,3-5" + (", or mean" if option == "--heads" else "")
            raise InputError(f"{option} {text}: expected {expected}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last > LARGEST_NUMBER:
            raise InputError(f"{option} {text}: {part.strip()} is no range", hint="write the smaller number first")
        found |= set(range(first, last + 1))
    return tuple(sorted(found))


def command_line() -> str:
    """How the command was called, as a shell reads it."""
    return shlex.join(["tformer", *sys.argv[1:]])


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
    from tformer.device import resolve_device
    from tformer.loading import load
    from tformer.viz.attention.weights import Changes

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
    from tformer.output_files import require_writable

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
    from tformer.decoding.prompts import task_prefix

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
    from tformer.viz.attention.text import (
        as_csv,
        as_json,
    )

    return (as_json if format_ == "json" else as_csv)(scene, view)


def _colour(path: Path | None) -> Colour:
    """What the terminal can show: letters alone where nobody looks, or where NO_COLOR says so."""
    if path is not None or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return "none"
    return "truecolor" if os.environ.get("COLORTERM", "") in ("truecolor", "24bit") else "256"
