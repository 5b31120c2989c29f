"""Optimizer steps of every family's shipped recipe at a small size, by the training loop itself, without a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.test_presets_build import VOCABULARY, read, scaled_down
from tformer.data.batching.batch import Batch
from tformer.data.shards.corpus import Example
from tformer.data.shards.pair_tokens import PairExample
from tformer.data.sources.images import ImageExample
from tformer.objectives.base import ImageContext, Objective, ObjectiveContext
from tformer.recipe.recipe import Recipe
from tformer.support.device import DTYPES
from tformer.tokenizer.special import SpecialIds, decoder_tokens
from tformer.training import assemble
from tformer.training.loop import Trainer

PRESETS = (
    *("gpt/tiny", "gpt/small", "llama/tiny", "bert/tiny", "bert/classify", "roberta/tiny", "electra/tiny", "vit/tiny"),
    *("transformer/tiny", "t5/tiny", "bart/tiny", "longformer/classify", "bigbird/classify", "linformer/classify"),
    "performer/classify",
)
"""One of each family at least; gpt/small for AdamW and learned positions."""

SPECIAL = SpecialIds(pad=0, bos=1, eos=2, unk=3, cls=1, sep=2, mask=4, sentinels=tuple(range(90, 97)))
FIRST_WORD, LAST_WORD = 5, 89
LENGTH = 24  # tokens of a text
IMAGE = {"image_size": 16, "size": 8}


def small_recipe(preset: str, *, dropout: bool, seed: int = 3) -> Recipe:
    """The preset with two layers of width 32 and images of 16 x 16; without `dropout`, nothing is drawn."""
    recipe = read(preset)
    models = {}
    for name in ("model", "generator"):
        model = getattr(recipe, name)
        if model is None:
            continue
        values = scaled_down(model).model_dump()
        if recipe.generator is not None:
            values["embedding"]["size"] = 16  # both share one table
        if values["patches"] is not None:
            values["patches"] |= IMAGE
        if not dropout:
            values["embedding"]["dropout"] = 0.0
        for side in ("encoder", "decoder"):
            if values[side] is not None and "rank" in values[side]["attention"]:
                values[side]["attention"]["rank"] = 8
            if values[side] is not None and not dropout:
                values[side] |= dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
        models[name] = type(model).model_validate(values)
    training = recipe.training.model_copy(
        update={"max_steps": 20, "batch_size": 6, "batch_tokens": None, "eval_every": 10**9, "save_every": 10**9}
    )
    data = recipe.data.model_copy(update={"labels": ["a", "b"] if preset.endswith(("classify", "vit/tiny")) else []})
    return recipe.model_copy(update={**models, "training": training, "data": data, "seed": seed})


def context(recipe: Recipe) -> ObjectiveContext:
    both = recipe.model.encoder is not None and recipe.model.decoder is not None
    return ObjectiveContext(
        special_ids=SPECIAL,
        seq_len=LENGTH + 8,
        vocab_size=VOCABULARY,
        target=decoder_tokens(SPECIAL) if both else None,
        target_seq_len=LENGTH + 8 if both else None,
        images=ImageContext((0.5,) * 3, (0.5,) * 3) if recipe.model.patches is not None else None,
        label_counts=np.array([6, 5]) if recipe.model.patches is not None else None,
    )


def host_batch(recipe: Recipe, objective: Objective, *, seed: int = 0) -> Batch:
    """Six examples of random words: texts of several lengths, but windows for causal models."""
    rng = np.random.default_rng(seed)

    def words(length: int) -> np.ndarray:
        return rng.integers(FIRST_WORD, LAST_WORD, length)

    kind = recipe.objectives[0].kind
    lengths = [LENGTH - 3 * row for row in range(6)]
    samples: Sequence[Any] | np.ndarray
    if recipe.model.patches is not None:
        pixels = rng.integers(0, 256, (6, 3, 16, 16)).astype(np.uint8)
        samples = [ImageExample(image, label=row % 2) for row, image in enumerate(pixels)]
    elif kind == "causal_lm":
        samples = np.stack([words(LENGTH + 1) for _ in range(6)])
    elif kind == "seq2seq":
        samples = [PairExample(words(length), words(length)) for length in lengths]
    else:
        samples = [Example(words(length), label=row % 2) for row, length in enumerate(lengths)]
    return objective.collate(samples, rng=rng)


def small_models(recipe: Recipe, precision: str) -> assemble.TrainedModels:
    return assemble.make_models(recipe, torch.device("cpu"), dtype=DTYPES[precision])


class Stepper:
    """`step(batch)`: one step of the loop; the loss is then in `losses`, on the device."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        precision: str = "fp32",
        models: assemble.TrainedModels | None = None,
        wrap: Callable[[nn.Module], Callable[..., Any]] = lambda model: model,
    ) -> None:
        self.recipe = recipe
        self.models = small_models(recipe, precision) if models is None else models
        self.device = next(self.models.parameters()).device
        self.objective: Objective = assemble.make_objective(recipe, context(recipe), self.models)
        self.batches = _Given()
        self.trainer = Trainer(
            recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"clip_grad_norm": 1.0})}),
            self.models,
            self.objective,
            self.batches,
            device=self.device,
            forward=wrap(self.models.main),
        )

    def step(self, *micro_batches: Batch) -> Tensor:
        self.batches.batches = micro_batches
        self.trainer.train_step()
        return self.trainer._sums[-1][0]

    def gradients(self, batch: Batch) -> dict[str, Tensor]:
        """Of the mean loss of one batch, by name; the weights stay."""
        objective, trainer = self.objective, self.trainer
        result = objective.loss(trainer.forward, batch.to(self.device))
        counts = objective.label_count(batch)
        torch.stack([term.weight * term.sum / counts[name] for name, term in result.terms.items()]).sum().backward()
        found = {n: p.grad.clone() for n, p in self.models.trained_parameters() if p.grad is not None}
        trainer.optimizer.zero_grad()
        return found


class _Given:
    batches: Sequence[Batch] = ()

    def next(self) -> Sequence[Batch]:
        return self.batches

    def cursor(self) -> dict[str, Any]:
        return {}
