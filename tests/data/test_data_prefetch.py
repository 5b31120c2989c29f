from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from tformer.data.prefetch import Prefetcher


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_prefetcher_keeps_the_order_and_ends() -> None:
    with Prefetcher(iter(range(100)), depth=3) as prefetcher:
        assert list(prefetcher) == list(range(100))
        assert next(prefetcher, None) is None


def test_prefetcher_is_bounded() -> None:
    made: list[int] = []
    third = threading.Event()

    def source() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            if number == 2:
                third.set()
            yield number

    with Prefetcher(source(), depth=2):
        assert third.wait(10)
        assert len(made) == 3  # two waiting, one in the thread's hand


def test_prefetcher_raises_the_sources_error_in_its_place() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise RuntimeError("broken source")

    with Prefetcher(source()) as prefetcher:
        assert next(prefetcher) == 1
        with pytest.raises(RuntimeError, match="broken source"):
            next(prefetcher)
        assert next(prefetcher, None) is None


def test_prefetcher_closes_cleanly_and_runs_the_sources_cleanup() -> None:
    cleaned = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from iter(int, 1)
        finally:
            cleaned.set()

    prefetcher = Prefetcher(source())
    next(prefetcher)
    prefetcher.close()
    prefetcher.close()
    assert cleaned.is_set()
    assert not prefetch_threads()


def test_prefetcher_that_is_dropped_ends_its_thread() -> None:
    prefetcher = Prefetcher(iter(int, 1))
    next(prefetcher)
    (thread,) = prefetch_threads()
    del prefetcher
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
