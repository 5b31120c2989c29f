"""Refusal of a config.json whose `model_type` tformer does not read, by the features that its keys ask for.

The keys are compared with those that each architecture reads. The keys that the nearest one does not read name features
that tformer lacks, or that this one lacks; if it reads all keys, its name is suggested.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from difflib import SequenceMatcher
from functools import cache
from typing import Any

from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.config import Config
from tformer.support.errors import InputError
from tformer.support.formatting import listed

MAX_LISTED, MAX_NAME = 4, 100
FEWEST_KEYS = 5  # fewer keys fit too many architectures to suggest one

_NETWORKS, _AUDIO = "two networks or more in one model", "an encoder of audio"

FEATURES: Mapping[str, str] = {
    r"(?!quantization_|attn_).*_config|encoder|decoder|(text|audio)_encoder": _NETWORKS,
    r"projection_(dim|size)|projector_.*": _NETWORKS,
    r"(image|video|audio|vision)_(.*_)?(token|vocab).*": _NETWORKS,
    r".*experts?(_.*)?|(.*_)?moe_.*|router_.*|n_group|.*topk.*|decoder_sparse_step": "mixture-of-experts layers",
    r"(kv|q)_lora_rank|qk_(nope|rope)_head_dim|v_head_dim": "attention with compressed keys and values",
    r"(n_)?mamba_.*|use_mambapy|state_size|time_step_.*|ssm_.*": "state-space layers in place of attention",
    r"linear_(conv|key|value|num)_.*": "linear attention layers with gates",
    r"lru_width|block_types|rescale_every": "recurrent layers in place of attention",
    r"conv_bias|full_attn_idxs|conv_L_cache": "short convolutions in place of attention",
    r"num_mel_bins|input_feat_per_channel|feat_extract_.*|mask_feature_.*": _AUDIO,
    r"(num_)?codebook.*|upsampl.*": _AUDIO,
    r"attention_chunk_size|attn_temperature_tuning": "attention in chunks of a text",
    r"swiglu_.*": "a feed-forward network with a clipped gate",
    r"lambda_std_dev": "differences of two attentions (differential)",
    r"mem_len|clamp_len|bi_data|same_length": "two-stream attention with relative positions",
    r"n_langs|use_lang_emb": "language embeddings",
    r"languages|adapter_.*": "an adapter for each language",
    r"task_type_vocab_size": "embeddings of tasks",
    r"lsh_.*|axial_.*|num_hashes": "attention by hashing and reversible layers",
    r"block_sizes|pool_q_only|pooling_type": "pooling between layers",
    r"tpu_short_seq_length|.*fourier.*": "Fourier transforms in place of attention",
    r"num_landmarks|segment_means_seq_len": "Nystrom attention",
    r"head_ratio": "convolutions beside attention",
    r"[qkv]_groups|(output|intermediate|post_attention)_groups": "grouped convolutions in place of matrices",
    r".*bottleneck.*|num_feedforward_networks": "bottlenecks and several feed-forward networks in a block",
    r"quant_mode|force_dequant": "integer arithmetic",
    r".*_2d_.*|dim_bbox.*|max_xpath.*": "positions of words on a page",
    r"bbox_(cost|loss).*|num_queries": "detection of objects",
    r"global_attn_indexes|drop_path_rate|mlp_ratios?|num_frames|spatial_merge_size": "other layers than ViT's",
    r"prediction_length|lags_sequence|horizon_length": "forecasts of series of numbers",
    r"entity_.*": "embeddings of entities",
    r"per_layer_.*|num_kv_shared_layers|.*_per_layer_input|altup_.*": "inputs for each layer, as Gemma 3n has them",
    r"resampler_.*|.*_latents|latent_.*": "latent queries, as Perceiver has them",
    r"local_radius|global_block_size": "local and transient-global attention with T5's biases",
    r"ngram|disable_ngram_loss": "prediction of several next tokens at once",
    r"(in|out)put_embedding_size": "embeddings of input and output of different widths",
    r"layer_?scale_.*": "layer scale",
    r"use_(shared_)?relative_position_bias|use_mean_pooling": "relative position biases of patches",
    r"depths": "stages of a growing width with windows of patches",
    r"quantization(_config)?": "quantized weights",
}
"""Pattern (`re.fullmatch`) of keys -> the feature that they ask for and tformer lacks."""

ELSEWHERE: Mapping[str, str] = {
    r"rope_.*|rotary_.*": "rotary positions",
    r".*logit_softcapping": "soft caps of scores or logits",
    r"sliding_window|layer_types|max_window_layers": "windows of attention by layer",
    r"num_random_blocks|rescale_embeddings": "random blocks of attention",
    r"attention_window|max_encoder_position_embeddings": "Longformer's attention",
    r"expansion_ratio|attn_config|learned_pos_emb": "ALiBi in MPT's layout, without biases",
    r"afn": "the post-norm layout of GPT's first release",
    r"logit_scale": "Cohere's scaled logits and interleaved rotary positions",
}
"""The same of features that other types or recipes have, but not the type with the nearest keys."""


def unknown_type(config: Mapping[str, Any], *, name: str) -> InputError:
    """The refusal: what the keys of a config.json, which messages call `name`, ask for, or the type that they fit."""
    model_type = config.get("model_type")
    found = "the key is missing" if model_type is None else f"found {model_type!r}, which tformer does not read"
    found = f"{name}: model_type: {found}"

    def distance(known: str) -> tuple[int, int, float]:
        likeness = SequenceMatcher(None, str(model_type)[:MAX_NAME], known).ratio()
        return len(_left(config, known)), len(_read_by(known) - config.keys()), -likeness

    types = sorted((known for known, each in ARCHITECTURES.items() if each.code is None), key=distance)
    nearest = types[0]
    left = _left(config, nearest)
    parts, others = [], list(left)
    for subject, features in (("it", FEATURES), (f"{nearest!r}, the nearest type,", ELSEWHERE)):
        asked: dict[str, list[str]] = {}
        for keys, feature in features.items():
            asked.setdefault(feature, []).extend(key for key in left if re.fullmatch(keys, key))
        named = [f"{feature} ({listed(keys, MAX_LISTED)})" for feature, keys in asked.items() if keys]
        parts += [f"{subject} lacks {' and '.join(named)}"] if named else []
        others = [key for key in others if not any(key in keys for keys in asked.values())]
    keys = f"keys {listed(others, MAX_LISTED)} are" if len(others) > 1 else f"key {''.join(others)} is"
    parts += [f"the {keys} unknown beside those of {nearest!r}"] if others else []
    if parts:
        hint = f"the nearest of the types that tformer reads is {nearest!r}: look for a model of that type"
        return InputError(f"{found}: {'; '.join(parts)}", hint=hint)
    if len(Config(config).left()) < FEWEST_KEYS:
        return InputError(f"{found}; known: {', '.join(sorted(ARCHITECTURES))}")
    reasons = {known: _reason(config, known, name) for known in types if not _left(config, known)}
    fitting = [known for known, reason in reasons.items() if not reason]
    if not fitting or (reasons[nearest] and model_type is not None):
        return InputError(f"{found}; its keys are those of {nearest!r}, but {reasons[nearest]}")
    classes = str(config.get("architectures"))  # the class that the file names tells types with the same keys apart
    named = [known for known in fitting if any(repr(one) in classes for one in ARCHITECTURES[known].classes)]
    return InputError(
        f"{found}; known: {', '.join(sorted(ARCHITECTURES))}",
        hint=f"its keys are those of {', '.join(map(repr, named or fitting))}: write the type that computes the same "
        "into config.json and leave out architectures; the import checks the names and shapes of its tensors",
    )


def _reason(config: Mapping[str, Any], known: str, name: str) -> str:
    """Why a known type does not read the values of a config; empty: it reads them."""
    architecture = ARCHITECTURES[known]
    try:
        architecture.section(Config(config, name=name), next(iter(architecture.classes)))
    except InputError as refusal:
        return refusal.message.removeprefix(f"{name}: ")
    return ""


def _left(config: Mapping[str, Any], known: str) -> list[str]:
    """The keys with values that a known type does not read."""
    reader = Config(config)
    reader.ignore(*_read_by(known))
    return reader.left()


@cache
def _read_by(known: str) -> frozenset[str]:
    """The keys that a known type reads from a config without any."""
    reader, architecture = Config({}), ARCHITECTURES[known]
    for class_name in architecture.classes:
        with suppress(InputError):
            architecture.section(reader, class_name, pooler=architecture.pooler is not None)
    return frozenset(reader.taken)
