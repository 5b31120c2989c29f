"""Named pipes: refused where a file is expected, read whole where a stream may stand, never waited for without end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tformer.checkpoint.catalog import read_pointer
from tformer.data.sources.files import open_input, read_bytes
from tformer.recipe.yaml_text import read_yaml
from tformer.support import files
from tformer.support.errors import InputError
from tformer.support.files import open_regular, open_stream
from tformer.tokenizer import Tokenizer


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "WRITER_SECONDS", 0.1)
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize("read", [open_regular, Tokenizer.load])
def test_a_pipe_in_the_place_of_a_file_is_refused(pipe: Path, read: Callable[[Path], object]) -> None:
    with pytest.raises(InputError, match="is not an ordinary file"):
        read(pipe)
    assert read_pointer(pipe) is None


@pytest.mark.parametrize("read", [open_stream, open_input, read_yaml, lambda path: list(read_bytes(path))])
def test_a_pipe_that_no_process_writes_to_is_refused(pipe: Path, read: Callable[[Path], object]) -> None:
    with pytest.raises(InputError, match="is a named pipe that no process writes to"):
        read(pipe)


@pytest.mark.parametrize("pause", [0.0, 0.2], ids=["at once", "later than the limit for a writer to open it"])
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_written_arrives_whole(pipe: Path, pause: float, whole: bool) -> None:
    content = bytes(range(256)) * 1000

    def write() -> None:
        with open(pipe, "wb", buffering=0) as file:
            time.sleep(pause)
            file.write(content)

    writer = threading.Thread(target=write)
    writer.start()
    with open_stream(pipe) as stream:
        found = stream.read() if whole else b"".join(iter(lambda: stream.read(1000), b""))
    writer.join()
    assert found == content
