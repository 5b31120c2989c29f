"""Inspection of a model: modules and cost, shapes of all tensors, drawings, integrity of its files."""
