"""The logit lens: its last row is the model's answer, each row that of the model cut off there, by the formulas."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.inside.lens_models import RECIPES, head_of, inputs_of, length_of, loaded_of
from tformer.inside import lens as lenses
from tformer.inside.lens import OWN, Lens, final_states, read_lens
from tformer.loading import Loaded

FAMILIES = [family for family in RECIPES if family != "several labels"]


def lens_of(loaded: Loaded, *, side: str | None = None, targets: list[int] | None = None, **options: Any) -> Lens:
    own = "encoder" if loaded.model.decoder is None else "decoder"
    count = length_of(loaded)
    return read_lens(
        loaded.model,
        inputs_of(loaded),
        side=side or own,
        head=head_of(loaded),
        places=range(count),
        targets=targets or [OWN] * count,
        **options,
    )


@torch.no_grad()
def logits_of(model: nn.Module, loaded: Loaded) -> Tensor:
    return model(**inputs_of(loaded)).logits.reshape(length_of(loaded), -1)


def agrees(lens: Lens, row: int, logits_NV: Tensor) -> None:
    """A row of a lens is what these logits say."""
    logs_NV = logits_NV.double().log_softmax(-1)
    targets = torch.tensor(lens.targets).unsqueeze(1)
    own = logs_NV.gather(1, targets)
    np.testing.assert_allclose(lens.probability[row], own.exp().squeeze(1), atol=1e-5)
    assert (lens.rank[row] == (logits_NV > logits_NV.gather(1, targets)).sum(-1).numpy()).all()
    np.testing.assert_allclose(lens.entropy[row], torch.special.entr(logs_NV.exp()).sum(-1), atol=1e-4)
    k = lens.top_ids.shape[2]
    np.testing.assert_allclose(lens.top_probabilities[row], logs_NV.exp().topk(k).values, atol=1e-5)
    shares = logs_NV.exp().gather(1, torch.tensor(lens.top_ids[row]))
    np.testing.assert_allclose(lens.top_probabilities[row], shares, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_row_is_the_answer_of_the_model(family: str) -> None:
    loaded = loaded_of(family)
    lens, logits = lens_of(loaded, top_k=3), logits_of(loaded.model, loaded)
    assert (lens.targets == logits.argmax(-1).numpy()).all() and (lens.rank[-1] == 0).all()
    assert (lens.kl[-1] == 0).all() and (lens.kl[:-1] > 0).any()
    agrees(lens, -1, logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_is_the_answer_of_the_model_cut_off_after_that_layer(family: str) -> None:
    """With the KL of the paper, from the model's answer to that one (arXiv 2303.08112)."""
    loaded = loaded_of(family)
    lens, final = lens_of(loaded), logits_of(loaded.model, loaded).log_softmax(-1)
    side = "encoder" if loaded.model.decoder is None else "decoder"
    for row in range(1, len(lens.rows)):
        cut = copy.deepcopy(loaded.model)
        stack: Any = getattr(cut, side)
        stack.blocks = stack.blocks[:row]
        logits = logits_of(cut, loaded)
        agrees(lens, row, logits)
        kl = F.kl_div(logits.log_softmax(-1), final, reduction="none", log_target=True).sum(-1)
        np.testing.assert_allclose(lens.kl[row], kl, atol=1e-4)
    assert lens.rows == ("input", *map(str, range(len(lens.rows) - 1)))


@torch.no_grad()
def test_a_row_by_the_formula_of_the_logit_lens() -> None:
    loaded = loaded_of("llama")
    model = loaded.model
    assert model.decoder is not None
    h = model(**inputs_of(loaded), taps={"decoder.0.hidden"}).taps["decoder.0.hidden"][0]
    norm: Any = model.decoder.final_norm
    logits = (h / (h.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight) @ model.heads["lm"].weight.T
    agrees(lens_of(loaded), 1, logits)


@torch.no_grad()
def test_the_first_row_reads_the_input_of_the_first_layer() -> None:
    loaded = loaded_of("gpt")
    model: Any = loaded.model
    x = model(**inputs_of(loaded), taps={"decoder.embedding"}).taps["decoder.embedding"][0]
    agrees(lens_of(loaded), 0, model.heads["lm"](model.decoder.final_norm(x)))


@torch.no_grad()
def test_a_row_of_bert_goes_through_the_transform_of_its_head() -> None:
    loaded = loaded_of("bert")
    h = loaded.model(**inputs_of(loaded), taps={"encoder.1.hidden"}).taps["encoder.1.hidden"][0]
    head: Any = loaded.model.heads["masked_lm"]
    x = F.gelu(h @ head.dense.weight.T + head.dense.bias)
    x = F.layer_norm(x, x.shape[-1:], head.norm.weight, head.norm.bias, head.norm.eps)
    agrees(lens_of(loaded), 2, x @ head.weight.T + head.bias)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_layers_of_an_encoder_answer_through_the_whole_decoder(family: str) -> None:
    """DecoderLens (arXiv 2310.03686): the decoder reads the encoder cut off there, behind its final norm."""
    loaded = loaded_of(family)
    lens = lens_of(loaded, side="encoder")
    assert len(lens.rows) == 1 + loaded.recipe.model.encoder.num_layers  # type: ignore[union-attr]
    for row in range(len(lens.rows)):
        cut = copy.deepcopy(loaded.model)
        stack: Any = cut.encoder
        stack.blocks = stack.blocks[:row]
        agrees(lens, row, logits_of(cut, loaded))


def test_targets_are_followed_and_positions_chosen() -> None:
    loaded = loaded_of("gpt")
    ids = inputs_of(loaded)["input_ids"][0].tolist()
    whole = lens_of(loaded, targets=[*ids[1:], OWN])
    assert whole.targets.tolist()[:-1] == ids[1:]
    common: dict[str, Any] = {"side": "decoder", "head": "lm"}
    part = read_lens(loaded.model, inputs_of(loaded), **common, places=[1, 4], targets=[ids[2], ids[5]])
    for name in ("probability", "rank", "entropy", "kl"):
        np.testing.assert_allclose(getattr(part, name), getattr(whole, name)[:, [1, 4]], atol=1e-5)


def test_several_labels_have_their_own_probabilities() -> None:
    loaded = loaded_of("several labels")
    lens, logits = lens_of(loaded), logits_of(loaded.model, loaded)
    p = logits.double().sigmoid()
    np.testing.assert_allclose(lens.probability[-1], p.max(-1).values, atol=1e-6)
    np.testing.assert_allclose(lens.entropy[-1], (torch.special.entr(p) + torch.special.entr(1 - p)).sum(-1), atol=1e-5)
    assert (lens.kl[-1] == 0).all() and (lens.kl[0] > 0).all()


def test_logits_are_formed_for_one_layer_and_a_block_of_positions_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loaded_of("gpt")
    whole, head, sizes = lens_of(loaded), loaded.model.heads["lm"], []
    hook = head.register_forward_hook(lambda module, inputs, output: sizes.append(output.numel()))
    vocabulary = head.weight.shape[0]
    monkeypatch.setattr(lenses, "BLOCK_ELEMENTS", 2 * vocabulary)
    blocks = lens_of(loaded)
    hook.remove()
    assert max(sizes) == 2 * vocabulary
    for name, value in vars(whole).items():
        np.testing.assert_allclose(getattr(blocks, name), value, atol=1e-6) if name != "rows" else None


def test_a_translator_changes_the_states_before_the_final_norm() -> None:
    loaded = loaded_of("llama")
    inputs = inputs_of(loaded)
    with torch.no_grad():
        plain = final_states(loaded.model, inputs, "decoder")
        doubled = final_states(loaded.model, inputs, "decoder", translate=lambda states: 2.0 * states)
    torch.testing.assert_close(doubled, plain, atol=1e-3, rtol=1e-3)  # RMSNorm does not see the length
