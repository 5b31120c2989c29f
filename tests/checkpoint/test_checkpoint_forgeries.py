"""Forgeries that were once taken for true, or crashed a command: hashes are right, one part contradicts another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.checkpoint.attack import STEP, Subject, call, rehash
from tests.checkpoint.conftest import rewrite_manifest
from tformer.workflows.inspect.verify import verify

Change = Callable[[Path], object]


def edited(name: str, change: Callable[[dict[str, Any]], object]) -> Change:
    """Change a JSON file of a folder."""

    def apply(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return apply


def without_averages(folder: Path) -> None:
    (folder / "ema.safetensors").unlink()
    rewrite_manifest(folder, lambda content: content["files"].pop("ema.safetensors"))


def unlisted_averages(folder: Path) -> None:
    rewrite_manifest(folder, lambda content: content["files"].pop("ema.safetensors"))


def exchanged_roles(folder: Path) -> None:
    def exchange(content: dict[str, Any]) -> None:
        files = content["files"]
        files["ema.safetensors"]["role"], files["model.safetensors"]["role"] = "weights", "ema"

    rewrite_manifest(folder, exchange)


def one_average_less(folder: Path) -> None:
    tensors = load_file(folder / "ema.safetensors")
    del tensors["decoder.final_norm.weight"]
    save_file(tensors, folder / "ema.safetensors")


RESUMED: dict[str, tuple[Change, str]] = {  # case: (change, words of the refusal)
    "no averages, which the recipe asks for": (without_averages, "has no averaged weights"),
    "a key without a name": (edited("trainer.json", lambda d: d["sums"].update({"": 1})), "sums: unknown key"),
    "a window beyond the data": (edited("trainer.json", lambda d: d["cursor"].update(window=5)), "lie beyond"),
    "a batch beyond the data": (edited("trainer.json", lambda d: d["cursor"].update(batch=10**6)), "lie beyond"),
    "an epoch after the step": (edited("trainer.json", lambda d: d["cursor"].update(epoch=5)), "at most epoch 4"),
    "a step of another checkpoint": (edited("trainer.json", lambda d: d.update(step=3)), "expected 4"),
    "the cursor removed": (edited("trainer.json", lambda d: d.pop("cursor")), "cursor: expected the data position"),
    "no cursor": (edited("trainer.json", lambda d: d.update(cursor=None)), "cursor: found null, expected a mapping"),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_forged_checkpoint_is_not_resumed(subjects: dict[str, Subject], tmp_path: Path, case: str) -> None:
    change, words = RESUMED[case]
    run = shutil.copytree(subjects["lm"].path, tmp_path / "run")
    change(run / "checkpoints" / STEP)
    rehash(run / "checkpoints" / STEP)
    outcome = call("train", "--resume", "--out", run, "--max-steps", 5)
    assert outcome.code == 2 and "internal" not in outcome.err, outcome.err
    assert words in outcome.err, outcome.err
    assert not (run / "checkpoints" / "step-00000005").exists()


def test_a_damaged_manifest_of_the_best_checkpoint_is_reported_and_no_other_is_taken(
    subjects: dict[str, Subject], tmp_path: Path
) -> None:
    run = shutil.copytree(subjects["lm"].path, tmp_path / "run")
    assert (run / "checkpoints" / "best").read_text().strip() == STEP
    manifest = run / "checkpoints" / STEP / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"score"', '"scope"'))
    outcome = call("generate", run, "--prompt", "the", "--max-new-tokens", 2)
    assert outcome.code == 2 and "manifest.json is damaged" in outcome.err and "step-00000002" in outcome.err
    assert call("generate", run, "--prompt", "the", "--max-new-tokens", 2, "--checkpoint", "step-2").code == 0


FLAGGED: dict[str, tuple[Change, str]] = {
    "a step that the manifest does not have": (
        edited("trainer.json", lambda d: d.update(step=3)),
        "trainer.json: step: expected 4 as in the manifest, found 3",
    ),
    "a state of another type": (
        edited("trainer.json", lambda d: d.update(tokens="many")),
        "trainer.json is damaged: tokens: found the text 'many', expected an integer",
    ),
    "averages that the manifest lacks": (unlisted_averages, "ema.safetensors is not in the manifest"),
    "weights and averages exchanged": (exchanged_roles, "has the role 'ema', which belongs to ema.safetensors"),
    "an average less": (one_average_less, "ema and recipe disagree: missing decoder.final_norm.weight"),
}


@pytest.mark.parametrize("case", FLAGGED)
def test_verify_finds_parts_that_contradict_each_other(subjects: dict[str, Subject], tmp_path: Path, case: str) -> None:
    change, words = FLAGGED[case]
    folder = shutil.copytree(subjects["lm"].path / "checkpoints" / STEP, tmp_path / STEP)
    assert [verdict.problems for verdict in verify(folder)] == [()]
    change(folder)
    rehash(folder)
    [verdict] = verify(folder)
    assert any(words in problem for problem in verdict.problems), verdict.problems


HUB: dict[str, tuple[str, dict[str, Any], str]] = {  # case: (file, keys, words of the refusal)
    "a class that is a list": ("config.json", {"architectures": [["GPT2LMHeadModel"]]}, "architectures: found"),
    "a class that is an object": ("config.json", {"architectures": [{"a": 1}]}, "architectures: found"),
    "a suppressed object": ("generation_config.json", {"suppress_tokens": [{"value": 1}]}, "suppress_tokens: found"),
    "a suppressed word": ("generation_config.json", {"suppress_tokens": ["x"]}, "suppress_tokens: found 'x'"),
    "a bad word that is an object": ("generation_config.json", {"bad_words_ids": [[{}]]}, "bad_words_ids: found {}"),
    "a stop text that is a number": ("generation_config.json", {"stop_strings": [1]}, "stop_strings: found 1"),
}


@pytest.mark.parametrize("case", HUB)
def test_a_forged_hugging_face_folder_is_refused_with_file_and_key(
    subjects: dict[str, Subject], tmp_path: Path, case: str
) -> None:
    file, keys, words = HUB[case]
    folder = shutil.copytree(subjects["hub"].path, tmp_path / "hub")
    edited(file, lambda content: content.update(keys))(folder)
    outcome = call("import", folder, "--out", tmp_path / "run")
    assert outcome.code == 2 and outcome.err.startswith("error: ") and f"{file}: {words}" in outcome.err, outcome.err
    assert not (tmp_path / "run").exists()
