"""Limits, closed streams, names, locales, folders, options of Python: the work is done, or refused in one line.

A command that has limits or closed streams runs in a fork of this process, which has imported everything.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from tests.conftest import TINY_RECIPE, Outcome
from tests.quick import first_is_quick

BYTES = "r\udcff"  # a file's name with the byte 0xff, as Python holds it
ROOT = Path(__file__).parents[2]
TRAIN = ("train", "--config", "tiny.yaml", "--data", "text.txt", "--max-steps", "4")


@dataclass(frozen=True)
class Ended:
    """How a command ended; `code` is negative for a signal."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of the error."""
        [line] = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert "Traceback" not in self.err and "internal error" not in self.err, self.err
        return line.removeprefix("error: ")


Command = Callable[..., Ended]


@pytest.fixture
def home(tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text and a recipe, in which commands run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TFORMER_KERNELS", "off")
    (tmp_path / "tiny.yaml").write_text(TINY_RECIPE)
    return tmp_path


@pytest.fixture
def command(home: Path, cli: Callable[..., Outcome]) -> Command:
    """`command(*words, prepare=...)` runs a command, with `prepare` in a fork of this process, after `prepare()`."""
    import torch

    import tformer.cli.app
    import tformer.training.session
    import tformer.viz.plots

    def child(words: tuple[str, ...], prepare: Callable[[], object]) -> NoReturn:
        code = 99
        try:
            sys.stdin = open(0, closefd=False)  # noqa: SIM115
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            sys.argv = ["tformer", *words]
            torch.set_num_threads(1)
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads of its pool are not in a fork
            prepare()
            tformer.cli.app.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def run(*words: object, prepare: Callable[[], object] | None = None, timeout: float = 60) -> Ended:
        if prepare is None:
            outcome = cli(*words)
            return Ended(outcome.code, outcome.out, outcome.err)
        if torch.version.cuda is not None:
            pytest.skip("this PyTorch cannot compute gradients in a fork of a process that has computed some")
        out, err = home / "out.log", home / "err.log"
        process = os.fork()
        if process == 0:
            for number, path in enumerate((Path(os.devnull), out, err)):
                flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                os.dup2(os.open(path, flags, 0o666), number)
            child(tuple(map(str, words)), prepare)
        deadline = time.monotonic() + timeout
        while (ended := os.waitpid(process, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
            time.sleep(0.01)
        texts = (path.read_text(errors="replace") for path in (out, err))
        return Ended(os.waitstatus_to_exitcode(ended[1]), *texts)

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The place of a copy of the run that the first test has trained."""
    return tmp_path_factory.mktemp("trained") / "run"


@pytest.fixture
def run(command: Command, home: Path, trained: Path) -> str:
    """A trained run: its name."""
    if trained.exists():
        shutil.copytree(trained, home / "run")
    else:
        assert command(*TRAIN, "--out", "run").code == 0
        shutil.copytree(home / "run", trained)
    return "run"


def limit(kind: int, soft: int, hard: int | None = None) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (soft, soft if hard is None else hard))


def close(*numbers: int) -> Callable[[], None]:
    """Close standard streams as `<&- >&- 2>&-` does: Python then has None for them."""

    def prepare() -> None:
        for number in numbers:
            os.close(number)
            setattr(sys, ("stdin", "stdout", "stderr")[number], None)

    return prepare


def leave_removed_folder() -> None:
    Path("removed").mkdir()
    os.chdir("removed")
    os.rmdir("../removed")


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_whose_name_is_no_utf8_trains_resumes_and_serves_every_command(command: Command, home: Path) -> None:
    """Its quick twin is `test_a_missing_file_whose_name_is_no_utf8_is_one_line`."""
    for words in (
        (*TRAIN, "--out", BYTES),
        ("train", "--resume", "--out", BYTES, "--max-steps", 5),
        ("inspect", BYTES, "--verify"),
        ("runs", "list", "."),
        ("runs", "show", BYTES, "--json"),
        ("generate", BYTES, "--prompt", "the", "--max-new-tokens", 2, "--json", "--output", "g\udcff"),
        ("evaluate", BYTES, "--json"),
        ("export", BYTES, "--out", "e\udcff"),
        ("average", BYTES, "--last", 2, "--out", "a\udcff"),
        ("plot", BYTES, "-o", "p\udcff.html"),
        ("viz-attention", BYTES, "--text", "the", "-o", "v\udcff.html"),
        ("train-tokenizer", "text.txt", "--vocab-size", 300, "--out", "t\udcff.json"),
    ):
        ended = command(*words)
        assert ended.code == 0, (words, ended.err)
    assert os.fsencode(home / BYTES).endswith(b"r\xff") and (home / "v\udcff.html").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("viz-attention", "--text", "the", "-o", "v.png"), ("viz-pe", "--run", "-o", "p.svg")]
)
def test_a_picture_of_a_run_whose_name_is_no_utf8(command: Command, words: tuple[str, ...]) -> None:
    assert command(*TRAIN, "--out", BYTES).code == 0
    at = 2 if words[0] == "viz-pe" else 1
    assert command(*words[:at], BYTES, *words[at:]).code == 0


@pytest.mark.parametrize(
    "words",
    [
        (*TRAIN, "--data", BYTES, "--out", "x"),
        ("train", "--config", BYTES),
        ("generate", BYTES, "--prompt", "x"),
        ("inspect", BYTES),
        ("classify", BYTES, "--text", "x"),
        ("train-tokenizer", BYTES),
    ],
    ids=lambda words: words[0],
)
def test_a_missing_file_whose_name_is_no_utf8_is_one_line(command: Command, words: tuple[str, ...]) -> None:
    ended = command(*words)
    assert ended.code == 2 and "\\udcff" in ended.error


def test_a_prompt_that_is_no_utf8_is_one_line(command: Command, run: str) -> None:
    ended = command("generate", run, "--prompt", "a\udcff")
    assert ended.code == 2 and "half a surrogate pair" in ended.error


def start(words: list[str], cwd: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """A command in a separate process, with options for Python."""
    return subprocess.run(
        [sys.executable, *options, *(() if "-c" in options else ("-m", "tformer")), *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
    )


@first_is_quick("locale", ["C", "POSIX"])
def test_a_locale_of_ascii_without_utf8_mode_reads_and_writes_names_beyond_ascii(home: Path, locale: str) -> None:
    (home / "é.txt").write_text("zwölf Boxkämpfer jagen Viktor\n" * 30, encoding="utf-8")
    words = ["train-tokenizer", "é.txt", "--model", "char", "--out", "ü.json", "--json"]
    done = start(words, home, LC_ALL=locale, PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0, done.stderr
    assert '"path": "ü.json"'.encode() in done.stdout and (home / "ü.json").is_file()


@pytest.mark.slow
def test_training_and_generation_in_a_locale_of_ascii(home: Path) -> None:
    (home / "é.txt").write_text("zwölf Boxkämpfer jagen Viktor\n" * 30, encoding="utf-8")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "LANG": ""}
    trained = start(["train", "--config", "tiny.yaml", "--data", "é.txt", "--out", "rün"], home, **locale)
    assert trained.returncode == 0, trained.stderr
    written = start(["generate", "rün", "--prompt", "ö", "--max-new-tokens", "2"], home, **locale)
    assert written.returncode == 0 and written.stdout.startswith("ö".encode())


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000])
def test_a_name_that_is_too_long_is_one_line(command: Command, name: str) -> None:
    for words in ((*TRAIN, "--out", name), ("inspect", name), ("viz-pe", "-o", f"{name}.png")):
        ended = command(*words)
        assert ended.code in (2, 3) and "too long" in ended.error


# -- links and folders -------------------------------------------------------------------------------------------------

FILES = [
    ("viz-pe", "-o", "{}.png"),
    ("viz-attention", "run", "--text", "the", "-o", "{}.html"),
    ("plot", "run", "-o", "{}.html"),
    ("inspect", "run", "-o", "{}.txt"),
    ("generate", "run", "--prompt", "the", "--output", "{}.txt"),
    ("evaluate", "run", "--mistakes", "{}.tsv"),
    ("train-tokenizer", "text.txt", "--out", "{}.json"),
    ("bench", "train", "--out", "{}.md"),
]


@pytest.mark.parametrize("words", FILES, ids=lambda words: words[0])
def test_an_output_file_in_a_folder_that_does_not_exist_is_refused_by_every_command(
    command: Command, home: Path, words: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    if "run" in words:
        request.getfixturevalue("run")
    ended = command(*(word.format("missing/folder/x") for word in words))
    assert ended.code == 2, ended.err
    assert not (home / "missing").exists()


@pytest.mark.parametrize("words", [FILES[0], FILES[6]], ids=lambda words: words[0])
def test_an_output_link_that_leads_nowhere_is_followed_or_refused(
    command: Command, home: Path, words: tuple[str, ...]
) -> None:
    name = words[-1].format("link")
    (home / name).symlink_to("missing/file")
    assert command(*(word.format("link") for word in words)).code == 2
    assert (home / name).is_symlink() and not (home / "missing").exists()
    (home / "missing").mkdir()
    assert command(*(word.format("link") for word in words)).code == 0
    assert (home / name).is_symlink() and (home / "missing/file").is_file()


def test_a_folder_link_that_leads_nowhere_is_refused(command: Command, home: Path, run: str) -> None:
    (home / "link").symlink_to("nowhere")
    for words in (
        (*TRAIN, "--out", "link"),
        ("train", "--resume", "--out", "link"),
        ("train", "--config", "tiny.yaml", "--data", "link", "--out", "x"),
        ("generate", "link", "--prompt", "x"),
        ("inspect", "link"),
        ("export", run, "--out", "link"),
        ("average", run, "--last", 2, "--out", "link"),
        ("import", "link", "--out", "x"),
        ("runs", "list", "link"),
    ):
        ended = command(*words)
        assert ended.code == 2 and "link" in ended.error, (words, ended.err)
    assert (home / "link").is_symlink() and not (home / "nowhere").exists()


def test_a_current_folder_that_was_removed_is_one_line(command: Command, home: Path) -> None:
    for words in (
        ("train", "--config", home / "tiny.yaml", "--data", home / "text.txt"),
        ("train-tokenizer", home / "text.txt"),
        ("viz-pe",),
    ):
        ended = command(*words, prepare=leave_removed_folder)
        assert ended.code == 2 and ended.error == "the current folder has been removed"


@pytest.mark.slow
def test_home_and_temporary_folder_may_be_missing(command: Command, home: Path) -> None:
    def without(**values: str | None) -> Callable[[], None]:
        def prepare() -> None:
            for name, value in values.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})

        return prepare

    for number, prepare in enumerate(
        (
            without(HOME="/proc/1", TFORMER_CACHE=None),
            without(HOME=os.devnull, TFORMER_CACHE=None),
            without(TMPDIR="/missing"),
            without(TFORMER_CACHE="/proc/cache"),
            without(TZ="Not/AZone", TERM="dumb", COLUMNS="1"),
            without(COLUMNS="1000000"),
        )
    ):
        ended = command(*TRAIN, "--out", f"run{number}", prepare=prepare)
        assert ended.code == 0, ended.err


@first_is_quick("mask", [0o077, 0o000])
def test_the_umask_is_honoured_by_every_file_of_a_run(command: Command, home: Path, mask: int) -> None:
    assert command(*TRAIN, "--out", "run", prepare=lambda: os.umask(mask)).code == 0
    for path in (home / "run").rglob("*"):
        assert path.is_symlink() or path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~mask, path


# -- limits ------------------------------------------------------------------------------------------------------------


@first_is_quick("spare", [0, 1 << 20, 16 << 20])
def test_no_memory_left_is_one_line_and_exit_5(command: Command, home: Path, spare: int) -> None:
    def prepare() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + spare, used + spare))

    large = ("--set", "model.d_model=1024", "--set", "model.decoder.num_layers=8")
    ended = command(*TRAIN, *large, "--out", "run", prepare=prepare)
    assert ended.code == 5 and ended.error.startswith("out of memory: ")
    assert not list(home.glob("run/checkpoints/*"))


@pytest.mark.parametrize("files", [4, 6, 8])
def test_no_further_open_file_is_one_line(command: Command, files: int) -> None:
    ended = command(*TRAIN, "--out", "run", prepare=limit(resource.RLIMIT_NOFILE, files))
    assert ended.code == 1 and ended.error.startswith("too many open files: cannot open ")


@pytest.mark.slow
def test_a_limit_on_the_size_of_files_is_exit_3_and_leaves_nothing(command: Command, home: Path) -> None:
    """Its quick twin is `checkpoint/test_checkpoint_faults.py::test_file_size_limit`."""
    assert command(*TRAIN, "--out", "run").code == 0  # fills the cache, too
    for words in (
        (*TRAIN, "--out", "x"),
        ("export", "run", "--out", "e"),
        ("viz-pe", "-o", "x.png"),
        ("train-tokenizer", "text.txt", "--model", "char", "--out", "t.json"),
    ):
        ended = command(*words, prepare=limit(resource.RLIMIT_FSIZE, 600))
        assert ended.code == 3 and "File too large" in ended.error and "ulimit -f" in ended.err, (words, ended.err)
    assert not [path for path in home.rglob("*") if path.name.startswith(".tmp-")]
    assert not (home / "e").exists() and not (home / "x.png").exists() and not (home / "t.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("hard", ["later", pytest.param("same", marks=pytest.mark.slow)])
def test_the_end_of_the_cpu_time_saves_a_checkpoint(command: Command, home: Path, hard: str) -> None:
    """SIGXCPU, at the soft limit or some seconds before the hard one, is handled as SIGTERM is.

    Its quick twin is `test_e2e_train.py::test_a_signal_saves_and_exits`.
    """

    def prepare() -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        used = int(usage.ru_utime + usage.ru_stime)
        resource.setrlimit(resource.RLIMIT_CPU, (used + 2, used + 100) if hard == "later" else (used + 12, used + 12))

    ended = command(*TRAIN, "--max-steps", 10**6, "--out", "run", prepare=prepare)
    assert ended.code == 128 + signal.SIGXCPU and ended.error.startswith("interrupted: saved at step ")
    assert command("train", "--resume", "--out", "run", "--max-minutes", "0.0001").code == 0


# -- streams -----------------------------------------------------------------------------------------------------------


def test_closed_standard_input_and_error_change_nothing(command: Command) -> None:
    assert command(*TRAIN, "--out", "run", prepare=close(0, 2)).code == 0
    for closed in (0, 2):
        assert command("generate", "run", "--prompt", "a", "--max-new-tokens", 2, prepare=close(closed)).out


def test_closed_standard_output_is_refused_before_any_work(command: Command, home: Path) -> None:
    ended = command(*TRAIN, "--out", "run", prepare=close(1))
    assert ended.code == 3 and ended.error == "standard output is closed"
    assert command(*TRAIN, "--out", "run", prepare=close(0, 1, 2)).code == 3
    assert not (home / "run").exists()


# -- options of Python -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-W", "error"), ("-OO",), ("-I", "-c", "MAIN")], ids=" ".join)
def test_a_training_does_not_depend_on_options_of_python(home: Path, options: tuple[str, ...]) -> None:
    main = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tformer.__main__ import main; main()"
    options = tuple(main if option == "MAIN" else option for option in options)
    done = start([*TRAIN, "--out", "run"], home, *options, PYTHONHASHSEED="7", PYTHONSAFEPATH="1")
    assert done.returncode == 0, done.stderr
    again = start([*TRAIN, "--out", "again"], home, PYTHONHASHSEED="8")
    assert again.returncode == 0, again.stderr
    weights = "checkpoints/step-00000004/model.safetensors"
    assert (home / "run" / weights).read_bytes() == (home / "again" / weights).read_bytes()
    written = start(["generate", "run", "--prompt", "the", "--max-new-tokens", "2"], home, *options)
    assert written.returncode == 0 and b"Warning" not in written.stderr, written.stderr
