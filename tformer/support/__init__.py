"""Modules that every package may import: errors, files, processes, options, texts of numbers, the device."""

__version__ = "0.1.0"
