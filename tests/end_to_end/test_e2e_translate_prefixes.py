"""Task prefixes of encoder-decoders: which one `tformer generate` and `evaluate` put before a source."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.translate_runs import SEQ2SEQ, Cli, Run, documents, refusal

PAIRS = SEQ2SEQ + "objectives: [{kind: seq2seq}]\n"
SOURCES, TARGETS = ["abc", "", "ge dab", "h"], ["cba", "", "bad", "h"]


def recipe_with(*prefixes: str, valid: str = "") -> str:
    train = ", ".join(f'{{path: train-{n}.tsv, prefix: "{prefix}"}}' for n, prefix in enumerate(prefixes))
    return f"{PAIRS}data: {{train: [{train}]{valid}}}\n"


@pytest.fixture(scope="module")
def plain(random_run: Callable[..., Run]) -> Run:
    """The same weights, of a run whose tasks have no prefix."""
    return random_run(PAIRS)


@pytest.fixture(scope="module")
def prefixed(random_run: Callable[..., Run]) -> Run:
    return random_run(recipe_with("ge ", "ge "))


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def with_ge(source: str) -> str:
    return source if not source or source.startswith("ge ") else "ge " + source


def test_generate_puts_the_prefix_of_all_tasks_before_every_source_once(
    cli: Cli, prefixed: Run, plain: Run, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.txt", SOURCES)
    outcome = cli("generate", prefixed, "--input", path)
    expected = cli("generate", plain, "--input", write(tmp_path / "b.txt", [with_ge(line) for line in SOURCES]))
    assert outcome.code == 0 and outcome.out == expected.out
    assert "prefix of the run's task, 'ge '" in outcome.err and "prefix" not in expected.err
    assert outcome.out != cli("generate", plain, "--input", path).out
    [document] = documents(cli("generate", prefixed, "--prompt", "abc", "--alignments", "--json"))
    assert (document["prompt"], document["source"]) == ("abc", "ge abc")
    assert document["source_tokens"] == list("ge abc")


def test_generate_takes_another_prefix_or_none(cli: Cli, prefixed: Run, plain: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", SOURCES)
    none = cli("generate", prefixed, "--input", path, "--prefix", "")
    assert none.out == cli("generate", plain, "--input", path).out and "prefix" not in none.err
    other = cli("generate", prefixed, "--prompt", "abc", "--prefix", "d ")
    assert other.out == cli("generate", plain, "--prompt", "d abc").out
    assert other.out == cli("generate", plain, "--prompt", "abc", "--prefix", "d ").out


@pytest.mark.parametrize("prefixes", [("ge ", "d "), ("ge ", "")])
def test_of_different_prefixes_none_is_added_and_all_are_listed(
    cli: Cli, random_run: Callable[..., Run], plain: Run, tmp_path: Path, prefixes: tuple[str, ...]
) -> None:
    run, path = random_run(recipe_with(*prefixes)), write(tmp_path / "a.txt", SOURCES)
    outcome = cli("generate", run, "--input", path)
    assert outcome.out == cli("generate", plain, "--input", path).out
    assert all(f"'{prefix}'" in outcome.err for prefix in prefixes) and "--prefix TEXT" in outcome.err
    measured = cli("evaluate", run, "--source", path, "--target", write(tmp_path / "b.txt", TARGETS), "--no-decode")
    assert all(f"'{prefix}'" in measured.err for prefix in prefixes)


def scores(cli: Cli, run: Run, sources: Path, targets: Path, *more: object) -> tuple[list[Any], str]:
    outcome = cli("evaluate", run, "--score", "--source", sources, "--target", targets, "--json", *more)
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)["scores"], outcome.err


def test_evaluate_puts_the_same_prefix_before_named_sources(
    cli: Cli, prefixed: Run, plain: Run, tmp_path: Path
) -> None:
    sources, targets = write(tmp_path / "a", SOURCES), write(tmp_path / "b", TARGETS)
    found, err = scores(cli, prefixed, sources, targets)
    by_hand, _ = scores(cli, plain, write(tmp_path / "c", [with_ge(line) for line in SOURCES]), targets)
    assert found == by_hand and "prefix of the run's task, 'ge '" in err
    assert scores(cli, prefixed, sources, targets, "--prefix", "")[0] == scores(cli, plain, sources, targets)[0]
    chosen, silent = scores(cli, plain, sources, targets, "--prefix", "ge ")
    assert chosen == found and silent == scores(cli, plain, sources, targets)[1]


def test_evaluate_puts_the_prefix_before_validation_data_that_has_none(
    cli: Cli, random_run: Callable[..., Run], prefixed: Run, tmp_path: Path
) -> None:
    sources, targets = write(tmp_path / "a", SOURCES), write(tmp_path / "b", TARGETS)
    run = random_run(recipe_with("ge ", valid=f', valid: [{{path: "{sources}", target_path: "{targets}"}}]'))
    outcome = cli("evaluate", run, "--score", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["scores"] == scores(cli, prefixed, sources, targets)[0]
    assert "prefix of the run's task" in outcome.err


def test_a_prefix_that_would_change_what_is_held_out_is_refused(
    cli: Cli, random_run: Callable[..., Run], tmp_path: Path
) -> None:
    table = write(tmp_path / "train.tsv", ["source\ttarget", *(f"{a}{b}\t{b}{a}" for a in "abcd" for b in "efgh")])
    run = random_run(f'{PAIRS}data: {{train: [{{path: "{table}", prefix: "ge "}}], valid_fraction: 0.2}}\n')
    assert "would change which pairs" in refusal(cli("evaluate", run, "--no-decode", "--prefix", ""))
    [own] = documents(cli("evaluate", run, "--no-decode", "--json"))
    [same] = documents(cli("evaluate", run, "--no-decode", "--json", "--prefix", "ge "))
    assert own["loss"] == same["loss"] and "held out" in own["data"]


def test_the_data_of_a_run_has_the_prefixes_of_its_tasks_without_a_note(
    cli: Cli, random_run: Callable[..., Run], tmp_path: Path
) -> None:
    table = write(tmp_path / "train.tsv", ["source\ttarget", *(f"{a}{b}\t{b}{a}" for a in "abcd" for b in "efgh")])
    tasks = ", ".join(f'{{path: "{table}", prefix: "{prefix}"}}' for prefix in ("ge ", "d "))
    run = random_run(f"{PAIRS}data: {{train: [{tasks}], valid_fraction: 0.2}}\n")
    outcome = cli("evaluate", run, "--no-decode", "--json")
    assert outcome.code == 0 and "prefix" not in outcome.err
