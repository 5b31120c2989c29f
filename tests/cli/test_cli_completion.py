"""What a shell completes, in the form in which typer's scripts for bash, zsh and fish ask."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick import first_is_quick
from tformer.support.shipped import list_presets


def surroundings(more: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **more}


def completed(line: str, cwd: Path) -> list[str]:
    """The completions of the last word of a line in bash; fails if torch is imported."""
    words = line.split(" ")
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_TFORMER_COMPLETE": "complete_bash"}
    code = (
        "import sys\nfrom tformer.cli.app import main\nsys.argv = ['tformer']\n"
        "try:\n    main()\nfinally:\n    assert not {'torch', 'numpy', 'tokenizers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, env=surroundings(asked), check=True
    )
    return done.stdout.split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs, and one without a recipe."""
    folder = tmp_path_factory.mktemp("completion")
    for name in ("gpt-tiny-1", "bert-tiny-1"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "recipe.yaml").touch()
    (folder / "runs" / "empty").mkdir()
    return folder


@first_is_quick(
    ("line", "expected"),
    [
        ("tformer tra", ["train-tokenizer", "train"]),
        ("tformer bench gen", ["generate"]),
        ("tformer train --objec", ["--objective"]),
        ("tformer train --arch li", ["linformer"]),
        ("tformer train --arch vit --preset ", list_presets()["vit"]),
        ("tformer config show --preset gpt/m", ["gpt/medium", "gpt/mini", "gpt/modern"]),
        ("tformer generate ", ["runs/bert-tiny-1", "runs/gpt-tiny-1"]),
        ("tformer runs compare runs/gpt-tiny-1 runs/b", ["runs/bert-tiny-1"]),
        ("tformer train --init-from runs/g", ["runs/gpt-tiny-1"]),
        ("tformer classify --quantize ", ["none", "int8", "int4"]),
        ("tformer evaluate --checkpoint l", ["latest"]),
        ("tformer evaluate --mistakes fi", []),
        ("tformer guide tr", ["training", "troubleshooting"]),
    ],
    quick=2,
)
def test_commands_flags_and_values_are_completed_without_torch(line: str, expected: list[str], folder: Path) -> None:
    assert completed(line, folder) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_install_completion_writes_a_script_of_the_shell(shell: str, tmp_path: Path) -> None:
    code = "import sys; from tformer.cli.app import main; main(['--install-completion', *sys.argv[1:]])"
    done = subprocess.run(
        [sys.executable, "-c", code, shell],
        capture_output=True,
        text=True,
        env=surroundings({"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}),
        check=True,
    )
    written = [path for path in tmp_path.rglob("*tformer*") if path.is_file()]
    assert len(written) == 1 and "_TFORMER_COMPLETE" in written[0].read_text() and str(written[0]) in done.stdout
