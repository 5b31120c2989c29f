"""Parameters whose rows are spread over processes (FSDP2), and the tensors that the optimizer updates in this process.

Process k of N holds rows k c to (k + 1) c of every parameter, c = ceil(rows / N). An optimizer that treats each number
by itself (Adam) updates these rows where they are. One that reads whole tensors (Muon orthogonalizes matrices,
Adafactor sums rows and columns) gets them: every tensor has one owner, which keeps it and its state whole. In a step
the rows of the gradients go to the owners, and the rows of the new weights come back, each in one exchange for all
tensors. So the work is divided over the processes (ZeRO-1 of arXiv 1910.02054; for Muon 2502.16982).

Shapes: r rows of a parameter.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

Key = TypeVar("Key", bound=Hashable)


def rows_of(count: int, rank: int, size: int) -> slice:
    """The rows of process `rank` (of `size`) in a parameter with `count` rows."""
    chunk = -(-count // size)
    return slice(min(rank * chunk, count), min((rank + 1) * chunk, count))


@dataclass
class _Part:
    """A sharded parameter, and the tensor that the optimizer updates in this process.

    Attributes:
        parameter: a DTensor.
        own: its rows here, or the whole tensor, on the meta device where another process owns it.
        owner: the process that has the whole tensor; None: every process updates its rows.
    """

    parameter: nn.Parameter
    own: nn.Parameter
    owner: int | None


@dataclass(frozen=True)
class TensorShard:
    """The part of a tensor that this process has.

    Attributes:
        tensor: the whole tensor, or this process's rows of it; on the meta device where only the owner has it.
        shape: of the whole tensor.
        is_cut: the processes of the group have some rows each.
        owner: rank of the process that has it, where others do not.
    """

    tensor: Tensor
    shape: torch.Size
    is_cut: bool = False
    owner: int | None = None

    def outline(self) -> Tensor:
        """The whole tensor on the meta device."""
        return torch.empty(self.shape, dtype=self.tensor.dtype, device="meta")


ROUND_BYTES = 256 << 20
"""Whole tensors that are collected at once: what a device needs beside its part for a checkpoint."""


class Shards:
    """The tensors of this process. Most methods communicate: every process must call them."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._parts: dict[Tensor, _Part] = {}  # by `own`
        self._load = [0] * self.size  # numbers that each process owns

    def rows(self, count: int, rank: int | None = None) -> slice:
        """The rows of a process (None: this one) of a parameter with `count` of them."""
        return rows_of(count, self.rank if rank is None else rank, self.size)

    @torch.no_grad()
    def own(self, parameter: nn.Parameter, *, whole: bool) -> nn.Parameter:
        """The tensor that the optimizer updates here for this parameter; on the meta device if another process does."""
        if not whole:
            own, owner = nn.Parameter(local(parameter)), None
        else:
            complete = self.complete(local(parameter), parameter.shape)
            owner = self._load.index(min(self._load))
            self._load[owner] += parameter.numel()
            own = nn.Parameter(complete if owner == self.rank else torch.empty_like(complete, device="meta"))
        self._parts[own] = _Part(parameter, own, owner)
        return own

    # In a step.

    def gradients(self) -> list[Tensor]:
        """The rows of this process of all existing gradients."""
        return [local(gradient) for part in self._parts.values() if (gradient := part.parameter.grad) is not None]

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """The L2 norm of all gradients, equal in every process."""
        square = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(square)
        return square.sqrt()

    def zero_grad(self) -> None:
        for part in self._parts.values():
            part.parameter.grad = None

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Give every tensor of the optimizer its gradient."""
        for part in self._parts.values():
            gradient = part.parameter.grad
            part.own.grad = local(gradient) if part.owner is None and gradient is not None else None
        moved = self._moved()
        outgoing = [[local(part.parameter.grad) for part in moved if part.owner == owner] for owner in self._ranks]
        owned = [part for part in moved if part.owner == self.rank]
        incoming = self._exchange(outgoing, [[self._block(part, rank) for part in owned] for rank in self._ranks])
        for part, *rows in zip(owned, *incoming, strict=True):
            part.own.grad = torch.cat(rows)

    @torch.no_grad()
    def return_weights(self) -> None:
        """Write the owners' new weights into the rows of every process."""
        moved = self._moved()
        owned = [part.own for part in moved if part.owner == self.rank]
        outgoing = [[own[self.rows(len(own), rank)] for own in owned] for rank in self._ranks]
        expected = [[part for part in moved if part.owner == owner] for owner in self._ranks]
        incoming = self._exchange(outgoing, [[self._block(part, self.rank) for part in parts] for parts in expected])
        for parts, blocks in zip(expected, incoming, strict=True):
            for part, block in zip(parts, blocks, strict=True):
                local(part.parameter).copy_(block)

    @property
    def _ranks(self) -> range:
        return range(self.size)

    def _moved(self) -> list[_Part]:
        """Tensors with an owner and a gradient: the same in all processes."""
        return [part for part in self._parts.values() if part.owner is not None and part.parameter.grad is not None]

    def _block(self, part: _Part, rank: int) -> torch.Size:
        """The shape of the rows of a process."""
        rows = self.rows(part.parameter.shape[0], rank)
        return torch.Size((rows.stop - rows.start, *part.parameter.shape[1:]))

    def _exchange(self, outgoing: list[list[Tensor]], shapes: list[list[torch.Size]]) -> list[list[Tensor]]:
        """Tensors of these shapes from each process, for the tensors that go to each process."""
        sent = [torch.cat([tensor.flatten() for tensor in [*tensors, self._nothing]]) for tensors in outgoing]
        sizes = [[shape.numel() for shape in each] for each in shapes]
        received = self._nothing.new_empty(sum(map(sum, sizes)))
        splits = [sum(each) for each in sizes], [len(each) for each in sent]
        dist.all_to_all_single(received, torch.cat(sent), *splits)
        blocks = iter(received.split([size for each in sizes for size in each]))
        return [[next(blocks).view(shape) for shape in each] for each in shapes]

    @property
    def _nothing(self) -> Tensor:
        """No numbers, with the device and dtype of the parameters."""
        return local(next(iter(self._parts.values())).parameter).new_empty(0)

    # For checkpoints.

    @torch.no_grad()
    def complete(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """The whole tensor of this shape, from the rows of every process."""
        chunk = -(-shape[0] // self.size)
        padded = rows.new_zeros(chunk, *shape[1:])
        padded[: len(rows)] = rows
        whole = rows.new_empty(chunk * self.size, *shape[1:])
        dist.all_gather(list(whole.split(chunk)), padded)
        return whole[: shape[0]]

    def piece(self, parameter: nn.Parameter, rows: Tensor | None = None) -> TensorShard:
        """This process's rows of a parameter, or of a tensor of its shape that is cut in the same way."""
        return TensorShard(local(parameter) if rows is None else rows, parameter.shape, is_cut=True)

    def state_piece(self, own: Tensor, state: Tensor) -> TensorShard:
        """This process's part of a tensor of optimizer state; `own` is what the optimizer updates here."""
        part = self._parts[own]
        if part.owner is None and state.ndim:
            return self.piece(part.parameter, state)
        return TensorShard(state, state.shape, owner=part.owner)

    def own_part(self, piece: TensorShard) -> slice:
        """The rows of a whole tensor that this process has."""
        return self.rows(piece.shape[0]) if piece.is_cut else slice(None)

    @torch.no_grad()
    def collect(self, pieces: Mapping[Key, TensorShard], writers: Mapping[Key, int]) -> dict[Key, Tensor]:
        """Gathers the full tensors that this process has to write, on the CPU.

        The rows go from each process to the writer alone, without copies between.

        writers: rank of the process that writes each tensor.
        """
        found: dict[Key, Tensor] = {}
        here = {key: piece for key, piece in pieces.items() if piece.is_cut}
        for keys in _rounds(here):
            whole: dict[Key, Tensor] = {}
            operations = []
            for tag, key in enumerate(keys):
                rows, writer = here[key].tensor.contiguous(), writers[key]
                if writer != self.rank:
                    operations += [dist.P2POp(dist.isend, rows, writer, tag=tag)] if rows.numel() else []
                    continue
                whole[key] = rows.new_empty(here[key].shape)
                for sender in self._ranks:
                    block = whole[key][self.rows(len(whole[key]), sender)]
                    if sender == writer:
                        block.copy_(rows)
                    elif block.numel():
                        operations.append(dist.P2POp(dist.irecv, block, sender, tag=tag))
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
            found |= {key: tensor.cpu() for key, tensor in whole.items()}
        return found


def _rounds(pieces: Mapping[Key, TensorShard]) -> Iterator[list[Key]]:
    """The keys in groups of tensors of about `ROUND_BYTES` together."""
    keys: list[Key] = []
    size = 0
    for key, piece in pieces.items():
        keys.append(key)
        size += piece.shape.numel() * piece.tensor.itemsize
        if size >= ROUND_BYTES:
            yield keys
            keys, size = [], 0
    yield keys


def is_spread(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor (whose import takes half a second)."""
    return hasattr(tensor, "to_local")


@torch.no_grad()
def local(tensor: Any) -> Tensor:
    """The rows of this process of a DTensor (whose import takes half a second), sharing its memory."""
    rows: Tensor = tensor.to_local()
    return rows
