"""`plot`, `viz-attention` and `viz-pe` as a user runs them."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.end_to_end.translate_runs import DECODER, SEQ2SEQ, build_run


def test_training_is_plotted_in_every_format(
    cli: Callable[..., Any], tmp_path: Path, text_file: Path, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for out, options in (("runs/one", ()), ("runs/two", ("--lr", 0.001))):
        trained = cli("train", "--config", tiny_recipe, "--data", text_file, "--out", out, *options)
        assert trained.code == 0, trained.err
    with open("runs/one/metrics.jsonl", "a") as stream:
        stream.write('{"split": "train", "st')  # as a kill leaves it

    outcome = cli("plot", "runs", "--metric", "all", "--x", "tokens", "--format", "json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert [run["name"] for run in document["runs"]] == ["one", "two"]
    found = {(series["split"], series["metric"]): series for series in document["series"] if series["run"] == "one"}
    assert {("train", "loss"), ("valid", "loss"), ("train", "lr"), ("train", "tokens_per_second"),
            ("train", "grad_norm"), ("valid", "bits_per_byte")} <= set(found)  # fmt: skip
    assert found["train", "loss"]["x"] == [192, 384, 576, 768], "4 sequences of 16 tokens a step, a record every 3"
    assert found["valid", "loss"]["x"] == [384, 768]

    for name in ("c.html", "c.svg", "c.png", "c.txt", "c.csv"):
        made = cli("plot", "one", "two", "--smooth", 0.5, "--x", "time", "--title", "Two rates", "-o", name)
        assert made.code == 0, made.err
        assert Path(name).stat().st_size > 500


Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(tmp_path_factory.mktemp("seq2seq"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(tmp_path_factory.mktemp("decoder"), DECODER)


def show(cli: Cli, run: Path, *arguments: object) -> Any:
    outcome = cli("viz-attention", run, *arguments)
    assert outcome.code == 0, outcome.err
    return outcome


def test_a_page_holds_all_three_attentions_of_a_translator(translator: Path, cli: Cli, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    outcome = show(cli, translator, "--text", "fed cab", "-o", page)
    assert outcome.out == "" and "wrote" in outcome.err
    text = page.read_text(encoding="utf-8")
    assert all(f'"kind":"{kind}"' in text for kind in ("encoder", "decoder", "cross"))
    assert "://" not in text.replace("http://www.w3.org/2000/svg", ""), "nothing is fetched from anywhere"


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("csv", b"attention,layer")])
@pytest.mark.parametrize("view", ["head", "model", "rollout", "summary"])
def test_every_view_in_every_format(
    view: str, suffix: str, start: bytes, translator: Path, cli: Cli, tmp_path: Path
) -> None:
    path = tmp_path / f"a.{suffix}"
    show(cli, translator, "--text", "fed cab", "--view", view, "-o", path)
    assert path.read_bytes().startswith(start)


def test_numbers_are_alone_on_standard_output(translator: Path, cli: Cli) -> None:
    document = json.loads(show(cli, translator, "--text", "fed cab", "--target", "abc", "--format", "json").out)
    cross = document["attention"]["cross"]
    assert cross["queries"]["tokens"] == ["[START]", "a", "b", "c"]
    assert cross["keys"]["tokens"] == ["[START]", *"fed cab", "[END]"]
    weights = np.array(cross["layers"][0]["heads"][0]["weights"])
    assert weights.shape == (4, 9)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    own = np.array(document["attention"]["decoder"]["layers"][0]["heads"][0]["weights"], dtype=float)
    assert np.isnan(own[np.triu_indices(4, 1)]).all()
    rows = csv.DictReader(io.StringIO(show(cli, translator, "--text", "a", "--view", "summary", "--format", "csv").out))
    assert {row["attention"] for row in rows} == {"encoder", "decoder", "cross"}


def test_the_terminal_shows_one_matrix_without_escapes_in_a_pipe(decoder: Path, cli: Cli) -> None:
    shown = show(cli, decoder, "--text", "abc", "--max-new-tokens", "3", "--format", "terminal").out
    assert "mean of heads" in shown and "\x1b" not in shown and "/" in shown


def test_the_terminal_shows_every_head_of_a_layer_that_is_chosen(decoder: Path, cli: Cli) -> None:
    shown = show(cli, decoder, "--text", "abc", "--layers", "0", "--top-k", "1", "--format", "terminal").out
    assert "head 0" in shown and "head 1" in shown and "mean of heads" not in shown


def test_heads_are_chosen_by_the_names_that_other_commands_print(decoder: Path, translator: Path, cli: Cli) -> None:
    def shown(run: Path, *words: str) -> list[tuple[str, str, str]]:
        outcome = cli("viz-attention", run, "--text", "fed", *words, "--view", "summary", "--format", "csv")
        assert outcome.code == 0, outcome.err
        return [(row["attention"], row["layer"], row["head"]) for row in csv.DictReader(io.StringIO(outcome.out))]

    found = json.loads(cli("lens", translator, "--text", "fed", "--target", "abc", "--format", "json").out)
    assert {"L0H0", "L0H1", "L0C0", "L0C1", "L0 feedforward"} <= set(found["parts"]["names"])
    assert shown(translator, "--heads", "L0C1") == [("cross", "0", "1")]
    assert shown(translator, "--heads", "l0h1, L0H0") == [("decoder", "0", "0"), ("decoder", "0", "1")]
    assert shown(translator, "--heads", "L0H1", "--attention", "encoder") == [("encoder", "0", "1")]
    best = json.loads(cli("heads", decoder, "--format", "json").out)["checkpoints"][0]["best"][0]
    assert shown(decoder, "--heads", best["name"]) == [("decoder", str(best["layer"]), str(best["head"]))]


def test_a_decoder_shows_its_own_continuation(decoder: Path, cli: Cli) -> None:
    outcome = show(cli, decoder, "--text", "abc", "--max-new-tokens", "4", "--format", "json")
    side = json.loads(outcome.out)["attention"]["decoder"]["queries"]
    assert side["tokens"][:3] == ["a", "b", "c"] and side["written_from"] == 3 and len(side["tokens"]) > 3
    assert "generated greedily by the model" in outcome.err


def test_options_of_the_picture_change_it(translator: Path, cli: Cli, tmp_path: Path) -> None:
    made = set()
    options: list[list[str]] = [[], ["--scale", "row"], ["--scale", "log"], ["--heads", "mean"], ["--heads", "1"]]
    for number, more in enumerate([*options, ["--hide-special"], ["--attention", "encoder"]]):
        path = tmp_path / f"{number}.svg"
        show(cli, translator, "--text", "fed", "--view", "head", "-o", path, *more)
        made.add(path.read_bytes())
    assert len(made) == 7


def test_images_are_laid_under_the_attention_of_their_patches(
    encoder_run: Callable[[str], Path], cli: Cli, tmp_path: Path
) -> None:
    run = encoder_run("image")
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(tmp_path / "x.png")
    for name in ("a.html", "a.png"):
        show(cli, run, "--image", tmp_path / "x.png", "-o", tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    found = json.loads(show(cli, run, "--image", tmp_path / "x.png", "--format", "json").out)
    assert found["attention"]["encoder"]["keys"]["tokens"][-4:] == ["0,0", "0,1", "1,0", "1,1"]


def test_a_folder_of_the_ecosystem_shows_what_the_run_shows(
    trained: Callable[[str], Path], cli: Cli, tmp_path: Path
) -> None:
    run = trained("pairs")
    assert cli("export", run, "--out", tmp_path / "hf").code == 0
    shown = [
        json.loads(show(cli, where, "--text", "the tool", "--text2", "a cat", "--format", "json").out)["attention"]
        for where in (run, tmp_path / "hf")
    ]
    matrices = [np.array(one["encoder"]["layers"][1]["heads"][1]["weights"]) for one in shown]
    assert shown[0]["encoder"]["queries"] == shown[1]["encoder"]["queries"]
    np.testing.assert_allclose(matrices[0], matrices[1], atol=1e-6)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_that_cannot_be_written_is_exit_code_3(decoder: Path, cli: Cli, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert cli("viz-attention", decoder, "--text", "abc", "-o", closed / "a.html").code == 3


def test_a_full_disk_is_exit_code_3(decoder: Path, cli: Cli) -> None:
    outcome = cli("viz-attention", decoder, "--text", "abc", "-o", "/proc/a.html")
    assert outcome.code == 3 and len(outcome.err.strip().splitlines()) <= 3


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
    found = document(cli, "--run", path)
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    assert np.allclose(found["plots"][0]["values"], unit @ unit.T, atol=1e-6) and found["encoding"] == "learned"
    assert found["run"]["trained"] and "random" not in found["run"]["name"]
    assert cli("viz-pe", "--run", path, "-o", tmp_path / "a.png").code == 0
    assert cli("viz-pe", "--run", path, "-o", tmp_path / "a.html").code == 0
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert 'id="blob-weight"' in page and "random initialization" not in page.split('id="data"')[0]
    compared = document(cli, "--run", path, "--compare", "all")
    assert "learned" in [line["label"] for line in compared["plots"][0]["lines"]]


def test_an_untrained_table_says_so(cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tformer.checkpoint.save as checkpoint

    save = checkpoint.save_checkpoint
    monkeypatch.setattr(
        checkpoint, "save_checkpoint", lambda run, step, contents: save(run, 0, replace(contents, trainer={"step": 0}))
    )
    path = build_run(tmp_path, DECODER)
    outcome = cli("viz-pe", "--run", path, "-o", tmp_path / "a.html")
    assert outcome.code == 0 and "random initialization" in outcome.err
    assert re.search(r'class="subtitle"[^>]*>[^<]*random initialization', (tmp_path / "a.html").read_text("utf-8"))
    assert "random initialization" in cli("viz-pe", "--run", path, "--format", "terminal").out
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


def test_shaws_clip_is_the_runs(run: Callable[[str], Path], cli: Callable[..., Any]) -> None:
    path = run("shaw")
    found = document(cli, "--run", path, "--positions", 10)
    assert found["settings"]["clip"] == 3 and np.max(found["plots"][0]["values"]) == 6
    outcome = cli("viz-pe", "--run", path, "--layer", 1)
    assert outcome.code == 2 and "--layer 1: the encoder" in outcome.err


def test_a_fixed_kind_takes_its_sizes_from_the_run(run: Callable[[str], Path], cli: Callable[..., Any]) -> None:
    settings = document(cli, "--run", run("rope"))["settings"]
    assert (settings["d_model"], settings["heads"], settings["base"]) == (8, 2, 500)
    assert document(cli, "--run", run("mixed"), "--encoding", "alibi")["settings"]["heads"] == 2


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        ("none", [], "has no positions that can be shown: found none (decoder)"),
        ("rope", ["--view", "bias"], "--view bias: rope has no such view"),
    ],
)
def test_mistakes(
    kind: str, arguments: list[str], words: str, run: Callable[[str], Path], cli: Callable[..., Any]
) -> None:
    outcome = cli("viz-pe", "--run", run(kind), *arguments)
    assert outcome.code == 2 and words in outcome.err and "Traceback" not in outcome.err
