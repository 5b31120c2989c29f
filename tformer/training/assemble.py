"""From a resolved recipe and corpora to the parts that the loop trains: model, optimizer, schedule, batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tformer.build import build_model
from tformer.errors import InputError
from tformer.model import Transformer
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.feedforward import FeedForward
from tformer.objectives import build_objective
from tformer.objectives.base import Objective
from tformer.optim.optimizers import NamedOptimizer, build_optimizer
from tformer.optim.schedules import Schedule, build_schedule
from tformer.recipe.recipe import Recipe
from tformer.tokenizer import Tokenizer


def vocabulary_size(recipe: Recipe, tokenizer: Tokenizer) -> int:
    """Rows of the embedding: the recipe's, or the tokenizer's. Errors: a tokenizer with more ids than rows."""
    rows = recipe.model.vocab_size if recipe.model.vocab_size is not None else tokenizer.vocab_size
    if tokenizer.vocab_size > rows:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} ids but model.vocab_size is {rows}",
            hint="leave model.vocab_size out, or train a smaller tokenizer",
        )
    return rows


def make_model(recipe: Recipe, device: torch.device) -> Transformer:
    """A fresh model, drawn from the recipe's seed. On the CPU first: every device starts from the same weights."""
    torch.manual_seed(recipe.seed)
    model = build_model(recipe.model, device="cpu")
    for stack in (model.encoder, model.decoder):
        if stack is not None:
            stack.checkpointing = recipe.training.activation_checkpointing
    return model.to(device)


def make_objective(recipe: Recipe, tokenizer: Tokenizer, seq_len: int) -> Objective:
    """The recipe's objective. Errors: more than one, which no objective so far can share a model with."""
    if len(recipe.objectives) != 1:
        raise InputError(f"objectives: {len(recipe.objectives)} objectives, but causal_lm stands alone")
    data = recipe.data
    return build_objective(
        recipe.objectives[0],
        tokenizer.special,
        seq_len=seq_len,
        padding=data.padding,
        pad_to=data.pad_to,
    )


def make_schedule(recipe: Recipe) -> Schedule:
    return build_schedule(recipe.schedule, total_steps=recipe.training.max_steps, d_model=recipe.model.d_model)


def make_optimizer(recipe: Recipe, model: Transformer, device: torch.device) -> NamedOptimizer:
    """The optimizer over the model's own names. Muon gets the matrices inside the stacks, split into projections."""
    options = recipe.optimizer
    rows = projection_rows(model)
    layers = [stack.num_layers for stack in (recipe.model.encoder, recipe.model.decoder) if stack is not None]
    return build_optimizer(
        model.named_parameters(),
        kind=options.kind,
        lr=options.lr,
        adam_lr=options.adam_lr,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        momentum=options.momentum,
        groups=options.groups,
        layer_decay=options.layer_decay,
        layer_of=layer_of,
        num_layers=max(layers),
        hidden_matrices=lambda name, parameter: name in rows and parameter.ndim == 2,
        splits=rows.get,
        device=device,
    )


def projection_rows(model: Transformer) -> dict[str, list[int]]:
    """Every matrix inside the blocks by name, with the rows of each projection that is fused into it."""
    found: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, (MultiHeadAttention, FeedForward)):
            for child, rows in module.fused_rows().items():
                found[f"{name}.{child}.weight"] = rows
    return found


def layer_of(name: str) -> int | None:
    """The block a parameter belongs to, None outside the blocks."""
    parts = name.split(".")
    return int(parts[2]) if len(parts) > 3 and parts[1] == "blocks" and parts[2].isdigit() else None


def matmul_parameters(model: nn.Module) -> int:
    """Parameters that take part in matrix products: all matrices but lookup tables (a tied one is the output's product)."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return sum(p.numel() for p in model.parameters() if p.ndim >= 2 and id(p) not in tables)


Compiled = Callable[..., object]


def maybe_compile(model: Transformer, choice: str, device: torch.device, max_steps: int) -> tuple[Compiled, str, str]:
    """(forward, 'on' or 'off', why). `auto` compiles on a GPU when the run is long enough to pay for it."""
    if choice == "auto":
        pays = device.type == "cuda" and max_steps >= 200
        choice = "on" if pays else "off"
        why = "a GPU and a long run" if pays else "it would not pay for itself here"
    else:
        why = "as asked"
    if choice == "off":
        return model, "off", why
    return torch.compile(model, dynamic=False), "on", why
