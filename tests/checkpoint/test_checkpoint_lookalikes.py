"""Weight files that look like something else, and something else that looks like a weight file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tformer.checkpoint.tensor_files import read_tensors
from tformer.support.errors import InputError


@pytest.mark.parametrize("length", [0x0280, 0x0380, 0x0480, 0x0580])
def test_a_header_whose_length_begins_like_a_pickle_is_read(length: int, tmp_path: Path) -> None:
    path, tensors = tmp_path / "model.safetensors", {"x" * 100: torch.ones(2)}
    save_file(tensors, path)
    data = path.read_bytes()
    old = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(length.to_bytes(8, "little") + data[8:old].ljust(length) + data[old:])
    assert torch.equal(read_tensors(path, sha256=None)["x" * 100], torch.ones(2))


def test_a_pointer_of_git_lfs_is_called_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(InputError, match="pointer of Git LFS") as caught:
        read_tensors(path, sha256=None)
    assert caught.value.hint == "git lfs pull"
