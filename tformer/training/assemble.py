"""From a resolved recipe and corpora to the parts that the loop trains: model, optimizer, schedule, batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from tformer.build import build_model
from tformer.errors import InputError
from tformer.model import Transformer
from tformer.nn.attention import Mechanism
from tformer.nn.embedding import TokenEmbedding
from tformer.nn.hardware import has_bf16_instructions
from tformer.nn.positions.base import Positions
from tformer.nn.projections import block_matrices
from tformer.nn.tying import tie_embeddings
from tformer.objectives import build_objective
from tformer.objectives.base import Objective
from tformer.optim.optimizers import NamedOptimizer, build_optimizer
from tformer.optim.schedules import Schedule, build_schedule
from tformer.recipe.recipe import Recipe
from tformer.tokenizer import Tokenizer
from tformer.training.material import Material

GENERATOR = "generator."
"""How the names of the second model's parameters begin, in the optimizer's state."""


def vocabulary_size(rows: int | None, tokenizer: Tokenizer, *, key: str = "vocab_size") -> int:
    """Rows of an embedding: the recipe's, or the tokenizer's. Errors: a tokenizer with more ids than rows."""
    if rows is None:
        return tokenizer.vocab_size
    if tokenizer.vocab_size > rows:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} ids but model.{key} is {rows}",
            hint=f"leave model.{key} out, or train a smaller tokenizer",
        )
    return rows


class Models(nn.Module):
    """What is trained together: the model, and ELECTRA's generator beside it. One switch to train or evaluate both."""

    def __init__(self, main: Transformer, generator: Transformer | None = None) -> None:
        super().__init__()
        self.main, self.generator = main, generator

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once: the model's under its own names, the generator's under `generator.`."""
        yield from self.main.named_parameters()
        if self.generator is not None:
            shared = {id(parameter) for parameter in self.main.parameters()}
            for name, parameter in self.generator.named_parameters():
                if id(parameter) not in shared:
                    yield f"{GENERATOR}{name}", parameter


def make_models(recipe: Recipe, device: torch.device, *, dtype: torch.dtype) -> Models:
    """Fresh models, drawn from the recipe's seed. On the CPU first: every device starts from the same weights."""
    torch.manual_seed(recipe.seed)
    labels = len(recipe.data.labels) or None
    main = build_model(recipe.model, num_labels=labels, device="cpu")
    generator = None if recipe.generator is None else build_model(recipe.generator, device="cpu")
    for model in (main, generator):
        if model is None:
            continue
        model.compute_dtype = dtype
        for stack in (model.encoder, model.decoder):
            if stack is not None:
                stack.checkpointing = recipe.training.activation_checkpointing
        model.to(device)
    if generator is not None and "embedding.weight" not in tie_embeddings(generator, main):
        raise InputError(
            "generator: it must share the token table of the model, but its rows have another size",
            hint="set generator.embedding.size to the width of the model's table",
        )
    return Models(main, generator)


def make_objective(recipe: Recipe, material: Material, models: Models | None = None) -> Objective:
    """The recipe's objective; without `models`, one that can make batches but not look at them."""
    generator = None if models is None else models.generator
    return build_objective(recipe.objectives, replace(material.context, generator=generator))


def make_schedule(recipe: Recipe) -> Schedule:
    return build_schedule(recipe.schedule, total_steps=recipe.training.max_steps, d_model=recipe.model.d_model)


def make_optimizer(recipe: Recipe, models: Models, device: torch.device) -> NamedOptimizer:
    """The optimizer over the model's own names. Muon gets the matrices inside the stacks, split into projections."""
    options = recipe.optimizer
    rows = {f"{name}.weight": rows for name, _, rows in block_matrices(models.main)}
    if models.generator is not None:
        rows |= {f"{GENERATOR}{name}.weight": rows for name, _, rows in block_matrices(models.generator)}
    layers = [stack.num_layers for stack in (recipe.model.encoder, recipe.model.decoder) if stack is not None]
    return build_optimizer(
        models.trained_parameters(),
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
        muon_dtype=torch.bfloat16 if device.type == "cuda" or has_bf16_instructions() else torch.float32,
        device=device,
    )


def layer_of(name: str) -> int | None:
    """Depth for layer-wise decay: 0 for embeddings and positions, i + 1 for block i, None for heads and final norms."""
    parts = name.removeprefix(GENERATOR).split(".")
    if len(parts) > 2 and parts[1] == "blocks":
        return int(parts[2]) + 1
    is_input = parts[0] in ("embedding", "decoder_embedding") or (len(parts) > 1 and "positions" in parts[1])
    return 0 if is_input else None


def matmul_parameters(model: Transformer) -> int:
    """Parameters in matrix products: all matrices but lookup tables (but a tied one is the output's product).

    Those of an attention kind are not among them: what they cost is in its `keys_per_query`.
    """
    heads = {id(parameter) for parameter in model.heads.parameters()}
    no_products = TokenEmbedding | Positions | Mechanism
    tables = {id(p) for m in model.modules() if isinstance(m, no_products) for p in m.parameters()}
    return sum(p.numel() for p in model.parameters() if p.ndim >= 2 and (id(p) in heads or id(p) not in tables))


def compiled(model: Transformer, *, wanted: bool, dynamic: bool = False) -> nn.Module:
    """The model's forward, compiled or as it is; the bare model stays the one that is saved.

    dynamic: once for batches of all shapes, in place of once for each shape.
    """
    if not wanted:
        return model
    forward: nn.Module = torch.compile(model, dynamic=dynamic)  # type: ignore[assignment]
    return forward
