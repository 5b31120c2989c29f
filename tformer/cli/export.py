"""`tformer export`: a checkpoint as a folder that Hugging Face's `from_pretrained`, or CTranslate2, opens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tformer.cli.command import examples
from tformer.cli.process import StopFlag
from tformer.cli.report import progress_reporter, report_result
from tformer.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from tformer.interop.exporting import ExportReport

FORMAT, RESULT = "Format", "Result"
DTYPES = ("fp32", "bf16", "fp16", "int8", "int16")
SMALL = ("int8", "int16")  # of CTranslate2 alone
FORMATS = ("huggingface", "ctranslate2")
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

EPILOG = examples(
    "`tformer export runs/gpt-small-1 --out gpt-hf`",
    "`tformer export runs/bert-base-1 --out bert-hf --dtype bf16 --shard-size 2GB`",
    "`tformer export runs/transformer-base-1 --out base-ct2 --to ctranslate2 --dtype int8`",
)


def export(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Run, checkpoint or Hugging Face folder; default: the newest run."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="The new folder; must not exist yet.", rich_help_panel=RESULT),
    ] = None,
    which: Annotated[
        str,
        typer.Option("--checkpoint", metavar="best|latest|step-N", help="Which of a run's.", rich_help_panel=RESULT),
    ] = "best",
    to: Annotated[
        str, typer.Option("--to", metavar="|".join(FORMATS), help="Who opens the folder.", rich_help_panel=FORMAT)
    ] = "huggingface",
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="fp32|bf16|fp16",
            help="Of the weights; for ctranslate2 also int8 and int16. Default: as they are stored.",
            rich_help_panel=FORMAT,
        ),
    ] = None,
    shard_size: Annotated[
        str,
        typer.Option("--shard-size", metavar="SIZE", help="The most bytes of one weight file.", rich_help_panel=FORMAT),
    ] = "5GB",
    model_type: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="MODEL_TYPE",
            help="The architecture to export as (gpt2, marian, ...), where several compute the same; default: the one "
            "of the recipe's arch.",
            rich_help_panel=FORMAT,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output.", rich_help_panel=RESULT)
    ] = False,
) -> None:
    """Write a run so that `transformers` loads it with `from_pretrained`: weights, config, tokenizer, labels.

    The class that computes exactly what the recipe says is found by itself; a model that no class computes is refused,
    with the fields that stand in the way. Averaged (EMA) weights are taken where the run keeps them.
    """
    if out is None:
        raise InputError("--out is missing: where shall the folder go?", hint="--out NAME-hf")
    if to not in FORMATS:
        raise InputError(f"unknown --to '{to}'", hint=did_you_mean(to, FORMATS))
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"unknown --dtype '{dtype}'", hint=did_you_mean(dtype, DTYPES))
    if dtype in SMALL and to != "ctranslate2":
        raise InputError(f"--dtype {dtype} is a format of CTranslate2 alone", hint="add --to ctranslate2")
    shard_bytes = parse_bytes(shard_size)
    with StopFlag() as flag:
        report = _export(run, which, out, to, dtype, shard_bytes, model_type, flag)
    report_result(lines_of(report), report.path, document_of(report) if as_json else None)


def _export(
    run: str | None,
    which: str,
    out: Path,
    to: str,
    dtype: str | None,
    shard_bytes: int,
    model_type: str | None,
    flag: StopFlag,
) -> ExportReport:
    from tformer.checkpoint import newest_checkpoint
    from tformer.checkpoint.average import require_new
    from tformer.interop.exporting import DTYPES as TORCH_DTYPES
    from tformer.interop.exporting import export_checkpoint
    from tformer.interop.importing import open_checkpoint

    require_new(out)
    checkpoint = open_checkpoint(newest_checkpoint(which=which) if run is None else run, which)
    common: dict[str, Any] = {"model_type": model_type, "should_stop": flag.should_stop}
    with progress_reporter("writing") as progress:
        if to == "ctranslate2":
            from tformer.interop.to_ctranslate2 import export_ctranslate2

            return export_ctranslate2(checkpoint, out, quantization=dtype or "fp32", progress=progress, **common)
        kind = None if dtype is None else TORCH_DTYPES[dtype]
        return export_checkpoint(checkpoint, out, dtype=kind, shard_bytes=shard_bytes, progress=progress, **common)


def parse_bytes(text: str) -> int:
    """`5GB`, `500 MB`, `2GiB` or a number of bytes. InputError for anything else, and for nothing at all."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = UNITS.get(found[2].upper()) if found else None
    size = int(float(found[1]) * unit) if found and unit else 0
    if size < 1:
        raise InputError(f"--shard-size: found '{text}', expected a size such as 5GB, 500MB or 2GiB")
    return size


def lines_of(report: ExportReport) -> list[str]:
    """What was written, in words, and how it is opened."""
    many = f"{report.num_tensors} tensors, {report.num_parameters:,} numbers in {report.dtype}"
    lines = [
        f"{report.class_name} (model_type {report.model_type}) of step {report.step}",
        f"{many}, {report.num_bytes:,} bytes",
        f"files: {', '.join(report.files)}",
        *(f"note: {note}" for note in report.notes),
    ]
    return [*lines, f"load it: {how_to_load(report)}"]


def how_to_load(report: ExportReport) -> str:
    if report.auto_class.startswith("ctranslate2."):
        return f'{report.auto_class}("{report.path}")'
    return f'transformers.{report.auto_class}.from_pretrained("{report.path}")'


def document_of(report: ExportReport) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "model_type": report.model_type,
        "class": report.class_name,
        "load": how_to_load(report),
        "step": report.step,
        "dtype": report.dtype,
        "tensors": report.num_tensors,
        "parameters": report.num_parameters,
        "bytes": report.num_bytes,
        "files": list(report.files),
        "notes": list(report.notes),
    }
