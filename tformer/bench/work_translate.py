"""`bench translate`: beam search of an encoder-decoder over random sources, every hypothesis of the same length.

The end of sequence is ruled out until the last token, so that all libraries write exactly the same number of tokens.
Sources are ids in memory, all of one length, in batches; a round is `sentences` of them.
"""

from __future__ import annotations

from math import ceil

from tformer.bench.inference import BYTES, check_compiled_steps, decoding_model
from tformer.bench.random_material import SPECIAL, random_ids
from tformer.bench.task import OURS, Cost, Task, Work, synchronise
from tformer.bench.work_generate import ROWS
from tformer.build import build_model, layer_sizes, resolve_sizes
from tformer.decoding.beam import beam_search
from tformer.decoding.beam_settings import BeamSettings
from tformer.decoding.stepper import EncoderDecoderStepper
from tformer.decoding.unwritten import unwritten_tokens
from tformer.errors import InputError
from tformer.model import Transformer
from tformer.nn.attention import Mechanism
from tformer.nn.positions.base import Positions
from tformer.recipe.recipe import Recipe
from tformer.tokenizer.special import decoder_tokens
from tformer.training.assemble import matmul_parameters
from tformer.training.flops import attention_flops_per_token
from tformer.training.prepare import product_shape

SOURCE_LENGTH = 20
TARGET = decoder_tokens(SPECIAL)
WEIGHT_BYTES = BYTES | {"int16": 2, "int8_bf16": 1, "int8_fp16": 1}  # ours, and other libraries' formats


def sources_of(task: Task) -> list[list[list[int]]]:
    """Ids of every source of a round, in batches: `sentences` of them, or what fills whole batches."""
    count = task.batch_size * ceil(task.options["sentences"] / task.batch_size)
    ids: list[list[int]] = random_ids(task, count, task.length).tolist()
    return [ids[start : start + task.batch_size] for start in range(0, count, task.batch_size)]


class Translating:
    """What `Translator` does between tokenising and writing down."""

    name = OURS

    def __init__(self, task: Task, precision: str) -> None:
        self.task, self.precision = task, precision

    def prepare(self) -> None:
        new_tokens = self.task.options["new_tokens"]
        self._model = decoding_model(self.task, self.precision)
        self._batches = sources_of(self.task)
        self._never = unwritten_tokens(SPECIAL, TARGET, eos=TARGET.eos)
        self._settings = BeamSettings(
            beam_size=self.task.options["beam"],
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            eos_id=TARGET.eos,
        )

    def run(self) -> int:
        tokens = 0
        for sources in self._batches:
            stepper = EncoderDecoderStepper(
                self._model,
                sources,
                [TARGET.prefix] * len(sources),
                capacity=self._settings.max_new_tokens,
            )
            found = beam_search(stepper, self._settings, never=self._never)
            tokens += sum(len(hypotheses[0].ids) for hypotheses in found)
        synchronise(self.task.device)
        return tokens


def check(task: Task) -> None:
    """Raise InputError for a model that does not translate, or not so."""
    model, beam, new_tokens = task.recipe.model, task.options["beam"], task.options["new_tokens"]
    if model.encoder is None or model.decoder is None:
        raise InputError(
            f"bench translate: {task.recipe.arch} is no encoder-decoder",
            hint="use --arch transformer, or tformer bench generate",
        )
    if model.target_vocab_size is not None:
        raise InputError("bench translate: a vocabulary of each side is not benched", hint="use a joint one")
    if new_tokens > model.max_seq_len:
        raise InputError(f"--new-tokens: found {new_tokens}, the model writes {model.max_seq_len} at most")
    if model.vocab_size is not None and beam > model.vocab_size:
        raise InputError(f"--beam: found {beam}, the vocabulary has {model.vocab_size} tokens")
    check_compiled_steps(task)


def cost(task: Task, precision: str) -> Cost:
    """Sources are read once, targets token by token in every hypothesis; each step reads the decoder's matrices, the
    keys and values of every source and of every hypothesis so far (half of the final length on average)."""
    beam, new_tokens, length = task.options["beam"], task.options["new_tokens"], task.length
    batches = ceil(task.options["sentences"] / task.batch_size)
    sentences = batches * task.batch_size
    model = build_model(task.recipe.model, device="meta")
    by_source, by_target = parameters_by_side(model, task.recipe)
    attention_source, attention_target = _attention_flops(task.recipe, length, new_tokens)
    rows = sentences * (1 + beam * (new_tokens - 1))  # the first step has one row for each sentence
    flops = 2.0 * (by_source * sentences * length + by_target * rows) + attention_source * sentences
    weights = WEIGHT_BYTES[precision]
    numbers = 4 if precision == "fp32" else 2  # bytes of a key's or value's number
    cache = numbers * _cached_width(task.recipe) * task.batch_size * (length + beam * new_tokens / 2)
    steps = batches * new_tokens
    return Cost(
        flops=flops + attention_target * rows,
        bytes_read=weights * (by_source * batches + by_target * steps) + cache * steps,
        steps=steps,
        examples=sentences,
    )


def parameters_by_side(model: Transformer, recipe: Recipe) -> tuple[int, int]:
    """Parameters in products whose rows are the source's tokens, and the others.

    The first are the encoder's and the key and value projections of cross-attention.
    """
    assert model.encoder is not None
    tables = {id(p) for m in model.encoder.modules() if isinstance(m, Positions | Mechanism) for p in m.parameters()}
    of_encoder = sum(p.numel() for p in model.encoder.parameters() if p.ndim >= 2 and id(p) not in tables)
    by_source = of_encoder + _cached_width(recipe) * resolve_sizes(recipe.model, "encoder").d_model
    return by_source, matmul_parameters(model) - by_source


def _cached_width(recipe: Recipe) -> int:
    """Numbers of a position's keys and values in all layers of the decoder, of self- or of cross-attention."""
    layers = layer_sizes(recipe.model, "decoder")
    return sum(sizes.num_kv_heads * (sizes.head_dim + sizes.value_dim) for sizes in layers)


def _attention_flops(recipe: Recipe, length: int, new_tokens: int) -> tuple[float, float]:
    """Of one source in the encoder, and of one token of a hypothesis of half the final length."""
    half = new_tokens / 2
    both = attention_flops_per_token(recipe.model, source_length=length, target_length=half) * (length + half)
    source = attention_flops_per_token(recipe.model, source_length=length, target_length=0.0) * length
    return source, (both - source) / half


def product(task: Task) -> tuple[int, int, int]:
    """The feed-forward product of many rows."""
    return (ROWS, *product_shape(task.recipe, task.length)[1:])


TRANSLATE = Work(
    "translate",
    "decoding step",
    Translating,
    (16, 32, 64),
    lambda _: SOURCE_LENGTH,
    cost,
    product,
    arch="transformer",
    check=check,
)
