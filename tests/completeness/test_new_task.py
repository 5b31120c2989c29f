"""A new kind of data takes one file and one row: train, resume, evaluate and prune read their data through it."""

from __future__ import annotations

from pathlib import Path

from tests.completeness.overlay import overlay

TASK = '''\
"""Running text, of which validation and evaluation also report the number of texts."""

from __future__ import annotations

from typing import Any

from tformer.tasks.text import Text


class CountedText(Text):
    """Running text with the number of texts among the metrics."""

    description = "a model of counted text"
    options = frozenset({"stride"})

    def validate(self, recipe: Any, corpora: Any, *arguments: Any) -> dict[str, Any]:
        return super().validate(recipe, corpora, *arguments) | {"texts": len(corpora)}

    def evaluate(self, *arguments: Any) -> dict[str, Any]:
        return super().evaluate(*arguments) | {"texts": 1}
'''
ROW = ('    "text": Text(),\n', '    "text": Text(),\n    "counted_text": CountedText(),\n')
IMPORT = ("from tformer.tasks.base import Task\n",
          "from tformer.tasks.base import Task\nfrom tformer.tasks.counted_text import CountedText\n")  # fmt: skip
OBJECTIVE = ('    data = "text"\n', '    data = "counted_text"\n')
SCRIPT = """
train = ["train", "--config", "{recipe}", "--data", "{text}", "--out", "run", "--json"]
trained = json.loads(succeed(*train, "--max-steps", "6"))
succeed("train", "--resume", "--out", "run", "--max-steps", "12")
evaluated = json.loads(succeed("evaluate", "run", "--stride", "4", "--json"))
pruned = json.loads(succeed("prune", "run", "--drop-heads", "0.5", "--out", "pruned", "--json"))
code, _ = command("evaluate", "run", "--text-column", "0")
report({"trained": trained["valid"]["texts"], "evaluated": evaluated["texts"], "pruned": "before" in pruned,
        "code": code})
"""


def test_one_file_and_one_row_make_a_task(tmp_path: Path, text_file: Path, tiny_recipe: Path) -> None:
    changed = overlay(
        tmp_path,
        files={"tformer/tasks/counted_text.py": TASK},
        rows={"tformer/tasks/__init__.py": [IMPORT, ROW], "tformer/objectives/causal_lm.py": [OBJECTIVE]},
    )
    found = changed.run(SCRIPT.replace("{recipe}", str(tiny_recipe)).replace("{text}", str(text_file)), cwd=tmp_path)
    assert found == {"trained": 1, "evaluated": 1, "pruned": True, "code": 2}
