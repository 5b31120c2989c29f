"""The kernels by this processor's instructions, by those of AVX2, and by the plainest: loops in place of named ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tformer.kernels.functions import Kernels
from tformer.kernels.library import INSTRUCTIONS, NATIVE, build, find_compiler, load, open_at

SETS = {"native": NATIVE, **INSTRUCTIONS}
SANITIZED = os.environ.get("TFORMER_SANITIZED_KERNELS")
"""The folder of libraries that `test_kernels_sanitized.py` compiled."""


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kernels]:
    """The kernels for a set of instructions, compiled once."""

    @cache
    def kernels_for(name: str) -> Kernels:
        if SANITIZED is not None:
            return Kernels(open_at(Path(SANITIZED) / f"{name}.so"))
        compiler = find_compiler()
        assert compiler is not None
        target = tmp_path_factory.mktemp("kernels") / f"{name}.so"
        build(compiler, target, SETS[name])
        return Kernels(open_at(target))

    return kernels_for


@pytest.fixture(params=SETS)
def kernels(request: pytest.FixtureRequest, built: Callable[[str], Kernels]) -> Kernels:
    library = load()
    if library is None:
        assert not os.environ.get("TFORMER_REQUIRE_KERNELS"), "no kernels, and TFORMER_REQUIRE_KERNELS is set"
        pytest.skip("no compiler for kernels here")
    if request.param == "avx2" and not has_avx2():
        pytest.skip("no AVX2 here")
    return Kernels(library) if request.param == "native" and SANITIZED is None else built(request.param)


def has_avx2() -> bool:
    flags = Path("/proc/cpuinfo").read_text().split()
    return "avx2" in flags and "fma" in flags
