"""Weight initialization; projections that share a matrix; embedding tables shared by two models.

    normal   weights N(0, std)                                                     GPT-2, BERT: std 0.02
    xavier   U(±sqrt(6 / (fan_in + fan_out))), each projection of a fused matrix separately    original Transformer
    scaled   U(±sqrt(3 / fan_in)): every product keeps unit variance               Muon recipes (nanochat)

Biases start at 0, gains at 1 (ScaleNorm √d). A projection into the residual stream is divided by √(number of such
projections in its stack), GPT-2's √(2 · layers), or starts at zero so that each block starts as the identity. Tables
that are summed at the input are N(0, embedding_std), those of relative positions N(0, std); the table of FixNorm is
U(±0.01) (arXiv 1910.05895: only directions matter), that of n-grams 0. The draws come from torch's global generator,
in the order of `model.modules()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tformer.nn.attention import Mechanism
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.embedding import TokenEmbedding
from tformer.nn.feedforward import FeedForward
from tformer.nn.heads import VocabularyHead
from tformer.nn.layer_norm import Norm
from tformer.nn.linear import Linear
from tformer.nn.ngrams import NgramEmbedding
from tformer.nn.options import require, require_positive
from tformer.nn.own_rows import RANDOM_FILLS
from tformer.nn.patches import PatchEmbedding
from tformer.nn.positions.base import Positions
from tformer.nn.stack import Stack
from tformer.nn.structured_dropout import LayerDrop


def hidden_matrices(model: nn.Module) -> dict[str, list[int]]:
    """{name of a parameter: row counts of the projections that share it} of the matrices that Muon trains.

    They are the matrices inside the stacks, and those of a stem's residual convolutions.
    """
    found = {f"{name}.weight": rows for name, _, rows in block_matrices(model)}
    stems = ((path, stem) for path, stem in model.named_modules() if isinstance(stem, PatchEmbedding))
    return found | {f"{path}.{name}": [count] for path, stem in stems for name, count in stem.hidden_matrices()}


def block_matrices(model: nn.Module) -> Iterator[tuple[str, Linear, list[int]]]:
    """(name, matrix, row counts of the projections that share it) of every product in the blocks of a model.

    Products of one input are fused; xavier initialization and Muon treat their parts separately.
    """
    for name, module in model.named_modules():
        if isinstance(module, FeedForward):
            rows = module.up.weight.shape[0]
            yield f"{name}.up", module.up, [rows // 2] * 2 if module.gated else [rows]
            yield f"{name}.down", module.down, [module.down.weight.shape[0]]
        elif isinstance(module, MultiHeadAttention):
            queries = module.num_heads * module.head_dim
            keys, values = module.num_kv_heads * module.head_dim, module.num_kv_heads * module.value_dim
            if module.is_cross:
                yield f"{name}.q", module.q, [queries]
                yield f"{name}.kv", module.kv, [keys, values]
            else:
                yield f"{name}.qkv", module.qkv, [queries, keys, values]
            yield f"{name}.out", module.out, [module.out.weight.shape[0]]


FIXNORM_BOUND = 0.01


def draw_matrix(weight: Tensor, options: InitOptions, *, parts: list[int] | None = None) -> None:
    """Fill a matrix [out, in]; `parts`: row counts of the projections that share it."""
    DRAWS[options.kind](weight, options, parts or [weight.shape[0]])


def _draw_normal(weight: Tensor, options: InitOptions, parts: list[int]) -> None:
    weight.normal_(0.0, options.std)


def _draw_scaled(weight: Tensor, options: InitOptions, parts: list[int]) -> None:
    bound = math.sqrt(3.0 / weight.shape[1])
    weight.uniform_(-bound, bound)


def _draw_xavier(weight: Tensor, options: InitOptions, parts: list[int]) -> None:
    for part in weight.split(parts):
        bound = math.sqrt(6.0 / (part.shape[0] + part.shape[1]))
        part.uniform_(-bound, bound)


DRAWS: dict[str, Callable[[Tensor, InitOptions, list[int]], None]] = {
    "normal": _draw_normal,
    "xavier": _draw_xavier,
    "scaled": _draw_scaled,
}


if TYPE_CHECKING:
    InitName = str
else:
    InitName = Literal[tuple(DRAWS)]


@dataclass(frozen=True)
class InitOptions:
    """Distribution of new weights.

    normal: N(0, std). xavier: uniform, fan-in + fan-out (the original). scaled: U(+-sqrt(3/fan_in)) (Muon recipes).
    """

    kind: InitName = "normal"
    std: float = 0.02  # standard deviation
    residual_scale: bool = True  # projections into the residual stream: std / sqrt(2 * num_layers), GPT-2
    zero_out: bool = False  # those projections start at zero instead
    embedding_std: float | None = None  # standard deviation of embeddings; null: std
    output_std: float | None = None  # an untied output projection; null: std; 0 allowed

    def __post_init__(self) -> None:
        require_positive(std=self.std, embedding_std=self.embedding_std)
        least = 0.0 if self.output_std is None else self.output_std
        require(least >= 0.0, f"output_std must be at least 0, found {self.output_std}")


@torch.no_grad()
def initialize(
    model: nn.Module, options: InitOptions, *, around: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext
) -> None:
    """Draw every parameter of `model`; `around` is entered for each module before its own parameters are drawn."""
    embedding_std = options.std if options.embedding_std is None else options.embedding_std
    output_std = options.std if options.output_std is None else options.output_std
    residual: dict[nn.Module, float] = {}  # what writes into a stream, with the factor that keeps the stream's variance
    for stack in model.modules():
        if isinstance(stack, Stack):
            functions = [each for block in stack.layers for each in (block.self_attention, block.cross_attention)]
            outputs = [each.out for each in functions if each is not None]
            outputs += [block.feedforward.down for block in stack.layers]
            residual |= dict.fromkeys(outputs, 1.0 / math.sqrt(len(outputs)))
    parts = {matrix: rows for _, matrix, rows in block_matrices(model)}
    for module in model.modules():
        with around(module):
            if isinstance(module, Linear):
                draw_matrix(module.weight, options, parts=parts.get(module))
                if module in residual:
                    module.weight.mul_(0.0 if options.zero_out else residual[module] if options.residual_scale else 1.0)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, Norm | LayerDrop):
                module.reset_parameters()
            elif isinstance(module, TokenEmbedding):
                if module.fixnorm:
                    module.weight.uniform_(-FIXNORM_BOUND, FIXNORM_BOUND)
                else:
                    module.weight.normal_(0.0, embedding_std)
                if module.token_types is not None:
                    module.token_types.normal_(0.0, embedding_std)
            elif isinstance(module, NgramEmbedding):
                module.weight.zero_()
            elif isinstance(module, PatchEmbedding):
                module.reset_parameters(partial(draw_matrix, options=options))
                if module.cls is not None:
                    module.cls.normal_(0.0, embedding_std)
            elif isinstance(module, Positions):
                for table in module.parameters(recurse=False):
                    table.normal_(0.0, embedding_std if module.has_embed else options.std)
            elif isinstance(module, Mechanism):
                module.reset_parameters(options.std)
            elif isinstance(module, VocabularyHead):
                if not module.is_tied:
                    module.weight.normal_(0.0, output_std)
                if module.bias is not None:
                    module.bias.zero_()


class NoDraws(TorchFunctionMode):
    """Skips random initialization: of weights to be loaded, and on the meta device, where it takes a second.

    A function mode, because a dispatch mode would load PyTorch's compiler.
    """

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        scales = func is Tensor.mul_ and isinstance(args[0], nn.Parameter)  # memory that nothing wrote to is not taken
        if func in RANDOM_FILLS or scales:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def tie_embeddings(follower: nn.Module, owner: nn.Module) -> dict[str, str]:
    """Share `owner`'s embedding tables with `follower`; returns {parameter name in `follower`: name in `owner`}.

    For ELECTRA (arXiv 2003.10555, section 3.2): the discriminator sees every token, so its tables learn from all of
    them. Shares the token table (with parameters tied to it, such as the output), token types and learned positions
    where both models have one of the same shape. Call it after the models are on their device.
    """
    owned = _tables(owner)
    tied: dict[str, str] = {}
    for table, parameter in _tables(follower).items():
        if table not in owned or owned[table].shape != parameter.shape:
            continue
        name_there = _names(owner, owned[table])[0]
        for name in _names(follower, parameter):
            module, _, attribute = name.rpartition(".")
            setattr(follower.get_submodule(module), attribute, owned[table])
            tied[name] = name_there
    return tied


def _tables(model: nn.Module) -> dict[str, nn.Parameter]:
    """The input tables of a model with one stack, by purpose."""
    tables: dict[str, nn.Parameter] = {}
    embedding = model.get_submodule("embedding")
    if isinstance(embedding, TokenEmbedding):
        tables["tokens"] = embedding.weight
        if embedding.token_types is not None:
            tables["token types"] = embedding.token_types
        if embedding.ngrams is not None:
            tables["n-grams"] = embedding.ngrams.weight
    for module in model.modules():
        if isinstance(module, Positions) and module.has_embed:
            for name, table in module.named_parameters(recurse=False):
                tables.setdefault(f"positions {name}", table)
    return tables


def _names(model: nn.Module, parameter: nn.Parameter) -> list[str]:
    return [name for name, found in model.named_parameters(remove_duplicate=False) if found is parameter]
