"""`tformer viz-attention`: attention weights as a page, a figure, in the terminal or as numbers."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tformer.cli.command import examples, takes_options
from tformer.cli.look_inside import command_line, looking_inside
from tformer.cli.report import emit_document, show_notes
from tformer.inside.options import PICTURE, SHOWN, ReadOptions, parse_heads
from tformer.support.bounds import Must, Positive
from tformer.support.errors import InputError
from tformer.support.options import Checkpoint, Device, PictureFile, PictureFormat, parse_numbers

if TYPE_CHECKING:
    from tformer.loading import Loaded
    from tformer.viz.attention.scene import Scene
    from tformer.viz.attention.weights import Chosen
    from tformer.viz.output import OutputTarget

PICTURES = ("png", "svg")
MEAN = "mean"
LINEAR_UP_TO = 24  # tokens up to which a linear colour scale shows even weights

EPILOG = examples(
    '`tformer viz-attention --text "The cat sat on the mat." -o attention.html`',
    '`tformer viz-attention --text "A dog." --layers 3 --heads mean -o cross.svg`',
    '`tformer viz-attention --text "The " --max-new-tokens 12 --format terminal`',
    '`tformer viz-attention runs/bert-tiny-1 --text "The cat sat." --view summary --format csv`',
    "`tformer viz-attention runs/vit-mnist-1 --image three.png -o patches.png`",
)


@dataclass(frozen=True)
class AttentionOptions(ReadOptions):
    """The options of `tformer viz-attention`."""

    attention: Annotated[
        Literal["encoder", "decoder", "cross"] | None,
        SHOWN(
            "--attention",
            help="Which attentions to show.",
            default="all; in a single picture cross-attention, if there is one",
        ),
    ] = None
    view: Annotated[
        Literal["head", "model", "rollout", "summary"] | None,
        SHOWN(
            "--view",
            help="head: one head with its tokens; model: all heads, small; rollout: the product over layers; summary: "
            "measures of every head.",
        ),
    ] = None
    layers: Annotated[str | None, SHOWN("--layers", metavar="0,3-5", help="Layers to show.", default="all")] = None
    heads: Annotated[
        str | None,
        SHOWN(
            "--heads",
            metavar="0,3-5|L3H5|mean",
            help="Heads to show, of all layers or by name; mean: the mean of each layer's heads.",
            default="all",
        ),
    ] = None
    top_k: Annotated[
        Positive, SHOWN("--top-k", metavar="K", help="Number of links drawn or listed for each token.")
    ] = 3
    merge_subwords: Annotated[
        bool, SHOWN("--merge-subwords", help="Merge the tokens of a word: sums over keys, means over queries.")
    ] = False
    hide_special: Annotated[
        bool, SHOWN("--hide-special", help="Omit special tokens and normalize each row again.", rare=True)
    ] = False
    output: Annotated[PictureFile, PICTURE] = None
    format: Annotated[PictureFormat, PICTURE] = None
    scale: Annotated[
        Literal["row", "global", "sqrt", "log"] | None,
        PICTURE(
            "--scale",
            help="Colour scale: each row by itself, linear, square root or logarithmic.",
            rare=True,
            default="linear; sqrt for long texts",
        ),
    ] = None
    max_megabytes: Annotated[
        float,
        Must(lambda size: size > 0, "above 0"),
        PICTURE("--max-megabytes", help="Refuse larger files.", rare=True),
    ] = 20.0
    checkpoint: Checkpoint = "best"
    device: Device = "auto"

    def check(self) -> None:
        """Raise InputError for values that are invalid for every model."""
        super().check()
        parse_numbers(self.layers, "--layers")
        self.head_numbers()
        named = parse_heads(self.heads) or ()
        if named and self.layers is not None:
            raise InputError(f"--layers and --heads {self.heads} exclude each other: the names have their layers")
        crosses = {cross for *_, cross in named}
        if len(crosses) > 1 or (crosses and self.attention is not None and crosses != {self.attention == "cross"}):
            raise InputError(f"--heads {self.heads}: C is a head of cross-attention, H of self-attention; show one")

    def view_in(self, format_: str) -> str:
        """The chosen view, or the default: a picture shows all heads unless one was chosen."""
        if self.view is not None:
            return self.view
        one = self.heads == MEAN or len(self.head_numbers() or ()) == 1
        return "model" if format_ in PICTURES and not one else "head"

    def head_numbers(self) -> tuple[int, ...] | None:
        """The chosen heads; None: all, also for their mean."""
        if (named := parse_heads(self.heads)) is not None:
            return tuple(sorted({head for _, head, _ in named}))
        return None if self.heads == MEAN else parse_numbers(self.heads, "--heads")

    def is_brief(self, format_: str) -> bool:
        """Whether to show a single matrix: the default in a terminal."""
        nothing = self.layers is None and self.heads is None
        return format_ == "terminal" and self.view_in(format_) == "head" and nothing

    def chosen_in(self, format_: str, loaded: Loaded) -> Chosen:
        """The attentions, layers and heads to compute. A picture, and the terminal, show one kind of attention."""
        from tformer.viz.attention.weights import Chosen, kinds_of, modules_of

        kinds: Any = None if self.attention is None else (self.attention,)
        if kinds is None and format_ in (*PICTURES, "terminal"):
            known = kinds_of(loaded)
            kinds = ("cross",) if "cross" in known else known[:1]
        layers = parse_numbers(self.layers, "--layers")
        if named := parse_heads(self.heads):
            own = ("cross",) if named[0][2] else kinds_of(loaded)[:2][-1:]
            pairs = frozenset((layer, head) for layer, head, _ in named)
            layers = tuple(sorted({layer for layer, _ in pairs}))
            return Chosen(own if self.attention is None else kinds, layers, self.head_numbers(), pairs)
        if self.is_brief(format_):
            layers = (len(modules_of(loaded, kinds[0])) - 1,) if kinds[0] in kinds_of(loaded) else None
        return Chosen(kinds, layers, self.head_numbers())

    def limits_in(self, format_: str) -> dict[str, Any]:
        """Size limits for `make_scene`, for pages and files of numbers; other formats have a bounded size."""
        from tformer.viz.attention.text import BYTES_PER_WEIGHT

        numbers = format_ in BYTES_PER_WEIGHT and self.view_in(format_) in ("head", "model")
        if not numbers and format_ != "html":
            return {"max_bytes": None}
        sizes = {"bytes_per_cell": BYTES_PER_WEIGHT[format_]} if numbers else {}
        return {"max_bytes": self.max_megabytes * 1e6, **sizes}


@takes_options
def viz_attention(options: AttentionOptions) -> None:
    """Draw attention maps of a model (page, PNG, SVG or terminal).

    The page (default) holds all views, works offline, and draws 12 layers of 12 heads over 512 tokens. Pictures show
    all heads unless --view, --layers or --heads say otherwise; the terminal shows the last layer's mean. An
    encoder-decoder without --target shows its own translation. Cells that cannot be seen (later tokens, or outside a
    sparse pattern) are hatched, and null in JSON. The numbers are those that the model computes with.
    """
    with looking_inside(options, "attention", [options.image]) as (chosen, loaded, _):
        if options.special_tokens:
            loaded.tokenizer = loaded.text_tokenizer.reading_special()
        scene = _scene(loaded, options, chosen.format)
    show_notes((*scene.notes, *(scene.changes.notes() if chosen.format != "html" else [])), dim=True)
    emit_document(chosen, _content(scene, options, chosen))


def _scene(loaded: Loaded, options: AttentionOptions, format_: str) -> Scene:
    from tformer.decoding.prompts import task_prefix
    from tformer.inside.reading import Inputs
    from tformer.viz.attention.scene import make_scene
    from tformer.viz.attention.weights import Changes

    text = options.text
    if text is not None and loaded.model.encoder is not None and loaded.model.decoder is not None:
        prefix, note = task_prefix(loaded.recipe, options.prefix)
        show_notes([note] if note is not None else [], dim=True)
        text = prefix + text
    return make_scene(
        loaded,
        Inputs(text, options.text2, options.target, options.image, options.max_tokens, options.max_new_tokens),
        options.chosen_in(format_, loaded),
        rollouts=format_ == "html" or options.view_in(format_) == "rollout",
        command=command_line(),
        changes=Changes(options.hide_special, options.merge_subwords),
        **options.limits_in(format_),
    )


def _content(scene: Scene, options: AttentionOptions, chosen: OutputTarget) -> str | bytes:
    format_ = chosen.format
    view: Any = options.view_in(format_)
    longest = max(len(side) for side in scene.reading.sides.values())
    scale: Any = options.scale or ("global" if longest <= LINEAR_UP_TO else "sqrt")
    if format_ == "html":
        from tformer.viz.attention.page import render

        return render(
            scene,
            view=view,
            scale=scale,
            top_k=options.top_k,
            max_bytes=options.max_megabytes * 1e6,
            head=options.heads if options.heads == MEAN else None,
        )
    if options.heads == MEAN or options.is_brief(format_):
        scene = scene.of_means()
    [kind, *_] = scene.attentions
    if format_ in PICTURES:
        from tformer.viz.attention.figures import draw

        return draw(scene, kind, view, format_=format_, scale=scale)
    from tformer.viz.attention.text import as_csv, as_json, as_text

    if format_ == "terminal":
        from tformer.viz.terminal import colour_support

        width = shutil.get_terminal_size((100, 24)).columns
        colour = "none" if chosen.path is not None else colour_support(sys.stdout)
        return as_text(scene, kind, view, scale=scale, top_k=options.top_k, width=width, colour=colour)
    return (as_json if format_ == "json" else as_csv)(scene, view)
