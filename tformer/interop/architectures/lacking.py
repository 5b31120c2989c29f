"""Well-known model types that tformer does not read, and what each needs that tformer lacks."""

from __future__ import annotations

from collections.abc import Mapping

_PARALLEL = "attention and feed-forward side by side in one block"
_EXPERTS = "mixture-of-experts layers"
_PARTIAL = "rotary positions on a part of each head"
_SPEECH = "an encoder of audio"
_STATE_SPACE = "state-space layers in place of attention"
_IMAGES_AND_TEXT = "two towers, of images and of text, in one model"
_TABLE = "a table of the names of its tensors (tformer has every part of the model)"

LACKING: Mapping[str, str] = {
    "beit": "relative position biases of patches and layer scale",
    "big_bird": "its random blocks as transformers counts them, and rescaled embeddings",
    "blip": _IMAGES_AND_TEXT,
    "clip": _IMAGES_AND_TEXT,
    "codegen": f"{_PARALLEL} and {_PARTIAL}",
    "cohere": f"{_PARALLEL} and scaled logits",
    "convbert": "convolutions beside attention",
    "deberta": "attention with separate terms for content and positions (disentangled)",
    "deepseek_v2": f"{_EXPERTS} and attention with compressed keys and values",
    "deepseek_v3": f"{_EXPERTS} and attention with compressed keys and values",
    "deit": "a distillation token",
    "dinov2": "layer scale",
    "falcon_mamba": _STATE_SPACE,
    "fnet": "Fourier transforms in place of attention",
    "funnel": "pooling between layers",
    "gemma3": _IMAGES_AND_TEXT,
    "gpt_oss": f"{_EXPERTS} and attention sinks",
    "ibert": "integer arithmetic",
    "layoutlm": "positions of words on a page",
    "led": "Longformer's attention in BART's layout",
    "llama4": f"{_EXPERTS} and rotary positions on some layers only",
    "longt5": "local and transient-global attention with T5's biases",
    "mamba": _STATE_SPACE,
    "mamba2": _STATE_SPACE,
    "mixtral": _EXPERTS,
    "mobilebert": "bottlenecks and several feed-forward networks in a block",
    "mpt": "ALiBi in MPT's layout, without biases",
    "musicgen": _SPEECH,
    "nystromformer": "Nystrom attention",
    "olmoe": _EXPERTS,
    "openai-gpt": "post-norm decoder in GPT's first layout",
    "persimmon": f"{_PARTIAL} and LayerNorm of queries and keys",
    "phimoe": _EXPERTS,
    "prophetnet": "prediction of several next tokens at once",
    "qwen2_moe": _EXPERTS,
    "qwen2_vl": _IMAGES_AND_TEXT,
    "qwen3_moe": _EXPERTS,
    "qwen3_next": "linear attention layers with gates",
    "recurrent_gemma": "recurrent layers in place of attention",
    "reformer": "attention by hashing and reversible layers",
    "rembert": "embeddings of input and output of different widths",
    "rwkv": "recurrent layers in place of attention",
    "siglip": _IMAGES_AND_TEXT,
    "speech_to_text": _SPEECH,
    "squeezebert": "grouped convolutions in place of matrices",
    "swin": "shifted windows of patches",
    "switch_transformers": _EXPERTS,
    "wav2vec2": _SPEECH,
    "whisper": _SPEECH,
    "xlm": "language embeddings",
    "xlm-roberta-xl": "pre-norm RoBERTa",
    "xlnet": "two-stream attention with relative positions",
}
"""`model_type` of config.json -> the missing feature."""
