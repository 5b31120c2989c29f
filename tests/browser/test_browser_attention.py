"""Attention's page in a browser: exact pixels, views, heads, keys, the URL, downloads, hostile tokens, 512 tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser.waiting import until
from tests.viz.attention_models import attention_of, random_attention, scene_of, signed_attention
from tformer.viz.attention.page import render
from tformer.viz.attention.weights import AttentionMaps, Changes, changed
from tformer.viz.plots import colour_table

HOSTILE = ["</script><script>window.hacked=1</script>", "<img src=x onerror=window.hacked=1>", "\u202eabc", "שלום",
           "👩‍👩‍👧", " \n\t", ""]  # fmt: skip
OPENED: dict[str, Any] = {"view": "head", "scale": "global", "top_k": 3, "max_bytes": 20e6}


@pytest.fixture
def shown(open_text: Callable[..., Any]) -> Callable[..., Any]:
    """`shown(attention, ..., hash="")`: the page of these attentions, drawn."""

    def show(*attentions: AttentionMaps, hash: str = "", changes: Changes = Changes(), **options: Any) -> Any:
        page = open_text(render(scene_of(*attentions, changes=changes), **OPENED), hash, **options)
        page.wait_for_selector("html[data-ready]")
        return page

    return show


def one_hot() -> AttentionMaps:
    """Two layers of two heads over four tokens; head h of layer l looks (l + h) tokens ahead, round the end."""
    weights = np.zeros((2, 2, 4, 4))
    for layer, head, row in np.ndindex(2, 2, 4):
        weights[layer, head, row, (row + layer + head) % 4] = 1
    return attention_of(weights, ["[CLS]", " un", "able", "[SEP]"])


def drawn(page: Any, name: str) -> None:
    until(page, f"document.documentElement.dataset.ready === {json.dumps(name)}")


def pixels(page: Any) -> np.ndarray:
    """uint8 [rows, columns, 4] of the first heat map."""
    code = """() => { const c = document.querySelector('#stage .cells canvas');
      return [c.height, c.width, ...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]; }"""
    height, width, *values = page.evaluate(code)
    return np.array(values, dtype=np.uint8).reshape(height, width, 4)


def colours(weights: np.ndarray) -> np.ndarray:
    table = np.frombuffer(colour_table("viridis"), dtype=np.uint8).reshape(256, 3)
    return table[np.floor(255 * weights + 0.5).astype(int)]


@pytest.mark.slow
def test_one_pixel_is_one_weight_and_masked_cells_have_no_colour(shown: Callable[..., Any]) -> None:
    attention = one_hot()
    page = shown(attention)
    np.testing.assert_array_equal(pixels(page)[..., :3], colours(attention.layers[0].weights_HTS[0]))
    causal = attention_of(np.eye(4)[None, None], list("abcd"), kind="decoder")
    cells = pixels(shown(causal))
    seen = np.tril(np.ones((4, 4), dtype=bool))
    assert (cells[seen][:, 3] == 255).all() and (cells[~seen][:, 3] == 0).all()


def test_layer_head_and_view_are_switched(shown: Callable[..., Any]) -> None:
    attention = one_hot()
    page = shown(attention)
    page.select_option("#layer", "1")
    page.select_option("#head", "1")
    drawn(page, "encoder head 1 1")
    np.testing.assert_array_equal(pixels(page)[..., :3], colours(attention.layers[1].weights_HTS[1]))
    page.select_option("#head", "mean")
    drawn(page, "encoder head 1 mean")
    np.testing.assert_array_equal(pixels(page)[..., :3], colours(attention.layers[1].weights_HTS.mean(0)))
    for view, words in (("model", "All heads"), ("rollout", "Rollout is the product"), ("summary", "Divergence")):
        page.locator(f"#controls input[value={view}]").check(force=True)
        until(page, f"document.documentElement.dataset.ready.includes('{view}')")
        assert words in page.locator("#stage").text_content()
    assert page.locator("#stage tbody tr").count() == 4


@pytest.mark.slow
def test_a_thumbnail_opens_its_head_by_key_and_arrows_move_between_them(shown: Callable[..., Any]) -> None:
    page = shown(one_hot(), hash="view=model")
    page.locator('[data-head="0.0"]').focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.head") == "1.1"
    page.keyboard.press("Enter")
    drawn(page, "encoder head 1 1")


@pytest.mark.slow
def test_keys_move_the_cursor_and_change_head_and_layer(shown: Callable[..., Any]) -> None:
    page = shown(one_hot())
    canvas = page.locator("#stage .cells canvas")
    canvas.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        canvas.press(key)
    assert page.locator("#stage .readout").first.text_content() == "able (2) → ␣un (1): 0.0000"
    assert page.locator("svg.links").get_attribute("aria-label").startswith("able looks most at able 1.000")
    page.keyboard.press("]")
    drawn(page, "encoder head 0 1")
    page.keyboard.press("}")
    drawn(page, "encoder head 1 1")
    page.keyboard.press("[")
    drawn(page, "encoder head 1 0")


@pytest.mark.slow
def test_a_click_on_a_token_shows_its_links(shown: Callable[..., Any]) -> None:
    page = shown(one_hot(), hash="head=1")
    page.locator('svg.links [data-query="3"]').click()
    until(
        page,
        "document.querySelector('svg.links').getAttribute('aria-label').startsWith('[SEP] looks most at [CLS] 1.000')",
    )
    assert page.locator("svg.links path").count() == 3
    page.fill("#top", "1")
    page.locator("#top").blur()
    until(page, "document.querySelectorAll('svg.links path').length === 1")


@pytest.mark.slow
def test_the_url_remembers_and_restores(shown: Callable[..., Any]) -> None:
    page = shown(one_hot(), hash="layer=1&head=1&scale=row&query=2&key=0&theme=dark")
    assert page.evaluate("document.documentElement.dataset.ready") == "encoder head 1 1"
    assert page.locator("#scale").input_value() == "row"
    assert page.locator("#stage .readout").first.text_content().startswith("able (2) → [CLS] (0): 1.0000")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.select_option("#layer", "0")
    until(page, "location.hash.includes('head=1') && !location.hash.includes('layer=1')")


@pytest.mark.slow
@pytest.mark.parametrize("changes", [Changes(True, False), Changes(False, True), Changes(True, True)])
def test_hidden_and_merged_tokens_are_those_of_python(changes: Changes, shown: Callable[..., Any]) -> None:
    attention = attention_of(np.full((1, 1, 4, 4), 0.25), ["[CLS]", " un", "able", "[SEP]"])
    page = shown(attention)
    if changes.hide_special:
        page.check("#hide")
    if changes.merge_subwords:
        page.check("#merge")
    until(
        page, f"document.querySelectorAll('#notes .notes').length === {changes.hide_special + changes.merge_subwords}"
    )
    expected = changed(attention, changes)
    until(page, f"document.querySelector('#stage .cells canvas')?.width === {len(expected.keys)}")
    found = page.evaluate("attention.matrix(attention.settings()).then((m) => [m.rows, m.cols, ...m.values])")
    assert found[:2] == [len(expected.queries), len(expected.keys)]
    np.testing.assert_allclose(found[2:], expected.layers[0].weights_HTS[0].ravel(), atol=0.01)


def test_weights_of_the_page_are_those_computed_to_a_step(shown: Callable[..., Any]) -> None:
    attention = random_attention(1, 2, 12, causal=True)
    page = shown(attention, hash="head=1")
    found = page.evaluate("attention.matrix(attention.settings()).then((m) => [...m.values])")
    expected = attention.layers[0].weights_HTS[1].ravel()
    assert (np.abs(np.array(found) - expected) <= np.sqrt(expected) / 255 + 1e-5).all()


@pytest.mark.slow
def test_downloads_hold_what_is_shown(shown: Callable[..., Any], tmp_path: Path) -> None:
    page = shown(one_hot())
    saved = {}
    for kind in ("PNG", "SVG", "CSV"):
        with page.expect_download() as waiting:
            page.get_by_role("button", name=kind).click()
        saved[kind] = waiting.value.path().read_bytes()
        assert waiting.value.suggested_filename == f"attention-encoder-0-0.{kind.lower()}"
    assert saved["PNG"].startswith(b"\x89PNG") and saved["SVG"].startswith(b"<svg")
    lines = saved["CSV"].decode().splitlines()
    assert lines[0] == "query,query_token,key,key_token,weight" and len(lines) == 17
    assert lines[1] == "0,[CLS],0,[CLS],1.000"


def test_hostile_tokens_are_inert_and_visible(shown: Callable[..., Any]) -> None:
    page = shown(attention_of(np.full((1, 1, 7, 7), 1 / 7), HOSTILE), hash="query=1")
    page.locator("details summary").click()
    until(page, "document.querySelectorAll('details tbody tr').length === 7")
    assert page.evaluate("window.hacked") is None and page.locator("#stage img").count() == 0
    text = page.locator("details").text_content()
    for words in (HOSTILE[0], "<img␣src=x␣onerror", "\\u202eabc", "שלום", "👩‍👩‍👧", "␣↵⇥", "∅"):
        assert words in text


@pytest.mark.slow
def test_no_two_elements_share_an_id(shown: Callable[..., Any]) -> None:
    page = shown(one_hot())
    twice = "[...document.querySelectorAll('[id]')].filter((e) => document.querySelectorAll('#' + e.id).length > 1)"
    assert page.evaluate(twice + ".map((e) => e.id)") == []


@pytest.mark.slow
def test_dark_and_narrow(shown: Callable[..., Any]) -> None:
    page = shown(random_attention(2, 8, 20), dark=True, width=360, hash="view=model")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    for view in ("model", "head", "rollout", "summary"):
        page.evaluate(f"tformer.state.set({{view: '{view}'}})")
        until(page, f"document.documentElement.dataset.ready.includes('{view}')")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
    page.click("#theme")
    until(page, "getComputedStyle(document.body).backgroundColor === 'rgb(255, 255, 255)'")


@pytest.mark.slow
def test_cross_attention_has_the_decoder_down_and_the_encoder_across(shown: Callable[..., Any]) -> None:
    weights = np.full((1, 1, 3, 5), 0.2)
    page = shown(attention_of(weights, list("xyz"), kind="cross", keys=list("abcde")))
    assert pixels(page).shape[:2] == (3, 5)
    titles: Sequence[str] = page.locator("#stage .axis").all_text_contents()
    assert titles[0].startswith("decoder") and titles[1].startswith("encoder")


@pytest.mark.slow
def test_all_heads_say_what_colours_and_hatching_mean(shown: Callable[..., Any]) -> None:
    page = shown(random_attention(2, 2, 6, causal=True), hash="view=model&scale=row")
    drawn(page, "decoder model 0 0")
    bar = page.locator("#stage .heads + .bar")
    assert bar.locator("canvas").count() == 1 and bar.locator(".swatch").count() == 1
    assert bar.text_content() == "share of the row's largest01a later token, which cannot be seen"


@pytest.mark.slow
def test_what_the_model_writes_is_told_from_what_it_was_given(shown: Callable[..., Any]) -> None:
    given = random_attention(1, 1, 4, causal=True)
    side = replace(given.queries, written_from=2)
    page = shown(replace(given, queries=side, keys=side), hash="query=0")
    said = page.locator("#stage svg + .caption")
    assert said.text_content() == "[CLS] is token 1 of 4. The next token is ␣word0."
    page.evaluate("tformer.state.set({query: 1})")
    until(page, "document.querySelector('#stage svg + .caption').textContent.endsWith('Here the model writes ␣word1.')")


@pytest.mark.slow
def test_negative_weights_are_shown_by_their_size_and_sign(shown: Callable[..., Any]) -> None:
    page = shown(signed_attention([[0.2, -0.6], [0.1, 0.3]], [" a", " b"]), hash="top=1")
    assert page.locator("svg.links").get_attribute("aria-label") == "␣a looks most at ␣b −0.600"
    assert page.locator("svg.links path[stroke-dasharray]").count() == 1
    assert page.locator("#scale").is_hidden() and page.locator("#colours").is_hidden()
    red, _, blue, _ = pixels(page)[0, 1]
    assert blue > red, "the blue end is below zero"
    page.evaluate("tformer.state.set({view: 'rollout'})")
    drawn(page, "encoder rollout 0 0")
    values = page.evaluate("attention.rollout(attention.settings()).then((m) => [...m.values])")
    np.testing.assert_allclose(values, [0.6, -0.3, 0.05, 0.65], atol=0.01)


@pytest.mark.slow
def test_144_heads_of_512_tokens_open_and_are_usable(shown: Callable[..., Any]) -> None:
    page = shown(random_attention(12, 12, 512))
    started = time.monotonic()
    page.reload()
    page.wait_for_selector("html[data-ready]")
    page.keyboard.press("]")
    drawn(page, "encoder head 0 1")
    # The promise is 5 s on an idle machine (measured by hand); here a loaded one must pass too.
    assert time.monotonic() - started < 120
    page.evaluate("tformer.state.set({view: 'model'})")
    drawn(page, "encoder model 0 1")
