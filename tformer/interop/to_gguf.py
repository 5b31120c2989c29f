"""A decoder as a GGUF file, which llama.cpp reads (optional).

A Hugging Face class that llama.cpp knows gives the names of tensors, and its `Architecture.gguf` how they are stored.
As in the files of llama.cpp's own tools, vectors and positions are fp32 in every file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tformer.build import resolve_sizes
from tformer.checkpoint.average import require_new
from tformer.checkpoint.read import Checkpoint
from tformer.interop.architecture import Gguf
from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.architectures.parts import stack_of
from tformer.interop.choose import ExportTarget, choose_class, differences, distance
from tformer.interop.config import Config
from tformer.interop.exporting import ExportReport, resolved, tokenizers_of, weights_of
from tformer.interop.from_gguf import DIVISORS, LONG, SCALING, SHORT, llama3_divisors
from tformer.interop.gguf_vocabulary import Vocabulary, vocabulary_of
from tformer.interop.tokenizer_config import special_keys
from tformer.interop.tokenizer_files import with_text_ends
from tformer.interop.weight_files import converted, outgoing
from tformer.nn.positions.rope import RopeOptions
from tformer.recipe.model import Model
from tformer.recipe.recipe import SpecialTokens, with_own_roles
from tformer.support import files
from tformer.support.errors import InputError, require_package
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.chat import TEMPLATES
from tformer.workers.work import QUIET, Work

SUFFIX = ".gguf"
NO_VOCABULARY = Vocabulary({"model": "none"})  # llama.cpp's name; texts go in and out as ids
TYPES = {
    "fp32": ("F32", "ALL_F32"),
    "fp16": ("F16", "MOSTLY_F16"),
    "bf16": ("BF16", "MOSTLY_BF16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
    "q4_0": ("Q4_0", "MOSTLY_Q4_0"),
}
"""--dtype -> the type of a matrix and that of the file."""
FULL = ("position_embd.weight",)
BLOCK = 32  # numbers of a row that share a scale
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation\b")  # marks answers for training; llama.cpp lacks the tag


def export_gguf(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    dtype: str | None = None,
    model_type: str | None = None,
    work: Work = QUIET,
) -> ExportReport:
    """Write a GGUF file with weights and vocabulary.

    Args:
        checkpoint, model_type, work: see `export_checkpoint`.
        out: a file NAME.gguf that does not exist yet.
        dtype: a key of `TYPES`; None: as most weights are stored.

    Raises:
        InputError: as `export_checkpoint`; also where gguf is not installed, llama.cpp does not compute the model
            equally, or it would cut texts into other tokens.
    """
    target = Path(out)
    if target.suffix != SUFFIX:
        raise InputError(f"--out: found {target}, expected the name of a file", hint=f"--out {target.name}{SUFFIX}")
    require_new(target)
    model, choice, vocabulary = plan(checkpoint, model_type)
    weights = weights_of(checkpoint, model)
    if (template := checkpoint.recipe.tokenizer.chat_template) is not None:
        text = TEMPLATES.get(template, template)
        template = _GENERATION.sub(lambda found: found[1] + ("endif" if found[2] else "if true"), text)
    if dtype is None:
        kinds = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
        dtype = kinds.get(max(weights.values(), key=Tensor.numel).dtype, "fp32")
    files.require_writable_folder(target.absolute().parent)
    with files.storage_errors(target):
        files.make_folders(target.absolute().parent)
        with files.replacing(target) as temporary:
            shapes, notes = write_gguf(
                temporary, choice, model, weights, dtype=dtype, vocabulary=vocabulary, template=template, work=work
            )
            files.sync_file(temporary)
    return ExportReport(
        path=target,
        model_type=choice.architecture.model_type,
        class_name=choice.class_name,
        auto_class="llama_cpp.Llama",
        dtype=dtype,
        num_tensors=len(shapes),
        num_parameters=sum(map(math.prod, shapes.values())),
        num_bytes=target.stat().st_size,
        files=(target.name,),
        step=checkpoint.step,
        notes=(
            *checkpoint.notes,
            *(step.note for step in choice.steps),
            *vocabulary.notes,
            *notes,
            *(["averaged weights are exported"] if checkpoint.has("ema") else []),
        ),
    )


def plan(checkpoint: Checkpoint, model_type: str | None = None) -> tuple[Model, ExportTarget, Vocabulary]:
    """(resolved model, class, vocabulary) of a checkpoint's file; errors as in `export_gguf`."""
    require_package("gguf", extra="gguf", user="--to gguf")
    recipe, tokenizers = checkpoint.recipe, tokenizers_of(checkpoint)
    model = resolved(recipe, tokenizers)
    return model, *planned(
        model,
        family=recipe.arch,
        model_type=model_type,
        tokenizer=tokenizers.source,
        ids=recipe.tokenizer.special_ids,
        common=special_keys(recipe, tokenizers.source, tokenizers.target),
    )


def planned(
    model: Model,
    *,
    family: str,
    model_type: str | None = None,
    tokenizer: Tokenizer | None = None,
    ids: SpecialTokens = SpecialTokens(),
    common: Mapping[str, Any] | None = None,
) -> tuple[ExportTarget, Vocabulary]:
    """The class and the vocabulary of a file of a resolved model; tokenizer None: no vocabulary. See `choose_class`.

    ids: the recipe's `tokenizer.special_ids`. Raises InputError for what llama.cpp does not compute, or cut, equally.
    """
    choice = choose_class(model, family=family, model_type=model_type, common=common)
    _form_of(choice)
    if tokenizer is None or model.vocab_size is None:
        return choice, NO_VOCABULARY
    special = with_text_ends(with_own_roles(ids, tokenizer).special)
    return choice, vocabulary_of(tokenizer, special, rows=model.vocab_size)


def refusal(model: Model, **options: Any) -> str | None:
    """The reason why a model cannot be written as a GGUF file; None if it can. options: as in `planned`."""
    try:
        planned(model, **options)
    except InputError as error:
        return error.message
    return None


def _form_of(choice: ExportTarget) -> Gguf:
    """The form of the class in a GGUF file. InputError for what llama.cpp does not compute equally."""
    form, class_name = choice.architecture.gguf, choice.class_name
    if form is None or not choice.architecture.classes[class_name]:
        known = [name for name, architecture in ARCHITECTURES.items() if architecture.gguf is not None]
        raise InputError(
            f"GGUF: {class_name} is not among the models that llama.cpp computes equally: {', '.join(known)}",
            hint="--to huggingface writes it",
        )
    read = Config(form.computed(choice.config), name="GGUF")
    if unlike := differences(choice.model, Model.model_validate(choice.architecture.section(read, class_name))):
        raise InputError(f"GGUF: llama.cpp does not compute this {class_name}: {distance(unlike)[1]}")
    return form


def write_gguf(
    path: Path,
    choice: ExportTarget,
    model: Model,
    weights: Mapping[str, Tensor],
    *,
    dtype: str,
    vocabulary: Vocabulary,
    template: str | None = None,
    work: Work = QUIET,
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Write the file, a tensor at a time beside the weights; returns the shapes of its tensors, and notes."""
    import gguf

    form = _form_of(choice)
    for step in choice.steps:
        model, weights = step.apply(model, weights)
    links, fixed = choice.architecture.written(model, choice.class_name)
    tensors = outgoing(links, fixed, weights, dtype=torch.float32)
    decoder, shapes = stack_of(model, "decoder"), {}
    made: dict[str, Callable[[], Tensor]] = {}
    notes: list[str] = []
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == form.name)
    names = gguf.get_tensor_name_map(arch, decoder.num_layers)
    for name, tensor in tensors.shapes.items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, f"llama.cpp computes {choice.class_name} without {name}"
        made[theirs] = partial(lambda name: form.stored(model, name, tensors.make(name)), name)
        shapes[theirs] = tuple(form.stored(model, name, tensor).shape)
    positions = decoder.positions if isinstance(decoder.positions, RopeOptions) else RopeOptions()
    scaling = positions.scaling
    rotation: dict[str, Tensor] = {}
    if scaling is not None and scaling.kind == "longrope":
        longest = f"{scaling.original_max_seq_len:,} tokens"
        notes = [f"llama.cpp turns all texts by the long factors where its context is longer than {longest}"]
        rotation = dict(zip((SHORT, LONG), scaling.divisors, strict=True))
    elif scaling is not None and scaling.kind == "llama3":
        size = positions.width(resolve_sizes(model, "decoder").head_dim)
        rotation = {DIVISORS: llama3_divisors(scaling, size=size, base=positions.base)}
    made |= {name: tensor.clone for name, tensor in rotation.items()}
    shapes |= {name: tuple(tensor.shape) for name, tensor in rotation.items()}
    matrix, of_file = TYPES[dtype]
    writer = gguf.GGUFWriter(path, form.name)
    _describe(writer, form, choice.config, model)
    writer.add_file_type(getattr(gguf.LlamaFileType, of_file))
    for key, value in vocabulary.values.items():
        add: Any = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}.get(type(value))
        (add or writer.add_array)(f"tokenizer.ggml.{key}", value)
    if template is not None:
        writer.add_chat_template(template)
    kinds = {}
    for name, shape in shapes.items():
        kind = "F32" if len(shape) == 1 or name in FULL else matrix
        if kind.startswith("Q") and shape[-1] % BLOCK:
            kind = "F16"
            notes.append(f"matrices whose rows are no multiple of {BLOCK} numbers are stored as fp16")
        kinds[name] = gguf.GGMLQuantizationType[kind]
        size = math.prod(gguf.quant_shape_to_byte_shape(shape, kinds[name]))
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, kinds[name])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, (name, make) in enumerate(made.items(), start=1):
            tensor = make().contiguous()
            if kinds[name] == gguf.GGMLQuantizationType.F16:
                converted(tensor, torch.float16, name=name)  # refuses a number that is too large
            writer.write_tensor_data(gguf.quants.quantize(tensor.numpy(), kinds[name]))
            work.report(done, len(made))
            work.raise_if_stopped("while exporting, nothing written")
    finally:
        writer.close()
    return shapes, list(dict.fromkeys(notes))


def _describe(writer: Any, form: Gguf, config: Mapping[str, Any], model: Model) -> None:
    """Sizes and constants, under the keys of the writer's architecture."""
    decoder, sizes = stack_of(model, "decoder"), resolve_sizes(model, "decoder")
    values = {key: config[name] for key, name in form.keys.items() if config.get(name) is not None}
    values |= {"vocab_size": model.vocab_size, "attention.value_length": sizes.value_dim}
    values |= {"attention.head_count_kv": sizes.num_kv_heads, "attention.key_length": sizes.head_dim}
    positions = decoder.positions
    if isinstance(positions, RopeOptions):
        values["rope.dimension_count"] = positions.width(sizes.head_dim)
        if (scaling := positions.scaling) is not None and scaling.kind != "llama3":
            values[f"{SCALING}type"] = scaling.kind
            number = {"factor": scaling.factor} if scaling.kind == "linear" else {"attn_factor": scaling.size}
            values |= {SCALING + key: value for key, value in number.items()}
    for key, value in values.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{form.name}.{key}", value)
