"""Permutation, batch plan, prefetching; batches and padding."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tformer.data.batching.batch import Batch, Share
from tformer.data.batching.padding import pad_layout
from tformer.data.batching.plan import BatchPlan, Cursor, Prefetcher
from tformer.data.permutation import derive_key, permute, permute_by_network
from tformer.support.errors import InputError


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permutation_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size=size, key=key).tolist()) == list(range(size))


def test_permutation_of_an_index_does_not_depend_on_the_other_indices() -> None:
    whole = permute(np.arange(1000), size=1000, key=5)
    assert permute(np.array([17, 999]), size=1000, key=5).tolist() == [whole[17], whole[999]]


def test_permutation_works_beyond_memory() -> None:
    places = permute(np.arange(10), size=10**15, key=1)
    assert len(set(places.tolist())) == 10
    assert ((places >= 0) & (places < 10**15)).all()


def test_permutation_orders_differ_between_keys_and_are_well_mixed() -> None:
    size = 10_000
    first, second = (permute(np.arange(size), size=size, key=derive_key("order", 1, epoch)) for epoch in (0, 1))
    for other in (np.arange(size), second):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.05
    assert (np.abs(np.diff(first)) == 1).mean() < 0.01


@pytest.mark.parametrize("size", [2, 3, 5])
def test_permutation_reaches_every_order_of_few(size: int) -> None:
    orders = {tuple(permute(np.arange(size), size=size, key=key).tolist()) for key in range(1500)}
    assert len(orders) == {2: 2, 3: 6, 5: 120}[size]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_orders_of_few_are_equally_frequent(size: int) -> None:
    """Chi-square over all orders; of four, some were a third too rare or too frequent."""
    number = math.factorial(size)
    draws = 300 * number
    found = Counter(
        tuple(permute(np.arange(size), size=size, key=derive_key("few", key)).tolist()) for key in range(draws)
    )
    chi_square = sum((count - 300) ** 2 / 300 for count in found.values())
    assert len(found) == number and abs(chi_square - (number - 1)) < 4 * math.sqrt(2 * (number - 1))


def test_held_out_parts_stay_those_of_earlier_versions() -> None:
    order = permute_by_network(np.arange(8), size=8, key=derive_key("held out", 0, 1)).tolist()
    assert order == [6, 4, 5, 1, 2, 7, 3, 0]


def test_derive_key_separates_its_parts() -> None:
    keys = [derive_key("a", 1), derive_key("a", 11), derive_key("a", 1, 1), derive_key("a1"), derive_key("a", "1")]
    assert len(set(keys)) == len(keys)


LENGTHS = np.random.default_rng(0).integers(1, 60, size=203)

PLANS: dict[str, dict[str, Any]] = {
    "examples": {"num_samples": 103, "batch_size": 8},
    "equal lengths by tokens": {"num_samples": 103, "lengths": 16, "batch_tokens": 100},
    "sorted examples": {"lengths": LENGTHS, "batch_size": 8, "sort_window": 50},
    "tokens": {"lengths": LENGTHS, "batch_tokens": 200},
    "sorted tokens": {"lengths": LENGTHS, "batch_tokens": 200, "sort_window": 64},
    "fewer than a batch": {"num_samples": 3, "batch_size": 8},
}


def make(name: str, *, seed: int = 1, **extra: Any) -> BatchPlan:
    return BatchPlan(seed=seed, **PLANS[name], **extra)


def cursors(plan: BatchPlan, start: Cursor | None = None) -> Iterator[Cursor]:
    """The place of every batch from `start` on, endlessly."""
    cursor = plan.canonical(start or Cursor())
    while True:
        yield cursor
        cursor = plan.next(cursor)


def batches_of_epochs(plan: BatchPlan, epochs: int) -> list[tuple[Cursor, list[int]]]:
    found = []
    for cursor in cursors(plan):
        if cursor.epoch == epochs:
            return found
        found.append((cursor, plan.global_batch(cursor)))
    raise AssertionError


@pytest.mark.parametrize("name", PLANS)
def test_plan_uses_every_sample_once_per_epoch(name: str) -> None:
    plan = make(name)
    for epoch in range(3):
        samples = [sample for cursor, batch in batches_of_epochs(plan, 3) if cursor.epoch == epoch for sample in batch]
        assert sorted(samples) == list(range(plan.num_samples))


@pytest.mark.parametrize("name", PLANS)
def test_plan_resumes_from_any_cursor_as_if_uninterrupted(name: str) -> None:
    whole = batches_of_epochs(make(name), 2)
    for index, (cursor, _) in enumerate(whole):
        restored = Cursor.from_json(json.loads(json.dumps(cursor.to_json())))
        fresh = make(name)
        following = [fresh.global_batch(place) for place in islice(cursors(fresh, restored), 3)]
        expected = [batch for _, batch in whole[index : index + 3]]
        assert following[: len(expected)] == expected


@pytest.mark.parametrize("name", PLANS)
def test_the_next_cursor_and_the_next_batch_of_the_plan_agree(name: str) -> None:
    plan = make(name)
    carried = plain = Cursor()
    for _ in range(60):
        assert plan.global_batch(plain) == plan.global_batch(carried)
        plain, carried = replace(plain, batch=plain.batch + 1), plan.next(carried)
    assert plan.canonical(plain) == carried


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("world_size", [2, 4])
def test_shares_of_a_micro_batch_are_all_its_rows_once(rows: int, world_size: int) -> None:
    ids = list(range(rows))
    shares = [Share.of(rows, rank=rank, world_size=world_size) for rank in range(world_size)]
    counted = [ids[share.rows] for share in shares if share.counted]
    assert sorted(chain.from_iterable(counted)) == ids
    assert max(map(len, counted)) - min(map(len, counted)) <= 1
    assert [ids[share.rows] for share in shares if not share.counted] == [[0]] * max(0, world_size - rows)


@pytest.mark.parametrize("name", ["tokens", "sorted tokens"])
def test_plan_cuts_by_padded_tokens(name: str) -> None:
    for _, batch in batches_of_epochs(make(name), 1):
        assert len(batch) * LENGTHS[batch].max() <= 200


def test_plan_gives_a_sample_over_the_budget_a_batch_of_its_own() -> None:
    plan = BatchPlan(seed=0, lengths=np.array([5, 500, 5]), batch_tokens=100)
    assert [1] in [batch for _, batch in batches_of_epochs(plan, 1)]


def test_plan_sorting_saves_padding_and_still_shuffles() -> None:
    def padded(plan: BatchPlan) -> int:
        return sum(len(batch) * int(LENGTHS[batch].max()) for _, batch in batches_of_epochs(plan, 1))

    ordered = make("sorted examples")
    assert padded(ordered) < 0.8 * padded(BatchPlan(seed=1, lengths=LENGTHS, batch_size=8))
    longest = [int(LENGTHS[batch].max()) for _, batch in batches_of_epochs(ordered, 1)]
    assert longest != sorted(longest)


def test_plan_sorted_windows_hold_whole_batches() -> None:
    sizes = [len(batch) for _, batch in batches_of_epochs(make("sorted examples"), 1)]
    assert sorted(sizes)[1:] == [8] * (len(sizes) - 1)


def test_plan_orders_differ_between_seeds_and_epochs() -> None:
    plan, other = make("examples"), make("examples", seed=2)
    assert plan.global_batch(Cursor(0)) != other.global_batch(Cursor(0))
    assert plan.global_batch(Cursor(0)) != plan.global_batch(Cursor(1))
    assert plan.global_batch(Cursor(0)) == make("examples").global_batch(Cursor(0))


def test_plan_resumes_far_away_without_walking_there() -> None:
    plan = BatchPlan(seed=0, num_samples=10**12, batch_size=4)
    cursor = plan.canonical(Cursor(0, 0, 10**15))
    assert cursor.epoch == 4000
    assert len(plan.global_batch(cursor)) == 4


@given(num_samples=st.integers(1, 200), batch_size=st.integers(1, 50), seed=st.integers(0, 9))
def test_plan_epoch_is_exact_for_any_sizes(num_samples: int, batch_size: int, seed: int) -> None:
    plan = BatchPlan(seed=seed, num_samples=num_samples, batch_size=batch_size)
    batches = batches_of_epochs(plan, 1)
    assert len(batches) == -(-num_samples // batch_size)
    assert sorted(chain.from_iterable(batch for _, batch in batches)) == list(range(num_samples))


@pytest.mark.parametrize(
    "values", [{}, {"epoch": 0, "window": 0, "batch": -1}, {"epoch": 0, "window": 0, "batch": "1"}]
)
def test_cursor_refuses_invalid_positions(values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="data position"):
        Cursor.from_json(values)


def test_plan_refuses_contradictions() -> None:
    with pytest.raises(AssertionError, match="batch_size or batch_tokens"):
        BatchPlan(seed=0, num_samples=3)
    with pytest.raises(AssertionError, match="needs lengths"):
        BatchPlan(seed=0, num_samples=3, batch_tokens=8)
    with pytest.raises(InputError, match="0 samples"):
        BatchPlan(seed=0, num_samples=0, batch_size=1)


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_prefetcher_keeps_the_order_and_ends() -> None:
    with closing(Prefetcher(iter(range(100)), depth=3)) as prefetcher:
        assert list(prefetcher) == list(range(100))
        assert next(prefetcher, None) is None


def test_prefetcher_is_bounded() -> None:
    made: list[int] = []
    third = threading.Event()

    def source() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            if number == 2:
                third.set()
            yield number

    with closing(Prefetcher(source(), depth=2)):
        assert third.wait(10)
        assert len(made) == 3  # two finished, one in preparation


def test_prefetcher_raises_the_sources_error_in_its_place() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise RuntimeError("broken source")

    with closing(Prefetcher(source())) as prefetcher:
        assert next(prefetcher) == 1
        with pytest.raises(RuntimeError, match="broken source"):
            next(prefetcher)
        assert next(prefetcher, None) is None


def test_prefetcher_closes_cleanly_and_runs_the_sources_cleanup() -> None:
    cleaned = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from iter(int, 1)
        finally:
            cleaned.set()

    prefetcher = Prefetcher(source())
    next(prefetcher)
    prefetcher.close()
    prefetcher.close()
    assert cleaned.is_set()
    assert not prefetch_threads()


def test_prefetcher_that_is_dropped_ends_its_thread() -> None:
    prefetcher = Prefetcher(iter(int, 1))
    next(prefetcher)
    (thread,) = prefetch_threads()
    del prefetcher
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


# -- batches and padding -----------------------------------------------------------------------------------------------


def test_batch_counts_real_tokens_once_on_the_host() -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert Batch(input_ids=ids).num_tokens == 6
    assert Batch(input_ids=ids, attention_mask=mask).num_tokens == 5
    assert Batch(input_ids=ids, decoder_input_ids=ids, decoder_attention_mask=mask).num_tokens == 11
    assert Batch(pixel_values=torch.zeros(4, 3, 2, 2)).num_tokens == 4
    assert Batch(input_ids=ids, attention_mask=mask, num_tokens=7).to("cpu").num_tokens == 7


def test_labels_are_counted_before_a_batch_leaves_the_host() -> None:
    ids = torch.tensor([[1, -100, 2], [-100, -100, 3]])
    assert Batch(labels=ids).to("cpu").num_labels is None
    assert Batch(labels=ids).to("meta").num_labels == Batch(labels=ids).counted().num_labels == 3
    assert Batch(labels=ids.float()).counted().num_labels is None


def test_model_inputs_are_the_tensors_that_are_set_without_labels() -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    batch = Batch(input_ids=ids, labels=ids, position_ids=ids)
    assert set(batch.model_inputs()) == {"input_ids", "position_ids"}


def test_batch_moves_every_tensor_and_is_frozen() -> None:
    batch = Batch(input_ids=torch.zeros(1, 2, dtype=torch.long), labels=torch.zeros(1, 2, dtype=torch.long))
    moved = batch.to("meta")
    assert moved.input_ids is not None and moved.input_ids.device.type == "meta"
    assert moved.labels is not None and moved.labels.device.type == "meta"
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.labels = None  # type: ignore[misc]


ROWS = [np.array([1, 2, 3]), np.array([4]), np.array([5, 6])]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    side=st.sampled_from(["right", "left", "random"]),
    pad_to=st.sampled_from(["longest", "max"]),
    seed=st.integers(0, 99),
)
def test_padding_keeps_every_row_whole_and_masks_exactly_the_rest(
    lengths: list[int], side: str, pad_to: str, seed: int
) -> None:
    rows = [np.arange(1, length + 1) for length in lengths]
    rng = np.random.default_rng(seed)
    layout = pad_layout(lengths, side=side, pad_to=pad_to, max_len=9, rng=rng)  # type: ignore[arg-type]
    ids, mask = layout.fill(rows, 0), layout.mask()
    assert ids.shape == (len(rows), 9 if pad_to == "max" else max(lengths))
    mask = np.ones_like(ids, dtype=bool) if mask is None else mask
    assert ((ids != 0) == mask).all()
    for row, padded, kept in zip(rows, ids, mask, strict=True):
        assert (padded[kept] == row).all()
        places = np.flatnonzero(kept)
        assert (np.diff(places) == 1).all()
        if side == "right":
            assert places[0] == 0
        if side == "left":
            assert places[-1] == len(padded) - 1


def test_padding_mask_is_none_when_nothing_is_padded() -> None:
    assert pad_layout([2, 2]).mask() is None
    assert pad_layout([2], pad_to="max", max_len=3).mask() is not None


def test_ids_and_labels_of_an_example_are_padded_equally() -> None:
    layout = pad_layout([3, 1, 2], side="random", pad_to="max", max_len=8, rng=np.random.default_rng(3))
    ids, labels = layout.fill(ROWS, 0), layout.fill(ROWS, -100)
    assert ((ids == 0) == (labels == -100)).all()


def test_padding_random_is_a_function_of_its_generator() -> None:
    def starts(seed: int) -> list[int]:
        rng = np.random.default_rng(seed)
        return pad_layout([1] * 20, side="random", pad_to="max", max_len=9, rng=rng).starts.tolist()

    assert starts(1) == starts(1) != starts(2)
    assert len(set(starts(1))) > 3


def test_padding_refuses_rows_over_the_maximum() -> None:
    with pytest.raises(AssertionError, match=r"3 tokens.*maximum of 2"):
        pad_layout([3, 1, 2], max_len=2)


def test_widths_are_rounded_up_where_something_is_padded_and_room_is_left() -> None:
    assert pad_layout([3, 5], multiple=8).width == 8
    assert pad_layout([9, 5], multiple=8, max_len=12).width == 12
    equal = pad_layout([5, 5], multiple=8)
    assert equal.width == 5 and equal.mask() is None
