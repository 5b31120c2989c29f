"""Saving in a thread: training goes on while a checkpoint is written from copies of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Thread

import torch
from torch import Tensor


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory. Names that share one tensor share one copy."""
    copies: dict[tuple[object, ...], Tensor] = {}
    found = {}
    for name, tensor in tensors.items():
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        found[name] = copies[key]
    return found


class BackgroundSaves:
    """One save at a time in a thread. An error of it is raised by the next call of any method, once."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def start(self, save: Callable[[], object]) -> None:
        """Call `save` in a thread, after the save before it has ended."""
        self.finish()
        # The thread ends with the process: a folder that it was writing is removed by the next save.
        self._thread = Thread(target=self._run, args=(save,), name="checkpoint", daemon=True)
        self._thread.start()

    def raise_if_failed(self) -> None:
        """Raise the error of a save that has ended."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self) -> None:
        """Wait until everything is on disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_if_failed()

    def _run(self, save: Callable[[], object]) -> None:
        try:
            with torch.no_grad():
                save()
        except BaseException as error:
            self._error = error
