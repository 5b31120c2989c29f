"""Encoder-decoders as folders really have them: configs of every age, repeated tensors, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.interop.hub_seq2seq import HUB
from tests.interop.parity import assert_agree, exported, imported, randomised, saved, section_of
from tests.interop.test_interop_seq2seq import FAMILY, TARGET_VOCABULARY, batch, sizes, t5
from tformer.build import count_parameters
from tformer.interop.choose import choose_class
from tformer.interop.read_model import read_model
from tformer.recipe.model import Model
from tformer.support.errors import InputError

Tensors = dict[str, Tensor]


def edited(folder: Path, change: Callable[[Tensors], Tensors], **keys: Any) -> Path:
    """The folder with other tensors and other keys of its config."""
    tensors = change(load_file(folder / "model.safetensors"))
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


def family(model_type: str, tmp_path: Path, **values: Any) -> Path:
    make_config, make_model = FAMILY[model_type]
    return saved(randomised(make_model(make_config(**sizes(**values)))), tmp_path / model_type)


def assert_reads_as_transformers(folder: Path, model_class: Any, *, vocabulary: int = 61) -> None:
    inputs = batch(vocabulary=vocabulary)
    model, _ = imported(folder)
    with torch.no_grad():
        expected = model_class.from_pretrained(folder).eval()(**inputs).logits
        assert_agree(model(**inputs).logits, expected, inputs["decoder_attention_mask"])


# --- configs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HUB)
def test_a_config_of_the_hub_is_read_whole(name: str) -> None:
    config, parameters = HUB[name]
    assert count_parameters(section_of(config)) == parameters


ODD_KEYS: list[tuple[str, dict[str, Any]]] = [
    ("t5-small", {"feed_forward_proj": "gated-tanh"}),
    ("t5-small", {"feed_forward_proj": "glu-relu"}),
    ("t5-small", {"dense_act_fn": "gelu_new"}),
    ("t5-small", {"is_gated_act": True}),
    ("t5-small", {"is_encoder_decoder": False}),
    ("t5-small", {"is_decoder": True}),
    ("t5-small", {"tie_encoder_decoder": True}),
    ("facebook/bart-base", {"normalize_before": True}),
    ("facebook/bart-base", {"normalize_embedding": False}),
    ("facebook/bart-base", {"add_final_layer_norm": True}),
    ("facebook/bart-base", {"add_bias_logits": True}),
    ("facebook/bart-base", {"static_position_embeddings": True}),
    ("facebook/bart-base", {"extra_pos_embeddings": 1}),
    ("facebook/bart-base", {"num_hidden_layers": 5}),
    ("facebook/bart-base", {"tie_word_embeddings": False}),
    ("facebook/bart-base", {"activation_function": "mish"}),
    ("facebook/bart-large-mnli", {"tie_word_embeddings": False}),
    ("facebook/mbart-large-en-ro", {"normalize_before": False}),
    ("google/pegasus-xsum", {"do_blenderbot_90_layernorm": True}),
    ("google/pegasus-xsum", {"static_position_embeddings": False}),
    ("Helsinki-NLP/opus-mt-en-de", {"decoder_vocab_size": 100}),
    ("Helsinki-NLP/opus-mt-en-de", {"tie_word_embeddings": False}),
    ("Helsinki-NLP/opus-mt-en-de", {"normalize_embedding": True}),
]


@pytest.mark.parametrize(("name", "keys"), ODD_KEYS, ids=[f"{name}-{next(iter(keys))}" for name, keys in ODD_KEYS])
def test_a_feature_that_no_such_model_has_is_refused_by_its_key(name: str, keys: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(keys))):
        section_of(HUB[name][0] | keys)


def test_three_labels_are_meant_where_bart_names_none() -> None:
    config = {key: value for key, value in HUB["facebook/bart-large-mnli"][0].items() if "label" not in key}
    assert section_of(config).heads[0].num_labels == 3  # type: ignore[union-attr]


# --- exports that no class computes -----------------------------------------------------------------------------------

ODD_SECTIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("t5-small", "model.decoder.num_heads", {"decoder": {"num_heads": 4}}),
    ("t5-small", "model.encoder.attention.scale", {"encoder": {"attention": {"scale": "auto"}}}),
    ("t5-small", "model.heads.lm.scale", {"heads": [{"kind": "lm", "scale": 0.5}]}),
    ("facebook/bart-base", "model.encoder.norm.eps", {"encoder": {"norm": {"eps": 1e-6}}}),
    (
        "facebook/bart-base",
        "model.decoder.feedforward.activation",
        {"decoder": {"feedforward": {"activation": "relu"}}},
    ),
    ("facebook/bart-base", "model.encoder.positions.offset", {"encoder": {"positions": {"offset": 0}}}),
    ("google/pegasus-xsum", "model.decoder.final_norm", {"decoder": {"final_norm": False}}),
    ("Helsinki-NLP/opus-mt-en-de", "model.decoder.positions.base", {"decoder": {"positions": {"base": 100.0}}}),
]


@pytest.mark.parametrize(("name", "path", "change"), ODD_SECTIONS, ids=[path for _, path, _ in ODD_SECTIONS])
def test_an_export_that_no_class_computes_is_refused_by_its_field(name: str, path: str, change: dict[str, Any]) -> None:
    def merged(old: Any, new: Any) -> Any:
        if isinstance(old, dict) and isinstance(new, dict):
            return {**old, **{key: merged(old.get(key), value) for key, value in new.items()}}
        return new

    config = HUB[name][0]
    model = Model.model_validate(merged(section_of(config).model_dump(mode="json"), change))
    with pytest.raises(InputError, match=path.replace(".", r"\.")):
        choose_class(model, family="transformer", model_type=config["model_type"])


# --- files ------------------------------------------------------------------------------------------------------------


def with_copies(tensors: Tensors) -> Tensors:
    """What older versions wrote: every name of the one table, and buffers."""
    table = tensors["model.shared.weight"]
    copies = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    return tensors | dict.fromkeys(copies, table) | {"model.encoder.version": torch.tensor([1.0])}


def test_a_file_that_repeats_the_tied_table_and_the_sinusoids_is_read(tmp_path: Path) -> None:
    folder = family("marian", tmp_path, scale_embedding=True)
    reference = transformers.MarianMTModel.from_pretrained(folder)
    sinusoids = {f"model.{side}.embed_positions.weight": reference.state_dict()[f"model.{side}.embed_positions.weight"]
                 for side in ("encoder", "decoder")}  # fmt: skip
    edited(folder, lambda tensors: with_copies(tensors) | sinusoids)
    assert_reads_as_transformers(folder, transformers.MarianMTModel)


@pytest.mark.parametrize("model_type", ["marian", "pegasus"])
@pytest.mark.parametrize("damage", [lambda table: table + 1e-3, lambda table: table[:-1]], ids=["other", "shorter"])
def test_stored_positions_that_are_no_sinusoids_are_refused(
    tmp_path: Path, model_type: str, damage: Callable[[Tensor], Tensor]
) -> None:
    name = "model.decoder.embed_positions.weight"
    table = family("pegasus", tmp_path / "donor")
    sinusoids = load_file(table / "model.safetensors")[name]
    folder = edited(family(model_type, tmp_path), lambda tensors: tensors | {name: damage(sinusoids)})
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        read_model(folder).weights()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_sinusoids_of_another_type_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = family("pegasus", tmp_path)
    edited(folder, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    assert {tensor.dtype for tensor in read_model(folder).weights().values()} == {dtype}


def test_pegasus_without_stored_positions_is_read(tmp_path: Path) -> None:
    folder = family("pegasus", tmp_path)
    edited(folder, lambda tensors: {name: tensor for name, tensor in tensors.items() if "embed_pos" not in name})
    assert_reads_as_transformers(folder, transformers.PegasusForConditionalGeneration)


def test_a_bare_body_is_a_generator_without_bias(tmp_path: Path) -> None:
    """As facebook/bart-base is stored; the output is the table, and the bias of the logits is zero."""
    config = transformers.BartConfig(**sizes())
    folder = saved(randomised(transformers.BartModel(config)), tmp_path / "body")
    assert not any(name.startswith("model.") for name in load_file(folder / "model.safetensors"))
    assert_reads_as_transformers(folder, transformers.BartForConditionalGeneration)
    model, foreign = imported(folder)
    assert foreign.class_name == "BartForConditionalGeneration" and "heads.lm.bias" not in model.state_dict()


def test_a_tied_table_under_the_name_of_a_copy_alone_is_read(tmp_path: Path) -> None:
    folder = family("mbart", tmp_path)
    edited(folder, lambda tensors: {
        {"model.shared.weight": "lm_head.weight"}.get(name, name): tensor for name, tensor in tensors.items()
    })  # fmt: skip
    assert_reads_as_transformers(folder, transformers.MBartForConditionalGeneration)


@pytest.mark.parametrize("model_type", ["bart", "marian"])
def test_an_output_of_its_own_in_the_file_is_honoured_and_written(tmp_path: Path, model_type: str) -> None:
    folder = family(model_type, tmp_path)
    edited(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.shared.weight"].flip(0)})
    assert_reads_as_transformers(folder, FAMILY[model_type][1])
    model, foreign = imported(folder)
    again = load_file(exported(foreign, model, tmp_path / "again", model_type=model_type) / "model.safetensors")
    assert torch.equal(again["lm_head.weight"], again["model.shared.weight"].flip(0))


def test_a_target_table_that_is_also_the_output(tmp_path: Path) -> None:
    apart = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": TARGET_VOCABULARY}
    folder = family("marian", tmp_path, **apart)
    edited(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.decoder.embed_tokens.weight"]})
    assert_reads_as_transformers(folder, transformers.MarianMTModel, vocabulary=TARGET_VOCABULARY)


OLD_T5 = {"tie_word_embeddings": False, "scale_decoder_outputs": None, "dense_act_fn": None, "is_gated_act": None}


@pytest.mark.parametrize("untied", [True, False], ids=["v1.1", "v1.0"])
def test_t5_files_of_older_versions(tmp_path: Path, untied: bool) -> None:
    """Their config.json says `tie_word_embeddings` alone; their files have a table that nothing reads."""
    folder = saved(randomised(t5(untied=untied)), tmp_path / "t5")
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    old = {**OLD_T5, "tie_word_embeddings": None if not untied else False}
    edited(folder, lambda tensors: tensors | {unread: torch.ones(8, 5)}, **old)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    model, foreign = imported(folder)
    assert foreign.model.heads[0].scale == ("none" if untied else "inverse_sqrt_d")  # type: ignore[union-attr]
    assert foreign.skipped == (unread,) and ("heads.lm.weight" in model.tied_names()) is not untied
    assert_reads_as_transformers(folder, transformers.T5ForConditionalGeneration)


def test_a_repeated_output_of_t5_is_tied(tmp_path: Path) -> None:
    folder = saved(randomised(t5()), tmp_path / "t5")
    edited(folder, lambda tensors: tensors | {"lm_head.weight": tensors["shared.weight"]})
    assert "heads.lm.weight" in imported(folder)[0].tied_names()
    assert_reads_as_transformers(folder, transformers.T5ForConditionalGeneration)
