"""Input embeddings of images: a picture becomes a row of patch vectors, by one of the stems in STEMS.

    linear, conv     cut into P x P squares, one product (ViT, arXiv 2010.11929); stored as a matrix or as a kernel
    shifted          also of four copies, moved by half a patch along the diagonals (SPT, arXiv 2112.13492)
    convolutions     log2 P layers: 3 x 3 convolution, ReLU, maximum of 3 x 3 with stride 2 (CCT, arXiv 2104.05704);
                     after each the residual convolutions of `stem_depth`: x + conv(ReLU(RMSNorm(x)))

Each patch vector may be preceded by a learned class token; positions, norm and dropout are those of every embedding.
"""

# Shapes: B batch, T positions, D d_model, C channels, P patch side, Y x X pixels.

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.nn.embedding import Embedding
from tformer.nn.layer_norm import rms_norm
from tformer.nn.norm import NormOptions, build_norm
from tformer.nn.positions.base import Positions
from tformer.nn.taps import Tap, TapSink, tap


class PatchEmbedding(Embedding):
    """Base class of the stems: class token, positions, norm and dropout around `patch_vectors`.

    Args:
        image_size: pixels per side of an image.
        size: pixels per side of a patch; a grid has ceil(image_size / size) patches per side.
        channels: values per pixel.
        cls: put a learned class token in front.
        width: channels between the convolutions of a stem.
        depth: residual convolutions after each halving of a stem.

    Attributes:
        parts: names of the stem's parameters and modules.
    """

    parts: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        d_model: int,
        *,
        image_size: int,
        size: int,
        channels: int,
        cls: bool,
        width: int = 64,
        depth: int = 0,
        norm: NormOptions | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(d_model, d_model, norm=norm, dropout=dropout)
        self.d_model, self.image_size, self.channels, self.size = d_model, image_size, channels, size
        self.side, self.width, self.depth = -(-image_size // size), width, depth
        self.build_stem()
        self.cls = nn.Parameter(torch.empty(d_model)) if cls else None

    @property
    def seq_len(self) -> int:
        """Number of positions an image becomes, the class token included."""
        return self.side**2 + (self.cls is not None)

    def build_stem(self) -> None:
        """Make the parameters of the stem. Raises ValueError for sizes that do not fit together."""
        raise NotImplementedError

    def patch_vectors(self, pixels_BCYX: Tensor, taps: TapSink | None) -> Tensor:
        """[B, C, Y, X] → [B, patches, D], row by row."""
        raise NotImplementedError

    def matrices(self) -> Iterator[tuple[Tensor, int]]:
        """(weight [out, in], number of places in an image) of each product, in order."""
        raise NotImplementedError

    def reset_parameters(self, draw: Callable[[Tensor], None]) -> None:
        """Draw the weights of the stem; `draw` fills a matrix as the recipe's `init` says."""
        raise NotImplementedError

    def forward(
        self,
        pixels_BCYX: Tensor,
        *,
        positions: Positions,
        pos_BT: Tensor,
        dtype: torch.dtype = torch.float32,
        taps: TapSink | None = None,
    ) -> Tensor:
        """[B, C, height, width] → [B, T, D] in `dtype`, row by row."""
        expected = (self.channels, self.image_size, self.image_size)
        if tuple(pixels_BCYX.shape[1:]) != expected:
            raise ValueError(f"pixel_values must have the shape [batch, {', '.join(map(str, expected))}], "
                             f"found {list(pixels_BCYX.shape)}")  # fmt: skip
        x_BTD = self.patch_vectors(tap(taps, "pixels", pixels_BCYX).to(dtype), taps)
        x_BTD = tap(taps, "patch_vectors", x_BTD)
        if self.cls is not None:
            x_BTD = torch.cat([self.cls.to(dtype).expand(x_BTD.shape[0], 1, -1), x_BTD], dim=1)
            x_BTD = tap(taps, "with_cls", x_BTD)
        return self.finish(x_BTD, positions, pos_BT, taps)

    def own_taps(self, e: str) -> list[Tap]:
        cls = Tap("with_cls", "B T D", "a learned vector put in front", parameters=("cls",), title="with class token")
        return [
            Tap("pixels", "B C Y X", "the image", ()),
            *self.stem_taps(),
            Tap("patch_vectors", "B N D", "each patch projected to the model's width", parameters=self.parts),
            *([cls] if self.cls is not None else []),
        ]

    def stem_taps(self) -> list[Tap]:
        """Inner tensors between the pixels and the patch vectors."""
        return []

    def flops(self) -> list[float]:
        """Forward operations of each product for one image."""
        return [2.0 * weight.numel() * places for weight, places in self.matrices()]

    def saved_bytes(self, itemsize: int) -> int:
        """Bytes of one image that the stem's backward pass reads, beside the patch vectors."""
        return 0

    def hidden_matrices(self) -> Iterator[tuple[str, int]]:
        """(name, rows) of the parameters that Muon trains as it trains the matrices of a stack."""
        return iter(())


class CutPatches(PatchEmbedding):
    """Squares without overlap, each projected to d_model by one product with `weight` [D, C·P·P]."""

    parts: ClassVar[tuple[str, ...]] = ("weight", "bias")
    copies: ClassVar[int] = 1  # images that a patch is cut from
    has_kernel: ClassVar[bool] = False  # the weight is stored as [D, C, P, P]

    def build_stem(self) -> None:
        if self.image_size % self.size:
            raise ValueError(f"{self.size} does not divide image_size {self.image_size}")
        square = (self.channels * self.copies, self.size, self.size)
        shape = square if self.has_kernel else (math.prod(square),)
        self.weight = nn.Parameter(torch.empty(self.d_model, *shape))
        self.bias = nn.Parameter(torch.empty(self.d_model))

    def patch_vectors(self, pixels_BCYX: Tensor, taps: TapSink | None) -> Tensor:
        patches = tap(taps, "patches", self.patches(pixels_BCYX))
        return F.linear(patches, self.weight.flatten(1).to(patches.dtype), self.bias.to(patches.dtype))

    def patches(self, pixels_BCYX: Tensor) -> Tensor:
        """The input of the product, [B, patches, C·P·P]."""
        return cut_patches(pixels_BCYX, self.size)

    def stem_taps(self) -> list[Tap]:
        numbers = "+".join(["CPP"] * self.copies)
        return [Tap("patches", f"B N {numbers}", "the image cut into squares, numbers in a row")]

    def matrices(self) -> Iterator[tuple[Tensor, int]]:
        yield self.weight.view(self.d_model, -1), self.side**2

    def reset_parameters(self, draw: Callable[[Tensor], None]) -> None:
        draw(self.weight.view(self.d_model, -1))
        self.bias.zero_()


class KernelPatches(CutPatches):
    """The same with the weight in the shape of a convolution's, as published ViTs store it."""

    has_kernel = True


class ShiftedPatches(CutPatches):
    """Squares of the image and of four copies moved by half a patch diagonally; LayerNorm before the product."""

    parts = (*CutPatches.parts, "patch_norm")
    copies = 5

    def build_stem(self) -> None:
        super().build_stem()
        self.patch_norm = build_norm(NormOptions(), self.weight.shape[1])

    def patches(self, pixels_BCYX: Tensor) -> Tensor:
        return self.patch_norm(cut_patches(shifted_copies(pixels_BCYX, self.size // 2), self.size))


class ConvolvedPatches(PatchEmbedding):
    """log2 P layers of convolution, ReLU and pooling, with `width` channels between them. Any image size will do.

    Each layer may be followed by `depth` residual convolutions that keep the size, x + conv(ReLU(RMSNorm(x))), with the
    norm over the channels of each place. They are zero at first, so that training begins with the plain stem.

    The kernels have no bias and He's variance 2 / fan_in (arXiv 1502.01852). Channels are the last dimension in memory,
    with which convolutions of a CPU take half the time.
    """

    parts = ("kernels", "residuals")

    def build_stem(self) -> None:
        layers = self.size.bit_length() - 1
        if layers < 1 or self.size != 1 << layers:
            raise ValueError(f"found {self.size}, expected 2, 4, 8 … as every convolution halves the image")
        widths = [self.channels, *[self.width] * (layers - 1), self.d_model]
        self.kernels = nn.ParameterList(torch.empty(out, given, 3, 3) for given, out in itertools.pairwise(widths))
        # Matrices [out, 9 in], in the order of channels-last kernels, so that Muon can train them.
        self.residuals = nn.ParameterList(
            torch.empty(width, 9 * width) for width in widths[1:] for _ in range(self.depth)
        )

    def patch_vectors(self, pixels_BCYX: Tensor, taps: TapSink | None) -> Tensor:
        x_BCYX = pixels_BCYX.contiguous(memory_format=torch.channels_last)
        residuals = iter(self.residuals)
        for kernel in self.kernels:
            x_BCYX = F.conv2d(x_BCYX, kernel.to(x_BCYX.dtype), padding=1)
            x_BCYX = F.relu(F.max_pool2d(x_BCYX, kernel_size=3, stride=2, padding=1))  # the other order costs more
            for matrix in itertools.islice(residuals, self.depth):
                channels = matrix.shape[0]
                kernel_OIYX = matrix.to(x_BCYX.dtype).view(channels, 3, 3, channels).permute(0, 3, 1, 2)
                normal_BYXC = rms_norm(x_BCYX.permute(0, 2, 3, 1), None, NormOptions.eps)
                x_BCYX = x_BCYX + F.conv2d(F.relu(normal_BYXC.permute(0, 3, 1, 2)), kernel_OIYX, padding=1)
        return x_BCYX.flatten(2).transpose(1, 2)

    def matrices(self) -> Iterator[tuple[Tensor, int]]:
        side, residuals = self.image_size, iter(self.residuals)
        for kernel in self.kernels:
            yield kernel.view(kernel.shape[0], -1), side**2
            side = -(-side // 2)
            for matrix in itertools.islice(residuals, self.depth):
                yield matrix, side**2

    def saved_bytes(self, itemsize: int) -> int:
        """Bytes that the backward pass of every layer and of every residual convolution reads.

        A layer keeps its input, the products, and the maxima with their places (int64); a residual convolution keeps
        its input before and after the norm with its ReLU.
        """
        total, side = 0, self.image_size
        for kernel in self.kernels:
            out, given = kernel.shape[:2]
            half = -(-side // 2)
            total += (given + out) * side**2 * itemsize + out * half**2 * (itemsize + 8)
            total += 2 * self.depth * out * half**2 * itemsize
            side = half
        return total

    def reset_parameters(self, draw: Callable[[Tensor], None]) -> None:
        for kernel in self.kernels:
            kernel.normal_(0.0, (2.0 / kernel[0].numel()) ** 0.5)
        for matrix in self.residuals:
            matrix.zero_()

    def hidden_matrices(self) -> Iterator[tuple[str, int]]:
        for name, matrix in self.residuals.named_parameters("residuals"):
            yield name, matrix.shape[0]


STEMS: dict[str, type[PatchEmbedding]] = {
    "linear": CutPatches,
    "conv": KernelPatches,
    "shifted": ShiftedPatches,
    "convolutions": ConvolvedPatches,
}

if TYPE_CHECKING:
    Stem = str
else:
    Stem = Literal[tuple(STEMS)]


def cut_patches(pixels_BCYX: Tensor, size: int) -> Tensor:
    """[B, C, height, width] → [B, T, C·P·P], row by row: `F.unfold` without overlap, by moving memory alone."""
    batch, channels, height, width = pixels_BCYX.shape
    rows, columns = height // size, width // size
    cut = pixels_BCYX.reshape(batch, channels, rows, size, columns, size).permute(0, 2, 4, 1, 3, 5)
    return cut.reshape(batch, rows * columns, channels * size * size)


def shifted_copies(pixels_BCYX: Tensor, by: int) -> Tensor:
    """[B, 5 C, Y, X]: the image, and the image moved up-left, up-right, down-left, down-right, with zeros outside."""
    height, width = pixels_BCYX.shape[2:]
    padded = F.pad(pixels_BCYX, (by, by, by, by))
    corners = [(2 * by, 2 * by), (2 * by, 0), (0, 2 * by), (0, 0)]
    moved = [padded[:, :, top : top + height, left : left + width] for top, left in corners]
    return torch.cat([pixels_BCYX, *moved], dim=1)
