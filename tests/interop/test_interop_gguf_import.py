"""`tformer import FILE.gguf`: what export wrote comes back, and damaged files are refused in one line."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.interop.exports import checkpoint
from tests.interop.gguf_shapes import SHAPES, shape
from tests.interop.test_interop_gguf_export import FAMILIES, as_cut, like_llama, recipe
from tformer.checkpoint.read import Checkpoint, read_checkpoint
from tformer.interop.choose import differences
from tformer.interop.exporting import resolved, tokenizers_of
from tformer.interop.from_gguf import llama3_scaling, unpack_gguf
from tformer.interop.gguf_vocabulary import CUTS, texts_of
from tformer.interop.to_gguf import TYPES, export_gguf
from tformer.interop.weight_files import open_weights
from tformer.nn.positions.rope import RopeScaling, scale_frequencies
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.chat import ChatTemplate

gguf = pytest.importorskip("gguf")


def returned(cli: Any, run: Checkpoint, folder: Path, dtype: str = "fp32", *options: Any) -> Checkpoint:
    export_gguf(run, folder / "model.gguf", dtype=dtype)
    outcome = cli("import", folder / "model.gguf", "--out", folder / "back", *options)
    assert outcome.code == 0, outcome.err
    assert sorted(path.name for path in folder.iterdir()) == ["back", "model.gguf", "run"]  # nothing else is left
    return read_checkpoint(folder / "back")


@pytest.mark.parametrize("name", [*FAMILIES, *SHAPES])
def test_every_number_and_option_comes_back(name: str, cli: Any, tmp_path: Path) -> None:
    values = shape(name) if name in SHAPES else recipe(name)
    run = checkpoint(tmp_path / "run", values, tokenizer=as_cut("gpt-2"))
    back = returned(cli, run, tmp_path)
    found, ours = back.weights(), run.weights()
    gains = 1e-6 if "gemma" in name else 0.0  # the file has 1 + w
    assert found.keys() == ours.keys()
    assert all((found[key] - ours[key]).abs().max() <= gains for key in ours)
    first, second = (resolved(one.recipe, tokenizers_of(one)) for one in (run, back))
    unlike = {path.rpartition(".")[2] for path, *_ in differences(first, second)}
    # longrope: the file has the factor of cosines that follows from `factor`
    assert unlike <= ({"factor", "attention_factor"} if "texts" in name else set()), unlike


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
    values = recipe("llama")
    values["model"]["vocab_size"] = ours.vocab_size + 3  # rows without a token
    run = checkpoint(tmp_path / "run", values, tokenizer=ours)
    found = Tokenizer.from_json(returned(cli, run, tmp_path).tokenizer_json)
    texts = [text.lstrip() for text in texts_of(ours, 500)]
    assert found.encode_batch(texts) == ours.encode_batch(texts) and found.special == ours.special
    assert found.tokens == ours.tokens


def test_a_tokenizer_can_take_the_place_of_the_vocabulary(cli: Any, tmp_path: Path) -> None:
    ours = as_cut("gpt-2")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "own.json").write_text(ours.to_json())
    run = checkpoint(tmp_path / "run" / "1", recipe("llama"), tokenizer=ours)
    back = returned(cli, run, tmp_path, "fp32", "--tokenizer", tmp_path / "run" / "own.json")
    assert Tokenizer.from_json(back.tokenizer_json).to_json() == ours.to_json()


@pytest.mark.parametrize(("size", "base", "original"), [(128, 500000.0, 8192), (64, 500000.0, 8192), (128, 1e6, 16384)])
def test_the_scaling_of_llama_3_is_found_from_its_divisors(size: int, base: float, original: int) -> None:
    scaling = RopeScaling(factor=32.0, original_max_seq_len=original)
    frequencies = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    divisors = (frequencies / scale_frequencies(frequencies, scaling)).float()
    found = llama3_scaling(divisors, size=size, base=base)
    expected = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert found == {"rope_type": "llama3", **expected, "original_max_position_embeddings": original}
    divisors[3] = 7.0
    assert llama3_scaling(divisors, size=size, base=base) is None


SMALL = {"embedding_length": 32, "block_count": 1, "feed_forward_length": 32, "attention.head_count": 2}
SMALL |= {"context_length": 16, "attention.layer_norm_rms_epsilon": 1e-5}


def small(
    path: Path,
    *,
    arch: str = "llama",
    odd: str = "",
    rows: int = 32,
    down: Any = None,
    bare: bool = False,
    **values: Any,
) -> None:
    """A Llama of one layer as a file, with changed values.

    odd: the name of a tensor that is left out, or added, or has a type that is not read. rows: of the queries.
    down: the type and the bytes of a matrix [32, 256]. bare: without tensors.
    """
    if down is not None:
        values[f"{arch}.feed_forward_length"] = 256
    writer = gguf.GGUFWriter(path, arch)
    for key, value in ({f"{arch}.{key}": value for key, value in SMALL.items()} | values).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        if value is not None:
            add[type(value)](key, value)
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    layer: dict[str, tuple[int, ...]] = {f"blk.0.{name}.weight": (32, 32) for name in matrices}
    layer |= {f"blk.0.{name}.weight": (32,) for name in ("attn_norm", "ffn_norm")}
    layer["blk.0.attn_q.weight"] = (rows, 32)
    if down is not None:
        layer |= {
            "blk.0.ffn_gate.weight": (256, 32),
            "blk.0.ffn_up.weight": (256, 32),
            "blk.0.ffn_down.weight": (32, 256),
        }
    shapes = {"token_embd.weight": (4, 32), "output_norm.weight": (32,), **layer}
    if odd and odd not in shapes:
        shapes[odd] = (32,)
    for name, size in () if bare else shapes.items():
        if down is not None and name == "blk.0.ffn_down.weight":
            writer.add_tensor(name, down[1], raw_dtype=down[0])
        elif name != odd or "ffn_up" in name or "sinks" in name:
            tensor = torch.zeros(size, dtype=torch.int8 if name == odd and "ffn_up" in name else torch.float32)
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file() if not bare else writer.write_ti_data_to_file()
    writer.close()


VOCABULARY: dict[str, Any] = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}
VOCABULARY |= {"tokenizer.ggml.tokens": ["a", "b", "ab", "c"], "tokenizer.ggml.merges": ["a b"]}


def with_bytes(at: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda file: file[:at] + data + file[at + len(data) :]


DAMAGES: dict[str, tuple[dict[str, Any], Callable[[bytes], bytes], str]] = {
    "other file": ({}, with_bytes(0, b"PK"), "begins with b'GGUF', found b'PKUF'"),
    "empty": ({}, lambda file: b"", "begins with b'GGUF', found b''"),
    "big-endian": ({}, with_bytes(4, struct.pack(">I", 3)), "its numbers are big-endian"),
    "version": ({}, with_bytes(4, struct.pack("<I", 9)), "not a usable GGUF file: .*version 9"),
    "header cut short": ({}, lambda file: file[:60], "not a usable GGUF file: it has 60 bytes"),
    "tensors cut short": ({}, lambda file: file[:-64], "not a usable GGUF file: it has .* bytes"),
    "count of tensors": ({}, with_bytes(8, struct.pack("<Q", 2**60)), "not a usable GGUF file"),
    "count of keys": ({}, with_bytes(16, struct.pack("<Q", 2**63)), "not a usable GGUF file"),
    "count of tokens": (
        {"tokenizer.ggml.tokens": ["#" * 16]},
        lambda file: with_bytes(file.index(b"#" * 16) - 16, struct.pack("<Q", 2**60))(file),
        "not a usable GGUF file",
    ),
    "list of lists": (
        {"tokenizer.ggml.tokens": ["#" * 16]},
        lambda file: with_bytes(file.index(b"#" * 16) - 20, struct.pack("<I", 9))(file),
        "not a usable GGUF file",
    ),
    "no text": (
        {"tokenizer.ggml.tokens": ["#" * 16]},
        lambda file: file.replace(b"#" * 16, b"\xff" * 16),
        "not a usable GGUF file: .*utf-8",
    ),
    "template of another type": ({"tokenizer.chat_template": [1]}, bytes, "chat_template: found .*, expected str"),
    "length of a key": ({}, with_bytes(24, struct.pack("<Q", 2**40)), "not a usable GGUF file: it has"),
    "architecture": ({"arch": "mamba"}, bytes, "general.architecture: found 'mamba', tformer reads gemma, gemma2"),
    "architecture of another type": ({"general.architecture": ["llama"]}, bytes, "found .*, expected str"),
    "key": ({"llama.expert_count": 4}, bytes, "llama.expert_count: found 4, a key that tformer does not read"),
    "missing key": ({"llama.block_count": None}, bytes, "llama: the key block_count is missing"),
    "heads by layer": ({"llama.attention.head_count": [2, 2]}, bytes, r"attention.head_count: found \[2, 2\]"),
    "rotated share": (
        {"llama.rope.dimension_count": 4},
        bytes,
        "llama: rope.dimension_count: found 4, tformer has this architecture with 16 only",
    ),
    "scaling": ({"llama.rope.scaling.type": "yarn"}, bytes, "scaling.type: found yarn, tformer reads linear, llama3"),
    "size of values": ({"llama.attention.value_length": 8}, bytes, "attention.value_length: found 8, .* 16 only"),
    "no embedding": ({"odd": "token_embd.weight"}, bytes, "missing token_embd.weight"),
    "merge": ({"tokenizer.ggml.merges": ["a c"]}, bytes, "merges: found 'a c', which joins no two tokens"),
    "part of a model": ({"split.count": 3}, bytes, "is one of 3 files"),
    "type": ({"odd": "blk.0.ffn_up.weight"}, bytes, "ffn_up.weight has the type I8, which the package gguf"),
    "tensor missing": ({"odd": "blk.0.ffn_norm.weight"}, bytes, "missing blk.0.ffn_norm.weight"),
    "rows of no head": ({"rows": 31}, bytes, r"attn_q.weight: its shape \[31, 32\] contradicts the keys"),
    "rows of other heads": ({"rows": 64}, bytes, r"q_proj.weight has the shape \[64, 32\], expected \[32, 32\]"),
    "tensor unknown": ({"odd": "blk.0.attn_sinks.weight"}, bytes, "unknown blk.0.attn_sinks.weight"),
    "tokens of another type": ({"tokenizer.ggml.tokens": [1, 2]}, bytes, "ggml.tokens: expected a list of .* type str"),
    "id of another type": ({"tokenizer.ggml.eos_token_id": "a"}, bytes, "eos_token_id: found 'a', expected an id"),
    "cuts of another type": ({"tokenizer.ggml.pre": ["gpt-2"]}, bytes, r"pre-tokenization \['gpt-2'\], tformer reads"),
    "no vocabulary": ({"tokenizer.ggml.tokens": None}, bytes, "has no vocabulary"),
    "other vocabulary": ({"tokenizer.ggml.model": "bert"}, bytes, "found the model 'bert'"),
    "other cuts": ({"tokenizer.ggml.pre": "falcon"}, bytes, "pre-tokenization 'falcon', tformer reads llama, and gpt2"),
    "token twice": ({"tokenizer.ggml.tokens": ["a", "b", "a", "d"]}, bytes, "tokens: found 'a' twice"),
    "types": ({"tokenizer.ggml.token_type": [1, 1]}, bytes, "token_type: found 2 values for 4 tokens"),
    "no scores": ({"tokenizer.ggml.model": "llama"}, bytes, "scores: found 0 values for 4 tokens"),
    "endless token": (
        {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a" * 1001], "tokenizer.ggml.scores": [0.0]},
        bytes,
        "tokens: found a token of 1,001 characters, expected at most 1,000",
    ),
    "special id": ({"tokenizer.ggml.eos_token_id": 4}, bytes, "eos_token_id: found 4, expected an id below 4"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_other_file_is_refused_by_its_name(damage: str, cli: Any, tmp_path: Path) -> None:
    values, change, told = DAMAGES[damage]
    path = tmp_path / "model.gguf"
    small(path, **(VOCABULARY | values))
    path.write_bytes(change(path.read_bytes()))
    outcome = cli("import", path, "--out", tmp_path / "back", "--json")
    error = json.loads(outcome.out)["error"]
    assert outcome.code == 2 and str(path) in error and "tformer-gguf" not in error
    assert re.search(told, error), error
    assert list(tmp_path.iterdir()) == [path]


TYPES_OF_GGUF = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S"),
    *(
        "IQ1_M",
        "IQ2_XXS",
        "IQ2_XS",
        "IQ2_S",
        "IQ3_XXS",
        "IQ3_S",
        "IQ4_NL",
        "IQ4_XS",
        "TQ1_0",
        "TQ2_0",
        "MXFP4",
        "NVFP4",
    ),
)


@pytest.mark.parametrize("name", TYPES_OF_GGUF)
def test_every_type_is_read_as_the_package_dequantizes_it(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    size = gguf.quant_shape_to_byte_shape((32, 256), kind)
    blocks = np.random.default_rng(0).integers(0, 64, size, np.uint8)  # small bytes: every factor of a block is finite
    small(tmp_path / "model.gguf", down=(kind, blocks), **VOCABULARY)
    (tmp_path / "folder").mkdir()
    unpack_gguf(tmp_path / "model.gguf", tmp_path / "folder")
    found = open_weights(tmp_path / "folder").read(["model.layers.0.mlp.down_proj.weight"])
    expected = gguf.quants.dequantize(blocks, kind)
    assert np.abs(expected).max() > 0
    assert np.array_equal(found["model.layers.0.mlp.down_proj.weight"].numpy(), expected)


def test_a_quantized_file_is_imported(cli: Any, tmp_path: Path) -> None:
    weights = torch.randn(32, 256, generator=torch.Generator().manual_seed(0)).numpy()
    kind = gguf.GGMLQuantizationType.Q4_1
    small(tmp_path / "model.gguf", down=(kind, gguf.quants.quantize(weights, kind)), **VOCABULARY)
    outcome = cli("import", tmp_path / "model.gguf", "--out", tmp_path / "back")
    assert outcome.code == 0, outcome.err
    read = read_checkpoint(tmp_path / "back").weights().values()
    [found] = [tensor for tensor in read if tensor.shape == weights.shape]
    assert 0 < np.abs(found.numpy() - weights).max() < 0.25


CHAT = (
    "{% if messages[0]['role'] != 'system' %}{{ 'You help.|' }}{% endif %}"
    "{% for message in messages %}{{ message['role'] + ':' + message['content'] + '|' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@pytest.mark.parametrize("own_tokenizer", [False, True])
def test_the_chat_template_and_its_system_message_come_along(own_tokenizer: bool, cli: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    small(path, **VOCABULARY, **{"tokenizer.chat_template": CHAT})
    assert cli("import", path, "--out", tmp_path / "first").code == 0
    options = ("--tokenizer", tmp_path / "first" / "tokenizer.json") if own_tokenizer else ()
    assert cli("import", path, "--out", tmp_path / "back", *options).code == 0
    run = read_checkpoint(tmp_path / "back")
    assert run.recipe.tokenizer.chat_template == CHAT
    template = ChatTemplate(Tokenizer.from_json(run.tokenizer_json or ""), run.recipe.tokenizer.chat_template)
    assert template.text([{"role": "user", "content": "hi"}], prompt=True) == "You help.|user:hi|assistant:"


@pytest.mark.parametrize("template", [CHAT, "chatml"])
def test_an_exported_chat_template_writes_the_same_prompts(template: str, cli: Any, tmp_path: Path) -> None:
    values = recipe("llama")
    values["tokenizer"] = values.get("tokenizer", {}) | {"chat_template": template}
    run = checkpoint(tmp_path / "run", values, tokenizer=as_cut("gpt-2"))
    back = returned(cli, run, tmp_path)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    ours, found = (
        ChatTemplate(Tokenizer.from_json(one.tokenizer_json or ""), one.recipe.tokenizer.chat_template).text(messages)
        for one in (run, back)
    )
    assert found == ours and "generation %}" not in (back.recipe.tokenizer.chat_template or "")


EARLY: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"arch": "mamba"}, "general.architecture: found 'mamba'"),
    "type": ({"odd": "blk.0.ffn_up.weight"}, "has the type I8"),
    "no weights": ({"bare": True}, "holds no weights"),
    "tensors": ({"odd": "blk.0.ffn_norm.weight"}, "missing blk.0.ffn_norm.weight"),
}


@pytest.mark.parametrize("case", EARLY)
def test_the_header_refuses_before_the_vocabulary_is_read(case: str, tmp_path: Path) -> None:
    """The vocabulary is damaged, which nothing says: its texts are found by their lengths and not read."""
    values, told = EARLY[case]
    path = tmp_path / "model.gguf"
    small(path, **VOCABULARY | {"tokenizer.ggml.tokens": ["#" * 16]} | values)
    path.write_bytes(path.read_bytes().replace(b"#" * 16, b"\xff" * 16))
    with pytest.raises(InputError, match=told):
        unpack_gguf(path, tmp_path)


def test_a_large_vocabulary_takes_no_array_operation_for_each_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(
        tmp_path / "model.gguf", bare=True, **VOCABULARY | {"tokenizer.ggml.tokens": [f"t{i}" for i in range(20_000)]}
    )
    calls: list[int] = []
    read = gguf.GGUFReader._get
    monkeypatch.setattr(gguf.GGUFReader, "_get", lambda self, *given: (calls.append(1), read(self, *given))[1])
    with pytest.raises(InputError, match="holds no weights"):
        unpack_gguf(tmp_path / "model.gguf", tmp_path)
    assert len(calls) < 500


def test_a_vocabulary_that_is_not_read_is_refused_before_weights_are_written(tmp_path: Path) -> None:
    small(tmp_path / "model.gguf", **VOCABULARY | {"tokenizer.ggml.pre": "falcon"})
    with pytest.raises(InputError, match="falcon"):
        unpack_gguf(tmp_path / "model.gguf", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_other_commands_say_how_to_read_the_file(cli: Any, tmp_path: Path) -> None:
    small(tmp_path / "model.gguf")
    outcome = cli("generate", tmp_path / "model.gguf", "--prompt", "a")
    assert outcome.code == 2 and f"tformer import {tmp_path / 'model.gguf'} --out DIR" in outcome.err


def test_the_small_file_of_these_tests_is_read_as_it_is(cli: Any, tmp_path: Path) -> None:
    small(tmp_path / "model.gguf", **VOCABULARY)
    outcome = cli("import", tmp_path / "model.gguf", "--out", tmp_path / "back")
    assert outcome.code == 0, outcome.err
    assert math.prod(read_checkpoint(tmp_path / "back").weights()["embedding.weight"].shape) == 128
