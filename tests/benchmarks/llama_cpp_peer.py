"""llama.cpp: greedy decoding with our own model, exported as a GGUF file.

The C interface of llama-cpp-python is called; all texts are sequences of one batch. Settings are the library's own
(keys and values in fp16, fused attention where it has it, weights mapped from the file and rearranged for its kernels),
with as many threads as PyTorch has. Its own quantizer stores the weights. The next token is the largest logit.

Shape legend: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.benchmarks.memory import PeakMemory
from tformer.bench.workloads import SEED, Contender
from tformer.bench.workloads.train import random_ids
from tformer.build import build_model
from tformer.interop.to_gguf import planned, write_gguf
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError

FILE_TYPES = {
    "fp32": "LLAMA_FTYPE_ALL_F32",
    "bf16": "LLAMA_FTYPE_MOSTLY_BF16",
    "q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0",
    "q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0",
}
"""llama.cpp's name of each format of the weights. q4_0: a tied table of tokens has 6 bits, as its quantizer decides."""

MOST_AT_ONCE = 512  # tokens of one pass; the library's default
GRANULE = 256  # of a sequence's capacity
SILENT = logging.CRITICAL + 1  # the library counts some of its remarks as critical


def supported(device: torch.device) -> tuple[str, ...]:
    if device.type != "cpu":
        raise InputError(f"--peer llama.cpp: found the device {device}, it is measured on CPUs only")
    return tuple(FILE_TYPES)


class Generation(Contender):
    name = "llama.cpp"

    def prepare(self) -> None:
        task = self.task
        file = export(Path(tempfile.mkdtemp()), task.recipe, precision=self.precision)
        PeakMemory(task.device)  # the conversion does not count
        self._prompts_BT = random_ids(task, task.batch_size, task.length)
        self._new_tokens = task.options["new_tokens"]
        self._engine = Engine(file, rows=task.batch_size, prompt=task.length, new_tokens=self._new_tokens)

    def run(self) -> int:
        self._engine.clear()
        next_B = self._engine.read(self._prompts_BT).argmax(1)
        written = next_B.size
        for _ in range(self._new_tokens - 1):
            next_B = self._engine.read(next_B[:, None]).argmax(1)
            written += next_B.size
        return written


class Engine:
    """A model file in memory, with a cache for `rows` texts of `prompt` + `new_tokens` tokens.

    Its memory is freed when the process ends.
    """

    def __init__(self, file: Path, *, rows: int, prompt: int, new_tokens: int, **settings: Any) -> None:
        """settings: fields of `llama_context_params` that differ from the library's."""
        self._library = library()
        model_params = self._library.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model = self._library.llama_model_load_from_file(str(file).encode(), model_params)
        if model is None:
            raise ValueError(f"llama.cpp cannot load {file.name}")
        params = self._library.llama_context_default_params()
        params.n_seq_max = rows
        params.n_ctx = rows * GRANULE * -(-(prompt + new_tokens) // GRANULE)
        params.n_batch = rows * prompt
        params.n_ubatch = min(params.n_batch, MOST_AT_ONCE)
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        for name, value in settings.items():
            setattr(params, name, value)
        self._context = self._library.llama_init_from_model(model, params)
        if self._context is None:
            raise ValueError(f"llama.cpp refuses {rows} texts of {prompt + new_tokens} tokens")
        self._vocab_size = self._library.llama_vocab_n_tokens(self._library.llama_model_get_vocab(model))
        self._batches = {length: _Batch(self._library, rows, length) for length in (prompt, 1)}
        self._position = 0

    def clear(self) -> None:
        """Forget the texts."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), False)
        self._position = 0

    def read(self, ids_BT: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
        """Logits [B, V] after the next tokens of every text: a prompt, or one token. The next call overwrites them."""
        rows, length = ids_BT.shape
        batch = self._batches[length].filled(ids_BT, self._position)
        if (code := self._library.llama_decode(self._context, batch)) != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        self._position += length
        return np.ctypeslib.as_array(self._library.llama_get_logits(self._context), (rows, self._vocab_size))


class _Batch:
    """`llama_batch` of `length` tokens of each of `rows` texts; logits are computed for the last."""

    def __init__(self, llama_cpp: Any, rows: int, length: int) -> None:
        size = rows * length
        self._batch = llama_cpp.llama_batch_init(size, 0, 1)
        self._batch.n_tokens = size
        self._tokens = np.ctypeslib.as_array(self._batch.token, (size,))
        self._positions = np.ctypeslib.as_array(self._batch.pos, (size,))
        self._offsets = np.tile(np.arange(length), rows)
        for place in range(size):
            self._batch.n_seq_id[place] = 1
            self._batch.seq_id[place][0] = place // length
            self._batch.logits[place] = (place + 1) % length == 0

    def filled(self, ids_BT: NDArray[np.integer[Any]], position: int) -> Any:
        """The batch with these ids from this position on."""
        self._tokens[:] = ids_BT.reshape(-1)
        np.add(self._offsets, position, out=self._positions, casting="unsafe")
        return self._batch


def library() -> Any:
    """The module `llama_cpp`, which writes nothing to stderr from now on."""
    import llama_cpp

    logging.getLogger("llama-cpp-python").setLevel(SILENT)
    return llama_cpp


def export(folder: Path, recipe: Recipe, *, precision: str) -> Path:
    """Write the model as a GGUF file and return its path. Raises InputError for what has no counterpart there."""
    torch.manual_seed(SEED)
    full, file = folder / "full.gguf", folder / "model.gguf"
    choice, vocabulary = planned(recipe.model, family=recipe.arch)
    weights = build_model(recipe.model).state_dict()
    write_gguf(full, choice, recipe.model, weights, dtype="fp32", vocabulary=vocabulary)
    llama_cpp = library()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, FILE_TYPES[precision])
    if llama_cpp.llama_model_quantize(str(full).encode(), str(file).encode(), params) != 0:
        raise InputError(f"llama.cpp cannot store this model as {precision}")
    full.unlink()
    return file
