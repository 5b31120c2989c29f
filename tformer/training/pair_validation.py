"""How a model of pairs in training is validated: its loss on what was held out, and what it writes by itself.

Everything is set up before training begins, so that a wrong setting is told then and not at the first validation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tformer.data.shards.pair_tokens import PairTokens
from tformer.decoding.loaded import make_translator
from tformer.decoding.settings import (
    BeamSettings,
    fitting_beam_settings,
)
from tformer.decoding.translate import Translator
from tformer.errors import InputError
from tformer.evaluation.translation import evaluate_pairs, evaluate_translation
from tformer.loading import decoder_tokens_of
from tformer.model import Transformer
from tformer.objectives.base import Objective
from tformer.recipe.recipe import Recipe
from tformer.tokenizer import Tokenizer
from tformer.training.material import ShouldStop

VALIDATION_TOKENS = 4096  # in a batch
SAMPLES = 2  # pairs that people see after each validation


@dataclass(frozen=True)
class Decoding:
    """The searches of a validation and of a sample; `validation` is None where validation does not decode."""

    validation: BeamSettings | None
    sample: BeamSettings


def plan_decoding(recipe: Recipe, target: Tokenizer) -> Decoding:
    """The recipe's beam search as validation and samples need it.

    Raises InputError for a `generation` section that contradicts itself, also where only a later command would read
    it, and for a beam larger than the vocabulary.
    """
    generation, eos, size = recipe.generation, decoder_tokens_of(recipe, target).eos, recipe.training.valid_beam_size
    BeamSettings.from_recipe(generation, eos_id=eos)
    for key, beam_size in (("generation.beam_size", generation.beam_size), ("training.valid_beam_size", size)):
        if beam_size > target.vocab_size:
            raise InputError(f"{key}: found {beam_size}, expected at most the target's {target.vocab_size} token ids")
    return Decoding(
        fitting_beam_settings(generation, eos_id=eos, beam_size=size) if size else None,
        fitting_beam_settings(generation, eos_id=eos, beam_size=1),
    )


@dataclass(frozen=True)
class PairValidation:
    """What validates, and writes samples. `tokenizers`: of source and target."""

    recipe: Recipe
    held_out: PairTokens
    tokenizers: tuple[Tokenizer, Tokenizer]
    decoding: Decoding

    def validate(self, model: Transformer, objective: Objective, should_stop: ShouldStop) -> dict[str, Any] | None:
        """The loss under teacher forcing, and what the model's own output is worth. None: interrupted."""
        values: dict[str, Any] = evaluate_pairs(
            model,
            objective,
            self.held_out,
            batch_tokens=VALIDATION_TOKENS,
            seed=self.recipe.seed,
            should_stop=should_stop,
        )
        if self.decoding.validation is not None and not should_stop():
            translator = self._translator(model, self.decoding.validation)
            values |= evaluate_translation(translator, self._decoded(), should_stop=should_stop)
        return None if should_stop() else values

    def sample(self, model: Transformer, should_stop: ShouldStop) -> str | None:
        """The first held-out sources and what the model makes of them. None: interrupted."""
        sources = [self.held_out.texts(index)[0] for index in range(min(SAMPLES, len(self.held_out)))]
        translator = self._translator(model, self.decoding.sample)
        outputs = translator.translate(sources, should_stop=should_stop, too_long="cut")
        if should_stop():
            return None
        return "\n".join(f"{source} -> {best[0].text}" for source, best in zip(sources, outputs, strict=True))

    def _decoded(self) -> PairTokens:
        """What is decoded: the first pairs, but of several tasks a share of each."""
        pairs = self.held_out
        count = min(len(pairs), self.recipe.training.valid_sentences or len(pairs))
        numbers = np.arange(count)
        return pairs.subset(numbers * len(pairs) // count if pairs.named_tasks else numbers)

    def _translator(self, model: Transformer, settings: BeamSettings) -> Translator:
        return make_translator(self.recipe, [model], self.tokenizers, settings=settings)
