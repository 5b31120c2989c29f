"""House rules that a machine can check: imports point down without cycles, file sizes, spelling, no unpickling."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tformer"

# Packages from top to bottom. A package may import those of later rows only, and itself.
LAYERS = (
    ("cli",),
    ("serve",),
    ("api",),
    ("workflows", "bench"),
    ("training",),
    ("tasks",),
    ("viz",),
    ("inside",),
    ("evaluation",),
    ("decoding",),
    ("loading",),
    ("interop", "cost"),
    ("checkpoint", "build"),
    ("recipe",),
    ("objectives",),
    ("data",),
    ("model", "optim", "metrics", "tokenizer"),
    ("nn",),
    ("guide", "kernels", "workers"),
    ("support",),
)
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}
CORE = {"nn", "model"}  # these see torch, the C kernels and each other only: no file, no tokenizer, no optimizer
CORE_MAY_IMPORT = {"tformer", "torch", "__future__", "collections", "dataclasses", "typing", "math", "functools"}
CORE_MAY_IMPORT |= {"abc", "difflib", "itertools", "contextlib", "copy", "enum", "logging", "types"}
RICH_ALLOWED = ("cli/", "training/display.py")
UNPICKLING = re.compile(r"\b(torch\.load|import pickle|from pickle|allow_pickle=True|yaml\.(unsafe_|full_)?load\()")
MAX_LINES = 700
# British spelling with -ize, as Oxford's dictionaries have it: colour and behaviour, tokenize and normalization.
OTHER_SPELLINGS = re.compile(
    r"(?i)(token|normal|initial|summar|random|penal|synchron|factor|regular|recogn|quant|orthogonal|vector|minim|maxim"
    r"|memor|standard|stabil|final|parallel|serial|optim|special|general|organ|local|real|visual)is(e[ds]?|ers?|ing|ation)"
    r"(?![a-z])"
)


def package_of(module: str) -> str:
    """`nn` of `tformer.nn.norm`; empty for `tformer` itself."""
    return [*module.split("."), ""][1]


def imports_of(tree: ast.AST, modules: set[str]) -> set[str]:
    """Modules that a file imports anywhere; `from tformer.data import plan` is `tformer.data.plan` if that exists."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in modules else node.module or "")
    return found


PATHS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TEXTS = {module: path.read_text() for module, path in PATHS.items()}
TREES = {module: ast.parse(text) for module, text in TEXTS.items()}
IMPORTS = {module: imports_of(tree, set(PATHS)) for module, tree in TREES.items()}
OWN = {module: {name for name in found if name in PATHS} - {module} for module, found in IMPORTS.items()}


def test_imports_point_down() -> None:
    for module, found in OWN.items():
        package = package_of(module)
        if package in ("", "__main__"):
            continue
        assert package in LEVEL, f"{module}: {package} has no row in LAYERS"
        for name in found:
            other = package_of(name)
            allowed = other == package or LEVEL.get(other, -1) > LEVEL[package]
            assert allowed, f"{module} imports {name}, which is not below it"


def test_imports_have_no_cycle() -> None:
    graph = {module: found - {"tformer"} for module, found in OWN.items() if module != "tformer"}  # it loads on demand
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_the_core_imports_torch_the_kernels_and_itself_only() -> None:
    for module, found in IMPORTS.items():
        if package_of(module) in CORE:
            for name in found:
                assert name.split(".")[0] in CORE_MAY_IMPORT, f"{module} imports {name}"
                is_ours = not name.startswith("tformer.") or package_of(name) in CORE | {"kernels"}
                assert is_ours, f"{module} imports {name}"


def test_terminal_and_plotting_libraries_stay_in_their_packages() -> None:
    for module, found in IMPORTS.items():
        roots = {name.split(".")[0] for name in found}
        inside = PATHS[module].relative_to(PACKAGE).as_posix()
        assert "rich" not in roots or inside.startswith(RICH_ALLOWED), module
        assert "typer" not in roots or inside.startswith("cli/"), module
        assert "matplotlib" not in roots or inside.startswith("viz/"), module


def test_files_have_a_docstring_and_one_idea() -> None:
    for module, text in TEXTS.items():
        assert len(text.splitlines()) <= MAX_LINES, f"{module} is longer than {MAX_LINES} lines"
        assert ast.get_docstring(TREES[module]) or not text.strip(), f"{module} has no docstring"


def test_words_are_spelled_in_one_way() -> None:
    texts = [path for end in ("py", "md", "yaml", "c", "h", "js") for path in ROOT.glob(f"tformer/**/*.{end}")]
    texts += [*ROOT.glob("tests/**/*.py"), *ROOT.glob("tests/*.md"), *ROOT.glob("configs/**/*.*"), *ROOT.glob("*.md")]
    found = [(path.name, match[0]) for path in texts for match in OTHER_SPELLINGS.finditer(path.read_text("utf-8"))]
    assert not found


def test_nothing_is_ever_unpickled() -> None:
    for module, text in TEXTS.items():
        assert not UNPICKLING.search(text), module


def test_top_level_holds_what_was_agreed() -> None:
    agreed = {"tformer", "tests", "configs", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"}
    agreed |= {"CITATION.cff", "findings"}
    ignored = {"runs", "build", "dist"}
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert {name for name in found - ignored if not name.endswith(".egg-info")} <= agreed
