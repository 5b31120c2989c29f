"""Freed memory is kept while a process works, and can be given back; weights that are read often lie in large pages."""

from __future__ import annotations

import json
import os
import platform
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tformer.support import device as memory
from tformer.support.device import keep_freed_memory, return_free_memory, use_large_pages

CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
PROBE = """
import resource, sys
import torch
from tformer.support.device import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    kept = [torch.ones(2**n) for n in (23, 22, 21, 23, 20, 22)]  # a model's tensors of one step: 4 to 32 MiB
    return sum(len(tensor) for tensor in kept)
for _ in range(8):
    step()
before = faults()
for _ in range(4):
    step()
print(faults() - before)
"""
PAGES = 4 * 4 * 2**25 // 4096  # of the last four steps, about


def _faults(how: str) -> int:
    return int(subprocess.run([sys.executable, "-c", PROBE, how], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
@pytest.mark.slow
def test_kept_memory_is_mapped_once() -> None:
    """The quick twin is `test_where_the_threshold_is_refused_no_block_is_mapped`."""
    kept, given_back = _faults("keep"), _faults("default")
    if given_back < PAGES / 100:
        pytest.skip("this C library, or large pages, keep it anyway")
    assert kept < given_back / 3


@pytest.mark.slow
def test_both_work_wherever_they_are_called() -> None:
    """The quick twin is `test_a_library_without_the_options_is_left_alone`."""
    code = "from tformer.support.device import *; keep_freed_memory(); return_free_memory(); return_free_memory()"
    subprocess.run([sys.executable, "-c", code], check=True)


class OldLibrary:
    """glibc before 2.35: mallopt answers 0 to a threshold above 32 MiB, and leaves what was set."""

    def __init__(self, most: int) -> None:
        self.most, self.calls = most, list[tuple[int, int]]()

    def mallopt(self, option: int, value: int) -> int:
        refused = option == memory.M_MMAP_THRESHOLD and value > self.most
        if not refused:
            self.calls.append((option, value))
        return int(not refused)


@pytest.mark.parametrize(("most", "maps_none"), [(2**25, True), (memory.MAX_MALLOPT_VALUE, False)], ids=["old", "new"])
def test_where_the_threshold_is_refused_no_block_is_mapped(
    most: int, maps_none: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = OldLibrary(most)
    monkeypatch.setattr("ctypes.CDLL", lambda _: library)
    keep_freed_memory()
    assert ((memory.M_MMAP_MAX, 0) in library.calls) == maps_none and memory.M_MMAP_MAX == -4
    assert ((memory.M_MMAP_THRESHOLD, memory.MAX_MALLOPT_VALUE) in library.calls) != maps_none
    assert (memory.M_TRIM_THRESHOLD, memory.MAX_MALLOPT_VALUE) in library.calls


def test_a_library_without_the_options_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    keep_freed_memory()
    return_free_memory()


def large_pages_of(tensor: torch.Tensor) -> int:
    """KiB in large pages of the mappings that hold a tensor's memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(errors="replace").splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) < tensor.data_ptr() + tensor.nbytes and int(found[2], 16) > tensor.data_ptr()
        elif inside and line.startswith("AnonHugePages:"):
            total += int(line.split()[1])
    return total


def has_large_pages() -> bool:
    """Whether this system puts memory into large pages on request (Linux 6.1 and later, not set to never)."""
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    release = [int(part) for part in re.findall(r"\d+", platform.release())[:2]]
    return sys.platform == "linux" and release >= [6, 1] and switch.exists() and "[never]" not in switch.read_text()


@pytest.mark.skipif(not has_large_pages(), reason="no large pages on request here")
def test_weights_of_kernels_lie_in_large_pages_with_the_same_contents() -> None:
    weight = torch.arange(5 * 2**20, dtype=torch.float32)
    before, pages = weight.clone(), large_pages_of(weight)
    use_large_pages(weight)
    assert torch.equal(weight, before)
    assert large_pages_of(weight) >= max(pages, weight.nbytes // 1024 - 2048)


def test_only_large_tensors_on_a_cpu_are_put_into_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[tuple[int, int]] = []

    def advise(start: Any, count: Any, advice: int) -> int:
        ranges.append((start.value, start.value + count.value))
        return -1  # refused: nothing happens

    monkeypatch.setattr("tformer.support.device.ctypes.CDLL", lambda name: SimpleNamespace(madvise=advise))
    monkeypatch.setattr("tformer.support.device.sys.platform", "linux")
    file = SimpleNamespace(read_text=lambda: "2097152\n")
    monkeypatch.setattr("tformer.support.device.LARGE_PAGE_FILE", file)
    use_large_pages(torch.zeros(1000))
    use_large_pages(torch.zeros(10**9, device="meta"))
    assert not ranges
    weight = torch.zeros(2**20)
    use_large_pages(weight)
    for start, end in ranges:
        assert start <= weight.data_ptr() and end >= weight.data_ptr() + weight.nbytes
        assert start % 2**21 == end % 2**21 == 0 and end - start <= weight.nbytes + 2 * 2**21
    ranges.clear()
    file.read_text = lambda: "536870912\n"  # of a system whose small pages have 64 KiB
    use_large_pages(weight)
    assert not ranges


SHAPES = """
import re, torch
from pathlib import Path
from tformer.support.device import bound_products
bound_products(16)
torch.set_num_threads(1)
resident = lambda: int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
weight = torch.randn(512, 512, dtype=torch.bfloat16, requires_grad=True)
def multiply(start):
    for rows in range(start, start + 200):
        x = torch.ones(rows, 512, dtype=torch.bfloat16, requires_grad=True)
        torch.nn.functional.linear(x, weight).sum().backward()
multiply(40)
before = resident()
for start in (240, 440):
    multiply(start)
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_products_of_ever_new_shapes_keep_no_memory_unless_the_user_says_so() -> None:
    """oneDNN, and PyTorch in each thread, would keep a thousand products with their memory.

    Its quick twin is `test_the_number_of_products_that_are_kept_is_bounded_unless_the_user_says_so`.
    """

    def grown(**given: str) -> float:
        environment = {name: value for name, value in os.environ.items() if name not in CAPACITIES} | given
        command = [sys.executable, "-c", SHAPES]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return float(done.stdout)

    most = grown(**dict.fromkeys(CAPACITIES, "1024"))
    if most < 20:
        pytest.skip("nothing is kept of these products here")
    assert grown() < 0.3 * most


TRAINS = """
import json, sys
from tformer.cli.app import main
from tformer.support.processes import peak_resident_bytes, resident_bytes
from tformer.training.loop import Trainer
step, resident = Trainer.train_step, []
def measured(self):
    step(self)
    resident.append(resident_bytes())
Trainer.train_step = measured
try:
    main(sys.argv[2:])
finally:
    with open(sys.argv[1], "w") as file:
        json.dump({"resident": resident, "peak": peak_resident_bytes()}, file)
"""
USES = """
import json, sys
import tformer
from tformer.support.processes import resident_bytes
run, texts, resident = tformer.load(sys.argv[2]), open(sys.argv[3]).read().splitlines(), []
for start in range(0, len(texts), 4):
    part = texts[start : start + 4]
    if run.recipe.model.decoder is None:
        run.classify([text.partition("\\t")[2] for text in part])
    else:
        run.generate(part, max_new_tokens=len(part[0]) % 8 + 1)
    resident.append(resident_bytes())
with open(sys.argv[1], "w") as file:
    json.dump({"resident": resident}, file)
"""
QUIETLY = ("--set", "training.eval_every=1000", "--set", "training.sample_every=0")
STEPS = 260
LIBRARIES = 300e6
"""Bytes of PyTorch's libraries that the system takes away from a process when memory is scarce, and brings back."""


def varying_lines(count: int, draw: random.Random) -> list[str]:
    """Texts of 1 to 120 words, without a length that is more frequent than the others."""
    words = [f"w{number}" for number in range(200)]
    return [" ".join(draw.choices(words, k=draw.randint(1, 120))) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
@pytest.mark.parametrize("family", ["transformer", "bert", "gpt"])
def test_memory_on_varying_lengths_is_level_and_within_a_quarter_of_the_forecast(family: str, tmp_path: Path) -> None:
    """In training after 200 steps, and in generation or classification after as many batches."""
    draw = random.Random(0)
    texts = varying_lines(2400, draw)
    if family == "transformer":
        given = ["--preset", "tiny", "--set", "training.batch_tokens=2048"]
        for side in ("source", "target"):
            (tmp_path / side).write_text("\n".join(texts if side == "source" else reversed(texts)))
            given += [f"--{side}", str(tmp_path / side)]
    elif family == "bert":
        texts = [f"{draw.choice('ab')}\t{text}" for text in texts]
        (tmp_path / "data.tsv").write_text("label\ttext\n" + "\n".join(texts))
        given = ["--preset", "classify", "--data", str(tmp_path / "data.tsv"), "--batch-size", "16"]
    else:
        (tmp_path / "data.txt").write_text("\n\n".join(texts))
        given = ["--preset", "tiny", "--data", str(tmp_path / "data.txt"), "--set", "data.packing=none"]
        given += ["--batch-size", "16"]
    out, found = tmp_path / "run", tmp_path / "found.json"
    words = ["train", "--arch", family, *given, *QUIETLY, "--max-steps", str(STEPS), "--out", str(out)]
    dry = [sys.executable, "-m", "tformer", *words, "--dry-run", "--json"]
    forecast = json.loads(subprocess.run(dry, capture_output=True, text=True, check=True).stdout)["memory"]
    subprocess.run([sys.executable, "-c", TRAINS, found, *words], check=True, capture_output=True)
    training = json.loads(found.read_text())
    assert training["resident"][-1] < 1.05 * training["resident"][200]
    assert training["peak"] == pytest.approx(forecast["total_bytes"], abs=0.25 * forecast["total_bytes"] + LIBRARIES)
    inputs = tmp_path / "inputs"
    inputs.write_text("\n".join(texts[:1200]))
    subprocess.run([sys.executable, "-c", USES, found, out, inputs], check=True, capture_output=True)
    using = json.loads(found.read_text())["resident"]
    assert using[-1] < 1.05 * using[200]


def test_the_number_of_products_that_are_kept_is_bounded_unless_the_user_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(memory.CAPACITY, "1024")
    monkeypatch.setattr(memory, "_GIVEN", False)
    memory.bound_products(7)
    assert os.environ[memory.CAPACITY] == "7"
    monkeypatch.setattr(memory, "_GIVEN", True)
    memory.bound_products(9)
    assert os.environ[memory.CAPACITY] == "7"
