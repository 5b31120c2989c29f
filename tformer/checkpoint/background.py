"""Saving in a thread: training goes on while a checkpoint is written from copies of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from threading import Event, Thread
from typing import TypeVar

from torch import Tensor

Key = TypeVar("Key", bound=Hashable)


class Saver:
    """Saves one checkpoint at a time: at once, or in a thread from copies of the tensors.

    An error of the thread is raised by the next call of `save`, `raise_if_failed` or `finish`, once.
    `gave_up` is set when what `write` waits for will not come.
    """

    def __init__(self, *, in_background: bool) -> None:
        self._in_background = in_background
        self._thread: Thread | None = None
        self._error: BaseException | None = None
        self.gave_up = Event()

    def hold(self, tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """The tensors as they are now, for a `save` that follows.

        In the background these are copies in host memory; names that share one tensor share one copy.
        """
        if not self._in_background:
            return dict(tensors)
        copies: dict[tuple[object, ...], Tensor] = {}
        found = {}
        for name, tensor in tensors.items():
            key = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            if key not in copies:
                copies[key] = tensor.detach().to("cpu", copy=True)
            found[name] = copies[key]
        return found

    def save(self, write: Callable[[], object]) -> None:
        """Call `write`, now or in a thread, after the previous save has ended."""
        self.finish()
        if self._in_background:
            # The thread ends with the process: a folder that it was writing is removed by the next save.
            self._thread = Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
            self._thread.start()
        else:
            write()

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

    def _run(self, write: Callable[[], object]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error
