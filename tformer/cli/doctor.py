"""`tformer doctor`: the installation and the machine, for a bug report; cleans the caches."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

from tformer.cli.command import examples, takes_options
from tformer.cli.report import emit_json, emit_lines, in_columns, show_notes
from tformer.support.options import Json, option
from tformer.support.rules import Checked, exclude

EPILOG = examples("`tformer doctor`", "`tformer doctor --json`", "`tformer doctor --clean`")


@dataclass(frozen=True)
class DoctorOptions(Checked):
    RULES = (exclude("--clean", "--no-speed", hint="it measures nothing"),)

    clean: Annotated[bool, option("--clean", help="Remove what is in the caches, and do nothing else.")] = False
    no_speed: Annotated[bool, option("--no-speed", help="Leave out the speed check, which takes some seconds.")] = False
    as_json: Json = False


@takes_options
def doctor(options: DoctorOptions) -> None:
    """Show versions, hardware, caches and speed, for a bug report.

    It names no user and no host; the home directory is written as ~. Lines that begin with `advice` say what makes work
    slower or impossible here. The caches hold tokens, trained tokenizers, a teacher's translations, compiled kernels
    and the speed of the processor: all of it is made again when it is needed, so that --clean loses nothing. Rows that
    a program gave to tformer.train are kept: their runs read them.
    """
    if options.clean:
        _clean(as_json=options.as_json)
        return
    from tformer.cli.diagnosis import diagnosis, diagnosis_lines

    found = diagnosis(with_speed=not options.no_speed)
    if options.as_json:
        emit_json(found)
    else:
        emit_lines(in_columns(label, text) for label, text in diagnosis_lines(found))


def _clean(*, as_json: bool) -> None:
    from tformer.cli.diagnosis import cache_line, without_home
    from tformer.data.shards.caches import clean_caches
    from tformer.support.device import default_cache_dir

    home = default_cache_dir()
    removed, left = clean_caches(home)
    kinds = {kind: asdict(size) for kind, size in removed.items()}
    if as_json:
        emit_json({"folder": without_home(home), "removed": kinds, "left": left})
    else:
        emit_lines([f"removed from {cache_line(kinds, without_home(home)).replace(': empty', ': nothing')}"])
    show_notes(f"note: {name} is written by another process: left" for name in left)
