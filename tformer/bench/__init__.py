"""Benchmarks of speed and memory: every measurement runs in a separate process; and the reports."""
