"""`tformer train`: train a Transformer from a recipe and data into a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tformer.cli.command import examples
from tformer.cli.process import STARTED, StopFlag
from tformer.cli.report import console, emit, emit_json, progress_reporter
from tformer.errors import InputError

VOCABULARIES: dict[str | None, dict[str, Any]] = {
    None: {},
    "joint": {"tokenizer.separate": False, "tokenizer.source_path": None, "tokenizer.target_path": None},
    "separate": {"tokenizer.separate": True, "model.tie.source_target": False},
}
"""What --vocabulary sets."""


def vocabulary_flags(
    vocabulary: str | None,
    *,
    tokenizer: Path | None,
    source_tokenizer: Path | None,
    target_tokenizer: Path | None,
) -> dict[str, Any]:
    """Values by dotted key; None sets null. A file for each side means separate vocabularies, without being said.

    Raises InputError for another word than joint or separate, one side without the other, and files that exclude each
    other or the vocabulary.
    """
    if vocabulary not in VOCABULARIES:
        raise InputError(f"--vocabulary must be joint or separate, found '{vocabulary}'")
    given = {"--source-tokenizer": source_tokenizer, "--target-tokenizer": target_tokenizer}
    missing = [name for name, file in given.items() if file is None]
    if len(missing) == len(given):
        return VOCABULARIES[vocabulary] | ({} if tokenizer is None else {"tokenizer.path": str(tokenizer)})
    if missing:
        raise InputError(f"{missing[0]} is missing", hint="a tokenizer for each side; one for both is --tokenizer")
    if tokenizer is not None:
        raise InputError("--tokenizer and --source-tokenizer exclude each other", hint="--tokenizer is for both sides")
    if vocabulary == "joint":
        raise InputError("--vocabulary joint and --source-tokenizer exclude each other")
    return VOCABULARIES["separate"] | {
        "tokenizer.path": None,
        "tokenizer.source_path": str(source_tokenizer),
        "tokenizer.target_path": str(target_tokenizer),
    }


EPILOG = examples(
    "`tformer train --arch gpt`",
    "`tformer train --arch bert --data train.tsv --valid valid.tsv --label-column label`",
    "`tformer train --arch transformer --source train.en --target train.de`",
    "`tformer train --resume --out runs/gpt-tiny-1 --max-steps 2000`",
)

MODEL, DATA, RUN, OPTIM, MACHINE = "Model", "Data", "Run", "Optimization", "Machine"


def train(
    arch: Annotated[
        str | None, typer.Option(help="Family, for example gpt or llama (default gpt).", rich_help_panel=MODEL)
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="A shipped recipe of that family; `tformer config list` names them.", rich_help_panel=MODEL),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A recipe file of your own, over the preset.", rich_help_panel=MODEL)
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override any key of the recipe.", rich_help_panel=MODEL),
    ] = None,
    init_from: Annotated[
        Path | None,
        typer.Option(
            help="Start from the weights, body and tokenizer of this run; heads that do not fit are made anew.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Text, a csv/tsv/jsonl/parquet table, images (folder, zip or IDX), a glob, `-` or builtin:NAME; "
            "may be repeated. Nothing given: built-in data.",
            rich_help_panel=DATA,
        ),
    ] = None,
    valid: Annotated[
        list[str] | None,
        typer.Option(help="Validation data; nothing given: a tenth of the data.", rich_help_panel=DATA),
    ] = None,
    text_column: Annotated[
        str | None, typer.Option(help="Column of the text: its name, or its number from 0.", rich_help_panel=DATA)
    ] = None,
    text2_column: Annotated[
        str | None, typer.Option(help="Column of the second text, for pairs.", rich_help_panel=DATA)
    ] = None,
    label_column: Annotated[
        str | None, typer.Option(help="Column of the label or score.", rich_help_panel=DATA)
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(help="Source side of aligned text, a line a sentence; may be repeated.", rich_help_panel=DATA),
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="Its target side, as many lines.", rich_help_panel=DATA)
    ] = None,
    valid_source: Annotated[
        list[str] | None, typer.Option(help="Source side to validate on.", rich_help_panel=DATA)
    ] = None,
    valid_target: Annotated[
        list[str] | None, typer.Option(help="Target side to validate on.", rich_help_panel=DATA)
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            help='Of pairs: stands before every source of the data named here, for example "translate: ".',
            rich_help_panel=DATA,
        ),
    ] = None,
    source_column: Annotated[
        str | None,
        typer.Option(help="Column of the source in a table; several with commas.", rich_help_panel=DATA),
    ] = None,
    target_column: Annotated[
        str | None, typer.Option(help="Column of the target in a table.", rich_help_panel=DATA)
    ] = None,
    vocabulary: Annotated[
        str | None,
        typer.Option(help="Of pairs: joint (one tokenizer) or separate (one a side).", rich_help_panel=DATA),
    ] = None,
    errors: Annotated[
        str | None, typer.Option(help="Invalid UTF-8: strict (default) or replace.", rich_help_panel=DATA)
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer.json; nothing given: one is trained on the data.", rich_help_panel=DATA),
    ] = None,
    source_tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Of pairs: the tokenizer.json of the source, beside --target-tokenizer.", rich_help_panel=DATA
        ),
    ] = None,
    target_tokenizer: Annotated[
        Path | None, typer.Option(help="Of pairs: the tokenizer.json of the target.", rich_help_panel=DATA)
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            help="causal_lm, masked_lm (or masked_lm,next_sentence), replaced_token, classification, multi_label, "
            "regression, seq2seq, span_corruption or denoising; brings its head along.",
            rich_help_panel=OPTIM,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory (default runs/ARCH-PRESET-N).", rich_help_panel=RUN)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out, or the newest one.", rich_help_panel=RUN)
    ] = False,
    max_steps: Annotated[int | None, typer.Option(help="Optimizer steps in all.", rich_help_panel=RUN)] = None,
    max_epochs: Annotated[
        float | None, typer.Option(help="At most so many times the data.", rich_help_panel=RUN)
    ] = None,
    max_minutes: Annotated[
        float | None,
        typer.Option(help="Save and stop after so long; the learning-rate horizon stays.", rich_help_panel=RUN),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show recipe, parameters, memory and one batch; train nothing.", rich_help_panel=RUN
        ),
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.", rich_help_panel=RUN)] = False,
    batch_size: Annotated[int | None, typer.Option(help="Sequences in one micro-batch.", rich_help_panel=OPTIM)] = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens in one micro-batch (of pairs those of the longer side), instead of --batch-size.",
            rich_help_panel=OPTIM,
        ),
    ] = None,
    grad_accum: Annotated[
        int | None, typer.Option(help="Micro-batches in one optimizer step.", rich_help_panel=OPTIM)
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.", rich_help_panel=OPTIM)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.", rich_help_panel=OPTIM)] = None,
    teacher: Annotated[
        Path | None,
        typer.Option(
            help="Distil this run, checkpoint or Hugging Face folder into the new model, which takes its tokenizer.",
            rich_help_panel=OPTIM,
        ),
    ] = None,
    distil: Annotated[
        str | None,
        typer.Option(
            help="What is learned from --teacher: soft (its predictions, default) or sequence (of pairs: its "
            "translations).",
            rich_help_panel=OPTIM,
        ),
    ] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32, bf16 or fp16.", rich_help_panel=MACHINE)] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=MACHINE)] = None,
    compile: Annotated[str | None, typer.Option(help="auto, on or off.", rich_help_panel=MACHINE)] = None,
) -> None:
    """Train a Transformer, from scratch, from another run's weights, or on from where a run stopped."""
    from tformer.data.sources.columns import parse_column

    flags: dict[str, Any] = {
        "data.columns.text": parse_column(text_column),
        "data.columns.text2": parse_column(text2_column),
        "data.columns.label": parse_column(label_column),
        "data.columns.source": parse_column(source_column),
        "data.columns.target": parse_column(target_column),
        "data.errors": errors,
        "training.max_steps": max_steps,
        "training.max_epochs": max_epochs,
        "training.max_minutes": max_minutes,
        "training.batch_size": batch_size,
        "training.batch_tokens": batch_tokens,
        "training.grad_accum": grad_accum,
        "training.precision": precision,
        "training.device": device,
        "training.compile": compile,
        "optimizer.lr": lr,
        "seed": seed,
        "teacher.path": None if teacher is None else str(teacher),
        "teacher.kind": distil,
    }
    flags = {key: value for key, value in flags.items() if value is not None}
    named = {
        "data.train": _entries(data, source, target, "--source and --target"),
        "data.valid": _entries(valid, valid_source, valid_target, "--valid-source and --valid-target"),
    }
    if prefix is not None:
        if not any(named.values()):
            raise InputError(
                "--prefix stands before sources that --data, --source or --valid name, found none of these",
                hint="of a recipe's own data: --set 'data.train.0.prefix=TEXT'",
            )
        named = {key: [{**entry, "prefix": prefix} for entry in entries] for key, entries in named.items()}
    flags |= {key: entries for key, entries in named.items() if entries}
    flags |= vocabulary_flags(
        vocabulary, tokenizer=tokenizer, source_tokenizer=source_tokenizer, target_tokenizer=target_tokenizer
    )
    if objective is not None:
        flags["objectives"] = [{"kind": kind.strip()} for kind in objective.split(",")]

    with StopFlag() as stop:
        from tformer.training.request import TrainRequest
        from tformer.training.session import run_training

        request = TrainRequest(
            arch=arch,
            preset=preset,
            config=config,
            flags=flags,
            sets=tuple(set_ or ()),
            out=out,
            resume=resume,
            init_from=init_from,
            dry_run=dry_run,
        )
        summary = run_training(
            request,
            console=console,
            progress=progress_reporter,
            should_stop=stop.should_stop,
            interrupted=stop.interrupted,
            training_begins=stop.be_patient,
            began=STARTED,
        )
        if json_:
            emit_json(summary)
        elif dry_run:
            memory = {name.removesuffix("_bytes"): size for name, size in summary["memory"].items()}
            console.print("memory: " + ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in memory.items()))
            batch = ", ".join(f"{name} {value}" for name, value in summary["batch"].items())
            console.print(f"one batch: {batch}", markup=False)
            emit(summary["recipe_yaml"].rstrip())
        else:
            emit(summary["run"])


def _entries(
    paths: list[str] | None, sources: list[str] | None, targets: list[str] | None, names: str
) -> list[dict[str, str]]:
    """Entries of the recipe's data section. Errors: one side of aligned files without the other."""
    sources, targets = sources or [], targets or []
    if len(sources) != len(targets):
        raise InputError(f"{names} come in pairs, found {len(sources)} and {len(targets)}")
    aligned = [{"path": path, "target_path": target} for path, target in zip(sources, targets, strict=True)]
    return [*({"path": path} for path in paths or ()), *aligned]
