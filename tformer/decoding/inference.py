"""Prepare a model for inference: number format, packed or 8-bit matrices, or compiled decoding steps.

A decoding step reads every weight once and multiplies little, so the matrices are cast ahead instead of on each use.
Only the operands of products are rounded, as in training. Norms, biases of positions and tables that are added stay in
fp32.

A decoding step is many small operations, and on a GPU starting them takes the time. `torch.compile` makes one graph of
all, without breaks, which CUDA replays as a whole (CUDA graphs, by the compiler's mode `reduce-overhead`). That needs
fixed shapes and addresses, which `nn/fixed_cache.py` provides: a graph is made for each number of rows and each bucket
of slots, a power of two. Rows that end leave no gap: the remaining ones move to the front. Prompts are read uncompiled,
once. Caches are kept for the next batch of a similar shape, which then reuses their graph and memory.

Legend: B rows in use, R rows of the graph, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.kernels import library
from tformer.kernels.functions import Kernels, find
from tformer.model import Transformer
from tformer.nn.attention import Mechanism
from tformer.nn.fixed_cache import AnyCache, FixedCache
from tformer.nn.heads import VocabularyHead
from tformer.nn.linear import Linear
from tformer.nn.products import Quantize, is_possible, prepare_product
from tformer.support.device import DTYPES, MIN_SPEEDUP, device_name, has_bf16_instructions, keep_freed_memory
from tformer.support.errors import InputError, did_you_mean
from tformer.support.processes import process_lock

WORTH_A_BUILD = 2**22
"""Kernels that were not compiled before are compiled for models with at least this number of parameters."""
INSTALL = "Debian, Ubuntu: sudo apt install gcc"
MISSING_KERNELS = f"install a C compiler ({INSTALL}), or leave it out"
MOST_HELD_ROWS, PROBE_SHAPE, PROBES = 16, (6144, 1024), 3
"""Weights are held in bf16 for steps of at most this number of rows, and where a product of this shape is faster. It is
larger than most caches, and measured in less than 50 ms."""
QUANTIZE: tuple[Quantize, ...] = get_args(Quantize)
Compilation = Literal["auto", "on", "off"]


def inference_dtype(precision: str, *, trained_in: str, device: torch.device) -> torch.dtype:
    """The dtype of `fp32`, `bf16`, `fp16`, or `auto`: that of training (`trained_in`) where the device supports it.

    A CPU supports fp32, and bf16 when it has the instructions; without them bf16 is slower, not faster.
    Raises InputError for another name.
    """
    if precision == "auto":
        on_cpu = {"fp32"} | ({"bf16"} if has_bf16_instructions() else set())
        fits = device.type != "cpu" or trained_in in on_cpu
        return DTYPES.get(trained_in, torch.float32) if fits else torch.float32
    if precision not in DTYPES:
        raise InputError(f"unknown precision '{precision}'", hint=did_you_mean(precision, ("auto", *DTYPES)))
    return DTYPES[precision]


@contextmanager
def inference(model: Transformer) -> Iterator[None]:
    """Evaluation mode without gradients; restores the model's own mode at the end."""
    was_training = model.training
    if was_training:  # only then: visiting all modules takes longer than a decoding step
        model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        if was_training:
            model.train()


def decoding_dtype(
    precision: str, *, trained_in: str, model: Transformer, quantize: str, rows: int | None
) -> tuple[torch.dtype, str | None]:
    """(`inference_dtype` for decoding steps of `rows` rows, a note for the user or None).

    For `auto` on a CPU without bf16 instructions it is bf16 where steps are faster with weights in it
    (`prepare_inference`), measured once per process.
    """
    device = next(model.parameters()).device
    dtype = inference_dtype(precision, trained_in=trained_in, device=device)
    if precision != "auto" or device.type != "cpu" or quantize != "none" or has_bf16_instructions():
        return dtype, None
    if rows is None or rows > MOST_HELD_ROWS or model.num_parameters() < WORTH_A_BUILD or (kernels := find()) is None:
        return dtype, None
    speedup = _speedup_of_bf16_weights(kernels, rows)
    if speedup < MIN_SPEEDUP:
        return dtype, None
    faster = f"products are {speedup:.1f} times as fast here"
    return torch.bfloat16, f"weights are held in bf16: {faster}; --precision fp32 keeps them exact"


@cache
def _speedup_of_bf16_weights(kernels: Kernels, rows: int) -> float:
    """How many times as fast a product of few rows is here with its weight in bf16, beside x in fp32."""
    weight = torch.full(PROBE_SHAPE, 0.5)
    x = torch.ones(rows, PROBE_SHAPE[1])
    wide = prepare_product(weight, None, "none", kernels=kernels, rows=rows) or partial(F.linear, weight=weight)
    narrow = prepare_product(weight.bfloat16(), None, "none", kernels=kernels, rows=rows)
    assert narrow is not None
    seconds: dict[Any, float] = {}
    for product in (wide, narrow) * PROBES:  # in turns
        start = time.perf_counter()
        product(x)
        seconds[product] = min(seconds.get(product, math.inf), time.perf_counter() - start)
    return seconds[wide] / seconds[narrow]


def cast_matrices(model: Transformer, dtype: torch.dtype, compute_dtype: torch.dtype | None = None) -> None:
    """Store the matrices of products in `dtype`, and compute in it, or in `compute_dtype` with biases in that.

    For inference: masters are not kept.
    """
    model.compute_dtype = compute_dtype or dtype
    for module in model.modules():
        if isinstance(module, Linear) or _is_plain_head(module):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype if parameter.ndim > 1 else model.compute_dtype)


def prepare_inference(
    model: Transformer, dtype: torch.dtype, *, quantize: str = "none", rows: int | None = None
) -> None:
    """Make a model fast for inference: matrices in `dtype`, on a CPU packed or in 8 or 4 bits.

    A CPU without bf16 instructions would emulate bf16. With the C kernels it holds matrices in bf16, and computes in
    fp32.

    rows: maximum number of rows of a decoding step, texts times samples or beams; None: many.

    Afterwards its weights cannot be read, saved or trained; load it again for that.
    Raises InputError for an unknown `quantize`, and for int8 and int4 with fp16 or where they are impossible.
    """
    device = next(model.parameters()).device
    kind = require_quantize(quantize, device, dtype)
    keep_freed_memory()
    compute_dtype, kernels = dtype, None
    if device.type == "cpu":
        kernels = find(may_build=model.num_parameters() >= WORTH_A_BUILD)
        if not is_possible(kind, device, kernels):
            kernels = find()
        if dtype == torch.bfloat16 and kernels is not None and not has_bf16_instructions():
            compute_dtype = torch.float32
    model.eval()
    model.kernels = kernels
    cast_matrices(model, dtype, compute_dtype)
    for module in model.modules():
        if isinstance(module, Mechanism):
            module.kernels = kernels
        elif isinstance(module, Linear):
            module.freeze(kind, rows, kernels=kernels)
        elif isinstance(module, VocabularyHead):
            module.freeze(kind, dtype, rows, kernels=kernels)


def state_of_kernels(model: Transformer, device: torch.device) -> str:
    """The C kernels that `prepare_inference` will use for a model, in words; builds them where it would."""
    if device.type != "cpu":
        return f"none on {device.type}"
    return library.state(may_build=model.num_parameters() >= WORTH_A_BUILD)


def require_quantize(quantize: str, device: torch.device, dtype: torch.dtype | None = None) -> Quantize:
    """The checked kind of quantisation. Raises InputError for an unknown one, and where int8 is impossible."""
    if quantize not in QUANTIZE:
        raise InputError(f"--quantize: found '{quantize}'", hint=did_you_mean(quantize, QUANTIZE))
    if quantize == "none":
        return "none"
    if not can_quantize(quantize, device):
        instructions = "with 8-bit products (VNNI, AMX) or " if quantize == "int8" else "and "
        raise InputError(
            f"--quantize {quantize} needs a CPU {instructions}a C compiler for tformer's kernels, found "
            f"{device_name(device)}",
            hint=MISSING_KERNELS if device.type == "cpu" else "leave it out, or use --device cpu",
        )
    if dtype == torch.float16:
        raise InputError(f"--quantize {quantize} goes with bf16 or fp32, found fp16")
    return quantize


def can_quantize(quantize: Quantize, device: torch.device) -> bool:
    """Whether products in 8 or 4 bits are possible on the device; builds the C kernels where these are needed."""
    return is_possible(quantize, device) or (device.type == "cpu" and find() is not None)


def _is_plain_head(module: nn.Module) -> bool:
    # FixNorm first divides the rows of its matrix by their lengths, which must be exact.
    return isinstance(module, VocabularyHead) and not module.fixnorm


SMALLEST_BUCKET, SMALLEST_SOURCE = 64, 16
STEPS_AHEAD = 256  # the first bucket has room for up to this number of new tokens
MAX_FREE_CACHES = 4
MOST_GRAPHS = 64
AUTO_STEPS = 4096  # of decoding: on a GPU, compilation costs as much time as a few thousand steps of a small model save
_numbers = count()
_COMPILED = process_lock()  # compilation and the replay of graphs are of the whole process
CPP_COMPILERS = {"darwin": "clang++", "win32": "cl"}  # PyTorch's choice without $CXX; on other systems g++
C_COMPILERS = ("gcc", "clang")  # Triton's choice without $CC


def compile_decoding(model: Transformer, dtype: torch.dtype, *, backend: str = "inductor") -> None:
    """Compile the decoding steps of this model for `generate` and beam search, with its matrices in `dtype`.

    Instead of `prepare_inference`: packed matrices cannot be compiled. The first step of every shape takes the time of
    compiling it. Raises InputError for a model that `no_compiled_steps` refuses, or without a compiler.
    """
    if (reason := no_compiled_steps(model)) is not None:
        raise InputError(f"decoding cannot be compiled: {reason}", hint="leave it uncompiled")
    if backend == "inductor":
        require_compiler(next(model.parameters()).device)
    model.eval()
    cast_matrices(model, dtype)
    model.compiled_decoder = CompiledDecoder(model, backend=backend)


def prepare_decoding(
    model: Transformer,
    dtype: torch.dtype,
    *,
    compile: Compilation,
    quantize: str,
    rows: int | None,
    steps: Callable[[], int],
) -> str | None:
    """Call `compile_decoding` where it is requested or faster, else `prepare_inference`; returns a note for the user.

    Args:
        compile: `auto` compiles on a GPU, where starting many small operations takes the time, for `AUTO_STEPS` or more
            decoding steps; not on a CPU.
        rows: see `prepare_inference`.
        steps: the number of decoding steps; called only where it matters.

    Raises InputError for `compile` "on" without a compiler.
    """
    device = next(model.parameters()).device
    compiles, note = decide_compilation(model, device, compile, quantize=quantize, steps=steps)
    if compiles:
        compile_decoding(model, dtype)
    else:
        prepare_inference(model, dtype, quantize=quantize, rows=rows)
        is_large = model.num_parameters() >= WORTH_A_BUILD
        if note is None and device.type == "cpu" and is_large and library.lacks_compiler():
            note = f"found no C compiler: with one, tformer builds kernels that decode faster ({INSTALL})"
    return note


def decide_compilation(
    model: Transformer, device: torch.device, compile: Compilation, *, quantize: str, steps: Callable[[], int]
) -> tuple[bool, str | None]:
    """Whether `prepare_decoding` compiles, and its note."""
    if compile == "auto":
        compile = "on" if device.type == "cuda" and quantize == "none" and steps() >= AUTO_STEPS else "off"
        missing = missing_compiler(device)
    else:
        missing = None
    if compile == "off":
        return False, None
    reason = no_compiled_steps(model)
    if reason is None and missing is not None:
        reason = f"found no {missing}"
    if reason is not None:
        return False, f"decoded uncompiled: {reason}"
    require_compiler(device)
    return True, "decoding is compiled: the first tokens take a while"


def no_compiled_steps(model: Transformer) -> str | None:
    """The reason why a model's decoding steps cannot be compiled; None: they can.

    Kinds of attention whose state is not keys and values, or that find neighbours by their slots, have no fixed shape.
    """
    if model.decoder is None:
        return "the model has no decoder"
    if not isinstance(next(iter(model.heads.values()), None), VocabularyHead):
        return "the model has no head over a vocabulary"
    for layer, block in enumerate(model.decoder.layers):
        if not block.self_attention.mechanism.reads_dense_mask:
            kind = type(block.self_attention.mechanism).__name__
            return f"layer {layer} of the decoder has {kind}, which does not read whole rows of keys"
    return None


def replays_graphs(device: torch.device) -> bool:
    """Whether graphs are recorded on the device, which needs fixed addresses."""
    return device.type == "cuda"


def missing_compiler(device: torch.device) -> str | None:
    """The compiler that the default backend needs on this device and that is not installed; None: none is missing."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "Triton"
        found = os.environ.get("CC") or any(shutil.which(name) for name in C_COMPILERS)
        return None if found else "C compiler"
    return None if shutil.which(os.environ.get("CXX", CPP_COMPILERS.get(sys.platform, "g++"))) else "C++ compiler"


def require_compiler(device: torch.device) -> None:
    """Raise InputError where `missing_compiler` names something."""
    if (missing := missing_compiler(device)) is not None:
        raise InputError(f"decoding cannot be compiled: found no {missing}", hint="install one, or leave it uncompiled")


class CompiledDecoder:
    """The compiled step of one model, and the caches it runs on.

    Compiled steps of a process run one after another, whatever the thread and the model.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        backend: str = "inductor",
        smallest: int = SMALLEST_BUCKET,
        ahead: int = STEPS_AHEAD,
    ) -> None:
        """`smallest`: slots of the smallest bucket; `ahead`: number of new tokens that the first one has room for."""
        self.model = model
        self._smallest, self._ahead = smallest, ahead
        self._replayed = replays_graphs(next(model.parameters()).device)
        options: dict[str, Any] = {"backend": backend}
        if backend == "inductor" and self._replayed:
            options["mode"] = "reduce-overhead"
        self._options = options
        self._forget_graphs()
        self._caches: list[tuple[FixedCache, weakref.ref[BucketedCache]]] = []

    def begin(self, cache: AnyCache, *, capacity: int, beams: int = 1) -> BucketedCache:
        """The cache of compiled steps after a prefill: every row of it becomes a sentence of `beams` equal rows.

        capacity: maximum number of slots, those of the prefill included.
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
        with _COMPILED:
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
                if self._replayed:
                    for tensor in chosen.tensors():
                        torch._dynamo.mark_static_address(tensor, guard=False)
            unused = {id(cache) for cache in free[: max(0, len(free) - MAX_FREE_CACHES)]}
            dropped = unused - {id(user.fixed), id(chosen)}
            others = [entry for entry in self._caches if entry[0] is not chosen and id(entry[0]) not in dropped]
            self._caches = [*others, (chosen, weakref.ref(user))]
            return chosen

    def step(self, cache: FixedCache) -> Tensor:
        """fp32 logits [R, V] after the cache's newest tokens.

        InputError when the compiler fails: an installed compiler may not work.
        """
        with _COMPILED:
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


class BucketedCache:
    """The keys and values of compiled decoding, in a bucket of fixed shape: the counterpart of `ModelCache`.

    Attributes:
        length, capacity: number of slots in use, and the maximum.
        sentences, beams: number of sentences in use, and of rows of each.
    """

    def __init__(self, decoder: CompiledDecoder, *, beams: int) -> None:
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
        """Row i becomes a copy of row index[i], long [B], of the same sentence."""
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
    """The function to compile: from the cache with its newest tokens and their positions to fp32 logits [R, V]."""
    prefix = "" if model.encoder is None else "decoder_"

    def step(cache: FixedCache) -> Tensor:
        inputs = {f"{prefix}input_ids": cache.ids, f"{prefix}position_ids": cache.positions}
        logits_RV: Tensor = model(**inputs, cache=cache).logits_at(-1)
        cache.step_done()
        return logits_RV

    # The compiler counts and limits graphs by their code object: each step has its own.
    step.__code__ = step.__code__.replace(co_name=f"step_{next(_numbers)}")
    return step
