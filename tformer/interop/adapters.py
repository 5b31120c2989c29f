"""Checkpoints of adapters: small, because they name their base instead of holding it, and read as one merged model."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from tformer.build import add_adapters, build_model
from tformer.checkpoint.read import Checkpoint, differences, read_checkpoint
from tformer.checkpoint.resolve import resolve_checkpoint, suits
from tformer.checkpoint.run import CHECKPOINTS, is_run
from tformer.checkpoint.save import CheckpointContents, write_checkpoint
from tformer.checkpoint.tensor_files import TensorSpec
from tformer.interop.foreign_checkpoint import open_folder
from tformer.interop.weight_files import CONFIG
from tformer.kernels.functions import find
from tformer.model import Transformer
from tformer.nn.heads import VocabularyHead
from tformer.nn.linear import Linear
from tformer.nn.lora import ADAPTER, Adapter, FrozenMatrix, frozen_form
from tformer.recipe import Recipe, recipe_to_yaml
from tformer.recipe.sections import Lora
from tformer.support import files
from tformer.support.errors import InputError
from tformer.support.files import MANIFEST
from tformer.support.formatting import short_hash


def open_base(recipe: Recipe, *, beside: Path, instead: str | Path | None = None) -> Checkpoint:
    """The base that a recipe's adapters belong to. `instead`: where it is now.

    beside: the folder of the adapters. Where both were moved together, the base is found by the end of its path.

    Raises InputError when it is missing or has other weights.
    """
    assert recipe.lora is not None and recipe.lora.base is not None
    base = recipe.lora.base
    path = Path(base.path if instead is None else instead)
    fewest = 3 if path.parent.name == CHECKPOINTS else 1  # the name of the run is among them
    ends = [Path(*path.parts[-count:]) for count in range(5, fewest - 1, -1)]
    if instead is None and not path.is_dir():
        found = (above / end for above in beside.absolute().parents for end in ends)
        path = next((one for one in found if (one / MANIFEST).is_file() or (one / CONFIG).is_file()), path)
    if is_run(path):
        steps = sorted((path / CHECKPOINTS).glob("step-*"))
        path = next((step for step in steps if read_checkpoint(step).sha256 == base.sha256), (steps or [path])[-1])
    if not path.is_dir():
        raise InputError(
            f"{path}, the base of these adapters, does not exist",
            hint="put it back, or name where it is: tformer merge RUN --base DIR --out NEW",
        )
    checkpoint = read_checkpoint(path) if (path / MANIFEST).is_file() else open_folder(path)
    if checkpoint.sha256 != base.sha256:
        raise InputError(
            f"{path} is not the base of these adapters: the sha256 of its weights is {short_hash(checkpoint.sha256)}, "
            f"expected {short_hash(base.sha256)}",
            hint="adapters fit only the weights that they were trained with",
        )
    return checkpoint


def base_weights(base: Checkpoint) -> dict[str, Tensor]:
    """The weights that adapters are trained beside: averaged ones where there are."""
    return base.weights() | (base.ema() or {})


@dataclass
class AdaptedCheckpoint(Checkpoint):
    """A checkpoint of adapters as an ordinary one: weights of the base, changed by the adapters, in fp32.

    Matrices that were rounded in training (`lora.weights`) are rounded here too, for the adapters belong to these.
    """

    own: Checkpoint = field(kw_only=True)
    base: Checkpoint = field(kw_only=True)
    changed: bool = True  # by the adapters; False: the base alone

    @property
    def lora(self) -> Lora:
        """The adapters' section of the recipe they were trained with."""
        assert self.own.recipe.lora is not None
        return self.own.recipe.lora

    @cached_property
    def _model(self) -> Transformer:
        """The model on the meta device, with its adapters."""
        recipe = self.own.recipe
        model = build_model(recipe.model, num_labels=len(recipe.data.labels) or None, device="meta")
        with torch.device("meta"):
            add_adapters(model, recipe.model, self.lora)
        return model

    @property
    def tied(self) -> dict[str, str]:
        return {alias: owner for alias, owner in self._model.tied_names().items() if ADAPTER not in alias}

    def has(self, role: str) -> bool:
        return role == "weights"

    def specs(self, role: str) -> dict[str, TensorSpec]:
        if role != "weights":
            return {}
        shapes = {name: tensor.shape for name, tensor in self._model.state_dict().items()}
        return {name: TensorSpec(name, torch.float32, tuple(shape), 0, 4 * math.prod(shape))
                for name, shape in shapes.items() if ADAPTER not in name and name not in self.tied}  # fmt: skip

    def each(self, role: str) -> Iterator[tuple[str, Tensor]]:
        weights = self.weights() if role == "weights" else {}
        yield from ((name, tensor) for name, tensor in weights.items() if name not in self.tied)

    def rows(self, role: str, wanted: Mapping[str, slice], *, rank: int = 0, processes: int = 1) -> dict[str, Tensor]:
        weights = self.weights()
        return {name: weights[name][rows] for name, rows in wanted.items()}

    def trained(self) -> dict[str, Tensor]:
        """The tensors that were trained: adapters and parameters trained in full, averaged if the run averages."""
        return self.own.weights() | (self.own.ema() or {})

    def adapter(self, path: str, trained: Mapping[str, Tensor]) -> Adapter | None:
        """The adapter of the matrix of this module, with its tensors; None: it has none."""
        linear = self._model.get_submodule(path)
        if not isinstance(linear, Linear) or linear.adapter is None:
            return None
        adapter: Adapter = copy.deepcopy(linear.adapter).to_empty(device="cpu")
        adapter.load_state_dict({key: trained[f"{path}{ADAPTER}{key}"] for key in adapter.state_dict()})
        return adapter

    @cached_property
    def can_share(self) -> bool:
        """Whether each layer is the base's with adapters or trained in full; not with DoRA or trained biases alone."""
        base, own = ({*each.specs("weights"), *each.tied} for each in (self.base, self.own))
        layers = (
            {f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)}
            for path, module in self._model.named_modules()
            if isinstance(module, Linear | VocabularyHead)
        )
        return not self.lora.dora and all(names <= own or names <= base - own for names in layers)

    def weights(self) -> dict[str, Tensor]:
        model, own = self._model, self.trained()
        found = base_weights(self.base) | own
        state = {name: tensor for name, tensor in model.state_dict().items() if name not in model.tied_names()}
        if problems := differences(state, {name: found[name] for name in state if name in found}, aliases={}):
            raise InputError(f"{self.path}: the adapters do not fit {self.base.path}: {'; '.join(problems)}")
        kernels = find() if self.lora.weights == "int4" else None
        merged = {}
        for name in self.specs("weights"):
            tensor = found.pop(name)
            tensor = tensor.float() if tensor.is_floating_point() else tensor
            path, _, kind = name.rpartition(".")
            if name in model.base_names and (form := frozen_form(model, name, self.lora.weights)) != "fp32":
                tensor = FrozenMatrix(tensor, form, kernels).dense()
            adapter = self.adapter(path, own) if self.changed and kind == "weight" else None
            if adapter is not None:
                tensor = adapter.merged(tensor)
            merged[name] = tensor
        return self._with_aliases(merged)


def with_base(own: Checkpoint, *, instead: str | Path | None = None) -> Checkpoint:
    """Join a checkpoint of adapters with its base; other checkpoints stay. instead, errors: as in `open_base`."""
    lora = own.recipe.lora
    if lora is None:
        return own
    base = open_base(own.recipe, beside=own.path, instead=instead)
    note = f"adapters of rank {lora.rank} on {base.path}" + ("; averaged ones" if own.has("ema") else "")
    return AdaptedCheckpoint(
        own.path,
        own.manifest,
        recipe_to_yaml(own.recipe.model_copy(update={"lora": None})),
        own.tokenizer_json,
        own.trainer,
        target_tokenizer_json=own.target_tokenizer_json,
        notes=[*own.notes, note],
        own=own,
        base=base,
    )


def has_adapters(folder: Path) -> bool:
    """Whether a checkpoint holds adapters, see `suits`."""
    return suits(folder, lambda recipe: recipe.lora is not None)


def base_of(path: Path) -> Checkpoint:
    """The base model of trained adapters. Errors: a checkpoint without adapters; the errors of `open_base`."""
    checkpoint = with_base(read_checkpoint(path))
    if not isinstance(checkpoint, AdaptedCheckpoint):
        hint = "evaluate the run that was trained with --lora, as it was before tformer merge"
        raise InputError(f"{path} has no adapters, so there is no base to compare it with", hint=hint)
    return replace(checkpoint, changed=False)


def merge_adapters(
    run: str | Path, out: Path, *, which: str = "best", base: Path | None = None, dtype: torch.dtype = torch.float32
) -> AdaptedCheckpoint:
    """Write a run with adapters, which is returned, as an ordinary checkpoint in a new folder, without optimizer state.

    base: where the base is now; None: where it was. Raises InputError for a run without adapters, and those of
    `open_base`; nothing is written then.
    """
    own = read_checkpoint(resolve_checkpoint(run, which))
    checkpoint = with_base(own, instead=base)
    if not isinstance(checkpoint, AdaptedCheckpoint):
        raise InputError(f"{own.path} has no adapters: it is a whole model already", hint="no need to merge it")
    weights = {name: each.to(dtype) if each.is_floating_point() else each for name, each in checkpoint.each("weights")}
    files.require_writable_folder(out)
    trainer = {"step": own.step, "merged": {"sha256": checkpoint.base.sha256}}
    write_checkpoint(out, own.step, CheckpointContents.derived(checkpoint, weights, trainer))
    return checkpoint
