"""CTranslate2 as a peer: beam search with our own model, exported, in every compute type supported on this machine.

Sources are tokens in memory; the length is forced; as many threads as PyTorch has; scores are divided by the length, as
ours are.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from tformer.bench.peers.exporter import exported
from tformer.bench.workloads import SEED, Contender
from tformer.bench.workloads.decoding import sources_of
from tformer.build import build_model
from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.save import CheckpointContents, write_checkpoint
from tformer.interop.to_ctranslate2 import export_ctranslate2
from tformer.recipe import recipe_from_yaml, recipe_to_yaml
from tformer.support.errors import InputError
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
            str(exported(self.name, __name__, recipe_yaml=recipe_to_yaml(task.recipe))),
            device=task.device.type,
            device_index=task.device.index or 0,
            compute_type=COMPUTE_TYPES[self.precision],
            inter_threads=1,
            intra_threads=torch.get_num_threads(),
        )
        known, rows = vocabulary().tokens, task.recipe.model.vocab_size or 0  # as the exported model names its ids
        names = known + [f"<row {number}>" for number in range(len(known), rows)]
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


def vocabulary() -> Tokenizer:
    """A tokenizer of a few tokens; further ids have rows in the embedding and generated names."""
    options = TokenizerOptions(model="char", template="seq2seq", min_frequency=1)
    return train_tokenizer(lambda: iter(["a"]), options)


def export(folder: Path, *, recipe_yaml: str) -> Path:
    """Write the model in CTranslate2's format and return its folder. InputError for what has no counterpart there."""
    recipe = recipe_from_yaml(recipe_yaml, name="the recipe")
    torch.manual_seed(SEED)
    checkpoint, model = folder / "checkpoint", folder / "model"
    write_checkpoint(
        checkpoint,
        0,
        CheckpointContents(
            weights=build_model(recipe.model).state_dict(),
            recipe_yaml=recipe_yaml,
            tokenizer_json=vocabulary().to_json(),
            trainer={"step": 0},
        ),
    )
    export_ctranslate2(read_checkpoint(checkpoint), model)
    shutil.rmtree(checkpoint)
    return model
