"""The six kinds of tokenizer as pipelines of the `tokenizers` library: normalizer, pre-tokenizer, model, decoder.

Losses of each kind:

    byte-bpe   BPE over bytes (GPT-2): no unknown token, lossless (after its normalization)
    bpe        BPE over characters, a space written as ▁: loses ▁ itself and, without byte_fallback, unseen characters
    unigram    Kudo's unigram language model (arXiv 1804.10959), lossless as far as bpe is
    wordpiece  BERT's: cleans the text, splits at white space and punctuation; spacing is lost
    word       words and single punctuation marks; spacing is lost, decoding guesses it
    char       one id per character of the training text: lossless for these characters

Text that looks like a special token never becomes one: pre-tokenizers separate letters from punctuation, and every
special token contains both. No pre-token of a training is longer than `MAX_WORD_LENGTH`, which bounds a trainer's
memory for one word.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from tformer.support.errors import InputError
from tformer.tokenizer.options import TokenizerOptions
from tformer.tokenizer.special import TEMPLATES, last_tokens, sentinel_tokens, special_tokens

BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
SPACE = "▁"
MAX_WORD_LENGTH = 100
"""Characters of a word: longer words are cut, or become [UNK] (wordpiece), which bounds a trainer's memory for one."""

# GPT-2's pattern, with combining marks as letters and every run cut at @ characters.
SUBWORD_PATTERN = (
    r"(?i:'(?:[sdmt]|ll|ve|re))| ?[\p{L}\p{M}]{1,@}| ?\p{N}{1,@}| ?[^\s\p{L}\p{M}\p{N}]{1,@}|\s{1,@}(?!\S)|\s{1,@}"
)
WORD_PATTERN = r"\w{1,@}|[^\w]"


def untrained(options: TokenizerOptions, alphabet: Sequence[str] | None = None) -> tuple[RustTokenizer, Any]:
    """(tokenizer without a vocabulary, its trainer) for byte-bpe, bpe, wordpiece and word.

    Args:
        alphabet: the first entries for text, in order. Without it the trainer finds the characters of the text.
    """
    unk = TEMPLATES[options.template].unk
    # A trainer takes entries in a given order only as special tokens; `finished` makes them text again.
    first = (*special_tokens(options), *byte_tokens(options), *(alphabet or ()))
    counting: dict[str, Any] = {
        "vocab_size": options.vocab_size - len(last_tokens(options)),
        "special_tokens": _as_special(first),
        "min_frequency": options.min_frequency,
        "show_progress": False,
    }
    limit: dict[str, Any] = {"limit_alphabet": text_room(options) if alphabet is None else 0}
    trainer: Any
    model: Any
    match options.model:
        case "byte-bpe":
            every_byte = pre_tokenizers.ByteLevel.alphabet()  # without it, bytes that are not in the text would be lost
            model, trainer = models.BPE(), trainers.BpeTrainer(initial_alphabet=every_byte, **counting)
        case "bpe":
            model, trainer = models.BPE(unk_token=unk), trainers.BpeTrainer(**limit, **counting)
        case "wordpiece":
            model, trainer = models.WordPiece(unk_token=unk), trainers.WordPieceTrainer(**limit, **counting)
        case "word":
            model, trainer = models.WordLevel(unk_token=unk), trainers.WordLevelTrainer(**counting)
        case _:
            raise AssertionError(f"{options.model} has no trainer")
    tokenizer = RustTokenizer(model)
    _set(tokenizer, normalizer=build_normalizer(options), pre_tokenizer=build_pre_tokenizer(options, training=True))
    return tokenizer, trainer


def untrained_alphabet(options: TokenizerOptions) -> tuple[RustTokenizer, Any]:
    """(tokenizer, trainer) whose vocabulary becomes the characters of the text, for wordpiece also ##character."""
    tokenizer, _ = untrained(options)
    kind = trainers.WordPieceTrainer if options.model == "wordpiece" else trainers.BpeTrainer
    return tokenizer, kind(vocab_size=0, special_tokens=[], show_progress=False)


def from_pieces(pieces: Iterable[tuple[str, float]], options: TokenizerOptions) -> RustTokenizer:
    """The unigram kind: special tokens, byte tokens, then (piece, log probability)."""
    specials = special_tokens(options)
    first = [*specials, *byte_tokens(options)]
    vocabulary = [*((token, 0.0) for token in first), *pieces]
    unk_id = specials.index(TEMPLATES[options.template].unk)
    tokenizer = RustTokenizer(models.Unigram(vocabulary, unk_id=unk_id, byte_fallback=options.byte_fallback))
    tokenizer.add_special_tokens(_as_special(specials))
    _set(tokenizer, normalizer=build_normalizer(options))
    return tokenizer


def from_characters(characters: Iterable[str], options: TokenizerOptions) -> RustTokenizer:
    """The char kind: special tokens, then the characters by code point. BPE without merges is exactly that."""
    tokens = [*special_tokens(options), *sorted(set(characters))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = RustTokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=TEMPLATES[options.template].unk))
    tokenizer.add_special_tokens(_as_special(special_tokens(options)))
    _set(tokenizer, normalizer=build_normalizer(options))
    return tokenizer


def finished(tokenizer: RustTokenizer, options: TokenizerOptions) -> str:
    """The JSON of a trained tokenizer with added tokens, sentinels, template and decoder in place."""
    for token in options.added_tokens:
        # A token that begins and ends as a word does must not match inside a longer word.
        is_word = all(end == "_" or unicodedata.category(end)[0] in "LMN" for end in (token[0], token[-1]))
        tokenizer.add_tokens([AddedToken(token, single_word=is_word, normalized=False)])
    tokenizer.add_special_tokens(_as_special(sentinel_tokens(options)))
    processor = TEMPLATES[options.template].processor
    ids = tokenizer.get_vocab(with_added_tokens=True)
    _set(
        tokenizer,
        pre_tokenizer=build_pre_tokenizer(options, training=False),
        decoder=_decoder(options),
        post_processor=processor(ids) if processor else None,
    )
    document = json.loads(tokenizer.to_str())
    if options.model in ("wordpiece", "word"):  # trainers reset these to the library's defaults
        document["model"]["unk_token"] = TEMPLATES[options.template].unk
    if options.model == "wordpiece":
        document["model"]["max_input_chars_per_word"] = MAX_WORD_LENGTH
    if options.byte_fallback:
        document["model"]["byte_fallback"] = True
    added = {*special_tokens(options), *last_tokens(options)}
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] in added]
    return json.dumps(document, ensure_ascii=False, indent=1)


def build_normalizer(options: TokenizerOptions) -> Any:
    """Unicode form, then case, then accents; BERT's cleaning for wordpiece. None if the text stays unchanged."""
    steps: list[Any] = []
    if options.unicode != "none":
        steps.append({"nfc": normalizers.NFC, "nfkc": normalizers.NFKC}[options.unicode]())
    if options.model == "wordpiece":
        steps.append(normalizers.BertNormalizer(lowercase=options.lowercase, strip_accents=options.strip_accents))
        return normalizers.Sequence(steps)
    if options.lowercase:
        steps.append(normalizers.Lowercase())
    if options.strip_accents:
        # Recomposed at the end: decomposed characters (Hangul, for example) would be several tokens.
        steps += [normalizers.NFD(), normalizers.StripAccents(), normalizers.NFC()]
    return normalizers.Sequence(steps) if steps else None


def build_pre_tokenizer(options: TokenizerOptions, *, training: bool) -> Any:
    """The pre-tokenizer that splits text into words; with `training`, into the words that a trainer sees."""

    def cut(pattern: str) -> Any:
        return pre_tokenizers.Split(Regex(pattern.replace("@", str(MAX_WORD_LENGTH))), "isolated")

    digits = [pre_tokenizers.Digits(individual_digits=True)] if options.digits else []
    own = options.pre_tokenization == "tformer"
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not own)  # the regex is GPT-2's
    metaspace = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never", split=False)
    steps: dict[str, list[Any]] = {
        "byte-bpe": [
            *([cut(SUBWORD_PATTERN)] if own else []),
            *digits,
            to_bytes,
            *([cut(r"\S{1,@}")] if training and not own else []),
        ],
        "bpe": [cut(SUBWORD_PATTERN), *digits, metaspace],
        "unigram": [cut(SUBWORD_PATTERN), *digits, metaspace],
        # BERT and GPT-2 do not cut long words: the cut in training only bounds the trainer's memory.
        "wordpiece": [pre_tokenizers.BertPreTokenizer(), *digits, *([cut(r"\S{1,@}")] if training else [])],
        "word": [pre_tokenizers.WhitespaceSplit(), cut(WORD_PATTERN), *digits],
        "char": [],
    }
    return pre_tokenizers.Sequence(steps[options.model]) if steps[options.model] else None


def _decoder(options: TokenizerOptions) -> Any:
    match options.model:
        case "byte-bpe":
            return decoders.ByteLevel()
        case "bpe" | "unigram":
            fallback = [decoders.ByteFallback()] if options.byte_fallback else []
            return decoders.Sequence([decoders.Replace(SPACE, " "), *fallback, decoders.Fuse()])
        case "wordpiece":
            return decoders.WordPiece(prefix="##", cleanup=False)  # cleaning would turn "do not" into "don't"
        case "word":
            return decoders.Sequence(
                [
                    decoders.Replace(Regex(r"^(?=.)"), " "),
                    decoders.Replace(Regex(r"^ (?=[.,;:!?)\]}%]$)"), ""),
                    decoders.Fuse(),
                    decoders.Strip(" ", 1, 0),
                ]
            )
        case _:
            return decoders.Fuse()


def _as_special(tokens: Iterable[str]) -> list[AddedToken]:
    return [AddedToken(token, special=True, normalized=False) for token in tokens]


def text_room(options: TokenizerOptions) -> int:
    """The number of entries for text, without special and added tokens, sentinels and bytes.

    Raises InputError where there is no room.
    """
    specials = len(special_tokens(options)) + len(last_tokens(options))
    every_byte = 256 if options.model == "byte-bpe" or options.byte_fallback else 0
    room = options.vocab_size - specials - every_byte
    smallest = specials + every_byte + (options.model != "byte-bpe")
    if options.vocab_size < smallest:
        raise InputError(
            f"vocab_size must be at least {smallest} for model {options.model} with template {options.template}, "
            f"found {options.vocab_size}",
            hint=f"special tokens, added tokens and sentinels take {specials}"
            + (f", the bytes {every_byte}" if every_byte else ""),
        )
    return room


def byte_tokens(options: TokenizerOptions) -> tuple[str, ...]:
    """The tokens `<0xNN>` of bytes; () without byte_fallback."""
    return BYTE_TOKENS if options.byte_fallback else ()


def _set(tokenizer: RustTokenizer, **parts: Any) -> None:
    """Assign the parts that are not None, because the library does not accept None."""
    for name, part in parts.items():
        if part is not None:
            setattr(tokenizer, name, part)
