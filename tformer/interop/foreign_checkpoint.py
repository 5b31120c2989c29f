"""A Hugging Face folder opened in place as a checkpoint of step 0: without optimizer, tensors under tformer's names.

It can be used wherever a checkpoint can. Headers and texts are read and checked when it is opened, tensors when they
are first needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from tformer.build import build_model
from tformer.checkpoint.manifest import Manifest
from tformer.checkpoint.read import Checkpoint, all_finite, joint_sha256
from tformer.checkpoint.tensor_files import TensorSpec
from tformer.interop.architectures.parts import label_names
from tformer.interop.config import Config
from tformer.interop.generation_config import generation_document, generation_notes, read_generation
from tformer.interop.preprocessor import preprocessor_notes, read_preprocessor
from tformer.interop.read_model import ForeignModel, read_model, recipe_of
from tformer.interop.sentence_transformers import prompt_note, read_head, read_length
from tformer.interop.tokenizer_config import read_chat_template, read_tokenizer_config, special_ids
from tformer.interop.tokenizer_files import (
    TARGET_FOLDER,
    TOKENIZER_JSON,
    FoundTokenizer,
    read_target_tokenizer,
    read_tokenizer,
)
from tformer.interop.weight_files import CONFIG, FileRead
from tformer.recipe import recipe_to_yaml
from tformer.support.errors import InputError
from tformer.support.files import open_regular
from tformer.tokenizer import Tokenizer

NEEDED_IDS = ("decoder_start", "forced_bos", "eos")  # ids that decoding needs


@dataclass
class ForeignCheckpoint(Checkpoint):
    """A checkpoint that reads a folder in the layout of Hugging Face."""

    streams: ClassVar[bool] = True
    foreign: ForeignModel = field(kw_only=True)

    def has(self, role: str) -> bool:
        return role == "weights"

    def specs(self, role: str) -> dict[str, TensorSpec]:
        return self.foreign.specs() if self.has(role) else {}

    @cached_property
    def sha256(self) -> str:
        hashes = []
        for path in sorted(set(self.foreign.files.files.values())):
            with open_regular(path) as stream:
                hashes.append(hashlib.file_digest(stream, "sha256").hexdigest())
        return joint_sha256(hashes)

    def weights(self) -> dict[str, Tensor]:
        """Tensors by name, in the number formats of the files."""
        return self._with_aliases(dict(self.each("weights")))

    def each(self, role: str, *, file_read: FileRead = lambda done, total: None) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of the weights, in the number formats of the files; `file_read` is called after each file."""
        assert role == "weights"
        bad: list[str] = []

        def checked(found: tuple[str, Tensor]) -> tuple[str, Tensor]:
            bad.extend(() if all_finite(found[1]) else found[:1])
            return found

        yield from map(checked, self.foreign.each(file_read=file_read))  # a loop would hold the tensor meanwhile
        self._refuse_not_finite("weights", bad, len(self.foreign.specs()))


def open_folder(
    folder: str | Path,
    *,
    tokenizer: Path | None = None,
    target_tokenizer: Path | None = None,
    ignore: Collection[str] = (),
) -> ForeignCheckpoint:
    """Open a folder that `transformers` wrote, or that was downloaded from the hub.

    Args:
        folder: with config.json and safetensors.
        tokenizer: a tokenizer.json in the place of the folder's own.
        target_tokenizer: that of the target side, for a translator whose sides have one each.
        ignore: keys of config.json to pass over.

    Raises:
        InputError: an architecture or feature that tformer lacks, damaged or missing files, tensors that are missing,
            too many or of other shapes, a tokenizer with more ids than the embedding has rows.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder" if folder.exists() else f"{folder} does not exist")
    foreign, vectors = read_model(folder, ignore=ignore), read_head(folder)
    if vectors is not None:
        heads = {"heads": (*foreign.model.heads, vectors)}
        foreign = replace(foreign, model=foreign.model.model_copy(update=heads))
    model, config = foreign.model, foreign.config
    notes: list[str] = []
    named = config.get("architectures") or [foreign.class_name]
    if named != [foreign.class_name]:
        notes.append(f"config.json names {named[0]}; its weights are those of {foreign.class_name}, which was read")
    source = target = None
    tokenizers: list[Tokenizer] = []
    roles: Mapping[str, int] = {}
    if model.patches is None:
        source = read_tokenizer(folder, config, path=tokenizer)
        tokenizers.append(_fitting(source, model.vocab_size, tokenizer or folder))
        roles = source.roles
        notes += source.notes
    elif tokenizer is not None:
        raise InputError(f"--tokenizer: {folder} is a model of images: it reads no text")
    translates = model.encoder is not None and model.decoder is not None and source is not None
    if target_tokenizer is not None and not translates:
        raise InputError(f"--target-tokenizer: {folder} has no encoder and decoder of texts: one tokenizer serves")
    if target_tokenizer is None and translates and (folder / TARGET_FOLDER / TOKENIZER_JSON).is_file():
        target_tokenizer = folder / TARGET_FOLDER / TOKENIZER_JSON  # written by `tformer export`
    if target_tokenizer is not None:
        target = read_tokenizer(folder, config, path=target_tokenizer)
    elif translates and tokenizer is None:
        target = read_target_tokenizer(folder, config)
    if target is not None:
        rows = model.target_vocab_size or model.vocab_size
        tokenizers.append(_fitting(target, rows, target_tokenizer or folder))
        roles = target.roles  # special ids are those of the target side
        notes += target.notes
    notes += foreign.architecture.differs(model)
    generation = read_generation(folder, config)
    notes += generation_notes(folder, config)
    ids, dropped = _known_ids(folder, special_ids(config, generation_document(folder), roles), tokenizers)
    labels: tuple[str, ...] = ()  # of a classifier of texts or tokens, in the order of their ids
    for head in model.heads:
        if (count := getattr(head, "num_labels", None)) is not None:
            names = label_names(Config(config, name=str(folder / CONFIG)))
            labels = names or tuple(f"LABEL_{number}" for number in range(count))
    pixels = read_preprocessor(folder) if model.patches is not None else {}
    if model.patches is not None and not pixels:
        notes.append("no preprocessor_config.json: images are scaled to mean and deviation 0.5")
    notes += preprocessor_notes(folder) if model.patches is not None else ()
    recipe = recipe_of(
        foreign,
        special_ids=ids,
        generation=generation,
        pixels=pixels,
        labels=labels,
        separate=target is not None,
    )
    if source is not None and model.encoder is None:
        section = recipe.tokenizer.model_copy(update={"chat_template": read_chat_template(folder)})
        recipe = recipe.model_copy(update={"tokenizer": section})
    if vectors is not None and source is not None:
        own = read_tokenizer_config(folder).options.get("model_max_length")
        notes += prompt_note(folder)
        length = read_length(folder, source.json, most=model.max_seq_len, tokenizer_length=own)
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"seq_len": length})})
    hashes = [one.sha256 for one in tokenizers]
    manifest = Manifest(
        step=0,
        files=(),
        tied=build_model(model, device="meta").tied_names(),
        tokenizer_sha256=hashes[0] if hashes else None,
        target_tokenizer_sha256=hashes[1] if len(hashes) > 1 else None,
    )
    return ForeignCheckpoint(
        folder,
        manifest,
        recipe_to_yaml(recipe),
        None if source is None else source.json,
        {"step": 0, "imported": {"model_type": foreign.architecture.model_type, "class": foreign.class_name}},
        target_tokenizer_json=None if target is None else target.json,
        notes=[*notes, *dropped],
        foreign=foreign,
    )


def _fitting(found: FoundTokenizer, rows: int | None, where: Path) -> Tokenizer:
    """The tokenizer; InputError when an id has no row in the embedding."""
    tokenizer = Tokenizer.from_json(found.json, name=str(where))
    if rows is not None and tokenizer.vocab_size > rows:
        raise InputError(
            f"{where}: the tokenizer has {tokenizer.vocab_size:,} ids, but the model's embedding only {rows:,} rows",
            hint="the tokenizer of another model lies there: name the right one with tformer import --tokenizer FILE",
        )
    return tokenizer


def _known_ids(
    folder: Path, ids: Mapping[str, int], tokenizers: Sequence[Tokenizer]
) -> tuple[dict[str, int], list[str]]:
    """The special ids that the tokenizers have, and notes on the others. InputError when decoding needs another."""
    known, notes = {}, []
    size = tokenizers[-1].vocab_size if tokenizers else 0
    for name, token in ids.items():
        if not tokenizers or token < size:
            known[name] = token
        elif name in NEEDED_IDS:
            raise InputError(
                f"{folder / CONFIG}: {name}_token_id: found {token}, expected an id of the tokenizer, which are below "
                f"{size:,}"
            )
        else:
            notes.append(f"{name}_token_id {token} is no id of the tokenizer, which are below {size:,}: left out")
    return known, notes
