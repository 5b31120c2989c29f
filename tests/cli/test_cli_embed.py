"""`tformer embed` and `tformer search`: one vector for each text, formats, what is found, refusals."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tformer
from tests.random_runs import random_run
from tformer.decoding import lines
from tformer.evaluation import embed as embedding

Cli = Callable[..., Any]
BODY = """
schema: 1
model:
  d_model: 8
  max_seq_len: 16
  encoder: {num_layers: 2, num_heads: 2, feedforward: {d_ff: 16}}
  heads: [{kind: masked_lm}HEAD]
  init: {std: 0.5}
objectives: [{kind: masked_lm}]
training: {precision: fp32}
"""
TEXTS = ["abc", "a b c d", "", "hgf", "abc abc"]


def made(folder: Path, head: str = "") -> Path:
    return random_run(folder, BODY.replace("HEAD", head), arch="bert", letters="abcdefgh ", template="bert")


@pytest.fixture(scope="module")
def body(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("body"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("".join(f"{text}\n" for text in TEXTS))


def succeed(cli: Cli, *words: object) -> str:
    outcome = cli(*words)
    assert outcome.code == 0, outcome.err
    return str(outcome.out)


def vectors(cli: Cli, *words: object) -> np.ndarray:
    return np.array([json.loads(line)["vector"] for line in succeed(cli, "embed", *words).splitlines()])


# --- embed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "last"])
def test_each_line_gives_the_vector_of_the_python_api(pooling: str, body: Path, cli: Cli) -> None:
    found = vectors(cli, body, "--input", "texts.txt", "--pooling", pooling)
    np.testing.assert_allclose(found, tformer.load(body).embed(TEXTS, pooling=pooling), atol=1e-6)
    assert np.array_equal(found, vectors(cli, body, "--input", "texts.txt", "--pooling", pooling))


def test_last_is_the_pooling_eos(body: Path) -> None:
    run = tformer.load(body)
    assert np.array_equal(run.embed(TEXTS, pooling="last"), run.embed(TEXTS, pooling="eos"))


def test_vectors_of_length_1_and_their_first_numbers(body: Path, cli: Cli) -> None:
    plain, unit = vectors(cli, body, "--text", "abc"), vectors(cli, body, "--text", "abc", "--normalize")
    np.testing.assert_allclose(unit, plain / np.linalg.norm(plain), atol=1e-6)
    first = vectors(cli, body, "--text", "abc", "--normalize", "--dimensions", 3)
    np.testing.assert_allclose(first, plain[:, :3] / np.linalg.norm(plain[:, :3]), atol=1e-6)
    assert np.array_equal(vectors(cli, body, "--text", "abc", "--dimensions", 3), plain[:, :3])


def test_the_pooling_recorded_in_the_model_is_the_default(body: Path, cli: Cli, tmp_path: Path) -> None:
    recorded = made(tmp_path / "runs", ", {kind: embedding, pooling: cls}")
    found = vectors(cli, recorded, "--text", "abc")
    np.testing.assert_allclose(found, vectors(cli, body, "--text", "abc", "--pooling", "cls", "--normalize"), atol=1e-6)
    run = tformer.load(recorded)
    output = run.model(input_ids=torch.tensor([run.encode("abc")]))
    np.testing.assert_allclose(found, output.head("embedding").detach(), atol=1e-6)


def test_npy_jsonl_and_parquet_hold_the_same_vectors(body: Path, cli: Cli) -> None:
    pandas = pytest.importorskip("pandas")
    for name in ("v.npy", "v.jsonl", "v.parquet"):
        succeed(cli, "embed", body, "--input", "texts.txt", "--output", name)
    array = np.load("v.npy")
    assert array.shape == (len(TEXTS), 8) and array.dtype == np.float32
    lines = [json.loads(line) for line in Path("v.jsonl").read_text().splitlines()]
    table = pandas.read_parquet("v.parquet")
    assert [line["text"] for line in lines] == TEXTS == list(table["text"])
    np.testing.assert_allclose([line["vector"] for line in lines], array, atol=1e-6)
    np.testing.assert_allclose(np.stack(table["vector"]), array, atol=1e-6)


@pytest.mark.slow
def test_two_processes_write_the_index_of_one(body: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick twin is `test_cli_devices.py::test_several_processes_write_what_one_writes`."""
    monkeypatch.setattr(lines, "BLOCK_LINES", 2)
    for name, more in (("one.npy", ()), ("two.npy", ("--devices", 2, "--batch-size", 1))):
        succeed(cli, "embed", body, "--input", "texts.txt", "--output", name, "--device", "cpu", *more)
    np.testing.assert_allclose(np.load("two.npy"), np.load("one.npy"), atol=1e-6)
    assert Path("two.npy.jsonl").read_text() == Path("one.npy.jsonl").read_text()


def test_an_interrupt_keeps_the_rows_that_were_done_and_the_former_index(
    body: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, whole = list[int](), embedding.embed_texts

    def interrupted(*values: Any, **more: Any) -> np.ndarray:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return whole(*values, **more)

    monkeypatch.setattr(lines, "BLOCK_LINES", 2)
    monkeypatch.setattr(embedding, "embed_texts", interrupted)
    Path("v.npy").write_bytes(b"before")
    for name in ("v.jsonl", "v.npy"):
        calls.clear()
        outcome = cli("embed", body, "--input", "texts.txt", "--output", name, "--device", "cpu")
        assert outcome.code == 130 and "interrupted while embedding" in outcome.err
    assert [json.loads(line)["text"] for line in Path("v.jsonl").read_text().splitlines()] == TEXTS[:2]
    assert Path("v.npy").read_bytes() == b"before" and not Path("v.npy.jsonl").exists()


def test_a_table_comes_back_with_its_columns(body: Path, cli: Cli) -> None:
    Path("t.csv").write_text("id,text\n7,abc\n9,hgf\n")
    lines = [json.loads(line) for line in succeed(cli, "embed", body, "--input", "t.csv").splitlines()]
    assert [(line["id"], line["text"], len(line["vector"])) for line in lines] == [("7", "abc", 8), ("9", "hgf", 8)]


def test_long_texts_are_cut_and_counted(body: Path, cli: Cli) -> None:
    outcome = cli("embed", body, "--text", "abcdefgh" * 5)
    assert "1 texts are longer than 16 tokens and were cut" in outcome.err


def test_a_decoder_alone_gives_vectors_too(random_run: Path, cli: Cli) -> None:
    assert vectors(cli, random_run, "--text", "abc", "--pooling", "last").shape == (1, 8)


# --- search -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_text_itself_is_found_first(dtype: str, body: Path, cli: Cli) -> None:
    succeed(cli, "embed", body, "--input", "texts.txt", "--output", "v.npy", "--dtype", dtype)
    assert np.load("v.npy").dtype == dtype
    for row, text in enumerate(TEXTS):
        cosine, number, *found = succeed(cli, "search", "v.npy", text, "--top-k", 1).rstrip("\n").split("\t")
        assert (int(number), found) == (row, [text] if text else []) and float(cosine) == pytest.approx(1, abs=1e-3)


def test_several_queries_and_their_documents(body: Path, cli: Cli) -> None:
    succeed(cli, "embed", body, "--input", "texts.txt", "--output", "v.npy")
    Path("q.txt").write_text("abc\nhgf\n")
    lines = succeed(cli, "search", "v.npy", "--input", "q.txt", "--top-k", 2).splitlines()
    assert [line.split("\t")[0] for line in lines] == ["abc", "abc", "hgf", "hgf"]
    documents = [
        json.loads(line) for line in succeed(cli, "search", "v.npy", "--input", "q.txt", "--json").splitlines()
    ]
    assert [each["query"] for each in documents] == ["abc", "hgf"]
    assert [len(each["results"]) for each in documents] == [len(TEXTS)] * 2
    assert documents[0]["results"][0] | {"cosine": 1.0} == {"cosine": 1.0, "row": 0, "text": "abc"}


def test_the_query_is_read_as_the_texts_were(body: Path, cli: Cli) -> None:
    how = ("--pooling", "cls", "--layer", 0, "--dimensions", 4)
    succeed(cli, "embed", body, "--input", "texts.txt", "--output", "v.npy", *how)
    assert succeed(cli, "search", "v.npy", "hgf", "--top-k", 1).startswith("1.0000\t3\thgf")


def test_vectors_of_other_programs_need_a_model_and_may_have_texts(body: Path, cli: Cli) -> None:
    np.save("v.npy", tformer.load(body).embed(TEXTS))
    assert succeed(cli, "search", "v.npy", "hgf", "--top-k", 1, "--run", body) == "1.0000\t3\n"
    found = succeed(cli, "search", "v.npy", "hgf", "--top-k", 1, "--run", body, "--texts", "texts.txt")
    assert found == "1.0000\t3\thgf\n"


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("embed", "BODY", "--text", "a", "--pooling", "sum"),
            "--pooling: found 'sum', expected 'cls', 'mean'",
        ),
        (("embed", "BODY", "--text", "a", "--dimensions", "9"), "--dimensions must be between 1 and 8, found 9"),
        (("embed", "BODY", "--text", "a", "--dimensions", "0"), "--dimensions must be at least 1, found 0"),
        (("embed", "BODY", "--text", "a", "--layer", "2"), "--layer must be between -2 and 1, found 2"),
        (("embed", "BODY", "--text", "a", "--output", "v.csv"), "found .csv, expected .npy, .jsonl or .parquet"),
        (("embed", "BODY", "--text", "a", "--dtype", "int8"), "--dtype int8 is for a .npy file"),
        (("embed", "BODY", "--input", "none.txt"), "none.txt"),
        (("embed", "BODY", "--input", "empty.txt", "--output", "v.npy"), "empty.txt: no texts"),
        (("embed", "BODY", "--input", "old.npy", "--output", "old.npy"), "old.npy"),
        (("search", "texts.txt", "a"), "texts.txt: found .txt, expected .npy"),
        (("search", "none.npy", "a"), "none.npy: no such file"),
        (("search", "damaged.npy", "a"), "damaged.npy: damaged or not .npy"),
        (("search", "flat.npy", "a"), "flat.npy: found float32 [3], expected vectors [N, D] of float32"),
        (("search", "old.npy", "a"), "old.npy: nothing says which model made the vectors"),
        (("search", "old.npy", "a", "--run", "BODY"), "old.npy has vectors of 3 numbers, the query has 8"),
        (("search", "old.npy", "a", "--run", "BODY", "--texts", "texts.txt"), "found 5 texts, old.npy has 2 vectors"),
        (("search", "nan.npy", "a", "--run", "BODY"), "nan.npy: vector 1 has a number that is not finite"),
        (("search", "old.npy", "a", "--top-k", "0"), "must be at least 1, found 0"),
        (("search", "bad.npy", "a"), "bad.npy.jsonl: damaged: line 1: found a list of 0, expected a mapping"),
        (
            ("search", "facts.npy", "a"),
            "facts.npy.jsonl: damaged: line 1: options.layer: found the text 'top', expected an integer",
        ),
        (("search", "text.npy", "a", "--run", "BODY"), "text.npy.jsonl: damaged: line 2: found 3, expected text"),
        (("search", "pickled.npy", "a"), "pickled.npy: damaged or not .npy: "),
        (("search", "cut.npy", "a"), "cut.npy: damaged or not .npy: "),
        (("search", "wide.npy", "a"), "wide.npy: found int64 [2, 8], expected vectors [N, D] of float32"),
        (("search", "open.npy", "a"), "open.npy: damaged or not .npy: "),
        (
            ("search", "large.npy", "a", "--run", "BODY"),
            "large.npy: vector 0 has a number that is not finite, or too",
        ),
        (("search", "moved.npy", "a"), "moved/away does not exist"),
        (("search", "none.npy", ""), "none.npy: no such file"),
        (("embed", "BODY", "--input", "page.html"), "page.html: found HTML, expected text"),
        (("search", "moved.npy", "--input", "page.html", "--run", "BODY"), "page.html: found HTML, expected text"),
        (("embed", "BODY", "--devices", "2"), "--devices needs --input FILE"),
    ],
)
def test_a_mistake_is_one_clear_line(words: tuple[str, ...], expected: str, body: Path, cli: Cli) -> None:
    Path("empty.txt").touch()
    Path("page.html").write_text("<!DOCTYPE html>\n<html>\n")
    Path("damaged.npy").write_bytes(b"\x93NUMPY")
    np.save("flat.npy", np.zeros(3, np.float32))
    np.save("old.npy", np.ones((2, 3), np.float32))
    np.save("bad.npy", np.ones((2, 3), np.float32))
    Path("bad.npy.jsonl").write_text("[]\n3\n")
    Path("facts.npy").write_bytes(Path("bad.npy").read_bytes())
    Path("facts.npy.jsonl").write_text('{"options": {"layer": "top"}}\n"a"\n"b"\n')
    np.save("text.npy", np.ones((1, 8), np.float32))
    Path("text.npy.jsonl").write_text("{}\n3\n")
    np.save("pickled.npy", np.array([{}]), allow_pickle=True)
    Path("cut.npy").write_bytes(Path("text.npy").read_bytes()[:-4])
    Path("open.npy").write_bytes(Path("text.npy").read_bytes().replace(b"(1, 8)", b"(1, (8"))
    np.save("large.npy", np.full((2, 8), 3e38, np.float32))
    np.save("moved.npy", np.ones((1, 8), np.float32))
    Path("moved.npy.jsonl").write_text('{"run": "moved/away", "options": {"batch_size": -1}}\n"a"\n')
    np.save("wide.npy", np.ones((2, 8), np.int64))
    np.save("nan.npy", np.array([[1.0] * 8, [np.nan] * 8], np.float32))
    outcome = cli(*(body if word == "BODY" else word for word in words))
    [line] = [line for line in outcome.err.splitlines() if line.startswith("error:")]
    assert outcome.code == 2 and expected in line
    assert not Path("v.npy").exists() and not Path("v.npy.jsonl").exists()


def test_only_what_a_query_needs_is_read_from_an_index(body: Path, cli: Cli) -> None:
    succeed(cli, "embed", body, "--input", "texts.txt", "--output", "v.npy")
    facts, *texts = Path("v.npy.jsonl").read_text().splitlines()
    options = {"batch_size": -1, "precision": "none", "output": "other.npy", **json.loads(facts)["options"]}
    Path("v.npy.jsonl").write_text("\n".join([json.dumps(json.loads(facts) | {"options": options}), *texts]) + "\n")
    assert succeed(cli, "search", "v.npy", "hgf", "--top-k", 1).startswith("1.0000\t3\thgf")
    np.save("moved.npy", np.ones((1, 8), np.float32))
    Path("moved.npy.jsonl").write_text('{"run": "moved/away"}\n"a"\n')
    outcome = cli("search", "moved.npy", "a")
    assert outcome.code == 2 and "hint: moved.npy names this model: name another with --run RUN" in outcome.err


def test_an_index_of_other_weights_is_refused(body: Path, cli: Cli, tmp_path: Path) -> None:
    succeed(cli, "embed", body, "--input", "texts.txt", "--output", "v.npy")
    text = BODY.replace("HEAD", "")
    other = random_run(tmp_path / "other", text, arch="bert", letters="abcdefgh ", template="bert", seed=1)
    outcome = cli("search", "v.npy", "abc", "--run", other)
    assert outcome.code == 2 and "v.npy was made by other weights" in outcome.err


def test_a_column_is_that_of_the_training_where_the_table_has_it_else_guessed(cli: Cli, tmp_path: Path) -> None:
    recipe = BODY.replace("HEAD", "") + "data: {columns: {text: question}}\n"
    trained = random_run(tmp_path / "trained", recipe, arch="bert", letters="abcdefgh ", template="bert")
    Path("a.csv").write_text("text,question\nabc,hgf\n")
    Path("b.csv").write_text("id,text\n1,hgf\n")
    found = [vectors(cli, trained, "--input", name) for name in ("a.csv", "b.csv")]
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
