"""Folders of several weight files are read one tensor at a time: the memory of an import and of a load is bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import tformer
from tests.interop import tiny_folders as tiny
from tformer.decoding.inference import can_quantize, prepare_inference
from tformer.interop import weight_files
from tformer.interop.foreign_checkpoint import open_folder
from tformer.interop.importing import import_folder
from tformer.loading import load
from tformer.nn.products import Quantize

SHARD = 20 * 10**6
MEASURE = """
import json, sys
from pathlib import Path
import torch, tformer
from tformer.decoding import inference
from tformer.decoding.options import GenerateOptions
from tformer.decoding.writers import load_models
from tformer.interop.importing import import_folder

inference.keep_freed_memory = lambda: None  # holes that freed tensors leave are not what is measured

def status(name):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024

task, small, large, out = sys.argv[1:]
tasks = {
    "import": lambda folder: import_folder(folder, Path(out) / folder.name),
    "import as bf16": lambda folder: import_folder(folder, Path(out) / folder.name, dtype=torch.bfloat16),
    "load": lambda folder: tformer.load(folder),
    "load as bf16": lambda folder: tformer.load(folder, dtype=torch.bfloat16),
    "command in bf16": lambda folder: load_models(GenerateOptions((str(folder),), precision="bf16")),
    "command in int8": lambda folder: load_models(GenerateOptions((str(folder),), precision="fp32", quantize="int8")),
}
tasks[task](Path(small))  # what libraries take is not counted
Path("/proc/self/clear_refs").write_text("5")  # the highest memory so far is that of now
before = status("VmRSS")
kept = tasks[task](Path(large))
print(json.dumps(status("VmHWM") - before))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 with 19 M parameters in fp32, in shards of 20 MB."""
    folder = tmp_path_factory.mktemp("large") / "model"
    tiny.gpt2(folder, n_embd=512, n_layer=6, n_inner=2048, n_head=8)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20MB")
    assert len(list(folder.glob("model-*.safetensors"))) >= 4
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts the highest memory")
@pytest.mark.parametrize(
    ("task", "bytes_each"),
    [
        ("import", 4),
        ("import as bf16", 2),
        ("load", 4),
        ("load as bf16", 2),
        ("command in bf16", 2),
        ("command in int8", 1),
    ],
)
def test_at_most_the_model_in_its_number_format_and_a_shard(
    large: Path, tmp_path: Path, task: str, bytes_each: int
) -> None:
    """A new process measures its highest memory while the task runs, less the memory before it."""
    if task == "command in int8" and not can_quantize("int8", torch.device("cpu")):
        pytest.skip("8-bit products need instructions or a C compiler")
    small = tiny.gpt2(tmp_path / "small")
    words = [sys.executable, "-c", MEASURE, task, str(small), str(large), str(tmp_path / "out")]
    # Without it glibc puts large tensors into its heap, whose holes (up to 22 MB here) are not what is measured.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    found = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    parameters = tformer.load(large).model.num_parameters()
    limit = parameters * bytes_each + SHARD
    assert json.loads(found.stdout) < limit, (json.loads(found.stdout), limit)


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize("imported", [False, True], ids=["folder", "checkpoint"])
@pytest.mark.parametrize("make", [tiny.gpt2, tiny.bert, tiny.t5], ids=["tied", "joined", "both"])
def test_weights_that_are_packed_as_they_come_are_those_that_were_loaded_first(
    tmp_path: Path, make: Callable[..., Path], imported: bool, quantize: Quantize
) -> None:
    if not can_quantize(quantize, torch.device("cpu")):
        pytest.skip(f"{quantize} products need instructions or a C compiler")
    path = make(tmp_path / "folder")
    if imported:
        import_folder(path, path := tmp_path / "run")
    first, packed = load(path), load(path, lazily=True)
    prepare_inference(first.model, torch.bfloat16, quantize=quantize)
    prepare_inference(packed.model, torch.bfloat16, quantize=quantize, fill=packed.fill)
    ids = torch.randint(5, 20, (2, 7), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if first.recipe.model.is_encoder_decoder else {})}
    expected, found = (each.model(**inputs).logits for each in (first, packed))
    assert torch.equal(found, expected) and bool(found.isfinite().all())
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(7), packed.model.state_dict()[name].nan_to_num(7)), name


def test_no_tensor_outlives_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is read and made only the parts that wait for others are there when the next tensor is read."""
    folder, alive = tiny.bert(tmp_path / "folder"), list[weakref.ref[Tensor]]()
    most: list[int] = []
    each = weight_files.each_tensor

    def watched(path: Path, **options: Any) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in each(path, **options):
            most.append(sum(one() is not None for one in alive))
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    monkeypatch.setattr(weight_files, "each_tensor", watched)
    for _, tensor in open_folder(folder).each("weights"):
        alive.append(weakref.ref(tensor))
        del tensor
    # q, k, v of one layer, weights and biases, beside the tensor that was given last.
    assert len(most) > 30 and max(most) <= 8, most


def test_what_is_made_does_not_depend_on_the_order_of_the_files(tmp_path: Path) -> None:
    """Parts of one tensor lie in several shards: q, k and v of BERT, and a tied output."""
    folder = tiny.bert(tmp_path / "folder")
    model = transformers.BertForMaskedLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "shards", max_shard_size="2KB")
    for path in folder.glob("tokenizer*"):
        (tmp_path / "shards" / path.name).write_bytes(path.read_bytes())
    one, several = (tformer.load(path).model.state_dict() for path in (folder, tmp_path / "shards"))
    assert all(torch.equal(one[name], several[name]) for name in one)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_load_gives_the_weights_of_the_import_in_every_number_format(
    tmp_path: Path, dtype: torch.dtype | None
) -> None:
    folder = tiny.gpt2(tmp_path / "folder")
    import_folder(folder, tmp_path / "run")
    direct, imported = (tformer.load(path, dtype=dtype).model for path in (folder, tmp_path / "run"))
    assert direct.compute_dtype == imported.compute_dtype
    for name, tensor in direct.state_dict().items():
        other = imported.state_dict()[name]
        assert tensor.dtype == other.dtype == (dtype or torch.float32) and torch.equal(tensor, other), name
