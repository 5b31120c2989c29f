"""Options of commands, declared once as fields of a frozen dataclass; and the options that several commands share.

    BEAMS = Panel("Beam search")

    @dataclass(frozen=True)
    class GenerateOptions:
        run: Annotated[str | None, argument("RUN", help="Run, checkpoint or Hugging Face folder.")] = None
        beam_size: Annotated[int | None, BEAMS("--beam-size", metavar="B", help="Hypotheses kept.")] = None
        device: Device = "auto"

`tformer.cli.command.takes_options` makes a command of a function that takes such a dataclass. The declaration needs no
command-line library, so the dataclass may stand in the package that does the work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass, make_dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, cast, get_args, get_type_hints

from tformer.support.bounds import Positive
from tformer.support.errors import InputError
from tformer.support.formatting import MAX_DIGITS

Options = TypeVar("Options")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Option:
    """Declaration of a field as an option of the command line.

    Attributes:
        flags: `--name`; none: an argument without a flag.
        help: one line for `--help`.
        metavar: name of the value in `--help`; None: its type, or the choices of a `Literal`.
        panel: title of the group of options that `--help` shows it in.
        default: words for the default where its value says nothing: "the preset's"; None: the value, if there is one.
        rare: only `--help-all` shows it.
        bare: the value of a flag for a number that stands alone; None: it needs a value.
    """

    flags: tuple[str, ...]
    help: str = ""
    metavar: str | None = None
    panel: str | None = None
    default: str | None = None
    rare: bool = False
    bare: str | None = None


def option(*flags: str, **facts: Any) -> Option:
    """Metadata of a field that is given by a flag; facts: the other attributes of `Option`."""
    return Option(flags, **facts)


def argument(metavar: str, *, help: str = "", default: str | None = None) -> Option:
    """Metadata of a field that is given without a flag."""
    return Option((), help, metavar, None, default)


@dataclass(frozen=True)
class Panel:
    """A group of options in `--help`. It makes options of the group, and takes in an option that commands share.

    RESULT = Panel("Result")
    out: Annotated[Path, RESULT("--out", help="The file to write.")]
    as_json: Annotated[Json, RESULT] = False
    """

    title: str

    def __call__(self, *flags: str, **facts: Any) -> Option:
        return option(*flags, panel=self.title, **facts)


class CommandOnly(NamedTuple):
    """A fact of an option that only the command has: it is no keyword in Python. hint: what to do there instead."""

    hint: str


class Neutral(NamedTuple):
    """The value of an option that means the same as leaving it out."""

    value: Any


def some_of(options_type: type[Any], names: Sequence[str]) -> type[Any]:
    """A dataclass of options with these fields of another one."""
    hints = hints_of(options_type)
    chosen = [(one.name, hints[one.name], one.default) for one in fields(options_type) if one.name in names]
    return make_dataclass(f"Some{options_type.__name__}", chosen, frozen=True)


def comma_list(
    text: str, read: Callable[[str], Item | None], refuse: Callable[[str], InputError], *, skip_empty: bool = False
) -> tuple[Item, ...]:
    """Read each word between commas with `read`. Raises `refuse(word)` for the first word that gives None."""
    found: list[Item] = []
    for word in (part.strip() for part in text.split(",")):
        if skip_empty and not word:
            continue
        item = read(word)
        if item is None:
            raise refuse(word)
        found.append(item)
    return tuple(found)


LARGEST_NUMBER = 100_000


def parse_numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    """`0,3-5` as (0, 3, 4, 5), in order, each once; None stays None. InputError for anything else."""
    if text is None:
        return None

    def read(part: str) -> range | None:
        match = re.fullmatch(r"(\d{1,6})\s*(?:-\s*(\d{1,6}))?", part)
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last > LARGEST_NUMBER:
            raise InputError(f"{option} {text}: {part} is no range", hint="write the smaller number first")
        return range(first, last + 1)

    def refuse(part: str) -> InputError:
        expected = "numbers and ranges like 0,3-5" + (", or mean" if option == "--heads" else "")
        return InputError(f"{option} {text}: expected {expected}")

    return tuple(sorted({number for numbers in comma_list(text, read, refuse) for number in numbers}))


UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str, option: str = "--shard-size") -> int:
    """Number of bytes of `5GB`, `500 MB`, `2GiB` or `1000`. InputError for anything else, and for less than one."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = UNITS.get(found[2].upper()) if found else None
    size = int(float(found[1]) * unit) if found and unit and len(found[1]) <= MAX_DIGITS else 0
    if size < 1:
        raise InputError(f"{option}: found '{text}', expected a size such as 5GB, 500MB or 2GiB")
    return size


def facts_of(hint: Any) -> tuple[Any, ...]:
    """The metadata of a type `Annotated[T, ...]`, also where T is `Annotated[U, ...] | None`."""
    if hasattr(hint, "__metadata__"):
        return (*hint.__metadata__, *facts_of(hint.__origin__))
    return tuple(fact for each in get_args(hint) for fact in facts_of(each)) if type(None) in get_args(hint) else ()


@cache
def _hints_of(options_type: Any) -> dict[str, Any]:
    hints = get_type_hints(options_type, include_extras=True)
    return {field.name: hints[field.name] for field in fields(options_type)}


def hints_of(options_type: type[Any]) -> dict[str, Any]:
    """The types of the fields of a class of options, with the facts beside them; a command needs them several times."""
    return _hints_of(cast(Any, options_type))


def declared_option(hint: Any) -> Option:
    """The `Option` in the annotations of a field's type."""
    [declared] = [fact for fact in facts_of(hint) if isinstance(fact, Option)]
    return declared


def bare_name(argument: Option) -> str:
    """The name of an argument."""
    return (argument.metavar or "").strip("[].")


def declared_fields(options_type: Any) -> Iterator[tuple[tuple[str, ...], Field[Any], Any]]:
    """(names from the outside in, field, type) of every option of a class, those of its nested dataclasses included."""
    hints = hints_of(options_type)
    for field in fields(options_type):
        hint = hints[field.name]
        if is_dataclass(hint):
            for path, inner, its_hint in declared_fields(hint):
                yield (field.name, *path), inner, its_hint
        else:
            yield (field.name,), field, hint


def flag_of(options_type: type[Any], name: str) -> str:
    """The flag of a field."""
    return declared_option(hints_of(options_type)[name]).flags[0]


def with_bare_values(words: Sequence[str], options_type: type[Any]) -> list[str]:
    """The words of a command line with the value of each flag that may stand alone and does."""
    declared = (declared_option(hint) for _, _, hint in declared_fields(options_type))
    bare = {flag: each.bare for each in declared if each.bare is not None for flag in each.flags}
    found: list[str] = []
    for word, after in zip_longest(words, words[1:]):
        found.append(word)
        if word in bare and re.fullmatch(r"-?\d+(\.\d*)?", after or "") is None:
            found.append(bare[word])
    return found


def flag_words(options: Any) -> Iterator[str]:
    """The flags and values of these options, and the arguments; defaults are left out."""
    hints = hints_of(type(options))
    for field in fields(options):
        value = getattr(options, field.name)
        if is_dataclass(value):
            yield from flag_words(value)
        elif value != field.default:
            declared = declared_option(hints[field.name])
            for item in value if isinstance(value, tuple) else (value,):
                yield from declared.flags[:1]
                if item is not True:
                    yield f"{item:.15g}" if isinstance(item, float) else str(item)


def as_keyword(flag: str) -> str:
    """`max_new_tokens` of `--max-new-tokens`."""
    return flag.removeprefix("--").replace("-", "_")


# --- shared options ---------------------------------------------------------------------------------------------------

RETURNED = CommandOnly("the result is returned")
IN_ARGUMENT = CommandOnly("the inputs are the first argument; a pair is a tuple")
AS_STRINGS = CommandOnly("texts are given as strings")

DATA, MACHINE = Panel("Data"), Panel("Model and machine")

Errors = Literal["strict", "replace"]
"""What happens at invalid UTF-8: an error, or U+FFFD in its place."""

BadRowsAre = Literal["error", "drop"]
"""What rows of a table are that cannot be used: an error, or left out."""

QuotesAre = Literal["cells", "text"]
"""What quotes in csv are: around cells, or text like other characters."""

RUN = argument("RUN", help="Run, checkpoint or Hugging Face folder.", default="the newest run")
Run = Annotated[str | None, RUN]
Checkpoint = Annotated[
    str,
    MACHINE("--checkpoint", metavar="best|latest|step-N", help="Checkpoint to load."),
    CommandOnly("tformer.load(path, which=...) chooses it"),
]
DEVICE = MACHINE("--device", metavar="cpu|cuda[:i]", help="auto: a GPU where there is one.")
Device = Annotated[str, DEVICE, CommandOnly("tformer.load(path, device=...) chooses it")]
DEVICES = MACHINE(
    "--devices",
    metavar="N|auto",
    help="Processes that divide the work, one for each GPU or core; auto: all GPUs.",
    default="one process",
    rare=True,
)
Devices = Annotated[str | None, DEVICES, CommandOnly("several processes: the command")]
PRECISION = MACHINE("--precision", help="Number format; auto: that of the training.", rare=True)
NumberFormat = Literal["auto", "fp32", "bf16", "fp16"]
Precision = Annotated[NumberFormat, PRECISION]
COMPILE = MACHINE("--compile", metavar="auto|on|off", help="torch.compile; auto: long trainings on a GPU.", rare=True)
Quantize = Annotated[
    Literal["none", "int8", "int4"],
    MACHINE(
        "--quantize",
        help="int8, int4: multiply weights in 8 or 4 bits with 8-bit inputs, on a CPU; files on disk do not change.",
        rare=True,
    ),
]
TextColumn = Annotated[
    str | None, DATA("--text-column", metavar="C", help="Column of the text in a table: name, or number from 0.")
]
TableColumn = Annotated[
    str | None,
    option("--text-column", metavar="C", help="Column of a table, by name or number.", default="as in training"),
]
Text2Column = Annotated[str | None, DATA("--text2-column", metavar="C", help="Column of the second text.", rare=True)]
LabelColumn = Annotated[str | None, DATA("--label-column", metavar="C", help="Column of the label or score.")]
ENCODING = DATA(
    "--encoding",
    metavar="NAME",
    help="Encoding of the text: utf-8, latin-1, utf-16, ...",
    default="found in tables, else utf-8",
    rare=True,
)
Encoding = Annotated[str | None, ENCODING]
DELIMITER = DATA(
    "--delimiter", metavar="C", help="What separates the cells of csv: a character, or tab.", default="found", rare=True
)
Delimiter = Annotated[str | None, DELIMITER]
Quotes = Annotated[
    QuotesAre | None,
    DATA("--quotes", help="Quotes in csv: around cells, or text like other characters.", default="cells", rare=True),
]
BadRows = Annotated[
    BadRowsAre | None,
    DATA("--bad-rows", help="Table rows that cannot be used, as without a label.", default="error", rare=True),
]
InvalidUtf8 = Annotated[Errors, option("--invalid-utf8", help="How to treat invalid UTF-8 in --input.", rare=True)]
InputsPerBatch = Annotated[
    Positive | None,
    MACHINE("--batch-size", help="Inputs per batch; affects only the speed.", default="chosen by their length"),
]
TaskPrefix = Annotated[
    str | None,
    option(
        "--prefix",
        metavar="TEXT",
        help="Text to put before every source that does not begin with it.",
        default="the prefix of training, if all training sets have the same",
        rare=True,
    ),
]
SpecialTokens = Annotated[
    bool,
    option(
        "--special-tokens", help="Read special tokens spelled in the text, such as [MASK], as those tokens.", rare=True
    ),
]
Views = Annotated[
    int,
    option("--views", metavar="N", help="Images: average the probabilities of N views, moved and mirrored.", rare=True),
]
Arch = Annotated[str | None, option("--arch", help="Family, for example gpt or llama.")]
Preset = Annotated[
    str | None, option("--preset", help="A shipped recipe of the family (tformer config list).", default="the family's")
]
RecipeFile = Annotated[
    Path | None, option("--config", metavar="FILE", help="A recipe file; its values override the preset's.")
]
Sets = Annotated[
    tuple[str, ...], option("--set", metavar="KEY=VALUE", help="Set any key (tformer config explain); repeatable.")
]
AnswerFile = Annotated[
    Path | None,
    option(
        "--output",
        metavar="FILE",
        help="Output file; .csv, .tsv, .jsonl, .parquet: a table.",
        default="standard output",
    ),
    RETURNED,
]
NewFolder = Annotated[Path | None, option("--out", metavar="DIR", help="Folder to write; must not exist yet.")]
PictureFile = Annotated[
    Path | None,
    option(
        "-o",
        "--output",
        metavar="FILE",
        help="File, whose suffix sets the format.",
        default="a page named after the command",
    ),
    RETURNED,
]
PictureFormat = Annotated[
    str | None,
    option("--format", metavar="html|png|svg|terminal|json|csv", help="Output format.", default="by the suffix of -o"),
    RETURNED,
]
Json = Annotated[bool, option("--json", help="One JSON document on standard output."), RETURNED]
