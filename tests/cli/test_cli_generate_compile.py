"""`tformer generate --compile`: who is compiled, what is said, and that the text stays the same."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tformer.build import build_model
from tformer.cli.generate import generate
from tformer.cli.generate_compile import AUTO_STEPS, compiles, count_lines
from tformer.cli.generate_request import Asked
from tformer.decoding import compiled
from tformer.errors import InputError
from tformer.recipe.model import Model
from tformer.recipe.training import Generation

DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(generate).parameters.items()}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MANY = AUTO_STEPS


def asked(**options: Any) -> Asked:
    return Asked(**{**DEFAULTS, **options})


def loaded(kind: str = "full") -> Any:
    side = {"num_layers": 1, "num_heads": 2, "attention": {"kind": kind}}
    section = Model.model_validate({"d_model": 8, "max_seq_len": 16, "vocab_size": 11, "decoder": side})
    recipe = SimpleNamespace(generation=Generation(max_new_tokens=100))
    return SimpleNamespace(model=build_model(section, device="meta"), recipe=recipe, notes=[])


@pytest.fixture(autouse=True)
def compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "missing_compiler", lambda device: None)


@pytest.mark.parametrize(
    ("options", "device", "expected"),
    [
        ({}, CPU, False),
        ({"max_new_tokens": MANY}, CPU, False),
        ({"compile": "on"}, CPU, True),
        ({"max_new_tokens": MANY}, CUDA, True),
        ({"max_new_tokens": MANY - 1}, CUDA, False),
        ({}, CUDA, False),
        ({"max_new_tokens": MANY, "compile": "off"}, CUDA, False),
    ],
)
def test_auto_compiles_on_a_gpu_when_many_tokens_are_asked_for(
    options: dict[str, Any], device: torch.device, expected: bool
) -> None:
    assert compiles(asked(**options), loaded(), device) == expected


def test_lines_of_a_file_count_as_steps(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("a line\n" * MANY, encoding="utf-8")
    assert count_lines(str(path)) == MANY
    assert count_lines("-") == count_lines(None) == count_lines(str(tmp_path / "none")) == 1
    assert compiles(asked(input_path=str(path), batch_size=32), loaded(), CUDA)  # 128 batches of 100 steps
    assert not compiles(asked(input_path=str(path), batch_size=1024), loaded(), CUDA)


def test_a_kind_that_cannot_be_compiled_is_told_once_and_decoded_as_it_is() -> None:
    one = loaded("sliding_window")
    assert not compiles(asked(compile="on"), one, CPU)
    assert [note for note in one.notes if note.startswith("decoded uncompiled: layer 0 of the decoder")] == one.notes


def test_without_a_compiler_auto_goes_on_and_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "missing_compiler", lambda device: "Triton")
    one = loaded()
    assert not compiles(asked(max_new_tokens=MANY), one, CUDA)
    assert one.notes == ["decoded uncompiled: found no Triton"]
    with pytest.raises(InputError, match="found no Triton"):
        compiles(asked(compile="on"), one, CUDA)


def test_8_bits_and_compiling_exclude_each_other() -> None:
    with pytest.raises(InputError, match="--compile on and --quantize int8 exclude each other"):
        asked(compile="on", quantize="int8").check()
    assert not compiles(asked(max_new_tokens=MANY, quantize="int8"), loaded(), CUDA)
    with pytest.raises(InputError, match="--compile must be auto, on or off, found 'yes'"):
        asked(compile="yes").check()


@pytest.mark.parametrize("how", [["--greedy"], ["--seed", "3", "--num-samples", "2"], ["--beam-size", "2"]], ids=str)
def test_the_text_is_the_same(cli: Any, random_run: Path, how: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("generate", random_run, "--prompt", "abc", "--max-new-tokens", "8", *how)
    expected = cli(*command)
    monkeypatch.setattr(compiled, "compile_decoding", partial(compiled.compile_decoding, backend="eager"))
    found = cli(*command, "--compile", "on")
    assert found.code == 0, found.err
    assert found.out == expected.out
    assert found.err.count("decoding is compiled") == 1 and "compiled" not in expected.err
