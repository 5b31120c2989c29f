"""Sources of conversations: rows of jsonl and Parquet, in one of the formats that instructions come in.

messages            {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}, or as
                    ShareGPT has it {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}
prompt_completion   {"prompt": ..., "completion": ...}, each a text, or a list of messages; or as Alpaca has it
                    {"instruction": ..., "input": ..., "output": ...}, whose input may be missing or empty
text                {"text": ...}: no messages, all of it is learned
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tformer.data.sources.columns import LabelledLayout
from tformer.data.sources.files import Content, Piece, Source, SourceSpec, cut_pieces, locate
from tformer.data.sources.parquet import parquet_schema
from tformer.data.sources.reading import Reading
from tformer.data.sources.tables import Table, json_object, table_format, text_value, whole_characters
from tformer.support.errors import InputError
from tformer.support.formatting import shortened
from tformer.support.options import Errors

FormatName = Literal["messages", "prompt_completion", "text"]
FORMATS: dict[FormatName, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages",), ("conversations",)),
    "prompt_completion": (("prompt", "completion"), ("instruction", "output")),
    "text": (("text",),),
}
"""The keys that a row of each format must have."""
SENDERS = {"human": "user", "gpt": "assistant"}
ROWS = (".jsonl", ".parquet")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a row (none: a text), all of their text, and the row's place."""

    messages: list[dict[str, Any]]
    text: str
    place: str


def read_record(raw: Any, *, place: str, errors: Errors) -> dict[str, Any]:
    """A row of jsonl or Parquet. Raises InputError for no object, and for half a character unless it is replaced."""
    record: dict[str, Any] = json_object(raw, place=place) if isinstance(raw, str) else raw
    if isinstance(raw, str) and "\\ud" in raw.lower():
        record = json.loads(whole_characters(json.dumps(record, ensure_ascii=False), place=place, errors=errors))
    return record


def turns(role: str, value: Any) -> list[Any]:
    """A text as a message, or messages as they are."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def checked_messages(given: Sequence[Any], place: str) -> list[dict[str, Any]]:
    """Each as of `_checked_message`."""
    return [_checked_message(each, f"{place}: message {number}") for number, each in enumerate(given, 1)]


def _checked_message(message: Any, place: str) -> dict[str, Any]:
    """A message without keys of null, which Parquet has where others have a value. InputError for no message."""
    if isinstance(message, dict) and "from" in message:
        message = {"role": SENDERS.get(str(message["from"]), message["from"]), "content": message.get("value")}
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InputError(f"{place}: expected an object with role and content, found {shortened(repr(message), 40)}")
    content = message.get("content")
    if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
        raise InputError(f"{place}: expected content as text, found {type(content).__name__}")
    return {key: value for key, value in message.items() if value is not None}


@dataclass(frozen=True)
class ConversationTable(Table):
    """A file of conversations. conversations: their format; None: of each row the first whose keys it has."""

    conversations: FormatName | None = None

    def row(self, values: list[Any], **facts: Any) -> Any:
        messages, text = values
        return Conversation(messages, text, facts["place"])

    def columns_key(self) -> str:
        return str(self.conversations)

    def documents(self) -> Iterator[Piece]:
        """The text of each conversation, on which a tokenizer is trained."""
        for row in self.rows():
            yield from cut_pieces(row.text)

    def _parser(self) -> Callable[[str, Any], tuple[list[Any], Any]]:
        known = [keys for name, forms in FORMATS.items() for keys in forms if self.conversations in (None, name)]

        def parse(place: str, raw: Any) -> tuple[list[Any], Any]:
            record = read_record(raw, place=place, errors=self.content.errors)
            keys = next((keys for keys in known if all(record.get(key) is not None for key in keys)), None)
            if keys is None:
                expected = ", or ".join(" and ".join(keys) for keys in known)
                found = ", ".join(key for key, value in record.items() if value is not None) or "none"
                raise InputError(f"{place}: expected the keys {expected}, found {found}")
            values = [record[key] for key in keys]
            if keys == ("text",):
                messages, texts = [], values
            else:
                if len(keys) == 1 and not isinstance(values[0], list):
                    found = type(values[0]).__name__
                    raise InputError(f"{place}: '{keys[0]}' should be a list of messages, found {found}")
                if keys[0] == "instruction" and record.get("input"):
                    asked = [text_value(record[key], key, place=place, errors="strict") for key in (keys[0], "input")]
                    values[0] = "\n".join(filter(None, asked))
                given = [
                    turn
                    for role, each in zip(("user", "assistant"), values, strict=False)
                    for turn in turns(role, each)
                ]
                messages = checked_messages(given, place)
                if all(message["role"] != "assistant" for message in messages):
                    raise InputError(f"{place}: no message of the role assistant, so there is no answer to learn")
                texts = [message.get("content", "") for message in messages]
            text = "\n".join(text_value(text, "content", place=place, errors="strict") for text in texts)
            if not text.strip():
                raise InputError(f"{place}: no text")
            return [messages, text], None

        return parse


class ConversationSource(Source):
    """An opened source of conversations."""

    def rows(self) -> Iterator[Any]:
        """Every row in order. Raises InputError with file and line of a wrong row."""
        return self._items("rows")

    def documents(self) -> Iterator[Piece]:
        return self._items("documents")


def open_conversations(
    specs: Sequence[SourceSpec],
    *,
    format: FormatName | None = None,
    kind: type[ConversationTable] = ConversationTable,
    reading: Reading = Reading(),
) -> list[ConversationSource]:
    """One source per entry; format: of a `ConversationTable`, kind: of its tables.

    Raises InputError for what cannot be read, and a file that is neither jsonl nor Parquet.
    """
    sources = []
    for spec in specs:
        found = locate(spec.path, is_known=lambda path: table_format(path) in ROWS, known=", ".join(ROWS))
        parts = tuple(_table(content, format, kind) for content in found.contents(reading))
        sources.append(ConversationSource(name=found.name, parts=parts, weight=spec.weight, notes=found.notes))
    return sources


def _table(content: Content, name: FormatName | None, kind: type[ConversationTable]) -> ConversationTable:
    rows = ".jsonl" if content.path is None else table_format(content.path) or ""
    if rows not in ROWS:
        raise InputError(f"{content.name}: conversations are read from {' and '.join(ROWS)} files")
    names = tuple(parquet_schema(content.file).names) if rows == ".parquet" else None
    facts: dict[str, Any] = {"layout": LabelledLayout(), "names": names, "width": 0, "columns": {}}
    return kind(content, format=rows, guessed=False, keeps_records=True, conversations=name, **facts)
