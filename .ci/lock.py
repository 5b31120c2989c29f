"""Writes the lock of the test environment: version and SHA-256 of every package that continuous integration installs.

    python .ci/lock.py            (needs a package index and pip 23.1 or newer; takes a few minutes)

`requirements.txt` holds what the tests need but torch; `requirements-cpu.txt` the build of torch for CPUs;
`requirements-cuda.txt` its default build, with the CUDA libraries that it needs. The hashes are those that the index
gives for wheels of Linux on x86-64 (glibc 2.28 or newer) and each Python of `PYTHONS`, and for the CPU build those that
PyTorch publishes (`TORCH_CPU`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = (
    "linux",
    *(f"manylinux_2_{minor}" for minor in range(28, 4, -1)),
    "manylinux2014",
    "manylinux2010",
    "manylinux1",
)
TOOLS = [
    "editables",
    "pip-audit",
]  # what an editable install needs beside hatchling, and the check for known advisories
CUDA = ("nvidia-", "cuda-", "triton", "torch")
TORCH_CPU = {
    "2.13.0": {
        "3.11": "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
        "3.12": "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
        "3.13": "3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6",
        "3.14": "d20fa53ee744502fa4c69818a720b05ca0d37abd055d4f6e66cae155114bc691",
    },
}
# pip takes the tags of wheels from --python-version, but evaluates markers for the Python that runs it.
RESOLVE = """
import sys
from pip._internal.cli.main import main
from pip._vendor.packaging import markers
version, own = sys.argv[1], markers.default_environment
markers.default_environment = lambda: {**own(), "python_version": version, "python_full_version": version + ".0"}
sys.exit(main(sys.argv[2:]))
"""


def requirements() -> list[str]:
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
    build = project["build-system"]["requires"]
    return [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["test"], *build, *TOOLS]


def resolve(version: str) -> list[tuple[str, str, str]]:
    """(name, version, sha256) of every package that pip would install for a version of Python."""
    tags = [word for platform in PLATFORMS for word in ("--platform", f"{platform}_x86_64")]
    own = {name: value for name, value in os.environ.items() if name not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        words = ["install", "--dry-run", "--ignore-installed", "--quiet", "--no-input", "--only-binary=:all:"]
        words += ["--report", str(report), "--target", folder, "--python-version", version, *tags, *requirements()]
        environment = {**own, "PIP_CONFIG_FILE": os.devnull}
        subprocess.run([sys.executable, "-c", RESOLVE, version, *words], env=environment, check=True)
        found = json.loads(report.read_text())["install"]
    return [
        (
            package["metadata"]["name"].lower().replace("_", "-").replace(".", "-"),
            package["metadata"]["version"],
            package["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for package in found
    ]


def lines(locked: dict[tuple[str, str], dict[str, str]]) -> str:
    """The text of a requirements file. locked: (name, version) → hash by version of Python."""
    text = "# Written by .ci/lock.py: do not edit.\n"
    for (name, version), hashes in sorted(locked.items()):
        marker = " or ".join(f'python_version == "{python}"' for python in hashes)
        text += f"{name}=={version}" + (f" ; {marker}" if len(hashes) < len(PYTHONS) else "")
        text += "".join(f" \\\n    --hash=sha256:{each}" for each in sorted(set(hashes.values()))) + "\n"
    return text


def main() -> None:
    found: dict[tuple[str, str], dict[str, str]] = {}
    for python in PYTHONS:
        for name, version, sha256 in resolve(python):
            found.setdefault((name, version), {})[python] = sha256
    cuda = {package: hashes for package, hashes in found.items() if package[0].startswith(CUDA)}
    cpu = {("torch", f"{version}+cpu"): TORCH_CPU[version] for name, version in cuda if name == "torch"}
    others = {package: hashes for package, hashes in found.items() if package not in cuda}
    for name, locked in (("requirements", others), ("requirements-cpu", cpu), ("requirements-cuda", cuda)):
        (HERE / f"{name}.txt").write_text(lines(locked))


if __name__ == "__main__":
    main()
