"""`tformer viz-embeddings`: formats, what they agree on, refusals; `Run.embedding_table`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
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
from tformer.viz.embeddings import CHOICE_WORK, render

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
    Path("list.txt").write_text("a\n \nc\r\n\nh\n")
    Path("wrong.txt").write_text("a\n\nabc\n")
    Path("bytes.txt").write_bytes(b"a\n\xff\n")


def document(cli: Cli, *words: object) -> dict[str, Any]:
    outcome = cli("viz-embeddings", *words, "--format", "json")
    assert outcome.code == 0, outcome.err
    return dict(json.loads(outcome.out))


@pytest.mark.parametrize("asked", [(), ("--token", "a", "--token", " ")])
def test_every_format(asked: tuple[str, ...], decoder: Path, cli: Cli) -> None:
    starts = {"v.html": b"<!doctype", "v.png": b"\x89PNG", "v.svg": b"<?xml", "v.json": b"{", "v.csv": b"id,name,",
              "v.txt": b"a (" if asked else b"Vectors of"}  # fmt: skip
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
    assert data["rows"] is None and data["names"][data["asked"][0]] == "a" and data["count"] == len(data["names"])


def test_json_csv_and_the_table_agree(decoder: Path, cli: Cli) -> None:
    found = document(cli, decoder, "--token", "a", "--token", "h", "--top-k", 3)
    words = (decoder, "--token", "a", "--token", "h", "--top-k", 3)
    rows = list(csv.DictReader(io.StringIO(cli("viz-embeddings", *words, "--format", "csv").out)))
    flat = [(each["id"], n["id"], n["name"], n["cosine"]) for each in found["asked"] for n in each["nearest"]]
    assert [(int(row["id"]), int(row["nearest_id"]), row["nearest"], float(row["cosine"])) for row in rows] == flat
    assert [row["rank"] for row in rows] == ["1", "2", "3"] * 2
    table = cli("viz-embeddings", *words, "--format", "terminal").out.splitlines()
    assert (
        table[0].startswith("a (")
        and table[0].endswith("): cosine")
        and table[1].split() == ["nearest", "id", "cosine"]
    )
    assert table[2].split()[-1] == f"{flat[0][3]:.4f}"
    points = list(csv.DictReader(io.StringIO(cli("viz-embeddings", decoder, "--format", "csv").out)))
    assert [float(row["component_1"]) for row in points] == [each["components"][0] for each in found["points"]]
    assert sorted(found["explained"], reverse=True) == found["explained"] and sum(found["explained"]) < 1


def test_centred_cosines_are_said_to_be(decoder: Path, cli: Cli) -> None:
    plain, centred = document(cli, decoder, "--token", "a"), document(cli, decoder, "--token", "a", "--centred")
    assert (plain["centred"], centred["centred"]) == (False, True) and plain["asked"] != centred["asked"]
    assert plain["points"] == centred["points"]
    out = cli("viz-embeddings", decoder, "--token", "a", "--centred", "--format", "terminal").out
    assert out.splitlines()[0].endswith("cosine, the mean of the table subtracted")


def test_a_list_is_a_file_or_words_between_commas(decoder: Path, cli: Cli) -> None:
    names = [each["name"] for each in document(cli, decoder, "--tokens", "list.txt")["points"]]
    assert names == ["a", " ", "c", "h"]
    assert [each["name"] for each in document(cli, decoder, "--tokens", "h, ,a")["points"]] == ["h", " ", "a"]


def test_labels_and_positions(labelled: Path, cli: Cli) -> None:
    found = document(cli, labelled, "--table", "labels", "--token", "ugly")
    assert [each["name"] for each in found["points"]] == ["good", "bad", "ugly"]
    assert {each["name"] for each in found["asked"][0]["nearest"]} == {"good", "bad"}
    found = document(cli, labelled, "--table", "positions", "--tokens", "0-3,9", "--token", "15")
    assert [each["id"] for each in found["points"]] == [0, 1, 2, 3, 9] and found["asked"][0]["id"] == 15
    drawn = cli("viz-embeddings", labelled, "--table", "labels", "--format", "terminal").out
    assert all(name in drawn for name in ("good", "bad", "ugly", "component 1"))


def test_each_side_of_a_translator(translator: Path, cli: Cli) -> None:
    source, target, output = (document(cli, translator, "--table", name) for name in ("tokens", "target", "output"))
    assert source["points"] != target["points"] != output["points"]


def test_python_returns_arrays(decoder: Path, labelled: Path, cli: Cli) -> None:
    report = tformer.load(decoder).embedding_table(token=["a", "b"], top_k=4)
    found = document(cli, decoder, "--token", "a", "--token", "b", "--top-k", 4)
    assert isinstance(report, EmbeddingReport) and report.vectors.shape == (len(report.names), 8)
    assert report.names[report.neighbours].tolist() == [[n["name"] for n in each["nearest"]] for each in found["asked"]]
    np.testing.assert_array_equal(report.coordinates, [each["components"] for each in found["points"]])
    assert tformer.load(labelled).embedding_table("labels").names.tolist() == ["good", "bad", "ugly"]
    with pytest.raises(InputError, match="top_k must be 1 to 100, found 0"):
        tformer.load(decoder).embedding_table(top_k=0)
    with pytest.raises(InputError, match="takes no output"):
        tformer.load(decoder).embedding_table(output="x.html")


def report_of(rows: int, names: list[str], asked: list[int]) -> EmbeddingReport:
    draw = np.random.default_rng(0)
    near = np.array([[(place + 1) % rows] for place in asked], dtype=np.int64).reshape(-1, 1)
    return EmbeddingReport(
        "tokens", np.arange(rows), np.array(names, dtype=object), draw.normal(size=(rows, 4)).astype(np.float32),
        np.arange(rows), draw.normal(size=(rows, 3)), np.array([0.5, 0.3, 0.1]), np.array(asked, dtype=np.int64), near,
        np.ones((len(asked), 1), dtype=np.float32), False,
    )  # fmt: skip


def test_a_page_of_many_vectors_has_the_neighbours_of_those_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(50, [f"t{n}" for n in range(50)], [7])
    monkeypatch.setattr("tformer.viz.embeddings.MOST_WORK", 50 * 50 * (4 + CHOICE_WORK) - 1)
    assert page_data(render(report, title="x"))["rows"] == [7]
    monkeypatch.setattr("tformer.viz.embeddings.MOST_WORK", 50 * 50 * (4 + CHOICE_WORK))
    assert page_data(render(report, title="x"))["rows"] is None


def test_names_end_no_script_and_a_page_has_a_limit() -> None:
    report = report_of(3, ["</script><script>alert(1)</script>", "\u202e", "a"], [0])
    page = render(report, title="<b>", notes=("<i>",))
    assert "<script>alert" not in page and "<b>" not in page and "<i>" not in page
    with pytest.raises(InputError, match=r"does not fit into 0\.001 MB"):
        render(replace(report), title="x", max_bytes=1000)


@pytest.mark.slow
def test_a_page_of_fifty_thousand_vectors() -> None:
    report = report_of(50_000, [f" token{n}" for n in range(50_000)], [7])
    page = render(report, title="x")
    assert len(page) < 8e6 and page_data(page)["count"] == 50_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("RUN", "--token", "abc"), "--token 'abc': 3 tokens ('a', 'b', 'c'), expected one"),
        (("RUN", "--token", "x"), "--token 'x' is not in the vocabulary"),
        (("RUN", "--token", ""), "--token '' is not in the vocabulary"),
        (("RUN", "--tokens", "a,b,zz"), "--tokens 'zz'"),
        (("RUN", "--tokens", "a,,b"), "--tokens a,,b: found nothing between two commas"),
        (("RUN", "--tokens", "a"), "need at least 2 vectors, found 1"),
        (("RUN", "--tokens", "a,a"), "need at least 2 vectors, found 1"),
        (("RUN", "--tokens", "missing.txt"), "--tokens 'missing.txt'"),
        (("RUN", "--tokens", "wrong.txt"), "wrong.txt, line 3: 'abc': 3 tokens"),
        (("RUN", "--tokens", "bytes.txt"), "bytes.txt: no UTF-8: invalid start byte at byte 2"),
        (("RUN", "--tokens", "list.txt", "-o", "list.txt"), "would replace what is read"),
        (("RUN", "--table", "words"), "--table words: unknown"),
        (("RUN", "--table", "labels"), "has no table 'labels': it has no classifier"),
        (("RUN", "--table", "target-positions"), "it has no decoder with learned positions of its own"),
        (("RUN", "--table", "target"), "has no table 'target': its decoder has no token table of its own"),
        (("LABELLED", "--table", "target-positions"), "has no table 'target-positions'"),
        (("LABELLED", "--table", "output"), "has no table 'output'"),
        (("LABELLED", "--table", "labels", "--token", "goood"), "--token goood: not in the table 'labels'"),
        (("LABELLED", "--table", "labels", "--tokens", "good,fine"), "--tokens fine: not in the table 'labels'"),
        (("LABELLED", "--table", "positions", "--token", "16"), "--token 16: not in the table 'positions'"),
        (("LABELLED", "--table", "positions", "--tokens", "0-99"), "--tokens 16: not in the table 'positions'"),
        (("LABELLED", "--table", "positions", "--tokens", "5-2"), "5-2 is no range"),
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
