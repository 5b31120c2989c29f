"""The table of objectives."""

from __future__ import annotations

from tformer.objectives.causal_lm import CausalLmOptions

ObjectiveOptions = CausalLmOptions  # becomes a union with the second kind
