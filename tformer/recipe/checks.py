"""What the schema cannot say: keys that contradict one another, and keys that are allowed but do nothing.

A contradiction is an error; the rest are notes for the person who starts the run. Old checkpoints are not checked: what
once trained must load.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Literal, NamedTuple

from tformer.nn.heads import (
    ClassifierHeadOptions,
    HeadOptions,
    LmHeadOptions,
    MaskedLmHeadOptions,
    NextSentenceHeadOptions,
    RegressionHeadOptions,
    ReplacedTokenHeadOptions,
)
from tformer.recipe.problems import Problem, raise_problems
from tformer.recipe.recipe import Recipe, SpecialTokens

# How an objective's examples come: running text cut into windows, sentences, labelled rows (or images), or pairs.
DataKind = Literal["text", "sentences", "labelled", "pairs"]

BEAMS = ("beam_size", "length_penalty", "length_penalty_type", "stopping", "beam_groups", "diversity_penalty")
OF_SOURCES = tuple(f"generation.{name}" for name in ("coverage_penalty", "length_margin"))
DECODING = (*(f"generation.{name}" for name in BEAMS), "generation.min_new_tokens", *OF_SOURCES)
VALID_DECODING = ("training.valid_beam_size", "training.valid_sentences")
VOCABULARIES = tuple(f"tokenizer.{name}" for name in ("separate", "train_target", "source_path", "target_path"))
PAIRED = ("data.max_length_ratio", "data.target_seq_len", "data.overlong", *VOCABULARIES, *VALID_DECODING, "teacher")
IMAGES = ("data.image_mean", "data.image_std", "data.augment")
COLUMNS_OF_LABELLED = ("data.columns.text2", "data.columns.label", "data.label_separator", "data.truncation")
COLUMNS_OF_PAIRS = ("data.columns.source", "data.columns.target")
SPECIAL_IDS = tuple(f"tokenizer.special_ids.{name}" for name in SpecialTokens.model_fields)
WINDOWS = ("data.document_mask",)
_READ_IDS = ("decoder_start", "forced_bos", "eos")  # by what has an encoder and a decoder
_UNREAD_IDS = tuple(key for key in SPECIAL_IDS if not key.endswith(_READ_IDS))


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
_LABELLED_UNUSED = (*PAIRED, *COLUMNS_OF_PAIRS, *DECODING, *SPECIAL_IDS, *WINDOWS, "generator")
CLASS_METRICS = ("loss", "accuracy", "f1", "mcc")

OBJECTIVE_NEEDS: dict[str, Needs] = {
    "causal_lm": Needs(
        data="text",
        parts=("decoder",),
        without=("encoder", "patches"),
        head=LmHeadOptions(),
        metrics=("loss", "accuracy"),
        unused=(*_LM_UNUSED, *OF_SOURCES, *(key for key in SPECIAL_IDS if not key.endswith(".eos")), "generator"),
    ),
    "masked_lm": Needs(
        data="text",
        parts=("encoder",),
        without=("decoder", "patches"),
        head=MaskedLmHeadOptions(),
        metrics=("loss", "accuracy"),
        unused=(*_TEXT_UNUSED, *SPECIAL_IDS, "generator"),
    ),
    "next_sentence": Needs(
        data="sentences",
        parts=("encoder",),
        without=("decoder", "patches"),
        head=NextSentenceHeadOptions(),
        metrics=("loss",),
        unused=(*_TEXT_UNUSED, *SPECIAL_IDS, *WINDOWS, "generator", "data.packing"),
    ),
    "replaced_token": Needs(
        data="text",
        parts=("encoder",),
        without=("decoder", "patches"),
        head=ReplacedTokenHeadOptions(),
        metrics=("loss", "accuracy"),
        unused=(*_TEXT_UNUSED, *SPECIAL_IDS),
    ),
    "classification": Needs(
        data="labelled",
        parts=("encoder",),
        without=("decoder",),
        head=ClassifierHeadOptions(),
        metrics=CLASS_METRICS,
        unused=(*_LABELLED_UNUSED, "data.label_separator"),
    ),
    "multi_label": Needs(
        data="labelled",
        parts=("encoder",),
        without=("decoder",),
        head=ClassifierHeadOptions(multi_label=True),
        metrics=("loss", "accuracy", "f1"),
        unused=_LABELLED_UNUSED,
    ),
    "regression": Needs(
        data="labelled",
        parts=("encoder",),
        without=("decoder",),
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
        unused=(*IMAGES, *COLUMNS_OF_LABELLED, *_UNREAD_IDS, *WINDOWS, "data.packing", "data.valid_split", "generator"),
    ),
    "span_corruption": Needs(
        data="text",
        parts=("encoder", "decoder"),
        without=("patches",),
        head=LmHeadOptions(),
        metrics=("loss", "accuracy"),
        unused=(*_LM_UNUSED, *_UNREAD_IDS, *WINDOWS, "generator"),
    ),
    "denoising": Needs(
        data="text",
        parts=("encoder", "decoder"),
        without=("patches",),
        head=LmHeadOptions(),
        metrics=("loss", "accuracy"),
        unused=(*_LM_UNUSED, *_UNREAD_IDS, *WINDOWS, "generator"),
    ),
}


def data_kind(recipe: Recipe) -> DataKind:
    """How the examples of this recipe come; of several objectives the most demanding decides."""
    kinds = {OBJECTIVE_NEEDS[objective.kind].data for objective in recipe.objectives}
    return next(kind for kind in ("pairs", "labelled", "sentences", "text") if kind in kinds)


def check_recipe(recipe: Recipe) -> list[str]:
    """The notes on a recipe; `InputError` if its keys contradict one another."""
    raise_problems(list(contradictions(recipe)), lambda path: "")
    return list(notes(recipe))


def contradictions(recipe: Recipe) -> Iterator[Problem]:
    """What cannot be trained as it stands."""
    seq_len, longest = recipe.data.seq_len, recipe.model.max_seq_len
    if seq_len is not None and seq_len > longest:
        yield Problem(("data", "seq_len"), f"found {seq_len}, expected at most model.max_seq_len ({longest})")
    tokenizer = recipe.tokenizer
    if (tokenizer.source_path is None) != (tokenizer.target_path is None):
        missing = "source_path" if tokenizer.source_path is None else "target_path"
        yield Problem(("tokenizer", missing), "missing, expected a file for each side (or tokenizer.path for both)")
    if tokenizer.path is not None and tokenizer.source_path is not None:
        yield Problem(("tokenizer", "path"), "excludes tokenizer.source_path and tokenizer.target_path, found them all")
    yield from _unmet_needs(recipe)


def _unmet_needs(recipe: Recipe) -> Iterator[Problem]:
    heads = tuple(head.kind for head in recipe.model.heads)
    for index, objective in enumerate(recipe.objectives):
        path = ("objectives", str(index), "kind")
        needs = OBJECTIVE_NEEDS[objective.kind]
        for part in needs.parts:
            if getattr(recipe.model, part) is None:
                yield Problem(path, f"{objective.kind} needs model.{part}, found null")
        for part in needs.without:
            if getattr(recipe.model, part) is not None:
                yield Problem(path, f"{objective.kind} needs a model without model.{part}, found one")
        if needs.head.kind not in heads:
            found = ", ".join(heads) or "none"
            yield Problem(path, f"{objective.kind} needs a head of kind {needs.head.kind}, found {found}")
        if recipe.model.patches is not None and objective.kind in ("multi_label", "regression"):
            yield Problem(path, f"{objective.kind} needs texts; images have one class each: expected classification")
        yield from _unfit_head(recipe, objective.kind)
    yield from _odd_company(recipe)
    both = recipe.model.encoder is not None and recipe.model.decoder is not None
    if recipe.separate_vocabularies and recipe.model.tie.source_target and both:
        path = ("model", "tie", "source_target")
        yield Problem(path, "found true, expected false where source and target have a vocabulary each")
    metrics = {metric for objective in recipe.objectives for metric in OBJECTIVE_NEEDS[objective.kind].metrics}
    if recipe.training.best_metric not in metrics:
        best, known = recipe.training.best_metric, ", ".join(sorted(metrics))
        yield Problem(("training", "best_metric"), f"found '{best}', expected what the objectives yield: {known}")


def _unfit_head(recipe: Recipe, kind: str) -> Iterator[Problem]:
    if kind not in ("classification", "multi_label"):
        return
    wants_many = kind == "multi_label"
    for number, head in enumerate(recipe.model.heads):
        if isinstance(head, ClassifierHeadOptions) and head.multi_label != wants_many:
            found, expected = str(head.multi_label).lower(), str(wants_many).lower()
            path = ("model", "heads", str(number), "multi_label")
            yield Problem(path, f"found {found}, expected {expected} with the objective {kind}")


def _odd_company(recipe: Recipe) -> Iterator[Problem]:
    """Only next_sentence shares a model's forward pass, and only with masked_lm, which comes first."""
    kinds = tuple(objective.kind for objective in recipe.objectives)
    if len(kinds) > 1 and kinds != ("masked_lm", "next_sentence"):
        found = ", ".join(kinds)
        yield Problem(("objectives",), f"found {found}, expected one objective, or masked_lm and next_sentence")
    elif kinds == ("next_sentence",):
        yield Problem(("objectives",), "next_sentence stands beside masked_lm: expected masked_lm, next_sentence")
    if (recipe.generator is None) == ("replaced_token" in kinds):
        found = "null" if recipe.generator is None else "a model"
        expected = "the small masked language model that replaces tokens" if recipe.generator is None else "null"
        yield Problem(("generator",), f"found {found}, expected {expected} with the objective {kinds[0]}")


def notes(recipe: Recipe) -> Iterator[str]:
    """What is allowed but probably not meant."""
    training, schedule, optimizer = recipe.training, recipe.schedule, recipe.optimizer
    if schedule.warmup_steps > training.max_steps:
        yield (
            f"schedule.warmup_steps ({schedule.warmup_steps}) is more than training.max_steps ({training.max_steps}): "
            "the learning rate never reaches its peak"
        )
    elif schedule.decay_steps is not None and schedule.warmup_steps >= schedule.decay_steps:
        yield (
            f"schedule.warmup_steps ({schedule.warmup_steps}) leaves nothing of schedule.decay_steps "
            f"({schedule.decay_steps}) to decay in"
        )
    waits_for_validation = "training.early_stopping" if training.early_stopping else ""
    if schedule.kind == "plateau":
        waits_for_validation = "schedule.kind plateau"
    if waits_for_validation and training.eval_every is not None and training.eval_every >= training.max_steps:
        yield (
            f"{waits_for_validation} does nothing: training.eval_every ({training.eval_every}) is not below "
            f"training.max_steps ({training.max_steps})"
        )
    if optimizer.adam_lr is not None and optimizer.kind != "muon":
        yield f"optimizer.adam_lr does nothing: it belongs to muon, and optimizer.kind is {optimizer.kind}"
    if recipe.data.document_mask and recipe.data.packing == "none":
        yield "data.document_mask does nothing: data.packing is none, so documents never see each other anyway"
    yield from _unused(recipe)


def _unused(recipe: Recipe) -> Iterator[str]:
    """Keys that were set, and that no objective of this recipe reads."""
    kinds = [objective.kind for objective in recipe.objectives]
    who = " and ".join(dict.fromkeys(kinds))
    shared = set.intersection(*(set(OBJECTIVE_NEEDS[kind].unused) for kind in kinds))
    for key in sorted(shared):
        section, _, name = key.rpartition(".")
        owner = attrgetter(section)(recipe) if section else recipe
        value = getattr(owner, name)
        if value != type(owner).model_fields[name].default:
            found = f" ({value})" if isinstance(value, (int, float, str)) else ""
            yield f"{key}{found} is not used by {who}"
