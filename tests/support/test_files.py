"""Names of temporary files, which nothing is in the way of; named pipes, which are refused where a file is expected."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tformer.checkpoint.catalog import read_pointer
from tformer.support import files
from tformer.support.errors import InputError, StorageError
from tformer.support.files import open_output, open_regular, require_writable
from tformer.tokenizer import Tokenizer

NAMES = ["n" * 255, "é" * 127, "👩" * 63, "n" * 200, "n" * 201]


@pytest.mark.parametrize("name", NAMES, ids=["255 letters", "accents", "signs of 4 bytes", "200", "201"])
def test_every_name_that_a_file_may_have_can_be_written(tmp_path: Path, name: str) -> None:
    files.write_text(tmp_path / name, "first")
    with open_output(tmp_path / name) as write:
        write("second")
    assert (tmp_path / name).read_text() == "second"
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", NAMES, ids=["255 letters", "accents", "signs of 4 bytes", "200", "201"])
def test_every_name_that_a_folder_may_have_can_be_published_and_replaced(tmp_path: Path, name: str) -> None:
    for content in ("first", "second"):
        files.publish_directory(tmp_path / name, lambda folder, text=content: files.write_text(folder / "file", text))
    assert (tmp_path / name / "file").read_text() == "second"
    assert os.listdir(tmp_path) == [name]


def test_the_temporary_of_a_killed_process_is_removed_also_for_a_long_name(tmp_path: Path) -> None:
    target = tmp_path / NAMES[0]
    left = files.temporary_beside(target).name.removesuffix(str(os.getpid())) + "99999999"
    (tmp_path / left).write_text("half")
    files.write_text(target, "whole")
    assert os.listdir(tmp_path) == [target.name]


def test_a_folder_with_the_name_of_a_temporary_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".tmp-file-99999999").mkdir()
    files.write_text(tmp_path / "file", "text")
    assert sorted(os.listdir(tmp_path)) == [".tmp-file-99999999", "file"]


def test_a_folder_that_another_process_is_publishing_is_refused_and_never_mixed(tmp_path: Path) -> None:
    other = (
        "import sys\nfrom pathlib import Path\nfrom tformer.support import files\n"
        "files.publish_directory(Path(sys.argv[1]), lambda folder: files.write_text(folder / 'first', 'theirs'))\n"
    )

    def fill(folder: Path) -> None:
        files.write_text(folder / "first", "mine")
        ended = subprocess.run([sys.executable, "-c", other, tmp_path / "out"], stderr=subprocess.PIPE, text=True)
        assert ended.returncode != 0 and "another process is writing" in ended.stderr
        files.write_text(folder / "second", "mine")

    files.publish_directory(tmp_path / "out", fill)
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {"first": "mine", "second": "mine"}
    assert os.listdir(tmp_path) == ["out"]


# -- named pipes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize("read", [open_regular, Tokenizer.load])
def test_a_pipe_in_the_place_of_a_file_is_refused(pipe: Path, read: Callable[[Path], object]) -> None:
    with pytest.raises(InputError, match="is not an ordinary file"):
        read(pipe)
    assert read_pointer(pipe) is None


def test_a_file_is_tried_before_the_work_but_a_pipe_is_there_already(
    pipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(files, "create", refuse)
    assert require_writable(pipe) == pipe
    with pytest.raises(StorageError):
        require_writable(tmp_path / "file")
