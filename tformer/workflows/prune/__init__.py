"""Pruning (LayerDrop, arXiv 1909.11556; heads, arXiv 1905.10650): a trained model in, a smaller one out."""

from __future__ import annotations

from tformer.workflows.prune.layers import LayerChoice, Plan
from tformer.workflows.prune.pruning import Pruned, check_plan, prune
from tformer.workflows.prune.quality import HeldOut, LmText, Spread

__all__ = ["HeldOut", "LayerChoice", "LmText", "Plan", "Pruned", "Spread", "check_plan", "prune"]
