"""Recipe → modules: the only place that unpacks a recipe's `model` section.

Everything that two fields must agree on is checked here, with messages that name the fields in the recipe's words.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from tformer.model import Transformer
from tformer.nn.attention import Mechanism, cross_attention_options
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.classification_heads import HeadContext
from tformer.nn.embedding import TokenEmbedding
from tformer.nn.feedforward import FeedForward
from tformer.nn.init import NoDraws, initialize
from tformer.nn.lora import adapt, projections
from tformer.nn.ngrams import NgramEmbedding
from tformer.nn.norm import build_norm
from tformer.nn.own_rows import NoRows, OwnRows
from tformer.nn.patches import STEMS, PatchEmbedding
from tformer.nn.positions import PositionOptions, Positions, PositionSizes
from tformer.nn.stack import Block, Convolution, Stack
from tformer.nn.structured_dropout import DropHead, LayerDrop
from tformer.recipe.model import Model, layer_sections
from tformer.recipe.model import Stack as StackSection
from tformer.recipe.sections import Lora
from tformer.support.errors import InputError


class Sizes(NamedTuple):
    """Head counts and widths of a stack, with every default filled in."""

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int


def build_model(
    model: Model,
    *,
    vocab_size: int | None = None,
    target_vocab_size: int | None = None,
    num_labels: int | None = None,
    device: torch.device | str | None = None,
    rows: OwnRows | None = None,
) -> Transformer:
    """The modules that a recipe's `model` section describes, freshly initialized.

    Args:
        model: the section.
        vocab_size: of the tokenizer; the section's own value has precedence. Not needed for images alone.
        target_vocab_size: of the target side, when source and target have separate vocabularies.
        num_labels: for classifier heads that leave it open.
        device: where parameters are made; "meta" makes shapes without memory. Default: the CPU.
        rows: takes the rows of this process, and parameters are on the meta device; None: this process has all rows.

    Raises:
        InputError: values that contradict each other.
    """
    vocab_size = model.vocab_size if model.vocab_size is not None else vocab_size
    target_vocab_size = model.target_vocab_size if model.target_vocab_size is not None else target_vocab_size
    where: AbstractContextManager[Any] = torch.device(device) if device is not None else nullcontext()
    is_empty = torch.device(device or "cpu").type == "meta" or isinstance(rows, NoRows)
    draws = NoDraws() if is_empty else nullcontext()
    try:
        with where, draws:
            with nullcontext() if rows is None else rows.constructing():
                built = _build(model, vocab_size, target_vocab_size, num_labels)
            initialize(built, model.init, around=nullcontext if rows is None else rows.whole)
    except ValueError as error:
        raise InputError(f"model: {error}") from error
    return built


def add_adapters(model: Transformer, recipe: Model, lora: Lora) -> None:
    """Freeze a recipe's model and add its adapters. Heads over labels are trained in full, as they belong to the data.

    A pattern is like a whole name or its end, from a dot on. Raises InputError for one that matches nothing.
    """

    def matching(names: Sequence[str], patterns: Sequence[str], key: str, expected: str) -> set[str]:
        found: set[str] = set()
        for pattern in patterns:
            new = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")}
            if not new:
                raise InputError(f"lora.{key}: found '{pattern}', expected names or patterns of {expected}")
            found |= new
        return found

    of_data = (head for head in recipe.heads if head.label_kind is not None or head.labels_tokens)
    heads = [f"heads.{head.kind}.*" for head in of_data]
    every = [part.name for _, parts in projections(model).values() for part in parts]
    ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in every))
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    model.base_names = adapt(
        model,
        targets=matching(every, lora.targets or ("*",), "targets", ends),
        train=matching(names, (*lora.train, *heads), "train", f"parameters, such as {names[0]}"),
        rank=lora.rank,
        scale=lora.scale,
        dropout=lora.dropout,
        dora=lora.dora,
    )
    if not any(linear.adapter for linear, _ in projections(model).values()):
        raise InputError("lora.train: no matrix is left for an adapter", hint="train without --lora, or name fewer")


def count_parameters(model: Model, vocab_size: int | None = None, **sizes: Any) -> int:
    """Number of distinct parameters of `build_model(model, ...)`, without allocating any."""
    return build_model(model, vocab_size=vocab_size, device="meta", **sizes).num_parameters()


def resolve_sizes(model: Model, side: str) -> Sizes:
    """The sizes of `model.encoder` or `model.decoder`; InputError when they do not fit together."""
    stack = _section(model, side)
    d_model = model.d_model if stack.d_model is None else stack.d_model
    kv_heads = stack.num_heads if stack.num_kv_heads is None else stack.num_kv_heads
    if stack.head_dim is None and d_model % stack.num_heads:
        raise InputError(
            f"model.{side}.num_heads: {stack.num_heads} heads do not divide d_model {d_model}",
            hint=f"choose a divisor of {d_model}, or --set model.{side}.head_dim=N",
        )
    if stack.num_heads % kv_heads:
        raise InputError(
            f"model.{side}.num_kv_heads: {kv_heads} key/value heads do not divide {stack.num_heads} query heads"
        )
    head_dim = d_model // stack.num_heads if stack.head_dim is None else stack.head_dim
    value_dim = head_dim if stack.value_dim is None else stack.value_dim
    return Sizes(d_model, stack.num_heads, kv_heads, head_dim, value_dim)


def layer_sizes(model: Model, side: str) -> list[Sizes]:
    """The sizes of each layer: the stack's, but for layers with their own number of heads."""
    sizes = resolve_sizes(model, side)
    return [_sizes_of(layer, sizes) for layer in layer_sections(_section(model, side), path=f"model.{side}")]


def _sizes_of(layer: StackSection, sizes: Sizes) -> Sizes:
    if layer.num_heads == sizes.num_heads:
        return sizes
    return sizes._replace(num_heads=layer.num_heads, num_kv_heads=layer.num_heads)


def _section(model: Model, side: str) -> StackSection:
    section = getattr(model, side)
    assert section is not None
    return section


def _build(model: Model, vocab: int | None, target_vocab: int | None, num_labels: int | None) -> Transformer:
    both = model.is_encoder_decoder
    first = "encoder" if model.encoder is not None else "decoder"
    embedding: TokenEmbedding | PatchEmbedding
    if model.patches is not None:
        if model.encoder is None:
            raise InputError("model.patches: images need an encoder", hint="add model.encoder")
        embedding = patch_embedding(model)
    else:
        embedding = _token_embedding(model, first, vocab)
    decoder_embedding = _decoder_embedding(model, embedding, vocab, target_vocab) if both else None
    output_table = decoder_embedding if decoder_embedding is not None else embedding
    last = "decoder" if model.decoder is not None else "encoder"
    patches = embedding if isinstance(embedding, PatchEmbedding) else None
    return Transformer(
        embedding=embedding,
        decoder_embedding=decoder_embedding,
        encoder=_stack(model, "encoder", patches=patches) if model.encoder is not None else None,
        decoder=_stack(model, "decoder", patches=None) if model.decoder is not None else None,
        heads=_heads(model, last, output_table, num_labels),
        max_seq_len=patches.seq_len if patches is not None and not both else model.max_seq_len,
        max_target_len=model.max_target_len,
    )


def _token_embedding(model: Model, side: str, vocab_size: int | None) -> TokenEmbedding:
    if vocab_size is None:
        raise InputError("model.vocab_size: not given, and there is no tokenizer to take it from")
    options = model.embedding
    if options.convolution and model.encoder is None:
        raise InputError(
            f"model.embedding.convolution: found {options.convolution}, expected 0: a token would read later ones",
            hint="a model with an encoder may have one",
        )
    width = resolve_sizes(model, side).d_model
    return TokenEmbedding(
        vocab_size,
        width,
        size=options.size,
        scale=options.scale,
        fixnorm=options.fixnorm,
        token_types=options.token_types,
        ngrams=NgramEmbedding(options.size or width, longest=options.ngram, rows=options.ngram_rows)
        if options.ngram > 1
        else None,
        convolution=options.convolution if side == "encoder" else 0,
        norm=_section(model, side).norm if options.norm else None,
        dropout=options.dropout,
        project_first=options.project == "first",
        norm_first=side == "decoder" and options.target_norm == "tokens",
    )


def _decoder_embedding(
    model: Model, encoder_embedding: TokenEmbedding | PatchEmbedding, vocab: int | None, target_vocab: int | None
) -> TokenEmbedding:
    """The decoder's own norm and dropout around a table that may be the encoder's."""
    target_vocab = vocab if target_vocab is None else target_vocab
    embedding = _token_embedding(model, "decoder", target_vocab)
    embedding.token_types = None  # segments belong to the source
    if model.tie.source_target and isinstance(encoder_embedding, TokenEmbedding):
        if encoder_embedding.weight.shape != embedding.weight.shape:
            found = " and ".join(str(list(e.weight.shape)) for e in (encoder_embedding, embedding))
            raise InputError(
                f"model.tie.source_target: source and target tables must have one shape, found {found}",
                hint="--vocabulary separate for a table for each side, or --vocabulary joint for one table",
            )
        embedding.weight = encoder_embedding.weight
    return embedding


def patch_embedding(model: Model) -> PatchEmbedding:
    """The embedding that a model of images describes. Raises InputError for sizes that its stem refuses."""
    patches = model.patches
    assert patches is not None
    try:
        return STEMS[patches.stem](
            resolve_sizes(model, "encoder").d_model,
            image_size=patches.image_size,
            size=patches.size,
            channels=patches.channels,
            cls=patches.cls,
            depth=patches.stem_depth,
            norm=_section(model, "encoder").norm if model.embedding.norm else None,
            dropout=model.embedding.dropout,
        )
    except ValueError as error:
        raise InputError(f"model.patches.size: {error}") from error


def _stack(model: Model, side: str, *, patches: PatchEmbedding | None) -> Stack:
    section, sizes = _section(model, side), resolve_sizes(model, side)
    memory_dim = None
    if side == "decoder" and model.encoder is not None:
        memory_dim = resolve_sizes(model, "encoder").d_model
    max_seq_len = patches.seq_len if patches is not None else model.max_seq_len
    norm, layers = section.norm, layer_sections(section, path=f"model.{side}")
    made: dict[Any, Positions] = {}  # layers with the same options share a module
    positions: list[Positions] = []
    for layer in layers:
        key = (layer.positions, layer.num_heads if layer.positions.module.per_head else None)
        if key not in made or made[key].per_layer:
            made[key] = _positions(model, side, layer.positions, _sizes_of(layer, sizes), patches)
        positions.append(made[key])
    blocks: list[Block] = []
    for number, (layer, owner) in enumerate(zip(layers, section.owners, strict=True)):
        blocks.append(
            blocks[owner]
            if owner < number
            else _block(layer, _sizes_of(layer, sizes), memory_dim, side=side, number=number, max_seq_len=max_seq_len)
        )
    _fit_mechanisms(blocks, layers, path=f"model.{side}")
    rates = [layer.layerdrop_rate for layer in layers]
    return Stack(
        blocks,
        positions=positions if len(made) > 1 or positions[0].per_layer else positions[0],
        final_norm=build_norm(norm, sizes.d_model) if section.final_norm else None,
        d_model=sizes.d_model,
        layerdrop=LayerDrop(rates, learned=layers[0].learns_layerdrop) if any(rates) else None,
    )


def _fit_mechanisms(blocks: list[Block], layers: list[StackSection], *, path: str) -> None:
    """Check positions and dropout against each attention kind, and share parameters that its layers have in common."""
    first_of_kind: dict[type[Mechanism], Mechanism] = {}
    for block, layer in zip(blocks, layers, strict=True):
        mechanism, kind = block.self_attention.mechanism, layer.attention.kind
        if layer.positions.module.changes_scores and not mechanism.takes_position_scores:
            raise InputError(
                f"{path}.positions.kind: found {layer.positions.kind}, which changes the score of a query and a key: "
                f"{kind} attention has none",
                hint="use rope, learned or sinusoidal positions",
            )
        if layer.attention_dropout and not mechanism.drops_weights and block.cross_attention is None:
            raise InputError(
                f"{path}.attention_dropout: found {layer.attention_dropout:g}, expected 0: {kind} attention forms no "
                "weights that could be dropped"
            )
        first = first_of_kind.setdefault(type(mechanism), mechanism)
        if first is not mechanism:
            try:
                mechanism.share_with(first)
            except ValueError as error:
                raise InputError(f"{path}.attention.{error}") from error


def _positions(
    model: Model, side: str, options: PositionOptions, sizes: Sizes, patches: PatchEmbedding | None
) -> Positions:
    """The positions of a stack, or of some of its layers."""
    narrow = None if patches is not None or model.embedding.project == "first" else model.embedding.size
    width = sizes.d_model if narrow is None else narrow
    grid, max_seq_len = None, model.max_seq_len if side == "encoder" else model.longest_target
    if patches is not None:
        grid, max_seq_len = (patches.side, patches.side, patches.cls is not None), patches.seq_len
    sizes_of_stack = PositionSizes(
        width, sizes.num_heads, sizes.head_dim, sizes.value_dim, max_seq_len, bidirectional=side == "encoder", grid=grid
    )
    try:
        return options.build(sizes_of_stack)
    except ValueError as error:
        raise InputError(f"model.{side}.positions: {error}") from error


def _block(
    section: StackSection, sizes: Sizes, memory_dim: int | None, *, side: str, number: int, max_seq_len: int
) -> Block:
    path = f"model.{side}.attention"
    if side == "decoder" and not section.attention.mechanism.causal:
        raise InputError(
            f"{path}.kind: found {section.attention.kind}, which has no causal mode: a decoder cannot have it",
            hint="use it in an encoder, or another kind here",
        )

    place = section.norm.place
    unfit = "cross-attention" if memory_dim is not None else "" if place == "pre" else f"norm.place {place}"
    if section.residual != "sequential" and unfit:
        raise InputError(f"model.{side}.residual: found {section.residual}, expected sequential with {unfit}")

    if not section.attention_norm and (section.norm.place, section.residual) != ("pre", "sequential"):
        raise InputError(
            f"model.{side}.attention_norm: found false, expected true with norm.place {section.norm.place} and "
            f"residual {section.residual}"
        )

    if section.convolution and (side == "decoder" or section.convolution % 2 == 0):
        expected = "0: a token would read later ones" if side == "decoder" else "an odd number of positions"
        raise InputError(f"model.{side}.convolution: found {section.convolution}, expected {expected}")

    def attention(memory_dim: int | None) -> MultiHeadAttention:
        options = section.attention if memory_dim is None else cross_attention_options(section.attention)
        try:
            return MultiHeadAttention(
                sizes.d_model,
                options=options,
                num_heads=sizes.num_heads,
                num_kv_heads=sizes.num_kv_heads,
                head_dim=sizes.head_dim,
                value_dim=sizes.value_dim,
                memory_dim=memory_dim,
                dropout=section.attention_dropout,
                drophead=DropHead(section.drophead),
                max_seq_len=max_seq_len,
                layer=number,
                causal=side == "decoder" and memory_dim is None,
            )
        except ValueError as error:
            raise InputError(f"{path}.{error}") from error

    def norm() -> nn.Module:
        try:
            return build_norm(section.norm, sizes.d_model)
        except ValueError as error:
            raise InputError(f"model.{side}.{error}") from error

    return Block(
        attention(None),
        FeedForward(sizes.d_model, section.feedforward, activation_dropout=section.activation_dropout),
        cross_attention=attention(memory_dim) if memory_dim is not None else None,
        build_norm=norm,
        place=section.norm.place,
        attention_norm=section.attention_norm,
        residual=section.residual,
        dropout=section.dropout,
        multiplier=section.residual_multiplier,
        convolution=Convolution(sizes.d_model, width, section.dropout) if (width := section.convolution) else None,
    )


def _heads(
    model: Model, side: str, embedding: TokenEmbedding | PatchEmbedding, num_labels: int | None
) -> dict[str, nn.Module]:
    section, sizes = _section(model, side), resolve_sizes(model, side)
    table = embedding if isinstance(embedding, TokenEmbedding) else None
    context = HeadContext(
        d_model=sizes.d_model,
        vocab_size=table.weight.shape[0] if table is not None else None,
        norm=section.norm,
        dropout=section.dropout,
        num_labels=num_labels,
        tied=table.weight if table is not None and model.tie.output else None,
        fixnorm=model.embedding.fixnorm and model.tie.output,
    )
    heads: dict[str, nn.Module] = {}
    for index, options in enumerate(model.heads):
        if options.kind in heads:
            raise InputError(f"model.heads.{index}: a second head of kind '{options.kind}'")
        try:
            heads[options.kind] = options.build(context)
        except ValueError as error:
            raise InputError(f"model.heads.{index} ({options.kind}): {error}") from error
    return heads
