"""The `model` section: one description for encoder-only, decoder-only and encoder-decoder Transformers.

`layer_sections` merges a stack's `layers` mapping into one section per layer.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from tformer.nn.attention import AttentionOptions, FullAttentionOptions
from tformer.nn.feedforward import FeedForwardOptions
from tformer.nn.heads import HeadOptions, LmHeadOptions
from tformer.nn.init import InitOptions
from tformer.nn.norm import NormOptions
from tformer.nn.patches import Stem
from tformer.nn.positions import PositionOptions
from tformer.nn.positions.base import LearnedOptions
from tformer.nn.stack import Residual
from tformer.nn.structured_dropout import DropHeadSchedule, LayerDropOptions
from tformer.recipe.sections import Layers, NonNegative, Positive, PositiveFloat, Probability, Section, Size
from tformer.support.bounds import mistake_of
from tformer.support.errors import InputError, did_you_mean


class Embedding(Section):
    """Token embeddings: `size` below d_model factorizes them (ELECTRA), `scale` multiplies by sqrt(d_model)."""

    # width of the embeddings; null: d_model; smaller: factorized, with a projection to d_model
    size: Size | None = None
    norm: bool = False  # normalize the sum of the embeddings
    # what a decoder's norm is of: the sum, or the tokens before positions are added (Blenderbot-Small)
    target_norm: Literal["sum", "tokens"] = "sum"
    dropout: Probability = 0.0  # dropout of the sum of the embeddings
    # where narrow embeddings widen: after positions, norm and dropout (ELECTRA), or first and without bias (OPT-350m)
    project: Literal["last", "first"] = "last"
    # multiply by sqrt(d_model) (arXiv 1706.03762), rounded: by that number in the dtype of the stream (Gemma); or by a
    # number (Granite)
    scale: bool | Literal["rounded"] | PositiveFloat = False
    token_types: NonNegative = 0  # number of segments: 2 for pairs in BERT; 0: none
    # tokens that a convolution with ReLU reads together before positions are added (arXiv 2104.05704); 0: none
    convolution: Annotated[int, Field(ge=0, le=64)] = 0
    fixnorm: bool = False  # unit length times a learned scale (arXiv 1910.05895)
    # the longest n-gram: a token with those before it, whose vector is added to the token's (arXiv 2501.16975); 1: none
    ngram: Annotated[int, Field(ge=1, le=16)] = 1
    ngram_rows: Size = 65536  # rows of the table of n-grams, which share them by a hash


class Tie(Section):
    """Shared matrices: source and target embeddings, and the output projection and the embeddings."""

    source_target: bool = True  # one table for source and target (needs one vocabulary)
    output: bool = True  # the output projection is the embedding table (arXiv 1608.05859)


def _full_by_default(value: Any) -> Any:
    """Options of attention with their kind: `full`, the default, need not be named beside other options."""
    return {"kind": "full", **value} if isinstance(value, dict) and "kind" not in value else value


class Stack(Section):
    """An encoder or a decoder: `num_layers` blocks of attention and feed-forward."""

    num_layers: Layers = 6  # number of blocks
    # groups of neighbouring blocks that share their weights (ALBERT, arXiv 1909.11942: 1); null: none are shared
    layer_groups: Size | None = None
    num_heads: Size = 8  # number of attention heads
    num_kv_heads: Size | None = None  # heads of keys and values, each shared by several of queries; null: num_heads
    head_dim: Size | None = None  # width of a head's queries and keys; null: d_model / num_heads
    value_dim: Size | None = None  # width of a head's values; null: head_dim
    d_model: Size | None = None  # width of this stack; null: model.d_model
    # positional encoding
    positions: Annotated[PositionOptions, Field(discriminator="kind")] = LearnedOptions()
    # who attends to whom, and how
    attention: Annotated[AttentionOptions, Field(discriminator="kind"), BeforeValidator(_full_by_default)] = (
        FullAttentionOptions()
    )
    feedforward: FeedForwardOptions = FeedForwardOptions()
    norm: NormOptions = NormOptions()
    # parallel: attention and feed-forward layer read the same input, each after its own norm (arXiv 2204.06745);
    # parallel_one_norm: after one norm (arXiv 2204.02311)
    residual: Residual = "sequential"
    attention_norm: bool = True  # a norm before attention; false in a first layer behind the embedding's (ModernBERT)
    # positions read by a convolution beside each block, norm(block(x) + gelu(convolution(x))); an odd number; 0: none
    convolution: Annotated[int, Field(ge=0, le=63)] = 0
    final_norm: bool = True  # a norm after the last block
    residual_multiplier: PositiveFloat = 1.0  # factor of each sublayer's output before it joins the stream (Granite)
    dropout: Probability = 0.0  # dropout of each sublayer's output
    attention_dropout: Probability = 0.0  # dropout of attention weights
    activation_dropout: Probability = 0.0  # dropout after the activation of the feed-forward layer
    layerdrop: Probability | LayerDropOptions = 0.0  # probability of skipping a layer in training (arXiv 1909.11556)
    drophead: Probability | DropHeadSchedule = 0.0  # probability of dropping a head in training (arXiv 2004.13342)
    # per-layer overrides of attention, positions, feedforward, norm, attention_norm, convolution, dropouts, num_heads
    layers: dict[NonNegative, dict[str, Any]] = Field(default_factory=dict)

    @property
    def owners(self) -> list[int]:
        """For each layer the first one that has its weights: itself, unless `layer_groups` says otherwise."""
        size = self.num_layers / (self.layer_groups or self.num_layers)
        firsts: dict[int, int] = {}
        return [firsts.setdefault(int(layer / size), layer) for layer in range(self.num_layers)]

    @property
    def layerdrop_rate(self) -> float:
        """The probability of skipping a layer: of each, or the mean of learned ones."""
        return self.layerdrop.rate if isinstance(self.layerdrop, LayerDropOptions) else self.layerdrop

    @property
    def learns_layerdrop(self) -> bool:
        """Whether the rate of each layer is trained."""
        return isinstance(self.layerdrop, LayerDropOptions) and self.layerdrop.learned


class Patches(Section):
    """Cutting an image into a sequence of patches (ViT)."""

    image_size: Size = 224  # pixels per side
    size: Size = 16  # pixels per side of a patch
    channels: Size = 3  # values per pixel; 1: grey, 3: colours
    cls: bool = True  # a learned first token, which the head may read
    # linear, conv: one product of each patch, stored in two shapes; shifted: also of moved copies (arXiv
    # 2112.13492); convolutions: log2(size) layers of 3 x 3, each of which halves the image (arXiv 2104.05704)
    stem: Stem = "conv"
    stem_depth: NonNegative = 0  # residual convolutions after each of the convolutions, x + conv(ReLU(RMSNorm(x)))

    @model_validator(mode="after")
    def _only_convolutions_have_a_depth(self) -> Patches:
        if self.stem_depth and self.stem != "convolutions":
            raise ValueError(f"stem_depth is {self.stem_depth}, expected 0 with stem: {self.stem}")
        return self

    @property
    def side(self) -> int:
        """Patches along a side of the image."""
        return -(-self.image_size // self.size)


class Model(Section):
    """Sizes, stacks and heads of the model."""

    d_model: Size = 512  # width of the residual stream
    max_seq_len: Positive = 512  # maximum number of tokens of a sequence
    max_target_len: Positive | None = None  # maximum number of tokens of a target; null: max_seq_len
    vocab_size: Positive | None = None  # number of token ids; null: the tokenizer's
    target_vocab_size: Positive | None = None  # number of the target's token ids, with separate vocabularies
    embedding: Embedding = Embedding()
    tie: Tie = Tie()
    encoder: Stack | None = None  # null: a decoder-only model
    decoder: Stack | None = None  # null: an encoder-only model
    # what turns hidden states into predictions
    heads: tuple[Annotated[HeadOptions, Field(discriminator="kind")], ...] = (LmHeadOptions(),)
    patches: Patches | None = None  # null: the input is text
    init: InitOptions = InitOptions()

    @property
    def is_encoder_decoder(self) -> bool:
        return self.encoder is not None and self.decoder is not None

    @property
    def longest_target(self) -> int:
        """Maximum number of tokens that the decoder reads."""
        return self.max_target_len or self.max_seq_len

    @model_validator(mode="after")
    def _has_a_stack(self) -> Model:
        if self.encoder is None and self.decoder is None:
            raise ValueError("a model needs an encoder, a decoder, or both")
        if self.max_target_len is not None and not self.is_encoder_decoder:
            raise ValueError("max_target_len: only for models with an encoder and a decoder")
        return self

    @property
    def stacks(self) -> dict[str, Stack]:
        """The encoder, the decoder or both, by name."""
        both = {"encoder": self.encoder, "decoder": self.decoder}
        return {side: stack for side, stack in both.items() if stack is not None}


LAYER_KEYS = frozenset(
    {
        *("attention", "positions", "feedforward", "norm", "attention_norm", "convolution", "num_heads"),
        *("dropout", "attention_dropout", "activation_dropout", "layerdrop", "drophead"),
    }
)
NUMBER_OR_OPTIONS = ("layerdrop", "drophead")
KIND_KEYS = {
    key: {options.kind: {field.name for field in fields(options)} for options in get_args(union)}
    for key, union in (("attention", AttentionOptions), ("positions", PositionOptions))
}


def layer_sections(section: Stack, *, path: str) -> list[Stack]:
    """One section per layer: the stack's own with the layer's overrides.

    path: of the stack in the recipe, for messages. Raises InputError for an override that does not fit.
    """
    for layer, overrides in section.layers.items():
        place = f"{path}.layers.{layer}"
        if layer >= section.num_layers:
            raise InputError(f"{place}: the stack has {section.num_layers} layers, numbered from 0")
        for key in overrides:
            if key not in LAYER_KEYS:
                raise InputError(f"{place}.{key}: not an option of a single layer", hint=did_you_mean(key, LAYER_KEYS))
        if overrides.get("num_heads", section.num_heads) != section.num_heads:
            _check_num_heads(section, path, place)
        if "layerdrop" in overrides and section.learns_layerdrop:
            learned = f"{path}.layerdrop learns the rate of every layer"
            raise InputError(f"{place}.layerdrop: {learned}, so no layer has its own")
        if isinstance(overrides.get("layerdrop"), dict):
            raise InputError(f"{place}.layerdrop: found a mapping, expected a number: one layer's rate is not learned")
    if section.layer_groups is not None and section.layer_groups > section.num_layers:
        raise InputError(
            f"{path}.layer_groups: found {section.layer_groups}, expected at most {section.num_layers} (num_layers)"
        )
    sections = [
        _with_overrides(section, section.layers.get(layer, {}), f"{path}.layers.{layer}")
        for layer in range(section.num_layers)
    ]
    for layer, (own, owner) in enumerate(zip(sections, section.owners, strict=True)):
        if own != sections[owner]:
            raise InputError(
                f"{path}.layers: layer {layer} has the weights of layer {owner} (layer_groups), "
                "so both need the same options"
            )
        kinds = (own.positions, section.positions)
        shared = next((kind for kind in kinds if kind.module.has_embed or kind.module.trained), None)
        if own.positions != section.positions and shared is not None:
            raise InputError(
                f"{path}.layers.{layer}.positions: found {own.positions.kind} beside {section.positions.kind}: "
                f"{shared.kind} positions serve the whole stack",
                hint="layers may choose between none, rope and alibi",
            )
    return sections


def _check_num_heads(section: Stack, path: str, place: str) -> None:
    if section.head_dim is None:
        raise InputError(f"{place}.num_heads: found no size of a head, expected one", hint=f"set {path}.head_dim")
    if section.positions.module.per_head:
        raise InputError(
            f"{place}.num_heads: every layer needs the {section.num_heads} heads of {path}, whose positions of kind "
            f"{section.positions.kind} have a bias for each head"
        )
    if section.num_kv_heads not in (None, section.num_heads):
        raise InputError(
            f"{place}.num_heads: every layer needs the {section.num_heads} heads of {path}, which share "
            f"{section.num_kv_heads} key/value heads (num_kv_heads)"
        )


def _with_overrides(section: Stack, overrides: dict[str, Any], place: str) -> Stack:
    if not overrides:
        return section
    values = section.model_dump()
    if "num_heads" in overrides:
        values["num_kv_heads"] = None  # the same number
    for key, override in overrides.items():
        if key in NUMBER_OR_OPTIONS or not isinstance(values[key], dict):
            values[key] = override
            continue
        if not isinstance(override, dict):
            raise InputError(f"{place}.{key}: expected a mapping of options, found {override!r}")
        known = values[key].keys()
        if override.get("kind") in KIND_KEYS.get(key, {}):
            known = KIND_KEYS[key][override["kind"]]  # a layer of another kind keeps the options that both kinds have
        for option in override:
            if option not in known:
                raise InputError(f"{place}.{key}.{option}: unknown option", hint=did_you_mean(option, known))
        values[key] = {option: value for option, value in (values[key] | override).items() if option in known}
    try:
        return Stack.model_validate(values)
    except ValidationError as error:
        problem = max(error.errors(), key=lambda entry: len(_keys(entry["loc"], values)))
        where = ".".join(_keys(problem["loc"], values))
        raise InputError(f"{place}.{where}: {mistake_of(problem)}") from error


def _keys(location: tuple[int | str, ...], values: Any) -> list[str]:
    """pydantic's location without the names of union members."""
    keys = []
    for name in location:
        if isinstance(values, dict) and name in values:
            values = values[name]
            keys.append(str(name))
    return keys
