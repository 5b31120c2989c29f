"""A new kind of norm takes one file and one row."""

from __future__ import annotations

from pathlib import Path

from tests.completeness.overlay import overlay

FILE = '''\
"""Max norm: x · g / max |x|."""

from torch import Tensor

from tformer.nn.layer_norm import Norm


class MaxNorm(Norm):
    """Divides each vector by its largest magnitude."""

    has_bias = False

    def forward(self, x: Tensor) -> Tensor:
        out = x / x.abs().amax(-1, keepdim=True).clamp(min=self.eps)
        return out if self.weight is None else out * self.weight.to(x.dtype)
'''

ROW = ('    "batchnorm": BatchNorm,\n', '    "batchnorm": BatchNorm,\n    "maxnorm": MaxNorm,\n')
IMPORT = ("from tformer.nn.options import", "from tformer.nn.max_norm import MaxNorm\nfrom tformer.nn.options import")

SCRIPT = """
train = ["train", "--config", "{recipe}", "--data", "{text}", "--out", "run", "--json"]
norm = ["--set", "model.decoder.norm.kind=maxnorm"]
succeed(*train, *norm, "--max-steps", "8")
succeed("train", "--resume", "--out", "run", "--max-steps", "12")
evaluated = json.loads(succeed("evaluate", "run", "--json"))
inspected = json.loads(succeed("inspect", "run", "--json"))
shapes = succeed("inspect", "run", "--shapes", "--text", "the cat")
layout = succeed("inspect", "run", "--draw", "mermaid")
generated = succeed("generate", "run", "--prompt", "the", "--greedy", "--max-new-tokens", "4")
groups = command(*train[:-2], "other", *norm, "--set", "model.decoder.norm.groups=2")[0]
unknown = command(*train[:-2], "other", "--set", "model.decoder.norm.kind=none-such")[0]
report({"loss": evaluated["loss"], "memory": inspected["memory"]["activations_bytes"], "layout": layout,
        "shapes": shapes, "generated": generated, "codes": [groups, unknown]})
"""


def test_a_new_norm_takes_one_file_and_one_row(tmp_path: Path, text_file: Path, tiny_recipe: Path) -> None:
    changed = overlay(
        tmp_path,
        files={"tformer/nn/max_norm.py": FILE},
        rows={"tformer/nn/norm.py": [ROW, IMPORT]},
    )
    found = changed.run(SCRIPT.replace("{recipe}", str(tiny_recipe)).replace("{text}", str(text_file)), cwd=tmp_path)
    assert 0 < found["loss"] < 4 and found["memory"] > 0
    assert "maxnorm" in found["layout"] and "norm" in found["shapes"]
    assert found["generated"].startswith("the") and found["codes"] == [2, 2]
