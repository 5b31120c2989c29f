"""Sources of conversations: rows of jsonl and Parquet, in one of the formats that instructions come in.

messages            {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}
prompt_completion   {"prompt": ..., "completion": ...}, each a text, or a list of messages
alpaca              {"instruction": ..., "input": ..., "output": ...}; input may be missing or empty
sharegpt            {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}
text                {"text": ...}: no messages, all of it is learned
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tformer.data.sources.columns import LabelledLayout
from tformer.data.sources.files import Content, Piece, Source, SourceSpec, cut_pieces, locate
from tformer.data.sources.parquet import parquet_schema
from tformer.data.sources.reading import Reading
from tformer.data.sources.tables import Table, json_object, json_objects, table_format, text_value
from tformer.support.errors import InputError

FormatName = Literal["messages", "prompt_completion", "alpaca", "sharegpt", "text"]
Row = Mapping[str, Any]


def _turns(role: str, value: Any) -> list[Any]:
    """A text as a message, or messages as they are."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _of_alpaca(row: Row) -> list[Any]:
    asked = "\n".join(str(row[key]) for key in ("instruction", "input") if row.get(key))
    return [*_turns("user", asked), *_turns("assistant", row["output"])]


def _of_sharegpt(row: Row) -> list[Any]:
    roles = {"human": "user", "gpt": "assistant"}
    return [
        {"role": roles.get(str(turn.get("from")), turn.get("from")), "content": turn.get("value")}
        if isinstance(turn, dict)
        else turn
        for turn in _turns("user", row["conversations"])
    ]


FORMATS: dict[FormatName, tuple[tuple[str, ...], Callable[[Row], list[Any]]]] = {
    "messages": (("messages",), lambda row: _turns("user", row["messages"])),
    "prompt_completion": (
        ("prompt", "completion"),
        lambda row: [*_turns("user", row["prompt"]), *_turns("assistant", row["completion"])],
    ),
    "alpaca": (("instruction", "output"), _of_alpaca),
    "sharegpt": (("conversations",), _of_sharegpt),
    "text": (("text",), lambda row: []),
}
"""The keys that a row of each format must have, and its messages, which are not checked yet."""
_KNOWN = ("{} ({})".format(name, ", ".join(keys)) for name, (keys, _) in FORMATS.items())
HINT = f"known formats (data.format): {', '.join(_KNOWN)}"


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a row (none: a text), all of their text, and the row's place."""

    messages: list[dict[str, Any]]
    text: str
    place: str


@dataclass(frozen=True)
class ConversationTable(Table):
    """A file of conversations in one format."""

    conversations: FormatName = "messages"

    def row(self, values: list[Any], **facts: Any) -> Conversation:
        messages, text = values
        return Conversation(messages, text, facts["place"])

    def columns_key(self) -> str:
        return self.conversations

    def documents(self) -> Iterator[Piece]:
        """The text of each conversation, on which a tokenizer is trained."""
        for row in self.rows():
            yield from cut_pieces(row.text)

    def _parser(self) -> Callable[[str, Any], tuple[list[Any], Any]]:
        keys, read = FORMATS[self.conversations]

        def parse(place: str, raw: Any) -> tuple[list[Any], Any]:
            record = json_object(raw, place=place) if isinstance(raw, str) else raw
            if missing := [key for key in keys if record.get(key) is None]:
                raise InputError(f"{place}: no key '{missing[0]}', expected {' and '.join(keys)}", hint=HINT)
            messages = [_checked(each, f"{place}: message {n}") for n, each in enumerate(read(record), 1)]
            if self.conversations != "text" and all(message["role"] != "assistant" for message in messages):
                raise InputError(f"{place}: no message of the role assistant, so there is no answer to learn")
            texts = [message.get("content", "") for message in messages] or [record["text"]]
            text = "\n".join(text_value(text, "content", place=place, errors="strict") for text in texts)
            if not text.strip():
                raise InputError(f"{place}: no text")
            return [messages, text], None

        return parse


def _checked(message: Any, place: str) -> dict[str, Any]:
    """A message without keys of null, which Parquet has where others have a value. InputError for no message."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InputError(f"{place}: expected an object with role and content, found {str(message)[:40]}")
    content = message.get("content")
    if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
        raise InputError(f"{place}: expected content as text, found {type(content).__name__}")
    return {key: value for key, value in message.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class ConversationSource(Source):
    """An opened source of conversations; `format`: of its files."""

    format: FormatName

    def rows(self) -> Iterator[Conversation]:
        """Every row in order. Raises InputError with file and line of a wrong row."""
        return self._items("rows")

    def documents(self) -> Iterator[Piece]:
        return self._items("documents")


ROWS = (".jsonl", ".parquet")


def open_conversations(
    specs: Sequence[SourceSpec], *, format: FormatName | None = None, reading: Reading = Reading()
) -> list[ConversationSource]:
    """One source per entry. format: None: the first of `FORMATS` whose keys the first row has.

    Raises InputError for what cannot be read, a file that is neither jsonl nor Parquet, and a row of no known format.
    """
    sources = []
    for spec in specs:
        found = locate(spec.path, is_known=lambda path: table_format(path) in ROWS, known=", ".join(ROWS))
        contents = found.contents(reading)
        name = format or _format_of(contents[0])
        facts: dict[str, Any] = {"name": found.name, "weight": spec.weight, "notes": found.notes, "format": name}
        sources.append(ConversationSource(parts=tuple(_table(content, name) for content in contents), **facts))
    return sources


def _table(content: Content, name: FormatName) -> ConversationTable:
    rows = ".jsonl" if content.path is None else table_format(content.path) or ""
    if rows not in ROWS:
        raise InputError(f"{content.name}: conversations are read from {' and '.join(ROWS)} files")
    names = tuple(parquet_schema(content.file).names) if rows == ".parquet" else None
    facts: dict[str, Any] = {"layout": LabelledLayout(), "names": names, "width": 0, "columns": {}}
    return ConversationTable(content, format=rows, guessed=False, keeps_records=True, conversations=name, **facts)


def _format_of(content: Content) -> FormatName:
    keys: Sequence[str] = _table(content, "messages").names or ()
    keys = keys or next((tuple(row) for _, row in json_objects(content)), ())
    for name, (needed, _) in FORMATS.items():
        if set(needed) <= set(keys):
            return name
    raise InputError(f"{content.name}: no format of conversations has these keys: {', '.join(keys)}", hint=HINT)
