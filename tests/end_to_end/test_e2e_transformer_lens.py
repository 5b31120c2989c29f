"""Lens, parts of logits, patching and scores of heads are those of TransformerLens on the same folders."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import tformer
from tests.interop.tiny_folders import bytes_tokenizer, write_folder
from tformer.inside.heads import SELF, head_scores
from tformer.inside.lens import read_lens
from tformer.inside.logits import attribute_logits
from tformer.inside.patching import PatchingExample, patch
from tformer.workers.work import QUIET

pytest.importorskip("transformer_lens")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.slow

CLEAN, CORRUPTED = [25, 26, 27, 28, 29, 25, 26], [25, 30, 27, 31, 29, 25, 30]
ANSWER, WRONG = 32, 33
IDS = {"bos_token_id": 0, "eos_token_id": 0, "vocab_size": 300}
WIDE = IDS | {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "GPT2": IDS | {"n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4},
    "Llama": WIDE | {"num_key_value_heads": 2},
    "Mistral": WIDE | {"num_key_value_heads": 2},
    "Qwen2": WIDE | {"num_key_value_heads": 2},
    "GPTNeoX": WIDE,
}
close = partial(np.testing.assert_allclose, atol=1e-4, rtol=0)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """(the model loaded here, the bridge of TransformerLens) of one folder with random weights."""
    import transformers
    from transformer_lens.model_bridge import TransformerBridge

    folder = tmp_path_factory.mktemp("folder")
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**FAMILIES[request.param])
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    special = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    write_folder(folder, model, bytes_tokenizer("<|endoftext|>"), **special)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tformer.load(folder), TransformerBridge.boot_transformers(str(folder), hf_model=theirs, tokenizer=tokenizer)


def test_the_logit_lens(pair: tuple[Any, Any]) -> None:
    run, bridge = pair
    ids = torch.tensor([CLEAN])
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(ids)
        states = [cache["blocks.0.hook_in"], *(cache[f"blocks.{layer}.hook_out"] for layer in range(3))]
        expected = torch.stack([bridge.unembed(bridge.ln_final(each))[0] for each in states]).log_softmax(-1)
        close(expected[-1].numpy(), logits[0].log_softmax(-1).numpy())
    found = read_lens(run.model, {"input_ids": ids}, side="decoder", head="lm", places=range(7), targets=[ANSWER] * 7)
    close(found.probability, expected.exp()[..., ANSWER].numpy())
    close(found.top_probabilities, expected.exp().topk(10).values.numpy())
    close(found.entropy, -(expected.exp() * expected).sum(-1).numpy())
    close(found.kl, (expected[-1].exp() * (expected[-1] - expected)).sum(-1).numpy())


def test_direct_logit_attribution(pair: tuple[Any, Any]) -> None:
    """z W_O of each head, and the feed-forwards, through the final norm with its scale of this pass."""
    run, bridge = pair
    ids, last = torch.tensor([CLEAN]), len(CLEAN) - 1
    with torch.no_grad():
        _, cache = bridge.run_with_cache(ids)
        final, unembed = bridge.ln_final, bridge.unembed.W_U  # [D, V]
        direction = unembed[:, ANSWER] - unembed[:, WRONG]
        x = cache["blocks.2.hook_out"][0, last]
        gain, eps = final.weight, getattr(bridge.cfg, "eps", None) or 1e-5
        centres = getattr(final, "bias", None) is not None
        scale = ((x - x.mean() if centres else x).pow(2).mean() + eps).sqrt()

        def share(part: torch.Tensor) -> float:
            return float(((part - part.mean() if centres else part) / scale * gain) @ direction)

        expected = {}
        for layer in range(3):
            z_HV = cache[f"blocks.{layer}.attn.hook_z"][0, last].reshape(4, -1)
            w_O = bridge.blocks[layer].attn.W_O
            for head in range(4):
                expected[f"L{layer}H{head}"] = share(z_HV[head] @ w_O[head])
            expected[f"L{layer} feedforward"] = share(cache[f"blocks.{layer}.mlp.hook_out"][0, last])
    given = {"side": "decoder", "head": "lm", "places": [last], "targets": [ANSWER], "against": [WRONG]}
    found = attribute_logits(run.model, {"input_ids": ids}, **given)
    own = dict(zip([part.name for part in found.parts], found.values[0].tolist(), strict=True))
    for name, value in expected.items():
        assert own[name] == pytest.approx(value, abs=1e-4), name
    assert found.gap < 1e-4


@pytest.mark.parametrize(
    ("part", "theirs"),
    [
        ("residual", "resid_pre"),
        ("attention", "attn_out"),
        ("feedforward", "mlp_out"),
        ("heads", "attn_head_out_all_pos"),
    ],
)
def test_activation_patching(part: str, theirs: str, pair: tuple[Any, Any]) -> None:
    import transformer_lens.patching as oracle

    run, bridge = pair
    clean, corrupted = torch.tensor([CLEAN]), torch.tensor([CORRUPTED])

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[0, -1, ANSWER] - logits[0, -1, WRONG]

    with torch.no_grad():
        logits, cache = bridge.run_with_cache(clean)
        ends = float(metric(logits)), float(metric(bridge(corrupted)))
        expected = getattr(oracle, f"get_act_patch_{theirs}")(bridge, corrupted, cache, metric)
    question = PatchingExample({"input_ids": clean}, {"input_ids": corrupted}, -1, ANSWER, WRONG, "difference")
    [found], *own = patch(run.model, question, [part], noising=False, only_estimate=False, work=QUIET)
    close(own, ends)
    assert found.exact is not None
    close(found.exact * (ends[0] - ends[1]) + ends[1], expected.numpy())


def test_scores_of_heads(pair: tuple[Any, Any]) -> None:
    """Means of the diagonals of random tokens that come twice, without a token before them."""
    run, bridge = pair
    half = torch.randperm(250, generator=torch.Generator().manual_seed(1))[:10] + 20
    ids = torch.cat([half, half])[None]
    with torch.no_grad():
        _, cache = bridge.run_with_cache(ids)
    scores = head_scores(run, [{"input_ids": ids}])["decoder"]
    for layer in range(3):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0]
        for name, offset in (("previous", 1), ("duplicate", 10), ("induction", 9)):
            assert name in SELF
            queries = torch.arange(20)[(10 if name != "previous" else 1) :]
            close(scores[name][layer], pattern[:, queries, queries - offset].mean(-1).numpy())
