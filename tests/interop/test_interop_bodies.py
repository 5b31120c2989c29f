"""Bodies without a head: BertModel, GPT2Model, T5EncoderModel and the others, there and back, poolers included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.interop.classes import note
from tests.interop.parity import assert_agree, assert_parity, imported, randomized, saved, tokens
from tests.interop.tiny_folders import edit_json
from tests.interop.tiny_models import MASK, SIZES, batch, config_of, hidden_of, make
from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.read_model import read_model
from tformer.support.errors import InputError

# Class -> values of its configuration. The weights of every one lack the head.
BODIES: dict[str, dict[str, Any]] = {
    **{f"{name}Model": {} for name in ("Bert", "DistilBert", "Roberta", "Camembert", "XLMRoberta", "MPNet")},
    "ElectraModel": {"embedding_size": 12},
    "AlbertModel": {},
    "ModernBertModel": {},
    "DebertaV2Model": {},
    "LongformerModel": {},
    "BigBirdModel": {},
    "ViTModel": {},
    "GPT2Model": {"tie_word_embeddings": False},
    "OPTModel": {"tie_word_embeddings": False},
    "BloomModel": {"tie_word_embeddings": False},
    **{f"{name}Model": {"head_dim": 6, "tie_word_embeddings": False} for name in ("Llama", "Qwen2", "Qwen3")},
    **{
        f"{name}Model": {"tie_word_embeddings": False}
        for name in ("GPTNeoX", "GPTJ", "Phi", "StableLm", "Phi3", "SmolLM3", "Falcon")
    },
    **{f"{name}Model": {"tie_word_embeddings": False} for name in ("GPTNeo", "GPTBigCode", "XGLM")},
    **{f"{name}Model": {"tie_word_embeddings": False} for name in ("Gemma", "Gemma2", "Gemma3Text")},
    **{f"{name}Model": {"tie_word_embeddings": False} for name in ("Olmo", "Olmo2", "Granite", "Starcoder2")},
    "MistralModel": {"head_dim": 6, "tie_word_embeddings": False, "sliding_window": 5},
    **{name: {} for name in ("T5EncoderModel", "MT5EncoderModel", "UMT5EncoderModel")},
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_without_a_head(tmp_path: Path, name: str) -> None:
    family = name.removesuffix("Model").removesuffix("Encoder")
    reference = getattr(transformers, name)(config_of(family, **BODIES[name]))
    if name == "ViTModel":
        inputs = {"pixel_values": torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(2))}
    else:
        inputs = batch(pad=reference.config.pad_token_id)
    _, foreign = assert_parity(
        reference, inputs, tmp_path, theirs=hidden_of, ours=hidden_of, model_type=reference.config.model_type
    )
    assert foreign.class_name == name
    assert {head.kind for head in foreign.model.heads} <= {"pooler"}
    assert ("pooler" in dir(reference)) == bool(foreign.model.heads)


def pairs() -> dict[str, Tensor]:
    return {**batch(pad=0), "decoder_input_ids": tokens(3, 7, vocabulary=61)}


@pytest.mark.parametrize(
    "family",
    ["Bart", "MBart", "Pegasus", "Marian", "T5", "MT5", "UMT5", "Blenderbot", "BlenderbotSmall", "M2M100", "LED"],
)
def test_an_encoder_decoder_without_a_head_is_read_with_the_tied_one(tmp_path: Path, family: str) -> None:
    """Its file lacks nothing, because the output of these classes is the embedding table."""
    reference = randomized(getattr(transformers, f"{family}Model")(config_of(family)))
    model, foreign = imported(saved(reference, tmp_path / "model"))
    first = {"global_attention_mask": (torch.arange(MASK.shape[1]) == 0).expand(MASK.shape).long()}
    asked = pairs() | (first if family == "LED" else {})
    with torch.no_grad():
        error = assert_agree(model(**pairs()).hidden, reference(**asked).last_hidden_state)
    note(f"{family}Model", **{"import": "yes", "export": "with the head"}, largest_error=error)
    assert [head.kind for head in foreign.model.heads] == ["lm"] and foreign.skipped == ()


def test_a_pooler_beside_a_masked_language_model_is_kept(tmp_path: Path) -> None:
    """As in roberta-base, whose class does not use it."""
    reference = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SIZES))
    reference.roberta = transformers.RobertaModel(reference.config, add_pooling_layer=True)
    randomized(reference)
    reference.tie_weights()
    model, foreign = imported(saved(reference, tmp_path / "model"))
    assert [head.kind for head in foreign.model.heads] == ["masked_lm", "pooler"] and foreign.skipped == ()
    assert torch.equal(model.get_parameter("heads.pooler.pooler.weight"), reference.roberta.pooler.dense.weight)
    assert [head.kind for head in foreign.trained_heads] == ["masked_lm"]


@pytest.mark.parametrize("head", ["MaskedLM", "PreTraining"])
def test_weights_beyond_the_named_class_are_those_of_a_richer_one(tmp_path: Path, head: str) -> None:
    """bert-base-uncased is declared as BertForMaskedLM and holds the pooler and the next-sentence weights."""
    folder = saved(randomized(make("Bert", "PreTraining")), tmp_path / "model")
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
