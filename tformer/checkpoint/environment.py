"""What a run ran on: `environment.json`, for people who want to repeat or explain it."""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("tformer", "torch", "numpy", "tokenizers", "safetensors", "pydantic")


def describe_environment(
    *, device: str, data_fingerprint: str | None, command: Sequence[str] | None = None
) -> dict[str, Any]:
    """Versions, the device as the caller names it, the command line (null: this process's), the code's git commit and
    the fingerprint of the training data."""
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": list(sys.argv if command is None else command),
        "device": device,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "git_commit": git_commit(Path(__file__).resolve().parents[2]),
        "data_fingerprint": data_fingerprint,
    }


def _version(package: str) -> str | None:
    if package == "tformer":
        from tformer import __version__

        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_commit(checkout: Path) -> str | None:
    """The commit of a git checkout; None where there is no checkout, or no git."""
    if not (checkout / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
