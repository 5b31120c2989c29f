"""A model of random weights in CTranslate2's format, by `tformer export --to ctranslate2`, for as long as it is wanted.

A process of its own makes it, for conversion needs more memory than the model that is measured, and then waits with the
folder until whoever wanted it is gone, however that ended: its standard input then ends.
`python -m tformer.bench.peers.ctranslate2_export` reads a line {"recipe_yaml"} and writes {"folder"} or {"failed"}.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

from tformer.bench.workloads import SEED
from tformer.build import build_model
from tformer.checkpoint import read_checkpoint, write_checkpoint
from tformer.errors import InputError
from tformer.interop.to_ctranslate2 import export_ctranslate2
from tformer.recipe import recipe_from_yaml
from tformer.recipe.recipe import Recipe
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer

WAIT = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"


@cache
def exported(recipe_yaml: str) -> Path:
    """The folder of the recipe's model, made once in this process. Raises InputError for what is not exported."""
    helper = subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    _HELPERS.append(helper)
    assert helper.stdin is not None and helper.stdout is not None
    helper.stdin.write(json.dumps({"recipe_yaml": recipe_yaml}) + "\n")
    helper.stdin.flush()
    answer = json.loads(helper.stdout.readline() or '{"failed": "the export ended without a word"}')
    if "failed" in answer:
        raise InputError(f"--peer ctranslate2: {answer['failed']}")
    return Path(answer["folder"])


_HELPERS: list[subprocess.Popen[str]] = []  # their standard input stays open while this process lives


def token_names(recipe: Recipe) -> list[str]:
    """What the exported model calls its ids."""
    spelled, rows = vocabulary().tokens, recipe.model.vocab_size or 0
    return spelled + [f"<row {number}>" for number in range(len(spelled), rows)]


def vocabulary() -> Tokenizer:
    """A tokenizer of a few tokens; ids beyond have rows in the embedding all the same, and names that nobody spells."""
    options = TokenizerOptions(model="char", template="seq2seq", min_frequency=1)
    return train_tokenizer(lambda: iter(["a"]), options)


def export(recipe_yaml: str, folder: Path) -> None:
    """The model as `tformer translate` would be given it. Raises InputError for what has no counterpart."""
    recipe = recipe_from_yaml(recipe_yaml, name="the recipe")
    torch.manual_seed(SEED)
    checkpoint = folder / "checkpoint"
    write_checkpoint(
        checkpoint,
        0,
        weights=build_model(recipe.model).state_dict(),
        recipe_yaml=recipe_yaml,
        tokenizer_json=vocabulary().to_json(),
        trainer={"step": 0},
    )
    export_ctranslate2(read_checkpoint(checkpoint), folder / "model")
    shutil.rmtree(checkpoint)


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="tformer-bench-"))
    try:
        export(json.loads(sys.stdin.readline())["recipe_yaml"], folder)
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        sys.stdout.write(json.dumps({"failed": " ".join(str(error).split())}) + "\n")
        return
    sys.stdout.write(json.dumps({"folder": str(folder / "model")}) + "\n")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-S", "-c", WAIT, str(folder)])  # a small process waits, not this one


if __name__ == "__main__":
    main()
