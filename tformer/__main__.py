"""`python -m tformer` is `tformer`."""

from tformer.cli.app import main

if __name__ == "__main__":
    main()
