"""The page of a server: a model to play with in a browser. It asks the server that sent it and nobody else."""

from __future__ import annotations

from tformer.viz.page import render_page

BODY = """\
<div id="key-row" class="row" hidden></div>
<div id="controls" class="controls"></div>
<div id="ask" class="ask"></div>
<div id="sides" class="panels"></div>
<section id="detail" aria-live="polite"></section>
<div id="request"></div>
"""


def play_page() -> str:
    """The page as text; it reads the models from `/v1/models`."""
    return render_page(
        title="tformer",
        subtitle="Write, translate, classify, fill masks, and look inside",
        body=BODY,
        scripts=("play.js",),
        style="tokens.css",
        data={},
        without=("lines.js",),
        live=True,
    )
