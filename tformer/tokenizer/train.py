"""Train a tokenizer on text of any size, on an evenly spread sample where the text is too large.

The trainers keep every distinct word (pre-token) in memory, so their memory grows with the text. Text beyond SAMPLE_MB
is read whole, but an evenly spread share is used, as the report shows. Only char needs no sample: its memory is its
alphabet. Everything is a function of the text alone: training on the same text sees the same chunks.

The same text gives the same file, byte by byte, with any number of threads. The library orders the characters of bpe
and wordpiece at random where that order matters; they are counted and ordered here first.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from tformer.support.errors import InputError, Interrupted, TformerError
from tformer.tokenizer.options import TokenizerModel, TokenizerOptions
from tformer.tokenizer.pieces import PIECE_LIMIT
from tformer.tokenizer.pipeline import (
    SPACE,
    build_normalizer,
    build_pre_tokenizer,
    byte_tokens,
    finished,
    from_characters,
    from_pieces,
    text_room,
    untrained,
    untrained_alphabet,
)
from tformer.tokenizer.special import last_tokens, sentinel_tokens, special_tokens
from tformer.tokenizer.tokenizer import Tokenizer
from tformer.tokenizer.unigram import most_frequent, train_pieces
from tformer.workers.work import QUIET, Work

CHUNK_CHARACTERS = 16_384
LONGEST_CHUNK = PIECE_LIMIT  # of text without a place to cut, in characters
UNSEEN_EVERY = 50  # one in this number of chunks is withheld from training, to report on unseen text
REPORT_BYTES = 1_000_000


def utf8_length(text: str) -> int:
    """Bytes of the text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", errors="surrogatepass"))


_WORD = r"[ \t\n\r\u3000](?=\S)"  # not \s: wordpiece joins what other control characters separate
_LAST_WORD, _NEXT_WORD = re.compile(f".+(?={_WORD})", re.DOTALL), re.compile(_WORD)


def chunks(text: str) -> Iterator[str]:
    """Pieces of about CHUNK_CHARACTERS of the text; together they have the tokens of the whole text.

    They are cut before the last white space before a word: there the pre-tokenizers of all kinds begin a new word, and
    no normalizer joins the sides. Without such a place a piece ends after LONGEST_CHUNK characters.
    """
    start = 0
    while len(text) - start > CHUNK_CHARACTERS:
        end = start + CHUNK_CHARACTERS
        if before := _LAST_WORD.match(text, start, end):
            end = before.end()
        elif after := _NEXT_WORD.search(text, end - 1, start + LONGEST_CHUNK):
            end = after.start()
        else:
            end = start + LONGEST_CHUNK
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


class EvenSample:
    """An evenly spread sample of a stream of unknown length in bounded memory.

    It holds every stride-th text; when they exceed the limit, every other one is dropped and the stride doubles.
    """

    def __init__(self, limit_bytes: int = REPORT_BYTES) -> None:
        self.texts: list[str] = []
        self._size = 0
        self._limit = limit_bytes
        self._stride = 1
        self._count = 0

    def add(self, text: str) -> None:
        if self._count % self._stride == 0:
            self.texts.append(text)
            self._size += utf8_length(text)
            while self._size > self._limit and len(self.texts) > 1:
                self.texts = self.texts[::2]
                self._size = sum(utf8_length(text) for text in self.texts)
                self._stride *= 2
        self._count += 1


class Feed:
    """The chunks of text for a trainer; counts and samples them.

    Args:
        share: of the bytes that is used, evenly spread; 1: all.
        withhold: leave out one chunk in UNSEEN_EVERY, to report on unseen text.
        check: called before every chunk with the bytes so far; may raise to end the training.
    """

    def __init__(
        self,
        documents: Callable[[], Iterator[str]],
        *,
        share: float,
        withhold: bool,
        check: Callable[[int], None],
    ) -> None:
        self._documents = documents
        self._share = share
        self._withhold = withhold
        self._check = check
        self.seen_bytes = 0
        self.used_bytes = 0
        self.blank = True
        self.ended = threading.Event()
        self.failure: Exception | None = None
        self.trained = EvenSample()
        self.unseen = EvenSample()

    def __iter__(self) -> Iterator[str]:
        try:
            every_chunk = chain.from_iterable(map(chunks, self._documents()))
            for number, chunk in enumerate(every_chunk, start=1):
                self._check(self.seen_bytes)
                size = utf8_length(chunk)
                self.seen_bytes += size
                if self._withhold and number % UNSEEN_EVERY == 0:
                    self.unseen.add(chunk)
                elif self.used_bytes + size <= self.seen_bytes * self._share or self._share >= 1:
                    self.used_bytes += size
                    self.blank = self.blank and chunk.isspace()
                    self.trained.add(chunk)
                    yield chunk
        except Exception as error:
            self.failure = error  # the library first trains on the chunks so far: see `_train_model`
            raise
        finally:
            self.ended.set()


Documents = Callable[[], Iterator[str]]

SAMPLE_MB: dict[TokenizerModel, int | None] = {
    "byte-bpe": 256,
    "bpe": 256,
    "wordpiece": 256,
    "word": 256,
    "unigram": 64,
    "char": None,
}


@dataclass(frozen=True)
class TrainingFacts:
    """Facts about a training for the report: sizes in UTF-8 bytes, and samples of the text."""

    seen_bytes: int
    used_bytes: int
    sample_limit_bytes: int | None
    seconds: float
    trained_sample: tuple[str, ...]
    unseen_sample: tuple[str, ...]

    @property
    def sampled(self) -> bool:
        return self.sample_limit_bytes is not None and self.seen_bytes > self.sample_limit_bytes


def train_tokenizer(documents: Documents, options: TokenizerOptions, **settings: Any) -> Tokenizer:
    """The tokenizer of `train_with_facts`, which has the same arguments."""
    return train_with_facts(documents, options, **settings)[0]


def train_with_facts(
    documents: Documents,
    options: TokenizerOptions,
    *,
    size_bytes: int | None = None,
    work: Work = QUIET,
) -> tuple[Tokenizer, TrainingFacts]:
    """Train on `documents()`, a fresh iterator over texts at each call, read lazily.

    The text is read once more to measure it, unless `size_bytes` shows that no sample is needed.
    `work` reports the bytes read, and is polled throughout. Raises InputError for a text or a vocabulary that is too
    small, Interrupted if `work` is stopped.
    """
    started = time.monotonic()
    check_stop = partial(work.raise_if_stopped, "while training the tokenizer, nothing written")
    taken = {*special_tokens(options), *sentinel_tokens(options), *byte_tokens(options)}
    if both := taken.intersection(options.added_tokens):
        raise InputError(f"added_tokens: found {min(both)}, which is a special token of template {options.template}")
    if options.model != "char":
        text_room(options)  # refuses a vocabulary that is too small before any text is read
    megabytes = None if options.model == "char" else options.sample_mb or SAMPLE_MB[options.model]
    limit = None if megabytes is None else megabytes * 1_000_000
    total = size_bytes
    if limit is not None and (total is None or total > limit):
        total = 0
        for text in documents():
            check_stop()
            total += utf8_length(text)

    share = limit / total if limit is not None and total is not None and total > limit else 1.0
    readings = 2 if options.model == "wordpiece" else 1

    def read(number: int) -> Feed:
        """The text for a trainer, at reading `number` of `readings`."""

        def check(seen_bytes: int) -> None:
            check_stop()
            if total is None:
                work.report(seen_bytes, None)
            else:
                work.report(min(number * total + seen_bytes, readings * total), readings * total)

        return Feed(documents, share=share, withhold=options.model != "char", check=check)

    feed = read(readings - 1)
    match options.model:
        case "char":
            characters: set[str] = set()
            for text in _normalized(feed, options):
                characters.update(text)
            rust = from_characters(characters, options)
        case "unigram":
            pre_tokenizer = build_pre_tokenizer(options, training=True)
            words: Counter[str] = Counter()
            for text in _normalized(feed, options):
                words.update(word for word, _ in pre_tokenizer.pre_tokenize_str(text))
            pieces: list[tuple[str, float]] = []
            _in_thread(lambda: pieces.extend(train_pieces(words, text_room(options))), feed, options, check_stop)
            rust = from_pieces(pieces, options)
        case "wordpiece":
            alphabet = _wordpiece_alphabet(read, options, check_stop)
            rust = _train_model(feed, untrained(options, alphabet), options, check_stop)
        case "bpe":
            rust = _train_model(feed, untrained(options), options, check_stop)
            is_full = rust.get_vocab_size() == options.vocab_size - len(last_tokens(options))
            if is_full and not json.loads(rust.to_str())["model"]["merges"]:
                # Characters fill the vocabulary, and the library chose among the rarest at random.
                counts = _count_characters(read(1), options)
                alphabet = sorted(most_frequent(counts, text_room(options)))
                rust = _train_model(read(1), untrained(options, alphabet), options, check_stop)
        case _:
            rust = _train_model(feed, untrained(options), options, check_stop)
    if feed.blank:
        raise InputError(
            "no text to train a tokenizer on: "
            + ("the input is empty" if feed.seen_bytes == 0 else "the input contains only white space")
        )
    work.report(readings * feed.seen_bytes, readings * feed.seen_bytes)
    tokenizer = Tokenizer.from_json(finished(rust, options))
    _check_lossless(tokenizer, feed)
    facts = TrainingFacts(
        seen_bytes=feed.seen_bytes,
        used_bytes=feed.used_bytes,
        sample_limit_bytes=limit,
        seconds=time.monotonic() - started,
        trained_sample=tuple(feed.trained.texts),
        unseen_sample=tuple(feed.unseen.texts),
    )
    return tokenizer, facts


def _normalized(feed: Feed, options: TokenizerOptions) -> Iterator[str]:
    """The chunks of text as the model sees them."""
    normalizer = build_normalizer(options)
    for chunk in feed:
        yield chunk if normalizer is None else normalizer.normalize_str(chunk)


def _count_characters(feed: Feed, options: TokenizerOptions) -> Counter[str]:
    """Counts of the characters that the model sees."""
    counts: Counter[str] = Counter()
    for text in _normalized(feed, options):
        counts.update(text)
    if options.model == "bpe" and " " in counts:
        counts[SPACE] += counts.pop(" ")
    return counts


def _wordpiece_alphabet(
    read: Callable[[int], Feed], options: TokenizerOptions, check_stop: Callable[[], None]
) -> list[str]:
    """The characters at the start of a word, then those inside a word as ##character, in the order of code points.

    A character may take two entries: where more than half the vocabulary are characters, the most frequent stay.
    """
    rust = _train_model(read(0), untrained_alphabet(options), options, check_stop)
    entries = sorted(rust.get_vocab())
    characters = {entry for entry in entries if len(entry) == 1}
    limit = max(1, text_room(options) // 2)
    if len(characters) > limit:
        counts = _count_characters(read(0), options)
        characters = set(most_frequent(Counter({c: counts[c] for c in characters}), limit))
    return sorted((entry for entry in entries if entry[-1] in characters), key=lambda entry: (len(entry), entry))


def _train_model(
    feed: Feed, start: tuple[RustTokenizer, Any], options: TokenizerOptions, check_stop: Callable[[], None]
) -> RustTokenizer:
    rust, trainer = start
    _in_thread(lambda: rust.train_from_iterator(iter(feed), trainer=trainer), feed, options, check_stop)
    return rust


def _in_thread(
    train: Callable[[], None], feed: Feed, options: TokenizerOptions, check_stop: Callable[[], None]
) -> None:
    """Train in a thread, because a library can run for minutes in which Python handles no signal.

    When reading fails, the library still trains on the text so far; this does not wait for it. The thread ends with its
    training or with the process.
    """
    failures: list[BaseException] = []

    def train_in_thread() -> None:
        try:
            train()
        except BaseException as error:  # panics of the library do not derive from Exception
            failures.append(error)

    thread = threading.Thread(target=train_in_thread, name="tokenizer-training", daemon=True)
    thread.start()
    try:
        while thread.is_alive() and feed.failure is None:
            check_stop()
            thread.join(0.05)
        check_stop()
    except Interrupted:
        feed.ended.wait()  # the next chunk ends the feed; no thread may run Python code when the process ends
        thread.join(0.2)
        raise
    if feed.failure is not None:
        raise feed.failure
    if failures and not feed.blank:
        raise TformerError(f"the {options.model} trainer failed: {failures[0]}", hint="try another vocab_size")


def _check_lossless(tokenizer: Tokenizer, feed: Feed) -> None:
    """Raise TformerError for byte-bpe that loses a probe, and for char that loses text of its training."""
    if tokenizer.kind == "byte-bpe":
        failures = probe_losslessness(tokenizer)
        if failures:
            raise TformerError(
                f"the byte-bpe tokenizer is not lossless: {', '.join(failure['probe'] for failure in failures)}; "
                f"{failures[0]['text']!r} is decoded as {failures[0]['decoded']!r}"
            )
    if tokenizer.kind == "char":
        for text in feed.trained.texts:
            if not gives_back(tokenizer, text):
                raise TformerError(f"the char tokenizer is not lossless on its own training text: {text[:80]!r}")


def gives_back(tokenizer: Tokenizer, text: str) -> bool:
    """Whether decoding restores a text, up to the tokenizer's normalization."""
    decoded = tokenizer.decode(tokenizer.encode(text))  # added tokens are as the text has them
    return tokenizer.normalize(decoded) == tokenizer.normalize(text)


def first_that_gives_back(texts: Sequence[str], kinds: Sequence[TokenizerModel]) -> TokenizerModel:
    """The first of the kinds that, trained on these texts, restores each of them; the last one restores all texts."""
    assert kinds[-1] == "byte-bpe"
    for kind in kinds[:-1]:
        options = TokenizerOptions(model=kind, template="seq2seq", min_frequency=1)
        tokenizer = train_tokenizer(lambda: iter(texts), options)
        if all(gives_back(tokenizer, text) for text in texts):
            return kind
    return kinds[-1]


# Texts that show what a tokenizer does not preserve.

PROBES: dict[str, str] = {
    "plain": "The quick brown fox jumps over the lazy dog.",
    "double spaces": "one  two   three",
    "leading spaces": "   indented",
    "trailing spaces": "ends in spaces   ",
    "tab": "a\tb\t\tc",
    "newline": "line\n\nparagraph\n",
    "carriage return": "dos\r\nline\r\n",
    "null": "a\x00b",
    "contractions": "I'm sure they'll say IT'S we've",
    "digits": "3.14159 and 1,000,000",
    "accents": "café naïve Ångström",
    "combining marks": "e\u0301 a\u030a n\u0303 क्षि",
    "no-break and thin spaces": "a\u00a0b\u2009c\u3000d",
    "emoji with joiner": "👩\u200d👩\u200d👧 🏳\ufe0f\u200d🌈 👍🏽",
    "CJK": "日本語の文章と한국어와中文",
    "right to left": "שלום עולם مرحبا",
    "code": "def f(x):\n    return x**2  # {a: [1]}",
    "lower one eighth block": "a▁b",
    "word of 150 characters": "x" * 150,
    "special tokens as text": "[CLS] [SEP] <s></s><pad><unk> <|endoftext|> <extra_id_0> <0x41> <mask>",
}


def probe_losslessness(tokenizer: Tokenizer) -> list[dict[str, str]]:
    """(probe, text, decoded) of each probe, the special tokens as text among them, that decoding does not restore."""
    own = "".join(tokenizer.token(i) for i in range(tokenizer.vocab_size) if tokenizer.is_special(i))
    failures = []
    for probe, text in {**PROBES, "its own special tokens as text": own}.items():
        ids = tokenizer.encode(text)
        decoded = tokenizer.decode(ids)
        if decoded != tokenizer.normalize(text):
            failures.append({"probe": probe, "text": text, "decoded": decoded})
    return failures
