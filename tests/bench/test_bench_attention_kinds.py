"""Attention kinds in the measuring process: forward and backward, memory, other libraries' functions, compilation."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tformer.bench.peers import PEERS, choose_peers
from tformer.bench.workloads import attention
from tformer.bench.workloads.attention import (
    ATTENTION_PEERS,
    KINDS,
    ROUND_SECONDS,
    SHORT_LENGTH,
    SLOW_SECONDS,
    AttentionBench,
    AttentionContender,
    band_mask,
)
from tformer.nn.attention import ATTENTION, AttentionContext, AttentionSizes, FullAttentionOptions, Mechanism
from tformer.nn.attention.context import AttentionInputs
from tformer.support.errors import InputError

OPTIONS: dict[str, dict[str, Any]] = {"linformer": {"rank": 8}}


def bench_of(kind: str, **changes: Any) -> AttentionBench:
    values: dict[str, Any] = {"options": {kind: OPTIONS.get(kind, {})}, "batch_size": 2, "heads": 2, "head_dim": 4}
    return AttentionBench((kind,), **{"lengths": (40,), **values, **changes})


def contender_of(kind: str, length: int = 40, **changes: Any) -> AttentionContender:
    contender = AttentionContender(bench=asdict(bench_of(kind, **changes)), kind=kind, length=length)
    contender.prepare()
    return contender


def test_every_kind_of_the_table_can_be_measured_and_dense_masked_too() -> None:
    assert set(KINDS) == {*ATTENTION, "dense-masked"}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_goes_forward_and_back(kind: str, causal: bool) -> None:
    if causal and not KINDS[kind].mechanism.causal:
        return
    contender = contender_of(kind, causal=causal)
    assert contender.run() == 2 * 40
    peaks = contender.peak_memory()
    assert peaks["peak_bytes"] >= 0 and peaks["peak_rss_bytes"] > 2**20


@pytest.mark.parametrize(
    ("seconds", "calls"), [(ROUND_SECONDS / 15.5, 16), (2 * ROUND_SECONDS, 1), (2 * SLOW_SECONDS, 1)]
)
def test_quick_calls_are_repeated_within_a_round(seconds: float, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = (reading * seconds for reading in itertools.count())  # of a clock: every call takes this time
    monkeypatch.setattr(attention, "time", SimpleNamespace(perf_counter=readings.__next__))
    contender = contender_of("full")
    contender.warm_up()
    assert contender.run() == calls * 2 * 40


@pytest.mark.parametrize("causal", [False, True])
def test_the_dense_mask_is_the_band_of_a_window(causal: bool) -> None:
    mask = band_mask(7, 4, causal=causal, device=torch.device("cpu"))
    assert mask.shape == (1, 1, 7, 7)
    for query in range(7):
        first, last = (query - 4, query) if causal else (query - 2, query + 2)
        assert mask[0, 0, query].tolist() == [first <= key <= last for key in range(7)]


def test_gradients_of_all_inputs_and_own_parameters_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[torch.Size]] = []
    real = torch.autograd.grad

    def grad(outputs: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
        found = real(outputs, inputs, *rest, **options)
        asked.append([x.shape for x in found if x is not None])
        return found

    class Scaled(Mechanism):
        def __init__(self, _: Any, sizes: AttentionSizes) -> None:
            super().__init__(FullAttentionOptions(), sizes)
            self.gain = torch.nn.Parameter(torch.ones(3, 1, 1))

        def forward(self, inputs: AttentionInputs) -> Any:
            q, k, v, context = inputs[:4]
            assert q.shape == (2, 3, 40, 4) and self.scale == 0.5 and not context.is_causal and context.causal is False
            return self.gain * (q + k + v), None

    monkeypatch.setattr(torch.autograd, "grad", grad)
    monkeypatch.setattr(FullAttentionOptions, "mechanism", Scaled)
    contender_of("full", heads=3)
    assert asked[-1] == [torch.Size((2, 40, 3, 4))] * 3 + [torch.Size((3, 1, 1))]


def test_the_first_call_at_full_length_is_the_one_whose_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    class Hoarder(Mechanism):
        kept: torch.Tensor | None = None

        def forward(self, inputs: AttentionInputs) -> Any:
            q, k, v = inputs[:3]
            lengths.append(q.shape[2])
            if q.shape[2] > SHORT_LENGTH and self.kept is None:
                self.kept = torch.ones(2**23)  # 32 MiB, as a table that a kind makes once
            return q + k + v, None

    monkeypatch.setattr(FullAttentionOptions, "mechanism", Hoarder)
    contender = contender_of("full", length=200)
    assert lengths == [128, 200]
    # Linux adds up the pages of a process in batches for each thread, so its count may lag by some of them.
    assert contender.peak_memory()["peak_bytes"] >= 2**25 - 2**20


def test_options_reach_the_mechanism_and_are_refused_by_it() -> None:
    sizes = bench_of("full").sizes(16)
    assert sizes.d_model == 8 and sizes.max_seq_len == 16
    with pytest.raises(TypeError, match="nothing"):
        bench_of("full", options={"full": {"nothing": 1}}).mechanism("full", 16)


def output(mechanism: Mechanism, inputs: list[torch.Tensor], *, causal: bool) -> torch.Tensor:
    q, k, v = inputs
    context = AttentionContext.for_length(12, causal=causal)
    return mechanism(AttentionInputs(q, k, v, context, mechanism.scale, x_BTD=torch.zeros(2, 12, 32)))[0]


def require_library(name: str) -> None:
    for module in PEERS["attention", ATTENTION_PEERS[name][0]].needs:
        pytest.importorskip(module)


@pytest.mark.parametrize(("causal", "kv_heads"), [(False, 4), (True, 2)])
@pytest.mark.parametrize("name", ATTENTION_PEERS)
def test_a_peer_computes_what_our_full_attention_does(name: str, causal: bool, kv_heads: int) -> None:
    require_library(name)
    bench = bench_of("full", heads=4, head_dim=8, causal=causal, kv_heads=kv_heads)
    torch.manual_seed(0)
    inputs = [torch.randn(2, heads, 12, 8) for heads in (4, kv_heads, kv_heads)]
    ours, peer = bench.mechanism("full", 12), bench.mechanism(name, 12)
    torch.testing.assert_close(output(peer, inputs, causal=causal), output(ours, inputs, causal=causal))


@pytest.mark.parametrize("name", ATTENTION_PEERS)
def test_a_peer_is_measured_as_a_kind_is(name: str) -> None:
    require_library(name)
    assert contender_of(name, heads=4, causal=True, kv_heads=2).run() == 2 * 40


def test_a_library_stands_for_its_implementations() -> None:
    assert list(ATTENTION_PEERS) == ["transformers-eager", "transformers-sdpa"]
    if importlib.util.find_spec("transformers"):
        libraries = [("transformers", "eager"), ("transformers", "sdpa")]
        assert choose_peers("attention", ["transformers"], None) == libraries
    with pytest.raises(InputError, match="--peer ctranslate2: not available for attention; available: transformers"):
        choose_peers("attention", ["ctranslate2"], None)


def test_a_kind_of_ours_is_compiled_where_that_is_asked_for_and_a_peer_never(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: compiled.append(type(self).__name__))
    contender_of("full")
    assert compiled == []
    contender_of("full", compile=True)
    assert set(compiled) == {"FullAttention"}
    if importlib.util.find_spec("transformers"):
        contender_of("transformers-sdpa", compile=True)
    assert set(compiled) == {"FullAttention"}
