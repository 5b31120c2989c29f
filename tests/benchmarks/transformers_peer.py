"""Hugging Face transformers: training, generation, translation, classification, attention.

Models get layers, width, heads, inner width, vocabulary, positions, dropout and tying from the recipe, and random
weights; the rest is the library's. Attention is PyTorch's fused one (`sdpa`) but where `eager` is measured.

Shape legend: B batch, T positions, H heads, K heads of keys and values, h head_dim.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.benchmarks.classification import Texts
from tformer.bench.workloads import SEED, BenchTask, Contender, synchronize
from tformer.bench.workloads.decoding import sources_of
from tformer.bench.workloads.train import NUM_BATCHES, SPECIAL, STEPS, WARM_UP_STEPS, random_ids
from tformer.build import resolve_sizes
from tformer.nn.attention import AttentionSizes, FullAttentionOptions, Mechanism
from tformer.nn.attention.context import AttentionInputs
from tformer.recipe.model import Stack
from tformer.support.device import DTYPES
from tformer.support.errors import InputError

LOG_LEVEL_ERROR = 40
MASKED_SHARE = 0.15
ATTENTION_FUNCTIONS = {
    "eager": ("transformers.models.llama.modeling_llama", "eager_attention_forward"),
    "sdpa": ("transformers.integrations.sdpa_attention", "sdpa_attention_forward"),
}
"""Module and name of the function that a model calls for each implementation."""


class Training(Contender):
    """The usual training loop: fp32 or bf16 autocast, fused AdamW, clipping.

    The model is GPT-2 for a decoder, BERT's masked language model for an encoder.
    """

    name = "transformers"

    def prepare(self) -> None:
        task, causal = self.task, self.task.recipe.model.encoder is None
        torch.manual_seed(SEED)
        model = gpt2(task) if causal else bert(task, "BertForMaskedLM")
        self._model: Any = model.to(self.device).train()
        self._batches = []
        all_ids = torch.from_numpy(random_ids(task, NUM_BATCHES * task.batch_size, task.length))
        for ids in all_ids.split(task.batch_size):
            labels = ids if causal else ids.masked_fill(torch.rand(ids.shape) > MASKED_SHARE, -100)
            self._batches.append({"input_ids": ids.to(self.device), "labels": labels.to(self.device)})
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._done = 0
        self._train(WARM_UP_STEPS)

    def run(self) -> int:
        steps = STEPS[self.device.type]
        self._train(steps)
        return steps * self.task.batch_size * self.task.length

    def _train(self, steps: int) -> None:
        clip = self.task.recipe.optimizer.clip_grad_norm
        for _ in range(steps):
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision != "fp32"):
                loss = self._model(**self._batches[self._done % NUM_BATCHES]).loss
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(self._model.parameters(), clip, foreach=True)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            self._done += 1
        synchronize(self.device)


class Inference(Contender):
    """Base of what runs a model without gradients; bf16: the whole model is cast to it."""

    name = "transformers"

    def place(self, make: Callable[[BenchTask], Any]) -> Any:
        torch.manual_seed(SEED)
        return make(self.task).to(self.device, DTYPES[self.precision]).eval()


class Generation(Inference):
    """`generate` with GPT-2: greedy, with the cache, the same number of tokens for every row."""

    def prepare(self) -> None:
        task = self.task
        self._model = self.place(gpt2)
        self._model.generation_config.eos_token_id = None  # no token ends a text early
        self._ids = torch.from_numpy(random_ids(task, task.batch_size, task.length)).to(self.device)
        self._mask = torch.ones_like(self._ids)

    def run(self) -> int:
        with torch.inference_mode():
            out = self._model.generate(
                self._ids,
                attention_mask=self._mask,
                do_sample=False,
                max_new_tokens=self.task.options["new_tokens"],
                use_cache=True,
            )
        synchronize(self.device)
        return int(out.shape[0] * (out.shape[1] - self.task.length))


class Translation(Inference):
    """Beam search with a Marian model: `generate` with a cache, batches in order."""

    def prepare(self) -> None:
        self._model = self.place(marian)
        self._batches = [torch.tensor(rows, device=self.device) for rows in sources_of(self.task)]

    def run(self) -> int:
        new_tokens, tokens = self.task.options["new_tokens"], 0
        for ids in self._batches:
            with torch.inference_mode():
                found = self._model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    num_beams=self.task.options["beam_size"],
                    min_new_tokens=new_tokens,
                    max_new_tokens=new_tokens,
                    do_sample=False,
                    early_stopping=True,
                )
            tokens += found.shape[0] * (found.shape[1] - 1)  # without the start token
        synchronize(self.device)
        return tokens


class Classification(Inference):
    """BERT on all texts, `batch_size` at a time in the given order, each batch padded to its longest text."""

    def prepare(self) -> None:
        self._model = self.place(lambda task: bert(task, "BertForSequenceClassification"))
        self._texts = Texts(self.task)

    def run(self) -> int:
        scores: list[Tensor] = []
        with torch.inference_mode():
            for start in range(0, len(self._texts), self.task.batch_size):
                indices = np.arange(start, min(start + self.task.batch_size, len(self._texts)))
                rows = [example.ids for example in self._texts.examples(0, indices)]
                lengths = np.array(list(map(len, rows)))
                mask = np.arange(lengths.max()) < lengths[:, None]
                ids = np.zeros(mask.shape, dtype=np.int64)
                ids[mask] = np.concatenate(rows)
                inputs = {"input_ids": ids, "attention_mask": mask.astype(np.int64)}
                on_device = {name: torch.from_numpy(array).to(self.device) for name, array in inputs.items()}
                scores.append(self._model(**on_device).logits.float())
        torch.cat(scores).cpu()
        synchronize(self.device)
        return self._texts.tokens


class Attention(Mechanism):
    """The attention function of the library's models: `eager` or `sdpa`."""

    def __init__(self, sizes: AttentionSizes, implementation: str) -> None:
        super().__init__(FullAttentionOptions(), sizes)
        self.num_key_value_groups = sizes.num_heads // sizes.num_kv_heads  # the library reads these two
        self.is_causal = sizes.causal
        module, name = ATTENTION_FUNCTIONS[implementation]
        self._attend = getattr(importlib.import_module(module), name)
        self._needs_mask = sizes.causal and implementation == "eager"
        self._mask: Tensor | None = None

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        q_BHTh, k_BKTh, v_BKTh = inputs[:3]
        if self._needs_mask and (self._mask is None or self._mask.shape[-1] != q_BHTh.shape[2]):
            length, least = q_BHTh.shape[2], torch.finfo(q_BHTh.dtype).min
            full = torch.full((length, length), least, dtype=q_BHTh.dtype, device=q_BHTh.device)
            self._mask = full.triu_(1)[None, None]
        out_BTHh, _ = self._attend(self, q_BHTh, k_BKTh, v_BKTh, self._mask, scaling=self.scale, dropout=0.0)
        return out_BTHh.transpose(1, 2), None


def gpt2(task: BenchTask) -> Any:
    """`GPT2LMHeadModel`. Raises InputError for a recipe with an encoder."""
    from transformers import GPT2Config, GPT2LMHeadModel

    _silence_logging()
    model = task.recipe.model
    stack = _only_stack(task, "decoder", without="encoder")
    make_config: Any = GPT2Config
    config = make_config(
        vocab_size=model.vocab_size,
        n_positions=model.max_seq_len,
        n_embd=model.d_model,
        n_layer=stack.num_layers,
        n_head=stack.num_heads,
        n_inner=stack.feedforward.hidden_size(model.d_model),
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


def bert(task: BenchTask, class_name: str) -> Any:
    """A BERT class of the library (two labels). Raises InputError for a recipe with a decoder."""
    import transformers

    _silence_logging()
    model = task.recipe.model
    stack = _only_stack(task, "encoder", without="decoder")
    make_config: Any = transformers.BertConfig
    config = make_config(
        vocab_size=model.vocab_size,
        max_position_embeddings=model.max_seq_len,
        hidden_size=model.d_model,
        num_hidden_layers=stack.num_layers,
        num_attention_heads=stack.num_heads,
        intermediate_size=stack.feedforward.hidden_size(model.d_model),
        hidden_dropout_prob=stack.dropout,
        attention_probs_dropout_prob=stack.attention_dropout,
        tie_word_embeddings=model.tie.output,
        attn_implementation="sdpa",
        pad_token_id=0,
    )
    return getattr(transformers, class_name)(config)


def marian(task: BenchTask) -> Any:
    """`MarianMTModel`: post-norm, sinusoids, one table of embeddings for both sides and the output."""
    from transformers import MarianConfig, MarianMTModel

    _silence_logging()
    model = task.recipe.model
    encoder, decoder = model.encoder, model.decoder
    assert encoder is not None and decoder is not None
    sizes: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "d_model": model.d_model,
        "encoder_layers": encoder.num_layers,
        "decoder_layers": decoder.num_layers,
        "encoder_attention_heads": encoder.num_heads,
        "decoder_attention_heads": decoder.num_heads,
        "encoder_ffn_dim": encoder.feedforward.hidden_size(model.d_model),
        "decoder_ffn_dim": decoder.feedforward.hidden_size(model.d_model),
        "max_position_embeddings": model.max_seq_len + 1,  # the start token is read beside the longest target
        "activation_function": "relu",
        "scale_embedding": model.embedding.scale,
        "attn_implementation": "sdpa",
        "pad_token_id": SPECIAL.pad,
        "bos_token_id": SPECIAL.bos,
        "eos_token_id": SPECIAL.eos,
        "forced_eos_token_id": None,
        "decoder_start_token_id": SPECIAL.bos,
    }
    return MarianMTModel(MarianConfig(**sizes))


def _only_stack(task: BenchTask, side: str, *, without: str) -> Stack:
    """The recipe's only stack. Raises InputError where GPT-2 or BERT cannot have its sizes."""
    model = task.recipe.model
    stack: Stack | None = getattr(model, side)
    if stack is None or getattr(model, without) is not None:
        raise InputError(f"--peer transformers: no {task.work} by it here of a model with a {without}")
    sizes = resolve_sizes(model, side)
    if sizes.num_heads * sizes.head_dim != model.d_model:
        raise InputError(f"--peer transformers: its heads always fill the width {model.d_model}, this model's do not")
    if stack.feedforward.gated or sizes.num_kv_heads != sizes.num_heads:
        raise InputError("--peer transformers: GPT-2 and BERT have no gates and no shared key heads, this model has")
    return stack


def _silence_logging() -> None:
    from transformers.utils import logging

    logging.set_verbosity(LOG_LEVEL_ERROR)
    logging.disable_progress_bar()
