"""One example of a batch in readable form: the text before the objective, and what the model reads and predicts.

Tokens are shown as text, special ones spelled out: [MASK], <extra_id_0>, [PAD]. Rows with one value for each position
of a sequence stand below each other, in columns.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from torch import Tensor

from tformer.data.batching.batch import Batch
from tformer.data.encoding import token_text
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives.base import Objective
from tformer.objectives.labelled import LabelledObjective
from tformer.support.errors import visible
from tformer.support.formatting import TOKEN_SIGNS, as_one_line, columns_of, shortened
from tformer.tasks.base import Tokenizers
from tformer.tokenizer import Tokenizer

SHOWN_POSITIONS = 48  # of a sequence, as lines of text
SHOWN_CHARACTERS = 300  # of the original text
NO_LABEL = "·"
HEADINGS = {
    "input_ids": "input",
    "decoder_input_ids": "decoder input",
    "labels": "labels",
    "token_type_ids": "types",
    "document_ids": "documents",
    "position_ids": "positions",
}
"""Names of a batch's tensors in lines of text."""

SIDES = (
    ("input_ids", "token_type_ids", "document_ids", "position_ids", "attention_mask"),
    ("decoder_input_ids", "decoder_attention_mask"),
)
"""Tensors with one value for each position of the encoder or of the only stack, and of a decoder beside an encoder."""


def example_document(
    objective: Objective, samples: Sequence[Any], batch: Batch, tokenizers: Tokenizers, *, labels: Sequence[str] = ()
) -> dict[str, Any]:
    """The first example of a batch.

    Args:
        objective: it made the batch from these samples.
        labels: names of the classes.

    Keys: `objective`: {kind: what is predicted}; `original`: {name: the text before the objective}; every tensor of the
    batch, with the text of each token where it holds ids; `label` where the example has one.
    """
    source, target = tokenizers[0], tokenizers[1] or tokenizers[0]
    document: dict[str, Any] = {"objective": {each.options.kind: each.predicts for each in objective.members}}
    originals = objective.originals(samples[0])
    document["original"] = {name: _text(target if name == "target" else source, ids) for name, ids in originals.items()}
    values = {name: tensor[0] for name, tensor in batch.tensors().items()}
    if batch.pixel_values is not None:
        pixels = values.pop("pixel_values")
        found = {"shape": list(pixels.shape), "min": pixels.min().item(), "max": pixels.max().item()}
        document["pixel_values"] = found
    head = objective.members[0].head
    of_example = head.label_kind is not None or (batch.labels is not None and batch.labels.ndim == 1)
    label = values.pop("labels", None) if of_example else None
    if label is not None:
        document["label"] = _label(label, head.label_kind, labels)
    for name, row in values.items():
        if name == "labels" and isinstance(objective.members[0], LabelledObjective):
            known = [None if label == IGNORED_LABEL else label for label in row.tolist()]
            words = [None if label is None else labels[label] if labels else str(label) for label in known]
            document[name] = {"ids": known, "tokens": words}
        elif name.endswith("input_ids") or name == "labels":
            is_target = name.startswith("decoder") or (name == "labels" and batch.decoder_input_ids is not None)
            document[name] = _tokens(target if is_target else source, row.tolist())
        else:
            document[name] = row.tolist()
    return document


def _tokens(tokenizer: Tokenizer | None, ids: Sequence[int]) -> dict[str, list[Any]]:
    """{"ids", "tokens"}: null for an ignored label."""
    assert tokenizer is not None
    known = [None if token == IGNORED_LABEL else token for token in ids]
    return {"ids": known, "tokens": [None if token is None else token_text(tokenizer, token) for token in known]}


def _text(tokenizer: Tokenizer | None, ids: np.ndarray) -> dict[str, Any]:
    """{"text", "ids", "tokens"}."""
    assert tokenizer is not None
    return {"text": tokenizer.decode(ids.tolist(), skip_special=False), **_tokens(tokenizer, ids.tolist())}


def _label(label: Tensor, kind: str | None, names: Sequence[str]) -> Any:
    if kind == "classes":
        return names[int(label)] if names else int(label)
    if kind == "labels":
        return [name for name, is_set in zip(names, label.tolist(), strict=True) if is_set]
    return label.item()


# --- lines of text ---------------------------------------------------------------------------------------------------


def example_lines(document: Mapping[str, Any], *, width: int) -> Iterator[str]:
    """The document as lines: the original text, then each sequence in columns, at most SHOWN_POSITIONS of them."""
    for kind, predicts in document["objective"].items():
        yield from textwrap.wrap(f"{kind}: predicts {predicts}", width, subsequent_indent="  ")
    for name, original in document["original"].items():
        heading = "original" if name == "text" else f"original {name}"
        shown = shortened(as_one_line(original["text"]), SHOWN_CHARACTERS)
        yield from textwrap.wrap(f"{heading}: {visible(shown)}", width, subsequent_indent="  ")
    for side in SIDES:
        if side[0] in document:
            last = side[0] == "decoder_input_ids" or "decoder_input_ids" not in document
            names = (*side, "labels") if last else side
            yield from _side_lines({name: document[name] for name in names if name in document}, width)
    if "pixel_values" in document:
        pixels = document["pixel_values"]
        size = " × ".join(map(str, pixels["shape"]))
        yield f"image: {size} normalized numbers from {pixels['min']:.2f} to {pixels['max']:.2f}"
    for name in ("label", "next_sentence_label"):
        if name in document:
            value = document[name]
            shown = (", ".join(value) or "none") if isinstance(value, list) else value
            yield f"{name.replace('_', ' ')}: {shown}"


def _side_lines(rows: Mapping[str, Any], width: int) -> Iterator[str]:
    """Rows of equal length in columns, wrapped at the width, with a blank line before each block; then the mask."""
    masks = [row for name, row in rows.items() if name.endswith("attention_mask")]
    cells = {HEADINGS[name]: _cells(row) for name, row in rows.items() if not name.endswith("attention_mask")}
    left = max(map(len, cells)) + 2
    count = len(next(iter(cells.values())))
    shown = min(count, SHOWN_POSITIONS)
    widths = [max(columns_of(row[place]) for row in cells.values()) for place in range(shown)]
    start = 0
    while start < shown:
        stop, used = start, left
        while stop < shown and (stop == start or used + widths[stop] <= width):
            used, stop = used + widths[stop] + 1, stop + 1
        yield ""
        for heading, row in cells.items():
            padded = (row[place] + " " * (widths[place] - columns_of(row[place])) for place in range(start, stop))
            yield f"{heading:<{left}}{' '.join(padded)}".rstrip()
        start = stop
    if shown < count:
        yield f"... {count - shown:,} more positions (--json has all)"
    yield from textwrap.wrap(f"{'mask':<{left}}{_mask_words(masks[0]) if masks else 'none, nothing is padded'}", width)


def _mask_words(mask: Sequence[bool]) -> str:
    """The runs of real and of padded positions."""
    parts, start = [], 0
    for is_real, run in groupby(mask):
        stop = start + len(list(run))
        places = f"{start}" if stop == start + 1 else f"{start}-{stop - 1}"
        parts.append(f"{places} {'real' if is_real else 'padding'}")
        start = stop
    return f"positions {', '.join(parts)}"


def _cells(row: Any) -> list[str]:
    if isinstance(row, dict):
        return [NO_LABEL if token is None else visible(token.translate(TOKEN_SIGNS)) for token in row["tokens"]]
    return [str(int(value)) for value in row]
