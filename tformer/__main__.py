"""The entry point: `tformer` and `python -m tformer`."""

import os
import sys


def main() -> None:
    """Run one command and exit. Ctrl-C while the program is being imported ends it with one line, too."""
    try:
        _require_utf8()
        from tformer.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        if "--json" in sys.argv:
            sys.stdout.write('{"error": "interrupted", "hint": null, "code": 130}\n')
        sys.exit(130)


def _require_utf8() -> None:
    """Start Python again in UTF-8 mode where it takes names of files and arguments for ASCII."""
    if sys.getfilesystemencoding() == "ascii" and not sys.flags.utf8_mode and sys.executable:
        os.environ["PYTHONUTF8"] = "1"  # of the processes that this one starts
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


if __name__ == "__main__":
    main()
