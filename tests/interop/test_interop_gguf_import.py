"""`tformer import FILE.gguf`: what export wrote comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interop.exports import checkpoint
from tests.interop.test_interop_gguf_export import FAMILIES, as_cut, like_llama, recipe
from tformer.checkpoint.read import read_checkpoint
from tformer.interop.gguf_vocabulary import CUTS, texts_of
from tformer.interop.to_gguf import TYPES, export_gguf
from tformer.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf")


def returned(cli: Any, run: Any, folder: Path, dtype: str = "fp32") -> Any:
    export_gguf(run, folder / "model.gguf", dtype=dtype)
    outcome = cli("import", folder / "model.gguf", "--out", folder / "back")
    assert outcome.code == 0, outcome.err
    return read_checkpoint(folder / "back")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_comes_back(family: str, cli: Any, tmp_path: Path) -> None:
    run = checkpoint(tmp_path / "run", recipe(family), tokenizer=as_cut("gpt-2"))
    found, ours = returned(cli, run, tmp_path).weights(), run.weights()
    assert found.keys() == ours.keys() and all(torch.equal(found[name], ours[name]) for name in ours)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_is_read(dtype: str, cli: Any, tmp_path: Path) -> None:
    run = checkpoint(tmp_path / "run", recipe("llama"), tokenizer=as_cut("gpt-2"))
    found, ours = returned(cli, run, tmp_path, dtype).weights(), run.weights()
    name = "decoder.blocks.0.self_attention.qkv.weight"
    allowed = {"fp32": 0.0, "fp16": 1e-3, "bf16": 8e-3, "q8_0": 1e-2, "q4_0": 0.15}[dtype]
    assert (found[name] - ours[name]).abs().max() <= allowed * ours[name].abs().max()


@pytest.mark.parametrize("tokenizer", [*CUTS, "llama"])
def test_the_tokenizer_comes_back(tokenizer: str, cli: Any, tmp_path: Path) -> None:
    ours = like_llama() if tokenizer == "llama" else as_cut(tokenizer)
    run = checkpoint(tmp_path / "run", recipe("llama"), tokenizer=ours)
    text = returned(cli, run, tmp_path).tokenizer_json
    found = Tokenizer.from_json(text)
    texts = [text.lstrip() for text in texts_of(ours, 500)]
    assert found.encode_batch(texts) == ours.encode_batch(texts) and found.special == ours.special


def test_refusals_name_what_is_not_read(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    outcome = cli("import", tmp_path / "bad.gguf", "--out", tmp_path / "back")
    assert outcome.code == 2 and "not a usable GGUF file" in outcome.err
    for key, told in (("arch", "general.architecture"), ("key", "a key that tformer does not read")):
        writer = gguf.GGUFWriter(tmp_path / f"{key}.gguf", "mamba" if key == "arch" else "llama")
        writer.add_uint32("llama.expert_count", 4)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        outcome = cli("import", tmp_path / f"{key}.gguf", "--out", tmp_path / "back")
        assert outcome.code == 2 and told in outcome.err, outcome.err
