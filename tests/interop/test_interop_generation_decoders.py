"""Decoders with rotary positions write what `generate` of `transformers` writes, token for token, from a cache."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from tests.interop import writing
from tests.interop.parity import imported, saved
from tests.interop.tiny_models import config_of
from tests.interop.writing import ENDS, EOS, TEXTS, VOCABULARY, Pair, different_texts, ours, sharpened, theirs
from tformer.decoding.settings import BeamSettings, GenerationSettings

BY_LENGTH = {  # beyond 6 and 8 tokens the frequencies follow the length
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 50.0},
    "longrope": {
        **{"rope_type": "longrope", "rope_theta": 50.0, "original_max_position_embeddings": 6, "factor": 4.0},
        **{"short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 2.0, 4.0]},
    },
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("GPTNeoX", "GPTJ", "Phi", "StableLm", "Phi3", "SmolLM3", "Falcon")},
    **{f"{name}, norms of heads": (name, {"qk_layernorm": True}) for name in ("Phi", "StableLm")},
    "falcon, 40B": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, alibi": ("Falcon", {"alibi": True, "multi_query": False, "parallel_attn": False}),
    **{name: (name, {}) for name in ("Gemma", "Olmo", "Olmo2", "GPTNeo", "XGLM")},
    "GPTBigCode": ("GPTBigCode", {"n_positions": 40}),
    "OPT": ("OPT", {"do_layer_norm_before": False, "word_embed_proj_dim": 12}),
    **{name: (name, {"sliding_window": 4, "query_pre_attn_scalar": 6, "num_hidden_layers": 7,
                     "tie_word_embeddings": False}) for name in ("Gemma2", "Gemma3Text")},
    "Granite": ("Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 8.0}),
    "Starcoder2": ("Starcoder2", {"sliding_window": 5}),
    **{kind: ("Llama", {"head_dim": 6, "max_position_embeddings": {"dynamic": 8}.get(kind, 24),
                        "rope_parameters": values}) for kind, values in BY_LENGTH.items()},
}  # fmt: skip
LENGTH = 14
SEEDS = {"Olmo": 1}  # others leave two candidates tied


@pytest.fixture(scope="module", params=CASES)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    name, values = CASES[request.param]
    config = config_of(name, **{"vocab_size": VOCABULARY, **ENDS, **values})
    reference = sharpened(transformers.AutoModelForCausalLM.from_config(config), seed=SEEDS.get(request.param, 5))
    model, _ = imported(saved(reference, tmp_path_factory.mktemp("model")))
    return Pair(reference, model, None)


@pytest.fixture(autouse=True)
def texts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frequencies by length are those of the longest text of a batch: of one text they do not depend on batches."""
    if request.node.callspec.params["pair"] in BY_LENGTH:
        monkeypatch.setattr(writing, "TEXTS", TEXTS[1:2])


def test_greedy(pair: Pair) -> None:
    expected = theirs(pair, num_beams=1, max_new_tokens=LENGTH)
    found = ours(pair, GenerationSettings(max_new_tokens=LENGTH, temperature=0.0))
    assert [[ids for ids, _ in ones] for ones in found] == [[ids for ids, _ in ones] for ones in expected]
    assert max(len(set(ids)) for [(ids, _)] in expected) > 3


def test_a_beam_of_four(pair: Pair) -> None:
    expected = theirs(pair, num_beams=4, num_return_sequences=4, max_new_tokens=LENGTH)
    settings = BeamSettings(max_new_tokens=LENGTH, beam_size=4, n_best=4, eos_id=EOS)
    best = [different_texts(ones, settings.ends) for ones in expected]
    found = ours(pair, settings)
    for ones, others in zip(found, best, strict=True):
        assert [ids for ids, _ in ones][: len(others)] == [ids for ids, _ in others]
        assert [score for _, score in ones][: len(others)] == pytest.approx([score for _, score in others], rel=1e-4)
