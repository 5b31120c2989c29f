"""Which columns of a table hold what: options of the commands that measure a model on labelled rows."""

from __future__ import annotations

from typing import Annotated

import typer

DATA = "Data"

TextColumn = Annotated[
    str | None,
    typer.Option(
        "--text-column", metavar="C", help="Of csv, tsv, jsonl and parquet: name or number.", rich_help_panel=DATA
    ),
]
Text2Column = Annotated[
    str | None, typer.Option("--text2-column", metavar="C", help="The second text.", rich_help_panel=DATA)
]
LabelColumn = Annotated[
    str | None, typer.Option("--label-column", metavar="C", help="The label.", rich_help_panel=DATA)
]
