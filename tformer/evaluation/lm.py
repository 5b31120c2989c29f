"""Loss and perplexity of language models: causal ones over a token corpus, masked ones by masking each token alone.

The tokens t_0 ... t_{N-1} of a corpus have N - 1 predictions, of t_i from the tokens before it. They are cut into
windows of `seq_len`:

- without `stride` windows do not overlap: window k reads t_{kT} ... t_{kT+T-1} and predicts the T tokens one place
  further; the last window is as short as the text leaves it. Validation during training does the same.
- with `stride` S < T each window moves on by S and only its last S predictions count, so that every prediction but the
  first few has a context of at least T - S tokens. Slower by T / S; papers report this as sliding-window perplexity.

No window is padded: the short last one is a separate batch. bits_per_byte = sum of nats / ln 2 / bytes of the text.

Pseudo-perplexity of a masked language model (Salazar et al., arXiv 1910.14659, equation 4) is

    PPPL = exp( -1/N * sum over sentences, sum over t of log P(w_t | the sentence with w_t alone masked) )

Each of the N tokens costs a row: a sequence of n tokens is copied n times, each copy with another token masked. Special
tokens of the template are neither masked nor counted. It compares masked models of one tokenizer.

Shapes: M masked copies of a batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import numpy as np
import torch
from torch import nn

from tformer.data.batching.batch import Batch
from tformer.data.batching.padding import pad_layout
from tformer.data.batching.windows import restarting_positions
from tformer.data.shards.corpus import TokenCorpus
from tformer.decoding.inference import inference
from tformer.evaluation.predict import default_batch_tokens, divided
from tformer.metrics.text import bits_per_byte, perplexity
from tformer.model import Transformer
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives.base import Objective
from tformer.recipe.sections import Data
from tformer.support.errors import InputError
from tformer.tokenizer.special import SpecialIds
from tformer.workers.work import QUIET, Work


@dataclass(frozen=True, slots=True)
class Window:
    """A window that reads tokens start … stop - 1 and counts the predictions of tokens counted_from … stop."""

    start: int
    stop: int
    counted_from: int


def windows(num_tokens: int, seq_len: int, stride: int) -> Iterator[Window]:
    """The windows of a text of `num_tokens`; tokens 1 … num_tokens - 1 are predicted once each."""
    predicted = 0  # tokens 1 … predicted are done
    while predicted < num_tokens - 1:
        start = max(0, predicted + stride - seq_len)
        advance = seq_len if predicted == 0 else stride
        stop = min(predicted + advance, num_tokens - 1)
        yield Window(start=start, stop=stop, counted_from=predicted + 1)
        predicted = stop


def batches(all_windows: Iterator[Window], batch_size: int) -> Iterator[list[Window]]:
    """Batches of up to `batch_size` neighbouring windows of one shape."""
    for _, same_shape in groupby(all_windows, lambda each: (each.stop - each.start, each.counted_from - each.start)):
        while batch := list(islice(same_shape, batch_size)):
            yield batch


def evenly_spread(all_windows: Iterator[Window], total: int, share: float) -> Iterator[Window]:
    """This share of `total` windows, at least one, evenly spread."""
    count = max(1, round(share * total))
    return (window for n, window in enumerate(all_windows) if n * count // total > (n - 1) * count // total)


def isolates_documents(data: Data) -> bool:
    """Whether models trained on such data attend within single documents only."""
    return data.document_mask or data.packing == "none"


def evaluate_lm(
    model: Transformer,
    corpus: TokenCorpus,
    objective: Objective,
    *,
    seq_len: int,
    batch_size: int,
    stride: int | None = None,
    document_mask: bool = False,
    share: float = 1.0,
    work: Work = QUIET,
) -> dict[str, float]:
    """Loss (nats per token), perplexity, bits_per_byte, accuracy, tokens (predicted), bytes and tokens_per_second.

    The loss is the objective's, as in training; perplexity and bits_per_byte are never smoothed.
    The model runs as it is (its `compute_dtype`, on its device); the loss is summed in fp64. The result does not
    depend on `batch_size` beyond rounding. `document_mask`: tokens see their own document only, for models trained so.
    `share` of the windows is read, evenly spread.
    `work` is polled before every batch; once it is stopped, the metrics cover the text read so far. Several
    workers divide the batches; all get the metrics, added in the order of the batches.

    Raises InputError for a text of fewer than two tokens, ValueError for a stride outside 1 … seq_len.
    """
    stride = seq_len if stride is None else stride
    if not 1 <= stride <= seq_len:
        raise ValueError(f"stride must be between 1 and seq_len {seq_len}, found {stride}")
    if len(corpus) < 2:
        raise InputError(f"the text has {len(corpus)} tokens, evaluation needs at least 2")
    device = next(model.parameters()).device
    total = len(corpus) - 1
    chosen = windows(len(corpus), seq_len, stride)
    if share < 1.0:
        chosen = evenly_spread(chosen, 1 + -(-max(0, total - seq_len) // stride), share)
    sums_3 = torch.zeros(3, dtype=torch.float64, device=device)  # of the loss, in nats, and tokens that are predicted
    tokens = 0

    def sums_of(batch: list[Window]) -> torch.Tensor:
        result = objective.loss(model, load_batch(corpus, batch, document_mask=document_mask).to(device))
        loss = torch.stack([term.weight * term.sum for term in result.terms.values()]).sum()
        return torch.stack([loss, result.metrics["nll"].sum, result.metrics["accuracy"].sum]).double()

    began = time.perf_counter()
    with inference(model):
        for batch, of_batch_3 in divided(batches(chosen, batch_size), sums_of, work, device=device):
            sums_3 += of_batch_3
            tokens += sum(window.stop - window.counted_from + 1 for window in batch)
            work.report(tokens, total)
    return summarize(
        *sums_3.tolist(),
        tokens=tokens,
        num_bytes=corpus.num_bytes if tokens == total else max(1, round(corpus.num_bytes * tokens / total)),
        seconds=time.perf_counter() - began,
    )


def load_batch(corpus: TokenCorpus, batch: list[Window], *, document_mask: bool = False) -> Batch:
    """Inputs and labels [B, T], ignored where another window counts; documents as training numbers them."""
    tokens = np.stack([corpus.slice(window.start, window.stop + 1) for window in batch]).astype(np.int64)
    labels = tokens[:, 1:].copy()
    labels[:, : batch[0].counted_from - batch[0].start - 1] = IGNORED_LABEL
    positions = documents = None
    if document_mask:
        places = np.stack([np.arange(window.start, window.stop) for window in batch])
        numbers = corpus.document_numbers(places)
        positions, documents = torch.from_numpy(restarting_positions(numbers)), torch.from_numpy(numbers)
    return Batch(
        input_ids=torch.from_numpy(tokens[:, :-1].copy()),
        labels=torch.from_numpy(labels),
        position_ids=positions,
        document_ids=documents,
    )


def summarize(
    loss: float, nll: float, correct: float, *, tokens: int, num_bytes: int, seconds: float
) -> dict[str, float]:
    """The metrics, from sums over `tokens` predictions (NaN for none)."""
    nan = float("nan")
    return {
        "loss": loss / tokens if tokens else nan,
        "perplexity": perplexity(nll / tokens if tokens else nan),
        "bits_per_byte": bits_per_byte(nll, num_bytes) if tokens else nan,
        "accuracy": correct / tokens if tokens else nan,
        "tokens": tokens,
        "bytes": num_bytes,
        "tokens_per_second": tokens / seconds if tokens else 0.0,
    }


def combine_validation(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Metrics of several texts together, from `evaluate_lm`'s metrics of each (at least one)."""
    if len(parts) == 1:
        return dict(parts[0])
    parts = [part for part in parts if part["tokens"]]
    return summarize(
        sum(part["loss"] * part["tokens"] for part in parts),
        sum(part["bits_per_byte"] * part["bytes"] * math.log(2) for part in parts),
        sum(part["accuracy"] * part["tokens"] for part in parts),
        tokens=sum(part["tokens"] for part in parts),
        num_bytes=sum(part["bytes"] for part in parts),
        seconds=sum(part["tokens"] / part["tokens_per_second"] for part in parts),
    )


def pseudo_perplexity(
    model: nn.Module,
    sequences: Sequence[np.ndarray],
    special_ids: SpecialIds,
    *,
    places: np.ndarray | None = None,
    max_tokens: int | None = None,
    batch_tokens: int | None = None,
    work: Work = QUIET,
) -> dict[str, float]:
    """{"pseudo_perplexity", "loss" (nats per token), "tokens"} of sequences of ids, their special tokens included.

    `places`: position of the one token to predict in each sequence, the longest sequences first; None: every token is
    predicted. `max_tokens`: maximum number of predicted tokens, evenly spread; `batch_tokens`: tokens of a batch with
    its padding, None: chosen for the device. `work` is polled before every batch; once it is stopped, the metrics
    cover the tokens so far (NaN for none), the longest sequences first. Several workers divide the batches.

    Raises InputError for a tokenizer without a mask token, and for nothing to predict.
    """
    mask_id = special_ids.mask
    if mask_id is None:
        raise InputError("pseudo-perplexity needs a tokenizer with a mask token, this one has none")
    row_of, place_of = np.arange(len(sequences)), places
    if place_of is None:
        row_of, place_of = _targets(sequences, special_ids, max_tokens)
    total, tokens = len(row_of), 0
    if not total:
        raise InputError("there is nothing to evaluate: the text has no tokens")
    device = next(model.parameters()).device
    budget = batch_tokens or default_batch_tokens(device)
    nll = torch.zeros((), dtype=torch.float64, device=device)

    def batches() -> Iterator[slice]:
        start = 0
        while start < total:
            stop = min(total, start + max(1, budget // len(sequences[row_of[start]])))
            yield slice(start, stop)
            start = stop

    def nll_of(chosen: slice) -> torch.Tensor:
        """Sum of -log P of the token at each row's position, with that token masked."""
        rows, places = [sequences[row] for row in row_of[chosen]], place_of[chosen]
        layout = pad_layout([len(row) for row in rows])
        ids_MT, mask = layout.fill(rows, 0), layout.mask()
        labels_MT = np.full_like(ids_MT, IGNORED_LABEL)
        index_M = np.arange(len(rows))
        labels_MT[index_M, places] = ids_MT[index_M, places]
        ids_MT[index_M, places] = mask_id
        output = model(
            torch.from_numpy(ids_MT).to(device),
            attention_mask=None if mask is None else torch.from_numpy(mask).to(device),
        )
        nll: torch.Tensor = output.loss_terms("masked_lm", torch.from_numpy(labels_MT).to(device)).nll
        return nll.double()

    with inference(model):
        for chosen, of_batch in divided(batches(), nll_of, work, device=device):
            nll += of_batch
            tokens = chosen.stop
            work.report(tokens, total)
    loss = nll.item() / tokens if tokens else float("nan")
    return {"pseudo_perplexity": perplexity(loss), "loss": loss, "tokens": tokens}


def unpredicted(special_ids: SpecialIds) -> list[int]:
    """Ids of the template, which pseudo-perplexity leaves out."""
    template = (special_ids.pad, special_ids.bos, special_ids.eos, special_ids.cls, special_ids.sep)
    return [token for token in template if token is not None]


def _targets(
    sequences: Sequence[np.ndarray], special_ids: SpecialIds, max_tokens: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """(sequence, position) of every token to predict, longest sequences first."""
    left_out = unpredicted(special_ids)
    places = [np.flatnonzero(~np.isin(ids, left_out)) for ids in sequences]
    row_of = np.repeat(np.arange(len(places)), [len(part) for part in places])
    place_of = np.concatenate([np.zeros(0, dtype=np.int64), *places])
    if max_tokens is not None and max_tokens < len(row_of):
        kept = np.arange(max_tokens) * len(row_of) // max_tokens
        row_of, place_of = row_of[kept], place_of[kept]
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
    order = np.argsort(-lengths[row_of], kind="stable")
    return row_of[order], place_of[order]
