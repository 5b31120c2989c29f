"""`tformer bench`: speed and memory on this machine, beside other libraries. One command for each workload."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tformer.bench.options import (
    AllOptions,
    AttentionOptions,
    ClassifyOptions,
    GenerateOptions,
    SpeedOptions,
    TrainOptions,
    TranslateOptions,
)
from tformer.cli.command import Group, examples, takes_options
from tformer.cli.process import StopFlag
from tformer.cli.report import emit, emit_json, emit_lines, print_table, show_notes

if TYPE_CHECKING:
    from tformer.bench.report import Table
    from tformer.bench.speed import Row

app = Group(
    help="Measure speed and memory on this machine.",
    examples=examples(
        "`tformer bench train --arch gpt --preset char --peer transformers`",
        "`tformer bench generate --arch gpt --preset small --batch-size 1,8`",
        "`tformer bench attention --out report`",
    ),
)


@app.command(
    epilog=examples(
        "`tformer bench train --arch gpt --preset char --peer transformers`",
        "`tformer bench train --arch gpt --preset small --batch-size 2 --out train.md`",
        "`tformer bench train --arch roberta --preset base --batch-size 4,8,16 --json`",
    )
)
@takes_options
def train(options: TrainOptions) -> None:
    """Time optimizer steps: forward, backward, clipping, update, on random ids, as `tformer train` does them.

    Reports tokens per second, milliseconds per step, peak memory, and the speed as a share of the machine's rate of
    matrix products, which is measured at the start of the same run with the model's shapes. With --peer another library
    is measured at the same work, in alternating rounds.
    """
    _measure_speed(options)


@app.command(
    epilog=examples(
        "`tformer bench generate --arch gpt --preset small --peer transformers`",
        "`tformer bench generate --arch gpt --preset small --quantize none,int8`",
        "`tformer bench generate --run runs/gpt-small-1 --new-tokens 64 --json`",
    )
)
@takes_options
def generate(options: GenerateOptions) -> None:
    """Time greedy decoding of random prompts: reading the prompts, and the same number of steps for each row.

    Reports tokens per second, milliseconds per step, and the speed as a share of the memory's read rate, which bounds a
    step of few rows: it reads every matrix once. With --peer another library is measured at the same work, in
    alternating rounds.
    """
    _measure_speed(options)


@app.command(
    epilog=examples(
        "`tformer bench translate --preset base --peer ctranslate2`",
        "`tformer bench translate --preset tiny --batch-size 64 --quantize none,int8`",
        "`tformer bench translate --run runs/transformer-base-1 --peer transformers`",
    )
)
@takes_options
def translate(options: TranslateOptions) -> None:
    """Time beam search on random sources, with the same number of new tokens for each, as in `tformer generate`.

    By default batches of 16, 32 and 64 sources are measured and the best is reported. ctranslate2 is measured in every
    compute type that it has on this machine, with the exported model; transformers with a Marian model of the same
    sizes.
    """
    _measure_speed(options)


@app.command(
    epilog=examples(
        "`tformer bench classify --arch bert --preset base --peer transformers`",
        "`tformer bench classify --arch bert --preset small --batch-size 16,32,64`",
        "`tformer bench classify --run runs/bert-classify-1 --texts 1000 --json`",
    )
)
@takes_options
def classify(options: ClassifyOptions) -> None:
    """Time the classification of short texts of varied lengths, as token ids in memory.

    As in `tformer classify`, texts are sorted by length and batches are formed by number of tokens. --batch-size
    applies to the other libraries, which take texts in the given order and pad each batch to its longest.
    """
    _measure_speed(options)


def _measure_speed(options: SpeedOptions) -> None:
    options.check()
    with StopFlag() as flag:
        import torch

        from tformer.bench.machine import environment_line
        from tformer.bench.report import FAIRNESS, document, lines, report, row_line, tables
        from tformer.bench.speed import resolve, run_speed
        from tformer.checkpoint.logs import describe_environment
        from tformer.support.files import require_writable, write_text

        bench, notes = resolve(options)
        if options.out is not None:
            require_writable(options.out, option="--out")
        line = environment_line(torch.device(bench.device), dtype=bench.precision)
        line = ", ".join([line, *(f"{name} {version}" for name, version in bench.peer_versions.items())])
        show_notes([*notes, line])
        torch.set_num_threads(1)  # this process only waits
        rows = run_speed(bench, on_row=lambda row: show_notes([row_line(row)]), should_stop=flag.should_stop)
        command = shlex.join(["tformer", *sys.argv[1:]])
        environment: dict[str, Any] = {
            "line": line,
            "peers": bench.peer_versions,
            **describe_environment(device=bench.device, data_fingerprint=None),
        }
        if options.out is not None:
            write_text(options.out, f"{report(bench, rows, line=line, command=command)}\n\n{FAIRNESS}\n")
    if options.as_json:
        emit_json({"command": command, "environment": environment, **document(bench, rows)})
    else:
        _show_tables(tables(bench, rows))
        emit("")
        emit_lines(lines(rows))
    if options.out is not None:
        show_notes([f"wrote {options.out}"])
    _require_one(rows)


@app.command(
    epilog=examples(
        "`tformer bench attention --out attention-costs`",
        "`tformer bench attention --arch gpt --preset small --peer transformers`",
        "`tformer bench attention --kinds sliding_window,linformer --lengths 512,2048`",
    )
)
@takes_options
def attention(options: AttentionOptions) -> None:
    """Time and memory of attention against the length, for each kind: forward and backward, without projections.

    Every kind is measured at every length in its own process. Reports the median time, the peak memory beyond queries,
    keys and values, the exponents with which both grow, the length from which a kind is faster than full attention, and
    the speed as a share of the machine's rates of products and memory reads, which are measured at the start of the
    same run. If a model is given, heads, kind, options and lengths are taken from it. A kind that runs out of memory or
    time is reported as such, and the others are still measured.
    """
    options.check()
    with StopFlag() as flag:
        import torch

        from tformer.bench.attention import resolve_attention, run_attention
        from tformer.bench.attention_report import document, lines, notes, settings_line, tables, write_report
        from tformer.bench.machine import environment_line
        from tformer.checkpoint.logs import describe_environment
        from tformer.support.files import require_writable_folder
        from tformer.support.formatting import binary_bytes, short_seconds

        bench, decided = resolve_attention(options)
        if options.out is not None:
            require_writable_folder(options.out)
        line = environment_line(torch.device(bench.device), dtype=bench.dtype)
        show_notes([*(f"note: {note}" for note in decided), f"{line}; {settings_line(bench)}"])
        torch.set_num_threads(1)  # this process only waits

        def show_row(row: Row, number: int, total: int) -> None:
            result = row.failed or f"{short_seconds(row.seconds)}, {binary_bytes(row.memory['peak_bytes'])}"
            show_notes([f"{number} of {total}  {row.entry.name} at {row.length:,}: {result}"])

        ceilings, rows = run_attention(bench, on_row=show_row, should_stop=flag.should_stop)
        described = describe_environment(device=bench.device, data_fingerprint=None)
        environment = {"line": line, "ceilings": ceilings, **described}
        if options.out is not None:
            write_report(bench, rows, options.out, environment=environment)
    show_notes(f"note: {note}" for note in notes(rows))
    if options.as_json:
        emit_json(document(bench, rows, environment=environment))
    else:
        _show_tables(tables(bench, rows))
        emit("")
        emit_lines(f"- {text}" for text in lines(bench, rows, ceilings))
    if options.out is not None:
        show_notes([f"wrote {options.out}"])
    _require_one(rows)


@app.command(
    name="all",
    epilog=examples(
        "`tformer bench all --out report.md`",
        "`tformer bench all --quick --out quick.md`",
        "`tformer bench all --device cuda --out gpu.md --json`",
    ),
)
@takes_options
def all_(options: AllOptions) -> None:
    """Run every benchmark of the README's table, beside the libraries that are installed, and write a report.

    Training, generation, translation and classification on a CPU, or training and decoding of larger models on a GPU.
    A measurement that fails is reported, and the others go on. The report names the machine, versions, date and the
    command behind each figure.
    """
    options.check()
    with StopFlag() as flag:
        import torch

        from tformer.bench.suite import cases_for, run_all
        from tformer.support.device import resolve_device
        from tformer.support.files import require_writable, write_text

        device = resolve_device(options.device)
        require_writable(options.out, option="--out")
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        report = run_all(
            cases_for(device),
            device,
            say=lambda line: show_notes([line]),
            should_stop=flag.should_stop,
            quick=options.quick,
            threads=torch.get_num_threads(),
        )
        write_text(options.out, report.markdown)
    if options.as_json:
        emit_json(report.document)
    else:
        emit(str(options.out))
    if report.nothing_measured:
        sys.exit(1)


def _show_tables(tables: Sequence[Table]) -> None:
    from tformer.bench.report import markdown

    for number, table in enumerate(tables):
        if number:
            emit("")
        print_table(table.headings, table.rows, title=table.title, markdown=markdown(table))


def _require_one(rows: Sequence[Row]) -> None:
    """End the command with exit code 1 when nothing was measured."""
    if all(row.failed is not None for row in rows):
        sys.exit(1)
