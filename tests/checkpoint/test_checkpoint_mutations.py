"""Mutations of every file of a checkpoint: each is refused, flagged, or without effect; none crashes or hangs.

`TFORMER_MUTATIONS=400` sets the number of raw and of forged mutations of each file in the slow test.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import safetensors.torch

from tests.checkpoint import mutations
from tests.checkpoint.attack import BROKEN, FLAGGED, REFUSED, SILENT, Subject, Verdict, judge, run_command

QUICK, WHOLE = 1, int(os.environ.get("TFORMER_MUTATIONS", "12"))
LOADS = ("generate", "evaluate", "export")

FILES: dict[tuple[str, str], tuple[str, ...]] = {  # (subject, file): the commands that read it, the closest first
    ("lm", "model.safetensors"): ("resume", "average", *LOADS, "inspect"),
    ("lm", "optimizer.safetensors"): ("resume", "resume", "resume", "generate"),
    ("lm", "ema.safetensors"): (*LOADS, "resume"),
    ("lm", "trainer.json"): ("resume", "resume", "resume", "generate", "average", "runs show"),
    ("lm", "manifest.json"): ("resume", "average", *LOADS, "runs list", "runs show", "inspect"),
    ("lm", "recipe.yaml"): ("resume", "average", *LOADS, "runs list", "runs show", "inspect"),
    ("lm", "tokenizer.json"): ("resume", *LOADS, "average", "inspect"),
    ("lm", "latest"): ("resume", "generate", "runs list", "runs show"),
    ("lm", "best"): ("resume", "generate", "runs list", "runs show"),
    ("lm", "metrics.jsonl"): ("resume", "runs list", "runs show", "generate"),
    ("lm", "environment.json"): ("resume", "runs list", "runs show", "generate"),
    ("split", "model.safetensors.index.json"): ("resume", "average", *LOADS, "inspect"),
    ("split", "model-00001-of-00003.safetensors"): ("resume", "average", *LOADS, "inspect"),
    ("electra", "generator.safetensors"): ("resume", "average", "evaluate"),
    ("electra", "trainer.json"): ("resume", "resume", "evaluate"),
    ("hub", "config.json"): (*LOADS, "import", "inspect"),
    ("hub", "generation_config.json"): ("generate", "import", "export"),
    ("hub", "tokenizer_config.json"): (*LOADS, "import"),
    ("hub", "tokenizer.json"): (*LOADS, "import"),
    ("hub", "model.safetensors"): (*LOADS, "import", "inspect"),
}


@pytest.fixture(scope="module")
def intact(subjects: dict[str, Subject], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """`intact(subject, command)`: the numbers that the command makes of the undamaged subject."""
    work = tmp_path_factory.mktemp("intact")
    known: dict[tuple[str, str], Any] = {}

    def numbers(name: str, command: str) -> Any:
        if (name, command) not in known:
            shutil.rmtree(work / "run", ignore_errors=True)
            shutil.copytree(subjects[name].path, work / "run" / "run")
            outcome, known[name, command] = run_command(command, subjects[name], work / "run" / "run", work / "scratch")
            assert outcome.code == 0, outcome.err
        return known[name, command]

    return numbers


Attempt = tuple[Subject, str, mutations.Mutation, Verdict]


@dataclass(frozen=True)
class Attack:
    """`attack(subject, file, count, forged=...)`: the verdicts on `count` mutations of the file, seeded by its name."""

    subjects: dict[str, Subject]
    intact: Callable[[str, str], Any]
    work: Path

    def __call__(self, name: str, file: str, count: int, *, forged: bool) -> Iterator[Attempt]:
        subject, readers = self.subjects[name], FILES[name, file]
        folders = [one.path / one.folder for one in self.subjects.values()]
        others = sorted(path for folder in folders for path in folder.iterdir() if path.is_file())
        draw, path = Random(f"{name} {file} {forged}"), subject.file(file)
        step = 4 if subject.hashed and not forged else 1  # what a hash contradicts is given to fewer commands
        for number in range(count):
            change = mutations.forged(path, draw, others) if forged else mutations.raw(path.read_bytes(), draw)
            command = readers[number // step % len(readers)] if number % step == 0 else None
            numbers = None if command is None else self.intact(name, command)
            for verdict in judge(subject, file, change, command, numbers, self.work, forged=forged):
                yield subject, file, change, verdict


@pytest.fixture
def attack(
    subjects: dict[str, Subject],
    intact: Callable[[str, str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Attack:
    monkeypatch.setenv("TFORMER_KERNELS", "off")
    return Attack(subjects, intact, tmp_path)


TENSOR_FILES = tuple(file for _, file in FILES if file.endswith(".safetensors"))
UNHASHED = ("latest", "best", "metrics.jsonl", "environment.json")  # beside the checkpoints
ANY_VALUES = ("recipe.yaml", "tokenizer.json", "trainer.json")


def allowed(subject: Subject, file: str, change: mutations.Mutation, *, forged: bool) -> bool:
    """Whether other numbers without a warning are possible: nothing that is stored contradicts the change.

    These are the classes that tformer/guide/security.md lists under "Damaged and forged checkpoints".
    """
    if subject.hashed and not forged:
        return False
    if isinstance(change.content, Path):
        return forged
    if file in TENSOR_FILES:
        return _layout(change.content) == _layout(subject.file(file).read_bytes())
    if file == "manifest.json":
        return "score" in change.what or "content of" in change.what
    return not subject.hashed or file in ANY_VALUES


def _layout(data: bytes) -> dict[str, Any] | None:
    """Names, shapes and kinds of numbers of a tensor file, by the reference library; None: refused or not finite."""
    try:
        tensors = safetensors.torch.load(data)
    except Exception:
        return None
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        return None
    return {name: (tensor.shape, tensor.is_floating_point()) for name, tensor in tensors.items()}


def check(attempts: Iterable[Attempt], *, forged: bool) -> Counter[str]:
    """Counts of the verdicts by kind; fails for a crash, a hang, and other numbers that nothing warns of."""
    counts: Counter[str] = Counter()
    for subject, file, change, verdict in attempts:
        counts[verdict.kind] += 1
        assert verdict.kind != BROKEN, (subject.name, file, verdict)
        assert verdict.kind != SILENT or allowed(subject, file, change, forged=forged), (subject.name, file, verdict)
    return counts


@pytest.mark.parametrize("forged", [False, True], ids=["raw", "forged"])
def test_mutations_of_every_file_are_refused_flagged_or_without_effect(attack: Attack, forged: bool) -> None:
    """One of each file, so that every file and both ways of changing it are tried."""
    counts = check((each for name, file in FILES for each in attack(name, file, QUICK, forged=forged)), forged=forged)
    assert counts[FLAGGED] + counts[REFUSED] >= len(FILES) * QUICK // 3, counts


@pytest.mark.slow
@pytest.mark.parametrize("forged", [False, True], ids=["raw", "forged"])
@pytest.mark.parametrize(("name", "file"), FILES)
def test_many_mutations_of_a_file(attack: Attack, name: str, file: str, forged: bool) -> None:
    counts = check(attack(name, file, WHOLE, forged=forged), forged=forged)
    print(f"{name} {file} {'forged' if forged else 'raw'}: {dict(counts)}")
    if not forged and attack.subjects[name].hashed and file not in UNHASHED:
        assert counts[FLAGGED] >= WHOLE  # --verify finds each
