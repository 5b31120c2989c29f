"""The user guide as a site: a page a topic, and a first page that lists them; no network.

Every page has the list of topics, its own headings, and a search over all topics, whose text is in every page.
Raw HTML in the Markdown is text. Pictures are inside the pages.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tformer.guide import FOLDER, LINK, TOPICS, anchor_of, read_topic, rewrite_links, sections
from tformer.support.errors import InputError
from tformer.support.files import publish_directory, storage_errors, write_text
from tformer.viz.page import render_page

HOME = "index"
WITHOUT = ("controls.js", "pictures.js", "heatmap.js", "lines.js", "table.js")
MARK = 'id="blob-guide"'
"""In every page: a folder of nothing but such pages may be replaced."""
BODY = """\
<div class="guide">
<nav aria-label="Guide">
<input type="search" id="query" placeholder="Search" aria-label="Search the guide">
<ul class="topics">
{links}
</ul>
</nav>
<article>
<div id="found" aria-live="polite" hidden></div>
<div id="text">
{text}</div>
</article>
</div>"""
MIME = {".svg": "image/svg+xml", ".png": "image/png"}


def write_site(folder: Path) -> list[str]:
    """Write the pages into a folder that is new, empty, or holds such a site; the names of the pages, the first first.

    Raises:
        InputError: the folder holds something else.
        StorageError: the disk refuses.
    """
    pages = render_site()
    with storage_errors(folder):
        if not folder.name:
            raise InputError(f"{folder} has no name, expected the name of a new folder")
        if os.path.lexists(folder) and not folder.is_dir():
            raise InputError(f"{folder} is a file, expected a folder")
        found = sorted(folder.iterdir()) if folder.is_dir() else []
        if foreign := next((path.name for path in found if not _is_page(path)), None):
            hint = "choose another folder with --html"
            raise InputError(f"{folder} is not empty (it holds {foreign})", hint=hint)

        def fill(target: Path) -> None:
            for name, page in pages.items():
                write_text(target / name, page)

        publish_directory(folder, fill)
    return list(pages)


def _is_page(path: Path) -> bool:
    return path.suffix == ".html" and path.is_file() and MARK.encode() in path.read_bytes()


def render_site() -> dict[str, str]:
    """{name of the file: page}, the list of topics first."""
    index = [
        [one.topic, one.anchor if one.level > 1 else "", one.heading, _title(topic), _words(one.text)]
        for topic in TOPICS
        for one in sections(topic)
    ]
    blob = json.dumps(index, ensure_ascii=False).encode()
    listed = "".join(
        f"<dt>{_link(topic)}</dt><dd>{escape(about)}</dd><dd>{' · '.join(_headings(topic, f'{topic}.html'))}</dd>\n"
        for topic, about in TOPICS.items()
    )
    pages = {f"{HOME}.html": _page(HOME, "The guide to tformer", "", f"<dl>\n{listed}</dl>", blob)}
    for topic, about in TOPICS.items():
        text = render_markdown(topic, read_topic(topic))
        pages[f"{topic}.html"] = _page(topic, _title(topic), f"{about} · tformer guide {topic}", text, blob)
    return pages


def _page(name: str, title: str, subtitle: str, text: str, index: bytes) -> str:
    return render_page(
        title=title,
        subtitle=subtitle,
        body=BODY.format(links="\n".join(_links(name)), text=text),
        scripts=("guide.js",),
        style="guide.css",
        data={},
        blobs={"guide": index},
        without=WITHOUT,
    )


def _links(current: str) -> Iterator[str]:
    """The items of the navigation: the topics, below the current one its headings."""
    yield f"<li>{_link(HOME, current)}</li>"
    for topic in TOPICS:
        inner = "".join(f"<li>{heading}</li>" for heading in _headings(topic) if topic == current)
        yield f"<li>{_link(topic, current)}{inner and f'<ul>{inner}</ul>'}</li>"


def _headings(topic: str, page: str = "") -> Iterator[str]:
    for one in sections(topic):
        if one.level == 2:
            yield f'<a href="{page}#{one.anchor}">{escape(one.heading)}</a>'


def _link(page: str, current: str = "") -> str:
    mark = ' aria-current="page"' if page == current else ""
    return f'<a href="{page}.html"{mark}>{"All topics" if page == HOME else escape(_title(page))}</a>'


def _title(topic: str) -> str:
    return sections(topic)[0].heading


def render_markdown(topic: str, text: str) -> str:
    """The HTML of the Markdown of a topic, without its title: headings with anchors, links between pages, pictures."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    markdown.add_render_rule("table_open", lambda *_: '<div class="scroll"><table>\n')
    markdown.add_render_rule("table_close", lambda *_: "</table></div>\n")
    markdown.add_render_rule("code_inline", _code)
    markdown.add_render_rule("heading_close", _close_heading)
    linked = rewrite_links(
        text, topic, lambda shown, *place: f"[{shown}]({place[0]}.html{'#' * bool(place[1])}{place[1]})"
    )
    tokens = markdown.parse(linked)[3:]  # the title: its opening, its text, its close
    for token, content in pairwise(tokens):
        if token.type == "heading_open":
            token.attrSet("id", anchor_of(content.content))
        for picture in content.children or ():
            if picture.type == "image":
                picture.attrSet("src", _inlined(str(picture.attrGet("src"))))
    return str(markdown.renderer.render(tokens, markdown.options, {}))


def _code(renderer: Any, tokens: Sequence[Token], at: int, *_: Any) -> str:
    """Code in a line, which is broken between words only: not within `--resume`."""
    return f"<code>{' '.join(f'<span>{escape(word)}</span>' for word in tokens[at].content.split(' '))}</code>"


def _close_heading(renderer: Any, tokens: Sequence[Token], at: int, *_: Any) -> str:
    anchor = escape(str(tokens[at - 2].attrGet("id")))
    return f' <a class="anchor" href="#{anchor}" aria-label="Link to this section">#</a></{tokens[at].tag}>\n'


def _inlined(name: str) -> str:
    """A picture of the guide as an address that holds it."""
    content = (FOLDER / name).read_bytes()
    return f"data:{MIME[Path(name).suffix]};base64,{base64.b64encode(content).decode()}"


def _words(text: str) -> str:
    """The Markdown of a section without its heading and without marks, as one line to search in."""
    body = LINK.sub(r"\2", text.partition("\n")[2])
    return " ".join(re.sub(r"\||-{3,}", " ", re.sub(r"^ *```\w*|`|\*\*", "", body, flags=re.M)).split())
