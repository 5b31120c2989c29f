"""Values of the training modules that a page carries, so that its own script can be checked against them.

The explorer computes fixed encodings in the browser. Each case names a function of its script, the arguments, and what
the modules of `tformer.nn.positions` give at some places: in double precision, or where it says so in fp32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tformer.nn.positions.alibi import alibi_slopes
from tformer.viz.pe.absolute import patch_table, sinusoidal_table
from tformer.viz.pe.relative import bucket_of, rope_turns, rotated, shaw_index
from tformer.viz.pe.settings import LAYOUTS, Settings
from tformer.viz.plots import Numbers

SAMPLES = 48  # places of each table
ROWS = 500

Case = dict[str, Any]  # name, arguments, values as [row, column, value]; fp32: these are rounded


def reference_cases(settings: Settings) -> list[Case]:
    """Cases at the sizes asked for, and at the odd corners of others."""
    cases = []
    for layout in LAYOUTS["sinusoidal"]:
        for d_model, base in ((settings.d_model, settings.base), (6, 100.0), (2, 10000.0)):
            at = replace(settings, encoding="sinusoidal", layout=layout, d_model=d_model, base=base)
            cases.append(_case("sinusoidal", [ROWS, d_model, base, layout], sinusoidal_table(at, ROWS)))
    for head_dim, base in ((64, settings.base), (2, 500000.0)):
        at = replace(settings, encoding="rope", layout=None, d_model=head_dim, heads=1, base=base)
        cosines, sines = rope_turns(at, ROWS)
        cases.append(_case("ropeCos", [ROWS, head_dim, base], cosines))
        cases.append(_case("ropeSin", [ROWS, head_dim, base], sines))
        for layout in LAYOUTS["rope"]:
            turned = rotated(replace(at, layout=layout), 64)
            cases.append({**_case("ropeTurned", [64, head_dim, base, layout], turned), "fp32": True})
    for heads in {settings.heads, 8, 12}:
        cases.append(_case("alibiSlopes", [heads], np.array(alibi_slopes(heads))[:, None]))
    offsets = np.arange(-300, 301, dtype=float)
    for buckets, distance in {(settings.buckets, settings.max_distance), (32, 128), (64, 333), (10, 20)}:
        at = replace(settings, buckets=buckets, max_distance=distance)
        for both in (True, False):
            values = bucket_of(at, offsets, bidirectional=both)[:, None]
            cases.append(_case("t5Buckets", [300, buckets, distance, both], values, samples=len(offsets)))
    cases.append(_case("shawIndex", [40, settings.clip], shaw_index(settings, 40)))
    for width in {max(4, settings.d_model // 4 * 4), 8}:
        at = replace(settings, d_model=width)
        cases.append(_case("patch2d", [settings.grid, width, settings.base], patch_table(at)))
    return cases


def _case(name: str, arguments: list[Any], table: Numbers, *, samples: int = SAMPLES) -> Case:
    """Some places of a table, the same ones every time: corners, and a stride that has no factor of the width."""
    rows, columns = table.shape
    count = rows * columns
    if count <= samples:
        places = np.arange(count)
    else:
        places = np.unique(
            np.concatenate(([0, columns - 1, count - columns, count - 1], np.arange(samples) * 7919 % count))
        )
    values = [[int(at // columns), int(at % columns), float(table.flat[at])] for at in places]
    return {"name": name, "arguments": arguments, "values": values}
