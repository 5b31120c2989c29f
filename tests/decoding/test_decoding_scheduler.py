"""Continuous batching: what a request writes depends on nothing else in the batch."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.decoding.random_models import POSITIONS, VOCAB, random_model, tiny_model
from tests.quick import first_is_quick
from tformer.decoding import scheduler as scheduling
from tformer.decoding.generate import generate
from tformer.decoding.inference import prepare_inference
from tformer.decoding.scheduler import Request, Scheduler, TokenEvent, no_scheduler
from tformer.decoding.settings import Generated, GenerationSettings
from tformer.kernels.functions import find
from tformer.kernels.tape import Tape
from tformer.model import Transformer
from tformer.nn.row_cache import RowCache
from tformer.support.errors import InputError, NotFiniteError

Bytes = Callable[..., Any]
GREEDY = GenerationSettings(max_new_tokens=12, temperature=0.0, logprobs=True)
MARGIN = 1e-4  # of log-probabilities: rounding in fp32, whatever the number of rows


def ids_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(VOCAB), k=length)


def run(scheduler: Scheduler, steps: int = 10_000) -> int:
    """The steps until there is nothing to do."""
    return next(step for step in range(steps) if not scheduler.step())


def texts(request: Request) -> list[Generated]:
    return request.result.result(timeout=0)


def alone(model: Transformer, prompt: Sequence[int], settings: GenerationSettings, **options: Any) -> list[Generated]:
    [found] = generate(model, [prompt], settings, **options)
    return found


def assert_same(found: Sequence[Generated], expected: Sequence[Generated]) -> None:
    assert [(each.ids, each.text, each.finish_reason) for each in found] == [
        (each.ids, each.text, each.finish_reason) for each in expected
    ]
    for one, other in zip(found, expected, strict=True):
        assert (one.logprobs is None) == (other.logprobs is None)
        assert one.logprobs == pytest.approx(other.logprobs, abs=MARGIN)


def random_settings(draw: random.Random, seed: int) -> GenerationSettings:
    return GenerationSettings(
        max_new_tokens=draw.randrange(1, 40),
        min_new_tokens=draw.choice([0, 1]),
        temperature=draw.choice([0.0, 0.7, 1.3]),
        top_k=draw.choice([0, 5]),
        top_p=draw.choice([1.0, 0.9]),
        repetition_penalty=draw.choice([1.0, 1.3]),
        no_repeat_ngram=draw.choice([0, 3]),
        eos_id=draw.choice([None, 3]),
        num_samples=draw.choice([1, 1, 3]),
        context=draw.choice(["slide", "error"]),
        logprobs=True,
        seed=seed,
    )


KERNELS = ["learned", "rope", *(kind for kind in POSITIONS if kind not in ("learned", "rope"))]


@first_is_quick(
    ("positions", "prepared"),
    [*((kind, False) for kind in POSITIONS), *((kind, True) for kind in KERNELS)],
    quick=len(POSITIONS) + 2,
)
def test_tokens_do_not_depend_on_what_else_is_in_the_batch(positions: str, prepared: bool) -> None:
    """Random arrivals, lengths, settings and cancels, with contexts that slide, over every kind of positions."""
    model, draw = tiny_model(positions), random.Random(f"{positions} {prepared}")
    if prepared:
        prepare_inference(model, torch.float32, rows=4)
    wanted = [(ids_of(draw.randrange(1, 48), seed), random_settings(draw, seed)) for seed in range(10)]
    chunk, prefix_bytes = draw.choice([4, 16, 64]), draw.choice([0, 20_000, 2**20])
    scheduler = Scheduler(model, max_rows=3, chunk=chunk, prefix_bytes=prefix_bytes)
    requests: list[Request] = []
    while len(requests) < len(wanted) or scheduler.num_rows or scheduler.num_waiting:
        if len(requests) < len(wanted) and draw.random() < 0.4:
            prompt, settings = wanted[len(requests)]
            requests.append(scheduler.submit(prompt, settings, row=len(requests)))
        if requests and draw.random() < 0.03:
            draw.choice(requests).cancel()
        scheduler.step()
    assert sum(not request.is_cancelled for request in requests) >= 5
    for row, (request, (prompt, settings)) in enumerate(zip(requests, wanted, strict=True)):
        expected = alone(model, prompt, settings, first_row=row)
        for found, whole in zip(texts(request), expected, strict=True):
            if found.finish_reason == "interrupted":
                assert request.is_cancelled and found.ids == whole.ids[: len(found.ids)]
            else:
                assert_same([found], [whole])


def test_grouped_heads_and_other_norms_are_scheduled_too() -> None:
    stack = {"num_kv_heads": 2, "positions": {"kind": "rope"}, "norm": {"kind": "rmsnorm"}}
    model = random_model(stack, encoder=False, vocab_size=VOCAB, max_seq_len=48)
    scheduler = Scheduler(model)
    requests = [scheduler.submit(ids_of(length), GREEDY) for length in (3, 20, 9)]
    run(scheduler)
    for request, length in zip(requests, (3, 20, 9), strict=True):
        assert_same(texts(request), alone(model, ids_of(length), GREEDY))


def test_answers_come_in_order_as_from_one_batch() -> None:
    model = tiny_model()
    prompts, settings = [ids_of(length) for length in (30, 2, 17, 5, 11)], GenerationSettings(max_new_tokens=9, seed=5)
    found = list(Scheduler(model, max_rows=2).answers(prompts, settings, first_row=7))
    for each, expected in zip(found, generate(model, prompts, settings, first_row=7), strict=True):
        assert_same(each, expected)


@pytest.mark.skipif(find() is None, reason="no compiler for kernels here")
def test_recorded_steps_are_repeated_while_rows_of_different_lengths_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: list[int] = []
    play = Tape.__call__
    monkeypatch.setattr(Tape, "__call__", lambda self, x, slots: (rows.append(len(x)), play(self, x, slots))[1])
    model = tiny_model("learned")
    prepare_inference(model, torch.bfloat16, rows=4)
    scheduler = Scheduler(model)
    requests = [scheduler.submit(ids_of(length), GREEDY) for length in (4, 9, 13)]
    scheduler.step()
    late = scheduler.submit(ids_of(6), GenerationSettings(max_new_tokens=20, temperature=0.0))
    steps = run(scheduler)
    assert [len(texts(each)[0].ids) for each in (*requests, late)] == [12, 12, 12, 20]
    assert len(rows) >= steps - 4 and {1, 4} <= set(rows)  # each number of rows is recorded once


# --- prompts ----------------------------------------------------------------------------------------------------------


def fed(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Shapes of the inputs that the model reads from now on."""
    shapes: list[tuple[int, int]] = []
    forward = type(model).forward

    def noted(self: Transformer, input_ids: Any = None, **options: Any) -> Any:
        shapes.append(tuple(input_ids.shape))
        return forward(self, input_ids, **options)

    monkeypatch.setattr(type(model), "forward", noted)
    return shapes


def test_a_long_prompt_enters_in_chunks_between_decoding_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    scheduler = Scheduler(model, chunk=8)
    first = scheduler.submit([1], GREEDY)
    scheduler.step()
    long = scheduler.submit(ids_of(40), GREEDY)
    shapes = fed(model, monkeypatch)
    for _ in range(5):
        scheduler.step()
    assert shapes == [(1, 8), (1, 1)] * 4 + [(1, 8), (2, 1)]
    run(scheduler)
    assert_same(texts(first), alone(model, [1], GREEDY))
    assert_same(texts(long), alone(model, ids_of(40), GREEDY))


def test_a_short_prompt_does_not_wait_for_a_long_one_nor_a_long_one_for_many_short_ones() -> None:
    scheduler, settings = Scheduler(tiny_model(), chunk=8), GenerationSettings(max_new_tokens=2, temperature=0.0)
    long = scheduler.submit(ids_of(40), settings)
    short = scheduler.submit(ids_of(4), settings)
    scheduler.step()
    assert short.result.done() and not long.result.done()
    for step in range(20):
        scheduler.submit(ids_of(8, seed=step), settings)
        scheduler.step()
        if long.result.done():
            break
    assert step <= 10  # half of each chunk is the oldest prompt's


def test_rows_of_a_client_are_given_first_come_first_served() -> None:
    scheduler, ended = Scheduler(tiny_model(), max_rows=2), list[int]()
    for row in range(6):
        settings = GenerationSettings(max_new_tokens=3, temperature=0.0, num_samples=1 + row % 2)
        request = scheduler.submit([row + 1], settings, row=row, client="one")
        request.result.add_done_callback(lambda _, row=row: ended.append(row))
    assert scheduler.num_waiting == 6
    while scheduler.step():
        assert scheduler.num_rows <= 2
    assert ended == list(range(6))


def test_a_request_with_more_samples_than_rows_is_written_in_turns() -> None:
    model, settings = tiny_model(), GenerationSettings(max_new_tokens=4, num_samples=5, seed=2)
    scheduler = Scheduler(model, max_rows=2)
    first, second = scheduler.submit([1, 2], settings), scheduler.submit([3], GREEDY)
    while scheduler.step():
        assert len(scheduler._rows) <= 2
    assert_same(texts(first), alone(model, [1, 2], settings))
    assert_same(texts(second), alone(model, [3], GREEDY))


@pytest.mark.parametrize("prompts", [1, 64], ids=["of one prompt", "of many prompts"])
def test_a_small_request_does_not_wait_for_many_samples(prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside one other client a request has half of the time: its steps cost at most twice what they cost alone."""
    model, many = tiny_model(), GenerationSettings(max_new_tokens=16, num_samples=64 // prompts, seed=4)
    scheduler = Scheduler(model, max_rows=32, chunk=1000)
    texts_read = [[7, row % 5] for row in range(prompts)]
    large = [scheduler.submit(ids, many, row=row, client="large") for row, ids in enumerate(texts_read)]
    for _ in range(3):
        scheduler.step()
    assert len(scheduler._rows) == 32  # it is alone: all rows are its own
    shapes = fed(model, monkeypatch)
    small = scheduler.submit([3], GenerationSettings(max_new_tokens=5, temperature=0.0))
    steps = next(step for step in range(100) if scheduler.step() and small.result.done()) + 1
    assert steps <= 5
    costs = [scheduling.STEP_ROWS + rows for rows, _ in shapes[1:]]
    assert max(costs) <= 2 * (scheduling.STEP_ROWS + 1)
    for _ in range(2):
        scheduler.step()
    assert shapes[-1] == (32, 1)  # what was parked goes on
    run(scheduler)
    for request, expected in zip(large, generate(model, texts_read, many), strict=True):
        assert_same(texts(request), expected)


def test_every_client_gets_a_token_in_every_step_and_its_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random clients, samples and arrivals, as many clients as rows at most."""
    monkeypatch.setattr(scheduling, "STEP_ROWS", 1)
    draw, model = random.Random(3), tiny_model()
    shapes = fed(model, monkeypatch)
    scheduler, told = Scheduler(model, max_rows=6), list[str]()
    left = {name: draw.choice([1, 1, 2, 5, 9]) for name in "abcdef"}
    sizes = dict(left)
    unfinished = dict[str, int]()

    def submit(name: str) -> None:
        def tell(event: TokenEvent) -> None:
            told.append(name)
            unfinished[name] -= event.finish_reason is not None

        unfinished[name] = sizes[name]
        settings = GenerationSettings(max_new_tokens=draw.randrange(8, 30), num_samples=sizes[name], seed=1)
        scheduler.submit(ids_of(3, ord(name)), settings, on_token=tell, client=name)

    for _ in range(400):
        if left and draw.random() < 0.3:
            name, _ = left.popitem()
            submit(name)
        told.clear()
        active = {name: count for name, count in unfinished.items() if count > 0}
        scheduler.step()
        assert set(told) == set(active)
        if active:
            rows, _ = shapes[-1]
            assert rows <= 6 and 1 + rows <= len(active) * (1 + min(active.values()))
    assert not left and not any(unfinished.values())


@pytest.mark.parametrize("together", [False, True], ids=["in turn", "together"])
def test_a_common_prefix_is_computed_once(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    prompts = [[*ids_of(30), *ids_of(3, seed)] for seed in range(1, 5)]
    expected = [alone(model, prompt, GREEDY) for prompt in prompts]
    scheduler, shapes = Scheduler(model, chunk=16), fed(model, monkeypatch)
    requests = []
    for prompt in prompts:
        requests.append(scheduler.submit(prompt, GREEDY))
        if not together:
            run(scheduler)
    run(scheduler)
    assert sum(tokens for rows, tokens in shapes if rows == 1 and tokens > 1) <= 30 + 4 * 3
    for request, answers in zip(requests, expected, strict=True):
        assert_same(texts(request), answers)


def test_short_prompts_are_read_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    model, lengths = tiny_model("learned"), (4, 9, 2, 30)
    expected = [alone(model, ids_of(length), GREEDY) for length in lengths]
    scheduler, shapes = Scheduler(model, chunk=20), fed(model, monkeypatch)
    requests = [scheduler.submit(ids_of(length), GREEDY) for length in lengths]
    run(scheduler)
    assert shapes[0] == (1, 4 + 9 + 2)
    for request, answers in zip(requests, expected, strict=True):
        assert_same(texts(request), answers)


def test_a_chat_reads_its_new_turn_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    scheduler = Scheduler(model)
    first = scheduler.submit(ids_of(10), GREEDY)
    run(scheduler)
    turn = [*ids_of(10), *texts(first)[0].ids, 5, 6]
    expected = alone(model, turn, GREEDY)
    second, shapes = scheduler.submit(turn, GREEDY), fed(model, monkeypatch)
    run(scheduler)
    assert shapes[0] == (1, 3)  # the last token of the answer was chosen, not read
    assert_same(texts(second), expected)


def test_kept_prefixes_stay_within_their_memory() -> None:
    model = tiny_model()  # 2 layers, 24 numbers of keys and of values in fp32: 384 bytes a token
    scheduler = Scheduler(model, prefix_bytes=50 * 384)
    for seed in range(6):
        scheduler.submit(ids_of(20, seed), GREEDY)
        run(scheduler)
        assert 0 < sum(kept.num_read for kept in scheduler._kept) <= 50
    assert Scheduler(model, prefix_bytes=0)._most_kept == 0


def test_few_texts_are_kept_however_small_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "MOST_KEPT", 3)
    scheduler = Scheduler(tiny_model())
    for seed in range(6):
        scheduler.submit(ids_of(5, seed), GREEDY)
        run(scheduler)
    assert [kept.ids[:5] for kept in scheduler._kept] == [ids_of(5, seed) for seed in (3, 4, 5)]


# --- ends and mistakes ------------------------------------------------------------------------------------------------


def test_a_cancelled_request_frees_its_row_at_the_next_step() -> None:
    model = tiny_model()
    scheduler = Scheduler(model, max_rows=3)
    kept, dropped, waiting, reading = (scheduler.submit(ids_of(n), GREEDY) for n in (4, 6, 3, 5))
    for _ in range(3):
        scheduler.step()
    assert scheduler.num_rows == 3 and scheduler.num_waiting == 1
    dropped.cancel()
    reading.cancel()
    scheduler.step()
    assert scheduler.num_rows == 2 and scheduler.num_waiting == 0
    assert texts(reading)[0].ids == () and texts(reading)[0].finish_reason == "interrupted"
    [cut] = texts(dropped)
    assert cut.finish_reason == "interrupted" and cut.ids == alone(model, ids_of(6), GREEDY)[0].ids[:4]
    run(scheduler)
    for request, length in ((kept, 4), (waiting, 3)):
        assert_same(texts(request), alone(model, ids_of(length), GREEDY))


def test_a_callback_that_fails_ends_its_request_alone() -> None:
    model = tiny_model()
    scheduler = Scheduler(model)

    def fail(event: TokenEvent) -> None:
        if event.sample == 1:
            raise ConnectionError("gone")

    other = scheduler.submit([1, 2], GREEDY)
    bad = scheduler.submit([3], GenerationSettings(max_new_tokens=9, num_samples=3, seed=1), on_token=fail)
    more = scheduler.submit([4, 5, 6], GREEDY)
    run(scheduler)
    with pytest.raises(ConnectionError):
        texts(bad)
    assert_same(texts(other), alone(model, [1, 2], GREEDY))
    assert_same(texts(more), alone(model, [4, 5, 6], GREEDY))


def test_logits_that_are_not_numbers_end_their_request_alone() -> None:
    model = tiny_model()
    expected = alone(model, [1, 2], GREEDY), alone(model, [3, 1], GREEDY)
    model.embedding.weight.data[22] = torch.nan
    model.heads["lm"].weight = torch.nn.Parameter(model.embedding.weight.nan_to_num(0.0))
    scheduler = Scheduler(model)
    good, bad = scheduler.submit([1, 2], GREEDY), scheduler.submit([22, 2], GREEDY)
    scheduler.step()
    later = scheduler.submit([3, 1], GREEDY)
    run(scheduler)
    with pytest.raises(NotFiniteError):
        texts(bad)
    for request, answers in zip((good, later), expected, strict=True):
        assert texts(request)[0].finish_reason == answers[0].finish_reason == "length"


def test_a_step_that_fails_ends_the_rows_and_the_next_requests_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    scheduler = Scheduler(model)
    lost = scheduler.submit([1, 2], GREEDY)
    scheduler.step()
    with monkeypatch.context() as patch:
        patch.setattr(RowCache, "advance", lambda *_: (_ for _ in ()).throw(MemoryError("full")))
        scheduler.step()
    with pytest.raises(MemoryError):
        texts(lost)
    found = scheduler.submit([1, 2], GREEDY)
    run(scheduler)
    assert_same(texts(found), alone(model, [1, 2], GREEDY))


def test_wrong_prompts_are_refused_at_once() -> None:
    scheduler = Scheduler(tiny_model())
    with pytest.raises(InputError, match="prompt 1 has no tokens"):
        scheduler.submit([], GREEDY)
    with pytest.raises(InputError, match="49 tokens"):
        scheduler.submit(ids_of(49), GenerationSettings(context="error"))
    with pytest.raises(InputError, match="id 23, expected 0 to 22"):
        scheduler.submit([1, VOCAB], GREEDY)
    with pytest.raises(ValueError, match="stop texts need a tokenizer"):
        scheduler.submit([1], GenerationSettings(stop_texts=("a",)))
    assert scheduler.num_waiting == 0 and not scheduler.step()


def test_models_without_keys_and_values_of_every_token_are_refused() -> None:
    assert no_scheduler(tiny_model()) is None
    for model in (
        random_model({}, encoder=True, vocab_size=VOCAB, max_seq_len=16),
        tiny_model("learned", attention={"kind": "sliding_window", "window": 8}),
    ):
        with pytest.raises(ValueError, match="cannot be scheduled"):
            Scheduler(model)


# --- events and threads -----------------------------------------------------------------------------------------------


def test_events_tell_tokens_texts_log_probabilities_and_alternatives(bytes_tokenizer: Bytes) -> None:
    model, tokenizer = tiny_model(), bytes_tokenizer([bytes([97 + token]) for token in range(VOCAB)])
    settings = GenerationSettings(max_new_tokens=8, num_samples=2, seed=3, logprobs=True)
    events: list[TokenEvent] = []
    scheduler = Scheduler(model, tokenizer)
    request = scheduler.submit([1, 2, 3], settings, alternatives=4, on_token=events.append)
    run(scheduler)
    for sample, found in enumerate(texts(request)):
        own = [event for event in events if event.sample == sample]
        assert tuple(event.id for event in own) == found.ids
        assert tuple(event.logprob for event in own) == found.logprobs
        assert "".join(event.text for event in own) == found.text
        assert [event.finish_reason for event in own] == [None] * 7 + ["length"]
        for event in own:
            best = [logprob for _, logprob in event.alternatives]
            assert len(best) == 4 and best == sorted(best, reverse=True)
            assert event.logprob is not None and event.logprob <= best[0] + 1e-6
            assert dict(event.alternatives).get(event.id, event.logprob) == pytest.approx(event.logprob, abs=1e-5)


def test_stop_texts_and_suppressed_tokens_are_those_of_each_request(bytes_tokenizer: Bytes) -> None:
    model, tokenizer = tiny_model(), bytes_tokenizer([bytes([97 + token]) for token in range(VOCAB)])
    free = alone(model, [1, 2], GREEDY, tokenizer=tokenizer)[0]
    stopping = GenerationSettings(max_new_tokens=12, temperature=0.0, stop_texts=(free.text[3:5],))
    scheduler = Scheduler(model, tokenizer)
    plain, stopped = scheduler.submit([1, 2], GREEDY), scheduler.submit([1, 2], stopping)
    without = scheduler.submit([1, 2], GREEDY, suppressed=free.ids[:1])
    run(scheduler)
    assert_same(texts(plain), [free])
    assert texts(stopped)[0].finish_reason == "stop"
    assert_same(texts(stopped), alone(model, [1, 2], stopping, tokenizer=tokenizer))
    assert_same(texts(without), alone(model, [1, 2], GREEDY, tokenizer=tokenizer, suppressed=free.ids[:1]))


def test_requests_come_from_any_thread_and_one_owns_the_model() -> None:
    model, stopping = tiny_model(), threading.Event()
    scheduler = Scheduler(model, max_rows=3)

    def own() -> None:
        while not stopping.is_set():
            if not scheduler.step():
                stopping.wait(0.01)

    owner = threading.Thread(target=own)
    owner.start()
    found: dict[int, list[Generated]] = {}

    def client(seed: int) -> None:
        for length in (3, 11, 6):
            number = 100 * seed + length
            found[number] = scheduler.submit(ids_of(length, seed), GREEDY).result.result(timeout=60)

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(6)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    stopping.set()
    owner.join()
    for number, answers in found.items():
        assert_same(answers, alone(model, ids_of(number % 100, number // 100), GREEDY))
    assert len(found) == 18


def test_close_ends_what_was_begun() -> None:
    scheduler = Scheduler(tiny_model(), max_rows=1)
    begun, waiting = scheduler.submit([1], GREEDY), scheduler.submit([2], GREEDY)
    scheduler.step()
    scheduler.close()
    assert [texts(each)[0].finish_reason for each in (begun, waiting)] == ["interrupted"] * 2
    failed = scheduler.submit([1], GREEDY)
    scheduler.close(RuntimeError("the server stops"))
    with pytest.raises(RuntimeError, match="the server stops"):
        texts(failed)
    assert not scheduler.step()
