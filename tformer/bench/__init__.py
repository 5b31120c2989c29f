"""Measurements of speed and memory: each in a process of its own, and how tables and curves tell of them."""
