"""Language models whose texts begin with a token and may end with several: prompts, training data, generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.interop.parity import randomized
from tests.interop.test_interop_tokenizers import llama
from tformer.data.encoding import encode_prompt
from tformer.data.shards.corpus import token_corpus
from tformer.data.sources.text import open_sources
from tformer.decoding.generate import generate
from tformer.decoding.settings import BeamSettings, GenerationSettings
from tformer.decoding.translate import Continuer
from tformer.loading import Loaded, load
from tformer.recipe.sections import Columns, SourceSpec
from tformer.workers.work import Work

PROMPTS = ["the cat", "cats", "", "teach the cat"]
ENDS = [2, 7, 100, 101, 102, 103, 104, 105, 230, 231, 232, 260, 262]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = llama(tmp_path_factory.mktemp("models") / "llama")
    size = len(json.loads((path / "tokenizer.json").read_text())["model"]["vocab"])
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=ENDS, pad_token_id=None,
    )  # fmt: skip
    model = randomized(transformers.LlamaForCausalLM(config))
    model.generation_config.eos_token_id = ENDS
    model.save_pretrained(path)  # type: ignore[operator]
    return path


@pytest.fixture(scope="module")
def ours(folder: Path) -> Loaded:
    return load(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> tuple[Any, Any]:
    return (
        transformers.LlamaForCausalLM.from_pretrained(folder).eval(),
        transformers.AutoTokenizer.from_pretrained(folder),
    )


def expected(theirs: tuple[Any, Any], prompt: str, **options: Any) -> list[int]:
    model, tokenizer = theirs
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model.generate(ids, do_sample=False, pad_token_id=0, **options)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_is_what_the_tokenizer_there_makes_of_it(ours: Loaded, theirs: tuple[Any, Any], prompt: str) -> None:
    assert encode_prompt(ours.text_tokenizer, prompt) == theirs[1](prompt)["input_ids"]


def test_ends_and_roles_are_carried_into_the_recipe(ours: Loaded) -> None:
    ids = ours.recipe.tokenizer.special_ids
    assert (ids.bos, ids.eos) == (1, 2) and ours.text_tokenizer.special.eos == 2
    assert ours.recipe.generation.stop_tokens == tuple(ENDS[1:])
    assert ours.recipe.generation.suppress_tokens == ()


def test_greedy_ends_at_whichever_comes_first(ours: Loaded, theirs: tuple[Any, Any]) -> None:
    settings = GenerationSettings.from_recipe(ours.recipe.generation, temperature=0.0, max_new_tokens=40, eos_id=2)
    prompts = [encode_prompt(ours.text_tokenizer, prompt) for prompt in PROMPTS]
    found = [list(one.ids) for [one] in generate(ours.model, prompts, settings, tokenizer=ours.text_tokenizer)]
    assert found == [expected(theirs, prompt, max_new_tokens=40) for prompt in PROMPTS]
    assert any(ids[-1] in ENDS[1:] for ids in found)


@pytest.mark.parametrize(("stopping", "early"), [("beam", True), ("heuristic", False)])
def test_beams_end_at_every_one(ours: Loaded, theirs: tuple[Any, Any], stopping: str, early: bool) -> None:
    settings = BeamSettings.from_recipe(
        ours.recipe.generation, beam_size=3, max_new_tokens=12, eos_id=2, stopping=stopping, length_penalty=0.7
    )
    continuer = Continuer([ours.model], ours.text_tokenizer, settings)
    found = [list(best.ids) for best, *_ in continuer.continue_texts(PROMPTS)]
    options = {"num_beams": 3, "max_new_tokens": 12, "early_stopping": early, "length_penalty": 0.7}
    assert found == [expected(theirs, prompt, **options) for prompt in PROMPTS]
    assert any(ids[-1] in ENDS[1:] for ids in found)


def test_documents_begin_as_they_did_when_the_model_was_trained(ours: Loaded, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in PROMPTS[:2]))
    [source] = open_sources([SourceSpec(path=str(tmp_path / "rows.jsonl"))], columns=Columns())
    tokenizer = ours.text_tokenizer
    corpus = token_corpus(source, tokenizer, Work(cache_dir=tmp_path / "cache"))
    first, second = ([1, *tokenizer.encode(text), 2] for text in PROMPTS[:2])
    assert corpus.slice(0, len(corpus)).tolist() == [*first, *second]
    assert corpus.document_offsets.tolist() == [0, len(first), len(first) + len(second)]
