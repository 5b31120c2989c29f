"""Attribution to inputs: how much each token, or each patch of an image, mattered for an answer.

F is a metric of the answer (its logit, probability or loss, or the difference of two logits), x the rows of the token
table (before positions are added) or the pixels of an image, x' a baseline that says nothing: the row of a mask or pad
token, or zeros. Positions and special tokens stay. Of a place, summed over its numbers:

    gradient      x . dF/dx(x)                                      gradient x input, Shrikumar et al., arXiv 1605.01713
    integrated    (x - x') . ∫ dF/dx(x' + a (x - x')) da, a: 0..1   Sundararajan et al., arXiv 1703.01365, equation 1
    occlusion     F(x) - F(x with this place of x')                 Zeiler and Fergus, arXiv 1311.2901, section 4.2
    rollout       product over layers of (A + I) / 2               Abnar and Zuidema, arXiv 2005.00928 (`viz.attention`)

Integrated gradients are complete (proposition 1 there): they add up to F(x) - F(x'). The gap between both is the error
of the sum over points that stands for the integral. 50 points are enough for most models; a norm of vectors that pass
near zero turns fast there, and takes 300, the most that the paper needed (section 5).
"""

# Shapes: B copies of the input, N answers, P places: the tokens of the encoder, then those of the decoder.

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tformer.decoding.inference import inference
from tformer.inside.patching import BATCH_TOKENS, METRICS, METRICS_OF_LABELS, Inputs, logits_of
from tformer.model import Transformer
from tformer.nn.patches import PatchEmbedding
from tformer.support.errors import require_finite
from tformer.workers.work import Work

STEPS = (50, 300)
LARGE_GAP = 0.01  # of F(x) - F(x')
Values = Mapping[str, Tensor]
"""Tensors by the names of their taps."""


def gauss_legendre(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """(points in 0..1, weights), both [steps]; exact for polynomials of degree 2 steps - 1."""
    points, weights = np.polynomial.legendre.leggauss(steps)
    return (points + 1) / 2, weights / 2


def midpoint(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """(the middles of equal parts of 0..1, equal weights), both [steps]."""
    return (np.arange(steps) + 0.5) / steps, np.full(steps, 1 / steps)


RULES: dict[str, Callable[[int], tuple[np.ndarray, np.ndarray]]] = {
    "gauss-legendre": gauss_legendre,
    "midpoint": midpoint,
}


@dataclass(frozen=True)
class Answer:
    """An answer to explain.

    Attributes:
        at: its position; None: the model answers once, as classifiers do.
        id: of the token or label. against: of the one whose logit is subtracted.
    """

    at: int | None
    id: int
    against: int | None = None


@dataclass(frozen=True)
class Subject:
    """An input with its baseline, and the answers to explain.

    Attributes:
        inputs: keyword arguments of the model's forward, one row each.
        metric: a key of METRICS.
        several: the model is a classifier of several labels per example.
        real, baseline: x and x', by tap [1, ...].
        places: the place that each of their numbers belongs to, as a tensor that broadcasts to their shape [...].
        changed: the places where both may differ. count: of all places.
    """

    model: Transformer
    inputs: Inputs
    answers: Sequence[Answer]
    metric: str
    several: bool
    real: Values
    baseline: Values
    places: Values
    changed: Tensor
    count: int

    def measure(self, values: Values) -> Tensor:
        """fp32 [N, B]: the metric of each answer with these values [B, ...] in place of x."""
        count, metrics = len(next(iter(values.values()))), METRICS_OF_LABELS if self.several else METRICS
        copies = {name: each.expand(count, *each.shape[1:]) for name, each in self.inputs.items()}
        output = self.model(**copies, replace=values)
        found = [
            metrics[self.metric](logits_of(output, each.at), each.id, each.id if each.against is None else each.against)
            for each in self.answers
        ]
        return torch.stack(found)

    def gradients(self, values: Values, weights_B: Tensor, went: Callable[[int], None]) -> list[dict[str, Tensor]]:
        """For each answer, dF/dx at these values, summed over the rows with weights, by tap [...]."""
        leaves, found = {name: each.detach().requires_grad_() for name, each in values.items()}, []
        with torch.enable_grad():
            totals_N = (self.measure(leaves) * weights_B).sum(1)
            for total in totals_N:
                each = torch.autograd.grad(total, list(leaves.values()), retain_graph=True, materialize_grads=True)
                found.append({name: of_rows.sum(0) for name, of_rows in zip(leaves, each, strict=True)})
                went(len(weights_B))
        return found

    def by_place(self, numbers: Values) -> np.ndarray:
        """fp64 [P]: numbers of the shapes of x, summed over each place."""
        total = torch.zeros(self.count, dtype=torch.float64, device=self.changed.device)
        for name, each in numbers.items():
            total.index_add_(0, self.places[name].expand(each.shape).reshape(-1), each.double().reshape(-1))
        return total.cpu().numpy()


def subject_of(
    model: Transformer,
    inputs: Inputs,
    answers: Sequence[Answer],
    metric: str,
    *,
    several: bool,
    stays: Mapping[str, Sequence[bool]],
    baseline: Inputs | None,
) -> Subject:
    """The subject whose x are the vectors of `inputs`.

    stays: by side ("encoder", "decoder"), whether each token keeps its vector in x'.
    baseline: keyword arguments of the model's forward whose vectors are x'; None: zeros.
    """
    embedding, device = model.embedding, next(iter(inputs.values())).device
    stays_P = torch.tensor([mark for marks in stays.values() for mark in marks], device=device)
    if isinstance(embedding, PatchEmbedding):
        at = torch.arange(embedding.image_size, device=device) // embedding.size
        first = len(stays_P) - embedding.side**2
        places = {"encoder.embedding.pixels": (first + at.unsqueeze(1) * embedding.side + at).unsqueeze(0)}
    else:
        places_of_sides = torch.arange(len(stays_P), device=device).unsqueeze(1).split(list(map(len, stays.values())))
        own = dict(zip(stays, places_of_sides, strict=True))
        taps = {f"{side}.embedding.{name}": side for side in stays for name in ("tokens", "ngrams")}
        places = {tap: own[side] for tap, side in taps.items() if tap in model.tap_names()}
    with torch.no_grad():
        real = model(**inputs, taps=places).taps
        other = {} if baseline is None else model(**baseline, taps=places).taps
    base = {
        name: torch.where(stays_P[places[name]], value, other.get(name, torch.zeros_like(value)))
        for name, value in real.items()
    }
    changed = (~stays_P).nonzero().flatten()
    return Subject(model, inputs, answers, metric, several, real, base, places, changed, len(stays_P))


@dataclass(frozen=True)
class AttributionReport:
    """What mattered for one or several answers of a model.

    Attributes:
        tokens: that were read, by side ("encoder", "decoder"); of an image "CLS" and "row,column" of each patch.
        positions: of the answers [N]; None: the model answers once.
        targets: the tokens or labels that are explained [N]; against: the token whose logit is subtracted.
        baseline: mask, pad or zero. steps, rule: the points of integrated gradients, 0: not computed.
        values, baseline_values: the metric of each answer on the input and on the baseline, fp64 [N].
        scores: by method and side, fp64 [N, tokens]; NaN: a token that the answer cannot see, or that stays.
        pixels: the image, uint8 [Y, X, 3]; grid: rows and columns of its patches.
    """

    tokens: dict[str, tuple[str, ...]]
    positions: tuple[int | None, ...]
    targets: tuple[str, ...]
    against: str | None
    metric: str
    baseline: str
    steps: int
    rule: str
    values: np.ndarray
    baseline_values: np.ndarray
    scores: dict[str, dict[str, np.ndarray]]
    texts: dict[str, str]
    notes: tuple[str, ...] = ()
    pixels: np.ndarray | None = None
    grid: tuple[int, int] = (0, 0)

    @property
    def gaps(self) -> np.ndarray | None:
        """Of integrated gradients their sum - (F(x) - F(x')), fp64 [N]; None: they were not computed."""
        if "integrated" not in self.scores:
            return None
        total = sum(np.nansum(each, axis=1) for each in self.scores["integrated"].values())
        return np.asarray(total - (self.values - self.baseline_values))

    @property
    def gap_shares(self) -> np.ndarray | None:
        """The size of each gap as a share of F(x) - F(x')."""
        gaps = self.gaps
        return None if gaps is None else np.abs(gaps) / np.maximum(np.abs(self.values - self.baseline_values), 1e-12)


def attribute(
    subject: Subject, methods: Collection[str], *, steps: int | None, rule: str, work: Work
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, int]:
    """(scores by method, fp64 [N, P]; F(x) and F(x'), fp64 [N]; points) of the methods that need no attention weights.

    steps: number of points of integrated gradients; None: the first of STEPS whose gap is not large, else the last.

    Scores of integrated gradients and of occlusion are NaN at places that do not change.
    Raises NotFiniteError for outputs or gradients that are NaN or infinite.
    """
    found: dict[str, np.ndarray] = {}
    tried = (STEPS if steps is None else (steps,)) if "integrated" in methods else ()
    slopes, steps = ("gradient" in methods) + sum(tried[:1]), 0
    inputs = slopes * len(subject.answers) + len(subject.changed) * ("occlusion" in methods)
    size, done = max(1, BATCH_TOKENS // subject.count), 0

    def went(count: int) -> None:
        nonlocal done
        done += count
        work.report(done, max(done, inputs))
        work.raise_if_stopped("while attributing, nothing written")

    # The model's evaluation mode, as for inference, but with gradients.
    with inference(subject.model), torch.inference_mode(False), torch.no_grad():
        value_N, base_N = (subject.measure(each)[:, 0] for each in (subject.real, subject.baseline))
        require_finite(torch.stack([value_N, base_N]), "outputs")
        if "gradient" in methods:
            found["gradient"] = np.stack(
                [
                    subject.by_place({name: subject.real[name][0] * slope for name, slope in each.items()})
                    for each in subject.gradients(subject.real, torch.ones_like(value_N[:1]), went)
                ]
            )
        change_N = (value_N - base_N).double().cpu().numpy()
        for steps in tried:
            found["integrated"] = _integrated(subject, RULES[rule](steps), size, went)
            if (np.abs(found["integrated"].sum(1) - change_N) <= LARGE_GAP * np.abs(change_N)).all():
                break
        if "occlusion" in methods:
            found["occlusion"] = _occlusion(subject, value_N, size, went)
    for each in found.values():
        require_finite(each, "gradients")
    stays = np.delete(np.arange(subject.count), subject.changed.cpu().numpy())
    for method in {"integrated", "occlusion"} & found.keys():
        found[method][:, stays] = np.nan
    return found, value_N.double().cpu().numpy(), base_N.double().cpu().numpy(), steps


def _integrated(
    subject: Subject, points: tuple[np.ndarray, np.ndarray], size: int, went: Callable[[int], None]
) -> np.ndarray:
    """fp64 [N, P]: integrated gradients by a sum over these (points, weights)."""
    shifts = {name: real - subject.baseline[name] for name, real in subject.real.items()}
    device, found = subject.changed.device, np.zeros((len(subject.answers), subject.count))
    pairs = (torch.tensor(each, dtype=torch.float32, device=device).split(size) for each in points)
    for shares_B, weights_B in zip(*pairs, strict=True):
        path = {
            name: subject.baseline[name] + shares_B.view(-1, *[1] * (shift.dim() - 1)) * shift
            for name, shift in shifts.items()
        }
        for n, each in enumerate(subject.gradients(path, weights_B, went)):
            found[n] += subject.by_place({name: shifts[name][0] * slope for name, slope in each.items()})
    return found


def _occlusion(subject: Subject, value_N: Tensor, size: int, went: Callable[[int], None]) -> np.ndarray:
    """fp64 [N, P]: how much each answer loses without a place; 0 at places that do not change."""
    found = np.zeros((len(value_N), subject.count))
    for places_B in subject.changed.split(size):
        copies = {}
        for name, of_numbers in subject.places.items():
            is_hidden = places_B.view(-1, *[1] * of_numbers.dim()) == of_numbers
            copies[name] = torch.where(is_hidden, subject.baseline[name], subject.real[name])
        lost_NB = value_N.unsqueeze(1) - subject.measure(copies)
        found[:, places_B.cpu().numpy()] = lost_NB.double().cpu().numpy()
        went(len(places_B))
    return found
