"""What each objective asks of the recipe: data, parts of the model, a head; and which keys it does not read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from tformer.nn.classification_heads import (
    ClassifierHeadOptions,
    NextSentenceHeadOptions,
    RegressionHeadOptions,
    ReplacedTokenHeadOptions,
)
from tformer.nn.heads import HeadOptions, LmHeadOptions, MaskedLmHeadOptions
from tformer.recipe.recipe import Recipe

# How an objective's examples come: running text cut into windows, sentences, labelled rows (or images), or pairs.
DataKind = Literal["text", "sentences", "labelled", "pairs"]

BEAMS = ("beam_size", "length_penalty", "length_penalty_type", "stopping", "beam_groups", "diversity_penalty")
OF_SOURCES = tuple(f"generation.{name}" for name in ("coverage_penalty", "length_margin"))
DECODING = (*(f"generation.{name}" for name in (*BEAMS, "min_new_tokens", "suppress_tokens")), *OF_SOURCES)
VALID_DECODING = ("training.valid_beam_size", "training.valid_sentences")
VOCABULARIES = tuple(f"tokenizer.{name}" for name in ("separate", "train_target", "source_path", "target_path"))
PAIRED = ("data.max_length_ratio", "data.target_seq_len", "data.overlong", *VOCABULARIES, *VALID_DECODING)
IMAGES = ("data.image_mean", "data.image_std", "data.augment")
COLUMNS_OF_LABELLED = ("data.columns.text2", "data.columns.label", "data.label_separator", "data.truncation")
COLUMNS_OF_PAIRS = ("data.columns.source", "data.columns.target")
OF_DECODERS = tuple(f"tokenizer.special_ids.{name}" for name in ("decoder_start", "forced_bos", "forced_eos"))
WINDOWS = ("data.document_mask",)


class Needs(NamedTuple):
    """What an objective asks of data and model, which metrics it yields, and how its head looks by default."""

    data: DataKind
    parts: tuple[str, ...]  # of the model section; those in `without` must be null
    without: tuple[str, ...]
    head: HeadOptions
    metrics: tuple[str, ...]
    unused: tuple[str, ...]  # keys that it does not read


_LM_UNUSED = (*PAIRED, *IMAGES, *COLUMNS_OF_LABELLED, *COLUMNS_OF_PAIRS, "data.valid_split")
_TEXT_UNUSED = (*_LM_UNUSED, *DECODING)
# A decoder that reads the text after the encoder (BART's classifier) begins with decoder_start.
_LABELLED_UNUSED = (*PAIRED, *COLUMNS_OF_PAIRS, *DECODING, *OF_DECODERS[1:], *WINDOWS, "generator")
DECODED_METRICS = {"sequence_accuracy", "bleu", "chrf"}  # of what a model writes by itself
CLASS_METRICS = ("loss", "accuracy", "f1", "mcc")

OBJECTIVE_NEEDS: dict[str, Needs] = {
    "causal_lm": Needs(
        data="text",
        parts=("decoder",),
        without=("encoder", "patches"),
        head=LmHeadOptions(),
        metrics=("loss", "accuracy"),
        unused=(
            *_LM_UNUSED,
            *OF_SOURCES,
            *(key for key in OF_DECODERS if not key.endswith(".forced_eos")),
            "generator",
        ),
    ),
    "masked_lm": Needs(
        data="text",
        parts=("encoder",),
        without=("decoder", "patches"),
        head=MaskedLmHeadOptions(),
        metrics=("loss", "accuracy"),
        unused=(*_TEXT_UNUSED, *OF_DECODERS, "generator"),
    ),
    "next_sentence": Needs(
        data="sentences",
        parts=("encoder",),
        without=("decoder", "patches"),
        head=NextSentenceHeadOptions(),
        metrics=("loss",),
        unused=(*_TEXT_UNUSED, *OF_DECODERS, *WINDOWS, "generator", "data.packing"),
    ),
    "replaced_token": Needs(
        data="text",
        parts=("encoder",),
        without=("decoder", "patches"),
        head=ReplacedTokenHeadOptions(),
        metrics=("loss", "accuracy"),
        unused=(*_TEXT_UNUSED, *OF_DECODERS),
    ),
    "classification": Needs(
        data="labelled",
        parts=("encoder",),
        without=(),
        head=ClassifierHeadOptions(),
        metrics=CLASS_METRICS,
        unused=(*_LABELLED_UNUSED, "data.label_separator"),
    ),
    "multi_label": Needs(
        data="labelled",
        parts=("encoder",),
        without=(),
        head=ClassifierHeadOptions(multi_label=True),
        metrics=("loss", "accuracy", "f1"),
        unused=_LABELLED_UNUSED,
    ),
    "regression": Needs(
        data="labelled",
        parts=("encoder",),
        without=(),
        head=RegressionHeadOptions(),
        metrics=("loss", "pearson", "spearman"),
        unused=(*_LABELLED_UNUSED, "data.label_separator", "data.labels"),
    ),
    "seq2seq": Needs(
        data="pairs",
        parts=("encoder", "decoder"),
        without=("patches",),
        head=LmHeadOptions(),
        metrics=("loss", "accuracy", "sequence_accuracy", "bleu", "chrf"),
        unused=(*IMAGES, *COLUMNS_OF_LABELLED, *WINDOWS, "data.packing", "data.valid_split", "generator"),
    ),
    "span_corruption": Needs(
        data="text",
        parts=("encoder", "decoder"),
        without=("patches",),
        head=LmHeadOptions(),
        metrics=("loss", "accuracy"),
        unused=(*_LM_UNUSED, *WINDOWS, "generator"),
    ),
    "denoising": Needs(
        data="text",
        parts=("encoder", "decoder"),
        without=("patches",),
        head=LmHeadOptions(),
        metrics=("loss", "accuracy"),
        unused=(*_LM_UNUSED, *WINDOWS, "generator"),
    ),
}


def data_kind(recipe: Recipe) -> DataKind:
    """How the examples of this recipe come; of several objectives the most demanding decides."""
    kinds = {OBJECTIVE_NEEDS[objective.kind].data for objective in recipe.objectives}
    return next(kind for kind in ("pairs", "labelled", "sentences", "text") if kind in kinds)


def unused_keys(kinds: Iterable[str]) -> list[str]:
    """The keys that none of these objectives reads, in order of the alphabet."""
    return sorted(set.intersection(*(set(OBJECTIVE_NEEDS[kind].unused) for kind in kinds)))
