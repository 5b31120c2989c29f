"""Tokenizers out and in: `AutoTokenizer` gives the ids of ours, and a folder's roles come back into the recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.interop.classes import OWN, note
from tformer.interop.tokenizer_files import read_tokenizer, tokenizer_documents
from tformer.recipe.recipe import SpecialTokens
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer

TEXTS = ["the cat sat on the mat", " two  spaces\n", "Héllo, wörld! 日本 42", "unseen zzz", "", "a"]
CORPUS = [*TEXTS[:3], "the dog ran and the cat sat"] * 3
KINDS = ("byte-bpe", "bpe", "wordpiece", "unigram", "word", "char")
TEMPLATES = ("gpt", "bert", "roberta", "t5", "seq2seq", "none")
MODEL_TYPES = [name for name, one in OWN.items() if one.family != "vit" and not one.own_tokenizer_rules]


def trained(model: str, template: str) -> Tokenizer:
    options = TokenizerOptions(model=model, template=template, vocab_size=420, min_frequency=1)  # type: ignore[arg-type]
    return train_tokenizer(lambda: iter(CORPUS), options)


def written(tokenizer: Tokenizer, folder: Path, *, model_type: str = "gpt2", **options: Any) -> Path:
    folder.mkdir()
    documents = tokenizer_documents(tokenizer, SpecialTokens(), model_max_length=77, **options)
    for name, text in documents.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def assert_alike(ours: Tokenizer, theirs: Any) -> None:
    for text in TEXTS:
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.encode(text, template=True) == theirs(text)["input_ids"], text
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    assert ours.encode_pair("the cat", "sat")[0] == theirs("the cat", "sat")["input_ids"]
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_gives_the_same_ids(tmp_path: Path, kind: str, template: str) -> None:
    ours = trained(kind, template)
    theirs = transformers.AutoTokenizer.from_pretrained(written(ours, tmp_path / "out"))
    assert_alike(ours, theirs)
    for role in ("pad", "bos", "eos", "unk", "cls", "sep", "mask"):
        assert getattr(theirs, f"{role}_token_id") == getattr(ours.special, role), role
    assert theirs.model_max_length == 77


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_whatever_the_architecture_its_own_class_does_not_step_in(tmp_path: Path, model_type: str) -> None:
    ours = trained("unigram", "t5")
    theirs = transformers.AutoTokenizer.from_pretrained(written(ours, tmp_path / "out", model_type=model_type))
    assert_alike(ours, theirs)
    note(model_type, tokenizer="tokenizer.json")


def test_where_auto_tokenizer_overrules_every_file_the_plain_class_does_not(tmp_path: Path) -> None:
    """For `qwen2`, `AutoTokenizer` takes Qwen's own rules whatever class a folder names."""
    ours = trained("unigram", "t5")
    folder = written(ours, tmp_path / "out", model_type="qwen2")
    assert_alike(ours, transformers.PreTrainedTokenizerFast.from_pretrained(folder))
    note("qwen2", tokenizer="tokenizer.json")


def test_what_a_model_reads_is_said(tmp_path: Path) -> None:
    """GPT-2 adds an embedding of token types that it is handed, BART refuses them."""
    ours = trained("wordpiece", "bert")
    plain = transformers.AutoTokenizer.from_pretrained(written(ours, tmp_path / "plain", padding_side="left"))
    typed = transformers.AutoTokenizer.from_pretrained(written(ours, tmp_path / "typed", token_types=True))
    assert set(plain("a", "b")) == {"input_ids", "attention_mask"}
    assert typed("the cat", "sat")["token_type_ids"] == ours.encode_pair("the cat", "sat")[1]
    batch = plain(["the cat sat", "a"], padding=True)
    assert batch["attention_mask"][1][0] == 0 and batch["input_ids"][1][0] == ours.special.pad


def test_what_was_written_reads_back(tmp_path: Path) -> None:
    ours = trained("bpe", "seq2seq")
    found = read_tokenizer(written(ours, tmp_path / "out"), {})
    assert found.json == ours.to_json() and not found.notes
    assert found.roles == {role: getattr(ours.special, role) for role in found.roles}
    assert set(found.roles) == {"pad", "bos", "eos", "unk", "cls", "sep", "mask"}


def test_ids_of_the_recipe_name_the_tokens(tmp_path: Path) -> None:
    ours = trained("byte-bpe", "gpt")
    documents = tokenizer_documents(ours, SpecialTokens(eos=5, mask=6), model_max_length=9)
    named = json.loads(documents["special_tokens_map.json"])
    assert named["eos_token"] == ours.token(5) and named["mask_token"] == ours.token(6)
    assert named["bos_token"] == "<|endoftext|>"


# --- somebody else's tokenizer.json ----------------------------------------------------------------------------------


def llama(folder: Path, **options: Any) -> Path:
    """BPE with byte fallback, a leading ▁ and <s> before every text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"thecats"]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys([*pieces, "he", "the", "▁the"]))}
    merges = [("h", "e"), ("t", "he"), ("▁", "the")]
    rust = RustTokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    rust.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", special_tokens=[("<s>", 1)])
    rust.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder.mkdir()
    rust.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **options})
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def test_a_tokenizer_json_comes_as_it_is(tmp_path: Path) -> None:
    folder = llama(tmp_path / "llama")
    found = read_tokenizer(folder, {"model_type": "llama"})
    assert found.json == (folder / "tokenizer.json").read_text(encoding="utf-8")
    assert found.roles == {"bos": 1, "eos": 2}
    ours, theirs = Tokenizer.from_json(found.json), transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("the cat", "é", "the  the"):
        assert [*ours.opening, *ours.encode(text)] == theirs(text)["input_ids"]


@pytest.mark.parametrize("model_type", ["gemma", "gemma2", "gemma3_text"])
def test_gemmas_own_tokenizer_goes_in_and_out(tmp_path: Path, model_type: str) -> None:
    """BPE with byte fallback that splits behind spaces, without a leading ▁."""
    pieces = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<mask>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"thecats",
    ]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, "he", "the", "▁▁"])}
    theirs = transformers.GemmaTokenizer(vocabulary, [("h", "e"), ("t", "he"), ("▁", "▁")])
    theirs.save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "in")
    assert type(theirs).__name__ == "GemmaTokenizer"
    found = read_tokenizer(tmp_path / "in", {"model_type": model_type})
    assert found.roles == {"pad": 0, "eos": 1, "bos": 2, "unk": 3, "mask": 4}
    ours = Tokenizer.from_json(found.json)
    again = transformers.AutoTokenizer.from_pretrained(written(ours, tmp_path / "out", model_type=model_type))
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert [*ours.opening, *ours.encode(text)] == ids == again(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("gpt_neox", "GPTNeoXTokenizer"), ("gptj", "GPT2Tokenizer"), ("phi", "CodeGenTokenizer")],
)
def test_byte_bpe_of_a_class_of_its_own_goes_in_and_out(tmp_path: Path, model_type: str, name: str) -> None:
    """GPT-NeoX composes characters first (NFC)."""
    bpe = json.loads(trained("byte-bpe", "none").to_json())["model"]
    vocabulary = {"<|endoftext|>": len(bpe["vocab"]), "<|padding|>": len(bpe["vocab"]) + 1, **bpe["vocab"]}
    theirs = getattr(transformers, name)(vocabulary, [tuple(pair) for pair in bpe["merges"]])
    theirs.save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "in")
    found = read_tokenizer(tmp_path / "in", {"model_type": model_type})
    ours = Tokenizer.from_json(found.json)
    assert {found.roles[role] for role in ("bos", "eos")} == {vocabulary["<|endoftext|>"]}
    again = transformers.AutoTokenizer.from_pretrained(written(ours, tmp_path / "out", model_type=model_type))
    for text in [*TEXTS, "e\u0301te\u0301"]:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids == again(text)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)


def test_a_folder_of_codegens_vocabulary_alone_is_read(tmp_path: Path) -> None:
    bpe = json.loads(trained("byte-bpe", "none").to_json())["model"]
    vocabulary = {**bpe["vocab"], "<|endoftext|>": len(bpe["vocab"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    merges = "".join(" ".join(pair) + "\n" for pair in bpe["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CodeGenTokenizer"}))
    ours = Tokenizer.from_json(read_tokenizer(tmp_path, {"model_type": "phi"}).json)
    theirs = transformers.CodeGenTokenizer.from_pretrained(tmp_path)
    assert [ours.encode(text) for text in TEXTS] == [theirs(text)["input_ids"] for text in TEXTS]


@pytest.mark.parametrize("name", ["Albert", "DebertaV2"])
def test_unigrams_of_encoders_come_as_they_are(tmp_path: Path, name: str) -> None:
    """ALBERT's lowers the case and drops accents, DeBERTa's keeps both; [CLS] and [SEP] stand around a text."""
    special = {"Albert": ("<pad>", "<unk>"), "DebertaV2": ("[PAD]", "[UNK]")}[name]
    pieces = RustTokenizer(models.Unigram())
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=[*special], unk_token=special[1], show_progress=False
    )
    pieces.train_from_iterator(CORPUS, trainer)
    vocabulary = [tuple(piece) for piece in json.loads(pieces.to_str())["model"]["vocab"]]
    vocabulary[2:2] = [(token, 0.0) for token in ("[CLS]", "[SEP]", "[MASK]")]
    theirs = getattr(transformers, f"{name}Tokenizer")(vocab=vocabulary)
    theirs.save_pretrained(tmp_path)
    model_type = {"Albert": "albert", "DebertaV2": "deberta-v2"}[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    found = read_tokenizer(tmp_path, {"model_type": model_type})
    ours, again = Tokenizer.from_json(found.json), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text, template=True) == theirs(text)["input_ids"] == again(text)["input_ids"], text
    assert ours.encode_pair("the cat", "sat")[0] == theirs("the cat", "sat")["input_ids"]
    assert found.roles["cls"] == theirs.cls_token_id == 2 and found.roles["mask"] == theirs.mask_token_id == 4
    assert (ours.encode("THE CAT") == ours.encode("the cat")) == (name == "Albert")


def test_a_template_of_bytes_and_then_of_tokens_opens_texts(tmp_path: Path) -> None:
    """Llama 3 has its template in a sequence of post-processors."""
    rust = RustTokenizer.from_file(str(llama(tmp_path / "llama") / "tokenizer.json"))
    rust.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), rust.post_processor])
    assert Tokenizer.from_json(rust.to_str()).opening == (1,)


def test_roles_by_names_that_nobody_could_guess(tmp_path: Path) -> None:
    special = {"pad_token": "t", "mask_token": {"content": "he", "lstrip": True}, "unk_token": None}
    found = read_tokenizer(llama(tmp_path / "llama", **special), {})
    ours = Tokenizer.from_json(found.json)
    assert found.roles == {"bos": 1, "eos": 2, "pad": ours.token_id("t"), "mask": ours.token_id("he")}


def test_the_older_map_of_roles_counts_unless_the_added_tokens_are_listed(tmp_path: Path) -> None:
    folder = llama(tmp_path / "llama")
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "the"}))
    ours = Tokenizer.from_json(read_tokenizer(folder, {}).json)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert read_tokenizer(folder, {}).roles["eos"] == ours.token_id("the") == theirs.eos_token_id
    options = json.loads((folder / "tokenizer_config.json").read_text())
    listed = {"2": {"content": "</s>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({**options, "added_tokens_decoder": listed}))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert read_tokenizer(folder, {}).roles["eos"] == 2 == theirs.eos_token_id


def test_a_role_of_a_token_that_is_not_there_is_noted(tmp_path: Path) -> None:
    found = read_tokenizer(llama(tmp_path / "llama", pad_token="[PAD]"), {})
    assert "pad" not in found.roles
    assert [note.split(": ", 1)[1] for note in found.notes] == [
        "the pad token '[PAD]' of tokenizer_config.json is not in the vocabulary: left out"
    ]


def test_a_file_that_is_named_takes_the_place_of_the_folders(tmp_path: Path) -> None:
    folder, other = llama(tmp_path / "llama"), trained("word", "roberta")
    (folder / "tokenizer.json").unlink()
    file = other.save(tmp_path / "mine.json")
    found = read_tokenizer(folder, {}, path=file)
    assert found.json == other.to_json()
    assert found.roles == {"bos": other.special.bos, "eos": other.special.eos}


def test_without_a_readable_vocabulary_the_way_to_one_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_tokenizer(tmp_path, {"model_type": "t5"})
    assert "has no tokenizer: no tokenizer.json, no vocab.txt, no vocab.json with merges.txt" in str(caught.value)
    assert "no SentencePiece model" in str(caught.value) and "--tokenizer FILE" in str(caught.value.hint)
