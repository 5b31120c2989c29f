"""Inspection of a model: modules and cost, shapes of all tensors, integrity of its files."""
