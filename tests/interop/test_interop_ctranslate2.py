"""CTranslate2's own converter reads an exported folder by the documented lines; `export` notes the keys it ignores."""

from __future__ import annotations

import copy
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interop.exports import GPT, ORIGINAL, checkpoint
from tformer.interop.exporting import export_checkpoint
from tformer.loading import Loaded, load
from tformer.tokenizer import Tokenizer

README = (Path(__file__).parents[2] / "tformer/interop/README.md").read_text("utf-8")
SECTION = README.partition("## CTranslate2\n")[2].partition("\n## ")[0]

SIDE: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "feedforward": {"d_ff": 24, "activation": "gelu"}}
LEARNED = {**SIDE, "positions": {"kind": "learned", "offset": 2}, "norm": {"place": "post"}, "final_norm": False}
PRE = {**LEARNED, "norm": {"place": "pre"}, "final_norm": True}
SINES = {**SIDE, "positions": {"kind": "sinusoidal", "layout": "interleaved"}}
BIASES: dict[str, Any] = {
    **SIDE,
    "positions": {"kind": "t5_bias", "buckets": 8, "max_distance": 12},
    "attention": {"kind": "full", "qkv_bias": False, "out_bias": False, "scale": 1.0},
    "feedforward": {"d_ff": 24, "activation": "relu", "bias": False},
    "norm": {"kind": "rmsnorm", "eps": 1e-6},
}
ROPE: dict[str, Any] = {
    **SIDE,
    "num_kv_heads": 1,
    "positions": {"kind": "rope", "layout": "halves"},
    "attention": {"kind": "full", "qkv_bias": False, "out_bias": False},
    "feedforward": {"d_ff": 24, "activation": "silu", "gated": True, "bias": False},
    "norm": {"kind": "rmsnorm", "eps": 0.02},
}
SANDWICH: dict[str, Any] = {
    **ROPE,
    "feedforward": {**ROPE["feedforward"], "activation": "gelu_tanh"},
    "norm": {"kind": "rmsnorm", "place": "sandwich", "unit_offset": True},
}
SCALED = [{"kind": "lm", "scale": "inverse_sqrt_d"}]


def recipe(arch: str, **model: Any) -> dict[str, Any]:
    return {"arch": arch, "model": {"d_model": 16, "max_seq_len": 24, **model}}


RECIPES = {
    "gpt2": GPT,
    "llama": recipe("llama", decoder=ROPE),
    "gemma2": recipe("llama", decoder=SANDWICH, embedding={"scale": "rounded"}, tie={"output": True}),
    "bart": recipe("bart", embedding={"norm": True}, encoder=LEARNED, decoder={**LEARNED, "num_layers": 1}),
    "t5": recipe("t5", encoder=BIASES, decoder=BIASES, heads=SCALED),
    "marian": ORIGINAL,
    "mbart": recipe("bart", embedding={"norm": True}, encoder=PRE, decoder=PRE),
    "pegasus": recipe("transformer", embedding={"scale": True}, encoder=SINES, decoder=SINES),
}


def changed(name: str, path: str, value: Any) -> dict[str, Any]:
    """A recipe with another value at a dotted path of its model section."""
    found = copy.deepcopy(RECIPES[name])
    *parents, last = path.split(".")
    section = found["model"]
    for parent in parents:
        section = section.setdefault(parent, {})
    section[last] = value
    return found


LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_max_seq_len": 8}
UNSCALED = {**changed("t5", "heads", [{"kind": "lm"}])}
IGNORED = {
    "gpt2": ("layer_norm_epsilon", changed("gpt2", "decoder.norm", {"eps": 0.02})),
    "llama": ("hidden_act", changed("llama", "decoder.feedforward.activation", "gelu")),
    "llama3": ("rope_scaling", changed("llama", "decoder.positions.scaling", LLAMA3)),
    "attention's cap": ("attn_logit_softcapping", changed("gemma2", "decoder.attention.softcap", 0.5)),
    "cap of logits": ("final_logit_softcapping", changed("gemma2", "heads", [{"kind": "lm", "softcap": 0.5}])),
    "scale of queries": ("query_pre_attn_scalar", changed("gemma2", "decoder.attention.scale", 1.0)),
    "heads of BART": ("decoder_attention_heads", changed("bart", "encoder.num_heads", 4)),
    "epsilon of T5": ("layer_norm_epsilon", {
        **RECIPES["t5"],
        "model": {
            **RECIPES["t5"]["model"],
            **{side: {**BIASES, "norm": {"kind": "rmsnorm", "eps": 0.02}} for side in ("encoder", "decoder")},
        },
    }),
    "scale of T5's logits": ("scale_decoder_outputs", UNSCALED),
}  # fmt: skip
"""Case -> the key of config.json that the converter ignores, and a recipe that has it."""


def exported(tmp_path: Path, values: dict[str, Any], name: str) -> tuple[str, ...]:
    """Write a run and its export as `name`; returns the notes."""
    opened = checkpoint(tmp_path / "run", values)
    report = export_checkpoint(opened, tmp_path / "hf", model_type=name if name in RECIPES else None)
    return report.notes


def convert(tmp_path: Path, class_name: str | None = None) -> None:
    """Run the documented lines. class_name: of a model whose loader the second one replaces."""
    pytest.importorskip("ctranslate2")
    from ctranslate2.converters import transformers as converters

    line, code = re.findall(r"```(?:bash|python)\n(.*?)```", SECTION, re.DOTALL)
    paths = {"base-hf": str(tmp_path / "hf"), "base-ct2": str(tmp_path / "ct2")}
    if class_name is None:
        words = [paths.get(word, word) for word in shlex.split(line)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", [word for word in words if word not in ("--quantization", "int8")])
            converters.main()
        return
    known = dict(converters._MODEL_LOADERS)
    code = code.replace("MarianMTModel", class_name)
    code = code.replace("MarianConfig", re.split("MTModel|ForConditionalGeneration", class_name)[0] + "Config")
    for name, path in paths.items():
        code = code.replace(f'"{name}"', repr(path))
    try:
        exec(code.replace(', quantization="int8"', ""), {})
    finally:
        converters._MODEL_LOADERS.update(known)


def names(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token(token) for token in ids]


def expected(run: Loaded, source: list[int] | None, written: list[int], start: list[int]) -> list[float]:
    """Log-probabilities of the tokens written, by tformer."""
    read = torch.tensor([[*start, *written[:-1]]])
    given = {"input_ids": read} if source is None else {"input_ids": torch.tensor([source]), "decoder_input_ids": read}
    with torch.no_grad():
        logprobs = run.model(**given).logits.log_softmax(-1)[0, -len(written) :]
    return [float(row[token]) for row, token in zip(logprobs, written, strict=True)]


def difference(tmp_path: Path) -> float:
    """The largest difference of log-probabilities between CTranslate2 and tformer."""
    import ctranslate2

    run = load(tmp_path / "run")
    tokenizer = run.text_tokenizer
    if run.model.encoder is None:
        ids = tokenizer.encode("fed cab aaa")
        [scored] = ctranslate2.Generator(str(tmp_path / "ct2")).score_batch([names(tokenizer, ids)])
        ours = expected(run, None, ids[1:], ids[:1])
    else:
        source, end = tokenizer.encode("fed cab", template=True), run.decoder_tokens.eos
        written = [*tokenizer.encode("abc"), end]
        translator = ctranslate2.Translator(str(tmp_path / "ct2"))
        [scored] = translator.score_batch([names(tokenizer, source)], [names(tokenizer, written[:-1])])
        ours = expected(run, source, written, [run.decoder_tokens.start])
    return max(abs(one - other) for one, other in zip(scored.log_probs, ours, strict=True))


OTHER_LOADER = {
    "marian": "MarianMTModel",
    "mbart": "MBartForConditionalGeneration",
    "pegasus": "PegasusForConditionalGeneration",
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_converter_s_model_gives_the_same_probabilities(name: str, tmp_path: Path) -> None:
    notes = exported(tmp_path, RECIPES[name], name)
    assert not [note for note in notes if "CTranslate2" in note]
    convert(tmp_path, OTHER_LOADER.get(name))
    assert difference(tmp_path) < 2e-5


@pytest.mark.parametrize("case", IGNORED)
def test_what_the_converter_ignores_is_noted_by_the_export(case: str, tmp_path: Path) -> None:
    key, values = IGNORED[case]
    name = "gemma2" if values["model"].get("embedding") == {"scale": "rounded"} else case
    [note] = [note for note in exported(tmp_path, values, name) if "CTranslate2" in note]
    assert note.startswith(f"CTranslate2's converter (4.8.5) ignores {key} ") and f"`{key}`" in SECTION
    convert(tmp_path)
    assert difference(tmp_path) > 1e-3


def test_two_vocabularies_are_refused_by_the_converter(tmp_path: Path) -> None:
    from tests.interop.exports import letters

    values = copy.deepcopy(ORIGINAL) | {"tokenizer": {"separate": True}}
    values["model"]["tie"] = {"source_target": False}
    export_checkpoint(checkpoint(tmp_path / "run", values, target=letters("seq2seq", "xyz ")), tmp_path / "hf")
    with pytest.raises(
        ValueError, match=r"Target vocabulary 0 has size 16 but the model expected a vocabulary of size 11"
    ):
        convert(tmp_path, OTHER_LOADER["marian"])
