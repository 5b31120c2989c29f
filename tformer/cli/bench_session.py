"""One bench from its request to its result: what every command of `tformer bench` but `attention` does."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tformer.cli.bench_report import show_tables
from tformer.cli.process import StopFlag
from tformer.cli.report import console, emit, emit_json
from tformer.errors import InputError, visible

if TYPE_CHECKING:
    from tformer.bench.speed import Row


def run_bench(asked: Mapping[str, Any], *, out: Path | None, as_json: bool) -> None:
    """Measure and tell. asked: the fields of a `SpeedRequest`."""
    if out is not None and out.is_dir():
        raise InputError(f"--out: {out} is a folder, expected a file")
    with StopFlag() as flag:
        import torch

        from tformer.bench.machine import environment_line
        from tformer.bench.report import (
            FAIRNESS,
            document,
            lines,
            report,
            tables,
        )
        from tformer.bench.speed import (
            SpeedRequest,
            resolve,
            run_speed,
        )
        from tformer.checkpoint.files import require_writable, write_text
        from tformer.checkpoint.logs import describe_environment
        from tformer.checkpoint.run import make_folders

        bench, decided = resolve(SpeedRequest(**asked))
        if out is not None:
            require_writable(out.parent)
        versions = bench.peer_versions
        line = environment_line(torch.device(bench.device), dtype=bench.precision or "text")
        line = ", ".join([line, *(f"{name} {version}" for name, version in versions.items())])
        for note in [*decided, line]:
            console.print(visible(note), markup=False)
        torch.set_num_threads(1)  # this process only waits
        rows = run_speed(bench, on_row=_tell, should_stop=flag.should_stop)
        if rows is None:
            raise flag.interrupted("interrupted: nothing was written")
        command = shlex.join(["tformer", *sys.argv[1:]])
        environment: dict[str, Any] = {
            "line": line,
            "peers": versions,
            **describe_environment(device=bench.device, data_fingerprint=None),
        }
        if out is not None:
            make_folders(out.parent)
            write_text(out, f"{report(bench, rows, line=line, command=command)}\n\n{FAIRNESS}\n")
    if as_json:
        emit_json(document(bench, rows, environment=environment, command=command))
    else:
        show_tables(tables(bench, rows))
        emit("")
        for told in lines(rows):
            emit(visible(told))
    if out is not None:
        console.print(f"written to {out}", markup=False)
    if all(row.failed is not None for row in rows):
        raise typer.Exit(1)


def _tell(row: Row) -> None:
    """A line for each row as it is known."""
    told = row.failed if row.failed is not None else f"{row.tokens_per_second:,.0f} tokens/s"
    console.print(f"{row.entry.label}, batch {row.batch_size}: {visible(told)}", markup=False)
