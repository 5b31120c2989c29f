"""Commands that do no heavy work answer within five seconds of processor time, whatever they are given."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.killing import ends_within
from tformer.checkpoint.run import RunDirectory
from tformer.support import files
from tformer.workflows.runs.summary import read_logged, summarize_run

Cli = Callable[..., Any]
SECONDS = 5.0
HANGS_AFTER = 60  # seconds on the clock of one command, on a busy machine


def told(cli: Cli, *words: object) -> Any:
    """The outcome of a command that has an answer, or refuses its input in one line, in time."""
    began = time.process_time()
    with ends_within(HANGS_AFTER):
        outcome = cli(*words)
    assert time.process_time() - began < SECONDS, words
    errors = [line for line in outcome.err.splitlines() if line.startswith("error:")]
    assert (outcome.code, len(errors)) in ((0, 0), (2, 1)), (words, outcome.err)
    return outcome


# -- numbers -----------------------------------------------------------------------------------------------------------

HUGE = "9" * 500
VALUES = ("0", "-1", "1000000", str(10**12), str(10**22), "nan", "inf", "-inf", "1e400", "1e22", "1e-400", "", HUGE)
NUMBERS = {
    "train-tokenizer {text} --out {new}": "vocab-size min-frequency sentinels sample-mb",
    "train --dry-run --arch gpt --preset char-cpu --data {text}":
        "max-steps max-epochs max-minutes stop-at-step batch-size batch-tokens grad-accum lr seed devices",
    "average {decoder} --out {new}": "last",
    "prune {decoder} --out {new} --no-evaluate":
        "keep-layers drop-layers keep rate max-trials drop-heads heads-per-layer",
    "generate {decoder} --prompt abc --max-new-tokens 2":
        "beam-size length-penalty temperature top-k top-p min-p seed "
        "min-new-tokens length-margin repetition-penalty no-repeat-ngram batch-size n-best",
    "generate {translator} --prompt abc --max-new-tokens 2":
        "length-penalty n-best min-new-tokens length-margin",
    "sweep --arch gpt --out {new} --vary optimizer.lr=1,2 --dry-run": "seeds max-steps max-minutes draws eta",
    "runs list {runs}": "limit",
    "plot {decoder} --format terminal": "smooth",
    "inspect {decoder}": "batch-size seq-len depth",
    "inspect {decoder} --shapes": "batch-size seq-len depth",
    "inspect --arch gpt --preset char-cpu": "batch-size seq-len vocab-size depth",
    "tokenize {decoder} --text abc": "ids max-length",
    "tokenize {decoder} --text abc --pad max": "max-length",
    "viz-pe -o {page}": "d-model positions base dims num-heads layer",
    "viz-pe --encoding t5_bias --format json": "num-heads positions",
    "viz-attention {decoder} --text abc --format json": "max-tokens layers heads top-k scale max-megabytes",
    "heads {decoder} --format json": "length copies samples seed",
    "heads {decoder} --data {text} --format json": "max-examples batch-size",
    "patch {decoder} --ablate zero --data {text} --format json": "max-examples batch-size",
    "lens {decoder} --text abc --format json": "max-tokens positions top-k steps",
    "attribute {decoder} --text abc --format json": "max-tokens positions steps",
    "viz-tokens {decoder} --text abc --format json": "hardest top-k",
    "viz-tokens {decoder} --data {text} --format json": "max-examples batch-size",
    "export {decoder} --out {new}": "shard-size",
    "bench train --arch gpt --preset char-cpu": "threads",
}  # fmt: skip
# What once ended with another exception or never: refused now.
PAST = [
    ("train-tokenizer {text} --out {new}", "--min-frequency", str(10**22)),
    ("train-tokenizer {text} --out {new}", "--sentinels", str(10**12)),
    ("train-tokenizer {text} --out {new} --model unigram", "--sentinels", HUGE),
    ("export {decoder} --out {new}", "--shard-size", HUGE),
    ("bench train --arch gpt", "--max-seconds", str(10**12)),
    ("generate {decoder} --prompt a", "--num-samples", "99999999999"),
    ("generate {decoder} --prompt a", "--max-new-tokens", "1e22"),
    ("generate {decoder} --prompt a", "--max-new-tokens", str(10**22)),
    ("train --dry-run --arch gpt --data {text}", "--set", "training.batch_size=9999999999999"),
    ("train --dry-run --arch gpt --data {text}", "--set", "training.log_every=9999999999999"),
    ("inspect --arch gpt", "--set", "model.decoder.num_layers=100000000"),
    ("config show --arch gpt", "--set", "seed=99999999999999999999"),
    ("tokenize {decoder}", "--ids", "9" * 5000),
]


@pytest.fixture
def words_of(decoder: Path, translator: Path, text_file: Path, tmp_path: Path) -> Callable[[str], list[str]]:
    """The words of a command line with the places of this test; what it may have made before is removed."""

    def words(line: str) -> list[str]:
        new = tmp_path / "new"
        shutil.rmtree(new, ignore_errors=True)
        new.unlink(missing_ok=True) if new.is_file() else None
        places = {"decoder": decoder, "translator": translator, "text": text_file, "new": new,
                  "runs": decoder.parent, "page": tmp_path / "page.html"}  # fmt: skip
        return line.format(**places).split()

    return words


@pytest.mark.parametrize(("line", "flag", "value"), PAST)
def test_a_huge_number_is_refused_in_one_line(
    line: str, flag: str, value: str, cli: Cli, words_of: Callable[[str], list[str]]
) -> None:
    assert told(cli, *words_of(line), f"{flag}={value}").code == 2


@pytest.mark.slow
@pytest.mark.parametrize("line", NUMBERS)
def test_every_number_of_every_command_is_used_or_refused(
    line: str, cli: Cli, words_of: Callable[[str], list[str]]
) -> None:
    """A third of the values for each option in turn: which texts are numbers does not depend on the option."""
    for number, flag in enumerate(NUMBERS[line].split()):
        for value in VALUES[number % 3 :: 3]:
            if line.startswith("bench") and value in ("1000000",):
                continue  # a number that may be measured
            told(cli, *words_of(line), f"--{flag}={value}")


# -- broken runs -------------------------------------------------------------------------------------------------------


def replaced_by_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def replaced_by_loop(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def replaced_by_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def replaced_by_zeros(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def made_huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 10**12)


def filled_with_bytes(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 100)


DAMAGES = (replaced_by_pipe, replaced_by_loop, replaced_by_folder, replaced_by_zeros, made_huge, filled_with_bytes)
CHECKPOINT = "checkpoints/step-00000003"
FILES = (
    *("recipe.yaml", "environment.json", "checkpoints/latest", ".lock"),
    *(f"{CHECKPOINT}/{name}" for name in ("manifest.json", "model.safetensors", "trainer.json")),
)
DIGITS = "1" + "0" * 400
METRICS = {
    "numbers of 400 digits": f'{{"split": "train", "step": {DIGITS}, "tokens": {DIGITS}, "seconds": {DIGITS}}}\n',
    "numbers at the end of floats": '{"split": "train", "step": 1e308, "tokens": 1e308, "seconds": 5e-324}\n',
    "other types": '{"split": ["train"]}\n{"split": "train", "step": "x", "tokens": [], "seconds": {}}\n[1]\nnull\n',
    "a loss of 400 digits": f'{{"split": "valid", "is_best": true, "step": 3, "loss": {DIGITS}}}\n',
    "nesting": "[" * 100_000 + "\n" + '{"a":' * 50_000 + "\n",
}
RECIPES = {
    "layers": "model: {decoder: {num_layers: 100000000}}\n",
    "depth": "model: " + "[" * 400_000,
    "a long key": "? " + "a" * 900_000 + "\n: 1\n",
}


def break_file(run: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(run / name)


def break_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to("checkpoints")
    (run / "metrics.jsonl").touch()


@pytest.fixture(scope="session")
def broken_runs(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, each broken in its own way, and one that is whole: `whole`."""
    home = tmp_path_factory.mktemp("broken")

    def copied(name: str) -> Path:
        shutil.copytree(decoder, home / name)
        (home / name / "recipe.yaml").write_text((decoder / "checkpoints/step-00000003/recipe.yaml").read_text())
        return home / name

    copied("whole")
    for file in (*FILES, "metrics.jsonl"):
        for damage in DAMAGES:
            damage(copied(f"{file.replace('/', '-')} {damage.__name__}".lstrip(".")) / file)
    for what, text in METRICS.items():
        (copied(f"metrics with {what}") / "metrics.jsonl").write_text(text)
    for what, text in RECIPES.items():
        (copied(f"recipe with {what}") / "recipe.yaml").write_text(text)
    break_checkpoints(copied("checkpoints in a loop"))
    os.rename(copied("undecodable"), os.fsencode(home) + b"/run \xff\xfe\x1b[31m")
    os.rename(copied("lines"), home / "run\nof two lines")
    (home / "loop").symlink_to("loop")
    os.mkfifo(home / "pipe")
    return home


def test_a_broken_run_never_hides_another(cli: Cli, broken_runs: Path) -> None:
    outcome = told(cli, "runs", "list", broken_runs, "--json")
    listed = {Path(each["run"]).name: each for each in json.loads(outcome.out)}
    assert listed["whole"]["state"] == "stopped" and listed["whole"]["problems"] == []
    # Missing: the loop of checkpoints, which is no folder, and nothing else.
    assert len(listed) >= (len(FILES) + 1) * len(DAMAGES) + len(METRICS) + len(RECIPES) + 3


@pytest.mark.slow
def test_every_light_command_answers_on_every_broken_run(cli: Cli, broken_runs: Path) -> None:
    for run in sorted(broken_runs.iterdir()):
        told(cli, "runs", "show", run)
        told(cli, "inspect", run)
        told(cli, "plot", run, "--format", "json")
        assert cli("inspect", run, "--verify").code in (0, 2)


def test_verify_reports_a_recipe_that_is_no_text(cli: Cli, broken_runs: Path) -> None:
    for damage in (filled_with_bytes, made_huge):
        outcome = cli("inspect", broken_runs / f"recipe.yaml {damage.__name__}", "--verify")
        assert outcome.code == 2 and "recipe.yaml" in outcome.out and "internal" not in outcome.err


@pytest.mark.slow
def test_a_hundred_megabytes_of_metrics_are_listed_in_bounded_memory(decoder: Path, tmp_path: Path) -> None:
    import tracemalloc

    run = tmp_path / "run"
    shutil.copytree(decoder, run)
    line = (
        json.dumps({"split": "train", "step": 7, "loss": 1.5, "tokens": 10, "seconds": 2.5, "text": "a" * 900}) + "\n"
    )
    (run / "metrics.jsonl").write_text(line * 100_000)
    began = time.process_time()
    summary = summarize_run(run)
    assert time.process_time() - began < SECONDS
    assert (summary.tokens, summary.seconds) == (10, 2.5)
    (run / "metrics.jsonl").write_text(line * 5000)
    tracemalloc.start()
    read_logged(RunDirectory(run))
    assert tracemalloc.get_traced_memory()[1] < 2_000_000  # of 5 MB
    tracemalloc.stop()


# -- pipes -------------------------------------------------------------------------------------------------------------

DRY = "train --dry-run --arch gpt --preset char-cpu"
READ = [
    f"{DRY} --data {{text}} --tokenizer {{pipe}}", f"{DRY} --data {{text}} --init-from {{pipe}}",
    f"{DRY} --data {{text}} --teacher {{pipe}}", "train --resume --out {pipe}",
    "train --dry-run --arch vit --preset tiny --data {pipe}.zip", "average {pipe} --last 2 --out {new}",
    "prune {pipe} --keep 1 --out {new}", "generate {pipe} --prompt a", "classify {pipe} --text a",
    "sweep --config {pipe} --vary seed=1,2 --out {new}", "runs list {pipe}", "runs show {pipe}",
    "runs compare {pipe} {decoder}", "plot {pipe} --format json", "inspect {pipe}", "inspect {pipe} --verify",
    "tokenize {pipe} --text a", "viz-pe --run {pipe} --format json", "viz-attention {pipe} --text a",
    "heads {pipe}", "patch {pipe} --ablate zero", "import {pipe} --out {new}", "import {foreign} --out {new}",
    "inspect {foreign}", "export {pipe} --out {new}", "evaluate {pipe} --data {text}",
]  # fmt: skip
WRITTEN = [
    "generate {decoder} --prompt a --max-new-tokens 1 --output {pipe}", "train-tokenizer {text} --force --out {pipe}",
    "viz-pe --format png -o {pipe}.png", "plot {decoder} --format json -o {pipe}",
]  # fmt: skip


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "READER_SECONDS", 0.05)
    for ending in ("", ".parquet", ".jsonl", ".gz", ".zip", ".tsv", ".png"):
        os.mkfifo(tmp_path / f"pipe{ending}")
    return tmp_path / "pipe"


@pytest.mark.parametrize("line", [*READ, *WRITTEN])
def test_a_pipe_in_the_place_of_a_file_or_without_a_reader_is_refused(
    line: str, cli: Cli, pipe: Path, decoder: Path, text_file: Path, tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    os.mkfifo(foreign / "config.json")
    places = {"pipe": pipe, "decoder": decoder, "text": text_file, "new": tmp_path / "new", "foreign": foreign}
    assert told(cli, *line.format(**places).split()).code == 2


def test_a_pipe_with_a_reader_takes_an_output(cli: Cli, pipe: Path, decoder: Path) -> None:
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    outcome = cli("generate", decoder, "--prompt", "abc", "--max-new-tokens", 1, "--output", pipe)
    assert outcome.code == 0, outcome.err
    assert os.read(reader, 1000).startswith(b"abc")
    os.close(reader)
