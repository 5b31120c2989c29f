"""The Transformer of every family: embed → encoder? → decoder? → heads.

    encoder only        input_ids or pixel_values → encoder          BERT, RoBERTa, ELECTRA, ViT
    decoder only        input_ids → causal decoder                   GPT, Llama
    encoder-decoder     input_ids → encoder; decoder_input_ids → decoder, with cross-attention to the encoder's output

A forward pass returns hidden states; `ModelOutput` computes logits on demand, for the requested positions.
"""

# Shapes: B batch, T queries, S keys, D d_model, V vocabulary.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tformer.kernels.functions import Kernels
from tformer.nn.attention.context import AttentionContext
from tformer.nn.cache import CrossCache, ModelCache
from tformer.nn.embedding import TokenEmbedding
from tformer.nn.fixed_cache import AnyCache, FixedCache
from tformer.nn.heads import ModelOutput
from tformer.nn.patches import PatchEmbedding
from tformer.nn.stack import Stack
from tformer.nn.taps import Replacement, Tap, TapSink, check_taps, scoped


class StackInputs(NamedTuple):
    """Inputs of one stack: token ids or pixels [B, C, height, width], and numbers and masks of each position [B, T].

    memory: the encoder's output [B, S, D] for a decoder beside it; memory_mask: its padding [B, S].
    """

    ids: Tensor | None
    mask: Tensor | None
    position_ids: Tensor | None
    pixels: Tensor | None = None
    token_types: Tensor | None = None
    documents: Tensor | None = None
    global_mask: Tensor | None = None
    memory: Tensor | None = None
    memory_mask: Tensor | None = None


class Transformer(nn.Module):
    """Embeddings, stacks and heads; `tformer.build.build_model` makes one from a recipe.

    Args:
        embedding: of the encoder, or of the only stack.
        decoder_embedding: of the decoder beside an encoder (its table may be the encoder's); else None.
        encoder, decoder: at least one.
        heads: by name; `ModelOutput.logits` are those of the first.
        max_seq_len: positions the model was made for.
        max_target_len: those of the decoder beside an encoder; None: as many.

    Attributes:
        compute_dtype: dtype of the residual stream; parameters may stay in fp32.
        kernels: the C kernels of its decoding, set by `prepare_inference`; None: only PyTorch's operators.
        base_names: parameters of a frozen base, which adapters change (`nn.lora`) and checkpoints do not repeat.
        compiled_decoder: if set, takes the steps of decoding instead of `forward`.
    """

    def __init__(
        self,
        *,
        embedding: TokenEmbedding | PatchEmbedding,
        decoder_embedding: TokenEmbedding | None = None,
        encoder: Stack | None = None,
        decoder: Stack | None = None,
        heads: dict[str, nn.Module] | None = None,
        max_seq_len: int,
        max_target_len: int | None = None,
    ) -> None:
        super().__init__()
        assert encoder is not None or decoder is not None
        self.embedding = embedding
        self.decoder_embedding = decoder_embedding
        self.encoder, self.decoder = encoder, decoder
        self.heads = nn.ModuleDict(heads or {})
        self.max_seq_len, self.max_target_len = max_seq_len, max_target_len
        self.compute_dtype = torch.float32
        self.kernels: Kernels | None = None
        self.base_names: frozenset[str] = frozenset()
        self.compiled_decoder: Any = None
        self._tied = self.tied_names()

    # --- properties --------------------------------------------------------------------------------------------------

    @property
    def is_encoder_decoder(self) -> bool:
        return self.encoder is not None and self.decoder is not None

    @property
    def longest_target(self) -> int:
        """Positions that the decoder was made for."""
        return self.max_target_len or self.max_seq_len

    def num_parameters(self, *, trainable: bool | None = None, embeddings: bool = True) -> int:
        """Number of distinct parameters; tied ones count once.

        `trainable` keeps those with (or without) a gradient; `embeddings=False` leaves out token, type and position
        tables, and with them an output tied to them.
        """
        tables = set()
        if not embeddings:
            inputs = [self.embedding, self.decoder_embedding]
            tables = {id(p) for module in inputs if isinstance(module, TokenEmbedding)
                      for p in (module.weight, module.token_types, module.ngrams and module.ngrams.weight)}  # fmt: skip
            stacks = [stack for stack in (self.encoder, self.decoder) if stack is not None]
            tables |= {id(p) for stack in stacks for p in stack.positions_of(0).parameters()}
        return sum(
            p.numel()
            for p in self.parameters()
            if id(p) not in tables and (trainable is None or p.requires_grad == trainable)
        )

    def _decoder_table(self) -> TokenEmbedding:
        """The input table of the decoder."""
        embedding = self.embedding if self.decoder_embedding is None else self.decoder_embedding
        assert isinstance(embedding, TokenEmbedding)
        return embedding

    def tied_names(self) -> dict[str, str]:
        """Each further name of a shared parameter → its first name."""
        owners: dict[int, str] = {}
        tied: dict[str, str] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            owner = owners.setdefault(id(parameter), name)
            if owner != name:
                tied[name] = owner
        return tied

    def retie(self) -> None:
        """Make tied tensors one parameter again after a move that replaced them (`to_empty` from the meta device)."""
        for further, owner in self._tied.items():
            module, _, name = further.rpartition(".")
            setattr(self.get_submodule(module), name, self.get_parameter(owner))

    def taps(self) -> Iterator[tuple[str, Tap]]:
        """(name, declaration) of every inner tensor that `forward` returns or replaces."""
        for side, stack in (("encoder", self.encoder), ("decoder", self.decoder)):
            if stack is None:
                continue
            embedding = self.decoder_embedding if side == "decoder" and self.encoder is not None else self.embedding
            assert isinstance(embedding, TokenEmbedding | PatchEmbedding)
            for each in embedding.taps(stack.positions_of(0)):
                yield f"{side}.embedding.{each.name}".rstrip("."), each
            is_memory = side == "encoder" and self.decoder is not None
            yield from ((f"{side}.{name}", each) for name, each in stack.taps(is_memory=is_memory))

    def tap_names(self) -> list[str]:
        """All names that `forward(taps=..., replace=...)` accepts."""
        return [name for name, _ in self.taps()]

    def new_cache(
        self,
        batch_size: int,
        capacity: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> ModelCache:
        """Empty decoding cache for `capacity` positions and `batch_size` rows."""
        if self.decoder is None:
            raise ValueError("a model without a decoder has no cache")
        device = next(self.parameters()).device if device is None else device
        dtype = self.compute_dtype if dtype is None else dtype
        layers = [
            block.self_attention.mechanism.new_state(
                batch_size=batch_size, capacity=capacity, device=device, dtype=dtype
            )
            for block in self.decoder.layers
        ]
        cross = [CrossCache() for _ in layers] if self.encoder is not None else None
        keeps_ids = self._decoder_table().ngrams is not None
        return ModelCache(
            layers,
            cross,
            batch_size=batch_size,
            capacity=capacity,
            device=device,
            keeps_ids=keeps_ids,
            kernels=self.kernels,
        )

    # --- forward pass ------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        encoder_hidden: Tensor | None = None,
        encoder_mask: Tensor | None = None,
        cache: AnyCache | None = None,
        taps: Iterable[str] = frozenset(),
        replace: Mapping[str, Replacement] | None = None,
    ) -> ModelOutput:
        """Hidden states of a batch.

        Args:
            input_ids: tokens [B, T], of the encoder or of the only stack.
            attention_mask: True or 1 where `input_ids` are real [B, T]; None: everywhere.
            position_ids: [B, T]; default: the slots, or with an attention mask the count of real tokens before.
            token_type_ids: segments [B, T]; default 0.
            document_ids: [B, T]; positions of different documents do not see each other.
            global_attention_mask: 1 or True where a token of `input_ids` sees all and is seen by all [B, T]; for
                attention kinds with global tokens, in place of their own. Other kinds ignore it.
            pixel_values: an image instead of tokens [B, C, height, width].
            decoder_input_ids, decoder_attention_mask, decoder_position_ids: the same for the decoder beside an encoder.
            encoder_hidden: the encoder's output if it was computed before [B, S, D]; `encoder_mask`: its padding
                (default: `attention_mask`).
            cache: keys and values of the positions before these ones; it grows by T. With one that has the encoder's
                keys and values, the encoder does not run. A `FixedCache` takes one position per row, in `position_ids`.
            taps: names of inner tensors to return (`tap_names()` lists them).
            replace: what takes the place of inner tensors, by the same names: a tensor of the same shape and dtype, or
                a function that makes one from the tensor. All that follows is computed from it. In `taps` too, the
                replacement is returned. A cache keeps keys and values as they were computed.

        Raises:
            ValueError: unknown taps, missing inputs, ids of another shape, or a replacement that does not fit or has no
                place in this pass.
        """
        for name, ids in (("input_ids", input_ids), ("decoder_input_ids", decoder_input_ids)):
            if ids is not None and ids.ndim != 2:
                raise ValueError(f"{name} must have the shape [batch, tokens], found {list(ids.shape)}")
        wanted, replacements = frozenset(taps), dict(replace or {})
        sink = None
        if wanted or replacements:
            check_taps([*wanted, *replacements], self.tap_names())
            sink = TapSink(wanted, replacements)
        given = StackInputs(
            input_ids,
            attention_mask,
            position_ids,
            pixels=pixel_values,
            token_types=token_type_ids,
            documents=document_ids,
            global_mask=global_attention_mask,
        )
        if self.decoder is None:
            hidden, mask, encoder_hidden = self._encode(given, sink), attention_mask, None
        elif self.encoder is None:
            if input_ids is None:
                raise ValueError("a decoder-only model needs input_ids")
            hidden, mask, encoder_hidden = self._decode(given, cache, sink), attention_mask, None
        else:
            if decoder_input_ids is None:
                raise ValueError("a model with an encoder and a decoder needs decoder_input_ids")
            if encoder_hidden is None and not (cache is not None and cache.has_encoder):
                encoder_hidden = self._encode(given, sink)
            mask = decoder_attention_mask
            if mask is None and attention_mask is not None and attention_mask.shape == decoder_input_ids.shape:
                mask = attention_mask  # of a classifier, whose decoder reads the same tokens one place later
            target = StackInputs(
                decoder_input_ids,
                decoder_attention_mask,
                decoder_position_ids,
                memory=encoder_hidden,
                memory_mask=attention_mask if encoder_mask is None else encoder_mask,
            )
            hidden = self._decode(target, cache, sink)
        if sink is not None and (unused := replacements.keys() - sink.used):
            raise ValueError(f"replace '{min(unused)}': this forward pass does not compute it")
        found = sink.values if sink is not None else {}
        compiled = torch.compiler.is_dynamo_compiling()
        return ModelOutput(hidden, self.heads, mask, encoder_hidden=encoder_hidden, taps=found, compiled=compiled)

    def _encode(self, given: StackInputs, sink: TapSink | None) -> Tensor:
        stack = self.encoder
        assert stack is not None
        positions = stack.positions_of(0)
        embedding_taps = scoped(scoped(sink, "encoder"), "embedding")
        if isinstance(self.embedding, PatchEmbedding):
            if given.pixels is None:
                raise ValueError("a model of images needs pixel_values")
            pos_1T = torch.arange(self.embedding.seq_len, device=given.pixels.device).unsqueeze(0)
            x_BTD = self.embedding(
                given.pixels, positions=positions, pos_BT=pos_1T, dtype=self.compute_dtype, taps=embedding_taps
            )
            context = AttentionContext(pos_1T, pos_1T)
        else:
            if given.ids is None:
                raise ValueError("the model needs input_ids")
            pos_BT = self._positions(stack, given, cache=None)
            x_BTD = self.embedding(
                given.ids,
                positions=positions,
                pos_BT=pos_BT,
                token_type_ids=given.token_types,
                real_BT=given.mask,
                document_ids_BT=given.documents,
                dtype=self.compute_dtype,
                taps=embedding_taps,
            )
            context = AttentionContext(
                pos_BT, pos_BT, key_mask=given.mask, document_ids=given.documents, global_mask=given.global_mask
            )
        return stack(x_BTD, context, taps=scoped(sink, "encoder"))

    def _decode(self, given: StackInputs, cache: AnyCache | None, sink: TapSink | None) -> Tensor:
        stack, embedding = self.decoder, self._decoder_table()
        assert stack is not None and given.ids is not None
        pos_BT = self._positions(stack, given, cache=cache)
        k_pos, key_mask, before = pos_BT, given.mask, None
        if cache is not None and embedding.ngrams is not None:
            before = cache.put_ids(given.ids, before=embedding.ngrams.longest - 1)
        if isinstance(cache, FixedCache):
            k_pos, key_mask = cache.advance(pos_BT)
        elif cache is not None:
            has_past = cache.length > 0
            k_pos, key_valid = cache.advance(pos_BT, given.mask)
            key_mask = key_valid if has_past else given.mask
            if pos_BT.shape[1] == 1 and not cache.padded:
                key_mask = None  # a single query sees all slots
        x_BTD = embedding(
            given.ids,
            positions=stack.positions_of(0),
            pos_BT=pos_BT,
            token_type_ids=given.token_types,
            real_BT=given.mask,
            document_ids_BT=given.documents,
            before_BN=before,
            dtype=self.compute_dtype,
            taps=scoped(scoped(sink, "decoder"), "embedding"),
        )
        cross = None
        if self.encoder is not None:  # every real position of the encoder is visible; a cache keeps the mask
            memory_mask = given.memory_mask
            if cache is not None and memory_mask is None:
                memory_mask = cache.encoder_mask
            elif cache is not None:
                cache.encoder_mask = memory_mask
            cross = AttentionContext(pos_BT, pos_BT, key_mask=memory_mask, memory=given.memory).with_mask()
        context = AttentionContext(
            pos_BT,
            k_pos,
            causal=True,
            key_mask=key_mask,
            document_ids=given.documents,
            global_mask=given.global_mask,
            cross=cross,
        )
        return stack(x_BTD, context, cache=cache, taps=scoped(sink, "decoder"))

    def _positions(self, stack: Stack, given: StackInputs, *, cache: AnyCache | None) -> Tensor:
        """Positions [B or 1, T]: those given, or the count of real tokens before each one; padding may have its own."""
        ids, attention_mask, position_ids = given[:3]
        assert ids is not None
        if isinstance(cache, FixedCache):
            assert position_ids is not None, "a FixedCache needs position_ids"
            return position_ids
        positions = stack.positions_of(0)
        length, past = ids.shape[1], cache.length if cache is not None else 0
        # With a cache, given positions were counted by the caller: slots may be padding.
        counted_here = position_ids is None or cache is None
        most = positions.max_positions
        if most is not None and counted_here and past + length > most:
            raise ValueError(f"the model has {most} learned positions, the input needs {past + length}")
        if position_ids is not None:
            return position_ids
        if attention_mask is not None:
            pos_BT = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
        else:
            pos_BT = torch.arange(length, device=ids.device).unsqueeze(0)
        if cache is not None and past:
            pos_BT = pos_BT + (cache.key_valid[:, :past].sum(dim=1, keepdim=True) if cache.padded else past)
        if attention_mask is not None and positions.padding_position is not None:
            pos_BT = pos_BT.masked_fill(~attention_mask.bool(), positions.padding_position)
        return pos_BT
