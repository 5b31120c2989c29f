"""The kernels as functions of tensors on a CPU.

Shape legend: N rows, D in_features, O out_features; B batch, H query heads, K kv heads, T queries, S keys, h head_dim,
v value_dim; R rows, V columns, k of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from tformer.kernels.library import AttentionArguments, LinearArguments, load


class Kernels:
    """The functions of a loaded library, in the form of `nn.products.Kernels`. They use PyTorch's number of threads.

    Raise MemoryError where there is no memory for intermediate results.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def linear(
        self, weight_OD: Tensor, bias_O: Tensor | None, *, scales_O: Tensor | None, out_dtype: torch.dtype
    ) -> FewRows:
        """x -> x W^T + b for a weight in bf16, or in int8 with `scales_O`, the value of 1 in each row."""
        return FewRows(self._library, weight_OD, bias_O, scales_O, out_dtype)

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
        """softmax(q k^T scale + bias) v in bf16, [B, H, T, v] with the heads innermost in memory; fp32 inside.

        mask: bool, bias: fp32, both broadcastable to [B, H, T, S]. A query whose keys are all masked gets zeros.
        """
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BHTh, k_BKSh, v_BKSv))
        (batch, heads, num_queries, head_dim), (num_kv_heads, num_keys) = q.shape, k.shape[1:3]
        # The library reads at addresses: wrong shapes would read other memory.
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16 and heads % num_kv_heads == 0
        assert k.shape == (batch, num_kv_heads, num_keys, head_dim) and v.shape[:3] == k.shape[:3]
        assert (mask is None or mask.dtype == torch.bool) and (bias is None or bias.dtype == torch.float32)
        full = (batch, heads, num_queries, num_keys)
        mask = None if mask is None else mask.expand(full)
        bias = None if bias is None else bias.expand(full)
        out_BTHv = q.new_empty(batch, num_queries, heads, v.shape[-1])
        arguments = AttentionArguments(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            _address(mask),
            _address(bias),
            out_BTHv.data_ptr(),
            batch,
            heads,
            num_kv_heads,
            num_queries,
            num_keys,
            head_dim,
            v.shape[-1],
            q.stride()[:3],
            k.stride()[:3],
            v.stride()[:3],
            _strides(mask),
            _strides(bias),
            scale,
        )
        _check(self._library.attend(ctypes.addressof(arguments), torch.get_num_threads()))
        return out_BTHv.transpose(1, 2)

    def round_rows(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """bf16 or fp32 x in 8 bits, uint8 [N, D] with 128 for zero, and the scale of each row, fp32 [N]."""
        x_ND = x_ND.contiguous()
        rows, inner = x_ND.shape
        rounded_ND, scales_N = x_ND.new_empty(rows, inner, dtype=torch.uint8), x_ND.new_empty(rows, dtype=torch.float32)
        to = rounded_ND.data_ptr(), scales_N.data_ptr()
        wide = x_ND.dtype == torch.float32
        self._library.round_rows(x_ND.data_ptr(), wide, rows, inner, *to, torch.get_num_threads())
        return rounded_ND, scales_N

    def rescale_rows(self, y_NO: Tensor, scales_N: Tensor, bias_O: Tensor | None) -> Tensor:
        """y scales + bias in place, for a contiguous bf16 or fp32 y; the bias is fp32."""
        rows, columns = y_NO.shape
        by = scales_N.data_ptr(), _address(bias_O)
        wide = y_NO.dtype == torch.float32
        self._library.rescale_rows(y_NO.data_ptr(), wide, rows, columns, *by, torch.get_num_threads())
        return y_NO

    def top(self, x_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The `k` <= V largest fp32 numbers of each row and their columns, [R, k]: ties by column, NaN first."""
        x_RV = x_RV if x_RV.stride(1) == 1 else x_RV.contiguous()
        rows, columns = x_RV.shape
        assert x_RV.dtype == torch.float32 and 1 <= k <= columns
        values_Rk, indices_Rk = x_RV.new_empty(rows, k), x_RV.new_empty(rows, k, dtype=torch.long)
        addresses = values_Rk.data_ptr(), indices_Rk.data_ptr()
        threads = torch.get_num_threads()
        _check(self._library.top(x_RV.data_ptr(), rows, columns, x_RV.stride(0), k, *addresses, threads))
        return values_Rk, indices_Rk


class FewRows:
    """The product of one weight for few rows; holds references to the tensors that the library reads."""

    def __init__(
        self,
        library: ctypes.CDLL,
        weight_OD: Tensor,
        bias_O: Tensor | None,
        scales_O: Tensor | None,
        out_dtype: torch.dtype,
    ) -> None:
        self.weight = weight_OD.contiguous()
        self.out_dtype, self.out_features = out_dtype, len(weight_OD)
        self._bias = None if bias_O is None else bias_O.float().contiguous()
        self._scales = None if scales_O is None else scales_O.float().contiguous()
        self._totals = None if scales_O is None else _row_sums(weight_OD)
        self._arguments = LinearArguments(
            self.weight.data_ptr(),
            _address(self._bias),
            _address(self._scales),
            _address(self._totals),
            weight_OD.shape[1],
            self.out_features,
            out_dtype == torch.float32,
        )
        self._address = ctypes.addressof(self._arguments)
        self._bf16, self._int8 = library.linear_bf16, library.linear_int8

    def __call__(self, x: Tensor) -> Tensor:
        """x [*, D] -> [*, O]. x is bf16, beside an int8 weight also fp32."""
        assert x.shape[-1] == self.weight.shape[1]
        assert x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and self._scales is not None)
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.out_features, dtype=self.out_dtype)
        rows, threads = x.numel() // x.shape[-1], torch.get_num_threads()
        if self._scales is None:
            self._bf16(self._address, x.data_ptr(), out.data_ptr(), rows, threads)
        else:
            wide = x.dtype == torch.float32
            _check(self._int8(self._address, x.data_ptr(), wide, out.data_ptr(), rows, threads))
        return out


def find(*, may_build: bool = True) -> Kernels | None:
    """The kernels of this machine, or None. `may_build`: see `library.load`."""
    library = load(may_build=may_build)
    return None if library is None else Kernels(library)


def _row_sums(x_OD: Tensor) -> Tensor:
    """int32 [O]; in parts, because PyTorch widens the whole tensor before it adds."""
    return torch.cat([rows.sum(1, dtype=torch.int32) for rows in x_OD.split(2048)])


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _strides(tensor: Tensor | None) -> Sequence[int]:
    return (0, 0, 0, 0) if tensor is None else tensor.stride()


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("out of memory for intermediate results of a kernel")
