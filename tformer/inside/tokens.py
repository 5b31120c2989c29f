"""Predictions of each token of a text: loss in bits, rank, the most probable tokens; calibration.

    bits = -log2 p(token | what the model read)        rank = number of tokens with a larger probability

decoder             each token from those before it; the first has no prediction
encoder-decoder     each token of the target, its end among them, from the source and the target before it
masked language     each token alone masked, as pseudo-perplexity does (arXiv 1910.14659, equation 4)

Calibration: the probability of the most probable token beside the share of predictions where it is right, in 15 equal
bins; the expected calibration error is the mean gap, weighted by the bins' sizes (arXiv 1706.04599, equation 3).
"""

# Shapes: B texts or windows, T tokens (of a report: of all texts, one after the other), N predictions, V vocabulary,
# K most probable tokens.

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tformer.data.batching.batch import Batch
from tformer.decoding.inference import inference
from tformer.evaluation.lm import unpredicted
from tformer.evaluation.predict import default_batch_tokens
from tformer.inside.answers import answer_text
from tformer.inside.options import TOKEN_HEADS
from tformer.loading import Identity, Loaded
from tformer.metrics.classification import calibration_curve, expected_calibration_error
from tformer.metrics.text import perplexity
from tformer.model import Transformer
from tformer.nn.losses import IGNORED_LABEL
from tformer.support.errors import InputError, require_finite
from tformer.workers.work import QUIET, Work

BINS = 15  # of the calibration
CONTEXT_TOKENS = 8  # on each side of a token
Span = tuple[int, int]


@dataclass(frozen=True)
class TokenReport:
    """The predictions of the tokens of one text, or of examples of data.

    Attributes:
        model: name, step and hash of the checkpoint.
        read: what the model read, in words.
        text: the text whose tokens these are, of an encoder-decoder the target; None: examples of data.
        source: of an encoder-decoder's text.
        ids: of the tokens [T]. example: number of the example that each is of [T].
        spans: first character of each token in `text`, and the one after its last [T]; None: no token of the text.
        bits, rank: of the token [T]; NaN and -1 where nothing predicts it.
        top_ids, top_probabilities: the most probable tokens, best first [T, K].
        words: texts of all these ids. spaced: these are words, or parts of words, without the spaces between them.
    """

    model: Identity
    read: str
    text: str | None
    source: str | None
    ids: np.ndarray
    example: np.ndarray
    spans: tuple[Span | None, ...]
    bits: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top_probabilities: np.ndarray
    words: Mapping[int, str]
    spaced: bool
    notes: tuple[str, ...] = ()

    @cached_property
    def tokens(self) -> list[str]:
        """The text of each token [T]."""
        return [self.words[token] for token in self.ids.tolist()]

    @cached_property
    def pieces(self) -> list[str]:
        """The characters of the text that each token stands for, white space before it too [T].

        A dot for further bytes of a character, and the own text of a token of the template.
        """
        found, done = list[str](), 0
        for word, span in zip(self.tokens, self.spans, strict=True):
            _, stop = span or (0, 0)
            found.append((self.text or "")[done:stop] or ("·" if span else word))
            done = max(done, stop)
        return found

    def top(self, place: int) -> list[tuple[str, float]]:
        """(text, probability) of the most probable tokens at a place."""
        pairs = zip(self.top_ids[place].tolist(), self.top_probabilities[place].tolist(), strict=True)
        return [(self.words[token], probability) for token, probability in pairs]

    @cached_property
    def predicted(self) -> np.ndarray:
        """Places of the tokens that have a prediction [N]."""
        return np.flatnonzero(self.rank >= 0)

    def hardest(self, count: int) -> list[int]:
        """Places of the tokens with the highest loss, the highest first."""
        return self.predicted[np.argsort(-self.bits[self.predicted], kind="stable")][:count].tolist()

    def context(self, place: int) -> tuple[str, str]:
        """Text of a few tokens before and after a token in the same example."""
        sides = []
        for near in (range(place - CONTEXT_TOKENS, place), range(place + 1, place + 1 + CONTEXT_TOKENS)):
            same = [n for n in near if 0 <= n < len(self.ids) and self.example[n] == self.example[place]]
            words = [self.tokens[n] for n in same]
            sides.append(" ".join(words).replace(" ##", "") if self.spaced else "".join(words))
        return sides[0], sides[1]

    @cached_property
    def summary(self) -> dict[str, float]:
        """tokens (predicted), bits_per_token, bits_per_character (of a text), perplexity, accuracy, ece."""
        bits, (sure, right) = self.bits[self.predicted], self._answers
        mean = float(bits.mean())
        return {
            "tokens": len(bits),
            "bits_per_token": mean,
            **({"bits_per_character": float(bits.sum()) / len(self.text)} if self.text else {}),
            "perplexity": perplexity(mean * math.log(2)),
            "accuracy": float(right.mean()),
            "ece": expected_calibration_error(sure, right, num_bins=BINS),
        }

    @cached_property
    def calibration(self) -> dict[str, list[float]]:
        """{confidence, accuracy, tokens} of each bin that is not empty."""
        bins = calibration_curve(*self._answers, num_bins=BINS)
        return dict(zip(("confidence", "accuracy", "tokens"), map(np.ndarray.tolist, bins), strict=True))

    @property
    def _answers(self) -> tuple[np.ndarray, np.ndarray]:
        """(probability of the most probable token, whether it is right) of each prediction [N]."""
        return self.top_probabilities[self.predicted, 0], self.rank[self.predicted] == 0


# --- predictions ------------------------------------------------------------------------------------------------------


def predict(
    model: Transformer, inputs: Mapping[str, Tensor], labels_BT: Tensor, *, head: str, vocab_size: int, top_k: int
) -> dict[str, np.ndarray]:
    """bits, rank, top_ids and top_probabilities of every label that is not ignored, row by row [N, ...].

    vocab_size: the tokenizer's; a model's vocabulary may be rounded up. Raises NotFiniteError for logits that are not.
    """
    places_BT = labels_BT != IGNORED_LABEL
    wanted_N1, start, found = labels_BT[places_BT][:, None], 0, list[dict[str, Tensor]]()
    for logits_NV in model(**inputs).logit_chunks(head, places_BT):
        require_finite(logits_NV[:, :vocab_size], "logits")
        logs_NV = logits_NV[:, :vocab_size].log_softmax(-1)
        own_N1 = logs_NV.gather(1, wanted_N1[start : start + len(logs_NV)])
        best = logs_NV.topk(min(top_k, vocab_size))
        found.append(
            {
                "bits": -own_N1[:, 0].double() / math.log(2),
                "rank": (logs_NV > own_N1).sum(-1),
                "top_ids": best.indices,
                "top_probabilities": best.values.exp(),
            }
        )
        start += len(logs_NV)
    return {name: torch.cat([each[name] for each in found]).cpu().numpy() for name in found[0]}


def read_tokens(loaded: Loaded, batches: Sequence[Batch], *, top_k: int, work: Work = QUIET) -> dict[str, np.ndarray]:
    """The arrays of a report, over the tokens [T] of all rows of the batches; padding is left out.

    A masked model reads each row as often as it has tokens, whatever the batch masks.

    Raises InputError for a masked model whose tokenizer has no mask.
    """
    head = next(name for name in TOKEN_HEADS if name in loaded.model.heads)
    tokenizer, device = loaded.target_tokenizer, next(loaded.model.parameters()).device
    options: dict[str, Any] = {"head": head, "vocab_size": tokenizer.vocab_size, "top_k": top_k}
    parts, rows = list[dict[str, np.ndarray]](), 0
    with inference(loaded.model):
        for number, batch in enumerate(batches):
            work.raise_if_stopped("while predicting tokens, nothing written")
            work.report(number, len(batches))
            inputs = {name: value.to(device) for name, value in batch.model_inputs().items()}
            side = "decoder_" if loaded.model.is_encoder_decoder else ""
            read_BT, mask_BT = inputs[f"{side}input_ids"], inputs.get(f"{side}attention_mask")
            assert batch.labels is not None
            labels_BT = batch.labels.to(device)
            labelled_BT = labels_BT != IGNORED_LABEL
            real_BT = torch.ones_like(labelled_BT) if mask_BT is None else mask_BT.bool()
            if head == "masked_lm":
                ids_BT = torch.where(labelled_BT, labels_BT, read_BT)
                left_out = torch.tensor(unpredicted(tokenizer.special), dtype=torch.long, device=device)
                known_BT, predicted_BT = real_BT, real_BT & ~torch.isin(ids_BT, left_out)
                if tokenizer.special.mask is None:
                    raise InputError(f"{loaded.path}: its tokenizer has no mask token, which hides a token to predict")
                copies = _each_masked(inputs, ids_BT, predicted_BT, tokenizer.special.mask)
                found = [predict(loaded.model, *each, **options) for each in copies]
            else:  # a label is the token after the one at its place
                none = torch.zeros_like(labelled_BT[:, :1])
                after_BT = torch.where(labelled_BT, labels_BT, read_BT.roll(-1, dims=1))
                ids_BT = torch.cat([read_BT[:, :1], after_BT], dim=1)
                goes_on_BT = labelled_BT | torch.cat([real_BT[:, 1:], none], dim=1)
                known_BT = torch.cat([real_BT[:, :1], goes_on_BT], dim=1)
                predicted_BT = torch.cat([none, labelled_BT], dim=1)
                found = [predict(loaded.model, inputs, labels_BT, **options)]
            part = {"ids": ids_BT[known_BT].cpu().numpy(), "example": known_BT.nonzero()[:, 0].cpu().numpy() + rows}
            predicted_T = predicted_BT[known_BT].cpu().numpy()
            for name in found[0] if found else ():
                values_N = np.concatenate([each[name] for each in found])
                empty = np.nan if values_N.dtype.kind == "f" else -1
                part[name] = np.full((len(predicted_T), *values_N.shape[1:]), empty, dtype=values_N.dtype)
                part[name][predicted_T] = values_N
            if found:
                parts.append(part)
            rows += len(ids_BT)
    if not any((part["rank"] >= 0).any() for part in parts):
        raise InputError("there is nothing to predict", hint="give a text of several tokens")
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _each_masked(
    inputs: Mapping[str, Tensor], ids_BT: Tensor, predicted_BT: Tensor, mask_id: int
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """(inputs, labels) of copies of the rows, each with another token masked, in the order of the tokens."""
    size = max(1, default_batch_tokens(ids_BT.device) // ids_BT.shape[1])
    places = predicted_BT.nonzero()
    for places_N2 in places.split(size) if len(places) else ():
        row_N, place_N1 = places_N2[:, 0], places_N2[:, 1:]
        ids_NT = ids_BT[row_N]
        labels_NT = torch.full_like(ids_NT, IGNORED_LABEL).scatter(1, place_N1, ids_NT.gather(1, place_N1))
        yield (
            {name: value[row_N] for name, value in inputs.items()}
            | {"input_ids": ids_NT.scatter(1, place_N1, mask_id)},
            labels_NT,
        )


def words_of(loaded: Loaded, found: Mapping[str, np.ndarray]) -> dict[int, str]:
    """The texts of all ids of `read_tokens`."""
    ids = np.unique(np.concatenate([found["ids"], found["top_ids"][found["rank"] >= 0].ravel()]))
    return {token: answer_text(loaded, "lm", token) for token in ids.tolist()}


# --- two runs ---------------------------------------------------------------------------------------------------------


def segments(one: TokenReport, other: TokenReport) -> tuple[list[dict[str, Any]], tuple[list[int], list[int]]]:
    """(the common segments of two reports on one text, the number of the segment of each token, -1: of none).

    A segment is the shortest piece of the text that consists of whole tokens of both: {start, end, text, bits: of each
    report, NaN without a prediction, difference: of the other minus the one}. White space counts as part of what
    follows it: some tokenizers put it into tokens, others leave it out. The bits of all segments add up to those of the
    tokens, so that runs with different tokenizers are compared without rounding.

    Raises InputError for reports on two texts.
    """
    text = one.text
    if text is None or text != other.text:
        raise InputError("segments: expected two reports on the same text")
    place_of = [0]  # of each character: where the white space before it begins
    for place, character in enumerate(text, start=1):
        place_of.append(place_of[-1] if character.isspace() else place)
    starts = [[-1 if span is None else place_of[span[0]] for span in report.spans] for report in (one, other)]
    edges = sorted(set(starts[0]) & set(starts[1]) - {-1})
    edges[:1] = [0]
    numbers = [(np.searchsorted(edges, each, side="right") - 1).tolist() for each in starts]
    first, second = (
        np.bincount(np.array(of) + 1, report.bits, len(edges) + 1)[1:].tolist()
        for report, of in zip((one, other), numbers, strict=True)
    )
    found = [
        {"start": start, "end": end, "text": text[start:end], "bits": (a, b), "difference": b - a}
        for (start, end), a, b in zip(pairwise([*edges, len(text)]), first, second, strict=True)
    ]
    return found, (numbers[0], numbers[1])
