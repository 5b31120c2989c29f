"""The preset `gpt/induction`: induction heads appear in its training, and the heads that `tformer heads` names copy."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import tformer
from tformer.inside.heads import copying, repeated_tokens


def without_head(head: int, value: Tensor) -> Tensor:
    changed = value.clone()
    changed[:, head] = 0.0
    return changed


@pytest.mark.slow
def test_induction_heads_appear_and_the_model_copies_by_them(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained = cli("train", "--arch", "gpt", "--preset", "induction", "--out", "run", "--set", "training.threads=1")
    assert trained.code == 0, trained.err
    outcome = cli("heads", "run", "--over-training", "--format", "json")
    found = json.loads(outcome.out)["checkpoints"]
    assert len(found) == 20, "a checkpoint every 20 steps"
    induction = [max(max(row) for row in each["scores"]["decoder"]["induction"]) for each in found]
    assert induction[0] < 0.2 and induction[-1] > 0.8
    assert found[0]["copying"]["repeated_loss"] > 3.5 and found[-1]["copying"]["repeated_loss"] < 0.3

    run = tformer.load("run", which="latest")
    report = run.heads()
    (previous_layer, previous), (layer, head) = report.best("previous"), report.best("induction")
    assert (previous_layer, layer) == (0, 1)
    repeated = repeated_tokens(run)
    left = {
        (number, each): copying(
            run.model,
            repeated,
            replace={f"decoder.{number}.self_attention.heads": partial(without_head, each)},
        )["repeated_accuracy"]
        for number in range(2)
        for each in range(2)
    }
    assert report.copying["repeated_accuracy"] > 0.95
    assert min(left, key=lambda each: left[each]) == (0, previous), "nothing is found without what came before"
    assert left[layer, head] < left[layer, 1 - head] and left[layer, head] < left[0, 1 - previous]

    swapped = run.patch("Kx7QbmK", "Qx7KbmK")
    assert (swapped.answer, swapped.wrong) == ("x", "b")
    cells = {each.part: each.exact for each in swapped.maps}
    assert cells["residual"][1].argmax() == 1, "after layer 0 the first x holds that K stood before it"
    assert cells["heads"][0].argmax() == previous and cells["heads"][1].argmax() == head
    worth = {each.name: each.metrics["loss"] for each in run.patch(ablate="zero").parts if each.head is not None}
    assert sorted(worth, key=lambda name: -worth[name])[:2] == [f"L0H{previous}", f"L1H{head}"]
