"""Special tokens of a Hugging Face folder: their ids in config files, and tokenizer_config.json with its companions.

Start and end tokens of generation stand in generation_config.json, which `generate` uses, and in older keys of
config.json. The roles of a tokenizer's tokens stand in its own files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from tformer.interop.architectures import ARCHITECTURES
from tformer.recipe.recipe import Recipe, with_roles
from tformer.support.errors import InputError
from tformer.support.files import read_object
from tformer.support.formatting import kind_of, whole_number
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.chat import read_template
from tformer.tokenizer.special import decoder_tokens

OF_TOKENIZER = ("pad", "unk", "cls", "sep", "mask")
OF_MODEL = ("bos", "eos")
OF_DECODER = ("decoder_start", "forced_bos", "forced_eos")


def special_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None, roles: Mapping[str, int]
) -> dict[str, int]:
    """Values of `tokenizer.special_ids`.

    The ids of the decoder are what `generate` of transformers uses: those of generation_config.json alone where there
    is one (its start of sequence where it has no decoder start), else those of config.json.

    Args:
        config: of config.json.
        generation: of generation_config.json; None where there is none.
        roles: of the tokenizer.

    An id that is not below `vocab_size` stands for nothing and is left out. Of several ends of sequence this is the
    first; the others are `end_ids`' to find.
    """
    found = {role: _first(roles.get(role), _of_config(config, role)) for role in OF_TOKENIZER}
    stated = {name: _id(generation or {}, name, "generation_config.json") for name in (*OF_MODEL, *OF_DECODER)}
    for name in OF_MODEL:
        found[name] = _first(stated[name], _of_config(config, name), roles.get(name))
    for name in OF_DECODER:
        found[name] = stated[name] if generation is not None else _of_config(config, name)
    own_start = _of_config(config, "decoder_start")
    if generation is not None and (own_start is not None or config.get("is_encoder_decoder")):
        found["decoder_start"] = _first(stated["decoder_start"], stated["bos"], own_start)
    if generation is None and found["forced_bos"] is None and config.get("force_bos_token_to_be_generated"):
        found["forced_bos"] = found["bos"]  # BART's older name
    size = config.get("vocab_size")
    return {
        name: token
        for name, token in found.items()
        if token is not None and not (isinstance(size, int) and token >= size)
    }


def end_ids(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Ids of all end-of-sequence tokens, in the order of the files."""
    for values, name in ((generation or {}, "generation_config.json"), (config, "config.json")):
        if ids := _ids(values, "eos", name):
            return ids
    return ()


def special_keys(recipe: Recipe, tokenizer: Tokenizer | None, target: Tokenizer | None) -> dict[str, Any]:
    """The keys of config.json about special tokens. Null is written too, because a missing key has a default id.

    Args:
        tokenizer: of the text or of both sides; None: a model of images, which has no such keys.
        target: of the side that is written, where it has its own.
    """
    if tokenizer is None:
        return {}
    source, own = with_roles(recipe.tokenizer.special_ids, tokenizer, target)
    special = (own or source).special
    keys: dict[str, Any] = {"bos_token_id": special.bos, "eos_token_id": special.eos, "pad_token_id": special.pad}
    if recipe.model.is_encoder_decoder:
        given = recipe.tokenizer.special_ids
        ends = decoder_tokens(special, start=given.decoder_start, eos=given.eos, forced_bos=given.forced_bos)
        keys |= {
            "is_encoder_decoder": True,
            "eos_token_id": ends.eos,
            "decoder_start_token_id": ends.start,
            "forced_bos_token_id": ends.forced_bos,
            "forced_eos_token_id": given.forced_eos,
        }
    return keys


def _of_config(config: Mapping[str, Any], name: str) -> int | None:
    if f"{name}_token_id" in config:
        return _id(config, name, "config.json")
    architecture = ARCHITECTURES.get(str(config.get("model_type")))
    return None if architecture is None else architecture.special_ids.get(name)


def _id(values: Mapping[str, Any], name: str, file: str) -> int | None:
    return next(iter(_ids(values, name, file)), None)


def _ids(values: Mapping[str, Any], name: str, file: str) -> tuple[int, ...]:
    value = values.get(f"{name}_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise InputError(f"{file}: {name}_token_id: found {value!r}, expected an id")
    return tuple(one for one in ids if one >= 0)  # some files have -1 for none


def _first(*ids: int | None) -> int | None:
    return next((token for token in ids if token is not None), None)


TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
CHAT_TEMPLATE = "chat_template.jinja"
MAX_BYTES = 64 << 20  # added tokens can be many
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # in the order in which missing ones are added
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


@dataclass(frozen=True)
class TokenizerConfig:
    """The content of tokenizer_config.json, special_tokens_map.json and added_tokens.json.

    options: tokenizer_config.json as it stands.
    roles: role -> the token that has it; None where a file says that none has.
    added: (id, token) of the tokens beside the vocabulary, by increasing id.
    """

    folder: Path
    options: Mapping[str, Any]
    roles: Mapping[str, AddedToken | None]
    added: tuple[tuple[int, AddedToken], ...]
    further: tuple[AddedToken, ...]  # special ones without a role

    def flag(self, name: str, *, default: bool | None) -> bool | None:
        """A boolean option of tokenizer_config.json; null gives the default."""
        value = self.options.get(name)
        if value is not None and not isinstance(value, bool):
            raise InputError(f"{self.folder / TOKENIZER_CONFIG}: {name}: found {value!r}, expected true or false")
        return default if value is None else value


def read_tokenizer_config(folder: Path) -> TokenizerConfig:
    """Read the files that exist; a folder may have none. Raises InputError for damaged ones."""
    options = _read(folder / TOKENIZER_CONFIG)
    lists_added = options.get("added_tokens_decoder") is not None
    older = {} if lists_added else _read(folder / SPECIAL_TOKENS_MAP)
    named = {**options, **older}
    source = folder / (SPECIAL_TOKENS_MAP if older else TOKENIZER_CONFIG)
    roles = {
        role: None if named[key] is None else _token(named[key], source, key, special=True)
        for role in ROLES
        if (key := f"{role}_token") in named
    }
    key = "additional_special_tokens" if "additional_special_tokens" in named else "extra_special_tokens"
    listed = named.get(key) or []
    if not isinstance(listed, list | dict):
        raise InputError(f"{source}: {key}: found {listed!r}, expected a list of tokens")
    values = listed.values() if isinstance(listed, dict) else listed
    further = tuple(_token(value, source, key, special=True) for value in values)
    special = {token.content for token in (*roles.values(), *further) if token is not None}
    added = _by_id(folder, options["added_tokens_decoder"]) if lists_added else _by_token(folder, special)
    known = {token.content: token for _, token in added}
    # A role names a token; the added token has its matching rules.
    roles = {role: token and known.get(token.content, token) for role, token in roles.items()}
    return TokenizerConfig(folder, options, roles, tuple(sorted(added, key=lambda entry: entry[0])), further)


def read_chat_template(folder: Path) -> str | None:
    """The Jinja template of chat_template.jinja, else of tokenizer_config.json (of several the default); None: none.

    Raises InputError for a damaged file, and for a value that is no template.
    """
    path = folder / CHAT_TEMPLATE
    if path.exists():
        return read_template(path)
    found = _read(folder / TOKENIZER_CONFIG).get("chat_template")
    if isinstance(found, list):  # named ones
        found = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}.get("default")
    if found is not None and not isinstance(found, str):
        raise InputError(f"{folder / TOKENIZER_CONFIG}: chat_template: found {kind_of(found)}, expected text")
    return found


def _by_id(folder: Path, entries: Any) -> list[tuple[int, AddedToken]]:
    path, key = folder / TOKENIZER_CONFIG, "added_tokens_decoder"
    if not isinstance(entries, dict) or any(whole_number(name) is None for name in entries):
        raise InputError(f"{path}: {key}: expected an object with ids as keys")
    return [(int(name), _token(value, path, f"{key}.{name}")) for name, value in entries.items()]


def _by_token(folder: Path, special: set[str]) -> list[tuple[int, AddedToken]]:
    path = folder / ADDED_TOKENS
    entries = _read(path)
    for token, number in entries.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise InputError(f"{path}: {token}: found {number!r}, expected an id")
    return [(number, AddedToken(token, special=token in special)) for token, number in entries.items()]


def _token(value: Any, path: Path, key: str, *, special: bool | None = None) -> AddedToken:
    """A token given as a string, or as a mapping with its matching rules."""
    if isinstance(value, str):
        return AddedToken(value, special=bool(special))
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise InputError(f"{path}: {key}: found {value!r}, expected a token")
    flags = {name: value[name] for name in (*FLAGS, "special") if name in value}
    if odd := [name for name, flag in flags.items() if not isinstance(flag, bool)]:
        raise InputError(f"{path}: {key}.{odd[0]}: found {value[odd[0]]!r}, expected true or false")
    is_special = flags.pop("special", False) if special is None else special
    return AddedToken(value["content"], special=is_special, **flags)


def _read(path: Path) -> dict[str, Any]:
    return read_object(path, max_bytes=MAX_BYTES) if path.exists() else {}
