"""Training: lazy, bounded, sampled evenly, interruptible; nothing to learn from is an error."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tformer.recipe.data_defaults import WORD_TOKENS
from tformer.support.errors import InputError, Interrupted
from tformer.tokenizer import TokenizerOptions, train, train_tokenizer
from tformer.tokenizer.train import (
    CHUNK_CHARACTERS,
    LONGEST_CHUNK,
    EvenSample,
    Feed,
    chunks,
    first_that_gives_back,
    gives_back,
    train_with_facts,
    utf8_length,
)
from tformer.workers.work import Work


@pytest.mark.parametrize("model", ["byte-bpe", "char"])
def test_documents_are_read_lazily(model):
    """After the feeding is message to stop, the generator has hardly moved."""
    drawn = 0

    def documents() -> Iterator[str]:
        nonlocal drawn
        while True:  # endless: whoever wants it whole never returns
            drawn += 1
            yield f"word{drawn} another{drawn} "

    options = TokenizerOptions(model=model)
    with pytest.raises(Interrupted):
        train_with_facts(documents, options, size_bytes=1000, work=Work(should_stop=lambda: drawn >= 2000))
    assert 2000 <= drawn <= 2001


def test_memory_does_not_grow_with_the_input():
    document = "".join(f"line {number} of the text\n" for number in range(20_000))

    def peak(copies: int) -> int:
        tracemalloc.start()
        options = TokenizerOptions(model="char")
        train_with_facts(lambda: (document + str(copy) for copy in range(copies)), options)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    assert peak(16) < 1.3 * peak(8) + 100_000


def test_a_large_input_is_trained_on_an_evenly_spread_sample():
    # Ten stretches of text, each with a word of its own: all are in the sample.
    stretches = [f"stretch{letter} " * 30_000 for letter in "abcdefghij"]
    options = TokenizerOptions(model="word", sample_mb=1, vocab_size=100)
    tokenizer, facts = train_with_facts(lambda: iter(stretches), options)
    assert facts.sampled and facts.sample_limit_bytes == 1_000_000
    assert facts.seen_bytes == sum(map(len, stretches))
    assert 900_000 <= facts.used_bytes <= 1_000_000
    assert all(tokenizer.token_id(f"stretch{letter}") is not None for letter in "abcdefghij")


def test_char_reads_everything_whatever_the_sample_size():
    texts = ["a" * 3_000_000, "é"]
    tokenizer, facts = train_with_facts(lambda: iter(texts), TokenizerOptions(model="char", sample_mb=1))
    assert not facts.sampled and facts.used_bytes == 3_000_002
    assert tokenizer.token_id("é") is not None


def test_a_known_size_saves_the_first_reading():
    readings = 0

    def documents() -> Iterator[str]:
        nonlocal readings
        readings += 1
        yield "some text to read " * 100

    train_tokenizer(documents, TokenizerOptions(vocab_size=300), size_bytes=1800)
    assert readings == 1
    train_tokenizer(documents, TokenizerOptions(vocab_size=300))
    assert readings == 3


def test_chunks_are_small_whole_and_cut_before_white_space():
    text = "word " * 10_000 + "x" * 50_000 + " tail " + "y" * 300_000
    pieces = list(chunks(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces[:3])) <= CHUNK_CHARACTERS and max(map(len, pieces)) == LONGEST_CHUNK
    assert pieces[1].startswith(" word") and pieces[0].endswith("word")
    assert list(chunks("")) == []


KINDS = {
    **{kind: {"model": kind} for kind in ("byte-bpe", "bpe", "wordpiece", "unigram", "word", "char")},
    "gpt-2": {"pre_tokenization": "gpt-2"},
    "normalized": {"unicode": "nfkc", "lowercase": True, "strip_accents": True, "digits": True},
}
PARTS = ("the", "fox", "it's", "12", "e\u0301", "\u0308", "日本", "。", "[CLS]", "--", "x" * 120, "\x1c", "\x00")
SPACES = (" ", " ", "", "  ", "\n", "\n\n", "\r\n", "\t", "\n\u3000\u3000", "\u3000", " " * 150, "\x0b", "\x85")


@pytest.mark.property
@pytest.mark.parametrize("name", KINDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(PARTS), st.sampled_from(SPACES)), min_size=10, max_size=60))
def test_chunks_have_the_tokens_of_the_whole_text(make, name: str, parts: list[tuple[str, str]]) -> None:
    tokenizer, whole = make(**KINDS[name]), "".join(map("".join, parts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "CHUNK_CHARACTERS", 20)
        pieces = list(chunks(whole))
    assert "".join(pieces) == whole
    assert [token for ids in map(tokenizer.encode, pieces) for token in ids] == tokenizer.encode(whole)


def test_the_report_counts_the_tokens_of_the_whole_text() -> None:
    text = "".join(f"{number} small words of one document " for number in range(4000))
    tokenizer, facts = train_with_facts(lambda: iter([text]), TokenizerOptions(vocab_size=400))
    texts = [*facts.trained_sample, *facts.unseen_sample]
    assert len(texts) > 5 and sum(map(len, map(tokenizer.encode, texts))) == len(tokenizer.encode(text))


CHOSEN = {"jump": "word", "la vida .": "bpe", "a,b": "bpe", "( x )": "bpe", "say  it": "bpe", "a\u2581b": "byte-bpe"}


@pytest.mark.parametrize("text", CHOSEN)
def test_the_chosen_kind_gives_the_texts_back(text: str) -> None:
    texts = ["jump twice", "la vida", "go, then stop.", text]
    kind = first_that_gives_back(texts, WORD_TOKENS)
    options = TokenizerOptions(model=kind, template="seq2seq", min_frequency=1)
    assert kind == CHOSEN[text]
    assert all(gives_back(train_tokenizer(lambda: iter(texts), options), each) for each in texts)


def test_even_sample_is_spread_and_bounded():
    sample = EvenSample(limit_bytes=1000)
    for number in range(10_000):
        sample.add(f"{number:010d}")
    numbers = [int(text) for text in sample.texts]
    assert sum(utf8_length(text) for text in sample.texts) <= 1000 and len(numbers) > 40
    assert len({b - a for a, b in pairwise(numbers)}) == 1  # equal steps
    assert numbers[-1] > 9_000


def test_a_text_above_the_limit_is_a_sample_alone():
    sample = EvenSample(limit_bytes=5)
    sample.add("0123456789")
    assert sample.texts == ["0123456789"]


def test_some_chunks_are_withheld_for_the_report():
    feed = Feed(lambda: (f"line {n}\n" for n in range(200)), share=1.0, withhold=True, check=lambda seen: None)
    used = list(feed)
    assert len(used) == 196 and len(feed.unseen.texts) == 4
    assert not set(used) & set(feed.unseen.texts)


def test_progress_reports_bytes_and_ends_complete():
    seen: list[tuple[float, float | None]] = []
    train_tokenizer(
        lambda: iter(["some text "] * 500),
        TokenizerOptions(vocab_size=300),
        work=Work(report=lambda done, total=None: seen.append((done, total))),
    )
    assert seen[-1] == (5000, 5000)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert all(total == 5000 for _, total in seen)


@pytest.mark.parametrize("model", ["byte-bpe", "unigram", "word", "char"])
def test_stop_at_once(model):
    with pytest.raises(Interrupted) as caught:
        train_tokenizer(lambda: iter(["text"]), TokenizerOptions(model=model), work=Work(should_stop=lambda: True))
    assert caught.value.exit_code == 130


def test_stop_while_the_library_trains():
    """After the last document only the library works; should_stop is still polled."""
    fed = False

    def documents() -> Iterator[str]:
        nonlocal fed
        yield from (f"word{n % 997} other{n % 331}\n" for n in range(20_000))
        fed = True

    with pytest.raises(Interrupted):
        train_with_facts(documents, TokenizerOptions(), size_bytes=1, work=Work(should_stop=lambda: fed))


def test_neither_stop_nor_error_waits_for_the_library(monkeypatch):
    """It would train to the end on what it has: `train_from_iterator` here never returns before it is let go."""
    released = threading.Event()

    class Slow:
        def train_from_iterator(self, iterator: Iterator[str], trainer: object) -> None:
            try:
                for _ in iterator:
                    pass
            finally:
                released.wait(30)

    def documents() -> Iterator[str]:
        yield "text"
        raise InputError("corpus.txt:7: not UTF-8")

    monkeypatch.setattr(train, "untrained", lambda options: (Slow(), None))
    try:
        with pytest.raises(InputError, match=r"corpus\.txt:7"):
            train_with_facts(documents, TokenizerOptions(), size_bytes=1)
        with pytest.raises(Interrupted):
            train_with_facts(
                lambda: iter(["text"]), TokenizerOptions(), size_bytes=1, work=Work(should_stop=lambda: True)
            )
        assert not released.is_set()
    finally:
        released.set()


def test_errors_of_the_documents_come_through():
    def documents() -> Iterator[str]:
        yield "text " * 100
        raise InputError("corpus.txt:7: byte 3 is not UTF-8")

    for model in ("byte-bpe", "char"):
        with pytest.raises(InputError, match=r"corpus\.txt:7"):
            train_with_facts(documents, TokenizerOptions(model=model), size_bytes=1)


@pytest.mark.parametrize("model", ["byte-bpe", "bpe", "wordpiece", "unigram", "word", "char"])
def test_nothing_to_learn_from(model):
    for texts, message in (([], "empty"), ([""], "empty"), ([" \n\t "], "only white space")):
        with pytest.raises(InputError, match=message):
            train_tokenizer(lambda texts=texts: iter(texts), TokenizerOptions(model=model))


@pytest.mark.parametrize("text", ["a", "日本語", "x" * 500, "\x00", "hello hello"])
@pytest.mark.parametrize("model", ["byte-bpe", "bpe", "wordpiece", "unigram", "word", "char"])
def test_very_small_texts_train(model, text):
    tokenizer = train_tokenizer(lambda: iter([text]), TokenizerOptions(model=model, min_frequency=1))
    assert 0 < tokenizer.vocab_size <= 4096
    tokenizer.encode(text)


HASHES = """
import hashlib, sys
from tformer.tokenizer.options import TokenizerOptions
from tformer.tokenizer.train import train_tokenizer

words = [f"{a}{b}{c}" for a in "abdeéж" for b in "aeiouあ" for c in "lnrst語"]
text = " ".join(words[(n * n) % len(words)] for n in range(2_000))
for model, size in (("byte-bpe", 400), ("bpe", 200), ("bpe", 12), ("wordpiece", 200), ("wordpiece", 24),
                    ("unigram", 200), ("unigram", 14), ("word", 90), ("char", 90)):
    tokenizer = train_tokenizer(lambda: iter([text]), TokenizerOptions(model=model, vocab_size=size))
    print(model, size, hashlib.sha256(tokenizer.to_json().encode()).hexdigest())
"""


def test_the_same_text_gives_the_same_file_in_every_process_and_with_any_number_of_threads():
    """Also where the alphabet is larger than the vocabulary, and many pairs are equally frequent."""

    def hashes(threads: int) -> str:
        variables = {**os.environ, "RAYON_NUM_THREADS": str(threads), "PYTHONHASHSEED": str(threads)}
        done = subprocess.run([sys.executable, "-c", HASHES], env=variables, capture_output=True, text=True, check=True)
        return done.stdout

    first = hashes(1)
    assert len(first.splitlines()) == 9 and len(set(first.split()[2::3])) == 9
    assert hashes(2) == first and hashes(3) == first


def test_a_unigram_vocabulary_smaller_than_the_alphabet_keeps_the_most_frequent_characters():
    options = TokenizerOptions(model="unigram", vocab_size=6, template="none")
    tokenizer = train_tokenizer(lambda: iter(["aaaa bbb cc\n\n d e" * 20]), options)
    assert sorted(tokenizer.tokens) == sorted(["<unk>", "a", "b", "c", "▁", "\n"])
