"""The site of the guide: its pages, links, anchors and pictures; nothing unescaped; folders that it may replace."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tformer.guide import TOPICS, sections
from tformer.support.errors import InputError
from tformer.viz.guide import render_markdown, render_site, write_site

HOSTILE = """\
# A title

Text <script>alert(1)</script> and [a link](javascript:alert(1)), `<b>code</b>`, [rows](../data/README.md#x),
[stopping](security.md#what-is-sent), [here](#a-heading), [out](https://example.org).

## A `heading` <i>

| a | b |
|---|--:|
| <img src=x onerror=alert(1)> | 2 |

```bash
echo "<x>" [no](link.md)
```
"""


class Found(HTMLParser):
    """Addresses and anchors of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.pictures: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors.add(values.get("id") or "")
        if tag == "a":
            self.links.append(values.get("href") or "")
        if tag == "img":
            self.pictures.append(values.get("src") or "")


@pytest.fixture(scope="module")
def site() -> dict[str, str]:
    return render_site()


def test_every_topic_has_a_page_and_the_first_lists_them(site: dict[str, str]) -> None:
    assert list(site) == ["index.html", *(f"{topic}.html" for topic in TOPICS)]
    links = Found(site["index.html"]).links
    assert {f"{topic}.html" for topic in TOPICS} <= set(links)


def test_every_link_leads_to_a_page_and_an_anchor_of_it(site: dict[str, str]) -> None:
    found = {name: Found(page) for name, page in site.items()}
    for name, page in found.items():
        for link in page.links:
            if not link.startswith("https://"):
                file, _, anchor = link.partition("#")
                target = found[file or name]
                assert not anchor or anchor in target.anchors, f"{name}: {link}"
        assert all(picture.startswith("data:image/") for picture in page.pictures), name


@pytest.mark.parametrize("topic", TOPICS)
def test_every_heading_has_an_anchor(topic: str, site: dict[str, str]) -> None:
    anchors = Found(site[f"{topic}.html"]).anchors
    assert {section.anchor for section in sections(topic)[1:]} <= anchors


@pytest.mark.parametrize("topic", TOPICS)
def test_the_navigation_has_the_headings_of_the_second_level(topic: str, site: dict[str, str]) -> None:
    navigation = site[f"{topic}.html"].partition("<nav")[2].partition("</nav>")[0]
    headings = [link.removeprefix("#") for link in Found(navigation).links if link.startswith("#")]
    assert headings == [section.anchor for section in sections(topic) if section.level == 2]


def test_raw_html_and_scripts_in_the_markdown_are_text() -> None:
    html = render_markdown("security", HOSTILE)
    assert set(re.findall(r"</?([a-z0-9]+)", html)) == {
        "p", "a", "code", "span", "h2", "div", "table", "thead", "tbody", "tr", "th", "td", "pre",
    }  # fmt: skip
    assert Found(html).links == [
        "security.html#what-is-sent", "security.html#a-heading", "https://example.org", "#a-heading-i",
    ]  # fmt: skip
    assert "rows (<code><span>tformer/data/README.md</span></code>)" in html and "[no](link.md)" in html
    assert "A title" not in html, "the title is the page's"


def test_pictures_are_inside_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.svg").write_text("<svg/>")
    monkeypatch.setattr("tformer.viz.guide.FOLDER", tmp_path)
    assert Found(render_markdown("security", "# T\n\n![p](a.svg)\n")).pictures == ["data:image/svg+xml;base64,PHN2Zy8+"]


def test_an_older_site_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "site"
    assert write_site(folder)[0] == "index.html"
    (folder / "old-topic.html").write_text((folder / "security.html").read_text())
    write_site(folder)
    assert {path.name for path in folder.iterdir()} == {"index.html", *(f"{topic}.html" for topic in TOPICS)}
    (folder / "mine.html").write_text("mine")
    with pytest.raises(InputError, match=r"site is not empty \(it holds mine\.html\)"):
        write_site(folder)
    assert (folder / "mine.html").read_text() == "mine"
    with pytest.raises(InputError, match="is a file, expected a folder"):
        write_site(folder / "mine.html")
    with pytest.raises(InputError, match="has no name"):
        write_site(Path("."))


def test_the_command_says_what_to_open(cli: Callable[..., Any], tmp_path: Path) -> None:
    done = cli("guide", "--html", tmp_path / "site")
    assert done.code == 0 and done.out == f"{tmp_path / 'site'}\n" and "open index.html in a browser" in done.err
    assert "leave out 'security'" in cli("guide", "security", "--html", tmp_path / "other").err
    assert not (tmp_path / "other").exists()
