"""The table of classes: what tests note becomes its rows, and the README's names every class."""

from __future__ import annotations

import re
from pathlib import Path

import tformer.interop
from tests.interop.classes import OWN, by_file, tables

README = Path(tformer.interop.__file__).with_name("README.md")
OLD_NAMES = {"T5WithLMHeadModel"}  # of a class that transformers has under another


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


def test_the_readme_names_every_class_beside_its_file() -> None:
    rows = re.findall(r"^\| `(\w+\.py)` \| ([^|]+) \|", README.read_text(), re.M)
    named = {file: set(names.split(", ")) for file, names in rows}
    assert named == {file: {name for one in ones for name in one.classes} - OLD_NAMES
                     for file, (_, ones) in by_file().items()}  # fmt: skip
