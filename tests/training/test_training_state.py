"""trainer.json: what a training writes is read back equal, anything else is refused with the key."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tformer.support.errors import InputError
from tformer.training.state import RunningSums, TrainerState

STATES = {
    "the first": TrainerState(),
    "plateau, fp16, several terms": TrainerState(
        step=7,
        tokens=512,
        cursor={"epoch": 1, "window": 0, "batch": 3},
        best_score=1.5,
        best_step=4,
        validated=False,
        schedule={"best": None, "bad_count": 2, "scale": 0.25},
        scaler={"scale": 4096.0, "finite_steps": 9},
        sums=RunningSums(loss=3.5, steps=2, grad_norm=0.5, terms={"mlm": 3.0, "nsp": 0.5}),
        data_fingerprint="ab",
        global_batch=[8, None],
        seconds=1.25,
    ),
}

FORGED: list[tuple[tuple[str, ...], Any, str]] = [
    (("step",), -1, "step: input should be greater than or equal to 0, found -1"),
    (("step",), "3", "step: input should be a valid integer, found '3'"),
    (("step",), True, "step: input should be a valid integer, found True"),
    (("cursor",), None, "cursor: input should be an object, found None"),
    (("cursor", "batch"), 1.5, "cursor: input should be a valid integer, found 1.5"),
    (("cursor", "page"), 1, "cursor: expected the keys epoch, window, batch"),
    (("schedule",), {"best": 1.0}, "schedule: expected the keys best, bad_count, scale"),
    (("schedule", "bad_count"), -2, "schedule: input should be greater than or equal to 0, found -2"),
    (("scaler", "scale"), 0, "scaler: input should be greater than 0, found 0"),
    (("scaler", "scale"), float("nan"), "scaler: input should be a finite number, found nan"),
    (("sums",), None, "sums: input should be an object, found None"),
    (("sums", "terms"), {"mlm": "low"}, "sums.terms.mlm: input should be a valid number, found 'low'"),
    (("global_batch",), ["8", None], "global_batch.0: input should be a valid integer, found '8'"),
    (("validated",), "yes", "validated: input should be a valid boolean, found 'yes'"),
    (("seconds",), -1.0, "seconds: input should be greater than or equal to 0, found -1.0"),
    (("best_score",), [1], r"best_score: input should be a valid number, found \[1\]"),
    (("moon",), "full", "moon: unexpected keyword argument, found 'full'"),
]


@pytest.mark.parametrize("name", STATES)
def test_a_state_comes_back_equal(name: str) -> None:
    assert TrainerState.from_json(json.loads(json.dumps(STATES[name].to_json()))) == STATES[name]


@pytest.mark.parametrize(("path", "value", "message"), FORGED)
def test_a_forged_value_is_refused_with_its_key(path: tuple[str, ...], value: Any, message: str) -> None:
    document = json.loads(json.dumps(STATES["plateau, fp16, several terms"].to_json()))
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(InputError, match=f"^run/trainer.json is damaged: {message}"):
        TrainerState.from_json(document, name="run/trainer.json")
