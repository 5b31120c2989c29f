"""Mutants: small wrong changes of the source, and the quick test that notices each.

    pip install coverage
    python -m tests.mutants sample --number 300 --out before.json    draws mutants over the rooms and tries each
    python -m tests.mutants again before.json --out after.json       tries the same ones on another state of the code

A mutant is a changed expression of a line that quick tests of its room run. The first of these tests that fails kills
it; the shortest ones are tried first. A mutant is found again by its function and the text of its line; if the line is
gone, a new one of the same room takes its place. At the end the killed and tried mutants of each room are printed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("nn", "objectives", "optim", "data", "tokenizer", "recipe", "checkpoint", "decoding", "metrics", "inside")
MOST_TESTS = 12
"""A mutant survives when it passes this number of tests that run its line."""

SECONDS = 120
"""CPU time for the tests of one mutant; one that takes longer is killed: loops that never end count as noticed."""

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Mutant:
    """A changed expression. `line` is the text of its first line; `number` counts equal changes of one function."""

    room: str
    file: str
    function: str
    line: str
    change: str
    number: int = 0
    tests: tuple[str, ...] = ()
    killed_by: str | None = None


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Wrong variants of an expression."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        other = copy.deepcopy(node)
        other.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[assignment]
        yield other
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
        other = copy.deepcopy(node)
        other.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
        yield other
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)


def mutants_of(path: Path, room: str) -> Iterator[tuple[Mutant, int, str]]:
    """(mutant, first line, source with it) of every expression inside a function of a file."""
    source = path.read_text(encoding="utf-8")
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines, seen = source.splitlines(), Counter[tuple[str, ...]]()
    for name, function in functions(ast.parse(source)):
        for node in ast.walk(function):
            if not isinstance(node, ast.expr) or node.end_lineno is None or node.end_col_offset is None:
                continue
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            old = source.encode()[begin:end].decode()
            for changed in changes(node):
                new = ast.unparse(ast.fix_missing_locations(changed))
                line = lines[node.lineno - 1].strip()
                key = (name, line, f"{old} -> {new}")
                file = path.relative_to(ROOT).as_posix()
                mutant = Mutant(room, file, *key, number=seen[key])
                seen[key] += 1
                text = source.encode()[:begin].decode() + f"({new})" + source.encode()[end:].decode()
                yield mutant, node.lineno, text


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """(dotted name, node) of every function that is not inside another one."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def covering(room: str) -> dict[str, dict[int, list[str]]]:
    """{file: {line: quick tests of the room that run it, the shortest first}}."""
    from coverage import CoverageData

    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "coveragerc")
        settings.write_text(f"[run]\ndynamic_context = test_function\nsource = tformer/{room}\ncore = ctrace\n")
        words = ["-m", "coverage", "run", f"--rcfile={settings}", f"--data-file={folder}/data"]
        words += ["-m", "pytest", f"tests/{room}", "-n", "0", "--durations=0", "--durations-min=0", "-q"]
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
        took = Counter[str]()
        for seconds, file, test in re.findall(r"^([\d.]+)s \w+ +(\S+?)::([\w:]+)", done.stdout, re.M):
            took[f"{file}::{test}"] += float(seconds)  # type: ignore[assignment]
        data = CoverageData(f"{folder}/data")
        data.read()
        found: dict[str, dict[int, list[str]]] = {}
        for path in data.measured_files():
            of_line = found.setdefault(Path(path).relative_to(ROOT).as_posix(), {})
            for number, contexts in data.contexts_by_lineno(path).items():
                tests = {test_of(context) for context in contexts} & took.keys()
                of_line[number] = sorted(tests, key=lambda test: took[test])
    return found


def test_of(context: str) -> str:
    """The id of a test function by the name that coverage gives it: tests.nn.test_nn_norm.test_mean."""
    module, _, function = context.rpartition(".")
    return f"{module.replace('.', '/')}.py::{function}"


def killer(mutant: Mutant, source: str) -> str | None:
    """The test that fails on a copy of the tree with the changed source; None: all pass."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "runs")
        shutil.copytree(ROOT, tree, ignore=ignored, copy_function=os.link)
        Path(tree, mutant.file).unlink()
        Path(tree, mutant.file).write_text(source, encoding="utf-8")
        words = ["-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests]
        try:
            done = subprocess.run(
                ["prlimit", f"--cpu={SECONDS}", sys.executable, *words], cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True,
                timeout=20 * SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:  # a wait that never ends
            return mutant.tests[0]
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
        return None if done.returncode == 0 else failed[1] if failed else mutant.tests[0]


def drawn(room: str, number: int, draw: random.Random, wanted: list[Mutant]) -> Iterator[tuple[Mutant, str]]:
    """Mutants of a room with their sources: the wanted ones that are still there, then new ones up to the number."""
    tests = covering(room)
    all_: list[tuple[Mutant, str]] = []
    for path in sorted((ROOT / "tformer" / room).rglob("*.py")):
        of_line = tests.get(path.relative_to(ROOT).as_posix(), {})
        for mutant, line, source in mutants_of(path, room):
            if of_line.get(line):
                all_.append((replace(mutant, tests=tuple(of_line[line][:MOST_TESTS])), source))
    draw.shuffle(all_)
    known = {(each.function, each.line, each.change, each.number) for each in wanted}
    all_.sort(key=lambda pair: (pair[0].function, pair[0].line, pair[0].change, pair[0].number) not in known)
    yield from all_[:number]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("sample", "again"))
    parser.add_argument("before", nargs="?", help="the mutants to try again")
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--rooms", nargs="*", default=ROOMS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args()
    before = [Mutant(**each) for each in json.loads(Path(words.before).read_text())] if words.work == "again" else []
    tried: list[Mutant] = []
    rooms = [each.room for each in before]
    for room in words.rooms if not before else dict.fromkeys(rooms):
        number = rooms.count(room) or words.number // len(words.rooms)
        wanted = [each for each in before if each.room == room]
        for mutant, source in drawn(room, number, random.Random(f"{words.seed} {room}"), wanted):
            tried.append(replace(mutant, killed_by=killer(mutant, source)))
            words.out.write_text(json.dumps([asdict(each) for each in tried], indent=1))
        report(tried, room)
    report(tried, None)


def report(tried: list[Mutant], room: str | None) -> None:
    here = [each for each in tried if room in (None, each.room)]
    killed = sum(each.killed_by is not None for each in here)
    print(f"{room or 'all rooms'}: {killed} of {len(here)} killed", flush=True)


if __name__ == "__main__":
    main()
