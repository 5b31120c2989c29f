"""Tiny models of `transformers` with unusual sizes, and batches for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.interop.parity import padding, tokens
from tformer.model import Transformer

VOCABULARY, LENGTH = 61, 11
MASK = padding(LENGTH, 11, 8, 5)
LEFT = padding(LENGTH, 11, 8, 5, left=True)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "intermediate_size": 36,
    "max_position_embeddings": 23,
    "type_vocab_size": 3,
    "layer_norm_eps": 0.02,
}
DISTIL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "dim": 20,
    "n_layers": 3,
    "n_heads": 5,
    "hidden_dim": 36,
    "max_position_embeddings": 23,
}


IDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 20,
    "intermediate_size": 27,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 29,
    "rms_norm_eps": 0.03,
    **IDS,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_positions": 23,
    "n_embd": 20,
    "n_layer": 3,
    "n_head": 5,
    "n_inner": 36,
    **IDS,
}
IMAGES: dict[str, Any] = {
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 36,
    "image_size": 12,
    "patch_size": 4,
}
T5 = {"vocab_size": VOCABULARY, "d_model": 20, "d_kv": 6, "d_ff": 27, "num_layers": 2, "num_heads": 4}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 20,
    "max_position_embeddings": 29,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 5 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 27 for side in ("encoder", "decoder")},
    **IDS,
    "decoder_start_token_id": 2,
}
WIDE: dict[str, Any] = {  # heads of 8
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 29,
    **IDS,
}
OTHERS: dict[str, dict[str, Any]] = {
    "DistilBert": DISTIL,
    "ModernBert": {
        **{key: value for key, value in SIZES.items() if key not in ("type_vocab_size", "layer_norm_eps")},
        **{"hidden_size": 30, "num_hidden_layers": 5, "local_attention": 6, "norm_eps": 0.02, **IDS},
        **{"cls_token_id": 1, "sep_token_id": 2, "classifier_pooling": "mean"},
    },
    "DebertaV2": {
        **{**SIZES, "type_vocab_size": 0, "position_biased_input": False, "relative_attention": True},
        **{"position_buckets": 6, "max_relative_positions": 9, "pos_att_type": ["p2c", "c2p"]},
        **{"share_att_key": True, "norm_rel_ebd": "layer_norm"},
    },
    "BigBird": {
        **SIZES,
        "block_size": 2,
        "num_random_blocks": 1,
        "pad_token_id": 1,
        "sep_token_id": 2,
    },  # full up to 14 tokens
    "Longformer": {**SIZES, "attention_window": [4, 6, 4], "pad_token_id": 1},
    "Albert": {**SIZES, "embedding_size": 12, "num_hidden_layers": 5, "num_hidden_groups": 2},
    "MPNet": {key: value for key, value in SIZES.items() if key != "type_vocab_size"},
    "GPT2": GPT2,
    "ViT": IMAGES,
    "OPT": {
        **{"vocab_size": VOCABULARY, "hidden_size": 20, "ffn_dim": 27, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "max_position_embeddings": 29, "word_embed_proj_dim": 20, **IDS},
    },
    **dict.fromkeys(("T5", "MT5", "UMT5"), T5),
    **dict.fromkeys(("Bart", "MBart", "Pegasus", "Blenderbot", "BlenderbotSmall", "M2M100"), BART),
    "LED": {
        **{key: value for key, value in BART.items() if key != "max_position_embeddings"},
        **{"max_encoder_position_embeddings": 29, "max_decoder_position_embeddings": 9, "attention_window": 4},
    },
    "Marian": {**BART, "decoder_vocab_size": VOCABULARY},
    "Bloom": {"vocab_size": VOCABULARY, "hidden_size": 20, "n_layer": 2, "n_head": 4, **IDS},
    "GPTNeoX": {**WIDE, "intermediate_size": 36, "layer_norm_eps": 0.03},
    "GPTJ": {
        **{"vocab_size": VOCABULARY, "n_positions": 29, "n_embd": 32, "n_layer": 2, "n_head": 4},
        **{"rotary_dim": 4, **IDS},
    },
    **{
        name: {**WIDE, "intermediate_size": 36, "num_key_value_heads": 2, "layer_norm_eps": 0.03}
        for name in ("Phi", "StableLm")
    },
    "Phi3": {**WIDE, "intermediate_size": 27, "num_key_value_heads": 2, "rms_norm_eps": 0.03},
    "SmolLM3": {**WIDE, "intermediate_size": 27, "num_key_value_heads": 2, "num_hidden_layers": 5},
    "Falcon": {**WIDE, "ffn_hidden_size": 36, "layer_norm_epsilon": 0.03},
    **dict.fromkeys(("Llama", "Mistral", "Qwen2", "Qwen3"), DECODER),
    **dict.fromkeys(("Olmo2", "Granite"), DECODER | {"hidden_size": 24}),
    "GPTNeo": {
        **{"vocab_size": VOCABULARY, "max_position_embeddings": 29, "hidden_size": 20, "num_layers": 3, "num_heads": 4},
        **{"attention_types": [[["local", "global"], 1], [["local"], 1]], "window_size": 4, **IDS},
    },
    "GPTBigCode": GPT2,
    "XGLM": {
        **{"vocab_size": VOCABULARY, "d_model": 20, "ffn_dim": 27, "num_layers": 2, "attention_heads": 4},
        **{"max_position_embeddings": 29, **IDS},
    },
    "Olmo": {key: value for key, value in DECODER.items() if key != "rms_norm_eps"} | {"hidden_size": 24},
    **dict.fromkeys(("Gemma", "Gemma2", "Gemma3Text"), DECODER | {"head_dim": 6}),
    "Starcoder2": {"norm_epsilon" if key == "rms_norm_eps" else key: value for key, value in DECODER.items()}
    | {"hidden_size": 24},
}
"""Sizes of the models that do not have those of BERT."""


def config_of(name: str, **values: Any) -> Any:
    """`<name>Config` with unusual sizes."""
    return getattr(transformers, f"{name}Config")(**{**OTHERS.get(name, SIZES), **values})


def make(name: str, task: str, **values: Any) -> Any:
    """`<name>For<task>` with unusual sizes."""
    return getattr(transformers, f"{name}For{task}")(config_of(name, **values))


def batch(mask: Tensor = MASK, *, pad: int = 0, types: int = 1) -> dict[str, Tensor]:
    ids = tokens(*mask.shape, vocabulary=VOCABULARY).masked_fill(mask == 0, pad)
    typed = {"token_type_ids": torch.arange(mask.shape[1]).expand(mask.shape) % types} if types > 1 else {}
    return {"input_ids": ids, "attention_mask": mask, **typed}


def hidden_of(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Last hidden states at real positions, and the pooler's output where there is one."""
    found = model(**inputs)
    hidden: Tensor = found.hidden if isinstance(model, Transformer) else found.last_hidden_state
    if hidden.shape[:2] == MASK.shape:
        hidden = hidden[MASK.bool()]
    if isinstance(model, Transformer):
        pooled = found.head("pooler") if "pooler" in found.heads else None
    else:
        pooled = getattr(found, "pooler_output", None)
    return hidden if pooled is None else torch.cat([hidden.flatten(), pooled.flatten()])
