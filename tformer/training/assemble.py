"""The parts of a training, built from a recipe and its data: models, objective, optimizer, schedule, batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from tformer.build import add_adapters, build_model
from tformer.data.batching.batch import Batch, Share
from tformer.data.batching.mixture import Samples
from tformer.data.batching.padding import padded_lengths
from tformer.data.batching.plan import BatchPlan, Cursor, Prefetcher
from tformer.data.batching.subwords import SampledSubwords
from tformer.data.shards.array_files import BackgroundCheck
from tformer.model import Transformer
from tformer.nn.init import hidden_matrices, tie_embeddings
from tformer.nn.layer_norm import Norm
from tformer.nn.own_rows import NoRows, OwnRows
from tformer.nn.stack import Block, Stack
from tformer.objectives import build_objective
from tformer.objectives.base import Objective, ObjectiveContext
from tformer.optim.ema import Ema
from tformer.optim.optimizers import NamedOptimizer, OptimizerSettings, build_optimizer
from tformer.optim.shards import Shards, local
from tformer.recipe.recipe import Recipe
from tformer.support.device import has_bf16_instructions
from tformer.support.errors import InputError
from tformer.tasks.base import TrainingData
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.segmentation import segmenter_of

Result = TypeVar("Result")


class PlannedBatches:
    """The batches of a run from `cursor` on (None: from the start), for process `rank` of `world_size`.

    Micro-batches are cut as in one process; each process has some rows of every one (`Share`). On a GPU a thread
    prepares batches ahead, in page-locked memory. As a context manager it also checks the token files meanwhile.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: TrainingData,
        objective: Objective,
        *,
        cursor: dict[str, Any] | None,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
        check: BackgroundCheck | None = None,
    ) -> None:
        self._check = BackgroundCheck(()) if check is None else check
        self._recipe, self._objective, self._pinned = recipe, objective, device.type == "cuda"
        samples: Any = data.samples
        self._read: Callable[[int, Any], Any] = samples.windows if data.packed else samples.examples
        if recipe.data.subword_sampling:
            self._read = sampled_subwords(recipe, data)
        self._rank, self._world_size = rank, world_size
        self._plan = plan_of(recipe, samples)
        self._next = self._plan.resumed(Cursor.from_json(cursor)) if cursor else Cursor()
        self._source: Iterator[tuple[Cursor, list[Batch]]] = self._produce(self._next)
        if self._pinned:
            self._source = Prefetcher(self._source, depth=3)

    def next(self) -> Sequence[Batch]:
        """This process's part of the micro-batches of the next global batch. Raises InputError for damaged data."""
        self._check.raise_if_damaged()
        self._next, batches = next(self._source)
        return batches

    def next_samples(self) -> Any:
        """The samples of the next global batch's first micro-batch, as the objective gets them."""
        return self._read(self._next.epoch, next(self._micro_batches(self._next)))

    def cursor(self) -> dict[str, Any]:
        return self._next.to_json()

    def __enter__(self) -> PlannedBatches:
        self._check.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
        self._check.__exit__(*error)

    def close(self) -> None:
        """Stop the thread that prepares batches."""
        if isinstance(self._source, Prefetcher):
            self._source.close()

    def _produce(self, cursor: Cursor) -> Iterator[tuple[Cursor, list[Batch]]]:
        while True:
            # Corruption and random padding depend on the place of the batch, never on earlier draws.
            draw = np.random.default_rng([self._recipe.seed, cursor.epoch, cursor.window, cursor.batch])
            batches = [self._collated(cursor.epoch, ids, draw) for ids in self._micro_batches(cursor)]
            cursor = self._plan.next(cursor)
            yield cursor, [batch.pin_memory() for batch in batches] if self._pinned else batches

    def _collated(self, epoch: int, ids: np.ndarray, draw: np.random.Generator) -> Batch:
        """This process's rows of a micro-batch of samples. All processes draw the same numbers for all rows."""
        collate = self._objective.collate
        if self._world_size == 1:
            return collate(self._read(epoch, ids), rng=draw)
        share = Share.of(len(ids), rank=self._rank, world_size=self._world_size)
        if self._objective.collates_at_random:
            return collate(self._read(epoch, ids), rng=draw).shared(share)
        return replace(collate(self._read(epoch, ids[share.rows]), rng=draw), share=share)

    def _micro_batches(self, cursor: Cursor) -> Iterator[np.ndarray]:
        """The numbers of the samples of each micro-batch of a global batch."""
        ids = np.array(self._plan.global_batch(cursor), dtype=np.int64)
        size = -(-len(ids) // self._recipe.training.grad_accum)
        for start in range(0, len(ids), size):
            yield ids[start : start + size]


def plan_of(recipe: Recipe, samples: Samples) -> BatchPlan:
    """The plan of global batches: the samples of each.

    A global batch holds `batch_size * grad_accum` samples, cut into `grad_accum` micro-batches.
    """
    training = recipe.training
    return BatchPlan(
        seed=recipe.seed,
        num_samples=len(samples),
        lengths=samples.seq_len if samples.lengths is None else padded_lengths(samples.lengths),
        batch_size=None if training.batch_size is None else training.batch_size * training.grad_accum,
        batch_tokens=None if training.batch_tokens is None else training.batch_tokens * training.grad_accum,
        sort_window=recipe.data.sort_window,
    )


def sampled_subwords(recipe: Recipe, data: TrainingData) -> SampledSubwords:
    """The samples with segmentations drawn in each epoch. Raises InputError for a tokenizer that has only one."""
    assert data.tokenizer is not None
    rate, samples = recipe.data.subword_sampling, data.samples
    source = segmenter_of(data.tokenizer, rate)
    target = source if data.target_tokenizer is None else segmenter_of(data.target_tokenizer, rate)
    decoder = data.context.target
    room = recipe.target_seq_len - (decoder is not None and decoder.forced_bos is not None)
    return SampledSubwords(
        samples.examples, seed=recipe.seed, source=source, target=target, longest=(samples.seq_len, room)
    )


GENERATOR = "generator."
"""Prefix of the names of the generator's parameters in the optimizer state."""


def vocabulary_size(rows: int | None, tokenizer: Tokenizer, *, key: str = "vocab_size") -> int:
    """Rows of an embedding: as in the recipe, else as many as the tokenizer has ids.

    Raises InputError for a tokenizer with more ids than rows.
    """
    if rows is None:
        return tokenizer.vocab_size
    if tokenizer.vocab_size > rows:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} ids but model.{key} is {rows}",
            hint=f"leave model.{key} out, or train a smaller tokenizer",
        )
    return rows


class TrainedModels(nn.Module):
    """The trained models as one module: the main model, and ELECTRA's generator beside it."""

    def __init__(self, main: Transformer, generator: Transformer | None = None) -> None:
        super().__init__()
        self.main, self.generator = main, generator

    def forward(self, function: Callable[[], Result]) -> Result:
        """`function()`, which runs these models: with several processes the engine synchronizes what runs in here."""
        return function()

    @property
    def stacks(self) -> list[Stack]:
        return [stack for model in self.all for stack in (model.encoder, model.decoder) if stack is not None]

    @property
    def blocks(self) -> list[Block]:
        """The layers of all stacks; layers that share their weights appear once."""
        return list(dict.fromkeys(block for stack in self.stacks for block in stack.layers))

    @property
    def all(self) -> tuple[Transformer, ...]:
        return (self.main,) if self.generator is None else (self.main, self.generator)

    def skips_parameters(self, objective: Objective) -> bool:
        """Whether a step may leave parameters without a gradient: layers that are skipped, heads that are not used."""
        heads = sum(len(model.heads) for model in self.all)
        return heads > len(objective.heads) or any(stack.layerdrop is not None for stack in self.stacks)

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter), each once; names of the generator have the prefix `generator.`."""
        yield from self.main.named_parameters()
        if self.generator is not None:
            shared = {id(parameter) for parameter in self.main.parameters()}
            for name, parameter in self.generator.named_parameters():
                if id(parameter) not in shared:
                    yield f"{GENERATOR}{name}", parameter


def make_models(
    recipe: Recipe, device: torch.device, *, dtype: torch.dtype, rows: OwnRows | None = None
) -> TrainedModels:
    """Models with random weights from the recipe's seed, drawn on the CPU so that they are equal on every device.

    On the meta device they have shapes only, and nothing is drawn. With `rows`, of `Parallel.own_rows`, they have
    shapes until `Parallel.shard`; beside adapters, until the base is read (`training.adapters`).
    """
    torch.manual_seed(recipe.seed)
    if recipe.lora is not None and device.type != "meta":
        rows = NoRows()
    labels = len(recipe.data.labels) or None
    maker = "meta" if device.type == "meta" else "cpu"
    main = build_model(recipe.model, num_labels=labels, device=maker, rows=rows)
    generator = None if recipe.generator is None else build_model(recipe.generator, device=maker, rows=rows)
    models = TrainedModels(main, generator)
    for stack in models.stacks:
        stack.checkpointing = recipe.training.activation_checkpointing
    for model in models.all:
        model.compute_dtype = dtype
        if rows is None:
            model.to(device)
    if recipe.lora is not None:
        with torch.device(maker):
            add_adapters(main, recipe.model, recipe.lora)
    if generator is not None and "embedding.weight" not in tie_embeddings(generator, main):
        raise InputError(
            "generator: it must share the token table of the model, but its rows have another size",
            hint="set generator.embedding.size to the width of the model's table",
        )
    return models


def require_separate_rows(models: TrainedModels, world_size: int) -> None:
    """Raise InputError for several processes and a model whose output of a row depends on other rows."""
    if world_size == 1:
        return
    for model in models.all:
        for name, module in model.named_modules():
            if isinstance(module, Norm) and module.mixes_rows:
                kind = type(module).__name__.lower()
                raise InputError(
                    f"norm.kind {kind} ({name}) normalizes over the rows of a batch, which {world_size} processes "
                    f"would split: expected one process",
                    hint="train in one process, or with another norm, such as --set model.decoder.norm.kind=layernorm",
                )


def make_objective(recipe: Recipe, context: ObjectiveContext, models: TrainedModels | None = None) -> Objective:
    """The recipe's objective; without `models`, one that makes batches but has no generator to run."""
    generator = None if models is None else models.generator
    return build_objective(recipe.objectives, replace(context, generator=generator))


def muon_dtype(compute_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Number format of Muon's iteration: bf16 where the device has such products, but fp32 for a training in fp32.

    In bf16 it magnifies the rounding of gradients, so several processes would not train as one.
    """
    has_products = device.type == "cuda" or has_bf16_instructions()
    return torch.bfloat16 if has_products and compute_dtype != torch.float32 else torch.float32


def make_optimizer(
    recipe: Recipe, models: TrainedModels, device: torch.device, shards: Shards | None = None
) -> NamedOptimizer:
    """The optimizer of a recipe, keyed by parameter name.

    shards: of models whose parameters are spread over processes, see `Parallel.shard`.
    """
    options = recipe.optimizer
    rows = hidden_matrices(models.main)
    if models.generator is not None:
        rows |= {f"{GENERATOR}{name}": parts for name, parts in hidden_matrices(models.generator).items()}
    layers = [stack.num_layers for stack in (recipe.model.encoder, recipe.model.decoder) if stack is not None]
    return build_optimizer(
        models.trained_parameters(),
        OptimizerSettings(
            kind=options.kind,
            lr=options.lr,
            adam_lr=options.adam_lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
            momentum=options.momentum,
            groups=options.groups,
            layer_decay=options.layer_decay,
            layer_of=layer_of,
            num_layers=max(layers),
            hidden_matrices=lambda name, parameter: name in rows and parameter.ndim == 2,
            splits=rows.get,
            muon_dtype=muon_dtype(models.main.compute_dtype, device),
            device=device,
            shards=shards,
        ),
    )


def make_ema(recipe: Recipe, models: TrainedModels, shards: Shards | None = None) -> Ema | None:
    """Averages of the main model's weights; None without `ema_decay`. With shards, averages of this process's rows."""
    if recipe.training.ema_decay is None:
        return None
    parameters = [(name, each) for name, each in models.main.named_parameters() if name not in models.main.base_names]
    own = parameters if shards is None else ((name, nn.Parameter(local(each))) for name, each in parameters)
    return Ema(own, decay=recipe.training.ema_decay)


def layer_of(name: str) -> int | None:
    """Depth for layer-wise decay: 0 for embeddings and positions, i + 1 for block i, None for heads and final norms."""
    parts = name.removeprefix(GENERATOR).split(".")
    if len(parts) > 2 and parts[1] == "blocks":
        return int(parts[2]) + 1
    is_input = parts[0] in ("embedding", "decoder_embedding") or (len(parts) > 1 and "positions" in parts[1])
    return 0 if is_input else None


def compiled(model: Transformer, *, wanted: bool, dynamic: bool = False) -> nn.Module:
    """The module to call in training, compiled if wanted. Checkpoints hold `model` itself.

    dynamic: compile once for batches of all shapes, not once for each shape.
    """
    if not wanted:
        return model
    forward: nn.Module = torch.compile(model, dynamic=dynamic)  # type: ignore[assignment]
    return forward
