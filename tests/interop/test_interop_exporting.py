"""What `export_checkpoint` writes: whole or not at all, exactly, in the files that `transformers` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.interop.exports import GPT, ORIGINAL, checkpoint, letters, nothing_but, random_weights
from tests.interop.parity import assert_agree, padding, tokens
from tformer.interop.exporting import Tokenizers, export_checkpoint
from tformer.interop.read_model import read_model
from tformer.interop.weight_files import converted
from tformer.loading import load
from tformer.support import files
from tformer.support.errors import InputError

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
