"""CTranslate2 as a peer: beam search with our own model, exported, in every compute type supported on this machine.

Sources are tokens in memory; the length is forced; as many threads as PyTorch has; scores are divided by the length, as
ours are. The model is exported by a separate process, which runs `main`, for conversion needs more memory than the
model that is measured. That process reads a line {"recipe_yaml"}, writes {"folder"} or {"failed"}, and deletes the
folder and ends when its stdin ends, however its parent ended.
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
from pathlib import Path

import torch

from tformer.bench.workloads import SEED, Contender
from tformer.bench.workloads.decoding import sources_of
from tformer.build import build_model
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.save import write_checkpoint
from tformer.errors import InputError
from tformer.interop.to_ctranslate2 import export_ctranslate2
from tformer.processes import own_python
from tformer.recipe import recipe_from_yaml, recipe_to_yaml
from tformer.recipe.recipe import Recipe
from tformer.tokenizer import Tokenizer, TokenizerOptions, train_tokenizer

COMPUTE_TYPES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "int16": "int16",
    "int8": "int8_float32",
    "int8_bf16": "int8_bfloat16",
    "int8_fp16": "int8_float16",
}
"""CTranslate2's name of each precision."""

DELETE_AT_END = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"
_EXPORTERS: list[subprocess.Popen[str]] = []  # their stdin stays open while this process lives


def supported(device: torch.device) -> tuple[str, ...]:
    """Precisions in which CTranslate2 computes on this machine."""
    import ctranslate2

    known = ctranslate2.get_supported_compute_types(device.type)
    return tuple(name for name, compute_type in COMPUTE_TYPES.items() if compute_type in known)


class Translation(Contender):
    name = "ctranslate2"

    def prepare(self) -> None:
        import ctranslate2

        task = self.task
        usable = supported(task.device)
        if self.precision not in usable:
            raise InputError(f"ctranslate2 computes in {', '.join(usable)} on this machine")
        self._translator = ctranslate2.Translator(
            str(exported(recipe_to_yaml(task.recipe))),
            device=task.device.type,
            device_index=task.device.index or 0,
            compute_type=COMPUTE_TYPES[self.precision],
            inter_threads=1,
            intra_threads=torch.get_num_threads(),
        )
        names = token_names(task.recipe)
        self._sources = [[names[token] for token in source] for batch in sources_of(task) for source in batch]

    def run(self) -> int:
        new_tokens = self.task.options["new_tokens"]
        found = self._translator.translate_batch(
            self._sources,
            beam_size=self.task.options["beam_size"],
            max_batch_size=self.task.batch_size,
            min_decoding_length=new_tokens,
            max_decoding_length=new_tokens,
        )
        return sum(len(result.hypotheses[0]) for result in found)


@cache
def exported(recipe_yaml: str) -> Path:
    """Folder of the recipe's model with random weights. Raises InputError for what cannot be exported."""
    program = own_python(f"from {__name__} import main; main()")
    exporter = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    _EXPORTERS.append(exporter)
    assert exporter.stdin is not None and exporter.stdout is not None
    exporter.stdin.write(json.dumps({"recipe_yaml": recipe_yaml}) + "\n")
    exporter.stdin.flush()
    answer = json.loads(exporter.stdout.readline() or '{"failed": "the export ended without a message"}')
    if "failed" in answer:
        raise InputError(f"--peer ctranslate2: {answer['failed']}")
    return Path(answer["folder"])


def token_names(recipe: Recipe) -> list[str]:
    """The exported model's name of each token id."""
    tokens, rows = vocabulary().tokens, recipe.model.vocab_size or 0
    return tokens + [f"<row {number}>" for number in range(len(tokens), rows)]


def vocabulary() -> Tokenizer:
    """A tokenizer of a few tokens; further ids have rows in the embedding and generated names."""
    options = TokenizerOptions(model="char", template="seq2seq", min_frequency=1)
    return train_tokenizer(lambda: iter(["a"]), options)


def export(recipe_yaml: str, folder: Path) -> None:
    """Write the model in CTranslate2's format. Raises InputError for what has no counterpart there."""
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


def _delete_at_end(folder: Path) -> None:
    """Wait for the end of stdin, then delete the folder and end this process."""
    if not os.read(sys.stdin.fileno(), 1):
        while folder.exists():  # the export may be writing into it
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def main() -> None:
    request = sys.stdin.readline()
    folder = Path(tempfile.mkdtemp(prefix="tformer-bench-"))
    threading.Thread(target=_delete_at_end, args=(folder,), daemon=True).start()
    try:
        export(json.loads(request)["recipe_yaml"], folder)
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        sys.stdout.write(json.dumps({"failed": " ".join(str(error).split())}) + "\n")
        return
    sys.stdout.write(json.dumps({"folder": str(folder / "model")}) + "\n")
    sys.stdout.flush()
    # A small process waits with the folder, not this one.
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", DELETE_AT_END, str(folder)])
