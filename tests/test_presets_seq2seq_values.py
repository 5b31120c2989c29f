"""The published encoder-decoders: every setting that a paper or its code names is the preset's.

The headers of the YAML files say where each value comes from.
"""

from __future__ import annotations

import math
from functools import cache, reduce
from typing import Any

import pytest

from tformer.optim.schedules import build_schedule
from tformer.recipe import load_recipe
from tformer.recipe.load import recipe_to_data
from tformer.recipe.recipe import Recipe

ORIGINAL = ("transformer/base", "transformer/big", "transformer/base-enfr", "transformer/big-enfr")
T5 = ("t5/small", "t5/base", "t5/v1_1-small", "t5/v1_1-base")


@cache
def read(preset: str) -> Recipe:
    return load_recipe(preset=preset).recipe


ORIGINAL_VALUES: dict[str, Any] = {
    "tokenizer.train.model": "bpe",
    "tokenizer.train.template": "seq2seq",
    "tokenizer.separate": False,
    "model.embedding.scale": True,
    "model.embedding.norm": False,
    "model.tie.source_target": True,
    "model.tie.output": True,
    "stack.num_layers": 6,
    "stack.positions.kind": "sinusoidal",
    "stack.positions.layout": "interleaved",
    "stack.positions.base": 10000.0,
    "stack.attention.scale": "auto",
    "stack.feedforward.activation": "relu",
    "stack.feedforward.gated": False,
    "stack.norm.kind": "layernorm",
    "stack.norm.place": "post",
    "stack.final_norm": False,
    "stack.attention_dropout": 0.0,
    "stack.activation_dropout": 0.0,
    "model.init.kind": "xavier",
    "objectives.0.kind": "seq2seq",
    "objectives.0.label_smoothing": 0.1,
    "objectives.0.smoothing_kind": "off_target",
    "optimizer.kind": "adam",
    "optimizer.lr": 1.0,
    "optimizer.betas": [0.9, 0.98],
    "optimizer.eps": 1e-9,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_grad_norm": None,
    "schedule.kind": "noam",
    "schedule.warmup_steps": 4000,
    "training.batch_tokens": 25000,
    "training.grad_accum": 1,
    "generation.beam_size": 4,
    "generation.length_penalty": 0.6,
    "generation.length_penalty_type": "gnmt",
    "generation.length_margin": 50,
}
T5_VALUES: dict[str, Any] = {
    "tokenizer.train.model": "unigram",
    "tokenizer.train.vocab_size": 32100,
    "tokenizer.train.template": "t5",
    "model.vocab_size": 32128,
    "model.embedding.scale": False,
    "data.seq_len": 512,
    "stack.head_dim": 64,
    "stack.positions.kind": "t5_bias",
    "stack.positions.buckets": 32,
    "stack.positions.max_distance": 128,
    "stack.attention.scale": 1.0,
    "stack.attention.qkv_bias": False,
    "stack.attention.out_bias": False,
    "stack.feedforward.bias": False,
    "stack.norm.kind": "rmsnorm",
    "stack.norm.place": "pre",
    "stack.norm.eps": 1e-6,
    "stack.final_norm": True,
    "objectives.0.kind": "span_corruption",
    "objectives.0.noise_density": 0.15,
    "objectives.0.mean_span_length": 3.0,
    "schedule.kind": "inverse_sqrt",
    "schedule.warmup_steps": 10000,
    "training.max_steps": 1_000_000,
    "generation.beam_size": 4,
    "generation.length_penalty": 0.6,
    "generation.length_penalty_type": "gnmt",
}
V1_0 = {
    "stack.feedforward.activation": "relu",
    "stack.feedforward.gated": False,
    "model.tie.output": True,
    "model.heads.0.scale": "inverse_sqrt_d",
    "stack.dropout": 0.1,
}
V1_1 = {
    "stack.feedforward.activation": "gelu_tanh",
    "stack.feedforward.gated": True,
    "model.tie.output": False,
    "model.heads.0.scale": "none",
    "stack.dropout": 0.0,
}


def sizes(width: int, heads: int, hidden: int, **more: Any) -> dict[str, Any]:
    return {"model.d_model": width, "stack.num_heads": heads, "stack.feedforward.d_ff": hidden, **more}


def original(width: int, heads: int, vocabulary: int, dropout: float, steps: int, averaged: int) -> dict[str, Any]:
    return ORIGINAL_VALUES | sizes(width, heads, 4 * width) | {
        "tokenizer.train.vocab_size": vocabulary,
        "stack.dropout": dropout,
        "model.embedding.dropout": dropout,
        "training.max_steps": steps,
        "training.keep_last": averaged,
    }  # fmt: skip


def t5(width: int, heads: int, hidden: int, layers: int, version: dict[str, Any]) -> dict[str, Any]:
    return T5_VALUES | version | sizes(width, heads, hidden) | {"stack.num_layers": layers}


PUBLISHED: dict[str, dict[str, Any]] = {
    "transformer/base": original(512, 8, 37000, 0.1, 100_000, 5),
    "transformer/big": original(1024, 16, 37000, 0.3, 300_000, 20),
    "transformer/base-enfr": original(512, 8, 32000, 0.1, 300_000, 5),
    "transformer/big-enfr": original(1024, 16, 32000, 0.1, 300_000, 20),
    "transformer/tiny": sizes(128, 4, 256) | {
        "tokenizer.train.model": "bpe",
        "tokenizer.train.vocab_size": 10000,
        "stack.num_layers": 4,
        "stack.norm.place": "post",
        "stack.dropout": 0.3,
        "model.embedding.dropout": 0.3,
        "objectives.0.label_smoothing": 0.1,
        "optimizer.kind": "adam",
        "optimizer.lr": 5e-3,
        "optimizer.betas": [0.9, 0.98],
        "schedule.kind": "inverse_sqrt",
        "schedule.warmup_steps": 2000,
        "training.batch_tokens": 8192,
        "training.max_steps": 8000,
        "training.keep_last": 10,
        "training.early_stopping.patience": 10,
        "training.best_metric": "bleu",
        "training.valid_beam_size": 1,
        "generation.beam_size": 5,
        "generation.length_penalty": 1.0,
        "generation.length_penalty_type": "avg",
    },
    "transformer/iwslt": sizes(256, 4, 1024) | {
        "tokenizer.train.vocab_size": 32000,
        "tokenizer.train.lowercase": True,
        "stack.num_layers": 6,
        "stack.norm.place": "pre",
        "stack.final_norm": True,
        "stack.dropout": 0.3,
        "stack.attention_dropout": 0.3,
        "stack.activation_dropout": 0.3,
        "model.embedding.scale": True,
        "model.embedding.dropout": 0.0,
        "objectives.0.label_smoothing": 0.1,
        "optimizer.lr": 3e-4,
        "optimizer.betas": [0.9, 0.999],
        "schedule.kind": "plateau",
        "schedule.factor": 0.7,
        "schedule.patience": 5,
        "training.batch_tokens": 4096,
        "training.max_epochs": 100,
        "training.eval_every": 1000,
        "generation.max_new_tokens": 100,
        "generation.beam_size": 5,
        "generation.length_penalty": 1.0,
        "generation.length_penalty_type": "gnmt",
    },
    "transformer/tears": sizes(512, 8, 2048) | {
        "stack.num_layers": 6,
        "stack.norm.kind": "scalenorm",
        "stack.norm.place": "pre",
        "stack.norm.eps": 1e-5,
        "stack.final_norm": True,
        "stack.dropout": 0.3,
        "stack.attention_dropout": 0.3,
        "stack.activation_dropout": 0.3,
        "model.embedding.fixnorm": True,
        "model.embedding.dropout": 0.3,
        "model.heads.0.bias": True,
        "model.init.kind": "normal",
        "model.init.residual_scale": False,
        "objectives.0.label_smoothing": 0.1,
        "objectives.0.word_dropout": 0.1,
        "optimizer.lr": 3e-4,
        "optimizer.clip_grad_norm": 1.0,
        "schedule.kind": "plateau",
        "schedule.warmup_steps": 0,
        "schedule.factor": 0.8,
        "schedule.patience": 3,
        "training.best_metric": "bleu",
        "generation.beam_size": 4,
        "generation.length_penalty": 0.6,
        "generation.length_penalty_type": "gnmt",
        "generation.length_margin": 50,
    },
    "t5/small": t5(512, 8, 2048, 6, V1_0),
    "t5/base": t5(768, 12, 3072, 12, V1_0),
    "t5/v1_1-small": t5(512, 6, 1024, 8, V1_1),
    "t5/v1_1-base": t5(768, 12, 2048, 12, V1_1),
    "bart/base": sizes(768, 12, 3072) | {
        "tokenizer.train.model": "byte-bpe",
        "tokenizer.train.template": "roberta",
        "model.vocab_size": 50265,
        "model.max_seq_len": 1024,
        "model.embedding.norm": True,
        "model.embedding.scale": False,
        "stack.num_layers": 6,
        "stack.positions.kind": "learned",
        "stack.positions.offset": 2,
        "stack.feedforward.activation": "gelu",
        "stack.norm.place": "post",
        "stack.norm.eps": 1e-5,
        "stack.final_norm": False,
        "stack.dropout": 0.1,
        "objectives.0.kind": "denoising",
        "objectives.0.mask_share": 0.3,
        "objectives.0.span_length": 3.0,
        "objectives.0.permute_sentences": True,
        "training.max_steps": 500_000,
        "generation.beam_size": 5,
    },
}  # fmt: skip


def step_into(value: Any, name: str) -> Any:
    return value[int(name) if name.isdigit() else name]


@pytest.mark.parametrize("preset", PUBLISHED)
def test_settings_are_the_published_ones(preset: str) -> None:
    """`stack.` stands for the encoder and the decoder alike."""
    data = recipe_to_data(read(preset))
    for key, expected in PUBLISHED[preset].items():
        sides = ("encoder", "decoder") if key.startswith("stack.") else ("",)
        for side in sides:
            path = key.replace("stack.", f"model.{side}.", 1) if side else key
            found: Any = reduce(step_into, path.split("."), data)
            assert found == expected, f"{path}: found {found}, expected {expected}"


def test_batches_are_the_papers() -> None:
    """Windows a step; Transformers without Tears counts 4,096 tokens of both sides together."""
    for preset, expected in {**dict.fromkeys(T5, 2048), "bart/base": 8000}.items():
        training = read(preset).training
        assert training.batch_size is not None
        assert training.batch_size * training.grad_accum == expected
    assert read("transformer/tears").training.batch_tokens == 4096 // 2


@pytest.mark.parametrize("preset", ORIGINAL)
def test_the_rate_is_that_of_equation_3(preset: str) -> None:
    recipe = read(preset)
    width = recipe.model.d_model
    schedule = build_schedule(recipe.schedule, total_steps=recipe.training.max_steps, d_model=width)
    for step in (1, 3999, 4000, 100_000):
        expected = width**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert recipe.optimizer.lr * schedule.scale(step) == pytest.approx(expected)


def test_initial_weights_are_the_sources() -> None:
    for preset in (*ORIGINAL, "transformer/tiny"):
        model = read(preset).model
        assert model.init.embedding_std == pytest.approx(model.d_model**-0.5, rel=1e-6)
    assert read("transformer/tears").model.init.std == pytest.approx(math.sqrt(2 / (5 * 512)), rel=1e-6)
    iwslt = math.sqrt(6 / (32000 + 256)) / math.sqrt(3)  # of a number drawn from U(+-sqrt(6 / (fan-in + fan-out)))
    assert read("transformer/iwslt").model.init.embedding_std == pytest.approx(iwslt, rel=0.01)


def test_plateaus_end_where_the_sources_stop() -> None:
    for preset, last in {"transformer/iwslt": 1e-8, "transformer/tears": 5e-5}.items():
        recipe = read(preset)
        assert recipe.optimizer.lr * recipe.schedule.min_ratio == pytest.approx(last, rel=1e-3)
