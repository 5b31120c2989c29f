"""The entry point: `tformer` and `python -m tformer`."""

import sys


def main() -> None:
    """Run one command and exit. Ctrl-C while the program is being imported ends it with one line, too."""
    try:
        from tformer.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
