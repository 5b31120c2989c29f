"""HTML pages: one file with its style, scripts and data, without access to the network.

A content security policy forbids the network and all scripts except those of the page, listed by their SHA-256. Data is
inert: JSON with escaped `<`, so that no text can end its element, and gzip in base64 for large data. The body of a view
is trusted HTML; text of a user goes through the data and is shown by `textContent`.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from tformer.support import __version__
from tformer.support.errors import InputError, visible
from tformer.support.files import encode_text
from tformer.support.formatting import finite_or_none
from tformer.viz.plots import COLOUR_MAPS, PALETTE, colour_table

# Scripts of every page, before those of the view: state and theme first, then the parts that use them.
SHELL_SCRIPTS = ("page.js", "controls.js", "pictures.js", "heatmap.js", "lines.js", "table.js")
MAX_BYTES = 20e6
_ESCAPES = str.maketrans({"<": "\\u003c", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def render_page(
    *,
    title: str,
    subtitle: str,
    body: str,
    scripts: Sequence[str],
    data: Mapping[str, Any],
    style: str | None = None,
    blobs: Mapping[str, bytes] | None = None,
    notes: Sequence[str] = (),
    without: Sequence[str] = (),
    live: bool = False,
) -> str:
    """A whole page as text.

    Args:
        title, subtitle, notes: plain text, escaped here; the notes go into the footer, one a line.
        body: trusted HTML of the view, without text of a user.
        scripts: names of files in assets/, run in order after SHELL_SCRIPTS.
        style: name of a style sheet in assets/, beside page.css.
        data: JSON for `tformer.data`; NaN and infinity become null.
        blobs: bytes for `tformer.blob(name)`; names are of letters, digits, `-` and `_`.
        without: names of SHELL_SCRIPTS that the view does not use.
        live: the page may ask the server that it came from, and no other.
    """
    if style is not None:
        body = f"<style>\n{_asset(style)}</style>\n{body}"
    code = [_script(name) for name in (*(name for name in SHELL_SCRIPTS if name not in without), *scripts)]
    hashes = " ".join(f"'sha256-{_base64(hashlib.sha256(text.encode()).digest())}'" for text in code)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'" + "; connect-src 'self'" * live
    )
    network = "asks only the server that it came from" if live else "contains everything it shows and uses no network"
    colours = {name: _base64(colour_table(name)) for name in COLOUR_MAPS}
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{_text(title)}</title>\n<style>\n{_asset('page.css')}</style>\n</head>\n<body>",
        f'<header>\n<div>\n<h1 dir="auto">{_text(title)}</h1>\n<p class="subtitle" dir="auto">{_text(subtitle)}</p>',
        '</div>\n<button type="button" id="theme" class="quiet">Dark</button>\n</header>',
        f"<main>\n{body}\n<noscript><p>This page needs JavaScript, which is switched off.</p></noscript>\n</main>",
        "<footer>",
        *(f'<p dir="auto">{_text(note)}</p>' for note in notes),
        f"<p>Made by tformer {_text(__version__)}. This {'page' if live else 'file'} {network}.</p>",
        "</footer>",
        _element("application/json", "page-data", _json(data)),
        _element("application/json", "colour-maps", _json({"maps": colours, "palette": PALETTE})),
        *(
            _element("application/octet-stream;base64", f"blob-{name}", _base64(gzip.compress(content, 6, mtime=0)))
            for name, content in (blobs or {}).items()
        ),
        *(f"<script>{text}</script>" for text in code),
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def within(page: str, max_bytes: float, hint: str) -> str:
    """The page. Raises InputError for one of more than `max_bytes`."""
    if (size := len(encode_text(page))) > max_bytes:
        raise InputError(f"a page of {size / 1e6:.1f} MB does not fit into {max_bytes / 1e6:g} MB", hint=hint)
    return page


def _script(name: str) -> str:
    """A script without comment lines and unneeded spaces (no literal in the assets spans lines)."""
    lines = (line.strip() for line in _asset(name).splitlines())
    return "\n".join(_tight(line) for line in lines if line and not line.startswith("//"))


def _tight(line: str) -> str:
    """A line without spaces around operators, outside of strings; lines with templates or slashes stay unchanged."""
    if re.search(r"[`'/\\]|[-+] [-+]", line):
        return line
    parts = line.split('"')
    parts[::2] = [re.sub(r" ?([][{}()=,;:?<>+*&|!-]) ?", r"\1", part) for part in parts[::2]]
    return '"'.join(parts)


def _asset(name: str) -> str:
    return files("tformer.viz").joinpath("assets", name).read_text(encoding="utf-8")


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _text(text: str) -> str:
    return escape(visible(text))


def _element(mime: str, name: str, content: str) -> str:
    return f'<script type="{mime}" id="{name}">{content}</script>'


def _json(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(finite_or_none(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A lone surrogate is invalid UTF-8: the file could not be written.
    return text.translate(_ESCAPES).encode("utf-8", "backslashreplace").decode()


# --- shapes ----------------------------------------------------------------------------------------------------------

SHAPES_BODY = """\
<p class="caption">Choose a tensor, or press ↓ and ↑ for the next and the previous one, → for where it goes, ← for
where it comes from.</p>
<div id="example"></div>
<div class="shapes">
<div id="path" role="group" aria-label="The tensors in the order of computation"></div>
<div id="detail" aria-live="polite"></div>
</div>
<h2>Letters</h2>
<div id="letters"></div>
"""


def render_shapes(
    traces: Mapping[str, Mapping[str, Any]],
    *,
    subtitle: str,
    names: Mapping[str, str],
    example: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The path of a tensor as a page: every step with its shape, what comes in, what goes out, and its parameters.

    Args:
        traces: documents of `inspect --shapes` (`Trace.to_json`), by the heading of the model; "": no heading.
        names: meaning of each letter of a shape.
        example: document of the batch's first example (`tasks.example`).
    """
    data = {
        "models": [{"title": heading, **trace} for heading, trace in traces.items()],
        "names": dict(names),
        "example": example,
    }
    return render_page(
        title="Shapes",
        subtitle=subtitle,
        body=SHAPES_BODY,
        scripts=("shapes.js",),
        style="shapes.css",
        data=data,
        notes=notes,
        without=("controls.js", "pictures.js", "heatmap.js", "lines.js"),
    )
