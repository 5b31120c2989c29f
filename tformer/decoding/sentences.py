"""Lines of text as sentences to translate: encoded, checked, with a length limit each.

Everything is checked before anything is translated, so that an error on line 900 costs no work. Input that is too large
to be read at once is checked ahead (`check_sources`), which tokenizes only long lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tformer.data.shards.template import TextTemplate
from tformer.support.errors import InputError
from tformer.support.formatting import shortened
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.pieces import size_for_message

TooLong = Literal["error", "cut"]
SHOWN = 5  # unknown words of a prefix that are listed
SHOWN_CHARACTERS = 40  # of each


@dataclass(frozen=True)
class SourceSentence:
    """One text to translate.

    Attributes:
        source: ids, with the template's special ones.
        text_slice: the text's own ids among them.
        prefix: ids that begin the translation.
        limit: maximum number of tokens after the prefix.
    """

    source: tuple[int, ...]
    text_slice: slice
    prefix: tuple[int, ...]
    limit: int

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to translate."""
        return self.text_slice.start == self.text_slice.stop


@dataclass(frozen=True)
class Places:
    """The names of a row's source and target prefix in messages; rows count from 0."""

    source: Callable[[int], str]
    prefix: Callable[[int], str]


def line_number(row: int) -> str:
    return f"line {row + 1:,}"


LINES = Places(line_number, line_number)


class SentenceReader:
    """Makes sentences of texts.

    Attributes:
        cut: number of sources so far that were longer than the model reads.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        target_tokenizer: Tokenizer,
        template: TextTemplate,
        *,
        max_source: int,
        max_prefix: int,
        max_new_tokens: int,
        length_margin: int | None,
        too_long: TooLong = "error",
    ) -> None:
        """`max_source`: number of ids of a source, special ones included; `max_prefix`: of a target prefix."""
        self._tokenizer, self._target_tokenizer, self._template = tokenizer, target_tokenizer, template
        self._max_source, self._max_prefix = max_source, max_prefix
        self._max_new_tokens, self._length_margin = max_new_tokens, length_margin
        self._too_long = too_long
        self._starts: dict[str, tuple[int, ...]] = {"": ()}  # ids of each prefix: often all lines have the same one
        self.cut = 0

    def read(
        self,
        texts: Sequence[str],
        target_prefixes: Sequence[str] | None,
        *,
        first_row: int = 0,
        too_long: TooLong | None = None,
        places: Places = LINES,
    ) -> list[SourceSentence]:
        """One sentence for each text. `first_row`: number of the first text; `too_long` None: the reader's own.

        Raises InputError for a source (unless `too_long` is cut) or a prefix that is too long, and for a prefix with
        tokens outside the target's vocabulary.
        """
        prefixes = [""] * len(texts) if target_prefixes is None else target_prefixes
        if len(prefixes) != len(texts):
            raise ValueError(f"{len(texts)} texts and {len(prefixes)} target prefixes: expected one for each")
        cut = (too_long or self._too_long) == "cut"
        encoded = self._tokenizer.encode_batch(["" if text.isspace() else text for text in texts], most=self._room)
        sentences = []
        for row, (ids, prefix) in enumerate(zip(encoded, prefixes, strict=True), start=first_row):
            fitting = self._cut(ids) if cut else self._checked(ids, texts[row - first_row], row, places)
            start = self._start(prefix, row, places)
            limit = min(self._max_new_tokens, self._max_prefix - len(start) + 1)  # the last one is never read
            if self._length_margin is not None:
                limit = max(1, min(limit, len(fitting) + self._length_margin))
            before, after = self._template.prefix, self._template.suffix
            text_slice = slice(len(before), len(before) + len(fitting))
            sentences.append(SourceSentence((*before, *fitting, *after), text_slice, start, limit))
        return sentences

    def check_sources(self, texts: Sequence[str], *, first_row: int, places: Places) -> None:
        """Raise InputError for a text that is too long for `read`; for none where long texts are cut.

        Tokenizes only texts with more bytes than the model reads tokens: every token stands for at least a byte. (Where
        normalization makes a text longer, only `read` finds it.)
        """
        if self._too_long == "cut":
            return
        long = [(row, text) for row, text in enumerate(texts, start=first_row) if len(text.encode()) >= self._room]
        encoded = self._tokenizer.encode_batch([text for _, text in long], most=self._room)
        for (row, text), ids in zip(long, encoded, strict=True):
            self._checked(ids, text, row, places)

    def check_prefixes(self, prefixes: Iterable[str], *, places: Places) -> None:
        """Raise InputError for a target prefix that `read` refuses; rows count from 0."""
        for row, prefix in enumerate(prefixes):
            self._start(prefix, row, places)

    @property
    def _room(self) -> int:
        """Maximum number of the text's own ids."""
        return max(0, self._max_source - self._template.num_special)

    def _cut(self, ids: list[int]) -> list[int]:
        self.cut += len(ids) > self._room
        return ids[: self._room]

    def _checked(self, ids: list[int], text: str, row: int, places: Places) -> list[int]:
        if len(ids) > self._room:
            size = size_for_message(text, len(ids) + self._template.num_special, most=self._max_source)
            raise InputError(
                f"{places.source(row)}: the source has {size}, but the model reads at most {self._max_source:,}",
                hint="split it into sentences, one a line, or cut its end with --too-long cut",
            )
        return ids

    def _start(self, prefix: str, row: int, places: Places) -> tuple[int, ...]:
        """The ids of a target prefix, checked."""
        if prefix not in self._starts:
            ids = self._target_tokenizer.encode(prefix, most=self._max_prefix)
            self._check_prefix(prefix, ids, places.prefix(row))
            self._starts[prefix] = tuple(ids)
        return self._starts[prefix]

    def _check_prefix(self, prefix: str, ids: Sequence[int], place: str) -> None:
        unk = self._target_tokenizer.special.unk
        if unk is not None and unk in ids:
            words = [word for word in dict.fromkeys(prefix.split()) if unk in self._target_tokenizer.encode(word)]
            listed = ", ".join(f"'{shortened(word, SHOWN_CHARACTERS)}'" for word in words[:SHOWN] or [prefix])
            raise InputError(
                f"{place}: the target prefix has tokens outside the vocabulary: {listed}",
                hint="an unknown token cannot be forced: spell the text as in the training data",
            )
        if len(ids) > self._max_prefix:
            size = size_for_message(prefix, len(ids), most=self._max_prefix)
            raise InputError(
                f"{place}: the target prefix has {size}, but the model's context has room for {self._max_prefix:,}"
            )
