"""Whether an output projection is the embedding table: what the weight files say of it, whatever config.json does.

`transformers` 5 ties the two unless the files hold both with different values; T5's config.json can no longer say
otherwise. Deciding by the config alone would make one matrix of two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tformer.interop.weight_files import WeightFiles

OUTPUT = "lm_head.weight"


def output_is_tied(files: WeightFiles, tables: Sequence[str], *, config_says: bool) -> bool:
    """Reads the two matrices only where the config says that they are one and the files hold both.

    tables: the names under which files hold the embedding table, the usual one first.
    """
    table = next((name for name in tables if name in files.specs), None)
    if OUTPUT not in files.specs or table is None:
        return True
    if not config_says:
        return False
    if files.specs[OUTPUT].shape != files.specs[table].shape:
        return False
    stored = files.read([OUTPUT, table])
    return torch.equal(stored[OUTPUT], stored[table])
