"""`bench generate|translate --compile`: the same tokens by compiled steps, and refusals before anything is measured."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tformer.bench.options import GenerateOptions, ModelOptions, ProductOptions
from tformer.bench.speed import WORKS, resolve
from tformer.bench.workloads import Task
from tformer.bench.workloads import decoding as inference
from tformer.decoding.buckets import CompiledDecoder
from tformer.decoding.compilation import compile_decoding
from tformer.recipe import recipe_from_yaml
from tformer.support.errors import InputError

STACK = "{num_layers: 1, num_heads: 2, feedforward: {d_ff: 32}}"
GPT = f"schema: 1\nmodel: {{d_model: 16, max_seq_len: 32, vocab_size: 40, decoder: {STACK}}}\n"
PAIRS = GPT.replace("decoder", f"encoder: {STACK}, decoder") + "objectives: [{kind: seq2seq}]\n"
RECIPES = {"generate": GPT, "translate": PAIRS}
OPTIONS = {"generate": {"new_tokens": 6}, "translate": {"new_tokens": 6, "beam_size": 2, "sentences": 4}}


def task(work: str, **changes: Any) -> Task:
    recipe = recipe_from_yaml(changes.pop("recipe", RECIPES[work]), name="test")
    values = {"batch_size": 2, "length": 5, "precision": "fp32", "device": torch.device("cpu"), "compile": True}
    return Task(work, recipe, options=OPTIONS[work], **{**values, **changes})


@pytest.mark.parametrize(("work", "tokens"), [("generate", 12), ("translate", 24)])
def test_compiled_steps_write_what_a_round_writes(work: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "compile_decoding", partial(compile_decoding, backend="eager"))
    WORKS[work].check(task(work))
    ours: Any = WORKS[work].contender(task(work), "fp32")
    ours.prepare()
    assert isinstance(ours._model.compiled_decoder, CompiledDecoder)
    assert ours.run() == ours.run() == tokens


@pytest.mark.parametrize("work", ["generate", "translate"])
def test_a_kind_that_has_no_compiled_steps_is_refused(work: str) -> None:
    recipe = RECIPES[work].replace("decoder: {", "decoder: {attention: {kind: sliding_window}, ")
    WORKS[work].check(task(work, recipe=recipe, compile=False))
    with pytest.raises(InputError, match="--compile: layer 0 of the decoder has SlidingWindowAttention"):
        WORKS[work].check(task(work, recipe=recipe))


@pytest.mark.parametrize("int8", [True], indirect=True)
def test_8_bits_are_measured_in_another_run(int8: None) -> None:
    products = ProductOptions(device="cpu", compile=True)
    options = GenerateOptions(model=ModelOptions(arch="gpt", preset="char"), products=products, quantize="none,int8")
    with pytest.raises(InputError, match="--compile and --quantize int8 exclude each other"):
        resolve(options)
