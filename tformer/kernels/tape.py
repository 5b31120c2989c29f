"""The kernel calls of one decoding step, recorded as they run, and then repeated by one call of the library.

A step of one text is dozens of short calls, and the Python between them takes as long as the shortest of them. A tape
holds copies of the calls' arguments and the tensors at their addresses. It is complete where every call reads the
step's input, the result of an earlier call, parameters or the cache; the result of any other operation would not be on
the tape. The repeated calls are the same, and so are their results.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from tformer.kernels.library import POINTER, AttentionArguments, LinearArguments


class TapeEntry(ctypes.Structure):
    """`struct piece` of tape.c."""

    _fields_ = [("first", POINTER), ("second", POINTER)]


class AttentionCall:
    """The arguments of an attention of one new position of each row; its keys and values may move and grow."""

    def __init__(self, arguments: AttentionArguments) -> None:
        self.arguments = arguments
        self._shape: tuple[int, ...] = ()

    def place(self, keys_BKCh: Tensor, values_BKCv: Tensor, length: int) -> None:
        """Attend to the first `length` slots of this storage."""
        a = self.arguments
        if (shape := (*keys_BKCh.shape, *keys_BKCh.stride(), *values_BKCv.shape, *values_BKCv.stride())) != self._shape:
            slots = (a.rows, a.kv_heads, keys_BKCh.shape[2])  # the library reads at addresses
            assert keys_BKCh.shape == (*slots, a.head_dim) and keys_BKCh.stride(3) == 1
            assert values_BKCv.shape == (*slots, a.value_dim) and values_BKCv.stride(3) == 1
            a.k_strides[:], a.v_strides[:] = keys_BKCh.stride()[:3], values_BKCv.stride()[:3]
            self._shape = shape
        assert a.rows == keys_BKCh.shape[0] and length <= keys_BKCh.shape[2]
        a.k, a.v, a.num_keys = keys_BKCh.data_ptr(), values_BKCv.data_ptr(), length


class Tape:
    """A recorded step: input x [B, 1, D], layers of products and attention, output [B, 1, D]."""

    def __init__(self, library: ctypes.CDLL, x: Tensor) -> None:
        self._play = library.play
        self._input, self._output = x, x
        self._known = {x.data_ptr(): x}  # kept: no other tensor has these addresses
        self._complete = True
        self._pieces: list[TapeEntry] = []
        self._arguments: list[object] = []  # what the pieces point to
        self._attentions: list[AttentionCall] = []
        self._list = (TapeEntry * 0)()

    def add_product(
        self, product: LinearArguments, call: bytes, *, x: Tensor, residual: Tensor | None, out: Tensor
    ) -> None:
        """A product that ran: it read x and the residual, and wrote `out`; call: see `library.CALL`."""
        self._complete = self._complete and (residual is None or residual.data_ptr() in self._known)
        self._add(x, out, product, ctypes.create_string_buffer(call, len(call)))

    def add_attention(self, arguments: AttentionArguments, *, qkv: Tensor, out: Tensor) -> None:
        """The attention of a layer that ran: it read the projections and the layer's cache, and wrote `out`."""
        arguments = AttentionArguments.from_buffer_copy(arguments)
        self._complete = self._complete and arguments.mask is None and arguments.origins is None
        self._attentions.append(AttentionCall(arguments))
        self._add(qkv, out, arguments, None)

    def finish(self, out: Tensor, storages: Sequence[Tensor]) -> bool:
        """Whether the tape can be repeated: its calls lead to `out`, and attended to the keys of these storages."""
        read = [call.arguments.k for call in self._attentions]
        self._complete = self._complete and read == [keys.data_ptr() for keys in storages]
        self._complete = self._complete and out.data_ptr() in self._known and out.shape == self._input.shape
        self._output, self._list = out, (TapeEntry * len(self._pieces))(*self._pieces)
        return self._complete

    def takes(self, x: Tensor) -> bool:
        """Whether the tape can compute a step of this input: same shape and dtype, contiguous."""
        return x.shape == self._input.shape and x.dtype == self._input.dtype and x.is_contiguous()

    def __call__(self, x: Tensor, slots: Sequence[tuple[Tensor, Tensor, int]]) -> Tensor:
        """The step's result; `slots`: of each layer the storage of keys and values, and the slots then in use."""
        assert self._complete and len(slots) == len(self._attentions) and self.takes(x)
        ctypes.memmove(self._input.data_ptr(), x.data_ptr(), x.nbytes)
        for call, (keys, values, length) in zip(self._attentions, slots, strict=True):
            call.place(keys, values, length)
        if self._play(ctypes.addressof(self._list), len(self._list), torch.get_num_threads()):
            raise MemoryError("out of memory for intermediate results of a kernel")
        return self._output.clone()

    def _add(self, x: Tensor, out: Tensor, first: ctypes.Structure, second: ctypes.Array[ctypes.c_char] | None) -> None:
        self._complete = self._complete and x.data_ptr() in self._known
        self._known[out.data_ptr()] = out
        self._arguments += [first, second]
        self._pieces.append(TapeEntry(ctypes.addressof(first), None if second is None else ctypes.addressof(second)))


class _OfThread(threading.local):
    tape: Tape | None = None


RECORDED = _OfThread()
"""`tape` records the calls of this thread now; None: nothing does."""
