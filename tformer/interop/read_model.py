"""The model in a Hugging Face folder: config.json and weights, as a `model` section and our tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from tformer.build import build_model
from tformer.checkpoint.bounded_json import parse_object, read_bounded
from tformer.errors import InputError, did_you_mean
from tformer.interop.architecture import Architecture
from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.config import Config
from tformer.interop.mapping import Link, shapes_on_disk, to_ours
from tformer.interop.weight_files import WeightFiles, open_weights
from tformer.recipe.model import Model

CONFIG = "config.json"
MAX_CONFIG_BYTES = 16 << 20
MAX_LISTED = 5


@dataclass(frozen=True)
class ForeignModel:
    """What a folder's config.json says, checked against the names and shapes of its weights; no tensor is read yet.

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

    def weights(self) -> dict[str, Tensor]:
        """Our tensors by name (owners only), on the CPU, in the type in which they are stored."""
        stored = self.files.read(self.names.values())
        return to_ours(self.links, {name: stored[found] for name, found in self.names.items()})


def is_model_folder(folder: Path) -> bool:
    """Whether a folder looks like one that `transformers` wrote."""
    return (folder / CONFIG).is_file()


def read_model(folder: str | Path, *, ignore: Collection[str] = ()) -> ForeignModel:
    """Reads config.json and the headers of the weight files.

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
    class_name = _class(folder, config, architecture)
    reader = Config({key: value for key, value in config.items() if key not in ignore}, name=str(folder / CONFIG))
    values = architecture.read(reader, class_name)
    reader.finish()
    try:
        model = Model.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise InputError(f"{folder / CONFIG}: model.{where}: {problem['msg']}, found {problem['input']!r}") from None
    links = architecture.links(model, class_name)
    files = open_weights(folder)
    names, skipped = _match(architecture, links, files)
    _check_shapes(model, links, files, names)
    return ForeignModel(folder, config, architecture, class_name, model, links, files, names, skipped)


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise InputError(f"{folder} has no {CONFIG}", hint="a folder of a Hugging Face model has one")
    return parse_object(read_bounded(path, max_bytes=MAX_CONFIG_BYTES), name=str(path))


def _architecture(folder: Path, config: Mapping[str, Any]) -> Architecture:
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        raise InputError(
            f"{folder / CONFIG}: model_type: found {model_type!r}, tformer knows {', '.join(sorted(ARCHITECTURES))}",
            hint=did_you_mean(str(model_type), list(ARCHITECTURES)),
        )
    return ARCHITECTURES[model_type]


def _class(folder: Path, config: Mapping[str, Any], architecture: Architecture) -> str:
    found = config.get("architectures") or list(architecture.classes)[:1]
    if isinstance(found, list) and len(found) == 1 and found[0] in architecture.classes:
        return str(found[0])
    raise InputError(
        f"{folder / CONFIG}: architectures: found {found!r}, expected one of {', '.join(architecture.classes)}"
    )


def _match(
    architecture: Architecture, links: Sequence[Link], files: WeightFiles
) -> tuple[dict[str, str], tuple[str, ...]]:
    """{name in the table: name in the files}, and the names that are left out; none may be missing or unknown."""
    wanted = [name for entry in links for name in entry.theirs]
    optional = {name for entry in links for name in entry.also}
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
        if name in known:
            names[name] = stored
        elif any(re.fullmatch(pattern, name) for pattern in architecture.skipped):
            skipped.append(stored)
        else:
            unknown.append(stored)
    missing = [name for name in wanted if name not in names]
    problems = [f"{word} {_listing(found)}" for word, found in (("missing", missing), ("unknown", unknown)) if found]
    if problems:
        raise InputError(f"{files.folder}: config.json and weights disagree: {'; '.join(problems)}")
    return names, tuple(skipped)


def _check_shapes(model: Model, links: Sequence[Link], files: WeightFiles, names: Mapping[str, str]) -> None:
    built = build_model(model, device="meta")
    ours = {name: tuple(tensor.shape) for name, tensor in built.state_dict().items()}
    owners = ours.keys() - built.tied_names().keys()
    covered = {entry.ours for entry in links}
    assert covered == owners, f"the table and the model differ: {sorted(covered ^ owners)}"
    for name, shape in shapes_on_disk(links, ours).items():
        found = files.specs[names[name]].shape
        if found != shape:
            raise InputError(
                f"{files.file_of(names[name])}: tensor {names[name]} has the shape {list(found)}, "
                f"expected {list(shape)} by {CONFIG}"
            )


def _listing(names: Sequence[str]) -> str:
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
