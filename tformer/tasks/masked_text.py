"""Running text for models that restore it: masked LM, replaced-token detection, span corruption, denoising.

The objective corrupts windows of bare text or windows inside the tokenizer's template. Validation and evaluation use
the same batches and keys, so that every model is measured on the same corruption.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tformer.build import build_model
from tformer.data.batching.mixture import Samples
from tformer.data.batching.windows import MaskedWindows, Windows
from tformer.data.permutation import spread_evenly
from tformer.data.shards.corpus import Example
from tformer.data.shards.template import single_template
from tformer.evaluation.lm import pseudo_perplexity, unpredicted
from tformer.evaluation.options import EvaluationOptions
from tformer.interop.opening import open_checkpoint
from tformer.loading import Loaded, load_generator
from tformer.model import Transformer
from tformer.nn.init import tie_embeddings
from tformer.objectives import build_objective
from tformer.objectives.base import Objective, ObjectiveContext, require_special_tokens
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError
from tformer.tasks.base import Baselines, ChosenData, HeldOut, Validate, require_finite_loss
from tformer.tasks.baselines import baselines_on_own_data, label_baselines
from tformer.tasks.text import TEXT_OPTIONS, Corpora, CorpusTask, validation_batch
from tformer.tasks.tokenizers import decoder_context, text_context
from tformer.tokenizer import Tokenizer
from tformer.workers.work import Work

MAX_PSEUDO_TOKENS = 10_000
"""Default of --max-tokens: each token is a separate sequence."""


class MaskedText(CorpusTask):
    """Running text that an objective corrupts and a model restores."""

    description = "a masked language model, or one that restores corrupted text"
    options = TEXT_OPTIONS | {"pseudo_perplexity", "max_tokens"}

    def context(self, recipe: Recipe, tokenizer: Tokenizer) -> ObjectiveContext:
        for options in recipe.objectives:
            require_special_tokens(options, tokenizer.special)
        make_context = decoder_context if recipe.model.is_encoder_decoder else text_context
        return make_context(recipe, tokenizer)

    def loaded_objective(self, loaded: Loaded) -> Objective:
        """The objective of a loaded model, with its generator where it has one.

        Raises InputError for a model trained with replaced tokens that comes without its generator.
        """
        recipe, generator = loaded.recipe, None
        context = self.context(recipe, loaded.text_tokenizer)
        if any(options.objective.needs_generator for options in recipe.objectives):
            if recipe.generator is None:
                raise InputError(
                    f"{loaded.path} is a discriminator without its generator, which replaces the tokens to be detected",
                    hint="its body can be fine-tuned: tformer train --init-from ... --objective classification "
                    "--data FILE",
                )
            # ELECTRA's generator shares the embedding of the loaded model (averaged where the run averages weights).
            device = next(loaded.model.parameters()).device
            generator = build_model(recipe.generator, vocab_size=loaded.text_tokenizer.vocab_size, device=device)
            load_generator(generator, open_checkpoint(loaded.path))
            tie_embeddings(generator, loaded.model)
            generator.compute_dtype = loaded.model.compute_dtype
            generator.eval()
        return build_objective(recipe.objectives, replace(context, generator=generator))

    def windows(
        self, recipe: Recipe, corpora: Corpora, tokenizer: Tokenizer, context: ObjectiveContext
    ) -> Sequence[Samples]:
        room = build_objective(recipe.objectives, context).room
        return self.cut(recipe, corpora, tokenizer, room=room)

    def cut(
        self, recipe: Recipe, corpora: Corpora, tokenizer: Tokenizer, *, room: int | None, moves: bool = True
    ) -> Sequence[Windows]:
        """Windows of each corpus. Raises InputError when the template leaves no room for text.

        room: tokens of bare text, which an objective of an encoder-decoder puts into its template once it is corrupted;
        None: windows inside the template's special tokens.
        moves: in each epoch by another offset, for training; False: every token in one window.
        """
        template, data = single_template(tokenizer), recipe.data
        prefix, suffix = (template.prefix, template.suffix) if room is None else ((), ())
        return [
            MaskedWindows(
                corpus,
                recipe.seq_len if room is None else room,
                packing=data.packing,
                seed=recipe.seed,
                prefix=prefix,
                suffix=suffix,
                document_mask=data.document_mask,
                moves=moves,
            )
            for corpus in corpora
        ]

    def _held_out(self, recipe: Recipe, corpora: Corpora, tokenizer: Tokenizer, objective: Objective) -> HeldOut:
        samples = Joined(self.cut(recipe, corpora, tokenizer, room=objective.room, moves=False))
        return HeldOut("", samples, objective, recipe, validation_batch(recipe.seq_len))

    def validation(self, recipe: Recipe, corpora: Corpora, tokenizer: Tokenizer) -> Validate:
        def validate(model: Transformer, objective: Objective, work: Work, share: float) -> dict[str, Any]:
            return self._held_out(recipe, corpora, tokenizer, objective).validate(model, objective, work, share)

        return validate

    def baselines(
        self, recipe: Recipe, train: Corpora, held_out: Corpora, tokenizer: Tokenizer, objective: Objective
    ) -> Baselines:
        train_windows, windows = (
            Joined(self.cut(recipe, corpora, tokenizer, room=objective.room, moves=False))
            for corpora in (train, held_out)
        )
        return label_baselines(objective, train_windows, windows, num_ids=tokenizer.vocab_size)

    def first_try(self, recipe: Recipe, opening: str) -> tuple[str, ...]:
        if any(head.kind == "masked_lm" for head in recipe.model.heads):
            first, _, rest = opening.partition(" ")
            masked = f"{first} [MASK] {rest.partition(' ')[2]}".strip()
            return ("generate", "--prompt", masked if opening else "The [MASK] of the")
        return ("viz-attention", "--text", opening or "The cat sat on the mat.", "-o", "attention.html")

    def held_out(self, loaded: Loaded, data: ChosenData, work: Work) -> HeldOut:
        objective = self.loaded_objective(loaded)
        corpora, name = self.read(loaded, data, work)
        return replace(self._held_out(loaded.recipe, corpora, loaded.text_tokenizer, objective), name=name)

    def evaluate(self, loaded: Loaded, data: ChosenData, options: EvaluationOptions, work: Work) -> dict[str, Any]:
        """Loss and metrics of the objective (of each where there are several), and the pseudo-perplexity if wanted."""
        if options.pseudo_perplexity and all(head.kind != "masked_lm" for head in loaded.recipe.model.heads):
            raise InputError(f"--pseudo-perplexity: {loaded.path} has no head that predicts masked tokens")
        held_out = self.held_out(loaded, data, work)
        held_out = replace(held_out, batch_size=options.batch_size or held_out.batch_size)
        with work.part(f"evaluating {held_out.name}", unit="examples") as part:
            metrics = held_out.measure(loaded.model, part)
        work.raise_if_stopped("before the whole text was read")
        require_finite_loss(metrics["loss"])
        report = {"data": held_out.name, **metrics}
        if options.pseudo_perplexity:
            report |= self._pseudo_perplexity(loaded, held_out.samples, options, work)
        return report | {"baseline": baselines_on_own_data(loaded, data)}

    def _pseudo_perplexity(
        self, loaded: Loaded, samples: Samples, options: EvaluationOptions, work: Work
    ) -> dict[str, Any]:
        max_tokens, special_ids = options.max_tokens or MAX_PSEUDO_TOKENS, loaded.text_tokenizer.special
        sequences: Sequence[np.ndarray]
        if isinstance(samples, Joined):
            sequences, places = samples.around_each_token(max_tokens, left_out=unpredicted(special_ids))
        else:
            chosen = spread_evenly(len(samples), min(len(samples), max_tokens))
            examples: Sequence[Any] = samples.examples(0, chosen)  # of a pair of texts the first
            types = [each.token_type_ids for each in examples]
            sequences = [
                each.ids if of_each is None else each.ids[of_each == 0]
                for each, of_each in zip(examples, types, strict=True)
            ]
            places = None
        with work.part("masking every token alone", unit="tokens") as part:
            metrics = pseudo_perplexity(
                loaded.model, sequences, special_ids, places=places, max_tokens=max_tokens, work=part
            )
        work.raise_if_stopped("before the whole text was read")
        return {
            "pseudo_perplexity": metrics["pseudo_perplexity"],
            "pseudo_loss": metrics["loss"],
            "pseudo_tokens": metrics["tokens"],
        }

    def lines(self, report: dict[str, Any]) -> Iterator[str]:
        """One metric per line."""
        for name, value in report.items():
            if name not in ("run", "step", "data"):
                yield f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}"


class Joined:
    """Several sets of windows, one after the other."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts, self.seq_len = parts, parts[0].seq_len
        self._starts = np.cumsum([0, *(len(part) for part in parts)])
        lengths = [np.full(len(part), part.seq_len) if part.lengths is None else part.lengths for part in parts]
        self.lengths: np.ndarray | None = np.concatenate(lengths)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def around_each_token(self, max_tokens: int, *, left_out: Sequence[int]) -> tuple[Around, np.ndarray]:
        """(windows around each token, the token's place there), longest first; at most `max_tokens`, evenly spread.

        left_out: ids that are not counted.
        """
        total = sum(len(part.corpus) for part in self.parts)
        step = max(1, total // (2 * max_tokens))  # twice as many as wanted: some are left out
        found: list[np.ndarray] = []
        for number, part in enumerate(self.parts):
            tokens = np.arange(0, len(part.corpus), step)
            counted = tokens[~np.isin(part.corpus.gather(tokens, 1)[:, 0], left_out)]
            most = max(1, max_tokens * len(part.corpus) // total)
            chosen = counted[spread_evenly(len(counted), min(most, len(counted)))]
            found.append(np.stack([np.full(len(chosen), number), *part.around(chosen)]))
        windows_4N = np.concatenate(found, axis=1)
        windows_4N = windows_4N[:, np.argsort(-windows_4N[2], kind="stable")]
        return Around(self.parts, windows_4N[:3].T), windows_4N[3]

    def examples(self, epoch: int, indices: np.ndarray | Sequence[int]) -> list[Example]:
        """The samples at these indices, counted through all parts."""
        part_of = np.searchsorted(self._starts, np.asarray(indices), side="right") - 1
        pairs = zip(indices, part_of, strict=True)
        return [self.parts[part].examples(epoch, [int(index - self._starts[part])])[0] for index, part in pairs]


class Around(Sequence[np.ndarray]):
    """Windows of several sets, formed when they are read: there may be one for each token of a text."""

    def __init__(self, parts: Sequence[MaskedWindows], spans_N3: np.ndarray) -> None:
        """spans: number of the set, first token, number of tokens."""
        self._parts, self._spans_N3 = parts, spans_N3

    def __len__(self) -> int:
        return len(self._spans_N3)

    def __getitem__(self, index: Any) -> Any:
        number, start, size = self._spans_N3[index].tolist()
        return self._parts[number].window(start, size)
