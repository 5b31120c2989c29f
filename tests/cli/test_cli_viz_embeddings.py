"""`tformer viz-embeddings`: formats, what they agree on, refusals; `Run.embedding_table`."""

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
from tests.random_runs import random_run
from tests.viz.pages import page_data
from tformer.inside.embeddings import EmbeddingReport
from tformer.support.errors import InputError
from tformer.viz.embeddings import CHOICE_WORK, plots_of, render
from tformer.viz.picture import render_plots

Cli = Callable[..., Any]
LABELLED = """
schema: 1
model:
  d_model: 8
  max_seq_len: 16
  encoder: {num_layers: 1, num_heads: 2, positions: {kind: learned}, feedforward: {d_ff: 16}}
  heads: [{kind: classifier, num_labels: 3}]
data: {labels: [good, bad, ugly]}
"""


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(tmp_path_factory.mktemp("decoder"), DECODER)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_run(tmp_path_factory.mktemp("labelled"), LABELLED, letters="abcdefgh \t")


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(tmp_path_factory.mktemp("seq2seq"), SEQ2SEQ)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def document(cli: Cli, *words: object) -> dict[str, Any]:
    outcome = cli("viz-embeddings", *words, "--format", "json")
    assert outcome.code == 0, outcome.err
    return dict(json.loads(outcome.out))


@pytest.mark.parametrize("asked", [(), ("--token", "a", "--token", " ")])
def test_every_format(asked: tuple[str, ...], decoder: Path, cli: Cli) -> None:
    starts = {"v.html": b"<!doctype", "v.png": b"\x89PNG", "v.svg": b"<?xml", "v.json": b"{", "v.csv": b"name,id,",
              "v.txt": b"name"}  # fmt: skip
    for name, start in starts.items():
        made = cli("viz-embeddings", decoder, *asked, "-o", name)
        assert made.code == 0 and made.out == "" and f"wrote {name}" in made.err, made.err
        assert Path(name).read_bytes().startswith(start), name
        assert "Table 'tokens', 1" in made.err and "of the variance" in made.err
    assert "␣" in Path("v.svg").read_text() and Path("v.svg").stat().st_size < 100_000


def test_the_page_is_offline_and_small(decoder: Path, cli: Cli) -> None:
    assert cli("viz-embeddings", decoder, "--token", "a").code == 0
    page = Path("embeddings.html").read_text()
    assert len(page) < 150_000 and "://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "Content-Security-Policy" in page and f"Model: {decoder}" in page and "Command: tformer" in page
    data = page_data(page)
    assert data["names"][data["asked"][0]] == "a" and data["rows"] == data["shown"] == [*range(len(data["names"]))]


def test_json_csv_and_the_table_agree(decoder: Path, cli: Cli) -> None:
    words = (decoder, "--token", "a", "--token", "h", "--top-k", 3)
    found = document(cli, *words)
    rows = list(csv.DictReader(io.StringIO(cli("viz-embeddings", *words, "--format", "csv").out)))
    assert rows == [{key: str(value) for key, value in each.items()} for each in found["nearest"]]
    assert [(row["name"], row["rank"]) for row in rows] == [
        ("a", "1"),
        ("a", "2"),
        ("a", "3"),
        ("h", "1"),
        ("h", "2"),
        ("h", "3"),
    ]
    table = cli("viz-embeddings", *words, "--format", "terminal").out.splitlines()
    assert table[0].split() == [*found["nearest"][0]] and len(table) == 7
    assert table[1].split()[-1] == f"{found['nearest'][0]['cosine']:.4f}"
    points = list(csv.DictReader(io.StringIO(cli("viz-embeddings", decoder, "--format", "csv").out)))
    assert points == [{key: str(value) for key, value in each.items()} for each in found["points"]]
    assert sorted(found["explained"], reverse=True) == found["explained"] and sum(found["explained"]) < 1


def test_centred_cosines_are_said_to_be(decoder: Path, cli: Cli) -> None:
    plain, centred = document(cli, decoder, "--token", "a"), document(cli, decoder, "--token", "a", "--centred")
    assert (plain["centred"], centred["centred"]) == (False, True) and plain["nearest"] != centred["nearest"]
    assert plain["points"] == centred["points"]
    made = cli("viz-embeddings", decoder, "--token", "a", "--centred", "--format", "terminal")
    assert "nearest by cosine, the mean of the table subtracted" in made.err


def test_chosen_tokens_stand_between_commas(decoder: Path, cli: Cli) -> None:
    assert [each["name"] for each in document(cli, decoder, "--tokens", "h, ,a")["points"]] == ["h", " ", "a"]


def test_labels_have_their_names_in_every_format(labelled: Path, cli: Cli) -> None:
    found = document(cli, labelled, "--table", "labels", "--token", "ugly")
    assert [each["name"] for each in found["points"]] == ["good", "bad", "ugly"]
    assert {each["nearest"] for each in found["nearest"]} == {"good", "bad"}
    for form in ("terminal", "csv", "svg"):
        made = cli("viz-embeddings", labelled, "--table", "labels", "--format", form)
        drawn = Path("embeddings.svg").read_text() if form == "svg" else made.out
        assert all(name in drawn for name in ("good", "bad", "ugly")), form


def test_the_terminal_draws_many_points() -> None:
    report = report_of(100, [f"t{n}" for n in range(100)], [])
    drawn = render_plots(plots_of(report), "terminal", title="Vectors")
    assert isinstance(drawn, str) and "component 1" in drawn and len(drawn.splitlines()) < 40


def test_each_side_of_a_translator(translator: Path, cli: Cli) -> None:
    source, target, output = (document(cli, translator, "--table", name) for name in ("tokens", "target", "output"))
    assert source["points"] != target["points"] != output["points"]


def test_python_returns_arrays(decoder: Path, labelled: Path, cli: Cli) -> None:
    report = tformer.load(decoder).embedding_table(token=["a", "b"], top_k=4)
    found = document(cli, decoder, "--token", "a", "--token", "b", "--top-k", 4)
    assert isinstance(report, EmbeddingReport) and report.vectors.shape == (len(report.names), 8)
    assert report.names[report.neighbours].ravel().tolist() == [each["nearest"] for each in found["nearest"]]
    np.testing.assert_array_equal(report.coordinates[:, 1], [each["component_2"] for each in found["points"]])
    assert tformer.load(labelled).embedding_table("labels").names.tolist() == ["good", "bad", "ugly"]
    with pytest.raises(InputError, match="top_k must be 1 to 100, found 0"):
        tformer.load(decoder).embedding_table(top_k=0)
    with pytest.raises(InputError, match="takes no output"):
        tformer.load(decoder).embedding_table(output="x.html")


def report_of(rows: int, names: list[str], asked: list[int]) -> EmbeddingReport:
    draw = np.random.default_rng(0)
    near = np.array([[(row + 1) % rows] for row in asked], dtype=np.int64).reshape(-1, 1)
    return EmbeddingReport(
        "tokens", np.array(names, dtype=object), draw.normal(size=(rows, 4)).astype(np.float32), np.arange(rows),
        draw.normal(size=(rows, 3)), np.array([0.5, 0.3, 0.1]), np.array(asked, dtype=np.int64), near,
        np.ones((len(asked), 1), dtype=np.float32), False,
    )  # fmt: skip


@pytest.mark.parametrize(("limit", "most"), [("MOST_WORK", 50 * 50 * (4 + CHOICE_WORK)), ("MOST_NEIGHBOURS", 50)])
def test_a_page_of_many_vectors_has_the_neighbours_of_those_asked_for(
    limit: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = report_of(50, [f"t{n}" for n in range(50)], [7])
    monkeypatch.setattr(f"tformer.viz.embeddings.{limit}", most - 1)
    assert page_data(render(report, title="x"))["rows"] == [7]
    monkeypatch.setattr(f"tformer.viz.embeddings.{limit}", most)
    assert page_data(render(report, title="x"))["rows"] == list(range(50))


def test_names_end_no_script() -> None:
    report = report_of(3, ["</script><script>alert(1)</script>", "\u202e", "a"], [0])
    page = render(report, title="<b>", notes=("<i>",))
    assert "<script>alert" not in page and "<b>" not in page and "<i>" not in page


@pytest.mark.slow
def test_a_page_of_fifty_thousand_vectors() -> None:
    report = report_of(50_000, [f" token{n}" for n in range(50_000)], [7])
    page = render(report, title="x")
    assert len(page) < 8e6 and len(page_data(page)["shown"]) == 50_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("RUN", "--token", "abc"), "--token 'abc': 3 tokens ('a', 'b', 'c'), expected one"),
        (("RUN", "--token", "x"), "--token 'x' is not in the vocabulary"),
        (("RUN", "--token", ""), "--token '' is not in the vocabulary"),
        (("RUN", "--tokens", "a,b,zz"), "--tokens 'zz'"),
        (("RUN", "--tokens", "a,,b"), "--tokens '' is not in the vocabulary"),
        (("RUN", "--tokens", "a"), "need at least 2 vectors, found 1"),
        (("RUN", "--tokens", "a,a"), "need at least 2 vectors, found 1"),
        (("RUN", "--table", "words"), "--table words: unknown"),
        (("RUN", "--table", "labels"), "has no table 'labels': it has no classifier"),
        (("RUN", "--table", "target"), "has no table 'target': its decoder reads the table 'tokens'"),
        (("LABELLED", "--table", "output"), "has no table 'output'"),
        (("LABELLED", "--table", "labels", "--token", "goood"), "--token goood: no label of"),
        (("LABELLED", "--table", "labels", "--tokens", "good,fine"), "--tokens fine: no label of"),
        (("RUN", "--top-k", "0"), "--top-k must be"),
        (("RUN", "--top-k", "101"), "--top-k must be 1 to 100, found 101"),
        (("RUN", "--format", "pdf"), "--format pdf: unknown"),
        (("RUN", "-o", "v.pdf"), "v.pdf has the suffix .pdf"),
        (("RUN", "--checkpoint", "step-7"), "step-7"),
        (("missing",), "missing does not exist"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    words: tuple[str, ...], message: str, decoder: Path, labelled: Path, cli: Cli
) -> None:
    places, before = {"RUN": decoder, "LABELLED": labelled}, set(Path().iterdir())
    outcome = cli("viz-embeddings", *(places.get(word, word) for word in words))
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert outcome.code == 2 and outcome.out == "" and len(errors) == 1 and message in errors[0], outcome.err
    assert set(Path().iterdir()) == before
