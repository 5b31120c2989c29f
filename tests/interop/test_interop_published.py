"""Published configurations, made small: read as they are, exchanged and generated from with random weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.interop.classes import note
from tests.interop.parity import assert_parity, padding, tokens
from tests.interop.published import PUBLISHED, class_of
from tests.interop.tiny_models import MASK, hidden_of
from tests.interop.writing import ENDS, EOS, PAD, VOCABULARY, Pair, ours, theirs
from tformer.decoding.settings import BeamSettings, GenerationSettings
from tformer.interop.architectures import ARCHITECTURES
from tformer.model import Transformer

# Keys by what they count. A model gets a small vocabulary, 2 layers or one period of its pattern, narrow heads, as many
# heads as keep the ratio of queries to keys, and windows shorter than the texts.
LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"),
    *("encoder_layers", "decoder_layers"),
)
PERIODS = {"gemma3_text": 7, "smollm3": 5, "modernbert": 4}
BY_LAYER = ("layer_types", "no_rope_layers", "attention_window", "attention_layers")
HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
GROUPS = ("num_key_value_heads", "num_kv_heads")
HEAD_WIDTHS = ("head_dim", "d_kv", "rotary_dim", "attention_head_size")
WIDTHS = (
    *("hidden_size", "n_embd", "n_embed", "d_model", "dim", "embedding_size", "word_embed_proj_dim"),
    *("intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"),
    "pooler_hidden_size",
)
WINDOWS = {"sliding_window": 5, "window_size": 5, "local_attention": 6}
TABLES = ("vocab_size", "src_vocab_size", "tgt_vocab_size", "decoder_vocab_size")
IDS = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": EOS, "cls_token_id": 1, "sep_token_id": EOS}


def halved(size: int, least: int, *others: int) -> int:
    """The largest power of two that divides `size` and the others and leaves at least `least` of `size`."""
    return max(2**power for power in range(9) if math.gcd(size, *others) % 2**power == 0 and size >> power >= least)


def reduced(published: dict[str, Any]) -> dict[str, Any]:
    """The configuration with fewer layers, narrower and with a small vocabulary; all else as published."""
    config = json.loads(json.dumps(published))
    of_class = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(json.loads(json.dumps(config)))
    heads = of_class.num_attention_heads
    groups = [config[key] for key in GROUPS if config.get(key, 1) > 1]
    by = halved(heads, 4, *groups, *(group // 2 for group in groups))
    width = config.get("head_dim") or config.get("d_kv") or of_class.hidden_size // heads
    share = config.get("rotary_pct") or config.get("partial_rotary_factor") or 1.0
    rotated = config.get("rotary_dim") or round(share * width)
    narrower = halved(width, 8, rotated // 2)
    for key, value in config.items():
        if key in LAYERS:
            config[key] = min(value, PERIODS.get(config["model_type"], 2))
        elif key in HEADS or (key in GROUPS and value > 1):
            config[key] = value // by
        elif value is not None and (key in HEAD_WIDTHS or key in WIDTHS):
            config[key] = max(value // (narrower if key in HEAD_WIDTHS else narrower * by), 1)
        elif key in TABLES:
            config[key] = VOCABULARY
        elif key in WINDOWS and value is not None:
            config[key] = WINDOWS[key]
    depth = min(PERIODS.get(config["model_type"], 2), *(config[key] for key in LAYERS if key in config))
    for key in BY_LAYER:
        if key in config:
            config[key] = [4] * depth if key == "attention_window" else config[key][:depth]
    if "attention_types" in config:
        config["attention_types"][0][1] = 1
    for key in ("long_factor", "short_factor"):
        if factors := (config.get("rope_scaling") or {}).get(key):
            config["rope_scaling"][key] = factors[narrower // 2 :: narrower]
    if isinstance(inside := config.get("decoder"), dict):  # FSMT's
        inside["vocab_size"] = VOCABULARY
    start = config.get("decoder_start_token_id")
    roles = [key for key in IDS if start is not None and start in (config.get(key), of_class.to_dict().get(key))]
    writes = start is not None or ARCHITECTURES[config["model_type"]].classes[class_of(config)] == ("lm",)
    config |= {key: value for key, value in IDS.items() if key in config and (writes or config[key] >= VOCABULARY)}
    return config | ({"decoder_start_token_id": IDS[roles[0]]} if roles else {})


TARGET, NEW = padding(MASK.shape[1], 8, 11, 4), 8


def inputs_of(reference: Any) -> dict[str, Tensor]:
    """What the class reads: images, texts, or pairs of texts; padding stands on the right."""
    if reference.main_input_name == "pixel_values":
        size = reference.config.image_size
        return {"pixel_values": torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(2))}

    pad = reference.config.pad_token_id or PAD

    def side(mask: Tensor, seed: int) -> Tensor:
        return tokens(*mask.shape, vocabulary=VOCABULARY, seed=seed).masked_fill(mask == 0, pad)

    source = {"input_ids": side(MASK, 1), "attention_mask": MASK}
    if not reference.config.is_encoder_decoder:
        return source
    if type(reference).__name__.endswith("Classification"):  # it reads the source itself, shifted right
        for row, last in enumerate(MASK.sum(1).tolist()):
            source["input_ids"][row, last - 1] = EOS
        shifted = torch.cat([torch.full((len(MASK), 1), EOS), source["input_ids"][:, :-1]], dim=1)
        return {**source, "decoder_input_ids": shifted, "decoder_attention_mask": MASK}
    return {**source, "decoder_input_ids": side(TARGET, 2), "decoder_attention_mask": TARGET}


def logits_of(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Those of a class for pre-training are of the masked tokens."""
    if isinstance(model, Transformer):
        found = model(**inputs)
        logits: Tensor = found.head("masked_lm") if "next_sentence" in found.heads else found.logits
        return logits
    found = model(**inputs, **({"use_cache": False} if "decoder_input_ids" in inputs else {}))
    return found["prediction_logits" if "prediction_logits" in found else "logits"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_there_and_back(tmp_path: Path, name: str) -> None:
    """Logits, the exported file, and where there is a decoder the tokens of greedy search and of a beam of 4."""
    config, class_name = reduced(PUBLISHED[name][0]), class_of(PUBLISHED[name][0])
    architecture = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    if config["model_type"] == "umt5" and not hasattr(architecture, "scale_decoder_outputs"):
        config["scale_decoder_outputs"] = True  # transformers before 5.24 always scales
    reference = getattr(transformers, class_name)(architecture)
    if config["model_type"] == "t5" and not config.get("tie_word_embeddings", True):  # the constructor ties these too
        reference.lm_head.weight = torch.nn.Parameter(torch.empty_like(reference.lm_head.weight))
    if config["model_type"] == "fsmt":
        for stack in (reference.model.encoder, reference.model.decoder):
            stack.embed_positions.weight.requires_grad_(False)
    inputs, kinds = inputs_of(reference), ARCHITECTURES[config["model_type"]].classes[class_name]
    read = logits_of if kinds else hidden_of
    per_token = {"masked_lm", "lm", "replaced_token"} & {*kinds}
    model, _ = assert_parity(
        reference,
        inputs,
        tmp_path,
        mask=inputs.get("decoder_attention_mask", MASK) if per_token else None,
        theirs=read,
        ours=read,
        model_type=config["model_type"],
        their_inputs={key: inputs[key] for key in inputs if "decoder" not in key or per_token},
        published=(name, config),
    )
    if kinds != ("lm",):
        return
    start = config.get("decoder_start_token_id") if architecture.is_encoder_decoder else None
    reference.generation_config = transformers.GenerationConfig(**{**ENDS, "decoder_start_token_id": start})
    pair, greedy = Pair(reference, model, start), GenerationSettings(max_new_tokens=NEW, temperature=0.0)
    for beams in (1, 4):
        searched = BeamSettings(max_new_tokens=NEW, beam_size=beams, eos_id=EOS)
        found = ours(pair, greedy if beams == 1 and start is None else searched)
        assert [ids for [(ids, _)] in found] == [
            ids for [(ids, _)] in theirs(pair, num_beams=beams, max_new_tokens=NEW)
        ]
        note(name, generation="greedy" if beams == 1 else "beams")
