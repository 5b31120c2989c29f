"""`tformer inspect`: modules, cost and tensor shapes of a model; checks of its files."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tformer.cli.command import examples
from tformer.cli.process import StopFlag
from tformer.cli.report import console, emit, emit_json
from tformer.errors import InputError, did_you_mean, visible

if TYPE_CHECKING:
    from tformer.workflows.inspect import Question


MOST = 10**12  # of anything counted: more is a slip of the keyboard
MOST_SCORES = 2**48  # of one head that --shapes follows: beyond, a tensor's numbers cannot be counted
LAYOUTS = ("mermaid", "dot", "tree")
LAYOUT_SUFFIXES = {".mmd": "mermaid", ".mermaid": "mermaid", ".dot": "dot", ".gv": "dot"}


def layout_of(layout: str | None, output: Path | None) -> str | None:
    """As named, or by the suffix of the file."""
    if layout is not None and layout not in LAYOUTS:
        raise InputError(
            f"--layout: found '{layout}', expected mermaid, dot or tree", hint=did_you_mean(layout, LAYOUTS)
        )
    suffix = "" if output is None else output.suffix.lower()
    known = (*LAYOUT_SUFFIXES, ".txt", ".json", ".md")
    if output is not None and str(output) != "-" and suffix not in known:
        raise InputError(f"{output}: unknown suffix, expected one of {', '.join(known)}")
    by_suffix = LAYOUT_SUFFIXES.get(suffix)
    if by_suffix is not None and layout not in (None, by_suffix):
        raise InputError(f"--layout {layout} disagrees with {output}, which is for {by_suffix}")
    return layout or by_suffix


def check_views(
    run: str | None,
    arch: str | None,
    preset: str | None,
    config: Path | None,
    sets: list[str] | None,
    shapes: bool,
    text: str | None,
    layout: str | None,
    verify: bool,
    depth: int | None,
) -> None:
    """Refuse options that exclude each other or lack what they need. Raises InputError."""
    recipes = [("--arch", arch), ("--preset", preset), ("--config", config)]
    named = [option for option, value in recipes if value is not None]
    if run is not None and named:
        raise InputError(f"RUN and {named[0]} exclude each other: {run} has its own recipe")
    views = [("--shapes", shapes), ("--layout", layout is not None), ("--verify", verify)]
    chosen = [option for option, wanted in views if wanted]
    if len(chosen) > 1:
        raise InputError(f"{chosen[0]} and {chosen[1]} exclude each other")
    if verify and (named or sets):
        raise InputError(f"--verify checks files as they are: leave {named[0] if named else '--set'} out")
    if text is not None and not shapes:
        raise InputError("--text is for --shapes, which is missing")
    if text is not None and named:
        raise InputError(f"--text needs the tokenizer of a run: leave {named[0]} out", hint="or say --seq-len T")
    if depth is not None and (depth < 0 or chosen):
        raise InputError(f"--depth {depth}: it must be at least 0, and is for the tree of modules")


def check_counts(*counts: int | None) -> None:
    """Refuse sizes below one or absurd: batch, length, vocabulary, labels. Raises InputError."""
    names = ("--batch-size", "--seq-len", "--vocab-size", "--num-labels")
    for option, count in zip(names, counts, strict=True):
        if count is not None and count < 1:
            raise InputError(f"{option} must be at least 1, found {count}")
        if count is not None and count > MOST:
            raise InputError(f"{option} must be at most {MOST:,}, found {count:,}")


def check_trace(batch_size: int, source_length: int, target_length: int) -> None:
    """Refuse examples whose tensors would be too large even to be described. Raises InputError."""
    scores = batch_size * max(source_length, target_length) ** 2
    if scores > MOST_SCORES:
        raise InputError(
            f"--shapes: {batch_size:,} examples of {max(source_length, target_length):,} positions are too many to "
            f"follow: found {scores:,} scores a head, expected at most {MOST_SCORES:,}"
        )


WHAT, SIZES, VIEW, OUT = "Which model", "At which sizes", "What to show", "Result"
TINY = 8  # positions that --shapes follows where no text and no length is given
PIPE_WIDTH = 100

EPILOG = examples(
    "`tformer inspect --arch gpt --preset small`",
    "`tformer inspect runs/transformer-tiny-1 --shapes`",
    "`tformer inspect --arch bert --preset base --layout mermaid -o bert.mmd`",
    "`tformer inspect runs/gpt-tiny-1 --verify`",
)


def inspect(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN", help="Run, checkpoint or Hugging Face folder; default: the newest run.", show_default=False
        ),
    ] = None,
    arch: Annotated[str | None, typer.Option("--arch", help="A family, for example gpt.", rich_help_panel=WHAT)] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", help="A shipped recipe of the family.", rich_help_panel=WHAT)
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="A recipe of your own.", rich_help_panel=WHAT)
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="What if: override any key of the recipe.", rich_help_panel=WHAT
        ),
    ] = None,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="best|latest|step-N", help="Of the run.", rich_help_panel=WHAT)
    ] = "best",
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            metavar="N",
            help="Examples of a forward pass; default: the recipe's.",
            rich_help_panel=SIZES,
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            "--seq-len", metavar="T", help="Positions, on both sides; default: the recipe's.", rich_help_panel=SIZES
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option("--vocab-size", metavar="V", help="Where no tokenizer or recipe says it.", rich_help_panel=SIZES),
    ] = None,
    num_labels: Annotated[
        int | None, typer.Option("--num-labels", metavar="L", help="Of a classifier.", rich_help_panel=SIZES)
    ] = None,
    precision: Annotated[
        str, typer.Option("--precision", metavar="auto|fp32|bf16|fp16", rich_help_panel=SIZES)
    ] = "auto",
    device: Annotated[
        str,
        typer.Option("--device", metavar="auto|cpu|cuda", help="Whose memory is estimated.", rich_help_panel=SIZES),
    ] = "auto",
    shapes: Annotated[
        bool,
        typer.Option("--shapes", help="Follow an example: shape and meaning of every tensor.", rich_help_panel=VIEW),
    ] = False,
    text: Annotated[
        str | None,
        typer.Option("--text", help="What --shapes follows, through a run's tokenizer.", rich_help_panel=VIEW),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option("--layout", metavar="mermaid|dot|tree", help="Draw the architecture.", rich_help_panel=VIEW),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Check the files of a checkpoint, or of all of a run.", rich_help_panel=VIEW),
    ] = False,
    depth: Annotated[
        int | None, typer.Option("--depth", metavar="N", help="Levels of the tree; 0: the total.", rich_help_panel=VIEW)
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write there.", rich_help_panel=OUT)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output.", rich_help_panel=OUT)
    ] = False,
) -> None:
    """Show a model's modules, parameters, operations, memory and cache; follow its tensors; draw it; check its files.

    Needs no tokenizer, no data and, but for --verify, no memory: a model of any size takes a second. Training counts
    forward and backward; operations count full attention, as is the custom. Tied parameters count once.
    """
    layout = layout_of(layout, output)
    check_views(run, arch, preset, config, set_, shapes, text, layout, verify, depth)
    check_counts(batch_size, seq_len, vocab_size, num_labels)
    if precision not in ("auto", "fp32", "bf16", "fp16"):
        raise InputError(f"--precision: found '{precision}', expected auto, fp32, bf16 or fp16")
    if device not in ("auto", "cpu") and device.partition(":")[0] != "cuda":
        raise InputError(f"--device: found '{device}', expected auto, cpu or cuda")
    if verify:
        _verify(run, output, as_json)
        return
    from tformer.device import resolve_device
    from tformer.workflows.inspect import Question

    question = Question(
        path=run,
        which=checkpoint,
        arch=arch,
        preset=preset,
        config=config,
        sets=tuple(set_ or ()),
        vocab_size=vocab_size,
        num_labels=num_labels,
        batch_size=batch_size,
        seq_len=seq_len,
        precision=None if precision == "auto" else precision,
        device=resolve_device(device).type if device == "auto" else device.partition(":")[0],
    )
    if shapes:
        lines, document = _shapes(question, text)
    elif layout is not None:
        lines, document = _layout(question, layout)
    else:
        lines, document = _report(question, depth)
    _give(lines, document, output, as_json)


def _report(question: Question, depth: int | None) -> tuple[list[str], Any]:
    from tformer.workflows.inspect import read_subject, report_on
    from tformer.workflows.inspect.text import report_lines

    report = report_on(read_subject(question))
    return list(report_lines(report, width=_width(), depth=depth)), report.to_json()


def _shapes(question: Question, text: str | None) -> tuple[list[str], Any]:
    from tformer.workflows.inspect import read_subject, trace_shapes
    from tformer.workflows.inspect.text import trace_lines

    subject = read_subject(question)
    length, tokens = min(TINY, subject.source_length), []
    if text is not None:
        tokens = _tokens(subject.checkpoint, text)
        length = len(tokens)
        if length > subject.source_length:
            raise InputError(f"--text has {length} tokens, the model reads {subject.source_length}")
    elif question.seq_len is not None or subject.recipe.model.patches is not None:
        length = subject.source_length
    target = min(TINY - 2, subject.target_length) if question.seq_len is None else question.seq_len
    sizes = {"batch_size": question.batch_size or 1, "source_length": length, "target_length": target}
    check_trace(**sizes)
    trace = trace_shapes(subject.model, **sizes)
    document = {"name": subject.name, "tokens": tokens, **trace.to_json(), "notes": list(subject.notes)}
    lines = list(trace_lines(trace, width=_width(), tokens=tokens))
    if subject.generator is not None:
        first = trace_shapes(subject.generator, **sizes)
        document["generator"] = first.to_json()
        lines = [
            *("GENERATOR: guesses the masked tokens", ""),
            *trace_lines(first, width=_width(), tokens=tokens),
            *("", "DISCRIMINATOR: reads the text with the guesses in it", ""),
            *trace_lines(trace, width=_width()),
        ]
    return lines, document


def _tokens(checkpoint: Any, text: str) -> list[str]:
    """What the checkpoint's tokenizer makes of a text, its template included."""
    from tformer.tokenizer import Tokenizer

    if checkpoint is None or checkpoint.tokenizer_json is None:
        raise InputError("--text: this model has no tokenizer")
    tokenizer = Tokenizer.from_json(checkpoint.tokenizer_json)
    ids = tokenizer.encode(text)
    if not ids:
        raise InputError("--text: no tokens are in it")
    return [tokenizer.tokens[id_] or str(id_) for id_ in ids]


def _layout(question: Question, layout: str) -> tuple[list[str], Any]:
    from tformer.workflows.inspect import DRAWINGS, lay_out, read_subject

    subject = read_subject(question)
    drawn = lay_out(subject.recipe.model, title=subject.name, generator=subject.recipe.generator)
    return DRAWINGS[layout](drawn).splitlines(), {"name": subject.name, "layout": layout, **drawn.to_json()}


def _verify(run: str | None, output: Path | None, as_json: bool) -> None:
    from tformer.workflows.inspect import verify
    from tformer.workflows.inspect.text import verdict_lines

    with StopFlag() as flag:
        verdicts = verify(run, should_stop=flag.should_stop)
    _give(list(verdict_lines(verdicts)), [verdict.to_json() for verdict in verdicts], output, as_json)
    problems = sum(len(verdict.problems) for verdict in verdicts)
    if problems:
        console.print(f"{problems} problem{'s' * (problems != 1)}", markup=False)
        raise typer.Exit(2)


def _give(lines: list[str], document: Any, output: Path | None, as_json: bool) -> None:
    """To the file, else to standard output."""
    to_file = output is not None and str(output) != "-"
    if to_file and output is not None:
        from tformer.viz.output import Output, write_output

        wants_json = output.suffix == ".json"
        content = json.dumps(document, ensure_ascii=False, indent=1) if wants_json else "\n".join(map(visible, lines))
        write_output(Output("json" if wants_json else "terminal", output), content + "\n")
        console.print(f"written: {output}", markup=False)
    if as_json:
        emit_json(document)
    elif not to_file:
        for line in lines:
            emit(visible(line))


def _width() -> int:
    """Columns that lines are for: the terminal's, at least 60; in a pipe a page's."""
    return max(60, shutil.get_terminal_size().columns) if sys.stdout.isatty() else PIPE_WIDTH
