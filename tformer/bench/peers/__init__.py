"""Other libraries (peers) measured at the same work: one file for each library, and the table of them.

A class of a file is a `Contender` and imports its library inside its methods: this table is read without them. Models
have the sizes of ours (layers, width, heads, inner width, vocabulary) in the library's own architecture, random
weights, and the library's best settings.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from tformer.support.errors import InputError, did_you_mean

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Peer:
    """A library at one workload.

    Attributes:
        module, maker: under `tformer.bench.peers`; called with (task, precision).
        needs: modules that must be importable.
        precisions: number formats that it can be asked for (of attention: its implementations), all by default;
            None: the module's `supported(device)`.
        extra: of tformer, which installs it.
        package: under which it is installed; None: the library's name.
    """

    module: str
    maker: str
    needs: tuple[str, ...]
    precisions: tuple[str, ...] | None = ("fp32", "bf16")
    extra: str = "bench"
    package: str | None = None

    def precisions_on(self, device: torch.device) -> tuple[str, ...]:
        if self.precisions is not None:
            return self.precisions
        found: tuple[str, ...] = self._module().supported(device)
        return found

    def make(self, task: Any, precision: str) -> Any:
        """A `Contender`; of attention its `Mechanism`."""
        return getattr(self._module(), self.maker)(task, precision)

    def _module(self) -> Any:
        return import_module(f"{__name__}.{self.module}")


_TRANSFORMERS = ("transformers",)
PEERS: dict[tuple[str, str], Peer] = {
    ("train", "transformers"): Peer("transformers", "Training", _TRANSFORMERS),
    ("generate", "transformers"): Peer("transformers", "Generation", _TRANSFORMERS),
    ("generate", "llama.cpp"): Peer(
        "llama_cpp", "Generation", ("llama_cpp", "gguf"), None, extra="llama-cpp", package="llama-cpp-python"
    ),
    ("translate", "transformers"): Peer("transformers", "Translation", _TRANSFORMERS),
    ("translate", "ctranslate2"): Peer("ctranslate2", "Translation", ("ctranslate2", "transformers"), None),
    ("classify", "transformers"): Peer("transformers", "Classification", _TRANSFORMERS),
    ("attention", "transformers"): Peer("transformers", "Attention", _TRANSFORMERS, ("eager", "sdpa")),
}


def choose_peers(
    work: str, names: Sequence[str], precisions: Sequence[str] | None, *, device: torch.device = CPU
) -> list[tuple[str, str]]:
    """(library, precision) of each contender. Raises InputError for one that cannot do the work or is not installed."""
    known = {library: peer for (other, library), peer in PEERS.items() if other == work}
    chosen: list[tuple[str, str]] = []
    for name in dict.fromkeys(names):
        if name not in known:
            available = ", ".join(known) or "none"
            raise InputError(f"--peer {name}: not available for {work}; available: {available}")
        missing = [module for module in known[name].needs if importlib.util.find_spec(module) is None]
        if missing:
            raise InputError(
                f"--peer {name}: {missing[0]} is not installed", hint=f"pip install 'tformer[{known[name].extra}]'"
            )
        try:
            usable = known[name].precisions_on(device)
        except ImportError as error:  # installed, but broken
            raise InputError(f"--peer {name}: it cannot be imported: {error}") from error
        for precision in precisions or usable:
            if precision not in usable:
                raise InputError(
                    f"--peer-precision {precision}: {name} has no such precision for {work}",
                    hint=did_you_mean(precision, usable),
                )
            chosen.append((name, precision))
    return chosen
