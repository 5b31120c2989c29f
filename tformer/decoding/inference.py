"""Prepare a model for inference: its number format, and packed, 8-bit or 4-bit matrices.

A decoding step reads every weight once and multiplies little, so the matrices are cast ahead instead of on each use.
Only the operands of products are rounded, as in training. Norms, biases of positions and tables that are added stay in
fp32.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import get_args

import torch
import torch.nn.functional as F
from torch import nn

from tformer.kernels import library
from tformer.kernels.functions import Kernels, find
from tformer.loading import Loaded, Ready
from tformer.model import Transformer
from tformer.nn.attention import Mechanism
from tformer.nn.heads import VocabularyHead
from tformer.nn.linear import Linear
from tformer.nn.products import Product, Quantize, is_possible, prepare_product
from tformer.support.device import DTYPES, MIN_SPEEDUP, device_name, has_bf16_instructions, keep_freed_memory
from tformer.support.errors import Caution, InputError, did_you_mean

WORTH_A_BUILD = 2**22
"""Kernels that were not compiled before are compiled for models with at least this number of parameters."""
INSTALL = "Debian, Ubuntu: sudo apt install gcc"
MOST_HELD_ROWS, PROBE_SHAPE, PROBES = 16, (6144, 1024), 3
"""Weights are held in bf16 for steps of at most this number of rows, and where a product of this shape is faster. It is
larger than most caches, and measured in less than 50 ms."""
PROBED_SHAPES, MANY_ROWS = 3, 128
"""Weights that are measured before they are quantized: those of the most work, and rows where a step has many."""
QUANTIZE: tuple[Quantize, ...] = get_args(Quantize)


def inference_dtype(precision: str, *, trained_in: str, device: torch.device) -> torch.dtype:
    """The dtype of `fp32`, `bf16`, `fp16`, or `auto`: the training's (`trained_in`) if the device supports it.

    A CPU supports fp32, and bf16 when it has the instructions; without them bf16 is slower, not faster.
    """
    if precision == "auto":
        on_cpu = {"fp32"} | ({"bf16"} if has_bf16_instructions() else set())
        fits = device.type != "cpu" or trained_in in on_cpu
        return DTYPES.get(trained_in, torch.float32) if fits else torch.float32
    return DTYPES[precision]


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
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
    if not rows or rows > MOST_HELD_ROWS or model.num_parameters() < WORTH_A_BUILD or (kernels := find()) is None:
        return dtype, None
    speedup = _speedup_of_bf16_weights(kernels, rows)
    if speedup < MIN_SPEEDUP:
        return dtype, None
    faster = f"products are {speedup:.1f} times as fast here"
    return torch.bfloat16, f"weights are held in bf16: {faster}; --precision fp32 keeps them exact"


@cache
def _seconds_of_products(
    kernels: Kernels | None, shape: tuple[int, int], dtype: torch.dtype, x_dtype: torch.dtype, kind: Quantize, rows: int
) -> tuple[float, float]:
    """Seconds of a product of `rows` rows with a weight of this shape: (unquantized, in 8 or 4 bits)."""
    weight, x = torch.full(shape, 0.5, dtype=dtype), torch.ones(rows, shape[1], dtype=x_dtype)
    plain = prepare_product(weight, None, "none", kernels=kernels, rows=rows)
    narrow = prepare_product(weight, None, kind, kernels=kernels, rows=rows)
    assert narrow is not None
    return _seconds_in_turns(plain or (lambda x: F.linear(x.to(dtype), weight)), narrow, x)


def _seconds_in_turns(first: Product, second: Product, x: torch.Tensor) -> tuple[float, float]:
    """The shortest of `PROBES` times that each product takes."""
    seconds = [math.inf, math.inf]
    for number, product in enumerate((first, second) * PROBES):
        start = time.perf_counter()
        product(x)
        seconds[number % 2] = min(seconds[number % 2], time.perf_counter() - start)
    return seconds[0], seconds[1]


def _note_on_quantizing(
    model: Transformer, dtype: torch.dtype, kind: Quantize, rows: int | None, kernels: Kernels | None
) -> Caution | None:
    """A note where products in 8 or 4 bits are hardly faster here, measured once per shape; None: they are faster."""
    weights = [weight for each in model.modules() if isinstance(each, Linear) for weight in each.parameters(False)]
    shapes = Counter((len(weight), weight.shape[1]) for weight in weights if weight.ndim == 2)
    largest = sorted(shapes, key=lambda shape: -shapes[shape] * math.prod(shape))[:PROBED_SHAPES]
    plain = narrow = 0.0
    for shape in largest:
        before, after = _seconds_of_products(kernels, shape, dtype, model.compute_dtype, kind, rows or MANY_ROWS)
        plain, narrow = plain + shapes[shape] * before, narrow + shapes[shape] * after
    if plain >= MIN_SPEEDUP * narrow:
        return None
    found = f"{narrow / plain:.1f} times as long" if narrow > plain else "about as long"
    return Caution(f"--quantize {kind} does not pay here: products of this model take {found} with it; leave it out")


@cache
def _speedup_of_bf16_weights(kernels: Kernels, rows: int) -> float:
    """Speed-up of a product of few rows, x in fp32, by a weight in bf16 on this machine."""
    weight = torch.full(PROBE_SHAPE, 0.5)
    x = torch.ones(rows, PROBE_SHAPE[1])
    wide = prepare_product(weight, None, "none", kernels=kernels, rows=rows) or partial(F.linear, weight=weight)
    narrow = prepare_product(weight.bfloat16(), None, "none", kernels=kernels, rows=rows)
    assert narrow is not None
    before, after = _seconds_in_turns(wide, narrow, x)
    return before / after


def cast_matrices(model: Transformer, dtype: torch.dtype) -> None:
    """Store the matrices of products and their biases in `dtype`, which computes.

    For inference: the parameters of higher precision are not kept.
    """
    model.compute_dtype = dtype
    for module in model.modules():
        _cast(module, dtype, dtype)


def _cast(module: nn.Module, dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
    # FixNorm first divides the rows of its matrix by their lengths, which must be exact.
    if isinstance(module, Linear) or (isinstance(module, VocabularyHead) and not module.fixnorm):
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(dtype if parameter.ndim > 1 else compute_dtype)


def prepare_loaded(loaded: Loaded, precision: str, quantize: str) -> None:
    """Prepare a loaded model for whole batches of inputs in the format of --precision; its notes say what is slow."""
    device = next(loaded.model.parameters()).device
    dtype = inference_dtype(precision, trained_in=loaded.recipe.training.precision, device=device)
    if (note := prepare_inference(loaded.model, dtype, quantize=quantize, fill=loaded.fill)) is not None:
        loaded.notes.append(note)


def prepare_inference(
    model: Transformer,
    dtype: torch.dtype,
    *,
    quantize: str = "none",
    rows: int | None = None,
    fill: Callable[[Ready], None] | None = None,
) -> str | None:
    """Make a model fast for inference: matrices in `dtype`, on a CPU packed or in 8 or 4 bits.

    Returns a note for the user where 8 or 4 bits do not pay.

    A CPU without bf16 instructions would emulate bf16. With the C kernels it holds matrices in bf16, and computes in
    fp32.

    rows: maximum number of rows of a decoding step, texts times samples or beams; None: many.
    fill: loads the weights (`Loaded.fill`): each matrix is prepared before the next one is read.

    Afterwards its weights cannot be read, saved or trained; load it again for that.
    Raises InputError for an unknown `quantize`, and for int8 and int4 with fp16 or where they are impossible.
    """
    device = next(model.parameters()).device
    kind = require_quantize(quantize, device, dtype)
    compute_dtype, kernels = dtype, None
    if device.type == "cpu":
        kernels = find(may_build=model.num_parameters() >= WORTH_A_BUILD)
        if not is_possible(kind, device, kernels):
            kernels = find()
        if dtype == torch.bfloat16 and kernels is not None and not has_bf16_instructions():
            compute_dtype = torch.float32
    model.eval()
    model.kernels, model.compute_dtype = kernels, compute_dtype
    note = None if kind == "none" else _note_on_quantizing(model, dtype, kind, rows, kernels)

    def prepare(module: nn.Module) -> None:
        _cast(module, dtype, compute_dtype)
        if isinstance(module, Mechanism):
            module.kernels = kernels
        elif isinstance(module, Linear):
            module.freeze(kind, rows, kernels=kernels)
        elif isinstance(module, VocabularyHead):
            module.freeze(kind, dtype, rows, kernels=kernels)

    if fill is not None:
        fill(prepare)
    else:
        for module in list(model.modules()):
            prepare(module)
    keep_freed_memory()
    return note


def missing_kernels() -> str:
    """Hint for an option that needs C kernels where there are none."""
    need = "mount /proc" if library.state() == library.NO_PROC else f"install a C compiler ({INSTALL})"
    return f"{need}, or leave it out"


def state_of_kernels(model: Transformer, device: torch.device, *, seconds: float = math.inf) -> str:
    """The C kernels that `prepare_inference` will use for a model, in words; builds them where it would.

    seconds: time that a build may take: a busy machine needs up to `library.BUILD_SECONDS`.
    """
    if device.type != "cpu":
        return f"none on {device.type}"
    may_build = model.num_parameters() >= WORTH_A_BUILD and seconds >= library.BUILD_SECONDS
    return library.state(may_build=may_build)


def require_quantize(quantize: str, device: torch.device, dtype: torch.dtype | None = None) -> Quantize:
    """The checked kind of quantization; raises InputError for an unknown or impossible one, and for fp16 with it."""
    if quantize not in QUANTIZE:
        raise InputError(f"--quantize: found '{quantize}'", hint=did_you_mean(quantize, QUANTIZE))
    if quantize == "none":
        return "none"
    if not can_quantize(quantize, device):
        instructions = "with 8-bit products (VNNI, AMX) or " if quantize == "int8" else "and "
        raise InputError(
            f"--quantize {quantize} needs a CPU {instructions}a C compiler for tformer's kernels, found "
            f"{device_name(device)}",
            hint=missing_kernels() if device.type == "cpu" else "leave it out, or use --device cpu",
        )
    if dtype == torch.float16:
        raise InputError(f"--quantize {quantize} goes with bf16 or fp32, found fp16")
    return quantize


def can_quantize(quantize: Quantize, device: torch.device) -> bool:
    """Whether products in 8 or 4 bits are possible on the device; builds the C kernels where these are needed."""
    return is_possible(quantize, device) or (device.type == "cpu" and find() is not None)
