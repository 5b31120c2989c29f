"""Adapters in the layout of peft, both ways: adapter_config.json beside adapter_model.safetensors.

Keys are `base_model.model.` and the module of the Hugging Face class, then `.lora_A.weight` [r, in], `.lora_B.weight`
[out, r] and `.lora_magnitude_vector` [out] for DoRA; a tensor that was trained in full has its own name. The tables of
the architectures (`interop/architectures`) say which rows of which matrix a module holds. A module of several
projections with an adapter each, such as GPT-2's c_attn, gets one of the joint rank with a block for each in B.

peft saves modules: of a table of tokens that is the output's matrix too, either use or both. Where they come out
different, the model here has two tables.
"""

from __future__ import annotations

import fnmatch
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tformer.build import add_adapters, build_model
from tformer.checkpoint.average import require_new
from tformer.checkpoint.read import Checkpoint, all_finite
from tformer.checkpoint.save import CheckpointContents, write_checkpoint
from tformer.checkpoint.tensor_files import each_tensor, tensor_chunks
from tformer.interop.adapters import AdaptedCheckpoint, base_weights
from tformer.interop.architecture import Architecture, auto_class
from tformer.interop.choose import choose_class
from tformer.interop.config import Config
from tformer.interop.exporting import resolved, tokenizers_of
from tformer.interop.foreign_checkpoint import ForeignCheckpoint
from tformer.interop.mapping import TRANSPOSED, Link, to_ours
from tformer.interop.opening import open_checkpoint
from tformer.model import Transformer
from tformer.nn.lora import ADAPTER, Projection, projections
from tformer.recipe import recipe_from_yaml, recipe_to_yaml
from tformer.recipe.model import Model
from tformer.recipe.sections import Lora, LoraBase
from tformer.support import files
from tformer.support.errors import InputError, NotFiniteError
from tformer.support.formatting import listed, plural

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
KEY = re.compile(r"(.+)\.(lora_A|lora_B|lora_embedding_[AB]|lora_magnitude_vector)(?:\.weight)?")
TASKS = {
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
    "AutoModelForQuestionAnswering": "QUESTION_ANS",
    "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
    "AutoModel": "FEATURE_EXTRACTION",
}
INERT = ("peft_type", "peft_version", "task_type", "auto_mapping", "revision", "inference_mode", "runtime_config",
         "init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config",
         "qalora_group_size", "megatron_config", "megatron_core", "fan_in_fan_out", "bias", "ensure_weight_tying",
         "exclude_modules", "layers_to_transform", "layers_pattern")  # fmt: skip
"""Keys of adapter_config.json that the tensors show the effect of, or that concern training."""
READ = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "target_modules",
        "modules_to_save")  # fmt: skip
KEEPING = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights that leave the base as it is; PiSSA, OLoRA and others take their start out of it."""
Number = TypeVar("Number", int, float)
MAX_LISTED = 4
MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True)
class Module:
    """A linear layer of a Hugging Face class: its rows in a matrix of tformer."""

    path: str
    matrix: str
    rows: Tensor  # [out]
    is_transposed: bool

    def parts(self, all_parts: Sequence[Projection]) -> list[tuple[Projection, Tensor]]:
        """The projections that it holds, each with their rows in it. InputError for one that it holds in part."""
        found = []
        for part in all_parts:
            own = ((self.rows >= part.start) & (self.rows < part.stop)).nonzero().flatten()
            if len(own) == part.stop - part.start:
                found.append((part, own[self.rows[own].argsort()]))
            elif len(own):
                raise InputError(f"{self.path} holds only some rows of {part.name}")
        return found


def modules_of(links: Sequence[Link], model: Transformer) -> dict[str, Module]:
    """The linear layers inside the stacks, by their path in the Hugging Face class."""
    matrices, found = projections(model), {}
    for link in links:
        matrix = link.ours.removesuffix(".weight")
        if matrix in matrices and matrix != link.ours:
            numbers = torch.arange(matrices[matrix][0].out_features).unsqueeze(1)
            for name, part in zip(link.theirs, link.layout.split(numbers), strict=True):
                path = name.removesuffix(".weight")
                found[path] = Module(path, matrix, part.flatten(), link.layout is TRANSPOSED)
    return found


def _class_of(checkpoint: Checkpoint) -> tuple[Model, Architecture, str, list[Link]]:
    """(resolved model, architecture, class, links). InputError when no class of Hugging Face computes the model."""
    if isinstance(checkpoint, ForeignCheckpoint):
        foreign = checkpoint.foreign
        model, architecture, name = foreign.model, foreign.architecture, foreign.class_name
    else:
        recipe = checkpoint.recipe
        model = resolved(recipe, tokenizers_of(checkpoint))
        choice = choose_class(model, family=recipe.arch, source=recipe.model_type)
        if choice.steps:
            told = f"{checkpoint.path}: {choice.steps[0].note}: adapters cannot follow"
            raise InputError(told, hint="merge them: tformer merge RUN --out NEW")
        architecture, name = choice.architecture, choice.class_name
    return model, architecture, name, architecture.written(model, name)[0]


def class_of_adapted(checkpoint: Checkpoint) -> tuple[Model, Architecture, str, list[Link]]:
    """`_class_of` of a run with adapters. InputError for one without."""
    if not isinstance(checkpoint, AdaptedCheckpoint):
        raise InputError(f"{checkpoint.path} has no adapters", hint="--to peft writes runs of train --lora")
    return _class_of(checkpoint)


@dataclass(frozen=True)
class PeftReport:
    """Report of an export or import: folder, class of the base, numbers of adapted modules and tensors.

    base_format: of the base beside which the adapters were trained.
    """

    path: Path
    class_name: str
    modules: int
    tensors: int
    base_format: str = "fp32"

    @property
    def line(self) -> str:
        rounded = f"; they were trained beside a base in {self.base_format}" if self.base_format != "fp32" else ""
        counts = plural(self.modules, "module"), plural(self.tensors, "tensor")
        return f"adapters of {counts[0]} of {self.class_name}, {counts[1]}{rounded}"

    def document(self) -> dict[str, Any]:
        """The JSON document of the commands."""
        return {"path": str(self.path), "class": self.class_name, "modules": self.modules, "tensors": self.tensors}


def export_adapters(checkpoint: Checkpoint, out: Path) -> PeftReport:
    """Write a run's adapters for peft, which loads them onto the same base. Errors: as in `as_in_peft`."""
    require_new(out)
    class_name, modules, config, tensors = as_in_peft(checkpoint)

    def fill(folder: Path) -> None:
        files.write_durably(folder / CONFIG, [(json.dumps(config, indent=2) + "\n").encode()])
        files.write_durably(folder / WEIGHTS, tensor_chunks(tensors))

    with files.storage_errors(out):
        files.publish_directory(out, fill)
    assert isinstance(checkpoint, AdaptedCheckpoint)  # or `as_in_peft` refused it
    return PeftReport(out, class_name, modules, len(tensors), checkpoint.lora.weights)


def as_in_peft(checkpoint: Checkpoint) -> tuple[str, int, dict[str, Any], dict[str, Tensor]]:
    """(class of the base, number of adapted modules, adapter_config.json, tensors) of a run's adapters.

    Raises InputError for a run without adapters, a base that no class of Hugging Face computes, and DoRA on some of the
    projections of a module.
    """
    section, _, class_name, links = class_of_adapted(checkpoint)
    assert isinstance(checkpoint, AdaptedCheckpoint)  # or `class_of_adapted` refused it
    lora = checkpoint.lora
    model = build_model(section, device="meta")
    add_adapters(model, section, lora)
    tied, own = model.tied_names(), checkpoint.trained()
    modules, matrices = modules_of(links, model), projections(model)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    transposed: set[bool] = set()
    for module in modules.values():
        adapter = matrices[module.matrix][0].adapter
        held = [] if adapter is None else module.parts(adapter.projections)
        if not held:
            continue
        a, b, lengths = _joined(held, module, adapter, {key: own[f"{module.matrix}{ADAPTER}{key}"]
                                                        for key in adapter.state_dict()})  # fmt: skip
        ranks[module.path] = len(a)
        transposed.add(module.is_transposed)
        tensors |= {f"{PREFIX}{module.path}.lora_A.weight": a, f"{PREFIX}{module.path}.lora_B.weight": b}
        if lengths is not None:
            tensors[f"{PREFIX}{module.path}.lora_magnitude_vector"] = lengths
    placed = {link.ours for link in links}
    if homeless := sorted(name for name in own if name not in placed | tied.keys() and ADAPTER not in name):
        raise InputError(f"{class_name} has no place for {listed(homeless, MAX_LISTED)}")
    places = {name: link for link in links for name in (*link.theirs, *link.also)}
    trained = {name for name, link in places.items() if link.ours in own}
    biases = {name for name in trained if name.rpartition(".")[0] in ranks}  # of modules with an adapter
    saved = {name.rpartition(".")[0] for name in trained - biases}
    saved = {module for module in saved if not _is_of(module, saved)}
    if kept := {name for name in places.keys() - trained if _is_of(name, saved)}:  # a saved module is saved whole
        own = base_weights(checkpoint.base) | own
    for name in trained | kept:
        path, _, last = name.rpartition(".")
        key = f"{path}.base_layer.{last}" if name in biases else name
        tensors[f"{PREFIX}{key}"] = _part(places[name], name, own)
    factor = math.sqrt if lora.rslora else float
    config = {
        "peft_type": "LORA",
        "task_type": TASKS.get(auto_class(class_name)),
        "base_model_name_or_path": str(checkpoint.base.path) if isinstance(checkpoint.base, ForeignCheckpoint) else "",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": _shortest(
            list(ranks), [name.removesuffix(".weight") for link in links for name in link.theirs]
        ),
        "modules_to_save": sorted(saved) or None,
        "bias": "lora_only" if biases else "none",
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "fan_in_fan_out": transposed == {True},
        "rank_pattern": {path: rank for path, rank in ranks.items() if rank != lora.rank},
        "alpha_pattern": {path: lora.scale * factor(rank) for path, rank in ranks.items() if rank != lora.rank},
        "inference_mode": True,
    }
    if any(link.ours in own and link.ours in tied.values() and len(link.also) == 1 for link in links):
        config["ensure_weight_tying"] = True  # where training goes on; peft has it for one output beside the input
    return class_name, len(ranks), config, tensors


def _is_of(name: str, modules: Collection[str]) -> bool:
    """Whether a tensor belongs to one of these modules, or to a part of one."""
    return any(name.startswith(f"{module}.") for module in modules)


def _part(link: Link, name: str, ours: Mapping[str, Tensor]) -> Tensor:
    """The tensor that has this name on disk, or repeats the first one under it."""
    number = link.theirs.index(name) if name in link.theirs else 0
    return link.layout.split(ours[link.ours])[number].contiguous()


def _joined(
    held: Sequence[tuple[Projection, Tensor]], module: Module, adapter: Any, own: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(A, B, magnitudes or None) of a module, from the adapters of the projections that it holds."""
    adapter.to_empty(device="cpu").load_state_dict(dict(own))
    factors: dict[Projection, list[Any]] = {}
    for projection, *tensors in adapter.factors():
        factors[projection] = [None if tensor is None else tensor.detach() for tensor in tensors]
    first: Tensor = factors[held[0][0]][0]
    is_common = all(torch.equal(factors[projection][0], first) for projection, _ in held)
    joined_a = first if is_common else torch.cat([factors[projection][0] for projection, _ in held])
    joined_b = torch.zeros(len(module.rows), len(joined_a))
    lengths = None if adapter.magnitude is None else torch.zeros(len(module.rows))
    for number, (projection, place) in enumerate(held):
        a, b, length = factors[projection]
        start = 0 if is_common else number * len(a)
        joined_b[place, start : start + len(a)] = b
        if lengths is not None:
            lengths[place] = length
    if lengths is not None and sum(len(place) for _, place in held) < len(module.rows):
        told = f"DoRA: only some rows of {module.path} have an adapter, expected all"
        raise InputError(told, hint="merge them: tformer merge RUN --out NEW")
    return joined_a.contiguous(), joined_b, lengths


def _shortest(chosen: Sequence[str], every: Sequence[str]) -> list[str]:
    """Shortest names that select exactly the chosen paths: their last words, or the whole paths."""
    ends = sorted({path.rpartition(".")[2] for path in chosen})
    is_exact = all(path in set(chosen) for path in every if path.rpartition(".")[2] in ends)
    return ends if is_exact else sorted(chosen)


def import_adapters(folder: Path, out: Path, *, base: str | None = None) -> PeftReport:
    """Write a folder of peft as a run's checkpoint of adapters on `base`.

    base: the model, in any form that commands take; None: the folder that the adapter's configuration names.

    Raises InputError for another kind of adapter, features or modules that tformer has no adapters for, a base that is
    missing or does not fit.
    """
    require_new(out)
    weights, file = folder / WEIGHTS, folder / CONFIG
    config = Config(files.read_object(file, max_bytes=MAX_CONFIG_BYTES), name=str(file))
    peft_type, named = config.values.get("peft_type"), config.take("base_model_name_or_path", default=None, kind=str)
    if peft_type != "LORA":
        raise InputError(f"{file}: peft_type: found {peft_type!r}, expected 'LORA'")
    config.ignore(*INERT, *READ)
    if unread := config.left():
        raise InputError(f"{file}: {unread[0]}: tformer has no such adapters")
    if unsaid := [key for key in ("r", "lora_alpha", "lora_dropout") if config.values.get(key, 0) is None]:
        raise InputError(f"{file}: {unsaid[0]}: found null, expected a number")
    if (start := config.values.get("init_lora_weights")) not in KEEPING:
        hint = "write it by peft's save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        raise InputError(f"{file}: init_lora_weights: {start} changes the base, expected adapters alone", hint=hint)
    if base is None and not (named and Path(named).is_dir()):
        told = f"names the base '{named}', which is no folder here" if named else "names no base"
        raise InputError(f"{folder} {told}", hint="name it: --base MODEL")
    if not weights.is_file():
        raise InputError(f"{folder} has no {WEIGHTS}", hint="pickled weights are never read: save them as safetensors")
    checkpoint = open_checkpoint(base or str(named))
    if isinstance(checkpoint, AdaptedCheckpoint):
        told = f"--base: {checkpoint.path} holds adapters itself, expected a whole model"
        raise InputError(told, hint="merge these first: tformer merge RUN --out NEW")
    section, architecture, class_name, links = _class_of(checkpoint)
    model = build_model(section, device="meta")
    modules, kept = modules_of(links, model), cache(partial(base_weights, checkpoint))
    grouped: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for key, tensor in each_tensor(weights):
        if not all_finite(tensor):
            raise NotFiniteError(f"{weights}: {key} holds NaN or infinity")
        name = key.removeprefix(PREFIX).replace(".base_layer.", ".")
        if match := KEY.fullmatch(name):
            grouped.setdefault(match[1], {})[match[2]] = tensor.float()
        else:
            whole[name] = tensor.float()
    if unknown := sorted(grouped.keys() - modules.keys()):
        raise InputError(
            f"{folder}: {class_name} of {checkpoint.path} has no matrix inside its layers for {unknown[0]} "
            f"({len(unknown)} of {len(grouped)})",
            hint="the base must be of the class that the adapter was trained with; tables of tokens and outputs have "
            "none: modules_to_save trains them in full",
        )
    if not grouped:
        raise InputError(f"{weights} has no tensor of an adapter")
    targets, saved = (config.take(key, default=[], kind=(list, str)) for key in ("target_modules", "modules_to_save"))
    ends = tuple(f".{one}" for one in targets) if isinstance(targets, list) else ("",)
    if targets and (strays := [path for path in grouped if not f".{path}".endswith(ends)]):
        raise InputError(f"{file}: target_modules: expected {strays[0]} among them, which {WEIGHTS} has adapters of")
    unsaved = [name for link in links for name in (*link.theirs, *link.also) if name not in whole]
    if lost := sorted(name for name in unsaved if name.rpartition(".")[0].endswith(tuple(map(str, saved)))):
        raise InputError(f"{weights} has no tensor {lost[0]}, which modules_to_save names")
    section, own = _in_full(
        section, architecture, class_name, whole, kept, told=f"{weights}: {class_name} of {checkpoint.path}"
    )
    model = build_model(section, device="meta")
    matrices, dora = projections(model), config.take("use_dora", default=False, kind=bool)
    is_rslora = config.take("use_rslora", default=False, kind=bool)
    alpha, alpha_of = _by_module(config, "lora_alpha", "alpha_pattern", Config.positive)
    stated, rank_of = _by_module(config, "r", "rank_pattern", Config.size)
    factor = math.sqrt if is_rslora else float
    common, scales = alpha / factor(stated), {path: alpha_of(path) / factor(rank_of(path)) for path in grouped}
    rank = max(map(rank_of, grouped))
    for path, group in grouped.items():
        module, rows = modules[path], len(modules[path].rows)
        if f"{module.matrix}.weight" in own:
            raise InputError(f"{weights} has an adapter of {path} and, in full, the matrix that it is a part of here")
        if odd := min({"lora_A", "lora_B", *(["lora_magnitude_vector"] if dora else [])} ^ group.keys(), default=None):
            raise InputError(f"{weights}: {path} has {'a' if odd in group else 'no'} {odd}, and use_dora is {dora}")
        shapes = {"lora_A": (rank_of(path), matrices[module.matrix][0].in_features), "lora_B": (rows, rank_of(path))}
        for key, tensor in group.items():
            _require_shape(weights, f"{path}.{key}", tensor, shapes.get(key, (rows,)))
    is_plain = set(scales.values()) == {common} and rank == stated
    chosen: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {}
    for path, group in grouped.items():
        a, b, lengths = group["lora_A"], group["lora_B"] * (scales[path] / common), group.get("lora_magnitude_vector")
        b = torch.cat([b, b.new_zeros(len(b), rank - len(a))], dim=1)
        a = torch.cat([a, a.new_zeros(rank - len(a), a.shape[1])])
        for projection, place in modules[path].parts(matrices[modules[path].matrix][1]):
            chosen[projection.name] = a, b[place], None if lengths is None else lengths[place]
    every = [projection.name for _, held in matrices.values() for projection in held]
    lora = Lora.model_construct(
        rank=rank,
        alpha=alpha if is_plain else common * rank,
        rslora=is_rslora and is_plain,
        dora=dora,
        dropout=config.take("lora_dropout", default=0.0, kind=float),
        targets=() if len(chosen) == len(every) else tuple(_shortest(list(chosen), every)),
        train=tuple(own),
        base=LoraBase(path=str(checkpoint.path.absolute()), sha256=checkpoint.sha256),
    )
    recipe_yaml = recipe_to_yaml(checkpoint.recipe.model_copy(update={"lora": lora, "model": section}))
    recipe_from_yaml(recipe_yaml, name=f"{config.name} as a recipe")  # which checks the numbers
    add_adapters(model, section, lora)
    for name, (linear, _) in matrices.items():
        if linear.adapter is None:
            continue
        factors = [chosen[projection.name] for projection in linear.adapter.projections]
        own |= {f"{name}{ADAPTER}a": torch.cat([a for a, _, _ in factors]),
                f"{name}{ADAPTER}b": torch.cat([b for _, b, _ in factors])}  # fmt: skip
        if lora.dora:
            own[f"{name}{ADAPTER}magnitude"] = torch.cat([length for _, _, length in factors if length is not None])
    tied = model.tied_names()
    needed = [name for name in model.state_dict() if name not in model.base_names and name not in tied]
    if set(needed) - own.keys():
        own = kept() | own
    contents = CheckpointContents.derived(
        checkpoint,
        {name: own[name] for name in needed},
        {"step": 0, "imported": {"model_type": architecture.model_type, "class": class_name}},
        recipe_yaml=recipe_yaml,
        tied={alias: owner for alias, owner in tied.items() if owner not in model.base_names},
    )
    write_checkpoint(out, 0, contents)
    return PeftReport(out, class_name, len(grouped), sum(map(len, grouped.values())) + len(whole))


def _in_full(
    base: Model,
    architecture: Architecture,
    class_name: str,
    whole: dict[str, Tensor],
    kept: Callable[[], Mapping[str, Tensor]],
    *,
    told: str,
) -> tuple[Model, dict[str, Tensor]]:
    """(model section, tformer's tensors) of the tensors on disk that were trained in full.

    Where only one use of a tied table was, or the two differ, the section has two tables. kept: the base's weights.
    """
    section, model = base, build_model(base, device="meta")
    links, tied = architecture.written(base, class_name)[0], model.tied_names()
    if lost := sorted(whole.keys() - {name for link in links for name in (*link.theirs, *link.also)}):
        raise InputError(f"{told} has no tensor {lost[0]}")
    if base.tie.output and any(whole.keys() & {*link.theirs, *link.also} for link in links if link.also):
        section = base.model_copy(update={"tie": base.tie.model_copy(update={"output": False})})
        links, model = architecture.written(section, class_name)[0], build_model(section, device="meta")
    linked, state = [link for link in links if whole.keys() & {*link.theirs, *link.also}], model.state_dict()
    for link in linked:
        needed = (*link.theirs, *link.also) if link.also else link.theirs[:1]
        if lacking := [name for name in needed if name not in whole]:
            one = min(whole.keys() & {*link.theirs, *link.also})
            raise InputError(f"{told} has {one} and {lacking[0]} as one tensor, found the first alone")
        if not set(link.theirs) <= whole.keys():  # such as the idle bias of an output
            whole |= {name: _part(link, name, kept()) for name in link.theirs if name not in whole}
        for name, part in zip(link.theirs, link.layout.split(state[link.ours]), strict=True):
            _require_shape(told, name, whole[name], part.shape)
    own = to_ours(linked, whole)
    for head, table in tied.items() - model.tied_names().items():
        pair = [own[name] for name in (head, table) if name in own]
        if not pair or (len(pair) == 2 and torch.equal(*pair)):
            return base, {name: each for name, each in own.items() if name != head}
        if state[head].shape != state[table].shape:
            raise InputError(f"{told} has {head} and {table} as one tensor, found one or two others")
    return section, own


def _require_shape(file: object, name: str, tensor: Tensor, expected: Sequence[int]) -> None:
    if tensor.shape != torch.Size(expected):
        raise InputError(f"{file}: {name} is {list(tensor.shape)}, expected {list(expected)}")


def _by_module(
    config: Config, key: str, patterns: str, take: Callable[..., Number]
) -> tuple[Number, Callable[[str], Number]]:
    """(the value of `key`, function: module path -> value of the first pattern that is like the path or its end).

    A pattern of peft may be any regular expression; none is run, as some take forever.
    """
    stated = take(config, key, default=8)
    own = Config(config.take(patterns, default={}, kind=dict), name=f"{config.name}: {patterns}")
    found = []
    for pattern in own.values:
        pieces = pattern.removeprefix("^").removesuffix("$").replace(r"\.", ".").split(".*")
        if not all(re.fullmatch(r"[\w.-]*", piece) for piece in pieces):
            raise InputError(f"{own.name}: found {pattern!r}, expected names of modules, with .* for any text")
        start = "" if pattern.startswith("^") else r"(.*\.)?"
        found.append((re.compile(start + fnmatch.translate("*".join(pieces))), take(own, pattern, default=8)))
    return stated, lambda path: next((value for one, value in found if one.fullmatch(path)), stated)
