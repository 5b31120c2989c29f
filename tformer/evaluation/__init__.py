"""Metrics of a loaded model over data."""
