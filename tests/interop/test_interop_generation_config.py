"""Special ids and settings of generation, in from a folder and out again; what has no counterpart is told."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import tformer
from tests.interop import tiny_folders as tiny
from tests.interop.writing import EOS, MODELS, PAD, TEXTS, VOCABULARY, sharpened
from tformer.decoding.loaded import translator_of
from tformer.decoding.settings import BeamSettings
from tformer.decoding.translate import Continuer
from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.foreign_checkpoint import open_folder
from tformer.interop.generation_config import STOPPING, generation_notes, left_unsaid, read_generation, write_generation
from tformer.interop.tokenizer_config import end_ids, special_ids, special_keys
from tformer.loading import Loaded
from tformer.recipe.recipe import Recipe
from tformer.recipe.sections import Generation
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer

STACK = {"num_layers": 1, "num_heads": 2}
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
BART = {"model_type": "bart", "architectures": ["BartForConditionalGeneration"], "vocab_size": 50}


def recipe(*sides: str, head: str = "lm", ids: dict[str, int] | None = None, **generation: Any) -> Recipe:
    model = {"d_model": 8, "max_seq_len": 16, "heads": [{"kind": head}], **dict.fromkeys(sides, STACK)}
    tokenizer = {"special_ids": ids or {}}
    return Recipe.model_validate({"model": model, "tokenizer": tokenizer, "generation": generation})


def tokenizer(template: str) -> Tokenizer:
    options = TokenizerOptions(model="char", template=template)  # type: ignore[arg-type]
    return train_tokenizer(lambda: iter(["the cat sat on the mat"]), options)


def folder_with(path: Path, **values: Any) -> Path:
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


# --- special ids -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES.keys() & set(transformers.CONFIG_MAPPING)))
def test_a_key_that_is_missing_means_what_transformers_takes_it_for(model_type: str) -> None:
    theirs = transformers.AutoConfig.for_model(model_type)
    names = ("pad", "bos", "eos", "cls", "sep", "decoder_start", "forced_bos", "forced_eos")
    expected = {name: getattr(theirs, f"{name}_token_id", None) for name in names}
    expected = {name: token for name, token in expected.items() if token is not None}
    assert special_ids({"model_type": model_type}, None, {}) == expected


def test_a_null_is_none() -> None:
    assert special_ids({**BART, "decoder_start_token_id": None, "forced_eos_token_id": None}, None, {}) == {
        **{"pad": 1, "bos": 0, "eos": 2},
    }


def test_what_generation_says_goes_before_the_model_and_roles_of_the_tokenizer_are_its_own() -> None:
    config = {
        "pad_token_id": 1,
        "eos_token_id": 2,
        "bos_token_id": None,
        "sep_token_id": 9,
        "decoder_start_token_id": 5,
    }
    found = special_ids(config, {"eos_token_id": 3, "decoder_start_token_id": 6}, {"pad": 4, "eos": 8, "bos": 7})
    assert found == {"pad": 4, "sep": 9, "bos": 7, "eos": 3, "decoder_start": 6}


def test_an_id_beyond_the_vocabulary_stands_for_nothing() -> None:
    assert special_ids({**GPT2, "vocab_size": 61, "pad_token_id": -1}, None, {}) == {}


def test_of_several_ends_the_first_is_the_end_and_all_stop(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, eos_token_id=[9, 7, 8])
    assert special_ids({"eos_token_id": 2}, {"eos_token_id": [9, 7, 8]}, {})["eos"] == 9
    assert end_ids({"eos_token_id": [2, 3]}, None) == (2, 3)
    assert read_generation(folder, {**GPT2, "eos_token_id": 2})["stop_tokens"] == [7, 8]


def test_the_older_name_of_a_forced_first_token() -> None:
    assert special_ids({**BART, "force_bos_token_to_be_generated": True}, None, {})["forced_bos"] == 0


def bart_cnn(folder: Path, generation: dict[str, Any] | None) -> Path:
    """A folder of BART whose config.json forces the first and last token."""
    folder = tiny.bart(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    given = {"forced_bos_token_id": 0, "forced_eos_token_id": 2, "num_beams": 4, "no_repeat_ngram_size": 3}
    tiny.edit_json(folder / "config.json", given | {"length_penalty": 2.0, "early_stopping": True, "min_length": 5})
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


USED = ("forced_bos_token_id", "forced_eos_token_id", "decoder_start_token_id", "num_beams", "length_penalty",
        "no_repeat_ngram_size", "min_length", "early_stopping", "eos_token_id")  # fmt: skip


@pytest.mark.parametrize(
    "generation",
    [
        None,
        {},
        {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 2},
        {"bos_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": 2, "decoder_start_token_id": 2, "num_beams": 2},
        {"bos_token_id": 5, "eos_token_id": 2, "forced_bos_token_id": 0, "length_penalty": 0.5, "num_beams": 3},
        {"bos_token_id": 0, "eos_token_id": 2, "min_length": 3, "no_repeat_ngram_size": 2, "early_stopping": "never"},
    ],
    ids=["no-file", "empty-file", "without-forced", "forced-end", "start-from-bos", "other-keys"],
)
def test_generation_keys_come_from_the_file_alone_where_there_is_one(
    tmp_path: Path, generation: dict[str, Any] | None
) -> None:
    """As in bart-large-cnn: what config.json forces does not count beside a generation_config.json without it."""
    folder = bart_cnn(tmp_path / "folder", generation)
    theirs = transformers.BartForConditionalGeneration.from_pretrained(folder).generation_config
    wanted = {name: getattr(theirs, name) for name in USED}
    checkpoint = open_folder(folder)
    recipe = checkpoint.recipe
    ids, ours = recipe.tokenizer.special_ids, recipe.generation
    assert (ids.forced_bos, ids.forced_eos) == (wanted["forced_bos_token_id"], wanted["forced_eos_token_id"])
    start = wanted["decoder_start_token_id"] if wanted["decoder_start_token_id"] is not None else theirs.bos_token_id
    assert ids.decoder_start == (2 if start is None else start)  # transformers cannot start without either
    assert ours.beam_size == (wanted["num_beams"] or 1)
    assert ours.no_repeat_ngram == (wanted["no_repeat_ngram_size"] or 0)
    assert ours.length_penalty == (1.0 if wanted["length_penalty"] is None else wanted["length_penalty"])
    assert ours.stopping == STOPPING[wanted["early_stopping"] or False]
    forced = int(wanted["forced_bos_token_id"] is not None)
    assert ours.min_new_tokens == max(0, (wanted["min_length"] or 0) - 1 - forced)
    silent = wanted["eos_token_id"] is None
    assert any("no eos_token_id" in note for note in checkpoint.notes) == silent


def test_an_id_of_another_type_is_refused() -> None:
    with pytest.raises(InputError, match=r"config\.json: eos_token_id: found '2', expected an id"):
        special_ids({"eos_token_id": "2"}, None, {})


def test_the_keys_of_a_config_are_all_written_so_that_no_default_steps_in() -> None:
    word = tokenizer("bert")
    assert special_keys(recipe("encoder", head="masked_lm"), word, None) == {
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    }
    keys = special_keys(recipe("encoder", "decoder", ids={"decoder_start": 1, "forced_eos": 3}), tokenizer("t5"), None)
    assert keys == {
        **{"is_encoder_decoder": True, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0},
        **{"decoder_start_token_id": 1, "forced_bos_token_id": None, "forced_eos_token_id": 3},
    }
    assert special_keys(recipe("decoder"), None, None) == {}
    assert special_keys(recipe("decoder", ids={"eos": 4}), tokenizer("gpt"), None)["eos_token_id"] == 4


def test_with_two_vocabularies_the_keys_are_of_the_side_that_is_written() -> None:
    keys = special_keys(recipe("encoder", "decoder", ids={"pad": 5}), tokenizer("t5"), tokenizer("seq2seq"))
    target = tokenizer("seq2seq").special
    assert (keys["pad_token_id"], keys["eos_token_id"], keys["decoder_start_token_id"]) == (5, target.eos, target.bos)


# --- settings, in ----------------------------------------------------------------------------------------------------


def test_settings_of_an_encoder_decoder(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path,
        **{"num_beams": 4, "length_penalty": 2.0, "early_stopping": True, "no_repeat_ngram_size": 3},
        **{"max_length": 142, "min_length": 56, "forced_bos_token_id": 0, "repetition_penalty": 1.2},
    )
    found = read_generation(folder, BART)
    assert found == {
        **{"beam_size": 4, "length_penalty": 2.0, "stopping": "beam", "no_repeat_ngram": 3},
        **{"max_new_tokens": 140, "min_new_tokens": 54, "repetition_penalty": 1.2, "suppress_tokens": []},
        "temperature": 0.0,
    }
    Generation.model_validate(found)
    assert generation_notes(folder, BART) == ()


@pytest.mark.parametrize(
    ("value", "ours"), [(True, "beam"), (False, "heuristic"), (None, "heuristic"), ("never", "exhaustive")]
)
def test_the_stopping_rule(tmp_path: Path, value: Any, ours: str) -> None:
    assert read_generation(folder_with(tmp_path, early_stopping=value), BART)["stopping"] == ours


def test_sampling_and_greedy_decoding(tmp_path: Path) -> None:
    sampled = read_generation(folder_with(tmp_path, do_sample=True, temperature=0.6, top_p=0.9), GPT2)
    assert {name: sampled[name] for name in ("temperature", "top_k", "top_p", "min_p")} == {
        **{"temperature": 0.6, "top_k": 50, "top_p": 0.9, "min_p": 0.0}
    }
    assert read_generation(folder_with(tmp_path, do_sample=False, temperature=0.6), GPT2)["temperature"] == 0.0
    assert read_generation(folder_with(tmp_path), GPT2)["temperature"] == 0.0  # their `generate` is greedy by default


def test_a_length_of_their_own_counts_neither_start_nor_prompt(tmp_path: Path) -> None:
    marian = {"model_type": "marian", "architectures": ["MarianMTModel"], "vocab_size": 60000}
    folder = folder_with(tmp_path, max_length=512, bad_words_ids=[[58100]], forced_eos_token_id=0)
    assert read_generation(folder, marian)["max_new_tokens"] == 511
    assert read_generation(folder, marian)["suppress_tokens"] == [58100]
    assert "max_new_tokens" not in read_generation(folder, GPT2)
    assert any("max_length 512 counts the prompt" in note for note in generation_notes(folder, GPT2))
    assert read_generation(folder_with(tmp_path, max_new_tokens=7), GPT2)["max_new_tokens"] == 7


def test_older_keys_of_the_model_count_where_there_is_no_file(tmp_path: Path) -> None:
    assert read_generation(tmp_path, {**BART, "num_beams": 3})["beam_size"] == 3
    assert "beam_size" not in read_generation(folder_with(tmp_path), {**BART, "num_beams": 3})


def test_a_model_that_does_not_write_has_no_settings(tmp_path: Path) -> None:
    bert = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "num_beams": 3}
    assert read_generation(tmp_path, bert) == {} and generation_notes(tmp_path, bert) == ()


@pytest.mark.parametrize(
    ("values", "note"),
    [
        ({"epsilon_cutoff": 0.1}, "epsilon_cutoff 0.1 has no counterpart"),
        ({"encoder_no_repeat_ngram_size": 3}, "encoder_no_repeat_ngram_size 3 has no counterpart"),
        ({"bad_words_ids": [[3], [4, 5]]}, "bad_words_ids: tformer forbids single tokens only"),
        ({"begin_suppress_tokens": [3]}, "begin_suppress_tokens [3] has no counterpart"),
        ({"do_sample": True, "num_beams": 2}, "do_sample with num_beams"),
        ({"do_sample": True}, "do_sample: an encoder-decoder decodes greedily"),
        ({"length_penalty": 20.0}, "length_penalty 20.0 is beyond 10"),
    ],
)
def test_what_has_no_counterpart_is_told(tmp_path: Path, values: dict[str, Any], note: str) -> None:
    folder = folder_with(tmp_path, **values)
    assert any(note in told for told in generation_notes(folder, BART))
    Generation.model_validate(read_generation(folder, BART))


def test_what_is_switched_off_is_not_told(tmp_path: Path) -> None:
    values = transformers.GenerationConfig().to_dict() | transformers.GenerationConfig._get_default_generation_params()
    values.pop("max_length")  # a fallback of `generate`, which no folder has
    folder = folder_with(tmp_path, **values)
    assert generation_notes(folder, BART) == generation_notes(folder, GPT2) == ()


@pytest.mark.parametrize("values", [{"num_beams": "4"}, {"early_stopping": 1}, {"do_sample": "no"}])
def test_a_value_of_another_type_names_file_and_key(tmp_path: Path, values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=rf"generation_config\.json: {next(iter(values))}: found"):
        read_generation(folder_with(tmp_path, **values), BART)


# --- settings, out ---------------------------------------------------------------------------------------------------


def test_a_decoder_samples_there_as_here() -> None:
    word = tokenizer("gpt")
    written = write_generation(recipe("decoder", temperature=0.7, top_k=5, min_new_tokens=2, stop_tokens=[4]), word)
    assert written == {
        **{"bos_token_id": 0, "eos_token_id": [0, 4], "pad_token_id": 1, "suppress_tokens": [1]},
        **{"max_new_tokens": 200, "min_new_tokens": 2, "num_beams": 1},
        **{"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 1.0},
    }
    assert write_generation(recipe("decoder", temperature=0.0), word)["do_sample"] is False


def test_a_translator_searches_there_as_here() -> None:
    ids = {"decoder_start": 2, "forced_bos": 0, "forced_eos": 2, "eos": 2, "bos": 0, "pad": 1}
    values: dict[str, Any] = {"beam_size": 4, "length_penalty": 0.6, "stopping": "heuristic", "max_new_tokens": 30}
    written = write_generation(recipe("encoder", "decoder", ids=ids, **values), tokenizer("roberta"))
    assert written == {
        **{"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 2},
        **{"forced_bos_token_id": 0, "forced_eos_token_id": 2, "suppress_tokens": [1]},
        **{"max_new_tokens": 31, "do_sample": False, "num_beams": 4, "length_penalty": 0.6, "early_stopping": False},
    }


def test_an_encoder_writes_nothing() -> None:
    assert write_generation(recipe("encoder", head="masked_lm"), tokenizer("bert")) == {}
    assert write_generation(recipe("decoder"), None) == {}
    assert left_unsaid(recipe("encoder", head="masked_lm", stop=["x"])) == ()


def test_what_cannot_be_said_there_is_told() -> None:
    assert left_unsaid(recipe("decoder")) == ()
    told = left_unsaid(
        recipe("encoder", "decoder", length_penalty_type="gnmt", beam_size=2, length_margin=5, stop=["x"])
    )
    assert [line.split()[0] for line in told] == [
        *("generation.length_penalty_type", "generation.length_margin", "generation.stop")
    ]


@pytest.mark.parametrize("sides", [("decoder",), ("encoder", "decoder")])
def test_what_is_written_reads_back_as_it_was(tmp_path: Path, sides: tuple[str, ...]) -> None:
    shared: dict[str, Any] = {"repetition_penalty": 1.3, "no_repeat_ngram": 2, "max_new_tokens": 9, "min_new_tokens": 3}
    searched = {"beam_size": 3, "length_penalty": 0.5, "stopping": "exhaustive", "temperature": 0.0}
    sampled = {"temperature": 0.5, "top_k": 3, "top_p": 0.8, "min_p": 0.1, "stopping": "heuristic"}
    more: dict[str, Any] = sampled if len(sides) == 1 else searched
    ours = recipe(*sides, suppress_tokens=[5], stop_tokens=[7], **shared, **more)
    name = "GPT2LMHeadModel" if len(sides) == 1 else "BartForConditionalGeneration"
    folder = folder_with(tmp_path, **write_generation(ours, tokenizer("t5")))
    found = Generation.model_validate(read_generation(folder, {"architectures": [name]}))
    assert found == ours.generation


@given(
    temperature=st.floats(0.01, 10),
    top_k=st.integers(0, 100),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 0.99),
)
def test_every_setting_of_sampling_is_there_and_back_as_it_was(**values: Any) -> None:
    """Through the library itself, which leaves out its defaults."""
    ours = recipe("decoder", **values)
    document = write_generation(ours, tokenizer("gpt"))
    theirs = transformers.GenerationConfig(**document)
    assert all(getattr(theirs, name) == values[name] for name in values.keys() & document.keys())
    with TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        found = Generation.model_validate(read_generation(Path(folder), GPT2))
    assert {name: getattr(found, name) for name in values} == values
    assert left_unsaid(ours) == ()


def test_transformers_generates_with_the_files_that_were_written(tmp_path: Path) -> None:
    """Right start and end: what always wants the end stops at once, what always wants pad never writes it."""
    word = tokenizer("seq2seq")
    document = write_generation(recipe("encoder", "decoder", max_new_tokens=5), word)
    keys = special_keys(recipe("encoder", "decoder"), word, None)
    config = transformers.BartConfig(
        vocab_size=word.vocab_size, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=20, **keys,
    )  # fmt: skip
    for wanted, expected in ((word.special.eos, 1), (word.special.pad, 5)):
        model = transformers.BartForConditionalGeneration(config)
        model.final_logits_bias[0, word.special.eos] = -1000.0  # not by chance
        model.final_logits_bias[0, wanted] = 1000.0
        folder = tmp_path / str(wanted)
        model.save_pretrained(folder)
        folder_with(folder, **document)
        model = transformers.BartForConditionalGeneration.from_pretrained(folder)
        ids = model.generate(torch.tensor([[2, 8, 9, 3]]))[0].tolist()
        assert ids[0] == word.special.bos and len(ids) == 1 + expected and word.special.pad not in ids


# --- folders ----------------------------------------------------------------------------------------------------------


SUMMARIES = {"num_beams": 4, "length_penalty": 2.0, "no_repeat_ngram_size": 3, "min_length": 4, "max_length": 12}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "bart": [
        SUMMARIES | {"early_stopping": True, "forced_bos_token_id": 7, "forced_eos_token_id": EOS},
        SUMMARIES | {"forced_eos_token_id": EOS, "eos_token_id": [EOS, 3]},
    ],
    "marian": [
        {"num_beams": 4, "max_length": 14, "bad_words_ids": [[PAD]], "forced_eos_token_id": EOS},
        {
            "num_beams": 4,
            "max_new_tokens": 9,
            "length_penalty": 0.6,
            "early_stopping": "never",
            "suppress_tokens": [20],
        },
    ],
    "t5": [
        {"max_length": 11, "min_length": 5},
        {"num_beams": 4, "max_new_tokens": 10, "length_penalty": -0.5},
    ],
    "gpt2": [
        {"num_beams": 4, "max_new_tokens": 10, "length_penalty": 0.6, "repetition_penalty": 1.2},
        {"num_beams": 3, "max_new_tokens": 8, "min_new_tokens": 3, "early_stopping": True, "eos_token_id": [EOS, 17]},
    ],
}


def save(name: str, settings: dict[str, Any], folder: Path) -> tuple[Any, Any]:
    """A model and its tokenizer, the ends of whose sources are its template's."""
    make, start, seed = MODELS[name]
    model = sharpened(make(), seed=seed)
    model.generation_config.update(**settings)
    words = {f"w{token}": token for token in range(VOCABULARY) if token not in (PAD, EOS)} | {"<pad>": PAD, "</s>": EOS}
    rust = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    rust.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if start is not None:
        rust.post_processor = tokenizers.processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", EOS)]
        )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=rust,
        pad_token="<pad>",
        eos_token="</s>",
        padding_side="left" if start is None else "right",
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def write(loaded: Loaded) -> list[list[str]]:
    if loaded.model.encoder is not None:
        found = translator_of(loaded).translate(TEXTS)
    else:
        settings = BeamSettings.from_recipe(loaded.recipe.generation, eos_id=loaded.text_tokenizer.special.eos)
        found = Continuer([loaded.model], loaded.text_tokenizer, settings).continue_texts(TEXTS)
    return [ones[0].text.split() for ones in found]


def bare(words: list[str], settings: dict[str, Any]) -> list[str]:
    """Without the forced start and the second end, which are special tokens in real vocabularies."""
    start, ends = settings.get("forced_bos_token_id"), settings.get("eos_token_id", [])
    first = int(start is not None)
    last = next((place for place, word in enumerate(words) if word in [f"w{token}" for token in ends]), len(words))
    return words[first:last]


@pytest.mark.parametrize(("name", "number"), [(name, number) for name in MODELS for number in range(2)])
def test_a_folder_writes_as_its_original_does(tmp_path: Path, name: str, number: int) -> None:
    model, tokenizer = save(name, SETTINGS[name][number], tmp_path / "folder")
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    ids = model.generate(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, do_sample=False)
    new = ids if name != "gpt2" else ids[:, inputs.input_ids.shape[1] :]
    expected = [
        bare(text.split(), SETTINGS[name][number]) for text in tokenizer.batch_decode(new, skip_special_tokens=True)
    ]
    assert write(tformer.load(tmp_path / "folder")) == expected
