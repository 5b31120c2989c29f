"""Other libraries at the same work: one file for each (work, library), and the table of them.

A file has `make(task, precision) -> Contender` and imports its library inside it: this table is read without them.
Models have the sizes of ours (layers, width, heads, inner width, vocabulary) in the library's own architecture, random
weights, and the library's best settings.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tformer.bench.processes import Contender
from tformer.bench.workloads import Task
from tformer.errors import InputError, did_you_mean

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Peer:
    """module: under `tformer.bench.peers`; needs: what must be importable; precisions: those that it can be asked for,
    the usual ones, None: its `supported(device)` says; all are tried where none is named."""

    module: str
    needs: tuple[str, ...]
    precisions: tuple[str, ...] | None = ("fp32", "bf16")

    def precisions_on(self, device: torch.device) -> tuple[str, ...]:
        if self.precisions is not None:
            return self.precisions
        found: tuple[str, ...] = importlib.import_module(f"{__name__}.{self.module}").supported(device)
        return found

    def make(self, task: Task, precision: str) -> Contender:
        found: Contender = importlib.import_module(f"{__name__}.{self.module}").make(task, precision)
        return found


PEERS: dict[tuple[str, str], Peer] = {
    ("train", "transformers"): Peer("transformers_train", ("transformers",)),
    ("generate", "transformers"): Peer("transformers_generate", ("transformers",)),
    ("classify", "transformers"): Peer("transformers_classify", ("transformers",)),
    ("train", "x-transformers"): Peer("x_transformers_train", ("x_transformers",)),
    ("translate", "transformers"): Peer("transformers_translate", ("transformers",)),
    ("translate", "ctranslate2"): Peer("ctranslate2_translate", ("ctranslate2", "transformers"), None),
    ("tokenize", "transformers"): Peer("transformers_tokenize", ("transformers",), ("",)),  # it multiplies nothing
}


def choose_peers(
    work: str, names: Sequence[str], precisions: Sequence[str] | None, *, device: torch.device = CPU
) -> list[tuple[str, str]]:
    """(library, precision) of each contender. Raises InputError for one that cannot do the work or is not installed."""
    known = {library: peer for (of, library), peer in PEERS.items() if of == work}
    chosen: list[tuple[str, str]] = []
    for name in dict.fromkeys(names):
        if name not in known:
            there = ", ".join(known) or "none"
            raise InputError(f"--peer {name}: it does no {work} here; available: {there}")
        missing = [module for module in known[name].needs if importlib.util.find_spec(module) is None]
        if missing:
            raise InputError(f"--peer {name}: {missing[0]} is not installed", hint="pip install 'tformer[bench]'")
        try:
            usable = known[name].precisions_on(device)
        except ImportError as error:  # installed, but broken
            raise InputError(f"--peer {name}: it cannot be imported: {error}") from error
        for precision in precisions or usable:
            if precision not in usable:
                raise InputError(
                    f"--peer-precision {precision}: {name} has no such one for {work}",
                    hint=did_you_mean(precision, usable),
                )
            chosen.append((name, precision))
    return chosen
