"""longformer and bigbird: the parameters of the published models, the papers' settings, and bert/classify's size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from tformer.build import build_model
from tformer.recipe.recipe import Recipe

CONFIGS = Path(__file__).parent.parent / "configs"
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "longformer": ("Longformer", {"vocab_size": 50265, "max_position_embeddings": 4098, "type_vocab_size": 1}),
    "bigbird": ("BigBird", {"vocab_size": 50358}),
}
COUNTS = {  # ...Model without and with a pooler, ...ForMaskedLM
    "longformer": (148_068_864, 148_659_456, 148_711_257),
    "bigbird": (126_878_208, 127_468_800, 127_520_694),
}


def read(arch: str, name: str) -> Recipe:
    values = yaml.safe_load((CONFIGS / arch / f"{name}.yaml").read_text(encoding="utf-8"))
    return Recipe.model_validate({"arch": arch, "preset": name, **values})


def theirs(name: str, config: Any, **options: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in getattr(transformers, name)(config, **options).parameters())


@pytest.mark.parametrize("arch", THEIRS)
def test_base_has_the_published_parameters(arch: str) -> None:
    family, sizes = THEIRS[arch]
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = build_model(read(arch, "base").model, device="meta")
    names = dict(model.named_parameters())
    body = sum(value.numel() for name, value in names.items() if name.startswith(("embedding", "encoder")))
    found = (body, theirs(f"{family}Model", config), model.num_parameters())
    assert found == COUNTS[arch]
    assert body == theirs(f"{family}Model", config, add_pooling_layer=False)
    pooler = found[1] - found[0] if arch == "bigbird" else 0  # theirs keeps one beside the head
    assert model.num_parameters() + pooler == theirs(f"{family}ForMaskedLM", config)
    text = (CONFIGS / arch / "base.yaml").read_text(encoding="utf-8")
    assert all(f"{count:,}" in text for count in COUNTS[arch])


def test_longformers_header_counts_the_global_projections() -> None:
    model = build_model(read("longformer", "base").model, device="meta")
    own = sum(value.numel() for name, value in model.named_parameters() if ".global_" in name)
    assert f"{own:,}" in (CONFIGS / "longformer/base.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("arch", THEIRS)
def test_classify_is_bert_classify_but_for_attention_and_length(arch: str) -> None:
    ours, bert = (read(name, "classify") for name in (arch, "bert"))
    counts = [
        build_model(recipe.model, vocab_size=16000, num_labels=2, device="meta").num_parameters()
        for recipe in (ours, bert)
    ]
    assert counts[0] == counts[1]
    assert ours.data.seq_len == ours.model.max_seq_len == 2048
    assert ours.model.encoder is not None and bert.model.encoder is not None
    assert ours.model.encoder.model_copy(update={"attention": bert.model.encoder.attention}) == bert.model.encoder
    assert (ours.optimizer, ours.schedule, ours.objectives) == (bert.optimizer, bert.schedule, bert.objectives)


SETTINGS = {  # rate, warm-up, steps, sequences a step, of how many tokens
    "longformer": (3e-5, 500, 65_000, 64, 4096),
    "bigbird": (1e-4, 10_000, 500_000, 256, 4096),
}


@pytest.mark.parametrize("arch", SETTINGS)
def test_base_trains_as_in_the_papers(arch: str) -> None:
    recipe = read(arch, "base")
    training = recipe.training
    assert training.batch_size is not None
    sequences = training.batch_size * training.grad_accum
    found = (recipe.optimizer.lr, recipe.schedule.warmup_steps, training.max_steps, sequences, recipe.data.seq_len)
    assert found == SETTINGS[arch]
