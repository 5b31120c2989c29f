"""Any number of threads use one run, and a child of `os.fork` uses it too."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tformer
from tests.kernels.conftest import SANITIZED
from tests.quick import first_is_quick
from tests.test_api import classifier, lm, masked, translator  # noqa: F401  fixtures
from tests.threads import PROMPTS, TEXTS, calls_of, differences, same
from tformer.api import MOST_PREPARED
from tformer.decoding.inference import prepare_inference
from tformer.kernels import library
from tformer.kernels.functions import find
from tformer.kernels.tape import RECORDED

FAMILIES = ("lm", "classifier", "translator", "masked")
THREADS = 4


@pytest.fixture(autouse=True)
def sanitized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the libraries of `test_kernels_sanitized.py`, where it runs these tests."""
    if SANITIZED is not None:
        checked = library.open_at(Path(SANITIZED) / "native.so")
        found = lambda **_: None if os.environ.get(library.SWITCH) == "off" else checked  # noqa: E731
        monkeypatch.setattr("tformer.kernels.functions.load", found)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> tformer.Run:
    """A run of its own, without copies that another test prepared."""
    return tformer.load(request.getfixturevalue(request.param).path)


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(library.SWITCH, "on" if request.param == "kernels" else "off")
    library.forget()
    yield
    library.forget()


BF16, INT8, INT4 = {"precision": "bf16"}, {"quantize": "int8"}, {"quantize": "int4"}
QUICK: list[tuple[str, str, dict[str, str]]] = [
    ("lm", "kernels", INT8), ("lm", "no kernels", {}), ("classifier", "kernels", BF16), ("masked", "kernels", INT4),
]  # fmt: skip
"""Each family but the slowest; each kind of weights; with kernels and without."""
ALL = product(FAMILIES, ("kernels", "no kernels"), ({}, BF16, INT8, INT4))


@pytest.mark.usefixtures("kernels")
@first_is_quick(
    ("run", "kernels", "options"),
    [*QUICK, *(each for each in ALL if each not in QUICK)],
    quick=len(QUICK),
    indirect=["run", "kernels"],
    ids=str,
)
def test_answers_of_several_threads_are_those_of_one_to_the_bit(run: tformer.Run, options: dict[str, Any]) -> None:
    if options.get("quantize") and find() is None:
        pytest.skip("no 8-bit products here")
    made, wrong = differences(calls_of(run, **options), threads=THREADS, rounds=3)
    assert made and not wrong


@pytest.mark.slow
@pytest.mark.parametrize("run", ["lm", "translator"], indirect=True)
def test_compiled_steps_of_several_threads_write_what_one_writes(run: tformer.Run) -> None:
    calls = {name: call for name, call in calls_of(run, compile="on").items() if "embed" not in name}
    _, wrong = differences(calls, threads=THREADS, rounds=2)
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("run", ["lm"], indirect=True)
def test_a_thread_that_compiles_changes_no_answer_of_another_run(run: tformer.Run) -> None:
    """What the compiler traces differs from what runs without it; another thread must not take that route."""
    other = tformer.load(run.path)
    calls = {name: call for name, call in calls_of(other).items() if "greedy" in name or "embed" in name}
    expected = {name: call() for name, call in calls.items()}
    compiled, done = [], threading.Event()

    def compile_models() -> None:
        while not (compiled and done.is_set()):
            compiled.append(tformer.load(run.path).generate("the ", max_new_tokens=3, compile="on"))

    compiling = threading.Thread(target=compile_models)
    compiling.start()
    wrong = [name for _ in range(3) for name, call in calls.items() if not same(call(), expected[name])]
    done.set()
    compiling.join()
    assert compiled and not wrong


@pytest.mark.parametrize("run", ["lm"], indirect=True)
def test_threads_with_different_options_have_their_own_copies_and_few_are_kept(run: tformer.Run) -> None:
    calls = {}
    for options in ({}, {"precision": "bf16"}, {"precision": "fp32"}, {"num_samples": 2}, {"num_samples": 3}):
        calls[str(options)] = lambda options=options: run.generate("the ", max_new_tokens=8, seed=1, **options)
    _, wrong = differences(calls, threads=THREADS, rounds=4)
    assert not wrong and len(run._prepared) == MOST_PREPARED


@pytest.mark.parametrize("run", ["lm"], indirect=True)
def test_calls_with_similar_numbers_of_rows_share_a_copy(run: tformer.Run) -> None:
    for number in (2, 3, 4):
        run.generate("the ", max_new_tokens=2, num_samples=number)
    assert len(run._prepared) == 1


@pytest.mark.parametrize("run", ["lm"], indirect=True)
def test_the_steps_of_another_thread_are_not_recorded(run: tformer.Run) -> None:
    """A recording is of its thread: a step that another one makes meanwhile is not repeated in its place."""
    kernels = find()
    if kernels is None:
        pytest.skip("no compiler for kernels here")
    seen = []

    def step() -> torch.Tensor:
        other = threading.Thread(target=lambda: seen.append(RECORDED.tape))
        other.start()
        other.join()
        seen.append(RECORDED.tape)
        return torch.zeros(1, 1, 4)

    kernels.record(torch.zeros(1, 1, 4), step, list)
    assert seen[0] is None and seen[1] is not None and RECORDED.tape is None


@pytest.mark.parametrize("run", ["lm"], indirect=True)
def test_models_of_one_process_may_have_different_kernels(run: tformer.Run) -> None:
    with_kernels, without = run._copy().model, run._copy().model
    for model, kernels in ((with_kernels, find()), (without, None)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tformer.decoding.inference.find", lambda *, may_build=True, found=kernels: found)
            prepare_inference(model, torch.float32, rows=1)
    assert without.kernels is None and with_kernels.kernels is find()


@pytest.mark.parametrize("run", FAMILIES, indirect=True)
def test_results_in_fp32_with_kernels_without_and_at_a_second_call_differ_by_rounding_alone(
    run: tformer.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound that tformer/decoding/README.md states; tokens and labels are the same."""

    def numbers() -> tuple[Any, np.ndarray]:
        fresh = tformer.load(run.path)
        if "classify" in str(list(calls_of(run))):
            found = fresh.classify(TEXTS, precision="fp32")
            return [each.label for each in found], np.array([sorted(each.probabilities.values()) for each in found])
        if run.recipe.model.decoder is None:
            filled = [each for mask in fresh.fill_masks("the [MASK] sat", precision="fp32") for each in mask]
            return [each.id for each in filled], np.log([each.probability for each in filled])
        options = {"logprobs": True} if not run.model.is_encoder_decoder else {}
        answers = fresh.generate(PROMPTS, greedy=True, max_new_tokens=8, precision="fp32", **options)
        ids = [list(each.completions[0].ids) for each in answers]
        return ids, np.concatenate([each.completions[0].logprobs or [] for each in answers])

    found = []
    for switch in ("on", "on", "off"):
        monkeypatch.setenv(library.SWITCH, switch)
        library.forget()
        found.append(numbers())
    library.forget()
    (ids, first), (_, second), (others, without) = found
    assert np.array_equal(first, second) and ids == others
    np.testing.assert_allclose(first, without, atol=1e-5, rtol=0)


FORK = """\
import os, sys
import torch, tformer
torch.set_num_threads(2)
run = tformer.load(sys.argv[1])
expected = run.generate("the ", greedy=True, max_new_tokens=8).text
child = os.fork()
if child == 0:
    os._exit(0 if run.generate("the ", greedy=True, max_new_tokens=8).text == expected else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("run", ["lm"], indirect=True)
@pytest.mark.slow
def test_a_child_of_fork_answers_as_its_parent_did(run: tformer.Run) -> None:
    """The quick twin is `cli/test_cli_devices.py::test_several_processes_write_what_one_writes`."""
    command = [sys.executable, "-c", FORK, str(run.path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(Path(tformer.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "0\n", done.stderr


@pytest.mark.parametrize("run", ["lm"], indirect=True)
def test_a_call_that_is_broken_off_leaves_the_run_usable(run: tformer.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run.generate("the ", greedy=True, max_new_tokens=8)
    from tformer.decoding.completion import Completion

    with monkeypatch.context() as patch:
        patch.setattr(Completion, "take", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run.generate("the ", greedy=True, max_new_tokens=8)
    assert not torch.is_inference_mode_enabled()
    assert run.generate("the ", greedy=True, max_new_tokens=8) == expected
