"""The model to inspect: of a run, a checkpoint, a Hugging Face folder or a recipe, built on the meta device.

Values that a recipe takes from the data (size of the vocabulary, number of labels) are given, read from the checkpoint,
or assumed; assumptions are listed in the notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tformer.build import build_model
from tformer.checkpoint.read import Checkpoint
from tformer.checkpoint.resolve import newest_checkpoint
from tformer.interop.opening import open_checkpoint
from tformer.loading import embedding_rows, load, load_tokenizers
from tformer.model import Transformer
from tformer.nn.init import tie_embeddings
from tformer.recipe import load_recipe
from tformer.recipe.load import recipe_from_yaml
from tformer.recipe.recipe import Recipe
from tformer.support.device import DTYPES, has_bf16_instructions
from tformer.support.errors import InputError

if TYPE_CHECKING:
    from tformer.data.batching.batch import Batch
    from tformer.tasks.base import GivenExample

PRINTABLE_CHARACTERS = 96  # of ASCII, and the newline: the assumed vocabulary of characters
ASSUMED_LABELS = 2


@dataclass(frozen=True)
class InspectRequest:
    """The model to inspect: `path`, a recipe (by arch, preset or file), or the newest run; changes to it; sizes.

    Sizes that are None follow from the recipe or the checkpoint.
    """

    path: str | None = None
    which: str = "best"
    arch: str | None = None
    preset: str | None = None
    config: Path | None = None
    sets: Sequence[str] = ()
    vocab_size: int | None = None
    batch_size: int | None = None
    seq_len: int | None = None
    precision: str | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class InspectedModel:
    """A model on the meta device, and the sizes at which it is inspected.

    source_length: positions of the encoder, or of the only stack; target_length: of the decoder beside an encoder (else
    the same). batch_size: examples of one forward pass in training. generator: ELECTRA's second model.
    """

    name: str
    recipe: Recipe
    model: Transformer
    generator: Transformer | None
    source_length: int
    target_length: int
    batch_size: int
    dtype: torch.dtype
    device: str
    notes: tuple[str, ...]
    checkpoint: Checkpoint | None = None

    @property
    def has_both(self) -> bool:
        """Whether there is an encoder and a decoder."""
        return self.model.is_encoder_decoder

    @property
    def tokens(self) -> int:
        """Positions of one example, source and target together."""
        return self.source_length + (self.target_length if self.has_both else 0)


def read_subject(question: InspectRequest) -> InspectedModel:
    """Find and build the model. InputError for one that does not exist, and for impossible sizes."""
    checkpoint = None
    if all(value is None for value in (question.arch, question.preset, question.config)):
        path = newest_checkpoint(which=question.which) if question.path is None else question.path
        checkpoint = open_checkpoint(path, question.which)
    recipe, notes = _recipe_of(question, checkpoint)
    recipe, assumed = _sized(recipe, question, checkpoint)
    labels = len(recipe.data.labels) or None
    if labels is None and any(getattr(head, "num_labels", 1) is None for head in recipe.model.heads):
        labels = ASSUMED_LABELS
        assumed.append(f"labels: {labels} are assumed (data.labels)")
    model = build_model(recipe.model, num_labels=labels, device="meta")
    generator = None
    if recipe.generator is not None:
        generator = build_model(recipe.generator, device="meta")
        tie_embeddings(generator, model)
    source, target = _lengths(recipe, model, question.seq_len)
    name = f"{recipe.arch}/{recipe.preset}" if recipe.preset is not None else recipe.arch
    training = recipe.training
    batch_size = training.batch_size or max(1, (training.batch_tokens or 1) // max(source, target))
    precision = question.precision or training.precision
    if precision == "auto":
        precision = "bf16" if question.device.startswith("cuda") or has_bf16_instructions() else "fp32"
    return InspectedModel(
        name=str(question.config or name) if checkpoint is None else str(checkpoint.path),
        recipe=recipe,
        model=model,
        generator=generator,
        source_length=source,
        target_length=target,
        batch_size=question.batch_size or batch_size,
        dtype=DTYPES[precision],
        device=question.device,
        notes=(*notes, *assumed),
        checkpoint=checkpoint,
    )


def given_batch(subject: InspectedModel, given: GivenExample) -> tuple[Batch, dict[str, Any], tuple[str, ...]]:
    """A batch of one example, as training gives it to the model, the example in readable form, and notes.

    A translator's text without a target gets the model's own translation, for which the weights are loaded.

    Raises InputError for a model without a checkpoint's tokenizer, and for an example of another kind.
    """
    # Imported here: without an example, nothing of the data is needed.
    from tformer.decoding.prompts import task_prefix
    from tformer.inside.reading import Inputs, read
    from tformer.objectives import build_objective
    from tformer.tasks.example import example_document
    from tformer.tasks.table import task_of

    checkpoint, recipe = subject.checkpoint, subject.recipe
    assert checkpoint is not None, "an example is given to a model with a tokenizer"
    tokenizers, notes = load_tokenizers(checkpoint), tuple[str, ...]()
    has_targets = any("target" in keys for keys in task_of(recipe).row_keys)
    if has_targets and recipe.model.is_encoder_decoder and given.text and given.target is None:
        reading = read(load(checkpoint), Inputs(task_prefix(recipe, None)[0] + given.text))
        notes = reading.notes
        if written := reading.texts["translation"]:
            given = replace(given, target=written)
        else:
            notes = ("the model writes nothing for this text: the text stands for its target",)
    sample, context = task_of(recipe).sample_of(recipe, tokenizers, given)
    objective, samples = build_objective(recipe.objectives, context), [sample]
    batch = objective.collate(samples, rng=np.random.default_rng(recipe.seed))
    return batch, example_document(objective, samples, batch, tokenizers, labels=recipe.data.labels), notes


def _recipe_of(question: InspectRequest, checkpoint: Checkpoint | None) -> tuple[Recipe, list[str]]:
    if checkpoint is None:
        resolved = load_recipe(
            arch=question.arch,
            preset=question.preset,
            config=question.config,
            sets=question.sets,
        )
        return resolved.recipe, resolved.choices
    name = str(checkpoint.path / "recipe.yaml")
    if question.sets:
        resolved = load_recipe(base_yaml=checkpoint.recipe_text, base_name=name, sets=question.sets)
        return resolved.recipe, resolved.choices
    return recipe_from_yaml(checkpoint.recipe_text, name=name), []


def _sized(recipe: Recipe, question: InspectRequest, checkpoint: Checkpoint | None) -> tuple[Recipe, list[str]]:
    """The recipe with the sizes of its vocabularies, and the assumptions made."""
    if recipe.model.patches is not None and recipe.model.decoder is None:
        return recipe, []
    sides = ["vocab_size", *(["target_vocab_size"] if recipe.separate_vocabularies else [])]
    assumed: list[str] = []
    stored = {} if checkpoint is None else embedding_rows(checkpoint)
    for key in sides:
        if question.vocab_size is not None:
            size = question.vocab_size
        elif getattr(recipe.model, key) is not None:
            continue
        elif found := stored.get(key):
            size = found
        else:
            size, why = recipe.tokenizer.train.vocab_size, "tokenizer.train.vocab_size"
            if recipe.tokenizer.train.model == "char":
                size, why = PRINTABLE_CHARACTERS, "printable ASCII"
            assumed.append(f"vocabulary: {size:,} tokens are assumed, {why} (--vocab-size)")
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={key: size})})
    if recipe.generator is not None:
        generator = recipe.generator.model_copy(update={"vocab_size": recipe.model.vocab_size})
        recipe = recipe.model_copy(update={"generator": generator})
    return recipe, assumed[:1]


def _lengths(recipe: Recipe, model: Transformer, asked: int | None) -> tuple[int, int]:
    source, target = recipe.seq_len, recipe.target_seq_len
    if model.encoder is None or model.decoder is None:
        target = source
    if asked is None:
        return source, target
    if recipe.model.patches is not None:
        raise InputError(f"--seq-len {asked}: an image of this model always has {source} positions")
    for stack in (model.encoder, model.decoder):
        if stack is not None and stack.positions_of(0).max_positions is not None and asked > model.max_seq_len:
            raise InputError(
                f"--seq-len {asked}: the model has {model.max_seq_len} learned positions",
                hint=f"to compute the cost of a longer model: --set model.max_seq_len={asked}",
            )
    return asked, min(asked, model.longest_target)
