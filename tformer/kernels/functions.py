"""The kernels as functions of tensors on a CPU.

Shape legend: N rows, D in_features, O out_features; B batch, H query heads, K kv heads, T queries, S keys, h head_dim,
v value_dim; R rows, V columns, k of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tformer.kernels.library import CALL, AttentionArguments, LinearArguments, load
from tformer.kernels.tape import RECORDED, AttentionCall, Tape
from tformer.support.device import use_large_pages

# As in linear.h.
FORMATS = {torch.bfloat16: 0, torch.float32: 1, torch.int8: 2, torch.uint8: 3}
WIDE = {torch.float32: True, torch.bfloat16: False}  # other formats are not read
SCALES = {torch.int8: torch.float32, torch.uint8: torch.bfloat16}
GROUP, UNIT = 32, 128
NORMS, ACTIVATIONS = (None, "layernorm", "rmsnorm"), (None, "relu", "gelu", "gelu_tanh", "silu", "relu2")


class Kernels:
    """The functions of a loaded library. They use PyTorch's number of threads.

    Any number of threads may call them, and one product: what a call needs is made for it. An `AttentionStep` and a
    `Tape` belong to one cache, and a cache to one thread. Raise MemoryError where there is no memory for intermediate
    results.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __reduce__(self) -> tuple[Callable[[], Kernels | None], tuple[()]]:
        """Copies and pickles find the library of their own process."""
        return find, ()

    def linear(self, weight_OD: Tensor, bias_O: Tensor | None, **options: Any) -> Product:
        """x -> x W^T + b; options: see `Product`."""
        return Product(self._library, weight_OD, bias_O, **options)

    def round_groups(self, weight_OD: Tensor) -> tuple[Tensor, Tensor]:
        """A bf16 or fp32 weight in 4 bits, uint8 [O, bytes]; a scale for each 32 numbers of a row, bf16 [O, groups].

        A group's scale is the one of the smallest squared error among ten.
        """
        weight_OD = weight_OD.contiguous()
        rows, inner = weight_OD.shape
        groups = -(-inner // UNIT) * UNIT // GROUP
        packed = weight_OD.new_empty(rows, groups * GROUP // 2, dtype=torch.uint8)
        scales = weight_OD.new_empty(rows, groups, dtype=torch.bfloat16)
        wide = WIDE[weight_OD.dtype]
        to = packed.data_ptr(), scales.data_ptr()
        self._library.round_groups(weight_OD.data_ptr(), wide, rows, inner, *to, torch.get_num_threads())
        return packed, scales

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
        """softmax(q k^T scale + bias) v in bf16 or fp32, [B, H, T, v] with the heads innermost in memory; fp32 inside.

        mask: bool, bias: fp32, both broadcastable to [B, H, T, S]. A query whose keys are all masked gets zeros.
        """
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BHTh, k_BKSh, v_BKSv))
        (batch, heads, num_queries, head_dim), (num_kv_heads, num_keys) = q.shape, k.shape[1:3]
        # The library reads at addresses: wrong shapes would read other memory.
        assert q.dtype == k.dtype == v.dtype and heads % num_kv_heads == 0
        assert k.shape == (batch, num_kv_heads, num_keys, head_dim) and v.shape[:3] == k.shape[:3]
        assert (mask is None or mask.dtype == torch.bool) and (bias is None or bias.dtype == torch.float32)
        full = (batch, heads, num_queries, num_keys)
        mask = None if mask is None else mask.expand(full)
        bias = None if bias is None else bias.expand(full)
        out_BTHv = q.new_empty(batch, num_queries, heads, v.shape[-1])
        addresses = {"q": q, "k": k, "v": v, "mask": mask, "bias": bias, "out": out_BTHv}
        arguments = AttentionArguments(
            **{name: _address(tensor) for name, tensor in addresses.items()},
            **{f"{name}_strides": tensor.stride()[:3] for name, tensor in (("q", q), ("k", k), ("v", v))},
            mask_strides=_strides(mask),
            bias_strides=_strides(bias),
            rows=batch,
            heads=heads,
            kv_heads=num_kv_heads,
            num_queries=num_queries,
            num_keys=num_keys,
            head_dim=head_dim,
            value_dim=v.shape[-1],
            scale=scale,
            wide=WIDE[q.dtype],
        )
        _check(self._library.attend(ctypes.addressof(arguments), torch.get_num_threads()))
        return out_BTHv.transpose(1, 2)

    def attention_step(self, **sizes: Any) -> AttentionStep:
        """Attention of one new position of each row, which also writes its key and value into the cache."""
        return AttentionStep(self._library, **sizes)

    def record(
        self, x: Tensor, run: Callable[[], Tensor], storages: Callable[[], Sequence[Tensor]]
    ) -> tuple[Tensor, Tape | None]:
        """Run a decoding step of x [B, 1, D]; returns its result, and the tape if kernels did the whole step.

        storages: the keys of each layer's cache after the step.
        """
        RECORDED.tape = tape = Tape(self._library, x)
        try:
            out = run()
        finally:
            RECORDED.tape = None
        return out, tape if tape.finish(out, storages()) else None

    def round_rows(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """bf16 or fp32 x in 8 bits, uint8 [N, D] with 128 for zero, and the scale of each row, fp32 [N]."""
        x_ND = x_ND.contiguous()
        rows, inner = x_ND.shape
        rounded_ND, scales_N = x_ND.new_empty(rows, inner, dtype=torch.uint8), x_ND.new_empty(rows, dtype=torch.float32)
        to = rounded_ND.data_ptr(), scales_N.data_ptr()
        wide = WIDE[x_ND.dtype]
        self._library.round_rows(x_ND.data_ptr(), wide, rows, inner, *to, torch.get_num_threads())
        return rounded_ND, scales_N

    def rescale_rows(self, y_NO: Tensor, scales_N: Tensor, bias_O: Tensor | None) -> Tensor:
        """y scales + bias in place, for a contiguous bf16 or fp32 y; the bias is fp32."""
        rows, columns = y_NO.shape
        by = scales_N.data_ptr(), _address(bias_O)
        wide = WIDE[y_NO.dtype]
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


class AttentionStep:
    """Attention of one new position of each row beside cached keys and values."""

    def __init__(
        self, library: ctypes.CDLL, *, heads: int, kv_heads: int, head_dim: int, value_dim: int, scale: float
    ) -> None:
        a = AttentionArguments()
        a.heads, a.kv_heads, a.head_dim, a.value_dim, a.scale = heads, kv_heads, head_dim, value_dim, scale
        a.num_queries = 1
        self._sizes = heads * head_dim, kv_heads * head_dim, heads * value_dim
        self._width = (heads + kv_heads) * head_dim + kv_heads * value_dim
        a.q_strides[:], a.new_stride = (self._width, head_dim, self._width), self._width
        self._attend, self._call, self._address = library.attend, AttentionCall(a), ctypes.addressof(a)

    def __call__(
        self,
        qkv_B1x: Tensor,
        keys_BKCh: Tensor,
        values_BKCv: Tensor,
        *,
        length: int,
        mask: Tensor | None,
        origins_BS: Tensor | None = None,
        lengths_B: Tensor | None = None,
    ) -> Tensor:
        """[B, 1, H v]. qkv: the product of the fused projection, contiguous; keys, values: the cache's storage.

        length: slots in use, the new one included. mask: bool, broadcastable to [B, H, 1, length]. origins: int32, the
        row of the storage that holds each slot of a row, its own for the new slot; None: its own for all. lengths:
        int32, the slots of each row in use, the new one included; None: `length` in all.
        """
        a, wide = self._call.arguments, WIDE[qkv_B1x.dtype]
        rows, itemsize = qkv_B1x.shape[0], 4 if wide else 2
        assert qkv_B1x.shape[1:] == (1, self._width) and qkv_B1x.is_contiguous()
        assert keys_BKCh.dtype == values_BKCv.dtype == qkv_B1x.dtype
        a.rows, a.wide = rows, wide
        self._call.place(keys_BKCh, values_BKCv, length)
        out = qkv_B1x.new_empty(rows, 1, self._sizes[2])
        a.q = start = qkv_B1x.data_ptr()
        a.new_k = start + self._sizes[0] * itemsize
        a.new_v = start + (self._sizes[0] + self._sizes[1]) * itemsize
        a.out = out.data_ptr()
        if mask is None:
            a.mask = None
        else:
            assert mask.dtype == torch.bool
            mask = mask.expand(rows, a.heads, 1, length)
            a.mask, a.mask_strides[:] = mask.data_ptr(), mask.stride()
        if origins_BS is None:
            a.origins = None
        else:  # the caller keeps its numbers below B: reading them here would take longer than the attention
            assert origins_BS.dtype == torch.int32 and origins_BS.stride(1) == 1
            assert len(origins_BS) == rows and origins_BS.shape[1] >= length
            a.origins, a.origin_stride = origins_BS.data_ptr(), origins_BS.stride(0)
        assert lengths_B is None or (lengths_B.dtype == torch.int32 and len(lengths_B) == rows)
        a.lengths = _address(lengths_B)
        _check(self._attend(self._address, torch.get_num_threads()))
        if (tape := RECORDED.tape) is not None:
            tape.add_attention(a, qkv=qkv_B1x, out=out)
        return out


class _Around(NamedTuple):
    """What comes before and after a product: `numbers` are gain, shift, epsilon, norm and activation of a call."""

    norm: Any
    activation: str | None
    numbers: tuple[int, int, float, int, int]

    @staticmethod
    def of(norm: Any, activation: str | None) -> _Around:
        after = ACTIVATIONS.index(activation)
        if norm is None:
            return _Around(norm, activation, (0, 0, 0.0, 0, after))
        addresses = _address(norm.weight), _address(norm.bias)
        return _Around(norm, activation, (*addresses, norm.eps, NORMS.index(norm.kernel), after))


class Product:
    """The product of a weight in bf16 or fp32, in int8 with `scales` [O], or as `round_groups` returns it.

    in_features: of a weight from `round_groups`. out_dtype: by default that of x. Holds references to the tensors that
    the library reads.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weight_OD: Tensor,
        bias_O: Tensor | None,
        *,
        scales: Tensor | None = None,
        in_features: int | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        in_features = in_features or weight_OD.shape[1]
        self.weight = weight_OD.contiguous()
        use_large_pages(self.weight)
        self.in_features, self.out_features, self.out_dtype = in_features, len(weight_OD), out_dtype
        self._bias = None if bias_O is None else bias_O.float().contiguous()
        self._scales = None if scales is None else scales.contiguous()
        self._totals = None
        if weight_OD.dtype == torch.int8:  # in parts, because PyTorch widens the whole tensor before it adds
            self._totals = torch.cat([rows.sum(1, dtype=torch.int32) for rows in weight_OD.split(2048)])
        assert scales is None or scales.dtype == SCALES[weight_OD.dtype]
        self._arguments = LinearArguments(
            self.weight.data_ptr(),
            _address(self._bias),
            _address(self._scales),
            _address(self._totals),
            in_features,
            self.out_features,
            FORMATS[weight_OD.dtype],
        )
        self._around = _Around.of(None, None)  # of the last call: replaced as a whole, for other threads may read it
        self._address, self._linear = ctypes.addressof(self._arguments), library.linear

    def __call__(
        self,
        x: Tensor,
        *,
        norm: Any = None,
        activation: str | None = None,
        gated: bool = False,
        residual: Tensor | None = None,
    ) -> Tensor:
        """[residual +] activation(norm(x) W^T + b), of x [*, D] in bf16 or fp32 -> [*, O].

        norm: an `nn.layer_norm.Norm` with contiguous parameters; norm, activation: such as `takes` accepts. gated:
        activation of the first half of the columns, times the second half: [*, O / 2]. residual: contiguous, in the
        dtype of the result.
        """
        assert x.shape[-1] == self.in_features
        x = x.contiguous()
        columns = self.out_features // 2 if gated else self.out_features
        out = x.new_empty(*x.shape[:-1], columns, dtype=self.out_dtype or x.dtype)
        before, after, numbers = self._around
        if norm is not before or activation != after:
            self._around = around = _Around.of(norm, activation)
            numbers = around.numbers
        if residual is not None:
            assert residual.dtype == out.dtype and residual.numel() == out.numel() and residual.is_contiguous()
        gain, shift, epsilon, kind, function = numbers
        addresses = x.data_ptr(), _address(residual), out.data_ptr(), gain, shift
        rows, wide = x.numel() // self.in_features, (WIDE[x.dtype], WIDE[out.dtype])
        call = CALL.pack(*addresses, rows, epsilon, *wide, kind, function, gated)
        _check(self._linear(self._address, call, torch.get_num_threads()))
        if (tape := RECORDED.tape) is not None:
            tape.add_product(self._arguments, call, x=x, residual=residual, out=out)
        return out

    def takes(self, norm: Any, activation: str | None) -> bool:
        """Whether a product can begin with this norm and end with this activation."""
        around = self._around
        if norm is around.norm and activation == around.activation:
            return True  # as in the step before
        if activation not in ACTIVATIONS:
            return False
        if norm is None:
            return True
        parameters = [each for each in (norm.weight, norm.bias) if each is not None]
        fits = norm.kernel in NORMS[1:] and not norm.unit_offset
        return fits and all(each.dtype == torch.float32 for each in parameters)


def find(*, may_build: bool = True) -> Kernels | None:
    """The kernels of this machine, or None. `may_build`: see `library.load`."""
    library = load(may_build=may_build)
    return None if library is None else _kernels_of(library)


_kernels_of = cache(Kernels)  # one object for each library: what was measured is known by it


def _address(tensor: Tensor | None) -> int:
    """0, which is C's NULL, for None."""
    return 0 if tensor is None else tensor.data_ptr()


def _strides(tensor: Tensor | None) -> Sequence[int]:
    return (0, 0, 0, 0) if tensor is None else tensor.stride()


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("out of memory for intermediate results of a kernel")
