"""Answers in the shape of the question, as a user gets them: a table for a table, lines for lines."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.labelled_examples import sentences
from tests.end_to_end.translate_runs import DECODER, LINES, SEQ2SEQ, documents, refusal

Cli = Callable[..., Any]
Runs = Callable[[str], Path]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Ids, dates, a column of labels and texts with line ends and quotes."""
    path = tmp_path / "in.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = [(f"T{n}", f'{text}\n"', "2024-01-01", label) for n, (label, text) in enumerate(sentences(12, 21))]
        csv.writer(file).writerows([("ticket_id", "text", "date", "label"), *rows])
    return path


# --- classify ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet"])
def test_a_table_is_answered_with_its_columns_in_the_format_of_the_output(
    ending: str, cli: Cli, encoder_run: Runs, table: Path, tmp_path: Path
) -> None:
    out = tmp_path / f"out.{ending}"
    outcome = cli("classify", encoder_run("single"), "--input", table, "--output", out)
    assert (outcome.code, outcome.out) == (0, ""), outcome.err
    if ending == "jsonl":
        found: Any = [json.loads(line) for line in out.read_text().splitlines()]
    elif ending == "parquet":
        found = pytest.importorskip("pyarrow.parquet").read_table(out).to_pylist()
    else:
        found = rows_of(out)
    names = ["ticket_id", "text", "date", "label", "predicted_label", "probability", "animal", "tool"]
    assert [list(row) for row in found] == [names] * 12
    for row, given in zip(found, rows_of(table), strict=True):
        text = row["text"].replace("\\n", "\n") if ending == "tsv" else row["text"]
        assert row | given | {"text": text} == row | {"text": text}
        best = max(("animal", "tool"), key=lambda label: float(row[label]))
        assert row["predicted_label"] == best == row["label"] and float(row["probability"]) == float(row[best])


def test_a_line_says_rows_seconds_and_rows_per_second(cli: Cli, encoder_run: Runs, table: Path) -> None:
    said = cli("classify", encoder_run("single"), "--input", table).err
    assert re.search(r"^12 rows in [\d.]+ m?s, [\d,.]+ rows/s$", said, re.MULTILINE), said
    (table.parent / "in.txt").write_text("a saw\na cow\n")
    assert "2 lines in " in cli("classify", encoder_run("single"), "--input", table.parent / "in.txt").err
    assert " in " not in cli("classify", encoder_run("single"), "--text", "a saw").err.replace("runs", "")


def test_standard_output_has_the_format_of_the_table(cli: Cli, encoder_run: Runs, table: Path, tmp_path: Path) -> None:
    outcome = cli("classify", encoder_run("single"), "--input", table)
    (tmp_path / "out.csv").write_text(outcome.out)
    assert [row["predicted_label"] for row in rows_of(tmp_path / "out.csv")] == [r["label"] for r in rows_of(table)]
    lines = cli("classify", encoder_run("single"), "--input", table, "--json").out.splitlines()
    documents = [json.loads(line) for line in lines]
    assert [(each["row"], each["id"]) for each in documents] == [(n, f"T{n}") for n in range(12)]
    assert all(set(each) == {"row", "id", "label", "probabilities"} for each in documents)


def test_the_best_labels_are_a_list_of_columns(cli: Cli, encoder_run: Runs, table: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    assert cli("classify", encoder_run("single"), "--input", table, "--output", out, "--top-k", 6).code == 0
    found = rows_of(out)
    assert list(found[0])[4:] == ["label_1", "probability_1", "label_2", "probability_2"]
    assert all(float(row["probability_1"]) >= float(row["probability_2"]) for row in found)
    assert [row["label_1"] for row in found] == [row["label"] for row in found]


def test_several_labels_and_scores_have_columns_too(cli: Cli, encoder_run: Runs, table: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    assert cli("classify", encoder_run("multi"), "--input", table, "--output", out).code == 0
    assert list(rows_of(out)[0])[4:] == ["labels", "animal", "tool"]
    table.write_text("text\nthe cat with the saw\nthe cow\n")
    assert cli("classify", encoder_run("multi"), "--input", table, "--output", out).code == 0
    assert rows_of(out)[0]["labels"] in ("animal|tool", "tool|animal") and rows_of(out)[1]["labels"] == "animal"
    assert cli("classify", encoder_run("multi"), "--input", table, "--output", tmp_path / "out.jsonl").code == 0
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert sorted(first["labels"]) == ["animal", "tool"] and second["labels"] == ["animal"]
    assert cli("classify", encoder_run("score"), "--input", table, "--output", out).code == 0
    assert list(rows_of(out)[0]) == ["text", "score"]


def test_text_in_gives_text_out_and_a_table_where_the_output_is_one(
    cli: Cli, encoder_run: Runs, tmp_path: Path
) -> None:
    run, texts = encoder_run("single"), tmp_path / "in.txt"
    texts.write_text("the saw, the axe\n\nthe cow\n")
    assert cli("classify", run, "--input", texts, "--output", tmp_path / "out.tsv").code == 0
    lines = (tmp_path / "out.tsv").read_text().splitlines()
    assert [len(line.split("\t")) for line in lines] == [2, 2, 2]
    assert cli("classify", run, "--input", texts, "--output", tmp_path / "out.csv").code == 0
    found = rows_of(tmp_path / "out.csv")
    assert [row["text"] for row in found] == ["the saw, the axe", "", "the cow"]
    assert [row["label"] for row in found] == [line.split("\t")[0] for line in lines]
    texts.write_text("the saw\tthe cow\n")
    assert cli("classify", encoder_run("pair"), "--input", texts, "--output", tmp_path / "out.csv").code == 0
    assert list(rows_of(tmp_path / "out.csv")[0]) == ["text", "text2", "label", "probability", "other", "same"]


def test_images_are_named_in_a_table(cli: Cli, encoder_run: Runs, tmp_path: Path) -> None:
    run, out = encoder_run("image"), tmp_path / "out.csv"
    assert cli("classify", run, "--input", run.parent / "data", "--output", out).code == 0
    found = rows_of(out)
    assert list(found[0]) == ["image", "label", "probability", "dark", "light"]
    assert all(row["label"] in row["image"] for row in found)


@pytest.mark.slow
def test_several_processes_write_the_table_of_one(cli: Cli, encoder_run: Runs, table: Path, tmp_path: Path) -> None:
    """Its quick twin is `test_e2e_evaluate_devices.py::test_several_processes_report_what_one_reports`."""
    import os

    written = []
    for devices in ([], ["--devices", 2]):
        out = tmp_path / f"out{len(written)}.csv"
        words = ["classify", encoder_run("single"), "--input", table, "--output", out, "--device", "cpu", *devices]
        assert cli(*words).code == 0
        written.append([{k: v[:5] for k, v in row.items()} for row in rows_of(out)])
        os.unlink(out)
    assert written[0] == written[1]


def test_a_refused_output_is_named_before_anything_is_loaded(cli: Cli, table: Path) -> None:
    outcome = cli("classify", "absent", "--input", table, "--output", table.parent / "out.xlsx")
    assert outcome.code == 2 and ".xlsx is not written" in outcome.err and ".parquet" in outcome.err
    outcome = cli("generate", "absent", "--input", table, "--output", table.parent / "out.ods")
    assert outcome.code == 2 and ".ods is not written" in outcome.err


# --- generate ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    path = tmp_path / "sources.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("id", "source", "output"), *((n, line, "x") for n, line in enumerate(LINES))])
    return path


def test_translations_stand_beside_the_columns(
    cli: Cli, translator: Path, sources: Path, lines: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.csv"
    outcome = cli("generate", translator, "--input", sources, "--output", out, "--beam-size", 2)
    assert outcome.code == 0 and f"{len(LINES)} rows in " in outcome.err, outcome.err
    found, texts = rows_of(out), cli("generate", translator, "--input", lines, "--beam-size", 2).out.splitlines()
    assert list(found[0]) == ["id", "source", "output", "predicted_output", "score"]
    assert [row["source"] for row in found] == LINES and [row["predicted_output"] for row in found] == texts
    best = ["generate", translator, "--input", sources, "--text-column", "source", "--beam-size", 2, "--n-best", 2]
    assert cli(*best, "--logprobs", "--output", out).code == 0
    names = ["output_1", "score_1", "logprob_1", "output_2", "score_2", "logprob_2"]
    assert list(rows_of(out)[0])[3:] == names
    documents = [json.loads(line) for line in cli(*best, "--json").out.splitlines()]
    assert [(each["row"], each["id"], each["index"]) for each in documents] == [
        (n, str(n), n) for n in range(len(LINES))
    ]


def test_samples_of_a_decoder_stand_beside_the_columns(cli: Cli, decoder: Path, sources: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "out.jsonl", ["--max-new-tokens", 3, "--num-samples", 2, "--logprobs"]
    assert cli("generate", decoder, "--input", sources, "--output", out, *options).code == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert list(found[0]) == ["id", "source", "output", "output_1", "logprob_1", "output_2", "logprob_2"]
    assert len(found) == len(LINES) and all(row["logprob_1"] < 0 for row in found)


def test_masks_of_a_table_are_filled(cli: Cli, encoder_run: Runs, tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("id,text\n1,the [MASK] and the cow\n2,the cow\n3,x\n")
    outcome = cli("generate", encoder_run("masked"), "--input", path, "--top-k", 1)
    assert outcome.code == 2 and f"{path}:3: found no mask" in outcome.err
    path.write_text("id,text\n1,the [MASK] and the cow\n2,[MASK]\n3,the [MASK]\n")
    outcome = cli("generate", encoder_run("masked"), "--input", path, "--top-k", 1)
    header, first, *_ = outcome.out.splitlines()
    assert header == "id,text,output" and re.fullmatch(r"1,the \[MASK\] and the cow,\w+ 0\.\d{4}", first)


def test_a_source_that_is_too_long_is_named_by_its_place(cli: Cli, translator: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text('id,source\n1,"a\nb"\n2,' + "word " * 500 + "\n3,a\n4,b\n")
    outcome = cli("generate", translator, "--input", path)
    assert outcome.code == 2 and f"{path}:4: " in outcome.err, outcome.err


def test_tables_of_any_separator_and_encoding_are_read_and_answered(
    cli: Cli, decoder: Path, translator: Path, tmp_path: Path
) -> None:
    """A separator and letters that nothing finds, in a file of any name."""
    plain, odd = tmp_path / "plain.csv", tmp_path / "odd.txt"
    plain.write_text("id,source,город\n1,abc,Ü\n2,fed cab,я\n", encoding="utf-8")
    odd.write_text(plain.read_text(encoding="utf-8").replace(",", "!").replace("Ü", "Ж"), encoding="cp1251")
    for run in (decoder, translator):
        words = ["generate", run, "--max-new-tokens", 4, "--text-column", "source", "--input"]
        expected, found = cli(*words, plain), cli(*words, odd, "--delimiter", "!", "--encoding", "cp1251")
        assert expected.code == found.code == 0, found.err
        assert found.out == expected.out.replace(",", "!").replace("Ü", "Ж")


@pytest.mark.parametrize("recipe", [DECODER, SEQ2SEQ], ids=["decoder", "translator"])
def test_lines_of_any_encoding_are_read(recipe: str, cli: Cli, random_run: Callable[..., Path], tmp_path: Path) -> None:
    run, path, found = random_run(recipe, letters="aé жяü"), tmp_path / "in.txt", []
    for encoding in ("utf-8", "utf-16", "cp1252"):
        path.write_text("é a\n\nü\n", encoding=encoding)
        flags = [] if encoding == "utf-8" else ["--encoding", encoding]
        found.append(documents(cli("generate", run, "--input", path, "--max-new-tokens", 4, "--json", *flags)))
    assert found[0] == found[1] == found[2]
    assert [document["prompt"] for document in found[0]] == ["é a", "", "ü"]
    path.write_bytes("é\n".encode("cp1252"))
    message = refusal(cli("generate", run, "--input", path))
    assert "in.txt:1: invalid UTF-8" in message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--encoding", "latin-9000"], "--encoding: unknown encoding 'latin-9000'"),
        (["--delimiter", "::"], "--delimiter: expected one character"),
    ],
    ids=str,
)
def test_a_wrong_reading_is_refused_before_anything_is_loaded(flags: list[str], message: str, cli: Cli) -> None:
    assert message in refusal(cli("generate", "absent", *flags))
