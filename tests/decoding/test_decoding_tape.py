"""Decoding steps that the C kernels do alone are repeated without Python, with the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tformer.build import build_model
from tformer.decoding.generate import generate
from tformer.decoding.inference import inference, prepare_inference
from tformer.decoding.settings import GenerationSettings
from tformer.kernels.functions import find
from tformer.kernels.tape import Tape
from tformer.model import Transformer
from tformer.nn.cache import ModelCache, fastest_dtype
from tformer.recipe.model import Model

pytestmark = pytest.mark.skipif(find() is None, reason="no compiler for kernels here")

STEPS = 20  # the cache grows by 8 slots
GREEDY = GenerationSettings(max_new_tokens=STEPS, min_new_tokens=STEPS, temperature=0.0, logprobs=True)


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of rows of the steps that a tape did."""
    rows: list[int] = []
    play = Tape.__call__
    monkeypatch.setattr(Tape, "__call__", lambda self, x, slots: (rows.append(len(x)), play(self, x, slots))[1])
    yield rows


def model_of(quantize: str = "none", **stack: Any) -> Transformer:
    torch.manual_seed(3)
    decoder = {"num_layers": 2, "num_heads": 2, "positions": {"kind": "learned"}, **stack}
    section = Model(d_model=32, max_seq_len=40, decoder=decoder, init={"std": 0.3})
    model = build_model(section, vocab_size=40).eval()
    prepare_inference(model, torch.bfloat16, quantize=quantize, rows=4)
    return model


def written(model: Transformer, prompts: list[list[int]], settings: GenerationSettings = GREEDY) -> list[Any]:
    return [(each.ids, each.logprobs) for row in generate(model, prompts, settings) for each in row]


def without_tape(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> list[Any]:
    with monkeypatch.context() as patch:
        patch.setattr(ModelCache, "step", lambda self, x, run: run())
        return written(*arguments)


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize("rows", [1, 3])
def test_texts_and_log_probabilities_are_those_of_steps_in_python(
    quantize: str, rows: int, repeated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = model_of(quantize), [[1, 2, 3 + row] for row in range(rows)]
    expected = without_tape(monkeypatch, model, prompts)
    assert not repeated
    assert written(model, prompts) == expected
    assert repeated == [rows] * (STEPS - 2)  # the first token is the prompt's, the second step is recorded


def test_when_texts_end_the_others_go_on_with_a_new_tape(repeated: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = model_of(), [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    ends = {ids[6] for ids, _ in written(model, prompts)}  # at least one text ends early
    settings = GenerationSettings(max_new_tokens=STEPS, temperature=0.0, logprobs=True, eos_id=min(ends))
    repeated.clear()
    assert written(model, prompts, settings) == without_tape(monkeypatch, model, prompts, settings)
    assert len(set(repeated)) > 1


def test_two_texts_in_turn_are_those_of_one_after_the_other(repeated: list[int]) -> None:
    model = model_of()
    dtype = fastest_dtype(model.compute_dtype, torch.device("cpu"), slots=30, kernels=model.kernels)

    def logits_of(turns: list[int]) -> list[list[torch.Tensor]]:
        caches = [model.new_cache(1, 30, device="cpu", dtype=dtype) for _ in range(2)]
        found: list[list[torch.Tensor]] = [[], []]
        for text in turns:
            ids = torch.tensor([[(7 * text + 3 * len(found[text])) % 40]])
            found[text].append(model(input_ids=ids, cache=caches[text]).logits)
        return found

    with inference(model):
        expected, found = logits_of([0] * 12 + [1] * 12), logits_of([0, 1] * 12)
    assert len(repeated) == 4 * 11
    for one, other in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "stack",
    [
        {"positions": {"kind": "rope"}},
        {"positions": {"kind": "alibi"}},
        {"attention": {"kind": "full", "qk_norm": True}},
        {"attention": {"kind": "sliding_window", "window": 8}},
        {"norm": {"kind": "layernorm", "place": "post"}},
        {"norm": {"kind": "scalenorm"}},
        {"norm": {"kind": "rmsnorm", "unit_offset": True}},
        {"norm": {"kind": "rmsnorm", "place": "res_post"}},
        {"attention": {"softcap": 5.0}},
        {"residual_multiplier": 0.5},
    ],
    ids=["rope", "alibi", "qk-norm", "window", "post-norm", "scalenorm", "offset", "res-post", "capped", "multiplied"],
)
def test_models_whose_steps_need_more_than_kernels_run_in_python(stack: dict[str, Any], repeated: list[int]) -> None:
    written(model_of(**stack), [[1, 2, 3]])
    assert not repeated


def test_padded_prompts_run_in_python(repeated: list[int]) -> None:
    written(model_of(), [[1, 2, 3], [4]])
    assert not repeated
