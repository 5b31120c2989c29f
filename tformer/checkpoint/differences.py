"""What keeps stored weights from being a model's: missing and unexpected names, other shapes, ties that do not hold."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

MAX_LISTED = 8  # names of each sort in an error


def differences(state: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, aliases: Mapping[str, str]) -> list[str]:
    """What keeps `weights` from being loaded into `state`, in words; empty where nothing does.

    state: of the model, or of one on the meta device without its tied names.
    aliases: further names of tied tensors, which may stand among the weights or not.
    """
    missing = sorted(state.keys() - weights.keys())
    unexpected = sorted(weights.keys() - state.keys() - aliases.keys())
    reshaped = [
        f"{name} {list(weights[name].shape)} (expected {list(state[name].shape)})"
        for name in sorted(state.keys() & weights.keys())
        if weights[name].shape != state[name].shape
    ]
    problems = []
    if missing:
        problems.append(f"missing {_listing(missing)}")
    if unexpected:
        problems.append(f"unexpected {_listing(unexpected)}")
    if reshaped:
        problems.append(f"of another shape {_listing(reshaped)}")
    return problems or _untied(state, weights)


def _untied(state: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> list[str]:
    """Two different stored tensors for what is one tensor in the model: the last would win silently."""
    owners: dict[tuple[int, torch.Size], str] = {}
    for name, target in state.items():
        if target.is_meta or not target.numel():
            continue
        owner = owners.setdefault((target.data_ptr(), target.shape), name)
        if owner != name and weights[name] is not weights[owner] and not torch.equal(weights[name], weights[owner]):
            return [f"{name} and {owner} are tied in the recipe, but differ in the weights"]
    return []


def _listing(names: list[str]) -> str:
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
