"""Results over seeds: mean and sample standard deviation, failures in their words, the best of a task marked."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer.metrics.statistics import Stat
from tformer.workflows.sweep.cells import Result, read_run
from tformer.workflows.sweep.pictures import draw
from tformer.workflows.sweep.plan import SweepPlan, SweepTask
from tformer.workflows.sweep.table import (
    Column,
    SweepRow,
    SweepTable,
    latex,
    make_table,
    markdown,
    show_metric,
    write_tables,
)

LM = SweepTask(name="lm", vary={"optimizer.lr": (0.1, 0.2)}, evaluate={"longer": ()})
PAIRS = SweepTask(name="pairs", vary={"optimizer.lr": (0.1, 0.2), "model.*.norm.place": ("pre",)})


def result(task: str = "lm", lr: str = "0.1", seed: int = 1, best: float | None = 2.0, **more: Any) -> Result:
    values: dict[str, Any] = {
        "status": "done",
        "parameters": 1000,
        "flops_per_token": 5.0e6,
        "seconds": 10.0,
        "tokens_per_second": 2000.0,
        "peak_memory_bytes": 300 * 2**20,
        "best": best,
        "best_step": 4,
        "validation": {"loss": best, "accuracy": 0.5},
        "curve": [[2, 3.0], [4, best]],
    }
    return Result(f"{task}-{lr}-{seed}", task, {"lr": lr}, seed, **{**values, **more})


def seeds(lr: str, *bests: float, **more: Any) -> list[Result]:
    return [result(lr=lr, seed=seed, best=best, **more) for seed, best in enumerate(bests, start=1)]


def table_of(results: list[Result], *tasks: SweepTask) -> list[dict[str, str]]:
    table = make_table(SweepPlan(tasks=tasks or (LM,)), results)
    return [
        dict(zip(table.headings, table.cells(row, mark=lambda text: f"*{text}*"), strict=True)) for row in table.rows
    ]


def test_mean_and_sample_standard_deviation_over_seeds() -> None:
    [row] = table_of([result(seed=1, best=1.0), result(seed=2, best=2.0), result(seed=3, best=4.0)])
    assert row["loss"] == "2.3333 ± 1.5275"
    assert (row["parameters"], row["FLOPs/token"], row["tokens/s"], row["peak MiB"]) == ("1,000", "5 M", "2,000", "300")


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=6))
def test_the_deviation_divides_by_n_minus_one(values: list[float]) -> None:
    stat = Stat.of(values)
    assert stat is not None and stat.deviation is not None
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    assert stat.deviation == pytest.approx(math.sqrt(variance), rel=1e-6, abs=1e-6)
    assert stat.deviation == statistics.stdev(values)


def test_one_seed_has_no_deviation() -> None:
    assert table_of([result(best=2.5)])[0]["loss"] == "2.5000"
    assert Stat.of([3.0]) == Stat(3.0, None, 1) and Stat.of([]) is None


def test_the_best_of_a_task_is_marked_by_what_its_metric_means() -> None:
    losses = [*seeds("0.1", 2.0, 2.1), *seeds("0.2", 1.0, 1.1)]
    assert [row["loss"] for row in table_of(losses)] == ["2.0500 ± 0.0707", "*1.0500 ± 0.0707*"]
    pairs = [
        *seeds("0.1", 20.0, 21.0, task="pairs", metric="bleu"),
        *seeds("0.2", 9.0, 10.0, task="pairs", metric="bleu"),
    ]
    both = table_of([*losses, *pairs], LM, PAIRS)
    assert [row["bleu"] for row in both] == ["", "", "*20.50 ± 0.71*", "9.50 ± 0.71"]
    assert [row["loss"] for row in both][2:] == ["", ""]  # measured there too, but not what decides
    assert [row["loss"] for row in both][:2] == ["2.0500 ± 0.0707", "*1.0500 ± 0.0707*"]
    assert [row["task"] for row in both] == ["lm", "lm", "pairs", "pairs"]
    assert "*" not in table_of(seeds("0.1", 2.0, 2.1))[0]["loss"]  # alone, or where all are equal, none is best
    equal = table_of([*seeds("0.1", 2.0, 2.0), *seeds("0.2", 2.0, 2.0)])
    assert [row["loss"] for row in equal] == ["2.0000 ± 0.0000", "2.0000 ± 0.0000"]


def test_variants_within_noise_of_the_best_are_marked_with_it() -> None:
    close, worse = [*seeds("0.1", 6.31, 6.33), *seeds("0.2", 6.32, 6.34)], seeds("0.3", 7.0, 7.02)
    assert ["*" in row["loss"] for row in table_of([*close, *worse])] == [True, True, False]
    assert ["*" in row["loss"] for row in table_of(close)] == [False, False]  # all tie
    [remark] = make_table(SweepPlan(tasks=(LM,)), close).remarks()
    assert remark.startswith("no variant is marked as the best: they differ by less than twice the standard error")


def test_one_seed_marks_no_variant_and_the_table_says_why() -> None:
    results = [result(lr="0.1", best=6.3146), result(lr="0.2", best=6.3144)]
    assert [row["loss"] for row in table_of(results)] == ["6.3146", "6.3144"]
    [remark] = make_table(SweepPlan(tasks=(LM,)), results).remarks()
    assert remark.startswith("one seed: no variant is marked") and "--seeds 3" in remark
    assert make_table(SweepPlan(tasks=(LM,)), results[:1]).remarks() == []  # no rival


def test_a_variant_of_which_one_seed_is_left_is_judged_by_the_deviation_of_the_other() -> None:
    failed = result(lr="0.2", seed=2, status="diverged", best=None)
    near, far = ([*seeds("0.1", 2.0, 2.2), result(lr="0.2", best=best), failed] for best in (2.3, 5.0))
    assert ["*" in row["loss"] for row in table_of(near)] == [False, False]
    assert ["*" in row["loss"] for row in table_of(far)] == [True, False]


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=4), st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=4))
def test_ties_are_mutual_and_everything_ties_with_itself(left: list[float], right: list[float]) -> None:
    one, other = Stat.of(left), Stat.of(right)
    assert one is not None and other is not None
    assert one.ties_with(one) and one.ties_with(other) == other.ties_with(one)


def test_failures_are_rows_with_their_word() -> None:
    rows = table_of(
        [
            result(lr="0.1", seed=1),
            result(lr="0.1", seed=2, status="diverged", best=None),
            result(lr="0.2", seed=1, status="out of memory", best=None, parameters=None),
            result(lr="0.2", seed=2, status="out of memory", best=None, parameters=None),
        ]
    )
    assert rows[0]["loss"] == "2.0000 (1 of 2 diverged)"
    assert (rows[1]["loss"], rows[1]["parameters"]) == ("out of memory", "")


def test_what_diverged_counts_in_no_mean() -> None:
    [row] = table_of([result(seed=1), result(seed=2, status="diverged", best=900.0, seconds=1e9)])
    assert row["loss"] == "2.0000 (1 of 2 diverged)" and row["time s"] == "10.0"


def test_evaluations_are_columns_and_tell_how_they_failed() -> None:
    good = {"longer": {"metric": "loss", "value": 3.0}}
    bad = {"longer": {"failure": "refused", "message": "too long"}}
    rows = table_of([result(lr="0.1", evaluate=good), result(lr="0.2", evaluate=bad)])
    assert [row["longer"] for row in rows] == ["3.0000", "refused"]


def test_files_hold_every_figure(tmp_path: Path) -> None:
    results = [result(seed=1, best=1.0), result(seed=2, best=3.0), result(lr="0.2", status="killed", best=None)]
    plan = SweepPlan(tasks=(LM,))
    write_tables(plan, make_table(plan, results), results, tmp_path)
    variants = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert len(variants) == 2 and float(variants[0]["valid.loss"]) == 2.0
    assert float(variants[0]["valid.loss.sd"]) == pytest.approx(math.sqrt(2))
    assert variants[1]["failures"] == "killed" and variants[1]["valid.loss"] == ""
    cells = list(csv.DictReader(io.StringIO((tmp_path / "cells.csv").read_text())))
    assert [(cell["seed"], cell["status"], cell["valid.accuracy"]) for cell in cells][:2] == [
        ("1", "done", "0.5"),
        ("2", "done", "0.5"),
    ]
    document = json.loads((tmp_path / "table.json").read_text())
    assert document["rows"][0]["stats"]["valid.loss"] == {"mean": 2.0, "deviation": math.sqrt(2), "count": 2}
    assert document["rows"][0]["text"]["loss"] == "2.0000 ± 1.4142"


def test_markdown_is_one_table_with_the_best_in_bold() -> None:
    table = make_table(SweepPlan(tasks=(LM,)), [*seeds("0.1", 1.0, 1.1), *seeds("0.2", 2.0, 2.1)])
    lines = markdown(table).splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert "**1.0500 ± 0.0707**" in lines[2] and "**" not in lines[3]
    assert [remark.split(":")[0] for remark in table.remarks()] == ["bold"]


SYMBOLS = {r"\textbackslash": "\\", r"\textasciitilde": "~", r"\textasciicircum": "^", r"\textless": "<",
           r"\textgreater": ">", r"\textbar": "|"}  # fmt: skip
RULES = (r"\toprule", r"\midrule", r"\bottomrule")
TOKEN = re.compile(r"\\[a-zA-Z]+|\\[&%$#_{}\\]|[^\\]", re.DOTALL)


def tokens_of(source: str) -> deque[str]:
    """Commands, escaped characters and plain ones. Fails for a backslash before anything else."""
    found = deque(TOKEN.findall(source))
    assert "".join(found) == source
    return found


def expect(tokens: deque[str], *expected: str) -> None:
    assert [tokens.popleft() for _ in expected] == list(expected)


def read_text(tokens: deque[str], *ends: str) -> str:
    """The text that LaTeX prints up to one of the tokens `ends`, bold as **bold**; spaces are one, and none around it.

    Fails for an unknown command, an open group, and a character that is special to LaTeX, or would be read as an
    option at the beginning of a row.
    """
    text = ""
    while (token := tokens[0]) not in ends:
        tokens.popleft()
        if token == r"\textbf":
            expect(tokens, "{")
            text += f"**{read_text(tokens, '}')}**"
            expect(tokens, "}")
        elif token in SYMBOLS:
            expect(tokens, "{", "}")
            text += SYMBOLS[token]
        elif token == "$":
            expect(tokens, r"\pm", "$")
            text += "±"
        elif token == "{":
            text += tokens.popleft()
            assert text[-1] in "[*"
            expect(tokens, "}")
        elif token[0] == "\\":
            assert len(token) == 2 and token != r"\\", token
            text += token[1]
        else:
            assert token not in "&%$#_{}~^<>|[*±" and ord(token) not in (*range(10), *range(11, 32), *range(127, 160))
            text += token
    return re.sub("[ \n]+", " ", text).strip(" ")


def read_tabular(source: str) -> tuple[str, list[list[str]]]:
    """(column specification, rows with the heading first) of a tabular of booktabs, the only package that it needs.

    Fails for what is not one environment with a cell for each column in every row, and rules where booktabs has them.
    """
    comments, body = re.fullmatch(r"((?:%[^\n]*\n)+)(.*)", source, re.DOTALL).groups()  # type: ignore[union-attr]
    assert re.findall(r"\\usepackage\{(.*?)\}", comments) == ["booktabs"]
    tokens, rows, rules = tokens_of(body), list[list[str]](), list[tuple[int, str]]()
    expect(tokens, r"\begin", *"{tabular}{")
    columns = read_text(tokens, "}")
    expect(tokens, "}", "\n")
    while tokens[0] != r"\end":
        if tokens[0] in RULES:
            rules.append((len(rows), tokens.popleft()))
        else:
            rows.append([read_text(tokens, "&", r"\\")])
            while tokens.popleft() == "&":
                rows[-1].append(read_text(tokens, "&", r"\\"))
        expect(tokens, "\n")
    expect(tokens, r"\end", *"{tabular}\n")
    assert not tokens and re.fullmatch("[lr]+", columns) and {len(row) for row in rows} == {len(columns)}
    assert rules[:2] == [(0, r"\toprule"), (1, r"\midrule")] and rules[-1] == (len(rows), r"\bottomrule")
    assert {rule for _, rule in rules[2:-1]} <= {r"\midrule"}
    assert all(first < second for (first, _), (second, _) in pairwise(rules))
    return columns, rows


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (r"\end{tabular}", ""),
        (r"\begin{tabular}{", r"\begin{tabular}{l"),
        (r"\midrule", r"\hline"),
        (r"\toprule", r"\midrule"),
        ("\\bottomrule\n", ""),
        ("\\midrule\n", "\\midrule\n\\midrule\n"),
        (r"\usepackage{booktabs}", r"\usepackage{booktabs} \usepackage{siunitx}"),
        ("0.1 &", "0.1"),
        ("0.1 &", "[0.1] &"),
        *(("0.1 &", f"0.1{letter} &") for letter in (*"$%#_^~{}<[*±\\", "\\emph{a}")),
    ],
)
def test_the_reader_of_latex_refuses_what_latex_would(right: str, wrong: str) -> None:
    source = latex(make_table(SweepPlan(tasks=(LM,)), [result()]))
    assert read_tabular(source)[1][1][0] == "0.1" and right in source
    with pytest.raises((AssertionError, IndexError)):
        read_tabular(source.replace(right, wrong, 1))


SPECIAL = r"50% of $x_1$ & {#2} ~ ^ \ <|> [a] *"


def test_latex_is_the_same_table_as_markdown(tmp_path: Path) -> None:
    plan = SweepPlan(tasks=(LM, PAIRS))
    bleu = [result("pairs", lr, seed, best=20.0, metric="bleu") for lr in ("0.1", SPECIAL) for seed in (1, 2)]
    results = [
        *seeds("0.1", 1.0, 1.1),
        *seeds("0.2", 2.0, 2.1),
        *bleu,
        result("pairs", "[pre,true]", status="diverged"),
    ]
    table = make_table(plan, results)
    columns, [headings, *rows] = read_tabular(latex(table))
    shown = [table.cells(row, mark=lambda text: f"**{text}**") for row in table.rows]
    assert headings == table.headings and rows == shown
    assert columns == "lll" + "r" * len(table.columns) and {len(row) for row in rows} == {len(columns)}
    assert "**1.0500 ± 0.0707**" in rows[0] and [row[1] for row in rows][3:] == [SPECIAL, "[pre,true]"]
    assert latex(table).count(r"\midrule") == 2  # one for each task
    write_tables(plan, table, results, tmp_path)
    assert (tmp_path / "table.tex").read_text() == latex(table)


TRAPS = (*"\\&%$#_{}~^*<>|± \n\r\t\x00\x7fa", "\\\\", "\\end{tabular}", "\\textbf{", "\\input{x}", "[1ex]", "^^M")
HOSTILE = st.one_of(st.text(st.characters(codec="utf-8")), st.lists(st.sampled_from(TRAPS)).map("".join))


@given(names=st.lists(HOSTILE, min_size=6, max_size=6), tasks=st.lists(st.integers(0, 1), min_size=2, max_size=4))
def test_every_name_of_a_variant_is_a_cell_of_latex(names: list[str], tasks: list[int]) -> None:
    """Names of tasks, axes, values, evaluations and failures are printed as they are, control characters as spaces."""
    axis, value, title, failure, *of_task = names
    column = Column("valid.loss", title, show_metric, judged=True)
    metrics = {"valid.loss": "loss"}
    rows = [
        SweepRow(of_task[task], {axis: value}, 2, {failure: 1}, {"valid.loss": Stat(number, 0.1, 2)}, metrics)
        for number, task in enumerate(sorted(tasks))
    ]
    table = SweepTable("sweep", (axis,), (column,), tuple(rows))

    def printed(cells: list[str]) -> list[str]:
        return [re.sub(r"[\x00-\x20\x7f-\x9f]+", " ", cell).strip(" ") for cell in cells]

    _, [headings, *found] = read_tabular(latex(table))
    assert headings == printed(table.headings)
    assert found == [printed(table.cells(row, mark=lambda text: f"**{text}**")) for row in rows]


def test_curves_are_means_over_seeds_and_of_tasks_apart(tmp_path: Path) -> None:
    results = [result(seed=1), result(seed=2, best=4.0)]
    names = [path.name for path in draw(SweepPlan(tasks=(LM,)), results, tmp_path)]
    assert names == ["curves.svg", "curves.png"] and (tmp_path / "curves.svg").read_text().startswith("<?xml")
    both = [*results, result("pairs", metric="bleu")]
    names = [path.name for path in draw(SweepPlan(tasks=(LM, PAIRS)), both, tmp_path)]
    assert names == ["curves-lm.svg", "curves-lm.png", "curves-pairs.svg", "curves-pairs.png"]
    assert draw(SweepPlan(tasks=(LM,)), [result(curve=[], status="refused")], tmp_path) == []


def test_an_axis_over_the_size_of_the_data_is_a_learning_curve(tmp_path: Path) -> None:
    task = SweepTask(name="lm", vary={"data.fraction": (0.1, 1), "optimizer.lr": (1, 2)}, evaluate={"test": ("--x",)})
    results = [
        result(lr=lr, seed=seed, best=best + int(lr), metric="accuracy",
               evaluate={"test": {"metric": "loss", "value": best}})
        for lr in ("1", "2")
        for fraction, bests in (("0.1", (1.0, 3.0)), ("1", (0.5, 0.5)))
        for seed, best in enumerate(bests)
    ]  # fmt: skip
    for one, fraction in zip(results, ["0.1", "0.1", "1", "1"] * 2, strict=True):
        one.choices["fraction"] = fraction
    results.append(result(best=None, status="diverged", curve=[]))
    names = [path.name for path in draw(SweepPlan(tasks=(task,)), results, tmp_path)]
    assert names[2:] == [f"learning-curve.{suffix}" for suffix in ("html", "svg", "png", "csv")]
    rows = list(csv.DictReader((tmp_path / "learning-curve.csv").open()))
    assert [row["plot"] for row in rows] == ["validation: accuracy"] * 4 + ["test: loss"] * 4
    assert [(row["line"], row["x"], row["y"]) for row in rows[:4]] == [
        ("lr 1", "0.1", "3.0"), ("lr 1", "1.0", "1.5"), ("lr 2", "0.1", "4.0"), ("lr 2", "1.0", "2.5")
    ]  # fmt: skip
    assert [float(row["spread"]) for row in rows[4:6]] == [pytest.approx(math.sqrt(2)), 0.0]
    assert "Mean of 2 seeds" in (tmp_path / "learning-curve.svg").read_text()


def test_evaluations_by_position_are_curves_with_error_bars(tmp_path: Path) -> None:
    def far(*losses: float) -> dict[str, Any]:
        rows = [{"from": 8 * n, "to": 8 * n + 7, "tokens": 5, "loss": loss} for n, loss in enumerate(losses)]
        return {"far / away": {"metric": "loss", "value": 1.0, "by": {"axis": "position", "rows": rows}}}

    task = SweepTask(
        name="lm", vary={"optimizer.lr": (0.1, 0.2)}, evaluate={"far / away": ("--by", "position"), "near": ()}
    )
    results = [result(seed=1, evaluate=far(2.0, 1.0)), result(seed=2, evaluate=far(4.0, 1.0))]
    results.append(result(lr="0.2", evaluate=far(3.0, 3.0) | {"near": {"metric": "loss", "value": 1.0}}))
    names = [path.name for path in draw(SweepPlan(tasks=(task,)), results, tmp_path)]
    assert names[2:] == [f"far-away-by-position.{suffix}" for suffix in ("html", "svg", "png", "csv")]
    rows = list(csv.reader((tmp_path / "far-away-by-position.csv").open()))
    assert rows[0] == ["plot", "line", "x", "y", "spread"]
    assert rows[1] == ["far / away: loss by position", "lr 0.1", "3.5", "3.0", str(math.sqrt(2))]
    assert rows[2][2:] == ["11.5", "1.0", "0.0"] and rows[3][1:] == ["lr 0.2", "3.5", "3.0"]


def test_a_run_is_read_at_its_best_validation(tmp_path: Path) -> None:
    records = [
        {"split": "train", "step": 1, "loss": 9.0, "tokens": 50, "seconds": 1.0},
        {"split": "valid", "step": 2, "loss": 3.0, "bleu": 5.0, "is_best": True},
        {"split": "valid", "step": 4, "loss": 2.0, "bleu": 7.0, "is_best": True},
        {"split": "train", "step": 6, "loss": 8.0, "tokens": 300, "seconds": 4.0},
        {"split": "valid", "step": 6, "loss": 1.0, "bleu": 6.0, "is_best": False},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = Result("c", "t", {}, 1, metric="bleu")
    read_run(found, tmp_path)
    assert (found.best, found.best_step, found.validation) == (7.0, 4, {"loss": 2.0, "bleu": 7.0})
    assert (found.steps, found.tokens, found.seconds, found.tokens_per_second) == (6, 300, 4.0, 75.0)
    assert found.curve == [[2, 5.0], [4, 7.0], [6, 6.0]] and found.training_curve == [[1, 9.0], [6, 8.0]]
