"""What a Hugging Face folder says about its tokenizer beside the vocabulary: options, names of roles, added tokens.

Three files say it, from different years: `tokenizer_config.json` (options, roles by name, and as
`added_tokens_decoder` the added tokens by id), `special_tokens_map.json` (roles by name; older, and overruled where the
first lists the added tokens) and `added_tokens.json` (ids by token; likewise).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from tformer.checkpoint.bounded_json import parse_object, read_bounded
from tformer.errors import InputError

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
MAX_BYTES = 64 << 20  # added tokens can be many
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # in the order in which missing ones are added
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


@dataclass(frozen=True)
class TokenizerConfig:
    """What the small files say.

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
        """A yes or no of tokenizer_config.json; null is the default."""
        value = self.options.get(name)
        if value is not None and not isinstance(value, bool):
            raise InputError(f"{self.folder / TOKENIZER_CONFIG}: {name}: found {value!r}, expected true or false")
        return default if value is None else value


def read_tokenizer_config(folder: Path) -> TokenizerConfig:
    """Reads what is there; a folder may have none of the files. Raises InputError for damaged ones."""
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
    # A role names a token; how it is found in text is said where the token is added.
    roles = {role: token and known.get(token.content, token) for role, token in roles.items()}
    return TokenizerConfig(folder, options, roles, tuple(sorted(added, key=lambda entry: entry[0])), further)


def _by_id(folder: Path, entries: Any) -> list[tuple[int, AddedToken]]:
    path, key = folder / TOKENIZER_CONFIG, "added_tokens_decoder"
    if not isinstance(entries, dict) or not all(name.isdecimal() for name in entries):
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
    """A token as a string, or with how it is found in text."""
    if isinstance(value, str):
        return AddedToken(value, special=bool(special))
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise InputError(f"{path}: {key}: found {value!r}, expected a token")
    flags = dict(_flags(value, path, key))
    is_special = flags.pop("special", False) if special is None else special
    return AddedToken(value["content"], special=is_special, **flags)


def _flags(value: Mapping[str, Any], path: Path, key: str) -> Iterator[tuple[str, bool]]:
    for name in (*FLAGS, "special"):
        if name in value:
            if not isinstance(value[name], bool):
                raise InputError(f"{path}: {key}.{name}: found {value[name]!r}, expected true or false")
            yield name, value[name]


def _read(path: Path) -> dict[str, Any]:
    return parse_object(read_bounded(path, max_bytes=MAX_BYTES), name=str(path)) if path.exists() else {}
