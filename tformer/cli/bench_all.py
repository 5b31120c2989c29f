"""`tformer bench all`: the whole report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tformer.cli.bench_options import HOW, RESULT, WORK, AsJson, Device, Threads, require_threads
from tformer.cli.bench_quality import tell_seed
from tformer.cli.command import examples
from tformer.cli.process import StopFlag
from tformer.cli.report import console, emit, emit_json
from tformer.errors import InputError, visible

if TYPE_CHECKING:
    from tformer.bench.quality import QualityBench
    from tformer.bench.speed import Row

EPILOG = examples(
    "`tformer bench all --out report.md`",
    "`tformer bench all --quick --out quick.md`",
    "`tformer bench all --device cuda --data train.txt --valid val.txt --out gpu.md --json`",
)


def all_(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer batch sizes, rounds and texts.", rich_help_panel=HOW)
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="PATH",
            help="Text by which time to quality is measured too; the targets are those of tinyshakespeare.",
            rich_help_panel=WORK,
        ),
    ] = None,
    valid: Annotated[
        str | None,
        typer.Option("--valid", metavar="PATH", help="Its validation text, needed with --data.", rich_help_panel=WORK),
    ] = None,
    threads: Threads = None,
    device: Device = "auto",
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE.md", help="Where the report goes.", rich_help_panel=RESULT)
    ] = Path("report.md"),
    as_json: AsJson = False,
) -> None:
    """Measure everything that the README's table has, beside the libraries that are installed, and write a report.

    Training, generation, translation and classification on a CPU, or training and decoding of larger models on a GPU;
    with --data and --valid also the seconds of training to a validation loss, which `bench quality` measures.
    What cannot be measured is said, and the rest goes on. The report has the machine, versions, the date and the
    command of each figure.
    """
    require_threads(threads)
    if out.is_dir():
        raise InputError(f"--out: {out} is a folder, expected a file")
    if (data is None) != (valid is None):
        given, missing = ("--data", "--valid") if valid is None else ("--valid", "--data")
        raise InputError(f"{given}: found without {missing}", hint="time to quality needs both")
    with StopFlag() as flag:
        import torch

        from tformer.bench.quality import check
        from tformer.bench.suite import (
            Progress,
            cases_for,
            quality_for,
            run_all,
        )
        from tformer.checkpoint.files import require_writable, write_text
        from tformer.checkpoint.run import make_folders
        from tformer.device import resolve_device

        where = resolve_device(device)
        require_writable(out.parent)
        if threads is not None:
            torch.set_num_threads(threads)
        cases = cases_for(where, quick=quick, threads=torch.get_num_threads())
        qualities: tuple[QualityBench, ...] = ()
        if data is not None and valid is not None:
            qualities = quality_for(where, data=data, valid=valid, quick=quick, threads=torch.get_num_threads())
        for quality in qualities:
            check(quality)
        progress = Progress(on_case=_tell_case, on_row=_tell_row, on_note=_tell_note, on_seed=tell_seed)
        report = run_all(cases, where, progress=progress, should_stop=flag.should_stop, qualities=qualities)
        if report is None:
            raise flag.interrupted("interrupted: nothing was written")
        make_folders(out.parent)
        write_text(out, report.markdown)
    if as_json:
        emit_json(report.document)
    else:
        emit(str(out))
    if report.nothing_measured:
        raise typer.Exit(1)


def _tell_case(title: str, command: str, number: int, total: int) -> None:
    console.print(visible(f"{number} of {total}  {title}: {command}"), markup=False)


def _tell_row(row: Row) -> None:
    told = row.failed if row.failed is not None else f"{row.tokens_per_second:,.0f} tokens/s"
    console.print(f"  {row.entry.label}, batch {row.batch_size}: {visible(told)}", markup=False)


def _tell_note(note: str) -> None:
    console.print(f"  note: {visible(note)}", markup=False)
