"""Where what can be made again is kept: tokens, translations of a teacher, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """$TFORMER_CACHE, else tformer/ in $XDG_CACHE_HOME or ~/.cache."""
    if path := os.environ.get("TFORMER_CACHE"):
        return Path(path).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path("~/.cache").expanduser()) / "tformer"
