"""Pieces and scores of Kudo's unigram language model (arXiv 1804.10959), trained by SentencePiece on counted words.

The result is a function of the counts alone: words are given in sorted order, and the number of threads is fixed,
because the expectation step adds one partial sum per thread.
"""

from __future__ import annotations

import io
from collections import Counter

import sentencepiece

THREADS = 8  # another number gives other sums, and so another tokenizer
MAX_PIECE_LENGTH = 16
FIRST_PRIVATE = 0xF0000  # private-use characters stand for those that SentencePiece reserves
# Ends of lines and fields of its input, its sentence boundary, and its marks for unknown and protected characters.
UNKNOWN = "\n"  # SentencePiece needs a piece for it; no word contains this one
RESERVED = "\n\r\t\0\u2047\u2585"


def train_pieces(words: Counter[str], size: int) -> list[tuple[str, float]]:
    """(piece, log probability) of at most `size` pieces, the most probable first.

    Every character of the words is a piece; where there are more than `size`, the most frequent are.
    """
    used = set().union(*words)
    free = (code for code in range(FIRST_PRIVATE, 0x10FFFE) if chr(code) not in used)
    to_private = {ord(character): code for character, code in zip(RESERVED, free, strict=False)}
    from_private = {code: character for character, code in to_private.items()}
    words = _without_rare_characters(Counter({word.translate(to_private): n for word, n in words.items()}), size)
    if not words:
        return []
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(f"{word}\t{count}" for word, count in sorted(words.items())),
        input_format="tsv",
        model_writer=model,
        model_type="unigram",
        vocab_size=size + 1,
        hard_vocab_limit=False,
        character_coverage=1.0,
        max_sentencepiece_length=MAX_PIECE_LENGTH,
        max_sentence_length=2**30,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_by_whitespace=False,
        split_by_unicode_script=False,
        split_by_number=False,
        unk_piece=UNKNOWN,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        num_threads=THREADS,
        minloglevel=3,
    )
    trained = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(trained.get_piece_size())
    pieces = ((trained.id_to_piece(i), min(trained.get_score(i), 0.0)) for i in ids)
    return [(piece.translate(from_private), score) for piece, score in pieces if piece != UNKNOWN]


def most_frequent(counts: Counter[str], limit: int) -> list[str]:
    """At most `limit` keys by falling count, equal counts in the order of the keys."""
    return sorted(counts, key=lambda key: (-counts[key], key))[:limit]


def _without_rare_characters(words: Counter[str], limit: int) -> Counter[str]:
    """The words, cut at characters that are not among the `limit` most frequent ones."""
    characters: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            characters[character] += count
    if len(characters) <= limit:
        return words
    separators = dict.fromkeys(map(ord, set(characters) - set(most_frequent(characters, limit))), "\n")
    parts: Counter[str] = Counter()
    for word, count in words.items():
        for part in word.translate(separators).split("\n"):
            if part:
                parts[part] += count
    return parts
