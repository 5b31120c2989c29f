"""Export of our model with random weights for a peer that reads files; it happens in a separate process.

Conversion needs more memory than the model that is measured. The process runs `main`: it reads a line {"module",
"arguments"}, calls `export(folder, **arguments)` of that module, and writes {"path"}, what the function returned, or
{"failed"}. It deletes the folder and ends when its stdin ends, however its parent ended.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import cache
from importlib import import_module
from pathlib import Path

from tformer.support.errors import InputError
from tformer.support.processes import own_python

DELETE_AT_END = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"
_EXPORTERS: list[subprocess.Popen[str]] = []  # their stdin stays open while this process lives


@cache
def exported(peer: str, module: str, **arguments: str) -> Path:
    """What `export` of a module wrote; it is deleted when this process ends. Raises InputError where it failed.

    peer: the library's name in that message.
    """
    program = own_python(f"from {__name__} import main; main()")
    exporter = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    _EXPORTERS.append(exporter)
    assert exporter.stdin is not None and exporter.stdout is not None
    exporter.stdin.write(json.dumps({"module": module, "arguments": arguments}) + "\n")
    exporter.stdin.flush()
    answer = json.loads(exporter.stdout.readline() or '{"failed": "the export ended without a message"}')
    if "failed" in answer:
        raise InputError(f"--peer {peer}: {answer['failed']}")
    return Path(answer["path"])


def _delete_at_end(folder: Path) -> None:
    """Wait for the end of stdin, then delete the folder and end this process."""
    if not os.read(sys.stdin.fileno(), 1):
        while folder.exists():  # the export may be writing into it
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def main() -> None:
    request = json.loads(sys.stdin.readline())
    folder = Path(tempfile.mkdtemp(prefix="tformer-bench-"))
    threading.Thread(target=_delete_at_end, args=(folder,), daemon=True).start()
    try:
        path = import_module(request["module"]).export(folder, **request["arguments"])
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        sys.stdout.write(json.dumps({"failed": " ".join(str(error).split())}) + "\n")
        return
    sys.stdout.write(json.dumps({"path": str(path)}) + "\n")
    sys.stdout.flush()
    # A small process waits with the folder, not this one.
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", DELETE_AT_END, str(folder)])
