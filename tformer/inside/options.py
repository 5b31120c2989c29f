"""Options of the commands that look inside a model; in Python the keywords of the methods with their names."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from tformer.evaluation.options import DATA_OR_SOURCE, ONE_SIDE, PAIRS, EvaluationDataOptions
from tformer.support.bounds import Positive, Seed, at_least, within
from tformer.support.errors import InputError, did_you_mean
from tformer.support.options import (
    DATA,
    RETURNED,
    Checkpoint,
    CommandOnly,
    Device,
    Panel,
    PictureFile,
    PictureFormat,
    Run,
    SpecialTokens,
    argument,
    comma_list,
    parse_numbers,
)
from tformer.support.rules import AllBut, Checked, Rules, exclude, needs, required

RANDOM, SHOWN = Panel("Random tokens"), Panel("What is shown")
READ, TUNED, PICTURE = Panel("What the model reads"), Panel("Tuned lens"), Panel("The picture")
MOST_TOP = 100
MOST_SAMPLES = 10_000
MAX_EXAMPLES = 64
Two = Annotated[int, at_least(2)]
Top = Annotated[int, within(1, MOST_TOP)]
TOKEN_HEADS, LENS_HEADS = ("lm", "masked_lm"), ("lm", "masked_lm", "classifier")
ANSWERING_HEADS = (*LENS_HEADS, "regression")
"""Heads that viz-tokens, lens, attribute and patch can read, the first that a model has."""


def head_name(layer: int, head: int, *, cross: bool = False) -> str:
    """The name of a head in every output: L3H5, of cross-attention L3C5."""
    return f"L{layer}{'C' if cross else 'H'}{head}"


def parse_heads(text: str | None) -> tuple[tuple[int, int, bool], ...] | None:
    """(layer, head, whether of cross-attention) of each of the names L3H5,L3C5; None for a text of other things."""
    found = [re.fullmatch(r"L(\d{1,6})([HC])(\d{1,6})", word.strip()) for word in (text or "").upper().split(",")]
    return tuple((int(name[1]), int(name[3]), name[2] == "C") for name in found if name) if all(found) else None


def data_of(options: EvaluationDataOptions) -> EvaluationDataOptions:
    """The options of the data alone."""
    return EvaluationDataOptions(**{each.name: getattr(options, each.name) for each in fields(EvaluationDataOptions)})


def _named(flag: str, value: str | None, known: Collection[str]) -> tuple[str, ...]:
    """The words between commas, or all of them. Raises InputError for one that is not known."""

    def refuse(word: str) -> InputError:
        return InputError(f"{flag} {value}: unknown {flag[2:-1]} '{word}'", hint=did_you_mean(word, known))

    return comma_list(value or ",".join(known), lambda word: word if word in known else None, refuse)


@dataclass(frozen=True, kw_only=True)
class ExampleOptions(EvaluationDataOptions):
    """The options that heads, patch and viz-tokens share."""

    run: Run = None
    max_examples: Annotated[
        Positive | None,
        DATA(
            "--max-examples",
            metavar="N",
            help="Read at most N examples, evenly spread.",
            default=str(MAX_EXAMPLES),
        ),
    ] = None

    @property
    def of_data(self) -> list[str]:
        """The names of the options of the data that were given."""
        return [*data_of(self).given(), *(["max_examples"] if self.max_examples is not None else [])]


@dataclass(frozen=True, kw_only=True)
class HeadOptions(ExampleOptions):
    """The options of `tformer heads`."""

    RULES = (
        *EvaluationDataOptions.RULES,
        exclude(RANDOM, (EvaluationDataOptions, "--max-examples"), hint="examples of data replace random tokens"),
        exclude("--over-training", "--checkpoint"),
    )

    length: Annotated[
        Two | None, RANDOM("--length", metavar="T", help="Tokens of a sequence.", default="25, or as many as fit")
    ] = None
    copies: Annotated[
        Two | None, RANDOM("--copies", metavar="N", help="Number of times that each sequence is read.", default="4")
    ] = None
    samples: Annotated[
        Annotated[int, within(1, MOST_SAMPLES)] | None,
        RANDOM("--samples", metavar="N", help="Number of sequences.", default="10"),
    ] = None
    seed: Annotated[Seed | None, RANDOM("--seed", help="Seed of the tokens.", default="0")] = None
    over_training: Annotated[
        bool, SHOWN("--over-training", help="Score every checkpoint of the run, and draw a curve for each head.")
    ] = False
    output: Annotated[PictureFile, SHOWN] = None
    format: Annotated[PictureFormat, SHOWN] = None
    checkpoint: Checkpoint = "best"
    device: Device = "auto"

    @property
    def of_random(self) -> dict[str, int]:
        """The options of random tokens that were given."""
        values = {name: getattr(self, name) for name in ("length", "copies", "samples", "seed")}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class TokenOptions(ExampleOptions):
    """The options of `tformer viz-tokens`."""

    RULES = (
        DATA_OR_SOURCE,
        exclude("--data-folder", ("--data", "--source")),
        exclude("--text", (AllBut(EvaluationDataOptions, ("--target", "--prefix")), "--max-examples")),
        needs("--source", "--target", hint=ONE_SIDE),
        needs("--target", "--source", "--text"),
        needs("--special-tokens", "--text"),
    )

    second: Annotated[str | None, argument("RUN2", help="A second run that reads the same, for comparison.")] = None
    text: Annotated[
        str | None, READ("--text", help="The text to colour; for an encoder-decoder the source.", default="--data")
    ] = None
    target: Annotated[
        str | None,
        PAIRS(
            "--target",
            metavar="TEXT|FILE",
            help="With --text the target, which is coloured; with --source the file of references.",
            default="with --text the model's own translation",
        ),
    ] = None
    special_tokens: Annotated[SpecialTokens, READ] = False
    hardest: Annotated[
        Positive,
        SHOWN("--hardest", metavar="N", help="Number of tokens in the table of the hardest."),
        CommandOnly("the report's hardest(N) has their places"),
    ] = 20
    top_k: Annotated[Top, SHOWN("--top-k", metavar="K", help="Number of alternatives of each token.")] = 5
    output: Annotated[PictureFile, SHOWN] = None
    format: Annotated[PictureFormat, SHOWN] = None
    checkpoint: Checkpoint = "best"
    device: Device = "auto"

    def check(self) -> None:
        """Raise InputError for what can be refused before anything is loaded."""
        super().check()


PROMPTS, ABLATION = Panel("Two prompts"), Panel("Ablation")
PATCHED = ("residual", "attention", "feedforward", "heads")


@dataclass(frozen=True, kw_only=True)
class PatchOptions(ExampleOptions):
    """The options of `tformer patch`."""

    RULES = (
        exclude("--ablate", PROMPTS),
        exclude(("--clean-image", "--corrupted-image"), ("--clean", "--corrupted", "--text2", "--target")),
        exclude("--wrong", "--metric logit|probability|loss"),
        DATA_OR_SOURCE,
        exclude("--data-folder", ("--data", "--source")),
        needs((AllBut(EvaluationDataOptions, ("--target", "--prefix")), "--max-examples"), "--ablate"),
        needs("--source", "--target", hint=ONE_SIDE),
        needs("--target", "--source", "--clean"),
        required("--clean", "--clean-image", unless="--ablate", hint="--clean TEXT --corrupted TEXT, or --ablate zero"),
        required("--corrupted", "--corrupted-image", unless="--ablate", hint="a prompt with another answer"),
    )

    clean: Annotated[str | None, PROMPTS("--clean", metavar="TEXT", help="A prompt.")] = None
    corrupted: Annotated[
        str | None, PROMPTS("--corrupted", metavar="TEXT", help="A prompt of as many tokens with another answer.")
    ] = None
    clean_image: Annotated[
        Path | None,
        PROMPTS("--clean-image", metavar="FILE", help="Image models: an image in place of --clean.", rare=True),
    ] = None
    corrupted_image: Annotated[
        Path | None, PROMPTS("--corrupted-image", metavar="FILE", help="An image with another answer.", rare=True)
    ] = None
    text2: Annotated[
        str | None,
        PROMPTS("--text2", metavar="TEXT", help="Second text of both, for a model trained on pairs.", rare=True),
    ] = None
    corrupted_text2: Annotated[
        str | None,
        PROMPTS("--corrupted-text2", metavar="TEXT", help="Second text of --corrupted.", default="--text2", rare=True),
    ] = None
    target: Annotated[
        str | None,
        PAIRS(
            "--target",
            metavar="TEXT|FILE",
            help="Target before the answer; --ablate: references.",
        ),
    ] = None
    max_tokens: Annotated[
        Positive | None,
        PROMPTS("--max-tokens", metavar="N", help="Maximum number of tokens to read of a text.", rare=True),
    ] = None
    special_tokens: Annotated[SpecialTokens, PROMPTS] = False
    answer: Annotated[
        str | None,
        PROMPTS("--answer", metavar="TOKEN", help="Answer to --clean: a token or label.", default="the model's own"),
    ] = None
    wrong: Annotated[
        str | None, PROMPTS("--wrong", metavar="TOKEN", help="Answer to --corrupted.", default="the model's own")
    ] = None
    metric: Annotated[
        Literal["difference", "logit", "probability", "loss"] | None,
        PROMPTS(
            "--metric",
            help="Logit of --answer minus that of --wrong, or logit, probability or loss of --answer.",
            default="difference; scores: logit",
        ),
    ] = None
    noising: Annotated[bool, PROMPTS("--noising", help="Patch the clean prompt instead: what is needed?")] = False
    parts: Annotated[
        str | None,
        PROMPTS("--parts", metavar="residual,attention,feedforward,heads", help="What to patch.", default="all"),
    ] = None
    estimate: Annotated[
        bool, PROMPTS("--estimate", help="Only the estimate by gradients (attribution patching).", rare=True)
    ] = False
    ablate: Annotated[
        Literal["zero", "mean"] | None,
        ABLATION(
            "--ablate",
            help="Measure the loss without each head and layer: zeros in its place, or its mean over all tokens.",
        ),
    ] = None
    output: Annotated[PictureFile, SHOWN] = None
    format: Annotated[PictureFormat, SHOWN] = None
    checkpoint: Checkpoint = "best"
    device: Device = "auto"

    @property
    def prompts(self) -> tuple[ReadOptions, ReadOptions]:
        """The clean prompt and the corrupted one."""
        clean = ReadOptions(
            text=self.clean,
            text2=self.text2,
            target=self.target,
            image=self.clean_image,
            max_tokens=self.max_tokens,
            prefix=self.prefix,
            special_tokens=self.special_tokens,
        )
        text2 = self.text2 if self.corrupted_text2 is None else self.corrupted_text2
        return clean, replace(clean, text=self.corrupted, text2=text2, image=self.corrupted_image)

    @property
    def chosen_parts(self) -> tuple[str, ...]:
        """The parts to patch; attention and heads include cross-attention."""
        with_cross = {"attention": ("attention", "cross"), "heads": ("heads", "cross_heads")}
        return tuple(
            dict.fromkeys(
                part for word in _named("--parts", self.parts, PATCHED) for part in with_cross.get(word, (word,))
            )
        )

    def check(self) -> None:
        """Raise InputError for what can be refused before anything is loaded."""
        super().check()
        _ = self.chosen_parts


@dataclass(frozen=True)
class ReadOptions(Checked):
    """Input of one forward pass: the options shared by lens, attribute and viz-attention."""

    RULES: ClassVar[Rules] = (
        exclude("--image", ("--text", "--text2", "--target")),
        required("--text", "--image", hint="give --text TEXT, or for an image model --image FILE"),
    )

    run: Run = None
    text: Annotated[str | None, READ("--text", help="The text to read; for an encoder-decoder the source.")] = None
    text2: Annotated[str | None, READ("--text2", help="The second text, for a model trained on pairs.")] = None
    target: Annotated[
        str | None, READ("--target", help="The decoder's text.", default="the model's own translation")
    ] = None
    image: Annotated[Path | None, READ("--image", metavar="FILE", help="An image file.")] = None
    max_tokens: Annotated[
        Positive | None,
        READ("--max-tokens", metavar="N", help="Maximum number of tokens to read of a text.", rare=True),
    ] = None
    max_new_tokens: Annotated[
        int | None,
        READ("--max-new-tokens", metavar="N", help="Number of tokens that the model generates after the text."),
    ] = None
    prefix: Annotated[
        str | None, READ("--prefix", metavar="TEXT", help="Prefix of the source, instead of the run's own.", rare=True)
    ] = None
    special_tokens: Annotated[SpecialTokens, READ] = False


@dataclass(frozen=True)
class AnswerOptions(ReadOptions):
    """The options that lens and attribute share; both declare `positions` with its default."""

    target_token: Annotated[
        str | None,
        SHOWN(
            "--target-token",
            metavar="TOKEN",
            help="Answer to explain: a token, or a label of a classifier.",
            default="the next token, else the model's answer",
        ),
    ] = None
    against: Annotated[
        str | None, SHOWN("--against", metavar="TOKEN", help="Explain the difference to this token's logit instead.")
    ] = None
    positions: str | None = None
    output: Annotated[PictureFile, PICTURE] = None
    format: Annotated[PictureFormat, PICTURE] = None
    checkpoint: Checkpoint = "best"
    device: Device = "auto"

    def check(self) -> None:
        """Raise InputError also for positions that are no numbers."""
        super().check()
        parse_numbers(self.positions, "--positions")


@dataclass(frozen=True)
class LensOptions(AnswerOptions):
    """The options of `tformer lens`."""

    RULES = (
        *AnswerOptions.RULES,
        exclude("--tuned", "--lens logit"),
        exclude(
            "--stack encoder",
            ("--view parts", "--against"),
            hint="an encoder's layers answer through the decoder, which no sum divides into parts",
        ),
        needs("--steps", "--tuned"),
    )

    positions: Annotated[
        str | None,
        SHOWN("--positions", metavar="0,3-5", help="Positions to show.", default="all; in the terminal the last"),
    ] = None
    top_k: Annotated[Top, SHOWN("--top-k", metavar="K", help="Number of most probable tokens of each layer.")] = 10
    stack: Annotated[
        Literal["decoder", "encoder"] | None,
        SHOWN("--stack", help="Stack of an encoder-decoder.", default="decoder", rare=True),
    ] = None
    view: Annotated[
        Literal["layers", "parts"],
        SHOWN(
            "--view",
            help="Of pictures, csv and terminal: the answer after each layer, or what each part adds to the logit.",
        ),
        RETURNED,
    ] = "layers"
    tuned: Annotated[
        str | None, TUNED("--tuned", metavar="PATH", help="Train a tuned lens on this text, and save it in the run.")
    ] = None
    steps: Annotated[Positive, TUNED("--steps", metavar="N", help="Steps of that training.", rare=True)] = 250
    lens: Annotated[
        Literal["logit", "tuned"] | None,
        TUNED("--lens", help="tuned: the one that was saved.", default="tuned with --tuned"),
    ] = None

    def check(self) -> None:
        """Raise InputError for values that are invalid for every model."""
        super().check()


METHOD = Panel("Methods")
METHODS = {
    "gradient": "gradient x input",
    "integrated": "integrated gradients",
    "occlusion": "occlusion",
    "rollout": "attention rollout",
}
MOST_STEPS = 1000


@dataclass(frozen=True)
class AttributeOptions(AnswerOptions):
    """The options of `tformer attribute`."""

    RULES = (*AnswerOptions.RULES, exclude("--against", "--metric"))

    metric: Annotated[
        Literal["logit", "probability", "loss"] | None,
        SHOWN("--metric", help="What is explained of the token, label or score.", default="logit"),
    ] = None
    positions: Annotated[
        str | None,
        SHOWN("--positions", metavar="0,3-5", help="Positions to explain.", default="of new tokens, else the last"),
    ] = None
    methods: Annotated[
        str | None, METHOD("--methods", metavar=",".join(METHODS), help="Methods to compute.", default="all")
    ] = None
    baseline: Annotated[
        Literal["mask", "pad", "zero"] | None,
        METHOD("--baseline", help="In place of a token: a special one, or zeros.", default="the first that exists"),
    ] = None
    steps: Annotated[
        Annotated[int, within(1, MOST_STEPS)] | None,
        METHOD("--steps", metavar="N", help="Points of integrated gradients.", default="50, or 300 for a small gap"),
    ] = None

    @property
    def chosen_methods(self) -> tuple[str, ...]:
        """The methods to compute, in the order of METHODS."""
        named = _named("--methods", self.methods, METHODS)
        return tuple(method for method in METHODS if method in named)

    def check(self) -> None:
        """Raise InputError for values that are invalid for every model."""
        super().check()
        methods = {*self.chosen_methods}
        for flag, given, of in (
            ("--steps", self.steps, {"integrated"}),
            ("--baseline", self.baseline, {"integrated", "occlusion"}),
        ):
            if given is not None and not of & methods:
                raise InputError(f"{flag} has no meaning with --methods {self.methods}", hint="add integrated")


ROWS = Panel("Vectors")
EMBEDDING_TABLES = {
    "tokens": "it reads no tokens",
    "target": "its decoder reads the table 'tokens'",
    "output": "its output multiplies with the table 'tokens'",
    "labels": "it has no classifier",
}
"""Tables of vectors, and why a model has none."""


@dataclass(frozen=True)
class EmbeddingOptions(Checked):
    """The options of `tformer viz-embeddings`."""

    run: Run = None
    token: Annotated[
        tuple[str, ...],
        ROWS("--token", metavar="TOKEN", help="Show what is nearest to this token or label; repeatable."),
    ] = ()
    tokens: Annotated[str | None, ROWS("--tokens", metavar="A,B,...", help="Draw only these.", default="all")] = None
    table: Annotated[
        str | None, ROWS("--table", metavar="NAME", help=f"{', '.join(EMBEDDING_TABLES)}.", default="the first it has")
    ] = None
    top_k: Annotated[Top, ROWS("--top-k", metavar="K", help="Number of neighbours.")] = 10
    centred: Annotated[bool, ROWS("--centred", help="Subtract the mean of the table before the cosine.")] = False
    output: Annotated[PictureFile, PICTURE] = None
    format: Annotated[PictureFormat, PICTURE] = None
    checkpoint: Checkpoint = "best"
    device = "cpu"  # no option: the model computes nothing

    def check(self) -> None:
        """Raise InputError for values that are invalid for every model."""
        super().check()
        if self.table is not None and self.table not in EMBEDDING_TABLES:
            raise InputError(f"--table {self.table}: unknown", hint=did_you_mean(self.table, EMBEDDING_TABLES))
