"""Beam search of CTranslate2 with our own model, exported: every compute type that it supports on this machine.

Sources are tokens in memory; the length is forced; as many threads as PyTorch has. Scores are divided by the length, as
ours are.
"""

from __future__ import annotations

import torch

from tformer.bench.peers.ctranslate2_export import exported, token_names
from tformer.bench.workloads import Task
from tformer.bench.workloads.decoding import sources_of
from tformer.errors import InputError
from tformer.recipe import recipe_to_yaml

COMPUTE_TYPES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "int16": "int16",
    "int8": "int8_float32",
    "int8_bf16": "int8_bfloat16",
    "int8_fp16": "int8_float16",
}
"""What precisions are called here -> there."""


def supported(device: torch.device) -> tuple[str, ...]:
    """Precisions that CTranslate2 computes in on this machine."""
    import ctranslate2

    known = ctranslate2.get_supported_compute_types(device.type)
    return tuple(name for name, theirs in COMPUTE_TYPES.items() if theirs in known)


def make(task: Task, precision: str) -> CTranslate2Translating:
    return CTranslate2Translating(task, precision)


class CTranslate2Translating:
    name = "ctranslate2"

    def __init__(self, task: Task, precision: str) -> None:
        self.task, self.precision = task, precision

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
            beam_size=self.task.options["beam"],
            max_batch_size=self.task.batch_size,
            min_decoding_length=new_tokens,
            max_decoding_length=new_tokens,
        )
        return sum(len(result.hypotheses[0]) for result in found)
