"""Output: what the vocabulary heads are asked to compute, and what not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.nn import losses
from tformer.nn.heads import HeadContext, LmHeadOptions, MaskedLmHeadOptions, NextSentenceHeadOptions, build_head
from tformer.nn.losses import linear_cross_entropy
from tformer.nn.norm import NormOptions
from tformer.nn.output import Output
from tformer.nn.products import Quantize, int8_is_possible, prepare_product

HEADS: dict[str, Any] = {"lm": LmHeadOptions(), "masked_lm": MaskedLmHeadOptions(transform=False)}


def output(**options: Any) -> Output:
    torch.manual_seed(0)
    context = HeadContext(d_model=8, vocab_size=11, norm=NormOptions())
    heads = {name: build_head(head, context) for name, head in {**HEADS, **options}.items()}
    for head in heads.values():
        for parameter in head.parameters():
            nn.init.normal_(parameter)
    return Output(torch.randn(4, 16, 8), nn.ModuleDict(heads))


def labels(share: float) -> Tensor:
    """[4, 16], of which this share is ignored."""
    found = torch.randint(0, 11, (4, 16))
    found.view(-1)[torch.randperm(64)[: round(64 * share)]] = -100
    return found


@pytest.mark.parametrize("name", ["lm", "masked_lm"])
@pytest.mark.parametrize(("ignored", "computed"), [(0.0, 64), (0.05, 64), (0.25, 48), (0.85, 10), (1.0, 0)])
def test_ignored_positions_reach_no_head_where_there_are_more_than_a_few(
    name: str, ignored: float, computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, wanted, seen = output(), labels(ignored), []
    features = type(out.heads[name]).features
    monkeypatch.setattr(type(out.heads[name]), "features", lambda self, x: seen.append(len(x)) or features(self, x))
    loss, _, count, _ = out.loss_terms(name, wanted)
    assert seen == [computed] and int(count) == int((wanted != -100).sum())
    expected = F.cross_entropy(out.head(name).flatten(0, 1), wanted.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)


def test_losses_of_each_position_keep_their_places() -> None:
    out, wanted = output(), labels(0.8)
    loss, *_ = out.loss_terms("masked_lm", wanted, reduction="none")
    expected = F.cross_entropy(out.head("masked_lm").flatten(0, 1), wanted.flatten(), reduction="none")
    torch.testing.assert_close(loss, expected)


def test_a_head_without_a_vocabulary_has_no_such_loss() -> None:
    out = output(next_sentence=NextSentenceHeadOptions())
    with pytest.raises(ValueError, match="expected a head over the vocabulary"):
        out.loss_terms("next_sentence", labels(0.0))
    with pytest.raises(ValueError, match="expected a head over the vocabulary"):
        next(out.logit_chunks("next_sentence", labels(0.0) > 0))


@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize(
    "options", [LmHeadOptions(softcap=2.0, bias=True), MaskedLmHeadOptions()], ids=["lm", "masked"]
)
@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "smoothing",
    [{}, {"label_smoothing": 0.1}, {"label_smoothing": 0.1, "smoothing_kind": "off_target"}, {"reduction": "none"}],
    ids=str,
)
def test_a_frozen_heads_loss_is_that_of_its_own_product(
    quantize: Quantize, options: Any, ignored: float, smoothing: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss, the nll and what is correct agree with its logits exactly, and with the matrix to what it rounds."""
    if prepare_product(torch.ones(2, 2), None, "none") is None or (
        quantize == "int8" and not int8_is_possible(torch.device("cpu"))
    ):
        pytest.skip("no such product here")
    out, wanted = output(chosen=options), labels(ignored)
    monkeypatch.setattr(losses, "SLAB_ELEMENTS", 20 * 11)  # several parts
    monkeypatch.setattr(losses, "BLOCK_ELEMENTS", 7 * 11)
    head: Any = out.heads["chosen"]
    before = out.loss_terms("chosen", wanted, **smoothing)
    head.freeze(quantize, torch.float32)
    if head.dense is not None:
        head.dense.freeze(quantize)
    found = out.loss_terms("chosen", wanted, **smoothing)
    logits, flat = out.head("chosen").flatten(0, 1), wanted.flatten()
    one_by_one = F.cross_entropy(logits, flat, reduction="none")
    exact = linear_cross_entropy(logits, torch.eye(11), flat, **smoothing)
    summed = smoothing.get("reduction", "sum") == "sum"
    torch.testing.assert_close(found.nll, one_by_one.sum() if summed else one_by_one)
    torch.testing.assert_close(found, exact, check_dtype=False)
    assert not found.loss.requires_grad and [x.dtype for x in found] == [x.dtype for x in before]
    torch.testing.assert_close(found.loss, before.loss.detach(), rtol=0.1 if quantize == "int8" else 1e-5, atol=0.2)
