"""Matrix products with a fixed weight, prepared once for inference on a CPU.

    packed  the weight in oneDNN's own layout, in the compute dtype: the same numbers, up to twice as fast in products
            of few rows, as in decoding
    int8    y = s_x s_w (x8 W8^T): the weight rounded once to 8 bits with a scale for each row, each input row rounded
            with its own scale (after LLM.int8(), arXiv 2208.07339, without its outliers)
    int4    the same with a weight in 4 bits, with a scale for each 32 numbers of a row

The C kernels of `tformer.kernels` have all forms: they read the weight as it is stored, at the speed of memory, which
counts with few rows. Without them there is no int4, and int8 only by oneDNN on a processor with instructions for it.
A prepared model holds its kernels (`Transformer.kernels`), and a prepared product its own: models of one process may
differ, and any number of threads may use one.

Sums of 8-bit products are exact integers, so the result of a row does not depend on the other rows. A row that holds a
NaN or an infinity becomes NaN.

Shape legend: * leading dimensions, N rows of them, D in_features, O out_features.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.kernels import functions
from tformer.kernels.functions import Kernels

Quantize = Literal["none", "int8", "int4"]

LARGEST = 126  # what the largest number of a row becomes in 8 bits; rounding the scale may make it 127
ZERO_POINT = 128
PACKED_DTYPES = (torch.bfloat16, torch.float32)
ROWS_AT_ONCE = 2048  # of a weight when it is rounded: bounds the fp32 copies
TINY = 1e-20  # scale of a row of zeros: avoids a division by zero
FEW_ROWS: dict[Quantize, int] = {"none": 8, "int8": 16}
"""The C kernels are faster than oneDNN up to this many rows, on processors with instructions for the format."""
FEW_FP32_ROWS, LARGE_FP32 = 4, 2**20
"""The same for fp32 weights with at least this number of elements: smaller weights stay in the processor's cache."""
EVERY = 0
"""In place of a number of rows: one is as fast as alone, and many as many; some weights are held twice for it."""
ROW_CLASSES = (EVERY, 1, FEW_FP32_ROWS, FEW_ROWS["none"], FEW_ROWS["int8"])


Product = Callable[[Tensor], Tensor]
"""x [*, D] -> x W^T + b [*, O], in `out_dtype`, by default the dtype of x."""


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

    def __init__(
        self,
        weight_OD: Tensor,
        bias_O: Tensor | None,
        out_dtype: torch.dtype | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        rounded_OD, self.scale_O = rounded_rows(weight_OD)
        self.zero_O = torch.zeros(len(rounded_OD), dtype=torch.long)
        self.packed = torch.ops.onednn.qlinear_prepack(rounded_OD, None)
        self.bias = None if bias_O is None else bias_O.float()
        self.out_dtype, self.kernels = out_dtype, kernels

    def __call__(self, x: Tensor) -> Tensor:
        dtype = self.out_dtype or x.dtype
        x_ND = x.reshape(-1, x.shape[-1])
        unsigned_ND, scale_N = _unsigned_rows(x_ND) if self.kernels is None else self.kernels.round_rows(x_ND)
        out_NO = torch.ops.onednn.qlinear_pointwise(
            unsigned_ND, 1.0, ZERO_POINT, self.packed, self.scale_O, self.zero_O, None, 1.0, 0, dtype, "none", [], ""
        )
        if self.kernels is not None:
            out_NO = self.kernels.rescale_rows(out_NO, scale_N, self.bias)
        elif self.bias is None:
            out_NO = out_NO.mul_(scale_N.to(dtype).unsqueeze(1))
        else:
            out_NO = torch.addcmul(self.bias.to(dtype), out_NO, scale_N.to(dtype).unsqueeze(1))
        return out_NO.view(*x.shape[:-1], len(self.scale_O))


class KernelProduct:
    """Multiplies with the C kernels up to `most` rows (None: always). Prompts have more rows and use `other`."""

    def __init__(self, kernel: functions.Product, most: int | None = None, other: Product | None = None) -> None:
        self.kernel, self.most, self.other = kernel, most, other

    def __call__(self, x: Tensor, /) -> Tensor:
        return self.kernel(x) if self.takes(x) else self.other(x)  # type: ignore[misc]

    def takes(self, x: Tensor) -> bool:
        """Whether the kernels multiply an x of this many rows."""
        return self.other is None or self.most is None or x.numel() <= self.most * x.shape[-1]


class PlainProduct:
    """PyTorch's operator with the weight as it is stored."""

    def __init__(self, weight_OD: Tensor, bias_O: Tensor | None, out_dtype: torch.dtype | None = None) -> None:
        self.weight_OD, self.bias = weight_OD, None if bias_O is None else bias_O.to(weight_OD.dtype)
        self.out_dtype = out_dtype

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight_OD.dtype), self.weight_OD, self.bias).to(self.out_dtype or x.dtype)


def rounded_rows(weight_OD: Tensor) -> tuple[Tensor, Tensor]:
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


def prepare_product(
    weight_OD: Tensor,
    bias_O: Tensor | None,
    quantize: Quantize,
    *,
    kernels: Kernels | None = None,
    rows: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> Product | None:
    """The prepared product of a weight; None where `F.linear` is as fast (no CPU, no oneDNN).

    kernels: used on a CPU; None: only PyTorch's operators.
    rows: largest number of rows in a step; None: many, `EVERY`: few or many.
    Raises ValueError for int8 and int4 where `is_possible` is false, and for a weight in fp16, which overflows.
    """
    kernels = kernels if weight_OD.device.type == "cpu" else None
    if quantize != "none":
        if not is_possible(quantize, weight_OD.device, kernels):
            raise ValueError(f"{quantize} products need a CPU with the C kernels, or for int8 with 8-bit instructions")
        if weight_OD.dtype not in PACKED_DTYPES:
            raise ValueError(f"{quantize} products are made of weights in bf16 or fp32, found {weight_OD.dtype}")
    if kernels is not None and (product := _by_kernels(kernels, weight_OD, bias_O, quantize, rows, out_dtype)):
        return product
    if quantize == "int8":
        return Int8Product(weight_OD, bias_O, out_dtype, kernels)
    packs = _has_onednn(weight_OD.device) and _packs(weight_OD.dtype)
    return PackedProduct(weight_OD, bias_O, out_dtype) if packs else None


def _by_kernels(
    kernels: Kernels,
    weight_OD: Tensor,
    bias_O: Tensor | None,
    quantize: Quantize,
    rows: int | None,
    out_dtype: torch.dtype | None,
) -> KernelProduct | None:
    """The product by the kernels where they are faster than PyTorch's operators, or the only way."""
    if quantize == "int4":
        packed, scales = kernels.round_groups(weight_OD)
        size = weight_OD.shape[1]
        return KernelProduct(kernels.linear(packed, bias_O, scales=scales, in_features=size, out_dtype=out_dtype))
    if quantize == "int8":
        if _is_few(rows, FEW_ROWS["int8"]) or not _onednn_has_int8(weight_OD.device):
            rounded_OD, scale_O = rounded_rows(weight_OD)
            return KernelProduct(kernels.linear(rounded_OD, bias_O, scales=scale_O, out_dtype=out_dtype))
        return None
    packs = _has_onednn(weight_OD.device) and _packs(weight_OD.dtype)
    plain = (PackedProduct if rows == EVERY and packs else PlainProduct)(weight_OD, bias_O, out_dtype)
    if weight_OD.dtype == torch.bfloat16:
        kernel = kernels.linear(weight_OD, bias_O, out_dtype=out_dtype)
        if not packs:
            return KernelProduct(kernel)
        return KernelProduct(kernel, FEW_ROWS["none"], plain) if _is_few(rows, FEW_ROWS["none"]) else None
    if weight_OD.dtype == torch.float32 and _is_few(rows, FEW_FP32_ROWS) and weight_OD.numel() >= LARGE_FP32:
        return KernelProduct(kernels.linear(weight_OD, bias_O, out_dtype=out_dtype), FEW_FP32_ROWS, plain)
    return None


def row_class(rows: int) -> int | None:
    """The number of rows for which a product is prepared, at least `rows`; None: many.

    Models that are prepared for numbers of one class are the same.
    """
    return next((most for most in ROW_CLASSES if rows <= most), None)


def _is_few(rows: int | None, most: int) -> bool:
    return rows is not None and rows <= most


def is_possible(quantize: Quantize, device: torch.device, kernels: Kernels | None = None) -> bool:
    """Whether products of a kind can be prepared on the device, with these kernels."""
    if quantize == "none" or (device.type == "cpu" and kernels is not None):
        return True
    return quantize == "int8" and _onednn_has_int8(device)


def _onednn_has_int8(device: torch.device) -> bool:
    """Whether oneDNN has exact 8-bit products here: on a CPU with instructions for them (VNNI, AMX)."""
    return _has_onednn(device) and _sums_are_exact()


@cache
def _sums_are_exact() -> bool:
    """False where oneDNN adds pairs of products in 16 bits, which overflow: on CPUs without VNNI and AMX."""
    ones = torch.ones(LARGEST, LARGEST)
    largest = Int8Product(ones, None)(ones)
    return bool((largest > 0.9 * LARGEST).all())


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
