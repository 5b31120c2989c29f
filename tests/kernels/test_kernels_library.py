"""Building and finding the library: once, whole, by this user alone, and never a reason to fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tformer.kernels import library
from tformer.kernels.functions import find

pytestmark = pytest.mark.skipif(library.find_compiler() is None or os.name != "posix", reason="no compiler here")


@pytest.fixture(autouse=True)
def _a_new_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path / "cache"))
    library.load.cache_clear()
    yield
    library.load.cache_clear()


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "kernels").iterdir())


def test_it_is_built_once_and_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.load() is not None
    (found,) = kept(tmp_path)
    assert found.suffix == ".so" and found.stat().st_mode & 0o777 == 0o700 == found.parent.stat().st_mode & 0o777
    library.load.cache_clear()
    monkeypatch.setattr(library, "build", lambda *_: pytest.fail("built again"))
    assert library.load() is not None


@pytest.mark.parametrize("loosened", ["folder", "file"])
def test_what_others_can_write_is_not_loaded(loosened: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.load() is not None
    (found,) = kept(tmp_path)
    (found if loosened == "file" else found.parent).chmod(0o777)
    library.load.cache_clear()
    built: list[Path] = []
    original: Callable[..., None] = library.build
    monkeypatch.setattr(library, "build", lambda compiler, target: (built.append(target), original(compiler, target)))
    assert (library.load() is None) == (loosened == "folder")
    assert built == ([] if loosened == "folder" else [found])  # a file is made anew, a folder left alone


def test_its_threads_are_those_of_pytorch() -> None:
    """With a second OpenMP library in the process, each would keep a set of threads waiting for work."""
    code = "from tformer.kernels.library import load; load(); print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert len({line.split()[-1] for line in maps.splitlines() if "libgomp" in line or "libiomp" in line}) == 1


@pytest.mark.parametrize("word", ["off", "0", "OFF", "no"])
def test_it_can_be_switched_off(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFORMER_KERNELS", word)
    assert find() is None and not (tmp_path / "cache").exists()


def test_without_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert find() is None


def test_a_compiler_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = tmp_path / "cc"
    failing.write_text("#!/bin/sh\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CC", str(failing))
    assert find() is None and kept(tmp_path) == []


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
