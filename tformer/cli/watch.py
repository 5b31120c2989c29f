"""`tformer watch`: the curves and the progress of trainings in a browser, while they run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tformer.cli.command import examples, takes_options
from tformer.cli.report import console, spinner
from tformer.support.bounds import Port
from tformer.support.options import Panel, argument

ADDRESS = Panel("The address")

EPILOG = examples(
    "`tformer watch`",
    "`tformer watch runs/gpt-tiny-1 sweeps/norms`",
    "`tformer watch --port 0`",
)


@dataclass(frozen=True)
class WatchOptions:
    """The options of `tformer watch`."""

    folders: Annotated[
        tuple[Path, ...],
        argument("FOLDER", help="Runs, or folders of runs such as a sweep.", default="runs/"),
    ] = ()
    host: Annotated[
        str,
        ADDRESS("--host", metavar="ADDRESS", help="Where to listen; 0.0.0.0: for other machines too, without a key."),
    ] = "127.0.0.1"
    port: Annotated[Port, ADDRESS("--port", metavar="N", help="0: a free one.")] = 8078


@takes_options
def watch(options: WatchOptions) -> None:
    """Follow trainings in a browser: curves, progress, time left.

    The page is that of `tformer plot`, with the last sample of each training. It follows the files of the runs and
    takes nothing from a training but a little time of one core; new runs appear by themselves. Ctrl-C ends it.
    """
    from tformer.serve.host import own_names, require_packages, serve, watch_routes

    require_packages("watch")
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from tformer.workflows.runs.watching import Watch

    watched = Watch(options.folders or ["runs"])
    spinner.end()
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=own_names(options.host), www_redirect=False)
    serve(
        Starlette(routes=watch_routes(watched), middleware=[hosts]),
        options.host,
        options.port,
        ready=lambda url: console.print(f"watching at {url} (Ctrl-C ends it)", markup=False),
        timeout_graceful_shutdown=1,
    )
