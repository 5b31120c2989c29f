"""The recipes of the guide: every block of YAML is a file that loads strictly; every kind of a variant is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tformer.guide import read_topic
from tformer.nn.attention import ATTENTION
from tformer.nn.norm import NORMS
from tformer.nn.patches import STEMS
from tformer.nn.positions import POSITIONS
from tformer.optim.optimizers import OPTIMIZERS
from tformer.optim.schedules import SCHEDULES

BLOCKS = re.findall(r"^```yaml\n(.*?)^```", read_topic("recipe"), re.M | re.S)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_is_a_valid_file(number: int, tmp_path: Path, cli: Callable[..., Any]) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(BLOCKS[number])
    outcome = cli("config", "validate", str(file))
    assert outcome.code == 0, outcome.err


def test_the_kinds_of_attention_in_the_table_are_valid(tmp_path: Path, cli: Callable[..., Any]) -> None:
    lines = re.findall(r"\| `(\{kind: .*?\})`", read_topic("recipe"))
    assert len(lines) == 7
    [block] = [block for block in BLOCKS if "bigbird" in block]
    for number, line in enumerate(lines):
        (tmp_path / f"{number}.yaml").write_text(re.sub(r"attention: .*", f"attention: {line}", block))
    outcome = cli("config", "validate", *(str(path) for path in tmp_path.iterdir()))
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("table", [ATTENTION, NORMS, POSITIONS, STEMS, OPTIMIZERS, SCHEDULES])
def test_every_kind_is_named(table: dict[str, Any]) -> None:
    missing = [kind for kind in table if not re.search(rf"[`\s]{kind}[`,)\s]", read_topic("recipe"))]
    assert not missing
