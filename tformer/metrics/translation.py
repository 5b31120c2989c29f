"""BLEU and chrF over a corpus, by sacrebleu: scores come with the signature that makes them comparable.

BLEU: Papineni et al. 2002; chrF: Popović 2015; signatures: Post 2018 (arXiv 1804.08771). Texts are detokenised: the
metric has a tokenizer of its own, which the signature names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CorpusScore:
    """A score from 0 to 100 and how it was computed."""

    score: float
    signature: str


def bleu(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a", lowercase: bool = False
) -> CorpusScore:
    """Corpus BLEU of one reference per hypothesis. `tokenize`: 13a, zh, ja-mecab, char, ..."""
    from sacrebleu.metrics.bleu import BLEU

    _check(hypotheses, references)
    metric = BLEU(tokenize=tokenize, lowercase=lowercase)
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return CorpusScore(float(score.score), str(metric.get_signature()))


def chrf(hypotheses: Sequence[str], references: Sequence[str], *, word_order: int = 0) -> CorpusScore:
    """Corpus chrF of one reference per hypothesis; `word_order=2` is chrF++."""
    from sacrebleu.metrics.chrf import CHRF

    _check(hypotheses, references)
    metric = CHRF(word_order=word_order)
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return CorpusScore(float(score.score), str(metric.get_signature()))


def _check(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references) or not hypotheses:
        raise ValueError(f"expected one reference per hypothesis, found {len(hypotheses)} and {len(references)}")
