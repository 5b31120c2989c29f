"""Folders with SentencePiece only: ids and texts of the slow tokenizers, import, translation, training and export.

`transformers` 5 has slow tokenizers of Marian and M2M100. Those of the other classes, which it
approximates, are SentencePiece's own ids plus the offsets of the class: `OFFSETS` is that arithmetic.
"""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import transformers

import tformer
from tests.interop.classes import note
from tests.interop.parity import randomized
from tests.interop.tiny_folders import refusal
from tests.quick import first_is_quick
from tformer.interop.exporting import export_checkpoint
from tformer.interop.foreign_checkpoint import open_folder
from tformer.interop.importing import import_folder
from tformer.interop.opening import open_checkpoint
from tformer.interop.sentencepiece_files import M2M100, piece_files
from tformer.interop.tokenizer_files import read_target_tokenizer, read_tokenizer
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.segmentation import segmenter_of

WORDS = (
    "the cat sat on a mat and saw two big red dogs that ran under small blue trees near our old house",
    "собака и кошка 日本語 中文字 Γειά σου Ünïcödé naïve ½ ﬁne क्षेत्र שלום",
)
ENGLISH, OTHER = (sorted(set(words.split())) for words in WORDS)
TEXTS = [" ".join(random.Random(row).choices(ENGLISH, k=7)) for row in range(150)]
OTHERS = [" ".join(random.Random(row).choices(OTHER + [word.upper() for word in ENGLISH], k=6)) for row in range(150)]
SPECIAL = ["<s>", "</s>", "<unk>", "<pad>", "<mask>"]


@cache
def model(texts: str = "both", model_type: str = "unigram", size: int = 190, **options: Any) -> bytes:
    """A SentencePiece model of the texts, whose first pieces are <unk> <s> </s>, with NFKC unless told otherwise."""
    lines = {"english": TEXTS, "other": OTHERS, "both": TEXTS + OTHERS}[texts]
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        vocab_size=size,
        hard_vocab_limit=False,
        model_type=model_type,
        minloglevel=3,
        num_threads=1,
        **options,
    )
    return written.getvalue()


def processor(content: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=content)


def pieces(content: bytes) -> list[str]:
    loaded = processor(content)
    return [loaded.id_to_piece(number) for number in range(loaded.get_piece_size())]


def strings(count: int) -> list[str]:
    """Seeded random Unicode with combining signs and runs of spaces, real words, and what is at the edges."""
    draw = random.Random(7)

    def one() -> str:
        return "".join(
            draw.choice(
                (
                    chr(draw.randrange(32, 127)),
                    " " * draw.randrange(1, 4),
                    chr(draw.randrange(0x300, 0x370)),
                    chr(draw.randrange(0x2FFF)),
                    chr(draw.randrange(0xE000, 0x110000)),
                    draw.choice(ENGLISH + OTHER),
                )
            )
            for _ in range(draw.randrange(12))
        )

    edges = [
        "",
        " ",
        "   ",
        "\n",
        "\t a",
        "a ",
        "\0",
        "▁",
        "▁▁a",
        "\u3000a",
        "e\u0301",
        "½\u0301",
        "a\u200bb",
        *TEXTS[:20],
    ]
    marked = [f"{a}{token}{b}" for token in SPECIAL for a in ("", "the cat ", "x") for b in ("", " sat", "y", token)]
    return (edges + OTHERS[:20] + marked + [one() for _ in range(count)])[:count]


def write(folder: Path, model_type: str, files: dict[str, bytes], **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder


def in_json(*tokens: str) -> bytes:
    return json.dumps({token: number for number, token in enumerate(dict.fromkeys(tokens))}).encode()


def marian(folder: Path) -> Path:
    """Two models of different texts, and a vocabulary that lacks some of their pieces."""
    sides = [model("english", size=120), model("other", size=150)]
    known = [piece for side in sides for piece in pieces(side)[3:]]
    vocabulary = ["</s>", "<unk>", ">>fra<<", *(piece for n, piece in enumerate(known) if n % 13), "<pad>"]
    files = {"source.spm": sides[0], "target.spm": sides[1], "vocab.json": in_json(*vocabulary)}
    return write(folder, "marian", files, source_lang="en", target_lang="ru")


def m2m100(folder: Path, model_type: str = "bpe") -> Path:
    content = model(model_type=model_type)
    files = {
        "sentencepiece.bpe.model": content,
        "vocab.json": in_json("<s>", "<pad>", "</s>", "<unk>", *pieces(content)[3:-9]),
    }
    codes = [f"__{code}__" for code in M2M100.split()]  # published folders list them
    named = {"tokenizer_class": "M2M100Tokenizer", "src_lang": "de", "additional_special_tokens": codes}
    return write(folder, "m2m_100", files, **named)


def ours(folder: Path, *, target: bool = False) -> Tokenizer:
    config = json.loads((folder / "config.json").read_text())
    found = read_target_tokenizer(folder, config) if target else read_tokenizer(folder, config)
    assert found is not None
    note(config["model_type"], tokenizer="SentencePiece")
    return Tokenizer.from_json(found.json)


def assert_equal(found: Tokenizer, encode: Callable[[str], list[int]], decode: Any, texts: list[str]) -> None:
    """Ids with special tokens around and in the text, and the text of the ids."""
    reading = found.reading_special()
    for text in texts:
        ids = encode(text)
        assert reading.encode(text, template=True) == ids, text
        inner = reading.encode(text)  # by another way
        assert not inner or any(ids[start : start + len(inner)] == inner for start in range(3)), text
        assert found.decode(ids) == decode(ids, skip_special_tokens=True), text


COUNTS = [200, pytest.param(5000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("target", [False, True], ids=["source", "target"])
def test_marian_gives_the_ids_and_texts_of_the_slow_tokenizer(tmp_path: Path, target: bool, count: int) -> None:
    folder = marian(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert type(theirs).__name__ == "MarianTokenizer"
    codes = [
        ">>fra<< the cat",
        ">>fra<<the",
        ">>deu<< x",
        " >>fra<< y",
        ">>fra<<",
        ">> the",
        "</s>>>fra<< the",
        ">>\n<<",
    ]
    name = "text_target" if target else "text"
    assert_equal(
        ours(folder, target=target),
        lambda text: theirs(**{name: text})["input_ids"],
        theirs.decode,
        codes + strings(count),
    )


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_m2m100_gives_the_ids_and_texts_of_the_slow_tokenizer(tmp_path: Path, model_type: str, count: int) -> None:
    folder = m2m100(tmp_path, model_type)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert type(theirs).__name__ == "M2M100Tokenizer"
    found = ours(folder)
    assert found.token_id("__zu__") == theirs.get_lang_id("zu") == found.vocab_size - 1
    codes = ["__en__ the cat", "the__fr__cat", "__xx__"]
    texts = [text for text in codes + strings(count) if "<mask>" not in text]
    assert_equal(found, lambda text: theirs(text)["input_ids"], theirs.decode, texts)
    assert found.kind == model_type


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("TFORMER_DATA"), reason="TFORMER_DATA names no folder of real data")
@pytest.mark.parametrize("folder_of", [marian, m2m100], ids=["Marian", "M2M100"])
def test_real_lines_of_four_languages_have_the_ids_of_the_slow_tokenizer(
    tmp_path: Path, folder_of: Callable[[Path], Path]
) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder_of(tmp_path))
    names = ("multi30k/val.en", "multi30k/val.de", "multi30k/val.fr", "tanaka_enja/valid.ja")
    files = [Path(os.environ["TFORMER_DATA"]) / name for name in names]
    lines = [line for file in files for line in file.read_text("utf-8").splitlines()]
    assert_equal(ours(tmp_path), lambda text: theirs(text)["input_ids"], theirs.decode, lines)


def test_one_segmentation_alone_is_said_where_several_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="with a SentencePiece tokenizer, expected 0"):
        segmenter_of(ours(marian(tmp_path)), 0.1)


FAIRSEQ = {0: 3, 1: 0, 2: 2}  # <unk> <s> </s>
OFFSETS: dict[str, tuple[str, int, dict[int, int], list[int], list[int], str]] = {
    # class: file, what is added to an id, ids that are elsewhere, ids before and after a text (negative: from the end)
    "T5Tokenizer": ("spiece.model", 0, {}, [], [2], "t5"),
    "PegasusTokenizer": ("spiece.model", 103, {}, [], [1], "pegasus"),
    "XLMRobertaTokenizer": ("sentencepiece.bpe.model", 1, FAIRSEQ, [0], [2], "xlm-roberta"),
    "CamembertTokenizer": ("sentencepiece.bpe.model", 4, {0: 3}, [5], [6], "camembert"),
    "MBartTokenizer": ("sentencepiece.bpe.model", 1, FAIRSEQ, [], [2, -23], "mbart"),
    "MBart50Tokenizer": ("sentencepiece.bpe.model", 1, FAIRSEQ, [-50], [2], "mbart"),
    "NllbTokenizer": ("sentencepiece.bpe.model", 1, FAIRSEQ, [-157], [2], "m2m_100"),
    "LlamaTokenizer": ("tokenizer.model", 0, {}, [1], [], "llama"),
    "DebertaV2Tokenizer": ("spm.model", 0, {}, [1], [2], "deberta-v2"),
    "BigBirdTokenizer": ("spiece.model", 0, {}, [4], [5], "big_bird"),
}
DEBERTA = {
    **{"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3},
    **{"pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]", "unk_piece": "[UNK]"},
}
BIG_BIRD = {"pad_id": 3, "control_symbols": "[CLS],[SEP],[MASK]"}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", OFFSETS)
def test_a_class_gives_the_ids_of_its_model_plus_its_offset(tmp_path: Path, name: str, count: int) -> None:
    file, offset, moved, before, after, model_type = OFFSETS[name]
    options: dict[str, Any] = (
        {"bos_id": -1, "pad_id": 0, "eos_id": 1, "unk_id": 2} if name == "PegasusTokenizer" else {}
    )
    options = {"DebertaV2Tokenizer": DEBERTA, "BigBirdTokenizer": BIG_BIRD}.get(name, options)
    if name == "LlamaTokenizer":
        options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
        options |= {"model_type": "bpe", "size": 450}
    content = model(**options)
    found = ours(write(tmp_path, model_type, {file: content}, tokenizer_class=name))
    loaded, size = processor(content), found.vocab_size
    assert found.normalize("½") == ("½" if name == "LlamaTokenizer" else "1⁄2")
    for text in strings(count):
        ids = [moved.get(token, token + offset) for token in loaded.encode(text)]
        expected = [*(token % size for token in before), *ids, *(token % size for token in after)]
        assert found.encode(text, template=True) == expected, text
        if name != "LlamaTokenizer":
            known = [token for token in loaded.encode(text) if token != loaded.unk_id()]
            assert found.decode(expected) == loaded.decode(known).strip(), text
    if "lang" in found.to_json() and name.startswith(("MBart", "Nllb")):
        language = found.encode("", template=True)[0 if before else -1]
        assert found.token(language) == {"NllbTokenizer": "eng_Latn"}.get(name, "en_XX") and found.is_special(language)


@pytest.mark.parametrize("name", ["T5Tokenizer", "XLMRobertaTokenizer", "LlamaTokenizer"])
def test_transformers_gives_the_same_ids_for_texts_of_words(tmp_path: Path, name: str) -> None:
    file, *_, model_type = OFFSETS[name]
    size = {"model_type": "bpe", "size": 450, "byte_fallback": True, "normalization_rule_name": "identity"}
    folder = write(
        tmp_path, model_type, {file: model(**(size if name == "LlamaTokenizer" else {}))}, tokenizer_class=name
    )
    theirs, found = transformers.AutoTokenizer.from_pretrained(folder), ours(folder)
    for text in TEXTS[:40]:
        assert found.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], text
        assert found.decode(found.encode(text)) == text


def test_a_folder_of_deberta_as_it_is_published(tmp_path: Path) -> None:
    """microsoft/deberta-v3-base has spm.model and no class; [MASK] comes after the pieces."""
    folder = write(tmp_path, "deberta-v2", {"spm.model": model(**DEBERTA)}, do_lower_case=False)
    theirs, found = transformers.AutoTokenizer.from_pretrained(folder), ours(folder)
    assert type(theirs).__name__ == "DebertaV2Tokenizer"
    for text in TEXTS[:40]:
        assert found.encode(text, template=True) == theirs(text)["input_ids"], text
    assert found.token_id("[MASK]") == theirs.mask_token_id == found.vocab_size - 1
    assert found.encode_pair("the cat", "sat")[0] == theirs("the cat", "sat")["input_ids"]


def test_a_folder_of_albert_with_sentencepiece_alone_is_refused(tmp_path: Path) -> None:
    """Its class lowers the case and drops accents before the model reads a text."""
    with pytest.raises(InputError, match="tokenizer_class: found AlbertTokenizer"):
        ours(write(tmp_path, "albert", {"spiece.model": model()}))


def test_ids_are_where_published_models_have_them(tmp_path: Path) -> None:
    """NLLB-200: 256,000 pieces, ace_Arab 256001, eng_Latn 256047, <mask> 256203. T5: <extra_id_0> is the last."""
    content = model()
    base = len(pieces(content)) - 256_000
    found = ours(write(tmp_path, "m2m_100", {"sentencepiece.bpe.model": content}, tokenizer_class="NllbTokenizer"))
    names = {"ace_Arab": 256_001, "eng_Latn": 256_047, "zul_Latn": 256_202, "<mask>": 256_203}
    assert {name: (found.token_id(name) or 0) - base for name in names} == names
    other = tmp_path / "t5"
    found = ours(write(other, "t5", {"spiece.model": content}))
    assert found.special.sentinels[0] == found.vocab_size - 1 and len(found.special.sentinels) == 100


def test_places_of_pieces_in_a_text(tmp_path: Path) -> None:
    found = ours(marian(tmp_path))
    text = ">>fra<< the  ½ cat☃"
    ids, spans = found.encode_spans(text)
    assert ids == found.encode(text) and text[slice(*spans[0])] == ">>fra<<"
    assert all(a <= b for a, b in spans) and spans[-1][1] == len(text)
    assert "cat" in text[spans[-2][0] - 4 : spans[-1][1]]


def test_a_long_text_has_the_tokens_of_its_pieces(tmp_path: Path) -> None:
    found = ours(marian(tmp_path))
    text = " ".join(TEXTS * 20)
    assert len(text) > 1 << 16
    assert found.encode(text) == [token for one in TEXTS * 20 for token in found.encode(one)]


def test_a_text_that_spells_a_special_token_stays_text(tmp_path: Path) -> None:
    found = ours(marian(tmp_path))
    assert not {found.special.eos, found.special.pad} & set(found.encode("</s> <pad> the</s>"))


def separate(folder: Path) -> Path:
    """Marian with a vocabulary for each side."""
    sides = [model("english", size=120), model("other", size=150)]
    files = dict(zip(("source.spm", "target.spm"), sides, strict=True))
    for name, side in zip(("vocab.json", "target_vocab.json"), sides, strict=True):
        files[name] = in_json("</s>", "<unk>", *pieces(side)[3:-4], "<pad>")
    return write(folder, "marian", files, tokenizer_class="MarianTokenizer", separate_vocabs=True)


@pytest.mark.parametrize("target", [False, True], ids=["source", "target"])
def test_marian_with_a_vocabulary_for_each_side(tmp_path: Path, target: bool) -> None:
    folder = separate(tmp_path)
    theirs = transformers.MarianTokenizer.from_pretrained(folder)
    name, found = "text_target" if target else "text", ours(folder, target=target)
    for text in strings(200):
        ids = found.encode(text)
        if "<pad>" in text or theirs.pad_token_id in ids:  # special by the source's id in `transformers`
            continue
        assert found.reading_special().encode(text, template=True) == theirs(**{name: text})["input_ids"], text
        if target:
            assert found.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    sides = [ours(folder, target=side) for side in (False, True)]
    written = piece_files(sides[0], sides[1])
    assert json.loads(written["vocab.json"]) == json.loads((folder / "vocab.json").read_text())
    assert json.loads(written["target_vocab.json"]) == json.loads((folder / "target_vocab.json").read_text())
    assert json.loads(written["tokenizer_config.json"])["separate_vocabs"] is True


# --- import, translation, export --------------------------------------------------------------------------------------


def translator(folder: Path) -> Path:
    marian(folder)
    size = len(json.loads((folder / "vocab.json").read_text()))
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in
             (("layers", 1), ("attention_heads", 2), ("ffn_dim", 24))}  # fmt: skip
    ids = {"pad_token_id": size - 1, "eos_token_id": 0, "decoder_start_token_id": size - 1, "forced_eos_token_id": 0}
    config = transformers.MarianConfig(
        vocab_size=size, decoder_vocab_size=size, d_model=16, max_position_embeddings=64, **sizes, **ids
    )
    randomized(transformers.MarianMTModel(config)).save_pretrained(folder)  # type: ignore[operator]
    return folder


def their_translations(folder: Path, texts: list[str], **options: Any) -> list[str]:
    network = transformers.MarianMTModel.from_pretrained(folder).eval()
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    found = network.generate(**batch, max_new_tokens=12, bad_words_ids=[[network.config.pad_token_id]], **options)
    return tokenizer.batch_decode(found, skip_special_tokens=True)


@pytest.mark.parametrize("beams", [1, 4])
def test_a_marian_folder_translates_as_transformers_does_and_comes_back(tmp_path: Path, beams: int) -> None:
    folder = translator(tmp_path / "marian")
    run = import_folder(folder, tmp_path / "run")
    assert run.tokenizer_size == run.vocab_size
    texts = [*TEXTS[:5], ">>fra<< the cat"]
    expected = their_translations(folder, texts, num_beams=beams)
    loaded = tformer.load(tmp_path / "run", device="cpu")
    answers = loaded.translate(texts, beam_size=beams, max_new_tokens=12, length_penalty=1.0, length_penalty_type="avg")
    assert [answer.completions[0].text for answer in answers] == expected and len(set(expected)) > 1
    export_checkpoint(open_checkpoint(tmp_path / "run"), tmp_path / "again")
    for name in ("source.spm", "target.spm"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
    before, after = (json.loads((one / "vocab.json").read_text()) for one in (folder, tmp_path / "again"))
    assert before == after and not (tmp_path / "again" / "tokenizer.json").exists()
    assert type(transformers.AutoTokenizer.from_pretrained(tmp_path / "again")).__name__ == "MarianTokenizer"
    assert their_translations(tmp_path / "again", texts, num_beams=beams) == expected


@pytest.mark.slow
def test_a_marian_folder_is_trained_on_and_exported_by_the_commands(tmp_path: Path, cli: Callable[..., Any]) -> None:
    """Its quick twin is `test_a_marian_folder_translates_as_transformers_does_and_comes_back`."""
    folder = translator(tmp_path / "marian")
    for name, texts in (("en", TEXTS), ("ru", OTHERS)):
        (tmp_path / name).write_text("".join(f"{text}\n" for text in texts[:40]), encoding="utf-8")
    sides = ("--source", tmp_path / "en", "--target", tmp_path / "ru", "--max-steps", 2, "--batch-size", 4)
    tuned = cli("train", "--init-from", folder, *sides, "--out", tmp_path / "tuned")
    assert tuned.code == 0, tuned.err
    written = cli("generate", tmp_path / "tuned", "--prompt", TEXTS[0], "--beam-size", 1)
    assert written.code == 0, written.err
    assert cli("export", tmp_path / "tuned", "--out", tmp_path / "out").code == 0
    again = ours(tmp_path / "out", target=True)
    assert again.encode(OTHERS[0]) == ours(folder, target=True).encode(OTHERS[0])
    assert len(their_translations(tmp_path / "out", TEXTS[:2])) == 2


def multilingual(folder: Path, tokenizer_class: str) -> Path:
    """A translator with a token for each language, as M2M100 or NLLB."""
    if tokenizer_class == "M2M100Tokenizer":
        m2m100(folder)
    else:
        write(folder, "m2m_100", {"sentencepiece.bpe.model": model()}, tokenizer_class=tokenizer_class)
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in
             (("layers", 1), ("attention_heads", 2), ("ffn_dim", 24))}  # fmt: skip
    size = ours(folder).vocab_size
    config = transformers.M2M100Config(vocab_size=size, d_model=16, max_position_embeddings=64, **sizes)
    randomized(transformers.M2M100ForConditionalGeneration(config)).save_pretrained(folder)  # type: ignore[operator]
    return folder


LANGUAGES = [("M2M100Tokenizer", "fr", "zu", "__{}__"), ("NllbTokenizer", "fra_Latn", "zho_Hans", "{}")]


@first_is_quick("beams", [1, 4])
@first_is_quick(("name", "source", "target", "token"), LANGUAGES, ids=["M2M100", "NLLB"])
def test_languages_are_chosen_on_the_command_line(
    tmp_path: Path, cli: Callable[..., Any], name: str, source: str, target: str, token: str, beams: int
) -> None:
    folder = multilingual(tmp_path / "folder", name)
    found = ours(folder)
    first, last = (found.token_id(token.format(code)) or 0 for code in (source, target))
    network = transformers.M2M100ForConditionalGeneration.from_pretrained(folder).eval()
    ids = torch.tensor([[first, *found.encode(TEXTS[0]), 2]])
    theirs = network.generate(ids, forced_bos_token_id=last, num_beams=beams, max_new_tokens=9)[0].tolist()
    options: dict[str, Any] = {"source_language": source, "target_language": target, "max_new_tokens": 8}
    options |= {"beam_size": beams, "length_penalty": 1.0, "length_penalty_type": "avg"}
    [one] = tformer.load(folder, device="cpu").translate(TEXTS[0], **options).completions
    assert list(one.ids) == theirs[2:] and theirs[1] == last and len(one.ids) > 2
    flags = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", value)]
    answer = cli("generate", folder, "--prompt", TEXTS[0], *flags)
    assert answer.code == 0 and answer.out == f"{one.text}\n", answer.err
    export_checkpoint(open_checkpoint(folder), tmp_path / "again")
    assert ours(tmp_path / "again").to_json() == found.to_json()
    wrong = cli("generate", folder, "--prompt", "x", "--target-language", "tlh")
    assert wrong.code == 2 and "has no token for the language 'tlh'; it has " in wrong.err


def test_mbart_starts_from_the_language_of_its_outputs(tmp_path: Path) -> None:
    folder = write(tmp_path, "mbart", {"sentencepiece.bpe.model": model()}, tokenizer_class="MBartTokenizer")
    found = ours(folder)
    languages = found.languages
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in
             (("layers", 1), ("attention_heads", 2), ("ffn_dim", 24))}  # fmt: skip
    start = {"decoder_start_token_id": languages["ro_RO"], "forced_eos_token_id": None}
    config = transformers.MBartConfig(
        vocab_size=found.vocab_size, d_model=16, max_position_embeddings=64, **start, **sizes
    )
    randomized(transformers.MBartForConditionalGeneration(config)).save_pretrained(folder)  # type: ignore[operator]
    network = transformers.MBartForConditionalGeneration.from_pretrained(folder).eval()
    ids = torch.tensor([[*found.encode(TEXTS[0]), 2, languages["fr_XX"]]])
    theirs = network.generate(ids, decoder_start_token_id=languages["de_DE"], num_beams=1, max_new_tokens=9)[0].tolist()
    languages_of = {"source_language": "fr_XX", "target_language": "de_DE"}
    [one] = tformer.load(folder).translate(TEXTS[0], beam_size=1, max_new_tokens=9, **languages_of).completions
    assert list(one.ids) == theirs[1:] and theirs[0] == languages["de_DE"]


def test_a_model_without_languages_refuses_them(tmp_path: Path, cli: Callable[..., Any]) -> None:
    wrong = cli("generate", translator(tmp_path), "--prompt", "x", "--source-language", "fr")
    assert wrong.code == 2 and "it has none" in wrong.err


def test_equal_models_of_both_sides_are_one_tokenizer(tmp_path: Path) -> None:
    folder = translator(tmp_path)
    (folder / "target.spm").write_bytes((folder / "source.spm").read_bytes())
    checkpoint = open_folder(folder)
    assert checkpoint.target_tokenizer_json is None and not checkpoint.recipe.tokenizer.separate


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("source.spm", b"{}", "source.spm is no SentencePiece model"),
        ("vocab.json", b'{"<unk>": "x"}', "vocab.json: <unk>: found 'x', expected an id"),
        ("vocab.json", b'{"<unk>": 1000000000000}', "vocab.json: <unk>: found 1000000000000, expected an id"),
        ("vocab.json", b'{"</s>": 0}', "the unknown token <unk> is missing"),
        ("tokenizer_config.json", b'{"tokenizer_class": "XLNetTokenizer"}', "found XLNetTokenizer"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    folder = translator(tmp_path / "marian")
    (folder / name).write_bytes(content)
    assert said in str(refusal(folder, tmp_path / "out" / "run"))


def test_more_sentinels_than_any_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="extra_ids: found 1000000000000, expected a number up to 100,000"):
        ours(write(tmp_path, "t5", {"spiece.model": model()}, extra_ids=10**12))


def test_a_language_that_the_vocabulary_lacks_is_refused(tmp_path: Path) -> None:
    folder = m2m100(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"src_lang": "tlh", "tokenizer_class": "M2M100Tokenizer"}')
    with pytest.raises(InputError, match="src_lang: __tlh__ is no token of the vocabulary"):
        ours(folder)


def test_a_model_named_as_a_tokenizer_file_is_refused_with_the_command_that_reads_it(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model())
    refused = cli("tokenize", tmp_path / "tokenizer.model", "--text", "the cat")
    assert refused.code == 2 and "it is a SentencePiece model" in refused.err
    assert f"tformer tokenize {tmp_path} " in refused.err
    assert cli("tokenize", tmp_path, "--text", "the cat").code == 0
