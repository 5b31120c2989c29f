"""Benchmarks of speed, memory and time to quality: every measurement runs in a separate process; and the reports."""
