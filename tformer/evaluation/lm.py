"""How well a causal language model predicts a text: every token of it, each exactly once.

The tokens t_0 … t_{N-1} hold N - 1 predictions, t_i from those before it. They are cut into windows of `seq_len`:

- without `stride` (the default) windows do not overlap: window k reads t_{kT} … t_{kT+T-1} and predicts the T tokens
  one place further; the last window is as short as the text leaves it. The same as validation during training.
- with `stride` S < T each window moves on by S and only its last S predictions count, so that every prediction but the
  first few sees at least T - S tokens. Slower by T / S, and the figure that papers report as sliding-window perplexity.

No window is padded: the short last one is a batch of its own. bits_per_byte = sum of nats / ln 2 / bytes of the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
import torch

from tformer.data.batch import IGNORED_LABEL, Batch
from tformer.data.windows import restarting_positions
from tformer.errors import InputError
from tformer.metrics import bits_per_byte, perplexity
from tformer.model import Transformer
from tformer.recipe.data import Data


class Corpus(Protocol):
    """The part of a token corpus that evaluation needs."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def document_offsets(self) -> np.ndarray: ...

    def __len__(self) -> int: ...

    def slice(self, start: int, stop: int) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class Window:
    """Reads tokens start … stop - 1, and counts the predictions of tokens counted_from … stop."""

    start: int
    stop: int
    counted_from: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop - self.start, self.counted_from - self.start


def windows(num_tokens: int, seq_len: int, stride: int) -> Iterator[Window]:
    """Cut a text of `num_tokens` so that tokens 1 … num_tokens - 1 are predicted once each."""
    predicted = 0  # tokens 1 … predicted are done
    while predicted < num_tokens - 1:
        start = max(0, predicted + stride - seq_len)
        advance = seq_len if predicted == 0 else stride
        stop = min(predicted + advance, num_tokens - 1)
        yield Window(start=start, stop=stop, counted_from=predicted + 1)
        predicted = stop


def batches(all_windows: Iterator[Window], batch_size: int) -> Iterator[list[Window]]:
    """Up to `batch_size` neighbouring windows of one shape."""
    for _, alike in groupby(all_windows, key=lambda window: window.shape):
        batch: list[Window] = []
        for window in alike:
            batch.append(window)
            if len(batch) == batch_size:
                yield batch
                batch = []
        if batch:
            yield batch


def isolates_documents(data: Data) -> bool:
    """Whether a model trained on such data never looks beyond a document: by mask, or as each example is one."""
    return data.document_mask or data.packing == "none"


def evaluate_lm(
    model: Transformer,
    corpus: Corpus,
    *,
    seq_len: int,
    batch_size: int,
    stride: int | None = None,
    document_mask: bool = False,
    head: str = "lm",
    progress: Callable[..., None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> dict[str, float]:
    """Loss (nats per token), perplexity, bits_per_byte, accuracy, tokens (predicted), bytes and tokens_per_second.

    The model runs as it is (its `compute_dtype`, on its device); the loss is summed in fp64. The result does not
    depend on `batch_size` beyond rounding. `document_mask`: tokens see their own document only, for models trained so.
    `should_stop` is polled before every batch: when it says so, the figures are those of the text read so far
    (`tokens` tells how much), bits_per_byte by its share of the bytes.

    Raises InputError for a text of fewer than two tokens, ValueError for a stride outside 1 … seq_len.
    """
    stride = seq_len if stride is None else stride
    if not 1 <= stride <= seq_len:
        raise ValueError(f"stride must be between 1 and seq_len {seq_len}, found {stride}")
    if len(corpus) < 2:
        raise InputError(f"the text has {len(corpus)} tokens, evaluation needs at least 2")
    device = next(model.parameters()).device
    total = len(corpus) - 1
    nll = torch.zeros((), dtype=torch.float64, device=device)
    correct = torch.zeros((), dtype=torch.float64, device=device)
    tokens = 0
    was_training = model.training
    model.eval()
    began = time.perf_counter()
    try:
        with torch.inference_mode():
            for batch in batches(windows(len(corpus), seq_len, stride), batch_size):
                if should_stop is not None and should_stop():
                    break
                loaded = load_batch(corpus, batch, document_mask=document_mask).to(device)
                assert loaded.labels is not None
                _, nll_sum, _, correct_sum = model(**loaded.model_inputs()).loss_terms(head, loaded.labels)
                nll += nll_sum
                correct += correct_sum
                tokens += sum(window.stop - window.counted_from + 1 for window in batch)
                if progress is not None:
                    progress(tokens, total)
    finally:
        model.train(was_training)
    return summarise(
        nll.item(),
        correct.item(),
        tokens=tokens,
        num_bytes=corpus.num_bytes if tokens == total else max(1, round(corpus.num_bytes * tokens / total)),
        seconds=time.perf_counter() - began,
    )


def load_batch(corpus: Corpus, batch: list[Window], *, document_mask: bool = False) -> Batch:
    """Inputs and labels [B, T], ignored where another window counts; documents as training numbers them."""
    tokens = np.stack([corpus.slice(window.start, window.stop + 1) for window in batch]).astype(np.int64)
    labels = tokens[:, 1:].copy()
    labels[:, : batch[0].counted_from - batch[0].start - 1] = IGNORED_LABEL
    positions = documents = None
    if document_mask:
        places = np.stack([np.arange(window.start, window.stop) for window in batch])
        numbers = np.searchsorted(corpus.document_offsets, places, side="right")
        positions, documents = torch.from_numpy(restarting_positions(numbers)), torch.from_numpy(numbers)
    return Batch(
        input_ids=torch.from_numpy(tokens[:, :-1].copy()),
        labels=torch.from_numpy(labels),
        position_ids=positions,
        document_ids=documents,
    )


def summarise(nll: float, correct: float, *, tokens: int, num_bytes: int, seconds: float) -> dict[str, float]:
    """The figures that are reported, from sums over `tokens` predictions (0 of them: NaN)."""
    if tokens == 0:
        nan = float("nan")
        return dict.fromkeys(("loss", "perplexity", "bits_per_byte", "accuracy"), nan) | {
            "tokens": 0,
            "bytes": num_bytes,
            "tokens_per_second": 0.0,
        }
    return {
        "loss": nll / tokens,
        "perplexity": perplexity(nll / tokens),
        "bits_per_byte": bits_per_byte(nll, num_bytes),
        "accuracy": correct / tokens,
        "tokens": tokens,
        "bytes": num_bytes,
        "tokens_per_second": tokens / seconds,
    }
