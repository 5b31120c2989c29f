"""Text around decoding: stop texts, prompts, what is shown, and where it goes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer.decoding.output import open_output
from tformer.decoding.prompts import encode_prompt, read_lines, start_ids
from tformer.decoding.rendering import as_document, as_one_line
from tformer.decoding.settings import Generated
from tformer.decoding.text import TextFollower, held_length
from tformer.errors import InputError, Interrupted, visible
from tformer.tokenizer import TokenizerOptions, train_tokenizer


class Pieces:
    """A stream over ready-made pieces: id n is the n-th."""

    def __init__(self, pieces):
        self.pieces = pieces

    def push(self, token):
        return self.pieces[token]

    def finish(self):
        return ""


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_following_piece_by_piece_equals_searching_the_whole_text(pieces, stops):
    follower = TextFollower(Pieces(pieces), stops)
    shown, read = "", ""
    for token, piece in enumerate(pieces):
        shown += follower.push(token)
        read += piece
        if follower.stopped:
            break
    shown += follower.finish()
    cuts = [read.find(stop) for stop in stops if stop in read]
    assert shown == follower.text
    assert follower.stopped == bool(cuts)
    assert shown == (read[: min(cuts)] if cuts else read)


def test_held_length_is_the_longest_possible_beginning():
    assert held_length("xab", ["abc"]) == 2
    assert held_length("xab", ["abc", "bcd", "xabz"]) == 3
    assert held_length("abc", ["abc"]) == 0
    assert held_length("xyz", ["abc"]) == 0


@pytest.fixture(scope="module")
def word_tokenizer():
    def documents():
        yield from ["the cat sat on the mat", "the dog ran"] * 3

    return train_tokenizer(documents, TokenizerOptions(model="word", vocab_size=50, template="gpt"))


def test_the_joint_between_prompt_and_completion_is_spelled_as_inside_a_text(word_tokenizer):
    whole = word_tokenizer.encode("the cat sat on the mat")
    follower = TextFollower.after_prompt(word_tokenizer, whole[:2])
    pieces = [follower.push(token) for token in whole[2:]] + [follower.finish()]
    assert word_tokenizer.decode(whole[:2]) + "".join(pieces) == word_tokenizer.decode(whole)


def test_after_a_start_token_the_text_begins_without_a_joint(word_tokenizer):
    follower = TextFollower.after_prompt(word_tokenizer, start_ids(word_tokenizer))
    [the] = word_tokenizer.encode("the")
    assert follower.push(the) + follower.finish() == "the"


# --- prompts ---------------------------------------------------------------------------------------------------------


def fake_tokenizer(encoded, **special):
    return SimpleNamespace(
        special=SimpleNamespace(**{"bos": None, "eos": None, "unk": None, **special}), encode=lambda text: encoded
    )


def test_an_empty_prompt_starts_from_bos_then_eos_then_newline_then_the_first_token():
    assert start_ids(fake_tokenizer([7], bos=3, eos=4)) == [3]
    assert start_ids(fake_tokenizer([7], eos=4)) == [4]
    assert start_ids(fake_tokenizer([7])) == [7]
    assert start_ids(fake_tokenizer([7], unk=7)) == [0]
    assert start_ids(fake_tokenizer([7, 8])) == [0]


def test_a_prompt_without_tokens_is_the_start(word_tokenizer):
    assert encode_prompt(word_tokenizer, "") == start_ids(word_tokenizer)
    assert encode_prompt(word_tokenizer, "   ") == start_ids(word_tokenizer)
    assert encode_prompt(word_tokenizer, "the cat") == word_tokenizer.encode("the cat")


def test_lines_are_read_without_their_ends(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\ntwo \x00\n  three")
    assert list(read_lines(str(path))) == ["one", "", "two \x00", "  three"]
    path.write_bytes(b"")
    assert list(read_lines(str(path))) == []


def test_invalid_utf8_is_named_by_file_line_and_byte(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(b"fine\nnot \xff fine\n")
    with pytest.raises(InputError, match=r"in\.txt:2.*byte 9.*0xff") as raised:
        list(read_lines(str(path)))
    assert raised.value.exit_code == 2
    assert list(read_lines(str(path), errors="replace")) == ["fine", "not � fine"]


def test_missing_prompt_files_are_input_errors(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(InputError, match=path.name):
            list(read_lines(str(path)))


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_control_characters_cannot_steer_the_terminal():
    assert visible("a\x1b[2J\x9b1m\x07\r\x7f\u202eb") == "a\\x1b[2J\\x9b1m\\x07\\r\\x7f\\u202eb"
    assert visible("tab\tline\nümlaut 猫 👩‍💻") == "tab\tline\nümlaut 猫 👩‍💻"


def test_one_line_stays_one_line():
    assert as_one_line("a\nb\r\nc") == "a\\nb\\r\\nc"


def test_the_document_of_a_prompt():
    completions = [Generated((1, 2), "x", (-0.5, -0.25), "eos"), Generated((3,), "y", (-1.0,), "length")]
    document = as_document(4, "p", completions)
    assert json.loads(json.dumps(document)) == document
    assert list(document) == ["index", "prompt", "text", "finish_reason", "logprobs", "completions"]
    assert (document["index"], document["prompt"], document["text"]) == (4, "p", "x")
    assert (document["finish_reason"], document["logprobs"]) == ("eos", [-0.5, -0.25])
    assert [c["text"] for c in document["completions"]] == ["x", "y"]
    assert as_document(0, "", [Generated((1,), "x", None, "length")])["logprobs"] is None


# --- where it goes ---------------------------------------------------------------------------------------------------


def test_an_output_file_appears_when_the_work_is_done(tmp_path):
    path = tmp_path / "out.txt"
    with open_output(path) as write:
        write("ünï\n")
        assert not path.exists()
    assert path.read_bytes() == "ünï\n".encode()
    assert [file.name for file in tmp_path.iterdir()] == ["out.txt"]


def test_after_an_error_the_output_file_is_what_it_was(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")
    with pytest.raises(InputError), open_output(path) as write:
        write("new")
        raise InputError("bad line")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["out.txt"]


def test_after_an_interrupt_the_output_file_holds_what_was_done(tmp_path):
    path = tmp_path / "out.txt"
    with pytest.raises(Interrupted), open_output(path) as write:
        write("half")
        raise Interrupted("stop", signal_number=2)
    assert path.read_text() == "half"


def test_a_linked_output_stays_a_link(tmp_path):
    (tmp_path / "real.txt").write_text("old")
    link = tmp_path / "link.txt"
    link.symlink_to("real.txt")
    with open_output(link) as write:
        write("new")
    assert link.is_symlink()
    assert (tmp_path / "real.txt").read_text() == "new"


def test_output_places_that_cannot_be(tmp_path):
    for path in (tmp_path, tmp_path / "absent" / "out.txt"):
        with pytest.raises(InputError, match="--output"), open_output(path):
            pass
