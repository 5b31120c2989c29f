"""Folders of Hugging Face as a person uses them: imported, named wherever a run can be, and every bad one refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.end_to_end.import_data import LABELS, write_data
from tests.end_to_end.translate_runs import documents, refusal
from tests.interop import tiny_folders as tiny
from tests.quick import first_is_quick
from tformer.interop import weight_files

Cli = Callable[..., Any]


# --- tformer import ---------------------------------------------------------------------------------------------------


def test_import_says_what_it_mapped_and_gives_the_path(cli: Cli, folders: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "classifier"
    outcome = cli("import", folders / "classifier", "--out", out)
    assert outcome.code == 0 and outcome.out == f"{out}\n"
    told = " ".join(outcome.err.split())
    for words in ("BertForSequenceClassification (bert) as arch bert", "2 layers of 2 heads, width 16", "parameters",
                  "labels: zeta, alpha, mid", "mask [MASK]", "every tensor has its place"):  # fmt: skip
        assert words in told, told
    assert {path.name for path in out.iterdir()} == {
        "manifest.json", "model.safetensors", "recipe.yaml", "tokenizer.json", "trainer.json"
    }  # fmt: skip


def test_json_is_one_document(cli: Cli, folders: Path, tmp_path: Path) -> None:
    outcome = cli("import", folders / "gpt2", "--out", tmp_path / "out", "--dtype", "bf16", "--json")
    [document] = documents(outcome)
    assert (
        document["class"] == "GPT2LMHeadModel" and document["dtype"] == "bf16" and document["layers"] == {"decoder": 2}
    )
    assert document["parameters"] == sum(
        tensor.numel() for tensor in load_file(folders / "gpt2/model.safetensors").values()
    )


def test_a_repository_of_the_hub(cli: Cli, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *name, **options: str(folders / "gpt2"))
    outcome = cli("import", "hf:openai-community/gpt2@main", "--out", tmp_path / "out")
    assert outcome.code == 0, outcome.err
    assert cli("generate", tmp_path / "out", "--prompt", "the cat", "--greedy", "--max-new-tokens", 3).code == 0


def test_offline_and_without_the_hub(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = cli("import", "openai-community/gpt2", "--out", tmp_path / "out")
    assert "does not exist" in refusal(outcome) and "hf:openai-community/gpt2" in outcome.err
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    outcome = cli("import", "hf:openai-community/gpt2", "--out", tmp_path / "out")
    assert "not installed" in refusal(outcome) and "tformer[hub]" in outcome.err
    assert not (tmp_path / "out").exists()


def test_an_interrupt_leaves_nothing(cli: Cli, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = weight_files.each_tensor

    def interrupted(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return read(*arguments, **options)

    monkeypatch.setattr(weight_files, "each_tensor", interrupted)
    outcome = cli("import", folders / "gpt2", "--out", tmp_path / "out")
    assert outcome.code == 130 and outcome.out == "" and "interrupted" in outcome.err
    assert not list(tmp_path.iterdir())


# --- a folder wherever a run can be named -----------------------------------------------------------------------------


def test_gpt2_generates_as_the_reference_and_evaluates(cli: Cli, folders: Path, tmp_path: Path) -> None:
    folder = folders / "gpt2"
    outcome = cli("generate", folder, "--prompt", "the cat sat", "--greedy", "--max-new-tokens", 6, "--json")
    [document] = documents(outcome)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    ids = tokenizer("the cat sat", return_tensors="pt")
    with torch.no_grad():
        expected = model.generate(**ids, do_sample=False, max_new_tokens=6)[0, ids["input_ids"].shape[1] :].tolist()
    assert document["completions"][0]["ids"] == expected
    [figures] = documents(cli("evaluate", folder, "--data", write_data("text", tmp_path), "--json"))
    assert figures["run"] == str(folder) and figures["step"] == 0 and 4 < figures["loss"] < 12


def test_an_imported_model_has_no_data_of_its_own(cli: Cli, folders: Path) -> None:
    for name in ("gpt2", "bert", "classifier", "t5"):
        outcome = cli("evaluate", folders / name)
        assert "no training data" in refusal(outcome) and "--data" in outcome.err


def test_a_classifier_uses_its_own_names(cli: Cli, folders: Path, tmp_path: Path) -> None:
    folder = folders / "classifier"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    for texts in (("the cat sat",), ("the cat sat", "a dog ran")):
        with torch.no_grad():
            ids = tokenizer(*texts, return_tensors="pt")
            types = (ids["input_ids"] == 3).cumsum(1) - (ids["input_ids"] == 3).long()
            ids["token_type_ids"] = types.clamp(max=1) if len(texts) > 1 else torch.zeros_like(types)
            expected = model(**ids).logits.softmax(-1)[0]
        options = [word for pair in zip(("--text", "--text2"), texts, strict=False) for word in pair]
        [answer] = documents(cli("classify", folder, *options, "--json"))
        found = [answer["probabilities"][name] for name in LABELS.values()]
        assert found == pytest.approx(expected.tolist(), abs=1e-5) and max(found) > 0.36
        assert answer["label"] == LABELS[int(expected.argmax())]
    outcome = cli("evaluate", folder, "--data", write_data("labelled", tmp_path), "--json")
    [figures] = documents(outcome)
    assert 0 <= figures["accuracy"] <= 1 and 0.5 < figures["loss"] < 3


def test_lines_and_tables_of_texts_and_of_pairs(cli: Cli, folders: Path, tmp_path: Path) -> None:
    single, both = tmp_path / "single.tsv", tmp_path / "both.csv"
    single.write_text("text\nthe cat\na dog\n")
    both.write_text("premise,hypothesis\nthe cat,a dog\na dog,the cat\n")
    assert len(cli("classify", folders / "classifier", "--input", single).out.splitlines()) == 3
    columns = ("--text-column", "premise", "--text2-column", "hypothesis")
    assert len(cli("classify", folders / "classifier", "--input", both, *columns).out.splitlines()) == 3


@first_is_quick(
    ("task", "kind"),
    [("TokenClassification", "token_classifier"), ("QuestionAnswering", "span"), ("MultipleChoice", "multiple_choice")],
)
def test_heads_on_tokens_are_imported_inspected_and_exported_and_commands_that_lack_them_say_so(
    cli: Cli, tmp_path: Path, task: str, kind: str
) -> None:
    labels = {"id2label": tiny.LABELS} if kind == "token_classifier" else {}
    folder, run, again = tiny.bert(tmp_path / "folder", task, **labels), tmp_path / "run", tmp_path / "again"
    said = cli("import", folder, "--out", run).err
    assert f"BertFor{task} (bert)" in said and ("labels: bad, so-so, good" in said) == bool(labels)
    report = json.loads(cli("inspect", run, "--json").out)
    reference = getattr(transformers, f"BertFor{task}").from_pretrained(folder).eval()
    assert report["parameters"] == reference.num_parameters()
    assert f"head {kind}" in cli("inspect", run, "--shapes").out
    [document] = documents(cli("export", run, "--out", again, "--json"))
    assert document["class"] == f"BertFor{task}" and f"AutoModelFor{task}" in document["load"]
    before, after = (load_file(path / "model.safetensors") for path in (folder, again))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    if labels:
        config = json.loads((again / "config.json").read_text())
        assert config["id2label"] == {str(number): name for number, name in tiny.LABELS.items()}
    pair = ("--text2", "a dog") if kind == "span" else ()
    outcome = cli("classify", run, "--text", "the cat", *pair)
    is_trained = kind != "multiple_choice"
    if is_trained:
        assert outcome.code == 0 and outcome.out.count("\n") == 1, outcome.err
    else:
        assert outcome.code == 2 and f"has no head this command can use: found {kind}" in refusal(outcome)
        assert "no command reads it yet; from Python: tformer.load(RUN)" in " ".join(outcome.err.split())
    labelled = write_data("labelled", tmp_path)
    training = ("train", "--init-from", run, "--data", labelled, "--max-steps", 2, "--out", tmp_path / "tuned")
    outcome = cli(*training)
    found = "labelled.tsv: " if is_trained else f"found {kind}, which no objective trains"  # no data for these heads
    assert outcome.code == 2 and found in " ".join(outcome.err.split())
    outcome = cli(*training, "--objective", "classification")
    assert outcome.code == 0 and "new head: classifier (the checkpoint has none)" in " ".join(outcome.err.split())


def files_under(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.parametrize("name", ["gpt2", "classifier", "t5"])
def test_a_dry_run_says_what_an_import_would_do_and_writes_nothing(
    cli: Cli, folders: Path, tmp_path: Path, name: str
) -> None:
    before = files_under(folders), files_under(tmp_path)
    planned = cli("import", folders / name, "--dtype", "bf16", "--dry-run")
    assert planned.code == 0 and "nothing was written" in planned.out
    for words in ("parameters from", "would be written as bf16", "MiB of memory for tensors", "tokenizer: ", "special"):
        assert words in planned.out
    [document] = documents(cli("import", folders / name, "--dtype", "bf16", "--dry-run", "--json"))
    assert (files_under(folders), files_under(tmp_path)) == before and document["path"] is None
    [done] = documents(cli("import", folders / name, "--dtype", "bf16", "--out", tmp_path / "out", "--json"))
    assert document == done | {"path": None}
    size = sum(tensor.nbytes for tensor in load_file(tmp_path / "out" / "model.safetensors").values())
    assert document["bytes"] == size < document["memory"]


def test_a_dry_run_refuses_what_the_import_refuses(cli: Cli, folders: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    outcome = cli("import", folders / "gpt2", "--out", tmp_path / "there", "--dry-run")
    assert outcome.code == 2 and "exists already" in refusal(outcome)
    shutil.copytree(folders / "gpt2", tmp_path / "odd")
    tiny.edit_json(tmp_path / "odd" / "config.json", {"mystery_gate": 0.5})
    outcome = cli("import", tmp_path / "odd", "--dry-run")
    assert outcome.code == 2 and "mystery_gate" in refusal(outcome)


def test_a_body_is_imported_inspected_and_trained_and_commands_that_need_a_head_say_so(
    cli: Cli, folders: Path, tmp_path: Path
) -> None:
    body = tmp_path / "body"
    shutil.copytree(folders / "bert", body)
    transformers.BertForMaskedLM.from_pretrained(body).bert.save_pretrained(body)
    tiny.edit_json(body / "config.json", {"architectures": ["BertModel"]})
    assert "BertModel (bert) as arch bert" in cli("import", body, "--out", tmp_path / "out").err
    assert cli("inspect", body, "--shapes").code == 0
    text = write_data("text", tmp_path)
    for command in (("generate", body, "--prompt", "x"), ("classify", body, "--text", "x"),
                    ("evaluate", body, "--data", text)):  # fmt: skip
        outcome = cli(*command)
        assert outcome.code == 2 and "has no head this command can use: found none" in refusal(outcome)
        assert "hint: it is a body: tformer train --init-from gives it a head" in outcome.err
    labelled = write_data("labelled", tmp_path)
    training = ("train", "--init-from", body, "--data", labelled, "--max-steps", 2, "--out", tmp_path / "run")
    assert "--objective" in cli(*training).err
    assert "new head: classifier" in cli(*training, "--objective", "classification").err


def test_a_masked_model_fills_masks_and_evaluates(cli: Cli, folders: Path, tmp_path: Path) -> None:
    folder = folders / "bert"
    outcome = cli("generate", folder, "--prompt", "the [MASK] sat on", "--top-k", 3, "--json")
    [document] = documents(outcome)
    [mask] = document["masks"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("the [MASK] sat on", return_tensors="pt")
    with torch.no_grad():
        logits = transformers.BertForMaskedLM.from_pretrained(folder).eval()(input_ids=ids["input_ids"]).logits
    best = logits[0, 2].softmax(-1)[len(tiny.BERT_SPECIAL) :].topk(3)  # special tokens are never offered
    assert [candidate["id"] for candidate in mask] == (best.indices + len(tiny.BERT_SPECIAL)).tolist()
    assert [candidate["probability"] for candidate in mask] == pytest.approx(best.values.tolist(), abs=1e-4)
    [figures] = documents(cli("evaluate", folder, "--data", write_data("text", tmp_path), "--json"))
    assert 2 < figures["loss"] < 8


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_translators_translate_and_evaluate(name: str, cli: Cli, folders: Path, tmp_path: Path) -> None:
    folder = folders / name
    outcome = cli("generate", folder, "--prompt", "the cat sat", "--beam-size", 1, "--max-new-tokens", 5, "--json")
    [document] = documents(outcome)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    ids = tokenizer("the cat sat", return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        written = model.generate(**ids, do_sample=False, num_beams=1, max_new_tokens=5)[0]
    assert document["text"].split() == tokenizer.decode(written, skip_special_tokens=True).split()
    [figures] = documents(cli("evaluate", folder, "--data", write_data("pairs", tmp_path), "--no-decode", "--json"))
    assert 3 < figures["loss"] < 6


def test_an_ensemble_of_a_folder_and_its_import(cli: Cli, folders: Path, tmp_path: Path) -> None:
    assert cli("import", folders / "t5", "--out", tmp_path / "t5").code == 0
    options = ("--prompt", "the cat", "--max-new-tokens", 4)
    alone = cli("generate", folders / "t5", *options)
    both = cli("generate", "--ensemble", folders / "t5", tmp_path / "t5", *options)
    assert both.code == 0 and both.out == alone.out


def test_a_discriminator_without_its_generator(cli: Cli, tmp_path: Path, folders: Path) -> None:
    vocabulary = json.loads((folders / "bert" / "config.json").read_text())["vocab_size"]
    config = transformers.ElectraConfig(
        vocab_size=vocabulary, embedding_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=32,
    )  # fmt: skip
    folder = tmp_path / "electra"
    transformers.ElectraForPreTraining(config).save_pretrained(folder)
    for path in (folders / "bert").glob("tokenizer*"):
        shutil.copy(path, folder)
    assert "without its generator" in refusal(cli("evaluate", folder, "--data", write_data("text", tmp_path)))


def test_average_points_to_import(cli: Cli, folders: Path, tmp_path: Path) -> None:
    outcome = cli("average", folders / "gpt2", folders / "gpt2", "--out", tmp_path / "out")
    assert "Hugging Face folder" in refusal(outcome) and "tformer import" in outcome.err
