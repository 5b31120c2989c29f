"""The table of classes: what tests note becomes its rows; the README names every model."""

from __future__ import annotations

import re
from pathlib import Path

import tformer.interop
from tests.interop.classes import OWN, by_file, tables

README = Path(tformer.interop.__file__).with_name("README.md")


def test_notes_become_rows() -> None:
    notes = [
        *(("BertModel", "largest error", error) for error in (2e-7, 1e-6)),
        ("BertModel", "import", "yes"),
        ("bert", "tokenizer", "vocabulary"),
        ("gpt2", "largest error", 0.0),
        ("gpt2", "generation", "greedy"),
    ]
    text = tables(notes)
    assert "| BertModel | yes | – | 1.0e-06 | – | vocabulary | – | – |" in text
    assert "| gpt2 | GPT2LMHeadModel | – | – | 0 | greedy | – | – | – |" in text


def test_every_architecture_has_a_file() -> None:
    assert {one.model_type for _, ones in by_file().values() for one in ones} == OWN.keys()


def test_the_readme_names_every_model() -> None:
    rows = re.findall(r"^\| [\w-]+ \| ([^|`]+) \| none[^|]*\|$", README.read_text(), re.M)
    written = {re.sub(r"[\W_]", "", name.lower()) for row in rows for name in row.split(", ")}
    types = {re.sub(r"[\W_]", "", model_type) for model_type in OWN}
    found = [max((one for one in types if name.startswith(one)), key=len, default=name) for name in written]
    assert sorted(found) == sorted(types)
