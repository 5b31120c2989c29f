"""Reading of a Hugging Face folder's config.json and weights as a model section and its tensors, fully checked."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from tformer.build import build_model
from tformer.checkpoint.tensor_files import TensorSpec
from tformer.interop.architecture import Architecture, kind_in_classes
from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.config import Config
from tformer.interop.mapping import Fixed, Link, check_fixed, to_ours
from tformer.interop.unknown_types import unknown_type
from tformer.interop.weight_files import CONFIG, FileRead, WeightFiles, open_weights, refuse_dangling
from tformer.model import Transformer
from tformer.nn.classification_heads import EmbeddingHeadOptions
from tformer.nn.heads import HeadOptions
from tformer.objectives import objectives_for_heads
from tformer.recipe.model import Model
from tformer.recipe.recipe import Recipe
from tformer.support.bounds import mistake_of
from tformer.support.errors import InputError
from tformer.support.files import read_object
from tformer.support.formatting import listed, shortened


def planned(model: Model, files: WeightFiles, *, name: str) -> Transformer:
    """The model on the meta device, without memory for its tensors.

    Args:
        model: as config.json, which messages call `name`, describes it.
        files: the weights; a plan takes memory for each layer, so there may be no more layers than tensors in them.

    Raises:
        InputError: too many layers, sizes whose product is beyond counting, sizes that contradict each other.
    """
    for side in ("encoder", "decoder"):
        stack = getattr(model, side)
        if stack is not None and (stack.layer_groups or stack.num_layers) > len(files.specs):
            raise InputError(
                f"{name}: found {stack.num_layers:,} layers of the {side}, but the weights are {len(files.specs):,} "
                "tensors only"
            )
    try:
        return build_model(model, device="meta")
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise InputError(f"{name}: its sizes make tensors larger than any memory ({error})") from None


# Folders without config.json: (file that tells the kind, what the folder is, hint).
OTHER_FOLDERS = (
    ("adapter_config.json", "an adapter (PEFT), not a model", "tformer import DIR --base MODEL --out NEW"),
    ("model_index.json", "a pipeline of several networks (diffusers)", "a text encoder in it may be read by itself"),
    ("recipe.yaml", "a run or a checkpoint of tformer already", "every command takes it as it is"),
    ("params.json", "Llama in Meta's layout", "take the same model as transformers saves it"),
)
QUANTIZED = "quantization_config"
MAX_CONFIG_BYTES = 16 << 20
MAX_LISTED = 5
MAX_NAME = 200  # characters of a tensor's name in messages


@dataclass(frozen=True)
class ForeignModel:
    """A folder's model as its config.json says, checked against names and shapes of its weights; no tensor is read.

    model: our section, every size filled in.
    skipped: tensors of the files that are no part of this class (buffers, other heads).
    """

    folder: Path
    config: dict[str, Any]
    architecture: Architecture
    class_name: str
    model: Model
    links: Sequence[Link]
    files: WeightFiles
    names: Mapping[str, str]  # name in the table -> name in the files
    skipped: tuple[str, ...] = field(default=())

    @property
    def trained_heads(self) -> Sequence[HeadOptions]:
        """The heads of the class that config.json names; the files may hold further heads."""
        named = (self.config.get("architectures") or [self.class_name])[0]
        kinds = self.architecture.classes[named] or self.architecture.classes[self.class_name]
        vectors = [head for head in self.model.heads if isinstance(head, EmbeddingHeadOptions)]  # of its modules.json
        return vectors or [head for head in self.model.heads if kind_in_classes(head) in kinds]

    def weights(self, *, file_read: FileRead = lambda done, total: None) -> dict[str, Tensor]:
        """tformer's tensors by name (owners only), on the CPU, in the number formats of the files; see `each`."""
        return dict(self.each(file_read=file_read))

    def each(self, *, file_read: FileRead = lambda done, total: None) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of tformer's tensors, each when its parts have been read, which then are dropped.

        What the caller does not keep takes no memory. Parts wait for the other parts of their tensor.

        file_read: called after each weight file; what it raises ends the reading.
        """
        fixed = {entry.name: entry for entry in self.architecture.fixed(self.model, self.class_name)}
        parts = {entry.ours: {*entry.theirs, *(set(entry.also) & self.names.keys())} for entry in self.links}
        missing = {ours: set(names) for ours, names in parts.items()}
        uses = Counter(name for names in parts.values() for name in names)
        named, read = {found: name for name, found in self.names.items()}, dict[str, Tensor]()
        for found, tensor in self.files.each(named, file_read=file_read):
            name = named[found]
            if name in fixed:
                check_fixed([fixed[name]], {name: tensor})
            if name in uses:
                read[name] = tensor
            del tensor
            for entry in [entry for entry in self.links if name in missing[entry.ours]]:
                missing[entry.ours].remove(name)
                if missing[entry.ours]:
                    continue
                made = to_ours([entry], read)
                for part in parts[entry.ours]:
                    uses[part] -= 1
                    if not uses[part]:
                        del read[part]
                yield made.popitem()

    def specs(self) -> dict[str, TensorSpec]:
        """Names, number formats and shapes of tformer's tensors (owners only), without reading any."""
        shapes = build_model(self.model, device="meta").state_dict()
        found = {}
        for entry in self.links:
            dtype = self.files.specs[self.names[entry.theirs[0]]].dtype
            shape = tuple(shapes[entry.ours].shape)
            found[entry.ours] = TensorSpec(entry.ours, dtype, shape, 0, math.prod(shape) * dtype.itemsize)
        return found


def read_model(folder: str | Path, *, ignore: Collection[str] = ()) -> ForeignModel:
    """Read config.json and the headers of the weight files.

    Args:
        folder: one with a config.json.
        ignore: keys of config.json to pass over.

    Raises:
        InputError: no config.json, an architecture or a feature that tformer lacks, weights that are pickled, damaged,
            missing, too many or of other shapes.
    """
    folder = Path(folder)
    config = read_config(folder)
    architecture = _architecture(folder, config)
    if config.get(QUANTIZED) and QUANTIZED not in ignore:
        found = config[QUANTIZED].get("quant_method", "no quant_method") if isinstance(config[QUANTIZED], dict) else "?"
        raise InputError(
            f"{folder / CONFIG}: {QUANTIZED}: found {found!r}: quantized weights are not read",
            hint=f"take the model that they were made from; if the weights are not quantized: --ignore {QUANTIZED}",
        )
    files = open_weights(folder)
    named, found = None, config.get("architectures")
    if found:
        single = found[0] if isinstance(found, list) and len(found) == 1 else None
        if not isinstance(single, str) or single not in architecture.classes:
            known = ", ".join(architecture.classes)
            raise InputError(f"{folder / CONFIG}: architectures: found {found!r}, tformer reads one of {known} here")
        named = single

    def read_as(class_name: str) -> ForeignModel:
        reader = Config({key: value for key, value in config.items() if key not in ignore}, name=str(folder / CONFIG))
        fit = partial(_fit, class_name, reader, architecture, files)
        model, links, names, skipped = fit(pooler=False)
        # The pooler's weight and bias may be in the files, with or without the prefix.
        pooler = architecture.pooler or ""
        stems = (pooler, pooler.removeprefix(architecture.prefix)) if pooler else ()
        if any({f"{stem}.weight", f"{stem}.bias"} <= set(skipped) for stem in stems):
            model, links, names, skipped = fit(pooler=True)
        return ForeignModel(folder, config, architecture, class_name, model, links, files, names, skipped)

    return _best_fit(folder, read_as, architecture, named)


def _fit(
    class_name: str, reader: Config, architecture: Architecture, files: WeightFiles, *, pooler: bool
) -> tuple[Model, Sequence[Link], dict[str, str], tuple[str, ...]]:
    """The model of a class with or without the body's pooler, and how the files' tensors fit it: see ForeignModel."""
    section = architecture.section(reader, class_name, pooler=pooler)
    reader.finish()
    if architecture.of_files is not None:
        section = architecture.of_files(section, files)
    try:
        model = Model.model_validate(section)
    except ValidationError as error:
        raise InputError(f"{reader.name}: model.{_first(error)}") from None
    built = planned(model, files, name=reader.name)
    links = architecture.table(model, class_name)
    names, skipped = _match(architecture, links, architecture.fixed(model, class_name), files)
    _check_tensors(built, links, files, names)
    return model, links, names, skipped


def _first(error: ValidationError) -> str:
    """The first problem as text: place and mistake."""
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc']))}: {mistake_of(problem)}"


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    refuse_dangling(path)
    if not path.is_file():
        kind = next((each for each in OTHER_FOLDERS if (folder / each[0]).is_file()), None)
        _, what, hint = kind or ("", "", "a folder of a Hugging Face model has one")
        raise InputError(f"{folder} has no {CONFIG}{what and f': it is {what}'}", hint=hint)
    return read_object(path, max_bytes=MAX_CONFIG_BYTES)


def _architecture(folder: Path, config: Mapping[str, Any]) -> Architecture:
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in ARCHITECTURES:
        return ARCHITECTURES[model_type]
    raise unknown_type(config, name=str(folder / CONFIG))


def _best_fit(
    folder: Path, read_as: Callable[[str], ForeignModel], architecture: Architecture, named: str | None
) -> ForeignModel:
    """The first class with the fewest tensors left out, or kept as a pooler that it does not use.

    Tried are the named class and those that have its heads and more; all if config.json names none.
    InputError for none, and for several with other heads where config.json names none.
    """
    classes = list(architecture.classes)
    if named is not None:
        heads = set(architecture.classes[named])
        richer = [name for name, others in architecture.classes.items() if heads < set(others)]
        classes = [named, *richer] if heads else [*richer, named]  # a body with a tied head in its files is that model
    fits: list[ForeignModel] = []
    errors: dict[str, InputError] = {}
    for name in classes:
        try:
            fits.append(read_as(name))
        except InputError as error:
            errors[name] = error
            continue
        if named is not None and not fits[-1].skipped:
            break
    if not fits:
        first = next(iter(errors.values()))
        if named is not None or all(error.message == first.message for error in errors.values()):
            raise errors.get(named or "", first)
        raise InputError(
            f"{folder / CONFIG} does not say which class this is (architectures), and its weights fit none of "
            f"{', '.join(classes)}; of the first: {first.message}"
        )
    left = [len(fit.skipped) + 2 * any(head.kind == "pooler" for head in fit.model.heads) for fit in fits]
    best = [fit for fit, count in zip(fits, left, strict=True) if count == min(left)]
    rivals = {architecture.classes[fit.class_name]: fit.class_name for fit in reversed(best)}
    rivals.pop((), None)
    if len(rivals) > 1 and named is None:
        fitting = " and ".join(fit.class_name for fit in best)
        raise InputError(
            f"{folder / CONFIG} does not say which class this is (architectures), and its weights fit {fitting}",
            hint=f'add to it: "architectures": ["{best[0].class_name}"]',
        )
    return best[0]


def _match(
    architecture: Architecture, links: Sequence[Link], fixed: Sequence[Fixed], files: WeightFiles
) -> tuple[dict[str, str], tuple[str, ...]]:
    """{name in the table: name in the files} and the skipped names. InputError for missing or unknown tensors."""
    wanted = [name for entry in links for name in entry.theirs]
    optional = {name for entry in links for name in entry.also} | {entry.name for entry in fixed}
    names: dict[str, str] = {}
    skipped, unknown = [], []
    bare = bool(architecture.prefix) and not any(name.startswith(architecture.prefix) for name in files.specs)
    known = set(wanted) | optional
    for stored in files.specs:
        name = stored
        for pattern, replacement in architecture.renamed:
            name = re.sub(pattern, replacement, name)
        if bare and name not in known:
            name = architecture.prefix + name
        if name in names:
            raise InputError(f"{files.folder}: {names[name]} and {stored} are two tensors for one place")
        if name in known:
            names[name] = stored
        elif any(re.fullmatch(pattern, name) for pattern in architecture.skipped):
            skipped.append(stored)
        else:
            unknown.append(shortened(stored if stored.isprintable() else repr(stored), MAX_NAME))
    for entry in links:  # the copy of a tied tensor that a file holds without the original takes its place
        copy = next((name for name in entry.also if name in names), None)
        if copy is not None and entry.theirs[0] not in names:
            names[entry.theirs[0]] = names.pop(copy)
    missing = [name for name in wanted if name not in names]
    found = {"missing": missing, "unknown": unknown}
    problems = [f"{word} {listed(tensors, MAX_LISTED)}" for word, tensors in found.items() if tensors]
    if problems:
        raise InputError(f"{files.folder}: config.json and weights disagree: {'; '.join(problems)}")
    return names, tuple(skipped)


def _check_tensors(built: Transformer, links: Sequence[Link], files: WeightFiles, names: Mapping[str, str]) -> None:
    ours, tied = built.state_dict(), built.tied_names()
    owners = ours.keys() - tied.keys()
    assert (covered := {entry.ours for entry in links}) == owners, f"table and model differ: {covered ^ owners}"
    shapes = {
        name: tuple(part.shape)
        for entry in links
        for name, part in zip(entry.theirs, entry.layout.split(ours[entry.ours]), strict=True)
    }
    for name, shape in shapes.items():
        spec = files.specs[names[name]]
        if spec.shape != shape:
            raise InputError(
                f"{files.files[spec.name]}: tensor {spec.name} has the shape {list(spec.shape)}, "
                f"expected {list(shape)} by {CONFIG}"
            )
        if not spec.dtype.is_floating_point or spec.dtype.itemsize < 2:
            raise InputError(
                f"{files.files[spec.name]}: tensor {spec.name} holds {str(spec.dtype).removeprefix('torch.')}, "
                "expected floating-point numbers of 16 bits or more",
                hint="quantized weights are not read: take the model that they were made from",
            )


PIXELS = {"image_mean": 0.5, "image_std": 0.5}  # defaults of an image processor

FINE_TUNING: dict[str, dict[str, Any]] = {
    "optimizer": {"kind": "adamw", "lr": 5e-5, "betas": (0.9, 0.999), "weight_decay": 0.01, "clip_grad_norm": 1.0},
    "schedule": {"kind": "linear", "warmup_ratio": 0.06, "min_ratio": 0.0},
    "training": {
        "max_steps": 100_000,
        "max_epochs": 3.0,
        "batch_size": 16,
        "eval_every": None,
        "save_every": None,
    },
}


def recipe_of(
    foreign: ForeignModel,
    *,
    special_ids: Mapping[str, int],
    generation: Mapping[str, Any],
    pixels: Mapping[str, Sequence[float]],
    labels: Sequence[str],
    separate: bool,
) -> Recipe:
    """The recipe of a model that was read.

    Args:
        special_ids: values of `tokenizer.special_ids`.
        generation: values of the `generation` section.
        pixels: `image_mean` and `image_std`, of a model of images; {}: one half each.
        labels: of its classifier, in the order of their ids; () where it has none.
        separate: source and target have a tokenizer each.

    Raises InputError for values of the folder that no recipe can hold.
    """
    model = foreign.model
    data: dict[str, Any] = {"labels": tuple(labels)}
    if model.patches is not None:
        half = {name: (value,) * model.patches.channels for name, value in PIXELS.items()}
        data |= {name: tuple(pixels.get(name, value)) for name, value in half.items()}
    parts = {"encoder": model.encoder, "decoder": model.decoder, "patches": model.patches}
    objectives = objectives_for_heads(foreign.trained_heads, [name for name, part in parts.items() if part is not None])
    try:
        return Recipe.model_validate(
            {
                "arch": foreign.architecture.family,
                "model_type": foreign.architecture.model_type,
                "preset": None,
                "tokenizer": {"special_ids": dict(special_ids), "separate": separate},
                "data": data,
                "model": _section(model, labels, separate=separate),
                "objectives": [{"kind": kind} for kind in objectives],
                "generation": dict(generation),
                **FINE_TUNING,
            }
        )
    except ValidationError as error:
        raise InputError(
            f"{foreign.folder}: {_first(error)}",
            hint=f"it comes from {CONFIG}, generation_config.json or the tokenizer's files",
        ) from None


def _section(model: Model, labels: Sequence[str], *, separate: bool) -> dict[str, Any]:
    """The model section of the recipe; its number of labels is left to `data.labels`, so that other data can change it.

    Where two tokenizers cut texts for one table (Marian's), both sides have that table's rows.
    """
    values = model.model_dump()
    if separate and model.target_vocab_size is None:
        values["target_vocab_size"] = model.vocab_size
    for head in values["heads"]:
        if labels and head.get("num_labels") is not None:
            head["num_labels"] = None
    return values
