"""The published encoders: presets with exactly the parameters of the originals, and the papers' settings.

Counts are compared twice: with the published number, and with the class of `transformers` named beside it, built on the
meta device from a configuration of our own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tformer.build import build_model
from tformer.model import Transformer
from tformer.recipe import load_recipe
from tformer.recipe.model import Model
from tformer.recipe.recipe import Recipe

CONFIGS = Path(__file__).parent.parent / "configs"
POOLER = "heads.next_sentence.pooler"

BERT_SIZES = {
    "tiny": {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2},
    "mini": {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4},
    "small": {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8},
    "base": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12},
    "large": {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16},
}
BERT_BODY_AND_POOLER = {  # transformers.BertModel
    "tiny": 4_385_920,
    "mini": 11_170_560,
    "small": 28_763_648,
    "base": 109_482_240,
    "large": 335_141_888,
}
ROBERTA_SIZES = {
    "small": {"num_hidden_layers": 6, "hidden_size": 512, "num_attention_heads": 8},
    "base": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12},
}
ROBERTA_COUNTS = {  # RobertaModel with and without a pooler, RobertaForMaskedLM
    "small": (45_177_344, 44_914_688, 45_228_633),
    "base": (124_645_632, 124_055_040, 124_697_433),
}
ELECTRA_SIZES = {
    "small": {"embedding_size": 128, "hidden_size": 256, "num_attention_heads": 4},
    "base": {"embedding_size": 768, "hidden_size": 768, "num_attention_heads": 12},
}
GENERATOR_SIZES = {
    "small": {"embedding_size": 128, "hidden_size": 64, "num_attention_heads": 1},
    "base": {"embedding_size": 768, "hidden_size": 256, "num_attention_heads": 4},
}
ELECTRA_COUNTS = {  # ElectraModel and ElectraForPreTraining, then the generator: ElectraForMaskedLM
    "small": (13_483_008, 13_549_057, 4_620_026),
    "base": (108_891_648, 109_483_009, 33_740_602),
}
VIT_SIZES = {
    "tiny": {"hidden_size": 192, "num_attention_heads": 3},
    "small": {"hidden_size": 384, "num_attention_heads": 6},
    "base": {"hidden_size": 768, "num_attention_heads": 12},
}
VIT_COUNTS = {"tiny": 5_717_416, "small": 22_050_664, "base": 86_567_656}  # ViTForImageClassification, 1000 classes
PRESETS = [f"{arch}/{size}" for arch, sizes in (
    ("bert", BERT_SIZES), ("roberta", ROBERTA_SIZES), ("electra", ELECTRA_SIZES), ("vit", VIT_SIZES)
) for size in sizes]  # fmt: skip


def read(preset: str) -> Recipe:
    return load_recipe(preset=preset).recipe


def on_meta(section: Model | None) -> Transformer:
    assert section is not None
    return build_model(section, num_labels=1000, device="meta")


def theirs(name: str, **sizes: Any) -> int:
    """Parameters of a class of `transformers`; the feed-forward network is four times as wide as the model."""
    options = {key: sizes.pop(key) for key in ("add_pooling_layer",) if key in sizes}
    family = next(prefix for prefix in ("Bert", "Roberta", "Electra", "ViT") if name.startswith(prefix))
    config = getattr(transformers, f"{family}Config")(intermediate_size=4 * sizes["hidden_size"], **sizes)
    return counted(name, config, **options)


def counted(name: str, config: Any, **options: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in getattr(transformers, name)(config, **options).parameters())


def part(model: Transformer, *names: str) -> int:
    """Parameters whose names begin so; a tied one counts once, under its first name."""
    return sum(value.numel() for name, value in model.named_parameters() if name.startswith(names))


@pytest.mark.parametrize("size", BERT_SIZES)
def test_bert_has_the_published_parameters(size: str) -> None:
    model = on_meta(read(f"bert/{size}").model)
    expected = BERT_BODY_AND_POOLER[size]
    assert part(model, "embedding", "encoder", POOLER) == expected == theirs("BertModel", **BERT_SIZES[size])
    assert model.num_parameters() == theirs("BertForPreTraining", **BERT_SIZES[size])
    assert_stated(f"bert/{size}", expected, model.num_parameters())


@pytest.mark.parametrize("size", ROBERTA_SIZES)
def test_roberta_has_the_published_parameters(size: str) -> None:
    preset = read(f"roberta/{size}")
    sizes = {**ROBERTA_SIZES[size], "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
    pooled, body, with_head = ROBERTA_COUNTS[size]
    model = on_meta(preset.model)
    assert part(model, "embedding", "encoder") == body == theirs("RobertaModel", **sizes, add_pooling_layer=False)
    assert model.num_parameters() == with_head == theirs("RobertaForMaskedLM", **sizes)
    classifier = on_meta(preset.model.model_copy(update={"heads": next_sentence_head()}))
    assert part(classifier, "embedding", "encoder", POOLER) == pooled == theirs("RobertaModel", **sizes)
    assert model.get_parameter("encoder.positions.weight").shape[0] == 514
    assert_stated(f"roberta/{size}", pooled, body, with_head)


@pytest.mark.parametrize("size", ELECTRA_SIZES)
def test_electra_has_the_published_parameters(size: str) -> None:
    recipe = read(f"electra/{size}")
    body, with_head, generator = ELECTRA_COUNTS[size]
    model = on_meta(recipe.model)
    sizes = {"num_hidden_layers": 12, **ELECTRA_SIZES[size]}
    assert part(model, "embedding", "encoder") == body == theirs("ElectraModel", **sizes)
    assert model.num_parameters() == with_head == theirs("ElectraForPreTraining", **sizes)
    sizes = {"num_hidden_layers": 12, **GENERATOR_SIZES[size]}
    assert on_meta(recipe.generator).num_parameters() == generator == theirs("ElectraForMaskedLM", **sizes)
    assert_stated(f"electra/{size}", with_head, generator)


@pytest.mark.parametrize("size", VIT_SIZES)
def test_vit_has_the_published_parameters(size: str) -> None:
    count = on_meta(read(f"vit/{size}").model).num_parameters()
    assert count == VIT_COUNTS[size] == theirs("ViTForImageClassification", num_labels=1000, **VIT_SIZES[size])
    assert_stated(f"vit/{size}", count)


def assert_stated(preset: str, *counts: int) -> None:
    text = (CONFIGS / f"{preset}.yaml").read_text(encoding="utf-8")
    assert all(f"{count:,}" in text for count in counts)


def next_sentence_head() -> Any:
    values = {"vocab_size": 8, "encoder": {}, "heads": [{"kind": "next_sentence"}]}
    return Model.model_validate(values).heads


def test_electras_generator_can_share_its_tables() -> None:
    """Same vocabulary, embedding width, positions and token types: only so are the two models' tables one."""
    for size in ELECTRA_SIZES:
        recipe = read(f"electra/{size}")
        model, generator = on_meta(recipe.model), on_meta(recipe.generator)
        for name in ("embedding.weight", "embedding.token_types", "encoder.positions.weight"):
            assert model.get_parameter(name).shape == generator.get_parameter(name).shape


SETTINGS = {  # rate, betas, weight decay, warm-up, steps, sequences a step, of how many tokens
    "bert/base": (1e-4, (0.9, 0.999), 0.01, 10_000, 1_000_000, 256, 512),
    "bert/large": (1e-4, (0.9, 0.999), 0.01, 10_000, 1_000_000, 256, 512),
    "roberta/base": (6e-4, (0.9, 0.98), 0.01, 24_000, 500_000, 8192, 512),
    "electra/small": (5e-4, (0.9, 0.999), 0.01, 10_000, 1_000_000, 128, 128),
    "electra/base": (2e-4, (0.9, 0.999), 0.01, 10_000, 766_000, 256, 512),
}


@pytest.mark.parametrize("preset", SETTINGS)
def test_pre_training_settings_are_the_papers(preset: str) -> None:
    recipe = read(preset)
    optimizer, schedule, training = recipe.optimizer, recipe.schedule, recipe.training
    assert training.batch_size is not None
    found = (optimizer.lr, optimizer.betas, optimizer.weight_decay, schedule.warmup_steps, training.max_steps)
    assert (*found, training.batch_size * training.grad_accum, recipe.data.seq_len) == SETTINGS[preset]
    assert (optimizer.kind, schedule.kind, schedule.min_ratio) == ("adamw", "linear", 0.0)


@pytest.mark.parametrize("preset", PRESETS)
def test_heads_are_those_of_the_objectives(preset: str) -> None:
    expected = {
        "bert": ["masked_lm", "next_sentence"],
        "roberta": ["masked_lm"],
        "electra": ["replaced_token"],
        "vit": ["classification"],
    }
    recipe = read(preset)
    kinds = [objective.kind for objective in recipe.objectives]
    assert kinds == expected[recipe.arch]
    heads = ["classifier" if kind == "classification" else kind for kind in kinds]
    assert [head.kind for head in recipe.model.heads] == heads


def test_an_objective_brings_its_head_which_pools_as_the_one_before() -> None:
    flags = {"objectives": [{"kind": "regression"}]}
    recipe = load_recipe(arch="bert", preset="classify", flags=flags).recipe
    [head] = recipe.model.heads
    assert (head.kind, head.pooling, head.pooler, head.dropout) == ("regression", "mean", False, 0.3)  # type: ignore[union-attr]
    assert recipe.training.best_metric == "loss"  # accuracy is none of its metrics


def test_an_objective_without_a_generator_drops_it() -> None:
    recipe = load_recipe(arch="electra", preset="tiny", flags={"objectives": [{"kind": "masked_lm"}]}).recipe
    assert recipe.generator is None and [head.kind for head in recipe.model.heads] == ["masked_lm"]


# --- kinds of attention for long texts --------------------------------------------------------------------------------

LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "longformer": ("Longformer", {"vocab_size": 50265, "max_position_embeddings": 4098, "type_vocab_size": 1}),
    "bigbird": ("BigBird", {"vocab_size": 50358}),
}
LONG_COUNTS = {  # ...Model without and with a pooler, ...ForMaskedLM
    "longformer": (148_068_864, 148_659_456, 148_711_257),
    "bigbird": (126_878_208, 127_468_800, 127_520_694),
}


@pytest.mark.parametrize("arch", LONG)
def test_base_has_the_published_parameters(arch: str) -> None:
    family, sizes = LONG[arch]
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = build_model(read(f"{arch}/base").model, device="meta")
    names = dict(model.named_parameters())
    body = sum(value.numel() for name, value in names.items() if name.startswith(("embedding", "encoder")))
    found = (body, counted(f"{family}Model", config), model.num_parameters())
    assert found == LONG_COUNTS[arch]
    assert body == counted(f"{family}Model", config, add_pooling_layer=False)
    pooler = found[1] - found[0] if arch == "bigbird" else 0  # theirs keeps one beside the head
    assert model.num_parameters() + pooler == counted(f"{family}ForMaskedLM", config)
    text = (CONFIGS / arch / "base.yaml").read_text(encoding="utf-8")
    assert all(f"{count:,}" in text for count in LONG_COUNTS[arch])


def test_longformers_header_counts_the_global_projections() -> None:
    model = build_model(read("longformer/base").model, device="meta")
    own = sum(value.numel() for name, value in model.named_parameters() if ".global_" in name)
    assert f"{own:,}" in (CONFIGS / "longformer/base.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(("preset", "count"), [("linformer/base", 124_828_505), ("performer/base", 124_697_433)])
def test_presets_have_the_parameters_that_they_state(preset: str, count: int) -> None:
    assert on_meta(read(preset).model).num_parameters() == count
    assert_stated(preset, count)


@pytest.mark.parametrize("arch", [*LONG, "linformer", "performer"])
def test_classify_is_bert_classify_but_for_attention_and_length(arch: str) -> None:
    ours, bert = read(f"{arch}/classify"), read("bert/classify")
    assert ours.data.seq_len == ours.model.max_seq_len == 2048
    assert ours.model.encoder is not None and bert.model.encoder is not None
    assert ours.model.encoder.attention.kind == {"longformer": "sliding_window"}.get(arch, arch)
    encoder = ours.model.encoder.model_copy(update={"attention": bert.model.encoder.attention})
    same_length = {"encoder": encoder, "max_seq_len": bert.model.max_seq_len}
    assert ours.model.model_copy(update=same_length) == bert.model
    assert (ours.optimizer, ours.schedule, ours.objectives) == (bert.optimizer, bert.schedule, bert.objectives)


LONG_SETTINGS = {  # rate, warm-up, steps, sequences a step, of how many tokens
    "longformer": (3e-5, 500, 65_000, 64, 4096),
    "bigbird": (1e-4, 10_000, 500_000, 256, 4096),
}


@pytest.mark.parametrize("arch", LONG_SETTINGS)
def test_base_trains_as_in_the_papers(arch: str) -> None:
    recipe = read(f"{arch}/base")
    training = recipe.training
    assert training.batch_size is not None
    sequences = training.batch_size * training.grad_accum
    found = (recipe.optimizer.lr, recipe.schedule.warmup_steps, training.max_steps, sequences, recipe.data.seq_len)
    assert found == LONG_SETTINGS[arch]
