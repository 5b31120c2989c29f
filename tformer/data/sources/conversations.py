"""Sources of conversations: rows of jsonl and Parquet, in one of the formats that instructions come in.

messages            {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}, or as
                    ShareGPT has it {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}
prompt_completion   {"prompt": ..., "completion": ...}, each a text, or a list of messages; or as Alpaca has it
                    {"instruction": ..., "input": ..., "output": ...}, whose input may be missing or empty
text                {"text": ...}: no messages, all of it is learned

Before the messages of a row stand those of its keys `system` (a text) and `history` (messages, or pairs of a text and
its answer); `tools` are for the template. A call of a tool is a message of the assistant with `tool_calls`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tformer.data.sources.columns import LabelledLayout
from tformer.data.sources.files import Content, DocumentChunk, Source, SourceFields, cut_pieces, locate
from tformer.data.sources.parquet import parquet_schema
from tformer.data.sources.reading import Reading, whole_characters
from tformer.data.sources.tables import Table, json_object, table_format, text_value
from tformer.support.errors import InputError
from tformer.support.formatting import kind_of, shortened
from tformer.support.options import Errors

FormatName = Literal["messages", "prompt_completion", "text"]
FORMATS: dict[FormatName, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages",), ("conversations",)),
    "prompt_completion": (("prompt", "completion"), ("instruction", "output")),
    "text": (("text",),),
}
"""The keys that a row of each format must have."""
BESIDE = ("system", "history", "tools")
"""Keys that a row with messages may have; `instruction` may have `input` too."""
SENDERS = {"human": "user", "gpt": "assistant", "observation": "tool"}
ROWS = (".jsonl", ".parquet")


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a row (none: a text), all of their text, the row's place, and descriptions of tools."""

    messages: list[dict[str, Any]]
    text: str
    place: str
    tools: list[Any] | None = None


def read_record(raw: Any, *, place: str, errors: Errors) -> dict[str, Any]:
    """A row of jsonl or Parquet. Raises InputError for no object, and for half a character unless it is replaced."""
    record: dict[str, Any] = json_object(raw, place=place) if isinstance(raw, str) else raw
    if isinstance(raw, str) and "\\ud" in raw.lower():
        record = json.loads(whole_characters(json.dumps(record, ensure_ascii=False), place=place, errors=errors))
    return record


def turns(role: str, value: Any) -> list[Any]:
    """Messages: a text becomes one message of this role, a list stays."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def opened(record: Mapping[str, Any], given: Sequence[Any], place: str) -> list[Any]:
    """All messages of a row: its `system`, its `history`, then the given ones."""
    system, history = record.get("system") or "", record.get("history") or []
    if not isinstance(system, str) or not isinstance(history, list):
        raise InputError(f"{place}: 'system' should be a text, 'history' a list of messages or of pairs of texts")
    before = turns("system", system) if system else []
    for entry in history:
        is_pair = isinstance(entry, list) and len(entry) == 2
        before += [*turns("user", entry[0]), *turns("assistant", entry[1])] if is_pair else [entry]
    if before and given and isinstance(given[0], dict) and "system" in (given[0].get("role"), given[0].get("from")):
        if before != turns("system", given[0].get("content", given[0].get("value"))):
            raise InputError(f"{place}: found a system message after those of the keys system and history")
        before = []
    return [*before, *given]


def checked_messages(given: Sequence[Any], place: str) -> list[dict[str, Any]]:
    """Check each message by `_checked_message`."""
    return [_checked_message(each, f"{place}: message {number}") for number, each in enumerate(given, 1)]


def _checked_message(message: Any, place: str) -> dict[str, Any]:
    """A message without keys of null, which Parquet has where others have a value. InputError for no message."""
    if isinstance(message, dict) and "from" in message:
        kept = {key: value for key, value in message.items() if key not in ("from", "value")}
        message = {"role": SENDERS.get(str(message["from"]), message["from"]), "content": message.get("value")} | kept
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InputError(f"{place}: expected an object with role and content, found {shortened(repr(message), 40)}")
    content = message.get("content")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InputError(f"{place}: expected tool_calls as a list of objects, found {shortened(repr(calls), 40)}")
    if not isinstance(content, str) and (content is not None or not calls):
        raise InputError(f"{place}: expected content as text, found {kind_of(content)}")
    return {key: value for key, value in message.items() if value is not None} | {"content": content}


@dataclass(frozen=True)
class ConversationTable(Table):
    """A file of conversations. conversations: their format; None: of each row the first whose keys it has."""

    conversations: FormatName | None = None

    def row(self, values: list[Any], **facts: Any) -> Any:
        messages, text, tools = values
        return Conversation(messages, text, facts["place"], tools)

    def columns_key(self) -> str:
        return str(self.conversations)

    def documents(self) -> Iterator[DocumentChunk]:
        """The text of each conversation, on which a tokenizer is trained."""
        for row in self.rows():
            yield from cut_pieces(row.text)

    @property
    def _forms(self) -> list[tuple[str, ...]]:
        return [keys for name, forms in FORMATS.items() for keys in forms if self.conversations in (None, name)]

    def _form(self, record: Mapping[str, Any]) -> tuple[str, ...]:
        """The keys of the first format that a row has; () without one."""
        return next((keys for keys in self._forms if all(record.get(key) is not None for key in keys)), ())

    def used(self, record: Mapping[str, Any]) -> Collection[str]:
        keys = self._form(record)
        return (*keys, *(() if keys == ("text",) else BESIDE), *(("input",) if keys[:1] == ("instruction",) else ()))

    def _parser(self) -> Callable[[str, Any], tuple[list[Any], Any]]:
        def parse(place: str, raw: Any) -> tuple[list[Any], Any]:
            record = read_record(raw, place=place, errors=self.content.errors)
            keys, tools = self._form(record), record.get("tools")
            if not keys:
                expected = ", or ".join(" and ".join(keys) for keys in self._forms)
                found = ", ".join(key for key, value in record.items() if value is not None) or "none"
                raise InputError(f"{place}: expected the keys {expected}, found {found}")
            values = [record[key] for key in keys]
            if keys == ("text",):
                messages, texts = [], values
            else:
                if len(keys) == 1 and not isinstance(values[0], list):
                    found = kind_of(values[0])
                    raise InputError(f"{place}: '{keys[0]}' should be a list of messages, found {found}")
                if keys[0] == "instruction" and record.get("input"):
                    asked = [text_value(record[key], key, place=place, errors="strict") for key in (keys[0], "input")]
                    values[0] = "\n".join(filter(None, asked))
                given = [
                    turn
                    for role, each in zip(("user", "assistant"), values, strict=False)
                    for turn in turns(role, each)
                ]
                messages = checked_messages(opened(record, given, place), place)
                if all(message["role"] != "assistant" for message in messages):
                    raise InputError(f"{place}: no message of the role assistant, so there is no answer to learn")
                texts = [message.get("content", "") for message in messages]
            text = "\n".join(text_value(text, "content", place=place, errors="strict") for text in texts)
            if not text.strip():
                raise InputError(f"{place}: no text")
            if isinstance(tools, str):
                tools = json_object(f'{{"tools": {tools}}}', place=f"{place}: tools")["tools"]
            return [messages, text, tools or None], None

        return parse


class ConversationSource(Source):
    """An opened source of conversations."""

    def rows(self) -> Iterator[Any]:
        """Every row in order. Raises InputError with file and line of a wrong row."""
        return self._items("rows")

    def documents(self) -> Iterator[DocumentChunk]:
        return self._items("documents")


def open_conversations(
    specs: Sequence[SourceFields],
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
