"""`tformer doctor`: complete, private, and a cache that is emptied without loss."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tformer.bench.machine import environment_line
from tformer.cli import diagnosis as doctor
from tformer.data.shards.caches import KEPT, KINDS, cache_sizes, clean_caches
from tformer.kernels import library
from tformer.support.device import instruction_set

Cli = Callable[..., Any]

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed check reads a small buffer."""
    measure = partial(doctor.measure_ceilings, buffer_bytes=1 << 20)
    monkeypatch.setattr(doctor, "measure_ceilings", measure)
    monkeypatch.setattr(doctor, "PRODUCT", (8, 8, 8))
    monkeypatch.setattr("tformer.bench.machine.PRODUCT_SECONDS", 0.01)


def test_the_document_names_versions_machine_kernels_caches_extras_and_speed(cli: Cli) -> None:
    done = cli("doctor", "--json")
    found = json.loads(done.out)
    assert done.code == 0 and done.err == ""
    assert torch.__version__.startswith(found["versions"]["torch"]) and found["versions"]["pyyaml"]
    assert found["processor"]["name"] and found["processor"]["pytorch_uses"] == torch.backends.cpu.get_cpu_capability()
    assert 0 < found["memory"]["available_bytes"] <= found["memory"]["total_bytes"]
    assert found["threads"]["used"] == torch.get_num_threads() and found["threads"]["available"] >= 1
    assert set(found["cache"]["kinds"]) == {*KINDS, *KEPT} and found["cache"]["free_bytes"] > 0
    [cpu] = [rates for rates in found["speed"] if rates["device"] == "cpu"]
    assert set(cpu["flops_per_second"]) == {"fp32", "bf16"} and cpu["bytes_per_second"] > 0


def test_it_names_the_instructions_and_the_formats_that_training_and_inference_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = dict(doctor.diagnosis_lines(doctor.diagnosis(with_speed=False)))
    assert instruction_set() in lines["processor"]
    monkeypatch.setattr(
        "tformer.support.device.matmul_flops_per_second", lambda *_, **__: 1e9
    )  # both formats are equal
    for bf16 in (False, True):
        for module in ("tformer.support.device", "tformer.decoding.inference"):
            monkeypatch.setattr(f"{module}.has_bf16_instructions", lambda bf16=bf16: bf16)
        name = "bf16" if bf16 else "fp32"
        lines = dict(doctor.diagnosis_lines(doctor.diagnosis(with_speed=False)))
        assert lines["precision"] == f"training {name}; inference {name} for models trained in bf16"


@pytest.mark.parametrize(
    ("capability", "machine", "bf16", "vnni", "name"),
    [
        ("AVX512", "x86_64", True, True, "AVX512-BF16 with VNNI"),
        ("AVX512", "x86_64", False, False, "AVX512"),
        ("AVX2", "x86_64", True, True, "AVX2"),
        ("DEFAULT", "x86_64", False, False, "DEFAULT"),
        ("DEFAULT", "arm64", False, False, "NEON"),
        ("DEFAULT", "aarch64", False, False, "NEON"),
    ],
)
def test_the_instruction_set_has_its_usual_name(
    capability: str, machine: str, bf16: bool, vnni: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: bf16, raising=False)
    monkeypatch.setattr("torch.cpu._is_vnni_supported", lambda: vnni, raising=False)
    assert instruction_set() == name
    assert environment_line(torch.device("cpu"), dtype="fp32").endswith(f", {name}")


def test_every_extra_of_the_package_is_listed_with_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed, extras = doctor.requirements()
    assert extras.keys() == project["optional-dependencies"].keys() and len(needed) == len(project["dependencies"])
    monkeypatch.setattr(doctor, "installed", lambda package: None if package == "zstandard" else "1")
    found = doctor.diagnosis(with_speed=False)
    assert found["extras"]["zstd"] == {"zstandard": None} and "test" not in found["extras"]
    assert ("[zstd]", "zstandard missing") in list(doctor.diagnosis_lines(found))


@pytest.mark.parametrize(("free", "told"), [(10**6, True), (10**12, False)])
def test_a_full_disk_is_advice(monkeypatch: pytest.MonkeyPatch, free: int, told: bool) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    advice = " ".join(doctor.diagnosis(with_speed=False)["advice"])
    assert ("free on the cache's disk" in advice) == told


def test_a_missing_requirement_and_a_missing_compiler_are_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", lambda package: None if package == "sacrebleu" else "1")
    monkeypatch.setattr(library, "find_compiler", lambda: None)
    monkeypatch.setattr(doctor.sys, "platform", "linux")
    advice = " ".join(doctor.diagnosis(with_speed=False)["advice"])
    assert "sacrebleu: required" in advice and "no C compiler" in advice


def test_it_names_no_home_user_or_host(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "secret-user"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TFORMER_CACHE", str(home / "cache"))
    for words in (["doctor"], ["doctor", "--json"], ["doctor", "--clean"]):
        out = cli(*words, *(["--no-speed"] if "--clean" not in words else [])).out
        assert "~/cache" in out and "secret-user" not in out
        assert os.uname().nodename not in out.replace("localhost", "")


def test_clean_removes_what_training_left_and_nothing_else(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "cache"
    monkeypatch.setenv("TFORMER_CACHE", str(home))
    text = tmp_path / "text.txt"
    text.write_text("a b c d e f g h\n" * 300)
    words = ("--data", text, "--set", "tokenizer.train.vocab_size=280", "--max-steps", 1, "--device", "cpu")
    small = ("--set", "model.d_model=8", "--set", "model.decoder.num_heads=1", "--set", "training.batch_size=2")
    assert cli("train", "--arch", "gpt", *words, *small, "--out", tmp_path / "run").code == 0
    (home / "rows").mkdir()
    (home / "rows" / "0123456789abcdef.jsonl").write_text("{}\n")  # of tformer.train: its run reads it again
    (home / "mine.txt").write_text("mine")
    (home / ("0" * 32)).symlink_to(tmp_path / "run")
    before = cache_sizes(home)
    done = cli("doctor", "--clean", "--json")
    document = json.loads(done.out)
    assert done.code == 0 and document["left"] == []
    assert {kind: size["bytes"] for kind, size in document["removed"].items()} == {
        kind: before[kind].bytes for kind in KINDS
    }
    assert before["rows"].bytes == 3 and (home / "rows" / "0123456789abcdef.jsonl").is_file()
    assert {path.name for path in home.iterdir()} == {"rows", "mine.txt", "0" * 32, ".lock"} and any(
        (tmp_path / "run").iterdir()
    )
    assert "nothing" in cli("doctor", "--clean").out


def test_clean_never_removes_a_users_files_that_have_the_names_of_folders_of_the_cache(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = ["tokenizers/mine.json", "kernels/conv.c", f"{'a' * 32}/thesis.tex", "rows/0123456789abcdef.jsonl", "tokens",
            "c" * 32]  # fmt: skip
    for name in mine:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "tokenizers" / f"{'b' * 32}.json").write_text("{}")
    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path))
    removed = json.loads(cli("doctor", "--clean", "--json").out)["removed"]
    assert {kind: size["entries"] for kind, size in removed.items() if size["entries"]} == {"tokenizers": 1}
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()} == {*mine, ".lock"}


def test_clean_leaves_translations_that_another_process_writes(tmp_path: Path) -> None:
    busy, idle = (tmp_path / f"translations-{digit * 32}.jsonl" for digit in "01")
    busy.write_text("x"), idle.write_text("xy")
    code = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", code, str(busy)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    removed, left = clean_caches(tmp_path)
    holder.communicate(b"\n")
    assert left == [busy.name] and busy.exists() and not idle.exists() and removed["translations"].bytes == 2
    with busy.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_cache_that_cannot_be_written_is_one_line(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".lock").mkdir()
    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path))
    done = cli("doctor", "--clean")
    assert done.code == 3 and done.err.startswith("error: cannot write") and "internal" not in done.err


def test_no_cache_is_no_error(tmp_path: Path) -> None:
    removed, left = clean_caches(tmp_path / "none")
    assert not any(size.entries for size in removed.values()) and left == [] and not (tmp_path / "none").exists()
