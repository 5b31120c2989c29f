"""Metrics: pure functions from numbers (or strings) to numbers, one file a family. They import nothing of ours."""

from __future__ import annotations
