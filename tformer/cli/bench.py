"""`tformer bench`: how fast and how large things are on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tformer.cli import bench_all, bench_classify, bench_generate, bench_tokenize, bench_train, bench_translate
from tformer.cli.bench_options import require_positive
from tformer.cli.bench_report import show_tables
from tformer.cli.common import StopFlag, console, emit_json, examples
from tformer.errors import InputError, visible

if TYPE_CHECKING:
    from tformer.bench.attention import Cell

WHAT, HOW, RESULT = "What is measured", "How", "Result"
LENGTHS = "512,1024,2048,4096,8192,16384"
MAX_LENGTH = 2**24

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Measure speed and memory on this machine.",
    epilog=examples(
        "`tformer bench train --arch gpt --preset char --peer transformers`",
        "`tformer bench generate --arch gpt --preset small --batch-size 1,8`",
        "`tformer bench attention --out report`",
    ),
)

app.command(epilog=bench_train.EPILOG)(bench_train.train)
app.command(epilog=bench_generate.EPILOG)(bench_generate.generate)
app.command(epilog=bench_translate.EPILOG)(bench_translate.translate)
app.command(epilog=bench_classify.EPILOG)(bench_classify.classify)
app.command(epilog=bench_tokenize.EPILOG)(bench_tokenize.tokenize)
app.command(name="all", epilog=bench_all.EPILOG)(bench_all.all_)


@app.command(
    epilog=examples(
        "`tformer bench attention --out attention-costs`",
        "`tformer bench attention --kinds sliding_window,bigbird --lengths 512,2048,8192 --causal`",
        "`tformer bench attention --kinds linformer --set linformer.rank=256 --dtype bf16 --json`",
    )
)
def attention(
    kinds: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Attention kinds, and dense-masked: full attention with a T x T mask. Default: all. "
            "full is always measured.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    lengths: Annotated[
        str, typer.Option(metavar="T,T,...", help="Numbers of positions.", rich_help_panel=WHAT)
    ] = LENGTHS,
    batch_size: Annotated[int, typer.Option(help="Sequences at once.", rich_help_panel=WHAT)] = 1,
    heads: Annotated[int, typer.Option(help="Attention heads.", rich_help_panel=WHAT)] = 4,
    head_dim: Annotated[int, typer.Option(help="Size of a head.", rich_help_panel=WHAT)] = 64,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KIND.OPTION=VALUE",
            help="An option of a kind, as in a recipe: sliding_window.window=256; may be repeated.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="No position sees a later one.", rich_help_panel=WHAT)
    ] = False,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.", rich_help_panel=HOW)] = "fp32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda[:i].", rich_help_panel=HOW)] = "auto",
    repeats: Annotated[
        int, typer.Option(help="Timed repetitions; quick ones go on for half a second.", rich_help_panel=HOW)
    ] = 10,
    max_seconds: Annotated[
        float, typer.Option(help="Limit for one kind at one length, starting Python included.", rich_help_panel=HOW)
    ] = 120.0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A folder for table.md, table.csv, table.json, time.svg and memory.svg; files of these names are "
            "replaced.",
            rich_help_panel=RESULT,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output.", rich_help_panel=RESULT)
    ] = False,
) -> None:
    """Time and memory of attention against the length, for each kind: forward and backward, projections not included.

    Every kind is measured at every length in a process of its own. Reported are the median time, the peak of memory
    beyond queries, keys and values, the exponents with which both grow, and the length from which on a kind is faster
    than full attention. What runs out of memory or time is said, and the rest goes on.
    """
    named = None if kinds is None else [kind.strip() for kind in kinds.split(",") if kind.strip()]
    sizes = _lengths(lengths)
    require_positive(batch_size=batch_size, heads=heads, head_dim=head_dim, repeats=repeats, max_seconds=max_seconds)
    with StopFlag() as flag:
        import torch

        from tformer.bench.attention import AttentionBench, bench_attention, check
        from tformer.bench.attention_options import choose_kinds, read_settings
        from tformer.bench.attention_report import document, notes, settings_line, tables, write_report
        from tformer.bench.environment import environment_line
        from tformer.checkpoint.environment import describe_environment
        from tformer.checkpoint.probe import require_writable
        from tformer.errors import did_you_mean
        from tformer.nn.hardware import DTYPES
        from tformer.training.precision import resolve_device

        if dtype not in DTYPES:
            raise InputError(f"--dtype: found '{dtype}'", hint=did_you_mean(dtype, DTYPES))
        chosen, told = choose_kinds(named, causal=causal)
        where = resolve_device(device)
        bench = AttentionBench(
            kinds=tuple(chosen),
            lengths=sizes,
            options=read_settings(set_ or (), chosen),
            batch_size=batch_size,
            heads=heads,
            head_dim=head_dim,
            causal=causal,
            dtype=dtype,
            device=str(where),
            repeats=repeats,
            max_seconds=max_seconds,
        )
        check(bench)
        if out is not None:
            require_writable(out)
        line = environment_line(where, dtype=dtype)
        for note in told:
            console.print(f"note: {note}", markup=False)
        console.print(f"{line}; {settings_line(bench)}", markup=False)
        torch.set_num_threads(1)  # this process only waits
        cells = bench_attention(bench, measured=_tell, should_stop=flag.should_stop)
        if cells is None:
            raise flag.interrupted("interrupted: nothing was written")
        environment = {"line": line, **describe_environment(device=str(where), data_fingerprint=None)}
        if out is not None:
            write_report(bench, cells, out, environment=environment)
    for note in notes(bench, cells):
        console.print(f"note: {visible(note)}", markup=False)
    if as_json:
        emit_json(document(bench, cells, environment=environment))
    else:
        show_tables(tables(bench, cells))
    if out is not None:
        console.print(f"written to {out}", markup=False)
    if all(cell.failed is not None for cell in cells):
        raise typer.Exit(1)


def _lengths(text: str) -> tuple[int, ...]:
    """Ascending, each once."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not word.isdecimal() or not 1 <= int(word) <= MAX_LENGTH:
            raise InputError(f"--lengths: found '{word}', expected whole numbers from 1 to {MAX_LENGTH:,}")
    if not words:
        raise InputError("--lengths: found none", hint=f"--lengths {LENGTHS}")
    return tuple(sorted(set(map(int, words))))


def _tell(cell: Cell, number: int, total: int) -> None:
    """A line for each cell as it ends."""
    from tformer.bench.table import show_bytes, show_seconds

    if cell.median is None or cell.peak_bytes is None:
        told = str(cell.failed)
    else:
        told = f"{show_seconds(cell.median)}, {show_bytes(cell.peak_bytes)}"
    console.print(f"{number} of {total}  {cell.kind} at {cell.length:,}: {visible(told)}", markup=False)
