"""Options of every `tformer bench` command, declared once, and what can be refused before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

from tformer.support.bounds import above_0, within
from tformer.support.errors import InputError
from tformer.support.formatting import whole_number
from tformer.support.options import NumberFormat, Panel, comma_list
from tformer.support.rules import Checked, exclude

MODEL, WORK, HOW, RESULT = Panel("Which model"), Panel("What is measured"), Panel("How"), Panel("Result")

MOST_BATCH = 2**16
MOST_SIZES = 32
MOST_THREADS = 4096
Counted = Annotated[int, within(1, 10**9)]
COMPILE_RULES = (exclude("--compile", "--quantize", hint="measure them in turn"),)

NewTokens = Annotated[Counted, WORK("--new-tokens", metavar="N", help="Number of tokens generated per text.")]
Quantize = Annotated[
    str,
    WORK("--quantize", metavar="none|int8|int4", help="Quantization of matrices; none,int8 measures both."),
]


@dataclass(frozen=True)
class ModelOptions(Checked):
    """The model whose sizes are measured, with random weights."""

    RULES = (exclude("--run", ("--arch", "--preset", "--config")),)

    arch: Annotated[str | None, MODEL("--arch", help="A family, for example gpt.")] = None
    preset: Annotated[str | None, MODEL("--preset", help="A shipped recipe of the family.")] = None
    config: Annotated[Path | None, MODEL("--config", metavar="FILE", help="A recipe file.")] = None
    run: Annotated[
        str | None, MODEL("--run", metavar="RUN", help="Measure a model of this run's sizes; its weights are not used.")
    ] = None


@dataclass(frozen=True)
class SpeedOptions(Checked):
    """Options that every speed benchmark has. Fields of a subclass are the workload's own options.

    work: the name of the workload in `speed.WORKS`.
    """

    work: ClassVar[str]

    model: ModelOptions = ModelOptions()
    sets: Annotated[
        tuple[str, ...],
        MODEL("--set", metavar="KEY=VALUE", help="Override any key of the recipe (tformer config explain)."),
    ] = ()
    batch_size: Annotated[
        str | None,
        WORK("--batch-size", metavar="N,N,...", help="One batch size, or several, of which the best is reported."),
    ] = None
    repeats: Annotated[
        Counted,
        HOW(
            "--repeats",
            help="Minimum number of timed rounds; short rounds are repeated for half a second.",
            rare=True,
        ),
    ] = 10
    max_seconds: Annotated[
        float, above_0(10**9), HOW("--max-seconds", help="Time limit of each measuring process.", rare=True)
    ] = 600.0
    threads: Annotated[
        Annotated[int, within(1, MOST_THREADS)] | None,
        HOW("--threads", help="CPU threads.", default="PyTorch's choice"),
    ] = None
    precision: Annotated[NumberFormat, HOW("--precision", help="Number format.")] = "auto"
    compile: Annotated[bool, HOW("--compile", help="Run the model through torch.compile.", rare=True)] = False
    device: Annotated[str, HOW("--device", metavar="auto|cpu|cuda[:i]", help="auto: a GPU where there is one.")] = (
        "auto"
    )
    out: Annotated[Path | None, RESULT("--out", metavar="FILE.md", help="Write the report to this file too.")] = None
    as_json: Annotated[bool, RESULT("--json", help="One JSON document on standard output.")] = False

    @property
    def length(self) -> int | None:
        """Tokens of an example; None: the workload's default."""
        return None

    @property
    def quantize(self) -> str:
        return "none"

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The sizes in the given order, each once; none for the workload's default."""
        if self.batch_size is None:
            return ()
        sizes = whole_numbers("--batch-size", self.batch_size, least=1, most=MOST_BATCH)
        if len(sizes) > MOST_SIZES:
            raise InputError(f"--batch-size: found {len(sizes)} sizes, expected {MOST_SIZES} at most")
        return sizes

    @property
    def own(self) -> dict[str, Any]:
        """The workload's own options by name: `new_tokens`, `texts`, ..."""
        names = [field.name for field in fields(self)[len(fields(SpeedOptions)) :]]
        return {name: getattr(self, name) for name in names if name not in ("length", "quantize")}

    def check(self) -> None:
        """Raise InputError for what can be refused before anything is loaded."""
        super().check()
        if self.out is not None and self.out.is_dir():
            raise InputError(f"--out: {self.out} is a folder, expected a file")


@dataclass(frozen=True)
class BenchTrainOptions(SpeedOptions):
    """The options of `tformer bench train`."""

    work = "train"

    length: Annotated[Counted | None, WORK("--length", metavar="T", help="Tokens of an example.")] = None


@dataclass(frozen=True)
class BenchGenerateOptions(SpeedOptions):
    """The options of `tformer bench generate`."""

    RULES = COMPILE_RULES
    work = "generate"

    length: Annotated[Counted, WORK("--prompt-length", metavar="T", help="Tokens of each prompt.")] = 16
    new_tokens: NewTokens = 128
    quantize: Quantize = "none"


@dataclass(frozen=True)
class BenchTranslateOptions(SpeedOptions):
    """The options of `tformer bench translate`."""

    RULES = COMPILE_RULES
    work = "translate"

    length: Annotated[Counted | None, WORK("--source-length", metavar="T", help="Tokens of a source.")] = None
    new_tokens: NewTokens = 30
    beam_size: Annotated[Counted, WORK("--beam-size", metavar="B", help="Hypotheses.")] = 4
    sentences: Annotated[Counted, WORK("--sentences", metavar="N", help="Sources of a round.")] = 64
    quantize: Quantize = "none"


def words_of(flag: str, text: str) -> tuple[str, ...]:
    """Words between commas, each once. Raises InputError where there is none."""
    found = tuple(dict.fromkeys(comma_list(text, str, InputError, skip_empty=True)))
    if not found:
        raise InputError(f"{flag}: found '{text}', expected a word, or several separated by commas")
    return found


def whole_numbers(flag: str, text: str, *, least: int, most: int) -> tuple[int, ...]:
    """Whole numbers between commas in the given order, each once. Raises InputError for anything else."""

    def read(word: str) -> int | None:
        number = whole_number(word)
        return number if number is not None and least <= number <= most else None

    def refuse(word: str) -> InputError:
        return InputError(f"{flag}: found '{word}', expected whole numbers from {least} to {most:,}")

    found = comma_list(text, read, refuse, skip_empty=True)
    if not found:
        raise InputError(f"{flag}: found none, expected whole numbers separated by commas")
    return tuple(dict.fromkeys(found))
