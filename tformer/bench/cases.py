"""What `bench all` measures: a list of requests for a CPU, one for a GPU, each with the command that repeats it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from tformer.bench.quality import QualityBench
from tformer.bench.speed_request import LENGTH_OPTIONS, SpeedRequest

TRANSFORMERS, X_TRANSFORMERS, CTRANSLATE2 = "transformers", "x-transformers", "ctranslate2"
NO_DROPOUT = tuple(
    f"model.{key}=0" for key in ("embedding.dropout", "decoder.dropout", "decoder.attention_dropout")
)  # as nanoGPT's own bench has it
BOTH = ("none", "int8")
QUICK_REPEATS, QUICK_SECONDS, QUICK_TEXTS = 3, 300.0, 1000


@dataclass(frozen=True)
class Case:
    """title: what is measured, for people; note: what they should know of how."""

    title: str
    request: SpeedRequest
    note: str = ""

    @property
    def command(self) -> str:
        return command_of(self.request)


def _case(title: str, work: str, arch: str, preset: str, **fields: Any) -> Case:
    return Case(title, SpeedRequest(work, arch=arch, preset=preset, **fields))


def _training(title: str, preset: str, batch_sizes: tuple[int, ...], length: int, **fields: Any) -> Case:
    case = _case(title, "train", "gpt", preset, batch_sizes=batch_sizes, length=length, **fields)
    return case if len(batch_sizes) > 1 else replace(case, note=_fixed(batch_sizes[0]))


def _fixed(batch_size: int) -> str:
    return f"a batch of {batch_size} belongs to the shape that is measured: nobody's is swept, formats are"


def _generation(title: str, preset: str, batch_size: int, **fields: Any) -> Case:
    options = {"new_tokens": 128}
    given = {"length": 16, "options": options, "peers": (TRANSFORMERS,), **fields}
    case = _case(title, "generate", "gpt", preset, batch_sizes=(batch_size,), **given)
    return replace(case, note=_fixed(batch_size))


CPU_CASES = (
    _training(
        "Training, 6 layers of width 384 (nanoGPT's baby shape)",
        "char",
        (16,),
        256,
        sets=NO_DROPOUT,
        peers=(TRANSFORMERS, X_TRANSFORMERS),
    ),
    _training("Training and its memory, GPT-2 of 124M", "small", (2,), 512, peers=(TRANSFORMERS,), repeats=5),
    _generation("Generation, GPT-2 of 124M, one text", "small", 1, quantize=BOTH),
    _generation("Generation, GPT-2 of 124M, eight texts", "small", 8, quantize=BOTH),
    _case(
        "Translation, 6 + 6 layers of width 512, beam 4",
        "translate",
        "transformer",
        "base",
        sets=("model.vocab_size=16000",),
        batch_sizes=(8, 32, 64),
        length=20,
        options={"new_tokens": 30, "beam": 4, "sentences": 64},
        quantize=BOTH,
        peers=(CTRANSLATE2, TRANSFORMERS),
        repeats=5,
    ),
    _case(
        "Classification of 10,000 short texts, 4 layers of width 512",
        "classify",
        "bert",
        "small",
        batch_sizes=(16, 32, 64),
        options={"texts": 10_000},
        peers=(TRANSFORMERS,),
        repeats=3,
        max_seconds=1800.0,
    ),
)

GPU_CASES = (
    _training("Training, GPT-2 of 124M", "small", (16, 32, 64), 1024, compile=True, peers=(TRANSFORMERS,)),
    _training("Training, GPT-2 of 350M", "medium", (8, 16, 32), 1024, compile=True, peers=(TRANSFORMERS,)),
    _training("Training, GPT-2 of 1.5B", "xl", (4, 8, 16), 1024, compile=True),
    _generation("Generation, GPT-2 of 124M, one text", "small", 1, precision="bf16"),
    _generation("Generation, GPT-2 of 1.5B, one text", "xl", 1, precision="bf16"),
)
"""The presets' own precision is what the device has: bf16."""

SEEDS = (1, 2, 3)
QUALITY = {
    "cpu": (("char-12s", 1.88), ("char-6m", 1.4697)),
    "cuda": (("char", 1.4697),),
}
"""Presets by characters, and the validation loss on tinyshakespeare that each is timed to."""


def quality_for(
    device: torch.device, *, data: str, valid: str, quick: bool = False, threads: int | None = None
) -> tuple[QualityBench, ...]:
    """Times to quality on a kind of device. quick: the first preset, one seed."""
    found = [
        QualityBench(
            preset=preset,
            data=data,
            valid=valid,
            target=target,
            seeds=SEEDS[:1] if quick else SEEDS,
            device=str(device),
            threads=threads,
        )
        for preset, target in QUALITY[device.type]
    ]
    return tuple(found[:1] if quick else found)


def cases_for(device: torch.device, *, quick: bool = False, threads: int | None = None) -> tuple[Case, ...]:
    """The cases of a kind of device. quick: one batch size of a sweep, fewer rounds and texts."""
    chosen = GPU_CASES if device.type == "cuda" else CPU_CASES
    placed = [_with(case, device=str(device), threads=threads) for case in chosen]
    return tuple(_quick(case) if quick else case for case in placed)


def _quick(case: Case) -> Case:
    request = case.request
    sizes = request.batch_sizes
    options = dict(request.options)
    if "texts" in options:
        options["texts"] = QUICK_TEXTS
    return _with(
        case,
        batch_sizes=(sizes[len(sizes) // 2],),
        options=options,
        repeats=min(request.repeats, QUICK_REPEATS),
        max_seconds=min(request.max_seconds, QUICK_SECONDS),
    )


def _with(case: Case, **changes: Any) -> Case:
    return replace(case, request=replace(case.request, **changes))


def command_of(request: SpeedRequest) -> str:
    """The command that asks for the same; defaults are left out."""
    words = ["tformer", "bench", request.work]
    for name in ("arch", "preset"):
        value = getattr(request, name)
        words += [] if value is None else [f"--{name}", value]
    for text in request.sets:
        words += ["--set", text]
    if request.batch_sizes:
        words += ["--batch-size", ",".join(map(str, request.batch_sizes))]
    if request.length is not None:
        words += [LENGTH_OPTIONS.get(request.work, "--length"), str(request.length)]
    words += _options(request.options)
    if tuple(request.quantize) != _DEFAULTS["quantize"]:
        words += ["--quantize", ",".join(request.quantize)]
    for name in request.peers:
        words += ["--peer", name]
    words += ["--compile"] if request.compile else []
    for name in ("precision", "repeats", "max_seconds", "threads", "device"):
        value = getattr(request, name)
        if value != _DEFAULTS[name]:
            words += [f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def _options(options: Mapping[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


_DEFAULTS = {field.name: field.default for field in fields(SpeedRequest)}
