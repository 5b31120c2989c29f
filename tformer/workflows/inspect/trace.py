"""The dimension tracker: one example through the real forward pass, and every tensor on the way, with its meaning.

The model runs on the meta device, which makes every tensor's shape and none of its numbers, so that a model of any size
takes a second. Nothing is computed from the recipe: shapes are those of tensors that the model's own code made, seen by
hooks on its modules, by wrappers around the hooks of its positions, and by a mode that watches for the softmax. A
meaning that does not fit the tensor's shape is a failed assertion, not a wrong line.

Scores and weights are seen on the explicit path: training, and whatever asks for no weights, never stores them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.model import Transformer
from tformer.nn.attention import routes as chunked
from tformer.nn.classification_heads import PooledHead
from tformer.nn.embedding import PatchEmbedding, TokenEmbedding
from tformer.nn.heads import Output, VocabularyHead
from tformer.workflows.inspect.symbols import check_shape
from tformer.workflows.inspect.watch import Watch, watch_embedding, watch_head
from tformer.workflows.inspect.watch_layers import watch_stack


@dataclass(frozen=True)
class Step:
    """A tensor on the way. part: of a layer, or of what stands outside the layers."""

    part: str
    name: str
    symbols: tuple[str, ...]
    shape: tuple[int, ...]
    meaning: str

    def to_json(self) -> dict[str, Any]:
        return {"part": self.part, "name": self.name, "symbols": list(self.symbols), "shape": list(self.shape),
                "meaning": self.meaning}  # fmt: skip


@dataclass(frozen=True)
class Section:
    """Steps that belong together: an embedding, a layer and those alike (`layers`, by number), a head."""

    title: str
    layers: tuple[int, ...]
    steps: tuple[Step, ...]

    def to_json(self) -> dict[str, Any]:
        return {"title": self.title, "layers": list(self.layers), "steps": [step.to_json() for step in self.steps]}


@dataclass(frozen=True)
class Trace:
    """sizes: what the letters stand for, outside of single layers."""

    sizes: Mapping[str, int]
    sections: tuple[Section, ...]

    def to_json(self) -> dict[str, Any]:
        return {"sizes": dict(self.sizes), "sections": [section.to_json() for section in self.sections]}


class Recorder:
    """Where the tensors go that were seen, in order."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.seen: list[tuple[str, int | None, Step]] = []

    def see(
        self,
        where: tuple[str, int | None, str],
        name: str,
        tensor: Tensor,
        symbols: Sequence[str],
        meaning: str,
        own: Mapping[str, int] | None = None,
    ) -> None:
        """where: (section, layer, part); own: sizes of this place that go before the model's."""
        title, layer, part = where
        shape = tuple(tensor.shape)
        check_shape(shape, symbols, {**self.sizes, **(own or {})}, what=f"{title} {part} {name}")
        self.seen.append((title, layer, Step(part, name, tuple(symbols), shape, meaning)))


def trace_shapes(
    model: Transformer, *, batch_size: int = 1, source_length: int, target_length: int | None = None
) -> Trace:
    """Follow `batch_size` examples through a model, which may be on any device and is left as it was.

    Args:
        source_length: positions of the encoder or of the only stack; of images what an image has.
        target_length: of the decoder beside an encoder.
    """
    sizes = _sizes(model, batch_size, source_length, target_length)
    recorder = Recorder(sizes)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), _whole_scores(), _watched(model, recorder):
            taps = [name for name in model.tap_names() if name.endswith(".weights")]
            output = model(**_inputs(model, sizes, device), taps=taps)
            for name in model.heads:
                logits = output.head(name)
                _see_loss(recorder, output, name, logits)
    finally:
        model.train(was_training)
    return Trace(sizes, tuple(_sections(recorder)))


def _sizes(model: Transformer, batch_size: int, source_length: int, target_length: int | None) -> dict[str, int]:
    sizes = {"B": batch_size, "T": source_length}
    if model.encoder is not None and model.decoder is not None:
        sizes |= {"S": source_length, "T": source_length if target_length is None else target_length}
    stack = model.decoder if model.decoder is not None else model.encoder
    assert stack is not None
    sizes["D"] = stack.d_model
    embedding = model.embedding
    if isinstance(embedding, PatchEmbedding):
        side = embedding.image_size // embedding.size
        sizes |= {"C": embedding.channels, "Y": embedding.image_size, "X": embedding.image_size, "P": embedding.size}
        sizes |= {"N": side * side, "S" if "S" in sizes else "T": embedding.seq_len}
    if isinstance(model.embedding, TokenEmbedding):
        sizes["V"] = model.embedding.weight.shape[0]
    if model.decoder_embedding is not None:
        sizes["V"] = model.decoder_embedding.weight.shape[0]
    return sizes


def _inputs(model: Transformer, sizes: Mapping[str, int], device: torch.device) -> dict[str, Tensor]:
    batch, both = sizes["B"], "S" in sizes
    source = sizes["S"] if both else sizes["T"]
    inputs: dict[str, Tensor] = {}
    if isinstance(model.embedding, PatchEmbedding):
        inputs["pixel_values"] = torch.zeros(batch, sizes["C"], sizes["Y"], sizes["X"], device=device)
    else:
        inputs["input_ids"] = torch.zeros(batch, source, dtype=torch.long, device=device)
        if model.embedding.token_types is not None:
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    if both:
        inputs["decoder_input_ids"] = torch.zeros(batch, sizes["T"], dtype=torch.long, device=device)
    return inputs


@contextmanager
def _whole_scores() -> Iterator[None]:
    """Long inputs are worked through a few queries at a time: here all at once, as the scores are meant."""
    usual = chunked.CHUNK_ELEMENTS
    chunked.CHUNK_ELEMENTS = sys.maxsize
    try:
        yield
    finally:
        chunked.CHUNK_ELEMENTS = usual


@contextmanager
def _watched(model: Transformer, recorder: Recorder) -> Iterator[None]:
    """Watchers on everything that makes a tensor worth telling of; all are gone at the end."""
    with ExitStack() as stack:
        watch = stack.enter_context(Watch())
        sides = [(side, found) for side in ("encoder", "decoder") if (found := getattr(model, side)) is not None]
        both = len(sides) == 2
        for side, found in sides:
            embedding = model.embedding if side == sides[0][0] else model.decoder_embedding
            positions = "S" if both and side == "encoder" else "T"
            watch_embedding(stack, watch, recorder, embedding, found.positions_of(0), side=side, at=positions)
            watch_stack(stack, watch, recorder, found, side=side, at=positions, memory=both and side == "encoder")
        for name, head in model.heads.items():
            watch_head(stack, recorder, name, head)
        yield


def _see_loss(recorder: Recorder, output: Output, name: str, logits: Tensor) -> None:
    """The loss of zeros as labels, in the shapes that training has."""
    head = output.heads[name]
    where = (f"head {name}", None, "")
    if isinstance(head, VocabularyHead):
        labels = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
        recorder.see(where, "labels", labels, ("B", "T"), "the token that is right at each position")
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    elif isinstance(head, PooledHead) and logits.shape[-1] > 1:
        labels = torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)
        recorder.see(where, "labels", labels, ("B",), "the right class of each example")
        loss = F.cross_entropy(logits, labels)
    elif isinstance(head, PooledHead):
        labels = torch.zeros(logits.shape[0], device=logits.device)
        recorder.see(where, "labels", labels, ("B",), "the right number of each example")
        loss = F.mse_loss(logits.squeeze(-1), labels)
    else:
        labels = torch.zeros_like(logits)
        recorder.see(where, "labels", labels, ("B", "T"), "1 where the token was replaced")
        loss = F.binary_cross_entropy_with_logits(logits, labels)
    recorder.see(where, "loss", loss, (), "one number, the mean over what has a label")


def _sections(recorder: Recorder) -> Iterator[Section]:
    """The steps by place; neighbouring layers with the same steps are one section."""
    open_section: Section | None = None
    for (title, layer), group in groupby(recorder.seen, key=lambda entry: entry[:2]):
        layers = () if layer is None else (layer,)
        section = Section(title, layers, tuple(step for _, _, step in group))
        if open_section is not None:
            if layers and open_section.layers and section.steps == open_section.steps and title == open_section.title:
                open_section = Section(title, open_section.layers + layers, section.steps)
                continue
            yield open_section
        open_section = section
    if open_section is not None:
        yield open_section
