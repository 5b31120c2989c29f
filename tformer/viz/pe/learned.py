"""Learned positional encodings of a run: tables and biases, and their plots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tformer.nn.positions import Positions
from tformer.viz.pe.fixed import bucket_of
from tformer.viz.pe.settings import EncodingSettings, EncodingView
from tformer.viz.plots import Heat, Numbers, Plot, counted_heat

RANDOM = "random initialization: this model has not been trained"


@dataclass(frozen=True)
class LearnedEncoding:
    """Learned positions of one stack.

    Attributes:
        name: the checkpoint, its run and the stack.
        trained: False: the numbers are random initialization.
        weight: learned: [positions, d_model].
        bias: t5_bias: [buckets, heads]; bidirectional: later keys have separate buckets.
        module: of a kind without views.
    """

    encoding: str
    name: str
    trained: bool = True
    weight: Numbers | None = None
    bias: Numbers | None = None
    bidirectional: bool = False
    module: Positions | None = None

    @property
    def learned(self) -> Numbers:
        assert self.weight is not None
        return self.weight

    @property
    def note(self) -> str:
        return self.name if self.trained else f"{self.name}, {RANDOM}"

    def similarity(self, rows: int) -> Numbers:
        """Cosine similarity of each pair of the first rows."""
        table = self.learned[:rows]
        unit = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
        return unit @ unit.T


def similarity(view: EncodingView, settings: EncodingSettings, table: LearnedEncoding) -> Plot:
    return counted_heat(table.similarity(view.rows(settings)), "position", "position", "RdBu_r", -1, 1, "cosine")


def t5_bias(view: EncodingView, settings: EncodingSettings, table: LearnedEncoding) -> Plot:
    reach = view.rows(settings) - 1
    offsets = range(-reach, (reach if table.bidirectional else 0) + 1)
    assert table.bias is not None
    values = table.bias[bucket_of(settings, np.array(offsets), bidirectional=table.bidirectional).astype(int)].T
    bound = float(np.abs(values).max()) or 1.0
    heads = range(1, len(values) + 1)
    return Heat(values, heads, offsets, "head", "offset: key − query", "RdBu_r", -bound, bound, "bias")
