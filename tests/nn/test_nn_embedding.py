"""Embeddings: the order of the sum, scale, FixNorm, factorized tables, patches."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tformer.nn.embedding import TokenEmbedding
from tformer.nn.norm import NormOptions
from tformer.nn.positions.base import Positions

NONE = Positions()
POS = torch.arange(5).unsqueeze(0)
IDS = torch.tensor([[1, 2, 3, 4, 0], [0, 0, 6, 5, 1]])


class Plus(Positions):
    has_embed = True

    def embed(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        return x + pos.unsqueeze(-1).to(x.dtype)


def randomized(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.2, 0.7)
    return module


def test_the_sum_is_token_type_position_then_norm() -> None:
    module = randomized(TokenEmbedding(7, 8, token_types=2, scale=True, norm=NormOptions(eps=1e-12)))
    types = torch.randint(0, 2, IDS.shape)
    total = module.weight[IDS] * math.sqrt(8) + module.token_types[types] + POS.unsqueeze(-1)
    expected = F.layer_norm(total, (8,), module.norm.weight, module.norm.bias, 1e-12)
    torch.testing.assert_close(module(IDS, positions=Plus(), pos_BT=POS, token_type_ids=types), expected)


def test_a_number_multiplies_the_rows() -> None:
    module = randomized(TokenEmbedding(7, 8, scale=1.5))
    assert torch.equal(module(IDS, positions=NONE, pos_BT=POS), 1.5 * module.weight[IDS])


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, math.sqrt(3072)), (torch.bfloat16, 55.5)])
def test_a_rounded_root_is_a_number_of_the_stream(dtype: torch.dtype, factor: float) -> None:
    """Gemma 7B's square root of 3072, 55.4256, is 55.5 in bf16."""
    module = TokenEmbedding(7, 3072, scale="rounded")
    module.weight.data = torch.randn(7, 3072).to(dtype).float()
    expected = (module.weight[IDS] * factor).to(dtype)
    assert torch.equal(module(IDS, positions=NONE, pos_BT=POS, dtype=dtype), expected)


def test_a_projection_that_comes_first_stands_before_positions_and_norm() -> None:
    options = {"size": 6, "scale": True, "token_types": 2, "norm": NormOptions()}
    module = randomized(TokenEmbedding(7, 8, **options, project_first=True))
    assert module.project.bias is None and module.norm.dim == 8
    wide = (module.weight[IDS] * math.sqrt(8) + module.token_types[0]) @ module.project.weight.T + POS.unsqueeze(-1)
    torch.testing.assert_close(module(IDS, positions=Plus(), pos_BT=POS), module.norm(wide))


def test_a_norm_that_comes_first_stands_before_positions() -> None:
    module = randomized(TokenEmbedding(7, 8, norm=NormOptions(), norm_first=True))
    expected = module.norm(module.weight[IDS]) + POS.unsqueeze(-1)
    torch.testing.assert_close(module(IDS, positions=Plus(), pos_BT=POS), expected)


def test_segments_default_to_the_first() -> None:
    module = randomized(TokenEmbedding(7, 8, token_types=2))
    zeros = torch.zeros_like(IDS)
    assert torch.equal(
        module(IDS, positions=NONE, pos_BT=POS), module(IDS, positions=NONE, pos_BT=POS, token_type_ids=zeros)
    )


def test_segments_without_a_table_are_refused() -> None:
    module = randomized(TokenEmbedding(7, 8))
    with pytest.raises(ValueError, match="no token types"):
        module(IDS, positions=NONE, pos_BT=POS, token_type_ids=torch.zeros_like(IDS))


def test_fixnorm_gives_tokens_the_length_root_d() -> None:
    module = randomized(TokenEmbedding(7, 16, fixnorm=True))
    lengths = module(IDS, positions=NONE, pos_BT=POS).norm(dim=-1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, 4.0))


def test_factorized_embeddings_project_after_norm() -> None:
    module = randomized(TokenEmbedding(7, 8, size=4, norm=NormOptions()))
    assert module.weight.shape == (7, 4) and module.project.weight.shape == (8, 4)
    inner = F.layer_norm(module.weight[IDS] + POS.unsqueeze(-1), (4,), module.norm.weight, module.norm.bias)
    expected = F.linear(inner, module.project.weight, module.project.bias)
    torch.testing.assert_close(module(IDS, positions=Plus(), pos_BT=POS), expected)


def test_dropout_acts_on_the_sum_while_training() -> None:
    module = randomized(TokenEmbedding(7, 64, dropout=0.5))
    out = module(IDS, positions=Plus(), pos_BT=POS)
    assert 0.3 < (out == 0).float().mean() < 0.7
    module.eval()
    assert (module(IDS, positions=Plus(), pos_BT=POS) != 0).all()


def test_output_dtype_is_the_streams() -> None:
    module = randomized(TokenEmbedding(7, 8, size=4, token_types=2, norm=NormOptions()))
    out = module(IDS, positions=Plus(), pos_BT=POS, dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert module.weight.grad.dtype == torch.float32


def convolving(width: int, size: int = 6) -> torch.nn.Module:
    return randomized(TokenEmbedding(9, size, convolution=width))


def convolved(module: torch.nn.Module, ids: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
    return module(ids, positions=NONE, pos_BT=torch.arange(ids.shape[1]).unsqueeze(0), **options)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5])
def test_a_convolution_over_tokens_equals_conv1d_and_relu(width: int) -> None:
    module, ids = convolving(width), torch.randint(0, 9, (2, 7))
    kernel = module.convolve.weight.view(6, width, 6).permute(0, 2, 1)
    before = (width - 1) // 2
    x = F.pad(F.embedding(ids, module.weight).mT, (before, width - 1 - before))
    expected = F.relu(F.conv1d(x, kernel, module.convolve.bias)).mT
    torch.testing.assert_close(convolved(module, ids), expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_convolution_over_tokens_does_not_read_padding(side: str) -> None:
    module, ids = convolving(3), torch.randint(0, 9, (2, 5))
    alone = convolved(module, ids)
    padding, real = torch.randint(0, 9, (2, 2)), torch.ones(2, 5, dtype=torch.bool)
    both = [padding, ids] if side == "left" else [ids, padding]
    masks = [~real[:, :2], real] if side == "left" else [real, ~real[:, :2]]
    found = convolved(module, torch.cat(both, 1), real_BT=torch.cat(masks, 1))
    torch.testing.assert_close(found[:, 2:] if side == "left" else found[:, :5], alone)


def test_a_convolution_over_tokens_does_not_read_other_documents() -> None:
    module, first, second = convolving(5), torch.randint(0, 9, (1, 4)), torch.randint(0, 9, (1, 3))
    numbers = torch.tensor([[0] * 4 + [1] * 3])
    packed = convolved(module, torch.cat([first, second], 1), document_ids_BT=numbers)
    torch.testing.assert_close(packed, torch.cat([convolved(module, first), convolved(module, second)], 1))
