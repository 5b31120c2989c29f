"""Models whose input has vectors of n-grams (`model.embedding.ngram`): what a position depends on, and decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.decoding.test_decoding_compiled import assert_same, attach, num_graphs, search, write
from tests.test_model import make, padded, tokens
from tformer.build import build_model, count_parameters
from tformer.decoding.beam_search import beam_search
from tformer.decoding.settings import BeamSettings
from tformer.decoding.stepper import ModelStepper
from tformer.interop.choose import choose_class_or_code
from tformer.model import Transformer
from tformer.nn.ngrams import NgramEmbedding
from tformer.recipe.model import Model
from tformer.support.errors import InputError

LONGEST = 4
NGRAMS = {"embedding": {"ngram": LONGEST, "ngram_rows": 211}}


def table(rows: int = 10_007) -> NgramEmbedding:
    torch.manual_seed(0)
    embedding = NgramEmbedding(5, longest=LONGEST, rows=rows)
    torch.nn.init.normal_(embedding.weight)
    return embedding


def test_a_position_depends_on_its_token_and_the_tokens_just_before() -> None:
    embedding, ids = table(), tokens(1, 12)
    before = embedding(ids)
    for place in range(12):
        changed = ids.clone()
        changed[0, place] += 1
        differs = (embedding(changed) != before).any(dim=2)[0].nonzero().flatten().tolist()
        assert differs == [each for each in range(place, place + LONGEST) if each < 12]


def test_equal_ngrams_have_equal_rows_and_different_ones_mostly_others() -> None:
    embedding = table(rows=2**20)
    every = torch.cartesian_prod(*[torch.arange(12)] * LONGEST)
    rows = embedding.rows(every, None, None, None)[:, -1]
    for index, length in enumerate(range(2, LONGEST + 1)):
        found, expected = rows[:, index].unique().numel(), 12**length
        assert 0.97 * expected <= found <= expected
    assert rows.min() >= 0 and rows.max() < 2**20 and 0.4 < float(rows.float().mean()) / 2**20 < 0.6


def test_padding_and_other_documents_are_no_part_of_an_ngram() -> None:
    embedding, ids = table(), tokens(2, 6)
    for side, real in (("left", slice(3, None)), ("right", slice(0, 6))):
        filled, mask = padded(ids, 3, side)
        assert torch.equal(embedding(filled, real_BT=mask)[:, real], embedding(ids))
    documents = torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)
    parts = torch.cat([embedding(ids[:, :2]), embedding(ids[:, 2:])], dim=1)
    assert torch.equal(embedding(ids, document_ids_BT=documents), parts)


def test_a_new_model_computes_what_it_computes_without_ngrams() -> None:
    ids, section = tokens(2, 7), {"d_model": 16, "vocab_size": 23, "decoder": {"num_layers": 1, "num_heads": 2}}
    models = []
    for more in ({}, NGRAMS):
        torch.manual_seed(0)
        models.append(build_model(Model.model_validate(section | more)).eval())
    plain, ngrams = models
    assert torch.equal(plain(ids).logits, ngrams(ids).logits)
    assert ngrams.num_parameters() - plain.num_parameters() == 211 * 16
    assert ngrams.num_parameters(embeddings=False) == plain.num_parameters(embeddings=False)
    assert count_parameters(Model.model_validate(section | NGRAMS)) == ngrams.num_parameters()


def test_factorized_and_scaled_tables_have_ngrams_of_their_width() -> None:
    model = make(embedding={"ngram": 2, "ngram_rows": 31, "size": 6, "scale": True})
    assert model.get_parameter("embedding.ngrams.weight").shape == (31, 6)
    names = ["decoder.embedding.ngrams", "decoder.embedding.tokens", "decoder.embedding.scaled"]
    taps = model(tokens(1, 5), taps=names).taps
    torch.testing.assert_close(taps[names[2]], 4.0 * (taps[names[0]] + taps[names[1]]))


@pytest.mark.parametrize("left_padded", [False, True])
def test_cached_decoding_equals_uncached(left_padded: bool) -> None:
    model, ids = make(**NGRAMS), tokens(3, 5)
    mask = (torch.arange(5) >= torch.tensor([[0], [2], [4]])).long() if left_padded else torch.ones_like(ids)
    cache = model.new_cache(3, 16)
    with torch.no_grad():
        cached = model(ids, attention_mask=mask if left_padded else None, cache=cache).logits_at(-1)
        for _ in range(6):
            uncached = model(ids, attention_mask=mask if left_padded else None).logits_at(-1)
            torch.testing.assert_close(cached, uncached, atol=1e-5, rtol=0)
            chosen = uncached.argmax(-1, keepdim=True)
            ids, mask = torch.cat([ids, chosen], 1), torch.cat([mask, torch.ones_like(chosen)], 1)
            cached = model(chosen, cache=cache).logits_at(-1)


def test_cached_decoding_in_chunks_equals_one_pass() -> None:
    model, ids = make(**NGRAMS), tokens(2, 9)
    cache = model.new_cache(2, 9)
    with torch.no_grad():
        parts = [model(part, cache=cache).logits for part in ids.split([1, 1, 4, 3], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, atol=1e-5, rtol=1e-5)


def test_rows_that_are_moved_repeated_and_removed_keep_their_tokens() -> None:
    model, ids = make(**NGRAMS), tokens(3, 6)
    order = torch.tensor([2, 0, 0])
    cache = model.new_cache(3, 9)
    with torch.no_grad():
        model(ids, cache=cache)
        cache.reorder(order)
        assert cache.key_ids is not None and torch.equal(cache.key_ids[:, :6], ids[order])
        cache.compact(torch.tensor([True, False, True]))
        cache.truncate(4)
        rest = tokens(2, 2, seed=5)
        found = model(rest, cache=cache).logits
        expected = model(torch.cat([ids[order][[0, 2], :4], rest], dim=1)).logits[:, 4:]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def sharp(encoder: bool) -> Transformer:
    model = make("both" if encoder else "decoder", vocab_size=29, max_seq_len=64, **NGRAMS)
    with torch.no_grad():
        for embedding in filter(None, (model.embedding, model.decoder_embedding)):
            embedding.get_parameter("ngrams.weight").mul_(10.0)  # beams differ by their n-grams
    return model


@pytest.mark.parametrize("encoder", [False, True])
def test_a_beams_score_is_that_of_reading_its_text_at_once(encoder: bool) -> None:
    model, prompts, sources = sharp(encoder), [[1, 4, 3], [5], [7, 8]], [[3, 4, 2], [5, 6, 7, 2], [9, 2]]
    stepper = ModelStepper(model, prompts, capacity=8, **({"sources": sources} if encoder else {}))
    settings = BeamSettings(beam_size=4, max_new_tokens=8, eos_id=2, length_penalty=0.0, length_penalty_type="none")
    for prompt, source, found in zip(prompts, sources, beam_search(stepper, settings), strict=True):
        for one in found:
            ids = torch.tensor([[*prompt, *one.ids]])
            given = {"input_ids": torch.tensor([source]), "decoder_input_ids": ids} if encoder else {"input_ids": ids}
            with torch.no_grad():
                logprobs = model(**given).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
            chosen = logprobs[torch.arange(len(one.ids)), torch.tensor(one.ids)]
            assert one.score == pytest.approx(float(chosen.sum()), abs=1e-3)


@pytest.mark.slow
def test_compiled_beams_are_uncompiled_ones() -> None:
    """The quick twin is `test_rows_that_are_moved_repeated_and_removed_keep_their_tokens`."""
    model = sharp(encoder=False)
    expected = search([model])
    attach(model)
    assert search([model]) == expected and num_graphs() > 0


@pytest.mark.slow
@pytest.mark.parametrize("encoder", [False, True])
def test_compiled_steps_give_what_uncompiled_ones_give(encoder: bool) -> None:
    model = sharp(encoder)
    sources: Any = [[5, 6, 7, 2], [8, 9, 10, 11, 2], [14, 2], [15, 16, 2]] if encoder else None
    expected = write(model, sources=sources), search([model])
    attach(model)
    assert_same(write(model, sources=sources), expected[0])
    assert search([model]) == expected[1] and num_graphs() > 0


def test_a_model_with_ngrams_is_not_exported_as_another() -> None:
    section = {"d_model": 16, "vocab_size": 23, "max_seq_len": 8, "decoder": {"num_layers": 1, "num_heads": 2}}
    with pytest.raises(InputError, match="ngram"):
        choose_class_or_code(Model.model_validate(section | NGRAMS), family="gpt")
