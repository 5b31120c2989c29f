"""Models of transformers in the sizes of a recipe, with random weights: GPT-2 and BERT, what most people compare with.

Layers, width, heads, inner width, vocabulary, positions, dropout and tying are the recipe's; the rest is the library's.
"""

from __future__ import annotations

from typing import Any

from tformer.bench.workloads import Task
from tformer.build import resolve_sizes
from tformer.errors import InputError
from tformer.recipe.model import Stack

QUIET = 40  # logging's ERROR: a library's advice is no part of a measurement


def gpt2(task: Task) -> Any:
    """`GPT2LMHeadModel`. Raises InputError for a recipe with an encoder."""
    from transformers import GPT2Config, GPT2LMHeadModel

    quiet()
    model = task.recipe.model
    stack = _stack(task, "decoder", without="encoder")
    make_config: Any = GPT2Config
    config = make_config(
        vocab_size=model.vocab_size,
        n_positions=model.max_seq_len,
        n_embd=model.d_model,
        n_layer=stack.num_layers,
        n_head=stack.num_heads,
        n_inner=_inner(stack, model.d_model),
        resid_pdrop=stack.dropout,
        embd_pdrop=model.embedding.dropout,
        attn_pdrop=stack.attention_dropout,
        tie_word_embeddings=model.tie.output,
        attn_implementation="sdpa",
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config)


def bert_for_masked_lm(task: Task) -> Any:
    """`BertForMaskedLM`. Raises InputError for a recipe with a decoder."""
    from transformers import BertForMaskedLM

    return BertForMaskedLM(_bert_config(task))


def bert_for_classification(task: Task) -> Any:
    """`BertForSequenceClassification` with two labels. Raises InputError for a recipe with a decoder."""
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(_bert_config(task))


def _bert_config(task: Task) -> Any:
    from transformers import BertConfig

    quiet()
    model = task.recipe.model
    stack = _stack(task, "encoder", without="decoder")
    make_config: Any = BertConfig
    return make_config(
        vocab_size=model.vocab_size,
        max_position_embeddings=model.max_seq_len,
        hidden_size=model.d_model,
        num_hidden_layers=stack.num_layers,
        num_attention_heads=stack.num_heads,
        intermediate_size=_inner(stack, model.d_model),
        hidden_dropout_prob=stack.dropout,
        attention_probs_dropout_prob=stack.attention_dropout,
        tie_word_embeddings=model.tie.output,
        attn_implementation="sdpa",
        pad_token_id=0,
    )


def _stack(task: Task, side: str, *, without: str) -> Stack:
    """The only stack of the recipe, whose sizes are the library's kind."""
    model = task.recipe.model
    stack: Stack | None = getattr(model, side)
    if stack is None or getattr(model, without) is not None:
        raise InputError(f"--peer transformers: it does no {task.work} here of a model with a {without}")
    sizes = resolve_sizes(model, side)
    if sizes.num_heads * sizes.head_dim != model.d_model:
        raise InputError(f"--peer transformers: its heads fill the width {model.d_model}, these do not")
    if stack.feedforward.gated or sizes.num_kv_heads != sizes.num_heads:
        raise InputError("--peer transformers: GPT-2 and BERT have no gates and no shared key heads, this model has")
    return stack


def _inner(stack: Stack, d_model: int) -> int:
    return stack.feedforward.hidden_size(d_model)


def quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity(QUIET)
    logging.disable_progress_bar()
