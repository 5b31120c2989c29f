"""`tformer generate`: text from a trained model; a masked language model fills the masks of a prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tformer.cli.common import StopFlag, console, examples, refuse_to_replace
from tformer.cli.fill_mask import MaskFiller, refuse_options
from tformer.cli.generate_session import Session
from tformer.errors import InputError

if TYPE_CHECKING:
    from tformer.loading import Loaded

PROMPT, CHOICE, OUTPUT, MODEL = "What to continue", "How tokens are chosen", "Output", "Model and machine"
DEFAULT_SEED = 1337

EPILOG = examples(
    "`tformer generate`",
    '`tformer generate runs/gpt-tiny-1 --prompt "The " --temperature 0.8 --top-k 50 --num-samples 3`',
    "`tformer generate --input prompts.txt --output completions.jsonl --greedy --json`",
    '`tformer generate runs/bert-tiny-1 --prompt "The [MASK] sat." --top-k 10`',
)


def generate(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Run or checkpoint folder; default: the newest run."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Text to continue; default: nothing.", rich_help_panel=PROMPT)
    ] = None,
    input_path: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="FILE|-",
            help="One prompt a line; each gives one line of output, its completion alone.",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    errors: Annotated[
        str,
        typer.Option("--errors", metavar="strict|replace", help="Invalid UTF-8 in --input.", rich_help_panel=PROMPT),
    ] = "strict",
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", help="Length of a completion at most.", rich_help_panel=CHOICE)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="0 is greedy.", rich_help_panel=CHOICE)
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            "--top-k",
            help="Keep the K most probable tokens; 0: all. For a [MASK]: show so many (5).",
            rich_help_panel=CHOICE,
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", help="Keep the fewest tokens of total probability P.", rich_help_panel=CHOICE),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option("--min-p", help="Keep tokens at least P times as probable as the best.", rich_help_panel=CHOICE),
    ] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Always the most probable token.", rich_help_panel=CHOICE)
    ] = False,
    repetition_penalty: Annotated[
        float | None,
        typer.Option("--repetition-penalty", help="Above 1: used tokens become less likely.", rich_help_panel=CHOICE),
    ] = None,
    no_repeat_ngram: Annotated[
        int | None,
        typer.Option("--no-repeat-ngram", metavar="N", help="No N tokens in a row twice.", rich_help_panel=CHOICE),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", help="End before this text; may be given again.", rich_help_panel=CHOICE),
    ] = None,
    num_samples: Annotated[
        int, typer.Option("--num-samples", help="Completions of each prompt.", rich_help_panel=CHOICE)
    ] = 1,
    seed: Annotated[
        int, typer.Option("--seed", help="The same seed gives the same text.", rich_help_panel=CHOICE)
    ] = DEFAULT_SEED,
    context: Annotated[
        str,
        typer.Option(
            "--context",
            metavar="slide|error",
            help="When the model's context is full: go on with its last half, or stop (and refuse a longer prompt).",
            rich_help_panel=CHOICE,
        ),
    ] = "slide",
    output: Annotated[
        Path | None, typer.Option("--output", help="A file instead of standard output.", rich_help_panel=OUTPUT)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document per prompt, one a line.", rich_help_panel=OUTPUT)
    ] = False,
    logprobs: Annotated[
        bool,
        typer.Option("--logprobs", help="The model's log-probabilities of the tokens.", rich_help_panel=OUTPUT),
    ] = False,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="best|latest|step-N", help="Of the run.", rich_help_panel=MODEL)
    ] = "best",
    batch_size: Annotated[
        int, typer.Option("--batch-size", help="Prompts of --input at a time.", rich_help_panel=MODEL)
    ] = 16,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda[:i]", rich_help_panel=MODEL)] = "auto",
    precision: Annotated[
        str, typer.Option("--precision", metavar="auto|fp32|bf16|fp16", rich_help_panel=MODEL)
    ] = "auto",
) -> None:
    """Continue a text, or each line of a file, with a trained model.

    What is not given here comes from the model's recipe. A prompt is shown with its continuation, streamed on a
    terminal; lines of --input give completions only, with line ends inside them written as \\\\n. An empty prompt
    starts from the model's start token.

    A masked language model (BERT) fills each [MASK] of the prompt: the most probable tokens, one a line, with their
    probabilities and the text that each gives.
    """
    _check_usage(prompt, input_path, errors, greedy, temperature, num_samples, batch_size, as_json)
    refuse_to_replace(output, [] if input_path is None else [input_path])
    from tformer.decoding.output import open_output

    with StopFlag() as flag, open_output(output) as write:
        from tformer.decoding.precision import cast_matrices, inference_dtype
        from tformer.decoding.settings import GenerationSettings
        from tformer.loading import load
        from tformer.training.precision import resolve_device

        place = resolve_device(device)
        loaded = load(run, device=place, which=checkpoint, kinds={"lm", "masked_lm"})
        fills_masks = loaded.model.decoder is None and "masked_lm" in loaded.model.heads
        if not fills_masks and (loaded.model.decoder is None or loaded.model.encoder is not None):
            raise InputError(f"{loaded.path}: generation needs a decoder-only model")
        dtype = inference_dtype(precision, trained_in=loaded.recipe.training.precision, device=place)
        cast_matrices(loaded.model, dtype)
        if fills_masks:
            refuse_options(
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                min_p=min_p,
                greedy=greedy or None,
                repetition_penalty=repetition_penalty,
                no_repeat_ngram=no_repeat_ngram,
                stop=stop,
                num_samples=num_samples if num_samples != 1 else None,
                logprobs=logprobs or None,
            )
            on_terminal = output is None and sys.stdout.isatty()
            filler = MaskFiller(loaded, flag, write, top_k=top_k, as_json=as_json, on_terminal=on_terminal)
            filler.fill(prompt, input_path, errors)
            return
        for note in (f"generating with {loaded.path}, seed {seed}", *loaded.notes):
            console.print(note, style="dim", markup=False)
        settings = GenerationSettings.from_recipe(
            loaded.recipe.generation,
            max_new_tokens=max_new_tokens,
            temperature=0.0 if greedy else temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            no_repeat_ngram=no_repeat_ngram,
            stop_texts=tuple(stop) if stop else None,
            eos_id=_eos_id(loaded),
            seed=seed,
            num_samples=num_samples,
            logprobs=logprobs,
            context=context,
        )
        session = Session(
            loaded, settings, flag, write, as_json=as_json, on_terminal=output is None and sys.stdout.isatty()
        )
        if input_path is None:
            session.continue_prompt(prompt or "")
        else:
            session.continue_lines(input_path, errors, batch_size)


def _check_usage(
    prompt: str | None,
    input_path: str | None,
    errors: str,
    greedy: bool,
    temperature: float | None,
    num_samples: int,
    batch_size: int,
    as_json: bool,
) -> None:
    """What can be refused before anything is loaded."""
    if prompt is not None and input_path is not None:
        raise InputError("--prompt and --input exclude each other")
    if greedy and temperature:
        raise InputError(f"--greedy and --temperature {temperature:g} exclude each other")
    if input_path is not None and num_samples > 1 and not as_json:
        raise InputError(
            f"--num-samples {num_samples} with --input gives more than one line a prompt", hint="add --json"
        )
    if batch_size < 1:
        raise InputError(f"--batch-size must be at least 1, found {batch_size}")
    if errors not in ("strict", "replace"):
        raise InputError(f"--errors must be strict or replace, found '{errors}'")


def _eos_id(loaded: Loaded) -> int | None:
    chosen = loaded.recipe.tokenizer.special_ids.eos
    return loaded.text_tokenizer.special.eos if chosen is None else chosen
