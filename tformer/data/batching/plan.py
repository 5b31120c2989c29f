"""Batch plan: which samples form which batch, a pure function of (seed, epoch, window, lengths); and prefetching.

An epoch is every sample once, in an order drawn by a keyed permutation. The order is cut into windows. Inside a window
the samples are sorted by length (with `sort_window`), cut into global batches by examples or by padded tokens, and the
batches are shuffled. A cursor (epoch, window, batch) is the only state: it resumes in O(1), or O(window) where lengths
matter. Nothing depends on the number of processes.

`Prefetcher` prepares the next items in one thread while the current one is used. A corpus is read from
files and collating is short, so a thread hides it without the copies that processes would need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from tformer.data.permutation import derive_key, permute
from tformer.support.errors import InputError
from tformer.support.formatting import plural

TOKEN_WINDOW = 8192  # samples per window if batches are cut by tokens and not sorted
END = object()  # of the items of a source

Item = TypeVar("Item")


@dataclass(frozen=True, order=True, slots=True)
class Cursor:
    """The place of a global batch. `batch` may be past the last one of a window; see `BatchPlan.canonical`."""

    epoch: int = 0
    window: int = 0
    batch: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Cursor:
        """The inverse of `to_json`. Raises InputError for anything else."""
        found = [values.get(name) for name in ("epoch", "window", "batch")]
        if len(values) != 3 or not all(type(value) is int and value >= 0 for value in found):
            raise InputError(f"data position: expected whole numbers epoch, window and batch, found {values}")
        return cls(*found)  # type: ignore[arg-type]


class BatchPlan:
    """The batches of every epoch over `num_samples` samples, or over `lengths` (one length per sample, in tokens).

    Batches are cut by `batch_size` (samples per global batch) or by `batch_tokens` (longest sample times samples, so
    padding counts; a longer sample is a separate batch). For equal lengths, give `num_samples` and the length as a
    number. The last batch of a window may be smaller: no sample is dropped or repeated within an epoch.
    """

    def __init__(
        self,
        *,
        seed: int,
        num_samples: int | None = None,
        lengths: np.ndarray | int | None = None,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        sort_window: int = 0,
    ) -> None:
        assert (batch_size is None) != (batch_tokens is None), "give batch_size or batch_tokens, and not both"
        self.lengths = np.asarray(lengths) if lengths is not None and not isinstance(lengths, int) else None
        if isinstance(lengths, int) and batch_tokens is not None:
            batch_size = max(1, batch_tokens // lengths)
        assert batch_size is not None or self.lengths is not None, "batch_tokens needs lengths"
        if num_samples is None:
            assert self.lengths is not None, "give num_samples or one length per sample"
            num_samples = len(self.lengths)
        if num_samples < 1:
            raise InputError("there is nothing to make batches of: 0 samples")
        self.seed, self.num_samples = seed, num_samples
        self.batch_size, self.batch_tokens = batch_size, batch_tokens
        self.sorts = sort_window > 0 and self.lengths is not None
        if self.batch_size is None:
            self.window_size = sort_window if self.sorts else TOKEN_WINDOW
        elif self.sorts:  # whole batches: only the last window of an epoch may have a smaller one
            self.window_size = -(-sort_window // self.batch_size) * self.batch_size
        else:
            self.window_size = num_samples
        self.num_windows = -(-num_samples // self.window_size)
        self._latest: tuple[tuple[int, int], list[np.ndarray]] | None = None

    def global_batch(self, cursor: Cursor) -> list[int]:
        """The sample ids of the batch at `cursor`."""
        cursor = self.canonical(cursor)
        if not self._needs_lengths:  # from the permutation alone, without forming a window
            assert self.batch_size is not None
            start = cursor.batch * self.batch_size
            places = np.arange(start, min(start + self.batch_size, self.num_samples))
            return self._order(places, cursor.epoch).tolist()
        return self._window_batches(cursor.epoch, cursor.window)[cursor.batch].tolist()

    def next(self, cursor: Cursor) -> Cursor:
        """The cursor of the following batch."""
        return self.canonical(Cursor(cursor.epoch, cursor.window, cursor.batch + 1))

    def canonical(self, cursor: Cursor) -> Cursor:
        """The same place with `batch` inside its window and `window` inside its epoch."""
        epoch, window, batch = cursor.epoch, cursor.window, cursor.batch
        if not self._needs_lengths:
            extra, batch = divmod(batch, self.batches_in_window(epoch, window))
            return Cursor(epoch + extra, 0, batch)
        while True:
            if window >= self.num_windows:
                epoch, window = epoch + 1, 0
            count = self.batches_in_window(epoch, window)
            if batch < count:
                return Cursor(epoch, window, batch)
            batch, window = batch - count, window + 1

    def resumed(self, cursor: Cursor) -> Cursor:
        """The place of a saved cursor. Raises InputError for one beyond the batches of its epoch."""
        place = cursor
        while place.window < self.num_windows:
            count = self.batches_in_window(place.epoch, place.window)
            if place.batch < count:
                return place
            place = Cursor(place.epoch, place.window + 1, place.batch - count)
        raise InputError(
            f"data position: window {cursor.window} and batch {cursor.batch} lie beyond the epoch, which has "
            f"{plural(self.num_windows, 'window')} and {plural(self.num_samples, 'sample')}"
        )

    def batches_in_window(self, epoch: int, window: int) -> int:
        if self.batch_size is not None:
            size = min(self.window_size, self.num_samples - window * self.window_size)
            return -(-size // self.batch_size)
        return len(self._window_batches(epoch, window))

    def batches_per_epoch(self) -> int:
        """Global batches of the first epoch (with `batch_tokens`, others may differ by a few)."""
        if not self._needs_lengths:
            return self.batches_in_window(0, 0)
        return sum(self.batches_in_window(0, window) for window in range(self.num_windows))

    @property
    def _needs_lengths(self) -> bool:
        return self.sorts or self.batch_size is None

    def _order(self, places: np.ndarray, epoch: int) -> np.ndarray:
        return permute(places, size=self.num_samples, key=derive_key("sample order", self.seed, epoch))

    def _window_batches(self, epoch: int, window: int) -> list[np.ndarray]:
        """The batches of a window. The batches of the latest window are kept."""
        if self._latest is not None and self._latest[0] == (epoch, window):
            return self._latest[1]
        assert self.lengths is not None
        start = window * self.window_size
        samples = self._order(np.arange(start, min(start + self.window_size, self.num_samples)), epoch)
        lengths = self.lengths[samples]
        if self.sorts:
            by_length = np.argsort(lengths, kind="stable")
            samples, lengths = samples[by_length], lengths[by_length]
        if self.batch_size is not None:
            cuts = list(range(self.batch_size, len(samples), self.batch_size))
        else:
            assert self.batch_tokens is not None
            cuts = _cut_by_tokens(lengths.tolist(), self.batch_tokens)
        batches = np.split(samples, cuts)
        order = permute(np.arange(len(batches)), size=len(batches), key=derive_key("batches", self.seed, epoch, window))
        batches = [batches[index] for index in order]
        self._latest = ((epoch, window), batches)
        return batches


def _cut_by_tokens(lengths: list[int], batch_tokens: int) -> list[int]:
    """Cut `lengths` into parts with (longest length) x (samples) at most `batch_tokens`; returns the cuts."""
    cuts, start, longest = [], 0, 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if index > start and longest * (index - start + 1) > batch_tokens:
            cuts.append(index)
            start, longest = index, length
    return cuts


class Prefetcher(Iterator[Item]):
    """Iterates over `source` in a thread, in order, at most `depth` finished items ahead.

    An exception of the source is raised by the `next` that would have returned the failed item. `close()` stops the
    thread after its current item; items not yet taken are dropped.
    """

    def __init__(self, source: Iterable[Item], *, depth: int = 2) -> None:
        self._source = iter(source)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._pending = deque(self._prepare() for _ in range(depth + 1))  # the last one is still being prepared

    def _prepare(self) -> Future[Any]:
        return self._pool.submit(next, self._source, END)

    def __next__(self) -> Item:
        item: Any = self._pending.popleft().result() if self._pending else END
        if item is END:
            self._pending.clear()
            raise StopIteration
        self._pending.append(self._prepare())
        return item

    def close(self) -> None:
        """Stops the thread and the source. Safe to call twice."""
        self._pending.clear()
        self._pool.shutdown(cancel_futures=True)
        if isinstance(self._source, Generator):
            self._source.close()
