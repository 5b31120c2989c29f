"""Run directories and checkpoints: atomic, verified, never unpickled. Modules that read tensors import torch."""
