"""Scores of attention heads: what each head attends to, on random tokens that repeat or on examples of any data.

    previous      the token before                                    A[q, q - 1]
    first         the first token, where heads rest                   A[q, 0]
    duplicate     other places of the token read                      sum of A[q, k] over k with x[k] = x[q]
    induction     tokens that came after other places of it           sum of A[q, k] over k with x[k - 1] = x[q]

A score is the mean over the queries that have such keys, from 0 to 1; a decoder's keys are earlier ones. The keys are
those of TransformerLens's head detector (Nanda and Bloom 2022). Where T different random tokens come twice, the scores
are means of diagonals of A: q - 1, q - T and q - T + 1. Where 25 random tokens come four times, as by default,
induction is the prefix matching of Olsson et al. (arXiv 2209.11895).

Of cross-attention, special tokens of the source left out:

    sharpness     largest weight of a target token: the confidence of Voita et al. (arXiv 1905.09418)
    coverage      how much of the source is read: mean over its tokens of min(1, sum over t of A[t, s]), the coverage
                  of Wu et al. (arXiv 1609.08144, equation 14) without its logarithm
"""

# Shapes: B examples, T queries, S keys, H heads, L layers, P scores, V vocabulary.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tformer.data.encoding import token_text
from tformer.decoding.inference import inference
from tformer.loading import Loaded
from tformer.model import Transformer
from tformer.nn.taps import Replacement
from tformer.support.errors import InputError, did_you_mean, require_finite
from tformer.tokenizer import Tokenizer

Kind = Literal["encoder", "decoder", "cross"]
KINDS: dict[Kind, str] = {
    "encoder": "encoder self-attention",
    "decoder": "decoder self-attention",
    "cross": "cross-attention",
}
MEANINGS = {
    "previous": "attention to the token before",
    "first": "attention to the first token",
    "duplicate": "attention to other places of the same token",
    "induction": "attention to the tokens that came after other places of the same token",
    "sharpness": "largest weight on a token of the source",
    "coverage": "share of the source that is read",
}
SELF, CROSS = tuple(MEANINGS)[:4], tuple(MEANINGS)[4:]
DEFAULT_LENGTH, DEFAULT_COPIES = 25, 4

Scores = dict[Kind, dict[str, np.ndarray]]
"""fp64 [L, H] of each score by kind of attention; NaN where a score has no query, or a pruned layer fewer heads."""


@dataclass(frozen=True)
class HeadReport:
    """The scores of all heads of a checkpoint.

    Attributes:
        step: of the checkpoint.
        read: what the model read, in words.
        scores: see `Scores`.
        copying: of a causal model on repeated tokens, see `copying`; else empty.
    """

    step: int
    read: str
    scores: Scores
    copying: dict[str, float]

    def best(self, name: str, kind: Kind | None = None) -> tuple[int, int]:
        """(layer, head) with the highest score of this name; kind: default the last that has it.

        Raises InputError for a score that the model's heads do not have.
        """
        found = {each: scores[name] for each, scores in self.scores.items() if name in scores and kind in (None, each)}
        if not found:
            known = dict.fromkeys(each for scores in self.scores.values() for each in scores)
            raise InputError(f"these heads have no score '{name}'", hint=did_you_mean(name, known))
        found_LH = [*found.values()][-1]
        layer, head = divmod(int(np.nanargmax(found_LH)), found_LH.shape[1])
        return layer, head


def attention_maps(loaded: Loaded) -> dict[Kind, list[str]]:
    """The taps of attention weights, one a layer. Raises InputError for a model without tokens or without such maps."""
    if loaded.recipe.model.patches is not None:
        raise InputError(
            f"{loaded.path} reads images: these scores are of tokens",
            hint="tformer viz-attention --view summary measures its heads",
        )
    for stack in (loaded.model.encoder, loaded.model.decoder):
        for number, block in enumerate(stack.layers if stack is not None else ()):
            mechanism = block.self_attention.mechanism
            if mechanism.projects_keys or not mechanism.drops_weights:
                raise InputError(
                    f"{loaded.path}: layer {number} has attention of kind {mechanism.kind}, which forms no weights "
                    "between positions: its heads have no attention maps to score"
                )
    maps: dict[Kind, list[str]] = defaultdict(list)
    for name in loaded.model.tap_names():
        if name.endswith("attention.weights"):
            side: Kind = "encoder" if name.startswith("encoder") else "decoder"
            maps["cross" if "cross_attention" in name else side].append(name)
    return {kind: maps[kind] for kind in KINDS if kind in maps}


# --- repeated random tokens ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repeated:
    """Random tokens that come `copies` times: ids int64 [B, T]; `before` of them open the text."""

    ids_BT: Tensor
    before: int
    length: int
    copies: int

    def __str__(self) -> str:
        times = "twice" if self.copies == 2 else f"{self.copies} times"
        return f"{len(self.ids_BT)} sequences of {self.length} random tokens, each {times}"


def repeated_tokens(
    loaded: Loaded, *, length: int | None = None, copies: int = DEFAULT_COPIES, samples: int = 10, seed: int = 0
) -> Repeated:
    """Sequences of random tokens, each repeated, inside the special tokens that a text has.

    The tokens are printable ones of the vocabulary, all different where there are enough of them. A decoder's text
    begins with the token that it generates from, on which heads may rest.

    Args:
        length: tokens of a sequence; None: 25, or as many as fit in the length that the model was trained with.

    Raises InputError for more tokens than the model reads.
    """
    tokenizer, reader = loaded.text_tokenizer, loaded.reader
    before, after = [*(reader.single.prefix or reader.starts)], [*reader.single.suffix]
    special, longest = len(before) + len(after), loaded.model.max_seq_len
    room = (longest - special) // copies
    if room < 2 or (length or 0) > room:
        found = "" if length is None else f", found --length {length}"
        raise InputError(
            f"--copies {copies}: {loaded.path} reads {longest} tokens with the special ones, so at most {room} of them "
            f"{copies} times{found}"
        )
    if length is None:
        length = min(DEFAULT_LENGTH, max(2, (loaded.recipe.seq_len - special) // copies))
    pool, draw = np.array(printable_ids(tokenizer)), np.random.default_rng(seed)
    rows = []
    for _ in range(samples):
        chosen = draw.choice(pool, length, replace=len(pool) < length).tolist()
        rows.append([*before, *(chosen * copies), *after])
    return Repeated(torch.tensor(rows), len(before), length, copies)


def printable_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids of tokens that are text: no special tokens, parts of characters, or control characters."""

    def is_text(token: int) -> bool:
        text = token_text(tokenizer, token)
        return bool(text) and text.isprintable() and not tokenizer.is_special(token)

    found = [token for token, spelled in enumerate(tokenizer.tokens) if spelled and is_text(token)]
    if len(found) < 2:
        raise InputError(f"the vocabulary has {len(found)} printable tokens: too few to repeat")
    return found


def copying(
    model: Transformer, repeated: Repeated, *, replace: Mapping[str, Replacement] | None = None
) -> dict[str, float]:
    """Copying by a causal model: `first_loss` and `repeated_loss` (nats), `repeated_accuracy`.

    Of the first time and of the further times that a sequence is read, without each time's first token, which nothing
    announces. Olsson et al. (arXiv 2209.11895) call the drop of the loss in-context learning. `replace`: as of the
    model's forward, to measure it without a part of it.
    """
    ids_BT = repeated.ids_BT.to(next(model.parameters()).device)
    with inference(model):
        logits_BTV = model(ids_BT, replace=replace).logits[:, :-1]
    require_finite(logits_BTV, "outputs")
    labels_BT = ids_BT[:, 1:]
    losses_BT = -logits_BTV.log_softmax(-1).gather(-1, labels_BT.unsqueeze(-1)).squeeze(-1)
    right_BT = (logits_BTV.argmax(-1) == labels_BT).double()
    place_T = torch.arange(1, ids_BT.shape[1]) - repeated.before
    announced_T = (place_T > 0) & (place_T % repeated.length > 0) & (place_T < repeated.length * repeated.copies)
    first_T, later_T = announced_T & (place_T < repeated.length), announced_T & (place_T >= repeated.length)
    return {
        "first_loss": float(losses_BT[:, first_T].double().mean()),
        "repeated_loss": float(losses_BT[:, later_T].double().mean()),
        "repeated_accuracy": float(right_BT[:, later_T].mean()),
    }


# --- scores ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StackTokens:
    """Input of one stack, [B, T]: ids, masks of real ids and of text, and documents."""

    ids: Tensor
    real: Tensor
    text: Tensor
    documents: Tensor | None = None

    @classmethod
    def of(cls, inputs: Mapping[str, Tensor], special_V: Tensor, prefix: str = "") -> StackTokens:
        """The side of a model's inputs whose names begin with `prefix`."""
        ids, mask = inputs[f"{prefix}input_ids"], inputs.get(f"{prefix}attention_mask")
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        return cls(ids, real, real & ~special_V[ids], inputs.get(f"{prefix}document_ids"))


def keys_of(side: StackTokens, *, causal: bool) -> Tensor:
    """bool [4, B, T, T]: the keys of each query that `previous`, `first`, `duplicate` and `induction` count."""
    place = torch.arange(side.ids.shape[1], device=side.ids.device)
    query, key = place[:, None], place
    seen = side.real[:, :, None] & side.real[:, None, :]
    if causal:
        seen = seen & (key <= query)
    if side.documents is not None:
        seen = seen & (side.documents[:, :, None] == side.documents[:, None, :])
    same = (side.ids[:, :, None] == side.ids[:, None, :]) & side.text[:, :, None] & side.text[:, None, :] & seen
    same = same & (key != query)
    after = torch.cat((torch.zeros_like(same[..., :1]), same[..., :-1]), dim=-1)
    first = (key == side.real.int().argmax(1)[:, None, None]) & (key != query)
    return torch.stack(((key == query - 1).expand_as(seen), first.expand_as(seen), same, after)) & seen


def head_scores(loaded: Loaded, batches: Iterable[Mapping[str, Tensor]]) -> Scores:
    """The scores of every head over batches of model inputs.

    Every map is read where the forward pass makes it, and not kept, so that one is in memory at a time.
    """
    model, maps = loaded.model, attention_maps(loaded)
    device = next(model.parameters()).device
    special_V = special_tokens(loaded.text_tokenizer, device)
    target_V = special_tokens(loaded.target_tokenizer, device)
    sums_PH: dict[str, Tensor] = {}
    counts_P: dict[Kind, Tensor] = {kind: torch.zeros((), dtype=torch.float64) for kind in maps}

    def add(name: str, found_PH: Tensor) -> None:
        require_finite(found_PH, name)
        sums_PH[name] = sums_PH.get(name, 0) + found_PH.double().cpu()

    def read_self(name: str, keys_PBTS: Tensor, weights_BHTS: Tensor) -> Tensor:
        add(name, torch.einsum("bhts,pbts->ph", weights_BHTS.float(), keys_PBTS))
        return weights_BHTS

    def read_cross(name: str, target: StackTokens, source: StackTokens, weights_BHTS: Tensor) -> Tensor:
        seen = weights_BHTS.float() * target.real[:, None, :, None] * source.text[:, None, None, :]
        add(name, torch.stack((seen.amax(-1).sum((0, 2)), seen.sum(2).clamp(max=1).sum((0, 2)))))
        return weights_BHTS

    with inference(model):
        for given in batches:
            inputs = {name: value.to(device) for name, value in given.items()}
            source = StackTokens.of(inputs, special_V)
            target = StackTokens.of(inputs, target_V, "decoder_") if "cross" in maps else source
            replace: dict[str, Replacement] = {}
            for kind, names in maps.items():
                if kind == "cross":
                    counts_P[kind] = counts_P[kind] + torch.stack((target.real.sum(), source.text.sum())).cpu()
                    replace |= {name: partial(read_cross, name, target, source) for name in names}
                else:
                    keys_PBTS = keys_of(target if kind == "decoder" else source, causal=kind == "decoder")
                    counts_P[kind] = counts_P[kind] + keys_PBTS.any(-1).sum((1, 2)).cpu()
                    replace |= {name: partial(read_self, name, keys_PBTS.float()) for name in names}
            model(**inputs, replace=replace)
    scores: Scores = {}
    for kind, names in maps.items():
        most = max(sums_PH[name].shape[1] for name in names)
        found_LPH = torch.full((len(names), len(counts_P[kind]), most), torch.nan, dtype=torch.float64)
        for layer, name in enumerate(names):
            found_LPH[layer, :, : sums_PH[name].shape[1]] = sums_PH[name] / counts_P[kind][:, None]
        scores[kind] = dict(zip(CROSS if kind == "cross" else SELF, found_LPH.transpose(0, 1).numpy(), strict=True))
    return scores


def special_tokens(tokenizer: Tokenizer, device: torch.device) -> Tensor:
    """bool [V]: whether a token is special."""
    return torch.tensor([tokenizer.is_special(token) for token in range(tokenizer.vocab_size)], device=device)
