"""Pruning (LayerDrop, arXiv 1909.11556; heads, arXiv 1905.10650): a trained model in, a smaller one out."""

from __future__ import annotations

from tformer.workflows.prune.layers import LayerChoice, Plan
from tformer.workflows.prune.pruning import Pruned, check_plan, prune

__all__ = ["LayerChoice", "Plan", "Pruned", "check_plan", "prune"]
