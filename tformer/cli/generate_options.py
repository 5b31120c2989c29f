"""The options of `tformer generate`: a name, a type and a line of help each, in the groups that its help shows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PROMPT, BEAMS, SAMPLING = "What to continue or translate", "Beam search", "Sampling"
LENGTH, OUTPUT, MODEL = "Length and repetition", "Output", "Model and machine"

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN", help="Run, checkpoint or Hugging Face folder; default: the newest run."),
]

Prompt = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        help="Text to continue (default: nothing); for an encoder-decoder the source.",
        rich_help_panel=PROMPT,
    ),
]
InputPath = Annotated[
    str | None,
    typer.Option(
        "--input",
        metavar="FILE|-",
        help="One prompt or source a line; each gives one line of output, its completion alone. "
        "For an encoder-decoder the default is standard input.",
        rich_help_panel=PROMPT,
    ),
]
SpecialTokens = Annotated[
    bool,
    typer.Option(
        "--special-tokens",
        help="A special token that a prompt spells (<mask>, <extra_id_0>, <|im_start|>) is that token, not text.",
        rich_help_panel=PROMPT,
    ),
]
Errors = Annotated[
    str,
    typer.Option("--errors", metavar="strict|replace", help="Invalid UTF-8 in --input.", rich_help_panel=PROMPT),
]
Prefix = Annotated[
    str | None,
    typer.Option(
        "--prefix",
        metavar="TEXT",
        help="What goes before every source that does not begin with it; default: the prefix that all of the run's "
        "tasks share.",
        rich_help_panel=PROMPT,
    ),
]
TooLong = Annotated[
    str,
    typer.Option(
        "--too-long",
        metavar="error|cut",
        help="A source that is longer than the model reads is refused, or loses its end.",
        rich_help_panel=PROMPT,
    ),
]
TargetPrefix = Annotated[
    str | None,
    typer.Option("--target-prefix", metavar="TEXT", help="Every output begins with it.", rich_help_panel=PROMPT),
]
TargetPrefixFile = Annotated[
    str | None,
    typer.Option(
        "--target-prefix-file", metavar="FILE", help="One such beginning per line of --input.", rich_help_panel=PROMPT
    ),
]

BeamSize = Annotated[
    int | None,
    typer.Option("--beam-size", metavar="B", help="Hypotheses kept at every step; 1 is greedy.", rich_help_panel=BEAMS),
]
NBest = Annotated[
    int | None,
    typer.Option(
        "--n-best",
        metavar="N",
        help="The N best different texts of each line, best first: at most N lines of INDEX, SCORE and TEXT parted by "
        "tabs; INDEX counts the input's lines from 0.",
        rich_help_panel=BEAMS,
    ),
]
LengthPenalty = Annotated[
    float | None,
    typer.Option(
        "--length-penalty", metavar="A", help="Above 0 favours long texts, below 0 short.", rich_help_panel=BEAMS
    ),
]
LengthPenaltyType = Annotated[
    str | None,
    typer.Option(
        "--length-penalty-type",
        metavar="gnmt|avg|none",
        help="A score is log-probability / ((5 + length)/6)^A, / length^A, or / 1.",
        rich_help_panel=BEAMS,
    ),
]
CoveragePenalty = Annotated[
    float | None,
    typer.Option(
        "--coverage-penalty",
        metavar="B",
        help="Against skipped source tokens: scores get B times the sum of log min(attention to a token, 1).",
        rich_help_panel=BEAMS,
    ),
]
Stopping = Annotated[
    str | None,
    typer.Option(
        "--stopping",
        metavar="beam|heuristic|exhaustive",
        help="End with B finished hypotheses; when none as it stands is better besides; when none can become better.",
        rich_help_panel=BEAMS,
    ),
]
BeamGroups = Annotated[
    int | None,
    typer.Option("--beam-groups", metavar="G", help="Part the beam into G groups that differ.", rich_help_panel=BEAMS),
]
DiversityPenalty = Annotated[
    float | None,
    typer.Option(
        "--diversity-penalty", metavar="X", help="Of a token that earlier groups took.", rich_help_panel=BEAMS
    ),
]
Ensemble = Annotated[
    list[str] | None,
    typer.Option(
        "--ensemble",
        metavar="RUN...",
        help="Average the probabilities of several models of one vocabulary: A B C or A,B,C; the first gives the "
        "defaults, and RUN is one of them.",
        rich_help_panel=BEAMS,
    ),
]

Temperature = Annotated[float | None, typer.Option("--temperature", help="0 is greedy.", rich_help_panel=SAMPLING)]
TopK = Annotated[
    int | None,
    typer.Option(
        "--top-k",
        help="Keep the K most probable tokens; 0: all. For a [MASK]: show so many (5).",
        rich_help_panel=SAMPLING,
    ),
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", help="Keep the fewest tokens of total probability P.", rich_help_panel=SAMPLING),
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", help="Keep tokens at least P times as probable as the best.", rich_help_panel=SAMPLING),
]
Greedy = Annotated[bool, typer.Option("--greedy", help="Always the most probable token.", rich_help_panel=SAMPLING)]
NumSamples = Annotated[int, typer.Option("--num-samples", help="Completions of each prompt.", rich_help_panel=SAMPLING)]
Seed = Annotated[int, typer.Option("--seed", help="The same seed gives the same text.", rich_help_panel=SAMPLING)]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="End before this text (not in a beam); may be given again.", rich_help_panel=SAMPLING),
]

MaxNewTokens = Annotated[
    int | None, typer.Option("--max-new-tokens", help="Length of a completion at most.", rich_help_panel=LENGTH)
]
MinNewTokens = Annotated[int | None, typer.Option("--min-new-tokens", help="At least.", rich_help_panel=LENGTH)]
LengthMargin = Annotated[
    int | None,
    typer.Option(
        "--length-margin", metavar="N", help="At most N tokens more than the source has.", rich_help_panel=LENGTH
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option("--repetition-penalty", help="Above 1: used tokens become less likely.", rich_help_panel=LENGTH),
]
NoRepeatNgram = Annotated[
    int | None,
    typer.Option("--no-repeat-ngram", metavar="N", help="No N tokens in a row twice.", rich_help_panel=LENGTH),
]
Context = Annotated[
    str,
    typer.Option(
        "--context",
        metavar="slide|error",
        help="When a decoder's context is full: go on with its last half (a beam ends), or stop (and refuse a longer "
        "prompt). For sources there is --too-long.",
        rich_help_panel=LENGTH,
    ),
]

Output = Annotated[
    Path | None, typer.Option("--output", help="A file instead of standard output.", rich_help_panel=OUTPUT)
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="One JSON document per prompt, one a line, with all its completions (and their scores).",
        rich_help_panel=OUTPUT,
    ),
]
LogProbs = Annotated[
    bool, typer.Option("--logprobs", help="The model's log-probabilities of the tokens.", rich_help_panel=OUTPUT)
]
Alignments = Annotated[
    bool,
    typer.Option(
        "--alignments",
        help="Which source token each output token attends to most, from 0: `SOURCE-TARGET` pairs (0-0 1-2) after a "
        "tab; in --json [source, target] pairs, with the tokens.",
        rich_help_panel=OUTPUT,
    ),
]

Checkpoint = Annotated[
    str,
    typer.Option("--checkpoint", metavar="best|latest|step-N", help="Of the run.", rich_help_panel=MODEL),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        help="Lines of --input at a time; default: 16, for an encoder-decoder 32.",
        rich_help_panel=MODEL,
    ),
]
Device = Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda[:i]", rich_help_panel=MODEL)]
Precision = Annotated[str, typer.Option("--precision", metavar="auto|fp32|bf16|fp16", rich_help_panel=MODEL)]
Compile = Annotated[
    str,
    typer.Option(
        "--compile",
        metavar="auto|on|off",
        help="Compile the step of decoding; auto: on a GPU, when many tokens are asked for.",
        rich_help_panel=MODEL,
    ),
]
