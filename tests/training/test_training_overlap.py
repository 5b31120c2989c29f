"""A profile of DDP: gradients are exchanged while the backward pass computes others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent

from tests.training.worlds import in_processes
from tformer.recipe.load import load_recipe
from tformer.training import assemble
from tformer.training.parallel import Parallel

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its processes")]

STEPS, ROWS, TOKENS = 4, 8, 128
BACKWARD, EXCHANGE = "autograd::engine::evaluate_function", "gloo:all_reduce"


def exchange_and_overlap(events: list[FunctionEvent]) -> list[float]:
    """Microseconds in which a gradient was on its way, and those of them in which the backward pass was computing.

    The backward pass ends with its last operation: after it, DDP only waits.
    """
    ends = [event.time_range.end for event in events if event.name.startswith(BACKWARD)]
    exchanges = sorted((e.time_range.start, e.time_range.end) for e in events if e.name == EXCHANGE)
    total = overlap = last = 0.0
    for start, end in exchanges:
        begin = max(start, last)
        total += max(0.0, end - begin)
        overlap += max(0.0, min(end, max(ends)) - begin)
        last = max(last, end)
    return [total, overlap, max(ends) - min(start for start, _ in exchanges)]


def profiled(parallel: Parallel) -> dict[str, Tensor]:
    """[steps, 3] of steps of gpt/char: see `exchange_and_overlap`; the third is the time from the first exchange."""
    recipe = load_recipe(arch="gpt", preset="char").recipe
    section = recipe.model.model_copy(update={"vocab_size": 64})
    models = assemble.make_models(
        recipe.model_copy(update={"model": section}), torch.device("cpu"), dtype=torch.float32
    )
    run = parallel.wrap(models)
    ids = torch.randint(64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(parallel.rank))
    found = []
    for _ in range(STEPS):  # DDP orders its buckets in the first
        loss = run(lambda: models.main(input_ids=ids).loss_terms("lm", ids).loss)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss.backward()
        models.zero_grad()
        found.append(exchange_and_overlap(list(profile.events())))
    return {"times": torch.tensor(found[1:])}


def test_gradients_are_exchanged_while_the_backward_pass_goes_on(tmp_path: Path) -> None:
    for rank, found in enumerate(in_processes(2, profiled, tmp_path / "world")):
        times = found["times"]
        total, overlap, after_first = (times / 1000).tolist()[int(times[:, 1].argmax())]
        print(f"rank {rank}: {overlap:.0f} of {total:.0f} ms of exchange while the backward pass computes,")
        print(f"which goes on for {after_first:.0f} ms after the first gradients were sent")
        assert after_first > 0 and overlap > 0.25 * total
