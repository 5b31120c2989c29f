"""Questions: SQuAD's json and jsonl, windows of long contexts, and refusals."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tformer.data.shards.labelled_tokens import LabelledTokens
from tformer.data.shards.marked_tokens import UNMARKED, tokenize_questions
from tformer.data.sources.questions import QuestionRow, open_questions
from tformer.evaluation.classifier import GivenRows
from tformer.objectives.question_answering import QuestionAnsweringOptions
from tformer.recipe.sections import Data, SourceSpec
from tformer.support.errors import InputError
from tformer.tasks.base import EvenlySpread
from tformer.tasks.tags.task import divided
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer

CONTEXT = "Ada was born in London . Alan was born in Paris . Grace was born in Oslo ."


def squad(answers: Any, context: Any = CONTEXT, question: Any = "Where was Alan born ?", **more: Any) -> str:
    entry = {"id": "q1", "question": question, "answers": answers, **more}
    return json.dumps({"version": "v2.0", "data": [{"paragraphs": [{"context": context, "qas": [entry]}]}]})


def answer(text: str) -> dict[str, Any]:
    return {"text": text, "answer_start": CONTEXT.index(text)}


def read(path: Path, text: str) -> list[QuestionRow]:
    path.write_text(text, encoding="utf-8")
    return [row for source in open_questions([SourceSpec(path=str(path))]) for row in source.rows()]


def test_squad_has_articles_paragraphs_and_questions(tmp_path: Path) -> None:
    [row] = read(tmp_path / "a.json", squad([answer("Paris"), answer("in Paris")]))
    assert (row.text, row.text2, row.id) == ("Where was Alan born ?", CONTEXT, "q1")
    assert row.answers == (("Paris", CONTEXT.index("Paris")), ("in Paris", CONTEXT.index("in Paris")))
    assert row.place.endswith("a.json: question q1") and row.group == CONTEXT


def test_questions_may_have_no_answer(tmp_path: Path) -> None:
    [one] = read(tmp_path / "a.json", squad([], is_impossible=True, plausible_answers=[answer("Oslo")]))
    [other] = read(tmp_path / "b.json", squad([answer("Oslo")], is_impossible=True))
    [null] = read(tmp_path / "c.json", squad(None, is_impossible=True))
    assert one.answers == other.answers == null.answers == ()


def test_jsonl_has_a_question_in_a_line(tmp_path: Path) -> None:
    row = {"question": "Where ?", "context": CONTEXT, "answers": {"text": ["Oslo"], "answer_start": [68]}}
    [first, second] = read(tmp_path / "a.jsonl", f"{json.dumps(row)}\n\n{json.dumps(row | {'answers': []})}\n")
    assert first.answers == (("Oslo", 68),) and second.answers == () and (first.number, second.number) == (0, 1)


WRONG = [
    ("a.json", '{"data":\n [}', "a.json: not JSON: Expecting value at character 3 of line 2"),
    ("a.json", '{"data": ' * 100_000, "a.json: JSON nested too deeply"),
    ("a.json", "[]", "a.json: expected SQuAD's json, found a list"),
    ("a.json", "{}", "a.json: expected SQuAD's json, found no list 'data'"),
    ("a.json", '{"data": [{}]}', "found no list 'paragraphs'"),
    ("a.json", '{"data": [{"paragraphs": [{"context": "a"}]}]}', "found no list 'qas'"),
    ("a.json", '{"data": [{"paragraphs": [{"context": "a", "qas": [1]}]}]}', "expected an object in 'qas', found 1"),
    ("a.json", squad([], context=" "), "question q1: expected a text as 'context', found ' '"),
    ("a.json", squad([], question=None), "question q1: expected a text as 'question', found None"),
    ("a.json", squad(None), "'answers' should be a list, found None"),
    ("a.json", squad("Paris"), "'answers' should be a list, found 'Paris'"),
    ("a.json", squad(["Paris"]), "an answer needs 'text' and 'answer_start', found 'Paris'"),
    ("a.json", squad([{"text": "Paris"}]), "an answer needs 'text' and 'answer_start'"),
    ("a.json", squad([{"text": "Paris", "answer_start": 3}]), "the answer 'Paris' does not stand at character 3"),
    ("a.json", squad([{"text": "", "answer_start": 0}]), "the answer '' does not stand at character 0"),
    ("a.json", "", "is empty"),
    ("a.jsonl", '{"context": "a"}\n', "a.jsonl:1: expected a text as 'question', found None"),
    ("a.jsonl", '{"context": "a", "question": "b"}\n', "a.jsonl:1: 'answers' should be a list, found None"),
    ("a.json", squad([], context="a\ud800"), "question q1: \\ud800 is half a character"),
    ("a.json", squad([], question="a\ud800"), "question q1: \\ud800 is half a character"),
    ("a.jsonl", "[1]\n", "a.jsonl:1: expected an object, found a list"),
    ("a.json", squad({"text": "Paris", "answer_start": 39}), "question q1: 'answers' should be a list, or have lists"),
    ("a.json", squad({"text": "Paris", "answer_start": [39]}), "or have lists of one length as 'text' and"),
    ("a.json", squad({"text": ["Paris"]}), "'answers' should be a list, or have lists of one length"),
    ("a.json", squad({"text": ["Paris", "Oslo"], "answer_start": [39]}), "or have lists of one length as 'text' and"),
]


@pytest.mark.parametrize(("name", "text", "message"), WRONG)
def test_wrong_files_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        read(tmp_path / name, text)
    assert message in error.value.message


def test_there_is_no_built_in_source() -> None:
    with pytest.raises(InputError, match="questions need data"):
        open_questions([])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    options = TokenizerOptions(model="wordpiece", vocab_size=60, template="bert")
    return train_tokenizer(lambda: iter([CONTEXT] * 20), options)


def windows(
    tokenizer: Tokenizer, row: QuestionRow, *, seq_len: int, stride: int = 4, max_question: int = 9
) -> LabelledTokens:
    options = QuestionAnsweringOptions(stride=stride, max_question=max_question)
    return tokenize_questions([GivenRows([row])], options, tokenizer, seq_len=seq_len, token_types=True)


def offsets_of(found: LabelledTokens) -> list[np.ndarray]:
    rows: Any = found.rows
    return [row.offsets for row in rows]


def texts_of(found: LabelledTokens) -> list[str]:
    return [CONTEXT[int(each[0, 0]) : int(each[-1, 1])] for each in offsets_of(found)]


@pytest.mark.parametrize("stride", [0, 4, 9, 1000])
def test_windows_overlap_by_the_stride_and_cover_the_context(tokenizer: Tokenizer, stride: int) -> None:
    row = QuestionRow("Where ?", CONTEXT, None, "", answers=(("Paris", CONTEXT.index("Paris")),))
    found = windows(tokenizer, row, seq_len=20, stride=stride)
    _, offsets = tokenizer.encode_spans(CONTEXT)
    windows_of = [each.tolist() for each in offsets_of(found)]
    begins, sizes = [offsets.index(tuple(each[0])) for each in windows_of], list(map(len, windows_of))
    size = max(sizes)
    assert begins == [number * (size - min(stride, size // 2)) for number in range(len(begins))]
    assert begins[-1] + sizes[-1] == len(offsets) and (found.lengths <= 20).all()
    for begin, window in zip(begins, windows_of, strict=True):
        assert window == list(map(list, offsets[begin : begin + len(window)]))


def test_the_answer_is_marked_in_every_window_that_holds_it_whole(tokenizer: Tokenizer) -> None:
    text = "born in Paris"
    row = QuestionRow("Where ?", CONTEXT, None, "", answers=((text, CONTEXT.index(text)),))
    found = windows(tokenizer, row, seq_len=20, stride=6)
    marked = 0
    examples = found.examples(0, range(len(found)))
    for example, window, context in zip(examples, offsets_of(found), texts_of(found), strict=True):
        marks: Any = example.label
        allowed = np.flatnonzero(marks != UNMARKED)
        assert allowed[0] == 0 and len(allowed) == 1 + len(window)
        starts, ends = (np.flatnonzero((marks >= 0) & (marks & bit > 0)) for bit in (1, 2))
        if text in context:
            marked += 1
            places = allowed[1:]
            first, last = (window[int(np.searchsorted(places, each[0]))] for each in (starts, ends))
            assert CONTEXT[int(first[0]) : int(last[1])] == text
        else:
            assert starts.tolist() == ends.tolist() == [0]
    assert 0 < marked < len(found)


def test_a_window_is_a_pair_in_the_template(tokenizer: Tokenizer) -> None:
    row = QuestionRow("Where was Alan ?", CONTEXT, None, "")
    [example] = windows(tokenizer, row, seq_len=200).examples(0, [0])
    ids, types = tokenizer.encode_pair(row.text, CONTEXT)
    assert example.ids.tolist() == ids and example.token_type_ids is not None
    assert example.token_type_ids.tolist() == types


def test_a_long_question_has_at_most_half_of_the_room(tokenizer: Tokenizer) -> None:
    row = QuestionRow(CONTEXT, CONTEXT, None, "")
    found = windows(tokenizer, row, seq_len=23, max_question=64)
    assert max(map(len, offsets_of(found))) == 10
    with pytest.raises(InputError, match="leave no room for two texts"):
        windows(tokenizer, row, seq_len=4)


def test_the_windows_of_a_question_have_one_length_together(tokenizer: Tokenizer) -> None:
    rows = [QuestionRow("Where ?", text, None, "", number) for number, text in enumerate((CONTEXT, CONTEXT[:20]))]
    options = QuestionAnsweringOptions(stride=4, max_question=9)
    found = tokenize_questions([GivenRows(rows)], options, tokenizer, seq_len=20, token_types=True)
    numbers = np.array([row.number for row in found.rows])
    assert (numbers == 0).sum() > 1 and (numbers == 1).sum() == 1
    assert found.source_lengths.tolist() == [found.lengths[numbers == number].sum() for number in numbers]


def test_shares_and_divisions_keep_the_windows_of_a_text_together(tokenizer: Tokenizer) -> None:
    def row(number: int, context: int) -> QuestionRow:
        text = f"{context} " + CONTEXT * (1 + context % 3)
        return QuestionRow("Where ?", text, "", f"a.json: question {number}", number=number, group=text)

    rows = [row(number, number // 3) for number in range(60)]  # three questions to a context
    data = Data.model_validate({"valid_fraction": 0.2})
    kept, held_out = divided([GivenRows(rows, "a")], data)  # type: ignore[list-item]
    contexts = [{each.text2 for each in part.rows()} for part in (kept, held_out)]
    assert all(contexts) and not contexts[0] & contexts[1]

    options = QuestionAnsweringOptions()
    found = tokenize_questions([GivenRows(rows)], options, tokenizer, seq_len=20, token_types=True)
    windows = Counter(each.number for each in found.rows)
    assert found.text_numbers.tolist() == [each.number for each in found.rows] and max(windows.values()) > 3
    for part in (0.05, 0.3, 0.5):
        spread = EvenlySpread(found, max(1, round(part * len(found))))
        for chosen in (spread.chosen, found.share(fraction=part, seed=1)):
            numbers = Counter(each.number for each in chosen.rows)
            assert len(numbers) == round(part * 60) and all(count == windows[key] for key, count in numbers.items())
        assert len(spread.examples(0, range(len(spread)))) == len(spread) == len(spread.lengths)
    assert len(found.share(fraction=1.0, seed=1)) == len(found)
