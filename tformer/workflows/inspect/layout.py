"""The architecture as a graph, drawn as a Mermaid flowchart.

Consecutive layers with equal recipe sections are drawn once, with their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

from tformer.build import Sizes, layer_sizes, resolve_sizes
from tformer.nn.attention import cross_attention_options
from tformer.recipe.model import Model, layer_sections
from tformer.recipe.model import Stack as StackSection

Kind = Literal["data", "module", "sum"]
EdgeKind = Literal["flow", "residual", "cross", "tied"]


@dataclass(frozen=True)
class Node:
    """A node with lines of text: data (inputs), a module, or the sum at the end of a residual connection."""

    id: str
    lines: tuple[str, ...]
    kind: Kind = "module"


@dataclass(frozen=True)
class Edge:
    start: str
    end: str
    label: str = ""
    kind: EdgeKind = "flow"


@dataclass
class Group:
    """A frame around nodes and frames, in the order of the data flow."""

    id: str
    title: str
    members: list[Node | Group] = field(default_factory=list)

    def nodes(self) -> Iterator[Node]:
        for member in self.members:
            if isinstance(member, Group):
                yield from member.nodes()
            else:
                yield member


@dataclass(frozen=True)
class Layout:
    root: Group
    edges: tuple[Edge, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "nodes": [{"id": node.id, "text": list(node.lines), "kind": node.kind} for node in self.root.nodes()],
            "edges": [{"from": e.start, "to": e.end, "label": e.label, "kind": e.kind} for e in self.edges],
        }


def lay_out(model: Model, *, title: str, generator: Model | None = None) -> Layout:
    """The graph of a `model` section with known vocabulary sizes, after its `generator` (ELECTRA)."""
    if generator is None:
        drawing = _Drawing(model, title)
        return Layout(drawing.root, tuple(drawing.edges))
    first, second = (
        _prefixed(lay_out(section, title=name), name)
        for section, name in ((generator, "generator"), (model, "discriminator"))
    )
    between = [Edge(list(first.root.nodes())[-1].id, next(second.root.nodes()).id, "fills the masks")]
    if _table(generator) == _table(model):
        between.append(Edge("discriminator_encoder_embedding", "generator_encoder_embedding", "one table", "tied"))
    return Layout(Group("model", title, [first.root, second.root]), (*first.edges, *between, *second.edges))


def _table(model: Model) -> tuple[int | None, int]:
    """Rows and width of an encoder's embedding table; equal tables are shared."""
    return model.vocab_size, model.embedding.size or resolve_sizes(model, "encoder").d_model


def _prefixed(layout: Layout, prefix: str) -> Layout:
    """The layout with a prefix before all ids."""

    def renamed(member: Node | Group) -> Node | Group:
        if isinstance(member, Group):
            return Group(f"{prefix}_{member.id}", member.title, [renamed(inner) for inner in member.members])
        return replace(member, id=f"{prefix}_{member.id}")

    edges = (replace(e, start=f"{prefix}_{e.start}", end=f"{prefix}_{e.end}") for e in layout.edges)
    root = renamed(layout.root)
    assert isinstance(root, Group)
    return Layout(root, tuple(edges))


class _Drawing:
    def __init__(self, model: Model, title: str) -> None:
        self.model = model
        self.root, self.edges = Group("model", title), []  # type: tuple[Group, list[Edge]]
        both = model.encoder is not None and model.decoder is not None
        memory = None
        embeddings = []
        if model.encoder is not None:
            memory = self._side("encoder", model.encoder, memory=None)
            embeddings.append("encoder_embedding")
        last = memory
        if model.decoder is not None:
            last = self._side("decoder", model.decoder, memory=memory if both else None)
            embeddings.append("decoder_embedding")
        if both and model.tie.source_target and model.patches is None and model.target_vocab_size is None:
            self._edge("encoder_embedding", "decoder_embedding", "one table", "tied")
        assert last is not None
        self._heads(last, embeddings[-1], is_text=model.patches is None or model.decoder is not None)

    def _add(self, group: Group, id_: str, *lines: str, kind: Kind = "module") -> str:
        group.members.append(Node(id_, lines, kind))
        return id_

    def _edge(self, start: str, end: str, label: str = "", kind: EdgeKind = "flow") -> None:
        self.edges.append(Edge(start, end, label, kind))

    def _side(self, side: str, section: StackSection, *, memory: str | None) -> str:
        """Draw one stack from its input to its last node; returns the last node."""
        sizes = resolve_sizes(self.model, side)
        group = Group(side, side)
        self.root.members.append(group)
        at = self._input(group, side, section, sizes)
        layers = layer_sections(section, path=f"model.{side}")
        number = 0
        for layer, alike in groupby(zip(layers, layer_sizes(self.model, side), strict=True), key=lambda pair: pair):
            count = len(list(alike))
            at = self._layer(group, side, layer, number, count, at, memory)
            number += count
        if section.final_norm:
            end = self._add(group, f"{side}_norm", section.norm.kind, "final")
            self._edge(at, end)
            at = end
        return at

    def _input(self, group: Group, side: str, section: StackSection, sizes: Sizes) -> str:
        model, first = self.model, side == "encoder" or self.model.encoder is None
        if model.patches is not None and first:
            p = model.patches
            text = (f"{p.channels} × {p.image_size} × {p.image_size}",)
            given = self._add(group, f"{side}_input", "image", *text, kind="data")
            embedding = self._add(group, f"{side}_embedding", "patch embedding",
                                  f"{p.size} × {p.size} → {sizes.d_model}")  # fmt: skip
        else:
            rows = model.vocab_size if first or model.target_vocab_size is None else model.target_vocab_size
            name = {"encoder": "source tokens", "decoder": "target tokens"}[side]
            both = model.encoder is not None and model.decoder is not None
            given = self._add(group, f"{side}_input", name if both else "tokens", kind="data")
            width = model.embedding.size or sizes.d_model
            wider = () if width == sizes.d_model else (f"{width} → {sizes.d_model}",)
            embedding = self._add(group, f"{side}_embedding", "token embedding", f"{rows:,} × {width}", *wider)
        self._edge(given, embedding)
        kind = section.positions.kind
        if section.positions.module.has_embed:
            positions = self._add(group, f"{side}_positions", "positions", kind, kind="data")
            self._edge(positions, embedding, "added")
        return embedding

    def _layer(
        self,
        group: Group,
        side: str,
        layer: tuple[StackSection, Sizes],
        number: int,
        count: int,
        at: str,
        memory: str | None,
    ) -> str:
        section, sizes = layer
        which = f"layer {number}" if count == 1 else f"layers {number}-{number + count - 1} (× {count})"
        block = Group(f"{side}_{number}", which)
        group.members.append(block)
        causal = "causal self-attention" if side == "decoder" else "self-attention"
        shared = "" if sizes.num_kv_heads == sizes.num_heads else f", {sizes.num_kv_heads} kv"
        heads = f"{sizes.num_heads} head{'s' * (sizes.num_heads > 1)} of {sizes.head_dim}{shared}"
        # The kind of attention with its main option, and the positions that act in it.
        options, inside = section.attention, section.positions.module.acts_in_attention
        described = [options.kind, options.summary(), section.positions.kind if inside else None]
        start = at
        at = self._part(block, "self", at, section, causal, ", ".join(filter(None, described)), heads)
        if memory is not None:
            kind = cross_attention_options(section.attention).kind
            at = self._part(block, "cross", at, section, "cross-attention", kind, heads)
            self._edge(memory, f"{block.id}_cross", "K, V", "cross")
        wide = section.feedforward
        d_ff = wide.hidden_size(sizes.d_model)
        gated = "gated " if wide.gated else ""
        reads = {"sequential": at, "parallel": start, "parallel_one_norm": f"{block.id}_self_norm"}[section.residual]
        return self._part(block, "ff", at, section, "feed-forward", f"{sizes.d_model} → {d_ff} → {sizes.d_model}",
                          f"{gated}{wide.activation}", reads=reads)  # fmt: skip

    def _part(
        self, block: Group, name: str, at: str, section: StackSection, *lines: str, reads: str | None = None
    ) -> str:
        """Draw a function with its norms and the sum; returns the last node.

        reads: the node that the function reads, where it is not the stream `at`; it may be the norm.
        """
        id_ = f"{block.id}_{name}"
        last, after, kind, place = reads or at, f"{id_}_sum", section.norm.kind, section.norm.place
        has_norm = section.attention_norm if name == "self" else name != "ff" or section.residual != "parallel_one_norm"
        if place in ("pre", "sandwich") and has_norm:
            last = self._after(block, last, f"{id_}_norm", kind)
        last = self._after(block, last, id_, *lines, label="Q" if name == "cross" else "")
        if place in ("res_post", "sandwich"):
            last = self._after(block, last, f"{id_}_out_norm", kind)
        self._add(block, after, "+", kind="sum")
        self._edge(last, after)
        self._edge(at, after, "", "residual")
        return self._after(block, after, f"{id_}_norm", kind) if place == "post" else after

    def _after(self, block: Group, before: str, id_: str, *lines: str, label: str = "") -> str:
        """Draw a node behind another one; returns it."""
        self._add(block, id_, *lines)
        self._edge(before, id_, label)
        return id_

    def _heads(self, last: str, embedding: str, *, is_text: bool) -> None:
        for head in self.model.heads:
            rows = self.model.target_vocab_size or self.model.vocab_size
            predicts_tokens = head.over_vocabulary and rows is not None
            labels = getattr(head, "num_labels", None)
            text = f"{rows:,} tokens" if predicts_tokens else f"{labels} labels" if labels else ""
            id_ = self._add(self.root, f"head_{head.kind}", f"head: {head.kind}", *([text] if text else []))
            self._edge(last, id_)
            if predicts_tokens and self.model.tie.output and is_text:
                self._edge(embedding, id_, "tied", "tied")


MERMAID_FORMS = {"data": ("([", "])"), "module": ("[", "]"), "sum": ("((", "))")}
MERMAID_ARROWS = {"flow": "-->", "residual": "-.->", "cross": "==>", "tied": "-.-"}


def to_mermaid(layout: Layout) -> str:
    """A flowchart from bottom to top, as in papers."""
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
    """Text for double quotes: Mermaid writes special characters as #entities;."""
    for plain, escaped in (("#", "#35;"), ('"', "#quot;"), ("<", "#lt;"), (">", "#gt;")):
        text = text.replace(plain, escaped)
    return text
