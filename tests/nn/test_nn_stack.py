"""Blocks and stacks: residuals, norm placement, cross-attention, activation checkpointing, per-layer positions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from tformer.build import build_model
from tformer.model import Transformer
from tformer.nn.attention import AttentionContext, FullAttentionOptions
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.feedforward import FeedForward, FeedForwardOptions
from tformer.nn.init import block_matrices
from tformer.nn.norm import NormOptions, build_norm
from tformer.nn.positions.base import Positions
from tformer.nn.stack import Block
from tformer.nn.taps import TapSink
from tformer.optim.optimizers import OptimizerSettings, build_optimizer
from tformer.recipe.model import Model

WIDTH, HEADS, HIDDEN = 16, 4, 24
LENGTHS = torch.tensor([5, 3, 4])
REAL = torch.arange(5) < LENGTHS.unsqueeze(1)  # right padding
POS = torch.arange(5).unsqueeze(0)


def make_block(*, place: str, activation: str, cross: bool, dropout: float = 0.0, multiplier: float = 1.0) -> Block:
    def attention(memory_dim: int | None) -> MultiHeadAttention:
        return MultiHeadAttention(
            WIDTH,
            options=FullAttentionOptions(),
            num_heads=HEADS,
            num_kv_heads=HEADS,
            head_dim=WIDTH // HEADS,
            value_dim=WIDTH // HEADS,
            memory_dim=memory_dim,
            dropout=dropout,
        )

    return Block(
        attention(None),
        FeedForward(WIDTH, FeedForwardOptions(d_ff=HIDDEN, activation=activation)),
        cross_attention=attention(WIDTH) if cross else None,
        build_norm=lambda: build_norm(NormOptions(), WIDTH),
        place=place,
        dropout=dropout,
        multiplier=multiplier,
    )


@torch.no_grad()
def copy_attention(ours: MultiHeadAttention, theirs: nn.MultiheadAttention, *, cross: bool = False) -> None:
    weight, bias = theirs.in_proj_weight, theirs.in_proj_bias
    if cross:
        ours.q.weight.copy_(weight[:WIDTH])
        ours.q.bias.copy_(bias[:WIDTH])
        ours.kv.weight.copy_(weight[WIDTH:])
        ours.kv.bias.copy_(bias[WIDTH:])
    else:
        ours.qkv.weight.copy_(weight)
        ours.qkv.bias.copy_(bias)
    ours.out.load_state_dict(theirs.out_proj.state_dict())


def copy_layer(ours: Block, theirs: nn.Module) -> None:
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, 0.1, 0.4)
    copy_attention(ours.self_attention, theirs.self_attn)
    ours.self_attention_norm.load_state_dict(theirs.norm1.state_dict())
    last = theirs.norm2
    if ours.cross_attention is not None:
        copy_attention(ours.cross_attention, theirs.multihead_attn, cross=True)
        ours.cross_attention_norm.load_state_dict(theirs.norm2.state_dict())
        last = theirs.norm3
    ours.feedforward.up.load_state_dict(theirs.linear1.state_dict())
    ours.feedforward.down.load_state_dict(theirs.linear2.state_dict())
    ours.feedforward_norm.load_state_dict(last.state_dict())


@pytest.mark.parametrize("place", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_equals_torch_encoder_layer(place: str, activation: str) -> None:
    ours = make_block(place=place, activation=activation, cross=False)
    theirs = nn.TransformerEncoderLayer(
        WIDTH, HEADS, HIDDEN, dropout=0.0, activation=activation, batch_first=True, norm_first=place == "pre"
    )
    copy_layer(ours, theirs)
    x = torch.randn(3, 5, WIDTH)
    ours_out = ours(x, AttentionContext(POS, POS, mask=REAL[:, None, None]), positions=Positions())
    theirs_out = theirs(x, src_key_padding_mask=~REAL)
    torch.testing.assert_close(ours_out[REAL], theirs_out[REAL], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("place", ["pre", "post"])
def test_equals_torch_decoder_layer(place: str) -> None:
    ours = make_block(place=place, activation="relu", cross=True)
    theirs = nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True, norm_first=place == "pre")
    copy_layer(ours, theirs)
    x, memory = torch.randn(3, 4, WIDTH), torch.randn(3, 5, WIDTH)
    pos = torch.arange(4).unsqueeze(0)
    cross = AttentionContext(pos, pos, mask=REAL[:, None, None], memory=memory)
    ours_out = ours(x, AttentionContext(pos, pos, is_causal=True, cross=cross), positions=Positions())
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    theirs_out = theirs(x, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=~REAL)
    torch.testing.assert_close(ours_out, theirs_out, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("place", ["pre", "post"])
def test_dropout_sits_on_the_residual(place: str) -> None:
    """With everything dropped from the updates, a pre-norm block is the identity."""
    block = make_block(place=place, activation="relu", cross=False, dropout=1.0 - 1e-7)
    x = torch.randn(3, 5, WIDTH)
    out = block(x, AttentionContext(POS, POS), positions=Positions())
    expected = x if place == "pre" else block.feedforward_norm(block.self_attention_norm(x))
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("place", ["res_post", "sandwich"])
@pytest.mark.parametrize("cross", [False, True])
def test_norms_of_outputs_come_before_the_multiplier_and_the_sum(place: str, cross: bool) -> None:
    """By the formulas x + m norm(f(x)) and x + m norm(f(norm(x))), in training, in evaluation and with taps."""
    torch.manual_seed(0)
    block = make_block(place=place, activation="relu", cross=cross, multiplier=0.3)
    for parameter in block.parameters():
        nn.init.normal_(parameter, 0.1, 0.4)
    x, memory = torch.randn(3, 5, WIDTH), torch.randn(3, 5, WIDTH)
    of_cross = AttentionContext(POS, POS, memory=memory)
    context = AttentionContext(POS, POS, cross=of_cross if cross else None)
    expected = x
    for name, contexts in (("self_attention", [context]), ("cross_attention", [of_cross]), ("feedforward", [])):
        function, norm = getattr(block, name), getattr(block, f"{name}_norm")
        if function is not None and place == "res_post":
            expected = expected + 0.3 * norm(function(expected, *contexts))
        elif function is not None:
            expected = expected + 0.3 * getattr(block, f"{name}_out_norm")(function(norm(expected), *contexts))
    sink = TapSink({"feedforward.normalized_output", "feedforward.multiplied"})
    for found in (block(x, context, positions=Positions()), block(x, context, positions=Positions(), taps=sink),
                  block.eval()(x, context, positions=Positions())):  # fmt: skip
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        sink.values["feedforward.multiplied"], 0.3 * sink.values["feedforward.normalized_output"]
    )


IDS = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(0))


def make(**stack: object) -> Transformer:
    torch.manual_seed(0)
    decoder = {"num_layers": 3, "num_heads": 2, "positions": {"kind": "rope"}, **stack}
    return build_model(Model.model_validate({"d_model": 16, "max_seq_len": 8, "vocab_size": 11, "decoder": decoder}))


def hidden_of_layers(model: Transformer) -> list[torch.Tensor]:
    names = ["decoder.embedding", *(f"decoder.{layer}.hidden" for layer in range(3))]
    taps = model(IDS, taps=names).taps
    return [taps[name] for name in names]


def test_layerdrop_skips_whole_layers_without_rescaling() -> None:
    model = make(layerdrop=0.5)
    kept = []
    for seed in range(60):
        torch.manual_seed(seed)
        states = hidden_of_layers(model)
        kept += [not torch.equal(before, after) for before, after in itertools.pairwise(states)]
    assert 0.35 < sum(kept) / len(kept) < 0.65


def test_layerdrop_is_off_in_evaluation() -> None:
    model = make(layerdrop=0.9).eval()
    states = hidden_of_layers(model)
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(states))
    plain = make().eval()
    assert torch.equal(model(IDS).hidden, plain(IDS).hidden)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_gives_equal_gradients(dropout: float) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = make(dropout=dropout, attention_dropout=dropout)
        model.decoder.checkpointing = checkpointing
        torch.manual_seed(1)
        model(IDS).logits.square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, msg=name)


@pytest.mark.parametrize("layerdrop", [0.5, {"rate": 0.5, "learned": True}])
@pytest.mark.parametrize("norm", ["layernorm", "batchnorm"])
def test_checkpointing_with_layerdrop_gives_equal_gradients_and_statistics(layerdrop: object, norm: str) -> None:
    found = []
    for checkpointing in (False, True):
        model = make(layerdrop=layerdrop, dropout=0.2, norm={"kind": norm})
        model.decoder.checkpointing = checkpointing
        torch.manual_seed(4)
        model(IDS).logits.square().sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found.append((gradients, dict(model.named_buffers())))
    assert any(gradient is None for gradient in found[0][0].values())  # a block was skipped
    for first, second in zip(*found, strict=True):
        for name, expected in first.items():
            assert (expected is None) == (second[name] is None), name
            if expected is not None:
                torch.testing.assert_close(second[name], expected, msg=name)


def test_rate_zero_is_bit_identical_to_no_layerdrop_in_values_gradients_and_draws() -> None:
    found = []
    for changes in ({}, {"layerdrop": 0.0}, {"layerdrop": {"rate": 0.0}}, {"layers": {1: {"layerdrop": 0.0}}}):
        model = make(dropout=0.3, **changes)
        assert model.decoder.layerdrop is None
        torch.manual_seed(1)
        logits = model(IDS).logits
        logits.square().sum().backward()
        found.append((logits, [p.grad for p in model.parameters()], torch.rand(())))
    for logits, gradients, draw in found[1:]:
        assert torch.equal(logits, found[0][0]) and torch.equal(draw, found[0][2])
        assert all(torch.equal(a, b) for a, b in zip(gradients, found[0][1], strict=True))


def test_rates_may_differ_by_layer() -> None:
    model = make(layerdrop=0.25, layers={0: {"layerdrop": 0.0}, 2: {"layerdrop": 0.9}})
    assert model.decoder.layerdrop_rates() == [0.0, 0.25, 0.9]
    assert make().decoder.layerdrop_rates() == [0.0, 0.0, 0.0]
    torch.manual_seed(0)
    skipped = torch.zeros(3)
    for _ in range(200):
        states = hidden_of_layers(model)
        skipped += torch.tensor([float(torch.equal(before, after)) for before, after in itertools.pairwise(states)])
    assert skipped[0] == 0 and 25 < skipped[1] < 75 and skipped[2] > 160


def test_both_stacks_of_a_translation_model_drop_layers() -> None:
    stack = {"num_layers": 4, "num_heads": 2, "layerdrop": 0.5}
    sections = {"d_model": 16, "vocab_size": 11, "encoder": stack, "decoder": stack}
    model = build_model(Model.model_validate(sections))
    torch.manual_seed(0)
    model(IDS, decoder_input_ids=IDS).logits.sum().backward()
    for side in (model.encoder, model.decoder):
        used = [block.feedforward.down.weight.grad is not None for block in side.layers]
        assert True in used and False in used


@pytest.mark.parametrize("kind", ["adamw", "adam", "muon"])
@pytest.mark.parametrize("learned", [False, True])
def test_optimizers_and_clipping_pass_over_skipped_layers(kind: str, learned: bool) -> None:
    model = make(layerdrop={"rate": 0.5, "learned": learned})
    rows = {f"{name}.weight": rows for name, _, rows in block_matrices(model)}
    settings = OptimizerSettings(
        kind=kind,
        lr=0.01,
        weight_decay=0.1,
        hidden_matrices=lambda name, _: name in rows,
        splits=rows.get,
        muon_dtype=torch.float32,
        device="cpu",
    )
    optimizer = build_optimizer(model.named_parameters(), settings)
    for seed in range(4):
        torch.manual_seed(seed)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        model(IDS).logits.square().sum().backward()
        skipped = {name for name, parameter in model.named_parameters() if parameter.grad is None}
        assert torch.isfinite(optimizer.clip(1.0))
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name]) == (name in skipped), name
    assert set(optimizer.state_by_name()) >= {f"{name}.{'momentum' if kind == 'muon' else 'exp_avg'}" for name in rows}


def test_weight_decay_never_touches_learned_rates() -> None:
    model = make(layerdrop={"rate": 0.5, "learned": True})
    settings = OptimizerSettings(kind="adamw", lr=0.01, weight_decay=0.5, device="cpu")
    optimizer = build_optimizer(model.named_parameters(), settings)
    logits = model.decoder.layerdrop.logits
    (group,) = [
        one for inner in optimizer.optimizers for one in inner.param_groups if any(p is logits for p in one["params"])
    ]
    assert group["weight_decay"] == 0.0


def test_every_layer_may_be_skipped() -> None:
    model = make(layerdrop=0.999999)
    output = model(IDS, taps=["decoder.embedding", "decoder.2.hidden"])
    assert torch.equal(output.taps["decoder.embedding"], output.taps["decoder.2.hidden"])
    output.logits.sum().backward()
    assert model.embedding.weight.grad is not None


def test_layers_may_have_numbers_of_heads_of_their_own() -> None:
    layers = {1: {"num_heads": 5}, 2: {"num_heads": 1}}
    model = make(head_dim=6, layers=layers, drophead=0.2, layerdrop=0.2).eval()
    assert [block.self_attention.num_heads for block in model.decoder.layers] == [2, 5, 1]
    whole = model(IDS).logits
    cache = model.new_cache(2, 6)
    parts = [model(IDS[:, t : t + 1], cache=cache).logits for t in range(6)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)
    output = model(IDS, taps=["decoder.1.self_attention.weights"])
    assert output.taps["decoder.1.self_attention.weights"].shape == (2, 5, 6, 6)
    model.train()(IDS).logits.sum().backward()


def test_checkpointing_recomputes_only_with_gradients() -> None:
    model = make().eval()
    model.decoder.checkpointing = True
    with torch.no_grad():
        assert torch.isfinite(model(IDS).hidden).all()


def test_shaw_has_tables_per_layer_and_t5_one_for_all() -> None:
    shaw = make(positions={"kind": "shaw", "clip": 2})
    assert len({id(shaw.decoder.positions_of(layer).keys) for layer in range(3)}) == 3
    t5 = make(positions={"kind": "t5_bias"})
    assert len({id(t5.decoder.positions_of(layer)) for layer in range(3)}) == 1


TWO_BASES = {0: {"positions": {"base": 100.0}}, 2: {"positions": {"base": 100.0}}}
NO_POSITIONS = {1: {"positions": {"kind": "none"}}}


def one_position_after_the_other(model: Transformer) -> torch.Tensor:
    cache = model.new_cache(2, IDS.shape[1])
    return torch.cat([model(IDS[:, t : t + 1], cache=cache).logits for t in range(IDS.shape[1])], dim=1)


@pytest.mark.parametrize("layers", [TWO_BASES, NO_POSITIONS, {1: {"positions": {"kind": "alibi"}}}], ids=str)
def test_layers_may_have_positions_of_their_own(layers: dict[int, Any]) -> None:
    """Each layer computes what it computes in a stack whose layers all have its positions."""
    model = make(positions={"kind": "rope"}, layers=layers).eval()
    found = model(IDS, taps=[f"decoder.{layer}.hidden" for layer in range(3)] + ["decoder.embedding"]).taps
    for layer in range(3):
        alike = make(positions={"kind": "rope", **layers.get(layer, {}).get("positions", {})}).eval()
        alike.load_state_dict(model.state_dict())
        before = found["decoder.embedding" if layer == 0 else f"decoder.{layer - 1}.hidden"]
        blocks, alike.decoder.blocks = alike.decoder.blocks, alike.decoder.blocks[layer : layer + 1]
        alike.decoder.final_norm = None
        context = AttentionContext.for_length(IDS.shape[1], causal=True)
        torch.testing.assert_close(alike.decoder(before, context), found[f"decoder.{layer}.hidden"])
        assert len(blocks) == 3
    torch.testing.assert_close(one_position_after_the_other(model), model(IDS).logits, atol=1e-5, rtol=1e-5)


def test_layers_with_equal_positions_share_them() -> None:
    model = make(positions={"kind": "rope"}, layers=TWO_BASES)
    first, middle, last = (model.decoder.positions_of(layer) for layer in range(3))
    assert first is last and first is not middle
    assert make(positions={"kind": "rope"}, layers={1: {"positions": {"kind": "rope"}}}).decoder.positions is not None


def test_positions_by_layer_train_recomputed_dropped_and_compiled() -> None:
    model = make(positions={"kind": "rope"}, layers=TWO_BASES).eval()
    whole = model(IDS).logits
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(IDS).logits, whole)
    whole.square().sum().backward()
    expected = model.embedding.weight.grad.clone()
    model.zero_grad()
    model.decoder.checkpointing = True
    model(IDS).logits.square().sum().backward()
    torch.testing.assert_close(model.embedding.weight.grad, expected)
    dropping = make(positions={"kind": "rope"}, layers=TWO_BASES, layerdrop=0.5)
    dropping(IDS).logits.sum().backward()


@pytest.mark.parametrize("residual", ["parallel", "parallel_one_norm"])
def test_a_parallel_residual_adds_both_functions_of_the_input(residual: str) -> None:
    model = make(residual=residual, layers={1: {"norm": {"eps": 0.1}}}).eval()
    states = hidden_of_layers(model)
    context = AttentionContext.for_length(IDS.shape[1], causal=True)
    for layer, block in enumerate(model.decoder.layers):
        assert (block.feedforward_norm is None) == (residual == "parallel_one_norm")
        x = states[layer]
        norm = block.feedforward_norm or block.self_attention_norm
        attended = block.self_attention(block.self_attention_norm(x), context, positions=model.decoder.positions)
        torch.testing.assert_close(states[layer + 1], x + attended + block.feedforward(norm(x)))
    torch.testing.assert_close(one_position_after_the_other(model), model(IDS).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("residual", ["parallel", "parallel_one_norm"])
def test_a_parallel_residual_trains_as_it_infers(residual: str) -> None:
    model = make(residual=residual)
    torch.testing.assert_close(model(IDS).logits, model.eval()(IDS).logits)
    model.train()(IDS).logits.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients.values())
    model.zero_grad()
    model.decoder.checkpointing = True
    model(IDS).logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])


def test_final_norm_is_optional() -> None:
    assert make(final_norm=False).decoder.final_norm is None
    model = make(final_norm=False).eval()
    out = model(IDS, taps=["decoder.2.hidden"])
    assert torch.equal(out.hidden, out.taps["decoder.2.hidden"])


LONGROPE = {"kind": "longrope", "short_factors": [1.0, 1.5], "long_factors": [1.0, 4.0]}
VARIANTS: dict[str, dict[str, Any]] = {
    **{kind: {"positions": {"kind": "rope", "scaling": {"kind": kind}}}
       for kind in ("linear", "dynamic", "llama3", "yarn")},
    "longrope, a share": {"head_dim": 8, "positions": {"kind": "rope", "share": 0.5, "scaling": LONGROPE}},
    "interleaved, a share": {"positions": {"kind": "rope", "share": 0.5, "layout": "interleaved"}},
    "layers without positions": {"layers": NO_POSITIONS},
    "rounded alibi": {"positions": {"kind": "alibi", "rounded": True}},
    **{kind: {"residual": kind} for kind in ("parallel", "parallel_one_norm")},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_learns_and_writes_what_it_learned(name: str) -> None:
    """A sequence of numbers in order, from a cache."""
    model = make(**VARIANTS[name])
    text = torch.arange(8).unsqueeze(0) + 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(text[:, :-1]).logits[0], text[0, 1:]).backward()
        optimizer.step()
    model.eval()
    cache, found = model.new_cache(1, 8), [2]
    while len(found) < 8:
        found.append(int(model(torch.tensor([found[-1:]]), cache=cache).logits[0, -1].argmax()))
    assert found == text[0].tolist()
