"""The page of a server in a browser: write, choose another token, look inside; two models; labels, masks, pairs."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.waiting import until

if not all(map(importlib.util.find_spec, ("starlette", "uvicorn"))):
    pytest.skip("starlette or uvicorn is not installed", allow_module_level=True)

from tests.serve.conftest import LABELS, LETTERS, MASKED, PAIRS, TAGS, Server, make_gpt, served, silence

pytestmark = pytest.mark.slow
KEY = "a key"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from tests.random_runs import random_run

    home, common = tmp_path_factory.mktemp("played") / "runs", {"letters": LETTERS}
    runs = [make_gpt(home), make_gpt(home, seed=1)]
    runs.append(random_run(home, PAIRS, arch="pairs", change=silence, **common))
    runs += [
        random_run(home, text, arch=name, template="bert", **common)
        for name, text in (("masked", MASKED), ("labels", LABELS), ("tags", TAGS))
    ]
    with served(*runs) as found:
        yield found


@pytest.fixture
def page(chromium: Any, server: Server) -> Iterator[Any]:
    troubles: list[str] = []
    found = chromium.new_page(viewport={"width": 400, "height": 900})
    found.set_default_timeout(60_000)
    found.on("pageerror", lambda error: troubles.append(str(error)))
    found.on(
        "request",
        lambda request: request.url.startswith((server.url, "blob:", "data:")) or troubles.append(request.url),
    )
    found.goto(server.url + "/")
    until(found, "document.querySelector('#model').value !== ''")
    yield found
    assert found.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "fits 400 pixels"
    found.close()
    assert not troubles, troubles


def written(page: Any, text: str, count: int = 6) -> None:
    page.fill("#tokens", str(count))
    page.locator("#tokens").press("Enter")
    page.fill("#prompt", text)
    page.keyboard.press("Control+Enter")
    until(page, "document.querySelectorAll('#sides .tokens span[title$=\"%\"]').length > 0")


def test_another_token_is_chosen_and_the_model_goes_on(page: Any) -> None:
    written(page, "abc")
    page.locator("#sides .tokens [data-token='3']").click()
    until(page, "document.querySelector('#detail h2') !== null")
    others = page.locator("#detail .row").first.locator("button")
    assert others.count() == 8, "the most probable tokens"
    wanted = others.nth(2).text_content().split(" ")[0]
    others.nth(2).click()
    until(page, "document.querySelector('#detail').children.length === 0")
    until(page, f"document.querySelector('#sides .tokens [data-token=\"3\"]').textContent === {wanted!r}")
    assert page.locator("#sides .tokens [data-token='2']").text_content() == "c", "what stands before it stays"


@pytest.mark.parametrize(
    ("button", "there"), [("Attention", "canvas"), ("Answer of each layer", "table"), ("What mattered", ".tokens")]
)
def test_a_token_is_looked_at_by_keys_alone(page: Any, button: str, there: str) -> None:
    written(page, "abc")
    page.locator("#sides .tokens").focus()
    page.keyboard.press("ArrowLeft")
    until(page, "document.querySelector('#detail h2') !== null")
    page.get_by_role("button", name=button, exact=True).focus()
    page.keyboard.press("Enter")
    until(page, f"document.querySelector('#detail div {there}') !== null")


def test_two_models_answer_side_by_side_and_the_request_is_told(page: Any) -> None:
    page.select_option("#beside", index=1)
    written(page, "abc")
    until(page, "document.querySelectorAll('#sides section .tokens').length === 2")
    curl = page.locator("#request pre").first.text_content()
    assert curl.startswith("curl http://127.0.0.1:") and '"prompt":"abc"' in curl


def test_translation_labels_and_masks(page: Any) -> None:
    for mode, text, there in (
        ("translate", "abc de", "document.querySelectorAll('#sides .tokens').length === 2"),
        (
            "classify",
            "abc de",
            "document.querySelectorAll('#sides tbody tr').length === 2 && document.querySelector('#sides .tokens')",
        ),
        ("fill", "ab [MASK]", "document.querySelectorAll('#sides .row button').length > 2"),
    ):
        page.select_option("#mode", mode)
        until(page, "document.querySelector('#model').value !== ''")
        page.fill("#prompt", text)
        page.keyboard.press("Control+Enter")
        until(page, f"Boolean({there})")
    page.locator("#sides .row button").first.click()
    assert "[MASK]" not in page.input_value("#prompt")


def test_spans_of_a_text_are_a_table(page: Any) -> None:
    page.select_option("#mode", "classify")
    page.select_option("#model", "tags-tiny-1")
    page.fill("#prompt", "abc de")
    page.keyboard.press("Control+Enter")
    until(page, "document.querySelector('#sides table, #sides .caption').textContent.includes('Label')")
    assert all(row.startswith("X ") for row in page.locator("#sides tbody tr").all_text_contents())
    assert "answers no prompt" not in page.locator("#sides").text_content()


def test_an_error_is_told_beside_the_model(page: Any) -> None:
    page.fill("#prompt", "a" * 100)
    page.keyboard.press("Control+Enter")
    until(page, "document.querySelector('#sides .caption').textContent.includes('context')")


def test_a_server_with_a_key_asks_for_it(chromium: Any, tmp_path: Path) -> None:
    run = make_gpt(tmp_path / "runs")
    with served(run, TFORMER_API_KEY=KEY) as server:
        page = chromium.new_page()
        page.goto(server.url + "/")
        until(page, "!document.querySelector('#key-row').hidden")
        page.fill("#key", KEY)
        page.get_by_role("button", name="Use").click()
        until(page, "document.querySelector('#model').value !== ''")
        page.close()


def test_names_labels_and_tokens_are_shown_as_text(chromium: Any, tmp_path: Path) -> None:
    from tests.random_runs import random_run

    label = '<img src="x" onerror="document.title = 1">'
    recipe, letters = LABELS.replace("[bad, good]", json.dumps([label, "good"])), LETTERS + "<>/"
    run = random_run(tmp_path / "runs", recipe, arch="labels", template="bert", letters=letters)
    with served(run.rename(run.with_name("<i>x"))) as server:
        page = chromium.new_page()
        page.goto(server.url + "/")
        until(page, "document.querySelector('#model').value === '<i>x'")
        page.fill("#prompt", "<b>a")
        page.keyboard.press("Control+Enter")
        until(page, "document.querySelector('#sides .tokens') !== null")
        assert label in page.text_content("#sides tbody")
        assert page.locator("main img, main i, main b").count() == 0 and page.title() == "tformer"
        page.close()
