"""Optimizers, learning-rate schedules and the moving average of the weights."""

from __future__ import annotations
