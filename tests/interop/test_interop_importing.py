"""A folder of Hugging Face, opened in place or imported: the same model, checked before anything is written."""

from __future__ import annotations

import json
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import tformer
from tests.interop import tiny_folders as tiny
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.save import CheckpointContents, write_checkpoint
from tformer.interop import hub
from tformer.interop.foreign_checkpoint import open_folder
from tformer.interop.importing import import_folder
from tformer.interop.opening import is_foreign, open_checkpoint
from tformer.interop.read_model import read_model
from tformer.recipe.load import recipe_from_yaml
from tformer.support import files
from tformer.support.errors import InputError, Interrupted, NotFiniteError, StorageError, TformerError
from tformer.workers.work import Work

# --- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tiny.gpt2, tiny.bert, tiny.t5, tiny.bart])
def test_opened_and_imported_are_the_same_model(make: Callable[..., Path], tmp_path: Path, out: Path) -> None:
    folder = make(tmp_path / "folder")
    report = import_folder(folder, out)
    direct, imported = tformer.load(folder), tformer.load(out)
    assert direct.recipe == imported.recipe and direct.step == imported.step == 0
    assert direct.tokenizer is not None and imported.tokenizer is not None
    assert direct.tokenizer.sha256 == imported.tokenizer.sha256
    states = direct.model.state_dict(), imported.model.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert report.parameters == direct.model.num_parameters()
    assert report.tensors == len(load_file(folder / "model.safetensors"))


def test_shards_give_what_one_file_gives(tmp_path: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    shards = tmp_path / "shards"
    shutil.copytree(folder, shards, ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(shards, max_shard_size="12KB")
    assert len(list(shards.glob("model-*.safetensors"))) > 1
    one, several = open_folder(folder).weights(), open_folder(shards).weights()
    assert one.keys() == several.keys() and all(torch.equal(one[name], several[name]) for name in one)


def test_the_report_says_what_was_mapped(tmp_path: Path, out: Path) -> None:
    folder = tiny.bert(tmp_path / "folder", "SequenceClassification", id2label=tiny.LABELS)
    report = import_folder(folder, out)
    assert (report.model_type, report.class_name, report.arch) == ("bert", "BertForSequenceClassification", "bert")
    assert report.layers == {"encoder": 2} and report.heads == {"encoder": 2} and report.d_model == 16
    assert report.labels == ("bad", "so-so", "good") and report.dtype == report.stored_as == "fp32"
    assert report.special_tokens["mask"] == "[MASK]" and report.special_tokens["pad"] == "[PAD]"
    assert report.vocab_size == report.tokenizer_size == 25 and not report.left_out
    trainer = json.loads((out / "trainer.json").read_text())
    assert trainer == {"step": 0, "imported": {"model_type": "bert", "class": "BertForSequenceClassification"}}


def test_what_is_left_out_is_named(tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    tiny.change_weights(folder, lambda tensors: tensors.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 32, 32)}))
    assert import_folder(folder, out).left_out == ("transformer.h.0.attn.bias",)


def test_a_padded_embedding_is_a_note(tmp_path: Path, out: Path) -> None:
    report = import_folder(tiny.gpt2(tmp_path / "folder"), out)
    assert any("300 rows for 290 ids" in note for note in report.notes)


@pytest.mark.parametrize(("head", "objectives"), [
    ("MaskedLM", ["masked_lm"]), ("PreTraining", ["masked_lm", "next_sentence"]),
    ("SequenceClassification", ["classification"]),
])  # fmt: skip
def test_objectives_are_those_of_the_heads(head: str, objectives: list[str], tmp_path: Path) -> None:
    recipe = open_folder(tiny.bert(tmp_path / "folder", head)).recipe
    assert [objective.kind for objective in recipe.objectives] == objectives


NAMES = tiny.LABELS.values()


@pytest.mark.parametrize(("values", "kind", "labels"), [
    ({"num_labels": 1, "problem_type": "regression"}, "regression", ()),
    ({"id2label": tiny.LABELS, "problem_type": "multi_label_classification"}, "multi_label", tuple(NAMES)),
    ({"num_labels": 4}, "classification", tuple(f"LABEL_{number}" for number in range(4))),
    ({}, "classification", ("LABEL_0", "LABEL_1")),
])  # fmt: skip
def test_what_a_classifier_tells_apart(values: Any, kind: str, labels: tuple[str, ...], tmp_path: Path) -> None:
    recipe = open_folder(tiny.bert(tmp_path / "folder", "SequenceClassification", **values)).recipe
    assert recipe.objectives[0].kind == kind and recipe.data.labels == labels


def test_the_recipe_reads_back_and_fine_tunes_gently(tmp_path: Path) -> None:
    checkpoint = open_folder(tiny.t5(tmp_path / "folder"))
    recipe = recipe_from_yaml(checkpoint.recipe_text, name="test")
    assert recipe == checkpoint.recipe
    assert recipe.arch == "t5" and recipe.preset is None and recipe.objectives[0].kind == "seq2seq"
    assert recipe.optimizer.kind == "adamw" and recipe.optimizer.lr == 5e-5 and recipe.schedule.kind == "linear"
    ids = recipe.tokenizer.special_ids
    assert (ids.pad, ids.eos, ids.decoder_start) == (0, 1, 0)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_other_types_are_written_when_asked_for(name: str, dtype: torch.dtype, tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    assert import_folder(folder, out, dtype=dtype).dtype == name
    stored, original = read_checkpoint(out).weights(), open_folder(folder).weights()
    assert all(torch.equal(stored[key], original[key].to(dtype)) for key in original)
    assert tformer.load(out).model.embedding.weight.dtype == torch.float32


def test_a_folder_in_bf16_becomes_fp32(tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    tiny.change_weights(folder, lambda tensors: tensors.update({k: v.bfloat16() for k, v in tensors.items()}))
    report = import_folder(folder, out)
    assert (report.stored_as, report.dtype) == ("bf16", "fp32")
    original = open_folder(folder).weights()
    assert all(torch.equal(tensor, original[name].float()) for name, tensor in read_checkpoint(out).weights().items())


def test_numbers_that_do_not_fit_into_the_type(tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    tiny.change_weights(folder, lambda tensors: tensors["transformer.ln_f.bias"].fill_(7e4))
    assert "7e+04" in tiny.refusal(folder, out, dtype=torch.float16).message


def test_nan_in_the_weights_is_refused_by_name(tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    tiny.change_weights(folder, lambda tensors: tensors["transformer.ln_f.bias"].fill_(float("nan")))
    with pytest.raises(NotFiniteError, match=r"1 of 28 weights tensors hold NaN or infinity \(decoder.final_norm.bias"):
        import_folder(folder, out)
    assert not out.exists()


def test_an_import_is_an_ordinary_checkpoint(tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    import_folder(folder, out)
    shutil.rmtree(folder)
    checkpoint = read_checkpoint(out)
    again = tmp_path / "again"
    write_checkpoint(
        again,
        checkpoint.step,
        CheckpointContents.derived(checkpoint, checkpoint.weights(), checkpoint.trainer),
    )
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_a_tokenizer_for_each_side(tmp_path: Path, out: Path) -> None:
    folder = tiny.t5(tmp_path / "folder")
    other = tmp_path / "other.json"
    other.write_text((folder / "tokenizer.json").read_text().replace('"Whitespace"', '"WhitespaceSplit"'))
    import_folder(folder, out, target_tokenizer=other)
    loaded = tformer.load(out)
    assert loaded.own_target_tokenizer is not None and loaded.recipe.separate_vocabularies
    assert loaded.target_tokenizer.to_json() == other.read_text()


def test_images_bring_their_statistics(tmp_path: Path, out: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4
    )
    folder = tmp_path / "folder"
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    report = import_folder(folder, out)
    assert tformer.load(out).recipe.data.image_mean == (0.5, 0.5, 0.5)
    assert any("preprocessor_config.json" in note for note in report.notes)
    assert "images" in tiny.refusal(folder, tmp_path / "no" / "where", tokenizer=tmp_path / "t.json").message


# --- which class ------------------------------------------------------------------------------------------------------


def test_a_config_that_names_no_class(tmp_path: Path) -> None:
    for task in ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice"):
        folder = tiny.bert(tmp_path / task, task)
        tiny.edit_json(folder / "config.json", {"architectures": None})
        assert read_model(folder).class_name == f"BertFor{task}"


def test_a_config_that_names_the_bare_body(tmp_path: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    tiny.edit_json(folder / "config.json", {"architectures": ["GPT2Model"]})
    assert read_model(folder).class_name == "GPT2LMHeadModel"


def test_weights_that_fit_no_class(tmp_path: Path, out: Path) -> None:
    folder = tiny.bert(tmp_path / "folder")
    tiny.edit_json(folder / "config.json", {"architectures": None})
    tiny.change_weights(folder, lambda tensors: tensors.update({"qa_outputs.weight": torch.ones(2, 16)}))
    error = tiny.refusal(folder, out)
    assert "which class this is" in error.message and "fit none of" in error.message


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_folder_without_a_config(tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    (folder / "config.json").unlink()
    assert "config.json" in tiny.refusal(folder, out).message
    with pytest.raises(InputError, match=r"no config\.json"):
        tformer.load(folder)


def test_a_name_on_the_hub_is_imported_first(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="name on the hub") as caught:
        tformer.load("hf:owner/name")
    assert caught.value.hint == "tformer import hf:owner/name --out DIR"


@pytest.mark.parametrize("name", ["gtp2", "frobnicator", "qwen", None, 3])
def test_an_unknown_model_type_suggests_the_one_with_its_keys(name: Any, tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    tiny.edit_json(folder / "config.json", {"model_type": name})
    error = tiny.refusal(folder, out)
    assert "its keys are those of 'gpt2'" in error.message
    assert "write model_type 'gpt2' into config.json" in (error.hint or "")


def test_a_key_that_nobody_knows_unless_it_is_ignored(tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    tiny.edit_json(folder / "config.json", {"mystery_gate": 0.5})
    error = tiny.refusal(folder, out)
    assert "mystery_gate" in error.message and "--ignore mystery_gate" in (error.hint or "")
    import_folder(folder, out, ignore=["mystery_gate"])
    assert out.is_dir()


def test_code_of_a_repository_is_not_run(tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    mark = tmp_path / "ran"
    (folder / "modeling_custom.py").write_text(f"open({str(mark)!r}, 'w')")
    tiny.edit_json(folder / "config.json", {"auto_map": {"AutoModelForCausalLM": "modeling_custom.Model"}})
    assert "auto_map" in tiny.refusal(folder, out).message
    assert not mark.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("transformer.h.1.mlp.c_fc.bias"), ["missing transformer.h.1.mlp.c_fc.bias"]),
        (
            lambda tensors: tensors.update({"transformer.h.2.ln_1.bias": torch.ones(16)}),
            ["unknown transformer.h.2.ln_1.bias"],
        ),
        (
            lambda tensors: tensors.update({"transformer.wpe.weight": torch.ones(31, 16)}),
            ["transformer.wpe.weight", "[31, 16]", "[32, 16]"],
        ),
        (
            lambda tensors: tensors.update({"transformer.wpe.weight": torch.ones(32, 16, dtype=torch.int8)}),
            ["int8"],
        ),
    ],
    ids=["missing", "extra", "shape", "quantized"],
)
def test_a_wrong_tensor_is_named(
    tmp_path: Path, out: Path, change: Callable[[dict[str, Any]], Any], words: list[str]
) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    tiny.change_weights(folder, change)
    message = tiny.refusal(folder, out).message
    assert all(word in message for word in words)


def test_a_tokenizer_with_more_ids_than_rows(tmp_path: Path, out: Path) -> None:
    folder = tiny.bert(tmp_path / "folder")
    shutil.copy(tiny.gpt2(tmp_path / "other") / "tokenizer.json", folder / "tokenizer.json")
    error = tiny.refusal(folder, out)
    assert "290 ids" in error.message and "25 rows" in error.message and "--tokenizer" in (error.hint or "")


def test_the_named_tokenizer_replaces_the_wrong_one(tmp_path: Path, out: Path) -> None:
    folder = tiny.bert(tmp_path / "folder")
    right = tmp_path / "right.json"
    shutil.move(folder / "tokenizer.json", right)
    shutil.copy(tiny.gpt2(tmp_path / "other") / "tokenizer.json", folder / "tokenizer.json")
    import_folder(folder, out, tokenizer=right)
    assert (out / "tokenizer.json").read_text() == right.read_text()


def test_a_folder_without_a_tokenizer(tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    error = tiny.refusal(folder, out)
    assert "tokenizer" in error.message and error.hint


def test_an_end_of_sequence_that_the_tokenizer_lacks(tmp_path: Path, out: Path) -> None:
    folder = tiny.t5(tmp_path / "folder")
    for name in ("config.json", "generation_config.json"):
        tiny.edit_json(folder / name, {"eos_token_id": 50})
    message = tiny.refusal(folder, out).message
    assert "eos_token_id" in message and "50" in message


def test_an_existing_folder_is_never_written_to(tmp_path: Path) -> None:
    folder, out = tiny.gpt2(tmp_path / "folder"), tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    with pytest.raises(InputError, match="exists already"):
        import_folder(folder, out)
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


# --- interruptions and disks ------------------------------------------------------------------------------------------


def test_an_interruption_leaves_nothing(tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    with pytest.raises(Interrupted):
        import_folder(folder, out, work=Work(should_stop=lambda: True))
    assert not out.parent.exists()


@pytest.mark.parametrize("call", range(0, 30, 3))
def test_a_failing_disk_leaves_nothing(call: int, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    calls, write = iter(range(1000)), files.write

    def failing(descriptor: int, data: Any) -> None:
        if next(calls) == call:
            raise OSError(28, "No space left on device")
        write(descriptor, data)

    monkeypatch.setattr(files, "write", failing)
    try:
        import_folder(folder, out)
    except StorageError:
        assert not out.exists() and not (out.parent.exists() and list(out.parent.iterdir()))


# --- what a person may name -------------------------------------------------------------------------------------------


def test_what_is_a_folder_of_hugging_face(tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    import_folder(folder, out)
    assert is_foreign(folder) and not is_foreign(out) and not is_foreign(tmp_path)
    assert type(open_checkpoint(out)) is not type(open_checkpoint(folder))
    (out / "manifest.json").unlink()  # a checkpoint that was cut off is none of theirs
    assert not is_foreign(out)


def test_a_pickle_in_a_folder_is_never_opened(tmp_path: Path, out: Path) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02cos\nabort\n(tR.")  # would end this process
    with pytest.raises(InputError) as caught:
        tformer.load(folder)
    for error in (tiny.refusal(folder, out), caught.value):
        assert "pytorch_model.bin" in error.message and "pickle" in error.message


# --- the hub ----------------------------------------------------------------------------------------------------------


def test_a_repository_is_downloaded_without_pickles_and_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repository: str, **options: Any) -> str:
        asked.update(repository=repository, **options)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert hub.download("hf:owner/name@v1.0") == tmp_path
    assert asked["repository"] == "owner/name" and asked["revision"] == "v1.0"
    assert asked["allow_patterns"] == ["*.safetensors", "*.json", "*.txt", "*.model", "*.spm"]
    hub.download("hf:gpt2")
    assert (asked["repository"], asked["revision"]) == ("gpt2", None)


@pytest.mark.parametrize("name", ["hf:", "hf:a/b/c", "hf:../x", "hf:a/b@", "hf:a/b@../../x", "hf:a b", "hf:/etc"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(InputError, match="no name on the hub") as caught:
        hub.download(name)
    assert "hf:owner/name" in (caught.value.hint or "")


def test_without_the_extra_the_way_to_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match="not installed") as caught:
        hub.download("hf:owner/name")
    assert "tformer[hub]" in (caught.value.hint or "")


def test_offline_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(TformerError, match="cannot be reached") as caught:
        hub.download("hf:owner/name")
    assert not isinstance(caught.value, InputError) and caught.value.hint


def test_mistakes_about_repositories_are_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import errors

    response = types.SimpleNamespace(headers={}, request=None, status_code=404)
    for kind, word in (
        (errors.RepositoryNotFoundError, "no such repository"),
        (errors.RevisionNotFoundError, "no revision"),
        (errors.GatedRepoError, "restricts who may download"),
    ):

        def fail(*names: str, kind: Any = kind, **options: Any) -> str:
            raise kind("404", response=response)

        monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
        with pytest.raises(InputError, match=word):
            hub.download("hf:owner/name@main")
