"""Low-rank adapters beside frozen matrices: LoRA (arXiv 2106.09685), also over a rounded matrix (QLoRA, 2305.14314).

    y = W x + s B A dropout(x),   s = alpha / rank, or alpha / sqrt(rank) (rsLoRA, 2312.03732)
    y = m (W + s B A) x / |W + s B A|,   row by row (DoRA, 2402.09353; the norm counts as constant in the gradient)

A starts as U(+-1/sqrt(in)), B as zeros and m as |W|, so that training starts from the base. A matrix of several
projections, such as q, k and v, has an adapter for each: they are the adapters of the separate projections.

Shape legend: * leading dimensions, O out_features, D in_features, P projections with an adapter, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tformer.kernels.functions import GROUP, Kernels
from tformer.nn.dropout import dropout
from tformer.nn.embedding import TokenEmbedding
from tformer.nn.heads import VocabularyHead
from tformer.nn.init import block_matrices
from tformer.nn.linear import Linear
from tformer.nn.products import Product, rounded_rows

BaseFormat = Literal["fp32", "bf16", "int8", "int4"]
STACKS = ("encoder", "decoder")
NAMES = {"qkv": ("q", "k", "v"), "kv": ("k", "v"), "up": ("gate", "up")}
"""The projections of a fused matrix, in the order of their rows."""
BYTES: dict[BaseFormat, float] = {"fp32": 4, "bf16": 2, "int8": 1, "int4": 0.5 + 2 / GROUP}
"""Of a number; those of int4 have a scale for each group."""
ADAPTER = ".adapter."
"""In the names of an adapter's parameters, after the name of its matrix."""


class Projection(NamedTuple):
    """Rows of a matrix; `name` is its path in the model, `decoder.blocks.0.self_attention.q`."""

    name: str
    start: int
    stop: int


class Adapter(nn.Module):
    """The adapters of some projections of a matrix: a [P r, D], b [their rows, r], magnitude [their rows] for DoRA."""

    def __init__(
        self,
        in_features: int,
        projections: Sequence[Projection],
        *,
        rank: int,
        scale: float,
        dropout: float = 0.0,
        dora: bool = False,
    ) -> None:
        super().__init__()
        self.projections = tuple(projections)
        self.rank, self.scale, self.dropout = rank, scale, dropout
        rows = sum(each.stop - each.start for each in projections)
        self.a = nn.Parameter(torch.empty(len(projections) * rank, in_features))
        self.b = nn.Parameter(torch.zeros(rows, rank))
        self.magnitude = nn.Parameter(torch.ones(rows)) if dora else None
        nn.init.uniform_(self.a, -1 / math.sqrt(in_features), 1 / math.sqrt(in_features))

    def factors(self) -> Iterator[tuple[Projection, Tensor, Tensor, Tensor | None]]:
        """(projection, A [r, D], B [rows, r], magnitude [rows] or None) of each."""
        sizes = [each.stop - each.start for each in self.projections]
        lengths = [None] * len(sizes) if self.magnitude is None else self.magnitude.split(sizes)
        yield from zip(self.projections, self.a.split(self.rank), self.b.split(sizes), lengths, strict=True)

    def forward(self, x: Tensor, out: Tensor, linear: Linear) -> Tensor:
        """The adapted product [*, O] of x [*, D]; `out` is the frozen layer's product."""
        x, bias = dropout(x, self.dropout, self.training), linear.bias
        low = F.linear(x, self.a.to(x.dtype)) * self.scale
        frozen = None
        if self.magnitude is not None:
            product = linear.product
            frozen = product.matrix.dense() if isinstance(product, FrozenProduct) else linear.weight.detach()
        columns, end = [], 0
        for (projection, a, b, length), each in zip(self.factors(), low.split(self.rank, dim=-1), strict=True):
            start, stop = projection.start, projection.stop
            change, kept = F.linear(each, b.to(x.dtype)), out[..., start:stop]
            if length is None or frozen is None:
                change = kept + change
            else:
                norm = _lengths(frozen[start:stop] + self.scale * (b.detach() @ a.detach()))
                added = 0.0 if bias is None else bias[start:stop].to(x.dtype)
                change = (length / norm).to(x.dtype) * (kept - added + change) + added
            columns += [out[..., end:start], change] if start > end else [change]
            end = stop
        if end < out.shape[-1]:
            columns.append(out[..., end:])
        # Not dim=-1, as in the split of q, k and v that follows: torch.compile would leave out both, and its backward
        # pass would expect the strides of the first batch, whatever the shapes of the others (PyTorch 2.13).
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=out.dim() - 1)

    @torch.no_grad()
    def start_from(self, weight_OD: Tensor) -> None:
        """Set the magnitudes of DoRA to the lengths of the frozen rows."""
        for projection, _, _, length in self.factors():
            if length is not None:
                length.copy_(weight_OD[projection.start : projection.stop].norm(dim=1))

    @torch.no_grad()
    def merged(self, weight_OD: Tensor) -> Tensor:
        """`weight_OD` merged with the adapters: one fp32 matrix [O, D] with the same product."""
        merged = weight_OD.float().clone()
        for projection, a, b, length in self.factors():
            rows = merged[projection.start : projection.stop]
            rows += self.scale * (b.float() @ a.float())
            if length is not None:
                rows *= (length.float() / _lengths(rows)).unsqueeze(1)
        return merged


def _lengths(weight_OD: Tensor) -> Tensor:
    """Lengths of the rows [O], by which DoRA divides; above 0, so that a row of zeros stays zero."""
    return weight_OD.norm(dim=1).clamp(min=torch.finfo(weight_OD.dtype).tiny)


class AdaptedProduct:
    """A prepared product with adapters beside it, for inference: y = W x + b + (s B) (A x), not for DoRA.

    The matrix is not changed, so that several models may use it, each with its own adapters.
    """

    def __init__(self, product: Product, adapter: Adapter, out_features: int) -> None:
        assert adapter.magnitude is None
        self.product, self.a, rank = product, adapter.a.detach(), adapter.rank
        self.b = self.a.new_zeros(out_features, len(self.a))  # other columns for each projection
        for number, (projection, _, b, _) in enumerate(adapter.factors()):
            self.b[projection.start : projection.stop, number * rank : (number + 1) * rank] = adapter.scale * b.detach()

    def __call__(self, x: Tensor) -> Tensor:
        # Not in place: a tape of kernel calls would hold the product's result as if nothing was added to it.
        return self.product(x) + F.linear(F.linear(x, self.a), self.b)


class FrozenMatrix:
    """A matrix that is not trained, in bf16, or rounded as by `nn.products`: int8 by rows, int4 by groups of a row."""

    def __init__(self, weight_OD: Tensor, form: BaseFormat, kernels: Kernels | None = None) -> None:
        """kernels: needed for int4."""
        self.form, self.size, self.scales = form, weight_OD.shape[1], None
        if form == "int8":
            self.numbers, self.scales = rounded_rows(weight_OD.float())
        elif form == "int4":
            assert kernels is not None
            numbers, scales = kernels.round_groups(weight_OD.float().cpu())
            self.numbers, self.scales = numbers.to(weight_OD.device), scales.to(weight_OD.device)
        else:
            self.numbers = weight_OD.to(torch.bfloat16 if form == "bf16" else torch.float32)

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers [O, D]; made again for each product, and not kept."""
        if self.form == "int4":  # bytes hold the numbers of an even group in their low halves, of the next in the high
            pairs = self.numbers.unflatten(1, (-1, GROUP))
            groups = torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1, 2)
            assert self.scales is not None
            wide = groups.to(dtype).sub_(8).mul_(self.scales.to(dtype).unsqueeze(-1))
            return wide.flatten(1)[:, : self.size]
        if self.scales is not None:
            return self.numbers.to(dtype).mul_(self.scales.to(dtype).unsqueeze(1))
        return self.numbers.to(dtype)


class _FrozenProduct(torch.autograd.Function):
    """y = x W^T with the gradient dx = dy W; the matrix in full exists only inside of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: FrozenMatrix) -> Tensor:
        ctx.matrix = matrix
        return F.linear(x, matrix.dense(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.matrix.dense(grad.dtype), None


class FrozenProduct:
    """The product of a `FrozenMatrix` and the bias of its layer, for training."""

    def __init__(self, matrix: FrozenMatrix, linear: Linear) -> None:
        self.matrix, self._linear = matrix, linear

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = _FrozenProduct.apply(x, self.matrix)
        bias = self._linear.bias
        return out if bias is None else out + bias.to(x.dtype)


def projections(model: nn.Module) -> dict[str, tuple[Linear, list[Projection]]]:
    """The matrices inside the stacks of a model by name, each with its projections."""
    sizes = {matrix: rows for _, matrix, rows in block_matrices(model)}
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, Linear) or name.partition(".")[0] not in STACKS:
            continue
        parent, _, own = name.rpartition(".")
        rows = sizes.get(module, [module.out_features])
        names = NAMES[own] if len(rows) > 1 else (own,)
        ends = [sum(rows[: number + 1]) for number in range(len(rows))]
        parts = zip(names, rows, ends, strict=True)
        found[name] = module, [Projection(f"{parent}.{part}", end - count, end) for part, count, end in parts]
    return found


def adapt(model: nn.Module, *, targets: Collection[str], train: Collection[str] = (), **options: Any) -> frozenset[str]:
    """Freeze a model and give its matrices adapters; returns the names of the frozen parameters.

    targets: names of projections that get one. train: names of parameters that are trained in full; a matrix among them
    has no adapter. options: those of `Adapter`.
    """
    found = projections(model)
    trained = {id(model.get_parameter(name)) for name in train}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    named = model.named_parameters(remove_duplicate=False)
    frozen = frozenset(name for name, parameter in named if not parameter.requires_grad)
    for linear, parts in found.values():
        chosen = [part for part in parts if part.name in targets]
        if chosen and id(linear.weight) not in trained:
            linear.adapter = Adapter(linear.in_features, chosen, **options)
    return frozen


def frozen_form(model: nn.Module, name: str, form: BaseFormat) -> BaseFormat:
    """The format of a frozen parameter where the matrices inside the stacks have `form`.

    Tables of tokens, which are an output's matrix too, are bf16 beside rounded matrices; all else is fp32.
    """
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    if form == "fp32" or own != "weight":
        return "fp32"
    if isinstance(module, TokenEmbedding | VocabularyHead):
        return "fp32" if module.fixnorm else "bf16"
    return form if isinstance(module, Linear) and path.partition(".")[0] in STACKS else "fp32"


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Within this context an adapted model is its frozen base."""
    adapters = {module: module.adapter for module in model.modules() if isinstance(module, Linear)}
    for linear in adapters:
        linear.adapter = None
    try:
        yield
    finally:
        for linear, adapter in adapters.items():
            linear.adapter = adapter


@torch.no_grad()
def place(
    model: nn.Module, name: str, tensor: Tensor, form: BaseFormat, *, device: torch.device, kernels: Kernels | None
) -> None:
    """Put a base's tensor into its place in an adapted model, which may be on the meta device there.

    form: of frozen matrices inside the stacks, see `frozen_form`.
    """
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    if own not in module._parameters:
        model.get_buffer(name).copy_(tensor)
        return
    before = module.get_parameter(own)
    tensor, held = tensor.to(device, torch.float32), "fp32" if before.requires_grad else frozen_form(model, name, form)
    if isinstance(module, Linear) and own == "weight":
        if held != "fp32":
            matrix = FrozenMatrix(tensor, held, kernels)
            module.product = FrozenProduct(matrix, module)
            tensor = tensor if module.adapter is None or module.adapter.magnitude is None else matrix.dense()
        if module.adapter is not None:
            module.adapter.start_from(tensor)
        if held != "fp32":  # the parameter keeps its shape, without numbers
            tensor = torch.full((1, 1), torch.nan, device=device).expand_as(before)
    elif held == "bf16":
        tensor = tensor.bfloat16()
    setattr(module, own, nn.Parameter(tensor, before.requires_grad))
