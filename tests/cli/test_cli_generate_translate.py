"""What goes into a translation and how it comes out: windows of lines, checks, formats, interrupts. No model."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tformer.cli.generate_run import SearcherEngine, Session
from tformer.cli.report import DataOutput
from tformer.data.shards.template import single_template
from tformer.data.sources.reading import Reading
from tformer.decoding.lines import WINDOW_BATCHES, prompt_window, prompt_windows, source_windows
from tformer.decoding.options import GenerateOptions
from tformer.decoding.output import translation_document, translation_lines
from tformer.decoding.sentences import SentenceReader
from tformer.decoding.settings import BeamSettings
from tformer.decoding.translate import EMPTY, Translation
from tformer.decoding.writers import Searcher
from tformer.support.errors import InputError, Interrupted
from tformer.tokenizer import TokenizerOptions, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    options = TokenizerOptions(model="char", template="seq2seq", min_frequency=1)
    return train_tokenizer(lambda: iter(["abcdefgh \t\n"]), options)


def make_reader(tokenizer, too_long="error"):
    return SentenceReader(
        tokenizer,
        tokenizer,
        single_template(tokenizer),
        max_source=8,
        max_prefix=7,
        max_new_tokens=9,
        length_margin=None,
        too_long=too_long,
    )


@pytest.fixture
def reader(tokenizer):
    return make_reader(tokenizer)


def windows(path, reader, **options):
    return list(source_windows(str(path), reading=Reading(), batch_size=2, reader=reader, **options))


@pytest.fixture
def pipe(monkeypatch):
    """`pipe(text)`: standard input that holds it and ends."""
    opened = []

    def feed(text):
        reading, writing = os.pipe()
        os.write(writing, text.encode())
        os.close(writing)
        opened.append(os.fdopen(reading))
        monkeypatch.setattr("sys.stdin", opened[-1])

    yield feed
    for stdin in opened:
        stdin.close()


def test_a_file_comes_in_windows_of_many_batches(tmp_path, reader):
    path = tmp_path / "a.txt"
    path.write_text("ab\n" * 50)
    found = windows(path, reader)
    assert [len(window.sources) for window in found] == [2 * WINDOW_BATCHES, 50 - 2 * WINDOW_BATCHES]
    assert [window.first for window in found] == [0, 2 * WINDOW_BATCHES]
    assert all(window.prefixes is None for window in found)


def test_standard_input_comes_in_batches_of_what_has_arrived(reader, monkeypatch):
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        found = source_windows("-", reading=Reading(), batch_size=2, reader=reader)
        os.write(writing, b"a\nb\nc\nd")
        assert next(found).sources == ["a", "b"]
        assert next(found).sources == ["c"]  # the line that has not come whole is waited for
        os.write(writing, b"e\n")
        assert next(found).sources == ["de"]
        os.close(writing)
        assert list(found) == []


def test_prompts_of_a_decoder_come_a_batch_at_a_time(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a\n\nc\n")
    found = list(prompt_windows(str(path), reading=Reading(), batch_size=2))
    assert [(window.first, window.sources) for window in found] == [(0, ["a", ""]), (2, ["c"])]


def test_every_line_has_its_prefix(tmp_path, reader):
    path, prefixes = tmp_path / "a.txt", tmp_path / "p.txt"
    path.write_text("a\nb\nc\n")
    prefixes.write_text("d\n\nf\n")
    [window] = windows(path, reader, prefix_file=str(prefixes))
    assert window.prefixes == ["d", "", "f"]
    [window] = windows(path, reader, prefix="de")
    assert window.prefixes == ["de"] * 3
    prefixes.write_text("d\n")
    with pytest.raises(InputError, match=r"a\.txt has 3 lines, .*p\.txt 1"):
        windows(path, reader, prefix_file=str(prefixes))


def test_a_pipe_and_its_prefixes_must_have_as_many_lines(tmp_path, reader, pipe):
    prefixes = tmp_path / "p.txt"
    prefixes.write_text("d\n")
    pipe("a\nb\n")
    with pytest.raises(InputError, match="standard input has more than the 1 lines"):
        windows("-", reader, prefix_file=str(prefixes))
    prefixes.write_text("d\ne\nf\n")
    pipe("a\nb\n")
    found = source_windows("-", reading=Reading(), batch_size=2, reader=reader, prefix_file=str(prefixes))
    assert next(found).sources == ["a", "b"]
    with pytest.raises(InputError, match=r"standard input has 2 lines, .*p\.txt 3"):
        list(found)


def test_the_tasks_prefix_stands_before_each_source_once(tmp_path, reader):
    path = tmp_path / "a.txt"
    path.write_text("ab\n\ng ab\n")
    [window] = windows(path, reader, task_prefix="g ")
    assert (window.lines, window.sources) == (["ab", "", "g ab"], ["g ab", "", "g ab"])
    path.write_text("abcde\n")
    with pytest.raises(InputError, match=r"a\.txt:1: the source has 9 tokens"):
        windows(path, reader, task_prefix="g ")
    assert prompt_window("ab", task_prefix="g ").sources == ["g ab"]


def test_a_long_line_of_a_file_is_refused_before_anything_is_read_for_work(tmp_path, reader):
    path = tmp_path / "a.txt"
    path.write_text("ab\n" * 500 + "abcdefg\n")
    with pytest.raises(InputError, match=r"a\.txt:501: the source has 9 tokens, but the model reads at most 8"):
        next(source_windows(str(path), reading=Reading(), batch_size=2, reader=reader))


def test_only_lines_that_may_be_too_long_are_tokenized_ahead(tmp_path, tokenizer, monkeypatch):
    """No text is tokenized twice, but those with more bytes than the model reads tokens."""
    reader, seen = make_reader(tokenizer), []
    path = tmp_path / "a.txt"
    path.write_text("ab\ncd\nabcdef\n")
    whole = type(tokenizer).encode_batch
    monkeypatch.setattr(
        type(tokenizer),
        "encode_batch",
        lambda self, texts, **options: seen.extend(texts) or whole(self, texts, **options),
    )
    windows(path, reader)
    assert [text for text in seen if text] == ["abcdef"]


def test_nothing_is_too_long_where_it_is_cut(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    path.write_text("abcdefgh\n")
    reader = make_reader(tokenizer, "cut")
    [window] = windows(path, reader)
    [sentence] = reader.read(window.sources, None)
    assert len(sentence.source) == 8 and reader.cut == 1


BEST = [
    Translation("a\tb", (9, 8, 3), -0.5, -1.0, "eos", ((0, 1), (1, 0), (2, 0))),
    Translation("c\nd", (9, 3), -0.75, -1.5, "length", ((0, 0),)),
]


def test_lines_hold_the_columns_that_were_asked_for():
    assert translation_lines(4, BEST, n_best=False, alignments=False) == "a\tb\n"
    assert translation_lines(4, BEST, n_best=False, alignments=True) == "a\\tb\t1-0 0-1 0-2\n"
    assert translation_lines(4, BEST, n_best=True, alignments=False) == "4\t-0.5000\ta\\tb\n4\t-0.7500\tc\\nd\n"
    assert translation_lines(4, BEST, n_best=True, alignments=True).splitlines()[1] == "4\t-0.7500\tc\\nd\t0-0"
    assert translation_lines(0, [EMPTY], n_best=False, alignments=False) == "\n"


def test_a_document_holds_everything(tokenizer):
    document = translation_document(4, "ab", BEST, source="ab", target_prefix="a", tokenizers=(tokenizer, tokenizer))
    assert "source" not in document
    assert (document["index"], document["prompt"], document["target_prefix"]) == (4, "ab", "a")
    assert (document["text"], document["score"], document["source_tokens"]) == ("a\tb", -0.5, ["a", "b"])
    assert document["completions"][0]["alignment"] == [[1, 0], [0, 1], [0, 2]]
    assert len(document["completions"][0]["tokens"]) == 2  # without the end
    assert len(document["completions"][1]["tokens"]) == 2  # cut before one came
    document = translation_document(4, "ab", BEST, source="g ab", tokenizers=(tokenizer, tokenizer))
    assert (document["prompt"], document["source"], document["source_tokens"]) == ("ab", "g ab", [*"g ab"])
    assert "logprobs" not in document and "logprobs" not in document["completions"][0]


def test_a_document_holds_the_log_probability_of_each_id_but_those_of_the_target_prefix():
    answers = [replace(BEST[0], num_forced=1, logprobs=(-0.25, -0.75)), replace(BEST[1], logprobs=(-0.5, -1.0))]
    document = translation_document(0, "ab", answers, target_prefix="a", logprobs=True)
    assert [answer["logprobs"] for answer in document["completions"]] == [[None, -0.25, -0.75], [-0.5, -1.0]]
    assert document["logprobs"] == document["completions"][0]["logprobs"]


def session(search, reader, tokenizer, *, written, stop=lambda: False, **options):
    flag = SimpleNamespace(should_stop=stop, interrupted=lambda message: Interrupted(message, signal_number=2))
    searcher = Searcher(search, BeamSettings(), reader, (tokenizer, tokenizer), batch_size=2)
    given = GenerateOptions(**options)
    return Session(SearcherEngine(searcher, given), given, flag, DataOutput(written.append, on_terminal=False))


class Upper:
    """Translates to capitals; from the `fails_at`-th line on it is interrupted."""

    def __init__(self, fails_at=10**9, forced=0):
        self.fails_at, self.forced, self.calls = fails_at, forced, []

    def __call__(self, window, should_stop):
        self.calls.append(window)
        return [
            [
                Translation(
                    text.upper(),
                    (9, 9, 9),
                    -1.0,
                    -1.0,
                    self._reason(row),
                    num_forced=self.forced,
                    logprobs=(-1.0 / (3 - self.forced),) * (3 - self.forced),
                )
            ]
            for row, text in enumerate(window.sources, start=window.first)
        ]

    def _reason(self, row):
        return "eos" if row < self.fails_at else "interrupted"


def test_answers_stand_in_the_order_of_the_lines(tmp_path, reader, tokenizer):
    path, written, upper = tmp_path / "a.txt", [], Upper()
    path.write_text("".join(f"{letter}\n" for letter in "abcdefgh" * 5))
    session(upper, reader, tokenizer, written=written).answer_lines(str(path))
    assert "".join(written) == path.read_text().upper()
    assert [call.first for call in upper.calls] == [0, 32]


def test_an_interrupt_writes_the_lines_before_it(tmp_path, reader, tokenizer):
    path, written = tmp_path / "a.txt", []
    path.write_text("a\nb\nc\nd\n")
    interrupted = session(Upper(fails_at=3), reader, tokenizer, written=written, stop=lambda: True)
    with pytest.raises(Interrupted, match="interrupted after 3 lines"):
        interrupted.answer_lines(str(path))
    assert written == ["A\n", "B\n", "C\n"]


def test_a_prompt_is_shown_before_a_continuation_alone(reader, tokenizer):
    written = []
    session(Upper(), None, tokenizer, written=written).answer_prompt("ab")
    session(Upper(), reader, tokenizer, written=written).answer_prompt("ab")
    session(Upper(), reader, tokenizer, written=written, n_best=1).answer_prompt("ab")
    assert written == ["abAB\n", "AB\n", "0\t-1.0000\tAB\n"]


def test_the_mean_log_probability_is_of_the_tokens_that_were_scored(reader, tokenizer, capsys):
    """A forced beginning was not chosen, and its probability is no part of the sum."""
    for forced, said in ((0, "of 3 tokens, -0.333 a token"), (1, "of 2 tokens, -0.500 a token")):
        session(Upper(forced=forced), reader, tokenizer, written=[], logprobs=True).answer_prompt("ab")
        assert said in capsys.readouterr().err


def test_a_terminal_gets_no_control_characters():
    written = []
    output = DataOutput(written.append, on_terminal=True)
    output.text("a\x1b[2J\n")
    output.documents([{"text": "\x9b", "score": float("nan")}])
    assert written[0] == "a\\x1b[2J\n"
    assert "\x9b" not in written[1] and json.loads(written[1]) == {"text": "\x9b", "score": None}
