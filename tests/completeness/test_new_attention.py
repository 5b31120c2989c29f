"""A new kind of attention with its own decoding state takes one file and one row."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.completeness.overlay import overlay
from tformer.nn.attention import Mechanism
from tformer.nn.cache import LayerState

FILE = '''\
"""Averaging attention: each query takes the mean of the values it sees."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from tformer.nn.attention.mechanism import Mechanism, ProjectionOptions, StateBytes


class AveragingState:
    """Sum of the values so far [B, K, 1, v], and their number."""

    def __init__(self):
        self.total, self.length = 0.0, 0

    def select_rows(self, index, *, capacity=None, spares=None):
        self.total = self.total.index_select(0, index)

    def truncate(self, length):
        raise ValueError("sums cannot be cut")


class AveragingAttention(Mechanism):
    """out_t = mean(v_0 ... v_t), or the mean of all values without causality."""

    one_document = True
    takes_position_scores = False
    drops_weights = False

    def new_state(self, *, batch_size, capacity, device, dtype):
        return AveragingState()

    def state_bytes(self, dtype):
        return StateBytes(0, self.sizes.num_kv_heads * self.sizes.value_dim * dtype.itemsize)

    def compute(self, inputs, *, x_BTD, state=None):
        q, k, v, context = inputs[:4]
        before, past = (0.0, 0) if state is None else (state.total, state.length)
        length = v.shape[2]
        visible = torch.ones(length, length, device=v.device)
        visible = visible.tril() if context.causal else visible
        counts = (visible.sum(-1) + past)[:, None]
        out = (visible.to(v.dtype) @ v + before) / counts.to(v.dtype)
        if state is not None:
            state.total, state.length = before + v.sum(2, keepdim=True), past + length
        weights = None
        if inputs.need_weights:
            weights = (visible / counts).expand(q.shape[0], q.shape[1], -1, -1)
        return out.repeat_interleave(q.shape[1] // v.shape[1], dim=1).to(q.dtype), weights


@dataclass(frozen=True)
class AveragingOptions(ProjectionOptions):
    """Options of averaging attention."""

    mechanism: ClassVar[type[Mechanism]] = AveragingAttention

    kind: Literal["averaging"] = "averaging"
'''

ROW = (
    "    FullAttentionOptions | AdditiveOptions |",
    "    FullAttentionOptions | AveragingOptions | AdditiveOptions |",
)
IMPORT = (
    "from tformer.nn.attention.bigbird import",
    "from tformer.nn.attention.averaging import AveragingOptions\nfrom tformer.nn.attention.bigbird import",
)

SCRIPT = """
train = ["train", "--config", "{recipe}", "--data", "{text}", "--out", "run", "--json",
         "--set", "model.decoder.attention_dropout=0", "--set", "model.decoder.attention.kind=averaging"]
succeed(*train, "--max-steps", "8")
succeed("train", "--resume", "--out", "run", "--max-steps", "12")
evaluated = json.loads(succeed("evaluate", "run", "--json"))
inspected = json.loads(succeed("inspect", "run", "--json"))
shapes = succeed("inspect", "run", "--shapes", "--text", "the cat")
layout = succeed("inspect", "run", "--draw", "mermaid")
seen = json.loads(succeed("viz-attention", "run", "--text", "the cat", "--format", "json"))
generated = succeed("generate", "run", "--prompt", "the", "--greedy", "--max-new-tokens", "4")
code, _ = command(*train[:-1], "model.decoder.attention.kind=none-such", "--out", "other")
report({"loss": evaluated["loss"], "cache": inspected["cache"], "in_layout": "averaging" in layout,
        "shapes": bool(shapes), "pattern": "averaging" in json.dumps(seen), "generated": generated, "unknown": code})
"""


def test_a_new_kind_of_attention_takes_one_file_and_one_row(tmp_path: Path, text_file: Path, tiny_recipe: Path) -> None:
    changed = overlay(
        tmp_path,
        files={"tformer/nn/attention/averaging.py": FILE},
        rows={"tformer/nn/attention/__init__.py": [ROW, IMPORT]},
    )
    found = changed.run(SCRIPT.replace("{recipe}", str(tiny_recipe)).replace("{text}", str(text_file)), cwd=tmp_path)
    assert 0 < found["loss"] < 4 and found["in_layout"] and found["shapes"] and found["pattern"]
    assert found["cache"]["bytes_per_token"] == 0 and found["cache"]["bytes_constant"] > 0
    assert found["generated"].startswith("the") and found["unknown"] == 2


def test_a_kind_with_its_own_decoding_state_must_state_its_size() -> None:
    with pytest.raises(AssertionError, match="Silent needs state_bytes"):

        class Silent(Mechanism):
            def new_state(self, **_: object) -> LayerState:
                raise NotImplementedError
