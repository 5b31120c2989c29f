"""Decoding steps as graphs of fixed shape, and the caches that they run on.

A decoding step is many small operations, and on a GPU starting them takes the time. A CUDA graph starts all at once:
`RecordedDecoder` records the kernels of a step, which takes as long as the step; `CompiledDecoder` has `torch.compile`
write fewer and faster ones, which takes half a minute (CUDA graphs by the compiler's mode `reduce-overhead`). Both need
fixed shapes and addresses, which `nn/fixed_cache.py` provides: a graph is made for each number of rows and each bucket
of slots, a power of two. Rows that end leave no gap: the remaining ones move to the front. Prompts are read uncompiled,
once. Caches are kept for the next batch of a similar shape, which then reuses their graph and memory.

    slots in use     ....................                 tokens written so far, of the prompt too
    bucket of 64     [..............................]     a full bucket is copied into the next one

Legend: B rows in use, R rows of the graph, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from tformer.model import Transformer
from tformer.nn.fixed_cache import AnyCache, FixedCache
from tformer.support.errors import InputError
from tformer.support.processes import process_lock

SMALLEST_BUCKET, SMALLEST_SOURCE = 64, 16
STEPS_AHEAD = 256  # the first bucket has room for up to this number of new tokens
MAX_FREE_CACHES = 4
MOST_GRAPHS = 64
_numbers = count()
_ONE_AT_A_TIME = process_lock()  # compilation and the replay of graphs are of the whole process


def replays_graphs(device: torch.device) -> bool:
    """True if graphs are recorded on the device, which needs fixed addresses."""
    return device.type == "cuda"


class GraphDecoder:
    """The caches that graphs of one model's steps run on; subclasses have the graphs.

    Steps of a process run one after another, whatever the thread and the model.
    """

    def __init__(self, model: Transformer, *, smallest: int = SMALLEST_BUCKET, ahead: int = STEPS_AHEAD) -> None:
        """`smallest`: slots of the smallest bucket; `ahead`: number of new tokens that the first one has room for."""
        self.model = model
        self._smallest, self._ahead = smallest, ahead
        self._caches: list[tuple[FixedCache, weakref.ref[BucketedCache]]] = []

    def step(self, cache: FixedCache) -> Tensor:
        """fp32 logits [R, V] after the cache's newest tokens, in memory of the caller."""
        raise NotImplementedError

    def keep_addresses(self, cache: FixedCache) -> None:
        """Called with a new cache, whose tensors never move."""

    def begin(self, cache: AnyCache, *, capacity: int, beams: int = 1) -> BucketedCache:
        """The cache of the steps after a prefill; every row becomes a sentence of `beams` equal rows.

        capacity: maximum number of slots, with the slots of the prefill.
        """
        assert not isinstance(cache, FixedCache)
        begun = BucketedCache(self, beams=beams)
        begun.refill(cache, capacity=capacity)
        return begun

    def bucket(self, slots: int) -> int:
        """The size of the smallest bucket with at least `slots` slots: a power of two."""
        return max(self._smallest, _power_of_two(slots))

    def first_bucket(self, length: int, capacity: int) -> int:
        return self.bucket(min(capacity, length + self._ahead))

    def storage(
        self, like: AnyCache, user: BucketedCache, *, sentences: int, slots: int, source_slots: int
    ) -> FixedCache:
        """A cache of that shape for `user`: a free one with enough rows and at most twice as many, or a new one."""
        with _ONE_AT_A_TIME:
            free = [cache for cache, owner in self._caches if owner() is None or owner() is user]
            fitting = [
                cache
                for cache in free
                if (cache.slots, cache.source_slots, cache.beams) == (slots, source_slots, user.beams)
                and sentences <= cache.sentences <= 2 * sentences
            ]
            if fitting:
                chosen = min(fitting, key=lambda cache: cache.sentences)
            else:
                chosen = FixedCache(like, sentences=sentences, beams=user.beams, slots=slots, source_slots=source_slots)
                self.keep_addresses(chosen)
            unused = {id(cache) for cache in free[: max(0, len(free) - MAX_FREE_CACHES)]}
            dropped = unused - {id(user.fixed), id(chosen)}
            others = [entry for entry in self._caches if entry[0] is not chosen and id(entry[0]) not in dropped]
            self._caches = [*others, (chosen, weakref.ref(user))]
            return chosen


class CompiledDecoder(GraphDecoder):
    """Steps compiled by `torch.compile`, one graph for each shape."""

    def __init__(self, model: Transformer, *, backend: str = "inductor", **sizes: int) -> None:
        super().__init__(model, **sizes)
        self._replayed = replays_graphs(next(model.parameters()).device)
        options: dict[str, Any] = {"backend": backend}
        if backend == "inductor" and self._replayed:
            options["mode"] = "reduce-overhead"
        self._options = options
        self._forget_graphs()

    def keep_addresses(self, cache: FixedCache) -> None:
        if self._replayed:
            for tensor in cache.tensors():
                torch._dynamo.mark_static_address(tensor, guard=False)

    def step(self, cache: FixedCache) -> Tensor:
        """fp32 logits [R, V] after the cache's newest tokens.

        InputError when the compiler fails: an installed compiler may not work.
        """
        with _ONE_AT_A_TIME:
            if self._replayed:
                torch.compiler.cudagraph_mark_step_begin()
            logits_RV = self._run_compiled(cache)
            return logits_RV.clone() if self._replayed else logits_RV  # the next replay overwrites the graph's

    def _run_compiled(self, cache: FixedCache) -> Tensor:
        shape = (cache.sentences, cache.beams, cache.slots, cache.source_slots)
        if shape in self._shapes:
            return self._run(cache)
        if len(self._shapes) == MOST_GRAPHS:
            self._forget_graphs()
        self._shapes.add(shape)
        try:
            with torch._dynamo.config.patch(recompile_limit=2 * MOST_GRAPHS):  # every shape is compiled on purpose
                return self._run(cache)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            self._shapes.discard(shape)
            reason = str(error.inner_exception).strip().partition("\n")[0]
            raise InputError(f"decoding cannot be compiled: {reason}", hint="leave it uncompiled") from error

    def _forget_graphs(self) -> None:
        self._run = torch.compile(make_step(self.model), fullgraph=True, dynamic=False, **self._options)
        self._shapes: set[tuple[int, ...]] = set()


class RecordedDecoder(GraphDecoder):
    """Steps recorded as CUDA graphs, one for each cache, without a compiler.

    The first step of a cache runs as it is, which loads the kernels that recording needs. If a step cannot be recorded,
    for it copies numbers from the host, all run as they are.
    """

    def __init__(self, model: Transformer, **sizes: int) -> None:
        super().__init__(model, **sizes)
        self._run, self._records = make_step(model), True
        self._replays: weakref.WeakKeyDictionary[FixedCache, Callable[[], Tensor]] = weakref.WeakKeyDictionary()

    def step(self, cache: FixedCache) -> Tensor:
        with _ONE_AT_A_TIME:
            replay = self._replays.get(cache)
            if replay is not None:
                return replay().clone()  # the next replay overwrites the graph's
            logits_RV = self._run(cache)
            if self._records:
                try:
                    self._replays[cache] = record(partial(self._run, cache))
                except RuntimeError:
                    self._records = False
            return logits_RV


def record(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Record `run` as a CUDA graph, without executing it; returns a function that replays it on the same memory."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        written = run()

    def replay() -> Tensor:
        graph.replay()
        return written

    return replay


class BucketedCache:
    """The keys and values of decoding by graphs, in a bucket of fixed shape: the counterpart of `ModelCache`.

    Attributes:
        length, capacity: number of slots in use, and the maximum.
        sentences, beams: number of sentences in use, and of rows of each.
    """

    def __init__(self, decoder: GraphDecoder, *, beams: int) -> None:
        self._decoder, self.beams = decoder, beams
        self.sentences = self.length = self.capacity = 0
        self.fixed: FixedCache | None = None

    @property
    def batch_size(self) -> int:
        """Rows in use."""
        return self.sentences * self.beams

    def refill(self, cache: Any, *, capacity: int) -> None:
        """Take the keys and values of a `ModelCache` into which the same sentences were read."""
        self.sentences, self.length, self.capacity = cache.batch_size, cache.length, capacity
        source = cache.cross[0].read()[0].shape[2] if cache.cross else 0
        self.fixed = self._decoder.storage(
            cache,
            self,
            sentences=self.sentences,
            slots=self._decoder.first_bucket(self.length, capacity),
            source_slots=max(SMALLEST_SOURCE, _power_of_two(source)) if cache.cross else 0,
        )
        self.fixed.fill(cache)

    def step(self, ids_B1: Tensor, positions: Tensor) -> Tensor:
        """fp32 logits [B, V] after the newest tokens.

        positions: [B, 1], or [1, 1] for all. ValueError when the cache is full.
        """
        fixed = self._with_room()
        fixed.ids[: self.batch_size] = ids_B1
        fixed.positions[: self.batch_size] = positions
        logits_RV = self._decoder.step(fixed)
        self.length += 1
        return logits_RV[: self.batch_size]

    def compact(self, rows: Tensor) -> None:
        """Keep only `rows` (long), in order; there is one for each sentence."""
        assert self.beams == 1, "rows of several beams leave as sentences"
        self.keep_sentences(rows)

    def keep_sentences(self, sentences: Tensor) -> None:
        """Keep only these sentences (long), with all their rows."""
        assert self.fixed is not None
        self.fixed.keep_sentences(sentences, length=self.length)
        self.sentences = len(sentences)

    def reorder_beams(self, index: Tensor) -> None:
        """Replace row i by a copy of row index[i] of the same sentence; index: long [B]."""
        assert self.fixed is not None
        self.fixed.move_rows(index, length=self.length)

    def encoder_views(self) -> tuple[Any, Tensor | None]:
        """Cross-attention's caches and the encoder's mask, of the sentences in use."""
        assert self.fixed is not None
        return self.fixed.encoder_views(self.sentences)

    def _with_room(self) -> FixedCache:
        """The bucket, or the next one when it is full."""
        full = self.fixed
        assert full is not None
        if self.length == self.capacity:
            raise ValueError(f"the cache holds {self.capacity} positions, {self.length + 1} are needed")
        if self.length < full.slots:
            return full
        self.fixed = self._decoder.storage(
            full,
            self,
            sentences=self.sentences,
            slots=self._decoder.bucket(self.length + 1),
            source_slots=full.source_slots,
        )
        self.fixed.copy_from(full, sentences=self.sentences, length=self.length)
        return self.fixed


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()


def make_step(model: Transformer) -> Callable[[FixedCache], Tensor]:
    """The function of a graph: from the cache with its newest tokens and their positions to fp32 logits [R, V]."""
    prefix = "" if model.encoder is None else "decoder_"

    def step(cache: FixedCache) -> Tensor:
        inputs = {f"{prefix}input_ids": cache.ids, f"{prefix}position_ids": cache.positions}
        logits_RV: Tensor = model(**inputs, cache=cache).logits_at(-1)
        cache.slot.add_(1)
        return logits_RV

    # The compiler counts and limits graphs by their code object: each step has its own.
    step.__code__ = step.__code__.replace(co_name=f"step_{next(_numbers)}")
    return step
