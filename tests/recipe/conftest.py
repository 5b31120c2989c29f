"""Presets of the tests' own, so that no test here depends on what is shipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tformer.support import shipped

MODEL = """\
model:
  d_model: {d_model}
  max_seq_len: 32
  decoder:
    num_layers: 2
    num_heads: 2
    positions: {{kind: learned, offset: 2}}
    dropout: 0.1
"""
FILES = {
    "gpt/tiny": "# The little one\n#\n# Purpose  tests\n" + MODEL.format(d_model=16),
    "gpt/small": "# The published one\n"
    + MODEL.format(d_model=32)
    + "optimizer: {kind: adamw, lr: 2.0e-4, eps: 1.0e-7}\n",
    "gpt/token-batches": "# Batches by tokens\n" + MODEL.format(d_model=16) + "training: {batch_tokens: 500}\n",
    "llama/tiny": "# A llama\n" + MODEL.format(d_model=8),
    "llama/8b": "# A big llama\n" + MODEL.format(d_model=64),
}


@pytest.fixture
def own_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like configs/ with the presets of `FILES`, used instead of it."""
    folder = tmp_path / "presets"
    for name, text in FILES.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(shipped, "preset_folder", lambda: folder)
    return folder


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """`write(text)` makes a recipe file my.yaml of that text."""

    def make(text: str) -> Path:
        path = tmp_path / "my.yaml"
        path.write_text(text)
        return path

    return make
