"""Sentences of words with tags: CoNLL files and jsonl; alignment of pieces and words against transformers; refusals."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers

from tformer.data.shards.marked_tokens import UNMARKED
from tformer.data.sources.labelled import LabelIndex
from tformer.data.sources.tables import TaggedRow
from tformer.evaluation.classifier import GivenRows
from tformer.recipe.sections import SourceSpec
from tformer.support.errors import InputError
from tformer.tasks.tags.rows import as_bio, open_tagged
from tformer.tasks.tags.words import piece_words, tokenize_tagged, word_spans
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer

CONLL = "-DOCSTART- -X- O\n\nAda NNP B-PER\nLovelace NNP I-PER\nwrote VBD O\n\n\nLondon NNP B-LOC\n"
WORDS = ["Ada", "Lovelace", "didn't", "visit", "U.N.", "in", "Köln", "中国", "naïve", "3.14", "(", "e-mail", ")", "…"]


def read(path: Path, content: str, **columns: Any) -> list[TaggedRow]:
    path.write_text(content, encoding="utf-8")
    [source] = open_tagged([SourceSpec(path=str(path))], columns=SimpleNamespace(**columns))
    return list(source.rows())


def test_a_conll_file_has_a_word_and_its_tag_in_a_line(tmp_path: Path) -> None:
    first, second = read(tmp_path / "a.conll", CONLL)
    assert first.text == "Ada Lovelace wrote" and first.tags == ("B-PER", "I-PER", "O")
    assert [first.text[a:b] for a, b in first.spans] == ["Ada", "Lovelace", "wrote"]
    assert second.tags == ("B-LOC",) and second.place.endswith("a.conll:8")


@pytest.mark.parametrize("separator", [" ", "   ", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_other_white_space_is_a_part_of_its_word(tmp_path: Path, separator: str, end: str) -> None:
    words, place = ["10\u00a0000", "a\u2028b", "c\x85d", "\u200b"], tmp_path / "a.conll"
    place.write_bytes("".join(f"{word}{separator}B-X{end}" for word in words).encode())
    [row] = [row for source in open_tagged([SourceSpec(path=str(place))]) for row in source.rows()]
    assert [row.text[a:b] for a, b in row.spans] == words and set(row.tags) == {"B-X"}


def test_columns_are_named_by_number(tmp_path: Path) -> None:
    assert read(tmp_path / "a.txt", CONLL, label=1)[0].tags == ("NNP", "NNP", "VBD")
    assert read(tmp_path / "a.tsv", "1\tNew York\tB\n", text=1)[0].text == "New York"


def test_conllu_has_comments_and_words_of_several_tokens(tmp_path: Path) -> None:
    text = "# text = Im Haus\n1-2\tIm\t_\t_\n1\tIn\tin\tADP\n2\tdem\tder\tDET\n3\tHaus\tHaus\tNOUN\n\n"
    [row] = read(tmp_path / "a.conllu", text)
    assert row.text == "In dem Haus" and row.tags == ("ADP", "DET", "NOUN")


UD = "1\tGo\tgo\tVERB\tVB\tMood=Imp\t0\troot\t_\t_\n2\t#1\t#1\tNOUN\tNN\t_\t1\tobj\t_\t_\n"
COMMENTS = [  # (comment, word, columns of a word): the comments of published corpora, and words that begin with #
    ("# sent_id = s0", "Ada B-PER", 2),
    ("# text = Ada wrote", "Ada NNP x B-PER", 4),
    ("# newdoc", "Ada\tB-PER", 2),
    ("# newpar id = 1", "Ada B-PER", 2),
    ("#begin document (nw/a); part 000", "Ada NNP x y B-PER", 5),
    ("# global.columns = ID FORM", "Ada\tNNP\tx\tB-PER", 4),
    ("# a note of five words", "#1 O", 2),
]


@pytest.mark.parametrize(("comment", "word", "width"), COMMENTS)
def test_comments_of_conll_files_are_no_words(tmp_path: Path, comment: str, word: str, width: int) -> None:
    tag, separator = word.split()[-1], "\t" if "\t" in word else " "
    other = separator.join(["wrote", *"x" * (width - 2), "O"])
    text = f"{comment}\n{other}\n{word}\n\n{comment}\n{word}\n{comment}\n{other}\n\n"
    first, second = read(tmp_path / "a.conll", text)
    assert first.tags == ("O", tag) and second.tags == (tag, "O")
    assert first.text == f"wrote {word.split()[0]}" and first.place.endswith("a.conll:2")


def test_words_that_begin_with_a_hash_stay_words(tmp_path: Path) -> None:
    [row] = read(tmp_path / "a.conll", "#first O\n# O\n#2 B-X\n")
    assert row.text == "#first # #2" and row.tags == ("O", "O", "B-X")


@pytest.mark.parametrize("name", ["a.conllu", "a.conll", "a.txt", "a.tsv"])
def test_conllu_is_known_by_its_content(tmp_path: Path, name: str) -> None:
    [row] = read(tmp_path / name, f"# sent_id = 1\n{UD}\n")
    assert row.text == "Go #1" and row.tags == ("VERB", "NOUN")


@pytest.mark.parametrize("keys", [("words", "tags"), ("tokens", "ner_tags")])
def test_jsonl_has_lists_of_words_and_tags(tmp_path: Path, keys: tuple[str, str]) -> None:
    text = f'{{"{keys[0]}": ["New York", "is"], "{keys[1]}": ["B-LOC", "O"]}}\n\n{{"{keys[0]}": [], "{keys[1]}": []}}\n'
    [row] = read(tmp_path / "a.jsonl", text)
    assert [row.text[a:b] for a, b in row.spans] == ["New York", "is"] and row.tags == ("B-LOC", "O")


WRONG = [
    ("a.conll", "Ada B-PER\nLovelace\n", {}, "a.conll:2: expected a word in column 0 and its tag in another"),
    ("a.conll", "Ada B-PER\n", {"label": 5}, "found 2 columns"),
    ("a.conll", "Ada B-PER\n", {"label": 0}, "found 2 columns"),
    ("a.conll", "Ada B-PER\n", {"label": "ner"}, "columns of CoNLL files have numbers, found 'ner'"),
    ("a.tsv", "Ada\t\n", {}, "a.tsv:1: a tag of the sentence is blank"),
    ("a.tsv", "\tB-PER\n", {}, "a.tsv:1: a word of the sentence is blank"),
    ("a.conll", "", {}, "is empty"),
    ("a.csv", "Ada,B-PER\n", {}, "are read from CoNLL files and jsonl, found .csv"),
    ("a.jsonl", "Ada B-PER\n", {}, "a.jsonl:1: not JSON"),
    ("a.jsonl", '{"words": ["Ada"]}\n', {}, "a.jsonl:1: expected a key tags or ner_tags or"),
    ("a.jsonl", '{"words": ["Ada"], "tags": []}\n', {}, "found 1 words, 0 tags"),
    ("a.jsonl", '{"words": "Ada", "tags": ["O"]}\n', {}, "'words' should be a list of texts"),
    ("a.jsonl", '{"words": [1.5], "tags": ["O"]}\n', {}, "'words' should be a list of texts"),
    ("a.jsonl", '{"words": [" "], "tags": ["O"]}\n', {}, "a word of the sentence is blank"),
    ("a.jsonl", '{"words": ["a"], "tags": ["O"]}\n', {"text": "text"}, "expected a key text, found words, tags"),
    ("a.jsonl", '{"words": ["a\\ud800"], "tags": ["O"]}\n', {}, "a.jsonl:1: \\ud800 is half a character"),
    ("builtin:dates", "", {}, "is text without tags"),
]


@pytest.mark.parametrize(("name", "text", "columns", "message"), WRONG)
def test_wrong_files_are_refused(tmp_path: Path, name: str, text: str, columns: dict[str, Any], message: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as error:
        given = SourceSpec(path=name if name.startswith("builtin") else str(path))
        for source in open_tagged([given], columns=SimpleNamespace(**columns)):
            list(source.rows())
    assert message in error.value.message


def trained(model: str) -> Tokenizer:
    options = TokenizerOptions(model=model, vocab_size=400, template="bert")  # type: ignore[arg-type]
    return train_tokenizer(lambda: iter([" ".join(WORDS)] * 20), options)


def published(kind: str) -> Tokenizer:
    """RoBERTa's bytes and XLM-RoBERTa's pieces, which have a space before every word."""
    bytes_ = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    made = tokenizers.Tokenizer(tokenizers.models.BPE() if kind == "roberta" else tokenizers.models.Unigram())
    made.pre_tokenizer = bytes_ if kind == "roberta" else tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    trainers = tokenizers.trainers
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=bytes_.alphabet())
    if kind != "roberta":
        unknown: dict[str, Any] = {"unk_token": "<unk>", "special_tokens": ["<unk>"]}
        trainer = trainers.UnigramTrainer(vocab_size=60, show_progress=False, **unknown)
    made.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    return Tokenizer.from_json(made.to_str())


@pytest.mark.parametrize("model", ["wordpiece", "word", "roberta", "xlm-roberta"])
def test_pieces_belong_to_the_words_of_transformers(model: str, tmp_path: Path) -> None:
    tokenizer = published(model) if "roberta" in model else trained(model)
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer.save(tmp_path / "tokenizer.json")))
    rng = np.random.default_rng(5)
    for size in range(1, 30):
        words = [str(word) for word in rng.choice(WORDS, size=size)]
        row = TaggedRow.of(words, (), "")
        ids, offsets = tokenizer.encode_spans(row.text)
        expected = reference(words, is_split_into_words=True, add_special_tokens=False)
        assert ids == expected["input_ids"]
        assert piece_words(offsets, row.spans).tolist() == expected.word_ids()


def test_the_first_piece_of_a_word_has_its_label() -> None:
    tokenizer, row = trained("wordpiece"), TaggedRow.of(WORDS, WORDS, "")
    index = LabelIndex(tuple(WORDS))
    whole = tokenize_tagged([GivenRows([row])], index, tokenizer, seq_len=100)
    mark: Any = whole.examples(0, [0])[0].label
    ids, offsets = tokenizer.encode_spans(row.text)
    words = piece_words(offsets, row.spans).tolist()
    assert mark[0] == mark[-1] == UNMARKED and len(mark) == len(ids) + 2
    expected = [word if words.index(word) == place else UNMARKED for place, word in enumerate(words)]
    assert mark[1:-1].tolist() == expected and not whole.notes


@pytest.mark.parametrize("seq_len", [3, 4, 5, 8, 9, 12, 13, 300])
def test_a_word_of_a_long_sentence_has_its_label_in_the_window_where_it_is_farthest_from_a_cut(seq_len: int) -> None:
    tokenizer, names = trained("wordpiece"), list(dict.fromkeys(WORDS))
    tags = WORDS * 3
    row = TaggedRow.of(tags, tags, "a.conll:1")
    ids, offsets = tokenizer.encode_spans(row.text)
    found = tokenize_tagged([GivenRows([row])], LabelIndex(tuple(names)), tokenizer, seq_len=seq_len)
    words, room = piece_words(offsets, row.spans).tolist(), seq_len - 2
    distances: dict[int, list[int]] = {}  # of each token from the nearest cut, in each window
    begin, labelled = 0, dict[int, tuple[int, int]]()  # of each token: its label and its distance
    for example in found.examples(0, range(len(found))):
        text, marks = example.ids[1:-1].tolist(), np.asarray(example.label)[1:-1].tolist()
        assert text == ids[begin : begin + room]
        for place, mark in enumerate(marks, begin):
            edges = [place - begin] * (begin > 0) + [begin + len(text) - 1 - place] * (begin + len(text) < len(ids))
            distances.setdefault(place, []).append(min(edges, default=len(ids)))
            if mark != UNMARKED:
                assert place not in labelled
                labelled[place] = mark, distances[place][-1]
        begin += room - min(128, room // 2)
    firsts = [words.index(word) for word in range(len(tags))]
    assert sorted(labelled) == firsts and max(map(len, distances.values())) <= 2
    for word, place in enumerate(firsts):
        assert labelled[place] == (names.index(tags[word]), max(distances[place]))
    assert [note.endswith("are read in windows") for note in found.notes] == [True] * (len(found) > 1)
    assert found.source_lengths.tolist() == [int(found.lengths.sum())] * len(found)


def test_iob1_becomes_bio() -> None:
    tags = ["I-PER", "I-PER", "B-PER", "O", "I-LOC", "I-PER"]
    assert as_bio(tags) == ["B-PER", "I-PER", "B-PER", "O", "B-LOC", "B-PER"]
    for tags in (["B-PER", "I-PER", "O"], ["B-X", "I-X", "L-X", "U-X"], ["NOUN", "DET"]):
        assert as_bio(tags) == tags


@pytest.mark.parametrize(
    "words",
    [
        ["U.S", ".", "don't", "3.5", "-", "e-mail", ",", "a_b"],
        ["Ame\u0301lie", "हिन्दी", "می\u200cخواهم", "日本語"],  # accents, vowel signs, joiners
        ["👩\u200d💻", "❤\ufe0f", "😀", "\ud800"],
        [],
    ],
)
def test_marks_and_joiners_are_parts_of_their_word(words: list[str]) -> None:
    text = f" {' '.join(words)}\u00a0"
    assert [text[start:end] for start, end in word_spans(text)] == words
