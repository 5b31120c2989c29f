"""Weights and outputs that are NaN or infinite: exit 4 and one line in every command, NotFiniteError in Python."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tformer
from tests.checkpoint.conftest import rewrite_manifest
from tformer.support.errors import NotFiniteError

Cli = Callable[..., Any]
COMMANDS = {
    "generate": ("decoder", ["--prompt", "abc", "--max-new-tokens", "2"]),
    "generate of a translator": ("translator", ["--prompt", "abc"]),
    "evaluate": ("single", []),
    "evaluate --score": ("decoder", ["--data", "lines.tsv", "--score"]),
    "classify": ("single", ["--text", "a"]),
    "viz-attention": ("single", ["--text", "a", "--format", "json"]),
    "heads": ("decoder", ["--format", "json"]),
    "patch": ("decoder", ["--clean", "abc", "--corrupted", "abd", "--format", "json"]),
    "patch --ablate": (
        "decoder",
        ["--ablate", "zero", "--data", "lines.tsv", "--text-column", "0", "--format", "json"],
    ),
    "lens": ("single", ["--text", "a", "--format", "json"]),
    "attribute": ("single", ["--text", "a", "--format", "json"]),
    "viz-tokens": ("decoder", ["--text", "abc", "--format", "json"]),
}
FORMS = [*COMMANDS, "viz-pe", "viz-embeddings"]


def changed(run: Path, folder: Path, change: Callable[[Tensor], Tensor], *, names: str = "") -> Path:
    """A copy of a run whose weights with `names` in their names were changed and hashed again."""
    copy = Path(shutil.copytree(run, folder))
    for manifest in copy.glob("**/manifest.json"):
        weights = manifest.parent / "model.safetensors"
        tensors = load_file(weights)
        save_file({name: change(one) if names in name else one for name, one in tensors.items()}, weights)
        content = weights.read_bytes()
        sealed = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}

        def seal(found: dict[str, Any], sealed: dict[str, Any] = sealed, name: str = weights.name) -> None:
            found["files"][name] |= sealed

        rewrite_manifest(manifest.parent, seal)
    return copy


def not_a_number(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else tensor


def too_large(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, 3e38) if tensor.is_floating_point() else tensor


@pytest.fixture
def runs(encoder_run: Callable[[str], Path], decoder: Path, translator: Path) -> Callable[[str], Path]:
    own = {"decoder": decoder, "translator": translator}
    return lambda kind: own[kind] if kind in own else encoder_run(kind)


def line_of(outcome: Any) -> str:
    """The message of a command that ended with exit 4; it printed one line and one JSON object without null."""
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert outcome.code == 4 and len(errors) == 1 and "Warning" not in outcome.err
    assert not outcome.out or json.loads(outcome.out)["code"] == 4  # no answer with null, only the error
    return str(errors[0])


@pytest.mark.parametrize("command", FORMS)
@pytest.mark.parametrize("as_json", [False, True])
def test_weights_that_are_nan_end_every_command_with_4(
    command: str, as_json: bool, runs: Callable[[str], Path], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.tsv").write_text("ab\tcd\n")
    kind, options = COMMANDS.get(command, ("decoder", ["-o", "x.html"]))
    run = changed(runs(kind), tmp_path / "run", not_a_number, names="final_norm" if kind == "decoder" else "encoder")
    given = ["--run", run] if command == "viz-pe" else [run]
    more = ["--json"] if as_json and not command.startswith(("viz", "heads", "patch", "lens", "attribute")) else []
    message = line_of(cli(command.split()[0], *given, *options, *more))
    assert "hold NaN or infinity (" in message and ("final_norm" in message or "encoder" in message)


@pytest.mark.parametrize("command", COMMANDS)
def test_outputs_that_overflow_end_every_command_with_4(
    command: str, runs: Callable[[str], Path], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.tsv").write_text("ab\tcd\n")
    kind, options = COMMANDS[command]
    run = changed(runs(kind), tmp_path / "run", too_large)
    line_of(cli(command.split()[0], run, *options))


def test_filled_masks_that_overflow_end_with_4(encoder_run: Callable[[str], Path], cli: Cli, tmp_path: Path) -> None:
    run = changed(encoder_run("masked"), tmp_path / "run", too_large)
    line_of(cli("generate", run, "--prompt", "[MASK]"))


@pytest.mark.parametrize("change", [not_a_number, too_large])
def test_the_api_raises(change: Callable[[Tensor], Tensor], runs: Callable[[str], Path], tmp_path: Path) -> None:
    classifier, writer = (changed(runs(kind), tmp_path / kind, change) for kind in ("single", "decoder"))
    for path, call in (
        (classifier, lambda run: run.classify("a")),
        (classifier, lambda run: run.embed("a")),
        (writer, lambda run: run.generate("ab", max_new_tokens=2)),
        (writer, lambda run: run.score("a", "b")),
    ):
        with pytest.raises(NotFiniteError):
            call(tformer.load(path))


def test_an_output_that_turns_nan_later_is_found(runs: Callable[[str], Path]) -> None:
    """The check of the logits is made at every step, not only at the first."""
    from tformer.decoding.sampling import TokenChooser
    from tformer.decoding.settings import GenerationSettings

    chooser = TokenChooser(GenerationSettings(), keys=[(0, 0)], histories=[[1]], limits=[5])
    chooser.choose(torch.zeros(1, 4))
    chooser.choose(torch.tensor([[0.0, -torch.inf, 0.0, 0.0]]))  # a token that is ruled out
    for bad in (torch.nan, torch.inf):
        with pytest.raises(NotFiniteError, match="logits"):
            chooser.choose(torch.tensor([[0.0, bad, 0.0, 0.0]]))
    with pytest.raises(NotFiniteError, match="logits"):
        chooser.choose(torch.full((1, 4), -torch.inf))


def infinite(tensor: Tensor) -> Tensor:
    """One infinity: the model may compute finite numbers all the same."""
    found = tensor.clone()
    found.view(-1)[0] = -torch.inf
    return found


@pytest.mark.parametrize("change", [not_a_number, infinite])
def test_a_model_with_such_weights_is_not_exported_and_starts_no_training(
    change: Callable[[Tensor], Tensor], decoder: Path, text_file: Path, cli: Cli, tmp_path: Path
) -> None:
    run = changed(decoder, tmp_path / "run", change, names="final_norm")
    out = tmp_path / "out"
    for words in (
        ["export", run, "--out", out],
        ["train", "--init-from", run, "--data", text_file, "--max-steps", 2, "--out", out],
    ):
        message = line_of(cli(*words))
        assert "hold NaN or infinity (" in message and "final_norm" in message
    assert not out.exists()
