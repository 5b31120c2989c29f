"""A warm process that runs commands in forked children, each with one fault injected by `shim.c`.

Started with the shim preloaded, it imports the package once; a command then costs a fork instead of a start of Python.
It reads a request as a line of JSON and answers with one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import pkgutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 120


def serve(shim: str) -> None:
    arm = ctypes.CDLL(shim).fault_arm
    arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    import_everything()
    for line in sys.stdin:
        request = json.loads(line)
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            run(request, arm)
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            if time.monotonic() - started > TIMEOUT_SECONDS:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)
    os._exit(0)  # the interpreter would take a second to shut down


def import_everything() -> None:
    """Import all modules of the package, and what they import late."""
    import tformer

    for module in pkgutil.walk_packages(tformer.__path__, "tformer."):
        if not module.name.endswith(("__main__", "harness_model")):
            importlib.import_module(module.name)
    for name in ("matplotlib.figure", "matplotlib.backends.backend_svg", "matplotlib.backends.backend_agg"):
        importlib.import_module(name)
    sys.argv[:] = ["tformer"]


def run(request: dict[str, Any], arm: Any) -> None:
    """Run one command in this process, which ends with it."""
    code = 70
    with contextlib.suppress(BaseException):
        os.chdir(request["cwd"])
        for descriptor, name, flags in ((0, os.devnull, os.O_RDONLY), (1, request["out"], 0), (2, request["err"], 0)):
            opened = os.open(name, flags or os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(opened, descriptor)
        os.environ.update(request["environment"])
        tempfile.tempdir = None
        trace = os.open(request["trace"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666) if request["trace"] else -1
        arm(os.fsencode(request["root"]), request["call"], request["mode"], request["error"], trace)
        from tformer.cli.app import main

        try:
            main(request["words"])
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 71
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        atexit._run_exitfuncs()
    os._exit(code)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    serve(sys.argv[1])
