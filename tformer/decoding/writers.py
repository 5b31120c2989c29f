"""Work of `tformer generate` on loaded models: prepare them, and write sampled or searched texts.

The command shows the results line by line; the Python API returns them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from tformer.decoding.compilation import prepare_decoding
from tformer.decoding.completion import OnToken
from tformer.decoding.generate import generate
from tformer.decoding.inference import decoding_dtype
from tformer.decoding.lines import LineWindow
from tformer.decoding.loaded import choose_languages, require_same_vocabularies, translator_of
from tformer.decoding.options import GenerateOptions
from tformer.decoding.prompts import OnCut, encode_prompts, suppressed_tokens, task_prefix
from tformer.decoding.scheduler import Scheduler, no_scheduler
from tformer.decoding.sentences import LINES, SentenceReader
from tformer.decoding.settings import BeamSettings, Generated, GenerationSettings
from tformer.decoding.translate import Continuer, Translation
from tformer.loading import Loaded, load
from tformer.nn.heads import HEADS
from tformer.nn.products import row_class
from tformer.recipe.recipe import Recipe
from tformer.support.decoding import Use
from tformer.support.device import resolve_device
from tformer.support.errors import Caution, InputError
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.chat import ChatTemplate, Message
from tformer.workers.work import ShouldStop, never

MASK_CANDIDATES = 5


# --- models -----------------------------------------------------------------------------------------------------------


def load_models(options: GenerateOptions) -> list[Loaded]:
    """The models, each once, prepared for decoding. Raises InputError for models that cannot form an ensemble."""
    device, names = resolve_device(options.device), names_of_models(options.arguments, options.ensemble)
    return prepare_models([load_model(name, options, device) for name in names], options)


def load_model(name: str | None, options: GenerateOptions, device: torch.device) -> Loaded:
    """A model that writes text or fills masks, without its weights until `prepare_models`; None: of the newest run."""
    heads = {kind for kind, head in HEADS.items() if head.over_vocabulary}

    def usable(recipe: Recipe) -> bool:
        return recipe.model.encoder is None or not options.chat

    return load(name, device=device, which=options.checkpoint, kinds=heads, usable=usable, lazily=True)


def prepare_models(models: Sequence[Loaded], options: GenerateOptions) -> list[Loaded]:
    """The models, each once, after `prepare_decoding`. Raises InputError for models that cannot form an ensemble."""
    each: dict[Path, Loaded] = {}
    for loaded in models:
        choose_languages(loaded, options.source_language, options.target_language)
        if options.special_tokens:
            loaded.tokenizer = loaded.text_tokenizer.reading_special()
        each.setdefault(loaded.path.resolve(), loaded)
    chosen = list(each.values())
    if len(chosen) > 1:
        require_same_vocabularies(chosen)
    for loaded in chosen:
        model = loaded.model
        rows = rows_to_prepare(options, loaded)
        dtype, dtype_note = decoding_dtype(
            options.precision,
            trained_in=loaded.recipe.training.precision,
            model=model,
            quantize=options.quantize,
            rows=rows,
        )
        note = prepare_decoding(
            model,
            dtype,
            compile=options.compile,
            quantize=options.quantize,
            rows=rows,
            fill=loaded.fill,
        )
        loaded.notes.extend(line for line in (dtype_note, note) if line is not None)
    return chosen


def rows_to_prepare(options: GenerateOptions, loaded: Loaded) -> int | None:
    """The number of rows in a decoding step for which a model is prepared (`row_class`)."""
    return row_class(options.rows_of_a_step(loaded.recipe.generation, loaded.model))


def names_of_models(arguments: Sequence[str], ensemble: Sequence[str]) -> list[str | None]:
    """The models to load, in order; None is the newest run.

    Typer gives only the first word after `--ensemble` to the option and the others to RUN, so all belong to the
    ensemble. A word with commas is several names, unless there is a folder of that name.
    """
    if not ensemble:
        if len(arguments) > 1:
            raise InputError(
                f"unexpected argument '{arguments[1]}'",
                hint="a text needs --prompt or --input; several models need --ensemble",
            )
        return list(arguments) or [None]
    words = [part for word in ensemble for part in ([word] if Path(word).exists() else word.split(","))]
    return [word for word in dict.fromkeys([*words, *arguments]) if word]


def fills_masks(loaded: Loaded) -> bool:
    return loaded.model.decoder is None and "masked_lm" in loaded.model.heads


def candidates_of_a_mask(options: GenerateOptions) -> int:
    """Number of tokens to show for each mask. Raises InputError for an option without meaning for masks."""
    refused = [name for name in options.given(*Use) if name != "--top-k"]
    refused += ["--compile"] if options.compile == "on" else []
    if refused:
        raise InputError(
            f"{refused[0]} is for models that continue a text; this one fills masks",
            hint="--top-k N chooses how many tokens are shown for each mask",
        )
    if options.top_k is not None and options.top_k < 1:
        raise InputError(f"--top-k must be at least 1 to fill masks, found {options.top_k}")
    return options.top_k or MASK_CANDIDATES


# --- writers ----------------------------------------------------------------------------------------------------------


@dataclass
class Reach:
    """Counts texts, and the texts that read learned positions untrained by a model's run.

    counts: texts that read them, by the note on these positions.
    """

    models: Sequence[Loaded] = ()
    texts: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, length: int, target_length: int = 0) -> None:
        """Count a text of these lengths, as `OnRead` has them."""
        self.texts += 1
        self.counts.update({note for each in self.models for note in each.untrained_positions(length, target_length)})

    def notes(self, total: Callable[[int], int] = int) -> list[str]:
        """The notes, each with the number of texts. total: sums up a number over all processes."""
        longest = [each.untrained_positions(each.model.max_seq_len) for each in self.models]
        counts = {note: total(self.counts[note]) for note in dict.fromkeys(note for notes in longest for note in notes)}
        texts = total(self.texts)
        return [
            note if texts == 1 else Caution(f"{note}; {count:,} of {texts:,} texts read them")
            for note, count in counts.items()
            if count
        ]


class Sampler:
    """Continues prompts by sampling with a decoder-only model, `batch_size` at a time."""

    def __init__(
        self,
        loaded: Loaded,
        settings: GenerationSettings,
        *,
        on_cut: OnCut,
        batch_size: int,
        template: ChatTemplate | None = None,
        system: str | None = None,
    ) -> None:
        """template: the prompts are messages, each after the system prompt."""
        if template is not None:
            ends = dict.fromkeys((*settings.stop_tokens, *template.ends))
            settings = replace(settings, stop_tokens=tuple(ends))
        self.loaded, self.settings, self.on_cut, self.reach = loaded, settings, on_cut, Reach([loaded])
        self.template, self.system, self.batch_size = template, system, batch_size
        self._scheduler: Scheduler | None = None

    def write(
        self,
        prompts: Sequence[str | Sequence[Message]],
        *,
        first_row: int = 0,
        on_token: OnToken | None = None,
        should_stop: ShouldStop = never,
    ) -> Iterator[list[Generated]]:
        """The completions of each prompt (with a template also of messages), in order, as soon as they are done.

        The arguments are those of `generate`. A prompt joins the batch when another ends; models that cannot be
        scheduled take the prompts in batches.
        """
        tokenizer, settings, limit = self.loaded.text_tokenizer, self.settings, self.loaded.model.max_seq_len
        ids = encode_prompts(
            tokenizer,
            prompts,
            context=settings.context,
            max_seq_len=limit,
            first_row=first_row,
            on_cut=self.on_cut,
            template=self.template,
            system=self.system,
        )
        suppressed = suppressed_tokens(tokenizer.special, eos=settings.eos_id, suppressed=settings.suppress_tokens)
        options: dict[str, Any] = {"suppressed": suppressed, "on_token": on_token, "should_stop": should_stop}
        if no_scheduler(self.loaded.model) is None:
            if self._scheduler is None:  # keeps what a chat has read
                rows = self.batch_size * settings.num_samples
                self._scheduler = Scheduler(self.loaded.model, tokenizer, max_rows=rows)
            found = self._scheduler.answers(ids, settings, first_row=first_row, **options)
        else:
            batches = range(0, len(ids), self.batch_size)
            found = chain.from_iterable(
                generate(
                    self.loaded.model,
                    ids[first : first + self.batch_size],
                    settings,
                    tokenizer=tokenizer,
                    first_row=first_row + first,
                    **options,
                )
                for first in batches
            )
        for prompt, completions in zip(ids, found, strict=True):
            start = len(prompt) if len(prompt) <= limit else max(1, limit // 2)
            self.reach.add(min(limit, start + max(len(each.ids) for each in completions) - 1))
            yield completions


@dataclass(frozen=True)
class Searcher:
    """Answers texts with translations (also sampled ones) or searched continuations, best first.

    Attributes:
        search: the answers to each line of a window, best first; polls `should_stop`.
        settings: of the search, or of the sampling of an encoder-decoder.
        reader: of sources and target prefixes; None: the texts are prompts of decoder-only models.
        task_prefix: written before each source; `note` tells the user of it.
        tokenizers: of source and target.
        batch_size: texts at a time.
        reach: counts the texts that are answered.
    """

    search: Callable[[LineWindow, ShouldStop], list[list[Translation]]]
    settings: BeamSettings | GenerationSettings
    reader: SentenceReader | None
    tokenizers: tuple[Tokenizer, Tokenizer]
    batch_size: int
    task_prefix: str = ""
    note: str | None = None
    reach: Reach = field(default_factory=Reach)


def make_writer(options: GenerateOptions, models: Sequence[Loaded], *, on_cut: OnCut) -> Sampler | Searcher:
    """The sampler or searcher of prepared models. Raises InputError for options that do not apply to them."""
    first = models[0]
    if first.model.decoder is None:
        raise InputError(f"{first.path}: generation needs a model with a decoder")
    translates, generation = first.model.is_encoder_decoder, first.recipe.generation
    if options.chat and translates:
        raise InputError(f"--chat needs a decoder-only model, {first.path} has an encoder")
    if not translates:
        options.check_decoder_only(first.path)
    ends = {
        "eos_id": first.decoder_tokens.eos if translates else first.text_tokenizer.special.eos,
        "forced_eos": first.recipe.tokenizer.special_ids.forced_eos,
    }
    settings: BeamSettings | GenerationSettings
    if options.engine(generation, encoder_decoder=translates) == "sample":
        settings = options.sampling_settings(generation, encoder_decoder=translates, **ends)
    else:
        settings = options.beam_settings(generation, **ends)
    if translates:
        return _translations(options, models, settings)
    if isinstance(settings, BeamSettings):
        return _continuations(options, models, settings, on_cut)
    kept = first.recipe.tokenizer.chat_template
    template = ChatTemplate(first.text_tokenizer, kept) if options.chat else None
    size = options.texts_at_once(first.model)
    return Sampler(first, settings, on_cut=on_cut, batch_size=size, template=template, system=options.system)


def _translations(
    options: GenerateOptions, models: Sequence[Loaded], settings: BeamSettings | GenerationSettings
) -> Searcher:
    """A searcher of encoder-decoders, which turn sources into targets."""
    first, batch_size, reach = models[0], options.texts_at_once(models[0].model), Reach(models)
    translator = translator_of(
        *models,
        settings=settings,
        length_margin=options.length_margin,
        alignments=options.alignments,
        too_long=options.too_long,
        on_read=reach.add,
    )
    prefix, note = task_prefix(first.recipe, options.prefix)

    def search(window: LineWindow, should_stop: ShouldStop) -> list[list[Translation]]:
        return translator.translate(
            window.sources,
            target_prefixes=window.prefixes,
            batch_size=batch_size,
            should_stop=should_stop,
            first_row=window.first,
            places=window.places or LINES,
        )

    tokenizers = (first.text_tokenizer, first.target_tokenizer)
    return Searcher(search, settings, translator.reader, tokenizers, batch_size, prefix, note, reach)


def _continuations(
    options: GenerateOptions, models: Sequence[Loaded], settings: BeamSettings, on_cut: OnCut
) -> Searcher:
    """A searcher of decoder-only models, which continue prompts by beam search."""
    tokenizer, batch_size, reach = models[0].text_tokenizer, options.texts_at_once(models[0].model), Reach(models)
    continuer = Continuer(
        [loaded.model for loaded in models],
        tokenizer,
        settings,
        context=options.context,
        on_cut=on_cut,
        on_read=reach.add,
    )

    def search(window: LineWindow, should_stop: ShouldStop) -> list[list[Translation]]:
        return continuer.continue_texts(
            window.sources, batch_size=batch_size, should_stop=should_stop, first_row=window.first
        )

    return Searcher(search, settings, None, (tokenizer, tokenizer), batch_size, reach=reach)
