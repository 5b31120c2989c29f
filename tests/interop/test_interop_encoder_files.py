"""Encoders as the hub has them: published configs, old names, files that hold more than the class; and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.interop.encoder_configs import PUBLISHED
from tests.interop.parity import assert_agree, exported, imported, randomised, saved, section_of
from tests.interop.tiny_folders import change_weights, edit_json
from tests.interop.tiny_models import MASK, batch, make
from tformer.build import build_model
from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.read_model import read_model
from tformer.support.errors import InputError

POOLER = 768 * 768 + 768
BODIES = {  # published numbers of parameters without heads, here without the pooler too
    "bert-base-uncased": 109_482_240 - POOLER,
    "roberta-base": 124_645_632 - POOLER,
    "distilbert-base-uncased": 66_362_880,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_to_the_last_parameter(name: str) -> None:
    config = PUBLISHED[name]
    model = build_model(section_of(config), device="meta")
    with torch.device("meta"):
        reference_class = getattr(transformers, config["architectures"][0])
        reference = reference_class(reference_class.config_class(**config))
    assert model.num_parameters() == sum(parameter.numel() for parameter in reference.parameters())
    heads = sum(parameter.numel() for key, parameter in model.named_parameters() if key.startswith("heads."))
    assert name not in BODIES or model.num_parameters() - heads == BODIES[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_says_what_was_read(name: str) -> None:
    """Dropouts too, which no comparison of logits shows."""
    dropouts = {"hidden_dropout_prob": 0.11, "attention_probs_dropout_prob": 0.12, "classifier_dropout": 0.13}
    distil = {"dropout": 0.11, "attention_dropout": 0.12, "seq_classif_dropout": 0.13}
    config = PUBLISHED[name] | (distil if "distilbert" in name else dropouts)
    architecture, class_name = ARCHITECTURES[config["model_type"]], config["architectures"][0]
    written = architecture.write(section_of(config), class_name)
    kept = {key: value for key, value in written.items() if key in config}
    assert kept == {key: config[key] for key in kept} and len(kept) >= 10
    assert set(written) - set(config) <= {"tie_word_embeddings", "pad_token_id"}


def test_bert_base_with_its_pooler_has_the_published_number_of_parameters() -> None:
    config = {**PUBLISHED["bert-base-uncased"], "architectures": ["BertForSequenceClassification"]}
    project = 2 * 768 + 2
    assert build_model(section_of(config), device="meta").num_parameters() - project == 109_482_240


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def as_first_released(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """gamma and beta, and the counting buffer."""
    named = {}
    for key, tensor in tensors.items():
        key = key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        named[key] = tensor
    body = next(key for key in tensors if ".embeddings." in key).split(".")[0]
    return named | {f"{body}.embeddings.position_ids": torch.arange(23).unsqueeze(0)}


def with_tied_copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What writers stored before they left tied tensors out."""
    table = next(tensor for key, tensor in tensors.items() if key.endswith("word_embeddings.weight"))
    found = {"cls.predictions.bias": "cls.predictions.decoder", "lm_head.bias": "lm_head.decoder"}
    copies: dict[str, Tensor] = {}
    for key, output in {**found, "vocab_projector.bias": "vocab_projector"}.items():
        if key in tensors:
            copies |= {f"{output}.weight": table.clone(), f"{output}.bias": tensors[key].clone()}
    if "generator_lm_head.bias" in tensors:
        copies["generator_lm_head.weight"] = table.clone()
    return tensors | copies


def of_the_bare_body(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {re.sub(r"^(bert|distilbert|roberta|electra)\.", "", key): tensor for key, tensor in tensors.items()}


def replaced(tensors: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    tensors.clear()
    tensors.update(new)


@pytest.mark.parametrize("change", [as_first_released, with_tied_copies, of_the_bare_body])
@pytest.mark.parametrize("name", ["Bert", "DistilBert", "Roberta", "Electra"])
def test_files_of_any_age_are_read(tmp_path: Path, name: str, change: Change) -> None:
    reference = randomised(make(name, "MaskedLM"))
    folder = saved(reference, tmp_path / "original")
    change_weights(folder, lambda tensors: replaced(tensors, change(tensors)))
    model, foreign = imported(folder)
    assert [key.split(".")[-1] for key in foreign.skipped] == ["position_ids"] * (change is as_first_released)
    inputs = batch(pad=1)
    with torch.no_grad():
        assert_agree(model(**inputs).logits, reference(**inputs).logits, MASK)


def test_a_masked_model_in_a_file_with_pooler_and_next_sentence_head(tmp_path: Path) -> None:
    """bert-base-uncased says BertForMaskedLM and holds BertForPreTraining."""
    reference = randomised(make("Bert", "PreTraining"))
    folder = saved(reference, tmp_path / "original")
    edit_json(folder / "config.json", {"architectures": ["BertForMaskedLM"]})
    model, foreign = imported(folder)
    assert foreign.class_name == "BertForPreTraining" and foreign.skipped == ()
    again = load_file(exported(foreign, model, tmp_path / "again") / "model.safetensors")
    before = load_file(folder / "model.safetensors")
    assert before.keys() == again.keys() and all(torch.equal(before[name], again[name]) for name in before)
    with torch.no_grad():
        assert_agree(model(**batch()).logits, reference(**batch()).prediction_logits, MASK)


def test_a_classifier_in_a_file_with_a_pooler_of_nobody(tmp_path: Path) -> None:
    folder = saved(randomised(make("Roberta", "SequenceClassification")), tmp_path / "original")
    pooler = {"roberta.pooler.dense.weight": torch.ones(20, 20), "roberta.pooler.dense.bias": torch.ones(20)}
    change_weights(folder, lambda tensors: tensors.update(pooler))
    model, foreign = imported(folder)
    assert [head.kind for head in foreign.model.heads] == ["classifier", "pooler"] and foreign.skipped == ()
    again = load_file(exported(foreign, model, tmp_path / "again") / "model.safetensors")
    assert again.keys() == load_file(folder / "model.safetensors").keys() >= pooler.keys()


def test_a_file_without_the_head_of_its_class_is_refused(tmp_path: Path) -> None:
    folder = saved(make("Bert", "MaskedLM"), tmp_path / "original")
    edit_json(folder / "config.json", {"architectures": ["BertForSequenceClassification"]})
    with pytest.raises(InputError, match=r"missing bert\.pooler\.dense\.weight, .*classifier\.bias"):
        read_model(folder)


def test_a_tied_copy_that_differs_is_refused(tmp_path: Path) -> None:
    folder = saved(make("Roberta", "MaskedLM"), tmp_path / "original")
    change_weights(folder, lambda tensors: tensors.update({"lm_head.decoder.bias": tensors["lm_head.bias"] + 1}))
    with pytest.raises(InputError, match=r"lm_head\.decoder\.bias and lm_head\.bias are one tensor"):
        read_model(folder).weights()


@pytest.mark.parametrize(
    ("name", "task", "key", "value"),
    [
        ("Bert", "MaskedLM", "position_embedding_type", "relative_key_query"),
        ("Roberta", "MaskedLM", "position_embedding_type", "relative_key"),
        ("Electra", "PreTraining", "position_embedding_type", "relative_key"),
        ("Bert", "MaskedLM", "is_decoder", True),
        ("Roberta", "MaskedLM", "add_cross_attention", True),
        ("Bert", "MaskedLM", "pruned_heads", {"0": [1]}),
        ("Bert", "MaskedLM", "hidden_act", "quick_gelu"),
        ("Bert", "MaskedLM", "type_vocab_size", 0),
        ("Bert", "MaskedLM", "num_attention_heads", 6),
        ("Bert", "MaskedLM", "hidden_size", "20"),
        ("Bert", "MaskedLM", "embedding_size", 8),
        ("Bert", "SequenceClassification", "problem_type", "regression"),
        ("Bert", "MaskedLM", "architectures", ["BertForQuestionAnswering"]),
        ("Roberta", "MaskedLM", "pad_token_id", 61),
        ("Roberta", "MaskedLM", "pad_token_id", 22),
        ("Roberta", "MaskedLM", "pad_token_id", -1),
        ("Electra", "MaskedLM", "tie_word_embeddings", False),
        ("DistilBert", "MaskedLM", "n_heads", 6),
        ("DistilBert", "MaskedLM", "activation", "sigmoid"),
        ("DistilBert", "MaskedLM", "layer_norm_eps", 0.1),
    ],
)
def test_what_tformer_lacks_is_refused_by_name(tmp_path: Path, name: str, task: str, key: str, value: Any) -> None:
    folder = saved(make(name, task), tmp_path / "original")
    edit_json(folder / "config.json", {key: value})
    with pytest.raises(InputError, match=rf"config\.json: {key}: "):
        read_model(folder)
