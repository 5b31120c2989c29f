"""Pairs of texts: one or several text-to-text tasks, one tokenizer for both sides or one for each."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice
from typing import Any

import numpy as np

from tformer.data.batching.mixture import MixedPairs, Samples
from tformer.data.look import look_at
from tformer.data.permutation import spread_evenly
from tformer.data.shards.pair_tokens import PairRowSource, PairTokens, join_pairs, source_hashes, tokenize_pairs
from tformer.data.sources.pairs import PairSource, open_pairs, shared_columns
from tformer.data.sources.tables import PairRow
from tformer.decoding.compilation import prepare_decoding
from tformer.decoding.loaded import make_translator, translator_of
from tformer.decoding.options import batch_on
from tformer.decoding.prompts import task_prefix
from tformer.decoding.score import score_targets
from tformer.decoding.settings import BeamSettings
from tformer.decoding.translate import Translator
from tformer.evaluation.classifier import GivenRows
from tformer.evaluation.options import EvaluationOptions
from tformer.evaluation.translation import (
    COMPARED_CHARACTERS,
    evaluate_pairs,
    output_metrics,
    translate_pairs,
    write_wrong_outputs,
)
from tformer.loading import Loaded, decoder_tokens_of
from tformer.metrics.text import ter, tokenized_note
from tformer.model import Transformer
from tformer.objectives import build_objective
from tformer.objectives.base import Objective, ObjectiveContext
from tformer.recipe.data_defaults import (
    FORMAL_USES,
    FORMAL_WORDS,
    MAX_SURVEYED,
    MOST_TAGS,
    WORD_TOKENS,
    PairSurvey,
    Survey,
    tags_of,
    words_of,
)
from tformer.recipe.recipe import Recipe
from tformer.recipe.sections import Data, SourceSpec
from tformer.support.device import resolve_device
from tformer.support.errors import InputError
from tformer.tasks.base import (
    Baselines,
    ChosenData,
    GivenExample,
    HeldOut,
    Task,
    Tokenizers,
    TrainingData,
    TrainingSets,
    TrainingStart,
    hold_out,
    note_rows,
    require_finite_loss,
    share_of,
)
from tformer.tasks.baselines import baselines_on_own_data, copy_baselines, label_baselines
from tformer.tasks.continuations import PAIR_OPTIONS, score_lines, score_report
from tformer.tasks.sequence_teacher import translate_sources, weights_digest
from tformer.tasks.tokenizers import LEFT_OUT, Texts, decoder_context, obtain_tokenizers
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.train import first_that_gives_back
from tformer.workers.work import ShouldStop, Work

DECODED_TOKEN = 3.0  # positions of a forward pass that cost as much as a decoded token, which is computed alone
LONG_DECODING = 1e11  # operations: a second or two
DECODABLE = 0.75  # log-perplexity below which outputs are worth decoding, as a share of that of guessing by frequency
BATCH_TOKENS = 4096  # of the longer side, for the loss
BATCH_SENTENCES = 32  # decoded at a time
SAMPLE_PAIRS = 2  # shown after each validation
MOST_TER_WORDS = 1000  # of a reference: TER takes the third power of their number
SURVEYED_TEXTS = 2000  # which a tokenizer that is chosen for them must give back
SHOWN_PAIRS = 20  # of which the shortest source is the example of a first command
SIGNED = ("bleu", "chrf", "ter")


class Pairs(Task):
    """Pairs of a source and a target text."""

    description = "a model of pairs"
    options = PAIR_OPTIONS | {
        *("prefix", "mistakes", "no_decode", "beam_size", "length_penalty", "length_penalty_type"),
        *("max_new_tokens", "at_limit", "bleu_tokenize", "lowercase"),
    }
    tokenizer_texts = "pairs"
    row_keys = (("source", "target"),)

    def prepared(self, recipe: Recipe) -> Recipe:
        return _with_shared_prefix(recipe)

    def open(self, specs: Sequence[SourceSpec], data: Data | ChosenData, recipe: Recipe) -> Sequence[Any]:
        """Errors: files of different length, a missing column."""
        return open_pairs(specs, columns=data.columns, reading=data.reading)

    def settled(self, sets: TrainingSets) -> TrainingSets:
        """The recipe with the columns that all sources have."""
        if (shared := shared_columns(sets.all_sources)) is None:
            return sets
        data = sets.recipe.data
        columns = data.columns.model_copy(update={"source": shared[0], "target": shared[1]})
        return sets.with_recipe(sets.recipe.model_copy(update={"data": data.model_copy(update={"columns": columns})}))

    def obtain_tokenizers(self, sets: TrainingSets) -> Tokenizers:
        texts = (_tokenizer_texts(sets.sources, sets.recipe.data, side) for side in ("source", "target"))
        return obtain_tokenizers(sets.start, sets.work, *texts)

    def fitted(self, sets: TrainingSets) -> Recipe:
        """Errors: invalid decoding settings."""
        PairValidation.plan(sets.recipe, _both(sets.tokenizers))
        return sets.recipe

    def tokenize(self, sets: TrainingSets, sources: Sequence[Any], *, validation: bool) -> Sequence[Any]:
        """Errors: no pair left."""
        how: dict[str, Any] = {"keep_all": validation, "tasks": tuple(source.task for source in sets.sources)}
        return [_tokenize(sets.recipe, source, _both(sets.tokenizers), sets.work, **how) for source in sources]

    def chosen(self, sets: TrainingSets) -> Sequence[Any]:
        """The pairs to train on, with a sequence teacher those that it has translated."""
        parts, teacher = super().chosen(sets), sets.recipe.teacher
        if sets.start.teacher is not None and teacher is not None and teacher.kind == "sequence":
            return _translated(sets.start, parts, _both(sets.tokenizers), sets.work)
        return parts

    def assembled(self, sets: TrainingSets) -> TrainingData:
        recipe, tokenizers, parts, work = sets.recipe, _both(sets.tokenizers), sets.train, sets.work
        data, held_out, own_target = recipe.data, join_pairs(sets.valid), sets.tokenizers[1]
        validation = PairValidation.plan(recipe, tokenizers)
        samples: Samples = join_pairs(parts)
        weights = [spec.weight for spec in data.train]
        if not data.train:
            work.note("no --data: learning to read dates as people write them (builtin:dates)")
        if any(weight is not None for weight in weights):  # sets in the shares of their weights
            shares = [1.0 if weight is None else weight for weight in weights]
            samples = MixedPairs(parts, shares, seed=recipe.seed)
            found = (f"{part.name} {share / sum(shares):.1%}" for part, share in zip(parts, shares, strict=True))
            work.note(f"mixture: {', '.join(found)}")
        work.note(f"data: {sum(map(len, parts)):,} training pairs, {len(held_out):,} validation pairs")
        if data.train and sets.start.resumed is None:
            rows = chain.from_iterable(part.rows() for part in sets.whole)
            validated = chain.from_iterable(part.rows() for part in sets.valid) if data.valid else None
            lengths = np.concatenate([part.side_lengths for part in sets.whole])
            for line in look_at(rows, lengths, unit="tokens", valid=validated).lines:
                work.note(line)
        if own_target is not None:
            work.note(f"target tokenizer: {own_target.kind}, {own_target.vocab_size:,} ids")
        fingerprints = " ".join(part.fingerprint for part in (*parts, held_out))
        example = min((held_out.texts(number)[0] for number in range(min(SHOWN_PAIRS, len(held_out)))), key=len)

        @cache
        def guesses(objective: Objective) -> Baselines:
            return label_baselines(objective, samples, held_out, num_ids=tokenizers[1].vocab_size)

        return TrainingData(
            samples=samples,
            validate=lambda *arguments: validation.validate(held_out, guesses, *arguments),
            context=decoder_context(recipe, tokenizers[0], own_target),
            fingerprint=hashlib.sha256(fingerprints.encode()).hexdigest(),
            sample=lambda *arguments: validation.sample(held_out, *arguments),
            tokens_per_sample=max(recipe.seq_len, recipe.target_seq_len),
            valid_tokens=held_out.lengths.sum() + DECODED_TOKEN * validation.decoded_tokens(held_out),
            baselines=lambda objective: guesses(objective) | validation.baselines(held_out),
            first_try=("generate", "--prompt", example),
        )

    def survey(self, recipe: Recipe) -> Survey | None:
        data = recipe.data
        sources = open_pairs(data.train, columns=data.columns, reading=data.reading)
        rows = islice((row for source in sources for row in source.rows()), MAX_SURVEYED)
        may_have_tags = any("," in str(side) for source in sources for side, _ in source.columns)
        sides, known, tags, tagged, texts = [], set[str](), set[str](), 0, list[str]()
        for row in rows:
            if len(texts) < SURVEYED_TEXTS:
                texts += (row.source, row.target)
            sides.append([(words_of(text), len(text)) for text in (row.source, row.target)])
            if len(known) <= FORMAL_WORDS:
                known.update(row.source.split(), row.target.split())
            if may_have_tags:
                found = tags_of(row.source)
                tags.update(found)
                tagged += bool(found)
                may_have_tags = len(tags) <= MOST_TAGS
        words, characters = np.mean(sides, axis=0).max(axis=0)
        distinct = min(len(known), FORMAL_WORDS + 1)
        if not may_have_tags or tagged < len(sides) / 2 or len(tags) > len(sides) / FORMAL_USES:
            tags.clear()
        word_tokens = first_that_gives_back(texts, WORD_TOKENS) if distinct <= FORMAL_WORDS else WORD_TOKENS[0]
        return PairSurvey(len(sides), float(words), float(characters), distinct, tuple(sorted(tags)), word_tokens)

    def sample_of(self, recipe: Recipe, tokenizers: Tokenizers, given: GivenExample) -> tuple[Any, ObjectiveContext]:
        """A sample of a source, with the prefix of the run's task, and its target (default: the source)."""
        given.require("text", may="target", reader=self.description)
        tokenizer, own_target = tokenizers
        assert tokenizer is not None and given.text is not None
        prefix, _ = task_prefix(recipe, None)
        target = given.text if given.target is None else given.target
        rows = GivenRows([PairRow(prefix + given.text, target, "--text")], name="--text")
        sides = (tokenizer, own_target or tokenizer)
        for option, side, text in zip(("--text", "--target"), sides, (given.text, target), strict=True):
            if not side.encode(text):
                raise InputError(f"{option}: found no tokens in the text")
        tokens = _tokenize(recipe, rows, sides, Work(), keep_all=True, whole=True)
        [sample] = tokens.examples(0, [0])
        return sample, decoder_context(recipe, tokenizer, own_target)

    def read(
        self, loaded: Loaded, data: ChosenData, work: Work, *, whole: bool = False
    ) -> tuple[PairTokens, str, list[PairSource]]:
        """The pairs of an evaluation, their name and sources. whole: no target is cut; InputError for one too long."""
        recipe, given = loaded.recipe, data.given
        # the run's columns only where a table has them
        columns, preferred = (data.columns, None) if given is None else (given, data.columns)
        sources = open_pairs(data.specs, columns=columns, preferred=preferred, reading=data.reading)
        tokenizers = (loaded.text_tokenizer, loaded.target_tokenizer)
        # What is held out depends on which pairs training kept.
        parts = [
            _tokenize(recipe, source, tokenizers, work, keep_all=not data.held_out, whole=whole) for source in sources
        ]
        work.note_all(*sources, *parts)
        note_rows(sources, work)
        name = ", ".join(source.name for source in sources)
        if data.held_out:
            _, parts = hold_out(parts, recipe.data)
            name = f"{recipe.data.valid_fraction:.0%} of {name}, held out"
        return join_pairs(parts), name, sources

    def held_out(self, loaded: Loaded, data: ChosenData, work: Work) -> HeldOut:
        pairs, name, _ = self.read(loaded, data, work)
        return HeldOut(name, pairs, _objective(loaded), loaded.recipe)

    def evaluate(self, loaded: Loaded, data: ChosenData, options: EvaluationOptions, work: Work) -> dict[str, Any]:
        """Loss and metrics on the targets and of the model's own outputs; with `score` the log-probability of each."""
        decodes = not (options.score or options.no_decode)
        translator = _translator(loaded, options) if decodes else None  # before the data is read: it checks settings
        pairs, name, sources = self.read(loaded, data, work, whole=options.score)
        if not len(pairs):
            raise InputError(f"{name}: no pairs to evaluate")
        if options.score:
            with work.part("scoring", unit="pairs") as part:
                examples = pairs.examples(0, np.arange(len(pairs)))
                scores = score_targets(
                    loaded.model,
                    [example.source.tolist() for example in examples],
                    [example.target.tolist() for example in examples],
                    start_ids=loaded.decoder_tokens.prefix,
                    vocab_size=loaded.target_tokenizer.vocab_size,
                    batch_tokens=BATCH_TOKENS,
                    work=part,
                )
            work.raise_if_stopped("before every pair was read")
            return {"data": name, **score_report(scores)}
        with work.part("reading the pairs", unit="pairs") as part:
            metrics: dict[str, Any] = evaluate_pairs(
                loaded.model,
                _objective(loaded),
                pairs,
                batch_tokens=BATCH_TOKENS,
                batch_size=options.batch_size,
                seed=loaded.recipe.seed,
                work=part,
            )
        work.raise_if_stopped("before every pair was read")
        require_finite_loss(metrics["loss"])
        baselines = baselines_on_own_data(loaded, data)
        baselines.pop("copy", None)  # that of training is of as many pairs as a validation decodes
        if translator is not None:
            metrics |= _decoded(loaded, translator, pairs, sources, options, work)
            measure: dict[str, Any] = {"tokenize": options.bleu_tokenize or "13a", "lowercase": options.lowercase}
            baselines |= copy_baselines(*bare_texts(pairs, data.specs), **measure)
        return {"data": name, **metrics, "baseline": baselines}

    def lines(self, report: dict[str, Any]) -> Iterator[str]:
        """One metric per line, BLEU and chrF with their signatures; with `score` one log-probability per line."""
        if "scores" in report:
            yield from score_lines(report)
            return
        for name in ("loss", "perplexity", "accuracy", "sequence_accuracy", "bleu", "chrf", "ter"):
            if name in report:
                yield f"{name} {report[name]:.4f}" + (f" {report[f'{name}_signature']}" if name in SIGNED else "")
            for task in (key for key in report if key.startswith(f"{name}.")):  # of several tasks
                yield f"{task} {report[task]:.4f}"
        yield f"examples {report['examples']}"


@dataclass(frozen=True)
class PairValidation:
    """Validation during training: loss on the targets, and metrics of decoded outputs.

    Attributes:
        tokenizers: of source and target.
        beam: of validation; None: validation does not decode. sample_beam: of sample output.
    """

    recipe: Recipe
    tokenizers: tuple[Tokenizer, Tokenizer]
    beam: BeamSettings | None
    sample_beam: BeamSettings

    @classmethod
    def plan(cls, recipe: Recipe, tokenizers: tuple[Tokenizer, Tokenizer]) -> PairValidation:
        """Made before training begins, so that a wrong setting is an error then and not at the first validation.

        Raises InputError for a `generation` section that contradicts itself, also where only a later command would
        read it, and for a beam larger than the vocabulary.
        """
        generation, target, size = recipe.generation, tokenizers[1], recipe.training.valid_beam_size
        eos = decoder_tokens_of(recipe, target).eos
        BeamSettings.from_recipe(generation, eos_id=eos)
        for key, beam_size in (("generation.beam_size", generation.beam_size), ("training.valid_beam_size", size)):
            if beam_size > target.vocab_size:
                raise InputError(
                    f"{key}: found {beam_size}, expected at most the target's {target.vocab_size} token ids"
                )
        beam = BeamSettings.from_recipe(generation, eos_id=eos, beam_size=size) if size else None
        return cls(recipe, tokenizers, beam, BeamSettings.from_recipe(generation, eos_id=eos, beam_size=1))

    def validate(
        self,
        held_out: PairTokens,
        guesses: Callable[[Objective], Baselines],
        model: Transformer,
        objective: Objective,
        work: Work,
        share: float,
    ) -> dict[str, Any]:
        """The loss on the targets, and BLEU, chrF and exact matches of the model's own outputs.

        They are left out as long as decoding takes long and the model hardly knows more than the frequency of tokens:
        its outputs would go on to their longest length. guesses: the baselines of a training.
        """
        if share < 1.0:
            held_out = held_out.subset(spread_evenly(len(held_out), share_of(len(held_out), share)))
        with work.part("validating", total=len(held_out), unit="pairs") as part:
            metrics: dict[str, Any] = evaluate_pairs(
                model, objective, held_out, batch_tokens=BATCH_TOKENS, seed=self.recipe.seed, work=part
            )
        if self.beam is not None and (work.is_trial or not work.should_stop()):
            decoded = self.decoded(held_out)
            longest = len(decoded) * max(1, self.beam.beam_size) * self.recipe.generation.max_new_tokens
            if 2.0 * model.num_parameters() * longest > LONG_DECODING and not work.is_trial:
                guess = guesses(objective)["unigram"]["perplexity"]
                if math.log(metrics["perplexity"]) > DECODABLE * math.log(guess):
                    work.note(
                        f"not decoded: perplexity {metrics['perplexity']:.4g}, guessing by frequency has {guess:.4g}"
                    )
                    return metrics
            translator = make_translator(self.recipe, [model], self.tokenizers, settings=self.beam)
            with work.part("decoding the validation data", total=len(decoded), unit="pairs") as part:
                outputs = translate_pairs(translator, decoded, work=part)
            metrics |= output_metrics(outputs, decoded)
        return metrics

    def decoded(self, held_out: PairTokens) -> PairTokens:
        """The pairs that a validation decodes: the first ones, or with several tasks a share of each."""
        count = min(len(held_out), self.recipe.training.valid_sentences or len(held_out))
        return held_out.subset(spread_evenly(len(held_out), count) if held_out.named_tasks else np.arange(count))

    def decoded_tokens(self, held_out: PairTokens) -> float:
        """Tokens that a validation decodes, if outputs are as long as their references, times the size of the beam."""
        return 0.0 if self.beam is None else float(self.decoded(held_out).target_lengths.sum() * self.beam.beam_size)

    def baselines(self, held_out: PairTokens) -> Baselines:
        """The scores of the sources as outputs; {} where a validation does not decode."""
        data = self.recipe.data
        return copy_baselines(*bare_texts(self.decoded(held_out), data.valid or data.train)) if self.beam else {}

    def sample(self, held_out: PairTokens, model: Transformer, should_stop: ShouldStop) -> str | None:
        """The first held-out sources and the model's outputs. None: interrupted."""
        sources = [held_out.texts(index)[0] for index in range(min(SAMPLE_PAIRS, len(held_out)))]
        translator = make_translator(self.recipe, [model], self.tokenizers, settings=self.sample_beam)
        outputs = translator.translate(sources, should_stop=should_stop, too_long="cut")
        if should_stop():
            return None
        return "\n".join(f"{source} -> {best[0].text}" for source, best in zip(sources, outputs, strict=True))


def bare_texts(pairs: PairTokens, specs: Sequence[SourceSpec]) -> tuple[list[str], list[str]]:
    """(sources without the prefix of their task, targets), cut to the compared length."""
    prefixes = sorted({spec.prefix for spec in specs if spec.prefix}, key=len, reverse=True)
    texts = [[text[:COMPARED_CHARACTERS] for text in pairs.texts(index)] for index in range(len(pairs))]
    bare = (next((source[len(each) :] for each in prefixes if source.startswith(each)), source) for source, _ in texts)
    return list(bare), [target for _, target in texts]


def _both(tokenizers: Tokenizers) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizers of source and target."""
    source, target = tokenizers
    assert source is not None
    return source, target or source


def _with_shared_prefix(recipe: Recipe) -> Recipe:
    """The recipe with the prefix of its training data also on validation data, if all training data has the same."""
    data, prefixes = recipe.data, {spec.prefix for spec in recipe.data.train}
    if len(prefixes) != 1:
        return recipe
    [prefix] = prefixes
    valid = tuple(spec.model_copy(update={"prefix": spec.prefix or prefix}) for spec in data.valid)
    return recipe.model_copy(update={"data": data.model_copy(update={"valid": valid})})


def _tokenizer_texts(sources: Sequence[PairSource], data: Data, side: str) -> Texts:
    """Training texts of the tokenizer for one side, without the held-out part."""
    left_out = 0.0 if data.valid else min(1.0, LEFT_OUT * data.valid_fraction)

    def read() -> Iterator[str]:
        for source in sources:
            if not left_out:
                yield from (getattr(row, side) for row in source.rows())
                continue
            hashes = source_hashes(row.source.encode() for row in source.rows())
            kept = hashes > np.sort(hashes)[max(0, math.ceil(left_out * len(hashes)) - 1)]
            if not kept.any():  # too few to hold any out, which is an error of the split
                kept[:] = True
            yield from (getattr(row, side) for row, is_kept in zip(source.rows(), kept, strict=True) if is_kept)

    return Texts.of(sources, read, part=f"{side} without {left_out:g}" if left_out else side)


def _tokenize(
    recipe: Recipe,
    source: PairRowSource,
    tokenizers: tuple[Tokenizer, Tokenizer],
    work: Work,
    *,
    keep_all: bool = False,
    whole: bool = False,
    tasks: Sequence[str] = (),
) -> PairTokens:
    """The pairs of one source, filtered and cut by the recipe.

    Args:
        tokenizers: of source and target.
        keep_all: for evaluation: no pair is left out; too long ones are cut.
        whole: nothing is cut: both sides may be as long as the model reads, and a longer pair that stays is an error.
    """
    target, model = decoder_tokens_of(recipe, tokenizers[1]), recipe.model
    drops_overlong = recipe.data.overlong == "drop" and not keep_all  # then nothing is ever cut
    refuses = whole and not drops_overlong
    seq_len, target_seq_len = (
        (model.max_seq_len, model.longest_target) if refuses else (recipe.seq_len, recipe.target_seq_len)
    )
    with work.part(f"tokenizing {source.name}", unit="B") as part:
        return tokenize_pairs(
            [source],
            *tokenizers,
            seq_len=seq_len,
            target_seq_len=target_seq_len - (target.forced_bos is not None),  # which the decoder reads too
            eos=target.eos,
            overlong="refuse" if refuses else recipe.data.overlong,
            max_length_ratio=recipe.data.max_length_ratio,
            keep_all=keep_all,
            tasks=tasks,
            work=part,
        )


def _translated(
    start: TrainingStart, parts: Sequence[PairTokens], tokenizers: tuple[Tokenizer, Tokenizer], work: Work
) -> list[PairTokens]:
    """The training pairs with the targets of a sequence teacher in place of the references."""
    teacher = start.teacher
    assert teacher is not None
    if start.dry_run:
        work.note("dry run: the teacher translates nothing, the references are used instead")
        return list(parts)
    device, weights = resolve_device(start.recipe.training.device), weights_digest(teacher.model)
    translated = [translate_sources(part, teacher, weights=weights, device=device, work=work) for part in parts]
    work.note_all(*parts, *translated)
    return [_tokenize(start.recipe, pairs, tokenizers, work, tasks=parts[0].tasks) for pairs in translated]


def _objective(loaded: Loaded) -> Objective:
    context = decoder_context(loaded.recipe, loaded.text_tokenizer, loaded.own_target_tokenizer)
    return build_objective(loaded.recipe.objectives, context)


def _translator(loaded: Loaded, options: EvaluationOptions) -> Translator:
    generation, max_new_tokens = loaded.recipe.generation, options.max_new_tokens
    if max_new_tokens is None and options.seq_len is not None:  # of targets of another length than in training
        max_new_tokens = max(options.seq_len, generation.max_new_tokens)
    settings = BeamSettings.from_recipe(
        generation,
        beam_size=options.beam_size,
        max_new_tokens=max_new_tokens,
        length_penalty=options.length_penalty,
        length_penalty_type=options.length_penalty_type,
        at_limit=options.at_limit,
        eos_id=loaded.decoder_tokens.eos,
    )
    return translator_of(loaded, settings=settings)


def _decoded(
    loaded: Loaded,
    translator: Translator,
    pairs: PairTokens,
    sources: Sequence[PairSource],
    options: EvaluationOptions,
    work: Work,
) -> dict[str, Any]:
    """Metrics of the model's own outputs. `sources`: of the pairs."""
    if options.quantize == "none":  # else it was prepared when it was quantized
        dtype = loaded.model.compute_dtype
        prepare = partial(prepare_decoding, loaded.model, dtype, compile="auto", quantize="none", rows=None)
        work.worker.in_turn(prepare)  # the first process compiles kernels for all
    began = time.perf_counter()
    with work.part("decoding", unit="pairs") as part:
        outputs = translate_pairs(
            translator, pairs, batch_size=options.batch_size or batch_on(loaded.model, BATCH_SENTENCES), work=part
        )
    work.raise_if_stopped("before every pair was read")
    seconds = time.perf_counter() - began
    if translator.cut:
        work.note(
            f"{translator.cut:,} sources are longer than the model reads and were cut; --seq-len N reads further where "
            "the positions allow it"
        )
    tokenize = options.bleu_tokenize or "13a"
    note = tokenized_note(outputs.texts, outputs.references)
    if note is not None and tokenize != "none":
        work.note(note)
    if long := sum(len(reference) > COMPARED_CHARACTERS for reference in outputs.references):
        work.note(f"of {long:,} references only the first {COMPARED_CHARACTERS:,} characters are compared")
    metrics = output_metrics(outputs, pairs, tokenize=tokenize, lowercase=options.lowercase)
    compared = [reference[:COMPARED_CHARACTERS] for reference in outputs.references]
    if max(len(text.split()) for text in compared) <= MOST_TER_WORDS:
        edits = ter(outputs.texts, compared, lowercase=options.lowercase)
        metrics |= {"ter": edits.score, "ter_signature": edits.signature}
    if options.mistakes is not None and work.worker.leads:
        written = write_wrong_outputs(options.mistakes, outputs, sources, lowercase=options.lowercase)
        work.note(f"{options.mistakes}: {written:,} pairs")
    return {**metrics, "sentences_per_second": len(pairs) / seconds}
