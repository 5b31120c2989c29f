"""CTranslate2: beam search with a Marian model of our sizes, in every compute type supported on this machine.

Sources are tokens in memory; the length is forced; as many threads as PyTorch has; scores are divided by the length, as
ours are.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from tests.benchmarks.memory import PeakMemory
from tests.benchmarks.transformers_peer import marian
from tformer.bench.workloads import SEED, BenchTask, Contender
from tformer.bench.workloads.decoding import sources_of
from tformer.bench.workloads.train import SPECIAL

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
        folder = convert(task, Path(tempfile.mkdtemp()))
        PeakMemory(task.device)  # the conversion does not count
        self._translator = ctranslate2.Translator(
            str(folder),
            device=task.device.type,
            device_index=task.device.index or 0,
            compute_type=COMPUTE_TYPES[self.precision],
            inter_threads=1,
            intra_threads=torch.get_num_threads(),
        )
        self._sources = [[str(token) for token in source] for batch in sources_of(task) for source in batch]

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


def convert(task: BenchTask, folder: Path) -> Path:
    """Write a Marian model of the task's sizes by CTranslate2's converter and return its folder; tokens are numbers."""
    from ctranslate2.converters.transformers import MarianMTLoader

    torch.manual_seed(SEED)
    spec = MarianMTLoader().get_model_spec(marian(task))
    tokens = [str(token) for token in range(task.vocab_size - 1)]  # the converter drops the last row, Marian's padding
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.bos_token = spec.config.decoder_start_token = str(SPECIAL.bos)
    spec.config.eos_token, spec.config.unk_token = str(SPECIAL.eos), str(SPECIAL.unk)
    spec.validate()
    spec.save(str(folder))
    return folder
