"""The cached decoding engine: batches of prompts in, completions out.

Prompts of different lengths are padded on the left and read once (prefill); the cache is then repeated for every sample
of a prompt. Each step feeds one token per completion and projects only the last position to the vocabulary. A finished
completion leaves the batch at once. When the cache is full it is built again from each completion's context window
(`GenerationSettings.context`), which depends on the completion's own length, not on the others.

With `sources` the model is an encoder-decoder and the prompts are the decoder's first tokens. The encoder reads each
source once; the keys and values of cross-attention stay with the rows, also in a cache that is built again.

Legend: B live completions, T tokens fed, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from tformer.decoding.buckets import BucketedCache
from tformer.decoding.completion import Completion, OnToken, check_prompts
from tformer.decoding.inference import inference
from tformer.decoding.sampling import TokenChooser
from tformer.decoding.settings import Generated, GenerationSettings
from tformer.model import Transformer
from tformer.nn.cache import ModelCache, fastest_dtype
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.workers.work import ShouldStop, never

FILLER = 0  # any id will do: the mask hides it


def padded(
    rows: Sequence[Sequence[int]], device: torch.device, *, side: Literal["left", "right"]
) -> tuple[Tensor, Tensor | None]:
    """Ids long [B, T], padded on one side, and a bool mask [B, T] of the real ones; None: all are.

    Prompts are padded on the left, so that the newest token of every row is in the last column; sources on the right.
    """
    longest = max(map(len, rows))
    filled = [[FILLER] * (longest - len(row)) for row in rows]
    pairs = zip(filled, rows, strict=True)
    ids = [[*filler, *row] if side == "left" else [*row, *filler] for filler, row in pairs]
    ids_BT = torch.tensor(ids, device=device)
    if min(map(len, rows)) == longest:
        return ids_BT, None
    lengths_B1 = torch.tensor([[len(row)] for row in rows], device=device)
    columns_T = torch.arange(longest, device=device)
    return ids_BT, columns_T >= longest - lengths_B1 if side == "left" else columns_T < lengths_B1


def check_sources(
    model: Transformer, sources: Sequence[Sequence[int]], prefixes: Sequence[Sequence[int]], *, first_row: int = 0
) -> None:
    """Raise InputError for a source without tokens; ValueError for a model without an encoder or a decoder, or when
    there is not one decoder prefix for each source. Messages count sources from 1."""
    if model.encoder is None or model.decoder is None:
        raise ValueError("sources need a model with an encoder and a decoder")
    if len(sources) != len(prefixes):
        raise ValueError(f"{len(sources)} sources and {len(prefixes)} decoder prefixes: expected one prefix for each")
    for number, source in enumerate(sources, start=first_row + 1):
        if not source:
            raise InputError(f"source {number} has no tokens, expected at least 1")


def read_prompts(
    model: Transformer,
    rows: Sequence[Sequence[int]],
    cache: ModelCache,
    *,
    sources: Sequence[Sequence[int]] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Read prompts (and their sources) into the cache: logits [B, V] after each, and the mask of the padded prompts.

    sources: the encoder's; None: a decoder-only model, or a cache that holds the encoder's keys and values already.
    """
    device = next(model.parameters()).device
    ids_BT, mask_BT = padded(rows, device, side="left")
    inputs = _decoder_inputs(model, input_ids=ids_BT, attention_mask=mask_BT)
    if sources is not None:
        inputs["input_ids"], inputs["attention_mask"] = padded(sources, device, side="right")
    return model(**inputs, cache=cache).logits_at(-1), mask_BT


def feed(model: Transformer, ids_B1: Tensor, positions: Tensor, cache: ModelCache | BucketedCache) -> Tensor:
    """Append a token to each row: logits [B, V] after it. positions: [B, 1], or [1, 1] for all."""
    if isinstance(cache, BucketedCache):
        return cache.step(ids_B1, positions)
    return model(**_decoder_inputs(model, input_ids=ids_B1, position_ids=positions), cache=cache).logits_at(-1)


def _decoder_inputs(model: Transformer, **inputs: Tensor | None) -> dict[str, Tensor | None]:
    """The decoder's inputs under their names in `Transformer.forward`, beside an encoder or alone."""
    return inputs if model.encoder is None else {f"decoder_{name}": value for name, value in inputs.items()}


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    *,
    sources: Sequence[Sequence[int]] | None = None,
    tokenizer: Tokenizer | None = None,
    limits: Sequence[int] | None = None,
    num_start: int = 0,
    suppressed: Sequence[int] = (),
    on_token: OnToken | None = None,
    should_stop: ShouldStop = never,
    first_row: int = 0,
) -> list[list[Generated]]:
    """`settings.num_samples` completions of each prompt, in order.

    Args:
        prompts: token ids, at least one each; of the decoder, its start token included, when there are sources.
        sources: the encoder's token ids, one list for each prompt, at least one id each. The context's limit is the
            decoder's: the caller cuts sources.
        tokenizer: of the target side; gives the completions' text, and excludes ids without a token in a vocabulary
            that was rounded up; needed for stop texts.
        limits: maximum number of new tokens of each prompt's completions, up to `settings.max_new_tokens`.
        num_start: number of first tokens of every prompt that are no text (a decoder's start): n-gram blocking and the
            repetition penalty ignore them.
        suppressed: tokens that are not chosen (`suppressed_tokens`); the log-probabilities of the others do not change.
        on_token: called as (row, sample, id, text_piece) for every token as it is chosen; the pieces of a completion
            add up to its text (a piece is empty while a character or a possible stop text is incomplete).
        should_stop: polled before every step; completions cut short by it have the finish reason `interrupted`.
        first_row: number of the first prompt in a longer list. A completion depends on (seed, row number, sample
            number) and its prompt, not on how the list is cut into batches (up to rounding of the logits).

    Raises InputError for a prompt or source without tokens, or a prompt longer than the context with
    `context="error"`; ValueError for stop texts without a tokenizer, a model that cannot read sources, or not one
    source for each prompt.
    """
    completions = start_completions(
        model,
        prompts,
        settings,
        sources=sources,
        limits=limits,
        tokenizer=tokenizer,
        on_token=on_token,
        first_row=first_row,
    )
    with inference(model):
        _run(
            model,
            completions,
            settings,
            sources=sources,
            chooser=TokenChooser(
                settings,
                keys=[(completion.row, completion.sample) for completion in completions],
                histories=[completion.ids[num_start:] for completion in completions],
                limits=[completion.limit for completion in completions],
                vocab_size=None if tokenizer is None else tokenizer.vocab_size,
                suppressed=suppressed,
            ),
            should_stop=should_stop,
        )
    return collect(completions, settings.num_samples)


def start_completions(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    *,
    sources: Sequence[Sequence[int]] | None,
    limits: Sequence[int] | None,
    tokenizer: Tokenizer | None,
    on_token: OnToken | None,
    first_row: int,
) -> list[Completion]:
    """`num_samples` completions of each prompt, side by side, after the checks on the prompts and sources."""
    if settings.stop_texts and tokenizer is None:
        raise ValueError("stop texts need a tokenizer")
    if sources is not None:
        check_sources(model, sources, prompts, first_row=first_row)
    check_prompts(prompts, context=settings.context, max_seq_len=model.longest_target, first_row=first_row)
    return [
        Completion(
            prompt,
            settings,
            row=first_row + row,
            sample=sample,
            max_seq_len=model.longest_target,
            limit=None if limits is None else limits[row],
            tokenizer=tokenizer,
            on_token=on_token,
        )
        for row, prompt in enumerate(prompts)
        for sample in range(settings.num_samples)
    ]


def collect(completions: Sequence[Completion], num_samples: int) -> list[list[Generated]]:
    """Finished completions, grouped by prompt."""
    results = [completion.result() for completion in completions]
    return [results[start : start + num_samples] for start in range(0, len(results), num_samples)]


def _run(
    model: Transformer,
    completions: Sequence[Completion],
    settings: GenerationSettings,
    *,
    sources: Sequence[Sequence[int]] | None,
    chooser: TokenChooser,
    should_stop: ShouldStop,
) -> None:
    live = list(completions)
    cache: ModelCache | BucketedCache | None = None
    steps_left = settings.max_new_tokens
    while live:
        if should_stop():
            for completion in live:
                completion.interrupt()
            return
        if cache is None:
            # The samples of a prompt are neighbours: the first of each is read, and its cache repeated.
            windows = [completion.window() for completion in live]
            logits_BV, cache = _prefill(model, windows[:: settings.num_samples], steps=steps_left, sources=sources)
            if settings.num_samples > 1:
                cache.expand(settings.num_samples)
                logits_BV = logits_BV.repeat_interleave(settings.num_samples, dim=0)
            cache = _in_buckets(model, cache, steps=steps_left)
        elif cache.length == cache.capacity:
            windows = [completion.window() for completion in live]
            logits_BV, read = _prefill(model, windows, steps=steps_left, sources=sources, full=cache)
            cache = _in_buckets(model, read, steps=steps_left, full=cache)
        else:
            logits_BV = _step(model, live, cache)
        steps_left -= 1

        ids, logprobs = chooser.choose(logits_BV)
        for index, completion in enumerate(live):
            completion.take(ids[index], None if logprobs is None else logprobs[index])
        kept = [index for index, completion in enumerate(live) if completion.finish_reason is None]
        if kept and len(kept) < len(live):
            chooser.compact(kept)
            cache.compact(torch.tensor(kept, device=logits_BV.device))
        live = [live[index] for index in kept]


def _prefill(
    model: Transformer,
    windows: Sequence[Sequence[int]],
    *,
    steps: int,
    sources: Sequence[Sequence[int]] | None,
    full: ModelCache | BucketedCache | None = None,
) -> tuple[Tensor, ModelCache]:
    """Read whole windows into a new cache with room for `steps` tokens, or as many as the context holds.

    Where compiled steps follow, there is room for the windows alone: see `_in_buckets`.

    full: the cache of the same rows that the new one replaces; its keys and values of the sources are taken over.
    """
    device = next(model.parameters()).device
    longest = max(map(len, windows))
    capacity = min(model.longest_target, longest + steps)
    dtype = fastest_dtype(model.compute_dtype, device, slots=len(windows) * capacity, kernels=model.kernels)
    room = capacity if model.compiled_decoder is None else longest
    cache = model.new_cache(len(windows), room, device=device, dtype=dtype)
    if sources is not None and full is not None:
        views = full.encoder_views() if isinstance(full, BucketedCache) else (full.cross, full.encoder_mask)
        cache.cross, cache.encoder_mask = views
    logits_BV, _ = read_prompts(model, windows, cache, sources=sources if full is None else None)
    return logits_BV, cache


def _in_buckets(
    model: Transformer, cache: ModelCache, *, steps: int, full: ModelCache | BucketedCache | None = None
) -> ModelCache | BucketedCache:
    """The cache for the steps after a prefill: `cache` itself, or a cache of compiled steps (`full` if it is one)."""
    if model.compiled_decoder is None:
        return cache
    capacity = min(model.longest_target, cache.length + steps)
    if isinstance(full, BucketedCache):
        full.refill(cache, capacity=capacity)
        return full
    begun: BucketedCache = model.compiled_decoder.begin(cache, capacity=capacity)
    return begun


def _step(model: Transformer, live: Sequence[Completion], cache: ModelCache | BucketedCache) -> Tensor:
    """Feed the newest token of every completion."""
    device = next(model.parameters()).device
    ids_B1 = torch.tensor([[completion.ids[-1]] for completion in live], device=device)
    return feed(model, ids_B1, torch.tensor([[completion.next_position] for completion in live], device=device), cache)
