"""Steppers over the real model: whatever was started, stepped, reordered and kept, each row is its whole prefix."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.decoding.random_models import random_model
from tformer.decoding.beam_search import beam_search
from tformer.decoding.generate import generate
from tformer.decoding.inference import inference, prepare_inference
from tformer.decoding.settings import BeamSettings, GenerationSettings
from tformer.decoding.stepper import EnsembleStepper, ModelStepper, Stepper, mean_log_probabilities
from tformer.kernels.functions import find
from tformer.model import Transformer
from tformer.nn.cache import LayerCache, Spares
from tformer.support.errors import InputError, TformerError

VOCAB = 29
START = 1
STACKS: dict[str, dict[str, Any]] = {
    "sinusoidal-post": {"positions": {"kind": "sinusoidal"}, "norm": {"kind": "layernorm", "place": "post"}},
    "learned-offset-post": {"positions": {"kind": "learned", "offset": 2}, "norm": {"place": "post"}},
    "t5_bias-rms": {
        "positions": {"kind": "t5_bias", "buckets": 8, "max_distance": 16},
        "norm": {"kind": "rmsnorm", "place": "pre"},
        "attention": {"kind": "full", "scale": 1.0},
    },
    "rope-grouped": {"positions": {"kind": "rope"}, "num_kv_heads": 2, "attention": {"kind": "full", "qk_norm": True}},
    "alibi": {"positions": {"kind": "alibi"}},
    "sandwich-capped": {
        "norm": {"kind": "rmsnorm", "place": "sandwich", "unit_offset": True},
        "attention": {"softcap": 2.0, "qk_norm": "unit_offset"},
        "layers": {0: {"attention": {"kind": "sliding_window", "window": 2}}},
    },
    "res-post": {
        "norm": {"kind": "rmsnorm", "place": "res_post"},
        "attention": {"qk_norm": "width"},
        "residual_multiplier": 0.5,
    },
    "norms-of-heads": {"positions": {"kind": "rope"}, "num_kv_heads": 1, "attention": {"qk_norm": "groupnorm"}},
    "shaw-wide-values": {"positions": {"kind": "shaw", "clip": 3}, "head_dim": 4, "value_dim": 10},
}
SOURCES = [[5, 6, 7, 2], [8, 9, 10, 11, 12, 13, 2], [14, 2], [15, 16, 17, 2]]
PREFIXES = [[START], [START, 20, 21, 22], [START, 23], [START, 24]]
every_stack = pytest.mark.parametrize("stack", list(STACKS.values()), ids=list(STACKS))


def make(
    stack: dict[str, Any] = STACKS["sinusoidal-post"], *, encoder: bool = True, seed: int = 0, max_seq_len: int = 24
) -> Transformer:
    """A tiny model whose every parameter is random."""
    given = {"final_norm": True, **stack}
    return random_model(given, encoder=encoder, vocab_size=VOCAB, max_seq_len=max_seq_len, seed=seed)


def stepper_of(model: Transformer, sources: Sequence[list[int]], prefixes: Sequence[list[int]]) -> ModelStepper:
    """With `sources` for an encoder-decoder, without for a decoder."""
    if model.encoder is None:
        return ModelStepper(model, prefixes, capacity=10)
    return ModelStepper(model, prefixes, sources=sources, capacity=10)


def whole(model: Transformer, source: list[int], prefix: list[int]) -> Tensor:
    """Log-probabilities [V] after a prefix, from a fresh pass over it alone."""
    with inference(model):
        ids = torch.tensor([prefix])
        output = model(ids) if model.encoder is None else model(torch.tensor([source]), decoder_input_ids=ids)
        return output.logits[0, -1].log_softmax(-1)


def close(found: Tensor, expected: Sequence[Tensor], tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, torch.stack(list(expected)), atol=tolerance, rtol=0)


@contextmanager
def counted_rows(module: torch.nn.Module) -> Iterator[list[int]]:
    """How many rows each call of a module is given."""
    calls: list[int] = []
    handle = module.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0].shape[0]))
    yield calls
    handle.remove()


# --- each row is its prefix ------------------------------------------------------------------------------------------


@every_stack
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("prefixes", [PREFIXES, [[START]] * 4], ids=["prefixes", "starts"])
@pytest.mark.parametrize("encoder", [True, False], ids=["encoder-decoder", "decoder"])
def test_any_course_of_a_search_agrees_with_a_fresh_pass(
    stack: dict[str, Any], beams: int, prefixes: list[list[int]], encoder: bool
) -> None:
    model, draw = make(stack, encoder=encoder), random.Random(beams)
    stepper = stepper_of(model, SOURCES, prefixes)
    close(stepper.start(beams), [whole(model, *pair) for pair in zip(SOURCES, prefixes, strict=True)])
    live = list(range(4))
    rows = [(sentence, list(prefixes[sentence])) for sentence in live for _ in range(beams)]
    for keep in (None, [0, 1, 3], None, [1, 3], [3]):
        order = [row // beams * beams + draw.randrange(beams) for row in range(len(rows))]
        stepper.reorder(torch.tensor(order))
        tokens = [draw.randrange(VOCAB) for _ in rows]
        rows = [(rows[row][0], [*rows[row][1], token]) for row, token in zip(order, tokens, strict=True)]
        if keep is not None:
            stepper.keep(torch.tensor([live.index(sentence) for sentence in keep]))
            tokens = [token for token, (sentence, _) in zip(tokens, rows, strict=True) if sentence in keep]
            rows, live = [row for row in rows if row[0] in keep], keep
        logprobs = stepper.step(torch.tensor(tokens))
        assert stepper.num_sentences == len(live)
        close(logprobs, [whole(model, SOURCES[sentence], ids) for sentence, ids in rows])


@every_stack
def test_neighbours_and_their_order_change_nothing(stack: dict[str, Any]) -> None:
    model = make(stack)

    def run(order: Sequence[int]) -> dict[int, Tensor]:
        stepper = stepper_of(model, [SOURCES[i] for i in order], [PREFIXES[i] for i in order])
        steps = [stepper.start(2).repeat_interleave(2, dim=0)]
        steps += [
            stepper.step(torch.tensor([token for i in order for token in (3 + i, 4 + i)])),
            stepper.step(torch.tensor([token for i in order for token in (9 + i, 5 + i)])),
        ]
        table = torch.stack(steps, dim=1).unflatten(0, (-1, 2))
        return {i: table[place] for place, i in enumerate(order)}

    together, turned = run([0, 1, 2, 3]), run([3, 1, 0, 2])
    for i in range(4):
        torch.testing.assert_close(together[i], turned[i], atol=1e-5, rtol=0)
        torch.testing.assert_close(together[i], run([i])[i], atol=1e-5, rtol=0)


def test_a_stepper_may_be_started_again() -> None:
    stepper = stepper_of(make(), SOURCES, PREFIXES)
    first = stepper.start(2)
    stepper.keep(torch.tensor([1]))
    stepper.step(torch.tensor([3, 4]))
    assert torch.equal(stepper.start(3), first) and stepper.num_sentences == 4
    assert stepper.step(torch.full((12,), 5)).shape == (12, VOCAB)


def test_probabilities_are_fp32_and_add_up_also_in_bf16() -> None:
    model = make()
    exact = stepper_of(model, SOURCES, PREFIXES).start(2)
    model.compute_dtype = torch.bfloat16
    stepper = stepper_of(model, SOURCES, PREFIXES)
    rough = stepper.start(2)
    after = stepper.step(torch.arange(8))
    for logprobs in (rough, after):
        assert logprobs.dtype == torch.float32
        torch.testing.assert_close(logprobs.exp().sum(-1), torch.ones(len(logprobs)), atol=1e-5, rtol=0)
    assert (rough.exp() - exact.exp()).abs().max() < 0.05


def test_ids_beyond_the_tokenizer_are_never_offered() -> None:
    model = make()
    stepper = ModelStepper(model, PREFIXES, sources=SOURCES, capacity=4, vocab_size=20)
    first, second = stepper.start(2), stepper.step(torch.arange(8))
    assert stepper.vocab_size == 20 and first.shape == (4, 20) and second.shape == (8, 20)
    torch.testing.assert_close(second.exp().sum(-1), torch.ones(8))


def test_results_may_be_changed_in_place_and_a_training_model_trains_on() -> None:
    model = make().train()
    stepper = stepper_of(model, SOURCES, PREFIXES)
    stepper.start(2)[:, 2] = -math.inf
    stepper.step(torch.arange(8)).masked_fill_(torch.ones(VOCAB, dtype=torch.bool), 0.0)
    assert model.training
    assert not stepper.step(torch.arange(8)).requires_grad


# --- what is computed once -------------------------------------------------------------------------------------------


def test_the_encoder_runs_once_and_cross_keys_exist_once_per_sentence() -> None:
    model = make()
    assert model.encoder is not None and model.decoder is not None
    cross = [block.cross_attention for block in model.decoder.layers if block.cross_attention is not None]
    with (
        counted_rows(model.encoder) as encoder_calls,
        counted_rows(cross[0].kv) as first,
        counted_rows(cross[1].kv) as second,
        counted_rows(cross[0].q) as queries,
    ):
        stepper = stepper_of(model, SOURCES, PREFIXES)
        stepper.start(3)
        for _ in range(3):
            stepper.step(torch.arange(12))
            stepper.reorder(torch.tensor([2, 2, 0, 3, 3, 3, 8, 7, 6, 9, 11, 9]))
        stepper.keep(torch.tensor([0, 2]))
        stepper.step(torch.arange(6))
    assert encoder_calls == first == second == [4]
    assert queries == [4, 4, 4, 4, 2]  # the beams of a sentence are further queries of its row
    for cache in stepper._cache.cross:
        assert cache.read()[0].shape[0] == 2


def test_reordering_moves_self_attention_alone_and_the_identity_moves_nothing() -> None:
    stepper = stepper_of(make(), SOURCES, PREFIXES)
    stepper.start(2)
    stepper.step(torch.arange(8))
    keys, cross = stepper._cache.layers[0].keys, stepper._cache.cross[0].keys
    stepper.reorder(torch.arange(8))
    assert stepper._cache.layers[0].keys is keys
    stepper.reorder(torch.tensor([1, 0, 2, 3, 4, 5, 6, 7]))
    assert stepper._cache.layers[0].keys is not keys and stepper._cache.cross[0].keys is cross


def test_the_cache_is_no_larger_than_the_request() -> None:
    stepper = ModelStepper(make(), PREFIXES, sources=SOURCES, capacity=5)
    stepper.start(2)
    assert stepper._cache.capacity == 4 + 5 - 1  # the last token is chosen, never read


# --- queries from the decoder, keys and values from the encoder ------------------------------------------------------


def test_queries_come_from_the_decoder_and_keys_and_values_from_the_encoder() -> None:
    model = make()
    assert model.decoder is not None
    attention = model.decoder.layers[0].cross_attention
    assert attention is not None
    seen: dict[str, Tensor] = {}
    for name in ("q", "kv"):
        getattr(attention, name).register_forward_pre_hook(
            lambda _, inputs, name=name: seen.__setitem__(name, inputs[0].clone())
        )

    def run(source: list[int], prefix: list[int]) -> tuple[Tensor, Tensor]:
        whole(model, source, prefix)
        return seen["q"], seen["kv"]

    q, kv = run(SOURCES[0], PREFIXES[1])
    assert q.shape[1] == len(PREFIXES[1]) and kv.shape[1] == len(SOURCES[0])
    other_q, other_kv = run([5, 6, 8, 2], PREFIXES[1])
    assert torch.equal(q, other_q) and not torch.equal(kv, other_kv)
    other_q, other_kv = run(SOURCES[0], [START, 20, 21, 23])
    assert not torch.equal(q, other_q) and torch.equal(kv, other_kv)


def test_source_and_target_are_not_exchangeable() -> None:
    model, (one, other) = make(), ([5, 6, 7, 2], [START, 20, 21, 22])
    straight, swapped = whole(model, one, other), whole(model, other, one)
    assert (straight - swapped).abs().max() > 1e-2
    for pair, expected in (((one, other), straight), ((other, one), swapped)):
        close(ModelStepper(model, [pair[1]], sources=[pair[0]], capacity=2).start(1), [expected])


def test_either_side_moves_the_result() -> None:
    model = make()
    base = whole(model, SOURCES[1], PREFIXES[1])
    assert (whole(model, [9, *SOURCES[1][1:]], PREFIXES[1]) - base).abs().max() > 1e-3
    assert (whole(model, SOURCES[1], [START, 22, 21, 22]) - base).abs().max() > 1e-3


# --- the room --------------------------------------------------------------------------------------------------------


@every_stack
@pytest.mark.parametrize("encoder", [True, False], ids=["encoder-decoder", "decoder"])
def test_each_sentence_has_the_room_it_has_alone(stack: dict[str, Any], encoder: bool) -> None:
    model = make(stack, encoder=encoder, max_seq_len=7)
    long = [START, 3, 4, 5, 6]
    stepper = stepper_of(model, SOURCES[:2], [long, [START]])
    assert stepper.rooms == [3, 7]
    rows = [long, [START]]
    stepper.start(1)
    for step in range(6):  # the first goes on past its room, unheeded
        rows = [[*row, 8 + step] for row in rows]
        logprobs = stepper.step(torch.tensor([8 + step] * 2))
        assert torch.isfinite(logprobs).all()
        for place in range(2):
            if step + 1 < stepper.rooms[place]:
                close(logprobs[place : place + 1], [whole(model, SOURCES[place], rows[place])])


def test_what_cannot_be_started_is_said() -> None:
    model = make(max_seq_len=6)
    with pytest.raises(InputError, match="prompt 2 has no tokens"):
        ModelStepper(model, [[START], []], sources=SOURCES[:2], capacity=4)
    with pytest.raises(InputError, match="source 1 has no tokens"):
        ModelStepper(model, [[START]] * 2, sources=[[], [3]], capacity=4)
    with pytest.raises(InputError, match="prompt 1 has 7 tokens, but the model's context holds 6"):
        ModelStepper(model, [[START] * 7], sources=SOURCES[:1], capacity=4)
    with pytest.raises(ValueError, match="2 sources and 1 decoder prefixes"):
        ModelStepper(model, [[START]], sources=SOURCES[:2], capacity=4)
    with pytest.raises(ValueError, match="an encoder and a decoder"):
        ModelStepper(make(encoder=False), [[START]], sources=SOURCES[:1], capacity=4)


def test_a_broken_model_is_an_error() -> None:
    model = make()
    with torch.no_grad():
        model.embedding.weight.fill_(math.nan)
    with pytest.raises(TformerError, match="NaN"):
        stepper_of(model, SOURCES, PREFIXES).start(2)


# --- beside the other engine -----------------------------------------------------------------------------------------


@every_stack
@pytest.mark.parametrize("encoder", [True, False], ids=["encoder-decoder", "decoder"])
def test_the_best_row_of_one_beam_is_greedy_generation(stack: dict[str, Any], encoder: bool) -> None:
    model = make(stack, encoder=encoder)
    settings = GenerationSettings(max_new_tokens=8, temperature=0.0, logprobs=True)
    expected = generate(model, PREFIXES, settings, sources=SOURCES if encoder else None)
    stepper = stepper_of(model, SOURCES, PREFIXES)
    logprobs, chosen = stepper.start(1), []
    for _ in range(8):
        chosen.append(logprobs.max(-1))
        if len(chosen) < 8:
            logprobs = stepper.step(chosen[-1].indices)
    for row, [completion] in enumerate(expected):
        assert completion.ids == tuple(int(best.indices[row]) for best in chosen)
        assert completion.logprobs == pytest.approx([float(best.values[row]) for best in chosen], abs=1e-5)


# --- ensembles -------------------------------------------------------------------------------------------------------


def course(stepper: Stepper) -> list[Tensor]:
    """The numbers of a short search with every operation in it."""
    found = [stepper.start(2), stepper.step(torch.arange(8))]
    stepper.reorder(torch.tensor([1, 1, 2, 3, 5, 4, 7, 7]))
    found.append(stepper.step(torch.arange(8, 16)))
    stepper.keep(torch.tensor([1, 2]))
    return [*found, stepper.step(torch.arange(4))]


def test_copies_of_one_model_are_that_model() -> None:
    model = make()
    alone = course(stepper_of(model, SOURCES, PREFIXES))
    ensemble = EnsembleStepper([stepper_of(model, SOURCES, PREFIXES) for _ in range(3)])
    for found, expected in zip(course(ensemble), alone, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert ensemble.num_sentences == 2
    assert (ensemble.vocab_size, ensemble.rooms) == (VOCAB, [10] * 4)


def test_an_ensemble_is_the_logarithm_of_the_mean_probability() -> None:
    models = [make(seed=0), make(STACKS["t5_bias-rms"], seed=1)]
    one, other = (course(stepper_of(model, SOURCES, PREFIXES)) for model in models)
    both = course(EnsembleStepper([stepper_of(model, SOURCES, PREFIXES) for model in models]))
    for a, b, found in zip(one, other, both, strict=True):
        torch.testing.assert_close(found, ((a.exp() + b.exp()) / 2).log(), atol=1e-5, rtol=0)


def test_a_model_that_excludes_a_token_does_not_veto_it() -> None:
    never = torch.tensor([-math.inf, 0.0, -math.inf])
    found = mean_log_probabilities([never, torch.tensor([0.25, 0.75, 0.0]).log()])
    assert found.exp().tolist() == pytest.approx([0.125, 0.875, 0.0])


def test_ensembles_that_do_not_fit_are_refused() -> None:
    small = ModelStepper(make(), PREFIXES, sources=SOURCES, capacity=4, vocab_size=20)
    with pytest.raises(InputError, match="vocabularies of 29, 20 tokens") as raised:
        EnsembleStepper([stepper_of(make(), SOURCES, PREFIXES), small])
    assert "tokenizer" in str(raised.value.hint)
    with pytest.raises(ValueError, match="numbers of sentences"):
        EnsembleStepper([stepper_of(make(), SOURCES[:n], PREFIXES[:n]) for n in (1, 2)])
    with pytest.raises(ValueError, match="at least one"):
        EnsembleStepper([])


@pytest.mark.skipif(find() is None, reason="no compiler for kernels here")
@pytest.mark.parametrize("encoder", [True, False], ids=["encoder-decoder", "decoder"])
@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("prefixes", [[[START]] * 4, PREFIXES], ids=["equal", "padded"])
def test_beams_that_move_by_a_table_find_what_beams_find_whose_slots_are_moved(
    encoder: bool, quantize: str, prefixes: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sentences of different lengths, which leave one after another; bit for bit."""
    model = make(encoder=encoder, max_seq_len=40)
    prepare_inference(model, torch.bfloat16, quantize=quantize, rows=16)
    settings = BeamSettings(beam_size=4, max_new_tokens=20, eos_id=2, length_penalty=1.0)
    copies: list[str] = []
    gather = Spares.gather
    monkeypatch.setattr(
        Spares, "gather", lambda self, *a, **named: (copies.append("gather"), gather(self, *a, **named))[1]
    )

    def found(*, by_table: bool) -> tuple[list[Any], int]:
        with monkeypatch.context() as patch:
            if not by_table:
                patch.setattr(
                    LayerCache, "read_by_kernel", property(lambda self: False, lambda self, value: None), raising=False
                )
            copies.clear()
            stepper = ModelStepper(model, prefixes, sources=SOURCES if encoder else None, capacity=20)
            hypotheses = beam_search(stepper, settings, limits=[6, 9, 20, 13])
            return [[(each.ids, each.logprobs, each.score) for each in row] for row in hypotheses], len(copies)

    (expected, copied), (here, fewer) = found(by_table=False), found(by_table=True)
    assert here == expected and fewer < copied / 2
