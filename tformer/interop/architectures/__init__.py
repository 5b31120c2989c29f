"""The architectures that are read and written, by the `model_type` of their config.json."""

from __future__ import annotations

from tformer.interop.architecture import Architecture
from tformer.interop.architectures.gpt2 import GPT2

ARCHITECTURES: dict[str, Architecture] = {architecture.model_type: architecture for architecture in (GPT2,)}
