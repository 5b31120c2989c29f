"""`tformer sweep`: one recipe varied along axes, trained over seeds, compared in one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tformer.cli.common import StopFlag, console, emit, emit_json, examples
from tformer.cli.sweep_plan import check_flags, flag_words, make_plan
from tformer.errors import InputError, TformerError

if TYPE_CHECKING:
    from tformer.workflows.sweep.plan import Plan

EPILOG = examples(
    "`tformer sweep --arch gpt --vary model.*.positions.kind=rope,alibi,learned --out sweeps/positions`",
    "`tformer sweep --arch bert --data train.tsv --vary model.*.norm.place,model.*.final_norm=[pre,true],[post,false] "
    "--vary optimizer.lr=1e-3,3e-4 --seeds 3 --out sweeps/norms`",
    "`tformer sweep --plan positions --out sweeps/positions --dry-run`",
    '`tformer sweep --arch gpt --vary model.decoder.dropout=0,0.1 --out sweeps/drop --evaluate "test=--data test.txt"`',
)

WHAT, DATA, HOW, RUN = "What is compared", "Data", "How it is trained", "Run"


def sweep(
    train_flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- TRAIN FLAGS", help="After `--`: any other flags of `tformer train`."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the sweep; with an unfinished one, it goes on there.", rich_help_panel=RUN),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            help="A written plan instead of the options here: a file, or a shipped one (positions, tears).",
            rich_help_panel=WHAT,
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A recipe file of your own.", rich_help_panel=WHAT)] = None,
    arch: Annotated[str | None, typer.Option(help="Or a family, and", rich_help_panel=WHAT)] = None,
    preset: Annotated[str | None, typer.Option(help="a shipped recipe of it.", rich_help_panel=WHAT)] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key in every variant.", rich_help_panel=WHAT),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=a,b,c",
            help="An axis: a variant for each value; several axes: their product. `*` in a key: every stack. "
            "Keys that change together: KEY1,KEY2=[a,b],[c,d].",
            rich_help_panel=WHAT,
        ),
    ] = None,
    evaluate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LABEL=FLAGS",
            help="A further column: what `tformer evaluate` with these flags finds.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Trainings of each variant (default 1).", rich_help_panel=HOW)
    ] = None,
    max_steps: Annotated[int | None, typer.Option(help="Optimizer steps of each.", rich_help_panel=HOW)] = None,
    max_minutes: Annotated[float | None, typer.Option(help="At most so long each.", rich_help_panel=HOW)] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32, bf16 or fp16.", rich_help_panel=HOW)] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=HOW)] = None,
    data: Annotated[list[str] | None, typer.Option(help="As for train.", rich_help_panel=DATA)] = None,
    valid: Annotated[list[str] | None, typer.Option(help="Validation data.", rich_help_panel=DATA)] = None,
    source: Annotated[list[str] | None, typer.Option(help="Of aligned text.", rich_help_panel=DATA)] = None,
    target: Annotated[list[str] | None, typer.Option(help="Its target side.", rich_help_panel=DATA)] = None,
    valid_source: Annotated[list[str] | None, typer.Option(help="To validate on.", rich_help_panel=DATA)] = None,
    valid_target: Annotated[list[str] | None, typer.Option(help="To validate on.", rich_help_panel=DATA)] = None,
    text_column: Annotated[str | None, typer.Option(help="Name or number.", rich_help_panel=DATA)] = None,
    label_column: Annotated[str | None, typer.Option(help="Name or number.", rich_help_panel=DATA)] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer.json; nothing given: one is trained for all variants.", rich_help_panel=DATA),
    ] = None,
    skip_invalid: Annotated[
        bool,
        typer.Option("--skip-invalid", help="Leave out the variants that their recipe refuses.", rich_help_panel=RUN),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the trainings; run none.", rich_help_panel=RUN)
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.", rich_help_panel=RUN)] = False,
) -> None:
    """Train every variant of a recipe, seed after seed, and compare them in one table.

    Each training is a process and a run of its own under OUT/runs. OUT then holds table.md, table.csv, table.json,
    cells.csv and the plot curves.svg. The same command again goes on where it stopped, and repeats what failed but did
    not diverge.
    """
    options: dict[str, Any] = {
        "--data": data,
        "--valid": valid,
        "--source": source,
        "--target": target,
        "--valid-source": valid_source,
        "--valid-target": valid_target,
        "--text-column": text_column,
        "--label-column": label_column,
        "--tokenizer": tokenizer,
        "--max-minutes": max_minutes,
        "--precision": precision,
        "--device": device,
    }
    train = [*flag_words(options), *(train_flags or ())]
    chosen = {"--config": config, "--arch": arch, "--preset": preset, "--set": set_, "--vary": vary}
    chosen |= {"--evaluate": evaluate, "a flag of train": train}
    asked = make_plan(plan, chosen, seeds=seeds, max_steps=max_steps)
    check_flags(asked)
    if out is None and not dry_run:
        raise InputError("--out is missing", hint="a folder for the sweep, for example --out sweeps/first")
    with StopFlag() as stop:
        from tformer.workflows.sweep.run import resolve_plan

        grid = resolve_plan(asked, skip_invalid=skip_invalid)
        for note in grid.notes:
            console.print(note, markup=False)
        for result in grid.invalid:
            console.print(f"left out: {result.cell}: {result.message}", markup=False)
        if dry_run:
            _list(grid, json_=json_)
            return
        assert out is not None
        _run(asked, grid, out, stop, tolerant=skip_invalid, json_=json_)


def _list(grid: Any, *, json_: bool) -> None:
    from tformer.workflows.sweep.cells import train_words

    cells = [
        {"cell": work.cell.name, "choices": dict(work.cell.variant.choices), "command": ["tformer", "train", *words]}
        for work in grid.works
        for words in [train_words(work)]
    ]
    if json_:
        left_out = [{"cell": result.cell, "message": result.message} for result in grid.invalid]
        emit_json({"cells": cells, "left_out": left_out})
        return
    for cell in cells:
        emit("\t".join([cell["cell"], *(f"{key}={value}" for key, value in cell["choices"].items())]))
    console.print(f"{len(cells)} trainings", markup=False)


def _run(plan: Plan, grid: Any, out: Path, stop: StopFlag, *, tolerant: bool, json_: bool) -> None:
    from tformer.cli.sweep_report import Reporter, show_table
    from tformer.workflows.sweep.report import document
    from tformer.workflows.sweep.run import run_sweep

    stop.be_patient()
    with Reporter() as reporter:
        table, results = run_sweep(
            plan,
            grid,
            out,
            observer=reporter,
            should_stop=stop.should_stop,
            interrupted=stop.interrupted,
            tolerant=tolerant,
        )
    if json_:
        emit_json(document(plan, table, results))
    else:
        show_table(table)
    console.print(f"{out}: table.md, table.csv, table.json, cells.csv and curves", markup=False)
    if not any(result.status == "done" for result in results):
        raise TformerError("every training failed", hint=f"see the logs in {out}/cells")
