"""What a cell is compared with: operations and bytes by the kind's own words, shares of ceilings, a model's sizes."""

from __future__ import annotations

from typing import Any

import pytest

from tformer.bench.attention import AttentionBench, Cell
from tformer.bench.attention_ceilings import bytes_read, ceilings, flops, line_of
from tformer.bench.attention_model import attention_of
from tformer.bench.attention_rows import figures, lines
from tformer.recipe import load_recipe

RATES = {"flops_per_second": {"fp32": 1e12}, "product": [1, 2, 3], "bytes_per_second": 1e11, "data_sheet": None}


def bench(**changes: Any) -> AttentionBench:
    options: dict[str, Any] = {"full": {}, "dense-masked": {}, "sliding_window": {"window": 64}, "x-transformers": {}}
    values: dict[str, Any] = {"lengths": (1024,), "options": options, "heads": 2, "head_dim": 8}
    return AttentionBench(tuple(options), **{**values, **changes})


def test_operations_are_those_of_the_keys_that_a_kind_costs() -> None:
    of_a_key = 3 * 4 * 2 * 8  # forward and backward, 4 h of each head
    assert flops(bench(), "full", 1024) == of_a_key * 1024 * 1024
    assert flops(bench(), "sliding_window", 1024) == of_a_key * 65 * 1024
    assert flops(bench(batch_size=3), "full", 1024) == 3 * flops(bench(), "full", 1024)


def test_causal_full_attention_needs_half_and_a_dense_mask_saves_nothing() -> None:
    half = flops(bench(), "full", 1024) * 1025 / 2048
    assert flops(bench(causal=True), "full", 1024) == flops(bench(causal=True), "x-transformers", 1024) == half
    assert flops(bench(causal=True), "dense-masked", 1024) == flops(bench(), "full", 1024)
    assert flops(bench(causal=True), "sliding_window", 1024) == flops(bench(), "sliding_window", 1024)


def test_bytes_are_what_cannot_be_spared() -> None:
    numbers = 8 * 2 * 8 * 1024  # q, k, v; q, k, v, output, gradient
    assert bytes_read(bench(), "full", 1024) == 4 * numbers
    assert bytes_read(bench(dtype="bf16"), "full", 1024) == 2 * numbers
    assert bytes_read(bench(kv_heads=1), "full", 1024) == 3 * numbers
    assert bytes_read(bench(), "dense-masked", 1024) == 4 * numbers + 2 * 1024**2


def test_shares_of_the_ceilings_and_none_without() -> None:
    cell = Cell("full", 1024, median=flops(bench(), "full", 1024) / 0.5e12)
    line = line_of(bench(), cell, RATES)
    assert line is not None and line.arithmetic == pytest.approx(0.5) and line.bound == "arithmetic"
    assert line_of(bench(), cell, {"failed": "out of memory"}) is line_of(bench(), cell, None) is None
    assert line_of(bench(), Cell("full", 1024, failed="over 3 s"), RATES) is None
    found = figures(bench(), cell, RATES)
    assert found["share_of_peak"] == pytest.approx(0.5) and found["step_ms"] == 1000 * (cell.median or 0)
    assert lines(bench(), [cell], RATES)[1].startswith("full at 1,024: 50% of the matrix-product rate")
    assert lines(bench(), [cell], {"failed": "over 3 s"}) == ["ceilings: over 3 s"]


def test_ceilings_are_measured_at_the_width_of_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tformer.bench.ceiling.read_bytes_per_second", lambda *_, **__: 1.0)
    monkeypatch.setattr("tformer.bench.ceiling.PRODUCT_SECONDS", 0.0)
    found = ceilings(dtype="fp32", device="cpu", rows=16, width=8)
    assert found["product"] == (16, 8, 32) and found["flops_per_second"]["fp32"] > 0


def of(arch: str, *sets: str) -> Any:
    return attention_of(load_recipe(arch=arch, sets=sets, device="cpu").recipe)


def test_a_decoder_is_causal_and_an_encoder_is_not() -> None:
    assert of("gpt").causal and not of("bert").causal
    both = of("transformer")
    assert not both.causal and both.notes == ("the attention of the encoder",)


def test_lengths_go_as_far_as_the_model_reads() -> None:
    own = of("gpt", "model.max_seq_len=1500")
    assert own.lengths((512, 1024, 2048)) == (512, 1024, 1500)
    assert of("gpt", "model.max_seq_len=64").lengths((512,)) == (64,)
    assert of("vit", "model.patches.image_size=8", "model.patches.size=4").max_length == 4  # patches


def test_layers_that_differ_are_said() -> None:
    found = of("gpt", "model.decoder.layers={1: {attention: {kind: sliding_window, window: 32}}}")
    assert found.kind == "full" and "its layers differ" in found.notes[0]


def test_own_options_stand_where_set_says_nothing() -> None:
    own = of("longformer", "model.encoder.attention.window=64")
    assert own.options_beside({"sliding_window": {}, "dense-masked": {}, "full": {}}) == {
        "sliding_window": {"window": 64, "global_tokens": 1}, "dense-masked": {"window": 64}, "full": {},
    }  # fmt: skip
    assert own.options_beside({"sliding_window": {"window": 2}})["sliding_window"]["window"] == 2
