"""The `data` section: what is read, and how examples become batches."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tformer.recipe.section import NonNegative, Positive, PositiveFloat, Section


class Columns(Section):
    """Columns of csv, tsv, jsonl and parquet files: names, or numbers counted from 0."""

    text: str | int | None = None
    text2: str | int | None = None
    label: str | int | None = None
    source: str | int | None = None
    target: str | int | None = None


class SourceSpec(Section):
    """One place that text comes from: a file, folder or glob, `-` for standard input, or `builtin:NAME`."""

    path: str
    target_path: str | None = None  # the other side of aligned files
    # share of a mixture; null everywhere: in proportion to the tokens, of pairs to their number
    weight: PositiveFloat | None = None
    prefix: str = ""  # text-to-text tasks
    task: str | None = None


class Data(Section):
    train: tuple[SourceSpec, ...] = ()  # empty: the built-in source of the objective
    valid: tuple[SourceSpec, ...] = ()  # empty: `valid_fraction` of the training data, fixed
    valid_fraction: Annotated[float, Field(gt=0, lt=0.5)] = 0.1
    columns: Columns = Columns()
    errors: Literal["strict", "replace"] = "strict"  # invalid UTF-8
    packing: Literal["concat", "documents", "none"] = "concat"  # none: one document an example, padded
    document_mask: bool = False  # packed documents do not see each other
    padding: Literal["right", "left", "random"] = "right"
    pad_to: Literal["longest", "max"] = "longest"
    seq_len: Positive | None = None  # null: model.max_seq_len
    sort_window: NonNegative = 0  # examples sorted by length inside windows of this many; 0: not sorted
    target_seq_len: Positive | None = None  # pairs: of the target; null: seq_len
    overlong: Literal["drop", "truncate"] = "drop"  # what becomes of pairs longer than that
    max_length_ratio: PositiveFloat | None = None  # pairs whose longer side has more times the tokens are left out
    labels: tuple[str, ...] = ()  # label names in order; empty: found in the data
    label_separator: str = "|"  # between the labels of one example (multi_label)
    truncation: Literal["head", "tail", "head_tail"] = "head"  # which part of a text longer than seq_len is kept
    # of labelled examples without data.valid: a fixed drawing with every label's share, or the last ones
    valid_split: Literal["stratified", "last"] = "stratified"
    image_mean: tuple[float, ...] = ()  # per channel, of values in [0, 1]; empty: the training images'
    image_std: tuple[float, ...] = ()
    augment: tuple[Literal["shift", "flip", "crop"], ...] = ()
