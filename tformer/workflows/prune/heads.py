"""Choice of the attention heads that a pruned model keeps (Michel et al., arXiv 1905.10650, equation 4).

Importance: with a gate xi_h = 1 on the output of every head h,

    I_h = mean over examples x of |dL(x) / d xi_h|,      then  I_h / ||I||_2 within each attention

With the heads' outputs o side by side at the input of the output projection, dL/d xi_h is the sum over the positions
and coordinates of head h of o * dL/do: one backward pass per batch, no gates in the model. L(x) is the example's share
of its batch's loss times the number of examples in the batch.

Shape legend: B examples, T positions, H heads, v value_dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tformer.data.batching.mixture import Samples
from tformer.data.permutation import derive_key
from tformer.evaluation.predict import default_batch_tokens, length_sorted_batches
from tformer.model import Transformer
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.objectives.base import Objective, total_loss
from tformer.recipe.model import Model, layer_sections
from tformer.support.errors import InputError
from tformer.workers.work import QUIET, Work


def head_importance(
    model: Transformer,
    objective: Objective,
    samples: Samples,
    *,
    batch_size: int | None = None,
    seed: int = 0,
    work: Work = QUIET,
) -> dict[str, Tensor]:
    """Importance of heads: {name of an attention module: fp64 [H]}, each of Euclidean length 1 (or 0).

    Every sample is read once, without dropout. Once `work` is stopped, the result is incomplete.
    """
    if not len(samples):
        raise InputError("there is nothing to measure the importance of heads on: 0 examples")
    attentions = attention_modules(model)
    totals = {name: torch.zeros(module.num_heads, dtype=torch.float64) for name, module in attentions.items()}
    device = next(model.parameters()).device
    batches = length_sorted_batches(samples, batch_size=batch_size, batch_tokens=default_batch_tokens(device))
    was_training, done = model.training, 0
    model.eval()
    try:
        with torch.enable_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for number, indices in enumerate(batches):
                if work.should_stop():
                    break
                draw = np.random.default_rng([seed, number])
                torch.manual_seed(derive_key("importance", seed, number))
                batch = objective.collate(samples.examples(0, indices), rng=draw, training=False).to(device)
                for name, gates_BH in gate_gradients(model, objective, batch).items():
                    totals[name] += gates_BH.abs().sum(dim=0).double().cpu()
                done += len(indices)
                work.report(done, len(samples))
    finally:
        model.train(was_training)
    return {name: total / max(float(total.norm()), 1e-300) for name, total in totals.items()}


def attention_modules(model: nn.Module) -> dict[str, MultiHeadAttention]:
    """Self- and cross-attention modules of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MultiHeadAttention)}


def gate_gradients(model: Transformer, objective: Objective, batch: Any) -> dict[str, Tensor]:
    """{name of an attention module: fp32 [B, H]}: dL(x)/d xi_h of every example x of a batch."""
    attentions = attention_modules(model)
    entered: dict[str, Tensor] = {}  # the inputs of the output projections, [B, T, H v]

    def catch(name: str, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert name not in entered, "an objective runs the model once a batch"
        entered[name] = inputs[0]

    with ExitStack() as hooks:
        for name, module in attentions.items():
            hooks.callback(module.out.register_forward_pre_hook(partial(catch, name)).remove)
        loss = total_loss(objective.loss(model, batch).terms)
        gradients = torch.autograd.grad(loss, list(entered.values()))
    gates = {}
    for (name, entered_BTx), gradient_BTx in zip(entered.items(), gradients, strict=True):
        products_BTx = entered_BTx.detach().float() * gradient_BTx.float()
        products_BTHv = products_BTx.unflatten(-1, (attentions[name].num_heads, -1))
        gates[name] = products_BTHv.sum(dim=(1, 3)) * len(products_BTHv)
    return gates


PROJECTIONS = frozenset({"qkv", "q", "kv", "out"})
"""Heads can be removed from an attention that stores nothing else."""


@dataclass(frozen=True)
class LayerHeads:
    """The heads of one layer that stay, ascending; the same number of its cross-attention, if any."""

    self_attention: tuple[int, ...]
    cross_attention: tuple[int, ...] | None = None

    def of(self, attention: str) -> tuple[int, ...]:
        """The heads of `self_attention` or `cross_attention`."""
        kept: tuple[int, ...] = getattr(self, attention)
        return kept


@dataclass(frozen=True)
class HeadChoice:
    """{stack: [heads that stay, of each layer]}, their numbers before and after, and a remark for the user."""

    layers: Mapping[str, list[LayerHeads]]
    before: int
    after: int
    per_layer: str
    note: str = ""


def require_prunable_heads(model: Model, built: Transformer, sides: Sequence[str]) -> None:
    """Raise InputError, naming the field, for stacks with heads that cannot be removed one by one."""
    for side in sides:
        section, stack = getattr(model, side), getattr(built, side)
        layers = layer_sections(section, path=f"model.{side}")
        kind = next((layer.positions.kind for layer in layers if layer.positions.module.per_head), None)
        if kind is not None:
            raise InputError(
                f"--drop-heads: model.{side}.positions.kind is {kind}, whose slopes or biases belong "
                "to heads that all layers share",
                hint="prune layers instead",
            )
        for block in stack.layers:
            attention = block.self_attention
            if attention.num_kv_heads != attention.num_heads:
                raise InputError(
                    f"--drop-heads: model.{side}.num_kv_heads is {attention.num_kv_heads} for {attention.num_heads} "
                    "query heads, which cannot leave one by one",
                    hint="prune layers instead",
                )
            for module in (attention, block.cross_attention):
                if module is not None and not {name.split(".")[0] for name in module.state_dict()} <= PROJECTIONS:
                    raise InputError(
                        f"--drop-heads: model.{side}.attention.kind is {section.attention.kind}, which has more to its "
                        "heads than projections",
                        hint="prune layers instead",
                    )


def choose_heads(
    importance: Mapping[str, Sequence[Mapping[str, Tensor]]], *, amount: float, per_layer: str
) -> HeadChoice:
    """The heads that stay.

    Self- and cross-attention of a decoder layer have one number of heads, so they lose as many: the k-th best head of
    the one and the k-th best of the other are ranked together, by the mean of their importance.

    Args:
        importance: {stack: [{"self_attention": [H], perhaps "cross_attention": [H]} of each layer]}.
        amount: below 1 the share of all heads to remove, else their number.
        per_layer: `even`, the same share of every layer; `free`, the least important of all layers, but one stays.

    Raises:
        InputError: no head would be removed, or more than possible.
    """
    slots = {side: [_slots(layer) for layer in layers] for side, layers in importance.items()}
    total = sum(len(layer) for layers in slots.values() for layer in layers)
    least = sum(len(layers) for layers in slots.values())
    wanted = math.floor(amount * total + 0.5) if amount < 1 else int(amount)
    if wanted > total - least:
        raise InputError(
            f"--drop-heads {amount:g}: at most {total - least} of {total} heads can be removed: every layer keeps one",
            hint="--drop-layers takes whole layers out",
        )
    counts = {side: [len(layer) for layer in layers] for side, layers in slots.items()}
    if per_layer == "even":
        share = wanted / total
        counts = {side: [max(1, n - math.floor(n * share + 0.5)) for n in layers] for side, layers in counts.items()}
    else:
        removable = sorted(  # the least important first; of equal ones the deepest
            (score, -number, -layer, side)
            for side, layers in slots.items()
            for layer, scores in enumerate(layers)
            for number, score in enumerate(scores)
            if number
        )
        for _, _, layer, side in removable[:wanted]:
            counts[side][-layer] -= 1
    kept = {
        side: [
            LayerHeads(**{name: _best(scores, count) for name, scores in layer.items()})
            for layer, count in zip(layers, counts[side], strict=True)
        ]
        for side, layers in importance.items()
    }
    after = sum(map(sum, counts.values()))
    if after == total:
        raise InputError(f"--drop-heads {amount:g}: none of the {total} heads in {least} layers would be removed")
    note = ""
    if total - after != wanted:
        note = f"{total - after} heads are removed, not {wanted}: as many in every layer (--heads-per-layer free: any)"
    return HeadChoice(kept, total, after, per_layer, note)


def _slots(layer: Mapping[str, Tensor]) -> list[float]:
    """[H] importances in falling order: the k-th best of each attention of the layer, averaged."""
    ranked = [sorted(scores.tolist(), reverse=True) for scores in layer.values()]
    return [sum(column) / len(column) for column in zip(*ranked, strict=True)]


def _best(scores: Tensor, count: int) -> tuple[int, ...]:
    order = sorted(range(len(scores)), key=lambda head: (-float(scores[head]), head))
    return tuple(sorted(order[:count]))
