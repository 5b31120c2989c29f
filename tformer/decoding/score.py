"""Force-decoding: log-probabilities of given targets, token by token, and cross-attention alignments.

One forward pass reads a whole target (teacher forcing). It gives the same sums as beam search, and also alignments,
which the engine with a cache does not compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tformer.data.batching.padding import WIDTH_MULTIPLE, PadLayout, pad_layout
from tformer.decoding.inference import inference
from tformer.model import Transformer
from tformer.nn.heads import ModelOutput
from tformer.support.errors import InputError, require_finite
from tformer.workers.work import QUIET, Work

# Shapes: B rows, T source tokens, U decoder tokens, V vocabulary; of one row: t source tokens, u target tokens.

HEAD = "lm"


@dataclass(frozen=True)
class TargetScore:
    """Natural logarithms of the probability of each target token, and the decoder's attention.

    `alignment`: fp32 [u, t], the attention of each target token to each source token (special ones included) when it
    was predicted: the mean over the heads of one layer. None unless requested.
    `is_greedy`: whether every token is the most probable one. None unless requested.
    """

    logprobs: tuple[float, ...]
    alignment: np.ndarray | None = None
    is_greedy: bool | None = None

    @property
    def logprob(self) -> float:
        """Log-probability of the whole target."""
        return float(np.sum(np.array(self.logprobs, dtype=np.float64)))


@dataclass(frozen=True)
class _ScoringExample:
    source: Sequence[int] | None  # None: a decoder-only model
    context: Sequence[int]  # the decoder's tokens before the target
    target: Sequence[int]

    @property
    def decoder_length(self) -> int:
        return len(self.context) + len(self.target) - 1

    @property
    def length(self) -> int:
        return self.decoder_length + (len(self.source) if self.source is not None else 0)


def score_targets(
    model: Transformer,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    start_ids: Sequence[int],
    alignments: bool = False,
    **options: Any,
) -> list[TargetScore]:
    """Log-probabilities of each target after its source under an encoder-decoder, in order.

    Args:
        sources: ids as the encoder reads them, special ones included.
        targets: ids to be predicted, with eos where they end by it. An empty one has no probabilities.
        start_ids: the decoder's start tokens.
        alignments: also return the cross-attention of the last layer of the decoder.
        options: those of `_score`.

    Raises InputError for a source or target that is longer than the model's context.
    """
    rows = [_ScoringExample(source, start_ids, target) for source, target in zip(sources, targets, strict=True)]
    assert model.decoder is not None
    tap = f"decoder.{len(model.decoder.blocks) - 1}.cross_attention.weights" if alignments else None
    return _score(model, rows, tap=tap, **options)


def score_continuations(
    model: Transformer, prompts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], **options: Any
) -> list[TargetScore]:
    """Log-probabilities of each target after its prompt (at least one token) under a decoder-only model, in order.

    The options are those of `_score`, the errors those of `score_targets`.
    """
    rows = [_ScoringExample(None, prompt, target) for prompt, target in zip(prompts, targets, strict=True)]
    return _score(model, rows, **options)


def prompt_logprobs(
    model: Transformer, ids: Sequence[int], *, vocab_size: int | None = None, alternatives: int = 0
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """(log-probability, the most probable ids with theirs) of each token of a text but the first, by a decoder alone.

    vocab_size: the tokenizer's, see `_score`. alternatives: number of most probable tokens.
    """
    if len(ids) < 2:
        return []
    found: list[tuple[float, tuple[tuple[int, float], ...]]] = []
    with inference(model):
        ids_1T = torch.tensor([list(ids)], device=next(model.parameters()).device)
        places_1T = torch.ones_like(ids_1T[:, 1:], dtype=torch.bool)
        for logits_NV in model(ids_1T[:, :-1]).logit_chunks(HEAD, places_1T):
            logprobs_NV = logits_NV[:, :vocab_size].log_softmax(-1)
            require_finite(logprobs_NV.amax(-1), "log-probabilities")
            wanted_N1 = ids_1T[0, 1 + len(found) : 1 + len(found) + len(logprobs_NV), None]
            own, best = logprobs_NV.gather(1, wanted_N1)[:, 0].tolist(), logprobs_NV.topk(alternatives)
            tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            found += [(each, tuple(zip(*top, strict=True))) for each, top in zip(own, tops, strict=True)]
    return found


def _score(
    model: Transformer,
    rows: Sequence[_ScoringExample],
    *,
    vocab_size: int | None = None,
    batch_tokens: int = 4096,
    tap: str | None = None,
    greedy: bool = False,
    work: Work = QUIET,
) -> list[TargetScore]:
    """The score of each row.

    Args:
        vocab_size: the tokenizer's; a model's vocabulary may be rounded up. None: the model's.
        batch_tokens: number of tokens of sources and targets in a batch with their padding; at least one pair.
        tap: name of the attention that becomes the alignment.
        greedy: also find `is_greedy`.
        work: reports the pairs done, and is polled before every batch; once it is stopped, the probabilities of the
            rest are NaN. Several workers divide the batches, and all get all scores, without alignments.
    """
    for number, row in enumerate(rows, start=1):
        for side, length, longest in (
            ("source", len(row.source or ()), model.max_seq_len),
            ("target", row.decoder_length, model.longest_target),
        ):
            if length > longest:
                raise InputError(
                    f"{side} {number} has {length:,} tokens, but the model's context holds {longest:,}",
                    hint="shorten it",
                )
    scores = [
        TargetScore(
            (float("nan"),) * len(row.target),
            np.zeros((len(row.target), len(row.source or ())), dtype=np.float32) if tap else None,
        )
        for row in rows
    ]
    with inference(model):
        done = 0
        for batch, found in work.worker.divide(
            _batches(rows, batch_tokens),
            lambda batch: list(_score_batch(model, [rows[index] for index in batch], vocab_size, tap, greedy)),
            should_stop=work.should_stop,
            to_json=lambda found: [(score.logprobs, score.is_greedy) for score in found],
            from_json=lambda found: [TargetScore(tuple(each), is_greedy=best) for each, best in found],
        ):
            for index, score in zip(batch, found, strict=True):
                scores[index] = score
            done += len(batch)
            work.report(done, len(rows))
    return scores


def _batches(rows: Sequence[_ScoringExample], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of rows with a target, longest first: a batch that does not fit into memory fails at once."""
    order = sorted((i for i, row in enumerate(rows) if row.target), key=lambda i: -rows[i].length)
    start = 0
    while start < len(order):
        count = max(1, batch_tokens // max(1, rows[order[start]].length))
        yield order[start : start + count]
        start += count


def _score_batch(
    model: Transformer, rows: Sequence[_ScoringExample], vocab_size: int | None, tap: str | None, greedy: bool
) -> Iterator[TargetScore]:
    layout = _layout([row.decoder_length for row in rows], model.longest_target)
    output = _forward(model, rows, layout, taps={tap} if tap else set())
    firsts = [len(row.context) - 1 for row in rows]
    places_BU = np.zeros((len(rows), layout.width), dtype=bool)
    for places_U, first, row in zip(places_BU, firsts, rows, strict=True):
        places_U[first : first + len(row.target)] = True
    device = output.hidden.device
    wanted_N = torch.tensor([token for row in rows for token in row.target], device=device)
    found: list[torch.Tensor] = []
    best: list[bool] = []
    start = 0
    for logits_NV in output.logit_chunks(HEAD, torch.from_numpy(places_BU).to(device)):
        logprobs_NV = logits_NV[:, :vocab_size].log_softmax(-1)
        ids_N = wanted_N[start : start + len(logprobs_NV)]
        found.append(logprobs_NV.gather(1, ids_N[:, None])[:, 0])
        if greedy:
            best += (logprobs_NV.argmax(-1) == ids_N).tolist()
        start += len(ids_N)
    require_finite(flat_N := torch.cat(found), "log-probabilities")
    flat = flat_N.tolist()
    weights_BUT = None if tap is None else output.taps[tap].float().mean(dim=1).cpu().numpy()
    start = 0
    for index, (first, row) in enumerate(zip(firsts, rows, strict=True)):
        place = slice(start, start + len(row.target))
        start = place.stop
        alignment = None
        if weights_BUT is not None:
            alignment = weights_BUT[index, first : first + len(row.target), : len(row.source or ())]
        yield TargetScore(tuple(flat[place]), alignment, all(best[place]) if greedy else None)


def _forward(model: Transformer, rows: Sequence[_ScoringExample], layout: PadLayout, *, taps: set[str]) -> ModelOutput:
    """The model's output. The decoder's padding is on the right, where no real position sees it: it needs no mask."""
    device = next(model.parameters()).device
    ids = [np.array([*row.context, *row.target][:-1], dtype=np.int64) for row in rows]
    ids_BU = torch.from_numpy(layout.fill(ids, 0)).to(device)
    sources = [np.array(row.source, dtype=np.int64) for row in rows if row.source is not None]
    if not sources:
        return model(ids_BU, taps=taps)
    source_layout = _layout([len(source) for source in sources], model.max_seq_len)
    mask_BT = source_layout.mask()
    return model(
        torch.from_numpy(source_layout.fill(sources, 0)).to(device),
        attention_mask=None if mask_BT is None else torch.from_numpy(mask_BT).to(device),
        decoder_input_ids=ids_BU,
        taps=taps,
    )


def _layout(lengths: list[int], longest: int) -> PadLayout:
    return pad_layout(lengths, max_len=longest, multiple=WIDTH_MULTIPLE)


# --- alignments -------------------------------------------------------------------------------------------------------

Links = tuple[tuple[int, int], ...]
"""(target position, source position) of tokens, counted from 0 in the texts without special tokens."""


def mean_attention(
    models: Sequence[Transformer],
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    start_ids: Sequence[int],
) -> list[np.ndarray]:
    """fp32 [u, t] for each pair, the mean over the models; see `TargetScore.alignment`."""
    each = []
    for model in models:
        scores = score_targets(model, sources, targets, start_ids=start_ids, alignments=True)
        each.append([score.alignment for score in scores if score.alignment is not None])
    return [np.stack(parts).mean(axis=0) for parts in zip(*each, strict=True)]


def links_of(attention: np.ndarray, ids: Sequence[int], ends: Sequence[int]) -> Links:
    """The source token with the highest attention of each target token, without the `ends`.

    attention: [u, t] over the source text without special tokens.
    """
    places = [place for place, token in enumerate(ids) if token not in ends]
    return tuple((number, int(attention[place].argmax())) for number, place in enumerate(places))
