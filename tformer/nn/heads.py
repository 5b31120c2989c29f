from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tformer.nn.options import require_positive

HeadActivation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh", "none"]


@dataclass(frozen=True)
class LmHeadOptions:
    """Next-token (or decoder) logits. `scale` multiplies the hidden state: number, or d^-1/2 as in T5 v1.0."""

    kind: Literal["lm"] = "lm"
    bias: bool = False
    scale: Literal["none", "inverse_sqrt_d"] | float = "none"
    softcap: float | None = None  # c * tanh(logits / c)

    def __post_init__(self) -> None:
        require_positive(softcap=self.softcap)


@dataclass(frozen=True)
class MaskedLmHeadOptions:
    """BERT's dense -> activation -> norm transform before the (tied) projection."""

    kind: Literal["masked_lm"] = "masked_lm"
    bias: bool = True
    transform: bool = True
    activation: HeadActivation = "gelu"


@dataclass(frozen=True)
class ClassifierHeadOptions:
    kind: Literal["classifier"] = "classifier"
    num_labels: int | None = None  # null: taken from the data's labels
    pooling: Literal["cls", "mean", "eos"] = "cls"
    pooler: bool = True  # dense -> activation before the projection
    activation: HeadActivation = "tanh"
    dropout: float | None = None  # null: the stack's dropout
    multi_label: bool = False


@dataclass(frozen=True)
class RegressionHeadOptions:
    kind: Literal["regression"] = "regression"
    pooling: Literal["cls", "mean", "eos"] = "cls"
    pooler: bool = True
    activation: HeadActivation = "tanh"
    dropout: float | None = None


@dataclass(frozen=True)
class NextSentenceHeadOptions:
    kind: Literal["next_sentence"] = "next_sentence"


@dataclass(frozen=True)
class ReplacedTokenHeadOptions:
    kind: Literal["replaced_token"] = "replaced_token"
    activation: HeadActivation = "gelu"


HeadOptions = (
    LmHeadOptions
    | MaskedLmHeadOptions
    | ClassifierHeadOptions
    | RegressionHeadOptions
    | NextSentenceHeadOptions
    | ReplacedTokenHeadOptions
)
