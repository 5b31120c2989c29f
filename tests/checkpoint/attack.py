"""Runs to damage, the commands that read them, and what a command made of a damaged one."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tests.checkpoint.mutations import Mutation
from tformer.checkpoint.manifest import content_sha256
from tformer.tokenizer import Tokenizer

MAX_SECONDS = 5.0
STEP = "step-00000004"

LANGUAGE_MODEL = """\
arch: gpt
tokenizer: {train: {model: char, template: gpt}}
data: {seq_len: 8}
model:
  d_model: 8
  max_seq_len: 16
  tie: {output: true}
  decoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 8}, dropout: 0.1}
optimizer: {lr: 0.01}
schedule: {kind: plateau, warmup_steps: 0}
training: {max_steps: 4, batch_size: 4, eval_every: 2, save_every: 2, log_every: 1, sample_every: 0, ema_decay: 0.9,
           precision: fp32, device: cpu, threads: 1, compile: "off"}
"""
ELECTRA = """\
arch: electra
tokenizer: {train: {model: word, template: bert, vocab_size: 60, min_frequency: 1}}
data: {sort_window: 16}
model:
  d_model: 8
  max_seq_len: 24
  embedding: {token_types: 2}
  encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 12}}
  heads: [{kind: replaced_token}]
generator:
  d_model: 8
  max_seq_len: 24
  embedding: {token_types: 2, size: 8}
  encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 8}}
  heads: [{kind: masked_lm}]
objectives: [{kind: replaced_token}]
optimizer: {lr: 0.01}
training: {max_steps: 4, batch_size: 8, eval_every: 2, save_every: 2, log_every: 1, sample_every: 0,
           precision: fp32, device: cpu, threads: 1, compile: "off"}
"""
PROMPT = ["--prompt", "the", "--greedy", "--max-new-tokens", 3, "--logprobs", "--json"]


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a command that ran in this process."""

    code: int
    out: str
    err: str


class Hang(BaseException):
    """A command computed for more than `MAX_SECONDS`."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise Hang


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Context manager that raises Hang after `MAX_SECONDS` of computing."""
    previous = signal.signal(signal.SIGVTALRM, _stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def call(*words: object) -> Outcome:
    """Run a command in this process, `limited`."""
    from tformer.cli.app import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    with limited(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(word) for word in words])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return Outcome(code, out.getvalue(), err.getvalue())


@dataclass(frozen=True)
class Subject:
    """A folder to damage; `folder` below it has the files of the checkpoint."""

    name: str
    path: Path
    folder: str
    data: Path
    hashed: bool = True  # whether a manifest lists its files

    def file(self, name: str) -> Path:
        """A file of the checkpoint, or of the run or its pointers."""
        for place in (self.folder, "", "checkpoints"):
            if (self.path / place / name).is_file():
                return self.path / place / name
        raise FileNotFoundError(name)


def make_subjects(root: Path) -> dict[str, Subject]:
    """A language model with averages, the same in several weight files, ELECTRA, and a Hugging Face folder."""
    text = root / "text.txt"
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "run", "over", "there"]
    text.write_text("".join(" ".join(words[n % 5 : 4 + n % 9]) + ".\n" for n in range(120)))
    step = f"checkpoints/{STEP}"
    lm, electra, split, hub = (root / name for name in ("lm", "electra", "split", "hub"))
    for out, recipe in ((lm, LANGUAGE_MODEL), (electra, ELECTRA)):
        (root / "recipe.yaml").write_text(recipe)
        made = call("train", "--config", root / "recipe.yaml", "--data", text, "--out", out)
        assert made.code == 0, made.err
    shutil.copytree(lm, split)
    split_weights(split / step)
    made = call("export", lm, "--out", hub)
    assert made.code == 0, made.err
    return {
        "lm": Subject("lm", lm, step, text),
        "split": Subject("split", split, step, text),
        "electra": Subject("electra", electra, step, text),
        "hub": Subject("hub", hub, "", text, hashed=False),
    }


def split_weights(folder: Path) -> None:
    """Turn the one weight file of a checkpoint into three files and an index."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["model.safetensors"]
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[number::3]}, folder / file)
        weight_map |= dict.fromkeys(names[number::3], file)
        manifest["files"][file] = {"role": "weights", "size": 0, "sha256": ""}
    index = "model.safetensors.index.json"
    (folder / index).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    manifest["files"][index] = {"role": "weights_index", "size": 0, "sha256": ""}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    rehash(folder)


def rehash(folder: Path) -> None:
    """Compute every hash of a checkpoint anew: of its files, of its tokenizer, and of the manifest itself."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
        for name, entry in manifest["files"].items():
            if (folder / name).is_file() and not (folder / name).is_symlink():
                data = (folder / name).read_bytes()
                entry |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        with contextlib.suppress(Exception):
            manifest["tokenizer_sha256"] = Tokenizer.from_json((folder / "tokenizer.json").read_text()).sha256
        manifest["sha256"] = content_sha256(manifest)
        path.write_text(json.dumps(manifest))
    except (KeyError, TypeError, ValueError, AttributeError, OSError):
        return  # the manifest itself is what was forged


def forge_manifest(folder: Path) -> None:
    """Give a changed manifest its own hash, if it is an object with one."""
    path = folder / "manifest.json"
    if path.is_symlink():
        return
    with contextlib.suppress(ValueError, RecursionError, OSError):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and "sha256" in content:
            path.write_text(json.dumps(content | {"sha256": content_sha256(content)}))


# --- commands ---------------------------------------------------------------------------------------------------------


def run_command(name: str, subject: Subject, path: Path, scratch: Path) -> tuple[Outcome, Any]:
    """A command on the folder `path`; its outcome and, if it succeeded, the numbers that it made."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    outcome = call(*_words(name, subject, path, scratch))
    return outcome, _numbers(name, outcome, path, scratch) if outcome.code == 0 else None


def _words(name: str, subject: Subject, path: Path, scratch: Path) -> list[object]:
    steps = [path / "checkpoints" / step for step in ("step-00000002", STEP)]
    return {
        "generate": ["generate", path, *PROMPT],
        "evaluate": ["evaluate", path, "--data", subject.data, "--json"],
        "export": ["export", path, "--out", scratch / "out"],
        "import": ["import", path, "--out", scratch / "out"],
        "average": ["average", *steps, "--out", scratch / "out"],
        "resume": ["train", "--resume", "--out", path, "--max-steps", 5],
        "runs list": ["runs", "list", path.parent, "--json"],
        "runs show": ["runs", "show", path, "--json"],
        "inspect": ["inspect", path, "--json"],
    }[name]


def _numbers(name: str, outcome: Outcome, path: Path, scratch: Path) -> Any:
    if name in ("generate", "evaluate"):
        document = json.loads(outcome.out)
        keys = ("text", "logprobs", "loss", "accuracy", "tokens")
        return {key: document[key] for key in keys if key in document}
    if name in ("export", "average", "import"):
        return {file.name: _digest(file) for file in sorted((scratch / "out").glob("*.safetensors"))}
    if name == "resume":
        newest = sorted((path / "checkpoints").glob("step-*"))[-1]
        return newest.name, [_digest(newest / f"{role}.safetensors") for role in ("model", "optimizer", "ema")]
    return None  # descriptions, not results


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


REFUSED, FLAGGED, EQUAL, SILENT, BROKEN = "refused", "flagged", "equal", "silent", "FAULT"


@dataclass(frozen=True)
class Verdict:
    """What a command made of a mutation: refused, flagged by --verify, equal numbers, silent, or a fault."""

    command: str
    mutation: str
    kind: str
    detail: str = ""


def judge(
    subject: Subject, file: str, mutation: Mutation, command: str | None, intact: Any, work: Path, *, forged: bool
) -> list[Verdict]:
    """The verdicts of --verify, and of a command if one is given, on the subject with a mutated file.

    intact: the numbers that the command makes of the undamaged subject.
    """
    target = work / "damaged" / "run"
    shutil.rmtree(target.parent, ignore_errors=True)
    shutil.copytree(subject.path, target)
    path = target / subject.file(file).relative_to(subject.path)
    mutation.put(path)
    if forged and subject.hashed:
        forge_manifest(path.parent) if file == "manifest.json" else rehash(target / subject.folder)
    in_checkpoint = path.parent == target / subject.folder
    verified = _verified(path.parent if in_checkpoint else target, mutation)
    if command is None:
        return [verified]
    try:
        outcome, numbers = run_command(command, subject, target, work / "scratch")
    except Hang:
        return [verified, Verdict(command, mutation.what, BROKEN, f"more than {MAX_SECONDS} s")]
    if fault := _fault(command, outcome):
        return [verified, Verdict(command, mutation.what, BROKEN, fault)]
    if outcome.code:
        return [verified, Verdict(command, mutation.what, REFUSED, outcome.err)]
    different = FLAGGED if verified.kind == FLAGGED else SILENT
    return [verified, Verdict(command, mutation.what, EQUAL if numbers == intact else different)]


def _verified(path: Path, mutation: Mutation) -> Verdict:
    """The verdict of `inspect --verify`: flagged, or nothing found (equal)."""
    from tformer.support.errors import InputError
    from tformer.workflows.inspect.verify import verify

    try:
        with limited():
            problems = [problem for verdict in verify(path) for problem in verdict.problems]
    except InputError as error:
        problems = [error.message]
    except Hang:
        return Verdict("verify", mutation.what, BROKEN, f"more than {MAX_SECONDS} s")
    except Exception as error:
        return Verdict("verify", mutation.what, BROKEN, f"{type(error).__name__}: {error}")
    return Verdict("verify", mutation.what, FLAGGED if problems else EQUAL, "; ".join(problems))


def _fault(command: str, outcome: Outcome) -> str:
    """What is wrong with how a command ended; "" for none. Exit 4: weights, outputs or the loss are not finite."""
    allowed = (0, 2) if command in ("runs list", "runs show", "inspect") else (0, 2, 4)
    if "internal error" in outcome.err or "Traceback" in outcome.err or outcome.code not in allowed:
        return f"exit {outcome.code}: {outcome.err[-300:]}"
    if command == "runs list" and outcome.code:
        return f"runs list exits {outcome.code}: {outcome.err[-300:]}"
    errors = re.findall(r"^error: .*$", outcome.err, re.MULTILINE)
    if outcome.code and len(errors) != 1:
        return f"expected one error line, found {len(errors)}: {outcome.err[-300:]}"
    return ""
