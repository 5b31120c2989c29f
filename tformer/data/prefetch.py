"""One thread that prepares the next items while the current one is used.

No processes: the corpus is memory-mapped and collating is short, so a thread hides it without the cost of copying
between processes. At most `depth` finished items wait at any time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")


class _Channel(Generic[Item]):
    """What both threads see; it holds no reference to the Prefetcher, so that dropping that one ends the thread."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.items: deque[Item] = deque()
        self.changed = threading.Condition()
        self.closed = False  # the reader wants no more
        self.finished = False  # the source has no more
        self.error: BaseException | None = None


def _produce(source: Iterable[Item], channel: _Channel[Item]) -> None:
    try:
        for item in source:
            with channel.changed:
                channel.changed.wait_for(lambda: channel.closed or len(channel.items) < channel.depth)
                if channel.closed:
                    break
                channel.items.append(item)
                channel.changed.notify_all()
    except BaseException as error:  # re-raised in the reader's thread
        channel.error = error
    finally:
        close = getattr(source, "close", None)
        if close is not None:  # a generator's cleanup belongs to the thread that ran it
            close()
        with channel.changed:
            channel.finished = True
            channel.changed.notify_all()


class Prefetcher(Iterator[Item]):
    """Iterates over `source` from a thread of its own, in order, at most `depth` items ahead.

    An exception of the source is raised by the `next` that would have returned the failed item. `close()` (or leaving
    a `with` block) stops and joins the thread; items not yet taken are dropped.
    """

    def __init__(self, source: Iterable[Item], *, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, found {depth}")
        self._channel: _Channel[Item] = _Channel(depth)
        self._thread = threading.Thread(target=_produce, args=(source, self._channel), name="prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> Item:
        channel = self._channel
        with channel.changed:
            channel.changed.wait_for(lambda: channel.items or channel.finished or channel.closed)
            if channel.items and not channel.closed:
                item = channel.items.popleft()
                channel.changed.notify_all()
                return item
            error, channel.error = channel.error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """Stops the thread after the item it is working on. Safe to call twice."""
        with self._channel.changed:
            self._channel.closed = True
            self._channel.items.clear()
            self._channel.changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Prefetcher[Item]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        channel = getattr(self, "_channel", None)
        if channel is not None:
            channel.closed = True
            if channel.changed.acquire(blocking=False):  # never wait inside the garbage collector
                channel.changed.notify_all()
                channel.changed.release()
