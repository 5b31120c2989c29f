"""`--devices` of generate, classify and embed: the output of one process, byte for byte, for any number of them."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY_RECIPE, Outcome
from tests.end_to_end.conftest import ENCODER
from tests.end_to_end.labelled_examples import sentences, write_table
from tests.faults.killing import ends_within
from tests.quick import first_is_quick
from tests.training.pair_makers import RECIPE, english, german
from tformer.cli.app import main
from tformer.decoding import lines
from tformer.decoding.writers import Sampler

Cli = Callable[..., Outcome]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks its processes")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of two steps: gpt, labels, masks, pairs."""
    home = tmp_path_factory.mktemp("runs")
    texts = english(60)
    (home / "text.txt").write_text("\n".join(texts) + "\n")
    (home / "target.txt").write_text("\n".join(map(german, texts)) + "\n")
    write_table(home / "labelled.tsv", ("label", "text"), [*sentences(80, 0)])
    data = ("--data", home / "text.txt")
    trainings: dict[str, tuple[str, tuple[object, ...]]] = {
        "gpt": (TINY_RECIPE, data),
        "labels": (ENCODER, ("--data", home / "labelled.tsv")),
        "masks": (ENCODER, (*data, "--objective", "masked_lm")),
        "pairs": (RECIPE, ("--source", home / "text.txt", "--target", home / "target.txt")),
    }
    for name, (recipe, words) in trainings.items():
        (home / f"{name}.yaml").write_text(recipe)
        short = ("--max-steps", 2, "--set", "training.sample_every=0", "--set", "training.valid_sentences=1")
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setenv("TFORMER_CACHE", str(home / "cache"))
            main(list(map(str, ("train", "--config", home / f"{name}.yaml", *words, *short, "--out", home / name))))
        assert ended.value.code == 0
    return home


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several blocks of a few lines; a test that hangs ends."""
    monkeypatch.setattr(lines, "BLOCK_LINES", 4)
    monkeypatch.setattr(lines, "WINDOW_BATCHES", 1)
    with ends_within(60):
        yield


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(["", *english(21)]) + "\n")
    return path


def untimed(messages: str) -> str:
    """The messages without the time and the speed at their end."""
    return re.sub(r"(lines|texts) in .*/s", r"\1", messages)


COMMANDS: dict[str, tuple[object, ...]] = {
    "gpt": ("generate", "--batch-size", 3, "--max-new-tokens", 6, "--seed", 5, "--json", "--logprobs"),
    "labels": ("classify", "--top-k", 2),
    "masks": ("embed", "--batch-size", 2),
    "pairs": ("generate", "--batch-size", 2, "--max-new-tokens", 8, "--n-best", 2, "--beam-size", 2, "--logprobs"),
}


@first_is_quick("name", COMMANDS)
def test_several_processes_write_what_one_writes(name: str, cli: Cli, runs: Path, inputs: Path) -> None:
    """On stdout, in a file, and as messages."""
    command, *flags = COMMANDS[name]
    words = (command, runs / name, "--input", inputs, "--device", "cpu", *flags)
    one = cli(*words)
    assert one.code == 0 and len(one.out.splitlines()) >= 22
    two = cli(*words, "--devices", 2)
    assert (two.code, two.out, untimed(two.err)) == (0, one.out, untimed(one.err))
    output = inputs.with_name("out.jsonl" if command == "embed" else "out.txt")
    assert cli(*words, "--devices", 3, "--output", output).code == 0
    assert output.read_text() == one.out


@pytest.mark.slow
def test_processes_do_not_wait_for_the_threads_of_the_tokenizers_of_their_launcher(
    cli: Cli, runs: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick twin is `test_several_processes_write_what_one_writes`."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    words = ("classify", runs / "labels", "--input", inputs, "--device", "cpu")
    assert cli(*words).code == 0  # its threads exist from here on
    assert cli(*words, "--devices", 2).code == 0


@pytest.mark.slow
def test_several_processes_fill_masks_as_one(cli: Cli, runs: Path, tmp_path: Path) -> None:
    """The quick twin is `test_several_processes_write_what_one_writes`."""
    (tmp_path / "masks.txt").write_text("".join(f"{text} [MASK]\n" for text in english(7)))
    words = ("generate", runs / "masks", "--input", tmp_path / "masks.txt", "--device", "cpu", "--json")
    one, two = cli(*words), cli(*words, "--devices", 2)
    assert one.code == 0 and len(one.out.splitlines()) == 7
    assert (two.code, two.out, untimed(two.err)) == (0, one.out, untimed(one.err))


@pytest.mark.slow
def test_texts_that_are_cut_are_counted_over_all_processes(cli: Cli, runs: Path, tmp_path: Path) -> None:
    """The quick twin is `test_several_processes_write_what_one_writes`."""
    (tmp_path / "long.txt").write_text("\n".join(" ".join(english(30)) for _ in range(10)) + "\n")
    words = ("classify", runs / "labels", "--input", tmp_path / "long.txt", "--device", "cpu")
    one, two = cli(*words), cli(*words, "--devices", 2)
    assert "10 of 10 texts are longer" in one.err
    assert (two.out, untimed(two.err)) == (one.out, untimed(one.err))


@pytest.mark.slow
def test_a_bad_line_ends_all_processes_with_its_message(cli: Cli, runs: Path, tmp_path: Path) -> None:
    """The quick twin is
    `cli/test_cli_workers.py::test_the_failure_of_a_worker_has_the_message_and_the_code_of_its_error`.
    """
    (tmp_path / "masks.txt").write_text("a [MASK]\nb [MASK]\nno mask\nd [MASK]\n")
    words = ("generate", runs / "masks", "--input", tmp_path / "masks.txt", "--device", "cpu", "--devices", 2)
    outcome = cli(*words)
    assert outcome.code == 2 and outcome.err.count("error: ") == 1
    assert f"{tmp_path}/masks.txt:3: " in outcome.err


@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.slow
def test_an_interrupt_keeps_the_lines_before_it(
    window: int, cli: Cli, runs: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the process of rank 0 or another one answers at that moment.

    The quick twin is `cli/test_cli_workers.py::test_a_signal_to_the_launcher_or_to_a_worker_stops_all_together`.
    """
    words = ("generate", runs / "gpt", "--input", inputs, "--device", "cpu", "--batch-size", 3, "--max-new-tokens", 6)
    whole = cli(*words).out
    write = Sampler.write

    def interrupting(sampler: Sampler, prompts: Any, *, first_row: int = 0, **options: Any) -> Any:
        if first_row == 3 * window:
            os.kill(os.getppid(), signal.SIGINT)
            while not options["should_stop"]():
                pass
        return write(sampler, prompts, first_row=first_row, **options)

    monkeypatch.setattr(Sampler, "write", interrupting)
    output = inputs.with_name("out.txt")
    outcome = cli(*words, "--devices", 2, "--output", output)
    assert outcome.code == 130 and outcome.err.count("error: ") == 1
    kept = output.read_text()
    assert whole.startswith(kept) and 1 <= len(kept.splitlines()) <= 3 * window


@pytest.mark.parametrize("words", [("--prompt", "a"), ("--input", "-")])
def test_devices_need_lines_of_a_file(cli: Cli, runs: Path, words: tuple[str, ...]) -> None:
    outcome = cli("generate", runs / "gpt", *words, "--devices", 2)
    assert outcome.code == 2 and "--devices needs --input FILE" in outcome.err
