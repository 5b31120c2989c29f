"""Calls of runs in several threads, compared with the same calls in one.

`python -m tests.threads --seconds 600 --threads 8 RUN...` tries runs of any families, with kernels, in fp32 and int8.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import tformer
from tformer.decoding.writers import fills_masks
from tformer.support.processes import peak_resident_bytes

PROMPTS = ["the cat ", "on a mat and ", "two dogs", "a "]
TEXTS = ["the cat sat on", "a mat", "dogs run and run"]


def calls_of(run: tformer.Run, **options: Any) -> dict[str, Callable[[], Any]]:
    """Every method of the run that its family has, by name; the results of a call can be compared with `same`."""
    name, given = f"{run.recipe.arch} {options or ''}", options
    if run.recipe.model.decoder is None:
        if fills_masks(run):
            return {f"{name} fill_masks": lambda: run.fill_masks(["the [MASK] sat on [MASK]"] * 2, **given)}
        return {
            f"{name} classify": lambda: run.classify(TEXTS, **given),
            f"{name} embed": lambda: run.embed(TEXTS, **given),
        }
    write = run.translate if run.model.is_encoder_decoder else run.generate
    settings = {"max_new_tokens": 12, **options}
    found: dict[str, Callable[[], Any]] = {
        f"{name} greedy": lambda: write(PROMPTS[0], greedy=True, **settings),
        f"{name} several": lambda: write(PROMPTS, greedy=True, **settings),
        f"{name} sampled": lambda: write(PROMPTS[1], temperature=0.9, num_samples=2, seed=3, **settings),
        f"{name} beam": lambda: write(PROMPTS[:2], beam_size=3, **settings),
        f"{name} score": lambda: run.score(TEXTS[0], TEXTS[1]),
    }
    return found if run.model.is_encoder_decoder else found | {f"{name} embed": lambda: run.embed(TEXTS, **given)}


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal to the bit."""
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


def differences(
    calls: dict[str, Callable[[], Any]], *, threads: int, rounds: int | None = None, seconds: float = 1e9
) -> tuple[int, list[str]]:
    """(calls made, names of those whose result was not that of one thread); `rounds`: of all calls, in each thread."""
    expected = {name: call() for name, call in calls.items()}
    wrong: list[str] = []
    made = [0] * threads
    end = time.monotonic() + seconds
    together = threading.Barrier(threads)

    def work(number: int) -> None:
        order = random.Random(number)
        together.wait()
        done = 0
        while (rounds is None or done < rounds) and time.monotonic() < end:
            done += 1
            for name in order.sample(sorted(calls), len(calls)):
                made[number] += 1
                try:
                    if not same(calls[name](), expected[name]):
                        wrong.append(name)
                except Exception as error:
                    wrong.append(f"{name}: {error!r}")

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(made), wrong


def main(words: Sequence[str] | None = None) -> None:
    """A long run with its numbers of calls and differences, and the memory at the start and the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("runs", nargs="+")
    chosen = parser.parse_args(words)
    calls: dict[str, Callable[[], Any]] = {}
    for path in chosen.runs:
        calls |= calls_of(tformer.load(path)) | calls_of(tformer.load(path), quantize="int8", precision="fp32")
    differences(calls, threads=chosen.threads, rounds=1)
    before, curve, done = _resident(), list[str](), threading.Event()

    def watch() -> None:
        while not done.wait(chosen.seconds / 10):
            curve.append(f"{_resident() / 1e6:,.0f}")

    threading.Thread(target=watch, daemon=True).start()
    made, wrong = differences(calls, threads=chosen.threads, seconds=chosen.seconds)
    done.set()
    print(f"{len(calls)} kinds of calls, {made} calls, {len(wrong)} differences {sorted(set(wrong))[:5]}")
    print(f"resident {before / 1e6:,.0f} MB before, {_resident() / 1e6:,.0f} after, peak {peak_resident_bytes():,}")
    print(f"after each tenth of the time: {curve}")


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


if __name__ == "__main__":
    main()
