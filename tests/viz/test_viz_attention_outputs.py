"""The page, figures, terminal text, JSON and CSV of attention made by hand."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.viz.attention_models import attention_of, random_attention, scene_of, signed_attention
from tests.viz.pages import page_data, script_bytes
from tformer.support.errors import InputError
from tformer.viz.attention.figures import SMALL, Scale, blocks_of, draw, norm_of
from tformer.viz.attention.page import render
from tformer.viz.attention.scene import Scene
from tformer.viz.attention.text import as_csv, as_json, as_text
from tformer.viz.attention.weights import Changes

OPENED: dict[str, Any] = {"view": "head", "scale": "sqrt", "top_k": 3}
SCALES: tuple[Scale, ...] = ("global", "sqrt", "row", "log")
HOSTILE = ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\u202eabc", "😀", "$x^2$", "\x1b[31m"]


def test_a_page_of_64_tokens_is_below_a_megabyte_with_less_than_60_kilobytes_of_script() -> None:
    page = render(scene_of(random_attention(12, 12, 64)), **OPENED, max_bytes=20e6)
    assert len(page.encode()) <= 1e6 and script_bytes(page) < 60_000


@pytest.mark.slow
def test_a_page_of_512_tokens_is_below_20_megabytes() -> None:
    """Its quick twin is the test above."""
    scene = scene_of(random_attention(12, 12, 512))
    assert len(render(scene, **OPENED, max_bytes=20e6).encode()) <= 20e6


def test_a_page_that_is_too_large_is_refused_with_the_flags_that_help() -> None:
    with pytest.raises(InputError) as caught:
        render(scene_of(random_attention(2, 2, 16)), **OPENED, max_bytes=1000)
    assert "do not fit into 0.001 MB" in caught.value.message
    assert all(flag in (caught.value.hint or "") for flag in ("--layers", "--heads", "--max-tokens"))


def test_fewer_steps_are_taken_before_a_page_is_refused_and_it_is_said() -> None:
    scene = scene_of(random_attention(4, 8, 64), rollouts=False)
    fine = render(scene, **OPENED, max_bytes=1e9)
    coarse = render(scene, **OPENED, max_bytes=len(fine.encode()) - 1)
    assert len(coarse) < len(fine) and "rounded to 255 steps" in fine and "rounded to 2" in coarse


def test_equal_attention_gives_equal_pages() -> None:
    pages = {render(scene_of(random_attention(1, 2, 8)), **OPENED, max_bytes=1e7) for _ in range(2)}
    assert len(pages) == 1


def test_hostile_tokens_stay_inside_the_data() -> None:
    page = render(scene_of(attention_of(np.full((1, 1, 6, 6), 1 / 6), HOSTILE)), **OPENED, max_bytes=1e7)
    assert "<script>alert" not in page and "<img src" not in page and "\x1b" not in page.split("</footer>")[0]
    assert page_data(page)["sides"]["encoder"]["tokens"] == HOSTILE


def test_the_footer_says_what_was_shown_and_that_it_is_no_explanation() -> None:
    page = render(scene_of(random_attention(1, 1, 4), command="tformer viz-attention X"), **OPENED, max_bytes=1e7)
    for words in ("not by itself an explanation", "sha256 abababab", "tformer viz-attention X", "Text: "):
        assert words in page


# --- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", ["head", "model", "rollout", "summary"])
def test_figures_are_equal_for_equal_attention(view: str) -> None:
    scene = scene_of(random_attention(2, 1, 5, causal=True))
    pictures = {draw(scene, "decoder", view, format_="svg", scale="sqrt") for _ in range(2)}
    [picture] = pictures
    assert picture.startswith(b"<?xml") and b"<dc:date>" not in picture
    assert draw(scene, "decoder", view, format_="png", scale="row").startswith(b"\x89PNG")


def test_figures_hatch_what_cannot_be_seen_and_survive_any_token() -> None:
    causal = draw(scene_of(random_attention(1, 1, 8, causal=True)), "decoder", "head", format_="svg", scale="global")
    both = draw(scene_of(random_attention(1, 1, 8)), "encoder", "head", format_="svg", scale="global")
    assert b"<pattern" in causal and b"<pattern" not in both
    draw(scene_of(attention_of(np.full((1, 1, 6, 6), 1 / 6), HOSTILE)), "encoder", "head", format_="png", scale="log")


@pytest.mark.parametrize("view", ["head", "rollout"])
def test_the_caption_of_a_small_picture_is_not_cut_off(view: str) -> None:
    picture = draw(scene_of(random_attention(1, 1, 4)), "encoder", view, format_="png", scale="linear")
    pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("L"))
    assert (pixels[:, [0, -1]] == pixels[0, 0]).all()


def words_of(scene: Scene, view: str) -> list[str]:
    """The texts of a picture; matplotlib writes each as a comment beside its outlines."""
    return re.findall(r"<!-- (.*?) -->", draw(scene, "decoder", view, format_="svg", scale="global").decode())


@pytest.mark.parametrize(("layers", "heads", "tokens"), [(1, 2, 8), (2, 2, 8), (1, 2, 40)])
def test_a_picture_of_several_heads_names_tokens_queries_keys_layers_and_heads(
    layers: int, heads: int, tokens: int
) -> None:
    attention = random_attention(layers, heads, tokens, causal=True)
    words = words_of(scene_of(attention), "model")
    for number in range(tokens - 2):
        assert words.count(f"␣word{number}") == layers + heads, "beside each row, below each column"
    assert words.count("key") == heads and words.count("query") == layers
    assert {f"layer {n}" for n in range(layers)} | {f"head {n}" for n in range(heads)} <= set(words)


def test_a_picture_of_all_layers_and_heads_says_which_is_which_where_tokens_do_not_fit() -> None:
    words = words_of(scene_of(random_attention(2, 3, 100, causal=True)), "model")
    assert not any("word" in word for word in words)
    assert {"layer 0", "layer 1", "head 0", "head 1", "head 2"} <= set(words)
    assert words.count("key") == 3 and words.count("query") == 2


def test_chosen_heads_of_different_layers_all_have_names() -> None:
    attention = random_attention(2, 2, 6, causal=True)
    layers = [replace(layer, heads=(n,), weights_HTS=layer.weights_HTS[:1])
              for n, layer in zip((1, 0), attention.layers, strict=True)]  # fmt: skip
    words = words_of(scene_of(replace(attention, layers=tuple(layers)), rollouts=False), "model")
    assert {"layer 0", "layer 1", "head 0", "head 1"} <= set(words) and words.count("␣word0") == 4


def test_more_heads_than_fit_a_figure_are_refused() -> None:
    with pytest.raises(InputError, match="do not fit") as caught:
        draw(scene_of(random_attention(5, 4, 4)), "encoder", "head", format_="png", scale="sqrt")
    assert "--layers" in (caught.value.hint or "")


def test_a_scale_spans_what_it_colours() -> None:
    weights = np.array([[0.25, 0.5], [0.0, 0.125]], dtype=np.float32)
    ends = {scale: (norm.vmin, norm.vmax) for scale in SCALES for norm in [norm_of(scale, [weights])]}
    assert ends == {"global": (0, 0.5), "sqrt": (0, 0.5), "row": (0, 1), "log": (1e-4, 1)}
    signed = [norm_of(scale, [weights, weights - 1]) for scale in SCALES]
    assert all((norm.vmin, norm.vmax) == (-1, 1) for norm in signed), "zero is white, whatever the scale"


def test_small_pictures_keep_the_largest_of_each_block_by_size() -> None:
    matrix = np.zeros((2 * SMALL, 2 * SMALL), dtype=np.float32)
    matrix[7, 9], matrix[20, 30] = -0.5, 0.25
    small = blocks_of(matrix)
    assert small.shape == (SMALL, SMALL) and small[3, 4] == -0.5 and small[10, 15] == 0.25
    assert blocks_of(matrix < 0).sum() == 1


def test_negative_weights_show_in_every_format() -> None:
    attention = signed_attention([[0.2, -0.6, 0.1], [0.1, -0.5, 0.3], [0.0, 0.1, -0.875]], [" a", " b", " c"])
    scene = scene_of(attention)
    page = render(scene, **OPENED, max_bytes=20e6)
    assert '"mask":null,"signed":true,"unit":' in page, "so is the rollout's"
    assert '"largest":0.875' in page
    shown = as_text(scene, "encoder", "head", scale="global", top_k=1, width=80, colour="none")
    assert "␣b -0.600" in shown and "sizes without their signs" in shown
    assert json.loads(as_json(scene, "rollout"))["attention"]["encoder"]["rollout"][0][1] == pytest.approx(-0.3)
    for view in ("head", "model", "rollout"):
        picture = draw(scene, "encoder", view, format_="svg", scale="row")
        assert b"effective weight" in picture and b"share of the largest" not in picture


# --- text and numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [5, 120])
@pytest.mark.parametrize("view", ["head", "rollout", "summary"])
def test_text_fits_the_terminal(view: str, tokens: int) -> None:
    scene = scene_of(random_attention(1, 1, tokens, causal=True))
    shown = as_text(scene, "decoder", view, scale="row", top_k=2, width=80, colour="none")
    assert "\x1b" not in shown and "not by itself an explanation" in shown
    body = shown.split("Attention shows")[0]
    if view != "rollout":
        assert max(map(len, body.splitlines())) <= 80
    if view != "summary":
        assert "/: cannot be seen" in shown


def test_text_has_colours_only_when_asked() -> None:
    scene = scene_of(random_attention(1, 1, 5))
    assert ";48;2;" in as_text(scene, "encoder", "head", scale="sqrt", top_k=1, width=80, colour="truecolor")
    assert ";48;5;" in as_text(scene, "encoder", "head", scale="sqrt", top_k=1, width=80, colour="256")


def test_control_characters_of_tokens_do_not_reach_the_terminal() -> None:
    scene = scene_of(attention_of(np.full((1, 1, 6, 6), 1 / 6), HOSTILE))
    shown = as_text(scene, "encoder", "head", scale="sqrt", top_k=6, width=200, colour="none")
    assert "\x1b" not in shown and "\u202e" not in shown


def test_csv_and_json_tell_the_same() -> None:
    scene = scene_of(random_attention(2, 2, 4, causal=True))
    rows = list(csv.DictReader(io.StringIO(as_csv(scene, "head"))))
    document = json.loads(as_json(scene, "head"))
    assert len(rows) == 2 * 2 * 4 * 4
    for row in rows:
        layer = document["attention"]["decoder"]["layers"][int(row["layer"])]
        weight = layer["heads"][int(row["head"])]["weights"][int(row["query"])][int(row["key"])]
        assert (row["weight"] == "") == (weight is None)
        assert weight is None or float(row["weight"]) == pytest.approx(weight, abs=1e-8)


def test_summary_and_rollout_are_exported() -> None:
    scene = scene_of(random_attention(2, 2, 4, causal=True), changes=Changes(hide_special=True))
    summary = json.loads(as_json(scene, "summary"))["attention"]["decoder"]
    assert len(summary["heads"]) == 4 == len(summary["divergence"])
    rows = list(csv.DictReader(io.StringIO(as_csv(scene, "summary"))))
    assert [row["head"] for row in rows] == ["0", "1", "0", "1"] and rows[0]["attention"] == "decoder"
    rolled = json.loads(as_json(scene, "rollout"))["attention"]["decoder"]
    assert rolled["rollout"][0][1] is None and rolled["queries"]["tokens"] == [" word0", " word1"]
    assert len(list(csv.DictReader(io.StringIO(as_csv(scene, "rollout"))))) == 4
