"""A GGUF file as a Hugging Face folder, which `import_folder` reads: weights, dequantized, and the tokenizer."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tformer.checkpoint.tensor_files import tensor_chunks
from tformer.interop.architecture import Architecture, Gguf
from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.architectures.llama import ORIGINAL
from tformer.interop.config import Config
from tformer.interop.gguf_vocabulary import ROLES, document_of
from tformer.interop.tokenizer_config import TOKENIZER_CONFIG
from tformer.interop.tokenizer_files import TOKENIZER_JSON
from tformer.interop.weight_files import CONFIG, SINGLE
from tformer.nn.positions.rope import RopeScaling, scale_frequencies
from tformer.recipe.model import Model
from tformer.support import files
from tformer.support.errors import InputError, require_package
from tformer.support.formatting import listed

MAGIC = b"GGUF"
VOCABULARY, TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
NEEDED = ("context_length", "block_count", "feed_forward_length")  # keys; others have llama.cpp's default values
COMPUTED = ("vocab_size", "rope.dimension_count", "attention.value_length")  # keys that follow from others
SCALING = "rope.scaling."
OF_SCALING = ("type", "factor", "original_context_length", "attn_factor", "finetuned")
DIVISORS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"


@contextmanager
def unpacked(path: Path, *, beside: Path | None = None, vocabulary: bool = True) -> Iterator[Path]:
    """Context manager: a folder itself, or a temporary folder for a GGUF file. Messages name the file.

    Args:
        beside: the path beside which the temporary folder is made; None: the system's place.
        vocabulary: whether the file's vocabulary is read.
    """
    if not path.is_file():
        yield path
        return
    if beside is not None:
        files.require_writable_folder(beside)
    parent = None if beside is None else next(folder for folder in beside.absolute().parents if folder.is_dir())
    with TemporaryDirectory(prefix=".tformer-gguf-", dir=parent) as folder:
        try:
            unpack_gguf(path, Path(folder), vocabulary=vocabulary)
            yield Path(folder)
        except InputError as error:
            raise InputError(error.message.replace(folder, str(path)), hint=error.hint) from error


def unpack_gguf(path: Path, folder: Path, *, vocabulary: bool = True) -> None:
    """Write config.json, weights (fp32), chat template and, if asked for, the tokenizer of a GGUF file into a folder.

    Raises InputError for a damaged file, and for an architecture, a key, a type or a tensor that tformer does not read.
    """
    fields, tensors = _read(path)
    import gguf

    values = _contents(path, {name: field for name, field in fields.items() if not name.startswith(VOCABULARY)})
    known = {one.gguf.name: (one, one.gguf) for one in reversed(ARCHITECTURES.values()) if one.gguf is not None}
    stated = Config(values, name=str(path))
    found = stated.take("general.architecture", kind=str)
    if found not in known:
        raise InputError(f"{path}: general.architecture: found {found!r}, tformer reads {', '.join(sorted(known))}")
    architecture, form = known[found]
    if (parts := stated.take("split.count", default=1)) > 1:
        raise InputError(f"{path} is one of {parts} files", hint="llama-gguf-split --merge makes one file of them")
    if not tensors:
        hint = "the file of the whole model has the same vocabulary: import that"
        raise InputError(f"{path} holds no weights, only keys and perhaps a vocabulary", hint=hint)
    for kind, name in {tensor.tensor_type: tensor.name for tensor in tensors.values()}.items():
        try:  # nothing of the package lists the types that it reads
            gguf.quants.dequantize(np.zeros(gguf.GGML_QUANT_SIZES[kind][1], np.uint8), kind)
        except NotImplementedError:
            raise InputError(
                f"{path}: tensor {name} has the type {kind.name}, which the package gguf does not dequantize",
                hint="take a file of the same model in F16 or Q8_0",
            ) from None
    config = _config(path, architecture, form, values, tensors)
    class_name = config["architectures"][0]
    model = Model.model_validate(architecture.section(Config(config, name=str(path)), class_name))
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == form.name)
    names = gguf.get_tensor_name_map(arch, model.stacks["decoder"].num_layers)
    wanted = {
        theirs: names.get_name(theirs, try_suffixes=(".weight", ".bias")) or theirs
        for link in architecture.table(model, class_name)
        for theirs in link.theirs
    }
    missing = set(wanted.values()) - set(tensors)
    unknown = set(tensors) - set(wanted.values()) - {DIVISORS, SHORT, LONG}
    if missing or unknown:
        problems = {"missing": missing, "unknown": unknown}
        said = "; ".join(f"{word} {listed(sorted(some), 5)}" for word, some in problems.items() if some)
        raise InputError(f"{path}: its tensors are not those of {class_name}: {said}")

    def make(name: str) -> Tensor:
        return form.loaded(model, name, _numbers(tensors[wanted[name]])).contiguous()

    texts: dict[str, Any] = {CONFIG: config}
    template = stated.take(TEMPLATE, default=None, kind=str)
    texts[TOKENIZER_CONFIG] = {} if template is None else {"chat_template": template}
    shapes: dict[str, Tensor] = {}
    for name, theirs in wanted.items():
        empty = torch.empty(tensors[theirs].shape[::-1].tolist(), device="meta")
        try:
            shapes[name] = form.loaded(model, name, empty).contiguous()
        except RuntimeError:
            raise InputError(f"{path}: tensor {theirs}: its shape {list(empty.shape)} contradicts the keys") from None
    if vocabulary:
        stem = len(VOCABULARY)
        own = _contents(path, {key[stem:]: field for key, field in fields.items() if key.startswith(VOCABULARY)})
        texts[TOKENIZER_JSON] = document_of(path, own)
        ids = {ours: own[f"{role}_token_id"] for role, ours in ROLES.items() if f"{role}_token_id" in own}
        texts[CONFIG] |= {f"{role}_token_id": token for role, token in ids.items()}
        texts[TOKENIZER_CONFIG] |= {f"{role}_token": own["tokens"][token] for role, token in ids.items()}
    files.require_room(folder, sum(tensor.nbytes for tensor in shapes.values()))
    files.write_durably(folder / SINGLE, tensor_chunks(shapes, make=make))
    for name, document in texts.items():
        files.write_durably(folder / name, [json.dumps(document, ensure_ascii=False).encode()])


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys (`gguf.ReaderField`) and the tensors (`gguf.ReaderTensor`) by name, mapped from the file."""
    with files.open_regular(path) as file:
        start, version = file.read(len(MAGIC)), file.read(4)
    if start != MAGIC:
        raise InputError(f"{path} is not a folder, and a GGUF file begins with {MAGIC!r}, found {start!r}")
    if version[:2] == b"\0\0":  # the package reads their headers, and dequantizes them to other numbers
        raise InputError(f"{path}: its numbers are big-endian, tformer reads little-endian files")
    require_package("gguf", extra="gguf", user=str(path))
    import gguf

    class StrictReader(gguf.GGUFReader):
        """`GGUFReader` that raises ValueError at the end of the file, where its parent returns too few values.

        A list is one array, or one for each text: its parent makes several for each value, in 10 s for a vocabulary.
        """

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if not 0 <= int(count) <= (len(self.data) - int(offset)) // np.dtype(dtype).itemsize:
                raise ValueError(f"it has {len(self.data):,} bytes, and says that {count:,} values stand at {offset:,}")
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != gguf.GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = gguf.GGUFValueType(self._get(orig_offs, np.uint32)[0]), self._get(orig_offs + 4, np.uint64)[0]
            offset, types = orig_offs + 12, [gguf.GGUFValueType.ARRAY, kind]
            if kind != gguf.GGUFValueType.STRING:
                values = self._get(offset, self.gguf_scalar_to_np[kind], count)
                return 12 + values.nbytes, [values], [0], types
            data, parts = np.asarray(self.data), []
            for _ in range(count):
                [size] = struct.unpack_from("<Q", data.data, offset)
                offset += 8 + size
                parts.append(data[offset - size : offset])
            return offset - orig_offs, parts, list(range(len(parts))), types

    try:
        reader = StrictReader(path)
    except (ValueError, LookupError, OSError, OverflowError, RecursionError, struct.error) as error:
        raise InputError(f"{path} is not a usable GGUF file: {error}") from error
    return reader.fields, {tensor.name: tensor for tensor in reader.tensors}


def _contents(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The values of some keys (`gguf.ReaderField`)."""
    import gguf

    try:
        values = {name: field.contents() for name, field in fields.items()}
    except ValueError as error:  # bytes that are no text
        raise InputError(f"{path} is not a usable GGUF file: {error}") from error
    # shortest decimals: 1e-6 and not 9.99999997e-07
    single = [name for name, field in fields.items() if field.types == [gguf.GGUFValueType.FLOAT32]]
    return values | {name: float(str(np.float32(values[name]))) for name in single}


def _numbers(tensor: Any) -> Tensor:
    """A `gguf.ReaderTensor` in fp32."""
    import gguf

    numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(numbers.reshape(tensor.shape[::-1].tolist()).copy())


def _config(
    path: Path, architecture: Architecture, form: Gguf, values: Mapping[str, Any], tensors: Mapping[str, Any]
) -> dict[str, Any]:
    """The keys of config.json."""
    stem = f"{form.name}."
    own = {name.removeprefix(stem): value for name, value in values.items() if name.startswith(stem)}
    sizes = Config(own, name=f"{path}: {form.name}")
    heads, width = sizes.size("attention.head_count"), sizes.size("embedding_length")
    size = sizes.size("attention.key_length", default=width // heads)
    plain = {"attention.head_count_kv": heads, "attention.key_length": width // heads}  # of a class without these keys
    known = {*form.keys, *COMPUTED, *(SCALING + key for key in OF_SCALING)}
    if odd := sorted(key for key in own.keys() - known if own[key] != plain.get(key)):
        raise InputError(f"{path}: {stem}{odd[0]}: found {own[odd[0]]!r}, a key that tformer does not read")
    for key in (*NEEDED, *(key for key in form.keys if key.endswith("epsilon"))):
        sizes.take(key, kind=(int, float))
    missing = {"attention.head_count_kv": heads, "attention.key_length": size, "rope.freq_base": 10000.0}
    config = {name: own.get(key, missing.get(key)) for key, name in form.keys.items() if key in {*own, *missing}}
    rotated = sizes.size("rope.dimension_count", default=size)
    if share := form.keys.get("rope.dimension_count"):
        config[share] = rotated / size
    else:
        sizes.expect("rope.dimension_count", size)
    sizes.expect("attention.value_length", size)
    config["vocab_size"] = int(tensors["token_embd.weight"].shape[-1]) if "token_embd.weight" in tensors else 1
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config |= {key: True for key, name in form.shown.items() if name in tensors}
    if scaling := _scaling(path, form, own, tensors, size=rotated, base=own.get("rope.freq_base", 10000.0)):
        config["rope_scaling"] = scaling
    [class_name] = [name for name, heads_of in architecture.classes.items() if heads_of]
    named = {"architectures": [class_name], "model_type": architecture.model_type}
    return {**form.assumed(config), **config, **named}


def _scaling(
    path: Path, form: Gguf, own: Mapping[str, Any], tensors: Mapping[str, Any], *, size: int, base: float
) -> dict[str, Any] | None:
    """`rope_scaling` of config.json; None: the frequencies are not scaled."""
    rope_type = own.get(f"{SCALING}type", "linear" if f"{SCALING}factor" in own else "none")
    numbers = {name: _numbers(tensors[name]) for name in (DIVISORS, SHORT, LONG) if name in tensors}
    scaling: dict[str, Any] | None = None
    if DIVISORS in numbers:
        scaling = llama3_scaling(numbers[DIVISORS], size=size, base=base)
    elif SHORT in numbers and LONG in numbers:
        scaling = {"rope_type": "longrope", "attention_factor": own.get(f"{SCALING}attn_factor", 1.0)}
        scaling |= {"short_factor": numbers[SHORT].tolist(), "long_factor": numbers[LONG].tolist()}
    elif rope_type == "linear":
        scaling = {"rope_type": "linear", "factor": own.get(f"{SCALING}factor", 1.0)}
    elif rope_type == "none" and not numbers:
        return None
    if scaling is None or scaling["rope_type"] not in form.scalings:
        stated = ", ".join([rope_type, *numbers])
        raise InputError(f"{path}: {form.name}.{SCALING}type: found {stated}, tformer reads {', '.join(form.scalings)}")
    return scaling


def llama3_scaling(divisors: Tensor, *, size: int, base: float) -> dict[str, Any] | None:
    """`rope_scaling` of kind llama3 with the released limits and these divisors of frequencies; None: no such."""
    for original in (2**power for power in range(4, 21)):
        scaling = RopeScaling(factor=float(divisors.max()), original_max_seq_len=original)
        made = llama3_divisors(scaling, size=size, base=base)
        if made.shape == divisors.shape and torch.allclose(made, divisors, rtol=1e-5):
            limits = {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
            return {"rope_type": "llama3", "factor": scaling.factor, **limits, ORIGINAL: original}
    return None


def llama3_divisors(scaling: RopeScaling, *, size: int, base: float) -> Tensor:
    """Divisors of the frequencies [size / 2]: those without scaling over the scaled ones."""
    frequencies = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    return (frequencies / scale_frequencies(frequencies, scaling, base=base)).float()
