"""Folders of sentence-transformers in and out: poolings, lengths, layouts of versions, refusals; its own vectors."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import tformer
from tests.interop.tiny_folders import BART_SPECIAL, BERT_SPECIAL, SENTENCES, words_tokenizer, write_folder
from tests.quick import first_is_quick
from tformer.interop.exporting import export_checkpoint
from tformer.interop.importing import import_folder
from tformer.interop.opening import open_checkpoint
from tformer.support.errors import InputError

TEXTS = [*SENTENCES[:6], "", "cat", " ".join(SENTENCES)]
BODIES = ("Bert", "Roberta", "MPNet", "XLMRoberta")
POOLINGS = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens", "lasttoken": "lasttoken"}
LENGTH = 12


def folder_of(
    folder: Path, body: str = "Bert", *, pooling: str = "mean", normalize: bool = True, older: bool = True, **more: Any
) -> Path:
    """A folder as sentence-transformers writes it; `older`: one key for each pooling, and no names of modules."""
    if body == "Bert":
        special, names = BERT_SPECIAL, {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        tokenizer = words_tokenizer(special, unk="[UNK]", single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1")
    else:
        special, names = BART_SPECIAL, {"pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>"}
        tokenizer = words_tokenizer(special, unk="<unk>", single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>")
    sizes = {"hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes["n_inner" if body == "GPT2" else "intermediate_size"] = 36
    rows = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 24, "initializer_range": 0.5}
    ids = {"pad_token_id": tokenizer.token_to_id(names["pad_token"])}
    torch.manual_seed(0)
    config = getattr(transformers, f"{body}Config")(**sizes, **rows, **ids)
    write_folder(folder, getattr(transformers, f"{body}Model")(config), tokenizer, **names)
    new = {"Transformer": "base.modules.transformer", "Pooling": "sentence_transformer.modules.pooling",
           "Normalize": "base.modules.normalize"}  # fmt: skip
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalize else [])]
    modules = [
        {"path": path, "type": f"sentence_transformers.{'models' if older else new[kind]}.{kind}"}
        for path, kind in kinds
    ]
    modules = [{"idx": number, "name": str(number), **each} for number, each in enumerate(modules)]
    pool: dict[str, Any] = {"embedding_dimension": 20, "pooling_mode": pooling}
    if older:
        pool = {f"pooling_mode_{key}": name == pooling for name, key in POOLINGS.items()}
        pool |= {"word_embedding_dimension": 20, "pooling_mode_mean_sqrt_len_tokens": False}
    files = {"modules.json": modules, "1_Pooling/config.json": pool,
             "sentence_bert_config.json": {"max_seq_length": LENGTH, "do_lower_case": False}}  # fmt: skip
    (folder / "1_Pooling").mkdir()
    for name, document in (files | more).items():
        (folder / name).write_text(json.dumps(document))
    return folder


def by_hand(folder: Path, *, pooling: str = "mean", normalize: bool = True) -> np.ndarray:
    """The vectors by `transformers` and the formulas."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    vectors = []
    for text in TEXTS:
        ids = tokenizer(text, truncation=True, max_length=LENGTH, return_tensors="pt")
        with torch.no_grad():
            hidden = model(ids["input_ids"]).last_hidden_state[0]
        pooled = {"mean": hidden.mean(0), "cls": hidden[0], "max": hidden.amax(0), "lasttoken": hidden[-1]}[pooling]
        vectors.append(pooled / pooled.norm() if normalize else pooled)
    return torch.stack(vectors).numpy()


def embed(path: Path) -> np.ndarray:
    with pytest.warns(UserWarning, match=f"longer than {LENGTH} tokens"):
        return tformer.load(path).embed(TEXTS)


@first_is_quick("body", BODIES)
@first_is_quick("pooling", POOLINGS)
def test_a_folder_gives_the_vectors_of_the_formulas(body: str, pooling: str, tmp_path: Path) -> None:
    unit = pooling != "max"
    folder = folder_of(tmp_path / "st", body, pooling=pooling, normalize=unit, older=body != "MPNet")
    expected = by_hand(folder, pooling=pooling, normalize=unit)
    np.testing.assert_allclose(embed(folder), expected, atol=1e-5)


@pytest.mark.parametrize("body", BODIES)
def test_export_writes_the_layout_back(body: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "st", body, pooling="cls")
    report = export_checkpoint(open_checkpoint(folder), tmp_path / "out")
    assert report.class_name == f"{body}Model"
    assert report.how_to_load() == f'sentence_transformers.SentenceTransformer("{tmp_path / "out"}")'
    np.testing.assert_allclose(embed(tmp_path / "out"), embed(folder), atol=1e-6)
    modules = json.loads((tmp_path / "out/modules.json").read_text())
    assert [(each["path"], each["type"].split(".")[-1]) for each in modules] == [
        ("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")
    ]  # fmt: skip
    pooling = json.loads((tmp_path / "out/1_Pooling/config.json").read_text())
    assert [key for key, value in pooling.items() if value is True] == ["pooling_mode_cls_token"]
    assert json.loads((tmp_path / "out/sentence_bert_config.json").read_text())["max_seq_length"] == LENGTH
    np.testing.assert_allclose(by_hand(tmp_path / "out", pooling="cls"), embed(folder), atol=1e-5)


@pytest.mark.slow
def test_an_import_keeps_the_head_and_can_be_trained_on(tmp_path: Path) -> None:
    """Its quick twin is `test_a_folder_gives_the_vectors_of_the_formulas`."""
    folder = folder_of(tmp_path / "st")
    import_folder(folder, tmp_path / "imported")
    np.testing.assert_allclose(embed(tmp_path / "imported"), embed(folder), atol=1e-6)
    recipe = tformer.load(tmp_path / "imported").recipe
    assert [each.kind for each in recipe.objectives] == ["contrastive"] and recipe.seq_len == LENGTH
    rows = list(pairwise(SENTENCES))
    run = tformer.train(rows, init_from=str(tmp_path / "imported"), out=str(tmp_path / "run"), max_steps=2, quiet=True)
    assert run.embed("cat").shape == (20,)
    report = tformer.load(folder).evaluate(
        [("the cat", "a cat", "3"), ("the dog", "a tree", "1")], label_column="label"
    )
    assert -1 <= report["spearman"] <= 1


def test_without_a_length_it_is_that_of_the_tokenizer_or_the_model(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "st")
    (folder / "sentence_bert_config.json").unlink()
    assert tformer.load(folder).recipe.seq_len == 24
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 9}))
    assert tformer.load(folder).recipe.seq_len == 9


def test_a_prompt_before_every_text_is_noted(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"prompts": {"query": "the cat "}, "default_prompt_name": "query"}
    folder = folder_of(tmp_path / "st", **{"config_sentence_transformers.json": settings})
    assert any("texts must begin with that of 'query'" in note for note in tformer.load(folder).notes)
    settings["default_prompt_name"] = None
    folder = folder_of(tmp_path / "other", **{"config_sentence_transformers.json": settings})
    assert not any("prompt" in note for note in tformer.load(folder).notes)


def test_a_decoder_goes_out_with_padding_that_leaves_its_positions(tmp_path: Path) -> None:
    """transformers counts the learned positions of GPT-2 from the first place, padding or not."""
    folder = folder_of(tmp_path / "st", "GPT2", pooling="lasttoken")
    np.testing.assert_allclose(embed(folder), by_hand(folder, pooling="lasttoken"), atol=1e-5)
    export_checkpoint(open_checkpoint(folder), tmp_path / "out")
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text())["padding_side"] == "right"
    np.testing.assert_allclose(by_hand(tmp_path / "out", pooling="lasttoken"), embed(folder), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "document", "expected"),
    [
        ("modules.json", {}, "modules.json: found no modules; tformer reads Transformer in '', Pooling"),
        ("modules.json", [3], "modules.json: damaged: expected a list of modules"),
        ("modules.json", [{"path": "", "type": "m.Transformer"}, {"path": "1_CNN", "type": "m.CNN"}], "CNN in '1_CNN'"),
        (
            "modules.json",
            [{"path": "0_Transformer", "type": "m.Transformer"}, {"path": "1_Pooling", "type": "m.Pooling"}],
            "Transformer in '0_Transformer'",
        ),
        (
            "modules.json",
            [{"path": "", "type": "m.Transformer"}, {"path": "../1_Pooling", "type": "m.Pooling"}],
            "damaged: expected a list of modules with path and type (the file name '../1_Pooling' leads outside",
        ),
        (
            "modules.json",
            [{"path": path, "type": f"m.{path[2:] or 'Transformer'}"} for path in ("", "1_Pooling", "2_Dense")],
            "found Transformer in '', Pooling in '1_Pooling', Dense in '2_Dense'; tformer reads",
        ),
        ("modules.json", [[]] * 3, "modules.json: damaged: expected a list of modules"),
        (
            "modules.json",
            [{"path": 3, "type": None}] * 2,
            "modules.json: found None in '3', None in '3'; tformer reads",
        ),
        ("modules.json", ["a" * (1 << 20)], "modules.json has 1,048,580 bytes, expected at most 1,048,576"),
        ("1_Pooling/config.json", [], "config.json is damaged: expected a JSON object, found a list"),
        (
            "1_Pooling/config.json",
            {"pooling_mode": "weightedmean"},
            "pooling_mode: found 'weightedmean', tformer reads",
        ),
        (
            "1_Pooling/config.json",
            {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True},
            "pooling_mode: found ['cls', 'max'], tformer reads one of mean, cls, max, lasttoken",
        ),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case: found true, expected false"),
        ("sentence_bert_config.json", {"max_seq_length": -1}, "max_seq_length: found -1, expected a number of tokens"),
        ("sentence_bert_config.json", {"max_seq_length": "many"}, "max_seq_length: found 'many'"),
        ("sentence_bert_config.json", {"max_seq_length": float("nan")}, "max_seq_length: found nan"),
    ],
)
def test_what_tformer_lacks_is_refused(name: str, document: Any, expected: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "st", **{name: document})
    with pytest.raises(InputError) as caught:
        tformer.load(folder)
    assert expected in caught.value.message


def test_a_missing_file_of_the_pooling_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "st")
    (folder / "1_Pooling/config.json").unlink()
    with pytest.raises(InputError, match=r"config\.json"):
        tformer.load(folder)


@pytest.mark.slow
@pytest.mark.parametrize("body", [*BODIES, "GPT2"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_are_those_of_sentence_transformers_both_ways(body: str, pooling: str, tmp_path: Path) -> None:
    theirs = pytest.importorskip("sentence_transformers")
    folder = folder_of(tmp_path / "st", body, pooling=pooling, normalize=pooling != "max")
    model = theirs.SentenceTransformer(str(folder), device="cpu")
    expected = model.encode(TEXTS)
    np.testing.assert_allclose(embed(folder), expected, atol=1e-5)
    export_checkpoint(open_checkpoint(folder), tmp_path / "out")
    found = theirs.SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    model.save(str(tmp_path / "saved"))  # the layout of the installed version
    np.testing.assert_allclose(embed(tmp_path / "saved"), expected, atol=1e-5)
