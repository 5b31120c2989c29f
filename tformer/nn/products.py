"""Matrix products with a fixed weight, prepared once for inference on a CPU.

    packed  the weight in oneDNN's own layout, in the compute dtype: the same numbers, up to twice as fast in products
            of few rows, as in decoding
    int8    y = s_x s_w (x8 W8^T): the weight rounded once to 8 bits with a scale for each row, each input row rounded
            with a scale of its own (after LLM.int8(), arXiv 2208.07339, without its outliers)

Each has a second form for steps of few rows, by the C kernels of `tformer.kernels` where these are set
(`set_kernels`): they read the weight as it is stored, at the speed of memory.

Sums of 8-bit products are exact integers, so the result of a row does not depend on the other rows. A row that holds a
NaN or an infinity becomes NaN.

Shape legend: * leading dimensions, N rows of them, D in_features, O out_features; attention: B batch, H query heads, K
kv heads, T queries, S keys, h head_dim, v value_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Kernels(Protocol):
    """The interface of `tformer.kernels.functions.Kernels`, which this package may not import."""

    def linear(
        self, weight_OD: Tensor, bias_O: Tensor | None, *, scales_O: Tensor | None, out_dtype: torch.dtype
    ) -> Callable[[Tensor], Tensor]:
        """x -> x W^T + b for a weight in bf16, or in int8 with `scales_O`, the value of 1 in each row."""
        ...

    def round_rows(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """x in 8 bits, uint8 [N, D] with 128 for zero, and the scale of each row, fp32 [N]."""
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

LARGEST = 126  # of a row in 8 bits: rounding the scale may make it 127
ZERO_POINT = 128
PACKED_DTYPES = (torch.bfloat16, torch.float32)
ROWS_AT_ONCE = 2048  # of a weight when it is rounded: bounds the fp32 copies
TINY = 1e-20  # scale of a row of zeros: avoids a division by zero
FEW_ROWS: dict[Quantize, int] = {"none": 8, "int8": 16}
"""Largest number of rows for which the C kernels are faster than oneDNN."""


class Product(Protocol):
    """x [*, D] -> x W^T + b [*, O], in `out_dtype`, by default the dtype of x."""

    def __call__(self, x: Tensor) -> Tensor: ...


class PackedProduct:
    """The packed product of oneDNN, which `torch.compile` uses on a CPU; here without the compiler."""

    def __init__(self, weight_OD: Tensor, bias_O: Tensor | None, out_dtype: torch.dtype | None = None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_OD.contiguous())
        self.bias = None if bias_O is None else bias_O.to(weight_OD.dtype)
        self.dtype, self.out_dtype = weight_OD.dtype, out_dtype

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(self.dtype), self.packed, self.bias, "none", [], "")
        return out.to(self.out_dtype or x.dtype)


class Int8Product:
    """Weight and input in 8 bits: each number is rounded to a multiple of (largest magnitude of its row) / 126.

    Inputs are stored as 1 ... 255 with 128 for zero: oneDNN's kernels for unsigned numbers are the fastest.
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
    """bf16 product by the C kernels for few rows; more rows, those of a prompt, use PyTorch's operator."""

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
    """8-bit product by the C kernels, faster than `Int8Product` for few rows."""

    def __init__(
        self, kernels: Kernels, weight_OD: Tensor, bias_O: Tensor | None, out_dtype: torch.dtype | None = None
    ) -> None:
        rounded_OD, scale_O = _rounded(weight_OD)
        self.out_dtype = out_dtype
        self.few = kernels.linear(rounded_OD, bias_O, scales_O=scale_O, out_dtype=out_dtype or weight_OD.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self.few(x).to(self.out_dtype or x.dtype)


def _rounded(weight_OD: Tensor) -> tuple[Tensor, Tensor]:
    """The weight in int8 [O, D] and the scale of each row, fp32 [O]."""
    parts = []
    for rows_ND in weight_OD.split(ROWS_AT_ONCE):
        scale_N1 = _row_scales(rows_ND).float()
        parts.append(((rows_ND / scale_N1).round_().to(torch.int8), scale_N1.squeeze(1)))
    rounded, scales = zip(*parts, strict=True)
    return torch.cat(rounded), torch.cat(scales)


def _unsigned_rows(x_ND: Tensor) -> tuple[Tensor, Tensor]:
    """`Kernels.round_rows` by PyTorch's operators; scales in bf16."""
    scale_N1 = _row_scales(x_ND)
    signed_ND = (x_ND / scale_N1.float()).round_().to(torch.int8)
    unsigned_ND = signed_ND.view(torch.uint8).bitwise_xor_(ZERO_POINT)  # adds 128
    return unsigned_ND, scale_N1.squeeze(1)


def _row_scales(x_ND: Tensor) -> Tensor:
    """bf16 [N, 1]: the scale of each row, exact in bf16 and in fp32."""
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
    """The prepared product of a weight; None where `F.linear` is as fast (no CPU, no oneDNN).

    rows: largest number of rows in a step; None: many.
    Raises ValueError for int8 where `int8_is_possible` is false, and for a weight in fp16, which overflows.
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
    """Whether oneDNN has exact 8-bit products here: on a CPU with instructions for them (VNNI, AMX)."""
    return _has_onednn(device) and _sums_are_exact()


@cache
def _sums_are_exact() -> bool:
    """False where oneDNN adds pairs of products in 16 bits, which overflow: on CPUs without VNNI and AMX."""
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
    return on_cpu and all(hasattr(namespace, name) for namespace, name in operators)
