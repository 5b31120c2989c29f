"""What the processes of a bench do: one measures the machine, each of the others holds a contender and takes turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from tformer.bench.ceiling import measure_ceilings
from tformer.bench.contender import Contender
from tformer.bench.memory import peak_of_process
from tformer.bench.peers import PEERS
from tformer.bench.speed import Entry, SpeedBench, task_of
from tformer.bench.task import OURS, Task
from tformer.bench.works import WORKS
from tformer.memory import keep_freed_memory


def bounds(*, bench: dict[str, Any], batch_size: int) -> dict[str, Any]:
    """`ceilings` of the machine (None where nothing is multiplied), and `costs`: of each entry's round, in order."""
    keep_freed_memory()
    asked = SpeedBench.from_json(bench)
    task, work = _start(asked, batch_size), WORKS[asked.work]
    ceilings: dict[str, Any] | None = None
    if work.product is not None:
        formats = [task.precision, *(entry.precision for entry in asked.entries)]
        ceilings = asdict(measure_ceilings(formats, task.device, product=work.product(task)))
    costs = [asdict(work.cost(task, entry.precision)) for entry in asked.entries]
    return {"ceilings": ceilings, "costs": costs}


def contend(
    *, bench: dict[str, Any], name: str, precision: str, batch_size: int
) -> Callable[[str], dict[str, int | float]]:
    """Prepare a contender and warm it up by a round; returns what answers the questions that follow.

    `round` does one: {"seconds", "tokens"}. `peak` is that of the process so far, preparing included:
    {"peak_rss_bytes"}, and on a GPU {"peak_gpu_bytes"} of PyTorch's allocator.
    """
    if name == OURS:  # the others are measured as their users would run them
        keep_freed_memory()
    task = _start(SpeedBench.from_json(bench), batch_size)
    contender = make_contender(task, Entry(name, precision))
    contender.prepare()
    gc.collect()
    contender.run()

    def round_() -> dict[str, int | float]:
        start = time.perf_counter()
        tokens = contender.run()
        return {"seconds": time.perf_counter() - start, "tokens": tokens}

    def peak() -> dict[str, int | float]:
        found: dict[str, int | float] = {"peak_rss_bytes": peak_of_process()}
        if task.device.type == "cuda":
            found["peak_gpu_bytes"] = torch.cuda.max_memory_allocated(task.device)
        return found

    answers = {"round": round_, "peak": peak}
    return lambda question: answers[question]()


def make_contender(task: Task, entry: Entry) -> Contender:
    """Ours, or a peer's."""
    if entry.name == OURS:
        return WORKS[task.work].make(task, entry.precision)
    return PEERS[task.work, entry.name].make(task, entry.precision)


def _start(asked: SpeedBench, batch_size: int) -> Task:
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    return task_of(asked, batch_size)
