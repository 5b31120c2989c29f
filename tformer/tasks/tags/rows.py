"""Sentences of words with tags: CoNLL files, jsonl, and the built-in source.

A CoNLL file has a word a line, its columns separated by tabs or, in a line without one, by spaces; a blank line, and
one that begins with -DOCSTART-, ends a sentence. The first column is the word and the last one its tag, of CoNLL-U the
second and the fourth; data.columns names others by number. A line such as "# id = 1", or one that begins with # and has
another number of columns than the first word, is a comment. A row of jsonl has the words and their tags as two lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from tformer.data.sources.builtin import DEFAULTS, PREFIX, find_builtin
from tformer.data.sources.columns import column_hint
from tformer.data.sources.files import Content, SourceFields, split_lines
from tformer.data.sources.labelled import LabelledSource
from tformer.data.sources.reading import Reading, whole_characters
from tformer.data.sources.row_files import ending_of, open_files
from tformer.data.sources.tables import TaggedRow, json_objects
from tformer.support.errors import InputError
from tformer.support.file_kinds import kind_of
from tformer.support.formatting import plural, whole_number

CONLL_ENDINGS = (".conll", ".conllu", ".iob", ".bio")
FOLDER_ENDINGS = (*CONLL_ENDINGS, ".txt", ".tsv", ".jsonl")
OTHER_TABLES = (".csv", ".parquet", ".xlsx", ".ods", ".json")
DOCUMENT = "-DOCSTART-"
COMMENT = re.compile(r"#\s*\w\S*\s*=\s|#\s*(begin|end) document|#\s*new(doc|par)\b")
CONLL_KINDS = ("conll", "conllu")
KEYS = {"text": ("words", "tokens"), "label": ("tags", "ner_tags", "pos_tags", "upos", "labels")}
"""Keys of jsonl, the first that a row has."""

Sentence = tuple[str, list[str], list[str]]
"""Place, words, tags."""


def open_tagged(
    specs: Sequence[SourceFields], *, columns: object = None, reading: Reading = Reading()
) -> list[LabelledSource]:
    """One source per entry; without entries, the built-in one. Raises InputError for what cannot be read."""
    named = {role: getattr(columns, role, None) for role in KEYS}
    how: dict[str, Any] = {"endings": FOLDER_ENDINGS, "key": f"tagged {named}", "accepts": CONLL_KINDS}
    how |= {"reading": reading, "keys": [*map(str, named.values()), *chain(*KEYS.values())]}
    read, found = partial(tagged_rows, named=named), list[LabelledSource]()
    for path in [spec.path for spec in specs] or [DEFAULTS["tags"]]:
        if path.startswith(PREFIX):
            builtin = find_builtin(path, holds="tags")
            found.append(LabelledSource(name=path, parts=(builtin,), has_text2=False))
        else:
            found.append(open_files(path, read, **how))
    return found


def tagged_rows(content: Content, named: dict[str, Any]) -> Iterator[TaggedRow]:
    """Yield every sentence. named: the columns or keys of words (text) and tags (label) that the user named."""
    ending = ending_of(content)
    if ending in OTHER_TABLES:
        raise InputError(f"{content.name}: words and their tags are read from CoNLL files and jsonl, found {ending}")
    kind = kind_of(next(content.origin.read(), b""))
    is_ud = ending == ".conllu" or (kind is not None and kind.key == "conllu")
    found = _objects(content, named) if ending == ".jsonl" else _sentences(content, named, ud=is_ud)
    for place, words, tags in found:
        for what, values in (("word", words), ("tag", tags)):
            if not all(map(str.strip, values)):
                raise InputError(f"{place}: a {what} of the sentence is blank")
        if words:
            yield TaggedRow.of(words, as_bio(tags), place)


def as_bio(tags: Sequence[str]) -> list[str]:
    """The tags with B- where an I- follows no word of its type: IOB1, as CoNLL-2003 was published, becomes BIO."""
    pairs = zip(["", *tags], tags, strict=False)
    return [f"B{tag[1:]}" if tag[:2] == "I-" and last not in (tag, f"B{tag[1:]}") else tag for last, tag in pairs]


def _sentences(content: Content, named: dict[str, Any], *, ud: bool) -> Iterator[Sentence]:
    """Sentences of a CoNLL file, also empty ones. ud: it is CoNLL-U."""
    columns = {role: whole_number(name) if isinstance(name, str) else name for role, name in named.items()}
    for role, name in named.items():
        if name is not None and columns[role] is None:
            text = f"{content.name}: columns of CoNLL files have numbers, found '{name}'"
            raise InputError(text, hint=column_hint(role))
    rows = (_cells(line) for line in split_lines(content.texts(), name=content.name) if line[0] not in "#\r\n")
    width = next((len(cells) for cells in rows if any(cells) and cells[0] != DOCUMENT), 0)
    place, words, tags = "", list[str](), list[str]()
    for number, line in enumerate(split_lines(content.texts(), name=content.name), 1):
        cells = _cells(line)
        if not line.strip() or cells[0] == DOCUMENT:
            yield place, words, tags
            words, tags = [], []
        elif COMMENT.match(line) or (line[0] == "#" and 0 < width != len(cells) and (not words or line[:2] == "# ")):
            continue
        elif not ud or cells[0].isdecimal():  # else a word that is several tokens
            place = place if words else f"{content.name}:{number}"
            word = columns["text"] if columns["text"] is not None else int(ud)
            tag = 3 if ud else max(len(cells) - 1, word + 1)
            tag = tag if columns["label"] is None else columns["label"]
            if word == tag or max(word, tag) >= len(cells):
                count = plural(len(cells), "column")
                raise InputError(
                    f"{content.name}:{number}: expected a word in column {word} and its tag in another, found {count}",
                    hint="a line has a word and its tag; a blank line ends a sentence",
                )
            words.append(cells[word].strip())
            tags.append(cells[tag].strip())
    yield place, words, tags


def _cells(line: str) -> list[str]:
    return line.rstrip("\r\n").split("\t") if "\t" in line else re.split(" +", line.strip("\r\n "))


def _objects(content: Content, named: dict[str, Any]) -> Iterator[Sentence]:
    """Sentences of jsonl."""
    for number, row in json_objects(content):
        place, lists = f"{content.name}:{number}", list[list[str]]()
        for role, name in named.items():
            keys = KEYS[role] if name is None else (str(name),)
            key = next((key for key in keys if key in row), None)
            if key is None:
                text = f"{place}: expected a key {' or '.join(keys)}, found {', '.join(row)}"
                raise InputError(text, hint=column_hint(role))
            if not isinstance(row[key], list) or not all(isinstance(value, str | int) for value in row[key]):
                raise InputError(f"{place}: '{key}' should be a list of texts")
            lists.append([whole_characters(str(value), place=place, errors=content.errors) for value in row[key]])
        words, tags = lists
        if len(words) != len(tags):
            raise InputError(f"{place}: expected one tag for each word, found {len(words)} words, {len(tags)} tags")
        yield place, words, tags
