"""Bases that several served models share: adapters of one base, and the base itself.

A base is prepared once. Each model has its tensors and prepared products; beside these stand the factors of its
adapters, which are not merged, and the layers that it trained in full.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import nn

from tformer.checkpoint.read import Checkpoint
from tformer.decoding.inference import inference_dtype
from tformer.decoding.options import GenerateOptions
from tformer.decoding.writers import prepare_models
from tformer.interop.adapters import AdaptedCheckpoint
from tformer.kernels.functions import find
from tformer.loading import Loaded, Ready, load
from tformer.model import Transformer
from tformer.nn.heads import VocabularyHead
from tformer.nn.linear import Linear
from tformer.nn.lora import AdaptedProduct, BaseFormat, FrozenMatrix, frozen_form
from tformer.nn.products import PlainProduct


class Bases:
    """The bases of a server's models; each is held as long as one of these models is."""

    def __init__(self, checkpoints: Sequence[Checkpoint], precision: str, device: torch.device) -> None:
        """checkpoints: of all models. What only one of them needs is not shared: merged adapters are faster."""
        self._precision, self._device = precision, device
        adapted = [each for each in checkpoints if isinstance(each, AdaptedCheckpoint)]
        self._hashes = {each.base.path.resolve(): each.base.sha256 for each in adapted}
        self._counts = Counter(map(self._find, checkpoints))
        self._models: WeakValueDictionary[str, Transformer] = WeakValueDictionary()

    def of(self, checkpoint: Checkpoint) -> str | None:
        """Key of the base that a model shares: hash, rounding in training, number format here. None: it shares none."""
        name = self._find(checkpoint)
        return name if self._counts[name] > 1 else None

    def _find(self, checkpoint: Checkpoint) -> str | None:
        sha256 = self._hashes.get(checkpoint.path.resolve())
        if isinstance(checkpoint, AdaptedCheckpoint) and checkpoint.can_share:
            sha256 = checkpoint.base.sha256
        if sha256 is None:
            return None
        trained_in = checkpoint.recipe.training.precision
        dtype = inference_dtype(self._precision, trained_in=trained_in, device=self._device)
        return f"base:{sha256[:16]}:{_form(checkpoint)}:{str(dtype).removeprefix('torch.')}"

    def sizes(self, checkpoint: Checkpoint, name: str) -> dict[str, int]:
        """Bytes in fp32 of a model's own weights, under its name, and of its shared base."""
        base = self.of(checkpoint)
        if base is None:
            return {name: _bytes_of(checkpoint)}
        if isinstance(checkpoint, AdaptedCheckpoint):
            return {base: _bytes_of(checkpoint.base), name: _bytes_of(checkpoint.own)}
        return {base: _bytes_of(checkpoint), name: 0}

    def load(self, checkpoint: Checkpoint, options: GenerateOptions) -> tuple[Loaded, Transformer | None]:
        """Load and prepare a model; returns it with its base, to be held with it, or None if it shares no base.

        Raises the errors of `tformer.load`.
        """
        name, model = self.of(checkpoint), None
        # A model that shares starts on the CPU, where weights that are not written take no memory.
        loaded = load(checkpoint, device=self._device if name is None else "cpu", lazily=True)
        if name is not None and (model := self._models.get(name)) is None:
            whole = checkpoint.base if isinstance(checkpoint, AdaptedCheckpoint) else checkpoint
            base = load(whole, device=self._device, lazily=True)
            assert base.fill is not None
            base.recipe = loaded.recipe  # its precision
            base.fill = partial(_fill_rounded, base.model, _form(checkpoint), base.fill)
            prepare_models([base], options)
            model = self._models[name] = base.model
        if model is not None:
            loaded.fill = _share(loaded.model, model, checkpoint)
        prepare_models([loaded], options)
        loaded.fill = None
        return loaded, model


def _form(checkpoint: Checkpoint) -> BaseFormat:
    return checkpoint.lora.weights if isinstance(checkpoint, AdaptedCheckpoint) else "fp32"


def _bytes_of(checkpoint: Checkpoint) -> int:
    return sum(4 * math.prod(spec.shape) for spec in checkpoint.specs("weights").values())


def _fill_rounded(model: Transformer, form: BaseFormat, fill: Callable[[Ready], None], ready: Ready) -> None:
    """Load a base's weights, its matrices rounded as they were beside the adapters in training."""
    paths = {module: path for path, module in model.named_modules()}
    kernels = find() if form == "int4" else None

    def rounded(module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if (held := frozen_form(model, f"{paths[module]}.{name}", form)) != "fp32":
                parameter.data.copy_(FrozenMatrix(parameter.data, held, kernels).dense())
        ready(module)

    fill(rounded)


@torch.no_grad()
def _share(model: Transformer, base: Transformer, checkpoint: Checkpoint) -> Callable[[Ready], None]:
    """Move a model from the CPU to its prepared base: frozen tensors are the base's, the others the checkpoint's.

    Returns its `Loaded.fill`, which adds the products.
    """
    adapted = checkpoint if isinstance(checkpoint, AdaptedCheckpoint) else None
    own = {} if adapted is None else adapted.trained()
    for name, tensor in model.state_dict().items():
        path, _, key = name.rpartition(".")
        if name in own:
            tensor.copy_(own[name])
        else:
            setattr(model.get_submodule(path), key, getattr(base.get_submodule(path), key))
    model.to(next(base.parameters()).device)

    def fill(ready: Ready) -> None:
        for path, module in model.named_modules():
            if not isinstance(module, Linear | VocabularyHead) or f"{path}.weight" in own:
                ready(module)
                continue
            frozen = base.get_submodule(path)
            assert isinstance(frozen, Linear | VocabularyHead)
            module.product = frozen.product
            if adapted is not None and (adapter := adapted.adapter(path, own)) is not None:
                adapter.to(module.weight.device, model.compute_dtype)
                product = module.product or PlainProduct(module.weight, module.bias)
                module.product = AdaptedProduct(product, adapter, len(module.weight))

    return fill
