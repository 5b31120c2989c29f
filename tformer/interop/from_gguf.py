"""A GGUF file as a Hugging Face folder, which `import_folder` reads: weights, dequantized, and the tokenizer."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from tformer.checkpoint.tensor_files import tensor_chunks
from tformer.interop.architecture import Architecture
from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.config import Config
from tformer.interop.gguf_vocabulary import document_of
from tformer.interop.tokenizer_config import TOKENIZER_CONFIG
from tformer.interop.tokenizer_files import TOKENIZER_JSON
from tformer.interop.weight_files import CONFIG, SINGLE
from tformer.recipe.model import Model
from tformer.support import files
from tformer.support.errors import InputError
from tformer.support.formatting import listed

READ = ("F32", "F16", "BF16", "Q8_0", "Q4_0")
COMPUTED = ("vocab_size", "rope.dimension_count", "attention.value_length")  # follow from other keys
ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Context manager of a folder as it is, or of a temporary one for a GGUF file."""
    if not path.is_file():
        yield path
        return
    with TemporaryDirectory(prefix="tformer-gguf-") as folder:
        unpack_gguf(path, Path(folder))
        yield Path(folder)


def unpack_gguf(path: Path, folder: Path) -> None:
    """Write config.json, model.safetensors (fp32) and the tokenizer of a GGUF file into a folder.

    Raises InputError for a damaged file, and for an architecture, a key, a type or a tensor that tformer does not read.
    """
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f"{path} needs the package gguf, which is not installed", hint="pip install 'tformer[gguf]'")
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        values = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise InputError(f"{path} is not a usable GGUF file: {error}") from error
    for tensor in tensors.values():
        if tensor.tensor_type.name not in READ:
            raise InputError(
                f"{path}: tensor {tensor.name} has the type {tensor.tensor_type.name}, tformer reads {', '.join(READ)}",
                hint="take a file of the same model in F16 or Q8_0",
            )
    known = {one.gguf.name: one for one in reversed(ARCHITECTURES.values()) if one.gguf is not None}
    found = values.get("general.architecture")
    if found not in known:
        raise InputError(f"{path}: general.architecture: found {found!r}, tformer reads {', '.join(known)}")
    architecture, form = known[found], known[found].gguf
    assert form is not None
    config = _config(path, architecture, values, set(tensors))
    config["vocab_size"] = int(tensors["token_embd.weight"].shape[1])
    class_name = config["architectures"][0]
    section = architecture.section(Config(config, name=str(path)), class_name)
    model = Model.model_validate(section)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == form.name),
        model.stacks["decoder"].num_layers,
    )
    wanted = {
        theirs: names.get_name(theirs, try_suffixes=(".weight", ".bias")) or theirs
        for link in architecture.table(model, class_name)
        for theirs in link.theirs
    }
    missing, left = set(wanted.values()) - set(tensors), set(tensors) - set(wanted.values())
    if missing or left:
        problems = {"missing": missing, "unknown": left}
        said = "; ".join(f"{word} {listed(sorted(some), 5)}" for word, some in problems.items() if some)
        raise InputError(f"{path}: its tensors are not those of {class_name}: {said}")

    def make(name: str) -> Tensor:
        tensor = tensors[wanted[name]]
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return form.loaded(
            model, name, torch.from_numpy(numbers.reshape(tensor.shape[::-1].tolist()).copy())
        ).contiguous()

    def shape(name: str) -> Tensor:
        empty = torch.empty(tensors[wanted[name]].shape[::-1].tolist(), device="meta")
        return torch.empty(form.loaded(model, name, empty).shape, device="meta")

    files.write_durably(folder / SINGLE, tensor_chunks({name: shape(name) for name in wanted}, make=make))
    prefix = "tokenizer.ggml."
    vocabulary = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    ids = {ours: vocabulary[f"{role}_token_id"] for role, ours in ROLES.items() if f"{role}_token_id" in vocabulary}
    texts: dict[str, Any] = {CONFIG: config | {f"{role}_token_id": token for role, token in ids.items()}}
    texts[TOKENIZER_JSON] = document_of(path, vocabulary, vocabulary.get("tokens") or [])
    texts[TOKENIZER_CONFIG] = {f"{role}_token": vocabulary["tokens"][token] for role, token in ids.items()}
    for name, document in texts.items():
        files.write_durably(folder / name, [json.dumps(document, ensure_ascii=False).encode()])


def _config(path: Path, architecture: Architecture, values: Mapping[str, Any], tensors: set[str]) -> dict[str, Any]:
    """The keys of config.json."""
    form = architecture.gguf
    assert form is not None
    stem = f"{form.name}."
    own = {name.removeprefix(stem): value for name, value in values.items() if name.startswith(stem)}
    odd = sorted(own.keys() - form.keys.keys() - set(COMPUTED))
    plain = {"attention.head_count_kv": own.get("attention.head_count")}  # of a class without these keys
    plain["attention.key_length"] = own.get("embedding_length", 0) // (own.get("attention.head_count") or 1)
    if odd := [key for key in odd if key not in plain or own[key] != plain[key]]:
        raise InputError(f"{path}: {stem}{odd[0]}: found {own[odd[0]]!r}, a key that tformer does not read")
    config = {name: own[key] for key, name in form.keys.items() if key in own}
    heads, width = own.get("attention.head_count", 1), own.get("embedding_length", 0)
    size = own.get("attention.key_length", width // heads)
    if own.get("rope.dimension_count", size) != size or own.get("attention.value_length", size) != size:
        raise InputError(f"{path}: {stem}rope.dimension_count: found another size than that of a head, {size}")
    for key, missing in (("attention.key_length", size), ("attention.head_count_kv", heads)):
        if key in form.keys:
            config.setdefault(form.keys[key], missing)
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    config |= {key: True for key, name in biases.items() if name in tensors and architecture.model_type == "llama"}
    [class_name] = [name for name, heads_of in architecture.classes.items() if heads_of]
    tied = {"tie_word_embeddings": "output.weight" not in tensors}
    return config | tied | {"architectures": [class_name], "model_type": architecture.model_type}
