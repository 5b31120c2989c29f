"""`tformer export --to gguf`: weights and vocabulary as transformers and the package gguf read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers

from tests.interop.exports import checkpoint
from tests.interop.gguf_shapes import SHAPES, shape
from tests.interop.test_interop_gguf import LLAMA_STACK, gpt
from tformer.build import build_model
from tformer.cli.export import ExportOptions
from tformer.interop.gguf_vocabulary import CUTS, joined, texts_of
from tformer.interop.to_gguf import TYPES, export_gguf, refusal
from tformer.recipe.load import recipe_from_yaml
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer

gguf = pytest.importorskip("gguf")

TEXT = "it is a small text, is it not? 12 34 5678; she will read It again:\n\n  the cat sat on the mat and a dog ran. "


def byte_bpe(text: str = TEXT, **options: Any) -> Tokenizer:
    return train_tokenizer(lambda: iter([text] * 3), TokenizerOptions(**{"vocab_size": 300, **options}))


def with_parts(tokenizer: Tokenizer, **parts: Any) -> Tokenizer:
    return Tokenizer.from_json(json.dumps(json.loads(tokenizer.to_json()) | parts))


def as_cut(name: str) -> Tokenizer:
    """A tokenizer that cuts as llama.cpp does under this name."""
    steps, whole = CUTS[name]
    base = byte_bpe()
    model = json.loads(base.to_json())["model"] | {"ignore_merges": whole}
    steps = [{"trim_offsets": False, **step} if step["type"] == "ByteLevel" else step for step in steps]
    return with_parts(base, pre_tokenizer={"type": "Sequence", "pretokenizers": steps}, model=model)


def like_llama() -> Tokenizer:
    """BPE over characters with bytes for the others and ▁ before every text, as Llama's."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *sorted(set("aehtcs"))]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "c"), ("a", "t"), ("▁c", "at"), ("s", "at")]
    vocabulary += ["".join(pair) for pair in merges]
    ids = {token: number for number, token in enumerate(vocabulary)}
    rust = RustTokenizer(models.BPE(ids, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    rust.decoder = decoders.Sequence(steps)
    rust.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer.from_json(rust.to_str())


def recipe(family: str) -> dict[str, Any]:
    """A tiny model of the shape of a family, with rows of 32 numbers and more."""
    if family == "gpt2":
        found = gpt(feedforward={"d_ff": 64, "activation": "gelu_tanh"})
    else:
        kinds: dict[str, Any] = {
            "llama": {},
            "qwen2": {"qkv_bias": True},
            "qwen3": {"qk_norm": "learned", "qk_norm_eps": 0.02},
        }
        attention = LLAMA_STACK["attention"] | kinds[family]
        stack = LLAMA_STACK | {"attention": attention, "feedforward": LLAMA_STACK["feedforward"] | {"d_ff": 64}}
        found = {
            "arch": "llama",
            "model": {"d_model": 32, "max_seq_len": 24, "decoder": stack, "tie": {"output": False}},
        }
    found["model"].pop("vocab_size", None)
    return found


FAMILIES = ("gpt2", "llama", "qwen2", "qwen3")


def our_logits(values: dict[str, Any], weights: dict[str, torch.Tensor], rows: int, ids: torch.Tensor) -> torch.Tensor:
    model = recipe_from_yaml(json.dumps(values), name="test").model
    built = build_model(model.model_copy(update={"vocab_size": rows})).eval()
    built.load_state_dict(weights, strict=False)
    with torch.no_grad():
        return built(input_ids=ids).logits


def opened(transformers: Any, path: Path, own: dict[str, Any] | None = None) -> Any:
    """What `from_pretrained(gguf_file=...)` gives, for which it needs accelerate. own: keys of config.json."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = load_gguf_checkpoint(str(path))["config"]
    unread = {"gpt2": {"n_positions": 24, "n_inner": 64}, "qwen3": {"head_dim": 8}}  # by transformers, of any file
    config |= unread.get(config["model_type"], {}) if own is None else own
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing = model.load_state_dict(tensors, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_same_logits(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = as_cut("gpt-2")
    run = checkpoint(tmp_path / "run", recipe(family), tokenizer=tokenizer)
    report = export_gguf(run, tmp_path / "model.gguf")
    assert report.dtype == "fp32" and report.how_to_load() == f'llama_cpp.Llama("{tmp_path / "model.gguf"}")'
    theirs = opened(transformers, tmp_path / "model.gguf")
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, tokenizer.vocab_size, (2, 12)))
    expected = our_logits(recipe(family), run.weights(), tokenizer.vocab_size, ids)
    with torch.no_grad():
        found = theirs(ids).logits
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


def test_transformers_makes_the_same_tokens_of_the_vocabulary(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = as_cut("gpt-2")
    export_gguf(checkpoint(tmp_path / "run", recipe("gpt2"), tokenizer=tokenizer), tmp_path / "model.gguf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    reading = tokenizer.reading_special()  # as theirs is
    for text in texts_of(tokenizer, 200):
        assert theirs(text)["input_ids"] == reading.encode(text), text


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_holds_the_weights(dtype: str, tmp_path: Path) -> None:
    run = checkpoint(tmp_path / "run", recipe("qwen2"), tokenizer=as_cut("gpt-2"))
    report = export_gguf(run, tmp_path / "model.gguf", dtype=dtype)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == report.num_tensors and report.num_parameters == sum(t.n_elements for t in tensors.values())
    kind = gguf.GGMLQuantizationType[TYPES[dtype][0]]
    assert tensors["blk.0.ffn_down.weight"].tensor_type == tensors["output.weight"].tensor_type == kind
    assert tensors["blk.0.attn_q.bias"].tensor_type == tensors["output_norm.weight"].tensor_type == 0  # F32
    ours = run.weights()["decoder.blocks.0.feedforward.down.weight"].numpy()
    found = gguf.quants.dequantize(tensors["blk.0.ffn_down.weight"].data, kind)
    allowed = {"fp32": 0.0, "fp16": 1e-3, "bf16": 8e-3, "q8_0": 1e-2, "q4_0": 0.15}[dtype]
    assert found.shape == ours.shape and np.abs(found - ours).max() <= allowed * np.abs(ours).max()
    assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType[TYPES[dtype][1]]


def test_rows_that_are_no_whole_blocks_are_fp16_and_a_note_says_so(tmp_path: Path) -> None:
    values = recipe("gpt2")
    values["model"]["decoder"]["feedforward"]["d_ff"] = 40
    report = export_gguf(
        checkpoint(tmp_path / "run", values, tokenizer=as_cut("gpt-2")), tmp_path / "m.gguf", dtype="q8_0"
    )
    tensors = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    types = gguf.GGMLQuantizationType
    assert tensors["blk.0.ffn_down.weight"] == types.F16 and tensors["blk.0.ffn_up.weight"] == types.Q8_0
    assert "multiple of 32" in " ".join(report.notes)


def fields(tokenizer: Tokenizer, folder: Path, **recipe_values: Any) -> dict[str, Any]:
    values = recipe("llama") | recipe_values
    export_gguf(checkpoint(folder / "run", values, tokenizer=tokenizer), folder / "model.gguf")
    reader = gguf.GGUFReader(folder / "model.gguf")
    stem = "tokenizer.ggml."
    return {name.removeprefix(stem): field.contents() for name, field in reader.fields.items() if stem in name}


@pytest.mark.parametrize("name", CUTS)
def test_a_pre_tokenization_that_llama_cpp_knows_keeps_its_name(name: str, tmp_path: Path) -> None:
    tokenizer = as_cut(name)
    found = fields(tokenizer, tmp_path)
    assert found["model"] == "gpt2" and found["pre"] == name and found["tokens"] == tokenizer.tokens
    merges = json.loads(tokenizer.to_json())["model"]["merges"]
    assert found["merges"] == [" ".join(pair) for pair in merges]
    end = tokenizer.token_id("<|endoftext|>")
    assert found["bos_token_id"] == found["eos_token_id"] == end and found["add_bos_token"] is False
    assert found["token_type"][end] == 3 and set(found["token_type"]) == {1, 3}


def test_a_pre_tokenization_of_our_own_is_written_if_ten_thousand_texts_are_cut_equally(tmp_path: Path) -> None:
    tokenizer = byte_bpe()
    assert len(texts_of(tokenizer)) == 10_000
    assert fields(tokenizer, tmp_path)["pre"] == "gpt-2"  # no capital contraction in the text, and no combining mark


@pytest.mark.parametrize("digits", [False, True])
def test_a_tokenizer_trained_for_llama_cpp_keeps_its_name(digits: bool, tmp_path: Path) -> None:
    tokenizer = byte_bpe(CONTRACTIONS + TEXT, pre_tokenization="gpt-2", digits=digits)
    assert fields(tokenizer, tmp_path)["pre"] == ("smollm" if digits else "gpt-2")


def test_rows_without_a_token_get_an_unused_one(tmp_path: Path) -> None:
    values = recipe("llama")
    values["model"]["vocab_size"] = 320
    found = fields(as_cut("gpt-2"), tmp_path, model=values["model"])
    assert len(found["tokens"]) == len(found["token_type"]) == 320 and found["tokens"][-1] == "[PAD319]"
    assert found["token_type"][-1] == 5


def test_a_tokenizer_like_llamas_gets_scores(tmp_path: Path) -> None:
    tokenizer = like_llama()
    found = fields(tokenizer, tmp_path)
    assert found["model"] == "llama" and found["add_space_prefix"] is True
    scores = dict(zip(found["tokens"], found["scores"], strict=True))
    assert scores["th"] > scores["the"] > scores["▁the"]
    kinds = dict(zip(found["tokens"], found["token_type"], strict=True))
    assert (kinds["<unk>"], kinds["<s>"], kinds["<0x41>"], kinds["the"]) == (2, 3, 6, 1)


def test_pieces_are_joined_as_sentencepiece_does() -> None:
    tokenizer = like_llama()
    ids = {token: number for number, token in enumerate(tokenizer.tokens)}
    merges = json.loads(tokenizer.to_json())["model"]["merges"]
    scores = {"".join(pair): -float(rank) for rank, pair in enumerate(merges)}
    for text in ("the cat sat", "catthe", "  the é", "", "that heath"):
        assert joined(text, ids, scores, prefix=True) == tokenizer.encode(text)


CONTRACTIONS = "she'll read and it'll do, "


@pytest.mark.parametrize(
    ("tokenizer", "told"),
    [
        (
            lambda: byte_bpe(CONTRACTIONS),
            "of 10,000 texts differ",
        ),
        pytest.param(lambda: byte_bpe(lowercase=True), "texts differ", marks=pytest.mark.slow),
        pytest.param(lambda: byte_bpe(added_tokens=("cat",)), "texts differ", marks=pytest.mark.slow),
        (lambda: train_tokenizer(lambda: iter([TEXT]), TokenizerOptions(model="char")), "kind char"),
        (lambda: byte_bpe(model="unigram", vocab_size=60), "kind unigram"),
        (lambda: byte_bpe(model="bpe"), "kind bpe"),
    ],
    ids=["contractions after a mark", "lower case", "a whole word", "char", "unigram", "bpe without bytes"],
)
def test_a_tokenizer_that_llama_cpp_lacks_is_refused_with_the_reason(tokenizer: Any, told: str, tmp_path: Path) -> None:
    run = checkpoint(tmp_path / "run", recipe("llama"), tokenizer=tokenizer())
    with pytest.raises(InputError, match=told):
        export_gguf(run, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def changed(**decoder: Any) -> dict[str, Any]:
    values = recipe("qwen3")
    values["model"]["decoder"] |= decoder
    return values


WINDOW = {"kind": "sliding_window", "window": 4, "qkv_bias": False, "out_bias": False}
ROPE = LLAMA_STACK["positions"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (changed(attention=WINDOW), "attention.kind is sliding_window, expected full"),
        (changed(attention={"kind": "full", "qk_norm": "learned", "qk_norm_eps": 0.02}), "bias is true"),
        (changed(positions=ROPE | {"scaling": {"kind": "dynamic", "factor": 2.0}}), "positions.scaling is given"),
    ],
    ids=["window", "biases", "scaling"],
)
def test_a_model_that_llama_cpp_computes_otherwise_is_refused(
    values: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=told):
        export_gguf(checkpoint(tmp_path / "run", values, tokenizer=as_cut("gpt-2")), tmp_path / "model.gguf")


def test_the_command_writes_one_file(cli: Any, tmp_path: Path) -> None:
    checkpoint(tmp_path / "run", recipe("llama"), tokenizer=as_cut("gpt-2"))
    out = tmp_path / "new" / "model.gguf"
    report = json.loads(cli("export", tmp_path / "run", "--to", "gguf", "--dtype", "q4_0", "--out", out, "--json").out)
    assert report["files"] == ["model.gguf"] and report["dtype"] == "q4_0" and report["bytes"] == out.stat().st_size
    assert cli("export", tmp_path / "run", "--to", "gguf", "--out", out).code == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dtype": "q8_0"}, "number format of GGUF only"),
        ({"dtype": "int8", "to": "gguf"}, "number format of ONNX only"),
    ],
)
def test_number_formats_belong_to_a_format(options: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=told):
        ExportOptions(out=tmp_path / "x", **options).check()


def test_the_name_of_the_file_ends_in_gguf(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected the name of a file"):
        export_gguf(checkpoint(tmp_path / "run", recipe("llama"), tokenizer=as_cut("gpt-2")), tmp_path / "folder")


def test_a_vocabulary_like_llamas_without_bytes_is_refused(tmp_path: Path) -> None:
    document = json.loads(like_llama().to_json())
    ids = {token: number for token, number in document["model"]["vocab"].items() if token != "<0x41>"}
    document["model"]["vocab"] = {token: number for number, token in enumerate(ids)}
    run = checkpoint(tmp_path / "run", recipe("llama"), tokenizer=Tokenizer.from_json(json.dumps(document)))
    with pytest.raises(InputError, match="the vocabulary lacks <0x41>"):
        export_gguf(run, tmp_path / "model.gguf")


def test_the_reason_of_a_refusal_is_found_without_writing() -> None:
    tokenizer, other = as_cut("gpt-2"), byte_bpe(lowercase=True)
    model = recipe_from_yaml(json.dumps(recipe("qwen3")), name="test").model.model_copy(update={"vocab_size": 300})
    assert refusal(model, family="llama") is None and refusal(model, family="llama", tokenizer=tokenizer) is None
    assert "texts differ" in str(refusal(model, family="llama", tokenizer=other))
    alibi = recipe_from_yaml(json.dumps(gpt(positions={"kind": "alibi"})), name="test").model
    assert "no class of Hugging Face computes this model" in str(refusal(alibi, family="gpt"))


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_reads_the_same_logits_of_further_shapes(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if SHAPES[name][0] in ("gemma", "phi") or "biases" in name or "llama 3" in name or "texts" in name:
        pytest.skip("transformers does not read this of a GGUF file")
    tokenizer = as_cut("gpt-2")
    run = checkpoint(tmp_path / "run", shape(name), tokenizer=tokenizer)
    export_gguf(run, tmp_path / "model.gguf", model_type="phi3" if name == "phi3" else None)
    theirs = opened(transformers, tmp_path / "model.gguf", SHAPES[name][1])
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, tokenizer.vocab_size, (2, 12)))
    expected = our_logits(shape(name), run.weights(), tokenizer.vocab_size, ids)
    with torch.no_grad():
        found = theirs(ids).logits
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()
