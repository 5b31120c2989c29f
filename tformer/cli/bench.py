"""`tformer bench`: speed and memory on this machine. One command for each workload."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from tformer.bench.options import BenchGenerateOptions, BenchTrainOptions, BenchTranslateOptions, SpeedOptions
from tformer.cli.command import CommandGroup, examples, takes_options
from tformer.cli.process import StopFlag
from tformer.cli.report import emit, emit_json, emit_lines, print_table, show_notes

app = CommandGroup(
    help="Measure speed and memory on this machine.",
    examples=examples(
        "`tformer bench train --arch gpt --preset char`",
        "`tformer bench generate --arch gpt --preset small --batch-size 1,8`",
        "`tformer bench translate --preset base --quantize none,int8`",
    ),
)


@app.command(
    epilog=examples(
        "`tformer bench train --arch gpt --preset char`",
        "`tformer bench train --arch gpt --preset small --batch-size 2 --out train.md`",
        "`tformer bench train --arch roberta --preset base --batch-size 4,8,16 --json`",
    )
)
@takes_options
def train(options: BenchTrainOptions) -> None:
    """Time optimizer steps: forward, backward, clipping, update, on random ids, as `tformer train` does them.

    Reports tokens per second, milliseconds per step, peak memory, and the speed as a share of the machine's rate of
    matrix products, which is measured at the start of the same run with the model's shapes.
    """
    _measure_speed(options)


@app.command(
    epilog=examples(
        "`tformer bench generate --arch gpt --preset small --quantize none,int8`",
        "`tformer bench generate --arch llama --preset tiny --batch-size 1,8 --threads 1`",
        "`tformer bench generate --run runs/gpt-small-1 --new-tokens 64 --json`",
    )
)
@takes_options
def generate(options: BenchGenerateOptions) -> None:
    """Time greedy decoding of random prompts: reading the prompts, and the same number of steps for each row.

    Reports tokens per second, milliseconds per step, and the speed as a share of the memory's read rate, which bounds a
    step of few rows: it reads every matrix once.
    """
    _measure_speed(options)


@app.command(
    epilog=examples(
        "`tformer bench translate --preset base --beam-size 5`",
        "`tformer bench translate --preset tiny --batch-size 64 --quantize none,int8`",
        "`tformer bench translate --run runs/transformer-base-1 --json`",
    )
)
@takes_options
def translate(options: BenchTranslateOptions) -> None:
    """Time beam search on random sources, with the same number of new tokens for each, as in `tformer generate`.

    By default batches of 16, 32 and 64 sources are measured and the best is reported.
    """
    _measure_speed(options)


def _measure_speed(options: SpeedOptions) -> None:
    with StopFlag() as flag:
        import torch

        from tformer.bench.machine import environment_line
        from tformer.bench.report import document, lines, markdown, report, row_line, tables
        from tformer.bench.speed import resolve, run_speed
        from tformer.checkpoint.logs import describe_environment
        from tformer.support.files import require_writable, write_text

        bench, notes = resolve(options)
        if options.out is not None:
            require_writable(options.out, option="--out")
        line = environment_line(torch.device(bench.device), dtype=bench.precision)
        show_notes([*notes, line])
        torch.set_num_threads(1)  # this process only waits
        rows = run_speed(bench, on_row=lambda row: show_notes([row_line(row)]), should_stop=flag.should_stop)
        command = shlex.join(["tformer", *sys.argv[1:]])
        environment: dict[str, Any] = {
            "line": line,
            **describe_environment(device=bench.device, data_fingerprint=None),
        }
        if options.out is not None:
            write_text(options.out, f"{report(bench, rows, line=line, command=command)}\n")
    if options.as_json:
        emit_json({"command": command, "environment": environment, **document(bench, rows)})
    else:
        for table in tables(bench, rows):
            print_table(table.headings, table.rows, title=table.title, markdown=markdown(table))
            emit("")
        emit_lines(lines(rows))
    if options.out is not None:
        show_notes([f"wrote {options.out}"])
    if all(row.failed is not None for row in rows):  # nothing was measured
        sys.exit(1)
