"""`tformer train --lora`: every family, the checkpoint, the commands that read it, resume, processes, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import tformer
from tests.end_to_end.import_data import write_data
from tests.quick import first_is_quick
from tests.training.pair_makers import metrics, weights_of
from tformer.checkpoint.resolve import resolve_checkpoint
from tformer.kernels.functions import find

Cli = Callable[..., Any]
SETS = ("--set", "training.log_every=4", "--set", "training.valid_beam_size=0", "--set", "training.sample_every=0")
UNDROPPED = tuple(word for key in ("decoder.dropout", "decoder.attention_dropout", "embedding.dropout")
                  for word in ("--set", f"model.{key}=0"))  # fmt: skip


@pytest.fixture(scope="module")
def trained_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The place of the base that the first test has trained."""
    return tmp_path_factory.mktemp("trained") / "base"


@pytest.fixture
def base(
    cli: Cli, tmp_path: Path, text_file: Path, tiny_recipe: Path, trained_base: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """A trained run, to be adapted, in a new current folder."""
    monkeypatch.chdir(tmp_path)
    if not trained_base.exists():
        assert cli("train", "--config", tiny_recipe, "--data", text_file, "--out", trained_base).code == 0
    shutil.copytree(trained_base, "base")
    return "base"


@pytest.fixture
def adapt(base: str, cli: Cli, text_file: Path) -> Callable[..., Any]:
    """`adapt("--out", "run", ...)`: the outcome of a short training of adapters on the base."""

    def run(*words: object) -> Any:
        lora = (
            ()
            if "--resume" in words
            else ("--init-from", base, "--lora", 4, "--data", text_file, "--lr", 0.05, "--precision", "fp32")
        )
        return cli("train", *lora, *words)

    return run


def stored(run: object, file: str = "model") -> dict[str, torch.Tensor]:
    return load_file(resolve_checkpoint(str(run), "latest") / f"{file}.safetensors")


def test_adapters_alone_are_trained_and_saved(adapt: Cli, base: str) -> None:
    before = weights_of(Path(base))
    outcome = adapt("--out", "run")
    assert outcome.code == 0, outcome.err
    assert "LoRA of rank 4 on 8 matrices" in outcome.err
    found = stored("run")
    assert found and all(".adapter." in name for name in found)
    assert {name.rpartition(".")[0] for name in stored("run", "optimizer")} == set(found)
    assert weights_of(Path(base)) == before
    losses = [record["loss"] for record in metrics(Path("run"))]
    assert losses[-1] < losses[0]


def test_all_commands_take_the_run_and_a_merged_one_is_equal(
    adapt: Cli, cli: Cli, figures: Cli, text_file: Path, tmp_path: Path
) -> None:
    adapt("--out", "run")
    outcome = cli("merge", "run", "--out", "merged", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["step"] == 12
    merged, direct = tformer.load("merged"), tformer.load("run")
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(merged.model(input_ids=ids).logits, direct.model(input_ids=ids).logits)
    assert merged.recipe.lora is None
    one, two = (figures(run, "--data", text_file) for run in ("run", "merged"))
    assert one["loss"] == two["loss"]
    for words in (("generate", "run", "--prompt", "the cat", "--greedy"), ("inspect", "run"),
                  ("viz-attention", "run", "--text", "the cat", "-o", "a.html"), ("lens", "run", "--text", "the cat"),
                  ("export", "run", "--out", "hf"), ("evaluate", "run", "--data", text_file, "--quantize", "none"),
                  ("train", "--init-from", "run", "--data", text_file, "--max-steps", 2, "--out", "full")):  # fmt: skip
        outcome = cli(*words)
        assert outcome.code == 0, (words, outcome.err)


def test_adapters_that_were_trained_apart_have_no_mean_before_they_are_merged(adapt: Cli, cli: Cli) -> None:
    for number in (1, 2):
        assert adapt("--out", f"run{number}", "--seed", number, "--max-steps", 2).code == 0
    outcome = cli("average", "run1", "run2", "--out", "mean")
    assert outcome.code == 2 and "merge each first" in outcome.err and not Path("mean").exists()
    for number in (1, 2):
        assert cli("merge", f"run{number}", "--out", f"merged{number}").code == 0
    assert cli("average", "merged1", "merged2", "--out", "mean").code == 0


@pytest.mark.slow
def test_reports_and_pictures_take_the_run(adapt: Cli, cli: Cli, text_file: Path) -> None:
    adapt("--out", "run")
    for words in (
        ("generate", "run", "--ensemble", "base", "--prompt", "the"), ("embed", "run", "--text", "a"),
        ("average", "--last", 2, "run", "--out", "mean"), ("evaluate", "mean", "--data", text_file),
        ("viz-tokens", "run", "--text", "the cat"), ("viz-embeddings", "run"), ("heads", "run"),
        ("patch", "run", "--ablate", "zero", "--data", text_file), ("tokenize", "run", "--text", "the cat"),
        ("runs", "show", "run"), ("runs", "compare", "run", "base"), ("plot", "run", "-o", "plot.svg"),
    ):  # fmt: skip
        outcome = cli(*words)
        assert outcome.code == 0, (words, outcome.err)


@first_is_quick("sets", [
    (), ("lora.dora=true", "lora.dropout=0.2"), ("lora.weights=int8", "lora.rslora=true"), ("lora.weights=bf16",),
    ("lora.weights=int4", "lora.dora=true"), ("training.ema_decay=0.9",),
    ("lora.train=[final_norm.*]", "lora.targets=[q,v]"),
])  # fmt: skip
def test_validation_agrees_with_evaluate_and_a_resumed_run_is_equal_to_the_bit(
    sets: tuple[str, ...], adapt: Cli, figures: Cli
) -> None:
    if "int4" in str(sets) and find() is None:
        pytest.skip("no C kernels")
    words = [word for each in (*sets, "data.valid_fraction=0.2") for word in ("--set", each)]
    assert adapt("--out", "whole", *words).code == 0
    assert adapt("--out", "parts", *words, "--stop-at-step", 5).code == 0
    assert adapt("--resume", "--out", "parts").code == 0
    for file in ("model", "optimizer", *(["ema"] if "ema" in str(sets) else [])):
        one, two = stored("whole", file), stored("parts", file)
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    valid, other = (metrics(Path(run))[-1] for run in ("whole", "parts"))
    assert (valid["step"], valid["loss"]) == (other["step"], other["loss"])
    assert figures("whole", "--checkpoint", "latest")["loss"] == pytest.approx(valid["loss"], abs=1e-5)


def test_bare_lora_has_rank_16_and_the_base_is_named_by_its_hash(adapt: Cli, cli: Cli, text_file: Path) -> None:
    outcome = cli("train", "--init-from", "base", "--lora", "--data", text_file, "--max-steps", 1, "--out", "run")
    assert outcome.code == 0, outcome.err
    lora = yaml.safe_load(Path("run/recipe.yaml").read_text())["lora"]
    manifest = json.loads((Path(lora["base"]["path"]) / "manifest.json").read_text())
    assert lora["rank"] == 16 and lora["base"]["sha256"] == manifest["files"]["model.safetensors"]["sha256"]


@pytest.mark.slow
def test_several_processes_train_the_adapters_of_one(adapt: Cli) -> None:
    words = ("--set", "lora.weights=int8", "--set", "optimizer.eps=1e-4", *UNDROPPED, "--max-steps", 4)
    assert adapt("--out", "one", *words).code == 0
    outcome = adapt("--out", "two", *words, "--devices", 2)
    assert outcome.code == 0, outcome.err
    one, two = stored("one"), stored("two")
    assert one.keys() == two.keys()
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-4


# --- families and objectives ------------------------------------------------------------------------------------------


@first_is_quick(("name", "data", "more"), [
    ("gpt2", "text", ()), ("bert", "text", ()), ("bert", "labelled", ("--objective", "classification")),
    ("classifier", "labelled", ()), ("t5", "pairs", ("--lora-weights", "int8")), ("bart", "pairs", ()),
])  # fmt: skip
def test_adapters_of_imported_models_lower_the_loss(
    name: str, data: str, more: Any, cli: Cli, folders: Path, tmp_path: Path
) -> None:
    file, run = write_data(data, tmp_path), tmp_path / "run"
    words = ("--lora", 4, "--data", file, "--valid", file) if data != "pairs" else ("--lora", 4, "--data", file)
    words = (*words, "--out", run, "--batch-size", 8, "--lr", 0.01, "--precision", "fp32", "--device", "cpu")
    outcome = cli("train", "--init-from", folders / name, *words, *SETS, "--max-steps", 32, *more)
    assert outcome.code == 0, outcome.err
    found = [record["loss"] for record in metrics(run, "train")]
    assert min(found) < found[0], found
    alone = cli("evaluate", run, "--data", file, *(["--no-decode"] if data == "pairs" else []))
    assert alone.code == 0, alone.err
    assert cli("merge", run, "--out", tmp_path / "merged").code == 0
    if "int8" in more:
        outcome = cli("export", run, "--to", "peft", "--out", tmp_path / "adapter")
        assert outcome.code == 0 and "they were trained beside a base in int8" in outcome.err


@first_is_quick("kind", ["single", "score", "multi", "image", "masked", "sentences"])
def test_new_heads_are_trained_in_full_beside_the_adapters(
    kind: str, encoder_run: Callable[[str], Path], cli: Cli, tmp_path: Path
) -> None:
    run = encoder_run(kind)
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    data = recipe["data"]["train"][0]["path"]
    objective = ",".join(each["kind"] for each in recipe["objectives"])
    words = ("--data", data, "--objective", objective, "--max-steps", 8, "--out", tmp_path / "run")
    outcome = cli("train", "--init-from", run, "--lora", 2, *words)
    assert outcome.code == 0, outcome.err
    run, labelled = (
        tmp_path / "run",
        (("classify", "--text", "a cat"), ("attribute", "--text", "a cat", "-o", tmp_path / "a.html")),
    )
    pruned = ("prune", "--drop-heads", 0.5, "--data", data, "--out", tmp_path / "pruned")
    more = (*labelled, pruned) if kind == "single" else ()
    for command, *rest in (("evaluate", "--data", data), *more):
        outcome = cli(command, run, *rest)
        assert outcome.code == 0, (command, outcome.err)


# --- wrong inputs -----------------------------------------------------------------------------------------------------

REFUSALS: dict[str, tuple[tuple[object, ...], str]] = {
    "rank 0": (("--lora", 0), "--lora: lora.rank: found 0, expected more than 0"),
    "negative alpha": (("--set", "lora.alpha=-1"), "lora.alpha: found -1"),
    "dropout of 1": (("--set", "lora.dropout=1"), "lora.dropout: found 1"),
    "unknown format": (("--lora-weights", "int3"), "--lora-weights: lora.weights: found the text 'int3', expected"),
    "unknown key": (("--set", "lora.ranks=3"), "lora.ranks"),
    "unknown target": (("--lora-targets", "query"), "lora.targets: found 'query', expected names or patterns of q, k"),
    "unknown parameter": (
        ("--set", "lora.train=[classifier]"),
        "lora.train: found 'classifier', expected names",
    ),
    "no rank": (("--lora-targets", ""), "lora.targets: found '', expected names or patterns of q, k"),
    "targets outside the stacks": (("--lora-targets", "heads.*"), "lora.targets: found 'heads.*', expected names or"),
    "rank above the matrices": (("--lora", 17), "--lora: lora.rank: found 17, expected at most 16"),
    "infinite alpha": (("--set", "lora.alpha=1e400"), "lora.alpha: found inf, expected a finite number"),
    "rounded, all trained": (
        ("--lora-weights", "int8", "--set", "lora.train=['*']"),
        "lora.train: no matrix is left for an adapter",
    ),
    "another size": (("--set", "model.d_model=32"), "its body does not fit this model"),
    "fsdp": (
        ("--parallel", "fsdp"),
        "--parallel: training.parallel.kind: found fsdp, expected ddp with adapters",
    ),
    "embeddings": (("--embeddings", "vectors.txt"), "--init-from and --embeddings exclude each other"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_settings_are_one_line(case: str, adapt: Cli) -> None:
    words, message = REFUSALS[case]
    outcome = adapt("--out", "run", *words)
    assert outcome.code == 2 and message in outcome.err, outcome.err
    assert not Path("run").exists() and "Traceback" not in outcome.err


def test_lora_without_a_model_is_refused(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = cli("train", "--lora", "4", "--out", "run")
    assert outcome.code == 2 and "--lora needs a model to adapt, found none" in outcome.err
    assert "--init-from" in outcome.err and not Path("run").exists()


def test_adapters_on_adapters_are_refused(adapt: Cli, cli: Cli, text_file: Path) -> None:
    adapt("--out", "run", "--max-steps", 1)
    outcome = cli("train", "--init-from", "run", "--lora", 2, "--data", text_file, "--out", "next")
    assert outcome.code == 2 and "holds adapters itself, expected a whole model" in outcome.err
    assert "tformer merge" in outcome.err


@first_is_quick(
    ("words", "key", "has", "sets"),
    [
        (("--lora", 8), "rank", "4", "8"),
        (("--set", "lora.dora=true"), "dora", "False", "True"),
        (("--set", "lora.dropout=0.1"), "dropout", "0.0", "0.1"),
        (("--set", "lora=null"), "rank", "4", "none"),
    ],
)
def test_a_run_is_not_resumed_with_other_adapters(
    words: tuple[object, ...], key: str, has: str, sets: str, adapt: Cli
) -> None:
    adapt("--out", "run", "--max-steps", 2)
    before = Path("run/recipe.yaml").read_text()
    outcome = adapt("--resume", "--out", "run", *words)
    assert outcome.code == 2 and f"lora.{key}: the run in run has {has}, this command sets {sets}" in outcome.err
    assert Path("run/recipe.yaml").read_text() == before


def test_a_missing_or_changed_base_is_said(adapt: Cli, cli: Cli, base: str) -> None:
    adapt("--out", "run", "--max-steps", 2)
    checkpoint = resolve_checkpoint(base)
    shutil.move(base, "elsewhere")
    for words in (("generate", "run", "--prompt", "a"), ("train", "--resume", "--out", "run", "--max-steps", 4)):
        outcome = cli(*words)
        assert (
            outcome.code == 2 and f"{checkpoint.absolute()}, the base of these adapters, does not exist" in outcome.err
        )
    outcome = cli("merge", "run", "--base", Path("elsewhere/checkpoints") / checkpoint.name, "--out", "merged")
    assert outcome.code == 0, outcome.err
    outcome = cli("merge", "run", "--base", "elsewhere", "--out", "of-the-run")  # the step is found by its hash
    assert outcome.code == 0, outcome.err
    shutil.rmtree(Path("elsewhere/checkpoints") / checkpoint.name)
    outcome = cli("merge", "run", "--base", "elsewhere", "--out", "other")
    assert outcome.code == 2 and "is not the base of these adapters: the sha256 of its weights" in outcome.err
    outcome = cli("merge", "run", "--base", "merged", "--out", "other")
    assert outcome.code == 2 and "merged is not the base of these adapters: the sha256 of its weights" in outcome.err
    assert not Path("other").exists()


def test_a_base_that_was_moved_together_with_the_adapters_is_found(adapt: Cli, cli: Cli, base: str) -> None:
    adapt("--out", "runs/run", "--max-steps", 2)
    Path("moved").mkdir()
    for folder in (base, "runs"):
        shutil.move(folder, f"moved/{folder}")
    outcome = cli("generate", "moved/runs/run", "--prompt", "a", "--max-new-tokens", 2)
    assert outcome.code == 0, outcome.err
    outcome = cli("train", "--resume", "--out", "moved/runs/run", "--max-steps", 3)
    assert outcome.code == 0, outcome.err


def test_without_a_name_the_newest_run_with_adapters_is_merged_and_exported(adapt: Cli, cli: Cli, base: str) -> None:
    adapt("--out", "runs/adapted", "--max-steps", 1)
    shutil.copytree(base, "runs/whole")
    for manifest in Path("runs/whole").rglob("manifest.json"):
        manifest.touch()
    outcome = cli("merge", "--out", "merged")
    assert outcome.code == 0 and "of runs/adapted/checkpoints/step-00000001 and" in outcome.err, outcome.err
    outcome = cli("export", "--to", "peft", "--out", "adapter")
    assert "has no adapters" not in outcome.err, outcome.err
    shutil.rmtree("runs/adapted")
    outcome = cli("merge", "--out", "other")
    assert outcome.code == 2 and "no run under runs/ suits this command (1 have a checkpoint)" in outcome.err


def test_merge_refuses_a_whole_model_and_a_folder_that_exists(adapt: Cli, cli: Cli, base: str) -> None:
    adapt("--out", "run", "--max-steps", 1)
    for words, message in (
        (("merge", base, "--out", "new"), "has no adapters: it is a whole model already"),
        (("merge", "run", "--out", base), "exists already"),
    ):
        outcome = cli(*words)
        assert outcome.code == 2 and message in outcome.err and not Path("new").exists()


def test_a_damaged_adapter_file_is_said(adapt: Cli, cli: Cli) -> None:
    adapt("--out", "run", "--max-steps", 1)
    file = resolve_checkpoint("run") / "model.safetensors"
    tensors = stored("run")
    tensors.pop(next(iter(tensors)))
    save_file(tensors, file)
    outcome = cli("generate", "run", "--prompt", "a")
    assert outcome.code == 2 and "model.safetensors is" in outcome.err
