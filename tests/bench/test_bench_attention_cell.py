"""One cell: every kind goes forward and back, and what is counted is the mechanism alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tformer.bench import processes as timing
from tformer.bench.workloads import attention as attention_cell
from tformer.bench.workloads.attention import (
    KINDS,
    band_mask,
    make_mechanism,
    measure_attention,
    sizes_of,
)
from tformer.nn.attention import ATTENTION, FullAttentionOptions, Mechanism

OPTIONS: dict[str, dict[str, Any]] = {"linformer": {"rank": 8}}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ENOUGH_SECONDS", 0.0)


def cell(kind: str, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "kind": kind, "length": 40, "options": OPTIONS.get(kind, {}), "batch_size": 2, "heads": 2, "head_dim": 4,
        "causal": False, "dtype": "fp32", "device": "cpu", "repeats": 2, "max_seconds": 60.0,
    }  # fmt: skip
    return measure_attention(**{**arguments, **changes})


def test_every_kind_of_the_table_can_be_measured_and_dense_masked_too() -> None:
    assert set(KINDS) == {*ATTENTION, "dense-masked"}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_goes_forward_and_back(kind: str, causal: bool) -> None:
    if causal and not KINDS[kind].mechanism.causal:
        return
    found = cell(kind, causal=causal)
    assert found.keys() == {"median", "minimum", "spread", "repeats", "peak_bytes"}
    assert 0 < found["minimum"] <= found["median"] and found["repeats"] == 2 and found["peak_bytes"] >= 0


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
        def __init__(self, _: Any, *sizes: Any) -> None:
            super().__init__(FullAttentionOptions(), *sizes)
            self.gain = torch.nn.Parameter(torch.ones(3, 1, 1))

        def forward(self, q: Any, k: Any, v: Any, context: Any, **_: Any) -> Any:
            assert q.shape == (2, 3, 40, 4) and self.scale == 0.5 and not context.is_causal and context.causal is False
            return self.gain * (q + k + v), None

    monkeypatch.setattr(torch.autograd, "grad", grad)
    monkeypatch.setattr(FullAttentionOptions, "mechanism", Scaled)
    cell("full", heads=3)
    assert asked[-1] == [torch.Size((2, 40, 3, 4))] * 3 + [torch.Size((3, 1, 1))]


def test_the_first_call_at_full_length_is_the_one_whose_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    class Hoarder(Mechanism):
        kept: torch.Tensor | None = None

        def forward(self, q: Any, k: Any, v: Any, context: Any, **_: Any) -> Any:
            lengths.append(q.shape[2])
            if q.shape[2] > attention_cell.SHORT and self.kept is None:
                self.kept = torch.ones(2**23)  # 32 MiB, as a table that a kind makes once
            return q + k + v, None

    monkeypatch.setattr(FullAttentionOptions, "mechanism", Hoarder)
    found = cell("full", length=200, repeats=1)
    assert lengths[:2] == [128, 200]
    assert found["peak_bytes"] >= 2**25


def test_options_reach_the_mechanism_and_are_refused_by_it() -> None:
    sizes = sizes_of(heads=2, head_dim=4, length=16, causal=False)
    assert sizes.d_model == 8 and sizes.max_seq_len == 16
    with pytest.raises(TypeError, match="nothing"):
        make_mechanism("full", {"nothing": 1}, sizes)
