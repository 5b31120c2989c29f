"""Every mistake a user can make: one clear line, the right exit code, and everything on disk as it was."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tformer.checkpoint import files

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


@pytest.fixture
def finished_run(cli: Cli, tmp_path: Path, tiny_recipe: Path, text_file: Path) -> Path:
    run = tmp_path / "finished"
    assert cli("train", "--config", tiny_recipe, "--data", text_file, "--out", run).code == 0
    return run


def newest_checkpoint(run: Path) -> Path:
    return run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()


def test_missing_file(train: Callable[..., str], tmp_path: Path) -> None:
    assert "nothing.txt" in train("--data", tmp_path / "nothing.txt")


@pytest.mark.parametrize("content", ["", " \n\t\n  "], ids=["empty", "white space only"])
def test_file_without_text(content: str, train: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text(content)
    assert "blank.txt" in train("--data", tmp_path / "blank.txt")


def test_file_shorter_than_one_sequence(train: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("abcdefgh")
    message = train("--data", tmp_path / "short.txt")
    assert "short.txt" in message and "17" in message  # 16 tokens and the label of the last


def test_invalid_utf8_names_file_line_and_byte(
    train: Callable[..., str], cli: Cli, tiny_recipe: Path, text_file: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(text_file.read_bytes() + b"good line\nbad \xff line\n")
    line = bad.read_bytes()[: bad.read_bytes().index(b"\xff")].count(b"\n") + 1
    message = train("--data", bad)
    assert f"bad.txt:{line}" in message and "0xff" in message.lower() and "--errors replace" in message
    accepted = cli("train", "--config", tiny_recipe, "--data", bad, "--errors", "replace", "--out", tmp_path / "run")
    assert accepted.code == 0, accepted.err


def test_directory_with_nothing_readable(train: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "picture.png").write_bytes(b"\x89PNG\x00\x01")
    assert "folder" in train("--data", tmp_path / "folder")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arch", "gtp"], ["gtp", "did you mean 'gpt'"]),
        (["--arch", "gpt", "--preset", "tinny"], ["tinny", "did you mean 'tiny'"]),
        (["--set", "model.decoder.num_layer=3"], ["model.decoder.num_layer", "did you mean 'num_layers'"]),
        (["--set", "schedule.kind=cosin"], ["schedule.kind", "cosin", "cosine"]),
        (["--set", "model.d_model=wide"], ["model.d_model", "wide"]),
        (["--set", "model.d_model=-16"], ["model.d_model", "-16"]),
        (["--set", "training.batch_size=0"], ["training.batch_size", "0"]),
        (["--set", "optimizer.lr=.nan"], ["optimizer.lr", "nan"]),
        (["--lr", "nan"], ["lr", "nan"]),
        (["--lr", "-1"], ["lr", "-1"]),
        (["--max-steps", "0"], ["max_steps", "0"]),
        (["--set", "model.decoder.num_heads=3"], ["num_heads", "3", "16"]),
        (
            [
                "--set",
                "model.d_model=15",
                "--set",
                "model.decoder.num_heads=3",
                "--set",
                "model.decoder.positions={kind: sinusoidal}",
            ],
            ["15", "even", "sinusoidal"],
        ),
        (["--set", "tokenizer.train.vocab_size=5000000000"], ["5000000000"]),
        (["--precision", "int3"], ["precision", "int3", "bf16"]),
        (["--device", "tpu"], ["tpu"]),
        (["--device", "cuda:99"], ["cuda:99"]),
        (["--set", "nonsense"], ["nonsense"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value and value[0].startswith("--") else "",
)
def test_wrong_configuration(
    arguments: list[str],
    words: list[str],
    refused: Callable[..., str],
    tiny_recipe: Path,
    text_file: Path,
    tmp_path: Path,
) -> None:
    base = [] if "--arch" in arguments else ["--config", tiny_recipe]
    message = refused(2, "train", *base, "--data", text_file, "--out", tmp_path / "run", *arguments)
    for word in words:
        assert word.lower() in message.lower(), message


@pytest.mark.parametrize(
    ("yaml_text", "word"),
    [
        ("seed: 1\nseed: 2\n", "seed"),
        ("model: &m {d_model: 16}\ngenerator: *m\n", "anchor"),
        ("model: !!python/object/apply:os.system ['true']\n", "tag"),
        ("- a list\n", "mapping"),
        ("model: {d_model: 16\n", "broken.yaml"),
        ("a: " + "[" * 5000 + "]" * 5000 + "\n", "broken.yaml"),
    ],
    ids=["duplicate key", "alias", "tag", "not a mapping", "syntax", "deep nesting"],
)
def test_dangerous_or_broken_yaml(yaml_text: str, word: str, refused: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(yaml_text)
    message = refused(2, "train", "--config", path, "--out", tmp_path / "run")
    assert "broken.yaml" in message and word in message.lower(), message


def test_prompt_longer_than_the_context(refused: Callable[..., str], cli: Cli, finished_run: Path) -> None:
    prompt = "the cat sat on a mat and saw two dogs run"
    message = refused(2, "generate", finished_run, "--prompt", prompt, "--context", "error")
    assert "16" in message and str(len(prompt)) in message
    slid = cli("generate", finished_run, "--prompt", prompt, "--max-new-tokens", "3")
    assert slid.code == 0 and "8" in slid.err  # says that it keeps the last half of the context


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


def test_tokenizer_that_does_not_match_its_checkpoint(refused: Callable[..., str], finished_run: Path) -> None:
    checkpoint = newest_checkpoint(finished_run)
    tokenizer = checkpoint / "tokenizer.json"
    other = tokenizer.read_text().replace('"a"', '"@"')
    assert other != tokenizer.read_text()
    tokenizer.write_text(other)
    manifest = checkpoint / "manifest.json"
    import json

    content = json.loads(manifest.read_text())
    content["files"]["tokenizer.json"] |= {
        "size": tokenizer.stat().st_size,
        "sha256": hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
    }
    manifest.write_text(json.dumps(content))
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


def test_loss_that_is_not_finite_ends_with_exit_code_4(
    cli: Cli, tiny_recipe: Path, text_file: Path, tmp_path: Path
) -> None:
    arguments = ("--lr", "1e30", "--set", "schedule.warmup_steps=0", "--set", "optimizer.clip_grad_norm=null")
    outcome = cli("train", "--config", tiny_recipe, "--data", text_file, "--out", tmp_path / "run", *arguments)
    assert outcome.code == 4 and "not finite" in outcome.err


@pytest.mark.parametrize(("closed", "code"), [("0<&-", 0), ("1>&-", 3), ("2>&-", 0)])
def test_closed_streams_are_no_internal_error(closed: str, code: int) -> None:
    command = f"'{sys.executable}' -m tformer config list {closed}"
    outcome = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert outcome.returncode == code
    assert "internal error" not in outcome.stderr
    assert ("standard output is closed" in outcome.stderr) == (code == 3)
