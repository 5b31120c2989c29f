"""Fine-tuning from folders of Hugging Face: it lowers the loss, and resumes as if it had not been interrupted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tformer
from tests.end_to_end.import_data import LABELS, write_data
from tests.interop import tiny_folders as tiny
from tests.quick import first_is_quick
from tests.training.pair_makers import metrics, records, weights_of
from tests.training.stopping import train
from tformer.training.options import TrainOptions

Cli = Callable[..., Any]
QUICK = ("--batch-size", 8, "--lr", 0.01, "--precision", "fp32", "--device", "cpu")


@first_is_quick(("name", "data", "more"), [
    ("gpt2", "text", ()), ("bert", "text", ()), ("bert", "labelled", ("--objective", "classification")),
    ("classifier", "labelled", ()), ("t5", "pairs", ()), ("bart", "pairs", ()),
    ("gpt2", "text", ("--preset", "gpt/tiny")), ("bert", "labelled", ("--preset", "bert/finetune")),
], quick=2)  # fmt: skip
def test_fine_tuning_lowers_the_loss(name: str, data: str, more: Any, cli: Cli, folders: Path, tmp_path: Path) -> None:
    file, run = write_data(data, tmp_path), tmp_path / "run"
    sets = ["training.eval_every=8", "training.sample_every=0"]
    sets += ["training.valid_beam_size=0"] if data == "pairs" else []
    options = [word for text in sets for word in ("--set", text)]
    options += ["--valid", str(file)] if data == "labelled" else []
    words = ("--data", file, "--out", run, *QUICK, "--max-steps", 24, *options, *more)
    outcome = cli("train", "--init-from", folders / name, *words)
    assert outcome.code == 0, outcome.err
    found = [record["loss"] for record in metrics(run)]
    assert len(found) >= 2 and found[-1] < found[0] - 0.01, found
    if name == "classifier":
        assert "kept head: classifier" in outcome.err and "labels (3): zeta, alpha, mid" in outcome.err
    alone = cli("evaluate", run, "--data", file, *(["--no-decode"] if data == "pairs" else []))
    assert alone.code == 0, alone.err  # the run needs the folder no more


# --- labels and heads -------------------------------------------------------------------------------------------------


def with_labels(path: Path, names: dict[str, str]) -> Path:
    """The labelled data with other labels."""
    header, *lines = path.read_text().splitlines()
    cells = [line.split("\t") for line in lines]
    path.write_text("\n".join([header, *(f"{names.get(label, label)}\t{text}" for label, text in cells)]) + "\n")
    return path


@pytest.fixture
def tune(cli: Cli, folders: Path, tmp_path: Path) -> Callable[..., Any]:
    """`tune(folder, names, *options)`: one step on the labelled data with its labels renamed; (run, what was said)."""

    def run(folder: str, names: dict[str, str], *options: object) -> tuple[Path, str]:
        data, out = with_labels(write_data("labelled", tmp_path), names), tmp_path / "tuned"
        words = ("--init-from", folders / folder, "--data", data, "--out", out, "--max-steps", 1, *QUICK, *options)
        outcome = cli("train", *words)
        assert outcome.code == 0, outcome.err
        return out, " ".join(outcome.err.split())

    return run


def test_numbers_are_the_names_of_the_model_and_its_head_is_kept(tune: Any, cli: Cli, folders: Path) -> None:
    run, said = tune("classifier", {name: str(number) for number, name in LABELS.items()})
    assert "kept head: classifier" in said and "labels (3): zeta, alpha, mid" in said
    assert "0 as zeta" in said and "1 as alpha" in said
    assert tformer.load(run).recipe.data.labels == ("zeta", "alpha", "mid")
    for path in (run, folders / "classifier"):
        outcome = cli("evaluate", path, "--data", run.parent / "labelled.tsv")
        assert outcome.code == 0 and "0 as zeta" in outcome.err, outcome.err


def test_names_in_other_case_and_a_part_of_the_names_keep_the_head(tune: Any) -> None:
    run, said = tune("classifier", {"zeta": "Zeta", "alpha": "MID", "mid": "MID"})
    assert "kept head: classifier" in said and tformer.load(run).recipe.data.labels == ("zeta", "alpha", "mid")


def test_names_on_the_command_line_are_those_of_numbered_labels(tune: Any, folders: Path, tmp_path: Path) -> None:
    folder = tmp_path / "numbered"
    shutil.copytree(folders / "classifier", folder)
    tiny.edit_json(folder / "config.json", {"id2label": {str(n): f"LABEL_{n}" for n in LABELS}})
    numbers = {name: str(number) for number, name in LABELS.items()}
    run, said = tune(folder, numbers, "--labels", "zeta, alpha, mid")
    assert "kept head: classifier" in said and tformer.load(run).recipe.data.labels == ("zeta", "alpha", "mid")


@pytest.mark.parametrize(("names", "options", "reason"), [
    ({"mid": "new"}, (), "(its labels were zeta, alpha, mid, those of the data are alpha, new, zeta; --labels"),
    ({"mid": "alpha", "zeta": "0", "alpha": "1"}, (), "those of the data are 0, 1, alpha"),
    ({}, ("--pooling", "mean"), "(its pooling was cls, the recipe's is mean)"),
    ({}, ("--objective", "multi_label"), "(its multi_label was False, the recipe's is True)"),
])  # fmt: skip
def test_a_head_is_thrown_away_with_the_reason(names: Any, options: Any, reason: str, tune: Any) -> None:
    _, said = tune("classifier", names, *options)
    assert f"new head: classifier {reason if reason.startswith('(') else ''}".rstrip() in said and reason in said


def test_a_body_has_no_head_to_keep(tune: Any) -> None:
    _, said = tune("bert", {}, "--objective", "classification")
    assert "new head: classifier (the checkpoint has none)" in said


@first_is_quick(("name", "data", "kind"), [
    ("gpt2", "text", None), ("bert", "labelled", "classification"), ("t5", "pairs", None),
])  # fmt: skip
def test_fine_tuning_resumes_exactly(name: str, data: str, kind: str | None, folders: Path, tmp_path: Path) -> None:
    file = write_data(data, tmp_path)
    values = {
        "max_steps": 6, "eval_every": 3, "save_every": 2, "log_every": 1, "batch_size": 4, "sample_every": 0,
        "precision": "fp32", "device": "cpu", "threads": 1, **({"valid_beam_size": 0} if data == "pairs" else {}),
    }  # fmt: skip
    sets = tuple(f"training.{key}={value}" for key, value in values.items())
    start = TrainOptions(init_from=folders / name, data=(str(file),), objective=kind, sets=sets, out=tmp_path / "whole")
    assert train(start).ended
    expected = weights_of(tmp_path / "whole"), records(tmp_path / "whole")
    for stop_at in (4, 10):
        out = tmp_path / f"stopped-{stop_at}"
        assert not train(replace(start, out=out), stop_at=stop_at).ended
        assert weights_of(out) != expected[0]  # it stopped before its end
        assert train(TrainOptions(out=out, resume=True)).ended
        assert (weights_of(out), records(out)) == expected


# --- the rate by the body's width -------------------------------------------------------------------------------------


@first_is_quick(("words", "said"), [
    ((), "a body of width 16: AdamW, peak rate 0.001 (by its width; --lr changes it)"),
    (("--lora", 4), "adapters of a body of width 16: AdamW, peak rate 0.003 (by its width; --lr changes it)"),
    (("--lr", 0.01), None), (("--preset", "bert/finetune"), None), (("--set", "optimizer.lr=0.01"), None),
], quick=2)  # fmt: skip
def test_one_line_says_the_rate_of_an_imported_body(
    words: Any, said: str | None, cli: Cli, folders: Path, tmp_path: Path
) -> None:
    data, run = write_data("labelled", tmp_path), tmp_path / "run"
    start = ("--init-from", folders / "bert", "--objective", "classification", "--data", data, "--out", run)
    outcome = cli("train", *start, "--max-steps", 1, *words)
    assert outcome.code == 0, outcome.err
    found = " ".join(outcome.err.split())
    assert ("by its width" in found) == (said is not None) and (said or "") in found
    stored = tformer.load(run).recipe.optimizer
    assert cli("train", "--resume", "--out", run, "--max-steps", 2).code == 0
    assert tformer.load(run).recipe.optimizer == stored  # a resumed run chooses nothing


@first_is_quick(("objective", "follows"), [("classification", True), ("masked_lm", False)])
def test_a_wide_body_of_our_own_follows_its_width_for_another_objective(
    objective: str, follows: bool, cli: Cli, tmp_path: Path, text_file: Path
) -> None:
    """With the objective that it was trained for it goes on with its own recipe."""
    sizes = ("model.d_model=260", "model.encoder.num_layers=1", "model.encoder.num_heads=2", "data.seq_len=24")
    words: list[object] = [word for each in sizes for word in ("--set", each)]
    words += ["--arch", "bert", "--preset", "pretrain", "--data", text_file, "--out", tmp_path / "a"]
    body = cli("train", *words, "--max-steps", 1)
    assert body.code == 0, body.err
    data = write_data("labelled", tmp_path) if follows else text_file
    words = ["--init-from", tmp_path / "a", "--objective", objective, "--data", data, "--out", tmp_path / "b"]
    outcome = cli("train", *words, "--max-steps", 1)
    assert outcome.code == 0, outcome.err
    found = " ".join(outcome.err.split())
    assert ("a body of width 260: AdamW, peak rate 0.00025" in found) == follows
    one, two = (tformer.load(tmp_path / run).recipe.optimizer for run in "ab")
    assert (one != two) == follows
