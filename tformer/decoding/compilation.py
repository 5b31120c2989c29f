"""Whether decoding steps are graphs: what was requested, what the model allows, and which compilers are installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from typing import Literal

import torch

from tformer.decoding.buckets import CompiledDecoder, RecordedDecoder
from tformer.decoding.inference import INSTALL, WORTH_A_BUILD, cast_matrices, prepare_inference
from tformer.kernels import library
from tformer.loading import Ready
from tformer.model import Transformer
from tformer.nn.heads import VocabularyHead
from tformer.support.errors import InputError

Compilation = Literal["auto", "on", "off"]
Way = Literal["plain", "recorded", "compiled"]
"""Of a decoding step: operation by operation, as a recorded CUDA graph, or as a graph of compiled kernels."""
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


def record_decoding(model: Transformer, dtype: torch.dtype) -> None:
    """Record the decoding steps of a model on a GPU, with its matrices in `dtype`; not if `no_compiled_steps`."""
    model.eval()
    cast_matrices(model, dtype)
    model.compiled_decoder = RecordedDecoder(model)


def prepare_decoding(
    model: Transformer,
    dtype: torch.dtype,
    *,
    compile: Compilation,
    quantize: str,
    rows: int | None,
    fill: Callable[[Ready], None] | None = None,
) -> str | None:
    """Make the decoding steps graphs where it is requested or faster, else call `prepare_inference`.

    Returns a note for the user.

    Args:
        compile: `auto` records steps on a GPU, where starting many small operations takes the time; `on` compiles them.
        rows, fill: see `prepare_inference`.

    Raises InputError for `compile` "on" without a compiler.
    """
    device = next(model.parameters()).device
    way, note = decide_way(model, device, compile, quantize=quantize)
    if way != "plain" and fill is not None:
        fill(lambda module: None)
    if way == "compiled":
        compile_decoding(model, dtype)
    elif way == "recorded":
        record_decoding(model, dtype)
    else:
        note = prepare_inference(model, dtype, quantize=quantize, rows=rows, fill=fill) or note
        is_large = model.num_parameters() >= WORTH_A_BUILD
        if note is None and device.type == "cpu" and is_large:
            if library.lacks_compiler():
                note = f"found no C compiler: with one, tformer builds kernels that decode faster ({INSTALL})"
            elif library.state() == library.NO_PROC:
                note = f"C kernels {library.NO_PROC}: decoding is slower"
    return note


def decide_way(
    model: Transformer, device: torch.device, compile: Compilation, *, quantize: str
) -> tuple[Way, str | None]:
    """(How `prepare_decoding` lets steps run, its note). Raises InputError for `compile` "on" without a compiler."""
    if compile == "off" or (compile == "auto" and (device.type != "cuda" or quantize != "none")):
        return "plain", None
    reason = no_compiled_steps(model)
    if compile == "auto":
        return "plain" if reason else "recorded", None
    if reason is not None:
        return "plain", f"decoded uncompiled: {reason}"
    require_compiler(device)
    return "compiled", "decoding is compiled: the first tokens take a while"


def no_compiled_steps(model: Transformer) -> str | None:
    """Why the decoding steps of a model cannot be compiled; None if they can.

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


def missing_compiler(device: torch.device) -> str | None:
    """The compiler that the default backend needs on this device, if it is not installed."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "Triton"
        found = os.environ.get("CC") or any(shutil.which(name) for name in C_COMPILERS)
        return None if found else "C compiler"
    return None if shutil.which(os.environ.get("CXX", CPP_COMPILERS.get(sys.platform, "g++"))) else "C++ compiler"


def require_compiler(device: torch.device) -> None:
    """Raise InputError if the compiler for this device is not installed."""
    if (missing := missing_compiler(device)) is not None:
        raise InputError(f"decoding cannot be compiled: found no {missing}", hint="install one, or leave it uncompiled")
