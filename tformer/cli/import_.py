"""`tformer import`: a Hugging Face folder, or a repository of its hub, as a checkpoint like any other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tformer.cli.command import examples
from tformer.cli.process import StopFlag
from tformer.cli.report import console, progress_reporter, report_result
from tformer.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from tformer.interop.importing import ImportReport

FOLDER, RESULT = "What the folder leaves open", "Result"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
MAX_NAMED = 12  # tensors and labels that are listed one by one

EPILOG = examples(
    "`tformer import gpt2 --out runs/gpt2`",
    "`tformer import hf:google-bert/bert-base-uncased --out runs/bert`",
    "`tformer import opus-mt-en-de --tokenizer source.json --target-tokenizer target.json --out runs/en-de`",
)


def import_(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="HF_DIR",
            help="A folder with config.json, safetensors and tokenizer files; or hf:owner/name[@revision], which is "
            "downloaded (needs the `hub` extra).",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="The new checkpoint; must not exist yet.", rich_help_panel=RESULT),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer", metavar="FILE", help="A tokenizer.json in the place of the folder's.", rich_help_panel=FOLDER
        ),
    ] = None,
    target_tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--target-tokenizer",
            metavar="FILE",
            help="That of the target, for a translator whose sides have a tokenizer each.",
            rich_help_panel=FOLDER,
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore",
            metavar="KEY",
            help="A key of config.json that tformer does not know, and that you know to change nothing; repeatable.",
            rich_help_panel=FOLDER,
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="fp32|bf16|fp16", help="Of the weights.", rich_help_panel=RESULT)
    ] = "fp32",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output.", rich_help_panel=RESULT)
    ] = False,
) -> None:
    """Make a checkpoint of a Hugging Face folder, exactly or not at all.

    Every tensor of the files must have its place, with the shape that config.json says; a key of the configuration that
    tformer does not know is refused. Pickled weights are never read, and no code of a repository runs. The other
    commands take such a folder directly, too; a checkpoint of one's own needs neither the folder nor the network.
    """
    if out is None:
        raise InputError("--out is missing: where shall the checkpoint go?", hint="--out runs/NAME")
    if dtype not in DTYPES:
        raise InputError(f"unknown --dtype '{dtype}'", hint=did_you_mean(dtype, DTYPES))
    with StopFlag() as flag:
        import torch

        from tformer.checkpoint.average import require_new
        from tformer.interop.hub import download, is_hub_name
        from tformer.interop.importing import import_folder

        require_new(out)
        place = Path(folder)
        if is_hub_name(folder) and not place.exists():
            console.print(f"downloading {folder}", markup=False)
            place = download(folder)
        elif not place.exists():
            hint = (
                f"a repository of the hub is called hf:{folder}" if re.fullmatch(r"[\w.-]+/[\w.-]+", folder) else None
            )
            raise InputError(f"{folder} does not exist", hint=hint)
        with progress_reporter("reading the weights") as progress:
            report = import_folder(
                place,
                out,
                tokenizer=tokenizer,
                target_tokenizer=target_tokenizer,
                ignore=ignore or (),
                dtype=getattr(torch, DTYPES[dtype]),
                progress=progress,
                should_stop=flag.should_stop,
            )
    report_result(lines_of(report), report.path, document_of(report) if as_json else None)


def lines_of(report: ImportReport) -> list[str]:
    """What was mapped, in words."""
    sides = [
        f"{'' if len(report.layers) == 1 else side + ' '}{count} layers of {report.num_heads[side]} heads"
        for side, count in report.layers.items()
    ]
    lines = [
        f"{report.class_name} ({report.model_type}) as arch {report.arch}: {', '.join(sides)}, width {report.d_model}",
        f"{report.num_parameters:,} parameters from {report.num_tensors:,} tensors ({report.stored_as}), "
        f"written as {report.dtype}",
    ]
    if report.left_out:
        lines.append(f"left out, no part of this class: {_listed(report.left_out)}")
    if report.tokenizer_size is not None:
        lines.append(f"tokenizer: {report.tokenizer_size:,} ids; embedding: {report.vocab_size:,} rows")
    if report.special:
        lines.append("special tokens: " + ", ".join(f"{role} {token}" for role, token in report.special.items()))
    if report.labels:
        lines.append(f"labels: {_listed(report.labels)}")
    lines += [f"note: {note}" for note in report.notes]
    return [*lines, "checked: every tensor in its place, none missing, none left over"]


def document_of(report: ImportReport) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "class": report.class_name,
        "model_type": report.model_type,
        "arch": report.arch,
        "layers": dict(report.layers),
        "heads": dict(report.num_heads),
        "d_model": report.d_model,
        "parameters": report.num_parameters,
        "tensors": report.num_tensors,
        "left_out": list(report.left_out),
        "stored_as": report.stored_as,
        "dtype": report.dtype,
        "vocab_size": report.vocab_size,
        "tokenizer_size": report.tokenizer_size,
        "special_tokens": dict(report.special),
        "labels": list(report.labels),
        "notes": list(report.notes),
    }


def _listed(names: tuple[str, ...]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more:,} more" if more > 0 else "")
