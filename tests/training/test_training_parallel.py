"""One, two and four processes: the same losses, weights and counts, and ranks that are equal to the bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.small_steps import PRESETS
from tests.training.worlds import Training, in_processes, largest_difference, recipe_of
from tformer.errors import InputError
from tformer.training import assemble
from tformer.training.parallel import Parallel, SingleProcess

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its processes")

STEPS = 4
TOLERANCE = 1.0e-5

LAYERDROP, LEARNED = {"layerdrop": 0.4}, {"layerdrop": {"rate": 0.4, "learned": True}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{preset: (preset, {}) for preset in PRESETS},
    "next sentence": ("bert/tiny", {"objectives": [{"kind": "masked_lm"}, {"kind": "next_sentence"}]}),
    "word dropout, swapped pairs": (
        "bert/classify",
        {"objectives": [{"kind": "classification", "word_dropout": 0.2, "swap_pairs": True}]},
    ),
    "random padding": ("gpt/small", {"data": {"padding": "random"}}),
    "left padding": ("gpt/small", {"data": {"padding": "left"}}),
    "pairs by tokens": ("transformer/tiny", {"training": {"batch_size": None, "batch_tokens": 64}}),
    "a micro-batch of one row": ("gpt/small", {"training": {"batch_size": 1, "grad_accum": 5}}),
    "no accumulation": ("gpt/small", {"training": {"grad_accum": 1}}),
    "no clipping": ("gpt/small", {"optimizer": {"clip_grad_norm": None}}),
    "averaged weights": ("gpt/small", {"training": {"ema_decay": 0.9}}),
    "muon": ("gpt/small", {"optimizer": {"kind": "muon"}}),
    "adafactor": ("t5/tiny", {"optimizer": {"kind": "adafactor"}}),
    "adam": ("gpt/small", {"optimizer": {"kind": "adam"}}),
    "layerdrop": ("bert/tiny", {"model": {"encoder": LAYERDROP}}),
    "layerdrop of both sides": ("bart/tiny", {"model": {"encoder": LAYERDROP, "decoder": LAYERDROP}}),
    "learned layerdrop": ("gpt/small", {"model": {"decoder": LEARNED}}),
    "drophead": ("llama/tiny", {"model": {"decoder": {"drophead": 0.4}}}),
    "layerdrop, drophead, electra": ("electra/tiny", {"model": {"encoder": {**LAYERDROP, "drophead": 0.4}}}),
    "drophead, checkpointing": (
        "gpt/small",
        {"model": {"decoder": {"drophead": 0.4}}, "training": {"activation_checkpointing": True}},
    ),
    "checkpointing": ("bert/tiny", {"training": {"activation_checkpointing": True}}),
    "untied": ("gpt/small", {"model": {"tie": {"output": False}}}),
    "frozen groups": ("gpt/small", {"optimizer": {"groups": [{"match": "decoder.blocks.0.*", "frozen": True}]}}),
    "a head that is not trained": ("bert/classify", {"model": {"heads": [{"kind": "classifier"}, {"kind": "pooler"}]}}),
}
