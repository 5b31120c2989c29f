"""The options of every objective that reads an encoder, as the recipe's `objectives` list writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tformer.nn.options import require, require_positive, require_probability

ClassWeights = Literal["none", "balanced"]


@dataclass(frozen=True)
class MaskedLmOptions:
    """Masked language modelling (BERT, arXiv 1810.04805; dynamic as in RoBERTa, 1907.11692)."""

    kind: Literal["masked_lm"] = "masked_lm"
    mask_share: float = 0.15  # of the tokens
    mask_token_share: float = 0.8  # of those: become [MASK]
    random_share: float = 0.1  # of those: become a random token; the rest stays as it is
    whole_words: bool = False  # all tokens of a word or none
    label_smoothing: float = 0.0
    word_dropout: float = 0.0  # training: a share of the other tokens becomes [UNK]
    weight: float = 1.0

    def __post_init__(self) -> None:
        require_probability(label_smoothing=self.label_smoothing, word_dropout=self.word_dropout)
        require(0 < self.mask_share < 1, f"mask_share must lie between 0 and 1, found {self.mask_share}")
        shares = self.mask_token_share + self.random_share
        parts = min(self.mask_token_share, self.random_share)
        require(
            parts >= 0 and shares <= 1 + 1e-9,
            f"mask_token_share and random_share must be at least 0 and together at most 1, "
            f"found {self.mask_token_share} and {self.random_share}",
        )
        require_positive(weight=self.weight)


@dataclass(frozen=True)
class NextSentenceOptions:
    """Does the second text follow the first? Stands beside masked_lm (BERT, arXiv 1810.04805, section 3.1)."""

    kind: Literal["next_sentence"] = "next_sentence"
    weight: float = 1.0

    def __post_init__(self) -> None:
        require_positive(weight=self.weight)


@dataclass(frozen=True)
class ReplacedTokenOptions:
    """Replaced-token detection (ELECTRA, arXiv 2003.10555): loss = generator's masked LM + weight * detection."""

    kind: Literal["replaced_token"] = "replaced_token"
    mask_share: float = 0.15
    weight: float = 50.0
    generator_weight: float = 1.0

    def __post_init__(self) -> None:
        require(0 < self.mask_share < 1, f"mask_share must lie between 0 and 1, found {self.mask_share}")
        require_positive(weight=self.weight, generator_weight=self.generator_weight)


@dataclass(frozen=True)
class ClassificationOptions:
    """One class per example: a text, a pair of texts, or an image."""

    kind: Literal["classification"] = "classification"
    label_smoothing: float = 0.0  # torch's: eps spread over all classes
    class_weights: ClassWeights | tuple[float, ...] = "none"  # balanced: N / (L * count), as in scikit-learn
    word_dropout: float = 0.0  # this share of the text's tokens becomes [MASK] (or [UNK]) while training
    swap_pairs: bool = False  # while training, half of the pairs are read the other way round
    weight: float = 1.0

    def __post_init__(self) -> None:
        require_probability(label_smoothing=self.label_smoothing, word_dropout=self.word_dropout)
        require_positive(weight=self.weight)
        if not isinstance(self.class_weights, str):
            require(
                len(self.class_weights) > 0 and all(weight >= 0 for weight in self.class_weights),
                f"class_weights must be none, balanced or numbers of at least 0, found {self.class_weights}",
            )


@dataclass(frozen=True)
class MultiLabelOptions:
    """Any number of labels per example, each decided alone (binary cross-entropy)."""

    kind: Literal["multi_label"] = "multi_label"
    word_dropout: float = 0.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        require_probability(word_dropout=self.word_dropout)
        require_positive(weight=self.weight)


@dataclass(frozen=True)
class RegressionOptions:
    """One score per example, by squared error."""

    kind: Literal["regression"] = "regression"
    word_dropout: float = 0.0
    swap_pairs: bool = False
    weight: float = 1.0

    def __post_init__(self) -> None:
        require_probability(word_dropout=self.word_dropout)
        require_positive(weight=self.weight)


@dataclass(frozen=True)
class Seq2SeqOptions:
    """The target is predicted token by token from the source and what stands before (teacher forcing)."""

    kind: Literal["seq2seq"] = "seq2seq"
    label_smoothing: float = 0.0
    # uniform is torch's: eps over all K tokens; off_target is fairseq's: eps / (K - 1) on all but the target.
    smoothing_kind: Literal["uniform", "off_target"] = "uniform"
    word_dropout: float = 0.0  # training: a share of the source's and the decoder's input tokens becomes [UNK]
    weight: float = 1.0

    def __post_init__(self) -> None:
        require_probability(label_smoothing=self.label_smoothing, word_dropout=self.word_dropout)
        require_positive(weight=self.weight)


@dataclass(frozen=True)
class SpanCorruptionOptions:
    """T5's objective: spans of the text are cut out, a sentinel stands for each, the target lists them."""

    kind: Literal["span_corruption"] = "span_corruption"
    noise_density: float = 0.15
    mean_span_length: float = 3.0
    label_smoothing: float = 0.0
    word_dropout: float = 0.0  # as of seq2seq
    weight: float = 1.0

    def __post_init__(self) -> None:
        require_probability(label_smoothing=self.label_smoothing, word_dropout=self.word_dropout)
        require(0 < self.noise_density < 1, f"noise_density must be between 0 and 1, found {self.noise_density}")
        require(self.mean_span_length >= 1, f"mean_span_length must be at least 1, found {self.mean_span_length}")
        require_positive(weight=self.weight)


@dataclass(frozen=True)
class DenoisingOptions:
    """BART's objective: the text is damaged, the target is the whole of it."""

    kind: Literal["denoising"] = "denoising"
    mask_share: float = 0.3
    span_length: float = 3.0  # Poisson's lambda of text infilling; 0: single tokens are masked
    replace_share: float = 0.0  # of what would be masked: a random token instead
    delete_share: float = 0.0
    permute_sentences: bool = False
    rotate_share: float = 0.0  # of the examples: they begin at a random token
    label_smoothing: float = 0.0
    word_dropout: float = 0.0  # as of seq2seq
    weight: float = 1.0

    def __post_init__(self) -> None:
        require_probability(
            label_smoothing=self.label_smoothing,
            word_dropout=self.word_dropout,
            mask_share=self.mask_share,
            replace_share=self.replace_share,
            delete_share=self.delete_share,
            rotate_share=self.rotate_share,
        )
        require(self.span_length >= 0, f"span_length must be at least 0, found {self.span_length}")
        require_positive(weight=self.weight)
