"""`tformer export`, as a user runs it: what tformer trained opens in `transformers` and gives the same logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.end_to_end.labelled_examples import sentences
from tformer.loading import load

TOLERANCE = 2e-5  # of the largest logit, fp32


def exported(cli: Callable[..., Any], *arguments: object) -> dict[str, Any]:
    outcome = cli("export", *arguments, "--json")
    assert outcome.code == 0, outcome.err
    document: dict[str, Any] = json.loads(outcome.out)
    return document


def assert_equal_logits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= TOLERANCE * float(theirs.abs().max())


def test_a_gpt_of_gpt2s_shape(cli: Callable[..., Any], trained: Callable[[str], Path], tmp_path: Path) -> None:
    report = exported(cli, trained("gpt"), "--out", tmp_path / "hf")
    assert report["class"] == "GPT2LMHeadModel" and "AutoModelForCausalLM" in report["load"]
    run = load(trained("gpt"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    batch = tokenizer("the hammer cuts the wood", return_tensors="pt")
    assert batch.input_ids[0].tolist() == run.text_tokenizer.encode("the hammer cuts the wood", template=True)
    with torch.no_grad():
        assert_equal_logits(run.model(input_ids=batch.input_ids).logits, model(**batch).logits)


@pytest.mark.parametrize("kind", ["classifier", "pairs"])
def test_a_bert_classifier_and_its_labels(
    cli: Callable[..., Any], trained: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    report = exported(cli, trained(kind), "--out", tmp_path / "hf")
    assert report["class"] == "BertForSequenceClassification"
    run = load(trained(kind))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    labels = run.recipe.data.labels
    assert len(labels) >= 2 and model.config.id2label == dict(enumerate(labels))
    assert model.config.label2id == {label: number for number, label in enumerate(labels)}
    texts = [text for _, text in sentences(4, 1)]
    batch = tokenizer(texts, texts[::-1] if kind == "pairs" else None, padding=True, return_tensors="pt")
    with torch.no_grad():
        ours = run.model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, token_type_ids=batch.token_type_ids
        ).logits
        theirs = model(**batch).logits
    assert_equal_logits(ours, theirs)
    for text, second, row in zip(texts, texts[::-1], theirs, strict=True):
        more = ["--text2", second] if kind == "pairs" else []
        answer = json.loads(cli("classify", trained(kind), "--text", text, *more, "--json").out)
        assert answer["label"] == model.config.id2label[int(row.argmax())]


def test_the_original_transformer(cli: Callable[..., Any], trained: Callable[[str], Path], tmp_path: Path) -> None:
    report = exported(cli, trained("original"), "--out", tmp_path / "hf")
    assert report["class"] == "MarianMTModel" and "AutoModelForSeq2SeqLM" in report["load"]
    run = load(trained("original"))
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    batch = tokenizer(["012", "3"], padding=True, return_tensors="pt", return_token_type_ids=False)
    written = torch.tensor([[run.decoder_tokens.start, *run.text_tokenizer.encode("210")]] * 2)
    with torch.no_grad():
        ours = run.model(**batch, decoder_input_ids=written).logits
        assert_equal_logits(ours, model(**batch, decoder_input_ids=written).logits)


def test_the_report_says_class_tensors_bytes_files_and_how_to_load(
    cli: Callable[..., Any], trained: Callable[[str], Path], tmp_path: Path
) -> None:
    outcome = cli("export", trained("gpt"), "--out", tmp_path / "hf")
    assert (outcome.code, outcome.out) == (0, f"{tmp_path / 'hf'}\n")
    stored = (tmp_path / "hf" / "model.safetensors").stat().st_size
    for words in ("GPT2LMHeadModel", "28 tensors", "fp32", f"{stored:,} bytes", "config.json, ", "of step 12"):
        assert words in outcome.err, outcome.err
    assert f'transformers.AutoModelForCausalLM.from_pretrained("{tmp_path / "hf"}")' in outcome.err


def test_an_exported_folder_can_be_exported_again_as_it_is(
    cli: Callable[..., Any], trained: Callable[[str], Path], tmp_path: Path
) -> None:
    exported(cli, trained("gpt"), "--out", tmp_path / "one", "--dtype", "bf16")
    exported(cli, tmp_path / "one", "--out", tmp_path / "two")
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()


def test_small_shards_and_half_precision(
    cli: Callable[..., Any], trained: Callable[[str], Path], tmp_path: Path
) -> None:
    report = exported(cli, trained("gpt"), "--out", tmp_path / "hf", "--dtype", "bf16", "--shard-size", "5KB")
    assert "model.safetensors.index.json" in report["files"] and report["dtype"] == "bf16"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    rounded = load(trained("gpt")).model.get_parameter("embedding.weight").to(torch.bfloat16)
    assert torch.equal(model.transformer.wte.weight, rounded)


def test_the_list_says_what_an_export_would_do_and_writes_nothing(
    cli: Callable[..., Any], trained: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in ("gpt", "classifier"):
        run = trained(kind)
        outcome = cli("export", run, "--list", "--json")
        assert outcome.code == 0, outcome.err
        found = json.loads(outcome.out)
        assert [one["to"] for one in found] == ["huggingface", "gguf", "onnx", "peft"]
        assert not list(tmp_path.iterdir())
        lines = cli("export", run, "--list").out.splitlines()
        assert [" no: " in line for line in lines] == [one["barred"] is not None for one in found]
        barred = [one for one in found if one["barred"] is not None]
        assert barred
        for one in barred:
            outcome = cli("export", run, "--to", one["to"], "--out", f"new.{one['to']}")
            assert outcome.code == 2 and one["barred"] in outcome.err.replace("\n", " ")
        of_tokenizer = "--to gguf: "  # begins what the vocabulary bars, which inspect does not read
        by_recipe = [one["to"] for one in found if (one["barred"] or of_tokenizer).startswith(of_tokenizer)]
        told = " ".join(cli("inspect", run).out.split())
        assert f"formats of export, by the recipe: {', '.join(by_recipe)} (" in told
        assert json.loads(cli("inspect", run, "--json").out)["formats"] == by_recipe


def test_inspect_reads_neither_tokenizer_nor_weights_for_the_formats(
    trained: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tformer.interop.doors import formats_by_recipe
    from tformer.interop.opening import open_checkpoint
    from tformer.tokenizer import Tokenizer

    checkpoint = open_checkpoint(trained("gpt"))
    monkeypatch.setattr(Tokenizer, "from_json", None)
    monkeypatch.setattr(type(checkpoint), "each", None)
    assert "huggingface" in formats_by_recipe(checkpoint, checkpoint.recipe)


def test_an_imported_model_goes_back_as_its_type_after_training_adapters_merging_and_pruning(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.interop import tiny_folders as tiny

    monkeypatch.chdir(tmp_path)
    config = transformers.Phi3Config(
        vocab_size=290, hidden_size=16, intermediate_size=28, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = transformers.Phi3ForCausalLM(config)
    tiny.write_folder(Path("hf"), model, tiny.bytes_tokenizer("<|endoftext|>"), eos_token="<|endoftext|>")
    Path("text.txt").write_text("\n".join(tiny.SENTENCES * 3) + "\n")
    train = ("train", "--data", "text.txt", "--max-steps", 2, "--precision", "fp32", "--set", "training.sample_every=0")
    for name, words in {
        "imported": ("import", "hf"),
        "trained": (*train, "--init-from", "imported"),
        "named": (*train, "--init-from", "imported", "--arch", "llama", "--preset", "tiny"),
        "lora": (*train, "--init-from", "imported", "--lora", 2),
        "merged": ("merge", "lora"),
        "pruned": ("prune", "imported", "--drop-layers", "1", "--no-evaluate"),
    }.items():
        outcome = cli(*words, "--out", name)
        assert outcome.code == 0, (words, outcome.err)
        outcome = cli("export", name, "--out", f"{name}-hf", "--json")
        assert outcome.code == 0 and json.loads(outcome.out)["model_type"] == "phi3", (name, outcome.err + outcome.out)
