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
    (("step",), -1, "step: found -1, expected at least 0"),
    (("step",), "3", "step: found the text '3', expected an integer"),
    (("step",), True, "step: found true, expected an integer"),
    (("cursor",), None, "cursor: found null, expected a mapping"),
    (("cursor", "batch"), 1.5, "cursor: found 1.5, expected an integer"),
    (("cursor", "page"), 1, "cursor: expected the keys epoch, window, batch"),
    (("schedule",), {"best": 1.0}, "schedule: expected the keys best, bad_count, scale"),
    (("schedule", "bad_count"), -2, "schedule: found -2, expected at least 0"),
    (("scaler", "scale"), 0, "scaler: found 0, expected more than 0"),
    (("scaler", "scale"), float("nan"), "scaler: found nan, expected a finite number"),
    (("sums",), None, "sums: found null, expected a mapping"),
    (("sums", "terms"), {"mlm": "low"}, "sums.terms.mlm: found the text 'low', expected a number"),
    (("global_batch",), ["8", None], "global_batch.0: found the text '8', expected an integer"),
    (("validated",), "yes", "validated: found the text 'yes', expected true or false"),
    (("seconds",), -1.0, "seconds: found -1.0, expected at least 0"),
    (("best_score",), [1], r"best_score: found a list of 1, expected a number"),
    (("moon",), "full", "moon: unknown key"),
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
