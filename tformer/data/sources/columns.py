"""Columns of a table and their roles: text, second text and label of an example; source and target of a pair.

A column is named by its name, by its number from 0, or (sides of pairs) as several columns joined by commas, with texts
that are joined by one space: "lemma,features". A column with exactly this name takes precedence.

A role without a named column is guessed: from known column names, then from the remaining columns. A `Layout` is a set
of roles with their rules; it also decides whether the first row holds names or data.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tformer.support.errors import InputError, did_you_mean
from tformer.support.formatting import shortened, whole_number

Column = str | int | None

ROLES = {role: role for role in ("text", "label", "group", "source", "target", "negatives")} | {"text2": "second text"}
"""The roles in words."""

PAIRS = (
    *(("text_a", "text_b"), ("text", "text2"), ("text1", "text2"), ("text_1", "text_2")),
    *(("sentence_a", "sentence_b"), ("sentence1", "sentence2"), ("sentence_1", "sentence_2")),
    *(("question1", "question2"), ("premise", "hypothesis"), ("question", "sentence"), ("question", "passage")),
    *(("query", "passage"), ("query", "document"), ("#1_string", "#2_string")),
)
MATCHES = (("anchor", "positive"), ("query", "positive"), ("query", "answer"), ("question", "answer"))
NEGATIVES = re.compile(r"(hard_)?neg(ative)?s?(_?\d+)?")
TEXTS = (
    *("text", "sentence", "text_a", "text1", "sentence1", "question", "premise", "content", "review", "document"),
    *("comment", "comment_text", "tweet", "message", "query", "utterance", "passage", "article", "body", "abstract"),
    *("description", "headline", "title", "input"),
)
CLASSES = (
    *("label", "labels", "class", "classes", "category", "categories", "target", "sentiment", "gold_label", "intent"),
    *("topic", "emotion", "tag", "tags", "is_duplicate", "quality", "entailment_judgment", "output"),
)
SCORES = ("score", "relatedness", "relatedness_score", "similarity", "rating", "stars")
IDS = ("id", "idx", "uid", "guid", "uuid", "pairid")
ROW_NUMBERS = ("", "index", "unnamed:_0", *IDS, "pair_id", "#1_id", "#2_id")
TEXT_NAMES = frozenset(TEXTS) | {name for pair in PAIRS for name in pair}
SOURCES = (
    *("source", "src", "source_text", "src_text", "input", "inputs", "input_text", "question", "prompt", "instruction"),
    *("query", "document", "article", "dialogue", "text", "sentence", "context", "command"),
)
TARGETS = (
    *("target", "tgt", "trg", "target_text", "tgt_text", "output", "outputs", "targets", "output_text", "answer"),
    *("translation", "completion", "response", "reply", "summary", "highlights", "headline", "title", "label"),
)
LANGUAGE_CODES = """
    ar bg bn ca cs cy da de el en es et eu fa fi fr ga gl gu he hi hr hu hy id is it ja ka kk km kn ko lt lv mk ml mn
    mr ms mt my nb ne nl nn no pa pl ps pt ro ru si sk sl so sq sr sv sw ta te th tl tr uk ur uz vi xh zh zu
"""
LANGUAGES = frozenset(LANGUAGE_CODES.split())
UNMISTAKABLE_SIDES = frozenset(("source", "target", "src", "tgt", "trg", "source_text", "target_text"))
MIN_ROWS_OF_NUMBERS = 3  # below a word, for the word to count as a column name
SHOWN_CHARACTERS = 60  # of a first row, in a hint

WHOLE_FLOAT = re.compile(r"-?\d+\.0")
COMMA_NUMBER = re.compile(r"[+-]?\d+(,\d+)?")
LabelForm = Literal["", "whole labels", "decimal commas"]

Chosen = dict[str, tuple[int, ...]]
"""Column numbers by role."""


def parse_column(text: str | None) -> Column:
    """The value of a column option: a number from 0, or a name."""
    number = None if text is None else whole_number(text)
    return text if number is None else number


CHATS = "conversations are read by tformer train --objective chat"


def column_hint(role: str, names: Iterable[object] = ()) -> str:
    """Hint to name the column of a role. names: of the columns or keys; for conversations it names their objective."""
    chats = f"; {CHATS}" if role == "text" and not {"messages", "conversations"}.isdisjoint(names) else ""
    return f"name the column with --{role}-column (data.columns.{role}){chats}"


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def have_decimal_commas(texts: Iterable[str]) -> bool:
    """Whether all are numbers, and some have a decimal comma."""
    present = [text for each in texts if (text := each.strip())]
    return "," in "".join(present) and all(map(COMMA_NUMBER.fullmatch, present))


def are_numbers(texts: Sequence[str]) -> bool:
    return all(map(is_number, texts)) or have_decimal_commas(texts)


def numbers_rows(name: str) -> bool:
    """Whether a column of this name only numbers the rows."""
    return _normalized(name) in ROW_NUMBERS


def require_single(names: Sequence[str], column: str, *, name: str) -> None:
    """Raise InputError if several columns have this name."""
    count = names.count(column)
    if count > 1:
        raise InputError(
            f"{name}: {count} columns are called '{column}'",
            hint="rename the others, or (in csv and tsv) give its number from 0",
        )


@dataclass(frozen=True)
class TableHead:
    """The beginning of a table: names of columns, if any, and its first rows as text of equal width."""

    file: str
    names: tuple[str, ...] | None
    rows: list[list[str]]

    @property
    def width(self) -> int:
        return len(self.rows[0] if self.names is None else self.names)

    @property
    def normalized_names(self) -> list[str]:
        return [_normalized(name) for name in self.names or ()]

    def describe(self) -> str:
        """The columns, for messages."""
        return self._count() if self.names is None else f"columns: {', '.join(self.names)}"

    def _count(self) -> str:
        width = self.width
        return f"there are {width} columns, numbered from 0" if width > 1 else "there is one column, number 0"

    def has(self, column: str | int) -> bool:
        return column < self.width if isinstance(column, int) else column in (self.names or ())

    def find(self, column: str | int, *, role: str) -> int:
        """The number of a column. Raises InputError if it is missing or its name is not unique."""
        names = self.names or ()
        if isinstance(column, str) and column in names:
            require_single(names, column, name=self.file)
            return names.index(column)
        number = whole_number(column) if isinstance(column, str) else column
        if number is None:
            raise InputError(
                f"{self.file}: no column '{column}'; {did_you_mean(str(column), names)}", hint=column_hint(role)
            )
        if number >= self.width:
            raise InputError(f"{self.file}: no column {number}; {self._count()}", hint=column_hint(role))
        return number

    def free(self, used: Iterable[int]) -> list[int]:
        """Columns without a role that do not number the rows."""
        numbering = {column for column, name in enumerate(self.names or ()) if numbers_rows(name)}
        return [column for column in range(self.width) if column not in {*used, *numbering}]

    def cannot_tell(self, role: str, *, row: str = "") -> InputError:
        hint = (
            f"{column_hint(role, self.names or ())}{', or the separator with --delimiter' if self.width == 1 else ''}"
        )
        return InputError(
            f"{self.file}: cannot tell which column holds the {ROLES[role]}; {self.describe()}", hint=f"{hint}{row}"
        )

    def same_column(self, first: str, second: str, column: int) -> InputError:
        shown = column if self.names is None else f"'{self.names[column]}'"
        return InputError(
            f"{self.file}: {ROLES[first]} and {ROLES[second]} are the same column {shown}", hint=column_hint(second)
        )


class Layout(ABC):
    """A set of roles, and the rules that find their columns."""

    roles: ClassVar[tuple[str, ...]]
    apart: ClassVar[frozenset[str]] = frozenset()  # roles whose columns, and lists of texts, are not joined
    nests: ClassVar[str | None] = None  # a key whose object has columns of its own

    @property
    def required(self) -> tuple[str, ...]:
        """Roles that every row must have."""
        return self.roles

    def named(self, columns: object) -> dict[str, str | int]:
        """Columns that the user named, by role. `columns` has one attribute per role."""
        return {role: column for role in self.roles if (column := getattr(columns, role, None)) is not None}

    def has_names(self, rows: Sequence[Sequence[str]], named: Mapping[str, str | int]) -> bool:
        """Whether the first of these rows holds the names of the columns."""
        parts = [part for column in named.values() if isinstance(column, str) for part in column.split(",")]
        if any(whole_number(part.strip()) is None for part in parts):
            return True  # a name that is missing is reported when columns are chosen
        return self._looks_like_names(rows[0], rows[1:])

    @abstractmethod
    def _looks_like_names(self, first: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
        """Whether a first row without a named column holds names."""

    @abstractmethod
    def choose(self, head: TableHead, named: Mapping[str, str | int]) -> Chosen:
        """Choose the columns of each role; `named` has the columns that the user named.

        Raises InputError for a column that is missing, ambiguous or used twice.
        """

    @property
    def keeps_blank_lines(self) -> bool:
        """Whether a blank line of csv and tsv is a row without values; else it is skipped."""
        return False

    def flat(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record with the keys of its object `nests` lifted to the top."""
        inner = None if self.nests is None else record.get(self.nests)
        return record if not isinstance(inner, dict) else {k: v for k, v in record.items() if k != self.nests} | inner

    def accepts_plain_text(self, named: Mapping[str, str | int]) -> bool:
        """Whether lines of plain text are rows."""
        return False

    @abstractmethod
    def plain_text_error(self, name: str, *, empty: bool) -> InputError:
        """The error for plain text where a table is needed."""

    def label_form(self, labels: Sequence[str]) -> LabelForm:
        """The form of these first labels: whole numbers made floats, as pandas does where one is missing, or scores."""
        return ""


@dataclass(frozen=True)
class LabelledLayout(Layout):
    """Examples with a text, perhaps a second text, and a label.

    Attributes:
        needs_label: False: rows may have no label, also if its column was named, and lines of plain text are rows.
        numeric_label: the label is a score, a finite number also in float32: columns with a score's name, or with
            numbers, are preferred.
        multi_label: there may be any number of labels, joined by `separator`, or none.
    """

    needs_label: bool = True
    numeric_label: bool = False
    multi_label: bool = False
    separator: str = "|"

    roles: ClassVar[tuple[str, ...]] = ("text", "text2", "label", "group")
    pairs: ClassVar[tuple[tuple[str, str], ...]] = PAIRS
    text_names: ClassVar[frozenset[str]] = TEXT_NAMES

    @property
    def required(self) -> tuple[str, ...]:
        return self.roles if self.needs_label else ("text", "text2")

    @property
    def keeps_blank_lines(self) -> bool:
        return not self.needs_label  # answers stay aligned with the input

    def accepts_plain_text(self, named: Mapping[str, str | int]) -> bool:
        return not self.needs_label and not named

    def plain_text_error(self, name: str, *, empty: bool) -> InputError:
        missing = "labels" if self.needs_label else "columns"
        hint = "files with labels end in .csv, .tsv, .jsonl or .parquet"
        return InputError(f"{name}: plain text has no {missing}", hint=hint)

    def label_form(self, labels: Sequence[str]) -> LabelForm:
        present = [label for label in map(str.strip, labels) if label not in ("", "NaN")]
        if self.numeric_label:
            return "decimal commas" if have_decimal_commas(present) else ""
        return "whole labels" if present and all(map(WHOLE_FLOAT.fullmatch, present)) else ""

    def _looks_like_names(self, first: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
        """A known name of a text column that occurs once; or a word above a column of numbers."""
        for column, cell in enumerate(first):
            values = [row[column] for row in below if column < len(row)]
            if _normalized(cell) in self.text_names and cell not in values:
                return True
            numbers = len(values) >= MIN_ROWS_OF_NUMBERS and are_numbers(values)
            if numbers and cell.strip() and not are_numbers([cell]):
                return True
        return False

    def choose(self, head: TableHead, named: Mapping[str, str | int]) -> Chosen:
        chosen: dict[str, int] = {}
        for role, column in named.items():
            if role in self.required or head.has(column):
                number = head.find(column, role=role)
                for other in chosen:
                    if chosen[other] == number:
                        raise head.same_column(other, role, number)
                chosen[role] = number
        if head.names is not None:
            self._choose_by_name(head.normalized_names, chosen)
        self._choose_by_content(head, chosen)
        for role in ("text", "label") if self.needs_label else ("text",):
            if role not in chosen:
                raise head.cannot_tell(role)
        for role, number in chosen.items():
            if head.names is not None and not isinstance(named.get(role), int):
                require_single(head.names, head.names[number], name=head.file)
        return {role: (chosen[role],) for role in self.roles if role in chosen}

    def _choose_by_name(self, names: list[str], chosen: dict[str, int]) -> None:
        """Choose columns by known names, pairs of texts first. If only the text was named, each row has one text."""
        if "text" not in chosen:
            for first, second in self.pairs:
                if "text2" in chosen:
                    fits = names[chosen["text2"]] == second and first in names
                else:
                    fits = first in names and second in names
                others = {column for role, column in chosen.items() if role != "text2"}
                if fits and not {names.index(first), names.index(second)} & others:
                    chosen["text"] = names.index(first)
                    chosen.setdefault("text2", names.index(second))
                    break
            else:
                _choose_first_known("text", TEXTS, names, chosen)
        if "label" not in chosen:
            known = (*SCORES, *CLASSES) if self.numeric_label else (*CLASSES, *SCORES)
            _choose_first_known("label", known, names, chosen)

    def _choose_by_content(self, head: TableHead, chosen: dict[str, int]) -> None:
        """Choose the free columns if there are as many as missing roles. The label has fewer different values."""
        free = head.free(chosen.values())
        missing = [role for role in ("text", "label") if role not in chosen]
        if not self.needs_label and len(free) < len(missing):
            missing = ["text"] if "text" in missing else []
        if not missing or len(free) != len(missing):
            return

        def unlike_labels(column: int) -> tuple[bool, int, int]:
            values = [row[column] for row in head.rows]
            words = self.numeric_label and not are_numbers(values)
            return words, len(set(values)), sum(map(len, values))

        if "label" in missing and len(free) > 1:
            free.sort(key=unlike_labels, reverse=True)
        if self.needs_label or "text" in missing:  # a column beside a known text need not be a label
            chosen.update(zip(missing, free, strict=True))


@dataclass(frozen=True)
class MatchLayout(LabelledLayout):
    """Two texts that belong together, and hard negatives: texts beside the second one that do not match the first."""

    needs_label: bool = False

    roles: ClassVar[tuple[str, ...]] = ("text", "text2", "negatives")
    apart: ClassVar[frozenset[str]] = frozenset({"negatives"})
    pairs: ClassVar[tuple[tuple[str, str], ...]] = (*MATCHES, *PAIRS)
    text_names: ClassVar[frozenset[str]] = TEXT_NAMES.union(*MATCHES)

    @property
    def keeps_blank_lines(self) -> bool:
        return False

    def choose(self, head: TableHead, named: Mapping[str, str | int]) -> Chosen:
        """Negatives are the columns with such a name."""
        chosen = super().choose(head, named)
        free = [number for number, name in enumerate(head.normalized_names) if NEGATIVES.fullmatch(name)]
        free = [number for number in free if number not in _flat(chosen)]
        return chosen | ({"negatives": tuple(free)} if free else {})


@dataclass(frozen=True)
class TextLayout(LabelledLayout):
    """One text to continue or translate, from one or several columns."""

    needs_label: bool = False

    roles: ClassVar[tuple[str, ...]] = ("text",)
    text_names: ClassVar[frozenset[str]] = TEXT_NAMES.union(SOURCES)

    def choose(self, head: TableHead, named: Mapping[str, str | int]) -> Chosen:
        known = (head.normalized_names.index(name) for name in SOURCES if name in head.normalized_names)
        column = named.get("text", next(known, None))
        return {"text": super().choose(head, {})["text"] if column is None else _find_joined(head, column, "text")}


@dataclass(frozen=True)
class PairLayout(Layout):
    """Pairs of a source and a target text, each from one or several columns."""

    roles: ClassVar[tuple[str, ...]] = ("source", "target")
    nests: ClassVar[str | None] = "translation"

    def plain_text_error(self, name: str, *, empty: bool) -> InputError:
        if empty:
            return InputError(f"{name}: no rows")
        return InputError(
            f"{name}: plain text is one side of pairs, found no other",
            hint="give the file with the other side (--target), or one that ends in .tsv, .csv, .jsonl or .parquet",
        )

    def _looks_like_names(self, first: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
        """Whether the first row has known names of both sides, or one unmistakable name."""
        names = [
            "" if cell in (row[column] for row in below if column < len(row)) else _normalized(cell)
            for column, cell in enumerate(first)
        ]
        chosen: Chosen = {}
        self._choose_by_name(names, chosen)
        return len(chosen) == len(self.roles) or not UNMISTAKABLE_SIDES.isdisjoint(names)

    def choose(self, head: TableHead, named: Mapping[str, str | int]) -> Chosen:
        chosen = {role: _find_joined(head, column, role) for role, column in named.items()}
        if head.names is not None:
            self._choose_by_name(head.normalized_names, chosen)
        free = head.free(_flat(chosen))
        missing = [role for role in self.roles if role not in chosen]
        if len(free) == len(missing):  # of two columns the first is the source
            chosen.update((role, (column,)) for role, column in zip(missing, free, strict=True))
        for role in self.roles:
            if role not in chosen:
                first = "" if head.names is not None else ", ".join(head.rows[0])
                raise head.cannot_tell(role, row=first and f"; the first row: {shortened(first, SHOWN_CHARACTERS)}")
        if both := set(chosen["source"]) & set(chosen["target"]):
            raise head.same_column("source", "target", min(both))
        return {role: chosen[role] for role in self.roles}

    def _choose_by_name(self, names: list[str], chosen: Chosen) -> None:
        """Known names; two columns named after languages are source and target, in their order."""
        used = _flat(chosen)
        for role, known in (("source", SOURCES), ("target", TARGETS)):
            found = [names.index(name) for name in known if name in names and names.index(name) not in used]
            if role not in chosen and found:
                chosen[role] = (found[0],)
                used.add(found[0])
        languages = [column for column, name in enumerate(names) if re.split("[_@]", name)[0] in LANGUAGES]
        languages = [column for column in languages if column not in used]
        missing = [role for role in self.roles if role not in chosen]
        if len(languages) > len(missing):  # id is a language too
            languages = [column for column in languages if not numbers_rows(names[column])]
        if missing and len(languages) == len(missing):
            chosen.update((role, (column,)) for role, column in zip(missing, languages, strict=True))


def _find_joined(head: TableHead, column: str | int, role: str) -> tuple[int, ...]:
    """The column of this name, or several columns that are joined by commas."""
    if isinstance(column, int) or head.has(column) or "," not in column:
        return (head.find(column, role=role),)
    return tuple(head.find(part.strip(), role=role) for part in column.split(","))


def column_name(columns: Sequence[int], names: Sequence[str] | None) -> str | int:
    """These columns as a user names them: names joined by commas, or numbers if names are missing or ambiguous."""
    if names is None or any(names.count(names[column]) > 1 for column in columns):
        return columns[0] if len(columns) == 1 else ",".join(map(str, columns))
    return ",".join(names[column] for column in columns)


def is_present(column: str | int, first: Sequence[str], *, has_names: bool) -> bool:
    """Whether a table with this first row has a column. If columns have names, a number does not count."""
    if column in first:
        return True
    parts = [part.strip() for part in str(column).split(",")]
    numbers = [number for part in parts if (number := whole_number(part)) is not None]
    if len(numbers) == len(parts):
        return not has_names and all(number < len(first) for number in numbers)
    return all(part in first for part in parts)


def id_column(head: TableHead, chosen: Chosen) -> int | None:
    """The number of the first column without a role that is named `id` or like it; None: there is none."""
    names = enumerate(head.normalized_names)
    used = _flat(chosen)
    return next((n for n, name in names if n not in used and (name in IDS or name.endswith("_id"))), None)


def _flat(chosen: Chosen) -> set[int]:
    return {column for columns in chosen.values() for column in columns}


def _choose_first_known(role: str, known: Sequence[str], names: list[str], chosen: dict[str, int]) -> None:
    free = [name for name in known if name in names and names.index(name) not in chosen.values()]
    if free:
        chosen[role] = names.index(free[0])


def _normalized(name: str) -> str:
    return re.sub(r"[\s-]+", "_", name.strip().lower())
