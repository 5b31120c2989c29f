"""From logits to tokens, and from tokens to text with stop texts."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tformer.data.encoding import encode_prompt, start_ids
from tformer.decoding.completion import TextFollower, held_length
from tformer.decoding.lines import line_blocks
from tformer.decoding.output import generated_document
from tformer.decoding.sampling import (
    UniformStream,
    block_tokens,
    chosen_logprobs,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    pad_left,
    penalize_repetition,
    reshape,
)
from tformer.decoding.settings import Generated
from tformer.support.errors import InputError, Interrupted, visible
from tformer.support.files import open_output
from tformer.support.formatting import as_one_line
from tformer.tokenizer import TokenizerOptions, train_tokenizer

NEVER = float("-inf")
CHI_SQUARE_999 = {3: 16.27, 7: 24.32, 9: 27.88}  # 99.9 % quantiles


def kept(logits: torch.Tensor) -> list[list[int]]:
    return [row.isfinite().nonzero().squeeze(1).tolist() for row in logits]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens():
    logits = torch.tensor([[2.0, -2.0, 4.0, -4.0], [2.0, -2.0, 4.0, -4.0]])
    seen = pad_left([[1, 0, 1], [2, 3]])
    assert penalize_repetition(logits, seen, 2.0, exempt=()).tolist() == [
        [1.0, -4.0, 4.0, -4.0],
        [2.0, -2.0, 2.0, -8.0],
    ]
    assert torch.equal(penalize_repetition(logits, seen, 1.0, exempt=()), logits)


def test_blocked_tokens_are_never_chosen_and_other_rows_stay():
    logits = torch.zeros(3, 4)
    blocked = block_tokens(logits, [[1, 3], [], [0]])
    assert kept(blocked) == [[0, 2], [0, 1, 2, 3], [1, 2, 3]]


def test_a_row_with_every_token_blocked_is_left_as_it_was():
    logits = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    assert block_tokens(logits, [[0, 1], [1]]).tolist() == [[1.0, 2.0], [1.0, NEVER]]


def test_top_k_keeps_exactly_k_even_with_ties():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    assert kept(keep_top_k(logits, 2))[0] == [1, 3]
    assert len(kept(keep_top_k(logits, 2))[1]) == 2
    assert torch.equal(keep_top_k(logits, 4), logits)
    assert torch.equal(keep_top_k(logits, 99), logits)


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert kept(keep_top_p(logits, 0.4)) == [[0]]
    assert kept(keep_top_p(logits, 0.6)) == [[0, 1]]
    assert kept(keep_top_p(logits, 0.85)) == [[0, 1, 2]]
    assert kept(keep_top_p(logits, 0.99)) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("shift", [0.0, 5.3, -20.7])
@pytest.mark.parametrize(
    ("probabilities", "p", "count"),
    [
        *([([0.5, 0.3, 0.1, 0.1], p, count) for p, count in ((0.5, 1), (0.8, 2), (0.9, 3), (0.81, 3), (0.79, 2))]),
        *([([0.7, 0.2, 0.05, 0.05], p, count) for p, count in ((0.7, 1), (0.9, 2), (0.95, 3), (0.95001, 4))]),
        *([([0.4, 0.3, 0.2, 0.1], p, count) for p, count in ((0.4, 1), (0.7, 2), (0.70001, 3), (0.9, 3))]),
        *([([0.1] * 10, tenths / 10, tenths) for tenths in range(1, 10)]),
        *([([0.25] * 4, p, count) for p, count in ((0.25, 1), (0.25001, 2), (0.75, 3), (0.76, 4), (1 - 1e-9, 4))]),
    ],
)
def test_top_p_keeps_no_token_beyond_a_sum_of_exactly_p(probabilities, p, count, shift):
    """Whatever the logits' common shift, and no fewer than needed a hundred-thousandth beside it."""
    assert keep_top_p(torch.tensor([probabilities]).log() + shift, p).isfinite().sum() == count


@given(
    logits=st.lists(st.integers(-64, 64), min_size=1, max_size=40),
    p=st.floats(0.001, 0.999),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_top_p_keeps_the_smallest_set_of_the_distribution_that_the_logits_define(logits, p, dtype):
    """In fp32 and in bf16, whose logits are exact in fp32: against sums in fp64 over the sorted probabilities."""
    row = (torch.tensor([logits]) / 8).to(dtype).float()
    exact = row.double().softmax(-1)[0].sort(descending=True).values
    count = int((exact.cumsum(0) < p).sum()) + 1
    shaped = keep_top_p(row, p)
    assert abs(float(exact[: count - 1].sum()) - p) < 1e-6 or shaped.isfinite().sum() == count
    assert shaped[shaped.isfinite()].min() >= row.masked_fill(shaped.isfinite(), NEVER).max()


def test_top_p_is_unsorted_back_to_the_right_tokens():
    logits = torch.tensor([[0.05, 0.5, 0.15, 0.3], [0.3, 0.15, 0.5, 0.05]]).log()
    assert kept(keep_top_p(logits, 0.6)) == [[1, 3], [0, 2]]


def test_min_p_keeps_tokens_near_the_most_probable():
    logits = torch.tensor([[0.5, 0.26, 0.2, 0.04]]).log()
    assert kept(keep_min_p(logits, 0.5)) == [[0, 1]]
    assert kept(keep_min_p(logits, 0.05)) == [[0, 1, 2, 3]]


def test_a_tiny_temperature_neither_overflows_nor_changes_the_best_token():
    logits = torch.tensor([[80.0, 79.0, -300.0]])
    cold = reshape(logits, temperature=1e-38)
    assert not cold.isnan().any()
    assert draw(cold, torch.tensor([0.999])).tolist() == [0]


@given(
    logits=st.lists(st.integers(-30, 30), min_size=2, max_size=12),
    temperature=st.floats(0.1, 5),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 0.99),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_every_setting_leaves_the_best_token_and_draws_only_what_is_left(
    logits, temperature, top_k, top_p, min_p, uniform
):
    row = torch.tensor([logits], dtype=torch.float32)
    shaped = reshape(row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert row[0, shaped.argmax()] == row.max()
    assert shaped.max() > NEVER
    chosen = int(draw(shaped, torch.tensor([uniform], dtype=torch.float64)))
    assert shaped[0, chosen] > NEVER


def test_draw_never_gives_a_token_of_probability_zero():
    logits = torch.tensor([[NEVER, 0.0, NEVER, 0.0, NEVER]] * 3)
    uniforms = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, uniforms).tolist() == [1, 3, 3]


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_draws_follow_the_softmax(temperature):
    torch.manual_seed(0)
    logits = torch.randn(1, 8)
    streams = [UniformStream(3, row, 0) for row in range(200)]
    draws = [
        draw(
            reshape(logits.expand(200, 8), temperature=temperature),
            torch.tensor([stream.next() for stream in streams], dtype=torch.float64),
        )
        for _ in range(100)
    ]
    counts = torch.bincount(torch.cat(draws), minlength=8).double()
    assert chi_square(counts, (logits[0] / temperature).double().softmax(-1)) < CHI_SQUARE_999[7]


def test_rare_tokens_of_a_large_vocabulary_keep_their_share():
    logits = torch.zeros(1, 50_000)
    logits[0, 0] = math.log(50_000)  # half of the mass
    # Drawing at u and counting the smallest u that gives a token past k measures the CDF itself.
    for token in (1, 777, 49_999):
        boundary = 0.5 + 0.5 * (token - 1) / 49_999
        below, above = draw(logits.expand(2, -1), torch.tensor([boundary, boundary + 1.6e-5], dtype=torch.float64))
        assert int(below) in (token - 1, token)
        assert int(above) >= token


def test_logprobs_are_those_of_the_softmax():
    logits = torch.randn(3, 7)
    ids = torch.tensor([0, 3, 6])
    assert torch.allclose(chosen_logprobs(logits, ids), logits.log_softmax(-1)[range(3), ids])


def test_a_stream_depends_on_seed_row_and_sample():
    def first(*key: int) -> list[float]:
        stream = UniformStream(*key)
        return [stream.next() for _ in range(100)]

    assert first(1, 2, 3) == first(1, 2, 3)
    assert len({tuple(first(*key)) for key in ((1, 2, 3), (0, 2, 3), (1, 0, 3), (1, 2, 0), (3, 2, 1))}) == 5
    numbers = torch.tensor([value for row in range(50) for value in first(0, row, 0)])
    counts = torch.histc(numbers, bins=10, min=0, max=1)
    assert chi_square(counts, torch.full((10,), 0.1)) < CHI_SQUARE_999[9]


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


def read_lines(path):
    return [line for block in line_blocks(path, errors="strict", size=2) for line in block]


def test_lines_are_read_without_their_ends(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\n\ntwo \x00\n  three")
    assert read_lines(str(path)) == ["one", "", "two \x00", "  three"]
    path.write_bytes(b"")
    assert read_lines(str(path)) == []


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_control_characters_cannot_steer_the_terminal():
    assert visible("a\x1b[2J\x9b1m\x07\r\x7f\u202eb") == "a\\x1b[2J\\x9b1m\\x07\\r\\x7f\\u202eb"
    assert visible("tab\tline\nümlaut 猫 👩‍💻") == "tab\tline\nümlaut 猫 👩‍💻"


def test_one_line_stays_one_line():
    assert as_one_line("a\nb\r\nc") == "a\\nb\\r\\nc"


def test_the_document_of_a_prompt():
    completions = [Generated((1, 2), "x", (-0.5, -0.25), "eos"), Generated((3,), "y", (-1.0,), "length")]
    document = generated_document(4, "p", completions)
    assert json.loads(json.dumps(document)) == document
    assert list(document) == ["index", "prompt", "text", "finish_reason", "logprobs", "completions"]
    assert (document["index"], document["prompt"], document["text"]) == (4, "p", "x")
    assert (document["finish_reason"], document["logprobs"]) == ("eos", [-0.5, -0.25])
    assert [c["text"] for c in document["completions"]] == ["x", "y"]
    assert generated_document(0, "", [Generated((1,), "x", None, "length")])["logprobs"] is None


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
