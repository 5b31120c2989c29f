"""What goes into a translation and how it comes out: windows of lines, checks, formats, interrupts. No model."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest

from tformer.cli.generate_output import Printer, as_document, as_lines
from tformer.cli.translate_input import WINDOW_BATCHES, Checks, line_windows, prompt_windows
from tformer.cli.translate_session import TranslateSession
from tformer.decoding.translation import EMPTY, Translation
from tformer.errors import InputError, Interrupted
from tformer.tokenizer import TokenizerOptions, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    options = TokenizerOptions(model="char", template="seq2seq", min_frequency=1)
    return train_tokenizer(lambda: iter(["abcdefgh \t\n"]), options)


@pytest.fixture
def checks(tokenizer):
    return Checks(tokenizer, tokenizer, limit=8, start_tokens=1)


def windows(path, checks, *, batch_size=2, prefix=None, prefix_file=None):
    found = line_windows(
        str(path), errors="strict", batch_size=batch_size, checks=checks, prefix=prefix, prefix_file=prefix_file
    )
    return list(found)


def test_a_file_comes_in_windows_of_many_batches(tmp_path, checks):
    path = tmp_path / "a.txt"
    path.write_text("ab\n" * 50)
    found = windows(path, checks)
    assert [len(window.sources) for window in found] == [2 * WINDOW_BATCHES, 50 - 2 * WINDOW_BATCHES]
    assert [window.first for window in found] == [0, 2 * WINDOW_BATCHES]
    assert all(window.prefixes is None for window in found)


def test_standard_input_comes_in_batches_of_what_has_arrived(checks, monkeypatch):
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        found = line_windows("-", errors="strict", batch_size=2, checks=checks, prefix=None, prefix_file=None)
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
    found = list(prompt_windows(str(path), errors="strict", batch_size=2))
    assert [(window.first, window.sources) for window in found] == [(0, ["a", ""]), (2, ["c"])]


def test_every_line_has_its_prefix(tmp_path, checks):
    path, prefixes = tmp_path / "a.txt", tmp_path / "p.txt"
    path.write_text("a\nb\nc\n")
    prefixes.write_text("d\n\nf\n")
    [window] = windows(path, checks, prefix_file=str(prefixes))
    assert window.prefixes == ["d", "", "f"]
    [window] = windows(path, checks, prefix="de")
    assert window.prefixes == ["de"] * 3
    prefixes.write_text("d\n")
    with pytest.raises(InputError, match=r"a\.txt has 3 lines, .*p\.txt 1"):
        windows(path, checks, prefix_file=str(prefixes))


def test_a_pipe_with_more_lines_than_prefixes_is_told(tmp_path, checks, monkeypatch):
    prefixes = tmp_path / "p.txt"
    prefixes.write_text("d\n")
    reading, writing = os.pipe()
    os.write(writing, b"a\nb\n")
    os.close(writing)
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(InputError, match="standard input has more than the 1 lines"):
            windows("-", checks, prefix_file=str(prefixes))


def test_a_source_has_its_special_tokens_counted(checks):
    checks.sources(["abcdef", "", "   "], places=["1", "2", "3"])
    with pytest.raises(InputError, match=r"x:2: the source has 9 tokens, the model's context holds 8"):
        checks.sources(["a", "abcdefg"], places=["x:1", "x:2"])


def test_a_prefix_is_known_and_leaves_room(checks):
    checks.prefix("abcdefg", place="--target-prefix")
    with pytest.raises(InputError, match=r"p:3: .* does not know: 'aX'"):
        checks.prefix("ab aX", place="p:3")
    with pytest.raises(InputError, match=r"8 tokens, the model's context has room for 7"):
        checks.prefix("abcdefgh", place="--target-prefix")


BEST = [
    Translation("a\tb", (9, 8, 3), -0.5, -1.0, "eos", ((0, 1), (1, 0), (2, 0))),
    Translation("c\nd", (9, 3), -0.75, -1.5, "length", ((0, 0),)),
]


def test_lines_hold_the_columns_that_were_asked_for():
    assert as_lines(4, BEST, n_best=False, alignments=False) == "a\tb\n"
    assert as_lines(4, BEST, n_best=False, alignments=True) == "a\\tb\t1-0 0-1 0-2\n"
    assert as_lines(4, BEST, n_best=True, alignments=False) == "4\t-0.5000\ta\\tb\n4\t-0.7500\tc\\nd\n"
    assert as_lines(4, BEST, n_best=True, alignments=True).splitlines()[1] == "4\t-0.7500\tc\\nd\t0-0"
    assert as_lines(0, [EMPTY], n_best=False, alignments=False) == "\n"


def test_a_document_holds_everything(tokenizer):
    document = as_document(4, "ab", BEST, target_prefix="a", tokenizers=(tokenizer, tokenizer))
    assert (document["index"], document["prompt"], document["target_prefix"]) == (4, "ab", "a")
    assert (document["text"], document["score"], document["source_tokens"]) == ("a\tb", -0.5, ["a", "b"])
    assert document["completions"][0]["alignment"] == [[1, 0], [0, 1], [0, 2]]
    assert len(document["completions"][0]["tokens"]) == 2  # without the end
    assert len(document["completions"][1]["tokens"]) == 2  # cut before one came


def session(searcher, checks, tokenizer, *, written, stop=lambda: False, **options):
    asked = SimpleNamespace(
        **{"utf8": "strict", "target_prefix": None, "target_prefix_file": None, "as_json": False, "n_best": None}
        | {"alignments": False, "logprobs": False, "num_samples": 1, "errors": "strict"}
        | options
    )
    flag = SimpleNamespace(should_stop=stop, interrupted=lambda message: Interrupted(message, signal_number=2))
    printer = Printer(written.append, on_terminal=False)
    return TranslateSession(
        searcher, asked, flag, printer, checks=checks, tokenizers=(tokenizer, tokenizer), batch_size=2
    )


class Upper:
    """Translates to capitals; from the `fails_at`-th line on it is interrupted."""

    def __init__(self, fails_at=10**9):
        self.fails_at, self.calls = fails_at, []

    def translate(self, texts, *, target_prefixes=None, batch_size=32, should_stop=None, first_row=0):
        self.calls.append((first_row, list(texts), target_prefixes, batch_size))
        reasons = ["eos" if first_row + row < self.fails_at else "interrupted" for row in range(len(texts))]
        return [
            [Translation(text.upper(), (9,), -1.0, -1.0, reason)] for text, reason in zip(texts, reasons, strict=True)
        ]


def test_answers_stand_in_the_order_of_the_lines(tmp_path, checks, tokenizer):
    path, written, upper = tmp_path / "a.txt", [], Upper()
    path.write_text("".join(f"{letter}\n" for letter in "abcdefgh" * 5))
    session(upper, checks, tokenizer, written=written).answer_lines(str(path))
    assert "".join(written) == path.read_text().upper()
    assert [call[0] for call in upper.calls] == [0, 32]


def test_an_interrupt_writes_the_lines_before_it(tmp_path, checks, tokenizer):
    path, written = tmp_path / "a.txt", []
    path.write_text("a\nb\nc\nd\n")
    interrupted = session(Upper(fails_at=3), checks, tokenizer, written=written, stop=lambda: True)
    with pytest.raises(Interrupted, match="interrupted after 3 lines"):
        interrupted.answer_lines(str(path))
    assert written == ["A\n", "B\n", "C\n"]


def test_a_prompt_is_shown_before_a_continuation_alone(checks, tokenizer):
    written = []
    session(Upper(), None, tokenizer, written=written).answer_prompt("ab")
    session(Upper(), checks, tokenizer, written=written).answer_prompt("ab")
    session(Upper(), checks, tokenizer, written=written, n_best=1).answer_prompt("ab")
    assert written == ["abAB\n", "AB\n", "0\t-1.0000\tAB\n"]


def test_a_terminal_gets_no_control_characters():
    written = []
    printer = Printer(written.append, on_terminal=True)
    printer.show("a\x1b[2J\n")
    printer.show_document({"text": "\x9b", "score": float("nan")})
    assert written[0] == "a\\x1b[2J\n"
    assert "\x9b" not in written[1] and json.loads(written[1]) == {"text": "\x9b", "score": None}
