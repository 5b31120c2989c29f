"""The page of shapes in a browser: following a tensor by click and keys, ties, state in the URL, hostile text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.waiting import until
from tformer.build import build_model
from tformer.nn.taps import LETTERS
from tformer.recipe.model import Model
from tformer.viz.page import render_shapes
from tformer.workflows.inspect.trace import empty_inputs, trace_shapes

HOSTILE = "</script><script>window.hacked=1</script>\u202e"
STACK = {"num_layers": 2, "num_heads": 4, "feedforward": {"d_ff": 24}, "dropout": 0.1}
SECTION = {"d_model": 16, "max_seq_len": 32, "vocab_size": 11, "encoder": STACK, "decoder": STACK}
TIED = {"tie": {"source_target": True, "output": True}, "embedding": {"scale": True}}
CHOSEN = "#path [aria-current]"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build_model(Model.model_validate({**SECTION, **TIED}), device="meta")
    trace = trace_shapes(model, empty_inputs(model, source_length=5, target_length=4)).to_json()
    example = {
        "objective": {"seq2seq": "the target"},
        "original": {"source": {"text": HOSTILE}, "target": {"text": "b"}},
        "input_ids": {"ids": [0, 1], "tokens": ["[START]", HOSTILE]},
        "decoder_input_ids": {"ids": [0], "tokens": ["[START]"]},
        "labels": {"ids": [None], "tokens": [None]},
    }
    path = tmp_path_factory.mktemp("page") / "shapes.html"
    content = render_shapes({"": trace}, subtitle=HOSTILE, names=LETTERS, example=example)
    path.write_text(content, encoding="utf-8")
    return path


def chosen(page: Any) -> str:
    return page.locator(f"{CHOSEN} > span").first.text_content()


def marked(page: Any, kind: str) -> list[str]:
    return page.locator(f"#path .step.{kind} > span:first-child").all_text_contents()


def test_keys_follow_a_tensor_through_the_layers(page_file: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(page_file)
    assert chosen(page) == "ids" and page.locator("#path .step").count() == page.evaluate("""
        tformer.data.models[0].sections.reduce((sum, section) => sum + section.steps.length, 0)""")
    page.keyboard.press("ArrowRight")
    until(page, f"document.querySelector('{CHOSEN}').textContent.startsWith('tokens')")
    for name in ("scaled", "sum", "input"):
        page.keyboard.press("ArrowRight")
        until(page, f"document.querySelector('{CHOSEN}').textContent.startsWith('{name}')")
    page.keyboard.press("ArrowLeft")
    until(page, f"document.querySelector('{CHOSEN}').textContent.startsWith('sum')")
    page.keyboard.press("End")
    until(page, f"document.querySelector('{CHOSEN}').textContent.startsWith('loss')")
    assert marked(page, "from") == ["logits", "labels"] and marked(page, "to") == []
    assert "end of the path" in page.locator("#detail").text_content()
    page.keyboard.press("Home")
    until(page, f"document.querySelector('{CHOSEN}').textContent.startsWith('ids')")
    page.keyboard.press("ArrowUp")
    assert chosen(page) == "ids"


def test_a_click_shows_named_dimensions_inputs_outputs_and_parameters(
    page_file: Path, open_page: Callable[..., Any]
) -> None:
    page = open_page(page_file, "step=decoder.0.cross_attention.scores")
    assert page.locator("#detail h2").text_content() == "scores"
    assert page.locator("#detail .dim b").all_text_contents() == ["1", "4", "4", "5"]
    assert page.locator("#detail .dim small").all_text_contents() == [
        "examples",
        "heads",
        "positions",
        "source positions",
    ]
    assert marked(page, "from") == ["Q", "K"] and marked(page, "to") == ["weights"]
    page.locator("#detail .links button", has_text="K").first.click()
    until(page, "location.hash.includes('decoder.0.cross_attention.keys')")
    page.locator("#detail .links button", has_text="KV product").click()
    until(page, "document.querySelector('#detail h2').textContent === 'KV product'")
    assert marked(page, "from") == ["final norm"], "keys and values come from the encoder's output"
    assert "decoder.blocks.0.cross_attention.kv.weight" in page.locator("#detail table").text_content()
    assert "the others have the same shapes" in page.locator("#detail").text_content()


def test_ties_and_the_way_from_layer_to_layer_are_shown(page_file: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(page_file, "step=head.lm.logits")
    table = page.locator("#detail table").text_content()
    assert "tied to" in table and "embedding.weight, decoder_embedding.weight" in table and "176" in table
    page.locator("#path .step", has_text="residual").nth(1).click()
    until(page, "document.querySelector('#detail h2').textContent === 'residual'")
    assert "in the next layer" in page.locator("#detail").text_content()


def test_the_example_is_text_and_never_markup(page_file: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(page_file)
    assert page.evaluate("window.hacked") is None
    shown = page.locator("#example").text_content()
    assert "</script><script>window.hacked=1</script>" in shown and "\\u202e" in shown and "·" in shown


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_page_does_not_scroll_sideways_and_keeps_the_details_in_sight(
    dark: bool, page_file: Path, open_page: Callable[..., Any]
) -> None:
    page = open_page(page_file, "step=decoder.1.feedforward.up", width=400, height=800, dark=dark)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.locator("#path .step", has_text="active").first.click()
    until(page, "document.querySelector('#detail h2').textContent === 'active'")
    box = page.locator("#detail h2").bounding_box()
    assert 0 <= box["y"] < 800
    step = page.locator(CHOSEN).bounding_box()
    assert step["y"] >= 0 and step["y"] + step["height"] <= page.locator("#detail").bounding_box()["y"] + 1


@pytest.mark.slow
def test_two_models_are_shown_one_after_the_other(open_text: Callable[..., Any]) -> None:
    model = build_model(Model.model_validate({**SECTION, "encoder": None}), device="meta")
    trace = trace_shapes(model, empty_inputs(model, source_length=5)).to_json()
    text = render_shapes({"GENERATOR": trace, "DISCRIMINATOR": trace}, subtitle="", names=LETTERS)
    page = open_text(text, "step=1:decoder.embedding.tokens")
    assert page.locator("#path h2.model").all_text_contents() == ["GENERATOR", "DISCRIMINATOR"]
    assert "DISCRIMINATOR" in page.locator("#detail .place").text_content()
    page.keyboard.press("ArrowLeft")
    until(page, "location.hash.includes('1%3Adecoder.embedding.ids')")
