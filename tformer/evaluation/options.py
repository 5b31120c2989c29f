"""Options of an evaluation: which data is read, what is measured, and on which machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from tformer.support import options
from tformer.support.bounds import NonNegative, Positive
from tformer.support.errors import InputError
from tformer.support.files import refuse_to_replace, require_writable
from tformer.support.options import (
    DATA,
    BadRows,
    Checkpoint,
    Delimiter,
    Device,
    Devices,
    Encoding,
    Errors,
    Json,
    LabelColumn,
    Panel,
    Precision,
    Quantize,
    Quotes,
    Run,
    TaskPrefix,
    Text2Column,
    TextColumn,
    Views,
)
from tformer.support.rules import QUANTIZE_RULE, Checked, Rules, exclude, needs

PAIRS, MEASURE = Panel("Pairs of texts"), Panel("What is measured")
ENDINGS = (".csv", ".tsv", ".jsonl")  # of the file of mistakes
ONE_SIDE = "two aligned files: --source FILE --target FILE"
DATA_OR_SOURCE = exclude("--data", "--source", hint="--data is one table with both sides")
OF_DECODING = (
    *("--beam-size", "--max-new-tokens", "--length-penalty", "--length-penalty-type", "--at-limit"),
    *("--bleu-tokenize", "--lowercase", "--mistakes"),
)
"""Options that apply only where the model decodes its own outputs."""


@dataclass(frozen=True, kw_only=True)
class EvaluationDataOptions(Checked):
    """The data that a model is measured on; None: not given."""

    RULES: ClassVar[Rules] = (
        DATA_OR_SOURCE,
        exclude("--data-folder", ("--data", "--source")),
        needs("--source", "--target", hint=ONE_SIDE),
        needs("--target", "--source", hint=ONE_SIDE),
    )

    data: Annotated[
        str | None,
        DATA(
            "--data",
            metavar="PATH",
            help="File, folder, glob, URL, builtin:NAME or - (standard input).",
            default="the run's validation data",
        ),
    ] = None
    data_folder: Annotated[
        Path | None, DATA("--data-folder", metavar="DIR", help="Where the run's own data has been moved.", rare=True)
    ] = None
    text_column: TextColumn = None
    text2_column: Text2Column = None
    label_column: LabelColumn = None
    invalid_utf8: Annotated[
        Errors | None,
        DATA(
            "--invalid-utf8",
            help="Invalid UTF-8: an error (strict) or U+FFFD (replace).",
            rare=True,
            default="strict; for the run's own data as in training",
        ),
    ] = None
    encoding: Encoding = None
    delimiter: Delimiter = None
    quotes: Quotes = None
    bad_rows: BadRows = None
    source: Annotated[str | None, PAIRS("--source", metavar="FILE", help="File with one source per line.")] = None
    target: Annotated[str | None, PAIRS("--target", metavar="FILE", help="File with the reference of each source.")] = (
        None
    )
    source_column: Annotated[
        str | None,
        PAIRS("--source-column", metavar="C", help="Column of the source in --data: name or number.", rare=True),
    ] = None
    target_column: Annotated[
        str | None, PAIRS("--target-column", metavar="C", help="Column of the reference.", rare=True)
    ] = None
    prefix: Annotated[TaskPrefix, PAIRS] = None
    batch_size: Annotated[
        Positive | None,
        MEASURE(
            "--batch-size",
            help="Windows or examples per batch; masks of a masked model depend on it.",
            default="chosen by the kind of data",
        ),
    ] = None

    @property
    def files(self) -> list[str]:
        """The files of data that were named."""
        return [name for name in (self.data, self.source, self.target) if name is not None]

    def given(self) -> Iterator[str]:
        """The names of the options that differ from their defaults."""
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                yield field.name

    def check(self) -> None:
        """Raise InputError for what can be refused before anything is loaded."""
        super().check()
        if self.data == "":
            raise InputError("--data is empty", hint="name a file or folder: --data PATH")


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(EvaluationDataOptions):
    """The options of `tformer evaluate`."""

    RULES = (
        exclude(
            "--tasks", ("--data", "--data-folder", "--source", "--score", "--by", "--plot", "--devices", "--quantize")
        ),
        *EvaluationDataOptions.RULES,
        exclude("--score", ("--no-decode", "--by", "--plot")),
        exclude(("--score", "--no-decode"), OF_DECODING),
        exclude("--by position", "--stride", hint="a window has every position once"),
        QUANTIZE_RULE,
        needs("--max-tokens", "--pseudo-perplexity"),
        needs(("--num-fewshot", "--limit"), "--tasks"),
        needs("--pooling", "--data", hint="it measures vectors on pairs of texts"),
    )

    run: Run = None
    beam_size: Annotated[
        Positive | None,
        PAIRS("--beam-size", metavar="B", help="Hypotheses per text; 1: greedy.", default="the recipe's"),
    ] = None
    max_new_tokens: Annotated[
        Positive | None,
        PAIRS(
            "--max-new-tokens",
            metavar="N",
            help="Maximum number of output tokens.",
            default="the larger of the recipe's value and --seq-len",
            rare=True,
        ),
    ] = None
    length_penalty: Annotated[
        float | None,
        PAIRS("--length-penalty", metavar="A", help="A above 0 favours long texts.", rare=True, default="the recipe's"),
    ] = None
    length_penalty_type: Annotated[
        str | None,
        PAIRS(
            "--length-penalty-type",
            metavar="gnmt|avg|none",
            help="Divisor of a log-probability: gnmt ((5 + length)/6)^A, avg length^A, none 1.",
            rare=True,
            default="the recipe's",
        ),
    ] = None
    at_limit: Annotated[
        str | None,
        PAIRS(
            "--at-limit",
            metavar="cut|end",
            help="At the maximum length. cut: stop there. end: force the end-of-sequence token and score it.",
            rare=True,
            default="the recipe's",
        ),
    ] = None
    bleu_tokenize: Annotated[
        str | None,
        PAIRS(
            "--bleu-tokenize",
            metavar="13a|intl|zh|ja-mecab|char|none|moses[:LANG]",
            help="Tokenization for BLEU; moses: Moses tokens, as in older papers (pip install sacremoses).",
            rare=True,
            default="13a",
        ),
    ] = None
    lowercase: Annotated[bool, PAIRS("--lowercase", help="Ignore case in BLEU, chrF and exact matches.")] = False
    no_decode: Annotated[
        bool, PAIRS("--no-decode", help="Only loss, perplexity and token accuracy; generate nothing.", rare=True)
    ] = False
    score: Annotated[
        bool,
        PAIRS(
            "--score",
            help="Generate nothing: print the log-probability of each target, one per line. A decoder-only model "
            "scores a target as the continuation of its source.",
        ),
    ] = False
    mistakes: Annotated[
        Path | None,
        MEASURE(
            "--mistakes",
            metavar="FILE.csv|.tsv|.jsonl",
            help="Labelled data and pairs: write what the model gets wrong, the most confident mistakes first, with "
            "row (from 0) and id.",
        ),
    ] = None
    by: Annotated[
        Literal["position", "length"] | None,
        MEASURE(
            "--by",
            help="Also the loss by the position of a token, or by the length of the example (running text: of the "
            "windows).",
        ),
    ] = None
    plot: Annotated[
        Path | None,
        MEASURE(
            "--plot",
            metavar="FILE.html|.png|.svg|.csv",
            help="Draw the confusion matrix, precision-recall and calibration curves of a classifier, and the loss of "
            "--by.",
        ),
    ] = None
    predictions: Annotated[
        Path | None,
        MEASURE(
            "--predictions",
            metavar="FILE.jsonl",
            help="Labelled data and --tasks: write what the model says of each example, as JSON lines with its number.",
            rare=True,
        ),
    ] = None
    tasks: Annotated[
        str | None,
        MEASURE(
            "--tasks",
            metavar="NAME|FILE,...",
            help="Tasks of lm-evaluation-harness (extra lm-eval), by name or as YAML.",
        ),
    ] = None
    num_fewshot: Annotated[
        NonNegative | None,
        MEASURE(
            "--num-fewshot",
            metavar="K",
            help="Solved examples before each question.",
            rare=True,
            default="the task's",
        ),
    ] = None
    limit: Annotated[
        Positive | None,
        MEASURE("--limit", metavar="N", help="Only the first N examples of each task.", rare=True, default="all"),
    ] = None
    threshold: Annotated[
        str | None,
        MEASURE(
            "--threshold",
            metavar="X|RULE",
            help="Give a label (the second of two) above this probability: a number, or what validation data say for "
            "best-f1, best-accuracy, best-mcc, precision=P or recall=R. Stored with the run, also for classify.",
            default="the run's, else 0.5",
        ),
    ] = None
    views: Annotated[Views, MEASURE] = 1
    pooling: Annotated[
        str | None,
        MEASURE(
            "--pooling",
            metavar="mean|cls|max|last",
            help="An encoder of any kind: measure its vectors, pooled so, on pairs of texts (--data).",
            rare=True,
        ),
    ] = None
    seq_len: Annotated[
        Positive | None,
        MEASURE(
            "--seq-len",
            metavar="N",
            help="Maximum tokens of a window, an example, or a side of a pair. May exceed the training length unless "
            "the positions are learned.",
            default="as in training",
            rare=True,
        ),
    ] = None
    stride: Annotated[
        int | None,
        MEASURE(
            "--stride",
            metavar="S",
            help="Causal models: slide the window by S tokens. Overlapping windows give each token more context and "
            "take longer.",
            default="no overlap",
        ),
    ] = None
    pseudo_perplexity: Annotated[
        bool,
        MEASURE(
            "--pseudo-perplexity",
            help="Masked models: also mask one token at a time, one forward pass per token.",
            rare=True,
        ),
    ] = False
    max_tokens: Annotated[
        Positive | None,
        MEASURE("--max-tokens", metavar="N", help="Maximum number of tokens to mask.", rare=True),
    ] = None
    as_json: Annotated[Json, MEASURE] = False
    checkpoint: Checkpoint = "best"
    device: Device = "auto"
    devices: Devices = None
    precision: Precision = "auto"
    quantize: Quantize = "none"

    def check(self) -> None:
        """Raise InputError for what can be refused before anything is loaded."""
        super().check()
        if self.tasks is not None and not self.task_names:
            raise InputError("--tasks is empty", hint="name tasks of lm_eval or YAML files: --tasks NAME,FILE")
        if self.bleu_tokenize is not None:
            from tformer.metrics.text import require_tokenizer

            require_tokenizer(self.bleu_tokenize)
        if self.threshold is not None:
            from tformer.metrics.thresholds import parse_rule

            parse_rule(self.threshold)
        if self.predictions is not None:
            require_writable(self.predictions, option="--predictions")
            refuse_to_replace(self.predictions, filter(None, [self.data]), option="--predictions")
        if (path := self.mistakes) is not None:
            if path.suffix.lower() not in ENDINGS:
                invalid = str(path) in ("strict", "replace")
                raise InputError(
                    f"--mistakes writes a file that ends in {' or '.join(ENDINGS)}, found '{path}'",
                    hint="invalid UTF-8 is accepted with --invalid-utf8 replace" if invalid else None,
                )
            require_writable(path, option="--mistakes")
            refuse_to_replace(path, self.files, option="--mistakes")

    @property
    def task_names(self) -> tuple[str, ...]:
        """The names and files of --tasks."""
        return tuple(name for each in (self.tasks or "").split(",") if (name := each.strip()))


COMMON = frozenset(
    {
        *("run", "data", "data_folder", "batch_size", "by", "plot", "as_json"),
        *("checkpoint", "device", "devices", "precision", "quantize"),
    }
)
"""Options that apply to every kind of data."""

READING = frozenset({"invalid_utf8", "encoding", "delimiter", "quotes", "bad_rows"})
"""Options of how texts and tables are read."""


def flag_of(name: str) -> str:
    """The flag of an option of `tformer evaluate`."""
    return options.flag_of(EvaluationOptions, name)
