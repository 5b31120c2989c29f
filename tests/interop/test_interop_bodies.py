"""Bodies without a head: BertModel, GPT2Model, T5EncoderModel and the others, there and back, poolers included."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.interop.encoder_models import DISTIL, MASK, SIZES, batch, make
from tests.interop.parity import assert_agree, assert_parity, imported, randomised, saved, tokens
from tests.interop.tiny_folders import edit_json
from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.read_model import read_model
from tformer.model import Transformer
from tformer.support.errors import InputError

IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 20,
    "intermediate_size": 27,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 29,
    **IDS,
}
GPT2 = {"vocab_size": 61, "n_embd": 20, "n_layer": 2, "n_head": 4, "n_positions": 29, **IDS}
BART = {
    "vocab_size": 61,
    "d_model": 20,
    "max_position_embeddings": 29,
    **{f"{side}_{name}": value for side in ("encoder", "decoder")
       for name, value in {"layers": 2, "attention_heads": 5, "ffn_dim": 27}.items()},
    **IDS,
    "decoder_start_token_id": 2,
}  # fmt: skip
T5 = {"vocab_size": 61, "d_model": 20, "d_kv": 6, "d_ff": 27, "num_layers": 2, "num_heads": 4}
IMAGES = {
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 36,
    "image_size": 12,
    "patch_size": 4,
}
LLAMA = {**DECODER, "tie_word_embeddings": False}
# Class -> (configuration, its values). The weights of every one lack the head.
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "BertModel": ("BertConfig", SIZES),
    "DistilBertModel": ("DistilBertConfig", DISTIL),
    "RobertaModel": ("RobertaConfig", SIZES),
    "CamembertModel": ("CamembertConfig", SIZES),
    "XLMRobertaModel": ("XLMRobertaConfig", SIZES),
    "ElectraModel": ("ElectraConfig", {**SIZES, "embedding_size": 12}),
    "ViTModel": ("ViTConfig", IMAGES),
    "GPT2Model": ("GPT2Config", {**GPT2, "tie_word_embeddings": False}),
    "OPTModel": ("OPTConfig", {
        "vocab_size": 61, "hidden_size": 20, "ffn_dim": 27, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 29, "word_embed_proj_dim": 20, "tie_word_embeddings": False, **IDS,
    }),
    "BloomModel": ("BloomConfig", {
        "vocab_size": 61, "hidden_size": 20, "n_layer": 2, "n_head": 4, "tie_word_embeddings": False, **IDS,
    }),
    "LlamaModel": ("LlamaConfig", LLAMA),
    "MistralModel": ("MistralConfig", {**LLAMA, "sliding_window": 5}),
    "Qwen2Model": ("Qwen2Config", LLAMA),
    "Qwen3Model": ("Qwen3Config", LLAMA),
    "T5EncoderModel": ("T5Config", T5),
    "MT5EncoderModel": ("MT5Config", T5),
}  # fmt: skip


def hidden_of(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    found = model(**inputs)
    hidden: Tensor = found.hidden if isinstance(model, Transformer) else found.last_hidden_state
    if hidden.shape[:2] == MASK.shape:
        hidden = hidden[MASK.bool()]
    if isinstance(model, Transformer):
        pooled = found.head("pooler") if "pooler" in found.heads else None
    else:
        pooled = getattr(found, "pooler_output", None)
    return hidden if pooled is None else torch.cat([hidden.flatten(), pooled.flatten()])


@pytest.mark.parametrize("name", BODIES)
def test_a_body_without_a_head(tmp_path: Path, name: str) -> None:
    config, values = BODIES[name]
    reference = getattr(transformers, name)(getattr(transformers, config)(**values))
    if name == "ViTModel":
        inputs = {"pixel_values": torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(2))}
    else:
        inputs = batch(pad=values.get("pad_token_id", 1))
    _, foreign = assert_parity(
        reference, inputs, tmp_path, theirs=hidden_of, ours=hidden_of, model_type=reference.config.model_type
    )
    assert foreign.class_name == name
    assert {head.kind for head in foreign.model.heads} <= {"pooler"}
    assert ("pooler" in dir(reference)) == bool(foreign.model.heads)


def pairs() -> dict[str, Tensor]:
    return {**batch(pad=0), "decoder_input_ids": tokens(3, 7, vocabulary=61)}


@pytest.mark.parametrize(
    ("name", "config", "values"),
    [
        ("BartModel", "BartConfig", BART),
        ("MBartModel", "MBartConfig", BART),
        ("PegasusModel", "PegasusConfig", BART),
        ("MarianModel", "MarianConfig", {**BART, "decoder_vocab_size": 61}),
        ("T5Model", "T5Config", T5),
        ("MT5Model", "MT5Config", T5),
    ],
)
def test_an_encoder_decoder_without_a_head_is_read_with_the_tied_one(
    tmp_path: Path, name: str, config: str, values: dict[str, Any]
) -> None:
    """Its file lacks nothing, because the output of these classes is the embedding table."""
    reference = randomised(getattr(transformers, name)(getattr(transformers, config)(**values)))
    model, foreign = imported(saved(reference, tmp_path / "model"))
    with torch.no_grad():
        assert_agree(model(**pairs()).hidden, reference(**pairs()).last_hidden_state)
    assert [head.kind for head in foreign.model.heads] == ["lm"] and foreign.skipped == ()


def test_a_pooler_beside_a_masked_language_model_is_kept(tmp_path: Path) -> None:
    """As in roberta-base, whose class does not use it."""
    reference = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SIZES))
    reference.roberta = transformers.RobertaModel(reference.config, add_pooling_layer=True)
    randomised(reference)
    reference.tie_weights()
    model, foreign = imported(saved(reference, tmp_path / "model"))
    assert [head.kind for head in foreign.model.heads] == ["masked_lm", "pooler"] and foreign.skipped == ()
    assert torch.equal(model.get_parameter("heads.pooler.pooler.weight"), reference.roberta.pooler.dense.weight)
    assert [head.kind for head in foreign.trained_heads] == ["masked_lm"]


@pytest.mark.parametrize("head", ["MaskedLM", "PreTraining"])
def test_weights_beyond_the_named_class_are_those_of_a_richer_one(tmp_path: Path, head: str) -> None:
    """bert-base-uncased is declared as BertForMaskedLM and holds the pooler and the next-sentence weights."""
    folder = saved(randomised(make("Bert", "PreTraining")), tmp_path / "model")
    edit_json(folder / "config.json", {"architectures": [f"BertFor{head}"]})
    foreign = read_model(folder)
    assert foreign.class_name == "BertForPreTraining" and foreign.skipped == ()
    wanted = ["masked_lm"] if head == "MaskedLM" else ["masked_lm", "next_sentence"]
    assert [head.kind for head in foreign.trained_heads] == wanted


def test_every_class_names_an_existing_class_of_transformers() -> None:
    theirs = [one for model_type, one in ARCHITECTURES.items() if model_type in transformers.CONFIG_MAPPING]
    names = [name for one in theirs for name in one.classes if name != "T5WithLMHeadModel"]
    assert [name for name in names if not hasattr(transformers, name)] == []


def test_a_second_pooler_is_refused(tmp_path: Path) -> None:
    foreign = read_model(saved(make("Bert", "PreTraining"), tmp_path / "model"))
    values = json.loads(foreign.model.model_dump_json())
    values["heads"].append({"kind": "pooler"})
    with pytest.raises(InputError, match="found a pooler, which BertForPreTraining has in another head"):
        foreign.architecture.table(type(foreign.model).model_validate(values), "BertForPreTraining")


def test_the_file_of_a_body_lacks_the_prefix(tmp_path: Path) -> None:
    names = load_file(saved(make("Bert", "PreTraining").bert, tmp_path / "model") / "model.safetensors")
    assert all(not name.startswith("bert.") for name in names)
