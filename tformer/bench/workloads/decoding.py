"""`bench generate` and `bench translate`: greedy decoding of random prompts, beam search over random sources."""

from __future__ import annotations

from collections import Counter
from math import ceil

import torch

from tformer.bench.workloads import SEED, BenchTask, Cost, Workload, synchronize
from tformer.bench.workloads.train import SPECIAL, random_ids
from tformer.build import layer_sizes
from tformer.cost.flops import HEADS, attention_flops, product_flops, product_shape
from tformer.decoding.beam_search import beam_search
from tformer.decoding.compilation import (
    compile_decoding,
    no_compiled_steps,
    record_decoding,
    require_compiler,
)
from tformer.decoding.generate import generate
from tformer.decoding.inference import cast_matrices, prepare_inference
from tformer.decoding.prompts import suppressed_tokens
from tformer.decoding.settings import BeamSettings, GenerationSettings
from tformer.decoding.stepper import ModelStepper
from tformer.model import Transformer
from tformer.recipe.recipe import Recipe
from tformer.support.device import DTYPES
from tformer.support.errors import InputError
from tformer.tokenizer.special import decoder_tokens

WEIGHT_BYTES = {
    **{"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "int4": 0.5},
    **{"int16": 2, "int8_bf16": 1, "int8_fp16": 1, "q8_0": 1, "q4_0": 0.5},
}
"""Bytes of a matrix's weight in our formats and other libraries'; scales of quantized matrices are left out."""
HEAD_BYTES = WEIGHT_BYTES | {"int4": 1}
"""Bytes of a weight in the matrix over the vocabulary."""

HEAD = "lm"
PROMPT_LENGTH, SOURCE_LENGTH = 16, 20
ROWS = 4096  # of the product measured as the ceiling; with few rows memory would bound it
TARGET = decoder_tokens(SPECIAL)


def inference_model(task: BenchTask, precision: str, *, rows: int | None = None) -> Transformer:
    """Our model in evaluation mode, with random weights in the number format that the command would choose.

    Args:
        precision: the task's, or int8 for quantized matrices.
        rows: of a decoding step; None: many.

    A model that will be compiled keeps plain matrices, for the compiler cannot read packed ones. The caller compiles
    the whole model, or its steps.
    """
    torch.manual_seed(SEED)
    model = task.model("cpu")
    model.to(task.device).eval()
    if task.compile:
        cast_matrices(model, DTYPES[task.precision])
        return model
    quantize = "none" if precision == task.precision else precision
    prepare_inference(model, DTYPES[task.precision], quantize=quantize, rows=rows)
    return model


def matrix_parameters(model: Transformer, *, head: str) -> tuple[float, float]:
    """Parameters in matrix products of the stacks, which read every token, and of `head`, which reads few tokens."""
    parts = dict(product_flops(model, source_length=1, target_length=1))
    of_head = sum(flops for name, flops in parts.items() if name.startswith(HEADS + head))
    return sum(flops for name, flops in parts.items() if not name.startswith(HEADS)) / 2, of_head / 2


def parameters_by_side(model: Transformer) -> tuple[float, float]:
    """Parameters in products that read source tokens (also for the keys of cross-attention), and in the others."""
    of_source, of_both = (
        sum(flops for _, flops in product_flops(model, source_length=1, target_length=length)) / 2 for length in (0, 1)
    )
    return of_source, of_both - of_source


def _cached_bytes(recipe: Recipe, precision: str) -> int:
    """Bytes of one position's keys and values in all layers of the decoder, of self- or of cross-attention."""
    layers = layer_sizes(recipe.model, "decoder")
    width = sum(sizes.num_kv_heads * (sizes.head_dim + sizes.value_dim) for sizes in layers)
    return width * (4 if precision == "fp32" else 2)


def _attention_flops(model: Transformer, source_length: float, target_length: float) -> Counter[str]:
    """FLOPs of attention in the encoder and in the decoder, for one example."""
    found = Counter[str]()
    for name, flops in attention_flops(model, source_length=source_length, target_length=target_length):
        found[name.partition(".")[0]] += flops  # type: ignore[assignment]
    return found


class Decoding(Workload):
    """Base of generation and translation: --compile compiles the steps, and the ceiling is a product of many rows."""

    @staticmethod
    def product(task: BenchTask) -> tuple[int, int, int]:
        return (ROWS, *product_shape(task.recipe, task.length)[1:])

    @staticmethod
    def check_compiled_steps(task: BenchTask) -> None:
        """Raise InputError where --compile is given and decoding steps cannot be compiled."""
        if not task.compile:
            return
        if (reason := no_compiled_steps(task.model())) is not None:
            raise InputError(f"--compile: {reason}", hint="leave it out")
        require_compiler(task.device)

    def make_model(self, *, rows: int | None = None) -> Transformer:
        model = inference_model(self.task, self.precision, rows=rows)
        if self.task.compile:
            compile_decoding(model, DTYPES[self.task.precision])
        elif torch.device(self.task.device).type == "cuda" and no_compiled_steps(model) is None:
            record_decoding(model, DTYPES[self.task.precision])
        return model


class GenerationWorkload(Decoding):
    """Greedy decoding of one batch by `decoding.generate`, always the same number of tokens; no text is made."""

    step, batch_sizes = "token", (1,)

    @staticmethod
    def length(recipe: Recipe) -> int:
        return PROMPT_LENGTH

    @staticmethod
    def check(task: BenchTask) -> None:
        """Refuses a model that is not decoder-only, or reads too few positions."""
        recipe, length, new_tokens = task.recipe, task.length, task.options["new_tokens"]
        if recipe.model.decoder is None or recipe.model.encoder is not None:
            both = recipe.model.decoder is not None
            raise InputError(
                f"bench generate: {recipe.arch} has {'an encoder' if both else 'no decoder'}",
                hint="tformer bench translate" if both else "use a decoder-only model: --arch gpt or llama",
            )
        if length + new_tokens > recipe.model.max_seq_len:
            raise InputError(
                f"--prompt-length {length} and --new-tokens {new_tokens} are {length + new_tokens} positions, the "
                f"model reads {recipe.model.max_seq_len}"
            )
        Decoding.check_compiled_steps(task)

    @staticmethod
    def cost(task: BenchTask, precision: str) -> Cost:
        """Every step reads all matrices and the keys and values of all rows; the first step reads the prompts.

        The head reads one position per row and step, of a prompt the last.
        """
        new_tokens, model = task.options["new_tokens"], task.model()
        of_stack, of_head = matrix_parameters(model, head=HEAD)
        positions = task.length + new_tokens - 1  # of one row that pass through the model
        mean_length = task.length + (new_tokens - 1) / 2
        attention = _attention_flops(model, mean_length, mean_length)["decoder"] / mean_length
        weights = of_stack * WEIGHT_BYTES[precision] + of_head * HEAD_BYTES[precision]
        return Cost(
            flops=task.batch_size * (positions * (2.0 * of_stack + attention) + new_tokens * 2.0 * of_head),
            bytes_read=new_tokens * (weights + task.batch_size * mean_length * _cached_bytes(task.recipe, precision)),
            steps=new_tokens,
            examples=task.batch_size,
        )

    def prepare(self) -> None:
        task, new_tokens = self.task, self.task.options["new_tokens"]
        self._model = self.make_model(rows=task.batch_size)
        self._prompts = random_ids(task, task.batch_size, task.length).tolist()
        self._settings = GenerationSettings(max_new_tokens=new_tokens, min_new_tokens=new_tokens, temperature=0.0)

    def run(self) -> int:
        completions = generate(self._model, self._prompts, self._settings)
        synchronize(self.device)
        return sum(len(completion.ids) for row in completions for completion in row)


def sources_of(task: BenchTask) -> list[list[list[int]]]:
    """Ids of every source of a round, in batches: `sentences` of them, rounded up to whole batches."""
    count = task.batch_size * ceil(task.options["sentences"] / task.batch_size)
    ids: list[list[int]] = random_ids(task, count, task.length).tolist()
    return [ids[start : start + task.batch_size] for start in range(0, count, task.batch_size)]


class TranslationWorkload(Decoding):
    """Beam search as `Translator` runs it; every hypothesis gets the same length.

    The end of sequence is suppressed until the last token, so that all libraries write as many tokens.
    """

    step, batch_sizes = "decoding step", (16, 32, 64)
    arch = "transformer"

    @staticmethod
    def length(recipe: Recipe) -> int:
        return SOURCE_LENGTH

    @staticmethod
    def check(task: BenchTask) -> None:
        """Refuses a model that is no encoder-decoder, and sizes that do not fit it."""
        model, beam, new_tokens = task.recipe.model, task.options["beam_size"], task.options["new_tokens"]
        if model.encoder is None or model.decoder is None:
            raise InputError(
                f"bench translate: {task.recipe.arch} is not an encoder-decoder",
                hint="use --arch transformer, or tformer bench generate",
            )
        if model.target_vocab_size is not None:
            raise InputError(
                "bench translate: separate vocabularies of source and target cannot be benchmarked",
                hint="use a joint one",
            )
        if new_tokens > model.longest_target:
            raise InputError(f"--new-tokens: found {new_tokens}, the model writes {model.longest_target} at most")
        if model.vocab_size is not None and beam > model.vocab_size:
            raise InputError(f"--beam-size: found {beam}, the vocabulary has {model.vocab_size} tokens")
        Decoding.check_compiled_steps(task)

    @staticmethod
    def cost(task: BenchTask, precision: str) -> Cost:
        """Sources are read once, targets token by token in every hypothesis.

        Each step reads the decoder's matrices and the keys and values of every source and of every hypothesis so far
        (half of the final length on average).
        """
        beam, new_tokens, length = task.options["beam_size"], task.options["new_tokens"], task.length
        batches = ceil(task.options["sentences"] / task.batch_size)
        sentences, steps = batches * task.batch_size, batches * new_tokens
        model = task.model()
        by_source, by_target = parameters_by_side(model)
        attention = _attention_flops(model, length, new_tokens / 2)
        attention_source, attention_target = attention["encoder"], attention["decoder"] / (new_tokens / 2)
        rows = sentences * (1 + beam * (new_tokens - 1))  # the first step has one row for each sentence
        flops = 2.0 * (by_source * sentences * length + by_target * rows) + attention_source * sentences
        cache = _cached_bytes(task.recipe, precision) * task.batch_size * (length + beam * new_tokens / 2)
        return Cost(
            flops=flops + attention_target * rows,
            bytes_read=WEIGHT_BYTES[precision] * (by_source * batches + by_target * steps) + cache * steps,
            steps=steps,
            examples=sentences,
        )

    def prepare(self) -> None:
        new_tokens = self.task.options["new_tokens"]
        self._model = self.make_model()
        self._batches = sources_of(self.task)
        self._suppressed = suppressed_tokens(SPECIAL, TARGET, eos=TARGET.eos)
        self._settings = BeamSettings(
            beam_size=self.task.options["beam_size"],
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            eos_id=TARGET.eos,
        )

    def run(self) -> int:
        tokens = 0
        for sources in self._batches:
            starts = [TARGET.prefix] * len(sources)
            stepper = ModelStepper(self._model, starts, sources=sources, capacity=self._settings.max_new_tokens)
            found = beam_search(stepper, self._settings, suppressed=self._suppressed)
            tokens += sum(len(hypotheses[0].ids) for hypotheses in found)
        synchronize(self.device)
        return tokens
