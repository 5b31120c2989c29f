"""`tformer bench`: how fast and how large things are on this machine."""

from __future__ import annotations

import typer

from tformer.cli import (
    bench_all,
    bench_attention,
    bench_classify,
    bench_generate,
    bench_quality,
    bench_tokenize,
    bench_train,
    bench_translate,
)
from tformer.cli.command import examples

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
app.command(epilog=bench_attention.EPILOG)(bench_attention.attention)
app.command(epilog=bench_quality.EPILOG)(bench_quality.quality)
app.command(name="all", epilog=bench_all.EPILOG)(bench_all.all_)
