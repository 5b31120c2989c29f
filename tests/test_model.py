"""The one model: properties that every family must have."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from tformer.build import build_model
from tformer.model import Transformer
from tformer.recipe.model import Model

VOCABULARY = 23
POSITIONS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "sinusoidal": {"kind": "sinusoidal"},
    "sinusoidal-halves": {"kind": "sinusoidal", "layout": "halves"},
    "sinusoidal-fairseq": {"kind": "sinusoidal", "layout": "fairseq"},
    "learned": {"kind": "learned", "offset": 2},
    "rope": {"kind": "rope"},
    "rope-interleaved": {"kind": "rope", "layout": "interleaved"},
    "alibi": {"kind": "alibi"},
    "t5_bias": {"kind": "t5_bias", "buckets": 8, "max_distance": 16},
    "learned_t5_bias": {
        "kind": "learned_t5_bias",
        "offset": 2,
        "ids": "nonpad_cumsum",
        "buckets": 8,
        "max_distance": 16,
    },
    "shaw": {"kind": "shaw", "clip": 4},
    "shaw-keys-only": {"kind": "shaw", "clip": 4, "values": False},
}
every_position = pytest.mark.parametrize("positions", list(POSITIONS.values()), ids=list(POSITIONS))


def make(side: str = "decoder", *, seed: int = 0, randomize: bool = True, **values: Any) -> Transformer:
    """A tiny model whose every parameter is random, so that nothing hides behind zeros and ones."""
    torch.manual_seed(seed)
    stack = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "feedforward": {"d_ff": 24}, **values.pop("stack", {})}
    sides = {"encoder": stack, "decoder": stack} if side == "both" else {side: stack}
    base = {"d_model": 16, "max_seq_len": 32, "vocab_size": VOCABULARY}
    model = build_model(Model.model_validate(base | sides | values))
    if randomize:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.eval()


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def padded(ids: torch.Tensor, amount: int, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    filler, real = torch.full((ids.shape[0], amount), 7), torch.ones_like(ids)
    parts = [(filler, torch.zeros_like(filler)), (ids, real)]
    if side == "right":
        parts.reverse()
    return torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts], 1)


# --- who sees whom ---------------------------------------------------------------------------------------------------


@every_position
def test_a_decoder_never_sees_the_future(positions: dict[str, Any]) -> None:
    model, ids = make(stack={"positions": positions}), tokens(2, 9)
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % VOCABULARY
    before, after = model(ids).logits, model(changed).logits
    torch.testing.assert_close(before[:, :5], after[:, :5], atol=1e-6, rtol=1e-6)
    assert (before[:, 5:] - after[:, 5:]).abs().max() > 1e-3


@every_position
def test_an_encoder_sees_both_ways(positions: dict[str, Any]) -> None:
    model, ids = make("encoder", stack={"positions": positions}), tokens(1, 6)
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % VOCABULARY
    assert (model(ids).hidden[:, 0] - model(changed).hidden[:, 0]).abs().max() > 1e-4


@every_position
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("side", ["decoder", "encoder"])
def test_padding_changes_nothing(side: str, padding: str, positions: dict[str, Any]) -> None:
    model, ids = make(side, stack={"positions": positions}), tokens(2, 6)
    wide, mask = padded(ids, 3, padding)
    out = model(wide, attention_mask=mask).logits
    real = out[:, 3:] if padding == "left" else out[:, :6]
    torch.testing.assert_close(real, model(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_of_the_source_changes_nothing(padding: str) -> None:
    model, source, target = make("both"), tokens(2, 6), tokens(2, 4, seed=2)
    wide, mask = padded(source, 3, padding)
    plain = model(source, decoder_input_ids=target).logits
    torch.testing.assert_close(
        model(wide, attention_mask=mask, decoder_input_ids=target).logits, plain, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("positions", ["rope", "learned", "t5_bias", "shaw", "alibi"])
def test_packed_documents_do_not_see_each_other(positions: str) -> None:
    model = make(stack={"positions": POSITIONS[positions]})
    first, second = tokens(1, 5), tokens(1, 4, seed=3)
    documents = torch.tensor([[0] * 5 + [1] * 4])
    places = torch.tensor([[*range(5), *range(4)]])
    packed = model(torch.cat([first, second], 1), document_ids=documents, position_ids=places).logits
    torch.testing.assert_close(packed[:, :5], model(first).logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed[:, 5:], model(second).logits, atol=1e-5, rtol=1e-5)


@every_position
@pytest.mark.parametrize("side", ["decoder", "encoder"])
def test_a_fully_masked_row_gives_no_nan(side: str, positions: dict[str, Any]) -> None:
    model, ids = make(side, stack={"positions": positions}), tokens(2, 5)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    out = model(ids, attention_mask=mask)
    assert torch.isfinite(out.logits).all()
    out.logits[0].sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


# --- cached decoding -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left_padded", [False, True])
@pytest.mark.parametrize(
    "stack",
    [*({"positions": positions} for positions in POSITIONS.values()), {"layer_groups": 1}],
    ids=[*POSITIONS, "shared layers"],
)
def test_cached_decoding_equals_uncached(stack: dict[str, Any], left_padded: bool) -> None:
    model, ids = make(stack=stack), tokens(3, 5)
    mask = torch.ones_like(ids)
    if left_padded:
        mask = (torch.arange(5) >= torch.tensor([[0], [2], [4]])).long()
    cache = model.new_cache(3, 16)
    with torch.no_grad():
        cached = model(ids, attention_mask=mask if left_padded else None, cache=cache).logits_at(-1)
        for _ in range(6):
            uncached = model(ids, attention_mask=mask if left_padded else None).logits_at(-1)
            torch.testing.assert_close(cached, uncached, atol=1e-5, rtol=0)
            assert torch.equal(cached.argmax(-1), uncached.argmax(-1))
            chosen = uncached.argmax(-1, keepdim=True)
            ids, mask = torch.cat([ids, chosen], 1), torch.cat([mask, torch.ones_like(chosen)], 1)
            cached = model(chosen, cache=cache).logits_at(-1)
    assert cache.length == 11


@every_position
def test_cached_decoding_in_chunks_equals_one_pass(positions: dict[str, Any]) -> None:
    model, ids = make(stack={"positions": positions}), tokens(2, 9)
    cache = model.new_cache(2, 9)
    with torch.no_grad():
        parts = [model(part, cache=cache).logits for part in ids.split([4, 3, 2], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rope", "t5_bias", "shaw"])
def test_cached_decoding_beside_an_encoder(positions: str) -> None:
    model = make("both", stack={"positions": POSITIONS[positions]})
    source, mask = padded(tokens(2, 5), 2, "right")
    target = tokens(2, 6, seed=4)
    cache = model.new_cache(2, 6)
    with torch.no_grad():
        full = model(source, attention_mask=mask, decoder_input_ids=target).logits
        first = model(source, attention_mask=mask, decoder_input_ids=target[:, :2], cache=cache).logits
        rest = [model(decoder_input_ids=target[:, t : t + 1], cache=cache).logits for t in range(2, 6)]
    torch.testing.assert_close(torch.cat([first, *rest], 1), full, atol=1e-5, rtol=1e-5)


def test_an_encoders_output_can_be_given() -> None:
    model, source, target = make("both"), tokens(2, 5), tokens(2, 3)
    plain = model(source, decoder_input_ids=target)
    given = model(decoder_input_ids=target, encoder_hidden=plain.encoder_hidden)
    torch.testing.assert_close(given.logits, plain.logits)


# --- fresh models ----------------------------------------------------------------------------------------------------


@every_position
@pytest.mark.parametrize("tied", [True, False])
def test_first_loss_is_that_of_a_uniform_guess(positions: dict[str, Any], tied: bool) -> None:
    model = make(stack={"positions": positions}, tie={"output": tied}, randomize=False)
    ids, labels = tokens(8, 20), tokens(8, 20, seed=9)
    loss, _, count, _ = model(ids).loss_terms("lm", labels)
    assert float(loss.detach() / count) == pytest.approx(math.log(VOCABULARY), rel=0.05)


# --- parameters and precision ----------------------------------------------------------------------------------------


def test_tied_tensors_are_one_parameter() -> None:
    model = make()
    assert model.heads["lm"].weight is model.embedding.weight
    assert model.tied_names() == {"heads.lm.weight": "embedding.weight"}
    names = [name for name, _ in model.named_parameters()]
    assert "embedding.weight" in names and "heads.lm.weight" not in names


def test_three_way_tying_of_a_joint_vocabulary() -> None:
    model = make("both")
    assert model.tied_names() == {
        "decoder_embedding.weight": "embedding.weight",
        "heads.lm.weight": "embedding.weight",
    }
    untied = make("both", tie={"source_target": False, "output": False})
    assert untied.tied_names() == {}
    assert untied.num_parameters() - model.num_parameters() == 2 * VOCABULARY * 16


def test_tying_survives_a_move_from_meta() -> None:
    values = {"d_model": 16, "vocab_size": VOCABULARY, "decoder": {"num_layers": 1}}
    model = build_model(Model.model_validate(values), device="meta").to_empty(device="cpu")
    model.retie()
    assert model.heads["lm"].weight is model.embedding.weight


def test_counts_of_parameters() -> None:
    model = make()
    table = VOCABULARY * 16
    assert model.num_parameters() == sum(p.numel() for p in model.parameters())
    assert model.num_parameters() - model.num_parameters(embeddings=False) == table + 32 * 16
    model.embedding.weight.requires_grad_(False)
    assert model.num_parameters(trainable=False) == table
    assert model.num_parameters(trainable=True) == model.num_parameters() - table


@every_position
def test_bf16_compute_beside_fp32_parameters(positions: dict[str, Any]) -> None:
    model, ids = make(stack={"positions": positions}), tokens(2, 6)
    expected = model(ids).logits
    model.compute_dtype = torch.bfloat16
    out = model(ids)
    assert out.hidden.dtype == torch.bfloat16 and out.logits.dtype == torch.float32
    torch.testing.assert_close(out.logits, expected, atol=0.15, rtol=0.1)
    loss, _, count, _ = out.loss_terms("lm", ids)
    (loss / count).backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    "variant",
    [
        {"stack": {"norm": {"kind": "scalenorm"}}, "embedding": {"fixnorm": True}},
        {"stack": {"norm": {"kind": "rmsnorm", "place": "post"}, "final_norm": False}},
        {"stack": {"head_dim": 6, "value_dim": 10}},
        {"stack": {"attention": {"kind": "full", "qk_norm": True, "qkv_bias": False, "out_bias": False, "scale": 1.0}}},
        {"stack": {"feedforward": {"gated": True, "activation": "relu2", "bias": False}}},
        {"embedding": {"size": 8, "norm": True, "scale": True}},
        {"embedding": {"size": 8, "project": "first", "scale": "rounded"}},
        {"heads": [{"kind": "lm", "softcap": 5.0, "bias": True, "scale": "inverse_sqrt_d"}]},
        {"stack": {"num_heads": 2, "num_kv_heads": 1, "d_model": 12}},
        {
            "stack": {
                "norm": {"kind": "rmsnorm", "place": "sandwich", "unit_offset": True},
                "attention": {"softcap": 2.0},
            }
        },
        {
            "stack": {
                "norm": {"kind": "rmsnorm", "place": "res_post"},
                "attention": {"qk_norm": "width"},
                "residual_multiplier": 0.5,
            }
        },
        {"stack": {"attention": {"kind": "sliding_window", "window": 3, "softcap": 2.0, "qk_norm": "unit_offset"}}},
    ],
    ids=[
        "scalenorm-fixnorm",
        "post-rms",
        "odd-sizes",
        "qk-norm",
        "gated",
        "factorized",
        "projected-first",
        "softcap",
        "own-width",
        "sandwich-capped",
        "res-post",
        "window-capped",
    ],
)
def test_variants_are_causal_and_train(variant: dict[str, Any]) -> None:
    model, ids = make(**variant), tokens(2, 7)
    changed = ids.clone()
    changed[:, 4:] = 0
    torch.testing.assert_close(model(ids).logits[:, :4], model(changed).logits[:, :4], atol=1e-6, rtol=1e-6)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    losses = []
    for _ in range(12):
        loss, _, count, _ = model(ids).loss_terms("lm", ids.roll(-1, 1))
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
        losses.append(float(loss.detach() / count))
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    "place",
    [
        {"embedding": {"dropout": 0.5}},
        {"stack": {"dropout": 0.5}},
        {"stack": {"attention_dropout": 0.5}},
        {"stack": {"activation_dropout": 0.5}},
        {"stack": {"drophead": 0.5}},
        {"heads": [{"kind": "classifier", "num_labels": 3, "dropout": 0.5}]},
    ],
    ids=["embedding", "residual", "attention", "activation", "drophead", "head"],
)
def test_dropout_at_every_place_and_only_while_training(place: dict[str, Any]) -> None:
    model, ids = make(**place), tokens(2, 7)
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)
    torch.manual_seed(3)
    first = model(ids).logits
    torch.manual_seed(3)
    assert torch.equal(first, model(ids).logits)


# --- outputs and mistakes --------------------------------------------------------------------------------------------


def test_logits_at_projects_single_positions() -> None:
    model, ids = make(), tokens(2, 6)
    out = model(ids)
    torch.testing.assert_close(out.logits_at(-1), out.logits[:, -1])
    torch.testing.assert_close(out.logits_at(torch.tensor([1, 4])), out.logits[[0, 1], [1, 4]])


def test_loss_terms_equal_cross_entropy_on_the_logits() -> None:
    model, ids = make(heads=[{"kind": "lm", "softcap": 4.0, "bias": True}]), tokens(2, 6)
    labels = tokens(2, 6, seed=5)
    labels[0, :2] = -100
    out = model(ids)
    loss, nll, count, correct = out.loss_terms("lm", labels)
    expected = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(nll, expected.detach())
    assert int(count) == 10
    assert int(correct) == int((out.logits.argmax(-1) == labels).sum())


def test_masked_lm_loss_equals_cross_entropy_on_the_labelled_positions() -> None:
    model, ids = make("encoder", heads=[{"kind": "masked_lm"}, {"kind": "next_sentence"}]), tokens(2, 6)
    labels = torch.full_like(ids, -100)
    labels[0, 2], labels[1, 4] = 3, 5
    out = model(ids)
    loss, _, count, _ = out.loss_terms("masked_lm", labels)
    expected = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)
    assert int(count) == 2 and out.head("next_sentence").shape == (2, 2)


def test_an_image_model_runs() -> None:
    patches = {"image_size": 8, "size": 4, "channels": 1}
    heads = [{"kind": "classifier", "num_labels": 5, "pooler": False}]
    for positions in ({"kind": "learned"}, {"kind": "patch2d"}):
        model = make("encoder", patches=patches, heads=heads, vocab_size=None, stack={"positions": positions})
        assert model(pixel_values=torch.randn(3, 1, 8, 8)).logits.shape == (3, 5)
        assert model.max_seq_len == 5


def test_too_many_learned_positions_are_refused() -> None:
    model = make()
    with pytest.raises(ValueError, match="32 learned positions, the input needs 33"):
        model(tokens(1, 33))


@pytest.mark.parametrize("positions", ["rope", "sinusoidal", "alibi", "none"])
def test_formulas_go_beyond_the_trained_length(positions: str) -> None:
    assert torch.isfinite(make(stack={"positions": POSITIONS[positions]})(tokens(1, 40)).logits).all()


def test_missing_inputs_are_named() -> None:
    with pytest.raises(ValueError, match="input_ids"):
        make()()
    with pytest.raises(ValueError, match="decoder_input_ids"):
        make("both")(tokens(1, 3))
    with pytest.raises(ValueError, match="no head 'nsp'; it has: lm"):
        make()(tokens(1, 3)).head("nsp")
    with pytest.raises(ValueError, match="no cache"):
        make("encoder").new_cache(1, 4)


@pytest.mark.parametrize("shape", [(3,), (1, 1, 3)])
def test_ids_of_another_shape_are_one_clear_error(shape: tuple[int, ...]) -> None:
    ids, wrong = torch.zeros(1, 3, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    model = make("both")
    for given, name in (({"input_ids": wrong, "decoder_input_ids": ids}, "input_ids"),
                        ({"input_ids": ids, "decoder_input_ids": wrong}, "decoder_input_ids")):  # fmt: skip
        expected = rf"^{name} must have the shape \[batch, tokens\], found {re.escape(str(list(shape)))}$"
        with pytest.raises(ValueError, match=expected):
            model(**given)
