"""Other libraries' attention: the same outputs as ours, measured the same way; mistakes with their names."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tformer.bench import processes as timing
from tformer.bench.attention_peers import ATTENTION_PEERS, LIBRARIES, choose_attention_peers
from tformer.bench.workloads.attention import (
    make_mechanism,
    measure_attention,
    sizes_of,
)
from tformer.errors import InputError
from tformer.nn.attention import AttentionContext, Mechanism

MODULES = {row: module for module, rows in LIBRARIES.values() for row in rows}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ENOUGH_SECONDS", 0.0)


def output(mechanism: Mechanism, inputs: list[torch.Tensor], *, causal: bool) -> torch.Tensor:
    context = AttentionContext.for_length(12, causal=causal)
    q, k, v = inputs
    return mechanism(q, k, v, context, x_BTD=torch.zeros(2, 12, 32))[0]


def test_every_row_belongs_to_a_library() -> None:
    assert set(MODULES) == set(ATTENTION_PEERS)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ATTENTION_PEERS)
def test_a_peer_computes_what_our_full_attention_does(name: str, causal: bool, kv_heads: int) -> None:
    pytest.importorskip(MODULES[name])
    if name == "x-transformers" and kv_heads == 2:
        pytest.skip("it gives queries the heads of keys in another order")
    sizes = sizes_of(heads=4, head_dim=8, length=12, causal=causal, kv_heads=kv_heads)
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, 12, 8) for heads in (4, kv_heads, kv_heads)]
    ours, peer = make_mechanism("full", {}, sizes), make_mechanism(name, {}, sizes)
    torch.testing.assert_close(output(peer, inputs, causal=causal), output(ours, inputs, causal=causal))


@pytest.mark.parametrize("name", ATTENTION_PEERS)
def test_a_peer_is_measured_as_a_kind_is(name: str) -> None:
    pytest.importorskip(MODULES[name])
    found = measure_attention(
        kind=name, length=40, options={}, batch_size=2, heads=4, head_dim=4, causal=True, dtype="fp32", device="cpu",
        repeats=2, max_seconds=60.0, kv_heads=2,
    )  # fmt: skip
    assert 0 < found["minimum"] <= found["median"]


def test_a_library_stands_for_its_rows() -> None:
    if all(importlib.util.find_spec(module) for module, _ in LIBRARIES.values()):
        assert choose_attention_peers(["transformers", "x-transformers"]) == list(ATTENTION_PEERS)
    assert choose_attention_peers([]) == []


def test_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="--peer ctranslate2: it does no attention here; available: transformers, "):
        choose_attention_peers(["ctranslate2"])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(InputError, match="x_transformers is not installed") as caught:
        choose_attention_peers(["x-transformers"])
    assert caught.value.hint == "pip install 'tformer[bench]'"


def test_a_kind_of_ours_is_compiled_where_that_is_asked_for_and_a_peer_never(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: compiled.append(type(self).__name__))
    arguments: dict[str, Any] = {
        "length": 8, "options": {}, "batch_size": 1, "heads": 2, "head_dim": 4, "causal": False, "dtype": "fp32",
        "device": "cpu", "repeats": 1, "max_seconds": 60.0,
    }  # fmt: skip
    measure_attention(kind="full", **arguments)
    assert compiled == []
    measure_attention(kind="full", compile=True, **arguments)
    assert set(compiled) == {"FullAttention"}
    if importlib.util.find_spec("transformers"):
        measure_attention(kind="transformers-sdpa", compile=True, **arguments)
    assert set(compiled) == {"FullAttention"}
