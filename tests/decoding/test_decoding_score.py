"""Force-decoding: log-probabilities, alignments, coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tformer.build import build_model
from tformer.decoding.score import score_continuations, score_targets
from tformer.recipe.model import Model
from tformer.support.errors import InputError
from tformer.workers.work import Work

VOCAB, START, CONTEXT = 23, 1, 24


def tiny_model(*, encoder: bool = True, positions: str = "sinusoidal"):
    torch.manual_seed(0)
    stack = {"num_heads": 2, "feedforward": {"d_ff": 16}, "positions": {"kind": positions}, "dropout": 0.3}
    section = Model(
        d_model=8,
        max_seq_len=CONTEXT,
        vocab_size=VOCAB,
        encoder={"num_layers": 1, **stack} if encoder else None,
        decoder={"num_layers": 2, **stack},
        heads=[{"kind": "lm"}],
        init={"std": 0.5},
    )
    return build_model(section)


def random_pairs(count: int = 9) -> tuple[list[list[int]], list[list[int]]]:
    draw = np.random.default_rng(1)
    sides = [[draw.integers(2, VOCAB, size=draw.integers(1, 15)).tolist() for _ in range(count)] for _ in range(2)]
    return sides[0], sides[1]


def plain_logprobs(model, source, context, target, vocab_size=None) -> list[float]:
    """One forward pass per target token."""
    found = []
    model.eval()
    with torch.no_grad():
        for place, token in enumerate(target):
            ids = torch.tensor([[*context, *target[:place]]])
            output = model(ids) if source is None else model(torch.tensor([source]), decoder_input_ids=ids)
            found.append(float(output.logits[0, -1, :vocab_size].log_softmax(-1)[token]))
    return found


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "t5_bias"])
def test_scores_equal_a_plain_loop_over_positions(positions):
    model = tiny_model(positions=positions)
    sources, targets = random_pairs()
    scores = score_targets(model, sources, targets, start_ids=[START, 4])
    for score, source, target in zip(scores, sources, targets, strict=True):
        assert score.logprobs == pytest.approx(plain_logprobs(model, source, [START, 4], target), abs=1e-5)
        assert score.logprob == pytest.approx(sum(score.logprobs), abs=1e-6) and score.alignment is None


def test_a_source_and_a_target_may_fill_the_context():
    model = tiny_model()
    full = [3] * model.max_seq_len
    [score] = score_targets(model, [full], [full], start_ids=[START])
    assert len(score.logprobs) == len(full) and math.isfinite(score.logprob)


def test_batches_and_order_change_nothing_and_the_models_mode_comes_back():
    model = tiny_model().train()
    sources, targets = random_pairs()
    whole = score_targets(model, sources, targets, start_ids=[START])
    assert model.training
    single = score_targets(model, sources, targets, start_ids=[START], batch_tokens=1)
    reversed_ = score_targets(model, sources[::-1], targets[::-1], start_ids=[START], batch_tokens=40)[::-1]
    for score, alone, other in zip(whole, single, reversed_, strict=True):
        assert score.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
        assert score.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_continuations_of_a_decoder_alone_equal_a_plain_loop():
    model = tiny_model(encoder=False)
    prompts, targets = random_pairs(5)
    prompts = [prompt[:9] for prompt in prompts]
    for score, prompt, target in zip(score_continuations(model, prompts, targets), prompts, targets, strict=True):
        assert score.logprobs == pytest.approx(plain_logprobs(model, None, prompt, target), abs=1e-5)


def test_ids_without_a_token_have_no_share_of_the_probability():
    model = tiny_model()
    [score] = score_targets(model, [[3, 4]], [[5, 6]], start_ids=[START], vocab_size=10)
    assert score.logprobs == pytest.approx(plain_logprobs(model, [3, 4], [START], [5, 6], vocab_size=10), abs=1e-5)
    total = sum(
        math.exp(score_targets(model, [[3]], [[t]], start_ids=[1], vocab_size=10)[0].logprob) for t in range(10)
    )
    assert total == pytest.approx(1.0, abs=1e-5)


def test_the_alignment_is_the_attention_of_the_position_that_predicts_each_token():
    model = tiny_model()
    sources, targets = random_pairs()
    scores = score_targets(model, sources, targets, start_ids=[START, 7], alignments=True)
    for score, source, target in zip(scores, sources, targets, strict=True):
        assert score.alignment.shape == (len(target), len(source))
        assert score.alignment.sum(axis=1) == pytest.approx(np.ones(len(target)), abs=1e-5)
    tap = "decoder.1.cross_attention.weights"
    ids = torch.tensor([[START, 7, *targets[0]]])
    with torch.no_grad():
        weights = model.eval()(torch.tensor([sources[0]]), decoder_input_ids=ids, taps={tap}).taps[tap][0].mean(0)
    assert scores[0].alignment == pytest.approx(weights[1:-1].numpy(), abs=1e-5)


def test_an_empty_target_has_no_probabilities_and_nothing_gives_nothing():
    model = tiny_model()
    empty, score = score_targets(model, [[3], [4]], [[], [5]], start_ids=[START], alignments=True)
    assert empty.logprobs == () and empty.logprob == 0 and empty.alignment.shape == (0, 1) and len(score.logprobs) == 1
    assert score_targets(model, [], [], start_ids=[START]) == []


def test_interruption_leaves_the_rest_without_a_number():
    sources, targets = random_pairs()
    seen: list[tuple[int, int]] = []
    answers = iter([False, True])
    scores = score_targets(
        tiny_model(),
        sources,
        targets,
        start_ids=[START],
        batch_tokens=1,
        work=Work(should_stop=lambda: next(answers), report=lambda done, total: seen.append((done, total))),
    )
    assert seen == [(1, 9)] and sum(math.isfinite(score.logprob) for score in scores) == 1


@pytest.mark.parametrize(("source", "target", "words"), [(25, 3, "source 2 has 25"), (3, 25, "target 2 has 25")])
def test_what_is_longer_than_the_context_is_named(source, target, words):
    with pytest.raises(InputError, match=f"{words} tokens.* {CONTEXT}"):
        score_targets(tiny_model(), [[2], [2] * source], [[2], [2] * target], start_ids=[START])


def test_greedy_targets_are_known():
    model = tiny_model(encoder=False).eval()
    ids = [3, 4, 5]
    with torch.no_grad():
        for _ in range(4):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1, :10].argmax()))
    prompts, targets = [ids[:3]] * 3, [ids[3:], [*ids[3:6], (ids[6] + 1) % 10], []]
    options = {"vocab_size": 10, "batch_tokens": 1}
    found = [score.is_greedy for score in score_continuations(model, prompts, targets, greedy=True, **options)]
    assert found == [True, False, None]
    assert score_continuations(model, prompts, targets, **options)[0].is_greedy is None
