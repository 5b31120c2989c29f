"""Which class a model is exported to, which it is refused by, and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

from tests.interop.parity import section_of
from tests.interop.tiny_models import config_of
from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.choose import choose_class, differences, label_keys
from tformer.recipe.model import Model
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = (path for path in CONFIGS.glob("*/*.yaml") if path.parent.name != "sweeps")
PRESETS = sorted(path.relative_to(CONFIGS).with_suffix("").as_posix() for path in FILES)

# What every shipped preset is exported as; for the others the field that stands in the way.
CLASSES = {
    **dict.fromkeys(("gpt/small", "gpt/medium", "gpt/large", "gpt/xl", "gpt/gpt3-175b"), "GPT2LMHeadModel"),
    **dict.fromkeys(("gpt/char", "gpt/char-cpu"), "GPT2LMHeadModel"),
    **dict.fromkeys(("llama/tiny", "llama/mini", "llama/1b", "llama/8b"), "LlamaForCausalLM"),
    **dict.fromkeys(("bert/tiny", "bert/mini", "bert/small", "bert/base", "bert/large"), "BertForPreTraining"),
    **dict.fromkeys(("roberta/small", "roberta/base"), "RobertaForMaskedLM"),
    **dict.fromkeys(("electra/small", "electra/base"), "ElectraForPreTraining"),
    **dict.fromkeys(("t5/small", "t5/base", "t5/v1_1-small", "t5/v1_1-base"), "T5ForConditionalGeneration"),
    "bart/base": "BartForConditionalGeneration",
    "transformer/tiny": "FSMTForConditionalGeneration",
    **dict.fromkeys(("vit/tiny", "vit/small", "vit/base"), "ViTForImageClassification"),
    **dict.fromkeys((f"transformer/{name}" for name in ("base", "big", "base-enfr", "big-enfr")), "MarianMTModel"),
}
REFUSED = {
    **dict.fromkeys(("gpt/tiny", "gpt/mini", "gpt/modern", "gpt/char-12s", "gpt/char-6m", "gpt/char-15m"), "relu2"),
    "gpt/induction": "relu2",
    **dict.fromkeys(("bert/pretrain", "bert/pairs", "roberta/tiny", "electra/tiny", "bart/tiny"), "qk_norm"),
    **dict.fromkeys(("roberta/mini", "electra/mini", "bart/mini", "t5/mini"), "qk_norm"),
    "bert/classify": "model.encoder.positions.kind is rope, expected learned",
    "bert/tags": "comes nearest: model.encoder.positions.kind is rope",
    "bert/finetune": "model.heads.classifier.pooling is mean, expected cls",
    **dict.fromkeys(("transformer/modern", "transformer/dates", "t5/tiny", "vit/cifar"), "qk_norm"),
    "longformer/base": "model.encoder.attention.global_tokens is 1, expected 0",
    "longformer/classify": "LongformerForSequenceClassification comes nearest: ",
    "bigbird/base": "model.encoder.attention.dense_up_to is 0, expected 704",
    "bigbird/classify": "BigBirdForSequenceClassification comes nearest: ",
    **dict.fromkeys(("linformer/base", "linformer/classify"), "model.encoder.attention.kind: linformer"),
    **dict.fromkeys(("performer/base", "performer/classify"), "model.encoder.attention.kind: performer"),
    "performer/char": "model.decoder.attention.kind: performer",
    "vit/mnist": "model.encoder.positions.kind: patch2d",
    "transformer/tears": "model.encoder.norm.kind: scalenorm",
    "transformer/iwslt": "model.encoder.norm.eps is 1e-06, expected 1e-05",
}


def resolved(values: dict[str, Any]) -> Model:
    model = Model.model_validate(values).model_dump(mode="json")
    if model["patches"] is None:
        model["vocab_size"] = model["vocab_size"] or 4096
    for head in model["heads"]:
        if "num_labels" in head:
            head["num_labels"] = head["num_labels"] or 3
    return Model.model_validate(model)


def preset(name: str) -> Recipe:
    values = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    for section in (values["model"], values.get("generator", {})):
        for side in section.keys() & {"encoder", "decoder"}:
            section[side]["attention"] = {"kind": "full", **section[side].get("attention", {})}
    return Recipe.model_validate(values)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_exported_or_refused_by_name(name: str) -> None:
    assert (name in CLASSES) != (name in REFUSED), f"{name}: say which class it is exported as"
    family = name.split("/")[0]
    model = resolved(preset(name).model.model_dump(mode="json"))
    if name in CLASSES:
        choice = choose_class(model, family=family)
        assert choice.class_name == CLASSES[name]
        assert not (family in ("bert", "roberta", "electra", "vit") and choice.steps)
    else:
        with pytest.raises(InputError) as error:
            choose_class(model, family=family)
        assert REFUSED[name] in error.value.message and error.value.exit_code == 2


def test_electras_generator_has_its_class() -> None:
    generator = preset("electra/base").generator
    assert generator is not None
    model = resolved(generator.model_dump(mode="json"))
    assert choose_class(model, family="electra").class_name == "ElectraForMaskedLM"


def gpt(**decoder: Any) -> Model:
    stack = {"num_layers": 1, "num_heads": 2, "feedforward": {"activation": "gelu_tanh"}, **decoder}
    return resolved({"d_model": 8, "decoder": stack})


@pytest.mark.parametrize(
    ("decoder", "field"),
    [
        ({"norm": {"kind": "scalenorm"}}, "model.decoder.norm.kind: scalenorm"),
        ({"attention": {"kind": "additive"}}, "model.decoder.attention.kind: additive"),
        ({"norm": {"kind": "batchnorm"}}, "model.decoder.norm.kind: batchnorm"),
        ({"norm": {"kind": "groupnorm", "groups": 2}}, "model.decoder.norm.kind: groupnorm"),
        ({"positions": {"kind": "shaw"}}, "model.decoder.positions.kind: shaw"),
        ({"feedforward": {"activation": "relu2"}}, "model.decoder.feedforward.activation: relu2"),
        ({"attention": {"kind": "full", "qk_norm": True}}, "model.decoder.attention.qk_norm is true"),
        ({"layers": {"0": {"norm": {"eps": 0.1}}}}, "model.decoder.layers"),
        ({"value_dim": 3}, "model.decoder.value_dim is 3, expected 4"),
        ({"norm": {"place": "post"}}, "model.decoder.norm.place is post, expected pre"),
        ({"attention": {"kind": "full", "scale": 1.0}}, "model.decoder.attention.scale is 1.0, expected 0.5"),
        ({"final_norm": False}, "model.decoder.final_norm is false, expected true"),
    ],
)
def test_what_no_class_computes_is_refused_and_named(decoder: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as error:
        choose_class(gpt(**decoder), family="gpt")
    assert field in error.value.message and "Hugging Face" in error.value.message


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"embedding": {"fixnorm": True}}, "model.embedding.fixnorm: true"),
        ({"heads": [{"kind": "lm", "softcap": 15.0}]}, "model.heads.lm.softcap is 15.0, expected none"),
        ({"embedding": {"scale": True}}, "model.embedding.scale is true, expected false"),
    ],
)
def test_a_feature_outside_of_the_stacks_is_named_too(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match="Hugging Face") as error:
        choose_class(resolved({**gpt().model_dump(mode="json"), **values}), family="gpt")
    assert field in error.value.message


@pytest.mark.parametrize(
    ("base", "change", "field"),
    [
        ("vit/tiny", {"patches": {"stem": "convolutions"}}, "model.patches.stem: convolutions"),
        ("vit/tiny", {"patches": {"stem": "shifted"}}, "model.patches.stem: shifted"),
        (
            "vit/tiny",
            {"heads": [{"kind": "classifier", "pooling": "attention", "num_labels": 3}]},
            "pooling: attention",
        ),
        ("bert/tiny", {"embedding": {"convolution": 3}}, "model.embedding.convolution: 3"),
    ],
)
def test_parts_of_cct_are_refused_and_named(base: str, change: dict[str, Any], field: str) -> None:
    values = preset(base).model.model_dump(mode="json")
    for key, value in change.items():
        values[key] = {**values[key], **value} if isinstance(value, dict) else value
    with pytest.raises(InputError, match="Hugging Face") as error:
        choose_class(resolved(values), family=base.partition("/")[0])
    assert field in error.value.message


def test_a_head_that_no_class_has_is_named() -> None:
    encoder = {"num_layers": 1, "num_heads": 2}
    with pytest.raises(InputError, match=r"model\.heads: .* replaced_token"):
        choose_class(
            resolved({"d_model": 8, "encoder": encoder, "heads": [{"kind": "lm"}, {"kind": "replaced_token"}]}),
            family="bert",
        )


def test_the_family_of_the_recipe_goes_first_and_as_another_when_asked() -> None:
    model = resolved(preset("llama/tiny").model.model_dump(mode="json"))
    assert choose_class(model, family="llama").class_name == "LlamaForCausalLM"
    assert choose_class(model, family="llama", model_type="mistral").class_name == "MistralForCausalLM"


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES.keys() & {*transformers.CONFIG_MAPPING} - {"fsmt"}))
def test_a_model_goes_back_as_the_type_that_it_came_from(model_type: str) -> None:
    own = {"head_dim": 6} if model_type in ("llama", "mistral") else {}
    config = config_of(transformers.CONFIG_MAPPING[model_type].__name__.removesuffix("Config"), **own)
    classes = ARCHITECTURES[model_type].classes
    named = next((name for name in classes if classes[name]), next(iter(classes)))
    values = config.to_dict() | {"architectures": [named]}
    model = section_of(values, named)
    ids = {key: value for key, value in values.items() if key.endswith("_token_id")}
    choice = choose_class(model, family=ARCHITECTURES[model_type].family, source=model_type, common=ids)
    assert choice.architecture.model_type == model_type and not choice.steps


def test_a_class_that_fits_directly_goes_before_one_that_needs_a_change() -> None:
    biased = {"attention": {"kind": "full", "qkv_bias": True, "out_bias": False}}
    model = preset("llama/tiny").model.model_dump(mode="json")
    choice = choose_class(resolved({**model, "decoder": {**model["decoder"], **biased}}), family="llama")
    assert choice.class_name == "Qwen2ForCausalLM" and not choice.steps


def test_as_an_architecture_that_differs_is_refused() -> None:
    with pytest.raises(InputError, match=r"no class of opt .*; OPTForCausalLM comes nearest: model\."):
        choose_class(gpt(), family="gpt", model_type="opt")


def test_an_unknown_model_type_lists_the_known() -> None:
    with pytest.raises(InputError, match="'gtp2' is not one of") as error:
        choose_class(gpt(), family="gpt", model_type="gtp2")
    assert "gpt2" in (error.value.hint or "") and all(name in error.value.message for name in ARCHITECTURES)


def test_special_ids_are_part_of_what_is_compared() -> None:
    """RoBERTa counts its positions from the id of padding: another id is another model."""
    model = resolved(preset("roberta/base").model.model_dump(mode="json"))
    assert choose_class(model, family="roberta", common={"pad_token_id": 1}).class_name == "RobertaForMaskedLM"
    with pytest.raises(InputError, match=r"model\.encoder\.positions\.offset is 2, expected 1"):
        choose_class(model, family="roberta", common={"pad_token_id": 0})


def test_the_model_of_a_choice_is_what_its_config_says() -> None:
    model = resolved(preset("transformer/base").model.model_dump(mode="json"))
    choice = choose_class(model, family="transformer")
    assert choice.model.encoder is not None and choice.model.encoder.positions.layout == "halves"  # type: ignore[union-attr]
    assert len(choice.steps) == 2 and {path for path, _, _ in differences(model, choice.model)} == {
        "model.encoder.positions.layout",
        "model.decoder.positions.layout",
        "model.heads.lm.bias",
    }


@pytest.mark.parametrize(
    ("head", "problem", "count"),
    [
        ({"kind": "classifier", "num_labels": 3}, "single_label_classification", 3),
        ({"kind": "classifier", "num_labels": 3, "multi_label": True}, "multi_label_classification", 3),
        ({"kind": "regression"}, "regression", 1),
    ],
)
def test_labels_are_named_both_ways(head: dict[str, Any], problem: str, count: int) -> None:
    model = Model.model_validate({"encoder": {}, "heads": [head]})
    assert label_keys(model)["label2id"] == {f"LABEL_{number}": number for number in range(count)}
    names = ("a", "b", "c")[:count]
    keys = label_keys(model, names)
    assert keys["problem_type"] == problem
    assert keys["id2label"] == {str(number): name for number, name in enumerate(names)}
    assert keys["label2id"] == {name: number for number, name in enumerate(names)}
    assert label_keys(gpt()) == {}


def test_a_scale_of_one_is_no_scale() -> None:
    """And T5's, given as a number, is T5's."""
    t5 = preset("t5/small").model.model_dump(mode="json")
    plain = resolved({**gpt().model_dump(mode="json"), "heads": [{"kind": "lm", "scale": 1.0}]})
    assert choose_class(plain, family="gpt").class_name == "GPT2LMHeadModel"
    scaled = resolved({**t5, "heads": [{"kind": "lm", "scale": t5["d_model"] ** -0.5}]})
    assert choose_class(scaled, family="t5").config["scale_decoder_outputs"] is True
