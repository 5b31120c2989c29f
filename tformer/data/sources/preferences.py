"""Sources of preferences: rows of jsonl and Parquet with a prompt, the chosen answer and the rejected one.

texts       {"prompt": "...", "chosen": "...", "rejected": "..."}
messages    {"prompt": [message, ...], "chosen": [message, ...], "rejected": [message, ...]}; the prompt may be a
            text, and is not needed where chosen and rejected are whole conversations

`system` and `history` are those of conversations; texts beside them are messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tformer.data.sources.conversations import ConversationTable, checked_messages, opened, read_record, turns
from tformer.data.sources.tables import text_value
from tformer.support.errors import InputError
from tformer.support.formatting import kind_of

KEYS = ("prompt", "chosen", "rejected")
HINT = "each row has prompt, chosen and rejected: all texts, or all lists of messages"


@dataclass(frozen=True, slots=True)
class Preference:
    """A prompt with two answers, as texts; or no prompt, and two conversations that differ in their last messages."""

    prompt: str | None
    chosen: Any
    rejected: Any
    text: str  # all of it
    place: str


@dataclass(frozen=True)
class PreferenceTable(ConversationTable):
    """A file of preferences."""

    def row(self, values: list[Any], **facts: Any) -> Any:
        return Preference(*values)

    def columns_key(self) -> str:
        return "preferences"

    def used(self, record: Mapping[str, Any]) -> Collection[str]:
        return *KEYS, "system", "history"

    def _parser(self) -> Callable[[str, Any], tuple[list[Any], Any]]:
        def parse(place: str, raw: Any) -> tuple[list[Any], Any]:
            record = read_record(raw, place=place, errors=self.content.errors)
            prompt, chosen, rejected = _values(record, place)
            if chosen == rejected:
                raise InputError(f"{place}: chosen and rejected are equal, so neither is the better answer")
            messages = [{"content": prompt}, *turns("", chosen), *turns("", rejected)]
            texts = (text_value(each.get("content"), "content", place=place, errors="strict") for each in messages)
            return [prompt, chosen, rejected, "\n".join(texts), place], None

        return parse


def _values(record: Mapping[str, Any], place: str) -> list[Any]:
    """Prompt (None before conversations), chosen and rejected. Raises InputError for a row without them."""
    values: list[Any] = [record.get(key) for key in KEYS]
    for key in KEYS if isinstance(values[1], str) else KEYS[1:]:
        if record.get(key) is None:
            raise InputError(f"{place}: no key '{key}', found {', '.join(record)}", hint=HINT)
    if all(isinstance(value, str) for value in values) and (record.get("system") or record.get("history")):
        values = [values[0], *(turns("assistant", text) for text in values[1:])]
    if all(isinstance(value, str) for value in values):
        for key, text in zip(KEYS[1:], values[1:], strict=True):
            if not text.strip():
                raise InputError(f"{place}: '{key}' is empty")
        return values
    if not all(isinstance(value, list) for value in values[1:]):
        found = ", ".join(f"{key} {kind_of(record[key])}" for key in KEYS if key in record)
        raise InputError(f"{place}: found {found}", hint=HINT)
    sides = []
    before = [] if values[0] is None else checked_messages(turns("user", values[0]), f"{place}: prompt")
    for key, side in zip(KEYS[1:], values[1:], strict=True):
        messages = checked_messages(side, f"{place}: {key}")
        if not messages or messages[-1]["role"] != "assistant":
            raise InputError(f"{place}: '{key}' does not end with a message of the role assistant")
        is_whole = messages[0]["role"] != "assistant"  # with the prompt
        given = messages if is_whole else [*before, *messages]
        sides.append(checked_messages(opened(record, given, place), place))
    return [None, *sides]
