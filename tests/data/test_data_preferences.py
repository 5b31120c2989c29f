"""Preferences: texts and messages of jsonl and Parquet, the marks of answers, what is held out, refusals."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tformer.data.shards.chat_tokens import WholeDocuments, join_sequences, marked_corpus
from tformer.data.shards.corpus import LEARNED, SECOND
from tformer.data.sources.conversations import open_conversations
from tformer.data.sources.preferences import Preference, PreferenceTable
from tformer.data.sources.reading import Reading
from tformer.recipe.sections import SourceSpec
from tformer.support.errors import InputError
from tformer.tasks.preferences import Preferences, answer_sides
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer
from tformer.tokenizer.chat import ChatTemplate
from tformer.workers.work import QUIET

USER, GOOD, BAD = ({"role": role, "content": text} for role, text in
                   (("user", "why"), ("assistant", "so it is"), ("assistant", "no")))  # fmt: skip
EARLIER = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
TEXTS = {"prompt": "why", "chosen": " so it is", "rejected": " no"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    text = "user assistant why so it is no hi"
    return train_tokenizer(lambda: iter([text]), TokenizerOptions(model="byte-bpe", vocab_size=280, template="chatml"))


def spec(path: Path) -> list[SourceSpec]:
    return [SourceSpec(path=str(path))]


def read(tmp_path: Path, *rows: Any, **reading: Any) -> list[Preference]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    [source] = open_conversations(spec(path), kind=PreferenceTable, reading=Reading(**reading))
    found: list[Any] = list(source.rows())
    return found


@pytest.mark.parametrize("row", [
    {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": "why", "chosen": [GOOD], "rejected": [BAD]},
    {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    {"prompt": "why", "chosen": [USER, GOOD], "rejected": [USER, BAD], "score": 3},
])  # fmt: skip
def test_messages_come_in_four_forms(row: Any, tmp_path: Path) -> None:
    [found] = read(tmp_path, row)
    assert (found.prompt, found.chosen, found.rejected) == (None, [USER, GOOD], [USER, BAD])


def test_system_and_history_stand_before_both_sides(tmp_path: Path) -> None:
    system = {"role": "system", "content": "short"}
    for row in (TEXTS, {"prompt": "why", "chosen": [GOOD], "rejected": [BAD]}):
        [found] = read(tmp_path, {**row, "system": "short", "history": [["hi", "so"]]})
        for side, answer in ((found.chosen, GOOD), (found.rejected, BAD)):
            assert found.prompt is None and side[:-1] == [system, *EARLIER, USER]
            assert side[-1]["content"].strip() == answer["content"]


def test_texts_and_messages_of_parquet_are_those_of_jsonl(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for row in (TEXTS, {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}):
        parquet.write_table(pa.Table.from_pylist([row, row]), tmp_path / "rows.parquet")
        [source] = open_conversations(spec(tmp_path / "rows.parquet"), kind=PreferenceTable)
        found: list[Any] = list(source.rows())
        [one] = read(tmp_path, row)
        assert [(each.prompt, each.chosen, each.rejected) for each in found] == [
            (one.prompt, one.chosen, one.rejected)
        ] * 2


def test_half_characters_are_replaced_where_that_is_wanted(tmp_path: Path) -> None:
    [row] = read(tmp_path, {**TEXTS, "rejected": " no\ud800"}, errors="replace")
    assert row.rejected == " no\ufffd"


def test_the_answer_to_a_text_and_its_end_are_marked(tokenizer: Tokenizer) -> None:
    row = Preference("why", " so it is", " no", "", "x")
    sides = answer_sides(row, tokenizer, partial(ChatTemplate, tokenizer))
    prompt, whole = tokenizer.encode("why"), tokenizer.encode("why so it is")
    assert sides[0].ids == [*whole, tokenizer.special.eos]
    for side in sides:
        assert side.answers.tolist() == [False] * len(prompt) + [True] * (len(side.ids) - len(prompt))
    ids, marks = join_sequences(sides)
    assert ids.tolist() == [*sides[0].ids, *sides[1].ids]
    assert (marks & LEARNED > 0).tolist() == [*sides[0].answers, *sides[1].answers]
    assert (marks & SECOND > 0).tolist() == [False] * len(sides[0].ids) + [True] * len(sides[1].ids)


def test_of_conversations_the_answers_from_the_first_different_one_are_marked(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(tokenizer, "chatml")
    before = len(template.prompt([*EARLIER, USER]))
    messages = [[*EARLIER, USER, each] for each in (GOOD, {**BAD, "content": "so no"})]
    sides = answer_sides(Preference(None, *messages, "", "x"), tokenizer, lambda: template)
    for side, own in zip(sides, messages, strict=True):
        expected = template.examples(own)[0]
        assert side.ids == expected.ids
        assert side.answers.tolist() == [mark and place >= before for place, mark in enumerate(expected.answers)]


def corpus_of(tmp_path: Path, tokenizer: Tokenizer, rows: list[Any], **options: Any) -> Any:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [source] = open_conversations(spec(path), kind=PreferenceTable)
    facts: dict[str, Any] = {"key": "k", "seq_len": 30, "overlong": "drop", "kind": WholeDocuments, **options}
    template = partial(ChatTemplate, tokenizer)
    return marked_corpus(source, lambda row: [answer_sides(row, tokenizer, template)], unit="preferences", **facts)


def test_a_template_is_made_once_for_all_rows(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, made = tmp_path / "rows.jsonl", list[ChatTemplate]()

    def make(*given: Any) -> ChatTemplate:
        made.append(ChatTemplate(*given))
        return made[-1]

    monkeypatch.setattr("tformer.tasks.preferences.ChatTemplate", make)
    path.write_text((json.dumps({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}) + "\n") * 5)
    sections = {"tokenizer": SimpleNamespace(chat_template=None), "data": SimpleNamespace(overlong="drop")}
    recipe: Any = SimpleNamespace(seq_len=60, **sections)
    [source] = open_conversations(spec(path), kind=PreferenceTable)
    assert len(Preferences().corpus(source, tokenizer, recipe, QUIET).document_offsets) == 6 and len(made) == 1


def number_of_seconds(corpus: Any) -> int:
    """How often the second sequence of a preference begins."""
    return int((np.diff(corpus.marks_of(0, len(corpus)) & SECOND, prepend=0) == SECOND).sum())


def test_preferences_are_never_divided(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{**TEXTS, "chosen": " so" * (1 + n % 4)} for n in range(10)]
    corpus = corpus_of(tmp_path, tokenizer, rows)
    for fraction, held_out in ((0.1, 1), (0.25, 2), (0.001, 1), (0.99, 9)):
        train, valid = corpus.split(fraction=fraction)
        for part, count in ((train, 10 - held_out), (valid, held_out)):
            assert len(part.document_offsets) - 1 == count == number_of_seconds(part)
    share = corpus.share(fraction=0.4, seed=1)
    assert number_of_seconds(share) == 4
    with pytest.raises(InputError, match="1 example is too few to hold one out"):
        corpus_of(tmp_path, tokenizer, rows[:1]).split(fraction=0.5)


def test_long_preferences_are_left_out_or_lose_their_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [TEXTS, {**TEXTS, "rejected": " no" * 40}, {**TEXTS, "prompt": "why " * 40}]
    dropped = corpus_of(tmp_path, tokenizer, rows)
    assert (
        len(dropped.document_offsets) == 2 and "2 of 3 preferences are longer than 30 tokens: left" in dropped.notes[0]
    )
    cut = corpus_of(tmp_path, tokenizer, rows, overlong="truncate")
    assert len(cut.document_offsets) == 3  # without the prompt that leaves no room for an answer
    assert np.diff(cut.document_offsets).max() <= 62 and "cut at their end" in cut.notes[0]
    with pytest.raises(InputError, match="none of 1 preferences is left: 1 are longer than 30 tokens"):
        corpus_of(tmp_path, tokenizer, rows[2:])


def test_preferences_that_are_all_equal_are_counted_as_such(tmp_path: Path, tokenizer: Tokenizer) -> None:
    same = {"prompt": [USER], "chosen": [GOOD], "rejected": [{**GOOD, "name": "x"}]}  # equal in the template
    with pytest.raises(InputError, match="none of 3 preferences is left: 3 have two answers") as error:
        corpus_of(tmp_path, tokenizer, [same] * 3)
    assert error.value.hint is None
    found = corpus_of(tmp_path, tokenizer, [same, TEXTS])
    assert (
        len(found.document_offsets) == 2 and "1 of 2 preferences have two answers with equal tokens" in found.notes[0]
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps({**TEXTS, "rejected": TEXTS["chosen"]}) * 1 + "\n")
    [source] = open_conversations(spec(tmp_path / "rows.jsonl"), kind=PreferenceTable, reading=Reading(bad_rows="drop"))
    with pytest.raises(
        InputError, match="none of 1 preferences is left: 1 are left out: chosen and rejected are equal"
    ):
        marked_corpus(source, lambda row: [], key="k", seq_len=30, overlong="drop", unit="preferences")


WRONG: dict[str, tuple[Any, str]] = {
    "no prompt": ({"chosen": "a", "rejected": "b"}, "rows.jsonl:1: no key 'prompt', found chosen, rejected"),
    "no chosen": ({"prompt": "a", "rejected": "b"}, "rows.jsonl:1: no key 'chosen', found prompt, rejected"),
    "null": ({**TEXTS, "rejected": None}, "no key 'rejected'"),
    "no messages": ({"chosen": [USER, GOOD]}, "no key 'rejected', found chosen"),
    "equal": ({**TEXTS, "rejected": " so it is"}, "chosen and rejected are equal, so neither is the better answer"),
    "equal messages": ({"prompt": "a", "chosen": [GOOD], "rejected": [GOOD]}, "chosen and rejected are equal"),
    "empty": ({**TEXTS, "chosen": " "}, "'chosen' is empty"),
    "mixed": ({**TEXTS, "rejected": [BAD]}, "found prompt a text, chosen a text, rejected a list"),
    "number": ({**TEXTS, "prompt": 3}, "found prompt a number, chosen a text, rejected a text"),
    "no answer": ({"chosen": [USER, GOOD], "rejected": [USER]}, "'rejected' does not end with a message"),
    "empty list": ({"prompt": "a", "chosen": [], "rejected": [BAD]}, "'chosen' does not end with a message"),
    "no message": ({"prompt": "a", "chosen": ["b"], "rejected": [BAD]}, "chosen: message 1: expected an object"),
    "no JSON": ("{", "rows.jsonl:1: not JSON"),
    "list": ([1], "rows.jsonl:1: expected an object, found a list"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_row_is_one_line(case: str, tmp_path: Path) -> None:
    row, message = WRONG[case]
    with pytest.raises(InputError) as caught:
        read(tmp_path, row)
    assert message in caught.value.message
    assert read(tmp_path, row, TEXTS, bad_rows="drop")[0].prompt == "why"


def test_only_jsonl_and_parquet_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_text("prompt\tchosen\trejected\na\tb\tc\n")
    with pytest.raises(InputError, match=r"read from \.jsonl and \.parquet files"):
        open_conversations(spec(tmp_path / "rows.tsv"), kind=PreferenceTable)
