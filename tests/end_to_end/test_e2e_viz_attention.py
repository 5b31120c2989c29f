"""`tformer viz-attention` as a person runs it: every kind of model, every format, and their mistakes."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.end_to_end.translate_runs import DECODER, build_run, refusal

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
    page = tmp_path / "new" / "page.html"
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
    assert "mean of heads" in shown and "\x1b" not in shown and "·" in shown


def test_a_decoder_shows_its_own_continuation(decoder: Path, cli: Cli) -> None:
    outcome = show(cli, decoder, "--text", "abc", "--max-new-tokens", "4", "--format", "json")
    side = json.loads(outcome.out)["attention"]["decoder"]["queries"]
    assert side["tokens"][:3] == ["a", "b", "c"] and side["written_from"] == 3 and len(side["tokens"]) > 3
    assert "the model's own" in outcome.err


def test_options_of_the_picture_change_it(translator: Path, cli: Cli, tmp_path: Path) -> None:
    made = set()
    options: list[list[str]] = [[], ["--scale", "row"], ["--scale", "log"], ["--heads", "mean"], ["--heads", "1"]]
    for number, more in enumerate([*options, ["--hide-special"], ["--attention", "encoder"], ["--colours", "cividis"]]):
        path = tmp_path / f"{number}.svg"
        show(cli, translator, "--text", "fed cab", "--view", "head", "-o", path, *more)
        made.add(path.read_bytes())
    assert len(made) == 8


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
    assert "of images" in refusal(cli("viz-attention", run, "--text", "a"))


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


def test_mistakes_are_one_line(translator: Path, decoder: Path, cli: Cli, tmp_path: Path) -> None:
    def refused(run: Path, *arguments: object) -> str:
        return refusal(cli("viz-attention", run, "--text", "abc", "-o", tmp_path / "a.html", *arguments))

    assert "has no cross-attention" in refused(decoder, "--attention", "cross")
    assert "--target" in refused(decoder, "--target", "abc")
    assert "--layers: 7 is out of range" in refused(translator, "--layers", "7")
    assert "--heads: 7 is out of range" in refused(translator, "--heads", "0,7")
    assert "do not fit into 0.01 MB" in refused(translator, "--max-megabytes", "0.01")
    assert "reads at most 16" in refusal(cli("viz-attention", decoder, "--text", "a" * 40))
    assert "nothing" in refusal(cli("viz-attention", decoder))
    assert not (tmp_path / "a.html").exists()


def test_a_page_that_is_too_large_names_the_flags(translator: Path, cli: Cli, tmp_path: Path) -> None:
    outcome = cli("viz-attention", translator, "--text", "abc", "-o", tmp_path / "a.html", "--max-megabytes", "0.01")
    assert all(flag in outcome.err for flag in ("--layers", "--heads", "--max-tokens")) and outcome.code == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_that_cannot_be_written_is_exit_code_3(decoder: Path, cli: Cli, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert cli("viz-attention", decoder, "--text", "abc", "-o", closed / "a.html").code == 3


def test_a_full_disk_is_exit_code_3(decoder: Path, cli: Cli) -> None:
    outcome = cli("viz-attention", decoder, "--text", "abc", "-o", "/proc/a.html")
    assert outcome.code == 3 and len(outcome.err.strip().splitlines()) <= 3
