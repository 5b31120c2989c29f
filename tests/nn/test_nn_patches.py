"""Stems of image models: cutting, shifted copies, convolutions; their grids, class token and dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.nn.test_nn_embedding import NONE, Plus, randomized
from tformer.nn.patches import STEMS, ConvolvedPatches, PatchEmbedding, cut_patches, shifted_copies


def made(stem: str, **sizes: Any) -> PatchEmbedding:
    sizes = {"image_size": 12, "size": 4, "channels": 3, "cls": False} | sizes
    module = randomized(STEMS[stem](8, **sizes))
    assert isinstance(module, PatchEmbedding)
    return module


def run(module: PatchEmbedding, pixels: torch.Tensor, **options: Any) -> torch.Tensor:
    return module(pixels, positions=NONE, pos_BT=torch.arange(module.seq_len).unsqueeze(0), **options)


@pytest.mark.parametrize("stem", ["conv", "linear"])
@pytest.mark.parametrize("cls", [True, False])
def test_patches_equal_a_strided_convolution(stem: str, cls: bool) -> None:
    module = made(stem, cls=cls)
    pixels = torch.randn(2, 3, 12, 12)
    out = run(module, pixels)
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


@pytest.mark.parametrize("stem", STEMS)
def test_wrong_image_size_names_both_shapes(stem: str) -> None:
    with pytest.raises(ValueError, match=r"\[batch, 3, 12, 12\], found \[2, 1, 12, 12\]"):
        run(made(stem), torch.randn(2, 1, 12, 12))


@pytest.mark.parametrize(("size", "side"), [(32, 8), (28, 7), (30, 8), (33, 9), (5, 2), (1, 1)])
def test_convolutions_take_any_image_size_and_halve_it_rounding_up(size: int, side: int) -> None:
    module = made("convolutions", image_size=size, cls=True)
    assert module.side == side
    assert run(module, torch.randn(2, 3, size, size)).shape == (2, side**2 + 1, 8)


def test_convolutions_are_those_of_cct() -> None:
    module, pixels = made("convolutions", image_size=10, width=5), torch.randn(2, 3, 10, 10)
    x = pixels
    for kernel in module.kernels:
        x = F.max_pool2d(F.relu(F.conv2d(x, kernel, padding=1)), kernel_size=3, stride=2, padding=1)
    assert [tuple(kernel.shape) for kernel in module.kernels] == [(5, 3, 3, 3), (8, 5, 3, 3)]
    torch.testing.assert_close(run(module, pixels), x.flatten(2).mT)


def test_residual_convolutions_add_what_they_read_of_normalized_pixels() -> None:
    module, x = made("convolutions", image_size=10, width=5, depth=2), torch.randn(2, 3, 10, 10)
    assert [tuple(matrix.shape) for matrix in module.residuals] == [(5, 45), (5, 45), (8, 72), (8, 72)]
    out, matrices = run(module, x), iter(module.residuals)
    for kernel in module.kernels:
        x = F.max_pool2d(F.relu(F.conv2d(x, kernel, padding=1)), kernel_size=3, stride=2, padding=1)
        for _ in range(2):
            matrix = next(matrices)
            normal = x * (x.square().mean(dim=1, keepdim=True) + 1e-5).rsqrt()
            windows = F.unfold(F.relu(normal), 3, padding=1).unflatten(1, (x.shape[1], 9))  # [B, C, 9, places]
            weight = matrix.view(-1, 9, x.shape[1])
            x = x + torch.einsum("ojc,bcjp->bop", weight, windows).view(x.shape)
    torch.testing.assert_close(out, x.flatten(2).mT)


def test_residual_convolutions_change_nothing_at_first_and_learn_all_the_same() -> None:
    plain, deep = (made("convolutions", depth=depth) for depth in (0, 3))
    with torch.no_grad():
        deep.reset_parameters(torch.nn.init.zeros_)
    plain.kernels = deep.kernels
    pixels = torch.randn(2, 3, 12, 12)
    torch.testing.assert_close(run(deep, pixels), run(plain, pixels))
    run(deep, pixels).square().sum().backward()
    assert all(matrix.grad.any() for matrix in deep.residuals)


def test_muon_trains_the_residual_convolutions_and_no_other_part_of_a_stem() -> None:
    for stem, kind in STEMS.items():
        module = made(stem, **({"depth": 2} if kind is ConvolvedPatches else {}))
        names = dict(module.named_parameters())
        rows = {name: names[name].shape[0] for name in names if name.startswith("residuals.")}
        assert dict(module.hidden_matrices()) == rows
        assert (len(rows) == 4) == (kind is ConvolvedPatches)


def test_the_number_of_convolutions_follows_from_the_patch_size() -> None:
    for size in (2, 4, 8, 16):
        assert 2 ** len(made("convolutions", image_size=32, size=size).kernels) == size


@pytest.mark.parametrize("size", [1, 3, 6])
def test_convolutions_need_a_power_of_two(size: int) -> None:
    with pytest.raises(ValueError, match=f"found {size}, expected 2, 4, 8"):
        made("convolutions", size=size)


@pytest.mark.parametrize("stem", ["linear", "conv", "shifted"])
def test_cut_patches_must_divide_the_image(stem: str) -> None:
    with pytest.raises(ValueError, match="5 does not divide image_size 12"):
        made(stem, size=5)


def test_shifted_patches_are_cut_from_the_image_and_four_moved_copies() -> None:
    pixels = torch.randn(2, 3, 12, 12)
    copies = shifted_copies(pixels, 2)
    assert torch.equal(copies[:, :3], pixels)
    for number, (down, right) in enumerate([(-2, -2), (-2, 2), (2, -2), (2, 2)], 1):
        moved = torch.zeros_like(pixels)
        moved[:, :, max(0, down) : 12 + min(0, down), max(0, right) : 12 + min(0, right)] = pixels[
            :, :, max(0, -down) : 12 + min(0, -down), max(0, -right) : 12 + min(0, -right)
        ]
        assert torch.equal(copies[:, 3 * number : 3 * number + 3], moved)
    module = made("shifted")
    assert module.weight.shape == (8, 5 * 3 * 16)
    rows = module.patch_norm(cut_patches(copies, 4))
    torch.testing.assert_close(run(module, pixels), F.linear(rows, module.weight, module.bias))


@pytest.mark.parametrize("stem", STEMS)
def test_every_stem_adds_positions_and_has_the_streams_dtype(stem: str) -> None:
    module, pixels = made(stem), torch.randn(2, 3, 12, 12)
    pos = torch.arange(9).unsqueeze(0)
    plain, moved = run(module, pixels), module(pixels, positions=Plus(), pos_BT=pos)
    torch.testing.assert_close(moved, plain + pos.unsqueeze(-1))
    out = run(module, pixels, dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in module.parameters())


@pytest.mark.parametrize("stem", STEMS)
def test_flops_of_a_stem_are_those_of_its_products(stem: str) -> None:
    module = made(stem, image_size=16)
    expected = {
        "linear": [2 * 48 * 8 * 16],
        "conv": [2 * 48 * 8 * 16],
        "shifted": [2 * 5 * 48 * 8 * 16],
        "convolutions": [2 * 27 * 64 * 256, 2 * 64 * 9 * 8 * 64],
    }
    assert module.flops() == expected[stem]
    deep = made("convolutions", image_size=16, depth=1)
    assert deep.flops() == [2 * 27 * 64 * 256, 2 * 9 * 64**2 * 64, 2 * 64 * 9 * 8 * 64, 2 * 9 * 8**2 * 16]
