"""Builds a model in FSDP2 shards: this process stores some rows of each parameter.

Their parameters are on the meta device. Every number is drawn as by one process, since it depends on the draws before
it, but a tensor is whole only while its module is initialized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

RANDOM_FILLS = (nn.init.normal_, Tensor.normal_, Tensor.uniform_)


class OwnRows:
    """This process's rows of the parameters of models that are built with it.

    Args:
        rows: number of rows of a parameter -> those of this process.
    """

    def __init__(self, rows: Callable[[int], slice]) -> None:
        self._rows = rows
        self._kept: dict[nn.Parameter, Tensor] = {}  # by parameter on the meta device

    @contextmanager
    def constructing(self) -> Iterator[None]:
        """Modules that are made inside have their parameters on the meta device, and their buffers where they are.

        Draws into parameters move the random generator as if these were on the CPU.
        """
        hook = register_module_parameter_registration_hook(cast("Any", _moved_to_meta))
        try:
            with _DrawAside():
                yield
        finally:
            hook.remove()

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """Inside, the parameters of `module` itself, lists of them included, are whole on the CPU, to be initialized.

        Afterwards the rows of those that were written to are kept, and all are on the meta device again.
        """
        owners = [module, *(child for child in module.children() if isinstance(child, nn.ParameterList))]
        own = [(owner, name, each) for owner in owners
               for name, each in owner.named_parameters(recurse=False, remove_duplicate=False)]  # fmt: skip
        whole = {each: nn.Parameter(torch.empty(each.shape, dtype=each.dtype, device="cpu")) for _, _, each in own}
        for owner, name, parameter in own:
            setattr(owner, name, whole[parameter])
        unwritten = {parameter: tensor._version for parameter, tensor in whole.items()}
        yield
        for owner, name, parameter in own:
            setattr(owner, name, parameter)
        for parameter, tensor in whole.items():
            if tensor._version > unwritten[parameter]:
                self._kept[parameter] = tensor.detach()[self._rows(len(tensor))].clone()

    def take(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
        """The rows of named parameters by name; afterwards none are kept here."""
        taken = {name: self._kept[parameter] for name, parameter in parameters}
        self._kept.clear()
        return taken


class NoRows(OwnRows):
    """Builds a model without rows, whose numbers come from elsewhere: only buffers exist and no number is drawn."""

    def __init__(self) -> None:
        super().__init__(lambda count: slice(0))

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        yield


def _moved_to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """The parameter that a module registers: one on the meta device. One that is there already stays the same."""
    if parameter is None or parameter.is_meta:
        return parameter
    return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)


class _DrawAside(TorchFunctionMode):
    """Draws into tensors of the meta device go into ones on the CPU, which are dropped."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in RANDOM_FILLS:
            return func(*args, **kwargs)
        filled = args[0] if args else kwargs.pop("tensor")
        target = torch.empty(filled.shape, dtype=filled.dtype, device="cpu") if filled.is_meta else filled
        func(target, *args[1:], **kwargs)
        return filled
