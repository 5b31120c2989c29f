"""Bad folders of Hugging Face: one clear line, exit code 2, nothing written, whichever command reads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.end_to_end.translate_runs import refusal
from tests.interop import tiny_folders as tiny

Cli = Callable[..., Any]


def reshard(folder: Path, change: Callable[[dict[str, str]], None] = lambda weight_map: None) -> None:
    """Several files, and an index that is changed."""
    model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="12KB")
    tiny.edit_json(folder / "model.safetensors.index.json", lambda values: change(values["weight_map"]))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02cos\nabort\n(tR.")


def no_shard(folder: Path) -> None:
    reshard(folder)
    sorted(folder.glob("model-*.safetensors"))[0].unlink()


def cut_shard(folder: Path) -> None:
    reshard(folder)
    shard = sorted(folder.glob("model-*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-10])


def traversal(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent / "outside.safetensors")
    reshard(folder, lambda weight_map: weight_map.update(dict.fromkeys(weight_map, "../outside.safetensors")))


def linked(path: Path) -> None:
    path.unlink()
    path.symlink_to("nothing")


def foreign_tokenizer(folder: Path) -> None:
    values = json.loads((folder / "tokenizer.json").read_text())
    for number in range(50):
        values["model"]["vocab"][f"more{number}"] = 290 + number
    (folder / "tokenizer.json").write_text(json.dumps(values))


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing config.json": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "config.json is no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json is damaged"),
    "unknown model_type": (
        lambda folder: tiny.edit_json(folder / "config.json", {"model_type": "frobnicator"}),
        "its keys are those of 'gpt2'",
    ),
    "a model_type that tformer does not read": (
        lambda folder: tiny.edit_json(folder / "config.json", {"model_type": "mamba2", "state_size": 16}),
        "keys that 'gpt2' does not have: state_size",
    ),
    "a feature that tformer lacks": (
        lambda folder: tiny.edit_json(folder / "config.json", {"scale_attn_by_inverse_layer_idx": True}),
        "scale_attn_by_inverse_layer_idx",
    ),
    "more layers than memory": (
        lambda folder: tiny.edit_json(folder / "config.json", {"n_layer": 1000}), "found 1,000 layers"
    ),
    "more layers than any recipe": (
        lambda folder: tiny.edit_json(folder / "config.json", {"n_layer": 2**40}), "n_layer: found 1099511627776"
    ),
    "a size beyond counting": (
        lambda folder: tiny.edit_json(folder / "config.json", {"n_embd": 10**30}), "n_embd: found 1000000000000000"
    ),
    "sizes beyond counting": (
        lambda folder: tiny.edit_json(folder / "config.json", {"n_embd": 10**12}), "model.d_model: "
    ),
    "a megabyte of a value": (
        lambda folder: tiny.edit_json(folder / "config.json", {"junk": "x" * 10**6}), "junk: found 'xxxx"
    ),
    "a shard with an endless name": (
        lambda folder: reshard(folder, lambda names: names.update(x="a" * 300 + ".safetensors")), "name is too long"
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "missing shard": (no_shard, "is missing"),
    "truncated shard": (cut_shard, "truncated"),
    "truncated file": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:900]),
        "truncated",
    ),
    "wrong shape": (
        lambda folder: tiny.change_weights(folder, lambda t: t.update({"transformer.wpe.weight": torch.ones(5, 16)})),
        "transformer.wpe.weight has the shape [5, 16], expected [32, 16]",
    ),
    "extra tensors": (
        lambda folder: tiny.change_weights(folder, lambda t: t.update({"extra.weight": torch.ones(5)})),
        "unknown extra.weight",
    ),
    "missing tensors": (
        lambda folder: tiny.change_weights(folder, lambda t: t.pop("transformer.wpe.weight")),
        "missing transformer.wpe.weight",
    ),
    "mismatched tokenizer": (foreign_tokenizer, "the tokenizer has 340 ids, but the model's embedding only 300 rows"),
    "damaged tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json"),
    "weights that link to nothing": (
        lambda folder: linked(folder / "model.safetensors"), "model.safetensors is a link to nothing, which"
    ),
    "a config that links to nothing": (
        lambda folder: linked(folder / "config.json"), "config.json is a link to nothing, which is not there"
    ),
    "a tensor's name on two lines": (
        lambda folder: tiny.change_weights(folder, lambda t: t.update({"a\nb": torch.ones(5)})), r"unknown 'a\nb'"
    ),
    "half of a surrogate pair": (
        lambda folder: tiny.edit_json(folder / "tokenizer_config.json", {"bos_token": "\ud800"}), "surrogates not"
    ),
    "a decoder that is a list": (
        lambda folder: tiny.edit_json(folder / "tokenizer.json", {"decoder": ["x"]}), "its `decoder` is no object"
    ),
    "a template of nothing": (
        lambda folder: tiny.edit_json(folder / "tokenizer.json", {"post_processor": ["x"]}), "`post_processor` is no"
    ),
    "path traversal": (traversal, "'../outside.safetensors'"),
    "pickle": (pickled, "pytorch_model.bin: pickled weights"),
}  # fmt: skip


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_line_and_writes_nothing(name: str, cli: Cli, folders: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(folders / "gpt2", folder)
    spoil, words = BAD[name]
    spoil(folder)
    before = files_below(tmp_path)
    for command in (
        ("import", folder, "--out", tmp_path / "out"),
        ("generate", folder, "--prompt", "the"),
        ("train", "--init-from", folder, "--data", __file__, "--out", tmp_path / "out"),
    ):
        message = refusal(cli(*command))
        assert words in message and str(tmp_path) in message and len(message) < 5000, message
    assert files_below(tmp_path) == before and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("words", "message"), [
    (("nowhere", "--out", "OUT"), "nowhere does not exist"),
    (("GPT2", "--out", "GPT2"), "exists already"),
    (("GPT2", "--out", "OUT", "--dtype", "int8"), "'--dtype': 'int8'"),
    (("GPT2", "--out", "OUT", "--tokenizer", "nowhere.json"), "nowhere.json"),
    (("GPT2", "--out", "OUT", "--target-tokenizer", "GPT2/tokenizer.json"), "--target-tokenizer"),
    (("GPT2/config.json", "--out", "OUT"), "is not a folder"),
])  # fmt: skip
def test_usage(words: tuple[str, ...], message: str, cli: Cli, folders: Path, tmp_path: Path) -> None:
    arguments = [word.replace("GPT2", str(folders / "gpt2")).replace("OUT", str(tmp_path / "out")) for word in words]
    before = files_below(folders)
    assert message in refusal(cli("import", *arguments))
    assert not (tmp_path / "out").exists() and files_below(folders) == before
