"""Llama, Mistral, Qwen2 and Qwen3: pre-norm decoders with rotary positions, RMSNorm and a gated feed-forward network.

    Llama      biases of attention and of the feed-forward network by two keys
    Mistral    no biases; its first release has a sliding window in every layer
    Qwen2      biases on queries, keys and values; sliding windows in some layers, off by default
    Qwen3      as Qwen2; biases by a key, and queries and keys of each head are normalized before their rotation, with
               gains that all heads of a layer share

Newer files say `rope_parameters: {rope_type, rope_theta, ...}`, older ones `rope_theta` beside `rope_scaling: {type or
rope_type, ...}`. Both are written with equal values: older versions of the library ignore the newer key and use a base
of 10,000.

Their `sliding_window` counts the query's own key, a recipe's `window` does not: it is one less. A window that is no
shorter than the longest sequence hides nothing and is read as full attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from tformer.build import resolve_sizes
from tformer.interop.architecture import Architecture, Gguf
from tformer.interop.architectures.parts import decoder_links, size_or_missing, stack_of
from tformer.interop.architectures.table import ConfigKey, ConfigTable
from tformer.interop.config import ABSENT, Config
from tformer.interop.mapping import Link
from tformer.nn.attention.sliding_window import SlidingWindowOptions
from tformer.nn.positions.rope import RopeOptions
from tformer.recipe.model import Model, Stack, layer_sections
from tformer.support.errors import InputError

ROPE_NAMES = ("rope_theta", "partial_rotary_factor")
LENGTH = "original_max_seq_len"
ORIGINAL = "original_max_position_embeddings"
FOR_YARN = ("attention_factor", "beta_fast", "beta_slow", "truncate")
SCALINGS: Mapping[str, Mapping[str, str]] = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {key: key for key in ("factor", "low_freq_factor", "high_freq_factor")} | {ORIGINAL: LENGTH},
    "yarn": {key: key for key in ("factor", *FOR_YARN)} | {ORIGINAL: LENGTH},
    "longrope": {"short_factor": "short_factors", "long_factor": "long_factors", "factor": "factor"}
    | {"attention_factor": "attention_factor", ORIGINAL: LENGTH},
}
"""Types of RoPE scaling -> the keys of each -> the options of `RopeScaling`."""
OTHER_KINDS = {"truncate": bool, "short_factor": list, "long_factor": list}  # of values; the others are numbers
OLD_TYPES = {"su": "longrope"}


def read_rope(
    config: Config,
    *,
    max_seq_len: int,
    share: float | None = None,
    names: tuple[str, str] = ROPE_NAMES,
    base: float = 10000.0,
    original: int | None = None,
) -> dict[str, Any]:
    """The `positions` of a stack. InputError for a RoPE type, or a key of it, that tformer lacks.

    share: part of each head that is rotated where the config states none; None: the class rotates whole heads.
    names: of base and share outside of `rope_parameters`.
    base, original: the base, and the context length of pre-training, where the config states none.
    """
    newer = config.take("rope_parameters", default={}, kind=dict)
    older = config.take("rope_scaling", default={}, kind=dict)
    name, found = ("rope_scaling", older) if older else ("rope_parameters", newer)
    before = config.size(ORIGINAL, default=original)  # Phi's place for it, which goes first
    rope = Config(found, name=f"{config.name}: {name}")
    rope_type = str(found.get("rope_type", found.get("type", "default")))
    rope_type = OLD_TYPES.get(rope_type, rope_type)
    if rope_type not in ("default", *SCALINGS):
        raise InputError(f"{rope.name}: rope_type: found {rope_type!r}, tformer has {', '.join(SCALINGS)}")
    keys = SCALINGS.get(rope_type, {})
    for key, value in found.items():
        if key not in (*keys, *ROPE_NAMES, ORIGINAL, "rope_type", "type"):
            raise InputError(
                f"{rope.name}: {key}: found {value!r}, a key that tformer does not support for {rope_type}"
            )
    base = config.take(names[0], default=base, kind=float)
    positions = {"kind": "rope", "layout": "halves", "base": rope.take(ROPE_NAMES[0], default=base, kind=float)}
    if share is None:
        for each in (config, rope):
            each.expect(names[1], 1.0, 1)
    else:
        share = config.take(names[1], default=share, kind=float)
        positions["share"] = rope.take(ROPE_NAMES[1], default=share, kind=float)
    if rope_type == "default":
        return positions
    length = max_seq_len if rope_type == "dynamic" else before or rope.size(ORIGINAL, default=max_seq_len)
    options = {"kind": rope_type} | ({LENGTH: length} if rope_type != "linear" else {})
    for key, option in keys.items():
        default: Any = None if key in FOR_YARN else ABSENT
        if key == "factor" and rope_type in ("yarn", "longrope"):
            default = max_seq_len / length
        if key != ORIGINAL:
            value = rope.take(key, default=default, kind=OTHER_KINDS.get(key, float))
            options |= {} if value is None else {option: value}
    return positions | {"scaling": options}


def with_rope(config: Config, section: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The model section with the decoder's positions, see `read_rope`; with `dynamic` it reads longer texts."""
    length = section["max_seq_len"]
    positions = read_rope(config, max_seq_len=length, **options)
    scaling = positions.get("scaling", {"kind": None})
    longest = int(length * scaling["factor"]) if scaling["kind"] == "dynamic" else length
    return section | {"max_seq_len": longest, "decoder": section["decoder"] | {"positions": positions}}


def write_rope(stack: Stack, *, has_share: bool = False, names: tuple[str, str] = ROPE_NAMES) -> dict[str, Any]:
    """The RoPE keys of config.json; a stack with other positions gets plain RoPE.

    has_share: the class may rotate a part of each head.
    """
    positions = stack.positions if isinstance(stack.positions, RopeOptions) else RopeOptions()
    values = [positions.base, *([positions.share] if has_share else [])]
    outside, inside = (dict(zip(each, values, strict=False)) for each in (names, ROPE_NAMES))
    scaling = positions.scaling
    if scaling is None:
        return {**outside, "rope_parameters": {"rope_type": "default", **inside}}
    options = {key: getattr(scaling, option) for key, option in SCALINGS[scaling.kind].items()}
    options = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    if scaling.kind == "dynamic":
        outside["max_position_embeddings"] = scaling.original_max_seq_len
    stretched = {"rope_type": scaling.kind} | {key: value for key, value in options.items() if value is not None}
    return {**outside, "rope_parameters": {**stretched, **inside}, "rope_scaling": {**stretched, **inside}}


def with_windows(
    config: Config,
    values: dict[str, Any],
    window: int | None,
    slides: Sequence[bool],
    positions: dict[str, Any] | None = None,
    *,
    key: str = "sliding_window",
) -> dict[str, Any]:
    """The model section with windows of `window` keys, which include the query's own.

    slides: whether each layer has a window. If all have one, it is the stack's attention; otherwise it is written into
        the stack's `layers`.
    positions: of layers with a window; None: those of all layers, and a window of all positions is left out.
    """
    if window is None or (window >= values["max_seq_len"] and positions is None) or not any(slides):
        return values
    if window < 2:
        raise InputError(f"{config.name}: {key}: found {window}, expected at least 2, the query's own among them")
    sliding, decoder = {"kind": "sliding_window", "window": window - 1}, dict(values["decoder"])
    own = {} if positions is None else {"positions": positions}
    if all(slides):
        decoder |= {"attention": decoder["attention"] | sliding, **own}
    else:
        decoder["layers"] = {layer: {"attention": sliding, **own} for layer, slide in enumerate(slides) if slide}
    return values | {"decoder": decoder}


SLIDING, FULL = "sliding_attention", "full_attention"


def sliding_layers(config: Config, missing: Sequence[bool]) -> list[bool]:
    """For each layer whether it has a window, by `layer_types`; missing: the values without that key."""
    kinds = config.take("layer_types", default=[], kind=list)
    if kinds and (len(kinds) != len(missing) or any(kind not in (FULL, SLIDING) for kind in kinds)):
        raise InputError(
            f"{config.name}: layer_types: found {kinds!r}, expected {FULL} or {SLIDING} for each of "
            f"{len(missing)} layers"
        )
    return [kind == SLIDING for kind in kinds] or list(missing)


def written_windows(model: Model) -> dict[str, Any]:
    """The keys of config.json about windows, of classes whose layers have one or none."""
    windows = windows_of(model)
    kinds = [SLIDING if window else FULL for window in windows]
    return {"sliding_window": next(filter(None, windows), None), "layer_types": kinds}


def windows_of(model: Model) -> list[int | None]:
    """The window of each layer as config.json counts it; None stands for full attention."""
    layers = layer_sections(stack_of(model, "decoder"), path="model.decoder")
    kinds = [layer.attention for layer in layers]
    return [kind.window + 1 if isinstance(kind, SlidingWindowOptions) else None for kind in kinds]


MISSING_WINDOW = 4096  # null means no window, a missing key this one
MISSING_FULL_LAYERS = 28  # default number of first layers without a window

ROWS = (
    ConfigKey("vocab_size", "vocab_size", 32000),
    ConfigKey("hidden_size", "d_model", 4096),
    ConfigKey("intermediate_size", "decoder.feedforward.d_ff", 11008),
    ConfigKey("num_hidden_layers", "decoder.num_layers", 32),
    ConfigKey("num_attention_heads", "decoder.num_heads", 32),
    ConfigKey("head_dim", "decoder.head_dim", lambda section: section["d_model"] // section["decoder"]["num_heads"]),
    ConfigKey("hidden_act", "decoder.feedforward.activation", "silu"),
    ConfigKey("max_position_embeddings", "max_seq_len", 2048),
    ConfigKey("rms_norm_eps", "decoder.norm.eps", 1e-6),
    ConfigKey("attention_dropout", "decoder.attention_dropout", 0.0),
    ConfigKey("tie_word_embeddings", "tie.output", False),
)
FIXED = {
    "decoder.feedforward.gated": True,
    "decoder.feedforward.bias": False,
    "decoder.attention": {"kind": "full", "qkv_bias": False, "out_bias": False},
    "decoder.norm": {"kind": "rmsnorm", "place": "pre"},
    "decoder.final_norm": True,
    "heads": [{"kind": "lm"}],
}
BIAS = ConfigKey("attention_bias", "decoder.attention.qkv_bias decoder.attention.out_bias", False)

OF_LLAMA = ConfigTable(
    (*ROWS, BIAS, ConfigKey("mlp_bias", "decoder.feedforward.bias", False)),
    FIXED,
    ignored=("is_llama_config", "max_sequence_length"),  # left by converters (SmolLM2, LLaMA 1), without effect
)
OF_MISTRAL = ConfigTable(ROWS, FIXED).defaulting(intermediate_size=14336, max_position_embeddings=131072)
QWEN_SIZES = {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
OF_QWEN2 = ConfigTable(ROWS, FIXED | {"decoder.attention.qkv_bias": True}).defaulting(**QWEN_SIZES)
OF_QWEN3 = ConfigTable(
    (ConfigKey("rms_norm_eps", "decoder.attention.qk_norm_eps", 1e-6), *ROWS, BIAS),
    FIXED | {"decoder.attention.qk_norm": "learned"},
).defaulting(**QWEN_SIZES, head_dim=128)


def read(
    config: Config,
    class_name: str,
    *,
    table: ConfigTable,
    kv_heads: int | None = None,
    rope: Callable[[Config, dict[str, Any]], dict[str, Any]] = with_rope,
) -> dict[str, Any]:
    """The model section, without windows.

    kv_heads: the number of key and value heads if the key is missing; None: as many as query heads.
    rope: (config, section) -> the section with positions.
    """
    section = table.read(config)
    stack = section["decoder"]
    stack["num_kv_heads"] = size_or_missing(config, "num_key_value_heads", kv_heads) or stack["num_heads"]
    return rope(config, section)


def read_llama(config: Config, class_name: str) -> dict[str, Any]:
    section = read(config, class_name, table=OF_LLAMA)
    width, heads = section["d_model"], section["decoder"]["num_heads"]
    if width % heads:
        raise InputError(
            f"{config.name}: num_attention_heads: {heads} do not divide hidden_size {width}, which this class demands"
        )
    return section


def read_mistral(
    config: Config, class_name: str, *, table: ConfigTable, kv_heads: int, missing: int | None = MISSING_WINDOW
) -> dict[str, Any]:
    """The model section with a window in every layer or none. missing: the window if the key is missing."""
    section = read(config, class_name, table=table, kv_heads=kv_heads)
    window = size_or_missing(config, "sliding_window", missing)
    return with_windows(config, section, window, [True] * section["decoder"]["num_layers"])


def read_qwen(config: Config, class_name: str, *, table: ConfigTable) -> dict[str, Any]:
    """The model section: layers have windows by `layer_types`, without that key those from `max_window_layers` on."""
    section = read(config, class_name, table=table, kv_heads=32)
    window = size_or_missing(config, "sliding_window", MISSING_WINDOW)
    wanted = config.take("use_sliding_window", default=False, kind=bool)
    full = config.take("max_window_layers", default=MISSING_FULL_LAYERS)
    layers = section["decoder"]["num_layers"]
    slides = sliding_layers(config, [wanted and layer >= full for layer in range(layers)])
    return with_windows(config, section, window, slides)


def write(model: Model, class_name: str, *, table: ConfigTable) -> dict[str, Any]:
    decoder, sizes = stack_of(model, "decoder"), resolve_sizes(model, "decoder")
    return {**table.write(model), "num_key_value_heads": sizes.num_kv_heads, **write_rope(decoder)}


def write_mistral(model: Model, class_name: str, *, table: ConfigTable) -> dict[str, Any]:
    return {**write(model, class_name, table=table), "sliding_window": windows_of(model)[0]}


def write_qwen(model: Model, class_name: str, *, table: ConfigTable) -> dict[str, Any]:
    windows = written_windows(model)
    if not (slides := SLIDING in windows["layer_types"]):
        del windows["layer_types"]
    first = {"max_window_layers": windows["layer_types"].index(SLIDING)} if slides else {}
    return {**write(model, class_name, table=table), "use_sliding_window": slides, **windows, **first}


LAYER = {
    "self_attention_norm": "input_layernorm",
    "self_attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "self_attention.out": "self_attn.o_proj",
    "self_attention.q_norm": "self_attn.q_norm",
    "self_attention.k_norm": "self_attn.k_norm",
    "feedforward_norm": "post_attention_layernorm",
    "feedforward.up": "mlp.gate_proj mlp.up_proj",
    "feedforward.down": "mlp.down_proj",
}


def links(model: Model, class_name: str, *, layer: Mapping[str, str] = LAYER) -> list[Link]:
    return decoder_links(model, "model.embed_tokens.weight", "model.layers", layer, "model.norm")


def rotated_pairs(model: Model, name: str, tensor: Tensor, *, back: bool = False) -> Tensor:
    """The tensor as a GGUF file has it: rotated pairs side by side, not half a head apart. back: the inverse."""
    sizes = resolve_sizes(model, "decoder")
    heads = {"q_proj": sizes.num_heads, "k_proj": sizes.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.unflatten(0, (heads, -1, 2) if back else (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)


GGUF_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
IN_GGUF = Gguf(
    "llama",
    GGUF_KEYS,
    rotated_pairs,
    partial(rotated_pairs, back=True),
    shown={"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"},
    scalings=("linear", "llama3"),
)


def ignored_by_ctranslate2(config: Mapping[str, Any]) -> dict[str, Any]:
    """See `Architecture.ctranslate2`: without the original length of llama3 it scales nothing."""
    is_llama3 = (config.get("rope_scaling") or {}).get("rope_type") == "llama3"
    return {"hidden_act": "silu"} | ({"rope_scaling": None} if is_llama3 else {})


LLAMA = Architecture(
    model_type="llama",
    classes={"LlamaForCausalLM": ("lm",), "LlamaModel": ()},
    family="llama",
    read=read_llama,
    write=partial(write, table=OF_LLAMA),
    links=links,
    prefix="model.",
    skipped=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),  # given by a formula, a buffer in old files
    special_ids={"bos": 1, "eos": 2},
    slow_tokenizer="LlamaTokenizer",
    ctranslate2=ignored_by_ctranslate2,
    gguf=IN_GGUF,
)
MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    classes={"MistralForCausalLM": ("lm",), "MistralModel": ()},
    read=partial(read_mistral, table=OF_MISTRAL, kv_heads=8),
    write=partial(write_mistral, table=OF_MISTRAL),
    ctranslate2=None,
    gguf=replace(IN_GGUF, assumed=lambda config: {"sliding_window": None}, shown={}),
)
QWEN2 = replace(
    MISTRAL,
    model_type="qwen2",
    classes={"Qwen2ForCausalLM": ("lm",), "Qwen2Model": ()},
    read=partial(read_qwen, table=OF_QWEN2),
    write=partial(write_qwen, table=OF_QWEN2),
    special_ids={},
    slow_tokenizer=None,
    own_tokenizer_rules=True,
    gguf=Gguf("qwen2", GGUF_KEYS),
)
QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    classes={"Qwen3ForCausalLM": ("lm",), "Qwen3Model": ()},
    read=partial(read_qwen, table=OF_QWEN3),
    write=partial(write_qwen, table=OF_QWEN3),
    gguf=Gguf("qwen3", GGUF_KEYS),
)
