"""A new activation of the feed-forward network takes one file and one row."""

from __future__ import annotations

from pathlib import Path

from tests.completeness.overlay import overlay

FILE = '''\
"""Absolute value as an activation."""

from torch import Tensor


def absolute(x: Tensor) -> Tensor:
    """|x|."""
    return x.abs()
'''

ROW = ('    "relu2": relu2,\n', '    "relu2": relu2,\n    "absolute": absolute,\n')
IMPORT = ("from tformer.nn.linear import", "from tformer.nn.absolute import absolute\nfrom tformer.nn.linear import")

SCRIPT = """
train = ["train", "--config", "{recipe}", "--data", "{text}", "--out", "run", "--json",
         "--set", "model.decoder.feedforward.activation=absolute"]
succeed(*train, "--max-steps", "8")
succeed("train", "--resume", "--out", "run", "--max-steps", "12")
evaluated = json.loads(succeed("evaluate", "run", "--json"))
inspected = json.loads(succeed("inspect", "run", "--json"))
shapes = succeed("inspect", "run", "--shapes", "--text", "the cat")
layout = succeed("inspect", "run", "--draw", "mermaid")
generated = succeed("generate", "run", "--prompt", "the", "--greedy", "--max-new-tokens", "4")
code, _ = command(*train[:-1], "model.decoder.feedforward.activation=none-such", "--out", "other")
report({"loss": evaluated["loss"], "flops": inspected["flops"]["forward_per_token"], "in_layout": "absolute" in layout,
        "shapes": bool(shapes), "generated": generated, "unknown": code})
"""


def test_a_new_activation_takes_one_file_and_one_row(tmp_path: Path, text_file: Path, tiny_recipe: Path) -> None:
    changed = overlay(
        tmp_path,
        files={"tformer/nn/absolute.py": FILE},
        rows={"tformer/nn/feedforward.py": [ROW, IMPORT]},
    )
    found = changed.run(SCRIPT.replace("{recipe}", str(tiny_recipe)).replace("{text}", str(text_file)), cwd=tmp_path)
    assert 0 < found["loss"] < 4 and found["flops"] > 0 and found["in_layout"] and found["shapes"]
    assert found["generated"].startswith("the") and found["unknown"] == 2
