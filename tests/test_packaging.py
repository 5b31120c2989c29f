"""Packaging: dependencies and extras, licence, contents of the wheel, the README's commands."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tformer.guide import read_topic
from tformer.support import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
CODE = re.compile(r"^```bash\n(.*?)^```", re.M | re.S)
NAME = re.compile(r"^[A-Za-z0-9_.-]+")


def names(requirements: list[str]) -> set[str]:
    return {NAME.match(requirement)[0].lower() for requirement in requirements}  # type: ignore[index]


def test_dependencies_are_those_agreed_and_bounded() -> None:
    assert names(PROJECT["dependencies"]) == {
        "torch", "numpy", "typer", "rich", "tokenizers", "safetensors", "pyyaml", "pydantic", "matplotlib",
        "sacrebleu", "pillow", "sentencepiece", "jinja2",
    }  # fmt: skip
    assert "torch>=2.11,<2.14" in PROJECT["dependencies"]
    for requirement in PROJECT["dependencies"]:
        assert ">=" in requirement and ",<" in requirement, requirement
    assert PROJECT["requires-python"].startswith(">=3.11")


def test_extras_are_those_agreed() -> None:
    extras = {name: names(requirements) for name, requirements in PROJECT["optional-dependencies"].items()}
    assert extras["hub"] == {"huggingface_hub"} and extras["parquet"] == {"pyarrow"} and extras["zstd"] == {"zstandard"}
    assert extras["excel"] == {"python-calamine"} <= extras["test"]
    assert extras["tensorboard"] == {"tensorboard"} and "transformers" in extras["test"]
    assert extras["remote"] == {"fsspec", "huggingface_hub"}
    assert extras["gguf"] == {"gguf"} <= extras["test"]
    assert extras["onnx"] == {"onnx", "onnxscript", "onnxruntime"} <= extras["test"]
    assert extras["lm-eval"] == {"lm-eval"}
    assert extras["serve"] == {"starlette", "uvicorn"} <= extras["test"]


def test_every_extra_has_a_row_in_the_guide() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|", read_topic("first-steps"), re.M)
    assert sorted(rows) == sorted(PROJECT["optional-dependencies"])


def test_licence_and_changelog() -> None:
    assert PROJECT["license"] == "MIT" and "MIT License" in (ROOT / "LICENSE").read_text()
    assert "## " in (ROOT / "CHANGELOG.md").read_text()


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__ and citation["title"] == PROJECT["name"]
    assert citation["license"] == PROJECT["license"]


def assert_whole(inside: set[str]) -> None:
    """A wheel of these files has all that commands read."""
    for preset in (ROOT / "configs").rglob("*.yaml"):
        assert f"tformer/configs/{preset.relative_to(ROOT / 'configs').as_posix()}" in inside
    for asset in (ROOT / "tformer" / "viz" / "assets").iterdir():
        assert f"tformer/viz/assets/{asset.name}" in inside
    for source in (ROOT / "tformer" / "kernels").glob("*.[ch]"):
        assert f"tformer/kernels/{source.name}" in inside
    for page in (ROOT / "tformer" / "guide").rglob("*.*"):
        assert page.suffix == ".pyc" or page.relative_to(ROOT).as_posix() in inside
    assert "tformer/py.typed" in inside


def test_the_files_of_the_wheel_are_presets_assets_of_pages_and_sources_of_kernels() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    inside = {Path(file.distribution_path).as_posix() for file in wheel.recurse_included_files()}
    for folder, place in wheel.config.get_force_include().items():
        inside |= {f"{place}/{path.relative_to(folder).as_posix()}" for path in Path(folder).rglob("*.*")}
    assert_whole(inside)


@pytest.mark.slow
def test_a_wheel_that_is_installed_elsewhere_finds_its_presets_and_assets(tmp_path: Path) -> None:
    """The quick twin is `test_the_files_of_the_wheel_are_presets_assets_of_pages_and_sources_of_kernels`."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert_whole(inside)
    # An installed copy, far from any checkout, finds them.
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    shown = subprocess.run(
        [sys.executable, "-c", "from tformer.recipe import list_presets; print(list_presets())"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed), "PATH": ""},
        check=True,
        capture_output=True,
        text=True,
    )
    assert "char-cpu" in shown.stdout and "llama" in shown.stdout
    page = "from tformer.viz.page import *; print(render_page(title='', subtitle='', body='', scripts=(), data={}))"
    paged = subprocess.run(
        [sys.executable, "-c", page],
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed), "PATH": "", "PYTHONIOENCODING": "utf-8"},
        check=True,
        capture_output=True,
    )
    assert paged.stdout.startswith(b"<!doctype html>") and b"tformer.heatmap=" in paged.stdout


def test_the_readme_runs_the_main_job_and_the_tests_with_one_line_each() -> None:
    """Both lines install the build of torch for CPUs first where no NVIDIA GPU is, and go on where it cannot be had."""
    job, tests = [block.removesuffix("\n") for block in CODE.findall(README) if block.startswith("python3 -m venv")]
    assert CODE.findall(README)[0] == f"{job}\n" and "\n" not in job + tests
    made, activated, torch, *after = job.split(" && ")
    assert tests.split(" && ") == [made, activated, torch, "pip install -e '.[test]'", "pytest -n auto"]
    assert after[0] == "pip install ." and [words.split()[:2] for words in after[1:]] == [
        ["tformer", "train"],
        ["tformer", "generate"],
    ]
    assert torch.startswith("(command -v nvidia-smi || pip install ") and torch.endswith(" || true)")
    assert tests == subprocess.run(
        ["grep", "-m", "1", "-E", "^python3 .*pytest", "README.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.rstrip("\n")


CI = ROOT / ".ci"
LOCKED = re.compile(r"^(\S+==\S+(?: ; [^\\\n]+)?)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.M)
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def locked(name: str, python: str) -> dict[str, str]:
    """Version by package that a lock file has for a version of Python."""
    found = [Requirement(match[1]) for match in LOCKED.finditer((CI / name).read_text())]
    here = [each for each in found if each.marker is None or each.marker.evaluate({"python_version": python})]
    versions = {each.name.lower().replace("_", "-"): str(each.specifier).removeprefix("==") for each in here}
    assert len(versions) == len(here)  # one version of each
    return versions


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_has_a_version_and_a_hash_of_everything_that_the_tests_need(python: str) -> None:
    needed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"], "editables", "pip-audit"]
    needed += tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    cpu, cuda = locked("requirements-cpu.txt", python), locked("requirements-cuda.txt", python)
    assert cpu == {"torch": cuda["torch"] + "+cpu"}
    assert {name.split("-")[0] for name in cuda} == {"cuda", "nvidia", "torch", "triton"}
    versions = locked("requirements.txt", python) | cpu
    for requirement in map(Requirement, needed):
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            assert requirement.specifier.contains(versions[requirement.name.lower().replace("_", "-")]), requirement


def test_every_line_of_the_lock_has_a_hash_and_no_place_of_download() -> None:
    for path in CI.glob("*.txt"):
        text = path.read_text()
        assert "://" not in text and len(LOCKED.findall(text)) == text.count("==") - text.count("python_version ==")
    for name in ("cpu", "cuda"):
        torch = re.search(r"^torch==.*((?:\n    --hash=.*)+)", (CI / f"requirements-{name}.txt").read_text(), re.M)
        assert torch is not None and torch[1].count("sha256") == len(PYTHONS)
    installs = [line for line in (CI / "run").read_text().splitlines() if "pip install" in line]
    assert len(installs) == 1 and "--require-hashes" in installs[0] and "--no-deps" in installs[0]


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        ("", 0, "skipped: no network"),
        ({"dependencies": [{"name": "a", "skip_reason": "not found"}]}, 0, "skipped: the database has none of the 1"),
        ({"dependencies": [{"name": "a", "version": "1", "vulns": []}]}, 0, "0 known vulnerabilities in 1 packages"),
        ({"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]}]}, 1,
         "a 1: X-1, fixed in 2"),
    ],
)  # fmt: skip
def test_only_a_known_vulnerability_fails_the_audit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: object, code: int, said: str
) -> None:
    audit = runpy.run_path(str(CI / "audit.py"))["main"]
    done = subprocess.CompletedProcess([], code, stdout=found if isinstance(found, str) else json.dumps(found))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert audit() == code and said in capsys.readouterr().out
