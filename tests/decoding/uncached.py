"""The reference for the cached engine: every token from a fresh forward pass over the whole window, one row at a time.

Slow on purpose and free of everything that can go wrong in the engine (cache, padding, batches, compaction); the
tests require both to choose the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tformer.decoding.generate import collect, start_completions
from tformer.decoding.inference import inference
from tformer.decoding.sampling import TokenChooser
from tformer.decoding.settings import Generated, GenerationSettings
from tformer.model import Transformer
from tformer.tokenizer import Tokenizer


def uncached_generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    *,
    sources: Sequence[Sequence[int]] | None = None,
    tokenizer: Tokenizer | None = None,
    limits: Sequence[int] | None = None,
    num_start: int = 0,
    suppressed: Sequence[int] = (),
    first_row: int = 0,
) -> list[list[Generated]]:
    """What `generate` returns, computed without a cache. Same arguments, same errors."""
    completions = start_completions(
        model,
        prompts,
        settings,
        sources=sources,
        limits=limits,
        tokenizer=tokenizer,
        on_token=None,
        first_row=first_row,
    )
    device = next(model.parameters()).device
    with inference(model):
        for completion in completions:
            chooser = TokenChooser(
                settings,
                keys=[(completion.row, completion.sample)],
                histories=[completion.ids[num_start:]],
                limits=[completion.limit],
                vocab_size=None if tokenizer is None else tokenizer.vocab_size,
                suppressed=suppressed,
            )
            while completion.finish_reason is None:
                window = torch.tensor([completion.window()], device=device)
                if sources is None:
                    logits_1V = model(window).logits_at(-1)
                else:
                    source = torch.tensor([sources[completion.row - first_row]], device=device)
                    logits_1V = model(source, decoder_input_ids=window).logits_at(-1)
                ids, logprobs = chooser.choose(logits_1V)
                completion.take(ids[0], None if logprobs is None else logprobs[0])
    return collect(completions, settings.num_samples)
