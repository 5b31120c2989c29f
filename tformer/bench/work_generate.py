"""`bench generate`: random prompts continued by a fixed number of tokens, greedily, through `decoding.generate`.

No token ends a text and none is made into text: what is timed is reading the prompts and the steps after them.
"""

from __future__ import annotations

from tformer.bench.inference import BYTES, check_compiled_steps, decoding_model, matrix_parameters
from tformer.bench.random_material import random_ids
from tformer.bench.task import OURS, Cost, Task, Work, synchronise
from tformer.build import layer_sizes
from tformer.decoding.generate import generate
from tformer.decoding.settings import GenerationSettings
from tformer.errors import InputError
from tformer.training.flops import attention_flops_per_token
from tformer.training.prepare import product_shape

HEAD = "lm"
PROMPT_LENGTH = 16
ROWS = 4096  # of the product whose rate is the ceiling: with few rows it would be memory's


class Generation:
    """Greedy completions of one batch."""

    name = OURS

    def __init__(self, task: Task, precision: str) -> None:
        self.task, self.precision = task, precision

    def prepare(self) -> None:
        task = self.task
        self._model = decoding_model(task, self.precision, rows=task.batch_size)
        self._prompts = random_ids(task, task.batch_size, task.length).tolist()
        new_tokens = task.options["new_tokens"]
        self._settings = GenerationSettings(max_new_tokens=new_tokens, min_new_tokens=new_tokens, temperature=0.0)

    def run(self) -> int:
        completions = generate(self._model, self._prompts, self._settings)
        synchronise(self.task.device)
        return sum(len(one.ids) for row in completions for one in row)


def check(task: Task) -> None:
    """Raise InputError for a model that does not generate, or for more tokens than it reads."""
    recipe, length, new_tokens = task.recipe, task.length, task.options["new_tokens"]
    if recipe.model.decoder is None or recipe.model.encoder is not None:
        both = recipe.model.decoder is not None
        raise InputError(
            f"bench generate: {recipe.arch} has {'an encoder' if both else 'no decoder'}",
            hint="tformer bench translate" if both else "use a decoder-only model: --arch gpt or llama",
        )
    if length + new_tokens > recipe.model.max_seq_len:
        raise InputError(
            f"--prompt-length {length} and --new-tokens {new_tokens} are {length + new_tokens} positions, the model "
            f"reads {recipe.model.max_seq_len}"
        )
    check_compiled_steps(task)


def cost(task: Task, precision: str) -> Cost:
    """Every step reads all matrices and the keys and values of all rows; the first reads the prompts.

    The head reads one position of a row at each step, of a prompt the last.
    """
    new_tokens, (of_stack, of_head) = task.options["new_tokens"], matrix_parameters(task, head=HEAD)
    positions = task.length + new_tokens - 1  # that one row passes through the model
    mean_length = task.length + (new_tokens - 1) / 2
    attention = attention_flops_per_token(task.recipe.model, source_length=mean_length, target_length=mean_length)
    layers = layer_sizes(task.recipe.model, "decoder")
    cached = sum(sizes.num_kv_heads * (sizes.head_dim + sizes.value_dim) for sizes in layers)
    cache_bytes = BYTES["bf16" if precision == "int8" else precision]
    return Cost(
        flops=task.batch_size * (positions * (2.0 * of_stack + attention) + new_tokens * 2.0 * of_head),
        bytes_read=new_tokens
        * (float((of_stack + of_head) * BYTES[precision]) + task.batch_size * mean_length * cached * cache_bytes),
        steps=new_tokens,
        examples=task.batch_size,
    )


def product(task: Task) -> tuple[int, int, int]:
    """The feed-forward product of many rows."""
    return (ROWS, *product_shape(task.recipe, task.length)[1:])


GENERATE = Work("generate", "token", Generation, (1,), lambda _: PROMPT_LENGTH, cost, product, check=check)
