"""The `tformer` program: its commands by name, and the one place that turns errors into messages and exit codes.

Only the module of the called command is imported: typer inspects every option of an imported command, which would make
`--help` slow. The other commands are listed with the summary written here.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import re
import stat
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from tformer.cli.help import COMPLETING, HELP, HELP_ALL, HelpEntry, Page, paragraphs, show
from tformer.cli.process import BeforeTorch, DroppableStream
from tformer.cli.report import console, emit, emit_json, spinner
from tformer.support import __version__
from tformer.support.errors import InputError, InputErrors, OutOfMemoryError, StorageError, TformerError, visible
from tformer.support.formatting import as_cell
from tformer.support.options import with_bare_values

if TYPE_CHECKING:
    import typer


@dataclass(frozen=True)
class Command:
    """A command of `tformer`.

    Attributes:
        panel: title of the group of commands that `tformer --help` shows it in.
        module: in tformer.cli; the function has the same name.
        summary: the first sentence of its help.
        is_group: it has subcommands: its module's `app`.
    """

    panel: str
    module: str
    summary: str
    is_group: bool = False

    def imported(self) -> Any:
        """The `OptionsCommand`, or the `CommandGroup`, of its module."""
        module = import_module(f"tformer.cli.{self.module}")
        return module.app if self.is_group else getattr(module, self.module)

    def page(self, name: str, subcommand: str | None = None) -> Page:
        """The help of the command, or of a command in its group."""
        command = self.imported()
        if self.is_group:
            return command.page(name, subcommand)
        return command.page(name, import_module(f"tformer.cli.{self.module}").EPILOG)

    def subcommands(self) -> Collection[str]:
        """The names of a group's commands."""
        return self.imported().commands if self.is_group else ()


DOCUMENTS, TRAIN, USE = "Documents", "Train and compare", "Use"
LOOK_INSIDE, EXCHANGE, MEASURE = "Look inside", "Exchange", "Measure"


COMMANDS = {
    "guide": Command(DOCUMENTS, "guide", "Show the user guide, by topic, or the list of topics."),
    "train-tokenizer": Command(
        TRAIN, "train_tokenizer", "Train a tokenizer on your text and report how it encodes it."
    ),
    "data": Command(TRAIN, "data", "Look at data: columns, labels, lengths, duplicates, bad rows."),
    "train": Command(TRAIN, "train", "Train a Transformer from scratch, fine-tune or resume a run."),
    "config": Command(TRAIN, "config", "Show, validate, explain and list recipes, which define runs.", is_group=True),
    "sweep": Command(TRAIN, "sweep", "Train every variant of a recipe, and compare them in a table."),
    "runs": Command(TRAIN, "runs", "List, show and compare the runs of `tformer train`.", is_group=True),
    "plot": Command(
        TRAIN,
        "plot",
        "Plot loss, metrics, learning rate and throughput of runs.",
    ),
    "watch": Command(TRAIN, "watch", "Follow trainings in a browser: curves, progress, time left."),
    "average": Command(
        TRAIN,
        "average",
        "Average checkpoints of one model, often better than each.",
    ),
    "merge": Command(TRAIN, "merge", "Merge adapters (LoRA) into their base model."),
    "prune": Command(TRAIN, "prune", "Remove layers or attention heads, and measure the change."),
    "generate": Command(USE, "generate", "Continue or translate texts with a trained model."),
    "chat": Command(USE, "chat", "Talk with a trained model."),
    "classify": Command(
        USE,
        "classify",
        "Label texts, pairs of texts or images with a trained model.",
    ),
    "embed": Command(USE, "embed", "Turn texts into vectors, to compare or to search them."),
    "search": Command(USE, "search", "Find the texts of an embedded file nearest to a query."),
    "serve": Command(USE, "serve", "Answer a model over HTTP, with the API of OpenAI."),
    "inspect": Command(
        LOOK_INSIDE,
        "inspect",
        "Show parameters, cost, memory and tensor shapes of a model.",
    ),
    "tokenize": Command(
        LOOK_INSIDE,
        "tokenize",
        "Show how a text becomes tokens: pieces, ids, offsets, masks.",
    ),
    "viz-pe": Command(
        LOOK_INSIDE,
        "viz_pe",
        "Draw positional encodings (page, PNG, SVG or terminal).",
    ),
    "viz-attention": Command(
        LOOK_INSIDE,
        "viz_attention",
        "Draw attention maps of a model (page, PNG, SVG or terminal).",
    ),
    "heads": Command(
        LOOK_INSIDE,
        "heads",
        "Score attention heads: induction, previous token, alignment.",
    ),
    "patch": Command(
        LOOK_INSIDE,
        "patch",
        "Find the parts that an answer needs: patching, ablation.",
    ),
    "lens": Command(
        LOOK_INSIDE,
        "lens",
        "Show the answer after each layer, and what adds to a logit.",
    ),
    "attribute": Command(
        LOOK_INSIDE,
        "attribute",
        "Show which token or patch mattered for an answer.",
    ),
    "viz-embeddings": Command(
        LOOK_INSIDE,
        "viz_embeddings",
        "Draw vectors of tokens and labels; find the nearest of each.",
    ),
    "viz-tokens": Command(
        LOOK_INSIDE,
        "viz_tokens",
        "Colour a text by the loss of each token.",
    ),
    "import": Command(EXCHANGE, "import_", "Convert a Hugging Face folder or repository to a checkpoint."),
    "export": Command(
        EXCHANGE,
        "export",
        "Write a run for `transformers`, ONNX or llama.cpp.",
    ),
    "evaluate": Command(MEASURE, "evaluate", "Measure a model on the run's validation data or on --data."),
    "doctor": Command(MEASURE, "doctor", "Show versions, hardware, caches and speed, for a bug report."),
    "bench": Command(MEASURE, "bench", "Measure speed and memory on this machine.", is_group=True),
}


def add_commands(app: typer.Typer, words: Sequence[str]) -> None:
    """Register every command, and import the command that `words` (a command line without the program) calls."""
    called = next((word for word in words if not word.startswith("-")), None)
    for name, command in COMMANDS.items():
        if name != called:
            app.command(name, help=command.summary)(lambda: None)  # only completed
        elif command.is_group:
            app.add_typer(command.imported().for_typer(), name=name)
        else:
            app.command(name)(command.imported().for_typer())


MAX_MESSAGE = 4000  # characters: a message may quote a whole file
INTERRUPTED = 130  # exit code: 128 + SIGINT
STORAGE_ERRNOS = (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG, errno.EIO)


PROGRAM_OPTIONS = (
    HelpEntry("Options", "--version", "Print the version."),
    HelpEntry("Options", "--debug", "Show a traceback with every error; allowed everywhere."),
    HelpEntry(
        "Options", "--install-completion", "Complete commands, options and names of runs in this shell.", rare=True
    ),
    HelpEntry("Options", "--show-completion", "Print what --install-completion would install.", rare=True),
)

ABOUT = "Train, run and inspect Transformers: GPT, BERT, T5, ViT and others. `tformer COMMAND --help` shows examples."

FIRST_STEPS = (
    "tformer train --arch gpt --out runs/first",
    'tformer generate runs/first --prompt "The function returns"',
    'tformer viz-attention runs/first --text "The function returns a list."',
)


def help_page(path: Sequence[str]) -> Page:
    """The help of the program, or of a command by its name (in a group by both names)."""
    if path:
        return COMMANDS[path[0]].page("tformer " + path[0], *path[1:])
    commands = [HelpEntry(command.panel, name, command.summary) for name, command in COMMANDS.items()]
    return Page(
        "tformer", "[OPTIONS] COMMAND ...", paragraphs(ABOUT), (*commands, *PROGRAM_OPTIONS), FIRST_STEPS, "First steps"
    )


def asked_page(words: Sequence[str]) -> Page | None:
    """The help that a command line asks for right after the name of a command; None: typer has to parse it."""
    path: list[str] = []
    for word in words:
        if word in (*HELP, HELP_ALL):
            return help_page(path)
        is_command = word in COMMANDS if not path else len(path) == 1 and word in COMMANDS[path[0]].subcommands()
        if not is_command:
            return None
        path.append(word)
    return None


def make_program(words: Sequence[str]) -> Any:
    """Typer's program: all commands, and the options of the command that `words` calls, with our own help."""
    import typer

    app = typer.Typer(name="tformer", no_args_is_help=True, context_settings={"help_option_names": [*HELP, HELP_ALL]})

    @app.callback()
    def root(version: bool = typer.Option(False, "--version"), debug: bool = typer.Option(False, "--debug")) -> None:
        """Options of the program itself: they are read before this program, and only completed by it."""

    add_commands(app, words)
    program = typer.main.get_command(app)
    _replace_help(program, [], everything=HELP_ALL in words)
    return program


def _replace_help(command: Any, path: list[str], *, everything: bool) -> None:
    command.format_help = lambda context, formatter: show(help_page(path), everything=everything)
    for name, inner in getattr(command, "commands", {}).items():
        _replace_help(inner, [*path, name], everything=everything)


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit: the entry point of the `tformer` script."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        # At the end of the process, garbage collection among the objects of torch would take a quarter of a second.
        atexit.register(gc.freeze)
        # Warnings of PyTorch's C++ code are for its callers: DDP's of unused parameters is false with LayerDrop.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    _replace_closed_streams()
    _tolerate_any_locale()
    if arguments is None:
        sys.stderr = DroppableStream(sys.stderr)
        sys.meta_path.insert(0, BeforeTorch())
    stdout_is_pipe = _is_pipe(sys.stdout)
    try:
        if words[:1] == ["--version"]:
            emit(f"tformer {__version__}")
            sys.exit(0)
        if (page := asked_page(words)) is not None:
            show(page, everything=HELP_ALL in words)
            sys.exit(0)
        program = make_program(_words_to_complete() if COMPLETING in os.environ else words)
        if (command := COMMANDS.get(words[0] if words else "")) is not None and not command.is_group:
            words = with_bare_values(words, command.imported().options_type)
        with spinner.shown() if "-" not in words else nullcontext():  # what is typed on a terminal is echoed there
            code = program(words, prog_name="tformer", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:  # typer makes this exit code, without a message, of a KeyboardInterrupt
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except BrokenPipeError:
        _end_of_pipe()
    except SystemExit:
        # typer and rich exit with 1 where they find a pipe closed, after replacing the stream or its descriptor
        if stdout_is_pipe and (type(sys.stdout).__name__ == "PacifyFlushWrapper" or not _is_pipe(sys.stdout)):
            _end_of_pipe()
        raise
    except KeyboardInterrupt:
        sys.exit(_print_error("interrupted", None, INTERRUPTED, as_json="--json" in words))
    except Exception as error:
        if debug:
            traceback.print_exc()
        sys.exit(report(error, words))


def _words_to_complete() -> list[str]:
    """The words after `tformer` of the line that a shell wants completed."""
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    return line.split()[1:]


def _is_pipe(stream: TextIO) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # a stream of a test
        return False


def _end_of_pipe() -> NoReturn:
    """Exit as a program that SIGPIPE ends; the interpreter does not report the closed pipe while it shuts down."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(141)


def report(error: Exception, words: Sequence[str] = ()) -> int:
    """Print an error as one line and a hint, with `--json` also as an object on stdout, and return its exit code.

    words: the command line without the program's name.
    """
    known = as_tformer_error(error) or _usage_error(error, words) or internal_error(error)
    parts = known.message.split("\n") if isinstance(known, InputErrors) else [known.message]
    message, hint = "\n".join(map(_one_line, parts)), known.hint and hint_for(known.hint, words)
    return _print_error(message, hint, known.exit_code, as_json="--json" in words)


def hint_for(hint: str, words: Sequence[str]) -> str:
    """A hint for the command that `words` call: a flag of another command comes with the name of that one."""
    if (own := next(iter(words), "")) not in COMMANDS or "tformer " in hint:
        return hint
    own_names = (own, "train") if own == "sweep" else (own,)
    known = {flag for path in _paths(own_names) for flag in flags_of(path)}
    with suppress(Exception):  # where no memory is left to import another command
        for flag in dict.fromkeys(FLAG.findall(hint)):
            others = (path for path in _paths(("train", *COMMANDS)) if flag not in known and flag in flags_of(path))
            if (other := next(others, None)) is not None:
                hint += f" ({flag}: tformer {' '.join(other)})"
    return hint


FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def _paths(names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """The words that call these commands, and those in groups."""
    for name in names:
        yield from ((name, one) for one in COMMANDS[name].subcommands()) if COMMANDS[name].is_group else [(name,)]


@cache
def flags_of(path: tuple[str, ...]) -> set[str]:
    """The long flags of a command, which `--help-all` shows."""
    entries = (*help_page(path).entries, *PROGRAM_OPTIONS)
    return {*HELP, HELP_ALL, *(flag for entry in entries for flag in FLAG.findall(entry.name))}


def _usage_error(error: Exception, words: Sequence[str]) -> InputError | None:
    """The error for one of typer's own; None for any other."""
    if hasattr(error, "format_message"):  # typer's own usage errors
        context = getattr(error, "ctx", None)
        if context is None:  # the program and the command at the beginning of the line, with the command of a group
            found = [word for word in words[:1] if word in COMMANDS]
            if found and COMMANDS[found[0]].is_group:
                found += [word for word in words[1:2] if word.isidentifier()]
        command = " ".join(["tformer", *found]) if context is None else context.command_path
        # typer's message is empty when no command was given; its checks by pydantic begin with "Value error".
        message = " ".join(str(error.format_message()).split()).replace("Value error, ", "") or "no command was given"
        return InputError(message, hint=f"see '{command} --help'")
    return None


def internal_error(error: Exception) -> TformerError:
    """The error that says that an exception is a bug in tformer."""
    return TformerError(
        f"internal error: {type(error).__name__}: {error}", hint="this is a bug in tformer; --debug shows the traceback"
    )


def as_tformer_error(error: Exception) -> TformerError | None:
    """The user-facing error for an exception: itself, or a translated system or device error. None: a bug in
    tformer."""
    cause = error.__context__ if isinstance(error, InputError) else error
    if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):  # whatever the file was read as
        return TformerError(
            f"too many open files: cannot open {cause.filename or 'another'}", hint="raise the limit (ulimit -n)"
        )
    if isinstance(error, TformerError):
        return error
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or _is_failed_allocation(error):
        return OutOfMemoryError(
            f"out of memory: {str(error).splitlines()[0] if str(error) else 'allocation failed'}",
            hint="lower --batch-size (training: raise --grad-accum), or --set training.activation_checkpointing=true",
        )
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return OutOfMemoryError(
            "out of memory: the system starts no further thread",
            hint="raise the limits of memory and processes (ulimit -v, ulimit -u), or set OMP_NUM_THREADS=1",
        )
    if isinstance(error, FileNotFoundError) and _is_in_removed_folder():
        return InputError("the current folder has been removed", hint="change to another one (cd)")
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM):
        return StorageError(f"no access to {error.filename or 'a file'}: {error.strerror}")
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return InputError(f"{error.filename}: this name is too long for the file system")
    if isinstance(error, OSError) and error.errno in STORAGE_ERRNOS:
        action = "read or write" if error.errno == errno.EIO else "write"
        return StorageError(f"cannot {action} {error.filename or 'a file'}: {error.strerror}")
    return None


def _is_failed_allocation(error: Exception) -> bool:
    """Whether PyTorch got no memory on the CPU, or the system could not map a file."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def _is_in_removed_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _print_error(message: str, hint: str | None, code: int, *, as_json: bool = False) -> int:
    """Print an error on stderr, and with `as_json` an object on stdout; gives its exit code."""
    hint = hint and _one_line(hint)
    if as_json:
        with suppress(OSError):
            emit_json({"error": message, "hint": hint, "code": code})
    try:
        from rich.markup import escape

        console.print(f"[bold red]error:[/] {escape(message)}")
        if hint:
            console.print(f"[bold]hint:[/] {escape(hint)}")
    except (MemoryError, RuntimeError, OSError, ImportError):  # neither memory, threads nor files are left for it
        with suppress(OSError):
            os.write(2, f"error: {message}\n".encode("utf-8", "backslashreplace"))
    return code


def _one_line(text: str) -> str:
    """Text without newlines and escape sequences; a long text loses its middle."""
    half = MAX_MESSAGE // 2
    short = text if len(text) <= MAX_MESSAGE else f"{text[:half]} ... {text[-half:]}"
    return visible(as_cell(short))


def _replace_closed_streams() -> None:
    """Read a closed stdin as empty and discard messages to a closed stderr; a closed stdout ends the command."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.exit(_print_error("standard output is closed", "send it to a file, or to /dev/null", 3))


def _tolerate_any_locale() -> None:
    """Write data as UTF-8 whatever the locale; characters that a terminal lacks are escaped."""
    for stream, encoding in ((sys.stdout, "utf-8"), (sys.stderr, None)):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace", **({"encoding": encoding} if encoding else {}))


if __name__ == "__main__":
    main()
