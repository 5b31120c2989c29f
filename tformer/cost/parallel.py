"""Memory of one of N ranks (processes, each with a device) and the bytes that it sends in a step: DDP, FSDP2, HSDP.

Layout. N ranks hold R = N / S replicas of the model. Each replica is divided into S shards: S = 1 in DDP, N in FSDP;
in HSDP, S is the size of a group of ranks that share one replica. A rank holds ceil(rows / S) rows of each weight,
gradient and optimizer state (ZeRO, arXiv 1910.02054; FSDP, 2304.11277).

Units. FSDP2 gathers the weights of a unit when they are needed and frees them afterwards. Each block is a unit. One
more, the root, has all other parameters; it stays gathered from the forward to the end of the backward pass. Blocks
are sent in the compute dtype (g bytes a number), the root in fp32, gradients in the dtype of `reduce` (s bytes).

Traffic. Let P be all parameters, P_0 those of the root, and m the micro-batches in a step. The tensors of each
collective have together

    all-gather       m (4 P_0 + 2 g (P - P_0))   if S > 1: before a block's forward and again before its backward.
                     m (4 P_0 + g (P - P_0))     if blocks stay gathered in between (`reshard` false)
    reduce-scatter   m s P                       if S > 1: after a unit's backward
    all-reduce       s P / S                     if R > 1: once a step
    all-to-all       8 P'                        if S > 1: gradients to the owners of P' parameters that are updated
                                                 whole (Muon, Adafactor), and the new weights back

A rank in a ring of n ranks sends, and receives,

    - (n - 1) / n bytes for each byte of an all-gather or a reduce-scatter,
    - 2 (n - 1) / n bytes for each byte of an all-reduce,
    - in an all-to-all, as many bytes as its rows take.

Loss, counts and gradient norm add a few numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from tformer.cost.memory import MemoryEstimate
from tformer.model import Transformer
from tformer.nn.layer_norm import FP32_BYTES
from tformer.optim.optimizers import OPTIMIZERS, OptimizerKind
from tformer.recipe.recipe import Recipe
from tformer.recipe.sections import Training
from tformer.support.device import DTYPES
from tformer.support.errors import InputError, did_you_mean
from tformer.support.formatting import binary_bytes, plural

MACHINE_RANKS = 8  # GPUs of a usual machine: the ranks that share a replica with HSDP
GROUPS_ASSUMED = (
    f"groups of {MACHINE_RANKS} devices, as a usual machine has; of another size: --set training.parallel.shard_size=N"
)
USABLE_SHARE = 0.9  # of a device's memory; the rest is for its context, libraries and fragments

# --- layouts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParallelKind:
    """A way to divide a training over ranks.

    Attributes:
        shards: (ranks, ranks of a shard group) -> number of shards of a replica.
        has_groups: it needs several groups of equal size.
    """

    shards: Callable[[int, int], int]
    has_groups: bool = False


KINDS: dict[str, ParallelKind] = {
    "ddp": ParallelKind(lambda ranks, group: 1),  # every rank holds the whole model
    "hsdp": ParallelKind(lambda ranks, group: group, has_groups=True),  # each group of ranks divides the model
    "fsdp": ParallelKind(lambda ranks, group: ranks),  # all ranks divide the model
}
"""In order: the first holds the most in each rank and sends the smallest number of bytes between machines."""


@dataclass(frozen=True)
class Layout:
    """How ranks hold a model: in `replicas`, each divided into `shards`.

    Attributes:
        reshard: a block's gathered weights are freed after its forward, and gathered again for its backward.
        weight_bytes: of a number of a gathered block; the root's have four.
        gradient_bytes: of a number of the gradients that are exchanged.
    """

    kind: str
    replicas: int
    shards: int
    reshard: bool = True
    weight_bytes: int = FP32_BYTES
    gradient_bytes: int = FP32_BYTES

    @property
    def ranks(self) -> int:
        return self.replicas * self.shards


def layout_of(kind: str, ranks: int, *, shard_size: int = MACHINE_RANKS, **options: Any) -> Layout:
    """The layout of a kind on this number of ranks. shard_size: ranks that share a replica (hsdp).

    options: further attributes of `Layout`.

    Raises InputError for another kind, and for a shard size that does not divide the ranks.
    """
    if kind not in KINDS:
        raise InputError(f"--parallel: there is no kind '{kind}'", hint=did_you_mean(kind, ["auto", *KINDS]))
    shards = KINDS[kind].shards(ranks, shard_size)
    if ranks % shards:
        raise InputError(
            f"--parallel {kind}: groups of {shards} devices do not divide {plural(ranks, 'device')}",
            hint="--parallel fsdp divides the model over any number of devices; groups of another size: "
            "--set training.parallel.shard_size=N",
        )
    return Layout(kind, ranks // shards, shards, **options)


def choose_kind(needed: Mapping[str, int], available: int | None) -> tuple[str, str]:
    """(kind, reason) of `--parallel auto`: the first that fits, else the one that needs the fewest bytes.

    Args:
        needed: bytes that a rank needs by kind, in the order of preference.
        available: memory of a device in bytes; None: unknown, then the first.
    """
    first = next(iter(needed))
    if available is None:
        return first, "the memory of a device is unknown here"
    usable, has = int(USABLE_SHARE * available), f"{binary_bytes(available)} of a device"
    fitting = [kind for kind, size in needed.items() if size <= usable]
    if not fitting:
        least = min(needed, key=lambda kind: needed[kind])
        return least, f"no kind fits into the {has}; this one needs the least"
    if fitting[0] == first:
        return first, f"it fits into the {has}"
    return fitting[0], f"it fits into the {has}; {first} needs {binary_bytes(needed[first])}"


# --- parameters of a rank --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """Sizes, in numbers, of parameters that FSDP2 gathers together.

    Attributes:
        shard: held by the rank with the most rows; messages have as many for every rank.
        trained: of these, the ones with a gradient; matrices: of those, the ones in matrices.
        reused: of the largest tensor that several modules use, such as a tied table; 0: none.
        heads: of whole tensors of heads, whose gradients are there while all other ones are computed.
    """

    shard: int
    trained: int
    matrices: int
    reused: int
    heads: int


@dataclass(frozen=True)
class Shards:
    """The parameters of the trained models as one rank of a layout holds them. `root`: all outside the blocks."""

    layout: Layout
    root: Unit
    blocks: tuple[Unit, ...]

    @classmethod
    def of(cls, models: Sequence[Transformer], layout: Layout) -> Shards:
        """The shards of models on any device, also meta. A parameter of two models belongs to the first."""
        uses = Counter(id(p) for model in models for _, p in model.named_parameters(remove_duplicate=False))
        stacks = [stack for model in models for stack in (model.encoder, model.decoder) if stack is not None]
        blocks = [list(block.parameters()) for stack in stacks for block in dict.fromkeys(stack.layers)]
        inside = {id(p) for block in blocks for p in block}
        outside = {id(p): p for model in models for p in model.parameters() if id(p) not in inside}
        heads = {id(p) for model in models for p in model.heads.parameters()}

        def unit(parameters: Iterable[nn.Parameter]) -> Unit:
            # Rows are divided.
            sizes = [(p, -(-p.shape[0] // layout.shards) * (p.numel() // p.shape[0])) for p in parameters]
            return Unit(
                shard=sum(size for _, size in sizes),
                trained=sum(size for p, size in sizes if p.requires_grad),
                matrices=sum(size for p, size in sizes if p.requires_grad and p.ndim == 2),
                reused=max((p.numel() for p, _ in sizes if p.requires_grad and uses[id(p)] > 1), default=0),
                heads=sum(p.numel() for p, _ in sizes if p.requires_grad and id(p) in heads),
            )

        return cls(layout, unit(outside.values()), tuple(map(unit, blocks)))

    @property
    def units(self) -> tuple[Unit, ...]:
        return (self.root, *self.blocks)

    @property
    def held(self) -> int:
        """Number of elements of all parameters that one rank holds."""
        return sum(unit.shard for unit in self.units)

    @property
    def trained(self) -> int:
        """Number of these elements that have a gradient."""
        return sum(unit.trained for unit in self.units)

    def owned(self, optimizer: OptimizerKind) -> int:
        """Number of elements of the whole tensors that one rank updates for all ranks, on average."""
        return self.updated(optimizer) if optimizer.reads_whole else 0

    def updated(self, optimizer: OptimizerKind) -> int:
        """Number of elements that this optimizer itself updates; AdamW updates the others."""
        return sum(unit.matrices for unit in self.blocks) if optimizer.hidden_only else self.trained


# --- memory ----------------------------------------------------------------------------------------------------------


def rank_memory(whole: MemoryEstimate, shards: Shards, optimizer: OptimizerKind, *, ema: bool) -> MemoryEstimate:
    """Bytes of the rank with the most rows while it trains.

    Args:
        whole: of one process with the micro-batch of the rank. DDP needs as much: its buckets are the gradients.
        ema: whether there are averaged weights too.
    """
    if shards.layout.shards == 1:
        return whole
    weights, gradients = shards.held * FP32_BYTES, shards.trained * FP32_BYTES
    gathered, exchanged = _gathered_bytes(shards)
    updated, layout = shards.updated(optimizer), shards.layout
    moments = updated * optimizer.moments + (shards.trained - updated) * OPTIMIZERS["adamw"].moments
    # Copies of weights in the compute dtype: of the root alone, as blocks arrive in it.
    copies = shards.root.shard * layout.shards * layout.weight_bytes if layout.weight_bytes < FP32_BYTES else 0
    return replace(
        whole,
        weights=weights * (2 if ema else 1) + shards.owned(optimizer) * FP32_BYTES,
        gradients=gradients,
        optimizer=FP32_BYTES * moments,
        gathered=gathered,
        exchanged=exchanged,
        copies=copies,
    )


def _gathered_bytes(shards: Shards) -> tuple[int, int]:
    """(bytes of weights that are gathered in the backward of a block, more bytes of an exchange at the peak).

    Memory peaks at one of four moments. W: bytes of the root; w: bytes of the largest block. Gradients have as many,
    each in its own dtype.

        first block gathered         2 W + w   the root's buffer is freed after the block is copied
        backward of a block          W + 4 w   also the next block's buffer, its own gradients, those of the block
                                               before, and those of the heads; if blocks stay gathered, all weights
                                               in place of W + 3 w
        last gradients of the root   2 W + w   and twice those of a table that several modules use
        root's gradients reduced     2 W
    """
    layout, largest = shards.layout, max(shards.blocks, key=lambda unit: unit.shard)
    size, sent = layout.shards, layout.gradient_bytes
    root, block = shards.root.shard * size * FP32_BYTES, largest.shard * size * layout.weight_bytes
    root_sums, block_sums = (unit.trained * size * sent for unit in (shards.root, largest))
    all_blocks = sum(unit.shard for unit in shards.blocks) * size * layout.weight_bytes
    gathered = root + (2 * block if layout.reshard else all_blocks)
    peak = max(
        2 * root + block,
        gathered + block + (block_sums if layout.reshard else 0) + shards.root.heads * FP32_BYTES,
        2 * root + 2 * shards.root.reused * FP32_BYTES + block_sums,
        root + root_sums,
    )
    return gathered, peak - gathered


# --- traffic ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """One collective operation in a step: bytes of the whole tensors, and those that a rank sends.

    calls: None in DDP, whose buckets depend on torch and on the order of the gradients.
    """

    calls: int | None
    tensor_bytes: int
    sent_bytes: int


@dataclass(frozen=True)
class Traffic:
    """Collectives of a step by name; those that a layout does not use are missing."""

    collectives: Mapping[str, Collective]

    @property
    def sent(self) -> int:
        """Bytes that a rank sends, and receives."""
        return sum(collective.sent_bytes for collective in self.collectives.values())

    def to_json(self) -> dict[str, Any]:
        found = {name: asdict(collective) for name, collective in self.collectives.items()}
        return {**found, "sent_bytes": self.sent, "received_bytes": self.sent}


def step_traffic(shards: Shards, optimizer: OptimizerKind, *, micro_batches: int) -> Traffic:
    """What a rank sends in one step."""
    layout, units = shards.layout, shards.units
    found: dict[str, Collective] = {}
    if layout.shards > 1:
        gathered = shards.blocks * (2 if layout.reshard else 1)
        of_root, of_blocks = FP32_BYTES * shards.root.shard, layout.weight_bytes * sum(unit.shard for unit in gathered)
        weights = layout.shards * (of_root + of_blocks)
        gathers, scatters = 1 + len(gathered), sum(unit.trained > 0 for unit in units)
        gradients = layout.shards * layout.gradient_bytes * shards.trained
        found["all_gather"] = _ring(gathers, weights, layout.shards, times=micro_batches)
        found["reduce_scatter"] = _ring(scatters, gradients, layout.shards, times=micro_batches)
    if layout.replicas > 1:
        calls = sum(unit.trained > 0 for unit in units) if layout.shards > 1 else None
        found["all_reduce"] = _ring(calls, shards.trained * layout.gradient_bytes, layout.replicas, passes=2)
    if layout.shards > 1 and (owned := shards.owned(optimizer)):
        found["all_to_all"] = _ring(2, 2 * owned * FP32_BYTES, layout.shards)
    return Traffic(found)


def _ring(calls: int | None, tensor_bytes: int, ranks: int, *, times: int = 1, passes: int = 1) -> Collective:
    """`calls` times `times` collectives on a ring: a tensor passes it once, or twice for a sum that every rank gets."""
    total = tensor_bytes * times
    return Collective(calls and calls * times, total, passes * total * (ranks - 1) // ranks)


# --- the plan of a training ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankPlan:
    """Estimate for one rank of a training.

    Attributes:
        reason: why `auto` chose this kind; empty for a kind that was named.
        rows: of a micro-batch, in the rank that has the most.
        note: what is assumed, and what to change where ranks have no rows; None: nothing.
    """

    layout: Layout
    reason: str
    rows: int
    memory: MemoryEstimate
    traffic: Traffic
    note: str | None

    def to_json(self) -> dict[str, Any]:
        layout = self.layout
        return {
            "devices": layout.ranks,
            "kind": layout.kind,
            "reason": self.reason,
            "replicas": layout.replicas,
            "shards": layout.shards,
            "rows": self.rows,
            "memory": self.memory.to_json(),
            "traffic": self.traffic.to_json(),
            "note": self.note,
        }


def plan_ranks(
    recipe: Recipe,
    models: Sequence[Transformer],
    ranks: int,
    *,
    whole: MemoryEstimate,
    rows: int,
    machine_ranks: int | None = None,
    available: int | None,
) -> RankPlan:
    """The estimate for `ranks` ranks of the recipe's `training.parallel`.

    Args:
        models: all that are trained, on any device; parameters without `requires_grad` are frozen.
        whole: memory of one process with the rows of a rank.
        rows: of a micro-batch of all ranks.
        machine_ranks: ranks of one machine, which share a replica with hsdp; None: not known, `MACHINE_RANKS`.
        available: memory of a device in bytes; None: unknown.

    Raises InputError for groups that do not divide the ranks.
    """
    training = recipe.training
    section, optimizer = training.parallel, OPTIMIZERS[recipe.optimizer.kind]
    group = section.shard_size or machine_ranks or MACHINE_RANKS
    formats = {
        "reshard": section.reshard,
        "weight_bytes": models[0].compute_dtype.itemsize,
        "gradient_bytes": DTYPES[section.reduce].itemsize,
    }

    def planned(kind: str) -> tuple[Shards, MemoryEstimate]:
        shards = Shards.of(models, layout_of(kind, ranks, shard_size=group, **formats))
        return shards, rank_memory(whole, shards, optimizer, ema=training.ema_decay is not None)

    kind: str = section.kind
    reason = ""
    if kind == "auto":
        fits = group < ranks and ranks % group == 0
        possible = [name for name, each in KINDS.items() if fits or not each.has_groups]
        kind, reason = choose_kind({name: planned(name)[1].total for name in possible}, available)
    shards, memory = planned(kind)
    traffic = step_traffic(shards, optimizer, micro_batches=training.grad_accum)
    assumed = kind == "hsdp" and section.shard_size is None and machine_ranks is None
    notes = [GROUPS_ASSUMED if assumed else None, idle_note(training, rows, ranks)]
    note = "; ".join(filter(None, notes)) or None
    return RankPlan(shards.layout, reason, -(-rows // ranks), memory, traffic, note)


def idle_note(training: Training, rows: int, ranks: int) -> str | None:
    """What to change where a micro-batch has fewer rows than there are ranks; None where every rank has one."""
    if rows >= ranks:
        return None
    flag, size = (
        ("--batch-size", training.batch_size) if training.batch_size else ("--batch-tokens", training.batch_tokens)
    )
    assert size is not None
    idle = f"a micro-batch has {plural(rows, 'row')}, so {ranks - rows} of {ranks} devices have none"
    for count in range(training.grad_accum, 0, -1):
        if size * training.grad_accum % count == 0 and rows * training.grad_accum // count >= ranks:
            same = f"{flag} {size * training.grad_accum // count} --grad-accum {count}"
            return f"{idle}; the same step with rows for all: {same}"
    return f"{idle}; a step has {plural(rows * training.grad_accum, 'row')}, fewer than devices"
