"""What the model writes during training: a sample after each validation, which the run keeps in samples.txt."""

from __future__ import annotations

from collections.abc import Callable

from tformer.decoding.generate import generate
from tformer.decoding.prompts import encode_prompt
from tformer.decoding.settings import GenerationSettings
from tformer.model import Transformer
from tformer.tokenizer import Tokenizer

MAX_SAMPLE_TOKENS = 120


def write_sample(
    model: Transformer,
    tokenizer: Tokenizer,
    settings: GenerationSettings,
    *,
    text: str,
    should_stop: Callable[[], bool],
) -> str | None:
    """`text` (empty: from the start) and what the model makes of it; drawn from a generator of its own."""
    [[completion]] = generate(
        model, [encode_prompt(tokenizer, text)], settings, tokenizer=tokenizer, should_stop=should_stop
    )
    return None if completion.finish_reason == "interrupted" else text + (completion.text or "")
