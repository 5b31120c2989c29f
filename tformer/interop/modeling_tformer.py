"""A Transformer trained with tformer, as a model of `transformers`: load it with `trust_remote_code=True`.

This file needs torch and transformers only. config.json describes the model under `model`, in the words of a tformer
recipe with all sizes filled in; every module below has the names of its tensors in model.safetensors.
It computes what tformer computes without dropout, and no loss: it is for evaluation and generation, not for training.

    encoder only       TformerForMaskedLM, TformerForSequenceClassification
    decoder only       TformerForCausalLM, TformerForSequenceClassification
    encoder-decoder    TformerForConditionalGeneration

Shapes: B batch, T queries, S keys, D d_model, H query heads, K key/value heads, h head_dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import (
    BaseModelOutput,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    Seq2SeqLMOutput,
    SequenceClassifierOutput,
)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
    "tanh": torch.tanh,
    "none": lambda x: x,
}

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""Name of the keys and values in outputs: the first one from transformers 5.24 on."""


class TformerConfig(PretrainedConfig):
    """`model`: the model section of a recipe. The usual names of sizes follow from it."""

    model_type = "tformer"

    def __init__(self, model: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.model = model or {}
        stack = self.model.get("decoder") or self.model.get("encoder")
        if stack:
            sizes = {
                "vocab_size": self.model["target_vocab_size"] or self.model["vocab_size"],
                "hidden_size": stack["d_model"],
                "num_hidden_layers": stack["num_layers"],
                "num_attention_heads": stack["num_heads"],
                "num_key_value_heads": stack["num_kv_heads"],
                "head_dim": stack["head_dim"],
                "max_position_embeddings": self.model["max_seq_len"],
            }
            kwargs = {**sizes, **kwargs}
        super().__init__(**kwargs)


# --- layers -----------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """LayerNorm, RMSNorm or ScaleNorm (x / |x| times a learned length) over the last dimension; gains w or 1 + w."""

    def __init__(self, dim: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.dim, self.kind, self.eps = dim, options["kind"], options["eps"]
        self.unit_offset = options["unit_offset"]
        has_bias = options["learned"] and options["bias"] and self.kind == "layernorm"
        gains = 1 if self.kind == "scalenorm" else dim
        self.weight = nn.Parameter(torch.ones(gains)) if options["learned"] else None
        self.bias = nn.Parameter(torch.zeros(dim)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        gain = 1.0 + self.weight if self.unit_offset and self.weight is not None else self.weight
        if self.kind == "layernorm":
            return F.layer_norm(x, (self.dim,), gain, self.bias, self.eps)
        if self.kind == "rmsnorm":
            return F.rms_norm(x, (self.dim,), gain, self.eps)
        length = math.sqrt(self.dim) if self.weight is None else self.weight
        return F.normalize(x, dim=-1, eps=self.eps) * length


class Positions(nn.Module):
    """Position encodings: added to the embeddings, rotating queries and keys, or added to the scores of attention."""

    def __init__(self, stack: dict[str, Any], width: int, max_seq_len: int, *, bidirectional: bool) -> None:
        super().__init__()
        self.options = stack["positions"]
        self.kind = self.options["kind"]
        self.width, self.num_heads, self.head_dim = width, stack["num_heads"], stack["head_dim"]
        self.bidirectional = bidirectional
        self.padding: int | None = None  # the position of padding; None: the number of real tokens before it
        if self.kind == "learned":
            offset = self.options["offset"]
            self.weight = nn.Parameter(torch.zeros(max_seq_len + offset, width))
            if self.options["ids"] == "nonpad_cumsum":
                self.padding = max(-1, -offset)
        if self.kind == "t5_bias":
            self.weight = nn.Parameter(torch.zeros(self.options["buckets"], self.num_heads))

    def embed(self, x_BTD: Tensor, pos_BT: Tensor) -> Tensor:
        """The embeddings with positions added (learned, sinusoidal)."""
        if self.kind == "learned":
            return x_BTD + F.embedding(pos_BT + self.options["offset"], self.weight)
        if self.kind != "sinusoidal":
            return x_BTD
        half = self.width // 2
        last = max(half - 1, 1) if self.options["layout"] == "fairseq" else half
        angles = self._angles(pos_BT + self.options.get("offset", 0), half, last)
        if self.options["layout"] == "interleaved":
            waves = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)
        else:
            waves = torch.cat((angles.sin(), angles.cos()), dim=-1)
        return x_BTD + waves.to(x_BTD.dtype)

    def rotate(self, x_BHTh: Tensor, pos_BT: Tensor) -> Tensor:
        """Queries or keys turned by their positions (rope)."""
        if self.kind != "rope":
            return x_BHTh
        half = self.head_dim // 2
        angles = self._angles(pos_BT, half, half).unsqueeze(1)
        cos, sin = angles.cos().to(x_BHTh.dtype), angles.sin().to(x_BHTh.dtype)
        if self.options["layout"] == "interleaved":
            first, second = x_BHTh.unflatten(-1, (-1, 2)).unbind(-1)
            return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
        first, second = x_BHTh.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def bias(self, q_pos_BT: Tensor, k_pos_BS: Tensor) -> Tensor | float:
        """[B, H, T, S], added to the scores (alibi, t5_bias)."""
        if self.kind not in ("alibi", "t5_bias"):
            return 0.0
        relative = k_pos_BS.unsqueeze(1) - q_pos_BT.unsqueeze(2)
        if self.kind == "t5_bias":
            return F.embedding(self._buckets(relative), self.weight).permute(0, 3, 1, 2)
        below = 2 ** math.floor(math.log2(self.num_heads))
        slopes = [2.0 ** (-8.0 * n / below) for n in range(1, below + 1)]
        slopes += [2.0 ** (-4.0 * n / below) for n in range(1, 2 * (self.num_heads - below), 2)]
        return relative.abs().unsqueeze(1) * -torch.tensor(slopes, device=relative.device).view(1, -1, 1, 1)

    def _angles(self, pos: Tensor, count: int, last: int) -> Tensor:
        steps = torch.arange(count, device=pos.device, dtype=torch.float64) / last
        frequencies = self.options["base"] ** -steps
        return pos.unsqueeze(-1) * frequencies

    def _buckets(self, relative: Tensor) -> Tensor:
        buckets, first = self.options["buckets"], torch.zeros_like(relative)
        if self.bidirectional:
            buckets //= 2
            first, distance = (relative > 0).long() * buckets, relative.abs()
        else:
            distance = (-relative).clamp(min=0)
        exact = buckets // 2
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.options["max_distance"] / exact)
        far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
        return first + torch.where(distance < exact, distance, far)


class Attention(nn.Module):
    """Multi-head attention with grouped key/value heads; `memory_dim`: of the encoder's output, for cross-attention."""

    def __init__(self, stack: dict[str, Any], memory_dim: int | None = None) -> None:
        super().__init__()
        options, d_model = stack["attention"], stack["d_model"]
        self.heads, self.kv_heads, self.scale = stack["num_heads"], stack["num_kv_heads"], options["scale"]
        self.softcap, self.qk_norm, bias = options["softcap"], options["qk_norm"], options["qkv_bias"]
        head_norm = {"kind": "rmsnorm", "eps": options["qk_norm_eps"], "bias": False}
        head_norm |= {"learned": self.qk_norm is not True, "unit_offset": self.qk_norm == "unit_offset"}
        sizes = [stack["head_dim"] * (n if self.qk_norm == "width" else 1) for n in (self.heads, self.kv_heads)]
        self.q_norm, self.k_norm = (Norm(size, head_norm) if self.qk_norm else None for size in sizes)
        queries = self.heads * stack["head_dim"]
        self.sizes = [queries, self.kv_heads * stack["head_dim"], self.kv_heads * stack["value_dim"]]
        if memory_dim is None:
            self.qkv = nn.Linear(d_model, sum(self.sizes), bias=bias)
        else:
            self.q = nn.Linear(d_model, queries, bias=bias)
            self.kv = nn.Linear(memory_dim, sum(self.sizes[1:]), bias=bias)
        self.out = nn.Linear(self.heads * stack["value_dim"], d_model, bias=options["out_bias"])

    def forward(
        self,
        x_BTD: Tensor,
        visible: Tensor | None,
        *,
        memory: Tensor | None = None,
        positions: Positions | None = None,
        pos: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        layer: int = 0,
    ) -> Tensor:
        """visible: bool, broadcast to [B, H, T, S]; pos: positions of queries [B, T] and of all keys [B, S]."""
        if memory is None:
            q, k, v = self.qkv(x_BTD).split(self.sizes, dim=-1)
        else:
            q, (k, v) = self.q(x_BTD), self.kv(memory).split(self.sizes[1:], dim=-1)
        q, k = self._split(q, self.heads, self.q_norm), self._split(k, self.kv_heads, self.k_norm)
        v = self._split(v, self.kv_heads)
        bias: Tensor | float = 0.0
        if positions is not None and pos is not None:
            q, k = positions.rotate(q, pos[0]), positions.rotate(k, pos[0])
            bias = positions.bias(*pos)
        if cache is not None and memory is None:
            k, v = cache.update(k, v, layer)
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2)).float() * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores + bias
        if visible is not None:
            scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        out = scores.softmax(dim=-1).to(v.dtype) @ v
        return self.out(out.transpose(1, 2).flatten(2))

    def _split(self, x_BTx: Tensor, heads: int, norm: Norm | None = None) -> Tensor:
        """[B, heads, T, size], each head normalized or (`width`) all of them as one vector."""
        if norm is not None and self.qk_norm == "width":
            x_BTx, norm = norm(x_BTx), None
        x_BTHh = x_BTx.unflatten(-1, (heads, -1))
        return (x_BTHh if norm is None else norm(x_BTHh)).transpose(1, 2)


class FeedForward(nn.Module):
    """down(act(up(x))), or gated: down(act(gate) * value) with [gate; value] = up(x)."""

    def __init__(self, d_model: int, options: dict[str, Any]) -> None:
        super().__init__()
        self.gated, self.activation = options["gated"], ACTIVATIONS[options["activation"]]
        self.up = nn.Linear(d_model, options["d_ff"] * (2 if self.gated else 1), bias=options["bias"])
        self.down = nn.Linear(options["d_ff"], d_model, bias=options["bias"])

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.down(self.activation(self.up(x)))
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * value)


class Block(nn.Module):
    """Self-attention, cross-attention beside an encoder, feed-forward; each in a residual with its norm."""

    def __init__(self, stack: dict[str, Any], memory_dim: int | None) -> None:
        super().__init__()
        d_model, norm = stack["d_model"], stack["norm"]
        self.place, self.multiplier = norm["place"], stack["residual_multiplier"]
        self.self_attention, self.self_attention_norm = Attention(stack), Norm(d_model, norm)
        if memory_dim is not None:
            self.cross_attention, self.cross_attention_norm = Attention(stack, memory_dim), Norm(d_model, norm)
        self.feedforward, self.feedforward_norm = FeedForward(d_model, stack["feedforward"]), Norm(d_model, norm)
        if self.place == "sandwich":
            for name in ("self_attention", *(["cross_attention"] if memory_dim is not None else []), "feedforward"):
                setattr(self, f"{name}_out_norm", Norm(d_model, norm))

    def forward(
        self, x: Tensor, visible: Tensor | None, memory: Tensor | None, memory_visible: Tensor | None, **of_self: Any
    ) -> Tensor:
        x = self._residual(x, "self_attention", partial(self.self_attention, visible=visible, **of_self))
        if memory is not None:
            cross = partial(self.cross_attention, visible=memory_visible, memory=memory)
            x = self._residual(x, "cross_attention", cross)
        return self._residual(x, "feedforward", self.feedforward)

    def _residual(self, x: Tensor, name: str, function: Any) -> Tensor:
        norm = getattr(self, f"{name}_norm")
        update = function(norm(x) if self.place in ("pre", "sandwich") else x)
        if self.place in ("res_post", "sandwich"):
            update = (norm if self.place == "res_post" else getattr(self, f"{name}_out_norm"))(update)
        x = x + update * self.multiplier
        return norm(x) if self.place == "post" else x


class Embedding(nn.Module):
    """Token (scaled) + token type + position, then norm and projection to d_model where the model has them."""

    def __init__(self, vocab_size: int, stack: dict[str, Any], options: dict[str, Any], *, token_types: int) -> None:
        super().__init__()
        d_model = stack["d_model"]
        size = options["size"] or d_model
        self.fixnorm = options["fixnorm"]
        self.scale, self.project_first = options["scale"], options["project"] == "first"
        number = self.scale if isinstance(self.scale, float) and not self.fixnorm else None
        self.factor = number or (math.sqrt(d_model) if self.scale or self.fixnorm else 1.0)
        self.weight = nn.Parameter(torch.zeros(vocab_size, size))
        self.token_types = nn.Parameter(torch.zeros(token_types, size)) if token_types else None
        self.norm = Norm(d_model if self.project_first else size, stack["norm"]) if options["norm"] else None
        self.project = nn.Linear(size, d_model, bias=not self.project_first) if size != d_model else None

    def forward(self, ids_BT: Tensor, types_BT: Tensor | None, positions: Positions, pos_BT: Tensor) -> Tensor:
        x = F.embedding(ids_BT, self.weight)
        factor = torch.tensor(self.factor).to(x.dtype) if self.scale == "rounded" else self.factor
        x = (F.normalize(x, dim=-1) if self.fixnorm else x) * factor
        if self.token_types is not None:
            x = x + (self.token_types[0] if types_BT is None else F.embedding(types_BT, self.token_types))
        if self.project is not None and self.project_first:
            x = self.project(x)
        x = positions.embed(x, pos_BT)
        x = x if self.norm is None else self.norm(x)
        return x if self.project is None or self.project_first else self.project(x)


class Stack(nn.Module):
    """An encoder or a decoder with its embedding: token ids -> hidden states."""

    main_input_name = "input_ids"

    def __init__(self, model: dict[str, Any], side: str) -> None:
        super().__init__()
        stack, first = model[side], side == "encoder" or model["encoder"] is None
        self.causal = side == "decoder"
        memory_dim = None if first else model["encoder"]["d_model"]
        vocab_size = model["vocab_size"] if first else model["target_vocab_size"] or model["vocab_size"]
        token_types = model["embedding"]["token_types"] if first else 0
        self.embedding = Embedding(vocab_size, stack, model["embedding"], token_types=token_types)
        width = (None if self.embedding.project_first else model["embedding"]["size"]) or stack["d_model"]
        self.positions = Positions(stack, width, model["max_seq_len"], bidirectional=not self.causal)
        self.blocks = nn.ModuleList(Block(stack, memory_dim) for _ in range(stack["num_layers"]))
        self.final_norm = Norm(stack["d_model"], stack["norm"]) if stack["final_norm"] else None

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: Cache | None = None,
        **of_generate: Any,
    ) -> BaseModelOutput:
        """attention_mask: 1 on real tokens of the cache and of `input_ids` [B, S]; None: everywhere."""
        length, past = input_ids.shape[1], 0 if cache is None else cache.get_seq_length()
        keys = past + length
        if attention_mask is None:
            pos_BS = torch.arange(keys, device=input_ids.device).unsqueeze(0)
        else:
            pos_BS = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
            if self.positions.padding is not None:
                pos_BS = pos_BS.masked_fill(attention_mask == 0, self.positions.padding)
        pos_BT = pos_BS[:, past:]
        visible = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        if self.causal:
            earlier = torch.ones(length, keys, dtype=torch.bool, device=input_ids.device).tril(past)
            visible = earlier if visible is None else visible & earlier
        memory_visible = None if memory_mask is None else memory_mask.bool()[:, None, None, :]
        types_BT = None if token_type_ids is None else token_type_ids[:, -length:]
        x = self.embedding(input_ids, types_BT, self.positions, pos_BT)
        shared = {"positions": self.positions, "pos": (pos_BT, pos_BS), "cache": cache}
        for layer, block in enumerate(self.blocks):
            x = block(x, visible, memory, memory_visible, layer=layer, **shared)
        return BaseModelOutput(last_hidden_state=x if self.final_norm is None else self.final_norm(x))


class VocabularyHead(nn.Module):
    """Logits over the vocabulary, in fp32: (dense -> activation -> norm) or projection, then the matrix `weight`."""

    def __init__(self, model: dict[str, Any], side: str) -> None:
        super().__init__()
        stack, options = model[side], model["heads"][0]
        d_model = stack["d_model"]
        size = (model["embedding"]["size"] or d_model) if model["tie"]["output"] else d_model
        both = model["encoder"] and model["decoder"]
        vocab_size = (model["target_vocab_size"] if both else None) or model["vocab_size"]
        transform = options.get("transform", False)
        self.scale, self.softcap = options.get("scale", 1.0), options.get("softcap")
        self.fixnorm = model["embedding"]["fixnorm"] and model["tie"]["output"]
        self.weight = nn.Parameter(torch.zeros(vocab_size, size))
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if options["bias"] else None
        self.dense = nn.Linear(d_model, size) if transform else None
        self.norm = Norm(size, stack["norm"]) if transform else None
        self.activation = ACTIVATIONS[options.get("activation", "none")]
        self.project = nn.Linear(d_model, size, bias=False) if size != d_model and not transform else None

    def forward(self, x: Tensor) -> Tensor:
        if self.dense is not None and self.norm is not None:
            x = self.norm(self.activation(self.dense(x)))
        elif self.project is not None:
            x = self.project(x)
        matrix = F.normalize(self.weight, dim=-1) if self.fixnorm else self.weight
        logits = F.linear(x * self.scale, matrix, self.bias).float()
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class PooledHead(nn.Module):
    """Scores of a sequence: one vector of it -> (dense -> activation) -> projection."""

    def __init__(self, model: dict[str, Any], side: str) -> None:
        super().__init__()
        options, d_model = model["heads"][0], model[side]["d_model"]
        self.pooling, self.activation = options["pooling"], ACTIVATIONS[options["activation"]]
        self.pooler = nn.Linear(d_model, d_model) if options["pooler"] else None
        self.project = nn.Linear(d_model, options.get("num_labels", 1))

    def forward(self, x_BTD: Tensor, mask_BT: Tensor | None) -> Tensor:
        mask_BT = torch.ones(x_BTD.shape[:2], device=x_BTD.device) if mask_BT is None else mask_BT.to(x_BTD.device)
        rows, slots = torch.arange(len(x_BTD)), torch.arange(x_BTD.shape[1], device=x_BTD.device)
        if self.pooling == "mean":
            weights = mask_BT.unsqueeze(-1).float()
            x_BD = ((x_BTD.float() * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)).to(x_BTD.dtype)
        elif self.pooling == "max":
            x_BD = x_BTD.masked_fill(mask_BT.unsqueeze(-1) == 0, -torch.inf).amax(dim=1)
        elif self.pooling == "cls":  # the first real token
            x_BD = x_BTD[rows, mask_BT.long().argmax(dim=1)]
        else:  # the last real token
            x_BD = x_BTD[rows, (slots * mask_BT.long()).amax(dim=1)]
        x_BD = x_BD if self.pooler is None else self.activation(self.pooler(x_BD))
        return self.project(x_BD).float()


# --- models -----------------------------------------------------------------------------------------------------------


class TformerPreTrainedModel(PreTrainedModel):
    """The stacks that the config describes, and one head on the last of them."""

    config_class = TformerConfig
    head_class: type[nn.Module] = VocabularyHead

    def __init__(self, config: TformerConfig) -> None:
        super().__init__(config)
        model = config.model
        self.encoder: Any = Stack(model, "encoder") if model["encoder"] else None
        self.decoder: Any = Stack(model, "decoder") if model["decoder"] else None
        first, last = ("encoder" if model["encoder"] else "decoder"), ("decoder" if model["decoder"] else "encoder")
        self.head = self.head_class(model, last)
        self._tied_weights_keys = {}
        if model["tie"]["output"] and isinstance(self.head, VocabularyHead):
            self._tied_weights_keys["head.weight"] = f"{last}.embedding.weight"
        if first != last and model["tie"]["source_target"]:
            self._tied_weights_keys = dict.fromkeys(self._tied_weights_keys, "encoder.embedding.weight")
            self._tied_weights_keys["decoder.embedding.weight"] = "encoder.embedding.weight"
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return (self.encoder or self.decoder).embedding

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head if isinstance(self.head, VocabularyHead) else None

    def get_encoder(self, *unused: Any, **also_unused: Any) -> Any:
        return self.encoder


class TformerForCausalLM(TformerPreTrainedModel, GenerationMixin):
    """A decoder that continues a text."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        cache: Cache | None = None,
    ) -> CausalLMOutputWithPast:
        """cache: `past_key_values`, as transformers calls it from 5.24 on."""
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = DynamicCache()
        hidden = self.decoder(input_ids, attention_mask, token_type_ids, cache=cache).last_hidden_state
        logits = self.head(hidden)
        kept: dict[str, Any] = {CACHE: cache}
        return CausalLMOutputWithPast(logits=logits, **kept)


class TformerForConditionalGeneration(TformerPreTrainedModel, GenerationMixin):
    """An encoder-decoder that writes a target for a source."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        cache: EncoderDecoderCache | None = None,
    ) -> Seq2SeqLMOutput:
        """cache: `past_key_values`, as transformers calls it from 5.24 on."""
        cache = past_key_values if cache is None else cache
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, token_type_ids)
        memory = encoder_outputs[0]
        decoded = self.decoder(
            decoder_input_ids,
            decoder_attention_mask,
            memory=memory,
            memory_mask=attention_mask,
            cache=None if cache is None else cache.self_attention_cache,
        )
        logits = self.head(decoded.last_hidden_state)
        kept: dict[str, Any] = {CACHE: cache}
        return Seq2SeqLMOutput(logits=logits, encoder_last_hidden_state=memory, **kept)


class TformerForMaskedLM(TformerPreTrainedModel):
    """An encoder that fills masks."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> MaskedLMOutput:
        logits = self.head(self.encoder(input_ids, attention_mask, token_type_ids).last_hidden_state)
        return MaskedLMOutput(logits=logits)


class TformerForSequenceClassification(TformerPreTrainedModel):
    """A stack that labels or scores a text or a pair."""

    head_class = PooledHead

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutput:
        hidden = (self.encoder or self.decoder)(input_ids, attention_mask, token_type_ids).last_hidden_state
        return SequenceClassifierOutput(logits=self.head(hidden, attention_mask))
