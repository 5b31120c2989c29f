"""Text metrics: perplexity, bits per byte, BLEU and chrF (sacrebleu), exact match and F1 of answers (SQuAD).

BLEU: Papineni et al. 2002; chrF: Popović 2015; signatures, which make scores comparable: Post 2018 (arXiv 1804.08771).
Texts are detokenized: the metric has its own tokenizer, named in the signature. `moses` is the older measure of
Multi30k and others: both sides are lowercased (if requested), normalized and tokenized by the Moses scripts; its scores
differ from `13a`.

Answers are compared as by the evaluation script of SQuAD 2.0 (arXiv 1806.03822): in lower case, without punctuation,
articles and superfluous white space. F1 is that of the words, as a bag. A question without an answer is right, by both
measures, if none is given. Of several answers the best counts.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tformer.support.errors import InputError, did_you_mean


def perplexity(mean_nll_nats: float) -> float:
    """exp of the mean negative log-likelihood per token; infinity on overflow."""
    try:
        return math.exp(mean_nll_nats)
    except OverflowError:
        return math.inf


def bits_per_byte(nll_sum_nats: float, num_bytes: int) -> float:
    """nats / ln 2 / bytes: code length of the text under the model, in bits per UTF-8 byte."""
    if num_bytes <= 0:
        raise ValueError(f"bits per byte needs at least one byte, found {num_bytes}")
    return nll_sum_nats / math.log(2) / num_bytes


TOKENIZERS = ("13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none", "moses")
MOSES = "moses"  # moses:de has the rules of German
TOKENIZED_END = (" .", " ?", " !")
TOKENIZED_SHARE = 0.5  # of the texts that end in such a sign


@dataclass(frozen=True)
class CorpusScore:
    """A score from 0 to 100 and its signature."""

    score: float
    signature: str


def bleu(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a", lowercase: bool = False
) -> CorpusScore:
    """Corpus BLEU of one reference per hypothesis.

    `tokenize`: sacrebleu's 13a, intl, zh, ja-mecab, ko-mecab, char or none; or `moses` (English) and `moses:LANGUAGE`,
    which need the package sacremoses.

    Raises InputError for an unknown tokenizer and for a package that is not installed.
    """
    _check(hypotheses, references)
    if tokenize.partition(":")[0] == MOSES:
        return _moses_bleu(hypotheses, references, language=tokenize.partition(":")[2] or "en", lowercase=lowercase)
    return _sacrebleu(hypotheses, references, tokenize=tokenize, lowercase=lowercase)


def require_tokenizer(tokenize: str) -> None:
    """Raise the InputError that `bleu` would raise for this tokenizer."""
    bleu(["."], ["."], tokenize=tokenize)


def chrf(hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False) -> CorpusScore:
    """Corpus chrF of one reference per hypothesis."""
    from sacrebleu.metrics.chrf import CHRF

    _check(hypotheses, references)
    metric = CHRF(lowercase=lowercase)
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return CorpusScore(float(score.score), str(metric.get_signature()))


def ter(hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False) -> CorpusScore:
    """Corpus TER (translation edit rate) of one reference per hypothesis, lower is better."""
    from sacrebleu.metrics.ter import TER

    _check(hypotheses, references)
    metric = TER(case_sensitive=not lowercase)
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return CorpusScore(float(score.score), str(metric.get_signature()))


def sequence_accuracy(hypotheses: Sequence[str], references: Sequence[str], *, lowercase: bool = False) -> float:
    """The share of hypotheses equal to their reference, up to white space between words."""
    _check(hypotheses, references)
    pairs = zip(hypotheses, references, strict=True)
    return sum(same_text(hypothesis, reference, lowercase=lowercase) for hypothesis, reference in pairs) / len(
        references
    )


def same_text(hypothesis: str, reference: str, *, lowercase: bool = False) -> bool:
    """Whether two texts have the same words in the same order."""
    if lowercase:
        hypothesis, reference = hypothesis.lower(), reference.lower()
    return hypothesis.split() == reference.split()


def tokenized_note(hypotheses: Sequence[str], references: Sequence[str]) -> str | None:
    """A warning for texts that look tokenized ("a dog ."): their BLEU cannot be compared; None for others."""
    for name, texts in (("outputs", hypotheses), ("references", references)):
        ended = [text for text in map(str.rstrip, texts) if text.endswith((".", "?", "!"))]
        tokenized = sum(text.endswith(TOKENIZED_END) for text in ended)
        if len(ended) > 1 and tokenized > TOKENIZED_SHARE * len(ended):
            return (
                f"{tokenized:,} of {len(texts):,} {name} end in a separate sign (' .'): they look tokenized, "
                "and BLEU of tokenized texts cannot be compared with others"
            )
    return None


def _sacrebleu(hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str, lowercase: bool) -> CorpusScore:
    from sacrebleu.metrics.bleu import BLEU

    if tokenize not in TOKENIZERS:
        raise InputError(f"unknown tokenizer of BLEU '{tokenize}'", hint=did_you_mean(tokenize, TOKENIZERS))
    try:
        metric = BLEU(tokenize=tokenize, lowercase=lowercase, force=True)  # without its warning: see `tokenized_note`
    except (ImportError, RuntimeError) as error:
        package = tokenize.partition("-")[0]
        raise InputError(
            f"BLEU with the tokenizer {tokenize} needs a package that is not installed",
            hint=f"pip install sacrebleu[{package}]",
        ) from error
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return CorpusScore(float(score.score), str(metric.get_signature()))


def _moses_bleu(hypotheses: Sequence[str], references: Sequence[str], *, language: str, lowercase: bool) -> CorpusScore:
    """BLEU of lowercased, normalized and tokenized texts, as in the published files (`lc.norm.tok`)."""
    try:
        import sacremoses as moses
    except ImportError as error:
        raise InputError(
            "BLEU with the tokenizer moses needs the package sacremoses, which is not installed",
            hint="pip install sacremoses",
        ) from error
    normalize = moses.MosesPunctNormalizer(lang=language).normalize
    tokenize = moses.MosesTokenizer(lang=language).tokenize

    def prepared(text: str) -> str:
        text = text.lower() if lowercase else text
        return str(tokenize(normalize(text), return_str=True, escape=False))

    sides = [[prepared(text) for text in texts] for texts in (hypotheses, references)]
    plain = _sacrebleu(*sides, tokenize="none", lowercase=lowercase)
    version = getattr(moses, "__version__", None)
    parts = [plain.signature, f"{MOSES}:{language}", *([f"sacremoses:{version}"] if version else [])]
    return CorpusScore(plain.score, "|".join([*parts, *(["lc"] if lowercase else [])]))


def _check(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if len(hypotheses) != len(references) or not hypotheses:
        raise ValueError(f"expected one reference per hypothesis, found {len(hypotheses)} and {len(references)}")


# Answers to questions.

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalized_answer(text: str) -> str:
    """The text in SQuAD's form for comparison: lower case, without punctuation, articles and further spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def answer_match(answer: str, guess: str) -> float:
    """1 for equal texts, else 0."""
    return float(normalized_answer(answer) == normalized_answer(guess))


def answer_f1(answer: str, guess: str) -> float:
    """F1 of the words."""
    words, given = normalized_answer(answer).split(), normalized_answer(guess).split()
    if not words or not given:
        return float(words == given)
    same = sum((Counter(words) & Counter(given)).values())
    return 2 * same / (len(words) + len(given))


def best_of(measure: Callable[[str, str], float], answers: Sequence[str], guess: str) -> float:
    """The best over the answers that are not empty once they are normalized; without any, the guess should be empty."""
    return max(measure(answer, guess) for answer in [each for each in answers if normalized_answer(each)] or [""])
