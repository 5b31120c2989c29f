"""llama.cpp as a peer of `bench generate`, where it is installed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tformer.bench.peers import PEERS, choose_peers
from tformer.bench.workloads import Task
from tformer.bench.workloads.decoding import Generation
from tformer.recipe import load_recipe, recipe_to_yaml
from tformer.support.errors import InputError

NEW_TOKENS = 5
SETS = ("vocab_size=64", "d_model=64", "max_seq_len=32", "decoder.num_layers=2", "decoder.num_heads=2")
SETS += ("decoder.feedforward.d_ff=96",)


def task_of(*sets: str, rows: int = 2) -> Task:
    sets = tuple(f"model.{one}" for one in (*SETS, *sets))
    recipe = load_recipe(arch="gpt", preset="small", sets=sets, flags={}).recipe
    return Task("generate", recipe, rows, 4, "fp32", torch.device("cpu"), options={"new_tokens": NEW_TOKENS})


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The export runs in this process."""
    pytest.importorskip("llama_cpp")
    from tformer.bench.peers import llama_cpp

    def exported(peer: str, module: str, **arguments: Any) -> Path:
        return llama_cpp.export(tmp_path, **arguments)

    monkeypatch.setattr(llama_cpp, "exported", exported)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "q8_0", "q4_0"])
@pytest.mark.usefixtures("in_this_process")
def test_llama_cpp_writes_as_many_tokens_as_we(precision: str, rows: int) -> None:
    task = task_of(rows=rows)
    theirs, ours = PEERS["generate", "llama.cpp"].make(task, precision), Generation(task, "fp32")
    for contender in (theirs, ours):
        contender.prepare()
        assert [contender.run(), contender.run()] == 2 * [rows * NEW_TOKENS]
    assert (theirs.name, theirs.precision) == ("llama.cpp", precision)


def test_the_model_is_exported_in_a_process_of_its_own() -> None:
    pytest.importorskip("llama_cpp")
    from tformer.bench.peers import llama_cpp
    from tformer.bench.peers.exporter import exported

    task = task_of()
    file = exported("llama.cpp", llama_cpp.__name__, recipe_yaml=recipe_to_yaml(task.recipe), precision="q8_0")
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_llama_cpp_is_measured_on_cpus_in_its_own_formats() -> None:
    pytest.importorskip("llama_cpp")
    formats = ["fp32", "bf16", "q8_0", "q4_0"]
    assert choose_peers("generate", ["llama.cpp"], None) == [("llama.cpp", one) for one in formats]
    with pytest.raises(InputError, match=r"--peer-precision int8: llama.cpp has no such precision"):
        choose_peers("generate", ["llama.cpp"], ["int8"])
    with pytest.raises(InputError, match=r"--peer llama.cpp: found the device cuda, it is measured on CPUs only"):
        choose_peers("generate", ["llama.cpp"], None, device=torch.device("cuda"))


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, ("generate", "llama.cpp"), replace(PEERS["generate", "llama.cpp"], needs=("no_such",)))
    with pytest.raises(InputError, match=r"--peer llama.cpp: no_such is not installed") as caught:
        choose_peers("generate", ["llama.cpp"], None)
    assert caught.value.hint == "pip install 'tformer[llama-cpp]'"


def test_cost_counts_bytes_by_format() -> None:
    read = {precision: Generation.cost(task_of(), precision).bytes_read for precision in ("bf16", "q8_0", "q4_0")}
    assert read["bf16"] > read["q8_0"] > read["q4_0"] > 0.25 * read["bf16"]  # keys and values keep 16 bits
