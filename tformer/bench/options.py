"""Options of every `tformer bench` command, declared once, and what can be refused before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Annotated, Any, ClassVar

from tformer.support.errors import InputError
from tformer.support.formatting import whole_number
from tformer.support.options import Panel, comma_list, command_line

MODEL, WORK, PEERS = Panel("Which model"), Panel("What is measured"), Panel("Compared with")
HOW, RESULT = Panel("How"), Panel("Result")

MOST_BATCH = 2**16
MOST_SIZES = 32
MOST_THREADS = 4096
MOST = 10**9  # of anything that is counted or timed

Threads = Annotated[
    int | None, HOW("--threads", help="CPU threads for tformer and its peers.", default="PyTorch's choice")
]
Device = Annotated[str, HOW("--device", metavar="auto|cpu|cuda[:i]", help="auto: a GPU where there is one.")]
Compile = Annotated[bool, HOW("--compile", help="Run tformer through torch.compile.", rare=True)]
Repeats = Annotated[
    int,
    HOW("--repeats", help="Minimum number of timed rounds; short rounds are repeated for half a second.", rare=True),
]
Peers = Annotated[
    tuple[str, ...],
    PEERS("--peer", metavar="NAME", help="Another library to measure at the same work; may be repeated."),
]
NewTokens = Annotated[int, WORK("--new-tokens", metavar="N", help="Number of tokens generated per text.")]
Quantize = Annotated[
    str,
    WORK("--quantize", metavar="none|int8|int4", help="Quantization of tformer's matrices; none,int8 measures both."),
]
AsJson = Annotated[bool, RESULT("--json", help="One JSON document on standard output.")]


@dataclass(frozen=True)
class ModelOptions:
    """The model whose sizes are measured, with random weights."""

    arch: Annotated[str | None, MODEL("--arch", help="A family, for example gpt.")] = None
    preset: Annotated[str | None, MODEL("--preset", help="A shipped recipe of the family.")] = None
    config: Annotated[Path | None, MODEL("--config", metavar="FILE", help="A recipe file.")] = None
    run: Annotated[
        str | None, MODEL("--run", metavar="RUN", help="Measure a model of this run's sizes; its weights are not used.")
    ] = None


@dataclass(frozen=True)
class SpeedOptions:
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
    peer: Peers = ()
    peer_precision: Annotated[
        str | None,
        PEERS(
            "--peer-precision",
            metavar="P,P,...",
            help="Number formats of the other libraries.",
            default="all that they support on this machine",
            rare=True,
        ),
    ] = None
    repeats: Repeats = 10
    max_seconds: Annotated[float, HOW("--max-seconds", help="Time limit of each measuring process.", rare=True)] = 600.0
    threads: Threads = None
    precision: Annotated[str, HOW("--precision", metavar="auto|fp32|bf16|fp16", help="Of tformer.")] = "auto"
    compile: Compile = False
    device: Device = "auto"
    out: Annotated[Path | None, RESULT("--out", metavar="FILE.md", help="Write the report to this file too.")] = None
    as_json: AsJson = False

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

    @property
    def command(self) -> str:
        """The command line with these options; defaults are left out."""
        return command_line(["tformer", "bench", self.work], self)

    def check(self) -> None:
        """Raise InputError for what can be refused before anything is loaded."""
        require_positive(length=self.length, repeats=self.repeats, max_seconds=self.max_seconds, **self.own)
        check_threads_and_report(self.threads, self.out)


@dataclass(frozen=True)
class TrainOptions(SpeedOptions):
    """The options of `tformer bench train`."""

    work = "train"

    length: Annotated[int | None, WORK("--length", metavar="T", help="Tokens of an example.")] = None


@dataclass(frozen=True)
class GenerateOptions(SpeedOptions):
    """The options of `tformer bench generate`."""

    work = "generate"

    length: Annotated[int, WORK("--prompt-length", metavar="T", help="Tokens of each prompt.")] = 16
    new_tokens: NewTokens = 128
    quantize: Quantize = "none"


@dataclass(frozen=True)
class TranslateOptions(SpeedOptions):
    """The options of `tformer bench translate`."""

    work = "translate"

    length: Annotated[int | None, WORK("--source-length", metavar="T", help="Tokens of a source.")] = None
    new_tokens: NewTokens = 30
    beam_size: Annotated[int, WORK("--beam-size", metavar="B", help="Hypotheses.")] = 4
    sentences: Annotated[int, WORK("--sentences", metavar="N", help="Sources of a round.")] = 64
    quantize: Quantize = "none"


@dataclass(frozen=True)
class ClassifyOptions(SpeedOptions):
    """The options of `tformer bench classify`."""

    work = "classify"

    texts: Annotated[int, WORK("--texts", metavar="N", help="Number of texts.")] = 10_000
    length: Annotated[int | None, WORK("--length", metavar="T", help="Length of the longest text in tokens.")] = None


@dataclass(frozen=True)
class AttentionOptions:
    """The options of `tformer bench attention`."""

    model: ModelOptions = ModelOptions()
    kinds: Annotated[
        str | None,
        WORK(
            "--kinds",
            metavar="A,B,...",
            help="Attention kinds to measure; dense-masked is full attention with a T x T mask. Default: all "
            "kinds, or the model's. full is always measured.",
        ),
    ] = None
    lengths: Annotated[
        str | None,
        WORK(
            "--lengths",
            metavar="T,T,...",
            help="Sequence lengths.",
            default="512,1024,2048,4096,8192,16384, or those up to the model's maximum length",
        ),
    ] = None
    batch_size: Annotated[int, WORK("--batch-size", help="Sequences at once.")] = 1
    heads: Annotated[
        int | None, WORK("--num-heads", help="Number of attention heads.", default="4, or the model's", rare=True)
    ] = None
    head_dim: Annotated[
        int | None, WORK("--head-dim", help="Size of a head.", default="64, or the model's", rare=True)
    ] = None
    sets: Annotated[
        tuple[str, ...],
        WORK(
            "--set",
            metavar="KIND.OPTION=VALUE",
            help="An option of a kind, as in a recipe: sliding_window.window=256; with a model also any key of its "
            "recipe (tformer config explain). May be repeated.",
        ),
    ] = ()
    causal: Annotated[bool, WORK("--causal", help="Causal attention; decoders are always causal.")] = False
    peer: Peers = ()
    precision: Annotated[str | None, HOW("--precision", metavar="fp32|bf16|fp16", help="Default: fp32.")] = None
    compile: Compile = False
    device: Device = "auto"
    repeats: Repeats = 10
    max_seconds: Annotated[
        float, HOW("--max-seconds", help="Time limit for one kind at one length, including the start of Python.")
    ] = 120.0
    out: Annotated[
        Path | None,
        RESULT(
            "--out",
            metavar="DIR",
            help="Folder for table.md, table.csv, table.json, time.svg and memory.svg; existing files of these "
            "names are replaced.",
        ),
    ] = None
    as_json: AsJson = False

    def check(self) -> None:
        """Raise InputError for what can be refused before anything is loaded."""
        require_positive(
            batch_size=self.batch_size,
            num_heads=self.heads,
            head_dim=self.head_dim,
            repeats=self.repeats,
            max_seconds=self.max_seconds,
        )


@dataclass(frozen=True)
class AllOptions:
    """The options of `tformer bench all`."""

    quick: Annotated[bool, HOW("--quick", help="Measure fewer batch sizes, rounds and texts.")] = False
    threads: Threads = None
    device: Device = "auto"
    out: Annotated[Path, RESULT("--out", metavar="FILE.md", help="File of the report.")] = Path("report.md")
    as_json: AsJson = False

    def check(self) -> None:
        """Raise InputError for what can be refused before anything is loaded."""
        check_threads_and_report(self.threads, self.out)


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


def require_positive(**values: float | None) -> None:
    """Raise InputError for a number that is not above 0 or is above `MOST`; None was not given."""
    for name, value in values.items():
        if value is not None and not 0 < value <= MOST:
            expected = "more than 0" if not value > MOST else "a finite number" if value == inf else f"{MOST:,} at most"
            raise InputError(f"--{name.replace('_', '-')}: found {value}, expected {expected}")


def check_threads_and_report(threads: int | None, out: Path | None) -> None:
    """Raise InputError for a number of threads that no machine has, and for a report that would replace a folder."""
    if threads is not None and threads > MOST_THREADS:
        raise InputError(f"--threads: found {threads}, expected {MOST_THREADS:,} at most")
    require_positive(threads=threads)
    if out is not None and out.is_dir():
        raise InputError(f"--out: {out} is a folder, expected a file")
