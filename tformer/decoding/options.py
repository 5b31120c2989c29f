"""The options of `tformer generate`: what can be refused before a model is loaded, and the settings they give.

This module imports no model, so that `--help` is fast.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tformer.data.sources.reading import ReadsTexts
from tformer.support import decoding as row
from tformer.support.bounds import Positive, Seed
from tformer.support.decoding import BEAMS, SAMPLING, Use
from tformer.support.errors import InputError
from tformer.support.options import (
    AS_STRINGS,
    COMPILE,
    MACHINE,
    RETURNED,
    RUN,
    AnswerFile,
    Checkpoint,
    CommandOnly,
    Delimiter,
    Device,
    Devices,
    Encoding,
    InvalidUtf8,
    Neutral,
    Panel,
    Precision,
    Quantize,
    Quotes,
    SpecialTokens,
    TableColumn,
    TaskPrefix,
)
from tformer.support.rules import OF_FILES, QUANTIZE_RULE, Checked, as_given, exclude, names_of, needs

if TYPE_CHECKING:
    from tformer.decoding.settings import BeamSettings, GenerationSettings
    from tformer.model import Transformer
    from tformer.recipe.sections import Generation

PROMPT, OUTPUT = Panel("What to continue or translate"), Panel("Output")
BATCH_OF_PROMPTS, BATCH_OF_SOURCES, ON_GPU = 16, 32, 8
DEFAULT_SEED = 1337


def batch_on(model: Transformer, usual: int) -> int:
    """The texts of a batch: more on a GPU, whose steps take hardly longer for many rows than for few."""
    return usual * (ON_GPU if next(model.parameters()).is_cuda else 1)


@dataclass(frozen=True)
class GenerateOptions(ReadsTexts, Checked):
    """The options of `tformer generate`; None: not given, the model's recipe has the default."""

    RULES = (
        exclude("--prompt", ("--input", "--target-prefix-file")),
        exclude("--prompt", ("--text-column", *OF_FILES)),
        exclude("--target-prefix", "--target-prefix-file"),
        exclude("--greedy", "--temperature"),
        exclude(Use.SAMPLE, Use.SEARCH, hint="one draws samples, the other is for beam search"),
        exclude("--stop", Use.SEARCH, hint="a beam ends at the end token"),
        exclude("--chat", Use.SEARCH, hint="answers are sampled, or --greedy"),
        needs("--system", "--chat", hint="it is a message of the chat template"),
        exclude("--compile on", "--quantize", hint="8-bit matrices cannot be compiled"),
        QUANTIZE_RULE,
    )

    arguments: Annotated[
        tuple[str, ...], replace(RUN, help="Run, checkpoint or Hugging Face folder; several: only with --ensemble.")
    ] = ()
    prompt: Annotated[
        str | None,
        PROMPT("--prompt", help="Text to continue; for an encoder-decoder the source.", default="empty"),
        CommandOnly("the prompt is the first argument"),
    ] = None
    input_path: Annotated[
        str | None,
        PROMPT(
            "--input",
            metavar="FILE|-",
            help="Lines, each a prompt or source, or a table (csv, tsv, xlsx, jsonl, parquet), which comes back with "
            "a column `output`.",
            default="standard input for encoder-decoders",
        ),
        CommandOnly("the first argument may be a list of texts"),
    ] = None
    text_column: Annotated[TableColumn, PROMPT, AS_STRINGS] = None
    chat: Annotated[
        bool,
        PROMPT("--chat", help="Prompts are messages; print the answers alone."),
        Use.TEXT,
    ] = False
    system: Annotated[
        str | None,
        PROMPT("--system", metavar="TEXT", help="System prompt of a chat.", rare=True),
        Use.TEXT,
    ] = None
    special_tokens: Annotated[SpecialTokens, PROMPT] = False
    invalid_utf8: Annotated[InvalidUtf8, PROMPT, AS_STRINGS] = "strict"
    encoding: Annotated[Encoding, PROMPT, AS_STRINGS] = None
    delimiter: Annotated[Delimiter, PROMPT, AS_STRINGS] = None
    quotes: Annotated[Quotes, PROMPT, AS_STRINGS] = None
    prefix: Annotated[TaskPrefix, PROMPT, Use.SOURCE] = None
    too_long: Annotated[
        Literal["error", "cut"],
        PROMPT(
            "--too-long",
            help="A source longer than the model's maximum: stop with an error, or cut its end.",
            rare=True,
        ),
        Use.SOURCE,
        Neutral("error"),
    ] = "error"
    source_language: Annotated[
        str | None,
        PROMPT(
            "--source-language",
            metavar="CODE",
            help="Language of the sources, for models with a token for each (M2M100: en, NLLB: eng_Latn, ...).",
            default="the model's",
            rare=True,
        ),
        Use.SOURCE,
    ] = None
    target_language: Annotated[
        str | None,
        PROMPT("--target-language", metavar="CODE", help="Language of the outputs, likewise.", rare=True),
        Use.SOURCE,
    ] = None
    target_prefix: Annotated[
        str | None,
        PROMPT("--target-prefix", metavar="TEXT", help="Text that every output begins with.", rare=True),
        Use.SOURCE,
    ] = None
    target_prefix_file: Annotated[
        str | None,
        PROMPT(
            "--target-prefix-file", metavar="FILE", help="File with one target prefix per line of --input.", rare=True
        ),
        CommandOnly("call once for each target_prefix"),
        Use.SOURCE,
    ] = None

    beam_size: row.BeamSize | None = None
    n_best: row.NBest | None = None
    length_penalty: row.LengthPenalty | None = None
    length_penalty_type: row.LengthPenaltyType | None = None
    stopping: row.Stopping | None = None
    ensemble: Annotated[
        tuple[str, ...],
        BEAMS(
            "--ensemble",
            metavar="RUN...",
            help="Average the next-token probabilities of several models with one vocabulary: A B C or A,B,C. The "
            "recipe of the first gives the defaults; a model named as RUN belongs to the ensemble.",
            rare=True,
        ),
        Use.SEARCH,
    ] = ()

    temperature: row.Temperature | None = None
    top_k: row.TopK | None = None
    top_p: row.TopP | None = None
    min_p: row.MinP | None = None
    greedy: Annotated[bool, SAMPLING("--greedy", help="Take the most probable token at every step."), Use.TEXT] = False
    num_samples: row.NumSamples = 1
    seed: Annotated[Seed, SAMPLING("--seed", help="The same seed gives the same text.")] = DEFAULT_SEED
    stop: row.Stop = ()

    max_new_tokens: row.MaxNewTokens | None = None
    min_new_tokens: row.MinNewTokens | None = None
    at_limit: row.AtLimit | None = None
    length_margin: row.LengthMargin | None = None
    repetition_penalty: row.RepetitionPenalty | None = None
    no_repeat_ngram: row.NoRepeatNgram | None = None
    context: row.ContextPolicy = "slide"

    output: Annotated[AnswerFile, OUTPUT] = None
    as_json: Annotated[
        bool,
        OUTPUT("--json", help="One JSON object per line, one for each prompt (JSON Lines)."),
        RETURNED,
    ] = False
    logprobs: Annotated[
        bool,
        OUTPUT(
            "--logprobs",
            help="Add the model's log-probability of the text; with --json of each token (`logprobs`, one for each of "
            "`ids`; null for a target prefix).",
            rare=True,
        ),
        Use.TEXT,
    ] = False
    alignments: Annotated[
        bool,
        OUTPUT(
            "--alignments",
            help="Add the source token that each output token attends to most: `SOURCE-TARGET` pairs from 0 (0-0 1-2) "
            "after a tab; with --json [source, target] pairs and the tokens.",
            rare=True,
        ),
        Use.SOURCE,
    ] = False

    checkpoint: Checkpoint = "best"
    batch_size: Annotated[
        Positive | None,
        MACHINE(
            "--batch-size",
            help="Lines of --input per batch.",
            default="16, encoder-decoders 32; GPU 8 times",
        ),
    ] = None
    device: Device = "auto"
    devices: Devices = None
    precision: Precision = "auto"
    quantize: Quantize = "none"
    compile: Annotated[
        Literal["auto", "on", "off"],
        replace(
            COMPILE,
            metavar=None,
            help="The decoding step: auto records it as a CUDA graph on a GPU, on runs it through torch.compile.",
        ),
    ] = "auto"

    # --- what can be refused before a model is loaded -----------------------------------------------------------------

    def check(self) -> None:
        """Raise InputError for options that contradict each other, before anything is loaded."""
        super().check()
        _ = self.reading
        if self.is_greedy and (self.beam_size or 1) > 1:
            how = "--greedy" if self.greedy else "--temperature 0"
            raise InputError(f"{how} and --beam-size {self.beam_size} exclude each other", hint="greedy is a beam of 1")
        if self.output is not None and not self.as_json:
            from tformer.decoding.answer_table import output_format

            output_format(self.output, None)
        if self.input_path is not None and self.num_samples > 1 and not self.as_json:
            from tformer.decoding.lines import reads_table

            if not reads_table(self):
                found = f"--num-samples {self.num_samples} with --input would give several lines per prompt"
                raise InputError(found, hint="add --json")

    def given(self, *uses: Use) -> list[str]:
        """Flags of the options for one of these uses that were given and are not neutral."""
        return [name for name in names_of(uses, GenerateOptions) if as_given(self, name)]

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
        """The way of decoding: sampling or beam search.

        Encoder-decoder: by beam search (a beam of 1 is greedy) unless sampling options are given. Decoder-only: by
        sampling unless its recipe or an option sets a beam of more than 1.

        Raises InputError for a stop text in a beam of more than one.
        """
        if self.chat or self.given(Use.SAMPLE):
            return "sample"
        width = 1 if self.is_greedy else generation.beam_size
        if not self.given(Use.SEARCH) and width == 1 and (self.stop or not encoder_decoder):
            return "sample"
        if self.stop:
            raise InputError(
                f"--stop is not for beam search, and the model's recipe has a beam of {width}", hint="add --greedy"
            )
        return "beam"

    def texts_at_once(self, model: Transformer) -> int:
        """Lines of --input in a batch."""
        usual = BATCH_OF_SOURCES if model.is_encoder_decoder else BATCH_OF_PROMPTS
        return batch_on(model, usual) if self.batch_size is None else self.batch_size

    def rows_of_a_step(self, generation: Generation, model: Transformer) -> int:
        """The largest number of rows in a decoding step: texts of a batch, each with its samples or beams."""
        texts = 1 if self.prompt is not None else self.texts_at_once(model)
        if self.engine(generation, encoder_decoder=model.is_encoder_decoder) == "sample":
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
        from tformer.decoding.settings import BeamSettings

        chosen = self._values_for(BeamSettings)
        if self.is_greedy:
            chosen["beam_size"] = 1
        return BeamSettings.from_recipe(generation, eos_id=eos_id, forced_eos=forced_eos, **chosen)

    def _values_for(self, settings: type) -> dict[str, Any]:
        """The options that the settings have under the same names."""
        return {field.name: getattr(self, field.name) for field in fields(settings) if hasattr(self, field.name)}
