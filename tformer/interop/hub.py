"""Folders of the Hugging Face hub: `hf:owner/name[@revision]` downloaded through `huggingface_hub` (the `hub` extra).

Only what an import reads is fetched: safetensors and texts, never pickles and never code.
"""

from __future__ import annotations

import re
from pathlib import Path

from tformer.support.errors import InputError, TformerError

PREFIX = "hf:"
PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.spm")
SUBFOLDERS = "[!0-9]*/*"  # these hold other formats and models; 1_Pooling is a module of sentence-transformers
_NAME = re.compile(r"(?!.*\.\.)hf:([\w.-]+/[\w.-]+|[\w.-]+)(?:@([\w./-]+))?")


def is_hub_name(name: str) -> bool:
    return name.startswith(PREFIX)


def download(name: str) -> Path:
    """The local folder of a repository, downloaded into the hub's cache or found there.

    Args:
        name: `hf:owner/name`, or with a branch, tag or commit `hf:owner/name@revision`.

    Raises:
        InputError: another form of name, no such repository or revision, or the `hub` extra is missing.
        TformerError: the hub cannot be reached.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise InputError(f"{name} is no name on the hub", hint="expected hf:owner/name or hf:owner/name@revision")
    repository, revision = match.groups()
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError:
        raise InputError(
            f"{name}: downloading needs the package huggingface_hub, which is not installed",
            hint='pip install "tformer[hub]", or download the folder in another way and name it',
        ) from None
    try:
        return Path(
            snapshot_download(
                repository, revision=revision, allow_patterns=list(PATTERNS), ignore_patterns=[SUBFOLDERS]
            )
        )
    except GatedRepoError:
        raise InputError(
            f"{name}: its owner restricts who may download it", hint="accept the terms on its page, then: hf auth login"
        ) from None
    except RevisionNotFoundError:
        raise InputError(f"{name}: the repository has no revision {revision}") from None
    except RepositoryNotFoundError:
        raise InputError(
            f"{name}: there is no such repository, or it is private", hint="a private one needs: hf auth login"
        ) from None
    except HFValidationError as error:
        raise InputError(f"{name} is no name on the hub: {_first_line(error)}") from None
    except LocalEntryNotFoundError:
        raise TformerError(
            f"{name}: the hub cannot be reached, and the repository was not downloaded whole before",
            hint="try again with a network, or name a folder on this machine",
        ) from None
    except (OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise TformerError(
            f"{name}: the download failed: {_first_line(error)}", hint="try again; what is there already is kept"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
