"""A Hugging Face folder, opened in place, writes what its original does: everything that the folder says is obeyed.

Neither side is told anything: tokenizers, template, special ids and the settings of generation come from the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

import tformer
from tests.interop.writing import EOS, MODELS, PAD, TEXTS, VOCABULARY, sharpened
from tformer.decoding.loaded import translator_of
from tformer.decoding.settings import BeamSettings
from tformer.decoding.translate import Continuer
from tformer.loading import Loaded

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
