"""The decoding engine on real models: cached equals uncached, whatever the positions, heads and batches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.decoding.random_models import POSITIONS, PROMPTS, VOCAB, tiny_model, tokens
from tests.decoding.uncached import uncached_generate
from tests.pairwise import pairwise
from tformer.decoding.generate import generate
from tformer.decoding.inference import inference
from tformer.decoding.settings import GenerationSettings


def assert_same_logprobs(left, right):
    for a, b in zip(left, right, strict=True):
        for one, other in zip(a, b, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize(
    ("positions", "max_seq_len", "temperature"),
    pairwise(positions=list(POSITIONS), max_seq_len=[48, 10], temperature=[0.0, 1.0]),
)
def test_cached_equals_uncached_with_left_padded_prompts(positions, max_seq_len, temperature):
    model = tiny_model(positions, max_seq_len=max_seq_len)
    samples = 2 if temperature else 1
    settings = GenerationSettings(
        max_new_tokens=20, logprobs=True, temperature=temperature, num_samples=samples, seed=3
    )
    cached = generate(model, PROMPTS, settings)
    uncached = uncached_generate(model, PROMPTS, settings)
    assert tokens(cached) == tokens(uncached)
    assert_same_logprobs(cached, uncached)


@pytest.mark.parametrize("positions", POSITIONS)
def test_cached_logits_equal_uncached_logits_at_every_step(positions):
    model = tiny_model(positions)
    ids = torch.randint(VOCAB, (3, 12), generator=torch.Generator().manual_seed(0))
    lengths = [4, 7, 2]
    with inference(model):
        cache = model.new_cache(3, 16)
        prompt = torch.zeros(3, 7, dtype=torch.long)
        mask = torch.zeros(3, 7, dtype=torch.bool)
        for row, length in enumerate(lengths):
            prompt[row, 7 - length :] = ids[row, :length]
            mask[row, 7 - length :] = True
        logits = model(prompt, attention_mask=mask, cache=cache).logits_at(-1)
        for step in range(5):
            for row, length in enumerate(lengths):
                whole = model(ids[row : row + 1, : length + step]).logits_at(-1)[0]
                assert torch.allclose(logits[row], whole, atol=1e-5), (row, step)
            new = torch.stack([ids[row, length + step] for row, length in enumerate(lengths)])[:, None]
            position_ids = torch.tensor([[length + step] for length in lengths])
            logits = model(new, position_ids=position_ids, cache=cache).logits_at(-1)


@pytest.mark.parametrize(
    "stack", [{"num_kv_heads": 2}, {"head_dim": 4, "value_dim": 10}, {"attention": {"kind": "full", "qk_norm": True}}]
)
def test_head_shapes_do_not_matter(stack):
    model = tiny_model("rope", **stack)
    settings = GenerationSettings(max_new_tokens=12, num_samples=2)
    assert tokens(generate(model, PROMPTS, settings)) == tokens(uncached_generate(model, PROMPTS, settings))


@pytest.mark.parametrize("positions", ["learned", "alibi", "rope"])
def test_batched_equals_one_by_one(positions):
    model = tiny_model(positions)
    settings = GenerationSettings(max_new_tokens=15, num_samples=2, seed=8, eos_id=5)
    batched = generate(model, PROMPTS, settings)
    assert batched == [generate(model, [prompt], settings, first_row=row)[0] for row, prompt in enumerate(PROMPTS)]
    assert len({c[0].finish_reason for c in batched}) == 2, "the seed should give rows that end at different times"


def test_samples_from_one_prefill_equal_samples_drawn_alone():
    model = tiny_model()
    many = generate(model, PROMPTS, GenerationSettings(max_new_tokens=8, num_samples=3, seed=1))
    one = generate(model, PROMPTS, GenerationSettings(max_new_tokens=8, num_samples=1, seed=1))
    assert [completions[0] for completions in many] == [completions[0] for completions in one]
    assert any(len({c.ids for c in completions}) == 3 for completions in many)


def test_first_tokens_follow_the_models_softmax():
    model = tiny_model()
    with inference(model):
        expected = model(torch.tensor([PROMPTS[0]])).logits_at(-1)[0].double().softmax(-1)
    [completions] = generate(model, PROMPTS[:1], GenerationSettings(max_new_tokens=1, num_samples=4000))
    counts = torch.bincount(torch.tensor([c.ids[0] for c in completions]), minlength=VOCAB).double()
    common = expected * 4000 >= 5  # the usual condition of the test; the rest counts as one class
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([expected[common], expected[~common].sum()[None]]) * 4000
    kept = wanted > 0
    statistic = float(((observed - wanted)[kept] ** 2 / wanted[kept]).sum())
    degrees = int(kept.sum()) - 1
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5


def test_only_the_last_position_is_projected(monkeypatch):
    model = tiny_model()
    rows = []
    head = model.heads["lm"]
    forward = head.forward
    monkeypatch.setattr(
        head, "forward", lambda hidden, *rest: rows.append(tuple(hidden.shape)) or forward(hidden, *rest)
    )
    generate(model, PROMPTS, GenerationSettings(max_new_tokens=3))
    assert rows == [(4, 24)] * 3


def test_a_model_can_train_on_after_generating():
    for positions in POSITIONS:
        model = tiny_model(positions).train()
        generate(model, PROMPTS, GenerationSettings(max_new_tokens=3))
        assert model.training
        model(torch.tensor([PROMPTS[0]])).logits.sum().backward()
        assert all(parameter.grad is not None for parameter in model.decoder.parameters())


def test_generation_draws_nothing_from_the_global_stream():
    model = tiny_model()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    generate(model, PROMPTS, GenerationSettings(max_new_tokens=3))
    assert torch.equal(before, torch.get_rng_state())


def test_rounded_up_vocabularies_never_give_ids_without_a_token():
    model = tiny_model()
    tokenizer = SimpleNamespace(vocab_size=5, stream=lambda: SimpleNamespace(push=str, finish=str))
    settings = GenerationSettings(max_new_tokens=30, temperature=5.0)
    [[completion]] = generate(model, [[1, 2]], settings, tokenizer=tokenizer)
    assert max(completion.ids) < 5
