"""What sweep, prune, inspect and runs refuse before any work, with the message that names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.workflows.test_workflows_prune_layers import FLAT
from tests.workflows.test_workflows_sweep_plan import of_flags
from tformer.support.errors import InputError
from tformer.training.options import train_flags
from tformer.workflows.inspect.subject import InspectRequest, read_subject
from tformer.workflows.prune.heads import choose_heads
from tformer.workflows.prune.layers import named_layers, num_kept
from tformer.workflows.runs.summary import find_runs
from tformer.workflows.sweep.grid import OWN_FLAGS, train_options
from tformer.workflows.sweep.plan import SweepPlan, SweepTask, read_plan
from tformer.workflows.sweep.run import resolve_plan

GIVEN_BY_THE_SWEEP = ("--seed", "--out", "--resume", "--json", "--arch", "--config")
Call = Callable[[Path], object]
"""The call that is refused; its argument is the file of a tiny recipe."""


def axes(*vary: str) -> Call:
    return lambda recipe: of_flags(vary=list(vary))


def grid(vary: dict[str, tuple[Any, ...]], sets: dict[str, Any] | None = None, **more: Any) -> Call:
    return lambda recipe: resolve_plan(
        SweepPlan(tasks=(SweepTask(config=str(recipe), vary=vary, set=sets or {}),), **more)
    )


REFUSALS: list[tuple[Call, str]] = [
    (axes("optimizer.lr"), "expected KEY=value,value"),
    (axes("optimizer.lr="), "expected KEY=value,value"),
    (axes("optimizer.lr=1,{"), "optimizer.lr: the values '1,{' are no YAML list"),
    (axes("a,b=1,2"), "found 1, expected a list of 2: a value for each key"),
    (axes("a,=1,2"), "expected KEY or KEY1,KEY2"),
    (axes("optimizer.lr=1,1"), "the value 1 twice"),
    (axes("optimizer.lr=1", "optimizer.lr=2"), "optimizer.lr is given twice"),
    (axes("seed=1,2"), "seed is no axis: --seeds N"),
    (lambda recipe: of_flags(evaluate=["--data x"]), "expected LABEL=flags"),
    (lambda recipe: of_flags(evaluate=["test='x"]), "--evaluate test: No closing quotation"),
    (lambda recipe: of_flags(sets=["lr"]), "--set: found 'lr', expected key=value"),
    (lambda recipe: read_plan("position"), "unknown plan 'position'\ndid you mean 'positions'"),
    (grid({"model.*.positions.kind": ("rope", "rops")}), "positions.kind rops: --set: model.decoder.positions.kind"),
    (grid({"model.decoder.num_heads": (2, 3)}), "num_heads 3: model.decoder.num_heads: 3 heads do not divide"),
    (grid({"model.*.positions.kind": ("patch2d",)}), "patch2d needs model.patches"),
    (grid({"model.*.nonsense": (1,)}), "model.decoder.nonsense: unknown key"),
    (grid({"training.best_metric": ("loss", "bleu")}), "best_metric bleu: --set: training.best_metric"),
    (grid({"model.decoder.dropout": (0.0, 0.1)}, seeds=10**8), "give 200,000,000 trainings, expected at most 10,000"),
    (
        lambda recipe: resolve_plan(
            SweepPlan(tasks=(SweepTask(name="good", config=str(recipe)), SweepTask(name="bad", arch="nothing")))
        ),
        "task bad: --arch: unknown arch 'nothing'",
    ),
    *(
        (lambda recipe, flag=flag: train_options([flag, "1"]), f"{flag}: a sweep sets this flag")  # type: ignore[misc]
        for flag in GIVEN_BY_THE_SWEEP
    ),
    (
        lambda recipe: named_layers(6, keep=[0, 6], side="decoder"),
        "--keep-layers: the decoder has no layer 6: its layers are 0 to 5",
    ),
    (lambda recipe: named_layers(6, drop=[-1], side="decoder"), "--drop-layers: the decoder has no layer -1"),
    (lambda recipe: named_layers(6, drop=range(6), side="decoder"), "--drop-layers: no layer of the decoder is left"),
    (lambda recipe: named_layers(6, keep=[1, 1], side="decoder"), "--keep-layers: layer 1 is named twice"),
    (lambda recipe: num_kept(6, keep=7, rate=None, side="encoder"), "--keep 7: the encoder has 6 layers"),
    *(
        (
            lambda recipe, way=way: choose_heads(FLAT, amount=0.01, per_layer=way),  # type: ignore[misc]
            "none of the 8 heads in 2 layers would be removed",
        )
        for way in ("even", "free")
    ),
    (
        lambda recipe: read_subject(InspectRequest(arch="gpt", preset="small", seq_len=2000)),
        "--seq-len 2000: the model has 1024 learned positions",
    ),
    (
        lambda recipe: read_subject(InspectRequest(arch="vit", preset="mnist", seq_len=7)),
        "an image of this model always has 49 positions",
    ),
    (lambda recipe: find_runs([recipe.parent / "missing"]), "missing does not exist"),
    (lambda recipe: find_runs([recipe]), "is a file, expected a folder of runs"),
]


@pytest.mark.parametrize(("call", "told"), REFUSALS, ids=[told[:60] for _, told in REFUSALS])
def test_what_is_refused_is_named_in_one_line(call: Call, told: str, tiny_recipe: Path) -> None:
    with pytest.raises(InputError) as caught:
        call(tiny_recipe)
    assert told in f"{caught.value.message}\n{caught.value.hint}" and "\n" not in caught.value.message


def test_flags_that_a_sweep_gives_itself_are_flags_of_train() -> None:
    assert set(GIVEN_BY_THE_SWEEP) <= {*OWN_FLAGS} and set(GIVEN_BY_THE_SWEEP) <= {*train_flags()}
