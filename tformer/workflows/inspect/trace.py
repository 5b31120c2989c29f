"""Shapes of all tensors of one forward pass, from the model's taps: each with its letters, numbers and meaning.

The model runs on the meta device, which gives every tensor's shape and no numbers, so a model of any size takes a
second. Shapes are those of real tensors; a description that does not fit a tensor is a failed assertion. Scores and
weights are those of the explicit path of attention; training never stores them.

The letters are those of `nn.taps.LETTERS`; beside an encoder T counts the positions of the target. A tensor is named by
its tap, whose declaration also says what it is made of. The steps that training adds to a forward pass (dropout) change
no shape and have the name of the tensor before them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer.model import Transformer
from tformer.nn.classification_heads import LabelKind, PooledHead, TokenHead
from tformer.nn.embedding import TokenEmbedding
from tformer.nn.heads import VocabularyHead
from tformer.nn.patches import PatchEmbedding
from tformer.nn.stack import Stack
from tformer.nn.taps import Tap, TapSink

PARTS = {"self_attention": "self-attention", "cross_attention": "cross-attention", "feedforward": "feed-forward"}
PARTS |= {"convolution": "convolution"}


@dataclass(frozen=True)
class ParameterUse:
    """A parameter in a step. tied: other names of the same parameter."""

    name: str
    shape: tuple[int, ...]
    tied: tuple[str, ...] = ()


@dataclass(frozen=True)
class TraceStep:
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
class TraceSection:
    """Steps that belong together: an embedding, a head, or a layer and its equals (`layers`, by number)."""

    title: str
    layers: tuple[int, ...]
    steps: tuple[TraceStep, ...]


@dataclass(frozen=True)
class Trace:
    """sizes: the number of each letter outside single layers."""

    sizes: Mapping[str, int]
    sections: tuple[TraceSection, ...]

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
            declared = dict(model.taps())
            output = model(**inputs, taps=declared)
            path.follow(declared, output.taps)
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
    """Sizes by letter that hold in the whole model; D is the last stack's width."""
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

Seen = tuple[str, int | None, TraceStep]
"""Title and layer of the section, and the step."""


@dataclass
class _Path:
    """The steps so far, and which tensors the next one reads. A tensor is named by its id.

    Attributes:
        beside: parameters of another model, which may be tied to this one's.
        last: the tensors that the next one is made of.
        stream: the residual stream; memory: the encoder's output.
        known: the tensors of the module that is followed, by their names there.
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

    def follow(self, declared: Mapping[str, Tap], taps: Mapping[str, Tensor]) -> None:
        """Add the tapped tensors of all stacks, in the order of computation."""

        def module_of(tap: str) -> tuple[str, str, str]:
            """(encoder or decoder, "embedding", "final_norm" or the layer, function of the layer)."""
            side, place, *rest = tap.split(".")
            return side, place, rest[0] if place.isdecimal() else ""

        for (side, place, function), group in groupby(taps, key=module_of):
            if function == "hidden":
                continue
            paths = {path.rpartition(".")[2]: path for path in group}
            each = {name: declared[path] for name, path in paths.items()}
            values = {name: taps[path] for name, path in paths.items()}
            stack = getattr(self.model, side)
            at = "S" if "S" in self.sizes and side == "encoder" else "T"
            if place == "embedding":
                self._follow_embedding(side, stack, at, each, values)
            elif place == "final_norm":
                self.last = (self.stream,)
                places = {"": f"{side}.final_norm"}
                self._add_all(f"{side}: end", None, "", side, each, values, places, {"T": at})
            else:
                self._follow_function(side, stack, int(place), function, at, each, values)
            self.stream = self.last[0]
            if side == "encoder":
                self.memory = self.stream

    def _follow_embedding(
        self, side: str, stack: Stack, at: str, declared: dict[str, Tap], values: dict[str, Tensor]
    ) -> None:
        owner = "decoder_embedding" if side == "decoder" and self.model.encoder is not None else "embedding"
        # The output of an embedding has the embedding's own name.
        declared["input"], values["input"] = declared.pop("embedding"), values.pop("embedding")
        if "segments" in values and values["segments"].ndim == 1:  # a batch without segments: all have the first
            first = declared["segments"]
            declared["segments"] = first._replace(
                letters=first.letters.split()[-1], meaning="the vector of the first segment, added"
            )
        places = {"": owner, "positions": _positions_name(side, stack, 0)}
        self.last, self.known = (), {}
        self._add_all(f"{side}: embedding", None, "", f"{side}.embedding", declared, values, places, {"T": at})

    def _follow_function(
        self,
        side: str,
        stack: Stack,
        layer: int,
        function: str,
        at: str,
        declared: dict[str, Tap],
        values: Mapping[str, Tensor],
    ) -> None:
        if function == "feedforward" and stack.layerdrop is not None:
            declared["residual"] = declared["residual"]._replace(dropout=stack.layerdrop.fixed[layer])
        prefix = f"{side}.blocks.{layer}.{function}"
        block, norm = stack.layers[layer], f"{prefix}_norm"
        if function == "self_attention":
            self.before = self.stream
        elif function == "feedforward" and block.feedforward_norm is None:
            norm = f"{side}.blocks.{layer}.self_attention_norm"
        places = {"": prefix, "norm": norm, "out_norm": f"{prefix}_out_norm"}
        places |= {"positions": _positions_name(side, stack, layer)}
        is_parallel = function == "feedforward" and block.residual != "sequential"
        self.last = (self.before if is_parallel else self.stream,)
        self.known = {"stream": self.stream, "memory": self.memory, "before": self.before}
        letters = {"T": at} if function == "cross_attention" else {"T": at, "S": at}
        name = f"{side}.{layer}.{function}"
        self._add_all(side, layer, PARTS[function], name, declared, values, places, letters)

    def follow_head(self, name: str, head: Any, hidden: Tensor) -> None:
        """Add the steps from hidden states to predictions and the loss, with labels of zeros."""
        declared: dict[str, Tap] = {each.name: each for each in head.taps()}
        taps = TapSink(declared)
        logits = head(hidden, taps=taps)
        values = dict(taps.values)
        if "logits" in declared:
            declared["labels"], values["labels"], values["loss"] = _loss(head, logits)
            meaning = "one number, the mean over what has a label"
            declared["loss"] = Tap("loss", "", meaning, ("logits", "labels"))
        self.last, self.known = (self.stream,), {}
        self._add_all(f"head {name}", None, "", f"head.{name}", declared, values, {"": f"heads.{name}"}, {})

    def _add_all(
        self,
        title: str,
        layer: int | None,
        part: str,
        prefix: str,
        declared: Mapping[str, Tap],
        values: Mapping[str, Tensor],
        places: Mapping[str, str],
        letters: Mapping[str, str],
    ) -> None:
        """Add the steps of one module.

        places: full names of "" (the module) and of what else declarations name. letters: T and S of the module here.
        A letter that stands alone has the size of the first tensor with it; all others are checked against these.
        """
        shapes = {}
        sizes = {letter: size for letter, size in self.sizes.items() if letter not in ("D", "V")}
        for name, tensor in values.items():
            symbols = [letters.get(symbol, symbol) for symbol in declared[name].letters.split()]
            if symbols[:1] == ["1"] and tensor.shape[0] != 1:  # with padding, every example has its own positions
                symbols[0] = "B"
            shapes[name] = tuple(symbols)
            sizes = dict(zip(symbols, tensor.shape, strict=True)) | sizes
        self.known |= {name: f"{prefix}.{name}" for name in values}
        for name, tensor in values.items():
            tap, shape = declared[name], tuple(tensor.shape)
            shown_name = tap.title or name.replace("_", " ")
            check_shape(shape, shapes[name], sizes, what=f"{title} {part} {shown_name}")
            if tap.dropout_before:
                # The sum of the tensors before it, which has the shape of the first.
                first = next(step for _, _, step in self.seen if step.id == self.last[0])
                self._add_dropout(title, layer, first, tap.dropout_before, "")
            if "input" not in self.known and self.last:
                self.known["input"] = self.last[0]
            inputs = self.last if tap.inputs is None else self._named(tap.inputs)
            parameters = tuple(use for each in tap.parameters for use in self._parameters(each, places))
            step = TraceStep(part, shown_name, shapes[name], shape, tap.meaning, f"{prefix}.{name}", inputs, parameters)
            self.seen.append((title, layer, step))
            self.known[name] = self.known[tap.replaces or name] = step.id
            if not tap.beside:
                self.last = (step.id,)
            elif name != "position_ids":
                self.last = (*self.last, step.id)
            if tap.dropout:
                self._add_dropout(title, layer, step, tap.dropout, name)

    def _named(self, names: Sequence[str]) -> tuple[str, ...]:
        """Ids of the named tensors of this module that exist; "last" is the tensor before."""
        found = [
            self.last if name == "last" else (self.known[name],) for name in names if name in (*self.known, "last")
        ]
        return tuple(dict.fromkeys(each for ids in found for each in ids))

    def _add_dropout(self, title: str, layer: int | None, before: TraceStep, rate: float, name: str) -> None:
        """Add the dropout after a step, whose tap has this name."""
        what = {"heads": "the heads", "residual": "the passes through this layer"}.get(name, "the numbers")
        meaning = f"in training {100 * rate:.3g} % of {what} become 0, the others are divided by {1 - rate:.4g}"
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


def _positions_name(side: str, stack: Stack, layer: int) -> str:
    return f"{side}.positions" if stack.layer_positions is None else f"{side}.layer_positions.{layer}"


LABELS: dict[LabelKind, tuple[str, str]] = {
    "classes": ("B", "the correct class of each example"),
    "labels": ("B L", "1 for each label that the example has, else 0"),
    "score": ("B", "the correct number of each example"),
}
"""Letters and meaning of the labels of a pooled head."""


def _loss(head: nn.Module, logits: Tensor) -> tuple[Tap, Tensor, Tensor]:
    """Labels of zeros with their declaration, and the loss, of a head."""
    if isinstance(head, VocabularyHead):
        labels = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
        tap = Tap("labels", "B T", "the token that is right at each position", ())
        return tap, labels, F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    if isinstance(head, TokenHead):
        rows, length, outputs = logits.shape
        of_tokens = head.chooses == "labels"
        shape = (rows, length) if of_tokens else (rows, outputs)
        labels = torch.zeros(shape, dtype=torch.long, device=logits.device)
        meaning = "the label of each token" if of_tokens else "where the answer starts, where it ends"
        tap = Tap("labels", "B T" if of_tokens else f"B {outputs}", meaning, ())
        return tap, labels, F.cross_entropy(logits.transpose(1, 2) if of_tokens else logits, labels)
    if isinstance(head, PooledHead) and head.label_kind == "classes" and logits.shape[1] == 1:
        labels = torch.zeros(1, dtype=torch.long, device=logits.device)
        return Tap("labels", "1", "the number of the right choice", ()), labels, F.cross_entropy(logits.T, labels)
    kind: LabelKind = head.label_kind if isinstance(head, PooledHead) else "labels"
    letters, meaning = LABELS[kind] if isinstance(head, PooledHead) else ("B T", "1 where the token was replaced")
    tap = Tap("labels", letters, meaning, ())
    if kind == "labels":
        labels = torch.zeros_like(logits)
        return tap, labels, F.binary_cross_entropy_with_logits(logits, labels)
    is_class = kind == "classes"
    labels = torch.zeros(logits.shape[0], dtype=torch.long if is_class else torch.float32, device=logits.device)
    return tap, labels, F.cross_entropy(logits, labels) if is_class else F.mse_loss(logits.squeeze(-1), labels)


# --- letters ---------------------------------------------------------------------------------------------------------


def value_of(symbol: str, sizes: Mapping[str, int]) -> int:
    """The number of a symbol, such as `Hh+Kh+Kv`."""
    return sum(math.prod(sizes[c] if c in sizes else int(c) for c in term) for term in symbol.split("+"))


def check_shape(shape: Sequence[int], symbols: Sequence[str], sizes: Mapping[str, int], *, what: str) -> None:
    """Fail if a tensor does not have the shape of its symbols."""
    expected = [value_of(symbol, sizes) for symbol in symbols]
    assert list(shape) == expected, f"{what}: found {list(shape)}, expected {list(symbols)} = {expected}"


# --- sections --------------------------------------------------------------------------------------------------------


def _sections(seen: Sequence[Seen]) -> Iterator[TraceSection]:
    """Sections of steps by place. Consecutive layers with the same steps are one section with the first layer's ids."""
    found: list[TraceSection] = []
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
            found.append(TraceSection(title, () if layer is None else (layer,), steps))
            owners = steps
        shown |= {step.id: owner.id for step, owner in zip(steps, owners, strict=True)}
        for step, owner in zip(steps, owners, strict=True):
            inputs.setdefault(owner.id, {}).update({shown[each]: None for each in step.inputs})
    for section in found:
        yield replace(section, steps=tuple(replace(step, inputs=tuple(inputs[step.id])) for step in section.steps))
