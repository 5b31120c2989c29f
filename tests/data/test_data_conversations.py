"""Conversations: formats of rows, refusals, their ids and marks, packing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tformer.data.shards.chat_tokens import answer_ids, marked_corpus
from tformer.data.shards.corpus import LEARNED
from tformer.data.sources.conversations import Conversation, open_conversations
from tformer.data.sources.reading import Reading
from tformer.recipe.sections import SourceSpec
from tformer.support.errors import InputError
from tformer.tasks.chat import ConversationWindows
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer
from tformer.tokenizer.chat import ChatTemplate

ASKED, ANSWERED = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [ASKED, ANSWERED]},
    "prompt_completion": {"prompt": "2 + 2?", "completion": "4"},
    "alpaca": {"instruction": "2 +", "input": "2?", "output": "4"},
    "sharegpt": {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
    "text": {"text": "2 + 2 = 4"},
}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def read(path: Path, **options: Any) -> list[Conversation]:
    [source] = open_conversations((SourceSpec(path=str(path)),), **options)
    return list(source.rows())


def chat_corpus(source: Any, template: ChatTemplate, **options: Any) -> Any:
    return marked_corpus(source, lambda row: [[each] for each in answer_ids(row, template)], key="", **options)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = ["user assistant system\n2 + 2? 4, and what else 3 + 5 = 8\n"] * 20
    return train_tokenizer(lambda: iter(texts), TokenizerOptions(vocab_size=300, template="chatml"))


@pytest.mark.parametrize("name", ROWS)
def test_each_format_is_found_and_read(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [ROWS[name], ROWS[name]])
    [source] = open_conversations((SourceSpec(path=str(path)),))
    [row, other] = source.rows()
    asked = "2 +\n2?" if name == "alpaca" else "2 + 2?"
    assert row.messages == ([] if name == "text" else [{"role": "user", "content": asked}, ANSWERED])
    assert row.text == ("2 + 2 = 4" if name == "text" else f"{asked}\n4") and other.place == f"{path}:2"


@pytest.mark.parametrize("name", ROWS)
def test_parquet_gives_the_rows_of_jsonl(name: str, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [ROWS[name], ROWS[name]]
    if name == "messages":  # a key that only one message has is null in the others
        rows[1] = {"messages": [ASKED, ANSWERED | {"name": "x"}]}
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = read(tmp_path / "rows.parquet")
    assert [row.messages for row in found] == [row.messages for row in read(write(tmp_path / "rows.jsonl", rows))]


def test_messages_may_stand_in_prompt_and_completion(tmp_path: Path) -> None:
    system = {"role": "system", "content": "short"}
    row = {"prompt": [system, ASKED], "completion": [ANSWERED]}
    assert read(write(tmp_path / "rows.jsonl", [row]))[0].messages == [system, ASKED, ANSWERED]


BESIDE = {"system": "Be brief.", "history": [["hi", "hello"], ASKED, ANSWERED]}


@pytest.mark.parametrize("name", [name for name in ROWS if name != "text"])
def test_system_and_history_beside_a_row_stand_before_its_messages(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [ROWS[name] | BESIDE, ROWS[name] | {"system": "", "history": None}])
    row, bare = read(path)
    before = [("system", "Be brief."), ("user", "hi"), ("assistant", "hello"), ("user", "2 + 2?"), ("assistant", "4")]
    assert [(each["role"], each["content"]) for each in row.messages[:5]] == before
    assert row.messages[5:] == bare.messages and row.text.startswith("Be brief.\nhi\nhello\n")


def test_two_system_prompts_are_refused_unless_they_are_one(tmp_path: Path) -> None:
    for system in ({"role": "system", "content": "a"}, {"from": "system", "value": "a"}):
        row = {"messages": [system, ASKED, ANSWERED], "system": "a"}
        assert [each["role"] for each in read(write(tmp_path / "rows.jsonl", [row]))[0].messages].count("system") == 1
        with pytest.raises(InputError, match=r"rows\.jsonl:1: found a system message after"):
            read(write(tmp_path / "rows.jsonl", [row | {"system": "b"}]))


def test_tool_calls_without_content_are_read_and_learned(tokenizer: Tokenizer, tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    rows = [
        {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": tools}
        for tools in ([{"name": "f"}], '[{"name": "f"}]')
    ]
    found = read(write(tmp_path / "rows.jsonl", rows))
    assert found[0].messages == found[1].messages and found[0].messages[1]["content"] is None
    for row in found:
        assert row.tools == [{"name": "f"}]
        [example] = answer_ids(row, ChatTemplate(tokenizer))
        learned = tokenizer.decode(np.array(example.ids)[example.answers].tolist())
        assert learned.startswith('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')


def test_unknown_roles_are_refused_with_row_and_known_roles(tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = {
        "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "bing", "value": ""}]
    }
    [source] = open_conversations((SourceSpec(path=str(write(tmp_path / "rows.jsonl", [row]))),))
    expected = r"rows.jsonl:1: message 3: found the role 'bing', the chat template knows system, user, assistant, tool"
    with pytest.raises(InputError, match=expected):
        chat_corpus(source, ChatTemplate(tokenizer), seq_len=64, overlong="drop")


def test_answers_that_are_examples_of_their_own_are_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    so = "{{ 'so ' if loop.last and m.role == 'assistant' }}"
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        + so
        + "{{ m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    path = write(tmp_path / "rows.jsonl", [{"messages": [ASKED, ANSWERED] * 2}] * 3)
    [rows] = open_conversations((SourceSpec(path=str(path)),))
    corpus = chat_corpus(rows, ChatTemplate(tokenizer, source), seq_len=64, overlong="drop")
    assert len(corpus.document_offsets) - 1 == 6
    assert "3 conversations are 6 examples: the chat template rewrites an answer when more" in corpus.notes[0]


def test_a_named_format_is_read_where_several_fit(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [ROWS["messages"] | ROWS["text"]])
    assert read(path)[0].messages and not read(path, format="text")[0].messages


WRONG = {
    "no JSON": ('{"messages": ', "rows.jsonl:2: not JSON"),
    "no object": ("[1]", "rows.jsonl:2: expected an object, found a list"),
    "no key": (
        {"prompt": "x"},
        "rows.jsonl:2: expected the keys messages, or conversations, or prompt and comp",
    ),
    "null": ({"messages": None}, "instruction and output, or text, found none"),
    "a text": ({"messages": "hello"}, "rows.jsonl:2: 'messages' should be a list of messages, found a text"),
    "a list": ({"instruction": ["x"], "input": "y", "output": "z"}, "'instruction' should be text, found a list"),
    "no messages": ({"messages": []}, "no message of the role assistant, so there is no answer to learn"),
    "no answer": ({"messages": [ASKED]}, "rows.jsonl:2: no message of the role assistant"),
    "no role": ({"messages": [{"content": "x"}]}, "message 1: expected an object with role and content"),
    "no content": ({"messages": [ASKED, {"role": "assistant"}]}, "message 2: expected content as text, found null"),
    "parts": ({"messages": [{"role": "user", "content": [1]}]}, "message 1: expected content as text, found a list"),
    "a number": ({"messages": [3]}, "message 1: expected an object with role and content, found 3"),
    "blank": ({"messages": [{"role": "assistant", "content": " "}]}, "rows.jsonl:2: no text"),
    "no pairs": (
        {"messages": [{"role": "system", "content": "s"}, ASKED, ANSWERED], "history": ["x"]},
        "rows.jsonl:2: found a system message after those of the keys system and history",
    ),
    "history": ({**ROWS["messages"], "history": "x"}, "rows.jsonl:2: 'system' should be a text, 'history' a list"),
    "calls": (
        {"messages": [ASKED, ANSWERED | {"tool_calls": ["f"]}]},
        "message 2: expected tool_calls as a list of obj",
    ),
    "half a character": ({"messages": [{"role": "assistant", "content": "\ud800"}]}, "is half a character"),
    "half a role": ({"messages": [{"role": "\ud800", "content": "x"}, ANSWERED]}, "rows.jsonl:2: \\ud800 is half a"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rows_are_refused_with_their_line(name: str, tmp_path: Path) -> None:
    row, message = WRONG[name]
    path = write(tmp_path / "rows.jsonl", [ROWS["messages"], row])
    with pytest.raises(InputError) as error:
        read(path)
    assert message in error.value.message and "\n" not in error.value.message
    if name != "no JSON":
        assert len(read(path, reading=Reading(bad_rows="drop"))) == 1


def test_half_characters_are_replaced_where_that_is_wanted(tmp_path: Path) -> None:
    row = {"messages": [ASKED, ANSWERED | {"content": "4\ud800", "name": "\udc00"}]}
    [found] = read(write(tmp_path / "rows.jsonl", [row]), reading=Reading(errors="replace"))
    assert found.messages[1] == {"role": "assistant", "content": "4\ufffd", "name": "\ufffd"}
    assert found.text == "2 + 2?\n4\ufffd"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.txt", "hello\n", "conversations are read from .jsonl and .parquet"),
        ("rows.csv", "prompt,completion\na,b\n", "conversations are read from .jsonl and .parquet"),
        ("rows.jsonl", '{"question": "x", "answer": "y"}\n', "or text, found question, answer"),
        ("rows.jsonl", "", "is empty"),
    ],
)
def test_files_of_no_format_are_refused(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        read(tmp_path / name)


def test_marks_of_a_corpus_are_those_of_the_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    [source] = open_conversations((SourceSpec(path=str(write(tmp_path / "rows.jsonl", [ROWS["messages"]] * 3))),))
    template = ChatTemplate(tokenizer)
    corpus = chat_corpus(source, template, seq_len=64, overlong="drop")
    expected = template.examples([ASKED, ANSWERED])[0]
    ids = corpus.slice(0, len(expected.ids))
    assert len(corpus.document_offsets) == 4
    assert ids.tolist() == expected.ids and ids.dtype == np.int64
    for number in range(3):
        marks = corpus.subset(number * len(ids), (number + 1) * len(ids)).marks_of(0, len(ids))
        assert (marks == LEARNED).tolist() == expected.answers.tolist()


def test_long_conversations_are_left_out_or_cut(tokenizer: Tokenizer, tmp_path: Path) -> None:
    long = {"messages": [ASKED, ANSWERED | {"content": "4 " * 100}]}
    spec = SourceSpec(path=str(write(tmp_path / "rows.jsonl", [ROWS["messages"], long])))
    [source], template = open_conversations((spec,)), ChatTemplate(tokenizer)
    dropped = chat_corpus(source, template, seq_len=40, overlong="drop")
    cut = chat_corpus(source, template, seq_len=40, overlong="truncate")
    assert len(dropped.document_offsets) == 2 and np.diff(cut.document_offsets).tolist()[1] == 41
    assert "1 of 2 conversations are longer than 40 tokens: left out" in dropped.notes[0]
    with pytest.raises(InputError, match="none of 2 conversations is left: 2 are longer than 4 tokens"):
        chat_corpus(source, template, seq_len=4, overlong="drop")


def test_conversations_without_an_answer_are_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    answer = "{% if messages[1].content == '4' %}{% generation %}4{% endgeneration %}{% endif %}"
    template = ChatTemplate(tokenizer, "{{ messages[0].content }}" + answer)
    mute = {"messages": [ASKED, ANSWERED | {"content": "5"}]}
    [some], [none] = (
        open_conversations((SourceSpec(path=str(write(tmp_path / f"{name}.jsonl", rows))),))
        for name, rows in (("some", [ROWS["messages"], mute]), ("none", [mute]))
    )
    found = chat_corpus(some, template, seq_len=64, overlong="drop")
    assert len(found.document_offsets) == 2
    assert "1 of 2 conversations are without an answer that can be learned: left out" in found.notes[0]
    with pytest.raises(InputError, match=r"none of 1 conversations is left: 1 are without an answer") as error:
        chat_corpus(none, template, seq_len=64, overlong="drop")
    assert "{% generation %}" in (error.value.hint or "")


def test_what_a_template_refuses_names_the_row(tokenizer: Tokenizer, tmp_path: Path) -> None:
    [source] = open_conversations((SourceSpec(path=str(write(tmp_path / "rows.jsonl", [ROWS["messages"]]))),))
    template = ChatTemplate(tokenizer, "{{ raise_exception('no') }}")
    with pytest.raises(InputError, match=r"rows\.jsonl:1: the chat template refuses these messages: no"):
        chat_corpus(source, template, seq_len=64, overlong="drop")


def test_samples_hold_whole_conversations(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"prompt": f"{a} + {b}?", "completion": str(a + b)} for a in range(5) for b in range(20)]
    [source] = open_conversations((SourceSpec(path=str(write(tmp_path / "rows.jsonl", rows))),))
    corpus = chat_corpus(source, ChatTemplate(tokenizer), seq_len=100, overlong="drop")
    packed = ConversationWindows(corpus, 100, packing="documents", document_mask=True)
    examples = packed.examples(0, np.arange(len(packed)))
    assert max(map(len, examples)) <= 101 and len(examples) < len(rows)
    assert sum(map(len, examples)) == len(corpus)
    marks = np.concatenate([np.asarray(example.label) for example in examples])
    assert np.array_equal(marks, corpus.marks_of(0, len(corpus))) and set(marks.tolist()) == {0, LEARNED}
    lengths = [np.bincount(example.document_ids).tolist() for example in examples if example.document_ids is not None]
    assert [size for sizes in lengths for size in sizes] == np.diff(corpus.document_offsets).tolist()
