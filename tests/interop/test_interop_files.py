"""Folders as they really are: configs and weight files of every age, repeated tensors, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.interop.encoder_configs import PUBLISHED
from tests.interop.hub_seq2seq import HUB
from tests.interop.parity import assert_agree, exported, imported, randomized, saved, section_of, tokens
from tests.interop.test_interop_seq2seq import FAMILY, TARGET_VOCABULARY, sizes, t5
from tests.interop.test_interop_seq2seq import batch as pairs
from tests.interop.tiny_folders import change_weights, edit_json
from tests.interop.tiny_models import MASK, batch, config_of, make
from tformer.build import build_model, count_parameters
from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.choose import choose_class
from tformer.interop.read_model import read_model
from tformer.recipe.model import Model
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
    modern = {"embedding_dropout": 0.11, "attention_dropout": 0.12, "mlp_dropout": 0.13}
    config = PUBLISHED[name] | (distil if "distilbert" in name else modern if "Modern" in name else dropouts)
    architecture, class_name = ARCHITECTURES[config["model_type"]], config["architectures"][0]
    written = architecture.write(section_of(config), class_name)
    kept = {key: value for key, value in written.items() if key in config}
    assert kept == {key: config[key] for key in kept} and len(kept) >= 10
    assert set(written) - set(config) <= {"tie_word_embeddings", "pad_token_id", "layer_types", "rope_parameters"}


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
    reference = randomized(make(name, "MaskedLM"))
    folder = saved(reference, tmp_path / "original")
    change_weights(folder, lambda tensors: replaced(tensors, change(tensors)))
    model, foreign = imported(folder)
    assert [key.split(".")[-1] for key in foreign.skipped] == ["position_ids"] * (change is as_first_released)
    inputs = batch(pad=1)
    with torch.no_grad():
        assert_agree(model(**inputs).logits, reference(**inputs).logits, MASK)


def test_a_masked_model_in_a_file_with_pooler_and_next_sentence_head(tmp_path: Path) -> None:
    """bert-base-uncased says BertForMaskedLM and holds BertForPreTraining."""
    reference = randomized(make("Bert", "PreTraining"))
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
    folder = saved(randomized(make("Roberta", "SequenceClassification")), tmp_path / "original")
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
        ("Bert", "MaskedLM", "architectures", ["BertForNextSentencePrediction"]),
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


# --- decoders ---------------------------------------------------------------------------------------------------------


SIZES = {"Llama": {"head_dim": 6}}


def written(folder: Path, reference: Any, tensors: dict[str, Tensor], **keys: Any) -> Path:
    folder.mkdir()
    config = reference.config.to_dict() | {"architectures": [type(reference).__name__]} | keys
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.clone().contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("name", "rename", "stored"),
    [
        ("GPT2", "transformer.", {"h.0.attn.bias": (1, 1, 23, 23), "h.1.attn.masked_bias": (1,)}),
        ("GPT2", "", {"transformer.h.0.attn.bias": (1, 1, 23, 23)}),
        ("Llama", "", {"model.layers.1.self_attn.rotary_emb.inv_freq": (2,), "model.rotary_emb.inv_freq": (2,)}),
        ("OPT", "model.", {"decoder.version": (1,)}),
        ("Bloom", "transformer.", {}),
    ],
    ids=["gpt2-bare", "gpt2", "llama", "opt-bare", "bloom-bare"],
)
def test_bare_names_stored_buffers_and_repeated_outputs_are_read(
    tmp_path: Path, name: str, rename: str, stored: dict[str, tuple[int, ...]]
) -> None:
    """Each file holds lm_head.weight too, as files of pickled times did."""
    reference = randomized(transformers.AutoModelForCausalLM.from_config(config_of(name, **SIZES.get(name, {}))))
    tensors = {name.removeprefix(rename): value for name, value in reference.state_dict().items()}
    assert "lm_head.weight" in tensors
    buffers = {name: torch.ones(shape) for name, shape in stored.items()}
    model, foreign = imported(written(tmp_path / "model", reference, tensors | buffers))
    assert set(foreign.skipped) == set(stored)
    ids = tokens(2, 9, vocabulary=61)
    with torch.no_grad():
        assert_agree(model(ids).logits, reference(input_ids=ids).logits)


def test_a_tied_output_that_is_not_the_embeddings_is_refused(tmp_path: Path) -> None:
    reference = randomized(transformers.GPT2LMHeadModel(config_of("GPT2")))
    tensors = dict(reference.state_dict()) | {"lm_head.weight": torch.zeros(61, 20)}
    foreign = read_model(written(tmp_path / "model", reference, tensors))
    with pytest.raises(InputError, match=r"lm_head\.weight and transformer\.wte\.weight are one tensor"):
        foreign.weights()


@pytest.mark.parametrize("name", ["GPT2", "Llama", "OPT", "Bloom"])
def test_an_unknown_and_a_missing_tensor_are_named(tmp_path: Path, name: str) -> None:
    reference = transformers.AutoModelForCausalLM.from_config(config_of(name, **SIZES.get(name, {})))
    tensors = dict(reference.state_dict())
    lost = list(tensors)[3]
    kept = {name: value for name, value in tensors.items() if name != lost}
    folder = written(tmp_path / "model", reference, kept | {"score.weight": torch.ones(2)})
    with pytest.raises(InputError) as refused:
        read_model(folder)
    assert f"missing {lost}" in refused.value.message and "unknown score.weight" in refused.value.message


# --- encoder-decoders -------------------------------------------------------------------------------------------------


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
    return saved(randomized(make_model(make_config(**sizes(**values)))), tmp_path / model_type)


def assert_reads_as_transformers(folder: Path, model_class: Any, *, vocabulary: int = 61) -> None:
    inputs = pairs(vocabulary=vocabulary)
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
    folder = saved(randomized(transformers.BartModel(config)), tmp_path / "body")
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
    folder = saved(randomized(t5(untied=untied)), tmp_path / "t5")
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
    folder = saved(randomized(t5()), tmp_path / "t5")
    edited(folder, lambda tensors: tensors | {"lm_head.weight": tensors["shared.weight"]})
    assert "heads.lm.weight" in imported(folder)[0].tied_names()
    assert_reads_as_transformers(folder, transformers.T5ForConditionalGeneration)
