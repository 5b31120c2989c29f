"""The `model` section: one description for encoder-only, decoder-only and encoder-decoder Transformers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from tformer.nn.attention import AttentionOptions, FullAttentionOptions
from tformer.nn.drophead import DropHeadSchedule
from tformer.nn.feedforward import FeedForwardOptions
from tformer.nn.heads import HeadOptions, LmHeadOptions
from tformer.nn.init import InitOptions
from tformer.nn.layerdrop import LayerDropOptions
from tformer.nn.norm import NormOptions
from tformer.nn.positions import PositionOptions
from tformer.nn.positions.learned import LearnedOptions
from tformer.recipe.section import NonNegative, Positive, Probability, Section


class Embedding(Section):
    """Token embeddings: `size` below d_model factorises them (ELECTRA), `scale` multiplies by sqrt(d_model)."""

    size: Positive | None = None
    norm: bool = False
    dropout: Probability = 0.0
    scale: bool = False
    token_types: NonNegative = 0
    fixnorm: bool = False


class Tie(Section):
    """Which matrices are one: source with target embeddings, and the output projection with the embeddings."""

    source_target: bool = True
    output: bool = True


def _full_unless_named(value: Any) -> Any:
    """Attention that names no kind is full attention, as it was before there were others."""
    return {"kind": "full", **value} if isinstance(value, dict) and "kind" not in value else value


class Stack(Section):
    """An encoder or a decoder: `num_layers` blocks of attention and feed-forward."""

    num_layers: Positive = 6
    num_heads: Positive = 8
    num_kv_heads: Positive | None = None  # null: num_heads
    head_dim: Positive | None = None  # null: d_model / num_heads
    value_dim: Positive | None = None  # null: head_dim
    d_model: Positive | None = None  # null: model.d_model
    positions: Annotated[PositionOptions, Field(discriminator="kind")] = LearnedOptions()
    attention: Annotated[AttentionOptions, Field(discriminator="kind"), BeforeValidator(_full_unless_named)] = (
        FullAttentionOptions()
    )
    feedforward: FeedForwardOptions = FeedForwardOptions()
    norm: NormOptions = NormOptions()
    final_norm: bool = True
    dropout: Probability = 0.0  # residual
    attention_dropout: Probability = 0.0
    activation_dropout: Probability = 0.0
    layerdrop: Probability | LayerDropOptions = 0.0
    drophead: Probability | DropHeadSchedule = 0.0
    # per-layer overrides of attention, feedforward, norm, dropouts, num_heads
    layers: dict[NonNegative, dict[str, Any]] = Field(default_factory=dict)

    @property
    def layerdrop_rate(self) -> float:
        """The probability of skipping a layer: of each, or the mean of learned ones."""
        return self.layerdrop.rate if isinstance(self.layerdrop, LayerDropOptions) else self.layerdrop

    @property
    def learns_layerdrop(self) -> bool:
        """Whether the rate of each layer is trained."""
        return isinstance(self.layerdrop, LayerDropOptions) and self.layerdrop.learned


class Patches(Section):
    """How an image becomes a sequence (ViT)."""

    image_size: Positive = 224
    size: Positive = 16
    channels: Positive = 3
    cls: bool = True
    stem: Literal["linear", "conv"] = "conv"


class Model(Section):
    d_model: Positive = 512
    max_seq_len: Positive = 512
    vocab_size: Positive | None = None  # null: the tokenizer's
    target_vocab_size: Positive | None = None  # separate vocabularies only
    embedding: Embedding = Embedding()
    tie: Tie = Tie()
    encoder: Stack | None = None
    decoder: Stack | None = None
    heads: tuple[Annotated[HeadOptions, Field(discriminator="kind")], ...] = (LmHeadOptions(),)
    patches: Patches | None = None
    init: InitOptions = InitOptions()

    @model_validator(mode="after")
    def _has_a_stack(self) -> Model:
        if self.encoder is None and self.decoder is None:
            raise ValueError("a model needs an encoder, a decoder, or both")
        return self
