"""The Python examples of the documents run as they are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tformer

ROOT = Path(__file__).parents[1]
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
TINY = {"model.d_model": 16, "model.max_seq_len": 64, "model.decoder.num_layers": 1, "model.decoder.num_heads": 2}


def examples(document: str) -> list[str]:
    return EXAMPLE.findall((ROOT / document).read_text())


@pytest.mark.parametrize("document", ["README.md", "tformer/README.md", "tformer/guide/inside.md"])
def test_the_python_examples_of_a_document_run(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if document != "tformer/README.md":  # its example loads the run of the first command
        texts = ["The cat sat on the mat. Hello!"] * 50
        tformer.train(texts, arch="gpt", preset="char-cpu", out="runs/gpt-tiny-1", max_steps=1, quiet=True, set=TINY)
    found = examples(document)
    assert found
    for example in found:
        exec(compile(example, document, "exec"), {})
    assert "Run(" in capsys.readouterr().out
