"""Activation patching between two inputs, its estimate by gradients, and ablation of heads and layers.

Patching runs the model on the corrupted input with one inner tensor of the clean one (denoising: is it enough?), or on
the clean input with one of the corrupted one (noising: is it needed?). With a metric M of the answer, a cell is

    (M(patched) - M(corrupted)) / (M(clean) - M(corrupted))        1: as on the clean input, 0: as on the corrupted one

(Zhang and Nanda, arXiv 2309.16042; Heimersheim and Nanda, arXiv 2404.15255). Attribution patching (Syed et al., arXiv
2310.10348) estimates all cells by two forward passes and one backward pass: M changes by (a' - a) . dM/da where a is
replaced by a'. It is good for outputs of heads, and poor where M is far from linear, as in the residual stream.

    residual      the stream before each layer                         by layer and position
    attention     the output of self-attention; cross: of cross-attention
    feedforward   the output of the feed-forward network
    heads         the output of each head, at all positions            by layer and head

Ablation replaces the output of a head, of an attention or of a feed-forward network by zeros, or by its mean over all
tokens of the data, and measures the loss on the data.
"""

# Shapes: B copies of the input, N positions or heads, L layers, T positions, C tokens or labels.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.decoding.inference import inference
from tformer.inside.options import head_name
from tformer.model import Transformer
from tformer.nn.heads import ModelOutput
from tformer.nn.taps import Replacement
from tformer.support.errors import InputError, require_finite
from tformer.workers.work import Work

BATCH_TOKENS = 4096  # of the copies that run together
Inputs = Mapping[str, Tensor]

PARTS = {
    "residual": "residual stream before each layer",
    "attention": "output of attention",
    "cross": "output of cross-attention",
    "feedforward": "output of the feed-forward network",
    "heads": "output of attention heads",
    "cross_heads": "output of cross-attention heads",
}
TAPS = {
    "attention": "self_attention.projection",
    "cross": "cross_attention.projection",
    "feedforward": "feedforward.down",
    "heads": "self_attention.heads",
    "cross_heads": "cross_attention.heads",
}

METRICS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "difference": lambda logits_BC, answer, wrong: logits_BC[:, answer] - logits_BC[:, wrong],
    "logit": lambda logits_BC, answer, wrong: logits_BC[:, answer],
    "probability": lambda logits_BC, answer, wrong: logits_BC.softmax(-1)[:, answer],
    "loss": lambda logits_BC, answer, wrong: -logits_BC.log_softmax(-1)[:, answer],
}
"""fp32 [B]: what is measured, from the logits at the place of the answer and the ids of both answers."""

METRICS_OF_LABELS = METRICS | {
    "probability": lambda logits_BC, answer, wrong: logits_BC[:, answer].sigmoid(),
    "loss": lambda logits_BC, answer, wrong: -F.logsigmoid(logits_BC[:, answer]),
}
"""The same where any number of labels may hold: each has its own probability."""


@dataclass(frozen=True)
class PatchingExample:
    """Two inputs of one shape, and the metric of the answer.

    Attributes:
        clean, corrupted: keyword arguments of the model's forward, one row each.
        at: position of the answer; None: the model answers once, as classifiers do.
        answer, wrong: ids of the tokens or labels.
        metric: a key of METRICS.
        several: the model is a classifier of several labels per example.
    """

    clean: Inputs
    corrupted: Inputs
    at: int | None
    answer: int
    wrong: int
    metric: str
    several: bool = False

    def measure(
        self, model: Transformer, inputs: Inputs, *, replace: Mapping[str, Replacement] | None = None
    ) -> Tensor:
        """fp32 [B]: the metric on these inputs."""
        return self.metric_of(answers(model, inputs, self.at, replace=replace))

    def metric_of(self, logits_BC: Tensor) -> Tensor:
        """fp32 [B]: the metric of these logits of the answer."""
        metrics = METRICS_OF_LABELS if self.several else METRICS
        return metrics[self.metric](logits_BC, self.answer, self.wrong)


def answers(
    model: Transformer, inputs: Inputs, at: int | None, *, replace: Mapping[str, Replacement] | None = None
) -> Tensor:
    """fp32 [B, C]: the logits of the answer."""
    return logits_of(model(**inputs, replace=replace), at)


def logits_of(output: ModelOutput, at: int | None) -> Tensor:
    """fp32 [B, C]: the logits at a position; None: the model answers once."""
    return output.logits if at is None else output.logits_at(at)


@dataclass(frozen=True)
class PatchMap:
    """The cells of one part of one stack.

    Attributes:
        side: "encoder" or "decoder".
        part: a key of PARTS.
        exact: fp64 [L, N]; None where only the estimate was wanted.
        estimate: the same by attribution patching. NaN in both: a pruned layer has fewer heads.
    """

    side: str
    part: str
    exact: np.ndarray | None
    estimate: np.ndarray

    @property
    def correlation(self) -> float | None:
        """Pearson's, of both; None where one of them does not vary, or the exact one is missing."""
        if self.exact is None:
            return None
        pair = np.stack([self.exact[np.isfinite(self.exact)], self.estimate[np.isfinite(self.exact)]])
        return float(np.corrcoef(pair)[0, 1]) if (pair.std(axis=1) > 1e-12).all() else None

    @property
    def is_of_heads(self) -> bool:
        return self.part.endswith("heads")


@dataclass(frozen=True)
class PatchReport:
    """Patching between two prompts.

    Attributes:
        tokens: of the clean prompt, by side ("encoder", "decoder").
        answer, wrong: the texts of both answers; wrong: None where the metric is of the answer alone.
        clean, corrupted: the metric after each prompt.
        maps: 1 is the metric after the clean prompt, 0 that after the corrupted one.
    """

    tokens: dict[str, tuple[str, ...]]
    answer: str
    wrong: str | None
    metric: str
    noising: bool
    clean: float
    corrupted: float
    maps: list[PatchMap]


def taps_of(model: Transformer, parts: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """The taps, one a layer, of each (side, part) that the model has."""
    found: dict[tuple[str, str], list[str]] = {}
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        for part in parts:
            if stack is None:
                continue
            if part == "residual":
                found[side, part] = [f"{side}.embedding", *(f"{side}.{n}.hidden" for n in range(len(stack.layers) - 1))]
            elif stack.layers[0].cross_attention is not None or not part.startswith("cross"):
                found[side, part] = [f"{side}.{n}.{TAPS[part]}" for n in range(len(stack.layers))]
    return found


def patch(
    model: Transformer,
    question: PatchingExample,
    parts: Sequence[str],
    *,
    noising: bool,
    only_estimate: bool,
    work: Work,
) -> tuple[list[PatchMap], float, float]:
    """(the maps of these parts, M(clean), M(corrupted)).

    noising: patch the clean input with the corrupted one. only_estimate: no exact cells.

    Raises InputError where the metric is the same on both inputs, so that there is nothing to restore.
    """
    taps = taps_of(model, parts)
    names = [name for each in taps.values() for name in each]
    base, source = (question.clean, question.corrupted) if noising else (question.corrupted, question.clean)
    with inference(model):
        output = model(**source, taps=names)
        other, own = float(question.metric_of(logits_of(output, question.at))), float(question.measure(model, base))
    require_finite(np.array([own, other]), "outputs")
    clean, corrupted = (own, other) if noising else (other, own)
    span = clean - corrupted
    if abs(span) < 1e-6:
        raise InputError(f"the {question.metric} is {clean:.4g} after both prompts: there is nothing to restore")
    estimates = estimated_changes(model, question, base, output.taps)
    exact = {} if only_estimate else patched_changes(model, question, base, output.taps, own=own, work=work)

    def cells(changes: Mapping[str, np.ndarray], names: Sequence[str]) -> np.ndarray:
        return (padded([changes[name] for name in names]) + (own - corrupted)) / span

    maps = [
        PatchMap(side, part, cells(exact, each) if exact else None, cells(estimates, each))
        for (side, part), each in taps.items()
    ]
    return maps, clean, corrupted


def patched_changes(
    model: Transformer, question: PatchingExample, base: Inputs, values: Mapping[str, Tensor], *, own: float, work: Work
) -> dict[str, np.ndarray]:
    """Changes of the metric, fp64 [N] for each tap, when each entry of dimension 1 is patched into `base`.

    own: the metric on `base`.
    """
    changes: dict[str, np.ndarray] = {}
    for name, value in values.items():
        work.raise_if_stopped("while patching, nothing written")
        changes[name] = patched(model, question, base, name, value) - own
        work.report(len(changes), len(values))
    return changes


def patched(model: Transformer, question: PatchingExample, base: Inputs, name: str, value: Tensor) -> np.ndarray:
    """fp64 [N]: the metric on `base` with entry n of dimension 1 of a tap taken from `value`, for each n."""
    width = max([value.shape[-2], *(each.shape[1] for each in base.values() if each.dim() == 2)])
    found = []
    with inference(model):
        for places in torch.arange(value.shape[1], device=value.device).split(max(1, BATCH_TOKENS // width)):
            copies = {key: each.expand(len(places), *each.shape[1:]) for key, each in base.items()}
            found.append(question.measure(model, copies, replace={name: partial(with_entries, places, value)}))
    metric_N = torch.cat(found)
    require_finite(metric_N, "outputs")
    return metric_N.double().cpu().numpy()


def with_entries(places: Tensor, value: Tensor, base: Tensor) -> Tensor:
    """`base` [B, N, ...] with entry places[b] of row b taken from `value` [1, N, ...]."""
    changed = base.clone()
    changed[torch.arange(len(places), device=places.device), places] = value[0, places]
    return changed


def estimated_changes(
    model: Transformer, question: PatchingExample, base: Inputs, values: Mapping[str, Tensor]
) -> dict[str, np.ndarray]:
    """fp64 [N] of each tap: (value - base) . dM/d(base) of each entry of dimension 1."""
    with torch.enable_grad():
        output = model(**base, taps=list(values))
        metric = question.metric_of(logits_of(output, question.at)).sum()
        own = [output.taps[name] for name in values]
        gradients = torch.autograd.grad(metric, own, allow_unused=True)  # the last positions of some are not read
    changes = {}
    for (name, value), here, gradient in zip(values.items(), own, gradients, strict=True):
        product = torch.zeros_like(here) if gradient is None else (value - here.detach()) * gradient
        changes[name] = product[0].flatten(1).double().sum(1).cpu().numpy()
    return changes


def padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """fp64 [L, N]: rows of different lengths, NaN after their ends."""
    found = np.full((len(rows), max(map(len, rows))), np.nan)
    for layer, row in enumerate(rows):
        found[layer, : len(row)] = row
    return found


# --- ablation --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ablation:
    """Metrics of a model without one part: the part's stack, layer, kind (a key of PARTS) and head."""

    side: str
    part: str
    layer: int
    head: int | None
    metrics: Mapping[str, float]

    @property
    def name(self) -> str:
        if self.head is None:
            return f"L{self.layer} {self.part}"
        return head_name(self.layer, self.head, cross=self.part == "cross_heads")


@dataclass(frozen=True)
class AblationReport:
    """The metrics of a model on data, as it is (`whole`) and without each part."""

    mode: str
    data: str
    whole: dict[str, float]
    parts: list[Ablation]


class Replaced(nn.Module):
    """A model with some inner tensors replaced in every forward pass: what an objective takes for a model."""

    def __init__(self, model: Transformer, replace: Mapping[str, Replacement]) -> None:
        super().__init__()
        self.model, self.replace, self.training = model, replace, model.training

    def forward(self, **inputs: Any) -> Any:
        return self.model(**inputs, replace=self.replace)


class Means(nn.Module):
    """A model that adds up inner tensors over the real tokens that it reads.

    sums: by tap, fp64 [H, v] or [D]; counts: of tokens.
    """

    def __init__(self, model: Transformer, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names, self.training = model, names, model.training
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, float] = {}

    def forward(self, **inputs: Any) -> Any:
        own = inputs.get("attention_mask")
        beside = "decoder_input_ids" in inputs
        masks = {"encoder": own, "decoder": inputs.get("decoder_attention_mask") if beside else own}
        replace = {name: partial(self._add, name, masks[name.split(".")[0]]) for name in self.names}
        return self.model(**inputs, replace=replace)

    def _add(self, name: str, mask_BT: Tensor | None, value: Tensor) -> Tensor:
        found = value.transpose(1, 2) if value.dim() == 4 else value  # [B, T, H, v] or [B, T, D]
        real = torch.ones(found.shape[:2], device=found.device) if mask_BT is None else mask_BT.float()
        total = torch.einsum("bt,bt...->...", real.double(), found.double())
        self.sums[name] = self.sums.get(name, 0) + total
        self.counts[name] = self.counts.get(name, 0.0) + float(real.sum())
        return value

    def of(self, name: str) -> Tensor:
        """fp32 [H, v] or [D]."""
        return (self.sums[name] / self.counts[name]).float()


def ablated_parts(model: Transformer) -> list[tuple[str, str, int, int | None, str]]:
    """(side, part, layer, head, tap) of every head, attention and feed-forward network."""
    found: list[tuple[str, str, int, int | None, str]] = []
    for (side, part), names in taps_of(model, [part for part in PARTS if part != "residual"]).items():
        for layer, name in enumerate(names):
            attention = getattr(getattr(model, side).layers[layer], TAPS[part].split(".")[0])
            heads = range(attention.num_heads) if part.endswith("heads") else (None,)
            found += [(side, part, layer, head, name) for head in heads]
    return found


def ablations(
    model: Transformer,
    mode: Literal["zero", "mean"],
    measure: Callable[[nn.Module], Mapping[str, float]],
    *,
    work: Work,
) -> list[Ablation]:
    """The model measured without each head, each attention and each feed-forward network.

    measure: the metrics of a model on the data; called once for each part, and once more for the means.
    """
    parts, found = ablated_parts(model), list[Ablation]()
    means = Means(model, list(dict.fromkeys(name for *_, name in parts)))
    if mode == "mean":
        measure(means)
    for side, part, layer, head, name in parts:
        work.raise_if_stopped("while measuring, nothing written")
        put = partial(without, head, means.of(name) if mode == "mean" else None)
        found.append(Ablation(side, part, layer, head, measure(Replaced(model, {name: put}))))
        work.report(len(found), len(parts))
    return found


def without(head: int | None, mean: Tensor | None, value: Tensor) -> Tensor:
    """A tensor [B, T, D], or head `head` of one [B, H, T, v], replaced by zeros or by its mean."""
    if head is None:
        return torch.zeros_like(value) if mean is None else mean.to(value.dtype).expand_as(value)
    changed = value.clone()
    changed[:, head] = 0.0 if mean is None else mean[head].to(value.dtype)
    return changed
