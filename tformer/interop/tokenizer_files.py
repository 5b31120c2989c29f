"""The tokenizer of a Hugging Face folder, read (`tokenizer.json`, or older vocabularies converted) and written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tformer.interop.architecture import Architecture
from tformer.interop.sentencepiece_files import to_json
from tformer.interop.slow_tokenizers import JSON_HINT, convert_slow
from tformer.interop.tokenizer_config import (
    ROLES,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    read_tokenizer_config,
)
from tformer.recipe.recipe import SpecialTokens, with_own_roles
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.special import SpecialIds
from tformer.tokenizer.tokenizer import read_tokenizer_file

TOKENIZER_JSON = "tokenizer.json"
TARGET_FOLDER = "target_tokenizer"  # in an exported folder: the tokenizer of the target side


@dataclass(frozen=True)
class FoundTokenizer:
    """The text of a tokenizer.json and the ids of its roles: pad, bos, eos, unk, cls, sep, mask."""

    json: str
    roles: Mapping[str, int]
    notes: tuple[str, ...] = ()


def read_tokenizer(folder: Path, config: Mapping[str, Any], *, path: Path | None = None) -> FoundTokenizer:
    """The tokenizer of a folder.

    Args:
        folder: where it lies.
        config: the folder's config.json.
        path: a tokenizer.json that takes the place of the folder's own vocabulary.

    Raises InputError for damaged files, and for a folder without a vocabulary that can be read (hint: how to get one).
    """
    small = read_tokenizer_config(folder)
    source = folder / TOKENIZER_JSON if path is None else path
    if path is not None or source.exists():
        text = read_tokenizer_file(source)
        names = {role: token.content for role, token in small.roles.items() if token is not None}
        return _found(text, names, source)
    converted = convert_slow(small, config)
    if converted is not None:
        return _found(*converted, folder)
    raise InputError(
        f"{folder} has no tokenizer: no {TOKENIZER_JSON}, no vocab.txt, no vocab.json with merges.txt, no "
        "SentencePiece model",
        hint=JSON_HINT,
    )


def read_target_tokenizer(folder: Path, config: Mapping[str, Any]) -> FoundTokenizer | None:
    """The tokenizer of the target side of a folder without tokenizer.json; None where one tokenizer serves both."""
    small = read_tokenizer_config(folder)
    if (folder / TOKENIZER_JSON).exists() or (converted := convert_slow(small, config, target=True)) is None:
        return None
    same = converted == convert_slow(small, config)
    return None if same else _found(*converted, folder)


def _found(text: str, names: Mapping[str, str], source: Path) -> FoundTokenizer:
    tokenizer = Tokenizer.from_json(text, name=str(source))
    ids = {role: tokenizer.token_id(name) for role, name in names.items()}
    notes = tuple(
        f"{source}: the {role} token {names[role]!r} of {TOKENIZER_CONFIG} is not in the vocabulary: left out"
        for role, token in ids.items()
        if token is None
    )
    return FoundTokenizer(text, {role: token for role, token in ids.items() if token is not None}, notes)


def tokenizer_documents(
    tokenizer: Tokenizer,
    ids: SpecialTokens,
    *,
    model_max_length: int,
    token_types: bool = False,
    padding_side: str = "right",
    writes: bool = False,
) -> dict[str, str]:
    """File name -> text, from which `AutoTokenizer.from_pretrained` makes a tokenizer with the same ids.

    Args:
        ids: those that the recipe names take the place of what was found by name.
        model_max_length: the most tokens that the model reads.
        token_types: whether the model tells them apart: to others they do harm (GPT-2 adds their embedding).
        padding_side: `left` for a decoder-only model, whose batches continue at the right end.
        writes: the model is a language model, see `with_text_ends`.
    """
    special = with_own_roles(ids, tokenizer).special
    if writes:
        special = with_text_ends(special)
    roles = {role: getattr(special, role) for role in ROLES}
    names: dict[str, Any] = {
        f"{role}_token": tokenizer.token(token) for role, token in roles.items() if token is not None
    }
    if special.sentinels:
        names["additional_special_tokens"] = [tokenizer.token(token) for token in special.sentinels]
    inputs = ["input_ids", *(["token_type_ids"] if token_types else []), "attention_mask"]
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "model_input_names": inputs,
        "padding_side": padding_side,
        "truncation_side": "right",
        "clean_up_tokenization_spaces": False,
        **names,
    }
    return {
        TOKENIZER_JSON: tokenizer.to_json(),
        TOKENIZER_CONFIG: to_json(options),
        SPECIAL_TOKENS_MAP: to_json(names),
    }


def with_text_ends(special: SpecialIds) -> SpecialIds:
    """The roles with the unknown token as bos, eos and pad where a vocabulary has neither bos nor eos.

    Tools that evaluate language models ask for these: an empty context begins with bos or eos, batches are padded.
    Characters and words of the training text never are that token, so that no text is lost in decoding.
    """
    if special.bos is not None or special.eos is not None or special.unk is None:
        return special
    pad = special.unk if special.pad is None else special.pad
    return replace(special, bos=special.unk, eos=special.unk, pad=pad)


def text_ends_note(tokenizer: Tokenizer | None, ids: SpecialTokens) -> tuple[str, ...]:
    """A note for the tokenizer of a language model whose vocabulary does not end texts; () for the others."""
    special = None if tokenizer is None else with_own_roles(ids, tokenizer).special
    if tokenizer is None or special is None or special.bos is not None or special.eos is not None:
        return ()
    if special.unk is None:
        return (
            "the vocabulary has no special tokens: tools that evaluate language models need an end of text "
            "(train with --template gpt)",
        )
    return (
        f"the vocabulary has no end of text: transformers gets {tokenizer.token(special.unk)} for bos, eos and pad",
    )


def own_rules_note(architecture: Architecture, tokenizer: Tokenizer | None) -> tuple[str, ...]:
    """A note for an architecture whose tokenizers `AutoTokenizer` reads by fixed rules; () for the others."""
    if tokenizer is None or not architecture.own_tokenizer_rules:
        return ()
    return (
        f"AutoTokenizer of transformers 5 reads every tokenizer of {architecture.model_type} by that model's own "
        "rules: PreTrainedTokenizerFast.from_pretrained opens this one as it is",
    )
