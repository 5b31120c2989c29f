"""The options of `tformer generate`: what can be refused before a model is loaded, and the settings they give.

This module imports no model, so that `--help` is fast.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_type_hints

from tformer.data.sources.files import MAX_ROW_CHARACTERS
from tformer.support.errors import InputError
from tformer.support.options import (
    MACHINE,
    Checkpoint,
    Device,
    Devices,
    Errors,
    Option,
    Precision,
    Quantize,
    argument,
    check_quantize,
    panel,
    require_at_most_one,
)

if TYPE_CHECKING:
    from tformer.decoding.settings import BeamSettings, GenerationSettings
    from tformer.recipe.sections import Generation

PROMPT, BEAMS, SAMPLING = panel("What to continue or translate"), panel("Beam search"), panel("Sampling")
LENGTH, OUTPUT = panel("Length and repetition"), panel("Output")
BATCH_OF_PROMPTS, BATCH_OF_SOURCES = 16, 32
DEFAULT_SEED = 1337


class Use(Enum):
    """The models or methods that an option applies to; an option without one applies to all."""

    SAMPLE = "drawing samples"
    SEARCH = "beam search"
    SOURCE = "sources of encoder-decoders"
    TEXT = "models that write text: not for filling masks"


class Neutral(NamedTuple):
    """The value of an option that means the same as leaving it out."""

    value: Any


@dataclass(frozen=True)
class GenerateOptions:
    """The options of `tformer generate`; None: not given, the model's recipe has the default."""

    arguments: Annotated[
        tuple[str, ...],
        argument("RUN", help="Run, checkpoint or Hugging Face folder; default: the newest run.", show_default=False),
    ] = ()
    prompt: Annotated[
        str | None,
        PROMPT("--prompt", help="Text to continue (default: empty); for an encoder-decoder the source."),
    ] = None
    input_path: Annotated[
        str | None,
        PROMPT(
            "--input",
            metavar="FILE|-",
            help=f"File with one prompt or source per line, of at most {MAX_ROW_CHARACTERS:,} characters. Prints one "
            "line per line: the completion without the prompt. Default of encoder-decoders: standard input.",
        ),
    ] = None
    special_tokens: Annotated[
        bool,
        PROMPT(
            "--special-tokens",
            help="Read special tokens in a prompt (`<mask>`, `<extra_id_0>`) as special tokens, not as plain text.",
        ),
    ] = False
    invalid_utf8: Annotated[Errors, PROMPT("--invalid-utf8", help="How to treat invalid UTF-8 in --input.")] = "strict"
    prefix: Annotated[
        str | None,
        PROMPT(
            "--prefix",
            metavar="TEXT",
            help="Text to put before every source that does not begin with it. Default: the prefix of training, if "
            "all training sets have the same.",
        ),
        Use.SOURCE,
    ] = None
    too_long: Annotated[
        Literal["error", "cut"],
        PROMPT("--too-long", help="A source longer than the model's maximum: stop with an error, or cut its end."),
        Use.SOURCE,
        Neutral("error"),
    ] = "error"
    target_prefix: Annotated[
        str | None,
        PROMPT("--target-prefix", metavar="TEXT", help="Text that every output begins with."),
        Use.SOURCE,
    ] = None
    target_prefix_file: Annotated[
        str | None,
        PROMPT("--target-prefix-file", metavar="FILE", help="File with one target prefix per line of --input."),
        Use.SOURCE,
    ] = None

    beam_size: Annotated[
        int | None,
        BEAMS("--beam-size", metavar="B", help="Hypotheses kept at every step; 1 is greedy."),
        Use.SEARCH,
    ] = None
    n_best: Annotated[
        int | None,
        BEAMS(
            "--n-best",
            metavar="N",
            help="Print up to N different texts per input line (a text that several groups of --beam-groups found, "
            "once for each), best first, as tab-separated INDEX, SCORE and TEXT; INDEX is the number of the input "
            "line, from 0.",
        ),
        Use.SEARCH,
    ] = None
    length_penalty: Annotated[
        float | None,
        BEAMS("--length-penalty", metavar="A", help="A above 0 favours long texts, below 0 short ones."),
        Use.SEARCH,
    ] = None
    length_penalty_type: Annotated[
        Literal["gnmt", "avg", "none"] | None,
        BEAMS(
            "--length-penalty-type", help="Divisor of a log-probability: gnmt ((5 + length)/6)^A, avg length^A, none 1."
        ),
        Use.SEARCH,
    ] = None
    coverage_penalty: Annotated[
        float | None,
        BEAMS(
            "--coverage-penalty",
            metavar="C",
            help="Penalise source tokens with little attention: add C times the sum of log min(attention, 1) over the "
            "source tokens to a score.",
        ),
        Use.SEARCH,
        Use.SOURCE,
        Neutral(0),
    ] = None
    stopping: Annotated[
        Literal["beam", "heuristic", "exhaustive"] | None,
        BEAMS(
            "--stopping",
            help="When the search of a text stops. beam: B hypotheses are finished. heuristic: B are finished, and no "
            "unfinished one, scored at its present length, beats the worst of them. exhaustive: B are finished, and "
            "no unfinished one can beat the worst of them at any allowed length. Default: the recipe's.",
        ),
        Use.SEARCH,
    ] = None
    beam_groups: Annotated[
        int | None,
        BEAMS("--beam-groups", metavar="G", help="Divide the beam into G groups that choose different tokens."),
        Use.SEARCH,
    ] = None
    diversity_penalty: Annotated[
        float | None,
        BEAMS(
            "--diversity-penalty",
            metavar="X",
            help="Subtract X from a token's score for each hypothesis of an earlier group that chose it at this step.",
        ),
        Use.SEARCH,
        Neutral(0),
    ] = None
    ensemble: Annotated[
        tuple[str, ...],
        BEAMS(
            "--ensemble",
            metavar="RUN...",
            help="Average the next-token probabilities of several models with one vocabulary: A B C or A,B,C. The "
            "recipe of the first gives the defaults; a model named as RUN belongs to the ensemble.",
            show_default=False,
        ),
        Use.SEARCH,
    ] = ()

    temperature: Annotated[
        float | None, SAMPLING("--temperature", help="Divisor of the logits; 0: greedy."), Use.SAMPLE, Neutral(0)
    ] = None
    top_k: Annotated[
        int | None,
        SAMPLING("--top-k", help="Keep the K most probable tokens; 0: all. For a [MASK]: how many to show (5)."),
        Use.SAMPLE,
        Neutral(0),
    ] = None
    top_p: Annotated[
        float | None,
        SAMPLING("--top-p", help="Keep the smallest set of most probable tokens with a total probability of P."),
        Use.SAMPLE,
        Neutral(1),
    ] = None
    min_p: Annotated[
        float | None,
        SAMPLING("--min-p", help="Keep tokens at least P times as probable as the most probable one."),
        Use.SAMPLE,
        Neutral(0),
    ] = None
    greedy: Annotated[bool, SAMPLING("--greedy", help="Take the most probable token at every step."), Use.TEXT] = False
    num_samples: Annotated[
        int, SAMPLING("--num-samples", help="Number of completions per prompt."), Use.SAMPLE, Neutral(1)
    ] = 1
    seed: Annotated[int, SAMPLING("--seed", help="The same seed gives the same text.")] = DEFAULT_SEED
    stop: Annotated[
        tuple[str, ...],
        SAMPLING(
            "--stop",
            help="End the completion before this text (not with beam search); may be repeated.",
            show_default=False,
        ),
        Use.TEXT,
    ] = ()

    max_new_tokens: Annotated[
        int | None, LENGTH("--max-new-tokens", help="Maximum length of a completion in tokens."), Use.TEXT
    ] = None
    min_new_tokens: Annotated[
        int | None, LENGTH("--min-new-tokens", help="Minimum length of a completion in tokens."), Use.TEXT, Neutral(0)
    ] = None
    at_limit: Annotated[
        Literal["cut", "end"] | None,
        LENGTH(
            "--at-limit",
            help="What becomes of a text at its maximum length. cut: it stops without an end (with the end that the "
            "model forces, if any). end: its last token is the end of sequence, whose log-probability counts.",
        ),
        Use.TEXT,
        Neutral("cut"),
    ] = None
    length_margin: Annotated[
        int | None,
        LENGTH("--length-margin", metavar="N", help="Limit an output to the length of its source plus N tokens."),
        Use.SOURCE,
    ] = None
    repetition_penalty: Annotated[
        float | None,
        LENGTH("--repetition-penalty", help="Above 1 makes tokens that were already used less likely."),
        Use.TEXT,
    ] = None
    no_repeat_ngram: Annotated[
        int | None, LENGTH("--no-repeat-ngram", metavar="N", help="Never repeat a sequence of N tokens."), Use.TEXT
    ] = None
    context: Annotated[
        Literal["slide", "error"],
        LENGTH(
            "--context",
            help="When the context of a decoder-only model is full. slide: continue with its last half (beam search "
            "stops). error: stop, and refuse a longer prompt. For sources see --too-long.",
        ),
    ] = "slide"

    output: Annotated[Path | None, OUTPUT("--output", help="Write to this file instead of standard output.")] = None
    as_json: Annotated[
        bool,
        OUTPUT("--json", help="One JSON document per prompt and line, with all completions (and their scores)."),
    ] = False
    logprobs: Annotated[
        bool,
        OUTPUT(
            "--logprobs",
            help="Add the model's log-probability of the text; with --json of each token (`logprobs`, one for each of "
            "`ids`; null for a target prefix).",
        ),
        Use.TEXT,
    ] = False
    alignments: Annotated[
        bool,
        OUTPUT(
            "--alignments",
            help="Add the source token that each output token attends to most: `SOURCE-TARGET` pairs from 0 (0-0 1-2) "
            "after a tab; with --json [source, target] pairs and the tokens.",
        ),
        Use.SOURCE,
    ] = False

    checkpoint: Checkpoint = "best"
    batch_size: Annotated[
        int | None,
        MACHINE("--batch-size", help="Lines of --input per batch; default: 16, for an encoder-decoder 32."),
    ] = None
    device: Device = "auto"
    devices: Devices = None
    precision: Precision = "auto"
    quantize: Quantize = "none"
    compile: Annotated[
        Literal["auto", "on", "off"],
        MACHINE("--compile", help="Compile the decoding step (torch.compile); auto: on a GPU for long outputs."),
    ] = "auto"

    # --- what can be refused before a model is loaded -----------------------------------------------------------------

    def check(self) -> None:
        """Raise InputError for options that contradict each other, before anything is loaded."""
        prompt, target_prefix_file = ("--prompt", self.prompt), ("--target-prefix-file", self.target_prefix_file)
        require_at_most_one([prompt, ("--input", self.input_path)])
        require_at_most_one([("--target-prefix", self.target_prefix), target_prefix_file])
        require_at_most_one([prompt, target_prefix_file])
        if self.greedy and self.temperature:
            raise InputError(f"--greedy and --temperature {self.temperature:g} exclude each other")
        if self.is_greedy and (self.beam_size or 1) > 1:
            how = "--greedy" if self.greedy else "--temperature 0"
            raise InputError(f"{how} and --beam-size {self.beam_size} exclude each other", hint="greedy is a beam of 1")
        if self.input_path is not None and self.num_samples > 1 and not self.as_json:
            raise InputError(
                f"--num-samples {self.num_samples} with --input would give several lines per prompt", hint="add --json"
            )
        check_quantize(self.quantize, self.precision)
        if self.compile == "on" and self.quantize != "none":
            raise InputError(
                f"--compile on and --quantize {self.quantize} exclude each other",
                hint="8-bit matrices cannot be compiled",
            )
        sampling, search = self.given(Use.SAMPLE), self.given(Use.SEARCH)
        if sampling and search:
            raise InputError(
                f"{sampling[0]} and {search[0]} exclude each other",
                hint=f"{sampling[0]} draws samples, {search[0]} is for beam search",
            )
        if search and self.stop:
            raise InputError(f"--stop and {search[0]} exclude each other", hint="a beam ends at the end token")

    def given(self, *uses: Use) -> list[str]:
        """Flags of the options for one of these uses that were given and are not neutral."""
        values = [(option, getattr(self, option.name)) for option in _declared() if option.uses.intersection(uses)]
        return [
            option.flag
            for option, value in values
            if value is not None and value is not False and value != () and value != option.neutral
        ]

    @property
    def files(self) -> list[str]:
        """The files that are read, as they were written; `-`: standard input."""
        texts = "-" if self.prompt is None and self.input_path is None else self.input_path
        return [name for name in (texts, self.target_prefix_file) if name is not None]

    # --- settings -----------------------------------------------------------------------------------------------------

    @property
    def is_greedy(self) -> bool:
        return self.greedy or self.temperature == 0

    def engine(self, generation: Generation, *, encoder_decoder: bool) -> Literal["sample", "beam"]:
        """How the model is decoded.

        Encoder-decoder: by beam search (a beam of 1 is greedy) unless sampling options are given. Decoder-only: by
        sampling unless its recipe or an option sets a beam of more than 1.

        Raises InputError for a stop text in a beam of more than one.
        """
        if self.given(Use.SAMPLE):
            return "sample"
        width = 1 if self.is_greedy else generation.beam_size
        if not self.given(Use.SEARCH) and width == 1 and (self.stop or not encoder_decoder):
            return "sample"
        if self.stop:
            raise InputError(
                f"--stop is not for beam search, and the model's recipe has a beam of {width}", hint="add --greedy"
            )
        return "beam"

    def texts_at_once(self, *, encoder_decoder: bool) -> int:
        """Lines of --input in a batch."""
        return self.batch_size or (BATCH_OF_SOURCES if encoder_decoder else BATCH_OF_PROMPTS)

    def rows_of_a_step(self, generation: Generation, *, encoder_decoder: bool) -> int:
        """The largest number of rows in a decoding step: texts of a batch, each with its samples or beams."""
        texts = 1 if self.prompt is not None else self.texts_at_once(encoder_decoder=encoder_decoder)
        if self.engine(generation, encoder_decoder=encoder_decoder) == "sample":
            return texts * self.num_samples
        return texts * (1 if self.is_greedy else self.beam_size or generation.beam_size)

    def check_decoder_only(self, path: Path) -> None:
        """Raise InputError for an option about sources, which a decoder-only model does not have."""
        for flag in self.given(Use.SOURCE):
            raise InputError(
                f"{flag} is for encoder-decoders, {path} is a decoder-only model",
                hint="give the beginning of the output as the prompt" if flag.startswith("--target-prefix") else None,
            )

    def sampling_settings(
        self, generation: Generation, *, eos_id: int | None, encoder_decoder: bool, forced_eos: int | None = None
    ) -> GenerationSettings:
        """The options over the recipe's defaults. Encoder-decoders are greedy without options of sampling."""
        from tformer.decoding.settings import GenerationSettings

        chosen = self._values_for(GenerationSettings)
        if self.is_greedy or (encoder_decoder and not self.given(Use.SAMPLE)):
            chosen["temperature"] = 0.0
        stop_texts = self.stop or None
        ends: dict[str, Any] = {"eos_id": eos_id, "forced_eos": forced_eos, "stop_texts": stop_texts}
        return GenerationSettings.from_recipe(generation, **chosen, **ends)

    def beam_settings(
        self, generation: Generation, *, eos_id: int | None, forced_eos: int | None = None
    ) -> BeamSettings:
        """The options over the recipe's defaults; greedy is a beam of 1."""
        from tformer.decoding.settings import BeamSettings, fitting_beam_settings

        chosen = self._values_for(BeamSettings)
        if self.is_greedy:
            chosen["beam_size"] = 1
        return fitting_beam_settings(generation, eos_id=eos_id, forced_eos=forced_eos, **chosen)

    def _values_for(self, settings: type) -> dict[str, Any]:
        """The options that the settings have under the same names."""
        return {field.name: getattr(self, field.name) for field in fields(settings) if hasattr(self, field.name)}


class _Declared(NamedTuple):
    name: str
    flag: str
    uses: frozenset[Use]
    neutral: Any


@cache
def _declared() -> list[_Declared]:
    """The fields with a `Use`."""
    found = []
    for name, hint in get_type_hints(GenerateOptions, include_extras=True).items():
        facts = hint.__metadata__
        uses = frozenset(fact for fact in facts if isinstance(fact, Use))
        neutral = next((fact.value for fact in facts if isinstance(fact, Neutral)), None)
        if uses:
            [option] = [fact for fact in facts if isinstance(fact, Option)]
            found.append(_Declared(name, option.flags[0], uses, neutral))
    return found
