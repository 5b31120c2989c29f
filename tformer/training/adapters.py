"""The base of a training with adapters: read one tensor at a time into a model on the meta device, and frozen there."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tformer.checkpoint.read import Checkpoint
from tformer.decoding.inference import missing_kernels
from tformer.kernels.functions import Kernels, find
from tformer.model import Transformer
from tformer.nn.init import initialize
from tformer.nn.lora import Adapter, place
from tformer.recipe.recipe import Recipe
from tformer.recipe.sections import Lora
from tformer.support.device import return_free_memory
from tformer.support.errors import InputError


class BasePlaces:
    """Takes the tensors of a base for a model with adapters: matrices in the format of `lora.weights`."""

    def __init__(self, model: Transformer, recipe: Recipe, device: torch.device) -> None:
        """Raises InputError for int4 without the C kernels, which round to it."""
        assert recipe.lora is not None
        self._model, self._recipe, self._device = model, recipe, device
        self._format = recipe.lora.weights
        self._kernels: Kernels | None = find() if self._format == "int4" else None
        if self._format == "int4" and self._kernels is None:
            raise InputError("lora.weights: int4 needs tformer's C kernels, found none", hint=missing_kernels())

    def __call__(self, name: str, tensor: Tensor) -> None:
        place(self._model, name, tensor, self._format, device=self._device, kernels=self._kernels)
        if self._format != "fp32":
            return_free_memory()

    def kept_heads(self, resumed: Checkpoint) -> set[str]:
        """The heads whose tensors come partly from the base: the run does not store them in full."""
        stored, heads = resumed.specs("weights"), self._model.heads
        return {
            kind for kind in heads if any(f"heads.{kind}.{name}" not in stored for name in heads[kind].state_dict())
        }

    def finish(self) -> None:
        """Draw parameters that the base lacks (they are trained in full), tie tables, and move all to the device."""
        model = self._model
        model.retie()
        new = {name for name, each in model.named_parameters() if each.is_meta}
        for options in self._recipe.objectives if new else ():
            if options.objective.compares_base:
                hint = "train its base with --objective causal_lm first"
                raise InputError(f"{options.kind} compares with the base, which has no {min(new)}", hint=hint)
        for name in new:
            path, _, own = name.rpartition(".")
            shape = model.get_parameter(name).shape
            setattr(model.get_submodule(path), own, nn.Parameter(torch.empty(shape)))
        for drawn in dict.fromkeys(_owner(name) for name in sorted(new)):
            initialize(model.get_submodule(drawn), self._recipe.model.init)
        model.retie()
        named = model.named_parameters(remove_duplicate=False)
        model.base_names -= {name for name, each in named if each.requires_grad}
        model.to(self._device)


def _owner(name: str) -> str:
    """The head that a parameter belongs to, or its module."""
    parts = name.split(".")
    return ".".join(parts[:2] if parts[0] == "heads" else parts[:-1])


def describe_adapters(model: Transformer, lora: Lora) -> str:
    """A note with the adapters' kind, rank and share of trained parameters."""
    adapters = [module for module in model.modules() if isinstance(module, Adapter)]
    trained, total = model.num_parameters(trainable=True), model.num_parameters()
    kind, matrices = "DoRA" if lora.dora else "LoRA", "matrix" if len(adapters) == 1 else "matrices"
    beside = "" if lora.weights == "fp32" else f", beside frozen ones in {lora.weights}"
    return (
        f"{kind} of rank {lora.rank} on {len(adapters)} {matrices}{beside}: {trained:,} of {total:,} parameters are "
        f"trained ({trained / total:.1%})"
    )
