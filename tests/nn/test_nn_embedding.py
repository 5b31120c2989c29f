"""Embeddings: the order of the sum, scale, FixNorm, factorised tables, patches."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tformer.nn.embedding import PatchEmbedding, TokenEmbedding, cut_patches
from tformer.nn.norm import NormOptions
from tformer.nn.positions.base import Positions

NONE = Positions()
POS = torch.arange(5).unsqueeze(0)
IDS = torch.tensor([[1, 2, 3, 4, 0], [0, 0, 6, 5, 1]])


class Plus(Positions):
    has_embed = True

    def embed(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        return x + pos.unsqueeze(-1).to(x.dtype)


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.2, 0.7)
    return module


def test_the_sum_is_token_type_position_then_norm() -> None:
    module = randomised(TokenEmbedding(7, 8, token_types=2, scale=True, norm=NormOptions(eps=1e-12)))
    types = torch.randint(0, 2, IDS.shape)
    total = module.weight[IDS] * math.sqrt(8) + module.token_types[types] + POS.unsqueeze(-1)
    expected = F.layer_norm(total, (8,), module.norm.weight, module.norm.bias, 1e-12)
    torch.testing.assert_close(module(IDS, positions=Plus(), pos_BT=POS, token_type_ids=types), expected)


def test_segments_default_to_the_first() -> None:
    module = randomised(TokenEmbedding(7, 8, token_types=2))
    zeros = torch.zeros_like(IDS)
    assert torch.equal(
        module(IDS, positions=NONE, pos_BT=POS), module(IDS, positions=NONE, pos_BT=POS, token_type_ids=zeros)
    )


def test_segments_without_a_table_are_refused() -> None:
    module = randomised(TokenEmbedding(7, 8))
    with pytest.raises(ValueError, match="no token types"):
        module(IDS, positions=NONE, pos_BT=POS, token_type_ids=torch.zeros_like(IDS))


def test_fixnorm_gives_tokens_the_length_root_d() -> None:
    module = randomised(TokenEmbedding(7, 16, fixnorm=True))
    lengths = module(IDS, positions=NONE, pos_BT=POS).norm(dim=-1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, 4.0))


def test_factorised_embeddings_project_after_norm() -> None:
    module = randomised(TokenEmbedding(7, 8, size=4, norm=NormOptions()))
    assert module.weight.shape == (7, 4) and module.project.weight.shape == (8, 4)
    inner = F.layer_norm(module.weight[IDS] + POS.unsqueeze(-1), (4,), module.norm.weight, module.norm.bias)
    expected = F.linear(inner, module.project.weight, module.project.bias)
    torch.testing.assert_close(module(IDS, positions=Plus(), pos_BT=POS), expected)


def test_dropout_acts_on_the_sum_while_training() -> None:
    module = randomised(TokenEmbedding(7, 64, dropout=0.5))
    out = module(IDS, positions=Plus(), pos_BT=POS)
    assert 0.3 < (out == 0).float().mean() < 0.7
    module.eval()
    assert (module(IDS, positions=Plus(), pos_BT=POS) != 0).all()


def test_output_dtype_is_the_streams() -> None:
    module = randomised(TokenEmbedding(7, 8, size=4, token_types=2, norm=NormOptions()))
    out = module(IDS, positions=Plus(), pos_BT=POS, dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert module.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("stem", ["conv", "linear"])
@pytest.mark.parametrize("cls", [True, False])
def test_patches_equal_a_strided_convolution(stem: str, cls: bool) -> None:
    module = randomised(PatchEmbedding(8, image_size=12, size=4, channels=3, cls=cls, stem=stem))
    pixels = torch.randn(2, 3, 12, 12)
    out = module(pixels, positions=NONE, pos_BT=torch.arange(module.seq_len).unsqueeze(0))
    kernel = module.weight.view(8, 3, 4, 4)
    patches = F.conv2d(pixels, kernel, module.bias, stride=4).flatten(2).mT
    assert module.seq_len == 9 + cls == out.shape[1]
    torch.testing.assert_close(out[:, int(cls) :], patches)
    if cls:
        assert torch.equal(out[:, 0], module.cls.expand(2, -1))


@pytest.mark.parametrize(("size", "patch", "channels"), [(8, 2, 3), (12, 4, 1), (32, 16, 3), (4, 4, 3)])
def test_cutting_patches_is_unfolding(size: int, patch: int, channels: int) -> None:
    pixels = torch.randn(2, channels, size, size)
    assert torch.equal(cut_patches(pixels, patch), F.unfold(pixels, patch, stride=patch).mT)


def test_wrong_image_size_names_both_shapes() -> None:
    module = PatchEmbedding(8, image_size=12, size=4, channels=3, cls=True)
    with pytest.raises(ValueError, match=r"\[batch, 3, 12, 12\], found \[2, 1, 12, 12\]"):
        module(torch.randn(2, 1, 12, 12), positions=NONE, pos_BT=POS)
