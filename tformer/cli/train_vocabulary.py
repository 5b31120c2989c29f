"""`tformer train`: one vocabulary or two, and which tokenizer files, as keys of the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tformer.errors import InputError

VOCABULARIES: dict[str | None, dict[str, Any]] = {
    None: {},
    "joint": {"tokenizer.separate": False, "tokenizer.source_path": None, "tokenizer.target_path": None},
    "separate": {"tokenizer.separate": True, "model.tie.source_target": False},
}
"""What --vocabulary sets."""


def vocabulary_flags(
    vocabulary: str | None,
    *,
    tokenizer: Path | None,
    source_tokenizer: Path | None,
    target_tokenizer: Path | None,
) -> dict[str, Any]:
    """Values by dotted key; None sets null. A file for each side means separate vocabularies, without being said.

    Raises InputError for another word than joint or separate, one side without the other, and files that exclude each
    other or the vocabulary.
    """
    if vocabulary not in VOCABULARIES:
        raise InputError(f"--vocabulary must be joint or separate, found '{vocabulary}'")
    given = {"--source-tokenizer": source_tokenizer, "--target-tokenizer": target_tokenizer}
    missing = [name for name, file in given.items() if file is None]
    if len(missing) == len(given):
        return VOCABULARIES[vocabulary] | ({} if tokenizer is None else {"tokenizer.path": str(tokenizer)})
    if missing:
        raise InputError(f"{missing[0]} is missing", hint="a tokenizer for each side; one for both is --tokenizer")
    if tokenizer is not None:
        raise InputError("--tokenizer and --source-tokenizer exclude each other", hint="--tokenizer is for both sides")
    if vocabulary == "joint":
        raise InputError("--vocabulary joint and --source-tokenizer exclude each other")
    return VOCABULARIES["separate"] | {
        "tokenizer.path": None,
        "tokenizer.source_path": str(source_tokenizer),
        "tokenizer.target_path": str(target_tokenizer),
    }
