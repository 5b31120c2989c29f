"""Blocks equal torch.nn's Transformer layers, pre and post, with padding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tformer.nn.attention import FullAttentionOptions
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.block import NO_POSITIONS, Block, Sight
from tformer.nn.feedforward import FeedForward, FeedForwardOptions
from tformer.nn.norm import NormOptions, build_norm

WIDTH, HEADS, HIDDEN = 16, 4, 24
LENGTHS = torch.tensor([5, 3, 4])
REAL = torch.arange(5) < LENGTHS.unsqueeze(1)  # right padding
POS = torch.arange(5).unsqueeze(0)


def make(*, place: str, activation: str, cross: bool, dropout: float = 0.0) -> Block:
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
    ours = make(place=place, activation=activation, cross=False)
    theirs = nn.TransformerEncoderLayer(
        WIDTH, HEADS, HIDDEN, dropout=0.0, activation=activation, batch_first=True, norm_first=place == "pre"
    )
    copy_layer(ours, theirs)
    x = torch.randn(3, 5, WIDTH)
    ours_out = ours(x, Sight(POS, POS, REAL[:, None, None]), positions=NO_POSITIONS)
    theirs_out = theirs(x, src_key_padding_mask=~REAL)
    torch.testing.assert_close(ours_out[REAL], theirs_out[REAL], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("place", ["pre", "post"])
def test_equals_torch_decoder_layer(place: str) -> None:
    ours = make(place=place, activation="relu", cross=True)
    theirs = nn.TransformerDecoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True, norm_first=place == "pre")
    copy_layer(ours, theirs)
    x, memory = torch.randn(3, 4, WIDTH), torch.randn(3, 5, WIDTH)
    pos = torch.arange(4).unsqueeze(0)
    cross = Sight(pos, POS, REAL[:, None, None], memory=memory)
    ours_out = ours(x, Sight(pos, pos, is_causal=True), positions=NO_POSITIONS, cross_sight=cross)
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    theirs_out = theirs(x, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=~REAL)
    torch.testing.assert_close(ours_out, theirs_out, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("place", ["pre", "post"])
def test_dropout_sits_on_the_residual(place: str) -> None:
    """With everything dropped from the updates, a pre-norm block is the identity."""
    block = make(place=place, activation="relu", cross=False, dropout=1.0 - 1e-7)
    x = torch.randn(3, 5, WIDTH)
    out = block(x, Sight(POS, POS), positions=NO_POSITIONS)
    expected = x if place == "pre" else block.feedforward_norm(block.self_attention_norm(x))
    torch.testing.assert_close(out, expected)
