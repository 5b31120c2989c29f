"""The options of `tformer serve`. This module imports no model, so that `--help` is fast."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tformer.support.bounds import Port, within
from tformer.support.errors import InputError
from tformer.support.options import Checkpoint, Device, Panel, Precision, Quantize, argument
from tformer.support.rules import QUANTIZE_RULE, Checked

NETWORK, LIMITS, LOG = Panel("Network"), Panel("Limits"), Panel("Log")
MOST = 2**31 - 1
Most = Annotated[int, within(1, MOST)]
KEY_VARIABLE = "TFORMER_API_KEY"


@dataclass(frozen=True)
class ServeOptions(Checked):
    """The options of `tformer serve`."""

    RULES = (QUANTIZE_RULE,)

    runs: Annotated[
        tuple[str, ...],
        argument("RUN", help="Runs, checkpoints or Hugging Face folders.", default="the newest run"),
    ] = ()
    host: Annotated[str, NETWORK("--host", metavar="ADDRESS", help="Address to listen on; 0.0.0.0: every network.")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, NETWORK("--port", help="0: a free one, which is printed.")] = 8000
    api_key: Annotated[
        str | None,
        NETWORK(
            "--api-key",
            metavar="KEY",
            help=f"Requests need it as a bearer token; safer: the variable {KEY_VARIABLE}.",
            default="none",
        ),
    ] = None
    allow_hosts: Annotated[
        tuple[str, ...],
        NETWORK(
            "--allow-host",
            metavar="NAME",
            help="A name of this server, as of a proxy before it; addresses and localhost are allowed.",
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        NETWORK("--cors-origin", metavar="URL", help="A web site whose pages may call the server.", rare=True),
    ] = ()
    watch: Annotated[
        tuple[Path, ...],
        NETWORK("--watch", metavar="FOLDER", help="Runs that /runs shows, as `tformer watch` does.", rare=True),
    ] = ()
    memory: Annotated[
        str | None,
        LIMITS(
            "--memory",
            metavar="SIZE",
            help="Of all loaded weights, counted in fp32, such as 8GB: the model used least recently makes room.",
            default="none",
        ),
    ] = None
    queue: Annotated[Most, LIMITS("--queue", help="Requests at a time; further ones are refused with 429.")] = 256
    rows: Annotated[Most, LIMITS("--batch-size", help="Texts that are decoded together.")] = 32
    max_body: Annotated[str, LIMITS("--max-body", metavar="SIZE", help="Of the body of a request.")] = "4MB"
    deadline: Annotated[
        float,
        within(0.1, MOST),
        LIMITS("--deadline", metavar="SECONDS", help="For an answer, from the request on."),
    ] = 600.0
    grace: Annotated[
        float,
        within(0, MOST),
        LIMITS("--grace", metavar="SECONDS", help="After SIGTERM, for the answers that were begun.", rare=True),
    ] = 30.0
    log_texts: Annotated[bool, LOG("--log-texts", help="Log prompts and answers, too.", rare=True)] = False
    checkpoint: Checkpoint = "best"
    device: Device = "auto"
    precision: Precision = "auto"
    quantize: Quantize = "none"

    def check(self) -> None:
        """Raise InputError for what can be refused before anything is loaded."""
        super().check()
        key = self.key
        if key is not None and not (key.isascii() and key.isprintable() and key == key.strip() != ""):
            message = "--api-key: expected printable ASCII characters without spaces around them"
            raise InputError(message, hint="they travel in a header")
        if self.watch and key is not None:
            raise InputError("--watch: a browser sends no key with /runs", hint="tformer watch at another port")

    @property
    def key(self) -> str | None:
        """The key that requests need, if any."""
        return self.api_key if self.api_key is not None else os.environ.get(KEY_VARIABLE) or None
