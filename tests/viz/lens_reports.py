"""Reports of the lens with random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tformer.inside.lens import Lens, LensReport
from tformer.inside.logits import Contributions, LogitPart

VOCABULARY, TOP = 1000, 10
HOSTILE = ("</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\u202eabc", "שלום", "😀", " \n\t")


def random_lens(layers: int, positions: int, *, vocabulary: int = VOCABULARY, seed: int = 0) -> Lens:
    draws, shape = np.random.default_rng(seed), (layers + 1, positions)
    order = np.argsort(draws.random((*shape, vocabulary)))[..., :TOP]
    shares = -np.sort(-draws.dirichlet(np.ones(TOP), shape)).astype(np.float32)
    ranks = draws.integers(0, vocabulary, shape)
    ranks[-1] = 0
    return Lens(
        rows=("input", *map(str, range(layers))),
        top_ids=order,
        top_probabilities=shares,
        targets=order[-1, :, 0],
        probability=draws.random(shape, dtype=np.float32),
        rank=ranks,
        entropy=draws.random(shape, dtype=np.float32) * 3,
        kl=draws.random(shape, dtype=np.float32),
    )


def random_report(
    layers: int, heads: int, positions: int, *, tokens: Sequence[str] | None = None, head: str = "lm", seed: int = 0
) -> LensReport:
    """A report of a decoder; of a classifier of ten labels with `head="classifier"`."""
    vocabulary = TOP if head == "classifier" else VOCABULARY
    lens = random_lens(layers, positions, vocabulary=vocabulary, seed=seed)
    parts = [LogitPart("embedding"), LogitPart("positions")]
    for layer in range(layers):
        parts += [LogitPart("self_attention", layer, number) for number in range(heads)]
        parts += [LogitPart("attention_bias", layer), LogitPart("feedforward", layer)]
    parts.append(LogitPart("bias"))
    values = np.random.default_rng(seed).normal(size=(positions, len(parts))).astype(np.float32)
    names = tuple(tokens or (f" word{place}" for place in range(positions)))
    return LensReport(
        lens=lens,
        logit_lens=lens,
        tokens=("answer",) if head == "classifier" else names,
        positions=tuple(range(positions)),
        words={token: f" w{token}" for token in range(vocabulary)},
        parts=Contributions(tuple(parts), values, values.sum(1)),
        without_parts="",
        against=None,
        tuned_kl=None,
        pools=head == "classifier",
        every=False,
        stack="decoder",
        model={"name": "runs/tiny", "step": 3, "sha256": "ab" * 32},
        texts={"text": " ".join(names)},
        notes=(),
    )
