"""Files whose rows a function reads: of tagged words, and of questions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tformer.data.sources.files import Content, format_ending, locate
from tformer.data.sources.labelled import LabelledSource
from tformer.data.sources.reading import Reading
from tformer.data.sources.tables import LabelledRow, json_objects


@dataclass(frozen=True)
class RowFile:
    """One file of a source.

    Attributes:
        read: reads its rows.
        key: identifies the options on which the rows depend.
        keys: the keys of jsonl that are used.
    """

    content: Content
    read: Callable[[Content], Iterator[LabelledRow]]
    key: str
    keys: Collection[str]

    @property
    def contents(self) -> tuple[Content, ...]:
        return (self.content,)

    def fingerprint(self) -> str:
        return f"{self.key}:{self.content.decoding}:{self.content.fingerprint()}"

    def rows(self) -> Iterator[LabelledRow]:
        yield from self.read(self.content)

    def records(self) -> Iterator[tuple[dict[str, Any], Collection[str]]]:
        """As `Table.records`."""
        for _, row in json_objects(self.content) if ending_of(self.content) == ".jsonl" else ():
            yield row, self.keys


def open_files(
    path: str,
    read: Callable[[Content], Iterator[LabelledRow]],
    *,
    endings: Sequence[str],
    key: str,
    keys: Collection[str],
    reading: Reading,
    accepts: Sequence[str],
    has_text2: bool = False,
) -> LabelledSource:
    """Open the files behind a path. endings: of the files taken from a folder. accepts: as in `decode_text`."""
    found = locate(path, is_known=lambda place: format_ending(place) in endings, known=", ".join(endings))
    parts = tuple(RowFile(content, read, key, keys) for content in found.contents(reading, accepts=accepts))
    return LabelledSource(name=found.name, parts=parts, notes=found.notes, has_text2=has_text2)


def ending_of(content: Content) -> str:
    """The ending of a content's file; "" for a stream."""
    return "" if content.path is None else format_ending(content.path)
