"""Attribution to inputs: how much each token, or each patch of an image, mattered for an answer.

F is a metric of the answer (its logit, probability or loss, or the difference of two logits), x the rows of the token
table (before positions are added) or the pixels of an image, x' a baseline that says nothing: the row of a mask or pad
token, or zeros. Positions and special tokens stay. Of a place, summed over its numbers:

    gradient      x . dF/dx(x)                                      gradient x input, Shrikumar et al., arXiv 1605.01713
    integrated    (x - x') . ∫ dF/dx(x' + a (x - x')) da, a: 0..1   Sundararajan et al., arXiv 1703.01365, equation 1
    occlusion     F(x) - F(x with this place of x')                 Zeiler and Fergus, arXiv 1311.2901, section 4.2
    rollout       product over layers of (A + I) / 2               Abnar and Zuidema, arXiv 2005.00928 (`viz.attention`)

Integrated gradients are complete (proposition 1 there): they add up to F(x) - F(x'). The gap between both is the error
of the sum that stands for the integral, by Gauss and Legendre. 50 points are enough for most models; a norm of vectors
that pass near zero turns fast there, and takes 300, the most that the paper needed (section 5).
"""

# Shapes: B copies of the input, N answers, P places: the tokens of the encoder, then those of the decoder.

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tformer.inside.patching import BATCH_TOKENS, Inputs
from tformer.model import Transformer
from tformer.nn.patches import PatchEmbedding
from tformer.support.errors import require_finite

STEPS = (50, 300)
LARGE_GAP = 0.01  # of F(x) - F(x')
Values = Mapping[str, Tensor]
"""Tensors by the names of their taps."""


@dataclass(frozen=True)
class AttributionInputs:
    """The vectors of an input and of its baseline.

    Attributes:
        real, baseline: x and x', by tap [1, ...].
        places: the place that each of their numbers belongs to, as a tensor that broadcasts to their shape [...].
        stays: bool [P], the places where x' is x.
    """

    real: Values
    baseline: Values
    places: Values
    stays: Tensor


def subject_of(
    model: Transformer, inputs: Inputs, stays: Mapping[str, Sequence[bool]], baseline: Inputs | None
) -> AttributionInputs:
    """The vectors of `inputs`, keyword arguments of the model's forward, one row each.

    stays: by side ("encoder", "decoder"), whether each token keeps its vector in x'.
    baseline: inputs whose vectors are x'; None: zeros.
    """
    embedding, device = model.embedding, next(iter(inputs.values())).device
    stays_P = torch.tensor([mark for marks in stays.values() for mark in marks], device=device)
    if isinstance(embedding, PatchEmbedding):
        at = torch.arange(embedding.image_size, device=device) // embedding.size
        first = len(stays_P) - embedding.side**2
        places = {"encoder.embedding.pixels": (first + at.unsqueeze(1) * embedding.side + at).unsqueeze(0)}
    else:
        of_sides = torch.arange(len(stays_P), device=device).unsqueeze(1).split(list(map(len, stays.values())))
        own = dict(zip(stays, of_sides, strict=True))
        taps = {f"{side}.embedding.{name}": at for side, at in own.items() for name in ("tokens", "ngrams")}
        places = {tap: at for tap, at in taps.items() if tap in model.tap_names()}
    real = model(**inputs, taps=places).taps
    other = {} if baseline is None else model(**baseline, taps=places).taps
    base = {
        name: torch.where(stays_P[places[name]], value, other.get(name, torch.zeros_like(value)))
        for name, value in real.items()
    }
    return AttributionInputs(real, base, places, stays_P)


def attribute(
    measure: Callable[[Values], Tensor],
    subject: AttributionInputs,
    methods: Collection[str],
    *,
    steps: int | None = None,
    went: Callable[[int], None] = lambda rows: None,
    batch_tokens: int = BATCH_TOKENS,
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, int]:
    """(scores by method, fp64 [N, P]; F(x) and F(x'), fp64 [N]; points) of the methods that need no attention weights.

    Scores of integrated gradients and of occlusion are NaN at places that stay.

    measure: F, fp32 [N, B], of values [B, ...] in place of x.
    steps: number of points of integrated gradients; None: the first of STEPS whose gap is not large, else the last.
    went: called with the number of rows whose answers or gradients were computed.
    batch_tokens: of the copies that run together.

    Raises NotFiniteError for outputs or gradients that are NaN or infinite.
    """
    real, base, count = subject.real, subject.baseline, len(subject.stays)
    shifts = {name: each - base[name] for name, each in real.items()}
    found: dict[str, np.ndarray] = {}
    size, points = max(1, batch_tokens // count), 0

    def products(values: Values, weights_B: Tensor, factors: Values) -> np.ndarray:
        """fp64 [N, P]: dF/dx at these values, summed over rows with weights, times factors, summed over each place."""
        leaves = {name: each.detach().requires_grad_() for name, each in values.items()}
        with torch.enable_grad():
            totals_N = (measure(leaves) * weights_B).sum(1)
            sums_NP = torch.zeros(len(totals_N), count, dtype=torch.float64, device=totals_N.device)
            for sums_P, total in zip(sums_NP, totals_N, strict=True):
                slopes = torch.autograd.grad(total, list(leaves.values()), retain_graph=True, materialize_grads=True)
                for name, slope in zip(leaves, slopes, strict=True):
                    numbers = slope.sum(0) * factors[name][0]
                    of_places = subject.places[name].expand(numbers.shape)
                    sums_P.index_add_(0, of_places.reshape(-1), numbers.double().reshape(-1))
                went(len(weights_B))
        return sums_NP.cpu().numpy()

    with torch.no_grad():
        value_N, base_N = (measure(each)[:, 0] for each in (real, base))
        require_finite(torch.stack([value_N, base_N]), "outputs")
        change_N = (value_N - base_N).double().cpu().numpy()
        if "gradient" in methods:
            found["gradient"] = products(real, torch.ones_like(value_N[:1]), real)
        for points in (STEPS if steps is None else (steps,)) if "integrated" in methods else ():
            pairs = torch.from_numpy(np.stack(np.polynomial.legendre.leggauss(points)) / 2).float()  # from -1/2 to 1/2
            total_NP = np.zeros((len(value_N), count))
            for shares_B, weights_B in pairs.to(value_N.device).split(size, dim=1):
                path = {name: base[name] + along(shares_B + 0.5, each) * each for name, each in shifts.items()}
                total_NP += products(path, weights_B, shifts)
            found["integrated"] = total_NP
            if (np.abs(total_NP.sum(1) - change_N) <= LARGE_GAP * np.abs(change_N)).all():
                break
        if "occlusion" in methods:
            found["occlusion"] = np.zeros((len(value_N), count))
            for places_B in (~subject.stays).nonzero().flatten().split(size):
                hidden = {name: along(places_B, each) == subject.places[name] for name, each in real.items()}
                lost_NB = value_N.unsqueeze(1) - measure(
                    {name: torch.where(hidden[name], base[name], each) for name, each in real.items()}
                )
                found["occlusion"][:, places_B.cpu().numpy()] = lost_NB.double().cpu().numpy()
                went(len(places_B))
    for method, scores_NP in found.items():
        require_finite(scores_NP, "gradients")
        if method != "gradient":
            scores_NP[:, subject.stays.cpu().numpy()] = np.nan
    return found, value_N.double().cpu().numpy(), base_N.double().cpu().numpy(), points


def along(numbers_B: Tensor, like: Tensor) -> Tensor:
    """[B, 1, ...] with as many axes as `like` [1, ...]."""
    return numbers_B.view(-1, *[1] * (like.dim() - 1))


@dataclass(frozen=True)
class AttributionReport:
    """Attribution scores for one or several answers of a model.

    Attributes:
        tokens: that were read, by side ("encoder", "decoder"); of an image "CLS" and "row,column" of each patch.
        positions: of the answers [N]; None: the model answers once.
        targets: the tokens or labels that are explained [N]; against: the token whose logit is subtracted.
        baseline: mask, pad or zero. steps: points of integrated gradients, 0: not computed.
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
    values: np.ndarray
    baseline_values: np.ndarray
    scores: dict[str, dict[str, np.ndarray]]
    texts: dict[str, str]
    notes: tuple[str, ...] = ()
    pixels: np.ndarray | None = None
    grid: tuple[int, int] = (0, 0)

    @property
    def changes(self) -> np.ndarray:
        """The metric on the input minus that on the baseline, fp64 [N]."""
        return self.values - self.baseline_values

    @property
    def gaps(self) -> np.ndarray | None:
        """Sums of the integrated gradients minus `changes`, fp64 [N]; None if they were not computed."""
        if "integrated" not in self.scores:
            return None
        return sum(np.nansum(each, axis=1) for each in self.scores["integrated"].values()) - self.changes
