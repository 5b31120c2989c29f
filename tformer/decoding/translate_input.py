"""Lines of text as sentences that can be translated: encoded, checked, with the length each may reach.

Everything is checked before anything is translated, so that a mistake on line 900 costs no work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tformer.data.template import TextTemplate
from tformer.errors import InputError
from tformer.tokenizer import Tokenizer

TooLong = Literal["error", "cut"]
SHOWN = 5  # unknown words of a prefix that are listed


@dataclass(frozen=True)
class Sentence:
    """One text to translate.

    `source`: ids with the template's special ones, `text_slice` are the text's own. `prefix`: ids that the translation
    has to begin with. `limit`: the most tokens that may follow them.
    """

    source: tuple[int, ...]
    text_slice: slice
    prefix: tuple[int, ...]
    limit: int

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to translate."""
        return self.text_slice.start == self.text_slice.stop


class SentenceReader:
    """Texts in, sentences out.

    Attributes: `cut` counts the sources so far that were longer than the model reads.
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
    ) -> None:
        """`max_source`: ids, special ones included; `max_prefix`: ids of a text that the translation begins with."""
        self._tokenizer, self._target_tokenizer, self._template = tokenizer, target_tokenizer, template
        self._max_source, self._max_prefix = max_source, max_prefix
        self._max_new_tokens, self._length_margin = max_new_tokens, length_margin
        self.cut = 0

    def read(
        self, texts: Sequence[str], target_prefixes: Sequence[str] | None, *, first_row: int, too_long: TooLong
    ) -> list[Sentence]:
        """One sentence for each text. Messages count lines from 1, `first_row` before the first of these.

        Raises InputError for a source (unless `too_long` is cut) or a prefix that is too long, and for a prefix with
        tokens that the target's vocabulary does not know.
        """
        prefixes = [""] * len(texts) if target_prefixes is None else target_prefixes
        if len(prefixes) != len(texts):
            raise ValueError(f"{len(texts)} texts and {len(prefixes)} target prefixes: expected one for each")
        encoded = self._tokenizer.encode_batch(["" if not text.strip() else text for text in texts])
        # Each prefix once: often all lines have the same.
        starts = {prefix: tuple(self._target_tokenizer.encode(prefix)) if prefix else () for prefix in set(prefixes)}
        sentences = []
        for number, (ids, prefix) in enumerate(zip(encoded, prefixes, strict=True), start=first_row + 1):
            if prefix:
                self._check_prefix(prefix, starts[prefix], number)
            sentences.append(self._sentence(self._fitting(ids, number, too_long), starts[prefix]))
        return sentences

    def _sentence(self, ids: list[int], prefix: tuple[int, ...]) -> Sentence:
        template = self._template
        limit = min(self._max_new_tokens, self._max_prefix - len(prefix) + 1)  # the last one is never read
        if self._length_margin is not None:
            limit = max(1, min(limit, len(ids) + self._length_margin))
        start = len(template.prefix)
        source = (*template.prefix, *ids, *template.suffix)
        return Sentence(source, slice(start, start + len(ids)), prefix, limit)

    def _fitting(self, ids: list[int], number: int, too_long: TooLong) -> list[int]:
        room = max(0, self._max_source - self._template.num_special)
        if len(ids) <= room:
            return ids
        if too_long == "error":
            raise InputError(
                f"line {number:,} has {len(ids) + self._template.num_special:,} tokens, "
                f"but the model reads at most {self._max_source:,}",
                hint="split it into sentences",
            )
        self.cut += 1
        return ids[:room]

    def _check_prefix(self, prefix: str, ids: Sequence[int], number: int) -> None:
        unk = self._target_tokenizer.special.unk
        if unk is not None and unk in ids:
            words = [word for word in dict.fromkeys(prefix.split()) if unk in self._target_tokenizer.encode(word)]
            listed = ", ".join(f"'{word}'" for word in words[:SHOWN]) or f"'{prefix}'"
            raise InputError(
                f"line {number:,}: the target prefix has tokens that the vocabulary does not know: {listed}",
                hint="begin with words that the model has seen",
            )
        if len(ids) > self._max_prefix:
            raise InputError(
                f"line {number:,}: the target prefix has {len(ids):,} tokens, but the model's context has room for "
                f"{self._max_prefix:,}"
            )
