"""A new objective takes one file and one row: every command works with it."""

from __future__ import annotations

from pathlib import Path

from tests.completeness.overlay import overlay

OBJECTIVE = '''\
"""Word order: neighbouring tokens are swapped, and the original tokens of the swapped ones are predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from tformer.data.batching.batch import Batch
from tformer.nn.heads import MaskedLmHeadOptions
from tformer.nn.losses import IGNORED_LABEL
from tformer.nn.options import require_probability
from tformer.objectives.base import Objective, TokenObjective
from tformer.objectives.collate import pad_samples


class WordOrder(TokenObjective):
    """The objective; an encoder learns it with the head of masked language modelling."""

    data = "masked_text"
    head = MaskedLmHeadOptions()
    parts = ("encoder",)
    without = ("decoder",)
    unused_keys = ("data.columns.label",)

    @staticmethod
    def predicted_share(head: str, options: Any) -> float:
        """The share of swapped tokens."""
        return options.share

    def collate(self, samples: Sequence[Any] | np.ndarray, *, rng: np.random.Generator, training: bool = True) -> Batch:
        """Swaps tokens 2 i and 2 i + 1 in a share of the places i."""
        batch = pad_samples(samples, self.context, rng=rng)
        ids = batch.input_ids.numpy()
        even = ids.shape[1] // 2 * 2
        swapped = np.repeat(rng.random((len(ids), even // 2)) < self.options.share, 2, axis=1)
        other = ids[:, :even].reshape(len(ids), -1, 2)[:, :, ::-1].reshape(len(ids), even)
        inputs, labels = ids.copy(), np.full_like(ids, IGNORED_LABEL)
        inputs[:, :even][swapped], labels[:, :even][swapped] = other[swapped], ids[:, :even][swapped]
        labels[:, 0] = ids[:, 0]  # so that every batch has a label
        return replace(batch, input_ids=torch.from_numpy(inputs), labels=torch.from_numpy(labels))


@dataclass(frozen=True)
class WordOrderOptions:
    """Word order."""

    kind: Literal["word_order"] = "word_order"
    share: float = 0.5
    weight: float = 1.0
    objective: ClassVar[type[Objective]] = WordOrder

    def __post_init__(self) -> None:
        require_probability(share=self.share)
'''
ROW = ("    | DenoisingOptions\n", "    | DenoisingOptions\n    | WordOrderOptions\n")
IMPORT = (
    "from tformer.objectives.span_corruption import SpanCorruptionOptions\n",
    "from tformer.objectives.span_corruption import SpanCorruptionOptions\n"
    "from tformer.objectives.word_order import WordOrderOptions\n",
)
SCRIPT = """
SMALL = []
for setting in ("model.d_model=32", "model.encoder.num_layers=1", "model.encoder.num_heads=2", "data.seq_len=32",
                "model.encoder.feedforward.d_ff=48", "tokenizer.train.vocab_size=300", "training.compile=off"):
    SMALL += ["--set", setting]
TRAIN = ["train", "--data", "text.txt", "--batch-size", 8, "--json"]
START = [*TRAIN, "--arch", "bert", "--preset", "pretrain", "--objective", "word_order", "--max-steps", 6, *SMALL]

code, shown = command("config", "show", "--arch", "bert", "--preset", "pretrain", "--set",
                      "objectives=[{kind: word_order, share: 2}]")
assert code == 2, shown
succeed(*START, "--out", "run", "--set", "objectives.0.share=0.25")
succeed(*TRAIN, "--resume", "--out", "run", "--max-steps", 9)
succeed(*START, "--teacher", "run", "--out", "student", "--set", "teacher.hidden=0.5")
report({
    "evaluated": json.loads(succeed("evaluate", "run", "--data", "text.txt", "--json")),
    "held_out": json.loads(succeed("evaluate", "run", "--json")),
    "inspected": json.loads(succeed("inspect", "run", "--json")),
    "written": json.loads(succeed("generate", "run", "--prompt", "the quick [MASK] fox", "--json")),
})
"""


def metrics(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text().splitlines()


def test_one_file_and_one_row_make_an_objective(tmp_path: Path) -> None:
    words = "the quick brown fox jumps over the lazy dog and sees one more red hen in the old yard "
    (tmp_path / "text.txt").write_text("\n\n".join(words * 6 for _ in range(30)))
    changed = overlay(
        tmp_path,
        files={"tformer/objectives/word_order.py": OBJECTIVE},
        rows={"tformer/objectives/__init__.py": [IMPORT, ROW]},
    )
    found = changed.run(SCRIPT, cwd=tmp_path)
    recipe = (tmp_path / "run" / "recipe.yaml").read_text()
    assert "kind: word_order" in recipe and "share: 0.25" in recipe
    assert '"step": 9' in metrics(tmp_path / "run")[-1]
    for name in ("evaluated", "held_out"):
        assert {"loss", "accuracy", "perplexity"} <= found[name].keys()
    assert "distillation" in (tmp_path / "student" / "metrics.jsonl").read_text()
    assert found["inspected"]["parameters"] and len(found["written"]["masks"]) == 1
