"""Matrix products with a fixed weight, prepared once for inference on a CPU: packed by oneDNN, in 8 bits, or by our
own C kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Kernels(Protocol):
    """What `tformer.kernels` offers for tensors on a CPU."""

    def linear(
        self, weight_OD: Tensor, bias_O: Tensor | None, *, scales_O: Tensor | None, out_dtype: torch.dtype
    ) -> Callable[[Tensor], Tensor]:
        """x -> x W^T + b for a weight in bf16, or in int8 where `scales_O` says what 1 stands for in each row."""
        ...

    def round_rows(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """x in 8 bits, uint8 [N, D] with 128 for zero, and fp32 [N]: what 1 stands for in each row."""
        ...

    def rescale_rows(self, y_NO: Tensor, scales_N: Tensor, bias_O: Tensor | None) -> Tensor:
        """y scales + bias, in place."""
        ...

    def attend(
        self,
        q_BHTh: Tensor,
        k_BKSh: Tensor,
        v_BKSv: Tensor,
        *,
        scale: float,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """softmax(q k^T scale + bias) v in bf16, [B, H, T, v]."""
        ...


_kernels: Kernels | None = None


def set_kernels(kernels: Kernels | None) -> None:
    """Use these C kernels from now on in this process; None: only PyTorch's operators."""
    global _kernels
    _kernels = kernels


def get_kernels() -> Kernels | None:
    """The C kernels in use, or None."""
    return _kernels


Quantize = Literal["none", "int8"]

LARGEST = 126  # a row's largest number in 8 bits: rounding the scale may make it 127
ZERO_POINT = 128
PACKED_DTYPES = (torch.bfloat16, torch.float32)
ROWS_AT_ONCE = 2048  # of a weight, while it is rounded
TINY = 1e-20  # a row of zeros has this scale, in place of a division by zero
FEW_ROWS: dict[Quantize, int] = {"none": 8, "int8": 16}
"""Up to so many, our kernels are ahead of oneDNN's; beyond, they multiply more slowly than it does."""


class Product(Protocol):
    """x [*, D] -> x W^T + b [*, O], in x's dtype unless the product was given another."""

    def __call__(self, x: Tensor) -> Tensor: ...


class PackedProduct:
    """The product that `torch.compile` uses on a CPU, without the compiler."""

    def __init__(self, weight_OD: Tensor, bias_O: Tensor | None, out_dtype: torch.dtype | None = None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_OD.contiguous())
        self.bias = None if bias_O is None else bias_O.to(weight_OD.dtype)
        self.dtype, self.out_dtype = weight_OD.dtype, out_dtype

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.packed, self.bias, "none", [], "")
        return out.to(self.out_dtype or x.dtype)


class Int8Product:
    """Weight and input in 8 bits. Each number is rounded to a multiple of its row's largest one / 126.

    The input's are kept as 1 ... 255, with 128 for zero: for unsigned numbers oneDNN has its quickest kernels.
    """

    def __init__(self, weight_OD: Tensor, bias_O: Tensor | None, out_dtype: torch.dtype | None = None) -> None:
        rounded_OD, self.scale_O = _rounded(weight_OD)
        self.zero_O = torch.zeros(len(rounded_OD), dtype=torch.long)
        self.packed = torch.ops.onednn.qlinear_prepack(rounded_OD, None)
        self.bias = None if bias_O is None else bias_O.float()
        self.out_dtype = out_dtype

    def __call__(self, x: Tensor) -> Tensor:
        dtype = self.out_dtype or x.dtype
        x_ND = x.reshape(-1, x.shape[-1])
        kernels = get_kernels()
        unsigned_ND, scale_N = _unsigned_rows(x_ND) if kernels is None else kernels.round_rows(x_ND)
        out_NO = torch.ops.onednn.qlinear_pointwise(
            unsigned_ND, 1.0, ZERO_POINT, self.packed, self.scale_O, self.zero_O, None, 1.0, 0, dtype, "none", [], ""
        )
        if kernels is not None:
            out_NO = kernels.rescale_rows(out_NO, scale_N, self.bias)
        elif self.bias is None:
            out_NO = out_NO.mul_(scale_N.to(dtype).unsqueeze(1))
        else:
            out_NO = torch.addcmul(self.bias.to(dtype), out_NO, scale_N.to(dtype).unsqueeze(1))
        return out_NO.view(*x.shape[:-1], len(self.scale_O))


class FewRowsProduct:
    """bf16, for steps of few rows; more of them, a prompt's, are multiplied by PyTorch's operator."""

    def __init__(
        self, kernels: Kernels, weight_OD: Tensor, bias_O: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> None:
        self.weight_OD, self.bias = weight_OD, None if bias_O is None else bias_O.to(weight_OD.dtype)
        self.out_dtype = out_dtype
        self.few = kernels.linear(weight_OD, bias_O, scales_O=None, out_dtype=out_dtype or weight_OD.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        if x.numel() <= FEW_ROWS["none"] * x.shape[-1] and x.dtype == torch.bfloat16:
            return self.few(x)
        return F.linear(x.to(self.weight_OD.dtype), self.weight_OD, self.bias).to(self.out_dtype or x.dtype)


class FewRowsInt8Product:
    """`Int8Product` for steps of few rows; more of them take longer than there."""

    def __init__(
        self, kernels: Kernels, weight_OD: Tensor, bias_O: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> None:
        rounded_OD, scale_O = _rounded(weight_OD)
        self.out_dtype = out_dtype
        self.few = kernels.linear(rounded_OD, bias_O, scales_O=scale_O, out_dtype=out_dtype or weight_OD.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self.few(x).to(self.out_dtype or x.dtype)


def _rounded(weight_OD: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [O, D], and fp32 [O]: what 1 stands for in each row. Some rows at a time, for they pass through fp32."""
    parts = []
    for rows_ND in weight_OD.split(ROWS_AT_ONCE):
        scale_N1 = _row_scales(rows_ND).float()
        parts.append(((rows_ND / scale_N1).round_().to(torch.int8), scale_N1.squeeze(1)))
    rounded, scales = zip(*parts, strict=True)
    return torch.cat(rounded), torch.cat(scales)


def _unsigned_rows(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """`Kernels.round_rows` by PyTorch's operators; the scales are numbers of bf16."""
    scale_N1 = _row_scales(x_ND)
    signed_ND = (x_ND / scale_N1.float()).round_().to(torch.int8)
    unsigned_ND = signed_ND.view(torch.uint8).bitwise_xor_(ZERO_POINT)  # the quickest way to add it
    return unsigned_ND, scale_N1.squeeze(1)


def _row_scales(x_ND: Tensor) -> Tensor:
    """bf16 [N, 1]: what 1 stands for in 8 bits, a number that can be multiplied with in bf16 and in fp32."""
    highest_N1 = x_ND.abs().amax(-1, keepdim=True).bfloat16()  # `vector_norm` takes several times as long
    return highest_N1.mul(1 / LARGEST).clamp_(min=TINY)


PRODUCTS: dict[Quantize, Callable[..., Product]] = {"none": PackedProduct, "int8": Int8Product}
FEW_ROWS_PRODUCTS: dict[Quantize, Callable[..., Product]] = {"none": FewRowsProduct, "int8": FewRowsInt8Product}


def prepare_product(
    weight_OD: Tensor,
    bias_O: Tensor | None,
    quantize: Quantize,
    *,
    rows: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> Product | None:
    """The product of a weight that stays as it is; None where the plain one is as good (no CPU, no oneDNN).

    rows: how many there are in a step, at most; None: many.
    Raises ValueError for int8 where `int8_is_possible` says no, and for a weight in fp16, which overflows.
    """
    if quantize == "int8":
        if not int8_is_possible(weight_OD.device):
            raise ValueError("8-bit products need a CPU with instructions for them, and a PyTorch with oneDNN")
        if weight_OD.dtype not in PACKED_DTYPES:
            raise ValueError(f"8-bit products are made of weights in bf16 or fp32, found {weight_OD.dtype}")
    elif not (_has_onednn(weight_OD.device) and _packs(weight_OD.dtype)):
        return None
    kernels = get_kernels()
    if kernels is not None and rows is not None and rows <= FEW_ROWS[quantize] and _fits_kernels(weight_OD, quantize):
        return FEW_ROWS_PRODUCTS[quantize](kernels, weight_OD, bias_O, out_dtype)
    return PRODUCTS[quantize](weight_OD, bias_O, out_dtype)


def int8_is_possible(device: torch.device) -> bool:
    """Whether there are 8-bit products: by oneDNN, on a CPU with instructions for them (VNNI, AMX)."""
    return _has_onednn(device) and _sums_are_exact()


@cache
def _sums_are_exact() -> bool:
    """Without such instructions oneDNN adds pairs of products in 16 bits, which hold no two of the largest."""
    ones = torch.ones(LARGEST, LARGEST)
    largest = Int8Product(ones, None)(ones)
    return bool((largest > 0.9 * LARGEST).all())


def _fits_kernels(weight_OD: Tensor, quantize: Quantize) -> bool:
    return quantize == "int8" or weight_OD.dtype == torch.bfloat16


def _packs(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _has_onednn(device: torch.device) -> bool:
    # PyTorch's builds for ARM have oneDNN too, but not all of these operators.
    operators = (
        (torch.ops.mkldnn, "_reorder_linear_weight"),
        (torch.ops.mkldnn, "_linear_pointwise"),
        (torch.ops.mkldnn, "_is_mkldnn_bf16_supported"),
        (torch.ops.onednn, "qlinear_prepack"),
        (torch.ops.onednn, "qlinear_pointwise"),
    )
    on_cpu = device.type == "cpu" and torch.backends.mkldnn.is_available()
    return on_cpu and all(hasattr(room, name) for room, name in operators)
