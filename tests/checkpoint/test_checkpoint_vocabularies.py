"""Separate vocabularies: two tokenizers travel with the weights, and neither can take the other's place unnoticed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.checkpoint.conftest import TOKENIZER, rewrite_manifest, save
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.run import RunDirectory
from tformer.support.errors import InputError
from tformer.tokenizer.tokenizer import canonical_sha256

TARGET = '{"model": {"type": "char", "of": "the target"}}'
SAME_SIZE = TOKENIZER.replace("char", "word")
NAMES = ("tokenizer.source.json", "tokenizer.target.json")


def save_both(run: RunDirectory, step: int = 1, *, target: str = TARGET) -> Path:
    return save(run, step, target_tokenizer_json=target)


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_checkpoint(path)
    assert caught.value.exit_code == 2 and "\n" not in caught.value.message
    return caught.value.message


def test_both_tokenizers_come_back(run: RunDirectory) -> None:
    path = save_both(run)
    assert set(NAMES) < set(os.listdir(path)) and "tokenizer.json" not in os.listdir(path)
    assert [(path / name).read_text() for name in NAMES] == [TOKENIZER, TARGET]
    found = read_checkpoint(path)
    assert (found.tokenizer_json, found.target_tokenizer_json) == (TOKENIZER, TARGET)
    assert found.tokenizer_sha256 == canonical_sha256(TOKENIZER)
    assert found.target_tokenizer_sha256 == canonical_sha256(TARGET)
    roles = {name: record["role"] for name, record in json.loads((path / "manifest.json").read_text())["files"].items()}
    assert [roles[name] for name in NAMES] == ["tokenizer", "target_tokenizer"]


def test_hashes_that_are_given_are_kept(run: RunDirectory) -> None:
    path = save(run, 1, target_tokenizer_json=TARGET, tokenizer_sha256="aa", target_tokenizer_sha256="bb")
    found = read_checkpoint(path)
    assert (found.tokenizer_sha256, found.target_tokenizer_sha256) == ("aa", "bb")


def test_one_vocabulary_is_stored_as_ever(run: RunDirectory) -> None:
    path = save(run, 1)
    assert "tokenizer.json" in os.listdir(path) and not set(NAMES) & set(os.listdir(path))
    assert "target_tokenizer_sha256" not in json.loads((path / "manifest.json").read_text())
    found = read_checkpoint(path)
    assert found.target_tokenizer_json is None and found.target_tokenizer_sha256 is None


def test_a_target_without_a_source_is_a_bug(run: RunDirectory) -> None:
    with pytest.raises(ValueError, match="needs one of the source"):
        save(run, 1, tokenizer_json=None, target_tokenizer_json=TARGET)


@pytest.mark.parametrize("target", [TARGET, SAME_SIZE])
def test_swapped_tokenizers_are_told(run: RunDirectory, target: str) -> None:
    path = save_both(run, target=target)
    source = (path / NAMES[0]).read_bytes()
    (path / NAMES[0]).write_bytes((path / NAMES[1]).read_bytes())
    (path / NAMES[1]).write_bytes(source)
    assert refusal(path) == f"{path}: {NAMES[0]} and {NAMES[1]} are swapped"


@pytest.mark.parametrize("target", [TARGET, SAME_SIZE])
@pytest.mark.parametrize("copied", [0, 1])
def test_one_side_twice_is_told(run: RunDirectory, target: str, copied: int) -> None:
    path = save_both(run, target=target)
    (path / NAMES[1 - copied]).write_bytes((path / NAMES[copied]).read_bytes())
    assert refusal(path) == f"{path / NAMES[1 - copied]} is not its own tokenizer but that of {NAMES[copied]}"


@pytest.mark.parametrize(("name", "side"), [(NAMES[0], "source"), (NAMES[1], "target")])
def test_a_missing_tokenizer_is_told(run: RunDirectory, name: str, side: str) -> None:
    path = save_both(run)
    (path / name).unlink()
    assert refusal(path) == f"{path / name}, the tokenizer of the {side} side, is missing, but the manifest lists it"


@pytest.mark.parametrize("name", NAMES)
def test_another_tokenizer_is_named_as_such(run: RunDirectory, name: str) -> None:
    path = save_both(run)
    (path / name).write_text((path / name).read_text().replace("char", "word"))
    assert f"{name} is not the tokenizer this model was trained with" in refusal(path)


def test_equal_tokenizers_of_both_sides_are_no_mix_up(run: RunDirectory) -> None:
    path = save_both(run, target=TOKENIZER)
    assert read_checkpoint(path).target_tokenizer_json == TOKENIZER
    (path / NAMES[1]).write_text(SAME_SIZE)
    assert "is not the tokenizer this model was trained with" in refusal(path)


def test_a_manifest_that_lost_one_side_is_damaged(run: RunDirectory) -> None:
    for number, (gone, message) in enumerate(
        [(NAMES[1], "target_tokenizer_sha256 and a file"), (NAMES[0], "none of the source")], start=1
    ):
        path = save_both(run, number)
        rewrite_manifest(path, lambda content, name=gone: content["files"].pop(name))  # type: ignore[misc]
        assert message in refusal(path)


def test_tokenizers_lie_at_the_root_of_a_run(run: RunDirectory) -> None:
    run.write_tokenizer(TOKENIZER, TARGET)
    assert [(run.path / name).read_text() for name in NAMES] == [TOKENIZER, TARGET]
    assert not (run.path / "tokenizer.json").exists()
