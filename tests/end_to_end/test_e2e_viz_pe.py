"""`tformer viz-pe --run`: what models have learned about positions, of every kind that learns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.end_to_end.translate_runs import DECODER, SEQ2SEQ, build_run

STACK = "{num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}"


def with_positions(positions: str, *, both: bool = True, recipe: str = SEQ2SEQ) -> str:
    changed = recipe.replace("  decoder: " + STACK, f"  decoder: {STACK}, positions: {positions}")
    return changed.replace("  encoder: " + STACK, f"  encoder: {STACK}, positions: {positions}") if both else changed


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    recipes = {
        "learned": DECODER,
        "t5": with_positions("{kind: t5_bias, buckets: 8, max_distance: 20}"),
        "shaw": with_positions("{kind: shaw, clip: 3}"),
        "rope": with_positions("{kind: rope, base: 500, layout: interleaved}", recipe=DECODER),
        "mixed": with_positions("{kind: alibi}", both=False),
        "none": with_positions("{kind: none}", recipe=DECODER),
    }
    home, done = tmp_path_factory.mktemp("runs"), {}

    def make(kind: str) -> Path:
        if kind not in done:
            done[kind] = build_run(home / kind, recipes[kind])
        return done[kind]

    return make


def weights(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    import tformer

    return {name: tensor.numpy() for name, tensor in tformer.load(path).model.state_dict().items()}


def document(cli: Callable[..., Any], *arguments: object) -> Any:
    outcome = cli("viz-pe", *arguments, "--format", "json")
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def test_a_learned_table_is_shown_as_it_is(run: Callable[[str], Path], cli: Callable[..., Any], tmp_path: Path) -> None:
    path = run("learned")
    [table] = [tensor for name, tensor in weights(path).items() if "positions" in name]
    found = document(cli, "--run", path, "--view", "heatmap")
    assert np.allclose(found["plots"][0]["values"], table) and found["encoding"] == "learned"
    assert found["run"]["trained"] and "random" not in found["run"]["name"]
    for view in ("traces", "similarity", "norms", "pca", "beside"):
        assert document(cli, "--run", path, "--view", view)["view"] == view
    assert cli("viz-pe", "--run", path, "-o", tmp_path / "a.png").code == 0
    assert cli("viz-pe", "--run", path, "-o", tmp_path / "a.html").code == 0
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert 'id="blob-weight"' in page and "random initialisation" not in page.split('id="data"')[0]
    compared = document(cli, "--run", path, "--compare", "all")
    assert "learned" in [line["label"] for line in compared["plots"][0]["lines"]]


def test_an_untrained_table_says_so(cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tformer.checkpoint as checkpoint

    save = checkpoint.save_checkpoint
    monkeypatch.setattr(
        checkpoint, "save_checkpoint", lambda run, step, **rest: save(run, 0, **{**rest, "trainer": {"step": 0}})
    )
    path = build_run(tmp_path, DECODER)
    outcome = cli("viz-pe", "--run", path, "-o", tmp_path / "a.html")
    assert outcome.code == 0 and "random initialisation" in outcome.err
    assert re.search(r'class="subtitle"[^>]*>[^<]*random initialisation', (tmp_path / "a.html").read_text("utf-8"))
    assert "random initialisation" in cli("viz-pe", "--run", path, "--format", "terminal").out
    assert not document(cli, "--run", path)["run"]["trained"]


def test_t5s_bias_per_head_and_offset(run: Callable[[str], Path], cli: Callable[..., Any], tmp_path: Path) -> None:
    path = run("t5")
    tables = {name: tensor for name, tensor in weights(path).items() if name.endswith("positions.weight")}
    encoder = document(cli, "--run", path, "--view", "bias", "--positions", 10)["plots"][0]
    assert encoder["columns"] == list(range(-9, 10)) and encoder["rows"] == [1, 2]
    assert np.allclose(np.array(encoder["values"])[:, 9], tables["encoder.positions.weight"][0])
    decoder = document(cli, "--run", path, "--stack", "decoder", "--view", "bias", "--positions", 10)["plots"][0]
    assert decoder["columns"] == list(range(-9, 1))
    assert np.allclose(np.array(decoder["values"])[:, 8], tables["decoder.positions.weight"][1])
    assert document(cli, "--run", path)["settings"]["buckets"] == 8
    assert cli("viz-pe", "--run", path, "--view", "bias", "-o", tmp_path / "a.html").code == 0


def test_shaws_tables(run: Callable[[str], Path], cli: Callable[..., Any]) -> None:
    path = run("shaw")
    tables = {name: tensor for name, tensor in weights(path).items() if "encoder" in name and "positions" in name}
    for view in ("keys", "values"):
        plot = document(cli, "--run", path, "--view", view)["plots"][0]
        [expected] = [tensor for name, tensor in tables.items() if name.endswith(view)]
        assert np.allclose(plot["values"], expected) and plot["rows"] == list(range(-3, 4))
    outcome = cli("viz-pe", "--run", path, "--layer", 1)
    assert outcome.code == 2 and "--layer 1: the encoder" in outcome.err


def test_a_fixed_kind_takes_its_sizes_from_the_run(run: Callable[[str], Path], cli: Callable[..., Any]) -> None:
    settings = document(cli, "--run", run("rope"))["settings"]
    assert (settings["d_model"], settings["heads"], settings["base"], settings["layout"]) == (8, 2, 500, "interleaved")
    assert document(cli, "--run", run("mixed"), "--encoding", "alibi")["settings"]["heads"] == 2


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        ("learned", ["--encoding", "rope"], "has no rope positions: found learned (decoder)"),
        ("learned", ["--stack", "encoder"], "--stack encoder:"),
        ("none", [], "has no positions that can be shown: found none (decoder)"),
        ("rope", ["--view", "bias"], "--view bias: rope has no such view"),
    ],
)
def test_mistakes(
    kind: str, arguments: list[str], words: str, run: Callable[[str], Path], cli: Callable[..., Any]
) -> None:
    outcome = cli("viz-pe", "--run", run(kind), *arguments)
    assert outcome.code == 2 and words in outcome.err and "Traceback" not in outcome.err
