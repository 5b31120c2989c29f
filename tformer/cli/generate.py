"""`tformer generate`: text from a trained model: continued, translated, or with its masks filled."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tformer.cli import generate_options as options
from tformer.cli.classify_input import STANDARD_INPUT
from tformer.cli.fill_mask import MaskFiller, refuse_options
from tformer.cli.generate_models import end_token, fills_masks, is_encoder_decoder, load_models
from tformer.cli.generate_output import Printer
from tformer.cli.generate_request import OF_SOURCES, OF_TEXTS, SEARCH, Asked
from tformer.cli.generate_search import continuing, translating
from tformer.cli.generate_session import Session
from tformer.cli.options import Quantize
from tformer.cli.report import (
    StopFlag,
    console,
    examples,
    refuse_to_replace,
)
from tformer.errors import InputError

if TYPE_CHECKING:
    from tformer.cli.translate_session import TranslateSession
    from tformer.decoding.settings import BeamSettings, GenerationSettings
    from tformer.loading import Loaded

DEFAULT_SEED = 1337

EPILOG = examples(
    "`tformer generate`",
    '`tformer generate runs/gpt-tiny-1 --prompt "The " --temperature 0.8 --top-k 50 --num-samples 3`',
    "`tformer generate --input prompts.txt --output completions.jsonl --greedy --json`",
    "`tformer generate runs/transformer-tiny-1 --input test.en --output test.de --beam-size 5 --length-penalty 1`",
    "`tformer generate --ensemble runs/a runs/b --input test.en --n-best 3 --alignments --json`",
    '`tformer generate runs/bert-tiny-1 --prompt "The [MASK] sat." --top-k 10`',
)


def generate(
    arguments: options.Arguments = None,
    prompt: options.Prompt = None,
    input_path: options.InputPath = None,
    special_tokens: options.SpecialTokens = False,
    errors: options.Errors = "strict",
    prefix: options.Prefix = None,
    too_long: options.TooLong = "error",
    target_prefix: options.TargetPrefix = None,
    target_prefix_file: options.TargetPrefixFile = None,
    beam_size: options.BeamSize = None,
    n_best: options.NBest = None,
    length_penalty: options.LengthPenalty = None,
    length_penalty_type: options.LengthPenaltyType = None,
    coverage_penalty: options.CoveragePenalty = None,
    stopping: options.Stopping = None,
    beam_groups: options.BeamGroups = None,
    diversity_penalty: options.DiversityPenalty = None,
    ensemble: options.Ensemble = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    greedy: options.Greedy = False,
    num_samples: options.NumSamples = 1,
    seed: options.Seed = DEFAULT_SEED,
    stop: options.Stop = None,
    max_new_tokens: options.MaxNewTokens = None,
    min_new_tokens: options.MinNewTokens = None,
    length_margin: options.LengthMargin = None,
    repetition_penalty: options.RepetitionPenalty = None,
    no_repeat_ngram: options.NoRepeatNgram = None,
    context: options.Context = "slide",
    output: options.Output = None,
    as_json: options.AsJson = False,
    logprobs: options.LogProbs = False,
    alignments: options.Alignments = False,
    checkpoint: options.Checkpoint = "best",
    batch_size: options.BatchSize = None,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    quantize: Quantize = "none",
    compile: options.Compile = "auto",
) -> None:
    """Continue or translate a text, or each line of a file, with a trained model.

    What is not given here comes from the model's recipe. A prompt is shown with its continuation, streamed on a
    terminal; lines of --input give completions only, with line ends inside them written as \\\\n. An empty prompt
    starts from the model's start token.

    An encoder-decoder (transformer, T5, BART) turns each source into a target, by a beam search of the recipe's size;
    --greedy and the options of sampling do otherwise. An empty line gives an empty line; of standard input, what has
    arrived is answered before more is waited for. A decoder alone (GPT) searches when an option of beams is given.

    A masked language model (BERT) fills each [MASK] of the prompt: the most probable tokens, one a line, with their
    probabilities and the text that each gives.
    """
    asked = Asked(**locals())  # whose attributes are these parameters
    asked.check()
    refuse_to_replace(output, asked.files)
    from tformer.decoding.output import open_output

    with StopFlag() as flag, open_output(output) as write:
        models = load_models(asked)
        printer = Printer(write, on_terminal=output is None and sys.stdout.isatty())
        _answer(asked, models, flag, printer)


def _answer(asked: Asked, models: list[Loaded], flag: StopFlag, printer: Printer) -> None:
    """What the kind of model, and the options, ask for."""
    first, notes = models[0], [note for loaded in models for note in loaded.notes]
    if fills_masks(first):
        names = dict.fromkeys((*OF_TEXTS, *SEARCH, *OF_SOURCES))
        refuse_options(
            **{name: getattr(asked, name) for name in asked.given(names) if name != "top_k"},
            compile="on" if asked.compile == "on" else None,
        )
        filler = MaskFiller(
            first, flag, printer.write, top_k=asked.top_k, as_json=asked.as_json, on_terminal=printer.on_terminal
        )
        filler.fill(asked.prompt, asked.input_path, asked.errors)
        return
    if first.model.decoder is None:
        raise InputError(f"{first.path}: generation needs a model with a decoder")
    translates, generation = is_encoder_decoder(first), first.recipe.generation
    if not translates:
        asked.check_decoder_only(first.path)
    eos_id = first.decoder_tokens.eos if translates else end_token(first)
    forced_eos = first.recipe.tokenizer.special_ids.forced_eos
    batch_size = asked.texts_at_once(encoder_decoder=translates)
    paths = ", ".join(str(loaded.path) for loaded in models)
    settings: BeamSettings | GenerationSettings
    translation: TranslateSession
    if asked.engine(generation, encoder_decoder=translates) == "sample":
        settings = asked.sampling_settings(generation, eos_id=eos_id, forced_eos=forced_eos, encoder_decoder=translates)
        how = f"generating with {paths}" + ("" if settings.greedy else f", seed {asked.seed}")
        _tell([how, *notes])
        if not translates:
            session = Session(first, settings, flag, printer, as_json=asked.as_json)
            if asked.input_path is None:
                session.continue_prompt(asked.prompt or "")
            else:
                session.continue_lines(asked.input_path, asked.utf8, batch_size)
            return
        translation = translating(asked, models, settings, flag, printer, batch_size=batch_size)
    else:
        settings = asked.beam_settings(generation, eos_id=eos_id, forced_eos=forced_eos)
        _tell([f"generating with {paths}, beam {settings.beam_size}", *notes])
        if translates:
            translation = translating(asked, models, settings, flag, printer, batch_size=batch_size)
        else:
            translation = continuing(asked, models, settings, flag, printer, batch_size=batch_size)
    if asked.input_path is not None:
        translation.answer_lines(asked.input_path)
    elif asked.prompt is not None or not translates:
        translation.answer_prompt(asked.prompt or "")
    elif sys.stdin.isatty():
        raise InputError(
            "nothing to translate", hint="give --prompt TEXT or --input FILE, or pipe one text a line into the command"
        )
    else:
        translation.answer_lines(STANDARD_INPUT)


def _tell(notes: list[str]) -> None:
    for note in notes:
        console.print(note, style="dim", markup=False)
