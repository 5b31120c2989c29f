"""Building and finding the library: once, whole, by this user alone, and never a reason to fail."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tformer.kernels import library
from tformer.kernels.functions import find

pytestmark = pytest.mark.skipif(library.find_compiler() is None or os.name != "posix", reason="no compiler here")


@pytest.fixture(autouse=True)
def _a_new_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path / "cache"))
    library.load.cache_clear()
    yield
    library.load.cache_clear()


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
    (found,) = kept(tmp_path)
    assert found.suffix == ".so" and found.stat().st_mode & 0o777 == 0o700 == found.parent.stat().st_mode & 0o777
    library.load.cache_clear()
    monkeypatch.setattr(library, "build", lambda *_: pytest.fail("built again"))
    assert library.load() is not None


@pytest.mark.usefixtures("quick_build")
@pytest.mark.parametrize("loosened", ["folder", "file"])
def test_what_others_can_write_is_not_loaded(loosened: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.load() is not None
    (found,) = kept(tmp_path)
    (found if loosened == "file" else found.parent).chmod(0o777)
    library.load.cache_clear()
    built: list[Path] = []
    original: Callable[..., None] = library.build

    def build(compiler: str, target: Path) -> None:
        built.append(target)
        original(compiler, target)

    monkeypatch.setattr(library, "build", build)
    assert (library.load() is None) == (loosened == "folder")
    assert built == ([] if loosened == "folder" else [found])  # a file is made again, a folder left alone


@pytest.mark.usefixtures("quick_build")
def test_its_threads_are_those_of_pytorch() -> None:
    """With a second OpenMP library in the process, each would keep a set of threads waiting for work."""
    assert library.load() is not None  # kept for the next process
    code = "from tformer.kernels.library import load; load(); print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert len({line.split()[-1] for line in maps.splitlines() if "libgomp" in line or "libiomp" in line}) == 1


@pytest.mark.usefixtures("quick_build")
def test_for_little_work_only_what_is_there_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TFORMER_KERNELS")
    assert find(may_build=False) is None and kept(tmp_path) == []
    assert find() is not None
    library.load.cache_clear()
    assert find(may_build=False) is not None
    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path / "other"))
    monkeypatch.setenv("TFORMER_KERNELS", "on")
    library.load.cache_clear()
    assert find(may_build=False) is not None


@pytest.mark.parametrize("word", ["off", "0", "OFF", "no"])
def test_it_can_be_switched_off(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFORMER_KERNELS", word)
    assert find() is None and not (tmp_path / "cache").exists()


def test_without_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert find() is None


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
        library.load.cache_clear()
        assert find() is None and calls.read_text().count("\n") == expected


@pytest.mark.parametrize("word", ["ccache cc", "/usr/bin/sccache cc -O2", "ccache", "none-such", " "])
def test_cc_may_name_a_launcher_options_or_nothing_that_is_there(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_damaged_library_is_made_anew(tmp_path: Path) -> None:
    compiler = library.find_compiler()
    assert compiler is not None
    damaged = library._folder() / f"{library._digest(compiler)}.so"
    damaged.write_bytes(b"no library")
    damaged.chmod(0o700)
    assert library.load() is not None and kept(tmp_path) == [damaged]


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


@pytest.mark.usefixtures("quick_build")
def test_a_library_that_lacks_a_function_is_made_again_for_the_next_process(tmp_path: Path) -> None:
    """This one cannot open another of the same name."""
    compiler = library.find_compiler()
    assert compiler is not None
    other = library._folder() / f"{library._digest(compiler)}.so"
    source = tmp_path / "empty.c"
    source.write_text("int nothing;\n")
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(other)], check=True)
    other.chmod(0o700)
    assert library.load() is None and kept(tmp_path) == [other]
    library.open_at(Path(shutil.copy(other, tmp_path / "copy.so")))
