#!/usr/bin/env -S python3 -IS
"""A C compiler with a cache: each set of kernels is compiled once for all tests, and for later runs.

`tests/conftest.py` puts it into $CC. The folder $TFORMER_KEPT_LIBRARIES holds the libraries, each named by the digest
of its command, all C files in the folders of that command, the compiler and the processor.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path


def compiler() -> str:
    """The compiler that does the work: $TFORMER_TEST_CC or the system's."""
    names = (os.environ.get("TFORMER_TEST_CC", ""), "cc", "gcc", "clang")
    return next(found for name in names if (found := shutil.which(name)))


def digest(command: list[str]) -> str:
    """The digest of everything that determines the output of a command; `command` is without the output's name."""
    found = Path(command[0]).resolve()
    processor = {line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "model"))}
    made = hashlib.sha256("\0".join([*command, str(found), str(found.stat().st_mtime_ns), *sorted(processor)]).encode())
    folders = {Path(word).resolve().parent for word in command if word.endswith(".c")}
    for path in sorted(path for folder in folders for path in folder.glob("*.[ch]")):
        made.update(path.name.encode() + path.read_bytes())
    return made.hexdigest()


def main() -> None:
    command, folder = [compiler(), *sys.argv[1:]], os.environ.get("TFORMER_KEPT_LIBRARIES")
    if folder is None or "-shared" not in command or "-o" not in command:
        os.execv(command[0], command)
    at = command.index("-o")
    target = Path(command[at + 1])
    kept = Path(folder) / digest(command[:at] + command[at + 2 :])
    with suppress(FileNotFoundError):
        shutil.copyfile(kept, target)
        return
    done = subprocess.run(command, check=False)
    if done.returncode == 0:
        descriptor, made = tempfile.mkstemp(dir=folder)
        os.close(descriptor)
        shutil.copyfile(target, made)
        os.rename(made, kept)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
