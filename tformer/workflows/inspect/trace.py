"""Shapes of all tensors of one forward pass, from the model's taps: each with its letters, numbers and meaning.

The model runs on the meta device, which gives every tensor's shape and no numbers, so a model of any size takes a
second. Shapes are those of real tensors; a description that does not fit a tensor is a failed assertion. Scores and
weights are those of the explicit path of attention; training never stores them.

The letters are those of `tensors.NAMES`; beside an encoder T counts the positions of the target. A tensor is named by
its tap; the steps that training adds to a forward pass (dropout) change no shape and have the name of the tensor before
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.model import Transformer
from tformer.nn.attention.context import TapSink
from tformer.nn.attention.multi_head import MultiHeadAttention
from tformer.nn.classification_heads import PooledHead
from tformer.nn.embedding import TokenEmbedding
from tformer.nn.heads import VocabularyHead
from tformer.nn.patches import PatchEmbedding
from tformer.nn.stack import Stack
from tformer.workflows.inspect.tensors import (
    Described,
    Tensors,
    around,
    attention_tensors,
    check_shape,
    embedding_tensors,
    feedforward_tensors,
    head_tensors,
)

PARTS = {"self_attention": "self-attention", "cross_attention": "cross-attention", "feedforward": "feed-forward"}


@dataclass(frozen=True)
class ParameterUse:
    """A parameter in a step. tied: other names of the same parameter."""

    name: str
    shape: tuple[int, ...]
    tied: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """One tensor.

    part: of a layer; empty outside the layers. id: unique in the trace; inputs: ids of the tensors it is made of.
    """

    part: str
    name: str
    symbols: tuple[str, ...]
    shape: tuple[int, ...]
    meaning: str
    id: str = ""
    inputs: tuple[str, ...] = ()
    parameters: tuple[ParameterUse, ...] = ()

    def looks(self) -> tuple[Any, ...]:
        """Everything but names of the layer; equal for steps of layers that can be folded."""
        parameters = [(parameter.shape, bool(parameter.tied)) for parameter in self.parameters]
        return self.part, self.name, self.symbols, self.shape, self.meaning, parameters


@dataclass(frozen=True)
class Section:
    """Steps that belong together: an embedding, a head, or a layer and its equals (`layers`, by number)."""

    title: str
    layers: tuple[int, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Trace:
    """sizes: the number of each letter outside single layers."""

    sizes: Mapping[str, int]
    sections: tuple[Section, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def trace_shapes(
    model: Transformer, inputs: Mapping[str, Tensor], *, beside: Mapping[str, Tensor] | None = None
) -> Trace:
    """The shapes of a forward pass on these inputs (of `forward`), on any device; the model does not change.

    beside: parameters of another model by name, which may be tied to this one's (ELECTRA's generator).
    """
    sizes = _sizes(model, inputs)
    was_training = model.training
    model.eval()
    path = _Path(model, sizes, beside or {})
    try:
        with torch.no_grad():
            output = model(**inputs, taps=model.tap_names())
            path.follow(output.taps)
            for name, head in model.heads.items():
                path.follow_head(name, head, output.hidden)
    finally:
        model.train(was_training)
    return Trace(sizes, tuple(_sections(path.seen)))


# --- sizes and inputs ------------------------------------------------------------------------------------------------


def empty_inputs(
    model: Transformer, *, batch_size: int = 1, source_length: int, target_length: int | None = None
) -> dict[str, Tensor]:
    """Inputs of these sizes for the model's forward pass.

    Args:
        source_length: positions of the encoder or of the only stack; ignored for images.
        target_length: of the decoder beside an encoder; None: the same.
    """
    device, embedding = next(model.parameters()).device, model.embedding
    inputs: dict[str, Tensor] = {}
    if isinstance(embedding, PatchEmbedding):
        side = embedding.image_size
        inputs["pixel_values"] = torch.zeros(batch_size, embedding.channels, side, side, device=device)
    else:
        inputs["input_ids"] = torch.zeros(batch_size, source_length, dtype=torch.long, device=device)
        if embedding.token_types is not None:
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    if model.is_encoder_decoder:
        length = source_length if target_length is None else target_length
        inputs["decoder_input_ids"] = torch.zeros(batch_size, length, dtype=torch.long, device=device)
    return inputs


def _sizes(model: Transformer, inputs: Mapping[str, Tensor]) -> dict[str, int]:
    """The letters that are the same everywhere; D is that of the last stack."""
    embedding, both = model.embedding, model.is_encoder_decoder
    first = inputs["pixel_values" if isinstance(embedding, PatchEmbedding) else "input_ids"]
    length = embedding.seq_len if isinstance(embedding, PatchEmbedding) else first.shape[1]
    sizes = {"B": first.shape[0], "T": length}
    if both:
        sizes |= {"S": length, "T": inputs["decoder_input_ids"].shape[1]}
    stack = model.decoder if model.decoder is not None else model.encoder
    assert stack is not None
    sizes["D"] = stack.d_model
    if isinstance(embedding, PatchEmbedding):
        sizes |= {"C": embedding.channels, "Y": embedding.image_size, "X": embedding.image_size, "P": embedding.size}
        sizes["N"] = embedding.side**2
    if isinstance(model.embedding, TokenEmbedding):
        sizes["V"] = model.embedding.weight.shape[0]
    if model.decoder_embedding is not None:
        sizes["V"] = model.decoder_embedding.weight.shape[0]
    return sizes


# --- the path --------------------------------------------------------------------------------------------------------

Seen = tuple[str, int | None, Step]
"""Title and layer of the section, and the step."""


@dataclass
class _Path:
    """The steps so far, and which tensor the next one reads.

    Attributes:
        last: ids of the tensors that the next one is made of. stream: id of the residual stream. memory: that of the
            encoder's output. known: ids by name, of the module that is followed.
    """

    model: Transformer
    sizes: Mapping[str, int]
    beside: Mapping[str, Tensor]
    seen: list[Seen] = field(default_factory=list)
    last: tuple[str, ...] = ()
    stream: str = ""
    memory: str = ""
    known: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        self.aliases: dict[int, list[str]] = {}
        for name, parameter in (*self.names.items(), *self.beside.items()):
            self.aliases.setdefault(id(parameter), []).append(name)

    def follow(self, taps: Mapping[str, Tensor]) -> None:
        """Add the described taps, in the order of computation."""
        for (side, place, function), group in groupby(taps.items(), key=lambda tap: _module_of(tap[0])):
            if function == "hidden":
                continue
            values = {path.split(".")[-1]: tensor for path, tensor in group}
            stack = getattr(self.model, side)
            at = "S" if "S" in self.sizes and side == "encoder" else "T"
            if place == "embedding":
                self._follow_embedding(side, stack, at, values)
            elif place == "final_norm":
                self._follow_final_norm(side, at, values)
            else:
                self._follow_function(side, stack, int(place), function, at, values)
            self.stream = self.last[0]
            if side == "encoder":
                self.memory = self.stream

    def _follow_embedding(self, side: str, stack: Stack, at: str, values: Mapping[str, Tensor]) -> None:
        owner = "decoder_embedding" if side == "decoder" and self.model.encoder is not None else "embedding"
        embedding, positions = getattr(self.model, owner), stack.positions_of(0)
        # The stack's tap of its input has the embedding's own name.
        values = {"input" if name == "embedding" else name: tensor for name, tensor in values.items()}
        tensors = embedding_tensors(embedding, positions, at)
        if "segments" in values and values["segments"].ndim == 1:  # a batch without segments: all have the first
            described = tensors.described["segments"]
            first = described._replace(symbols=described.symbols[-1:], meaning="the vector of the first segment, added")
            tensors = tensors._replace(described=tensors.described | {"segments": first})
        places = {"": owner, "positions": _positions_name(side, stack, 0)}
        self.last, self.known = (), {}
        self._add_all(
            f"{side}: embedding", None, "", f"{side}.embedding", tensors, values, places, {"D": stack.d_model}
        )

    def _follow_final_norm(self, side: str, at: str, values: Mapping[str, Tensor]) -> None:
        is_memory = side == "encoder" and "S" in self.sizes
        meaning = "the encoder's output, read by every cross-attention" if is_memory else "the last states, normalised"
        tensors = Tensors({"final_norm": Described("final norm", ("B", at, "D"), meaning, None, ("",))}, {})
        self.last = (self.stream,)
        own = {"D": getattr(self.model, side).d_model}
        self._add_all(f"{side}: end", None, "", side, tensors, values, {"": f"{side}.final_norm"}, own)

    def _follow_function(
        self, side: str, stack: Stack, layer: int, function: str, at: str, values: Mapping[str, Tensor]
    ) -> None:
        block, prefix = stack.layers[layer], f"{side}.blocks.{layer}.{function}"
        module = getattr(block, function)
        if isinstance(module, MultiHeadAttention):
            keys = "S" if module.is_cross else at
            positions = None if module.is_cross else stack.positions_of(layer)
            tensors = attention_tensors(module, positions, at, keys, self.sizes[keys])
            after = {"heads": module.drophead.rate, "projection": block.dropout}
        else:
            tensors = feedforward_tensors(module, at)
            after = {"down": block.dropout}
        if function == "feedforward" and stack.layerdrop is not None:
            after["residual"] = stack.layerdrop.fixed[layer]
        described = tensors.described | around(at, is_pre_norm=block.place == "pre")
        tensors = Tensors(described, tensors.letters, {**tensors.dropout, **after})
        places = {"": prefix, "norm": f"{prefix}_norm", "positions": _positions_name(side, stack, layer)}
        self.last = (self.stream,)
        self.known = {"stream": self.stream, "memory": self.memory}
        own = {"D": stack.d_model}
        self._add_all(side, layer, PARTS[function], f"{side}.{layer}.{function}", tensors, values, places, own)

    def follow_head(self, name: str, head: nn.Module, hidden: Tensor) -> None:
        """Add the steps from hidden states to predictions and the loss, with labels of zeros."""
        tensors = head_tensors(head)
        taps = TapSink(frozenset(tensors.described))
        logits = head(hidden, taps=taps)
        values = dict(taps.values)
        if "loss" in tensors.described:
            labels, loss = _loss(head, logits)
            values |= {"logits": logits, "labels": labels, "loss": loss}
        self.last, self.known = (self.stream,), {}
        self._add_all(f"head {name}", None, "", f"head.{name}", tensors, values, {"": f"heads.{name}"}, {})

    def _add_all(
        self,
        title: str,
        layer: int | None,
        part: str,
        prefix: str,
        tensors: Tensors,
        values: Mapping[str, Tensor],
        places: Mapping[str, str],
        own: Mapping[str, int],
    ) -> None:
        """Add the steps of one module. places: full names of "" (the module) and of what else descriptions name."""
        sizes = {**self.sizes, **own, **tensors.letters}
        self.known |= {name: f"{prefix}.{name}" for name in values}
        for name, tensor in values.items():
            described = tensors.described[name]
            shape, symbols = tuple(tensor.shape), described.symbols
            if symbols[:1] == ("1",) and shape[0] != 1:  # with padding, every example has its own positions
                symbols = ("B", *symbols[1:])
            check_shape(shape, symbols, sizes, what=f"{title} {part} {described.name}")
            if rate := tensors.dropout.get(f"before {name}", 0.0):
                # The sum of the tensors before it, which has the shape of the first.
                first = next(step for _, _, step in self.seen if step.id == self.last[0])
                self._add_dropout(title, layer, first, rate)
            if "input" not in self.known and self.last:
                self.known["input"] = self.last[0]
            inputs = self.last if described.inputs is None else self._named(described.inputs)
            parameters = tuple(use for each in described.parameters for use in self._parameters(each, places))
            step = Step(part, described.name, symbols, shape, described.meaning, f"{prefix}.{name}", inputs,
                        parameters)  # fmt: skip
            self.seen.append((title, layer, step))
            self.known[name] = self.known[described.replaces or name] = step.id
            if not described.beside:
                self.last = (step.id,)
            elif name != "position_ids":
                self.last = (*self.last, step.id)
            if rate := tensors.dropout.get(name, 0.0):
                self._add_dropout(title, layer, step, rate, what=DROPPED.get(name, NUMBERS))

    def _named(self, names: Sequence[str]) -> tuple[str, ...]:
        """Ids of the named tensors of this module that exist; "last" is the tensor before."""
        found = [
            self.last if name == "last" else (self.known[name],) for name in names if name in (*self.known, "last")
        ]
        return tuple(dict.fromkeys(each for ids in found for each in ids))

    def _add_dropout(self, title: str, layer: int | None, before: Step, rate: float, what: str = "") -> None:
        meaning = (
            f"in training {100 * rate:.3g} % of {what or NUMBERS} become 0, the others are divided by {1 - rate:.4g}"
        )
        step = replace(before, name="dropout", meaning=meaning, id=f"{before.id}.dropout", inputs=self.last,
                       parameters=())  # fmt: skip
        self.seen.append((title, layer, step))
        self.last = (step.id,)
        self.known[before.id.rpartition(".")[2]] = step.id

    def _parameters(self, name: str, places: Mapping[str, str]) -> Iterator[ParameterUse]:
        """The parameters of a module, or one parameter, by its name relative to `places`."""
        first, _, rest = name.partition(".")
        place = ".".join(filter(None, (places[first], rest) if first in places else (places[""], name)))
        found = [path for path in self.names if path == place or path.startswith(f"{place}.")]
        for path in found:
            parameter = self.names[path]
            others = tuple(other for other in self.aliases[id(parameter)] if other != path)
            yield ParameterUse(path, tuple(parameter.shape), others)


NUMBERS = "the numbers"
DROPPED = {"heads": "the heads", "residual": "the passes through this layer"}
"""What training drops after these taps, where it is not single numbers."""


def _module_of(tap: str) -> tuple[str, str, str]:
    """(encoder or decoder, "embedding", "final_norm" or the layer, function of the layer) of a tap."""
    side, place, *rest = tap.split(".")
    return side, place, rest[0] if place.isdecimal() else ""


def _positions_name(side: str, stack: Stack, layer: int) -> str:
    return f"{side}.positions" if stack.layer_positions is None else f"{side}.layer_positions.{layer}"


def _loss(head: nn.Module, logits: Tensor) -> tuple[Tensor, Tensor]:
    """(labels of zeros, loss) of a head."""
    if isinstance(head, VocabularyHead):
        labels = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
        return labels, F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    kind = head.label_kind if isinstance(head, PooledHead) else "labels"
    if kind == "labels":
        labels = torch.zeros_like(logits)
        return labels, F.binary_cross_entropy_with_logits(logits, labels)
    is_class = kind == "classes"
    labels = torch.zeros(logits.shape[0], dtype=torch.long if is_class else torch.float32, device=logits.device)
    return labels, F.cross_entropy(logits, labels) if is_class else F.mse_loss(logits.squeeze(-1), labels)


# --- sections --------------------------------------------------------------------------------------------------------


def _sections(seen: Sequence[Seen]) -> Iterator[Section]:
    """The steps by place; consecutive layers with the same steps are one section, whose ids are those of its first."""
    found: list[Section] = []
    shown: dict[str, str] = {}  # id of each step -> that of the section's step
    inputs: dict[str, dict[str, None]] = {}  # id of a section's step -> ids of all that it is made of, in order
    for (title, layer), group in groupby(seen, key=lambda entry: entry[:2]):
        steps = tuple(step for _, _, step in group)
        last = found[-1] if found else None
        if last is not None and layer is not None and last.layers and title == last.title \
                and [step.looks() for step in steps] == [step.looks() for step in last.steps]:  # fmt: skip
            found[-1] = replace(last, layers=(*last.layers, layer))
            owners = last.steps
        else:
            found.append(Section(title, () if layer is None else (layer,), steps))
            owners = steps
        shown |= {step.id: owner.id for step, owner in zip(steps, owners, strict=True)}
        for step, owner in zip(steps, owners, strict=True):
            inputs.setdefault(owner.id, {}).update({shown[each]: None for each in step.inputs})
    for section in found:
        yield replace(section, steps=tuple(replace(step, inputs=tuple(inputs[step.id])) for step in section.steps))
