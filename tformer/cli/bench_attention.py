"""`tformer bench attention`: what each kind of attention costs at which length."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tformer.cli.bench_options import (
    Arch,
    AsJson,
    Compile,
    Config,
    Device,
    Peers,
    Preset,
    Run,
    require_positive,
)
from tformer.cli.bench_report import show_tables
from tformer.cli.report import (
    StopFlag,
    console,
    emit,
    emit_json,
    examples,
)
from tformer.errors import InputError, did_you_mean, visible

if TYPE_CHECKING:
    from tformer.bench.attention import AttentionBench, Cell

WHAT, HOW, RESULT = "What is measured", "How", "Result"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HEADS, HEAD_DIM, DTYPE = 4, 64, "fp32"
MAX_LENGTH = 2**24

EPILOG = examples(
    "`tformer bench attention --out attention-costs`",
    "`tformer bench attention --arch gpt --preset small --precision bf16 --peer transformers`",
    "`tformer bench attention --kinds sliding_window,linformer --lengths 512,2048 --set linformer.rank=256 --json`",
)


def attention(
    arch: Arch = None,
    preset: Preset = None,
    config: Config = None,
    run: Run = None,
    kinds: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Attention kinds, and dense-masked: full attention with a T x T mask. Default: all, or the model's. "
            "full is always measured.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="T,T,...",
            help=f"Numbers of positions. Default: {','.join(map(str, LENGTHS))}, or as far as the model reads.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences at once.", rich_help_panel=WHAT)] = 1,
    heads: Annotated[
        int | None, typer.Option(help=f"Attention heads. Default: {HEADS}, or the model's.", rich_help_panel=WHAT)
    ] = None,
    head_dim: Annotated[
        int | None, typer.Option(help=f"Size of a head. Default: {HEAD_DIM}, or the model's.", rich_help_panel=WHAT)
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KIND.OPTION=VALUE",
            help="An option of a kind, as in a recipe: sliding_window.window=256; beside a model, also any key of its "
            "recipe. May be repeated.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    causal: Annotated[
        bool,
        typer.Option("--causal", help="No position sees a later one; always so in decoders.", rich_help_panel=WHAT),
    ] = False,
    peer: Peers = None,
    precision: Annotated[
        str | None,
        typer.Option("--precision", metavar="fp32|bf16|fp16", help=f"Default: {DTYPE}.", rich_help_panel=HOW),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="fp32|bf16|fp16", help="The same as --precision.", rich_help_panel=HOW)
    ] = None,
    compile_: Compile = False,
    device: Device = "auto",
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
    as_json: AsJson = False,
) -> None:
    """Time and memory of attention against the length, for each kind: forward and backward, projections not included.

    Every kind is measured at every length in a process of its own. Reported are the median time, the peak of memory
    beyond queries, keys and values, the exponents with which both grow, the length from which on a kind is faster
    than full attention, and the share of what the machine multiplies and reads at most, measured at the start of the
    same run. With a model named, heads, kind, options and lengths are its own. What runs out of memory or time is
    said, and the rest goes on.
    """
    require_positive(batch_size=batch_size, heads=heads, head_dim=head_dim, repeats=repeats, max_seconds=max_seconds)
    named = None if kinds is None else [kind.strip() for kind in kinds.split(",") if kind.strip()]
    sizes = None if lengths is None else _lengths(lengths)
    has_model = any(value is not None for value in (arch, preset, config, run))
    with StopFlag() as flag:
        import torch

        from tformer.bench.attention import (
            AttentionBench,
            attention_of,
            bench_attention,
            check,
            choose_kinds,
            measure_attention_ceilings,
            read_settings,
            split_settings,
        )
        from tformer.bench.attention_peers import choose_attention_peers
        from tformer.bench.attention_report import document, notes, settings_line, write_report
        from tformer.bench.machine import environment_line
        from tformer.bench.speed import recipe_of
        from tformer.checkpoint.environment import describe_environment
        from tformer.checkpoint.probe import require_writable
        from tformer.device import resolve_device

        format_ = _number_format(precision, dtype)
        where = resolve_device(device)
        of_kinds, of_recipe = split_settings(set_ or ()) if has_model else (list(set_ or ()), [])
        own, model = None, None
        if has_model:
            recipe, model = recipe_of(
                arch=arch, preset=preset, config=config, run=run, sets=of_recipe, device=where, bench="attention"
            )
            own = attention_of(recipe)
            named = [own.kind] if named is None else named
        causal = causal or (own is not None and own.causal)
        chosen, told = choose_kinds(named, causal=causal)
        peers = choose_attention_peers(peer or ())
        options = read_settings(of_kinds, chosen)
        many = own is not None and heads is None and own.kv_heads != own.heads
        bench = AttentionBench(
            kinds=(*chosen, *peers),
            lengths=sizes or (LENGTHS if own is None else own.lengths(LENGTHS)),
            options={**(options if own is None else own.options_beside(options)), **{name: {} for name in peers}},
            batch_size=batch_size,
            heads=heads or (HEADS if own is None else own.heads),
            head_dim=head_dim or (HEAD_DIM if own is None else own.head_dim),
            kv_heads=own.kv_heads if own is not None and many else None,
            causal=causal,
            dtype=format_,
            device=str(where),
            repeats=repeats,
            max_seconds=max_seconds,
            model=model,
            compile=compile_,
        )
        check(bench)
        if out is not None:
            require_writable(out)
        line = environment_line(where, dtype=format_)
        for note in [*told, *(() if own is None else own.notes)]:
            console.print(f"note: {note}", markup=False)
        console.print(visible(f"{line}; {settings_line(bench)}"), markup=False)
        torch.set_num_threads(1)  # this process only waits
        ceilings = measure_attention_ceilings(bench, should_stop=flag.should_stop)
        cells = None
        if ceilings is not None:
            cells = bench_attention(bench, measured=_tell, should_stop=flag.should_stop)
        if cells is None:
            raise flag.interrupted("interrupted: nothing was written")
        described = describe_environment(device=str(where), data_fingerprint=None)
        environment = {"line": line, "ceilings": ceilings, **described}
        if out is not None:
            write_report(bench, cells, out, environment=environment)
    for note in notes(bench, cells):
        console.print(f"note: {visible(note)}", markup=False)
    if as_json:
        emit_json(document(bench, cells, environment=environment))
    else:
        _show(bench, cells, ceilings)
    if out is not None:
        console.print(f"written to {out}", markup=False)
    if all(cell.failed is not None for cell in cells):
        raise typer.Exit(1)


def _number_format(precision: str | None, dtype: str | None) -> str:
    from tformer.device import DTYPES

    if precision is not None and dtype is not None:
        raise InputError("--precision and --dtype are the same", hint="leave --dtype out")
    option, found = ("--dtype", dtype) if precision is None else ("--precision", precision)
    if found is not None and found not in DTYPES:
        raise InputError(f"{option}: found '{found}'", hint=did_you_mean(found, DTYPES))
    return found or DTYPE


def _lengths(text: str) -> tuple[int, ...]:
    """Ascending, each once."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not word.isdecimal() or not 1 <= int(word) <= MAX_LENGTH:
            raise InputError(f"--lengths: found '{word}', expected whole numbers from 1 to {MAX_LENGTH:,}")
    if not words:
        raise InputError("--lengths: found none", hint=f"--lengths {','.join(map(str, LENGTHS))}")
    return tuple(sorted(set(map(int, words))))


def _show(bench: AttentionBench, cells: list[Cell], ceilings: dict[str, Any] | None) -> None:
    """Tables, and the lines under them."""
    from tformer.bench.attention_report import lines, tables

    show_tables(tables(bench, cells))
    emit("")
    for told in lines(bench, cells, ceilings):
        emit(f"- {visible(told)}")


def _tell(cell: Cell, number: int, total: int) -> None:
    """A line for each cell as it ends."""
    from tformer.formatting import binary_bytes, short_seconds

    if cell.median is None or cell.peak_bytes is None:
        told = str(cell.failed)
    else:
        told = f"{short_seconds(cell.median)}, {binary_bytes(cell.peak_bytes)}"
    console.print(f"{number} of {total}  {cell.kind} at {cell.length:,}: {visible(told)}", markup=False)
