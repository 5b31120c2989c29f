"""Encoder-decoder presets: values of the papers and parameter counts."""

from __future__ import annotations

import math
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.test_presets_build import scaled_down
from tests.test_presets_encoders import counted, part
from tformer.build import build_model
from tformer.model import Transformer
from tformer.optim.schedules import build_schedule
from tformer.recipe import list_presets, load_recipe
from tformer.recipe.load import recipe_to_data
from tformer.recipe.recipe import Recipe
from tformer.tokenizer.options import TokenizerOptions
from tformer.tokenizer.special import DecoderTokens, decoder_tokens, find_special_ids, sentinel_tokens, special_tokens

CONFIGS = Path(__file__).parent.parent / "configs"
PRESETS = [f"{arch}/{name}" for arch in ("transformer", "t5", "bart") for name in list_presets()[arch]]
ORIGINAL = ("transformer/base", "transformer/big", "transformer/base-enfr", "transformer/big-enfr")
OTHERS = ("transformer/tears", "transformer/iwslt")  # published, without a count
T5 = ("t5/small", "t5/base", "t5/v1_1-small", "t5/v1_1-base")


@cache
def read(preset: str) -> Recipe:
    return load_recipe(preset=preset).recipe


def on_meta(preset: str) -> Transformer:
    recipe = read(preset)
    return build_model(recipe.model, vocab_size=recipe.tokenizer.train.vocab_size, device="meta")


# --- parameters -------------------------------------------------------------------------------------------------------

COUNTS = {
    "transformer/base": 63_082_496,
    "transformer/big": 214_245_376,
    "transformer/base-enfr": 60_522_496,
    "transformer/big-enfr": 209_125_376,
    "t5/small": 60_506_624,
    "t5/base": 222_903_552,
    "t5/v1_1-small": 76_961_152,
    "t5/v1_1-base": 247_577_856,
    "bart/base": 139_420_416,
}


@pytest.mark.parametrize("preset", COUNTS)
def test_parameters_are_the_published_ones_and_stated(preset: str) -> None:
    assert on_meta(preset).num_parameters() == COUNTS[preset]
    assert f"{COUNTS[preset]:,}" in (CONFIGS / f"{preset}.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("preset", ORIGINAL)
def test_the_originals_parameters_by_part(preset: str) -> None:
    model, section = on_meta(preset), read(preset).model
    width, hidden, vocabulary = section.d_model, 4 * section.d_model, read(preset).tokenizer.train.vocab_size
    attention = 4 * (width * width + width)
    feedforward = width * hidden + hidden + hidden * width + width
    norm = 2 * width
    assert part(model, "embedding") == vocabulary * width
    assert part(model, "encoder") == 6 * (attention + feedforward + 2 * norm)
    assert part(model, "decoder.") == 6 * (2 * attention + feedforward + 3 * norm)
    assert part(model, "decoder_embedding", "heads") == 0  # three-way tied
    assert model.num_parameters() == part(model, "embedding", "encoder", "decoder.")


def test_no_one_vocabulary_gives_both_of_the_papers_rounded_counts() -> None:
    implied = {}
    for preset, rounded in (("transformer/base", 65e6), ("transformer/big", 213e6)):
        model = on_meta(preset)
        implied[preset] = (rounded - part(model, "encoder", "decoder.")) / read(preset).model.d_model
    assert [round(size) for size in implied.values()] == [40_745, 35_784]


def test_small_translators_have_the_sizes_told_of_them() -> None:
    """Wu et al. (arXiv 2105.14462) and Joey NMT give millions."""
    for preset, millions in {"transformer/tiny": 2.6, "transformer/iwslt": 19}.items():
        assert on_meta(preset).num_parameters() / 1e6 == pytest.approx(millions, rel=0.02)


T5_SIZES = {
    "t5/small": {"d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    "t5/base": {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "t5/v1_1-small": {"d_model": 512, "d_ff": 1024, "num_layers": 8, "num_heads": 6},
    "t5/v1_1-base": {"d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12},
}


@pytest.mark.parametrize("preset", T5)
def test_t5_has_the_parameters_of_transformers(preset: str) -> None:
    untied = "v1_1" in preset
    config = transformers.T5Config(
        vocab_size=32128, d_kv=64, feed_forward_proj="gated-gelu" if untied else "relu", **T5_SIZES[preset]
    )
    tied = counted("T5ForConditionalGeneration", config)  # the class ties, whatever the configuration says
    own_head = 32128 * config.d_model if untied else 0  # which is in v1.1's files
    assert on_meta(preset).num_parameters() == tied + own_head


def test_bart_has_the_parameters_of_transformers() -> None:
    sides = {"layers": 6, "attention_heads": 12, "ffn_dim": 3072}
    both = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sides.items()}
    config = transformers.BartConfig(d_model=768, vocab_size=50265, max_position_embeddings=1024, **both)
    model = on_meta("bart/base")
    assert model.num_parameters() == counted("BartForConditionalGeneration", config)
    assert model.get_parameter("encoder.positions.weight").shape[0] == 1026


# --- conventions ------------------------------------------------------------------------------------------------------

DECODERS = {  # start, eos, forced bos
    "transformer": ("[START]", "[END]", None),
    "t5": ("<pad>", "</s>", None),
    "bart": ("</s>", "</s>", "<s>"),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_decoders_begin_and_end_as_published(preset: str) -> None:
    recipe = read(preset)
    options = recipe.tokenizer.train
    ids = {token: number for number, token in enumerate([*special_tokens(options), *sentinel_tokens(options)])}
    given = recipe.tokenizer.special_ids
    found = decoder_tokens(
        find_special_ids(ids, None), start=given.decoder_start, eos=given.eos, forced_bos=given.forced_bos
    )
    start, eos, forced = DECODERS[recipe.arch]
    assert found == DecoderTokens(ids[start], ids[eos], None if forced is None else ids[forced])


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.startswith("t5/")])
def test_t5_vocabularies_have_their_hundred_sentinels(preset: str) -> None:
    options: TokenizerOptions = read(preset).tokenizer.train
    assert len(sentinel_tokens(options)) == 100
    vocabulary = read(preset).model.vocab_size
    assert vocabulary is None or vocabulary >= options.vocab_size


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_a_small_copy_starts_near_a_uniform_guess_and_learns(preset: str) -> None:
    """Tables of T5 v1.0 and FixNorm are as wide at the output as at the input: of the decoder's input token they make a
    guess of their own, with a logit of about sqrt(d_model)."""
    torch.manual_seed(0)
    model = build_model(scaled_down(read(preset).model)).eval()
    source, target = torch.randint(8, 97, (2, 8, 12))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss, _, count, _ = model(source, decoder_input_ids=target[:, :-1]).loss_terms("lm", target[:, 1:])
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
        losses.append(float(loss.detach()) / float(count))
    own = math.exp(math.sqrt(32)) if preset in ("t5/small", "t5/base", "transformer/tears") else 0.0
    assert losses[0] == pytest.approx(math.log(97 + own), abs=1.0)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_published_or_small(preset: str) -> None:
    assert preset in (*COUNTS, *OTHERS) or on_meta(preset).num_parameters() < 12_000_000


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
    "optimizer.kind": "adafactor",
    "optimizer.clip_grad_norm": None,
    "optimizer.weight_decay": 0.0,
    "schedule.kind": "truncated_rsqrt",
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


@pytest.mark.parametrize("preset", T5)
def test_t5s_rate_is_the_inverse_square_root_after_ten_thousand_steps(preset: str) -> None:
    recipe = read(preset)
    schedule = build_schedule(recipe.schedule, total_steps=recipe.training.max_steps, d_model=recipe.model.d_model)
    for step in (1, 10_000, 10_001, 500_000):
        assert recipe.optimizer.lr * schedule.scale(step) == pytest.approx(max(step, 10_000) ** -0.5)


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
