"""Tables of `tformer bench` on standard output."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tformer.cli.report import emit

if TYPE_CHECKING:
    from tformer.bench.report import Table


def show_tables(found: Sequence[Table]) -> None:
    """Tables on a terminal that has room for them; else Markdown."""
    from tformer.bench.report import markdown

    if not sys.stdout.isatty():
        emit("\n\n".join(map(markdown, found)))
        return
    from rich.console import Console
    from rich.table import Table as RichTable

    stdout = Console(highlight=False)
    for table in found:
        wide = RichTable(title=table.title, title_justify="left")
        for index, heading in enumerate(table.headings):
            wide.add_column(heading, justify="left" if index == 0 else "right")
        for row in table.rows:
            wide.add_row(*row)
        stdout.print(wide)
