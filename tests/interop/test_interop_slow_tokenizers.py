"""Vocabularies without tokenizer.json give the ids that `transformers`' own tokenizers give for the same files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers, trainers

from tests.interop.classes import note
from tformer.interop.tokenizer_files import read_tokenizer
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer

TEXTS = [
    "The cat sat on the mat.",
    "  two  spaces,\ttab\nline ",
    "Café naïve ÅNGSTRÖM ﬁne",
    "日本語 and 中文字",
    "hello newword newwords",
    "don't can't 3.14 (a+b)",
    "\u00a0\u200bzero\x00width\ufffd",
    "x" * 120,
    "👩‍👩‍👧 ok",
    "",
    " ",
    "cat",
    " cat",
]
CORPUS = ["the cat sat on the mat", "café naive angstrom fine", "日 本 語 中 文 字", "don't can't 3.14 hello word"] * 4


def write(folder: Path, **documents: Any) -> Path:
    """`tokenizer_config={...}` becomes tokenizer_config.json."""
    folder.mkdir(exist_ok=True)
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    return folder


def wordpiece(folder: Path, *special: str, **documents: Any) -> Path:
    words = sorted({word for text in CORPUS for word in text.split()})
    letters = sorted({letter for text in CORPUS for letter in text if letter.strip()} | set("CATMN.,()+"))
    vocabulary = [*(special or ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")), *words, "The", "newword", "##s"]
    vocabulary += [*letters, *(f"##{letter}" for letter in letters)]
    write(folder, **documents)
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in dict.fromkeys(vocabulary)), encoding="utf-8")
    return folder


def byte_bpe(folder: Path, *special: str, **documents: Any) -> Path:
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
    )
    rust.train_from_iterator(CORPUS, trainer)
    write(folder, **documents)
    rust.model.save(str(folder))
    return folder


def theirs(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def assert_alike(folder: Path) -> tuple[Tokenizer, Any]:
    """Ids of texts and of pairs, with and without special tokens; roles; the size."""
    config = json.loads((folder / "config.json").read_text())
    found = read_tokenizer(folder, config)
    note(config["model_type"], tokenizer="vocabulary")
    ours, reference = Tokenizer.from_json(found.json), theirs(folder)
    for text in TEXTS:
        assert ours.encode(text) == reference(text, add_special_tokens=False)["input_ids"], text
        assert ours.encode(text, template=True) == reference(text)["input_ids"], text
    pair = reference("the cat", "on mats", return_token_type_ids=True)
    assert ours.encode_pair("the cat", "on mats") == (pair["input_ids"], pair["token_type_ids"])
    for role in ("pad", "bos", "eos", "unk", "cls", "sep", "mask"):
        assert found.roles.get(role) == getattr(reference, f"{role}_token_id"), role
    assert {token: number for number, token in enumerate(ours.tokens) if token} == {
        token: number for token, number in reference.get_vocab().items() if token
    }
    return ours, reference


BERT = {"model_type": "bert"}
OPTIONS: Mapping[str, dict[str, Any]] = {
    "by default": {},
    "cased": {"do_lower_case": False},
    "accents stay": {"strip_accents": False},
    "cased without accents": {"do_lower_case": False, "strip_accents": True},
    "Chinese in words": {"tokenize_chinese_chars": False, "do_lower_case": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_wordpiece(tmp_path: Path, options: dict[str, Any]) -> None:
    assert_alike(wordpiece(tmp_path, config=BERT, tokenizer_config=options))


@pytest.mark.parametrize("kind", ["distilbert", "electra"])
def test_relatives_of_bert(tmp_path: Path, kind: str) -> None:
    assert_alike(wordpiece(tmp_path / "plain", config={"model_type": kind}))
    name = {"distilbert": "DistilBertTokenizer", "electra": "ElectraTokenizerFast"}[kind]
    assert_alike(wordpiece(tmp_path / "named", config={"model_type": kind}, tokenizer_config={"tokenizer_class": name}))


def test_mpnet_frames_wordpieces_as_roberta_does(tmp_path: Path) -> None:
    special = ("<s>", "<pad>", "</s>", "[UNK]", "<mask>")
    ours, reference = assert_alike(wordpiece(tmp_path, *special, config={"model_type": "mpnet"}))
    assert type(reference).__name__ == "MPNetTokenizer"
    assert ours.encode_pair("the cat", "sat")[0].count(2) == 3  # <s> a </s></s> b </s>


def test_wordpiece_with_roles_of_other_names(tmp_path: Path) -> None:
    names = {"unk_token": "<u>", "cls_token": "<c>", "sep_token": "<e>", "pad_token": "<p>", "mask_token": "<m>"}
    ours, _ = assert_alike(wordpiece(tmp_path, *names.values(), config=BERT, special_tokens_map=names))
    assert ours.token(ours.encode("cat", template=True)[0]) == "<c>"


def test_wordpiece_reads_lines_as_the_library_does(tmp_path: Path) -> None:
    folder = wordpiece(tmp_path, config=BERT)
    lines = (folder / "vocab.txt").read_text(encoding="utf-8")
    (folder / "vocab.txt").write_bytes((lines.replace("\n", "\r\n") + "twice\r\n  \r\ntwice").encode())
    assert_alike(folder)


def test_gpt2(tmp_path: Path) -> None:
    ours, _ = assert_alike(byte_bpe(tmp_path, "<|endoftext|>", config={"model_type": "gpt2"}))
    assert ours.kind == "byte-bpe" and ours.special.eos == 0 and not ours.opening


def test_a_space_before_the_first_word(tmp_path: Path) -> None:
    options = {"add_prefix_space": True}
    assert_alike(byte_bpe(tmp_path / "a", "<|endoftext|>", config={"model_type": "gpt2"}, tokenizer_config=options))
    roberta = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    ours, _ = assert_alike(
        byte_bpe(tmp_path / "b", *roberta, config={"model_type": "roberta"}, tokenizer_config=options)
    )
    assert ours.encode("cat") == ours.encode(" cat")


def test_opt_puts_its_first_token_before_every_text(tmp_path: Path) -> None:
    options = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_bos_token": True,
        **{"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"},
    }
    folder = byte_bpe(tmp_path, "<s>", "<pad>", "</s>", config={"model_type": "opt"}, tokenizer_config=options)
    ours, reference = assert_alike(folder)
    assert ours.opening == (2,) and reference("cat")["input_ids"][0] == 2


def test_an_end_of_sequence_that_gpt2_is_told_to_add(tmp_path: Path) -> None:
    options: dict[str, Any] = {"add_bos_token": True, "add_eos_token": True}
    options |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<s>"}
    assert_alike(byte_bpe(tmp_path, "<s>", "</s>", config={"model_type": "gpt2"}, tokenizer_config=options))


@pytest.mark.parametrize(
    ("kind", "named"),
    [("roberta", False), ("roberta", True), ("bart", False), ("longformer", True)],  # by model type, or by class
)
def test_roberta_and_its_relatives(tmp_path: Path, kind: str, named: bool) -> None:
    options = {"tokenizer_class": f"{kind.capitalize()}Tokenizer"} if named else {}
    special = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    folder = byte_bpe(tmp_path, *special, config={"model_type": kind}, tokenizer_config=options)
    ours, _ = assert_alike(folder)
    first, *_, last = ours.encode("cat", template=True)
    assert (first, last) == (0, 2)


MASK = {"content": "<mask>", "lstrip": True, "rstrip": False, "single_word": False, "normalized": False}
ADDED = {
    "old files": {"added_tokens": {"<mask>": 328, "newword": 329}, "special_tokens_map": {"mask_token": MASK}},
    "by id": {
        "tokenizer_config": {
            "mask_token": "<mask>",
            "added_tokens_decoder": {
                "329": {**MASK, "content": "newword", "lstrip": False, "special": False, "normalized": True},
                "328": {**MASK, "special": True},
            },
        }
    },
}


@pytest.mark.parametrize("documents", ADDED.values(), ids=ADDED)
def test_added_tokens(tmp_path: Path, documents: dict[str, Any]) -> None:
    folder = byte_bpe(tmp_path, "<s>", "<pad>", "</s>", "<unk>", config={"model_type": "roberta"})
    size = len(json.loads((folder / "vocab.json").read_text()))
    text = json.dumps(documents).replace("328", str(size)).replace("329", str(size + 1))
    write(folder, **json.loads(text))
    ours, _ = assert_alike(folder)
    assert size + 1 in ours.encode("hello newword") and ours.special.mask == size


def test_further_special_tokens_are_added_after_the_vocabulary(tmp_path: Path) -> None:
    further = {"additional_special_tokens": ["<one>", "<two>"]}
    ours, reference = assert_alike(wordpiece(tmp_path, config=BERT, special_tokens_map=further))
    assert ours.token_id("<two>") == reference.convert_tokens_to_ids("<two>") == ours.vocab_size - 1


def test_a_text_that_spells_a_special_token_stays_text(tmp_path: Path) -> None:
    found = read_tokenizer(wordpiece(tmp_path, config=BERT), BERT)
    ours = Tokenizer.from_json(found.json)
    assert not {ours.special.mask, ours.special.sep} & set(ours.encode("[MASK] [SEP]"))


def test_a_role_of_the_class_alone_adds_no_row(tmp_path: Path) -> None:
    """`transformers` appends an id for which no embedding has a row; nothing else differs."""
    folder = wordpiece(tmp_path, "[UNK]", "[CLS]", "[SEP]", config=BERT)
    found = read_tokenizer(folder, BERT)
    ours, reference = Tokenizer.from_json(found.json), theirs(folder)
    assert ours.vocab_size == reference.vocab_size < len(reference)
    assert set(found.roles) == {"unk", "cls", "sep"}
    assert ours.encode("the cat", template=True) == reference("the cat")["input_ids"]


def refusal(folder: Path, config: Mapping[str, Any]) -> InputError:
    with pytest.raises(InputError) as caught:
        read_tokenizer(folder, config)
    return caught.value


def test_bad_files_are_named(tmp_path: Path) -> None:
    assert "vocab.txt: [SEP] is missing" in str(refusal(wordpiece(tmp_path / "a", "[UNK]", "[CLS]", config=BERT), BERT))
    folder = wordpiece(tmp_path / "b", config=BERT)
    (folder / "vocab.txt").write_bytes(b"ok\n\xff\n")
    assert "vocab.txt: byte 3 is not UTF-8" in str(refusal(folder, BERT))
    gpt2 = {"model_type": "gpt2"}
    folder = byte_bpe(tmp_path / "c", config=gpt2)
    with open(folder / "merges.txt", "a") as file:
        file.write("only\n")
    assert "merges.txt:" in str(refusal(folder, gpt2)) and "'only'" in str(refusal(folder, gpt2))
    folder = byte_bpe(tmp_path / "d", config=gpt2, added_tokens={"extra": 999})
    assert "the added token 'extra' has the id 999" in str(refusal(folder, gpt2))
    folder = byte_bpe(tmp_path / "e", config=gpt2, tokenizer_config={"add_prefix_space": "yes"})
    assert "add_prefix_space: found 'yes', expected true or false" in str(refusal(folder, gpt2))
    many = {"added_tokens_decoder": {"9" * 5000: {"content": "<extra>"}}}
    folder = byte_bpe(tmp_path / "g", config=gpt2, tokenizer_config=many)
    assert "added_tokens_decoder: expected an object with ids as keys" in str(refusal(folder, gpt2))
    folder = wordpiece(tmp_path / "f", config=BERT, special_tokens_map={"cls_token": 3})
    assert "special_tokens_map.json: cls_token: found 3, expected a token" in str(refusal(folder, BERT))


def test_classes_with_other_rules_are_refused(tmp_path: Path) -> None:
    named = {"tokenizer_class": "BertJapaneseTokenizer"}
    error = refusal(wordpiece(tmp_path / "a", config=BERT, tokenizer_config=named), BERT)
    assert "found BertJapaneseTokenizer" in str(error) and "save_pretrained" in str(error.hint)
    named = {"tokenizer_class": "Qwen2Tokenizer"}
    assert "found Qwen2Tokenizer" in str(refusal(byte_bpe(tmp_path / "b", config={}, tokenizer_config=named), {}))
