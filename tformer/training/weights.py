"""Sources of the weights that a training starts with, loaded in order. Weights that no source has stay random.

a resumed run    its checkpoint, beside the base of its adapters
fine-tuning      the body of a checkpoint, and of its heads and generator what fits
any              token vectors from files; the mean of the scores as the bias of a new head
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tformer.interop.adapters import open_base
from tformer.loading import load_body, load_generator, load_weights, why_new
from tformer.optim.shards import Shards
from tformer.training.adapters import BasePlaces, describe_adapters
from tformer.training.assemble import TrainedModels
from tformer.training.embeddings import write_embeddings
from tformer.training.training import Training


@dataclass
class Target:
    """Models into which weights are loaded.

    Attributes:
        shards: of models that are spread over processes.
        base: takes the tensors of the base of adapters.
        new_heads: heads that are still random.
    """

    models: TrainedModels
    shards: Shards | None
    base: BasePlaces | None
    new_heads: list[str]


@dataclass
class WeightSource:
    """A source of weights. note: lines for the user, set by `load`."""

    training: Training
    note: tuple[str, ...] = ()

    def load(self, target: Target) -> None:
        raise NotImplementedError


class ResumedRun(WeightSource):
    """All weights of the run that is continued; with adapters also their base, which it does not store."""

    def load(self, target: Target) -> None:
        checkpoint, base, main = self.training.resumed, target.base, target.models.main
        assert checkpoint is not None
        if base is not None:
            stored = open_base(self.training.recipe, beside=checkpoint.path)
            load_body(main, stored, keep_heads=base.kept_heads(checkpoint), place=base)
            base.finish()
        load_weights(main, checkpoint, shards=target.shards)
        if target.models.generator is not None:
            load_generator(target.models.generator, checkpoint, shards=target.shards)
        target.new_heads = []


class Body(WeightSource):
    """The body of a checkpoint, and of its heads and its generator what fits the recipe."""

    def load(self, target: Target) -> None:
        own, checkpoint, models = self.training.recipe, self.training.weights, target.models
        assert checkpoint is not None
        reasons: dict[str, str | None] = {
            head.kind: why_new(head, own, checkpoint.recipe, given=self.training.given_labels)
            for head in own.model.heads
        }
        keep = {kind for kind, reason in reasons.items() if reason is None}
        fresh = load_body(models.main, checkpoint, keep_heads=keep, shards=target.shards, place=target.base)
        if target.base is not None:
            target.base.finish()
        if models.generator is not None and checkpoint.has("generator"):
            load_generator(models.generator, checkpoint, shards=target.shards)
        target.new_heads = new = list(dict.fromkeys(name.split(".")[1] for name in fresh))
        kept = ", ".join(head for head in models.main.heads if head not in new)
        self.note = tuple(f"new head: {head} ({reasons.get(head) or 'another shape'})" for head in new)
        self.note += (f"kept head: {kept}",) if kept else ()


class Adapters(WeightSource):
    """Adapters, which are drawn with the model and change nothing at first."""

    def load(self, target: Target) -> None:
        assert self.training.recipe.lora is not None
        self.note = (describe_adapters(target.models.main, self.training.recipe.lora),)


class TokenVectors(WeightSource):
    """Vectors of tokens from files, as the tables of embeddings."""

    def load(self, target: Target) -> None:
        write_embeddings(self.training.vectors, target.models.main, shards=target.shards)


class MeanScore(WeightSource):
    """The mean of the training scores, as the bias of a new head."""

    def load(self, target: Target) -> None:
        head, mean = self.training.recipe.objectives[0].objective.head.kind, self.training.data.label_mean
        assert mean is not None
        if head in target.new_heads:
            torch.nn.init.constant_(target.models.main.get_parameter(f"heads.{head}.project.bias"), mean)


def sources_of(training: Training) -> list[WeightSource]:
    """The sources of a training's weights, in the order in which they are loaded."""
    used = {
        ResumedRun: training.resumed is not None,
        Body: training.resumed is None and training.weights is not None,
        Adapters: training.recipe.lora is not None,
        TokenVectors: bool(training.vectors),
        MeanScore: training.data.label_mean is not None,
    }
    return [source(training) for source, is_used in used.items() if is_used]


def load_sources(training: Training, models: TrainedModels, shards: Shards | None, note: Callable[[str], None]) -> None:
    """Load the weights that a training starts with, and say what was taken."""
    recipe = training.recipe
    base = None if recipe.lora is None else BasePlaces(models.main, recipe, training.device)
    target = Target(models, shards, base, list(models.main.heads))
    for source in sources_of(training):
        source.load(target)
        for line in source.note:
            note(line)
