"""The published encoder-decoders: presets with the papers' parameters, that begin, end and learn as they do.

The original Transformer is counted by part. Its paper rounds to 65M (base) and 213M (big), which no one vocabulary
gives: 65M would be 40,745 tokens, 213M 35,784. At the 37,000 that it names there are 63.1M and 214.2M, biases included,
tables counted once. T5 and BART are counted twice: the published number, and the class of `transformers` on the meta
device.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tformer.build import build_model
from tformer.model import Transformer
from tformer.recipe import list_presets, load_recipe
from tformer.recipe.model import Model
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


def part(model: Transformer, *names: str) -> int:
    """Parameters whose names begin so; a tied one counts once, under its first name."""
    return sum(value.numel() for name, value in model.named_parameters() if name.startswith(names))


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
    tied = count_of(transformers.T5ForConditionalGeneration, config)  # the class ties, whatever the configuration says
    own_head = 32128 * config.d_model if untied else 0  # which is in v1.1's files
    assert on_meta(preset).num_parameters() == tied + own_head


def test_bart_has_the_parameters_of_transformers() -> None:
    sides = {"layers": 6, "attention_heads": 12, "ffn_dim": 3072}
    both = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sides.items()}
    config = transformers.BartConfig(d_model=768, vocab_size=50265, max_position_embeddings=1024, **both)
    model = on_meta("bart/base")
    assert model.num_parameters() == count_of(transformers.BartForConditionalGeneration, config)
    assert model.get_parameter("encoder.positions.weight").shape[0] == 1026


def count_of(class_: Any, config: Any) -> int:
    with torch.device("meta"):
        reference = class_(config)
    return sum(parameter.numel() for parameter in reference.parameters())


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


def scaled_down(model: Model) -> Model:
    """The same variant with two layers of width 32 a side and 97 tokens; dropout off."""
    values = model.model_dump()
    values |= {"d_model": 32, "max_seq_len": 32, "vocab_size": 97}
    values["embedding"]["dropout"] = 0.0
    for side in ("encoder", "decoder"):
        values[side] |= {"num_layers": 2, "num_heads": 4, "head_dim": None, "layers": {}}
        values[side] |= {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
        values[side]["feedforward"]["d_ff"] = 64
    return Model.model_validate(values)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_small_copy_starts_near_a_uniform_guess_and_learns(preset: str) -> None:
    """Tables of T5 v1.0 and FixNorm are as wide at the output as at the input: of the decoder's input token they make a
    guess of their own, with a logit of about sqrt(d_model)."""
    torch.manual_seed(0)
    model = build_model(scaled_down(read(preset).model))
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
