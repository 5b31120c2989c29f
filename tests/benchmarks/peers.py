"""Table of the other libraries: which work each can do, in which number formats, and what must be installed.

Each has a file, whose classes are `Contender` and import the library inside their methods.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

import torch

from tformer.bench.speed import ContenderSpec
from tformer.bench.worker import named
from tformer.support.errors import InputError


@dataclass(frozen=True)
class Peer:
    """A library at one work.

    Attributes:
        maker: `module:name` of its contender, under `tests.benchmarks`.
        packages: that must be installed, by the names of their modules; the first is the library.
        precisions: number formats; None: the module's `supported(device)`.
    """

    maker: str
    packages: dict[str, str]
    precisions: tuple[str, ...] | None = ("fp32", "bf16")

    @property
    def entry_point(self) -> str:
        return f"tests.benchmarks.{self.maker}"

    @property
    def version(self) -> str:
        return metadata.version(next(iter(self.packages.values())))

    def precisions_on(self, device: torch.device) -> tuple[str, ...]:
        if self.precisions is not None:
            return self.precisions
        found: tuple[str, ...] = named(f"{self.entry_point.partition(':')[0]}:supported")(device)
        return found


TRANSFORMERS = {"transformers": "transformers"}
LLAMA_CPP = {"llama_cpp": "llama-cpp-python", "gguf": "gguf"}
CTRANSLATE2 = {"ctranslate2": "ctranslate2", **TRANSFORMERS}
PEERS: dict[tuple[str, str], Peer] = {
    ("train", "transformers"): Peer("transformers_peer:Training", TRANSFORMERS),
    ("generate", "transformers"): Peer("transformers_peer:Generation", TRANSFORMERS),
    ("generate", "llama.cpp"): Peer("llama_cpp_peer:Generation", LLAMA_CPP, None),
    ("translate", "transformers"): Peer("transformers_peer:Translation", TRANSFORMERS),
    ("translate", "ctranslate2"): Peer("ctranslate2_peer:Translation", CTRANSLATE2, None),
    ("classify", "transformers"): Peer("transformers_peer:Classification", TRANSFORMERS),
}


def choose_peers(work: str, name: str, precisions: Sequence[str] | None, device: torch.device) -> list[ContenderSpec]:
    """The contenders of a library. Raises InputError for one that cannot do the work or is not installed."""
    if (work, name) not in PEERS:
        known = ", ".join(library for other, library in PEERS if other == work)
        raise InputError(f"--peer {name}: not available for {work}; available: {known}")
    peer = PEERS[work, name]
    missing = [package for module, package in peer.packages.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise InputError(f"--peer {name}: {missing[0]} is not installed", hint=f"pip install {' '.join(missing)}")
    usable = peer.precisions_on(device)
    chosen = [precision for precision in precisions or usable if precision in usable]
    if not chosen:
        raise InputError(f"--peer-precision: {name} has {', '.join(usable)} for {work}")
    return [ContenderSpec(name, precision, peer.entry_point) for precision in chosen]
