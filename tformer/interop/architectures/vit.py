"""ViT (2010.11929): patches of an image, a class token, a pre-norm encoder, a classifier on the class token.

The names are those of the files; in memory `transformers` calls the layers otherwise. A head dimension that is not
hidden_size / heads is the extra key `head_dim`.
"""

from __future__ import annotations

from typing import Any

from tformer.build import resolve_sizes
from tformer.interop.architecture import Architecture
from tformer.interop.architectures.parts import layer_links, pooled_links, sequence_head, stack_of
from tformer.interop.architectures.table import ConfigKey, ConfigTable
from tformer.interop.config import Config
from tformer.interop.mapping import SAME, Link, both, link, reshaped
from tformer.recipe.model import Model
from tformer.support.errors import InputError

CONFIG = ConfigTable(
    rows=(
        ConfigKey("hidden_size", "d_model", 768),
        ConfigKey("num_hidden_layers", "encoder.num_layers", 12),
        ConfigKey("num_attention_heads", "encoder.num_heads", 12),
        ConfigKey("intermediate_size", "encoder.feedforward.d_ff", 3072),
        ConfigKey("hidden_act", "encoder.feedforward.activation", "gelu"),
        ConfigKey("hidden_dropout_prob", "encoder.dropout embedding.dropout", 0.0),
        ConfigKey("attention_probs_dropout_prob", "encoder.attention_dropout", 0.0),
        ConfigKey("layer_norm_eps", "encoder.norm.eps", 1e-12),
        ConfigKey("qkv_bias", "encoder.attention.qkv_bias", True),
        ConfigKey("num_channels", "patches.channels", 3),
    ),
    fixed={
        "encoder.positions.kind": "learned",
        "encoder.attention.kind": "full",
        "encoder.norm.place": "pre",
        "encoder.final_norm": True,
    },
    ignored=("encoder_stride", "pooler_act", "pooler_output_size"),  # keys of heads that this class lacks
)


LAYER = {
    "self_attention.qkv": "attention.attention.query attention.attention.key attention.attention.value",
    "self_attention.out": "attention.output.dense",
    "self_attention_norm": "layernorm_before",
    "feedforward.up": "intermediate.dense",
    "feedforward.down": "output.dense",
    "feedforward_norm": "layernorm_after",
}


def read(config: Config, class_name: str) -> dict[str, Any]:
    section = CONFIG.read(config)
    width, stack = section["d_model"], section["encoder"]
    image, patch = _side(config, "image_size", default=224), _side(config, "patch_size", default=16)
    if image % patch:
        raise InputError(f"{config.name}: patch_size: found {patch}, which does not divide image_size {image}")
    section["max_seq_len"] = (image // patch) ** 2 + 1
    section["patches"] |= {"image_size": image, "size": patch}
    stack["head_dim"] = config.size("head_dim", default=None) or width // stack["num_heads"]
    return section | {"heads": [sequence_head(config, pooler=False, dropout=0.0)]}


def _side(config: Config, key: str, *, default: int) -> int:
    """The side of a square image, from a number or two equal ones."""
    found = config.take(key, default=default, kind=(int, list))
    first, second = found if isinstance(found, list) and len(found) == 2 else (found, found)
    if type(first) is not int or first < 1 or first != second:
        raise InputError(f"{config.name}: {key}: found {found!r}, tformer has squares only: expected one whole number")
    return first


def write(model: Model, class_name: str) -> dict[str, Any]:
    encoder, patches = stack_of(model, "encoder"), model.patches
    if patches is None:
        raise InputError("model.patches: found none, this architecture reads images")
    size = resolve_sizes(model, "encoder").head_dim
    values = CONFIG.write(model) | {"image_size": patches.image_size, "patch_size": patches.size}
    return values | ({} if size == model.d_model // encoder.num_heads else {"head_dim": size})


def links(model: Model, class_name: str) -> list[Link]:
    patches = model.patches
    assert patches is not None
    kernel = (model.d_model, patches.channels, patches.size, patches.size)
    flat = reshaped(ours=(model.d_model, -1), theirs=kernel)
    tables = "vit.embeddings"
    table = [
        link("embedding.cls", f"{tables}.cls_token", layout=reshaped(ours=(-1,), theirs=(1, 1, -1))),
        link(
            "encoder.positions.weight",
            f"{tables}.position_embeddings",
            layout=reshaped(ours=(-1, model.d_model), theirs=(1, -1, model.d_model)),
        ),
        *both("embedding", f"{tables}.patch_embeddings.projection", layout=SAME if patches.stem == "conv" else flat),
        *both("encoder.final_norm", "vit.layernorm"),
    ]
    layers = layer_links(model, "encoder", "vit.encoder.layer", LAYER)
    return [*table, *layers, *pooled_links(model, project="classifier")]


VIT = Architecture(
    model_type="vit",
    classes={"ViTForImageClassification": ("classifier",), "ViTModel": ()},
    family="vit",
    read=read,
    write=write,
    links=links,
    prefix="vit.",
    pooler="vit.pooler.dense",
    skipped=(r"vit\.pooler\.dense\.(weight|bias)", r"vit\.embeddings\.mask_token"),
)
