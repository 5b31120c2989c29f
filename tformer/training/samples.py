"""What the model writes during training: a sample after each validation, which the run keeps in samples.txt."""

from __future__ import annotations

from collections.abc import Callable

from tformer.decoding.generate import generate
from tformer.decoding.settings import GenerationSettings
from tformer.model import Transformer
from tformer.tokenizer import Tokenizer

MAX_SAMPLE_TOKENS = 120


def write_sample(
    model: Transformer,
    tokenizer: Tokenizer,
    settings: GenerationSettings,
    *,
    prompt: list[int],
    should_stop: Callable[[], bool],
) -> str:
    """The text that the model continues `prompt` with; sampling draws from its own generator, never training's."""
    [[completion]] = generate(model, [prompt], settings, tokenizer=tokenizer, should_stop=should_stop)
    return completion.text or ""

