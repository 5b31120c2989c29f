"""What decoding never writes, and what never keeps it from ending: pad and start tokens, and the end of sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.decoding.beam_reference import ScriptedStepper, table
from tests.decoding.uncached import uncached_generate
from tformer.build import build_model
from tformer.decoding.beam_search import beam_search
from tformer.decoding.generate import generate
from tformer.decoding.prompts import suppressed_tokens
from tformer.decoding.score import score_targets
from tformer.decoding.settings import BeamSettings, GenerationSettings
from tformer.decoding.translate import Continuer, Translator
from tformer.model import Transformer
from tformer.recipe.model import Model
from tformer.recipe.sections import Generation
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer
from tformer.tokenizer.special import DecoderTokens, SpecialIds, decoder_tokens

A, EOS, B = 0, 1, 2
TEXTS = ["abc", "fed cab", "h"]


def train(template: str) -> Tokenizer:
    options = TokenizerOptions(model="char", template=template, min_frequency=1, sentinels=0)
    return train_tokenizer(lambda: iter(["abcdefgh "]), options)


def make(tokenizer: Tokenizer, *, encoder: bool = True, likely: tuple[int, ...] = ()) -> Transformer:
    """A model that would rather write the `likely` tokens than anything else."""
    torch.manual_seed(0)
    side = {"num_layers": 1, "num_heads": 2, "feedforward": {"d_ff": 16}}
    sides = {"encoder": side, "decoder": side} if encoder else {"decoder": side}
    section: dict[str, Any] = {"d_model": 8, "max_seq_len": 16, "tie": {"output": False}, **sides}
    section["heads"] = [{"kind": "lm", "bias": True}]
    model = build_model(Model.model_validate(section), vocab_size=tokenizer.vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
        model.state_dict()["heads.lm.bias"][list(likely)] += 9.0
    return model.eval()


def make_translator(
    tokenizer: Tokenizer, template: str, settings: Any, *, likely: tuple[str, ...]
) -> tuple[Translator, DecoderTokens, Transformer]:
    roles = [getattr(tokenizer.special, role) for role in likely]
    model = make(tokenizer, likely=tuple(role for role in roles if role is not None))
    # BART starts from its end of sequence; T5, which has no bos, from its pad.
    target = decoder_tokens(tokenizer.special, start=tokenizer.special.eos if template == "roberta" else None)
    return Translator([model], tokenizer, tokenizer, settings=settings, target=target, max_source=16), target, model


# --- pad and start are never written ----------------------------------------------------------------------------------


def test_pad_and_start_are_suppressed_unless_they_end_a_text_or_are_forced() -> None:
    special = SpecialIds(pad=0, bos=1, eos=2)
    assert suppressed_tokens(special, DecoderTokens(start=7, eos=2), eos=2) == (0, 1, 7)
    assert suppressed_tokens(special, DecoderTokens(start=2, eos=2), eos=2) == (0, 1)
    assert suppressed_tokens(special, DecoderTokens(start=2, eos=2, forced_bos=1), eos=2) == (0,)
    assert suppressed_tokens(SpecialIds(bos=3, eos=3), eos=3) == ()
    assert suppressed_tokens(SpecialIds(), eos=None) == ()


def test_a_recipe_may_rule_out_other_tokens_or_none() -> None:
    special = SpecialIds(pad=0, bos=1, eos=2)
    assert suppressed_tokens(special, DecoderTokens(start=7, eos=2), eos=2, suppressed=(9, 3, 9)) == (3, 9)
    assert suppressed_tokens(special, eos=2, suppressed=()) == ()
    for kind in (BeamSettings, GenerationSettings):
        assert kind.from_recipe(Generation()).suppress_tokens is None
        assert kind.from_recipe(Generation(suppress_tokens=(3,))).suppress_tokens == (3,)


@pytest.mark.parametrize("kind", [BeamSettings, GenerationSettings])
def test_what_a_recipe_does_not_rule_out_is_written(kind: Any) -> None:
    """Ids that the vocabulary does not have are never written in any case."""
    tokenizer = train("seq2seq")
    pad = tokenizer.special.pad
    one = {"beam_size": 1} if kind is BeamSettings else {"temperature": 0.0}
    for suppressed, written in (((), True), ((pad, 10**6), False), (None, False)):
        settings = kind(max_new_tokens=3, suppress_tokens=suppressed, **one)
        translator, *_ = make_translator(tokenizer, "seq2seq", settings, likely=("pad",))
        assert all((pad in ones[0].ids) == written for ones in translator.translate(TEXTS))


@pytest.mark.parametrize("template", ["seq2seq", "t5", "roberta"])
@pytest.mark.parametrize(
    "settings",
    [
        BeamSettings(beam_size=3, n_best=3, max_new_tokens=6, length_penalty_type="none"),
        GenerationSettings(max_new_tokens=6, num_samples=4, seed=3),
        GenerationSettings(max_new_tokens=6, temperature=0),
    ],
    ids=["beam", "sampled", "greedy"],
)
def test_pad_and_start_are_never_written_however_likely(template: str, settings: Any) -> None:
    """And nothing is normalized again: log-probabilities are those of force-decoding."""
    tokenizer = train(template)
    translator, target, model = make_translator(tokenizer, template, settings, likely=("pad", "bos"))
    never = {tokenizer.special.pad, tokenizer.special.bos, target.start} - {target.eos}
    for text, ones in zip(TEXTS, translator.translate(TEXTS), strict=True):
        for one in ones:
            assert one.ids and not never & set(one.ids)
            source = tokenizer.encode(text, template=True)
            [score] = score_targets(model, [source], [one.ids], start_ids=target.prefix)
            assert one.logprob == pytest.approx(score.logprob, abs=1e-4) and score.logprob < -5


def test_a_beam_of_a_decoder_alone_never_writes_pad() -> None:
    tokenizer = train("gpt")
    model = make(tokenizer, encoder=False, likely=(tokenizer.special.pad,))
    settings = BeamSettings(beam_size=3, n_best=3, max_new_tokens=6, eos_id=tokenizer.special.eos)
    for ones in Continuer([model], tokenizer, settings).continue_texts(TEXTS):
        assert all(tokenizer.special.pad not in one.ids for one in ones)


def test_what_is_never_offered_keeps_the_numbers_of_the_others() -> None:
    rule = table({}, otherwise=(0.5, 0.2, 0.3))
    options = BeamSettings(beam_size=1, max_new_tokens=2, eos_id=EOS)
    [[found]] = beam_search(ScriptedStepper([rule]), options, suppressed=[A])
    assert found.ids == (B, B)
    assert found.logprob == pytest.approx(2 * torch.tensor(0.3).log().item(), abs=1e-6)


# --- the end of sequence is never blocked or penalized ----------------------------------------------------------------


def test_an_end_of_sequence_in_the_history_is_neither_blocked_nor_penalized() -> None:
    rule = table({}, otherwise=(0.1, 0.6, 0.3))
    for rules in ({"no_repeat_ngram": 1}, {"repetition_penalty": 9.0}):
        options = BeamSettings(beam_size=1, max_new_tokens=3, eos_id=EOS, **rules)
        [[found]] = beam_search(ScriptedStepper([rule]), options, histories=[[EOS, B]])
        assert found.ids == (EOS,) and found.score == found.logprob


@pytest.mark.parametrize("changes", [{"no_repeat_ngram": 1}, {"repetition_penalty": 9.0}])
@pytest.mark.parametrize("engine", [generate, uncached_generate])
def test_an_end_of_sequence_in_the_prompt_does_not_keep_sampling_from_ending(scripted, engine, changes) -> None:
    model = scripted(lambda seen: [1.0, 3.0, 2.0])
    settings = GenerationSettings(max_new_tokens=3, temperature=0, eos_id=EOS, **changes)
    [[completion]] = engine(model, [[EOS, A]], settings)
    assert completion.ids == (EOS,)


@pytest.mark.parametrize("changes", [{"no_repeat_ngram": 1}, {"repetition_penalty": 1.7}])
@pytest.mark.parametrize("kind", [BeamSettings, GenerationSettings])
def test_a_decoder_that_starts_from_its_end_ends_as_one_that_does_not(kind: Any, changes: dict[str, Any]) -> None:
    """BART: what is looked back on begins with the text. The start token, were it seen, would count as repeated."""
    one = {"beam_size": 1} if kind is BeamSettings else {"temperature": 0.0}
    for template in ("roberta", "seq2seq"):
        settings = kind(max_new_tokens=8, **one, **changes)
        translator, *_ = make_translator(train(template), template, settings, likely=("eos",))
        assert [ones[0].finish_reason for ones in translator.translate(TEXTS)] == ["eos"] * len(TEXTS)
        assert all(len(ones[0].ids) == 1 for ones in translator.translate(TEXTS))


@pytest.mark.parametrize("kind", [BeamSettings, GenerationSettings])
def test_a_start_token_is_no_text_that_could_be_repeated(kind: Any) -> None:
    """Here the decoder starts from a letter: it may write that letter once, but not twice."""
    tokenizer = train("seq2seq")
    [letter] = tokenizer.encode("a")
    model = make(tokenizer, likely=(letter,))
    target = DecoderTokens(start=tokenizer.special.unk, eos=tokenizer.special.eos, forced_bos=letter)
    one = {"beam_size": 1} if kind is BeamSettings else {"temperature": 0.0}
    settings = kind(max_new_tokens=4, no_repeat_ngram=1, **one)
    translator = Translator([model], tokenizer, tokenizer, settings=settings, target=target, max_source=16)
    plain, forced = translator.translate(["abc"] * 2, target_prefixes=["", "a"])
    assert plain[0].ids[0] == letter and plain[0].ids.count(letter) == 1
    assert forced[0].ids[0] == letter and forced[0].ids.count(letter) == 1  # the forced one


# --- the least length, of samples too ---------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [generate, uncached_generate])
def test_no_sample_ends_before_the_least_length(scripted, engine) -> None:
    model = scripted(lambda seen: [1.0, 5.0, 2.0])
    for least in (0, 1, 4):
        settings = GenerationSettings(max_new_tokens=9, min_new_tokens=least, eos_id=EOS, temperature=0, logprobs=True)
        [[completion]] = engine(model, [[A]], settings)
        assert completion.ids == (*(B,) * least, EOS)
        assert completion.logprobs is not None and completion.logprobs[-1] > -0.1  # under the model's own distribution


@pytest.mark.parametrize("engine", [generate, uncached_generate])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_forced_end_is_the_last_token_of_each_samples_limit(scripted, engine, temperature: float) -> None:
    model = scripted(lambda seen: [1.0, -40.0, 2.0])
    settings = GenerationSettings(
        max_new_tokens=4, min_new_tokens=2, eos_id=EOS, forced_eos=EOS, temperature=temperature, logprobs=True
    )
    found = [one for [one] in engine(model, [[A], [B], [A, B]], settings, limits=[1, 3, 4])]
    assert [len(one.ids) for one in found] == [1, 3, 4]
    for one in found:
        assert one.ids.index(EOS) == len(one.ids) - 1 and one.finish_reason == "eos"
        assert one.logprobs is not None and one.logprobs[-1] < -40  # under the model's own distribution


@pytest.mark.parametrize("engine", [generate, uncached_generate])
def test_a_sample_at_its_limit_ends_where_the_settings_say_so(scripted, engine) -> None:
    """By the model's end of sequence, or by its first stop token where it has none."""
    model = scripted(lambda seen: [1.0, -40.0, 2.0])
    for ends in ({"eos_id": EOS}, {"stop_tokens": (EOS,)}):
        settings = GenerationSettings(max_new_tokens=4, temperature=0.0, at_limit="end", logprobs=True, **ends)
        found = [one for [one] in engine(model, [[A], [B]], settings, limits=[1, 4])]
        assert [one.ids for one in found] == [(EOS,), (B, B, B, EOS)]
        assert all(one.finish_reason in ("eos", "stop") and one.logprobs[-1] < -40 for one in found)


def test_an_end_at_the_limit_needs_a_token_that_ends_a_text() -> None:
    for kind in (BeamSettings, GenerationSettings):
        with pytest.raises(InputError, match=r"^--at-limit end needs an end-of-sequence token, the model has none$"):
            kind(at_limit="end")
        with pytest.raises(InputError, match=r"^at_limit must be cut or end, found stop$"):
            kind(at_limit="stop", eos_id=EOS)
        assert kind(at_limit="end", stop_tokens=(3, 4)).last_token == 3
        assert kind(at_limit="end", eos_id=5, stop_tokens=(3, 4)).last_token == 5
        assert kind(at_limit="end", eos_id=5, forced_eos=6).last_token == 6
        assert kind(eos_id=5).last_token is None


@pytest.mark.parametrize("kind", [BeamSettings, GenerationSettings])
def test_a_translation_that_would_be_cut_ends_as_it_is_forced_to(kind: Any) -> None:
    """However short the sentence's own limit is."""
    tokenizer = train("seq2seq")
    [letter] = tokenizer.encode("a")
    eos = tokenizer.special.eos
    assert eos is not None
    model = make(tokenizer, likely=(letter,))
    one = {"beam_size": 1} if kind is BeamSettings else {"temperature": 0.0}
    for forced in (None, eos):
        target = DecoderTokens(start=tokenizer.special.bos or 0, eos=eos, forced_eos=forced)
        options = {"settings": kind(max_new_tokens=6, **one), "target": target, "max_source": 16, "length_margin": 0}
        translator = Translator([model], tokenizer, tokenizer, **options)
        found = [ones[0] for ones in translator.translate(TEXTS)]
        assert [len(one.ids) for one in found] == [3, 6, 1]
        assert all((one.ids[-1] == eos) == (forced is not None) for one in found)


def test_the_least_length_gives_way_where_only_the_end_is_left(scripted) -> None:
    never = float("-inf")
    settings = GenerationSettings(max_new_tokens=9, min_new_tokens=4, eos_id=EOS, temperature=0)
    [[completion]] = generate(scripted(lambda seen: [never, 5.0, never]), [[A]], settings)
    assert completion.ids == (EOS,)


def test_samples_of_an_encoder_decoder_have_the_least_length() -> None:
    settings = GenerationSettings(max_new_tokens=8, min_new_tokens=5, num_samples=3, seed=2)
    translator, target, _ = make_translator(train("seq2seq"), "seq2seq", settings, likely=("eos",))
    for ones in translator.translate(TEXTS):
        assert all(len(one.ids) >= 6 and target.eos not in one.ids[:5] for one in ones)


def test_a_recipes_least_length_gives_way_to_a_smaller_maximum() -> None:
    recipe = Generation(min_new_tokens=20)
    assert GenerationSettings.from_recipe(recipe).min_new_tokens == 20
    assert GenerationSettings.from_recipe(recipe, max_new_tokens=8).min_new_tokens == 8
    with pytest.raises(InputError, match="--min-new-tokens 9 is larger than --max-new-tokens 8"):
        GenerationSettings.from_recipe(recipe, max_new_tokens=8, min_new_tokens=9)
