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


@pytest.mark.parametrize("document", ["README.md", "tformer/guide/using.md", "tformer/guide/inside.md"])
def test_the_python_examples_of_a_document_run(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder with the runs and the table that their commands have made."""
    monkeypatch.chdir(tmp_path)
    texts = ["The cat sat on the mat. Hello!"] * 50
    if document == "tformer/guide/using.md":
        (tmp_path / "texts.csv").write_text('id,text\n7,"good, bad"\n8,fine\n')
        labelled = [(text, "ab"[number % 2]) for number, text in enumerate(texts)]
        tformer.train(labelled, arch="bert", preset="classify", out="runs/bert-classify-1", max_steps=1, quiet=True)
    else:
        tformer.train(texts, arch="gpt", preset="char-cpu", out="runs/first", max_steps=1, quiet=True, set=TINY)
    found = examples(document)
    assert found
    for example in found:
        exec(compile(example, document, "exec"), {})
    assert "Run(" in capsys.readouterr().out
