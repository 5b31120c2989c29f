"""User mistakes in data, recipes and run directories: one clear line, the right exit code, nothing on disk changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.end_to_end.conftest import IMAGES
from tests.end_to_end.labelled_examples import write_images
from tests.quick import first_is_quick
from tformer.checkpoint.manifest import content_sha256
from tformer.checkpoint.run import RunDirectory
from tformer.support import files

Cli = Callable[..., Any]


def snapshot(folder: Path) -> dict[str, str]:
    """Every file below a folder with its hash; the lock of a run, which is no content, left out."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in folder.rglob("*")
        if path.name != ".lock"
    }


@pytest.fixture
def refused(cli: Cli, tmp_path: Path) -> Callable[..., str]:
    """`refused(code, *arguments)`: runs the command, checks what every refusal promises, returns the message."""

    def run(code: int, *arguments: object) -> str:
        before = snapshot(tmp_path)
        outcome = cli(*arguments)
        assert outcome.code == code, outcome.err
        assert outcome.out == ""
        complaints = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
        assert len(complaints) == 1, outcome.err
        assert "Traceback" not in outcome.err and "internal error" not in outcome.err
        assert snapshot(tmp_path) == before
        return str(outcome.err[outcome.err.index("error: ") :])

    return run


@pytest.fixture
def train(refused: Callable[..., str], tiny_recipe: Path, tmp_path: Path) -> Callable[..., str]:
    """`train(*arguments)`: a training that must be refused with exit code 2."""
    return lambda *arguments: refused(2, "train", "--config", tiny_recipe, "--out", tmp_path / "run", *arguments)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The place of the run that the first test has trained, beside its text."""
    return tmp_path_factory.mktemp("trained") / "run"


@pytest.fixture
def finished_run(cli: Cli, tmp_path: Path, tiny_recipe: Path, text_file: Path, trained: Path) -> Path:
    if not trained.exists():
        text = shutil.copy(text_file, trained.with_name("text.txt"))
        assert cli("train", "--config", tiny_recipe, "--data", text, "--out", trained).code == 0
    return Path(shutil.copytree(trained, tmp_path / "finished", symlinks=True))


def newest_checkpoint(run: Path) -> Path:
    return run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()


def test_a_run_in_use_is_refused_before_its_checkpoint_is_read(refused: Callable[..., str], finished_run: Path) -> None:
    (newest_checkpoint(finished_run) / "trainer.json").unlink()  # as a training that removes it would
    with RunDirectory.open(finished_run, lock=True):
        for words in (["--resume"], ["--arch", "gpt"]):
            message = refused(6, "train", *words, "--out", finished_run)
            assert f"is in use by process {os.getpid()}" in message and "remove" not in message
        (finished_run / ".lock").write_text("1\n")  # as another process would
        assert "a training writes to this run" in refused(2, "generate", finished_run)


def test_a_missing_recipe_is_restored_from_the_newest_checkpoint(cli: Cli, finished_run: Path) -> None:
    recipe = finished_run / "recipe.yaml"
    text = recipe.read_text()
    recipe.unlink()
    outcome = cli("train", "--resume", "--out", finished_run)
    assert outcome.code == 0 and "had no recipe.yaml: restored from its checkpoint step-" in outcome.err
    assert recipe.read_text() == text


def test_invalid_utf8_names_file_line_and_byte(
    train: Callable[..., str], cli: Cli, tiny_recipe: Path, text_file: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(text_file.read_bytes() + b"good line\nbad \xff line\n")
    line = bad.read_bytes()[: bad.read_bytes().index(b"\xff")].count(b"\n") + 1
    message = train("--data", bad)
    assert f"bad.txt:{line}" in message and "0xff" in message.lower() and "--invalid-utf8 replace" in message
    accepted = cli(
        "train", "--config", tiny_recipe, "--data", bad, "--invalid-utf8", "replace", "--out", tmp_path / "run"
    )
    assert accepted.code == 0, accepted.err


def test_run_directory_that_is_not_empty(
    refused: Callable[..., str], finished_run: Path, tiny_recipe: Path, text_file: Path
) -> None:
    message = refused(2, "train", "--config", tiny_recipe, "--data", text_file, "--out", finished_run)
    assert "not empty" in message and "--resume" in message


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize("damage", [flip_a_bit, truncate])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "trainer.json", "tokenizer.json"])
def test_damaged_checkpoint(
    name: str, damage: Callable[[Path], None], refused: Callable[..., str], finished_run: Path
) -> None:
    damage(newest_checkpoint(finished_run) / name)
    message = refused(2, "train", "--resume", "--out", finished_run, "--max-steps", "20")
    assert name in message
    if name != "optimizer.safetensors":
        assert name in refused(2, "generate", newest_checkpoint(finished_run))


@first_is_quick("command", ["generate", "evaluate", "export", "prune --keep 1"])
def test_weights_declared_as_whole_numbers(refused: Callable[..., str], finished_run: Path, command: str) -> None:
    """The bytes of the weights stay, their header changes, every hash is computed anew."""
    checkpoint = newest_checkpoint(finished_run)
    weights, manifest = checkpoint / "model.safetensors", checkpoint / "manifest.json"
    data = weights.read_bytes().replace(b'"F32"', b'"I32"')
    weights.write_bytes(data)
    content = json.loads(manifest.read_text())
    content["files"][weights.name]["sha256"] = hashlib.sha256(data).hexdigest()
    manifest.write_text(json.dumps(content | {"sha256": content_sha256(content)}))
    word, *options = command.split()
    more = ["--out", "made"] if word in ("export", "prune") else []
    assert "of another number format" in refused(2, word, checkpoint, *options, *more)
    assert not Path("made").exists()


def test_tokenizer_that_does_not_match_its_checkpoint(refused: Callable[..., str], finished_run: Path) -> None:
    checkpoint = newest_checkpoint(finished_run)
    tokenizer = checkpoint / "tokenizer.json"
    other = tokenizer.read_text().replace('"a"', '"@"')
    assert other != tokenizer.read_text()
    tokenizer.write_text(other)
    manifest = checkpoint / "manifest.json"
    content = json.loads(manifest.read_text())
    content["files"]["tokenizer.json"] |= {
        "size": tokenizer.stat().st_size,
        "sha256": hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
    }
    manifest.write_text(json.dumps(content | {"sha256": content_sha256(content)}))
    assert "tokenizer" in refused(2, "generate", checkpoint)


def test_tokenizer_larger_than_the_model(
    refused: Callable[..., str], finished_run: Path, tiny_recipe: Path, text_file: Path, tmp_path: Path
) -> None:
    message = refused(
        2, "train", "--config", tiny_recipe, "--data", text_file, "--out", tmp_path / "run",
        "--tokenizer", finished_run / "tokenizer.json", "--set", "model.vocab_size=5",
    )  # fmt: skip
    assert "vocab_size" in message


def test_nothing_to_generate_from(refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "tformer train" in refused(2, "generate")
    assert "does not exist" in refused(2, "generate", "runs/none")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a file system that refuses new files")
def test_read_only_directory_is_refused_before_training(
    refused: Callable[..., str], tiny_recipe: Path, text_file: Path
) -> None:
    message = refused(3, "train", "--config", tiny_recipe, "--data", text_file, "--out", "/proc/self/run")
    assert "cannot write" in message


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(files, "free_bytes", lambda path: 10)
    yield


def test_full_disk_is_refused_before_training(
    full_disk: None, cli: Cli, tiny_recipe: Path, text_file: Path, tmp_path: Path
) -> None:
    outcome = cli("train", "--config", tiny_recipe, "--data", text_file, "--out", tmp_path / "run")
    assert outcome.code == 3 and "bytes needed" in outcome.err and "10 free" in outcome.err
    assert not (tmp_path / "run" / "recipe.yaml").exists()


def test_disk_that_fills_up_keeps_the_last_checkpoint(
    cli: Cli, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = newest_checkpoint(finished_run)
    real = files.require_space

    def full_after_start(path: Path, bytes_needed: int) -> None:
        if path.name == "checkpoints":
            raise files.storage_error(path, OSError(28, "No space left on device"), bytes_needed=bytes_needed)
        real(path, bytes_needed)

    monkeypatch.setattr(files, "require_space", full_after_start)
    outcome = cli("train", "--resume", "--out", finished_run, "--max-steps", "20")
    assert outcome.code == 3 and "bytes needed" in outcome.err
    monkeypatch.undo()
    assert newest_checkpoint(finished_run) == before
    assert cli("generate", finished_run, "--max-new-tokens", "2").code == 0


def test_an_image_of_another_size_is_resized_and_that_is_said(cli: Cli, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", 6)
    first = next(path for path in folder.iterdir() if path.is_dir())
    Image.new("L", (20, 12), 100).save(first / "wide.png")
    recipe = tmp_path / "images.yaml"
    recipe.write_text(IMAGES)
    outcome = cli("train", "--config", recipe, "--data", folder, "--out", tmp_path / "run", "--max-steps", "2")
    assert outcome.code == 0, outcome.err
    assert "resized" in outcome.err
