"""Workflows over trained models and runs: inspect, prune, sweep, and lists of runs."""
