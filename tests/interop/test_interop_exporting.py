"""What `export_checkpoint` writes: whole or not at all, exactly, in the files that `transformers` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from torch import Tensor

from tests.interop.exports import GPT, ORIGINAL, checkpoint, letters, nothing_but, random_weights
from tests.interop.parity import assert_agree, padding, tokens
from tformer.checkpoint.read import Checkpoint
from tformer.interop.exporting import Tokenizers, export_checkpoint
from tformer.interop.read_model import read_model
from tformer.interop.weight_files import converted
from tformer.loading import load
from tformer.support import files
from tformer.support.errors import InputError, Interrupted, StorageError
from tformer.workers.work import Work

TARGET = letters("seq2seq", "xyz ")


def logits(model: Any, **inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def test_a_decoder_gives_the_same_logits_in_transformers(tmp_path: Path) -> None:
    report = export_checkpoint(checkpoint(tmp_path / "run"), tmp_path / "out")
    assert (report.class_name, report.model_type, report.dtype) == ("GPT2LMHeadModel", "gpt2", "fp32")
    assert (report.auto_class, report.step, report.notes) == ("AutoModelForCausalLM", 7, ())
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    run = load(tmp_path / "run")
    ids = tokens(2, 24, vocabulary=run.text_tokenizer.vocab_size)
    assert_agree(logits(run.model, input_ids=ids), logits(theirs.eval(), input_ids=ids))


def test_the_tokenizer_and_its_special_ids_go_along(tmp_path: Path) -> None:
    export_checkpoint(checkpoint(tmp_path / "run"), tmp_path / "out")
    ours = load(tmp_path / "run").text_tokenizer
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("fed cab").input_ids == ours.encode("fed cab", template=True)
    assert theirs.eos_token_id == ours.special.eos and theirs.model_max_length == 24
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == ours.special.eos and config["pad_token_id"] == ours.special.pad
    assert config["architectures"] == ["GPT2LMHeadModel"] and config["dtype"] == "float32"


def pairs(**more: int) -> dict[str, Tensor]:
    return {
        "input_ids": tokens(2, 9, vocabulary=16),
        "attention_mask": padding(9, 9, 5),
        "decoder_input_ids": tokens(2, 7, vocabulary=more.get("target", 16)),
    }


def test_the_original_transformer_is_a_marian_model(tmp_path: Path) -> None:
    report = export_checkpoint(checkpoint(tmp_path / "run", ORIGINAL), tmp_path / "out")
    assert report.class_name == "MarianMTModel" and any("sinusoids" in note for note in report.notes)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    assert_agree(logits(load(tmp_path / "run").model, **pairs()), logits(theirs, **pairs()))


def test_two_vocabularies_have_two_tokenizers(tmp_path: Path) -> None:
    recipe = {**ORIGINAL, "model": {**ORIGINAL["model"], "tie": {"source_target": False}}}
    recipe |= {"tokenizer": {"separate": True}}
    export_checkpoint(checkpoint(tmp_path / "run", recipe, target=TARGET), tmp_path / "out")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    inputs = pairs(target=TARGET.vocab_size)
    assert_agree(logits(load(tmp_path / "run").model, **inputs), logits(theirs, **inputs))
    written = transformers.AutoTokenizer.from_pretrained(tmp_path / "out" / "target_tokenizer")
    assert written("zyx").input_ids == TARGET.encode("zyx", template=True)
    assert theirs.config.eos_token_id == TARGET.special.eos


def test_tensors_are_written_once_and_tied_ones_under_one_name(tmp_path: Path) -> None:
    report = export_checkpoint(checkpoint(tmp_path / "run"), tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in stored and len(stored) == report.num_tensors
    assert report.num_parameters == load(tmp_path / "run").model.num_parameters()
    assert report.num_bytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    listed = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert listed == list(report.files) and {"config.json", "tokenizer.json", "generation_config.json"} <= set(listed)


# --- types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_numbers_that_a_type_holds_come_through_exactly(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    tokenizers = Tokenizers(letters("gpt"), None)
    rounded = {key: tensor.to(dtype).float() for key, tensor in random_weights(GPT, tokenizers).items()}
    opened = checkpoint(tmp_path / "run", weights=rounded)
    full = export_checkpoint(opened, tmp_path / "full")
    half = export_checkpoint(opened, tmp_path / "half", dtype=dtype)
    before, after = (load_file(tmp_path / where / "model.safetensors") for where in ("full", "half"))
    assert before.keys() == after.keys() and (full.dtype, half.dtype) == ("fp32", name)
    for key, tensor in after.items():
        assert tensor.dtype == dtype and torch.equal(tensor.float(), before[key]), key
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == dtype


def test_a_number_too_large_for_fp16_is_refused_and_its_tensor_named(tmp_path: Path) -> None:
    weights = random_weights(GPT, Tokenizers(letters("gpt"), None))
    weights["decoder.blocks.1.feedforward.up.weight"][3, 2] = -70000.0
    opened = checkpoint(tmp_path / "run", weights=weights)
    with pytest.raises(InputError, match=r"transformer\.h\.1\.mlp\.c_fc\.weight .* 70000, the most there is 65504"):
        export_checkpoint(opened, tmp_path / "out", dtype=torch.float16)
    assert nothing_but(tmp_path, "run")
    export_checkpoint(opened, tmp_path / "out", dtype=torch.bfloat16)


def test_only_floating_tensors_are_converted() -> None:
    whole = torch.arange(3)
    assert converted(whole, torch.int64, name="x") is whole
    assert converted(torch.tensor([1.5, float("inf")]), torch.float16, name="x").isinf().tolist() == [False, True]


# --- files ------------------------------------------------------------------------------------------------------------


def test_shards_lie_beside_an_index_and_hold_the_same(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path / "run")
    export_checkpoint(opened, tmp_path / "one")
    report = export_checkpoint(opened, tmp_path / "many", shard_bytes=4000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    count = len(shards)
    assert count > 2 and shards[0] == f"model-00001-of-{count:05d}.safetensors"
    one = load_file(tmp_path / "one" / "model.safetensors")
    many: dict[str, Tensor] = {}
    for shard in shards:
        part = load_file(tmp_path / "many" / shard)
        assert {name for name, file in index["weight_map"].items() if file == shard} == part.keys()
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= 4000
        many |= part
    assert many.keys() == one.keys() and all(torch.equal(many[name], one[name]) for name in one)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in one.values())
    assert report.num_bytes == sum((tmp_path / "many" / shard).stat().st_size for shard in shards)
    ids = tokens(1, 9, vocabulary=10)
    models = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / where) for where in ("one", "many")]
    assert torch.equal(*(logits(model.eval(), input_ids=ids) for model in models))
    assert read_model(tmp_path / "many").weights().keys() == read_model(tmp_path / "one").weights().keys()


def test_one_tensor_at_a_time_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the model there is never a second copy of it: each tensor is written before the next one is converted."""
    order: list[str] = []
    write = files.write

    def watched(tensor: Tensor, dtype: torch.dtype, *, name: str) -> Tensor:
        order.append(name)
        return converted(tensor, dtype, name=name)

    def noted(descriptor: int, data: bytes) -> None:
        order.append("write")
        write(descriptor, data)

    monkeypatch.setattr("tformer.interop.weight_files.converted", watched)
    monkeypatch.setattr(files, "write", noted)
    report = export_checkpoint(checkpoint(tmp_path / "run"), tmp_path / "out", dtype=torch.bfloat16)
    made = order[order.index(next(name for name in order if name != "write" and "." in name)) :]
    pattern = ["make" if name != "write" else name for name in made[: 2 * report.num_tensors]]
    assert pattern == ["make", "write"] * report.num_tensors


def test_averaged_weights_go_first(tmp_path: Path) -> None:
    tokenizers = Tokenizers(letters("gpt"), None)
    averaged = random_weights(GPT, tokenizers, seed=1)
    opened = checkpoint(tmp_path / "run", ema={name: averaged[name] for name in list(averaged)[:-1]})
    report = export_checkpoint(opened, tmp_path / "out")
    assert "averaged weights are exported" in report.notes
    stored = read_model(tmp_path / "out").weights()
    expected = load(tmp_path / "run").model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in stored.items())


# --- presets ----------------------------------------------------------------------------------------------------------


CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = {"d_model": 16, "max_seq_len": 24, "vocab_size": None}
STACK = {"num_layers": 2, "num_heads": 2}
PRESETS = {  # preset -> (the class that opens it, the template of its tokenizer)
    "gpt/small": ("AutoModelForCausalLM", "gpt"),
    "gpt/char": ("AutoModelForCausalLM", "gpt"),
    "llama/tiny": ("AutoModelForCausalLM", "gpt"),
    "bert/base": ("AutoModelForPreTraining", "bert"),
    "roberta/base": ("AutoModelForMaskedLM", "roberta"),
    "electra/small": ("AutoModelForPreTraining", "bert"),
    "t5/small": ("AutoModelForSeq2SeqLM", "t5"),
    "t5/v1_1-base": ("AutoModelForSeq2SeqLM", "t5"),
    "bart/base": ("AutoModelForSeq2SeqLM", "roberta"),
    "transformer/base": ("AutoModelForSeq2SeqLM", "seq2seq"),
    "vit/base": ("AutoModelForImageClassification", ""),
}


def small(preset: str) -> dict[str, Any]:
    """The preset's recipe with two layers of width 16 and the tokenizer's own vocabulary."""
    values: dict[str, Any] = yaml.safe_load((CONFIGS / f"{preset}.yaml").read_text(encoding="utf-8"))
    model = {**values["model"], **SMALL, "init": {}}
    for side in ("encoder", "decoder"):
        if side in model:
            sizes = {"head_dim": 8} if "head_dim" in model[side] else {}
            hidden = {"feedforward": {**model[side]["feedforward"], "d_ff": 24}}
            model[side] = {**model[side], **STACK, **sizes, **hidden, "num_kv_heads": 1 if "llama" in preset else None}
    if model.get("embedding", {}).get("size"):
        model["embedding"] = {**model["embedding"], "size": 12}
    if "patches" in model:
        model["patches"] = {**model["patches"], "image_size": 8, "size": 4}
        del model["vocab_size"]
    recipe = {"arch": preset.split("/")[0], "model": model}
    if "patches" in model:
        recipe["data"] = {"labels": ["cat", "dog", "owl"], "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.2]}
    return recipe


def inputs(model: dict[str, Any]) -> dict[str, Tensor]:
    if "patches" in model:
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))}
    found = {"input_ids": tokens(2, 9, vocabulary=12)}
    if "encoder" in model:  # a row of the batch is padded
        found["attention_mask"] = padding(9, 9, 6)
    if "encoder" in model and "decoder" in model:
        found["decoder_input_ids"] = tokens(2, 7, vocabulary=12)
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_opens_in_transformers_with_the_same_logits(preset: str, tmp_path: Path) -> None:
    assert_opens_alike(preset, small(preset), tmp_path)


@pytest.mark.parametrize("preset", ["bert/base", "roberta/base", "electra/small"])
def test_an_encoder_without_token_types_is_one_with_types_of_zeros(preset: str, tmp_path: Path) -> None:
    recipe = small(preset)
    recipe["model"]["embedding"]["token_types"] = 0
    assert_opens_alike(preset, recipe, tmp_path)


@pytest.mark.parametrize(("types", "given"), [(0, True), (1, False), (2, True)])
def test_only_a_model_of_several_token_types_is_given_them(types: int, given: bool, tmp_path: Path) -> None:
    """A pair has the types 0 and 1: the second would lie outside of a table of one. None become two, of zeros."""
    recipe = small("bert/base")
    recipe["model"]["embedding"]["token_types"] = types
    export_checkpoint(checkpoint(tmp_path / "run", recipe, tokenizer=letters("bert")), tmp_path / "out")
    pair = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("ab", "cd", return_tensors="pt")
    assert ("token_type_ids" in pair) == given
    with torch.no_grad():
        transformers.AutoModel.from_pretrained(tmp_path / "out")(**pair)


def assert_opens_alike(preset: str, recipe: dict[str, Any], tmp_path: Path) -> None:
    auto, template = PRESETS[preset]
    tokenizer = letters(template) if template else None
    report = export_checkpoint(checkpoint(tmp_path / "run", recipe, tokenizer=tokenizer), tmp_path / "out")
    assert report.auto_class == auto
    theirs, info = getattr(transformers, auto).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    run, batch = load(tmp_path / "run"), inputs(recipe["model"])
    if tokenizer is not None and "attention_mask" in batch:
        batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, tokenizer.special.pad or 0)
    with torch.no_grad():
        ours, found = run.model(**batch), theirs.eval()(**batch)
        mask = batch.get("attention_mask")
        if preset.startswith("bert"):
            assert_agree(run.model.heads["masked_lm"](ours.hidden), found.prediction_logits, mask)
            assert_agree(run.model.heads["next_sentence"](ours.hidden, mask), found.seq_relationship_logits)
        else:
            assert_agree(ours.logits, found.logits, None if "decoder" in recipe["model"] else mask)


def test_the_labels_of_images_go_along(tmp_path: Path) -> None:
    export_checkpoint(checkpoint(tmp_path / "run", small("vit/base")), tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.id2label == {0: "cat", 1: "dog", 2: "owl"} and config.label2id["owl"] == 2


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_exists_is_never_replaced(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    {"folder": out.mkdir, "file": out.touch, "link": lambda: out.symlink_to("nowhere")}[kind]()
    with pytest.raises(InputError, match="exists already"):
        export_checkpoint(checkpoint(tmp_path / "run"), out)
    assert nothing_but(tmp_path, "run", "out")


@pytest.mark.parametrize("rows", [1, -1])
def test_a_table_whose_rows_are_not_the_vocabulary_is_refused(tmp_path: Path, rows: int) -> None:
    """Padding of the vocabulary, which exists in computation alone, never reaches a file."""
    weights = random_weights(GPT, Tokenizers(letters("gpt"), None))
    table = weights["embedding.weight"]
    padded = torch.cat([table, torch.zeros(rows, 16)]) if rows > 0 else table[:rows]
    weights |= dict.fromkeys(("embedding.weight", "heads.lm.weight"), padded)
    with pytest.raises(InputError, match=r"another shape embedding\.weight \[\d+, 16\] \(expected \[\d+, 16\]\)"):
        export_checkpoint(checkpoint(tmp_path / "run", weights=weights), tmp_path / "out")
    assert nothing_but(tmp_path, "run")


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_weights_of_another_recipe_are_refused(tmp_path: Path, change: str) -> None:
    weights = random_weights(GPT, Tokenizers(letters("gpt"), None))
    if change == "missing":
        del weights["decoder.final_norm.bias"]
    else:
        weights["decoder.final_norm.gain"] = torch.ones(1)
    with pytest.raises(InputError, match=rf"recipe and weights disagree: {change} decoder\.final_norm"):
        export_checkpoint(checkpoint(tmp_path / "run", weights=weights), tmp_path / "out")


def test_what_no_class_computes_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    decoder = {**GPT["model"]["decoder"], "norm": {"kind": "batchnorm"}}
    recipe = {**GPT, "model": {**GPT["model"], "decoder": decoder}}
    with pytest.raises(InputError, match=r"model\.decoder\.norm\.kind: batchnorm"):
        export_checkpoint(checkpoint(tmp_path / "run", recipe), tmp_path / "deep" / "out")
    assert nothing_but(tmp_path, "run")


def test_learned_layerdrop_rates_stay_behind(tmp_path: Path) -> None:
    decoder = {**GPT["model"]["decoder"], "layerdrop": {"rate": 0.2, "learned": True}}
    recipe = {**GPT, "model": {**GPT["model"], "decoder": decoder}}
    report = export_checkpoint(checkpoint(tmp_path / "run", recipe), tmp_path / "out")
    plain = export_checkpoint(checkpoint(tmp_path / "plain"), tmp_path / "plain-out")
    assert (report.num_tensors, report.class_name) == (plain.num_tensors, "GPT2LMHeadModel")


def test_a_folder_appears_below_folders_that_do_not_exist(tmp_path: Path) -> None:
    export_checkpoint(checkpoint(tmp_path / "run"), tmp_path / "a" / "b" / "out")
    assert (tmp_path / "a" / "b" / "out" / "config.json").is_file()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Checkpoint]:
    yield checkpoint(tmp_path / "run")
    assert nothing_but(tmp_path, "run"), "a failed export leaves nothing"


@pytest.mark.parametrize("after", [0, 3, 20])
def test_a_stop_between_tensors_leaves_nothing(opened: Checkpoint, tmp_path: Path, after: int) -> None:
    polls = iter([False] * after + [True] * 100)
    with pytest.raises(Interrupted, match="nothing written"):
        export_checkpoint(opened, tmp_path / "out", work=Work(should_stop=lambda: next(polls)))


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=["^C", "full disk"]
)
def test_a_write_that_fails_leaves_nothing(
    opened: Checkpoint, tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, write = 0, files.write

    def failing(descriptor: int, data: bytes) -> None:
        nonlocal count
        count += 1
        if count > 6:
            raise error
        write(descriptor, data)

    monkeypatch.setattr(files, "write", failing)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else StorageError):
        export_checkpoint(opened, tmp_path / "out")


def test_the_bytes_needed_are_asked_for_before_writing(
    opened: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda path: 1000)
    with pytest.raises(StorageError, match=r"[\d,]+ bytes needed, 1,000 free"):
        export_checkpoint(opened, tmp_path / "out")


def test_a_write_that_numpy_cuts_short_has_a_hint() -> None:
    error = files.storage_error(Path("x"), OSError("4800 requested and 280 written"))
    assert error.message == "cannot write x: only a part was written" and "free some space" in (error.hint or "")
