"""The kernels as this processor runs them, and as the plainest would: loops in place of named instructions."""

from __future__ import annotations

import os

import pytest

from tformer.kernels.functions import Kernels
from tformer.kernels.library import FLAGS, build, find_compiler, load, open_at

NATIVE = "-march=native"


@pytest.fixture(scope="session")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    compiler = find_compiler()
    assert compiler is not None
    target = tmp_path_factory.mktemp("kernels") / "portable.so"
    build(compiler, target, [flag for flag in FLAGS if flag != NATIVE])
    return Kernels(open_at(target))


@pytest.fixture(params=["native", "portable"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    library = load()
    if library is None:
        assert not os.environ.get("TFORMER_REQUIRE_KERNELS"), "no kernels, and TFORMER_REQUIRE_KERNELS is set"
        pytest.skip("no compiler for kernels here")
    return Kernels(library) if request.param == "native" else request.getfixturevalue("portable")
