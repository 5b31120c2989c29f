"""`tformer heads`: formats, refusals, and scores over the checkpoints of a run."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tformer
from tests.end_to_end.translate_runs import DECODER, SEQ2SEQ, build_run
from tests.random_runs import random_contents, random_run
from tformer.checkpoint.run import RunDirectory
from tformer.checkpoint.save import save_checkpoint
from tformer.inside.heads import HeadReport
from tformer.viz.heads import MOST_CURVES, plots_of
from tformer.viz.plots import LinePlot

Cli = Callable[..., Any]
LETTERS = "abcdefgh \t"


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints of steps 3, 5 and 9, with random weights each."""
    path = build_run(tmp_path_factory.mktemp("decoder"), DECODER)
    for step in (5, 9):
        contents = random_contents(DECODER, letters=LETTERS, template="none", seed=step, step=step)
        save_checkpoint(RunDirectory.open(path), step, contents, keep_last=9)
    return path


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(tmp_path_factory.mktemp("seq2seq"), SEQ2SEQ + "objectives: [{kind: seq2seq}]\n")


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.src").write_text("abc\nfed cab\n")
    Path("a.trg").write_text("cab\nabc\n")
    Path("abc.txt").write_text("abc abc fed\n" * 20)


def document(cli: Cli, *words: object) -> dict[str, Any]:
    outcome = cli("heads", *words, "--format", "json")
    assert outcome.code == 0, outcome.err
    return dict(json.loads(outcome.out))


def test_one_checkpoint_in_every_format(
    decoder: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, start in (("h.html", b"<!doctype"), ("h.png", b"\x89PNG"), ("h.svg", b"<?xml"), ("h.json", b"{"),
                        ("h.csv", b"step,attention,layer,head"), ("h.txt", b"decoder self-att")):  # fmt: skip
        made = cli("heads", decoder, "-o", name)
        assert made.code == 0 and made.out == "" and f"wrote {name}" in made.err, made.err
        assert Path(name).read_bytes().startswith(start)
        assert "induction: L0H" in made.err and "nonsense" not in made.err
    page = Path("h.html").read_text()
    assert f"Model: {decoder}" in page and "Command: tformer" in page
    assert cli("heads", decoder).code == 0
    page = Path("heads.html").read_text()
    assert len(page) < 200_000 and "://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "Content-Security-Policy" in page


def test_numbers_agree_in_json_csv_and_the_table(decoder: Path, cli: Cli) -> None:
    found = document(cli, decoder, "--samples", 4)
    assert found["read"] == "4 sequences of 3 random tokens, each 4 times"
    [checkpoint] = found["checkpoints"]
    scores = checkpoint["scores"]["decoder"]
    assert list(scores) == ["previous", "first", "duplicate", "induction"] and np.shape(scores["first"]) == (1, 2)
    rows = list(csv.DictReader(io.StringIO(cli("heads", decoder, "--samples", 4, "--format", "csv").out)))
    assert {row["step"] for row in rows} == {str(checkpoint["step"])} and len(rows) == 8
    for row in rows:
        assert float(row["value"]) == scores[row["score"]][int(row["layer"])][int(row["head"])]
    table = cli("heads", decoder, "--samples", 4, "--format", "terminal").out.splitlines()
    assert table[1].split() == ["head", *scores]
    assert table[3].split() == ["L0H1", *(f"{scores[name][0][1]:.3f}" for name in scores)]
    [best] = [each for each in checkpoint["best"] if each["score"] == "induction"]
    assert best["value"] == max(scores["induction"][0])


def test_over_training_scores_every_checkpoint_as_if_alone(decoder: Path, cli: Cli, tmp_path: Path) -> None:
    found = document(cli, decoder, "--over-training")["checkpoints"]
    assert [each["step"] for each in found] == [3, 5, 9]
    for each in found:
        [alone] = document(cli, decoder, "--checkpoint", f"step-{each['step']}")["checkpoints"]
        assert alone == each
    assert found[0]["scores"] != found[1]["scores"]
    page = tmp_path / "birth.html"
    outcome = cli("heads", decoder, "--over-training", "-o", page)
    assert outcome.code == 0 and all(f'"label":"L0H{head}"' in page.read_text() for head in (0, 1)), outcome.err
    drawn = cli("heads", decoder, "--over-training", "--format", "terminal").out
    assert "induction, decoder self-attention" in drawn and "A L0H0" in drawn


def test_a_page_has_the_curves_of_the_highest_heads() -> None:
    steps = [10, 20]
    values = [np.arange(30.0).reshape(5, 6) / 100 * step for step in steps]
    reports = [
        HeadReport(step, "x", {"decoder": {"previous": value}}, {}) for step, value in zip(steps, values, strict=True)
    ]
    [plot] = plots_of(reports)
    assert isinstance(plot, LinePlot) and len(plot.lines) == MOST_CURVES and plot.lines[0].label == "L1H0"
    assert plot.caption.endswith("the 24 of 30 heads with the highest values")


@pytest.mark.usefixtures("pairs")
def test_a_translator_shows_how_its_heads_align(translator: Path, cli: Cli) -> None:
    found = document(cli, translator, "--source", "a.src", "--target", "a.trg")
    assert found["read"] == "2 examples of a.src" or "a.src" in found["read"]
    scores = found["checkpoints"][0]["scores"]
    assert list(scores) == ["encoder", "decoder", "cross"] and found["checkpoints"][0]["copying"] is None
    assert list(scores["cross"]) == ["sharpness", "coverage"]
    assert all(0 < value <= 1 for row in scores["cross"]["coverage"] for value in row)


@pytest.mark.usefixtures("pairs")
def test_a_text_is_read_in_windows(decoder: Path, cli: Cli) -> None:
    found = document(cli, decoder, "--data", "abc.txt", "--max-examples", 3)
    assert found["read"].startswith("3 of ") and "abc.txt" in found["read"]
    assert found["checkpoints"][0]["scores"] != document(cli, decoder)["checkpoints"][0]["scores"]


def test_python_returns_what_the_command_prints(decoder: Path, cli: Cli) -> None:
    run = tformer.load(decoder)
    [checkpoint] = document(cli, decoder, "--samples", 2, "--seed", 3)["checkpoints"]
    report = run.heads(samples=2, seed=3)
    assert isinstance(report, HeadReport)
    for name, values in checkpoint["scores"]["decoder"].items():
        np.testing.assert_array_equal(report.scores["decoder"][name], values)
    assert report.copying == checkpoint["copying"]
    layer, head = report.best("induction")
    assert report.scores["decoder"]["induction"][layer, head] == report.scores["decoder"]["induction"].max()
    reports = run.heads(over_training=True)
    assert isinstance(reports, list) and [each.step for each in reports] == [3, 5, 9]
    with pytest.raises(tformer.InputError, match="samples must be 1 to 10,000"):
        run.heads(samples=0)


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("RUN", "--length", "1"), "--length must be at least 2, found 1"),
        (("RUN", "--length", "9"), "at most 3 of them 4 times, found --length 9"),
        (("RUN", "--copies", "1"), "--copies must be at least 2, found 1"),
        (("RUN", "--copies", "9"), "reads 16 tokens"),
        (("RUN", "--samples", "0"), "--samples must be 1 to 10,000, found 0"),
        (("RUN", "--samples", "99999"), "--samples must be 1 to 10,000, found 99999"),
        (("RUN", "--seed", "-1"), "--seed must be at least 0"),
        (("RUN", "--max-examples", "0"), "--max-examples must be at least 1"),
        (("RUN", "--data", "missing.txt"), "missing.txt"),
        (("TRANSLATOR", "--copies", "2"), "reads pairs of texts"),
        (("RUN", "--data", "abc.txt", "--label-column", "x"), "--label-column has no meaning here"),
        (("RUN", "--data", "abc.txt", "-o", "abc.txt"), "would replace"),
        (("RUN", "--format", "pdf"), "--format pdf: unknown"),
        (("RUN", "-o", "heads.pdf"), "heads.pdf has the suffix .pdf"),
        (("RUN", "--checkpoint", "step-7"), "step-7"),
        (("missing",), "missing does not exist"),
        (("TRANSLATOR", "--over-training"), "is the only checkpoint"),
        (("TRANSLATOR", "--source", "a.src", "--target", "abc.txt"), "lines"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    words: tuple[str, ...], message: str, decoder: Path, translator: Path, cli: Cli
) -> None:
    places = {"RUN": decoder, "TRANSLATOR": translator}
    before = set(Path().iterdir())
    outcome = cli("heads", *(places.get(word, word) for word in words))
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert outcome.code == 2 and outcome.out == "" and len(errors) == 1 and message in errors[0], outcome.err
    assert set(Path().iterdir()) == before


@pytest.mark.parametrize("words", ["heads", "patch --ablate zero", "viz-tokens", "evaluate"])
def test_an_empty_name_of_data_is_refused(words: str, decoder: Path, cli: Cli) -> None:
    command, *rest = words.split()
    outcome = cli(command, decoder, *rest, "--data", "")
    assert outcome.code == 2 and "error: --data is empty" in outcome.err, outcome.err


def test_an_encoder_without_maps_is_refused_with_the_reason(cli: Cli, tmp_path: Path) -> None:
    recipe = DECODER.replace("decoder:", "encoder:").replace("kind: lm", "kind: masked_lm")
    recipe = recipe.replace("feedforward", "attention: {kind: performer}, feedforward")
    run = random_run(tmp_path / "runs", recipe, letters=LETTERS)
    outcome = cli("heads", run)
    assert outcome.code == 2 and "of kind performer, which forms no weights between positions" in outcome.err


def test_the_best_head_of_a_score_that_there_is_not(decoder: Path) -> None:
    report = tformer.load(decoder).heads()
    assert isinstance(report, HeadReport)
    with pytest.raises(tformer.InputError, match="these heads have no score 'coverage'"):
        report.best("coverage")
