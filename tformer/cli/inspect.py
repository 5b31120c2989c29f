"""`tformer inspect`: modules, cost and tensor shapes of a model; checks of its files."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tformer.cli.command import examples, takes_options
from tformer.cli.process import StopFlag
from tformer.cli.report import PIPE_WIDTH, emit_json, emit_lines, show_notes
from tformer.support.bounds import NonNegative, Positive
from tformer.support.errors import InputError, visible
from tformer.support.files import require_writable
from tformer.support.formatting import json_text, plural
from tformer.support.options import (
    DEVICE,
    PRECISION,
    Arch,
    Checkpoint,
    Json,
    NumberFormat,
    Panel,
    Preset,
    RecipeFile,
    Run,
    Sets,
)
from tformer.support.rules import Checked, exclude, needs

if TYPE_CHECKING:
    from tformer.tasks.base import GivenExample
    from tformer.workflows.inspect.subject import InspectRequest
    from tformer.workflows.inspect.trace import Trace

MOST_SCORES = 2**48  # of one head with --shapes: the elements of larger tensors cannot be counted
PAGE = ".html"
TEXTS = (".txt", ".json", ".md")
NAMED = ("--arch", "--preset", "--config")
EXAMPLE = ("--text", "--text2", "--target", "--image")
SHORT = 8  # positions of --shapes without a text and without a length

WHAT, SIZES, VIEW, OUT = Panel("Which model"), Panel("At which sizes"), Panel("What to show"), Panel("Result")

EPILOG = examples(
    "`tformer inspect --arch gpt --preset small`",
    '`tformer inspect --shapes --text "A dog." -o shapes.html`',
    "`tformer inspect runs/gpt-tiny-1 --verify`",
)


@dataclass(frozen=True)
class InspectOptions(Checked):
    """The options of `tformer inspect`."""

    RULES = (
        exclude("RUN", NAMED, hint="a run has its own recipe"),
        exclude("--checkpoint", NAMED, hint="a recipe has no checkpoints"),
        exclude("--shapes", "--verify"),
        exclude("--verify", (*NAMED, "--set", "--checkpoint"), hint="files are checked as they are"),
        exclude("--verify", SIZES, hint="files are checked as they are"),
        exclude(EXAMPLE, NAMED, hint="an example is for a run; or use --seq-len T"),
        exclude(EXAMPLE, "--seq-len", hint="the example sets the length"),
        exclude("--depth", ("--shapes", "--verify"), hint="it is for the tree of modules"),
        needs(EXAMPLE, "--shapes"),
    )

    run: Run = None
    arch: Annotated[Arch, WHAT] = None
    preset: Annotated[Preset, WHAT] = None
    config: Annotated[RecipeFile, WHAT] = None
    set: Annotated[Sets, WHAT] = ()
    checkpoint: Annotated[Checkpoint, WHAT] = "best"
    batch_size: Annotated[
        Positive | None, SIZES("--batch-size", metavar="N", help="Examples in a forward pass.", default="the recipe's")
    ] = None
    seq_len: Annotated[
        Positive | None,
        SIZES("--seq-len", metavar="T", help="Sequence length of source and target in tokens.", default="the recipe's"),
    ] = None
    vocab_size: Annotated[
        Positive | None,
        SIZES(
            "--vocab-size",
            metavar="V",
            help="Vocabulary size, if neither a tokenizer nor the recipe gives it.",
            rare=True,
        ),
    ] = None
    precision: Annotated[
        NumberFormat, replace(PRECISION, help="Number format of the training whose memory is estimated."), SIZES
    ] = "auto"
    device: Annotated[
        str, replace(DEVICE, metavar="auto|cpu|cuda", help="The device whose memory is estimated."), SIZES
    ] = "auto"
    shapes: Annotated[bool, VIEW("--shapes", help="Show shape and meaning of every tensor in a forward pass.")] = False
    text: Annotated[
        str | None,
        VIEW("--text", help="This example as training gives it to the model, special tokens included."),
    ] = None
    text2: Annotated[str | None, VIEW("--text2", help="Its second text, for a model of pairs of texts.", rare=True)] = (
        None
    )
    target: Annotated[
        str | None,
        VIEW("--target", help="Its target, for a translator.", default="the model's own translation", rare=True),
    ] = None
    image: Annotated[Path | None, VIEW("--image", metavar="FILE", help="An image in place of a text.", rare=True)] = (
        None
    )
    verify: Annotated[
        bool, VIEW("--verify", help="Check the files of a checkpoint, or of all checkpoints of a run.")
    ] = False
    depth: Annotated[
        NonNegative | None, VIEW("--depth", metavar="N", help="Depth of the module tree; 0: only the total.", rare=True)
    ] = None
    output: Annotated[Path | None, OUT("-o", "--output", metavar="FILE", help="Write to this file.")] = None
    json: Annotated[Json, OUT] = False

    def check(self) -> None:
        """Raise InputError for options that contradict each other or are out of range."""
        super().check()
        if self.device not in ("auto", "cpu") and self.device.partition(":")[0] != "cuda":
            raise InputError(f"--device: found '{self.device}', expected auto, cpu or cuda")
        suffix = "" if self.output is None else self.output.suffix.lower()
        if suffix == PAGE and not self.shapes:
            raise InputError(f"{self.output}: a page is for --shapes, which is missing")
        if self.output is not None and str(self.output) != "-" and suffix not in (*TEXTS, PAGE):
            raise InputError(f"{self.output}: unknown suffix, expected one of {', '.join((*TEXTS, PAGE))}")

    def example(self) -> GivenExample | None:
        """The example that the command line gives."""
        parts = (self.text, self.text2, self.target, self.image)
        if all(part is None for part in parts):
            return None
        from tformer.tasks.base import GivenExample

        return GivenExample(*parts)

    def question(self) -> InspectRequest:
        """The model and its sizes, as `tformer.workflows.inspect` takes them."""
        from tformer.support.device import resolve_device
        from tformer.workflows.inspect.subject import InspectRequest

        return InspectRequest(
            path=self.run,
            which=self.checkpoint,
            arch=self.arch,
            preset=self.preset,
            config=self.config,
            sets=self.set,
            vocab_size=self.vocab_size,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            precision=None if self.precision == "auto" else self.precision,
            device=resolve_device(self.device).type if self.device == "auto" else self.device.partition(":")[0],
        )


@takes_options
def inspect(options: InspectOptions) -> None:
    """Show parameters, cost, memory and tensor shapes of a model.

    Needs no tokenizer and no data. Weights are only read with --verify and for a translator's own translation, so a
    model of any size takes a second. Training FLOPs count forward and backward; full attention counts every key, also
    those that a causal mask hides. Tied parameters count once.
    """
    if options.output is not None and str(options.output) != "-":
        require_writable(options.output, option="-o")
    if options.verify:
        _verify(options)
        return
    from tformer.workflows.inspect.report import report_on
    from tformer.workflows.inspect.subject import read_subject
    from tformer.workflows.inspect.text import report_lines

    if options.shapes:
        lines, document, page = _shapes(options)
        _write(lines, document, options, page)
        return
    report = report_on(read_subject(options.question()))
    _write(list(report_lines(report, width=_width(), depth=options.depth)), report.to_json(), options)


def _shapes(options: InspectOptions) -> tuple[list[str], Any, str | None]:
    """The shapes as lines, as a document, and as a page where the output is one."""
    from tformer.tasks.example import example_lines
    from tformer.workflows.inspect.subject import given_batch, read_subject
    from tformer.workflows.inspect.text import trace_lines
    from tformer.workflows.inspect.trace import empty_inputs, trace_shapes

    question = options.question()
    subject, example = read_subject(question), options.example()
    batch_size, width = question.batch_size or 1, _width()
    document: dict[str, Any] = {"name": subject.name}
    lines: list[str] = []
    if example is not None:
        batch, document["example"], notes = given_batch(subject, example)
        show_notes(notes, dim=True)
        lines = [*example_lines(document["example"], width=width), ""]
        given = batch.to("meta").model_inputs()
        _refuse_many_scores(batch_size, max(one.shape[1] for one in given.values()))
        inputs = {name: one.new_empty((batch_size, *one.shape[1:])) for name, one in given.items()}
    else:
        # Short lengths, unless the command line or the model says otherwise.
        has_length = question.seq_len is not None or subject.recipe.model.patches is not None
        source = subject.source_length if has_length else min(SHORT, subject.source_length)
        target = min(SHORT - 2, subject.target_length) if question.seq_len is None else question.seq_len
        sizes = {"source_length": source, "target_length": target}
        _refuse_many_scores(batch_size, max(sizes.values()))
        inputs = empty_inputs(subject.model, batch_size=batch_size, **sizes)
    traces: dict[str, Trace] = {}
    if subject.generator is None:
        traces[""] = trace_shapes(subject.model, inputs)
    else:
        both = {"generator": subject.generator, "discriminator": subject.model}
        headings = {
            "generator": "GENERATOR: predicts the masked tokens",
            "discriminator": "DISCRIMINATOR: reads the text with the predictions in it",
        }
        for name, model in both.items():
            [(other, beside)] = (pair for pair in both.items() if pair[0] != name)
            parameters = {f"{other}.{key}": value for key, value in beside.named_parameters(remove_duplicate=False)}
            traces[headings[name]] = trace_shapes(model, inputs, beside=parameters)
        document["generator"] = traces[headings["generator"]].to_json()
    page = None
    if options.output is not None and options.output.suffix.lower() == PAGE:
        from tformer.nn.taps import LETTERS
        from tformer.viz.page import render_shapes

        page = render_shapes(
            {title: trace.to_json() for title, trace in traces.items()},
            subtitle=f"The path of a tensor through {subject.name}",
            names=LETTERS,
            example=document.get("example"),
            notes=subject.notes,
        )
    for title, trace in traces.items():
        lines += [*((title, "") if title else ()), *trace_lines(trace, width=width), ""]
    return lines[:-1], document | traces[title].to_json() | {"notes": list(subject.notes)}, page


def _refuse_many_scores(batch_size: int, longest: int) -> None:
    if (scores := batch_size * longest**2) > MOST_SCORES:
        raise InputError(
            f"--shapes: {batch_size:,} examples of {longest:,} positions are too many: "
            f"found {scores:,} scores a head, expected at most {MOST_SCORES:,}"
        )


def _verify(options: InspectOptions) -> None:
    from tformer.workers.work import Work
    from tformer.workflows.inspect.text import verdict_lines
    from tformer.workflows.inspect.verify import verify

    with StopFlag() as flag:
        verdicts = verify(options.run, work=Work(should_stop=flag.should_stop))
    _write(list(verdict_lines(verdicts)), [verdict.to_json() for verdict in verdicts], options)
    problems, damaged = sum(len(verdict.problems) for verdict in verdicts), [v for v in verdicts if v.problems]
    if damaged:
        places = damaged[0].path if len(damaged) == 1 else f"{len(damaged)} of {len(verdicts)} folders"
        message = f"{places}: found {plural(problems, 'problem')}, expected none"
        if options.json:  # the document has the problems
            show_notes([f"error: {message}"])
            raise SystemExit(2)
        raise InputError(message)


def _write(lines: list[str], document: Any, options: InspectOptions, page: str | None = None) -> None:
    """Write the result to the file, or to standard output. page: content of a file in place of the lines."""
    path = None if str(options.output) == "-" else options.output
    if path is not None:
        from tformer.viz.output import OutputTarget, write_output

        wants_json = path.suffix == ".json"
        content = json_text(document, indent=1) if wants_json else "".join(f"{visible(line)}\n" for line in lines)
        write_output(OutputTarget("json" if wants_json else "terminal", path), page or content)
        show_notes([f"wrote {path}"])
    if options.json:
        emit_json(document)
    elif path is None:
        emit_lines(lines)


def _width() -> int:
    """Width of the output: the terminal's, at least 60; in a pipe PIPE_WIDTH."""
    return max(60, shutil.get_terminal_size().columns) if sys.stdout.isatty() else PIPE_WIDTH
