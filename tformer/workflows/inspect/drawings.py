"""A layout as text: for Mermaid (mermaid.js.org), for Graphviz's dot, and as an indented tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tformer.workflows.inspect.layout import Group, Layout, Node

MERMAID_FORMS = {"data": ("([", "])"), "module": ("[", "]"), "sum": ("((", "))")}
MERMAID_ARROWS = {"flow": "-->", "residual": "-.->", "cross": "==>", "tied": "-.-"}
DOT_SHAPES = {"data": "ellipse", "module": "box", "sum": "circle"}
DOT_STYLES = {"flow": "solid", "residual": "dashed", "cross": "bold", "tied": "dotted"}


def to_mermaid(layout: Layout) -> str:
    """A flowchart, from bottom to top as papers draw it."""
    lines = ["flowchart BT", *_mermaid_group(layout.root, "  ")]
    for edge in layout.edges:
        label = f'|"{_mermaid_text(edge.label)}"|' if edge.label else ""
        lines.append(f"  {edge.start} {MERMAID_ARROWS[edge.kind]}{label} {edge.end}")
    return "\n".join(lines) + "\n"


def _mermaid_group(group: Group, indent: str) -> Iterator[str]:
    yield f'{indent}subgraph {group.id}["{_mermaid_text(group.title)}"]'
    yield f"{indent}  direction BT"
    for member in group.members:
        if isinstance(member, Group):
            yield from _mermaid_group(member, indent + "  ")
        else:
            left, right = MERMAID_FORMS[member.kind]
            text = "<br/>".join(map(_mermaid_text, member.lines))
            yield f'{indent}  {member.id}{left}"{text}"{right}'
    yield f"{indent}end"


def _mermaid_text(text: str) -> str:
    """Text between double quotes: Mermaid writes what is special as #entities;."""
    for plain, escaped in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;")):
        text = text.replace(plain, escaped)
    return text


def to_dot(layout: Layout) -> str:
    """A directed graph with a cluster for each frame, from bottom to top."""
    fonts = [f'  {what} [fontname="sans-serif"];' for what in ("graph", "node", "edge")]
    lines = ["digraph model {", "  rankdir=BT;", "  labeljust=l;", *fonts]
    lines += _dot_group(layout.root, "  ")
    for edge in layout.edges:
        extra = ", dir=none, constraint=false" if edge.kind == "tied" else ""
        lines.append(
            f"  {_dot_text(edge.start)} -> {_dot_text(edge.end)} "
            f"[label={_dot_text(edge.label)}, style={DOT_STYLES[edge.kind]}{extra}];"
        )
    return "\n".join([*lines, "}"]) + "\n"


def _dot_group(group: Group, indent: str) -> Iterator[str]:
    yield f"{indent}subgraph {_dot_text('cluster_' + group.id)} {{"
    yield f"{indent}  label={_dot_text(group.title)};"
    for member in group.members:
        if isinstance(member, Group):
            yield from _dot_group(member, indent + "  ")
        else:
            text = _dot_text("\n".join(member.lines))
            yield f"{indent}  {_dot_text(member.id)} [label={text}, shape={DOT_SHAPES[member.kind]}];"
    yield f"{indent}}}"


def _dot_text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def to_tree(layout: Layout) -> str:
    """Frames and nodes indented, in the order of the flow; what else a node reads stands behind it."""
    reads: dict[str, list[str]] = {}
    for edge in layout.edges:
        if edge.kind in ("cross", "tied"):
            start = edge.start.partition("_")[0]
            what = f"{edge.label} of the {start}'s output" if edge.kind == "cross" else f"{start}'s table"
            reads.setdefault(edge.end, []).append(what)
    return "\n".join(_tree_group(layout.root, "", reads)) + "\n"


def _tree_group(group: Group, indent: str, reads: dict[str, list[str]]) -> Iterator[str]:
    yield f"{indent}{group.title}"
    members = [member for member in group.members if not (isinstance(member, Node) and member.kind == "sum")]
    for number, member in enumerate(members):
        last = number == len(members) - 1
        branch, rest = ("└─ ", "   ") if last else ("├─ ", "│  ")
        if isinstance(member, Group):
            first, *others = _tree_group(member, "", reads)
            yield f"{indent}{branch}{first}"
            yield from (f"{indent}{rest}{line}" for line in others)
        else:
            extra = [f"({what})" for what in reads.get(member.id, [])]
            yield f"{indent}{branch}{', '.join(member.lines)} {' '.join(extra)}".rstrip()


DRAWINGS: dict[str, Callable[[Layout], str]] = {"mermaid": to_mermaid, "dot": to_dot, "tree": to_tree}
