"""Rotary positions in a config.json: what the Llama family turns its queries and keys by.

Newer files say `rope_parameters: {rope_type, rope_theta, ...}`, older ones `rope_theta` beside `rope_scaling: {type or
rope_type, ...}`. Both are written, saying the same: the older library would pass over the newer key and turn by 10,000.
"""

from __future__ import annotations

from typing import Any

from tformer.errors import InputError
from tformer.interop.config import Config
from tformer.nn.positions.rope import RopeOptions
from tformer.recipe.model import Stack

DEFAULT_BASE = 10000.0
KNOWN = {
    "default": ("rope_theta",),
    "llama3": ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""The types that tformer has -> the keys of each."""


def read_rope(config: Config, *, max_seq_len: int) -> dict[str, Any]:
    """The `positions` of a stack. A type, or a key of its mapping, that tformer lacks is refused by name."""
    config.expect("partial_rotary_factor", 1.0, 1)
    newer = config.take("rope_parameters", default={}, kind=dict)
    older = config.take("rope_scaling", default={}, kind=dict)
    name, found = ("rope_scaling", older) if older else ("rope_parameters", newer)
    base = config.take("rope_theta", default=DEFAULT_BASE, kind=float)
    before = config.size("original_max_position_embeddings", default=None)  # Phi's place for it, which goes first
    rope = Config(found, name=f"{config.name}: {name}")
    rope_type = str(found.get("rope_type", found.get("type", "default")))
    if rope_type not in KNOWN:
        raise InputError(f"{rope.name}: rope_type: found {rope_type!r}, tformer has {' and '.join(KNOWN)} only")
    rope.expect("partial_rotary_factor", 1.0, 1)
    for key, value in found.items():
        if key not in (*KNOWN[rope_type], "rope_type", "type", "partial_rotary_factor"):
            raise InputError(f"{rope.name}: {key}: found {value!r}, a key that tformer does not know for {rope_type}")
    positions = {"kind": "rope", "layout": "halves", "base": rope.take("rope_theta", default=base, kind=float)}
    if rope_type == "llama3":
        inner = rope.size("original_max_position_embeddings", default=max_seq_len)
        positions["scaling"] = {
            "factor": rope.take("factor", kind=float),
            "low_freq_factor": rope.take("low_freq_factor", kind=float),
            "high_freq_factor": rope.take("high_freq_factor", kind=float),
            "original_max_seq_len": before or inner,
        }
    return positions


def write_rope(stack: Stack) -> dict[str, Any]:
    """The keys of config.json; those of plain RoPE where the stack's positions are of another kind."""
    positions = stack.positions if isinstance(stack.positions, RopeOptions) else RopeOptions()
    keys: dict[str, Any] = {"rope_theta": positions.base}
    scaling = positions.scaling
    if scaling is None:
        return {**keys, "rope_parameters": {"rope_type": "default", **keys}}
    stretched = {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
        **keys,
    }
    return {**keys, "rope_parameters": stretched, "rope_scaling": dict(stretched)}
