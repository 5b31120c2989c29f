"""Benchmarks of speed, memory and time to quality: every measurement in a process of its own, and reports of them."""
