"""What a person asked of `tformer generate`, and what is wrong with it: before a model is loaded, and after.

An encoder-decoder searches with a beam (of its recipe's size, 1 is greedy) unless an option of sampling is given; a
decoder alone samples unless an option of beam search is given, or its recipe's beam is wider than 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tformer.cli.classify_input import STANDARD_INPUT
from tformer.cli.options import check_quantize
from tformer.errors import InputError

if TYPE_CHECKING:
    from tformer.data.sources.files import Errors
    from tformer.decoding.settings import BeamSettings, GenerationSettings
    from tformer.recipe.sections import Generation

Engine = Literal["sample", "beam"]
BATCH_OF_PROMPTS, BATCH_OF_SOURCES = 16, 32

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "num_samples")
SEARCH = (
    *("beam_size", "n_best", "length_penalty", "length_penalty_type", "coverage_penalty", "stopping"),
    *("beam_groups", "diversity_penalty", "ensemble"),
)
OF_BEAMS = (
    *("length_penalty", "length_penalty_type", "max_new_tokens", "min_new_tokens", "stopping", "n_best"),
    *("no_repeat_ngram", "repetition_penalty", "beam_groups", "diversity_penalty"),
)
OF_SOURCES = (
    *("coverage_penalty", "length_margin", "alignments", "prefix", "too_long", "target_prefix", "target_prefix_file"),
)
OF_TEXTS = (
    *("max_new_tokens", "min_new_tokens", *SAMPLING, "greedy", "repetition_penalty", "no_repeat_ngram", "stop"),
    "logprobs",
)
NEUTRAL: dict[str, Any] = {"num_samples": 1, "temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0}
NEUTRAL |= {"too_long": "error"}
NEUTRAL |= dict.fromkeys(("coverage_penalty", "diversity_penalty", "min_new_tokens"), 0)
WORDS = {
    "errors": ("strict", "replace"),
    "context": ("slide", "error"),
    "too_long": ("error", "cut"),
    "stopping": ("beam", "heuristic", "exhaustive"),
    "length_penalty_type": ("gnmt", "avg", "none"),
    "compile": ("auto", "on", "off"),
}
EXCLUSIVE = (("prompt", "input_path"), ("target_prefix", "target_prefix_file"), ("prompt", "target_prefix_file"))


def flag_of(name: str) -> str:
    """How the option is written."""
    return {"input_path": "--input", "as_json": "--json"}.get(name, f"--{name.replace('_', '-')}")


@dataclass(frozen=True)
class Asked:
    """The command line, an attribute per option; None where an option was not given and has no fixed default."""

    arguments: list[str] | None
    prompt: str | None
    input_path: str | None
    special_tokens: bool
    errors: str
    prefix: str | None
    too_long: str
    target_prefix: str | None
    target_prefix_file: str | None
    beam_size: int | None
    n_best: int | None
    length_penalty: float | None
    length_penalty_type: str | None
    coverage_penalty: float | None
    stopping: str | None
    beam_groups: int | None
    diversity_penalty: float | None
    ensemble: list[str] | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    greedy: bool
    num_samples: int
    seed: int
    stop: list[str] | None
    max_new_tokens: int | None
    min_new_tokens: int | None
    length_margin: int | None
    repetition_penalty: float | None
    no_repeat_ngram: int | None
    context: str
    output: Path | None
    as_json: bool
    logprobs: bool
    alignments: bool
    checkpoint: str
    batch_size: int | None
    device: str
    precision: str
    quantize: str
    compile: str

    @property
    def files(self) -> list[str]:
        """What is read, as written; `-`: standard input."""
        texts = STANDARD_INPUT if self.prompt is None and self.input_path is None else self.input_path
        return [name for name in (texts, self.target_prefix_file) if name is not None]

    @property
    def utf8(self) -> Errors:
        return "replace" if self.errors == "replace" else "strict"

    @property
    def is_greedy(self) -> bool:
        return self.greedy or self.temperature == 0

    def given(self, names: Iterable[str]) -> list[str]:
        """Those of the options that were given and ask for something."""
        values = {name: getattr(self, name) for name in names}
        return [
            name
            for name, value in values.items()
            if value is not None and value is not False and value != [] and value != NEUTRAL.get(name)
        ]

    def check(self) -> None:
        """What can be refused before anything is loaded."""
        for first, second in EXCLUSIVE:
            if getattr(self, first) is not None and getattr(self, second) is not None:
                raise InputError(f"{flag_of(first)} and {flag_of(second)} exclude each other")
        if self.greedy and self.temperature:
            raise InputError(f"--greedy and --temperature {self.temperature:g} exclude each other")
        if self.is_greedy and (self.beam_size or 1) > 1:
            how = "--greedy" if self.greedy else "--temperature 0"
            raise InputError(f"{how} and --beam-size {self.beam_size} exclude each other", hint="greedy is a beam of 1")
        if self.input_path is not None and self.num_samples > 1 and not self.as_json:
            raise InputError(
                f"--num-samples {self.num_samples} with --input gives more than one line a prompt", hint="add --json"
            )
        if self.batch_size is not None and self.batch_size < 1:
            raise InputError(f"--batch-size must be at least 1, found {self.batch_size}")
        if self.length_margin is not None and self.length_margin < 0:
            raise InputError(f"--length-margin must be at least 0, found {self.length_margin}")
        if self.coverage_penalty is not None and not 0 <= self.coverage_penalty < float("inf"):
            raise InputError(f"--coverage-penalty must be at least 0 and finite, found {self.coverage_penalty:g}")
        for name, words in WORDS.items():
            if (word := getattr(self, name)) is not None and word not in words:
                expected = f"{', '.join(words[:-1])} or {words[-1]}"
                raise InputError(f"{flag_of(name)} must be {expected}, found '{word}'")
        check_quantize(self.quantize, self.precision)
        if self.compile == "on" and self.quantize != "none":
            raise InputError(
                f"--compile on and --quantize {self.quantize} exclude each other",
                hint="8-bit matrices are closed to the compiler",
            )
        sampling, search = self.given(SAMPLING), self.given(SEARCH)
        if sampling and search:
            raise InputError(
                f"{flag_of(sampling[0])} and {flag_of(search[0])} exclude each other",
                hint=f"{flag_of(sampling[0])} draws samples, {flag_of(search[0])} is for beam search",
            )
        if search and self.stop:
            raise InputError(f"--stop and {flag_of(search[0])} exclude each other", hint="a beam ends at the end token")

    def engine(self, generation: Generation, *, encoder_decoder: bool) -> Engine:
        """How the model is decoded. Raises InputError for a stop text in a beam of more than one."""
        if self.given(SAMPLING):
            return "sample"
        searches = bool(self.given(SEARCH))
        width = 1 if self.is_greedy else generation.beam_size
        if not searches and width == 1 and (self.stop or not encoder_decoder):
            return "sample"
        if self.stop:
            raise InputError(
                f"--stop is not for beam search, and the model's recipe asks for a beam of {width}", hint="add --greedy"
            )
        return "beam"

    def texts_at_once(self, *, encoder_decoder: bool) -> int:
        """Of many."""
        return self.batch_size or (BATCH_OF_SOURCES if encoder_decoder else BATCH_OF_PROMPTS)

    def rows_of_a_step(self, generation: Generation, *, encoder_decoder: bool) -> int:
        """The most rows that a step of decoding has: texts of a batch, each with its samples or beams."""
        texts = 1 if self.prompt is not None else self.texts_at_once(encoder_decoder=encoder_decoder)
        if self.engine(generation, encoder_decoder=encoder_decoder) == "sample":
            return texts * self.num_samples
        return texts * (1 if self.is_greedy else self.beam_size or generation.beam_size)

    def check_decoder_only(self, path: Path) -> None:
        """Raise InputError for an option about sources, which a decoder alone does not have."""
        for name in self.given(OF_SOURCES):
            raise InputError(
                f"{flag_of(name)} is for encoder-decoders, {path} is a decoder alone",
                hint="its prompt is what an output begins with" if name.startswith("target_prefix") else None,
            )

    def sampling_settings(
        self, generation: Generation, *, eos_id: int | None, encoder_decoder: bool, forced_eos: int | None = None
    ) -> GenerationSettings:
        """The recipe's defaults under what was asked for. An encoder-decoder is greedy until sampling is asked for."""
        from tformer.decoding.settings import GenerationSettings

        greedy = self.is_greedy or (encoder_decoder and not self.given(SAMPLING))
        return GenerationSettings.from_recipe(
            generation,
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            temperature=0.0 if greedy else self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            no_repeat_ngram=self.no_repeat_ngram,
            stop_texts=tuple(self.stop) if self.stop else None,
            eos_id=eos_id,
            forced_eos=forced_eos,
            seed=self.seed,
            num_samples=self.num_samples,
            logprobs=self.logprobs,
            context=self.context,
        )

    def beam_settings(
        self, generation: Generation, *, eos_id: int | None, forced_eos: int | None = None
    ) -> BeamSettings:
        """The recipe's defaults under what was asked for; greedy is a beam of 1."""
        from tformer.decoding.settings import fitting_beam_settings

        asked: dict[str, Any] = {name: getattr(self, name) for name in OF_BEAMS}
        size = 1 if self.is_greedy else self.beam_size
        return fitting_beam_settings(generation, eos_id=eos_id, forced_eos=forced_eos, beam_size=size, **asked)
