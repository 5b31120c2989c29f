"""`tformer merge`: a run with adapters as an ordinary checkpoint, which needs its base no more."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tformer.cli.command import examples, takes_options
from tformer.cli.report import console, report_result
from tformer.support.options import Checkpoint, Json, NewFolder, Panel, Run
from tformer.support.rules import Checked, required

WHICH, RESULT = Panel("Which adapters"), Panel("Result")

EPILOG = examples(
    "`tformer merge runs/gpt2-lora --out runs/gpt2-merged`",
    "`tformer merge runs/bert-lora --base models/bert-base --out runs/bert-merged`",
    "`tformer merge --checkpoint latest --out merged --dtype bf16`",
)


@dataclass(frozen=True)
class MergeOptions(Checked):
    """The options of `tformer merge`."""

    RULES = (required("--out", hint="--out runs/NAME"),)

    run: Run = None
    checkpoint: Annotated[Checkpoint, WHICH] = "best"
    base: Annotated[
        Path | None,
        WHICH("--base", metavar="DIR", help="Where the base is now.", default="where it was in training"),
    ] = None
    out: Annotated[NewFolder, RESULT] = None
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], RESULT("--dtype", help="Number format of the weights.")] = "fp32"
    as_json: Annotated[Json, RESULT] = False


@takes_options
def merge(options: MergeOptions) -> None:
    """Merge adapters (LoRA) into their base model.

    The result is an ordinary checkpoint, whose matrices are W + s B A in fp32. Other commands merge as they load the
    run, so this is for a model that goes elsewhere, is trained on in full, or gets other adapters. In bf16 and fp16
    small changes may be rounded away.
    """
    assert options.out is not None  # the rules require it
    from tformer.checkpoint.average import require_new
    from tformer.checkpoint.resolve import newest_checkpoint
    from tformer.interop.adapters import has_adapters, merge_adapters
    from tformer.support.device import DTYPES

    require_new(options.out)
    which = options.checkpoint
    run = newest_checkpoint(which=which, usable=has_adapters) if options.run is None else options.run
    made = merge_adapters(run, options.out, which=which, base=options.base, dtype=DTYPES[options.dtype])
    for note in made.notes:
        console.print(note, markup=False)
    parameters, base = sum(math.prod(spec.shape) for spec in made.specs("weights").values()), str(made.base.path)
    line = f"{parameters:,} parameters in {options.dtype}, of {made.path} and {base}"
    document = {
        "path": str(options.out),
        "step": made.step,
        "base": base,
        "parameters": parameters,
        "notes": made.notes,
    }
    report_result([line], options.out, document if options.as_json else None)
