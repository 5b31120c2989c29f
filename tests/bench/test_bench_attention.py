"""`bench attention`: kinds and options, order of cells, costs, sizes of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from tformer.bench.attention import (
    add_options,
    attention_of,
    bytes_read,
    check,
    choose_kinds,
    flops,
    measure_attention_ceilings,
    read_settings,
    run_attention,
)
from tformer.bench.attention_report import lines
from tformer.bench.report import figures
from tformer.bench.speed import Row
from tformer.bench.workloads.attention import KINDS, AttentionBench
from tformer.recipe import load_recipe
from tformer.support.errors import InputError

ALL = tuple(KINDS)


def test_full_attention_is_always_there_and_first() -> None:
    assert choose_kinds(None, causal=False) == (list(ALL), [])
    kinds, notes = choose_kinds(["dense-masked", "dense-masked"], causal=False)
    assert kinds == ["full", "dense-masked"] and "full" in notes[0]
    assert choose_kinds(["dense-masked", "full"], causal=False) == (["full", "dense-masked"], [])


def test_kinds_without_a_causal_mode() -> None:
    kinds, notes = choose_kinds(None, causal=True)
    assert set(kinds) == {kind for kind in ALL if KINDS[kind].mechanism.causal}
    for kind in set(ALL) - set(kinds):
        assert any(kind in note for note in notes)
        with pytest.raises(InputError, match=f"{kind} has no causal mode"):
            choose_kinds([kind], causal=True)


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(InputError, match="--kinds: unknown kind 'dense'") as refusal:
        choose_kinds(["dense"], causal=False)
    assert "dense-masked" in str(refusal.value.hint)


def test_settings_by_kind() -> None:
    assert read_settings(["dense-masked.window=64"], ALL)["dense-masked"] == {"window": 64}
    assert read_settings([], ["full"]) == {"full": {}}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("window=3", "expected KIND.OPTION=VALUE"),
        ("dense-masked.window", "expected KIND.OPTION=VALUE"),
        ("longformer.window=3", "unknown kind 'longformer'"),
        ("dense-masked.windw=3", "no such option"),
        ("full.qkv_bias=false", "no such option"),
        ("dense-masked.window=wide", "--set dense-masked.window: found the text 'wide', expected an integer"),
    ],
)
def test_mistakes_name_what_is_wrong(text: str, told: str) -> None:
    with pytest.raises(InputError) as refusal:
        read_settings([text], ALL)
    assert told in refusal.value.message


def test_options_of_a_kind_that_is_not_measured_are_refused() -> None:
    with pytest.raises(InputError, match="dense-masked is not measured"):
        read_settings(["dense-masked.window=64"], ["full"])


def test_the_dense_mask_has_the_window_of_the_sliding_window() -> None:
    found = read_settings(["sliding_window.window=64"], ALL)
    assert found["dense-masked"] == found["sliding_window"] == {"window": 64}
    both = read_settings(["sliding_window.window=64", "dense-masked.window=32"], ALL)
    assert both["dense-masked"] == {"window": 32}


Answers = Callable[..., list[tuple[str, int]]]
GOOD = {"seconds": 1.0, "minimum": 1.0, "spread": 0.0, "repeats": 3, "memory": {"peak_bytes": 10}}


def run(bench: Any) -> list[Row]:
    seen: list[tuple[Row, int, int]] = []
    ceilings, rows = run_attention(bench, on_row=lambda *row: seen.append(row), should_stop=lambda: False)
    assert ceilings == {"failed": "over 3 s"}
    assert seen == [(row, number, len(rows)) for number, row in enumerate(rows, 1)]
    return rows


def test_all_kinds_at_one_length_before_the_next(make_bench: Any, answers: Answers) -> None:
    asked = answers(lambda arguments: GOOD)
    rows = run(make_bench(lengths=(1024, 2048)))
    expected = [("full", 1024), ("dense-masked", 1024), ("full", 2048), ("dense-masked", 2048)]
    assert asked == expected == [(row.entry.name, row.length) for row in rows]
    assert all(row.failed is None and row.seconds == 1.0 for row in rows)


@pytest.mark.parametrize("failure", ["out of memory", "out of memory: the system ended the process", "over 120 s"])
def test_a_kind_that_ran_out_is_not_tried_further_and_the_rest_goes_on(
    make_bench: Any, answers: Answers, failure: str
) -> None:
    asked = answers(lambda a: {"failed": failure} if (a["kind"], a["length"]) == ("dense-masked", 2048) else GOOD)
    rows = run(make_bench())
    assert ("dense-masked", 4096) not in asked and ("full", 4096) in asked
    assert [row.failed for row in rows if row.entry.name == "dense-masked"] == [
        None,
        failure,
        f"not tried: {failure} at 2,048",
    ]


def test_a_length_that_is_refused_does_not_end_a_kind(make_bench: Any, answers: Answers) -> None:
    answers(lambda a: {"failed": "rank: 2000 is more than the length"} if a["length"] == 1024 else GOOD)
    assert [row.failed is None for row in run(make_bench(kinds=("full",)))] == [False, True, True]


def test_options_that_suit_no_length_are_refused_before_anything_runs(
    make_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tformer.nn.attention import FullAttentionOptions

    def refuse(options: Any, sizes: Any) -> Any:
        assert sizes.max_seq_len == 4096
        raise ValueError("window: 100 is not a multiple of 64")

    check(make_bench())
    monkeypatch.setattr(FullAttentionOptions, "mechanism", staticmethod(refuse))
    with pytest.raises(InputError, match=r"^full\.window: 100 is not a multiple of 64$"):
        check(make_bench())


RATES = {"flops_per_second": {"fp32": 1e12}, "product": [1, 2, 3], "bytes_per_second": 1e11, "data_sheet": None}


def bench(**changes: Any) -> AttentionBench:
    options: dict[str, Any] = {"full": {}, "dense-masked": {}, "sliding_window": {"window": 64}}
    values: dict[str, Any] = {"lengths": (1024,), "options": options, "heads": 2, "head_dim": 8}
    return AttentionBench(tuple(options), **{**values, **changes})


def test_operations_are_those_of_the_keys_that_a_kind_costs() -> None:
    of_a_key = 3 * 4 * 2 * 8  # forward and backward, 4 h of each head
    assert flops(bench(), "full", 1024) == of_a_key * 1024 * 1024
    for causal in (False, True):  # a window of 64 and the query itself, in whole blocks
        assert 65 <= flops(bench(causal=causal), "sliding_window", 1024) / (of_a_key * 1024) < 2 * 65
    assert flops(bench(batch_size=3), "full", 1024) == 3 * flops(bench(), "full", 1024)


def test_causal_full_attention_needs_half_and_a_dense_mask_saves_nothing() -> None:
    half = flops(bench(), "full", 1024) * 1025 / 2048
    assert flops(bench(causal=True), "full", 1024) == flops(bench(causal=True), "transformers-sdpa", 1024) == half
    assert flops(bench(causal=True), "dense-masked", 1024) == flops(bench(), "full", 1024)


def test_bytes_are_what_cannot_be_spared() -> None:
    numbers = 8 * 2 * 8 * 1024  # q, k, v; q, k, v, output, gradient
    assert bytes_read(bench(), "full", 1024) == 4 * numbers
    assert bytes_read(bench(dtype="bf16"), "full", 1024) == 2 * numbers
    assert bytes_read(bench(kv_heads=1), "full", 1024) == 3 * numbers
    assert bytes_read(bench(), "dense-masked", 1024) == 4 * numbers + 2 * 1024**2


def test_shares_of_the_ceilings_and_none_without(make_row: Any) -> None:
    sizes = {"heads": 2, "head_dim": 8}
    seconds = flops(bench(), "full", 1024) / 0.5e12
    row = make_row("full", 1024, seconds, ceilings=RATES, **sizes)
    assert row.roofline.arithmetic == pytest.approx(0.5) and row.roofline.bound == "arithmetic"
    assert make_row("full", 1024, ceilings=None).roofline is None
    assert make_row("full", 1024, ceilings=RATES, failed="over 3 s").roofline is None
    found = figures(row)
    assert found["share_of_peak"] == pytest.approx(0.5) and found["step_ms"] == 1000 * seconds
    assert lines(bench(), [row], RATES)[1].startswith("full at 1,024: 50% of the matrix-product rate")
    assert lines(bench(), [row], {"failed": "over 3 s"}) == ["ceilings: over 3 s"]


def test_ceilings_are_measured_at_the_width_of_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tformer.bench.machine.read_bytes_per_second", lambda *_, **__: 1.0)
    monkeypatch.setattr("tformer.bench.machine.PRODUCT_SECONDS", 0.0)
    found = measure_attention_ceilings(bench=asdict(bench(lengths=(16,), heads=2, head_dim=4)))
    assert found["product"] == (16, 8, 32) and found["flops_per_second"]["fp32"] > 0


def of(arch: str, *sets: str) -> tuple[AttentionBench, list[str]]:
    return attention_of(load_recipe(arch=arch, sets=sets).recipe, arch)


def test_a_decoder_is_causal_and_an_encoder_is_not() -> None:
    assert of("gpt")[0].causal and not of("bert")[0].causal
    both, notes = of("transformer")
    assert not both.causal and notes == ["the attention of the encoder"]


def test_lengths_go_as_far_as_the_model_reads() -> None:
    assert of("gpt", "model.max_seq_len=1500")[0].lengths == (512, 1024, 1500)
    assert of("gpt", "model.max_seq_len=64")[0].lengths == (64,)
    assert of("vit", "model.patches.image_size=8", "model.patches.size=4")[0].lengths == (4,)  # patches


def test_layers_that_differ_are_said() -> None:
    found, notes = of("gpt", "model.decoder.layers={1: {attention: {kind: sliding_window, window: 32}}}")
    assert found.kinds == ("full",) and "its layers differ" in notes[0]


def test_own_options_stand_where_set_says_nothing() -> None:
    own = of("longformer", "model.encoder.attention.window=64")[0]
    nothing: dict[str, dict[str, Any]] = {"sliding_window": {}, "dense-masked": {}, "full": {}}
    add_options(nothing, own)
    assert nothing == {
        "sliding_window": {"window": 64, "global_tokens": 1}, "dense-masked": {"window": 64}, "full": {},
    }  # fmt: skip
    some: dict[str, dict[str, Any]] = {"sliding_window": {"window": 2}}
    add_options(some, own)
    assert some["sliding_window"]["window"] == 2
