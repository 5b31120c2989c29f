"""The most probable tokens for each [MASK] of a text (Cloze; BERT, arXiv 1810.04805).

Each mask is filled by itself: p(token | text with every mask left in), a softmax over the vocabulary. With several
masks the answers are not a joint choice.
"""

# Shapes: T tokens, M masks, V vocabulary.

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice

import torch

from tformer.data.shards.template import single_template
from tformer.decoding.inference import inference
from tformer.decoding.prompts import OnRead
from tformer.model import Transformer
from tformer.support.errors import InputError, require_finite
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.pieces import size_for_message

HEAD = "masked_lm"
SPELLINGS = ("[MASK]", "<mask>")  # accepted for every tokenizer, beside its own name of the mask
SPACE_BEFORE_WORD = ("byte-bpe", "bpe", "unigram")  # a word's token begins with the space before it
SPACE_LEFT_OUT = ("word", "wordpiece")  # spaces have no ids: decoding puts one between words


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token for a mask: its text, id and probability, and the whole text with it (other masks stay)."""

    token: str
    id: int
    probability: float
    text: str


@dataclass(frozen=True)
class _Cloze:
    """A text, and its ids without the template. Each mask has a place among the ids and a span of the text."""

    text: str
    ids: list[int]
    places: list[int]
    spans: list[tuple[int, int]]


def fill_mask(
    model: Transformer, tokenizer: Tokenizer, text: str, *, top: int, on_read: OnRead = lambda *_: None
) -> list[list[Candidate]]:
    """The `top` most probable tokens for each mask of `text`, masks in order, tokens by falling probability.

    `[MASK]`, `<mask>` and the tokenizer's own name all mean its mask token. Special tokens count in the softmax but
    are no candidates.

    Raises InputError for a text without a mask or longer than the model reads, for a model without a masked_lm head,
    and for a tokenizer without a mask token.
    """
    if HEAD not in model.heads:
        found = ", ".join(model.heads) or "none"
        raise InputError(
            f"filling masks needs a masked language model (a head of kind {HEAD}), this one's heads: {found}",
            hint="pre-train one with `tformer train --arch bert --objective masked_lm`",
        )
    mask_id = tokenizer.special.mask
    if mask_id is None:
        raise InputError(
            f"the tokenizer ({tokenizer.kind}) has no mask token",
            hint="train one with --template bert or --template roberta",
        )
    cloze = _read(tokenizer, text, mask_id, most=model.max_seq_len)
    template = single_template(tokenizer)
    prefix, suffix = [int(i) for i in template.prefix], [int(i) for i in template.suffix]
    length = len(prefix) + len(cloze.ids) + len(suffix)
    if length > model.max_seq_len:
        size = size_for_message(text, length, most=model.max_seq_len)
        raise InputError(f"the text has {size} with its special ones, but the model reads {model.max_seq_len}")
    on_read(length, 0)
    with inference(model):
        device = next(model.parameters()).device
        ids_1T = torch.tensor([[*prefix, *cloze.ids, *suffix]], device=device)
        places_1T = torch.zeros_like(ids_1T, dtype=torch.bool)
        places_1T[0, [len(prefix) + place for place in cloze.places]] = True
        logits_MV = torch.cat(list(model(ids_1T).logit_chunks(HEAD, places_1T)))
        # A rounded-up vocabulary has rows without a token.
        probabilities_MV = logits_MV[:, : tokenizer.vocab_size].softmax(dim=-1)
        require_finite(probabilities_MV, "probabilities")
        best = probabilities_MV.sort(dim=-1, descending=True, stable=True)
        values, order = best.values.tolist(), best.indices.tolist()
    candidates = []
    for mask in range(len(cloze.places)):
        ranked = zip(order[mask], values[mask], strict=True)
        of_text = (pair for pair in ranked if not tokenizer.is_special(pair[0]) and _has_token(tokenizer, pair[0]))
        candidates.append(
            [
                Candidate(_spelling(tokenizer, token), token, probability, _filled(tokenizer, cloze, mask, token))
                for token, probability in islice(of_text, top)
            ]
        )
    return candidates


def _read(tokenizer: Tokenizer, text: str, mask_id: int, *, most: int) -> _Cloze:
    """Encode the text between the masks. A text of more than `most` tokens may be cut, but never to `most` or fewer.

    Where tokens begin with a space, the mask stands for that space too.
    """
    names = {*SPELLINGS, tokenizer.token(mask_id)}
    masks = list(re.finditer("|".join(re.escape(name) for name in sorted(names)), text))
    if not masks:
        expected = tokenizer.token(mask_id)
        raise InputError(
            f"found no mask in the text, expected {expected} at least once", hint=f'for example "The {expected} sat."'
        )
    ids: list[int] = []
    places: list[int] = []
    end = 0
    for mask in masks:
        piece = text[end : mask.start()]
        ids += tokenizer.encode(piece.removesuffix(" ") if tokenizer.kind in SPACE_BEFORE_WORD else piece, most=most)
        places.append(len(ids))
        ids.append(mask_id)
        end = mask.end()
    return _Cloze(text, [*ids, *tokenizer.encode(text[end:], most=most)], places, [mask.span() for mask in masks])


def _has_token(tokenizer: Tokenizer, token_id: int) -> bool:
    try:
        tokenizer.token(token_id)
    except ValueError:  # a hole in the vocabulary
        return False
    return True


def _spelling(tokenizer: Tokenizer, token_id: int) -> str:
    """The token as text; its spelling in the vocabulary where the text is empty or half a character."""
    text = tokenizer.decode([token_id]).strip()
    return text if text and "\N{REPLACEMENT CHARACTER}" not in text else tokenizer.token(token_id)


def _filled(tokenizer: Tokenizer, cloze: _Cloze, mask: int, token_id: int) -> str:
    """The given text with the token in place of one mask; only a space before it may be dropped."""
    place, (start, end) = cloze.places[mask], cloze.spans[mask]
    before = cloze.text[:start]
    read = tokenizer.decode(cloze.ids[:place], skip_special=False)
    added = tokenizer.decode([*cloze.ids[:place], token_id], skip_special=False).removeprefix(read)
    if tokenizer.kind in SPACE_LEFT_OUT and not before.endswith(" "):
        added = added.removeprefix(" ")
    elif tokenizer.kind != "char" and (read or added.startswith(" ")):
        before = before.removesuffix(" ")  # the token has it, or continues the word before
    return before + added + cloze.text[end:]
