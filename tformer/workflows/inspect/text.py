"""Text output of `tformer inspect`: tree with numbers, cost, tensor shapes; for 60 columns or more."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from tformer.nn.taps import LETTERS
from tformer.support.formatting import amount
from tformer.workflows.inspect.report import Node, Report
from tformer.workflows.inspect.trace import Trace
from tformer.workflows.inspect.verify import Verdict

PARAMETERS, FLOPS = "parameters", "FLOPs/token"
LEAST_MEANING = 18  # columns; with fewer, the meaning of a tensor goes below it


def report_lines(report: Report, *, width: int, depth: int | None) -> Iterator[str]:
    """Name, tree, operations, memory and cache."""
    subject = report.subject
    beside = f" and {report.generator_parameters:,} of the generator" if report.generator_parameters else ""
    yield from textwrap.wrap(f"{subject.name}: {report.parameters:,} parameters{beside}", width)
    for note in subject.notes:
        yield from textwrap.wrap(f"note: {note}", width, subsequent_indent="  ")
    yield ""
    for tree in report.trees:
        yield from tree_lines(tree, width=width, depth=depth, tokens=subject.tokens)
    if any("(× " in row for tree in report.trees for row in tree_lines(tree, width=width, depth=depth, tokens=1)):
        yield "beneath (× n): numbers of one of the n"
    for alias, owner in report.tied.items():
        yield from textwrap.wrap(f"tied, counted once: {alias} is {owner}", width, subsequent_indent="  ")
    for side, heads in report.heads.items():
        if len(set(heads)) > 1:
            yield from textwrap.wrap(f"heads of the {side}'s layers: {' '.join(map(str, heads))}", width)
    if report.formats is not None:
        named = ", ".join(report.formats) or "none"
        told = f"formats of export, by the recipe: {named} (all checks: tformer export RUN --list)"
        yield from textwrap.wrap(told, width, subsequent_indent="  ")
    yield ""
    yield from _cost_lines(report)


def tree_lines(tree: Node, *, width: int, depth: int | None, tokens: int) -> Iterator[str]:
    """A line for each module: name, sizes, parameters, operations per token of the forward pass."""
    rows = list(_tree_rows(tree, "", "", 0, depth, tokens))
    exact = max(len(row[2]) for row in rows)
    compact = max(len(row[3]) for row in rows)
    room = max(len(row[0]) for row in rows)
    full = room + max(exact, len(PARAMETERS)) + len(FLOPS) + 4 <= width
    numbers = max(exact if full else compact, len(PARAMETERS))
    left = min(width - numbers - len(FLOPS) - 4, max(len(f"{row[0]}  {row[1]}") for row in rows))
    yield f"{'':<{left}}  {PARAMETERS:>{numbers}}  {FLOPS}"
    for name, detail, parameters, short, flops in rows:
        text = f"{name}  {detail}".rstrip()
        text = text if len(text) <= left else name[:left]
        yield f"{text:<{left}}  {parameters if full else short:>{numbers}}  {flops:>{len(FLOPS)}}".rstrip()


def _tree_rows(
    node: Node, branch: str, rest: str, level: int, depth: int | None, tokens: int
) -> Iterator[tuple[str, str, str, str, str]]:
    """(indented name, sizes, parameters, the same in short, operations)."""
    count = f" (× {node.count})" if node.count > 1 else ""
    detail = node.detail or (node.kind.removesuffix("Positions").lower() if node.kind.endswith("Positions") else "")
    mark = "tied" if node.tied and not node.parameters else ""
    plus = "+ tied" if node.tied and node.parameters else ""
    full = mark or f"{node.parameters:,}"
    short = mark or amount(node.parameters)
    flops = amount(node.flops / tokens) if node.flops else ""
    name = "layers" if node.kind == "ModuleList" and node.name == "blocks" else node.name
    yield f"{branch}{name}{count}", f"{detail} {plus}".strip(), full, short, flops
    if depth is not None and level >= depth:
        return
    for number, child in enumerate(node.children):
        is_last = number == len(node.children) - 1
        yield from _tree_rows(
            child, rest + ("└ " if is_last else "├ "), rest + ("  " if is_last else "│ "), level + 1, depth, tokens
        )


def _cost_lines(report: Report) -> Iterator[str]:
    subject, flops, memory = report.subject, report.flops, report.memory
    lengths = f"{subject.source_length:,}"
    if subject.has_both:
        lengths = f"({lengths} + {subject.target_length:,})"
    many = f"{report.examples_per_step:,} × {lengths}"
    unit = "image" if subject.recipe.model.patches is not None else "example"
    rows = [
        ("FLOPs, a multiplication and an addition being two", ""),
        ("  forward, a token", amount(flops.forward / subject.tokens)),
        (f"  forward, an {unit} of {lengths}", amount(flops.forward)),
        ("  training, a token", amount(flops.training / subject.tokens)),
        (f"  training, a step of {many}", amount(flops.training * report.examples_per_step)),
        ("", ""),
        (f"memory to train {subject.batch_size:,} × {lengths} at a time", ""),
        ("  weights, fp32", amount(memory.weights, "B")),
        ("  gradients, fp32", amount(memory.gradients, "B")),
        (f"  optimizer ({subject.recipe.optimizer.kind})", amount(memory.optimizer, "B")),
        (f"  activations, {_precision(report)}", amount(memory.activations, "B")),
    ]
    rows += [
        (f"  {what}", amount(value, "B"))
        for what, value in (
            (f"weights in {_precision(report)}", memory.copies),
            ("workspace", memory.workspace),
            ("freed, kept for reuse", memory.held),
        )
        if value
    ]
    rows.append((f"  in all, on {'a CPU' if subject.device == 'cpu' else 'a GPU'}", amount(memory.total, "B")))
    cache = report.cache
    if cache is not None:
        rows += [("", ""), (f"cache to decode one sequence, {_precision(report)}", "")]
        rows.append(("  a token", amount(cache.per_token, "B")))
        if cache.constant:
            rows.append(("  whatever the length", amount(cache.constant, "B")))
        if cache.per_source_token:
            rows.append(("  a token of the source", amount(cache.per_source_token, "B")))
        at = cache.at(subject.target_length, subject.source_length)
        rows.append((f"  {lengths} tokens", amount(at, "B")))
    left = max(len(name) for name, value in rows if value)
    for name, value in rows:
        yield f"{name:<{left}}  {value:>9}".rstrip() if value else name


def _precision(report: Report) -> str:
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[str(report.subject.dtype).removeprefix("torch.")]


def trace_lines(trace: Trace, *, width: int) -> Iterator[str]:
    """A line for each tensor: its shape in numbers and in letters, its name and meaning, and tied parameters."""
    steps = [step for section in trace.sections for step in section.steps]
    numbers = max(len(_numbers(step.shape)) for step in steps)
    letters = max(len(_letters(step.symbols)) for step in steps)
    names = max(len(step.name) for step in steps)
    left = 2 + numbers + 2 + letters + 2 + names + 2
    stacked = width - left < LEAST_MEANING
    yield from _legend(trace, width)
    for section in trace.sections:
        yield ""
        title, layers = section.title, section.layers
        if layers:
            more = len(layers) - 1
            numbered = f"{layers[1]}-{layers[-1]}" if more > 1 else ""
            if more == 1 or layers[-1] - layers[0] != more:
                numbered = ", ".join(map(str, layers[1:]))
            title += f", layer {layers[0]}" + (f" (× {more} more with equal shapes: {numbered})" if more else "")
        yield from textwrap.wrap(title, width)
        part = ""
        for step in section.steps:
            if step.part != part:
                part = step.part
                yield f" {part}"
            line = f"  {_numbers(step.shape):<{numbers}}  {_letters(step.symbols):<{letters}}  {step.name}"
            tied = (f"{used.name} is tied to {', '.join(used.tied)}" for used in step.parameters if used.tied)
            meaning = "; ".join([step.meaning, *tied])
            if not stacked:
                first, *others = textwrap.wrap(meaning, width - left)
                yield f"{line:<{left}}{first}"
                yield from (f"{'':<{left}}{other}" for other in others)
            else:
                yield line.rstrip()
                yield from textwrap.wrap(meaning, width, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _legend(trace: Trace, width: int) -> Iterator[str]:
    """The meaning of each letter, with its number if it is the same everywhere."""
    found: dict[str, set[int]] = {}
    for section in trace.sections:
        for step in section.steps:
            for symbol, size in zip(step.symbols, step.shape, strict=True):
                for letter in filter(str.isalpha, symbol):
                    found.setdefault(letter, set()).update([size] if symbol == letter else ())
    for letter, sizes in found.items():
        if not sizes and letter in trace.sizes:
            sizes.add(trace.sizes[letter])
    entries = [
        f"{letter}{f' = {min(found[letter])}' if len(found[letter]) == 1 else ''} {LETTERS[letter]}"
        for letter in LETTERS
        if letter in found
    ]
    # Lines break between entries only.
    lines = textwrap.wrap(", ".join(entry.replace(" ", "\u00a0") for entry in entries), width)
    yield from (line.replace("\u00a0", " ") for line in lines)


def _numbers(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "1 number"


def _letters(symbols: Sequence[str]) -> str:
    """The symbols with dots between factors: `CPP` is C·P·P."""
    return " ".join("+".join("·".join(term) for term in symbol.split("+")) for symbol in symbols)


def verdict_lines(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """One line for each problem, or for each folder that has none."""
    for verdict in verdicts:
        if not verdict.problems:
            yield f"{verdict.path}: ok ({verdict.tensors:,} tensors, {amount(verdict.bytes, 'B')})"
        yield from (f"{verdict.path}: {problem}" for problem in verdict.problems)
