"""A new kind of position encoding takes one file and one row; `viz-pe` shows it from its hooks."""

from __future__ import annotations

from pathlib import Path

from tests.completeness.overlay import overlay

FILE = '''\
"""A learned slope per head: bias = -slope · distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from tformer.nn.positions.base import Positions, PositionSizes


class SlopePositions(Positions):
    kind = "slope"
    about = "Each head subtracts a learned slope times the distance from its scores."
    per_head = True

    def __init__(self, *, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads))

    def bias(self, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor:
        distance = (k_pos_BS.unsqueeze(1) - q_pos_BT.unsqueeze(2)).abs()
        return distance.unsqueeze(1) * -self.weight.view(1, -1, 1, 1)


@dataclass(frozen=True)
class SlopeOptions:
    module: ClassVar = SlopePositions
    kind: Literal["slope"] = "slope"

    def build(self, sizes: PositionSizes) -> Positions:
        return SlopePositions(num_heads=sizes.num_heads)
'''

ROW = ("    | Patch2dOptions\n", "    | Patch2dOptions\n    | SlopeOptions\n")
IMPORT = (
    "from tformer.nn.positions.shaw import ShawOptions\n",
    "from tformer.nn.positions.shaw import ShawOptions\nfrom tformer.nn.positions.slope import SlopeOptions\n",
)

SCRIPT = """
train = ["train", "--config", "{recipe}", "--data", "{text}", "--out", "run", "--json"]
slope = ["--set", "model.decoder.positions.kind=slope"]
succeed(*train, *slope, "--max-steps", "8")
succeed("train", "--resume", "--out", "run", "--max-steps", "12")
evaluated = json.loads(succeed("evaluate", "run", "--json"))
inspected = json.loads(succeed("inspect", "run", "--json"))
shapes = succeed("inspect", "run", "--shapes", "--text", "the cat")
layout = succeed("inspect", "run", "--draw", "mermaid")
generated = succeed("generate", "run", "--prompt", "the", "--greedy", "--max-new-tokens", "4")
beams = succeed("generate", "run", "--prompt", "the", "--beam-size", "2", "--max-new-tokens", "4")
succeed("viz-attention", "run", "--text", "the cat", "-o", "attention.json", "--format", "json")
succeed("viz-pe", "--run", "run", "-o", "slope.json", "--format", "json")
succeed("viz-pe", "-o", "page.html")
succeed("viz-pe", "--run", "run", "-o", "run.html")
own_heads = ["--set", "model.decoder.layers.0.num_heads=1", "--set", "model.decoder.head_dim=8"]
code, _ = command(*train[:-2], "other", *slope, *own_heads)
report({"loss": evaluated["loss"], "flops": inspected["flops"]["forward_per_token"], "layout": layout, "shapes": shapes,
        "generated": generated, "beams": beams, "code_of_own_heads": code})
"""


def test_a_new_kind_of_positions_takes_one_file_and_one_row(tmp_path: Path, text_file: Path, tiny_recipe: Path) -> None:
    changed = overlay(
        tmp_path,
        files={"tformer/nn/positions/slope.py": FILE},
        rows={"tformer/nn/positions/__init__.py": [ROW, IMPORT]},
    )
    found = changed.run(SCRIPT.replace("{recipe}", str(tiny_recipe)).replace("{text}", str(text_file)), cwd=tmp_path)
    assert 0 < found["loss"] < 4 and found["flops"] > 0
    assert "full, slope" in found["layout"]  # it acts in attention
    assert "bias" in found["shapes"]
    assert found["generated"].startswith("the") and found["beams"].startswith("the")
    assert found["code_of_own_heads"] == 2
    assert "Each head subtracts a learned slope" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '"slope"' in (tmp_path / "run.html").read_text(encoding="utf-8")
    assert (tmp_path / "slope.json").stat().st_size > 1000
