"""A text as a model reads it: ids inside their template, with pieces, offsets and token types; padded batches.

decoder only       opening ids (Llama's <s>, mostly none), text
encoder            [CLS] text [SEP], a pair [CLS] text [SEP] second text [SEP], as the tokenizer's template says
target side        decoder's start, text, end: the decoder reads all but the last id and predicts all but the first
tokenizer alone    its own template
"""

# Shapes: B texts, T tokens.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tformer.data.batching.padding import PadTo, pad_layout
from tformer.data.shards.template import (
    TextTemplate,
    fitting_sizes,
    head_of,
    own_template,
    pair_template,
    plain_template,
    single_template,
    text_room,
)
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.pieces import Truncation, is_long

SPELLED_OUT = ("wordpiece", "word", "char")  # kinds with tokens shown as in the vocabulary


def start_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids that an empty prompt begins from: the bos token, else eos (packed texts have it between them), else a
    newline, else the vocabulary's first token."""
    for special in (tokenizer.special.bos, tokenizer.special.eos):
        if special is not None:
            return [special]
    newline = tokenizer.encode("\n")
    if len(newline) == 1 and newline[0] != tokenizer.special.unk:
        return newline
    return [0]


def encode_prompt(tokenizer: Tokenizer, text: str, *, most: int | None = None, keep: Truncation = "head") -> list[int]:
    """The ids of a prompt. Before them stand the ids that the tokenizer opens every text with (Llama's `<s>`), if any.

    A prompt without tokens (empty, or spaces only for a word tokenizer) gives `start_ids`. `most` and `keep` are those
    of `Tokenizer.encode_batch`.
    """
    return [*tokenizer.opening, *tokenizer.encode(text, most=most, keep=keep)] or start_ids(tokenizer)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token with its leading space; a part of a character as the vocabulary spells it."""
    spelled = tokenizer.token(token)
    if tokenizer.kind in SPELLED_OUT or tokenizer.is_special(token):
        return spelled
    text = tokenizer.decode([token], skip_special=False)
    if spelled.startswith("▁") and not text.startswith(" "):
        text = " " + text  # the decoder dropped the first space of a text
    return text if text and "\N{REPLACEMENT CHARACTER}" not in text else spelled


@dataclass(frozen=True)
class EncodedText:
    """One text or a pair inside its template, a value for each token.

    Attributes:
        ids, types: token ids and token types.
        parts: 0 for tokens of the first text, 1 for tokens of the second.
        spans: offsets in the characters of the token's text; None for a token of the template.
        num_cut: number of tokens of the texts that did not fit (of a long text at least one, if they were not counted).
    """

    ids: tuple[int, ...]
    types: tuple[int, ...]
    parts: tuple[int, ...]
    spans: tuple[tuple[int, int] | None, ...]
    num_cut: int = 0

    @property
    def from_template(self) -> list[bool]:
        """For each token whether it belongs to the template."""
        return [span is None for span in self.spans]


Token = tuple[int, int, int, tuple[int, int] | None]
"""Id, type, part and span of a token, see `EncodedText`."""


@dataclass(frozen=True)
class TextReader:
    """Reads texts as the ids of one side of a model.

    Attributes:
        single: the template of one text.
        pair: makes the template of two texts; None where the model reads one.
        starts: ids that stand for an empty text; () where an empty text is allowed.
        max_length: the most tokens of an input, special ones included; None if there is no limit.
        padding_side, pad_to, truncation: of batches.
    """

    tokenizer: Tokenizer
    single: TextTemplate
    pair: Callable[[Tokenizer], TextTemplate] | None = None
    starts: tuple[int, ...] = ()
    max_length: int | None = None
    padding_side: Literal["right", "left"] = "right"
    pad_to: PadTo = "longest"
    truncation: Truncation = "head"

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer, **settings: Any) -> TextReader:
        """A tokenizer without a model: its own template, if it has one."""
        own = own_template(tokenizer)
        return cls(tokenizer, own, pair_template if own.num_special else None, **settings)

    @classmethod
    def of_prompts(cls, tokenizer: Tokenizer, **settings: Any) -> TextReader:
        """A decoder-only language model's reading."""
        starts = () if tokenizer.opening else tuple(start_ids(tokenizer))
        return cls(tokenizer, plain_template(tokenizer.opening), starts=starts, **settings)

    @classmethod
    def of_encoder(cls, tokenizer: Tokenizer, **settings: Any) -> TextReader:
        """The reading of an encoder, or of a classifier."""
        return cls(tokenizer, single_template(tokenizer), pair_template, **settings)

    @classmethod
    def of_target(cls, tokenizer: Tokenizer, prefix: Sequence[int], end: int, **settings: Any) -> TextReader:
        """The reading of a decoder that reads an encoder's output: start tokens, text, end."""
        return cls(tokenizer, plain_template(prefix, [end]), **settings)

    @property
    def pad_id(self) -> int:
        """The id in padded places, which the attention mask hides."""
        return self.tokenizer.special.pad or 0

    def encode(self, text: str, text2: str | None = None, *, cut: bool = False, count_cut: bool = True) -> EncodedText:
        """A text, or a pair, inside its template.

        Args:
            cut: leave out what is longer than `max_length`, see `truncation`.
            count_cut: count the tokens that were left out exactly, which takes time for a long text.

        Raises InputError for two texts where the model reads one, and for no room beside the special tokens.
        """
        texts = [text] if text2 is None else [text, text2]
        if len(texts) == 2 and self.pair is None:
            raise InputError("there is no template for two texts here, only for one", hint="give the whole text as one")
        template = self.single if self.pair is None or text2 is None else self.pair(self.tokenizer)
        most = self.max_length if cut else None
        encoded = [self.tokenizer.encode_spans(one, most=most, keep=self.truncation) for one in texts]
        sizes = [len(ids) for ids, _ in encoded]
        kept = self._kept(template, sizes) if cut else sizes
        if not template.num_special and not sum(kept):
            zeros = (0,) * len(self.starts)
            return EncodedText(self.starts, zeros, zeros, (None,) * len(self.starts))

        def of_template(ids: Sequence[int], types: Sequence[int], part: int) -> list[Token]:
            return [(token, kind, part, None) for token, kind in zip(ids, types, strict=True)]

        def of_text(part: int) -> list[Token]:
            ids, spans = encoded[part]
            places = self._places(sizes[part], kept[part])
            return [(ids[place], part * template.second_type, part, spans[place]) for place in places]

        tokens = [*of_template(template.prefix, template.prefix_types, 0), *of_text(0)]
        if len(texts) == 2:
            tokens += [*of_template(template.middle, template.middle_types, 0), *of_text(1)]
        tokens += of_template(template.suffix, template.suffix_types, len(texts) - 1)
        ids, types, parts, spans = zip(*tokens, strict=True) if tokens else ((), (), (), ())
        num_cut = sum(sizes) - sum(kept)
        if num_cut and count_cut and any(map(is_long, texts)):
            num_cut = sum(map(self.tokenizer.count, texts)) - sum(kept)
        return EncodedText(ids, types, parts, spans, num_cut)

    def batch(self, texts: Sequence[EncodedText]) -> dict[str, np.ndarray]:
        """int64 [B, T] `input_ids`, `attention_mask` (1 on real tokens) and `token_type_ids`, padded to one width.

        Raises InputError for padding to the maximum without a `max_length`.
        """
        if self.pad_to == "max" and self.max_length is None:
            raise InputError("padding to the maximum needs a maximum length")
        longest = max((len(text.ids) for text in texts), default=0)
        max_len = None if self.max_length is None else max(self.max_length, longest)
        layout = pad_layout(
            [len(text.ids) for text in texts], side=self.padding_side, pad_to=self.pad_to, max_len=max_len
        )
        return {
            "input_ids": layout.fill([np.array(text.ids, dtype=np.int64) for text in texts], self.pad_id),
            "attention_mask": layout.fill([np.ones(len(text.ids), dtype=np.int64) for text in texts], 0),
            "token_type_ids": layout.fill([np.array(text.types, dtype=np.int64) for text in texts], 0),
        }

    def _kept(self, template: TextTemplate, sizes: Sequence[int]) -> list[int]:
        if self.max_length is None or sum(sizes) + template.num_special <= self.max_length:
            return list(sizes)
        room = text_room(self.max_length, template.num_special, texts=len(sizes), key="the maximum length")
        first, second = fitting_sizes(sizes[0], sizes[1] if len(sizes) == 2 else 0, room)
        return [int(first), int(second)][: len(sizes)]

    def _places(self, size: int, kept: int) -> list[int]:
        head = int(head_of(np.array(kept), self.truncation))
        return [*range(head), *range(size - (kept - head), size)]
