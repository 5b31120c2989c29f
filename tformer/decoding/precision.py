"""The number format of inference: the one the model was trained in, unless another is asked for.

A decoding step reads every weight once and multiplies little, so the matrices are cast ahead instead of on each use.
What is rounded is exactly what training rounds: the operands of products. Norms, biases of positions and tables that
are added stay in fp32.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import nn

from tformer.errors import InputError, did_you_mean
from tformer.kernels.functions import find
from tformer.memory import keep_freed_memory
from tformer.model import Transformer
from tformer.nn.hardware import DTYPES, has_bf16_instructions
from tformer.nn.heads import VocabularyHead
from tformer.nn.kernels import bring
from tformer.nn.linear import Linear
from tformer.nn.products import Quantize, int8_is_possible

WORTH_A_BUILD = 2**22
"""Parameters of a model from which on kernels are compiled for it, if nobody has had them compiled before."""
QUANTIZE: tuple[Quantize, ...] = get_args(Quantize)


def inference_dtype(precision: str, *, trained_in: str, device: torch.device) -> torch.dtype:
    """`fp32`, `bf16`, `fp16`, or `auto`: as in training (`trained_in`, the recipe's) where the device is made for it.

    A CPU is made for fp32, and for bf16 when it has the instructions; without them bf16 is slower, not faster.
    Raises InputError for another name.
    """
    if precision == "auto":
        on_cpu = {"fp32"} | ({"bf16"} if has_bf16_instructions() else set())
        fits = device.type != "cpu" or trained_in in on_cpu
        return DTYPES.get(trained_in, torch.float32) if fits else torch.float32
    if precision not in DTYPES:
        raise InputError(f"unknown precision '{precision}'", hint=did_you_mean(precision, ("auto", *DTYPES)))
    return DTYPES[precision]


def cast_matrices(model: Transformer, dtype: torch.dtype) -> None:
    """Compute in `dtype`, with the matrices of products stored in it. For inference: masters are not kept."""
    model.compute_dtype = dtype
    for module in model.modules():
        if isinstance(module, Linear) or _is_plain_head(module):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)


def prepare_inference(
    model: Transformer, dtype: torch.dtype, *, quantize: str = "none", rows: int | None = None
) -> None:
    """Make a model as quick as it gets, for inference alone: matrices in `dtype`, on a CPU packed or in 8 bits.

    rows: the most that a step of decoding has, texts times samples or beams; None: many.

    After this its weights cannot be read, saved or trained; load it again for that.
    Raises InputError for an unknown `quantize`, or int8 where there is none: elsewhere than on a CPU that multiplies 8
    bits in hardware, and in fp16.
    """
    device = next(model.parameters()).device
    kind = require_quantize(quantize, device, dtype)
    keep_freed_memory()
    if device.type == "cpu":
        bring(find(may_build=sum(parameter.numel() for parameter in model.parameters()) >= WORTH_A_BUILD))
    cast_matrices(model, dtype)
    for module in model.modules():
        if isinstance(module, Linear):
            module.freeze(kind, rows)
        elif isinstance(module, VocabularyHead):
            module.freeze(kind, dtype, rows)


def require_quantize(quantize: str, device: torch.device, dtype: torch.dtype | None = None) -> Quantize:
    """The kind of that name. Raises InputError for another, and for int8 where there is none (dtype None: any)."""
    if quantize not in QUANTIZE:
        raise InputError(f"--quantize: found '{quantize}'", hint=did_you_mean(quantize, QUANTIZE))
    if quantize == "int8" and not int8_is_possible(device):
        raise InputError(
            f"--quantize int8 needs a CPU with 8-bit products (VNNI, AMX) and a PyTorch with oneDNN, found {device}",
            hint="leave it out" if device.type == "cpu" else "leave it out, or use --device cpu",
        )
    if quantize == "int8" and dtype == torch.float16:
        raise InputError("--quantize int8 goes with bf16 or fp32, found fp16")
    return quantize


def _is_plain_head(module: nn.Module) -> bool:
    # FixNorm divides the rows of its matrix by their lengths first, which needs them exact.
    return isinstance(module, VocabularyHead) and not module.fixnorm
