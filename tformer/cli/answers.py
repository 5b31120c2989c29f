"""Answers of `generate` and `classify`: beside the columns of the table that was read, or one a line."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tformer.cli.report import DataOutput, console
from tformer.data.sources.labelled import LabelledSource
from tformer.data.sources.tables import LabelledRow
from tformer.decoding.answer_table import AnswerTable, Kind, output_format
from tformer.support.formatting import short_seconds


class Answers:
    """The answers to the inputs of one command, and their number.

    Attributes:
        done: the inputs that this process has answered.
        takes_cells: whether the answers, in `written`, go into the columns of a table: `write_cells` takes them.
    """

    def __init__(
        self,
        output: DataOutput,
        options: Any,
        source: LabelledSource | None,
        *,
        inputs: Sequence[str],
        columns: Sequence[tuple[str, Kind]],
        separator: str = "|",
    ) -> None:
        """Answers of one input, or to `source`, a table.

        inputs: names of the columns of an input in a table, where none was read; columns: those of an answer;
        separator: between the labels of a list.
        """
        self._output, self._inputs, self._source = output, len(inputs), source
        self._tables = [] if source is None else source.tables
        format = output_format(options.output, self._tables[0].format if self._tables else None, options.as_json)
        self.takes_cells = False
        brought: list[tuple[str, Kind]] = [] if self._tables else [(name, "text") for name in inputs]
        table = AnswerTable(format or "", [*brought, *columns], self._tables, separator)
        self._table = None if format is None else table
        self.done, self._began = 0, time.monotonic()

    def rows(self) -> Iterator[LabelledRow] | None:
        """The rows to answer, in order; None: no table was read."""
        if self._source is None:
            return None
        if self._table is None or not self._output.leads:
            return self._source.rows()
        return self._table.reading(self._source.keeping_records().rows())

    @contextmanager
    def written(self, unit: str) -> Iterator[None]:
        """A context in which answers are written. At its end a line says how many and how fast; not if `unit` is ""."""
        self.takes_cells = self._table is not None and self._table.format != "rows"
        with self._output.answering(self._table):
            yield
        count, seconds = self._output.total(self.done), time.monotonic() - self._began
        if unit:
            rate = count / max(seconds, 1e-9)
            console.print(f"{count:,} {unit} in {short_seconds(seconds)}, {rate:,.1f} {unit}/s", style="dim")

    def write_cells(self, answers: Iterable[tuple[Sequence[str], list[Any]]]) -> None:
        """Write answers in the order of the columns, each after its input."""
        self._output.documents(cells if self._tables else [*given[: self._inputs], *cells] for given, cells in answers)
