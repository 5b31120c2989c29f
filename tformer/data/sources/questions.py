"""Questions with a context and answers in it: SQuAD's json (1.1 and 2.0), and jsonl.

    {"data": [{"paragraphs": [{"context": C, "qas": [{"id": I, "question": Q, "answers": [A, ...]}]}]}]}
    A is {"text": T, "answer_start": character of the context}; a line of jsonl:
    {"id": I, "context": C, "question": Q, "answers": {"text": [...], "answer_start": [...]}}

A question without answers has none in its context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tformer.data.sources.files import Content, SourceFields
from tformer.data.sources.labelled import LabelledSource
from tformer.data.sources.reading import Reading, whole_characters
from tformer.data.sources.row_files import ending_of, open_files
from tformer.data.sources.tables import LabelledRow, json_object, json_objects
from tformer.support.errors import InputError
from tformer.support.formatting import shortened

SHOWN_CHARACTERS = 60  # of a value in a message
KEYS = ("id", "title", "context", "question", "answers", "is_impossible", "plausible_answers")


@dataclass(frozen=True, slots=True)
class QuestionRow(LabelledRow):
    """A question (`text`) about a context (`text2`).

    `answers`: text and first character of each. Of a window, `offsets`: int64 [c, 2], the characters of its tokens;
    `marks`: the label of each token.
    """

    answers: tuple[tuple[str, int], ...] = ()
    offsets: Any = field(default=None, compare=False)
    marks: Any = field(default=None, compare=False)


def open_questions(specs: Sequence[SourceFields], *, reading: Reading = Reading()) -> list[LabelledSource]:
    """One source per entry. Raises InputError for no entry, and for what cannot be read."""
    if not specs:
        raise InputError("questions need data: there is no built-in source", hint="give SQuAD's json with --data FILE")
    given: dict[str, Any] = {
        "endings": (".json", ".jsonl"),
        "key": "questions",
        "has_text2": True,
        "accepts": ("json", "jsonl"),
        "keys": KEYS,
    }
    return [open_files(spec.path, question_rows, reading=reading, **given) for spec in specs]


def question_rows(content: Content) -> Iterator[QuestionRow]:
    """Every question."""
    for number, (place, context, entry) in enumerate(_entries(content)):
        texts = list[str]()
        for key, value in (("question", entry.get("question")), ("context", context)):
            if not isinstance(value, str) or not value.strip():
                raise InputError(f"{place}: expected a text as '{key}', found {_shown(value)}")
            texts.append(whole_characters(value, place=place, errors=content.errors))
        answers = [] if entry.get("is_impossible") else entry.get("answers")
        if isinstance(answers, dict):  # of a table: lists of texts and of first characters
            columns: Any = [answers.get(key) for key in ("text", "answer_start")]
            if not all(isinstance(column, list) for column in columns) or len(columns[0]) != len(columns[1]):
                keys = "'answers' should be a list, or have lists of one length as 'text' and 'answer_start'"
                raise InputError(f"{place}: {keys}, found {_shown(answers)}")
            answers = [{"text": text, "answer_start": start} for text, start in zip(*columns, strict=True)]
        if not isinstance(answers, list):
            raise InputError(f"{place}: 'answers' should be a list, found {_shown(answers)}")
        found = tuple(_answer(answer, context, place) for answer in answers)
        # Questions about one context are held out together.
        facts: dict[str, Any] = {"number": number, "id": str(entry.get("id", number)), "group": texts[1]}
        yield QuestionRow(texts[0], texts[1], "", place, answers=found, **facts)


def _entries(content: Content) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(place, context, question with its answers)."""
    name = content.name
    if ending_of(content) == ".jsonl":
        for number, row in json_objects(content):
            yield f"{name}:{number}", row.get("context"), row
        return
    document = json_object("".join(content.texts()), place=name, expected="SQuAD's json")
    for article in _list(document, "data", name):
        for paragraph in _list(article, "paragraphs", name):
            for number, entry in enumerate(_list(paragraph, "qas", name)):
                if not isinstance(entry, dict):
                    raise InputError(f"{name}: expected an object in 'qas', found {_shown(entry)}")
                yield f"{name}: question {entry.get('id', number)}", paragraph.get("context"), entry


def _list(parent: Any, key: str, name: str) -> list[Any]:
    found = parent.get(key) if isinstance(parent, dict) else None
    if not isinstance(found, list):
        hint = "its lists are data, paragraphs and qas"
        raise InputError(f"{name}: expected SQuAD's json, found no list '{key}'", hint=hint)
    return found


def _answer(answer: Any, context: str, place: str) -> tuple[str, int]:
    """(text, first character) of an answer, which must stand there."""
    text, start = (answer.get(key) if isinstance(answer, dict) else None for key in ("text", "answer_start"))
    if not isinstance(text, str) or not isinstance(start, int):
        raise InputError(f"{place}: an answer needs 'text' and 'answer_start', found {_shown(answer)}")
    if not text or start < 0 or context[start : start + len(text)] != text:
        raise InputError(f"{place}: the answer {_shown(text)} does not stand at character {start} of the context")
    return text, start


def _shown(value: Any) -> str:
    return shortened(repr(value), SHOWN_CHARACTERS)
