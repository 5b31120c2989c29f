"""The options of `tformer evaluate` for models of pairs (translation and other text-to-text tasks)."""

from __future__ import annotations

from typing import Annotated

import typer

PAIRS = "Pairs of texts"

Source = Annotated[
    str | None,
    typer.Option(
        "--source", metavar="FILE", help="One source a line; its references are --target.", rich_help_panel=PAIRS
    ),
]
Target = Annotated[
    str | None,
    typer.Option("--target", metavar="FILE", help="One reference a line, as many as sources.", rich_help_panel=PAIRS),
]
SourceColumn = Annotated[
    str | None,
    typer.Option("--source-column", metavar="C", help="Of the table in --data: name or number.", rich_help_panel=PAIRS),
]
TargetColumn = Annotated[
    str | None, typer.Option("--target-column", metavar="C", help="The reference.", rich_help_panel=PAIRS)
]
Prefix = Annotated[
    str | None,
    typer.Option(
        "--prefix",
        metavar="TEXT",
        help="What goes before every source that does not begin with it; default: what all of the run's tasks share.",
        rich_help_panel=PAIRS,
    ),
]
Score = Annotated[
    bool,
    typer.Option(
        "--score",
        help="Write nothing: print the log-probability of each target, one a line. For decoders alone too: of targets "
        "as continuations of the sources.",
        rich_help_panel=PAIRS,
    ),
]
NoDecode = Annotated[
    bool, typer.Option("--no-decode", help="Loss, perplexity and token accuracy alone.", rich_help_panel=PAIRS)
]
BeamSize = Annotated[
    int | None,
    typer.Option("--beam-size", metavar="B", help="1 is greedy; default: the run's.", rich_help_panel=PAIRS),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        metavar="N",
        help="At most so many are written; default: as the recipe says, and no fewer than --seq-len.",
        rich_help_panel=PAIRS,
    ),
]
LengthPenalty = Annotated[
    float | None,
    typer.Option("--length-penalty", metavar="A", help="Above 0 favours long texts.", rich_help_panel=PAIRS),
]
LengthPenaltyType = Annotated[
    str | None,
    typer.Option(
        "--length-penalty-type",
        metavar="gnmt|avg|none",
        help="A score is log-probability / ((5 + length)/6)^A, / length^A, or / 1.",
        rich_help_panel=PAIRS,
    ),
]
BleuTokenize = Annotated[
    str | None,
    typer.Option(
        "--bleu-tokenize",
        metavar="13a|intl|zh|ja-mecab|char|none|moses[:LANG]",
        help="How BLEU parts words; moses: the older measure on normalised tokens (pip install sacremoses).",
        rich_help_panel=PAIRS,
    ),
]
Lowercase = Annotated[
    bool, typer.Option("--lowercase", help="Case makes no difference to the scores.", rich_help_panel=PAIRS)
]
