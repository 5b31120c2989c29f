"""Hugging Face folders as a person has them, tiny: written by `transformers`, each with a tokenizer trained here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tformer.interop.importing import import_folder
from tformer.support.errors import InputError

TEXT = "the a cat dog bird sat ran flew on under mat rug tree and saw two big red small blue"
WORDS = TEXT.split()
SENTENCES = [" ".join(WORDS[(7 * row + 3 * column) % len(WORDS)] for column in range(4 + row % 5)) for row in range(60)]
LABELS = {0: "bad", 1: "so-so", 2: "good"}
BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
T5_SPECIAL = ("<pad>", "</s>", "<unk>")
BART_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def bytes_tokenizer(*special: str) -> Tokenizer:
    """Byte-level BPE as GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def words_tokenizer(special: tuple[str, ...], *, unk: str, single: str = "", pair: str = "") -> Tokenizer:
    """A word an id; `single` and `pair` are the template in the notation of `tokenizers`."""
    tokenizer = Tokenizer(models.WordLevel(unk_token=unk))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(SENTENCES, trainers.WordLevelTrainer(special_tokens=list(special)))
    if single:
        ids = [(token, tokenizer.token_to_id(token)) for token in special if token in single]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
    return tokenizer


def write_folder(folder: Path, model: Any, tokenizer: Tokenizer, **special: str) -> Path:
    """Model and tokenizer with the writers of `transformers`; `special`: `pad_token="[PAD]"` and the like."""
    model.save_pretrained(folder)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(folder)
    return folder


def gpt2(folder: Path, **values: Any) -> Path:
    tokenizer = bytes_tokenizer("<|endoftext|>")
    sizes: dict[str, Any] = {
        "vocab_size": 300,
        "n_positions": 32,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_inner": 24,
        "initializer_range": 0.2,
    }
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**{**sizes, **ids, **values})
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    return write_folder(folder, model, tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>")


def bert(folder: Path, head: str = "MaskedLM", **values: Any) -> Path:
    tokenizer = words_tokenizer(BERT_SPECIAL, unk="[UNK]", single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1")
    sizes: dict[str, Any] = {"vocab_size": tokenizer.get_vocab_size(), "hidden_size": 16, "num_hidden_layers": 2}
    sizes |= {
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 32,
        "initializer_range": 0.2,
    }
    config = transformers.BertConfig(**{**sizes, **values})
    torch.manual_seed(0)
    model = getattr(transformers, f"BertFor{head}")(config)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return write_folder(folder, model, tokenizer, **names, mask_token="[MASK]")


def t5(folder: Path, **values: Any) -> Path:
    tokenizer = words_tokenizer(T5_SPECIAL, unk="<unk>", single="$A </s>", pair="$A </s> $B </s>")
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**{**sizes, **ids, **values}))
    return write_folder(folder, model, tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def bart(folder: Path, **values: Any) -> Path:
    tokenizer = words_tokenizer(BART_SPECIAL, unk="<unk>", single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>")
    sizes = {"vocab_size": 64, "d_model": 16, "max_position_embeddings": 32}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 24}
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**{**sizes, **values}))
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return write_folder(folder, model, tokenizer, **names, mask_token="<mask>")


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Write model.safetensors again after `change` has done something to its tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_json(path: Path, change: Callable[[dict[str, Any]], None] | Mapping[str, Any]) -> None:
    """Change a JSON file: set the keys of a mapping (None removes one), or apply a function to it."""
    values = json.loads(path.read_text(encoding="utf-8"))
    if callable(change):
        change(values)
    else:
        values = {key: value for key, value in {**values, **change}.items() if value is not None}
    path.write_text(json.dumps(values), encoding="utf-8")


def refusal(folder: Path, out: Path, **options: Any) -> InputError:
    """The error of an import, after which nothing is there."""
    with pytest.raises(InputError) as caught:
        import_folder(folder, out, **options)
    assert not out.exists() and not out.parent.exists()
    assert "\n" not in caught.value.message
    return caught.value
