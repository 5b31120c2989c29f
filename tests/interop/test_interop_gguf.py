"""GGUF files: what is in them, and that llama.cpp computes of them what tformer does (where it is installed)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.interop.exports import GPT, random_weights
from tformer.build import build_model
from tformer.interop.exporting import Tokenizers
from tformer.interop.to_gguf import planned, write_gguf
from tformer.recipe.load import recipe_from_yaml
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError

gguf = pytest.importorskip("gguf")

VOCABULARY = 40
NORM = {"eps": 0.02}  # so large that the wrong one shows
LLAMA_STACK: dict[str, Any] = {
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "positions": {"kind": "rope", "layout": "halves", "base": 500.0},
    "attention": {"kind": "full", "qkv_bias": False, "out_bias": False},
    "feedforward": {"d_ff": 48, "activation": "silu", "gated": True, "bias": False},
    "norm": {"kind": "rmsnorm", **NORM},
}
SCALING = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0, "original_max_seq_len": 16}


def gpt(**decoder: Any) -> dict[str, Any]:
    model = {"d_model": 32, "max_seq_len": 24, "vocab_size": VOCABULARY}
    return {"arch": "gpt", "model": {**model, "decoder": {**GPT["model"]["decoder"], "norm": NORM, **decoder}}}


def llama(*, tied: bool = False, **decoder: Any) -> dict[str, Any]:
    model = {"d_model": 32, "max_seq_len": 24, "vocab_size": VOCABULARY, "tie": {"output": tied}}
    return {"arch": "llama", "model": {**model, "decoder": {**LLAMA_STACK, **decoder}}}


MODELS = {
    "gpt2": gpt(),
    "llama": llama(),
    "llama, tied": llama(tied=True),
    "llama, pairs beside each other": llama(positions={**LLAMA_STACK["positions"], "layout": "interleaved"}),
    "llama, scaled frequencies": llama(positions={**LLAMA_STACK["positions"], "scaling": SCALING}),
}


def written(path: Path, values: dict[str, Any]) -> tuple[Recipe, dict[str, torch.Tensor]]:
    recipe = recipe_from_yaml(json.dumps(values), name="test")
    weights = random_weights(values, Tokenizers(None, None))
    choice, vocabulary = planned(recipe.model, family=recipe.arch)
    write_gguf(path, choice, recipe.model, weights, dtype="fp32", vocabulary=vocabulary)
    return recipe, weights


def ids_BT() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCABULARY, (3, 12))


def expected(recipe: Recipe, weights: dict[str, torch.Tensor]) -> np.ndarray:
    model = build_model(recipe.model).eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(ids_BT())).logits.numpy()


def test_the_file_has_the_sizes_and_every_number(tmp_path: Path) -> None:
    recipe, weights = written(tmp_path / "model.gguf", MODELS["gpt2"])
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    built = build_model(recipe.model, device="meta")
    assert sum(int(tensor.n_elements) for tensor in tensors.values()) == sum(p.numel() for p in built.parameters())
    ours = weights["decoder.blocks.1.self_attention.qkv.weight"].numpy()
    assert np.array_equal(tensors["blk.1.attn_qkv.weight"].data, ours)
    assert np.array_equal(tensors["position_embd.weight"].data, weights["decoder.positions.weight"].numpy())
    sizes = {"context_length": 24, "embedding_length": 32, "block_count": 2, "feed_forward_length": 24}
    found = {key: reader.fields[f"gpt2.{key}"].contents() for key in sizes}
    assert found == sizes and reader.fields["gpt2.vocab_size"].contents() == VOCABULARY
    assert reader.fields["general.architecture"].contents() == "gpt2"
    assert reader.fields["tokenizer.ggml.model"].contents() == "none"


def test_the_coordinates_that_rope_rotates_together_are_neighbours(tmp_path: Path) -> None:
    _, weights = written(tmp_path / "model.gguf", MODELS["llama"])
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    heads = weights["decoder.blocks.0.self_attention.qkv.weight"].numpy().reshape(8, 8, 32)  # 4 of q, 2 of k, 2 of v
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    for name, ours in (("q", heads[:4, order]), ("k", heads[4:6, order]), ("v", heads[6:])):
        assert np.array_equal(tensors[f"blk.0.attn_{name}.weight"], ours.reshape(-1, 32)), name


def test_scaled_frequencies_become_divisors(tmp_path: Path) -> None:
    written(tmp_path / "model.gguf", MODELS["llama, scaled frequencies"])
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    divisors = tensors["rope_freqs.weight"]
    assert divisors[0] == 1.0 and divisors[-1] == SCALING["factor"] and (np.diff(divisors) >= 0).all()


@pytest.mark.parametrize("kind", MODELS)
def test_llama_cpp_computes_the_same_logits_for_prompts_and_single_tokens(kind: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    from tests.benchmarks.llama_cpp_peer import Engine

    recipe, weights = written(tmp_path / "model.gguf", MODELS[kind])
    exact = {
        "type_k": llama_cpp.GGML_TYPE_F32,
        "type_v": llama_cpp.GGML_TYPE_F32,
        "flash_attn_type": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
    }
    engine = Engine(tmp_path / "model.gguf", rows=3, prompt=11, new_tokens=1, **exact)
    logits_BTV, ids = expected(recipe, weights), ids_BT()
    allowed = 1e-3 if kind == "gpt2" else 1e-5  # its GELU is a table of fp16 numbers
    for _ in range(2):
        for start, stop in ((0, 11), (11, 12)):
            found_BV = engine.read(ids[:, start:stop])
            assert np.abs(found_BV - logits_BTV[:, stop - 1]).max() < allowed * np.abs(logits_BTV).max()
        engine.clear()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (gpt(feedforward={"d_ff": 24, "activation": "relu"}), "llama.cpp"),
        (llama(feedforward={**LLAMA_STACK["feedforward"], "activation": "gelu_tanh"}), "activation is gelu_tanh"),
        (gpt(positions={"kind": "alibi"}), "Bloom|no class of Hugging Face"),
        (gpt(feedforward={"d_ff": 24, "activation": "relu2"}), "feedforward.activation: relu2"),
    ],
    ids=["relu", "gated gelu", "alibi", "relu2"],
)
def test_what_llama_cpp_does_not_compute_is_refused_by_name(values: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=told):
        written(tmp_path / "model.gguf", values)
    assert list(tmp_path.iterdir()) == []
