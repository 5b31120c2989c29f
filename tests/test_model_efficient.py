"""Whole models with other kinds of attention than full: padding, causality, caches, gradients, weights, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tformer.build import build_model
from tformer.model import Transformer
from tformer.recipe.model import Model
from tformer.support.errors import InputError

VOCABULARY, LENGTH = 23, 61
ATTENTION: dict[str, dict[str, Any]] = {
    "window": {"kind": "sliding_window", "window": 8, "implementation": "blocks"},
    "window-global": {"kind": "sliding_window", "window": 8, "global_tokens": 2, "implementation": "blocks"},
    "window-dilated": {"kind": "sliding_window", "window": 6, "dilation": 2, "global_tokens": 1,
                       "implementation": "blocks"},
    "bigbird": {"kind": "bigbird", "block": 4, "random_blocks": 2, "implementation": "blocks"},
}  # fmt: skip
POSITIONS: dict[str, dict[str, Any]] = {
    "rope": {"kind": "rope"},
    "alibi": {"kind": "alibi"},
    "t5_bias": {"kind": "t5_bias", "buckets": 8, "max_distance": 16},
    "shaw": {"kind": "shaw", "clip": 4},
    "learned": {"kind": "learned"},
}
LINEAR: dict[str, dict[str, Any]] = {
    "linformer": {"kind": "linformer", "rank": 4},
    "linformer-layerwise": {"kind": "linformer", "rank": 4, "sharing": "layerwise"},
    "performer": {"kind": "performer", "features": 16},
    "performer-relu": {"kind": "performer", "features": 16, "kernel": "relu"},
}
DISENTANGLED = {"kind": "disentangled", "buckets": 8, "max_distance": 20}
OTHERS = {**LINEAR, "additive": {"kind": "additive"}, "disentangled": DISENTANGLED}
every_sparse_kind = pytest.mark.parametrize("attention", list(ATTENTION.values()), ids=list(ATTENTION))
every_kind = pytest.mark.parametrize("attention", [*ATTENTION.values(), *OTHERS.values()], ids=[*ATTENTION, *OTHERS])
every_position = pytest.mark.parametrize("positions", list(POSITIONS.values()), ids=list(POSITIONS))
PAIRS = {
    f"{kind}, {position}": (attention, options)
    for kind, attention in {**ATTENTION, **OTHERS}.items()
    for position, options in POSITIONS.items()
    if kind in ATTENTION or position in ("rope", "learned")  # Linformer and Performer have no scores to change
}
every_pair = pytest.mark.parametrize(("attention", "positions"), list(PAIRS.values()), ids=list(PAIRS))
CAUSAL = {name: pair for name, pair in PAIRS.items() if not name.startswith("linformer")}
every_causal_pair = pytest.mark.parametrize(("attention", "positions"), list(CAUSAL.values()), ids=list(CAUSAL))


def make(attention: dict[str, Any], positions: dict[str, Any], *sides: str, **stack: Any) -> Transformer:
    torch.manual_seed(0)
    section = {
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "positions": positions,
        "attention": attention,
        "feedforward": {"d_ff": 24},
        **stack,
    }
    head = {"kind": "lm"} if "decoder" in sides else {"kind": "masked_lm"}
    values = {"d_model": 16, "max_seq_len": 64, "vocab_size": VOCABULARY, "heads": [head]}
    model = build_model(Model.model_validate({**values, **dict.fromkeys(sides, section)}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.eval()


def left_padded(batch: int) -> tuple[Tensor, Tensor]:
    """Texts of LENGTH, LENGTH - 7, ... tokens, behind padding."""
    torch.manual_seed(1)
    ids, mask = torch.randint(0, VOCABULARY, (batch, LENGTH)), torch.ones(batch, LENGTH, dtype=torch.long)
    for row in range(batch):
        mask[row, : 7 * row] = 0
    return ids, mask


# --- encoders ---------------------------------------------------------------------------------------------------------


@every_pair
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_changes_nothing(attention: dict[str, Any], positions: dict[str, Any], side: str) -> None:
    model = make(attention, positions, "encoder")
    ids, mask = left_padded(3)
    if side == "right" or attention["kind"] == "linformer":  # its projections are of slots: padding would move a text
        ids, mask = ids.flip(1), mask.flip(1)
    together = model(ids, attention_mask=mask).logits
    for row in range(3):
        real = mask[row].bool()
        torch.testing.assert_close(together[row, real], model(ids[row : row + 1, real]).logits[0], atol=1e-5, rtol=0)


@every_kind
def test_every_parameter_learns(attention: dict[str, Any]) -> None:
    encoder = attention["kind"] == "sliding_window" and "global_tokens" in attention
    options = {**attention, "global_projections": encoder}
    options = options if encoder else attention
    dropout = 0.0 if attention["kind"] == "performer" else 0.1
    model = make(options, {"kind": "rope"}, "encoder", attention_dropout=dropout).train()
    ids, mask = left_padded(2)
    model(ids, attention_mask=mask).logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert "bias" in name or parameter.grad.abs().sum() > 0, name


@torch.no_grad()
def test_named_global_tokens_see_all_and_are_seen_by_all() -> None:
    model = make({**ATTENTION["window"], "window": 2}, {"kind": "rope"}, "encoder", num_layers=1)
    ids, _ = left_padded(1)
    marks = torch.zeros(1, LENGTH)
    marks[0, 30] = 1
    changed = ids.clone()
    changed[0, 60] = (ids[0, 60] + 1) % VOCABULARY
    for given, reached in ((None, False), (marks, True)):
        before = model(ids, global_attention_mask=given).logits
        after = model(changed, global_attention_mask=given).logits
        assert torch.equal(before[0, 30], after[0, 30]) != reached  # the named token sees the far one
    changed = ids.clone()
    changed[0, 30] = (ids[0, 30] + 1) % VOCABULARY
    before, after = (model(x, global_attention_mask=marks).logits for x in (ids, changed))
    assert not torch.equal(before[0, 3], after[0, 3])


@torch.no_grad()
def test_layers_may_have_windows_of_their_own() -> None:
    model = make(ATTENTION["window"], {"kind": "rope"}, "decoder", layers={0: {"attention": {"window": 4}}})
    windows = [block.self_attention.mechanism.options.window for block in model.decoder.layers]  # type: ignore[union-attr]
    assert windows == [4, 8]


@every_kind
def test_weights_can_be_looked_at(attention: dict[str, Any]) -> None:
    model = make(attention, {"kind": "rope" if attention in LINEAR.values() else "alibi"}, "encoder")
    ids, mask = left_padded(2)
    name = "encoder.1.self_attention.weights"
    seen, plain = model(ids, attention_mask=mask, taps={name}), model(ids, attention_mask=mask)
    assert seen.taps[name].shape == (2, 4, LENGTH, LENGTH)
    if attention["kind"] != "linformer":
        torch.testing.assert_close(seen.taps[name].sum(-1)[0], torch.ones(4, LENGTH))
    torch.testing.assert_close(seen.logits[mask.bool()], plain.logits[mask.bool()], atol=1e-5, rtol=0)


@every_kind
def test_checkpointing_changes_no_gradient(attention: dict[str, Any]) -> None:
    ids, mask = left_padded(2)
    gradients = []
    for checkpointing in (False, True):
        model = make(attention, {"kind": "rope" if attention in LINEAR.values() else "t5_bias"}, "encoder").train()
        assert model.encoder is not None
        model.encoder.checkpointing = checkpointing
        model(ids, attention_mask=mask).logits.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


# --- decoders ---------------------------------------------------------------------------------------------------------


@every_causal_pair
@torch.no_grad()
def test_a_causal_model_never_sees_the_future(attention: dict[str, Any], positions: dict[str, Any]) -> None:
    model = make(attention, positions, "decoder")
    ids, _ = left_padded(2)
    changed = ids.clone()
    changed[:, 37:] = (ids[:, 37:] + 1) % VOCABULARY
    before, after = model(ids).logits, model(changed).logits
    assert torch.equal(before[:, :37], after[:, :37])
    assert not torch.equal(before[:, 37:], after[:, 37:])


@every_sparse_kind
@every_position
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_cached_decoding_equals_the_whole_sequence(
    attention: dict[str, Any], positions: dict[str, Any], padded: bool
) -> None:
    model = make(attention, positions, "decoder")
    ids, mask = left_padded(3)
    whole = model(ids, attention_mask=mask if padded else None).logits
    for sizes in ([1] * 61 if not padded else [30] + [1] * 31, [21, 40], [25, 3, 1, 32]):
        cache, start = model.new_cache(3, LENGTH), 0
        for size in sizes:
            part = slice(start, start + size)
            given = mask[:, part] if padded and start == 0 else None
            logits = model(ids[:, part], attention_mask=given, cache=cache).logits
            real = mask[:, part].bool() if padded else torch.ones(3, size, dtype=torch.bool)
            torch.testing.assert_close(logits[real], whole[:, part][real], atol=2e-5, rtol=0)
            start += size


@every_sparse_kind
@torch.no_grad()
def test_rows_of_a_cache_may_move(attention: dict[str, Any]) -> None:
    """Reordered, thinned out and given beams, each row goes on as the text that it is."""
    model = make(attention, {"kind": "rope"}, "decoder")
    ids, mask = left_padded(3)
    cache = model.new_cache(3, LENGTH)
    model(ids[:, :40], attention_mask=mask[:, :40], cache=cache)
    rows = torch.tensor([2, 0, 2])
    cache.reorder(rows)
    ids, mask = ids[rows], mask[rows]
    cache.compact(torch.tensor([True, True, False]))
    ids, mask = ids[:2], mask[:2]
    cache.fan_out(2, capacity=LENGTH)
    ids, mask = ids.repeat_interleave(2, dim=0), mask.repeat_interleave(2, dim=0)
    ids[:, 40:] = torch.randint(0, VOCABULARY, (4, LENGTH - 40))
    for slot in range(40, LENGTH):
        logits = model(ids[:, slot : slot + 1], cache=cache).logits
        if slot == 50:
            index = torch.tensor([1, 1, 3, 2])
            cache.reorder_beams(index)
            ids[:, : slot + 1] = ids[index, : slot + 1]
    whole = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[:, -1], whole[:, -1], atol=2e-5, rtol=0)


@every_sparse_kind
@torch.no_grad()
def test_packed_documents_are_as_if_alone(attention: dict[str, Any]) -> None:
    """Positions begin anew; blocks and global tokens are the sequence's, so only plain windows are quite the same."""
    model = make(attention, {"kind": "rope"}, "decoder")
    ids, _ = left_padded(1)
    documents = (torch.arange(LENGTH) >= 28).long().unsqueeze(0)
    changed = ids.clone()
    changed[:, :28] = (ids[:, :28] + 1) % VOCABULARY
    packed = [model(x, document_ids=documents).logits for x in (ids, changed)]
    assert torch.equal(packed[0][:, 28:], packed[1][:, 28:])
    if attention == ATTENTION["window"]:
        positions = torch.cat([torch.arange(28), torch.arange(LENGTH - 28)]).unsqueeze(0)
        both = model(ids, document_ids=documents, position_ids=positions).logits[:, 28:]
        torch.testing.assert_close(both, model(ids[:, 28:]).logits, atol=1e-5, rtol=0)


# --- encoder-decoders and refusals ------------------------------------------------------------------------------------


@every_sparse_kind
@torch.no_grad()
def test_beside_these_kinds_cross_attention_is_full(attention: dict[str, Any]) -> None:
    model = make(attention, {"kind": "rope"}, "encoder", "decoder")
    assert model.decoder is not None
    crosses = [block.cross_attention for block in model.decoder.layers]
    assert {type(cross.mechanism).__name__ for cross in crosses if cross is not None} == {"FullAttention"}
    source, mask = left_padded(2)
    source, mask = source.flip(1), mask.flip(1)
    target, _ = left_padded(2)
    whole = model(source, attention_mask=mask, decoder_input_ids=target).logits
    cache = model.new_cache(2, LENGTH)
    encoded = model(source, attention_mask=mask, decoder_input_ids=target[:, :45], cache=cache)
    torch.testing.assert_close(encoded.logits, whole[:, :45], atol=2e-5, rtol=0)
    for slot in range(45, LENGTH):
        step = model(decoder_input_ids=target[:, slot : slot + 1], cache=cache).logits
        torch.testing.assert_close(step[:, 0], whole[:, slot], atol=2e-5, rtol=0)


@pytest.mark.parametrize(("attention", "words"), [
    ({"kind": "sliding_window", "global_projections": True}, "model.decoder.attention.global_projections: only for"),
])  # fmt: skip
def test_what_is_not_defined_for_a_decoder_names_its_field(attention: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=f"^{words}"):
        make(attention, {"kind": "rope"}, "decoder")
