"""The ground floor, which imports nothing above it: errors, files, processes, options, texts of numbers, the device."""

__version__ = "0.1.0"
