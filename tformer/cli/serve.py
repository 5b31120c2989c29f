"""`tformer serve`: models answered over HTTP."""

from __future__ import annotations

from tformer.cli.command import examples, takes_options
from tformer.cli.report import show_notes, spinner
from tformer.serve.options import ServeOptions

EPILOG = examples(
    "`tformer serve runs/gpt-small-1`",
    "`tformer serve runs/gpt-small-1 runs/translator --port 8080 --memory 8GB`",
    "`tformer serve --host 0.0.0.0 --allow-host models.example.org`",
)


@takes_options
def serve(options: ServeOptions) -> None:
    """Answer a model over HTTP, with the API of OpenAI.

    Needs the extra `serve`. Endpoints: /v1/completions, /v1/chat/completions, /v1/embeddings, /v1/models; /generate,
    /translate, /classify, /fill, /score; /health, /metrics, /openapi.json. A body is JSON; an error has a status and a
    message. A model is loaded when it is first asked for. The log, one JSON object for each request on standard error,
    has no texts. SIGTERM and Ctrl-C end the server after the answers that were begun.
    """
    from tformer.serve import host

    host.require_packages("serve")
    from tformer.serve.app import Protocol, make_app
    from tformer.serve.service import Service, WarningLines

    WarningLines.start()
    service = Service(options)
    spinner.end()

    def ready(url: str) -> None:
        show_notes(f"{entry.name}: {', '.join(entry.uses) or 'nothing'}" for entry in service.models.entries.values())
        if host.own_names(options.host) == ["*"] and options.key is None:
            show_notes(["anybody who reaches this address can use the models: --api-key KEY asks for a key"])
        show_notes([f"serving at {url} (Ctrl-C ends it)"])

    limits = {"http": Protocol, "ws": "none", "timeout_graceful_shutdown": max(1, round(options.grace))}
    host.serve(make_app(service), options.host, options.port, ready=ready, **limits)
    if service.failure is not None:
        raise service.failure
