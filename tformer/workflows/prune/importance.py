"""How much each attention head matters to the loss (Michel et al., arXiv 1905.10650, equation 4).

A gate xi_h = 1 on every head's output, and the change of the loss that closing it would begin with:

    I_h = mean over examples x of |dL(x) / d xi_h|,      then  I_h / ||I||_2 within each attention

With the heads' outputs o side by side at the entrance of the output projection, dL/d xi_h is the sum over the positions
and coordinates of head h of o * dL/do: one backward pass per batch, no gates in the model.

L(x) is the example's share of its batch's loss times the examples in the batch: its loss per prediction, were all
examples as long.

Shape legend: B examples, T positions, H heads, v value_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tformer.data.permutation import derive_key
from tformer.errors import InputError
from tformer.evaluation.predict import Samples, default_batch_tokens, length_sorted_batches
from tformer.model import Transformer
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.objectives.base import Objective, total_loss


def head_importance(
    model: Transformer,
    objective: Objective,
    samples: Samples,
    *,
    batch_size: int | None = None,
    seed: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[..., None] | None = None,
) -> dict[str, Tensor]:
    """{name of an attention module: fp64 [H]}, each of Euclidean length 1 (or 0), over every sample once.

    The model runs without dropout. `should_stop` is polled before every batch; the figures are then those so far.
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
                if should_stop():
                    break
                draw = np.random.default_rng([seed, number])
                torch.manual_seed(derive_key("importance", seed, number))
                batch = objective.collate(samples.examples(0, indices), rng=draw, training=False).to(device)
                for name, gates_BH in gate_gradients(model, objective, batch).items():
                    totals[name] += gates_BH.abs().sum(dim=0).double().cpu()
                done += len(indices)
                if progress is not None:
                    progress(done, len(samples))
    finally:
        model.train(was_training)
    return {name: total / max(float(total.norm()), 1e-300) for name, total in totals.items()}


def attention_modules(model: nn.Module) -> dict[str, MultiHeadAttention]:
    """The attentions of a model, self and cross, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MultiHeadAttention)}


def gate_gradients(model: Transformer, objective: Objective, batch: Any) -> dict[str, Tensor]:
    """{name: fp32 [B, H]}: dL(x)/d xi_h of every example x of a batch on the model's device."""
    attentions = attention_modules(model)
    with _entrances(attentions) as entered:
        loss = total_loss(objective.loss(model, batch).terms)
        names = list(entered)
        gradients = torch.autograd.grad(loss, [entered[name] for name in names])
    gates = {}
    for name, gradient_BTx in zip(names, gradients, strict=True):
        products_BTHv = (entered[name].detach().float() * gradient_BTx.float()).unflatten(
            -1, (attentions[name].num_heads, -1)
        )
        gates[name] = products_BTHv.sum(dim=(1, 3)) * len(products_BTHv)
    return gates


@contextmanager
def _entrances(attentions: dict[str, MultiHeadAttention]) -> Iterator[dict[str, Tensor]]:
    """Catches what enters the output projections, [B, T, H v], in the next forward pass."""
    entered: dict[str, Tensor] = {}

    def catch(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            assert name not in entered, "an objective runs the model once a batch"
            entered[name] = inputs[0]

        return hook

    handles = [module.out.register_forward_pre_hook(catch(name)) for name, module in attentions.items()]
    try:
        yield entered
    finally:
        for handle in handles:
            handle.remove()
