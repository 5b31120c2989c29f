"""Whether `tformer generate` compiles the step of decoding: `--compile auto|on|off`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tformer.cli.generate_request import Asked
    from tformer.loading import Loaded

AUTO_STEPS = 4096
"""Of decoding: compiling takes as long as some thousand steps of a small model save on a GPU."""


def compiles(asked: Asked, loaded: Loaded, device: torch.device) -> bool:
    """Whether to compile the steps of this model; its notes say so, or why one that was to be is not.

    Raises InputError for `--compile on` without a compiler.
    """
    from tformer.decoding.inference import (
        missing_compiler,
        no_compiled_steps,
        require_compiler,
    )

    if asked.compile == "off" or (asked.compile == "auto" and not compiling_pays(asked, loaded, device)):
        return False
    reason = no_compiled_steps(loaded.model)
    if reason is None and asked.compile == "on":
        require_compiler(device)
    elif reason is None and (missing := missing_compiler(device)) is not None:
        reason = f"found no {missing}"
    loaded.notes.append(
        "decoding is compiled: the first tokens take a while" if reason is None else f"decoded uncompiled: {reason}"
    )
    return reason is None


def compiling_pays(asked: Asked, loaded: Loaded, device: torch.device) -> bool:
    """On a GPU, whose time goes into starting small operations, and for many steps; not on a CPU."""
    if device.type != "cuda" or asked.quantize != "none":
        return False
    longest = asked.max_new_tokens or loaded.recipe.generation.max_new_tokens
    texts = asked.texts_at_once(encoder_decoder=loaded.model.encoder is not None)
    batches = -(-count_lines(asked.input_path) // texts)
    return longest * batches >= AUTO_STEPS


def count_lines(path: str | None) -> int:
    """Of a file; 1 where that is not known ahead: a prompt, standard input, a file that will be refused."""
    if path is None or not Path(path).is_file():
        return 1
    with Path(path).open("rb") as file:
        return max(1, sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b"")))
