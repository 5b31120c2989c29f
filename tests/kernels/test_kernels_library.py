"""Building and finding the library: once, whole, by this user alone, and never a reason to fail."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.decoding.random_models import tiny_model
from tformer.cli.diagnosis import diagnosis
from tformer.data.shards.caches import clean_caches
from tformer.decoding.inference import missing_kernels, state_of_kernels
from tformer.kernels import library
from tformer.kernels.functions import find

pytestmark = pytest.mark.skipif(library.find_compiler() is None or os.name != "posix", reason="no compiler here")


@pytest.fixture(autouse=True)
def _a_new_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path / "cache"))
    library.forget()
    library._say_once.cache_clear()
    yield
    library.forget()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, compiled once for the tests that need only its file."""
    compiler = library.find_compiler()
    assert compiler is not None
    target = tmp_path_factory.mktemp("compiled") / "library.so"
    library.build(compiler, target)
    return target


@pytest.fixture
def quick_build(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`build` copies the compiled library."""

    def build(compiler: str, target: Path) -> None:
        new = Path(shutil.copy(compiled, target.with_suffix(".new")))  # the old file may be mapped
        new.chmod(0o700)
        new.replace(target)

    monkeypatch.setattr(library, "build", build)


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "kernels").iterdir())


def test_it_is_built_once_and_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.load() is not None
    record, found = kept(tmp_path)
    assert (record.name, found.suffix) == (f"{found.stem}.json", ".so")
    assert found.stat().st_mode & 0o777 == 0o700 == found.parent.stat().st_mode & 0o777
    library.forget()
    monkeypatch.setattr(library, "build", lambda *_: pytest.fail("built again"))
    assert library.load() is not None


def test_the_compiler_of_the_tests_compiles_each_command_and_source_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls, source = tmp_path / "cc", tmp_path / "calls", tmp_path / "sources" / "one.c"
    real.write_text(f'#!/bin/sh\necho >> {calls}\nwhile [ "$1" != -o ]; do shift; done\ndate +%N > "$2"\n')
    real.chmod(0o755)
    source.parent.mkdir()
    monkeypatch.setenv("TFORMER_TEST_CC", str(real))
    monkeypatch.setenv("TFORMER_KEPT_LIBRARIES", str(tmp_path))
    made = []
    for text, flag in (("int a;", "-O1"), ("int a;", "-O1"), ("int a;", "-O2"), ("int b;", "-O2"), ("int a;", "-O1")):
        source.write_text(text)
        words = [flag, "-shared", str(source), "-o", str(tmp_path / "made.so")]
        subprocess.run([Path(__file__).parents[1] / "keeping_cc.py", *words], check=True)
        made.append((tmp_path / "made.so").read_text())
    assert made[0] == made[1] == made[4] and len(set(made)) == 3 == calls.read_text().count("\n")


@pytest.mark.usefixtures("quick_build")
@pytest.mark.parametrize("loosened", ["folder", "file"])
def test_what_others_can_write_is_not_loaded(loosened: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.load() is not None
    _, found = kept(tmp_path)
    (found if loosened == "file" else found.parent).chmod(0o777)
    library.forget()
    built: list[Path] = []
    original: Callable[..., None] = library.build

    def build(compiler: str, target: Path) -> None:
        built.append(target)
        original(compiler, target)

    monkeypatch.setattr(library, "build", build)
    assert (library.load() is None) == (loosened == "folder")
    assert built == ([] if loosened == "folder" else [found])  # a file is made again, a folder left alone


@pytest.mark.usefixtures("quick_build")
@pytest.mark.slow
def test_its_threads_are_those_of_pytorch() -> None:
    """With a second OpenMP library in the process, each would keep a set of threads waiting for work.

    The quick twin is `test_of_several_openmp_libraries_pytorchs_is_taken`.
    """
    assert library.load() is not None  # kept for the next process
    code = "from tformer.kernels.library import load; load(); print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert len({line.split()[-1] for line in maps.splitlines() if "libgomp" in line or "libiomp" in line}) == 1


@pytest.mark.usefixtures("quick_build")
def test_for_little_work_only_what_is_there_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TFORMER_KERNELS")
    assert find(may_build=False) is None and kept(tmp_path) == []
    assert find() is not None
    library.forget()
    assert find(may_build=False) is not None
    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path / "other"))
    monkeypatch.setenv("TFORMER_KERNELS", "on")
    library.forget()
    assert find(may_build=False) is not None


@pytest.mark.usefixtures("quick_build")
def test_a_training_whose_time_is_limited_builds_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine builds for up to a minute."""
    monkeypatch.delenv("TFORMER_KERNELS")
    monkeypatch.setattr("tformer.decoding.inference.WORTH_A_BUILD", 1)
    model, cpu = tiny_model(), torch.device("cpu")
    assert state_of_kernels(model, cpu, seconds=9.0) == "missing" and kept(tmp_path) == []
    assert state_of_kernels(model, cpu) == "ready"
    library.forget()
    assert state_of_kernels(model, cpu, seconds=9.0) == "ready"


@pytest.mark.parametrize("word", ["off", "0", "OFF", "no"])
def test_it_can_be_switched_off(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFORMER_KERNELS", word)
    assert find() is None and not (tmp_path / "cache").exists()


def test_without_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert find() is None


@pytest.mark.parametrize("name", ["MAPS", "PROCESSOR"])
def test_without_proc_there_is_none_and_that_is_said(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, name, tmp_path / "none")
    assert find() is None and library.state() == library.NO_PROC and "/proc" in library.NO_PROC
    assert "/proc" in missing_kernels() and "compiler" not in missing_kernels()
    [advice] = [line for line in diagnosis(with_speed=False)["advice"] if "kernels" in line]
    assert "/proc" in advice and "could not be compiled" not in advice


def test_a_compiler_that_fails_is_left_alone_for_a_day_unless_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing, calls = tmp_path / "cc", tmp_path / "calls"
    failing.write_text(f"#!/bin/sh\necho >> {calls}\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CC", str(failing))
    assert find() is None
    (mark,) = kept(tmp_path)
    assert mark.suffix == ".failed"
    for age, expected in ((0, 1), (library.RETRY_SECONDS + 60, 2), (-3600, 3)):
        then = time.time() - age
        os.utime(mark, (then, then))
        library.forget()
        assert find() is None and calls.read_text().count("\n") == expected


@pytest.mark.parametrize("word", ["ccache cc", "/usr/bin/sccache cc -O2", "ccache", "none-such", " "])
def test_cc_may_name_a_launcher_options_or_nothing_that_is_there(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    expected = library.find_compiler()
    monkeypatch.setenv("CC", word)
    assert Path(str(library.find_compiler())).resolve() == Path(str(expected)).resolve()


@pytest.mark.usefixtures("quick_build")
def test_a_mapped_file_may_have_any_name(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/latin-\xfc"
    os.mkdir(folder)
    with open(folder + b"/file", "wb+") as file:
        file.write(b"some bytes")
        file.flush()
        with mmap.mmap(file.fileno(), 0):
            assert library.load() is not None


def test_without_a_home_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user in a container whose number nobody knows."""
    for name in ("TFORMER_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert find() is None


@pytest.mark.usefixtures("quick_build")
@pytest.mark.parametrize("damage", ["truncated", "zeroed page", "other bytes", "no record", "damaged record"])
def test_a_library_that_is_not_as_it_was_built_is_never_opened_and_made_anew(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert library.load() is not None
    record, path = kept(tmp_path)
    whole = path.read_bytes()
    if damage == "no record":
        record.unlink()
    elif damage == "damaged record":
        record.write_text("{")
    else:
        changed = {"truncated": whole[:5000], "zeroed page": whole[:4096] + bytes(4096) + whole[8192:]}
        new = Path(f"{path}.new")  # this process has mapped the old file
        new.write_bytes(changed.get(damage, b"no library"))
        new.chmod(0o700)
        new.replace(path)
    opened: list[bytes] = []
    monkeypatch.setattr(library, "open_at", lambda path: opened.append(path.read_bytes()))
    monkeypatch.setattr(library, "_tried_out", library.open_at)
    library.forget()
    library.load()
    assert opened == [whole] and library._is_as_built(path)


@pytest.mark.usefixtures("quick_build")
@pytest.mark.parametrize("suffix", [".so", ".json"])
def test_a_folder_in_the_place_of_a_file_of_the_cache_is_no_error(suffix: str, tmp_path: Path) -> None:
    assert library.load() is not None
    path = kept(tmp_path)[-1].with_suffix(suffix)
    path.unlink()
    path.mkdir()
    library.forget()
    assert library.load() is None


@pytest.mark.usefixtures("quick_build")
def test_doctor_does_not_die_of_a_damaged_library(tmp_path: Path) -> None:
    assert library.load() is not None
    _, path = kept(tmp_path)
    new = Path(f"{path}.new")  # this process has mapped the old file
    new.write_bytes(path.read_bytes()[:5000])
    new.chmod(0o700)
    new.replace(path)
    library.forget()
    assert diagnosis(with_speed=False)["kernels"]["state"] == "ready"
    assert library._is_as_built(path)


@pytest.mark.usefixtures("quick_build")
def test_a_cache_that_can_only_be_read_serves_the_library_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert library.load() is not None
    library.forget()
    monkeypatch.setattr(library, "build", lambda *_: pytest.fail("built again"))
    monkeypatch.setattr(library.files, "temporary_beside", lambda path: tmp_path / "absent" / path.name)
    assert library.load() is not None and library.state() == "ready"


@pytest.mark.usefixtures("quick_build")
def test_a_library_that_was_missing_at_the_first_call_is_used_once_it_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small models do not build one; a large model of the same process does."""
    monkeypatch.delenv("TFORMER_KERNELS", raising=False)
    assert library.load(may_build=False) is None and library.state() == "missing"
    built = library.load()
    assert built is not None and library.load(may_build=False) is built and library.state() == "ready"


DIES = """\
import os, sys
from tformer.kernels import library
library.open_at = lambda path: os.kill(os.getpid(), int(sys.argv[1]))
library.load()
"""


@pytest.mark.usefixtures("quick_build")
def test_after_a_crash_in_the_first_calls_the_next_processes_go_without_for_a_day(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert library.load() is not None and library.state() == "ready"
    done = subprocess.run([sys.executable, "-c", DIES, "11"], check=False)
    assert done.returncode == -11
    marker = next(path for path in kept(tmp_path) if path.suffix == library.MARKER)
    library.forget()
    assert library.load() is None and library.load() is None and library.state() == library.ENDED
    (said,) = [record.getMessage() for record in caplog.records]  # once for each process, in one line
    assert said.startswith(library.ENDED) and "doctor --clean" in said and "\n" not in said
    (advice,) = [line for line in diagnosis(with_speed=False)["advice"] if "kernels" in line]
    assert library.ENDED in advice
    then = time.time() - library.RETRY_SECONDS - 60
    os.utime(marker, (then, then))
    library.forget()
    assert library.load() is not None and library.state() == "ready" and not marker.exists()


@pytest.mark.usefixtures("quick_build")
def test_a_process_that_is_in_its_first_calls_keeps_no_other_from_them(tmp_path: Path) -> None:
    assert library.load() is not None
    path = kept(tmp_path)[-1]
    library.forget()
    with library._marked(path.with_suffix(library.MARKER)):
        assert library.load() is not None


@pytest.mark.usefixtures("quick_build")
def test_clean_removes_all_that_belongs_to_the_kernels(tmp_path: Path) -> None:
    assert library.load() is not None
    path = kept(tmp_path)[-1]
    for suffix in (".failed", library.MARKER):
        path.with_suffix(suffix).touch()
    clean_caches(tmp_path / "cache")
    assert not (tmp_path / "cache" / "kernels").exists()


@pytest.mark.usefixtures("quick_build")
def test_of_several_threads_one_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []
    original: Callable[..., None] = library.build

    def build(compiler: str, target: Path) -> None:
        built.append(target)
        time.sleep(0.1)
        original(compiler, target)

    monkeypatch.setattr(library, "build", build)
    with ThreadPoolExecutor(4) as threads:
        assert None not in [each.result() for each in [threads.submit(library.load) for _ in range(4)]]
    assert len(built) == 1


def test_a_cache_that_cannot_be_made_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path / "file"))
    assert find() is None


def test_of_several_openmp_libraries_pytorchs_is_taken(tmp_path: Path) -> None:
    """Other packages bring one too, under names that may come first in the alphabet."""
    (own,) = library._threads_of_pytorch() or [""]
    if not own.startswith(str(Path(torch.__file__).resolve().parent)):
        pytest.skip("PyTorch's is not its own here")
    other = tmp_path / "libgomp-0.so"
    shutil.copy(own, other)
    code = "import ctypes, sys, torch; ctypes.CDLL(sys.argv[1]); from tformer.kernels import library as l"
    code += "; print('libgomp-0' in open('/proc/self/maps').read(), *l._threads_of_pytorch())"
    command = [sys.executable, "-c", code, str(other)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["True", own]
