"""Encoder-decoders: the engine with sources, and translation of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.decoding.random_models import random_model, shaken
from tests.decoding.uncached import uncached_generate
from tests.pairwise import pairwise
from tformer.build import build_model
from tformer.decoding.generate import generate
from tformer.decoding.loaded import translator_of
from tformer.decoding.score import score_targets
from tformer.decoding.sentences import Places
from tformer.decoding.settings import BeamSettings, Generated, GenerationSettings, length_penalty
from tformer.decoding.translate import EMPTY, Translator
from tformer.loading import Loaded
from tformer.model import Transformer
from tformer.recipe.load import recipe_from_yaml
from tformer.recipe.model import Model
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer
from tformer.tokenizer.special import decoder_tokens

VOCAB = 29
START = 1
STACKS: dict[str, dict[str, Any]] = {
    "sinusoidal-post": {"positions": {"kind": "sinusoidal"}, "norm": {"place": "post"}},
    "learned-offset-post": {"positions": {"kind": "learned", "offset": 2}, "norm": {"place": "post"}},
    "t5_bias-rms": {"positions": {"kind": "t5_bias", "buckets": 8, "max_distance": 16}, "norm": {"kind": "rmsnorm"}},
    "rope-grouped": {"positions": {"kind": "rope"}, "num_kv_heads": 2},
}
SOURCES = [[5, 6, 7, 2], [8, 9, 10, 11, 12, 13, 2], [14, 2], [15, 16, 17, 2]]
PREFIXES = [[START], [START, 20, 21, 22], [START, 23], [START, 24]]
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"num_samples": 3, "seed": 3},
    "restrained": {"num_samples": 2, "top_k": 9, "repetition_penalty": 1.3, "no_repeat_ngram": 2, "eos_id": 4},
}


def make_model(
    stack: dict[str, Any] = STACKS["sinusoidal-post"], *, max_seq_len: int = 32, target_vocab_size: int | None = None
) -> Transformer:
    more: dict[str, Any] = {"tie": {"output": False}}  # a tied output would repeat what it reads
    if target_vocab_size is not None:
        more = {"target_vocab_size": target_vocab_size, "tie": {"source_target": False, "output": True}}
    given = {"final_norm": True, **stack}
    return random_model(given, encoder=True, vocab_size=VOCAB, max_seq_len=max_seq_len, **more)


def assert_same(left: Sequence[list[Generated]], right: Sequence[list[Generated]]) -> None:
    for some, others in zip(left, right, strict=True):
        for one, other in zip(some, others, strict=True):
            assert (one.ids, one.finish_reason) == (other.ids, other.finish_reason)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize(
    ("stack", "choice", "max_seq_len"), pairwise(stack=list(STACKS), choice=list(CHOICES), max_seq_len=[32, 7])
)
def test_cached_equals_uncached_with_sources(stack: str, choice: str, max_seq_len: int) -> None:
    model = make_model(STACKS[stack], max_seq_len=max_seq_len)
    settings = GenerationSettings(max_new_tokens=14, logprobs=True, **CHOICES[choice])
    cached = generate(model, PREFIXES, settings, sources=SOURCES)
    assert_same(cached, uncached_generate(model, PREFIXES, settings, sources=SOURCES))
    assert len({completions[0].logprobs for completions in cached}) == 4, "every source says something else"


@pytest.mark.parametrize(("stack", "choice"), list(zip(STACKS, [*CHOICES, "sampled"], strict=True)))
def test_a_batch_of_sources_equals_one_by_one(stack: str, choice: str) -> None:
    model = make_model(STACKS[stack])
    settings = GenerationSettings(max_new_tokens=12, logprobs=True, **CHOICES[choice])
    alone = [
        generate(model, [prefix], settings, sources=[source], first_row=row)[0]
        for row, (source, prefix) in enumerate(zip(SOURCES, PREFIXES, strict=True))
    ]
    assert_same(generate(model, PREFIXES, settings, sources=SOURCES), alone)
    uncached = uncached_generate(model, PREFIXES[2:], settings, sources=SOURCES[2:], first_row=2)
    assert_same(uncached, alone[2:])


@pytest.mark.parametrize("max_seq_len", [32, 7], ids=["within", "sliding"])
def test_sources_are_encoded_once(max_seq_len: int) -> None:
    model = make_model(max_seq_len=max_seq_len)
    assert model.encoder is not None and model.decoder is not None
    cross = model.decoder.layers[0].cross_attention
    assert cross is not None
    calls: list[int] = []
    for module in (model.encoder, cross.kv):
        module.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0].shape[0]))
    generate(model, PREFIXES, GenerationSettings(max_new_tokens=14, num_samples=2), sources=SOURCES)
    assert calls == [4, 4]


def test_the_target_side_has_its_own_vocabulary() -> None:
    model, settings = make_model(target_vocab_size=40), GenerationSettings(max_new_tokens=30, seed=1, logprobs=True)
    found = generate(model, [[39]] * 4, settings, sources=SOURCES)
    assert_same(found, uncached_generate(model, [[39]] * 4, settings, sources=SOURCES))
    assert max(max(completion.ids) for [completion] in found) >= VOCAB


def test_no_sources_no_work() -> None:
    assert generate(make_model(), [], GenerationSettings(), sources=[]) == []


def test_what_cannot_be_read_is_said() -> None:
    model, settings = make_model(max_seq_len=6), GenerationSettings(max_new_tokens=2, context="error")
    for engine in (generate, uncached_generate):
        with pytest.raises(InputError, match="source 12 has no tokens"):
            engine(model, [[START]] * 2, settings, sources=[[3], []], first_row=10)
        with pytest.raises(InputError, match="prompt 1 has 7 tokens, but the model's context holds 6"):
            engine(model, [[START] * 7], settings, sources=[[3]])
        with pytest.raises(ValueError, match="2 sources and 1 decoder prefixes"):
            engine(model, [[START]], settings, sources=[[3], [4]])
        with pytest.raises(ValueError, match=r"needs (decoder_)?input_ids"):
            engine(model, [[START]], settings)


def test_only_an_encoder_decoder_reads_sources() -> None:
    section = {"d_model": 8, "max_seq_len": 8, "vocab_size": VOCAB, "decoder": {"num_layers": 1, "num_heads": 2}}
    with pytest.raises(ValueError, match="an encoder and a decoder"):
        generate(build_model(Model.model_validate(section)), [[START]], GenerationSettings(), sources=[[3]])


CONTEXT = 16
TEXTS = ["abc", "", "hgfedcba", "c", " \t ", "dead beef", "abcabcabcab", "b a"]
RECIPE = f"""
schema: 1
model:
  d_model: 8
  max_seq_len: {CONTEXT}
  encoder: {{num_layers: 1, num_heads: 2, feedforward: {{d_ff: 16}}}}
  decoder: {{num_layers: 1, num_heads: 2, feedforward: {{d_ff: 16}}}}
objectives: [{{kind: seq2seq}}]
generation: {{beam_size: 3, length_margin: 4}}
"""


def train(letters: str = "abcdefgh ", model: str = "char") -> Tokenizer:
    options = TokenizerOptions(model=model, template="seq2seq", min_frequency=1, vocab_size=64)
    return train_tokenizer(lambda: iter([letters]), options)


TOKENIZER = train()
TARGET = decoder_tokens(TOKENIZER.special)
SETTINGS = BeamSettings(beam_size=3, max_new_tokens=9, n_best=3)


def make(seed: int = 0, *, positions: str = "sinusoidal"):
    torch.manual_seed(seed)
    stack = {"num_layers": 2, "num_heads": 2, "feedforward": {"d_ff": 16}, "positions": {"kind": positions}}
    values = {"d_model": 8, "max_seq_len": CONTEXT, "encoder": stack, "decoder": stack, "tie": {"output": False}}
    model = build_model(Model.model_validate(values), vocab_size=TOKENIZER.vocab_size)
    return shaken(model, 0.4)


def translator(*models, settings=SETTINGS, **options) -> Translator:
    options = {"target": TARGET, "max_source": CONTEXT, **options}
    return Translator(models or (make(),), TOKENIZER, TOKENIZER, settings=settings, **options)


def same(left, right) -> bool:
    """Equal up to the rounding of scores."""
    pairs = [pair for some, others in zip(left, right, strict=True) for pair in zip(some, others, strict=True)]
    return all(
        (one.text, one.ids, one.finish_reason, one.alignment)
        == (other.text, other.ids, other.finish_reason, other.alignment)
        and (one.score, one.logprob) == pytest.approx((other.score, other.logprob), abs=1e-4)
        for one, other in pairs
    )


def forced(model, text: str, ids, start=TARGET.prefix, **options):
    """The force-decoding of one output."""
    return score_targets(model, [TOKENIZER.encode(text, template=True)], [ids], start_ids=start, **options)[0]


# --- order, batches, empty lines --------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [SETTINGS, GenerationSettings(max_new_tokens=9, num_samples=2, seed=5)])
def test_order_is_kept_and_batches_change_nothing(settings):
    one = translator(settings=settings, alignments=True)
    whole = one.translate(TEXTS)
    assert len(whole) == len(TEXTS)
    for size in (1, 3):
        assert same(one.translate(TEXTS, batch_size=size), whole)
    alone = [one.translate([text], first_row=row)[0] for row, text in enumerate(TEXTS)]
    assert same(alone, whole)
    if isinstance(settings, BeamSettings):
        assert same(one.translate(TEXTS[::-1])[::-1], whole)


def test_empty_and_blank_texts_give_one_empty_text():
    found = translator(alignments=True).translate(TEXTS)
    for text, translations in zip(TEXTS, found, strict=True):
        if not text.strip():
            [empty] = translations
            assert (empty.text, empty.ids, empty.logprob, empty.alignment) == ("", (), 0.0, ())
    assert [translations[0].alignment for translations in translator().translate(["", " "])] == [None, None]
    assert translator().translate([]) == []


def test_every_row_is_announced_once_with_what_is_returned():
    seen = {}
    found = translator().translate(
        TEXTS, batch_size=2, first_row=10, on_text=lambda row, ones: seen.update({row: ones})
    )
    assert [seen[10 + index] for index in range(len(TEXTS))] == found


def test_interruption_marks_what_was_not_done():
    calls = iter([False] * 4 + [True] * 999)
    found = translator().translate(TEXTS, batch_size=1, should_stop=lambda: next(calls))
    reasons = [translations[0].finish_reason for translations in found]
    assert reasons[1] == reasons[4] == "eos" and reasons[0] == "interrupted"  # the longest come first
    assert all(translations[0].text == "" for translations in found if translations[0].text is None)


# --- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_reported_log_probabilities_equal_force_decoded_ones(positions):
    model = make(positions=positions)
    for kind, alpha in (("avg", 1.0), ("gnmt", 0.6), ("none", 1.0)):
        settings = replace(SETTINGS, length_penalty=alpha, length_penalty_type=kind)
        for text, ones in zip(TEXTS, translator(model, settings=settings).translate(TEXTS), strict=True):
            for one in ones if text.strip() else []:
                score = forced(model, text, one.ids, vocab_size=TOKENIZER.vocab_size)
                assert one.logprobs == pytest.approx(score.logprobs, abs=1e-4)
                expected = score.logprob
                assert one.logprob == pytest.approx(expected, abs=1e-4)
                assert one.score == pytest.approx(
                    expected / length_penalty(len(one.ids), alpha=alpha, kind=kind), abs=1e-4
                )


def test_n_best_are_different_texts_best_first():
    settings = replace(SETTINGS, beam_size=8, n_best=8)
    for ones in translator(settings=settings).translate(["abc", "b a"]):
        texts, scores = [one.text for one in ones], [one.score for one in ones]
        assert len(set(texts)) == len(texts) > 1 and scores == sorted(scores, reverse=True)
        assert not any("[" in text for text in texts)  # special tokens are no text: hence the equal ones
    [best] = translator(settings=replace(settings, n_best=1)).translate(["abc"])
    assert same([best], [translator(settings=settings).translate(["abc"])[0][:1]])


def test_alignments_link_each_token_to_the_source_token_it_looked_at():
    model = make()
    [best, *_] = translator(model, alignments=True).translate(["hgfedcba"])[0]
    attention = forced(model, "hgfedcba", best.ids, alignments=True).alignment[:, 1:-1]  # without [START], [END]
    tokens = [token for token in best.ids if token != TARGET.eos]
    assert best.alignment == tuple((place, int(attention[place].argmax())) for place in range(len(tokens)))
    assert all(0 <= source < 8 for _, source in best.alignment)


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_a_length_margin_bounds_each_text_by_its_own_source():
    for settings in (replace(SETTINGS, min_new_tokens=9), GenerationSettings(max_new_tokens=9, seed=3, num_samples=4)):
        found = translator(settings=settings, length_margin=1).translate(["a", "abcde", "hgfedcbahg"])
        longest = [max(len(one.ids) for one in ones) for ones in found]
        assert longest[0] <= 2 and longest[1] <= 6 and longest[2] <= 9
        assert any(one.finish_reason == "length" for one in found[0])


def test_the_context_bounds_what_is_written_whatever_stands_beside():
    settings = BeamSettings(beam_size=2, max_new_tokens=50, min_new_tokens=40)
    for positions in ("sinusoidal", "learned"):
        one = translator(make(positions=positions), settings=settings)
        prefixes = ["", "abcdabcda", "ab"]
        found = one.translate(["abc"] * 3, target_prefixes=prefixes)
        alone = [one.translate(["abc"], target_prefixes=[prefix])[0] for prefix in prefixes]
        assert [len(ones[0].ids) for ones in found] == [CONTEXT] * 3  # the last one is never read
        assert same(found, alone)


def test_a_source_longer_than_the_context_names_line_tokens_and_limit():
    decoded = []
    one = translator()
    with pytest.raises(InputError, match=r"line 12: the source has 17 tokens, but the model reads at most 16"):
        one.translate(["a", "b" * 15], first_row=10, on_text=lambda *_: decoded.append(1))
    assert not decoded and one.cut == 0
    found = one.translate(["a", "b" * 15], too_long="cut")
    assert one.cut == 1 and same([found[1]], one.translate(["b" * 14]))
    assert translator(max_source=5).translate(["abc"])
    with pytest.raises(InputError, match=r"6 tokens.*at most 5"):
        translator(max_source=5).translate(["abcd"])


# --- forced prefixes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [SETTINGS, GenerationSettings(max_new_tokens=5, seed=1)])
def test_a_target_prefix_begins_every_translation(settings):
    model, prefixes = make(), ["ha", "", "b f", "c"]
    texts = ["abc", "cab", "d", "hgfedc"]
    found = translator(model, settings=settings).translate(texts, target_prefixes=prefixes)
    for text, prefix, ones in zip(texts, prefixes, found, strict=True):
        ids = TOKENIZER.encode(prefix) if prefix else []
        for one in ones:
            assert one.text.startswith(prefix) and list(one.ids[: len(ids)]) == ids
            after = forced(model, text, one.ids[len(ids) :], start=[*TARGET.prefix, *ids])
            assert one.logprob == pytest.approx(after.logprob, abs=1e-4)


def test_a_prefix_with_unknown_tokens_is_refused_with_its_words():
    with pytest.raises(InputError, match=r"line 3: the target prefix .* 'xyz', '!'"):
        translator().translate(["a", "b"], target_prefixes=["a", "ab xyz ! c"], first_row=1)


def test_a_forced_prefix_is_no_part_of_what_was_scored():
    for settings in (SETTINGS, GenerationSettings(max_new_tokens=5, seed=1)):
        [ones] = translator(settings=settings).translate(["abc"], target_prefixes=["ha"])
        assert all((one.num_forced, len(one.logprobs)) == (2, len(one.ids) - 2) for one in ones)
    assert EMPTY.logprobs == ()


def test_messages_call_rows_what_the_caller_does():
    places = Places(lambda row: f"a.en:{row}", lambda row: f"p.txt:{row}")
    with pytest.raises(InputError, match=r"^a\.en:11: the source has 17 tokens"):
        translator().translate(["a", "b" * 15], first_row=10, places=places)
    with pytest.raises(InputError, match=r"^p\.txt:10: the target prefix has tokens .* 'X'"):
        translator().translate(["a"], target_prefixes=["X"], first_row=10, places=places)


def test_a_prefix_that_fills_the_context_is_refused():
    with pytest.raises(InputError, match=r"line 1: the target prefix has 16 tokens.* room for 15"):
        translator().translate(["a"], target_prefixes=["a" * 16])
    assert translator().translate(["a"], target_prefixes=["a" * 15])[0][0].text.startswith("a" * 15)


# --- ensembles, sampling ----------------------------------------------------------------------------------------------


def test_an_ensemble_of_one_model_twice_is_that_model():
    model = make()
    options = {"alignments": True}
    assert same(translator(model, model, **options).translate(TEXTS), translator(model, **options).translate(TEXTS))


def test_an_ensemble_averages_probabilities():
    models = [make(0), make(1)]
    [best, *_] = translator(*models).translate(["abc"])[0]
    each = np.array([forced(model, "abc", best.ids).logprobs for model in models])
    assert best.logprobs == pytest.approx(np.log(np.exp(each).mean(axis=0)), abs=1e-4)
    assert best.logprob == pytest.approx(sum(best.logprobs), abs=1e-6)


def test_samples_depend_on_the_seed_and_have_their_log_probability():
    model, settings = make(), GenerationSettings(max_new_tokens=6, num_samples=3, seed=1)
    ones = translator(model, settings=settings).translate(["abc"])[0]
    assert len(ones) == 3
    for one in ones:
        assert one.score == one.logprob == pytest.approx(forced(model, "abc", one.ids).logprob, abs=1e-4)
        assert one.logprobs == pytest.approx(forced(model, "abc", one.ids).logprobs, abs=1e-4)
    others = translator(model, settings=replace(settings, seed=2)).translate(["abc"])[0]
    assert [one.ids for one in ones] != [one.ids for one in others]


def test_greedy_sampling_is_a_beam_of_one():
    greedy = translator(settings=GenerationSettings(max_new_tokens=9, temperature=0)).translate(TEXTS)
    beam = translator(settings=BeamSettings(beam_size=1, max_new_tokens=9)).translate(TEXTS)
    assert [ones[0].ids for ones in greedy] == [ones[0].ids for ones in beam]


def test_a_stop_text_cuts_what_is_written():
    settings = GenerationSettings(max_new_tokens=9, temperature=0)
    plain = translator(settings=settings).translate(["abc"], target_prefixes=["ha"])[0][0].text
    stop = plain[4:5]
    [[cut]] = translator(settings=replace(settings, stop_texts=(stop,))).translate(["abc"], target_prefixes=["ha"])
    assert cut.finish_reason == "stop" and cut.text == "ha" + plain[2:].split(stop)[0]


def test_sampling_needs_one_model():
    settings = GenerationSettings()
    with pytest.raises(InputError, match="ensemble of 2"):
        translator(make(), make(1), settings=settings)


# --- what was loaded --------------------------------------------------------------------------------------------------


def loaded(letters: str = "abcdefgh ", name: str = "one", recipe: str = RECIPE) -> Loaded:
    tokenizer, torch_recipe = train(letters), recipe_from_yaml(recipe, name="test")
    torch.manual_seed(0)
    model = build_model(torch_recipe.model, vocab_size=tokenizer.vocab_size)
    return Loaded(model.eval(), tokenizer, torch_recipe, Path(name), 3)


def test_a_loaded_model_translates_as_its_recipe_says():
    one = loaded()
    found = translator_of(one).translate(["abc"])
    settings = BeamSettings.from_recipe(one.recipe.generation, eos_id=TARGET.eos)
    by_hand = translator(one.model, settings=settings, length_margin=4)
    assert same(found, by_hand.translate(["abc"])) and len(found[0][0].ids) <= 7
    longer = translator_of(one, length_margin=1).translate(["abc"])
    assert len(longer[0][0].ids) <= 4
    assert translator_of(one, settings=GenerationSettings()).translate(["abc"])


def test_an_ensemble_of_different_vocabularies_is_refused_with_both_names():
    assert translator_of(loaded(), loaded(name="two"))
    with pytest.raises(InputError, match=r"one and two have different vocabularies \(16 and 16 tokens"):
        translator_of(loaded(), loaded("abcdefxy ", name="two"))
    decoder = RECIPE.replace("  encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}}\n", "").replace(
        "objectives: [{kind: seq2seq}]\ngeneration: {beam_size: 3, length_margin: 4}", ""
    )
    alone = loaded(name="two", recipe=decoder)
    with pytest.raises(InputError, match="of one and two, two has no encoder"):
        translator_of(loaded(), alone)
    with pytest.raises(InputError, match="two: translation needs a model with an encoder and a decoder"):
        translator_of(alone)
