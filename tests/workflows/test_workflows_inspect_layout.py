"""The architecture as a graph: what is joined to what, and text that Mermaid can read."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tformer.recipe.model import Model
from tformer.workflows.inspect.layout import Group, Layout, lay_out, to_mermaid

STACK: dict[str, Any] = {"num_layers": 3, "num_heads": 4}


def model(**sections: Any) -> Model:
    return Model.model_validate({"d_model": 16, "vocab_size": 11, **sections})


BOTH = model(encoder=STACK, decoder={**STACK, "norm": {"place": "post"}})
MODELS = {
    "decoder": model(decoder={**STACK, "positions": {"kind": "rope"}}),
    "both": BOTH,
    "sandwich": model(
        encoder={**STACK, "norm": {"place": "res_post"}}, decoder={**STACK, "norm": {"place": "sandwich"}}
    ),
    "parallel": model(decoder={**STACK, "residual": "parallel"}),
    "one norm": model(decoder={**STACK, "residual": "parallel_one_norm"}),
    "own heads": model(encoder={**STACK, "head_dim": 4, "layers": {1: {"num_heads": 2}}}),
    "images": model(encoder=STACK, patches={"image_size": 8, "size": 4}, heads=[{"kind": "classifier"}]),
}
NAMED = 'a "title" <of> #1 \\ [x]'


def parse_mermaid(text: str) -> tuple[set[str], set[tuple[str, str]], int]:
    """(nodes, edges, frames) of a flowchart; fails on a line that Mermaid would not take."""
    first, *lines = text.splitlines()
    assert first == "flowchart BT"
    nodes: set[str] = set()
    edges: set[tuple[str, str]] = set()
    depth = frames = 0
    for line in map(str.strip, lines):
        if match := re.fullmatch(r'subgraph (\w+)\["[^"]+"\]', line):
            depth, frames = depth + 1, frames + 1
        elif line == "end":
            depth -= 1
            assert depth >= 0
        elif match := re.fullmatch(r'(\w+) (?:-->|-\.->|==>|-\.-)(?:\|"[^"]+"\|)? (\w+)', line):
            edges.add((match[1], match[2]))
        elif match := re.fullmatch(r'(\w+)(?:\["[^"]+"\]|\(\["[^"]+"\]\)|\(\("[^"]+"\)\))', line):
            assert match[1] not in nodes, "a node is drawn twice"
            nodes.add(match[1])
        else:
            assert line == "direction BT", line
    assert depth == 0
    return nodes, edges, frames


def test_norms_stand_where_they_are_computed() -> None:
    edges = {(edge.start, edge.end) for edge in lay_out(MODELS["sandwich"], title="a").edges}
    names = {node.id: node.lines[0] for node in lay_out(MODELS["sandwich"], title="a").root.nodes()}
    for side, before in (("encoder", False), ("decoder", True)):
        [ff] = [name for name in names if name.startswith(side) and name.endswith("_ff")]
        assert {(ff, f"{ff}_out_norm"), (f"{ff}_out_norm", f"{ff}_sum")} <= edges
        assert ((f"{ff}_norm", ff) in edges) == before and (f"{ff}_norm" in names) == before


@pytest.mark.parametrize("name", MODELS)
def test_the_flowchart_has_the_nodes_and_edges_of_the_graph(name: str) -> None:
    layout = lay_out(MODELS[name], title=NAMED)
    nodes, edges, frames = parse_mermaid(to_mermaid(layout))
    assert frames == to_mermaid(layout).count("subgraph")
    assert {end for edge in edges for end in edge} <= nodes
    assert nodes == {node.id for node in layout.root.nodes()}
    assert edges == {(edge.start, edge.end) for edge in layout.edges}
    assert len(nodes) == len({*(end for edge in edges for end in edge)}), "a node stands alone"


def edges_of(layout: Layout, kind: str) -> list[tuple[str, str]]:
    return [(edge.start, edge.end) for edge in layout.edges if edge.kind == kind]


def test_cross_attention_reads_the_encoder() -> None:
    layout = lay_out(BOTH, title="both")
    assert edges_of(layout, "cross") == [("encoder_norm", "decoder_0_cross")]
    assert ("encoder_embedding", "decoder_embedding") in edges_of(layout, "tied")
    assert ("decoder_embedding", "head_lm") in edges_of(layout, "tied")
    assert not edges_of(lay_out(MODELS["decoder"], title="one"), "cross")


def test_norms_stand_where_the_recipe_says() -> None:
    layout = lay_out(BOTH, title="both")
    flow = edges_of(layout, "flow")
    assert ("encoder_0_self_norm", "encoder_0_self") in flow and ("encoder_0_self", "encoder_0_self_sum") in flow
    assert ("decoder_0_self_sum", "decoder_0_self_norm") in flow
    assert ("encoder_embedding", "encoder_0_self_sum") in edges_of(layout, "residual")


def test_a_parallel_residual_is_drawn_beside_attention() -> None:
    for name, start, last in (("parallel", "decoder_embedding", "ff_norm"), ("one norm", "decoder_0_self_norm", "ff")):
        layout = lay_out(MODELS[name], title=name)
        assert (start, f"decoder_0_{last}") in edges_of(layout, "flow")
        assert ("decoder_0_self_sum", "decoder_0_ff_sum") in edges_of(layout, "residual")


def test_untied_tables_are_not_joined() -> None:
    untied = model(encoder=STACK, decoder=STACK, tie={"source_target": False, "output": False})
    assert not edges_of(lay_out(untied, title="untied"), "tied")


def test_equal_layers_are_drawn_once_and_others_apart() -> None:
    def layers(name: str) -> list[str]:
        [side] = [member for member in lay_out(MODELS[name], title="x").root.members if isinstance(member, Group)]
        return [member.title for member in side.members if isinstance(member, Group)]

    assert layers("own heads") == ["layer 0", "layer 1", "layer 2"]
    assert layers("decoder") == ["layers 0-2 (× 3)"]


def test_nodes_name_kinds_heads_and_sizes() -> None:
    texts = [", ".join(node.lines) for node in lay_out(BOTH, title="both").root.nodes()]
    for words in ("cross-attention, full, 4 heads of 4", "feed-forward, 16 → 64 → 16, gelu", "head: lm, 11 tokens",
                  "positions, learned"):  # fmt: skip
        assert words in texts, texts


def test_electra_is_drawn_with_its_generator() -> None:
    layout = lay_out(MODELS["own heads"], title="x", generator=model(encoder=STACK, heads=[{"kind": "masked_lm"}]))
    _, edges, _ = parse_mermaid(to_mermaid(layout))
    assert ("generator_head_masked_lm", "discriminator_encoder_input") in edges
    shared = ("discriminator_encoder_embedding", "generator_encoder_embedding")
    assert shared in edges_of(layout, "tied")
    narrow = model(d_model=8, encoder=STACK, heads=[{"kind": "masked_lm"}])
    assert shared not in edges_of(lay_out(MODELS["own heads"], title="x", generator=narrow), "tied")
