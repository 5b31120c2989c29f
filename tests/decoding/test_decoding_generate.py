"""The decoding engine on scripted models: prompts, samples, context, stop rules, stop tokens."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.decoding.beam_reference import ScriptedStepper, random_rule
from tests.decoding.uncached import uncached_generate
from tformer.decoding.beam_search import beam_search
from tformer.decoding.generate import generate
from tformer.decoding.settings import BeamSettings, GenerationSettings
from tformer.recipe.sections import Generation
from tformer.support.errors import InputError, TformerError

VOCAB = 6
BOTH = pytest.mark.parametrize("engine", [generate, uncached_generate], ids=["cached", "uncached"])


def greedy(**changes):
    return GenerationSettings(**{"temperature": 0.0, "max_new_tokens": 5, **changes})


def next_number(seen):
    """Counts up modulo the vocabulary, whatever came before the last token."""
    return [5.0 if token == (seen[-1] + 1) % VOCAB else 0.0 for token in range(VOCAB)]


def flat(seen):
    return [0.0] * VOCAB


def ids(results):
    return [[completion.ids for completion in completions] for completions in results]


@BOTH
def test_greedy_follows_the_most_probable_token(scripted, engine):
    results = engine(scripted(next_number), [[0], [3, 4]], greedy())
    assert ids(results) == [[(1, 2, 3, 4, 5)], [(5, 0, 1, 2, 3)]]
    assert [r[0].finish_reason for r in results] == ["length", "length"]


@BOTH
def test_eos_ends_a_completion_and_is_its_last_id(scripted, engine):
    results = engine(scripted(next_number), [[0], [2], [3]], greedy(eos_id=4))
    assert ids(results) == [[(1, 2, 3, 4)], [(3, 4)], [(4,)]]
    assert {r[0].finish_reason for r in results} == {"eos"}


@BOTH
def test_repetition_penalty_counts_prompt_and_completion(scripted, engine):
    # Logits 3, 2, 1 for tokens 0, 1, 2: with penalty 4 a used token falls below the unused ones.
    def rule(seen):
        return [3.0, 2.0, 1.0, 0.0, -9.0, -9.0]

    [[completion]] = engine(scripted(rule), [[1]], greedy(repetition_penalty=4.0, max_new_tokens=3))
    assert completion.ids == (0, 2, 0)  # 3 beats 2/4 and 1; then 1 beats 3/4; then 3/4 beats 2/4 and 1/4


@BOTH
def test_no_ngram_is_written_twice(scripted, engine):
    settings = GenerationSettings(max_new_tokens=20, no_repeat_ngram=2, seed=5)
    [[completion]] = engine(scripted(flat), [[0, 1, 2]], settings)
    written = [0, 1, 2, *completion.ids]
    pairs = list(itertools.pairwise(written))
    assert len(pairs) == len(set(pairs))


@BOTH
def test_top_k_one_is_greedy(scripted, engine):
    settings = GenerationSettings(max_new_tokens=5, top_k=1, temperature=3.0)
    assert ids(engine(scripted(next_number), [[0]], settings)) == [[(1, 2, 3, 4, 5)]]


def test_logprobs_are_the_models_own_before_any_setting(scripted):
    def rule(seen):
        return [2.0, 1.0, 0.0, 0.0, 0.0, 0.0]

    settings = greedy(logprobs=True, max_new_tokens=3, repetition_penalty=3.0)
    [[completion]] = generate(scripted(rule), [[5]], settings)
    expected = torch.tensor(rule([])).log_softmax(-1)
    assert completion.ids == (0, 1, 0)
    assert completion.logprobs == pytest.approx([float(expected[token]) for token in completion.ids], abs=1e-6)
    assert generate(scripted(rule), [[5]], greedy())[0][0].logprobs is None


# --- texts ----------------------------------------------------------------------------------------------------------


PIECES = [b"", b"a", b"b", b"ab", b"END", b"E", b"ND", "é".encode()[:1], "é".encode()[1:], b"\n"]


def completion_of(spelling, bytes_tokenizer, written, *, on_token=None, **changes):
    tokenizer = bytes_tokenizer(PIECES, eos=0)
    model = spelling(written, prompt_length=1, vocab_size=len(PIECES))
    settings = greedy(**{"max_new_tokens": len(written), "eos_id": 0, **changes})
    [[completion]] = generate(model, [[1]], settings, tokenizer=tokenizer, on_token=on_token)
    return completion


def test_text_is_the_completion_alone(spelling, bytes_tokenizer):
    assert completion_of(spelling, bytes_tokenizer, [3, 2, 9, 1]).text == "abb\na"


def test_eos_has_no_text(spelling, bytes_tokenizer):
    completion = completion_of(spelling, bytes_tokenizer, [1, 0, 2])
    assert (completion.text, completion.ids, completion.finish_reason) == ("a", (1, 0), "eos")


def test_a_stop_text_inside_one_token_cuts_the_text_before_it(spelling, bytes_tokenizer):
    completion = completion_of(spelling, bytes_tokenizer, [1, 3, 1], stop_texts=("b",))
    assert (completion.text, completion.ids, completion.finish_reason) == ("aa", (1, 3), "stop")


def test_a_stop_text_may_straddle_tokens(spelling, bytes_tokenizer):
    completion = completion_of(spelling, bytes_tokenizer, [1, 5, 6, 1], stop_texts=("aEND",))
    assert (completion.text, completion.finish_reason) == ("", "stop")


def test_a_stop_text_does_not_reach_into_the_prompt(spelling, bytes_tokenizer):
    completion = completion_of(spelling, bytes_tokenizer, [2, 1], stop_texts=("ab",))
    assert (completion.text, completion.finish_reason) == ("ba", "length")


def test_the_start_of_a_stop_text_that_does_not_come_is_kept(spelling, bytes_tokenizer):
    completion = completion_of(spelling, bytes_tokenizer, [1, 5, 1, 5], stop_texts=("END",))
    assert (completion.text, completion.finish_reason) == ("aEaE", "length")


def test_streamed_pieces_add_up_to_the_text_and_never_show_a_stop_text(spelling, bytes_tokenizer):
    for written, stops in (([1, 5, 6, 1], ("END",)), ([7, 8, 5, 1, 7], ("END",)), ([7, 8, 1, 7], ()), ([4], ("D",))):
        seen = []
        completion = completion_of(
            spelling,
            bytes_tokenizer,
            written,
            stop_texts=stops,
            on_token=lambda *event: seen.append(event),  # noqa: B023
        )
        assert "".join(piece for *_, piece in seen) == completion.text
        assert tuple(token for _, _, token, _ in seen) == completion.ids
        assert {event[:2] for event in seen} == {(0, 0)}


def test_half_a_character_is_held_back(spelling, bytes_tokenizer):
    seen = []
    completion_of(spelling, bytes_tokenizer, [7, 8, 1], on_token=lambda *event: seen.append(event[3]))
    assert seen == ["", "é", "a"]


def test_stop_texts_need_a_tokenizer(scripted):
    with pytest.raises(ValueError, match="tokenizer"):
        generate(scripted(flat), [[0]], greedy(stop_texts=("x",)))


def test_ids_beyond_the_tokenizer_are_never_chosen(scripted, bytes_tokenizer):
    def rule(seen):
        return [0.0, 1.0, 9.0]

    [[completion]] = generate(scripted(rule), [[0]], greedy(), tokenizer=bytes_tokenizer([b"a", b"b"]))
    assert completion.text == "bbbbb"


# --- batches and samples --------------------------------------------------------------------------------------------


def history_rule(seen):
    """Logits that depend on every token seen."""
    return torch.randn(
        VOCAB, generator=torch.Generator().manual_seed(sum((i + 1) * t for i, t in enumerate(seen)))
    ).tolist()


PROMPTS = [[1], [2, 3, 4, 5, 0, 1], [3, 3], [5, 4, 3, 2]]


@pytest.mark.parametrize(
    "changes", [{}, {"top_k": 3}, {"no_repeat_ngram": 3, "repetition_penalty": 1.3}, {"eos_id": 2}]
)
def test_batched_equals_one_by_one_equals_uncached(scripted, changes):
    settings = GenerationSettings(max_new_tokens=12, num_samples=3, seed=9, **changes)
    model = scripted(history_rule, max_seq_len=64)
    batched = generate(model, PROMPTS, settings)
    alone = [generate(model, [prompt], settings, first_row=row)[0] for row, prompt in enumerate(PROMPTS)]
    assert batched == alone == uncached_generate(model, PROMPTS, settings)


def test_samples_of_a_prompt_differ_and_come_from_one_prefill(scripted):
    model = scripted(flat)
    settings = GenerationSettings(max_new_tokens=10, num_samples=4)
    results = generate(model, [[1, 2, 3], [4, 5]], settings)
    assert model.calls == [(2, 3)] + [(8, 1)] * 9
    assert all(len({completion.ids for completion in completions}) == 4 for completions in results)


def test_seeds_reproduce_and_differ(scripted):
    def run(seed):
        return ids(generate(scripted(flat), PROMPTS, GenerationSettings(max_new_tokens=10, seed=seed)))

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_finished_rows_leave_the_batch(scripted):
    model = scripted(next_number)
    generate(model, [[0], [3], [2]], greedy(eos_id=4, max_new_tokens=9))
    assert model.calls == [(3, 1), (2, 1), (1, 1), (1, 1)]


# --- the context ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_seq_len", [1, 2, 5, 8])
def test_sliding_windows_do_not_depend_on_the_batch(scripted, max_seq_len):
    settings = GenerationSettings(max_new_tokens=30, num_samples=2)
    model = scripted(history_rule, max_seq_len=max_seq_len)
    batched = generate(model, PROMPTS, settings)
    alone = [generate(model, [prompt], settings, first_row=row)[0] for row, prompt in enumerate(PROMPTS)]
    assert batched == alone == uncached_generate(model, PROMPTS, settings)
    assert all(len(c.ids) == 30 and c.finish_reason == "length" for completions in batched for c in completions)


def test_a_full_context_keeps_its_last_half(scripted):
    windows = []

    def rule(seen):
        windows.append(list(seen))
        return next_number(seen)

    generate(scripted(rule, max_seq_len=4), [[0]], greedy(max_new_tokens=6))
    assert windows == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [3, 4], [3, 4, 5]]


def test_a_prompt_longer_than_the_context_slides_or_is_an_error(scripted):
    windows = []

    def rule(seen):
        windows.append(list(seen))
        return next_number(seen)

    model = scripted(rule, max_seq_len=4)
    generate(model, [[0, 1, 2, 3, 4]], greedy(max_new_tokens=1))
    assert windows == [[3, 4]]
    with pytest.raises(InputError, match=r"5 tokens.* 4") as raised:
        generate(model, [[0, 1, 2, 3, 4]], greedy(context="error"))
    assert raised.value.exit_code == 2


@BOTH
def test_without_sliding_a_completion_ends_with_the_context(scripted, engine):
    model = scripted(next_number, max_seq_len=4)
    results = engine(model, [[0], [0, 1, 2]], greedy(context="error", max_new_tokens=9))
    assert ids(results) == [[(1, 2, 3, 4)], [(3, 4)]]
    assert [r[0].finish_reason for r in results] == ["context", "context"]


def test_the_cache_is_no_larger_than_the_request(scripted):
    sizes = []

    class Counting(scripted):
        def new_cache(self, batch_size, capacity, **rest):
            sizes.append(capacity)
            return super().new_cache(batch_size, capacity, **rest)

    generate(Counting(next_number, max_seq_len=64), [[0, 1]], greedy(max_new_tokens=7))
    generate(Counting(next_number, max_seq_len=8), [[0, 1]], greedy(max_new_tokens=9))
    assert sizes == [9, 8, 6]


# --- the rest -------------------------------------------------------------------------------------------------------


def test_should_stop_is_polled_before_every_step(scripted, bytes_tokenizer):
    polls = iter([False, False, True])
    tokenizer = bytes_tokenizer([b"0", b"1", b"2", b"3", b"4", b"5"])
    results = generate(
        scripted(next_number), [[0], [3]], greedy(), tokenizer=tokenizer, should_stop=lambda: next(polls)
    )
    assert [(r[0].text, r[0].finish_reason) for r in results] == [("12", "interrupted"), ("45", "interrupted")]


def test_a_prompt_without_tokens_is_an_error(scripted):
    with pytest.raises(InputError, match="prompt 2 has no tokens"):
        generate(scripted(flat), [[1], []], greedy())


def test_no_prompts_give_no_completions(scripted):
    assert generate(scripted(flat), [], greedy()) == []


def test_the_models_mode_comes_back(scripted):
    for training in (True, False):
        model = scripted(next_number).train(training)
        generate(model, [[0]], greedy())
        assert model.training is training


def test_logits_that_are_not_numbers_are_an_error(scripted):
    with pytest.raises(TformerError, match="NaN"):
        generate(scripted(lambda seen: [float("nan")] * VOCAB), [[0]], greedy())


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"min_p": 1.0},
        {"repetition_penalty": 0.0},
        {"no_repeat_ngram": -1},
        {"stop_texts": ("",)},
        {"seed": -1},
        {"num_samples": 0},
        {"num_samples": 10**11},
        {"context": "wrap"},
    ],
)
def test_wrong_settings_name_themselves(wrong):
    [(name, value)] = wrong.items()
    with pytest.raises(InputError, match=name.removesuffix("_texts")) as raised:
        GenerationSettings(**wrong)
    assert str(value) in raised.value.message


def test_settings_come_from_the_recipe_and_flags_override_them():
    from tformer.recipe.sections import Generation

    generation = Generation(temperature=0.7, top_k=5, stop=("x",))
    settings = GenerationSettings.from_recipe(generation, top_k=None, top_p=0.5, seed=3)
    assert (settings.temperature, settings.top_k, settings.top_p, settings.seed) == (0.7, 5, 0.5, 3)
    assert settings.stop_texts == ("x",)


@pytest.mark.parametrize("engine", [generate, uncached_generate], ids=["cached", "uncached"])
def test_every_stop_token_ends_a_completion(scripted, engine):
    settings = GenerationSettings(temperature=0.0, max_new_tokens=9, eos_id=5, stop_tokens=(2, 4))
    results = engine(scripted(next_number), [[0], [2], [4]], settings)
    assert [one[0].ids for one in results] == [(1, 2), (3, 4), (5,)]
    assert {one[0].finish_reason for one in results} == {"eos"}


def test_none_comes_before_the_least_length_and_none_counts_as_repeated(scripted):
    settings = GenerationSettings(temperature=0.0, max_new_tokens=9, stop_tokens=(2, 4), min_new_tokens=3)
    [[one]] = generate(scripted(lambda seen: [3, 0, 9, 2, 8, 1]), [[2, 4]], settings)
    assert one.ids == (0, 0, 0, 2)
    settings = GenerationSettings(temperature=0.0, max_new_tokens=9, stop_tokens=(2, 99), repetition_penalty=9.0)
    [[one]] = generate(scripted(lambda seen: [3, 0, 4, 0, 0, 0]), [[2]], settings)
    assert one.ids == (2,)


@pytest.mark.parametrize("seed", range(5))
def test_every_stop_token_ends_a_hypothesis_and_counts_in_it(seed):
    rule, ends = random_rule(seed, vocab_size=VOCAB), {1, 3, 4}
    settings = BeamSettings(beam_size=4, max_new_tokens=4, eos_id=1, stop_tokens=(3, 4), length_penalty=0.0)
    [found] = beam_search(ScriptedStepper([rule]), settings)
    for one in found:
        assert not set(one.ids[:-1]) & ends
        assert one.finish_reason == ("eos" if one.ids[-1] in ends else "length")
        logprob = sum(rule(one.ids[:n])[token] for n, token in enumerate(one.ids))
        assert math.isclose(one.logprob, logprob, abs_tol=1e-5)
    assert {one.ids[-1] for one in found} & ends


@pytest.mark.parametrize("seed", range(3))
def test_a_full_beam_goes_on_although_all_ends_rank_first(seed):
    rule = random_rule(seed, vocab_size=VOCAB)
    settings = BeamSettings(beam_size=2, max_new_tokens=3, min_new_tokens=2, eos_id=1, stop_tokens=(0, 2, 3))
    [found] = beam_search(ScriptedStepper([rule]), settings)
    assert len(found) >= 2 and all(len(one.ids) == 3 and set(one.ids[:2]) <= {4, 5} for one in found)


def test_the_recipe_says_which():
    recipe = Generation(stop_tokens=(7, 8))
    assert GenerationSettings.from_recipe(recipe, eos_id=3).ends == (3, 7, 8)
    assert BeamSettings.from_recipe(recipe, eos_id=3).ends == (3, 7, 8)
    assert GenerationSettings.from_recipe(recipe).ends == (7, 8)
    assert BeamSettings().ends == ()


@BOTH
def test_samples_come_from_the_smallest_set_that_reaches_p(scripted, engine) -> None:
    """Of 0.5, 0.3, 0.1 and 0.1 two tokens reach 0.8: with and without a cache, drawn by the same random numbers."""
    model = scripted(lambda seen: [math.log(p) for p in (0.1, 0.5, 0.1, 0.3)])
    settings = GenerationSettings(max_new_tokens=40, top_p=0.8, num_samples=5, seed=1)
    [samples] = engine(model, [[1]], settings)
    assert {token for one in samples for token in one.ids} == {1, 3}
    assert [one.ids for one in samples] == [one.ids for one in generate(model, [[1]], settings)[0]]
