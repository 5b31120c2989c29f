"""What the tests of sources share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tformer.errors import InputError

Documents = Callable[..., list[str]]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refusal(action: Callable[[], object]) -> InputError:
    with pytest.raises(InputError) as caught:
        action()
    assert "\n" not in caught.value.message
    return caught.value
