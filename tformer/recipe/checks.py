"""What the schema cannot say: keys that contradict one another, and keys that are allowed but do nothing.

A contradiction is an error; the rest are notes for the person who starts the run. Old checkpoints are not checked: what
once trained must load.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from tformer.nn.heads import ClassifierHeadOptions, RegressionHeadOptions
from tformer.recipe.model import Stack, layer_sections
from tformer.recipe.needs import DECODED_METRICS, OBJECTIVE_NEEDS, data_kind, unused_keys
from tformer.recipe.problems import Problem, raise_problems
from tformer.recipe.recipe import Recipe, Teacher

SCORED_POSITIONS = ("alibi", "t5_bias", "shaw")
"""Kinds that change the score of a query and a key, or what its value adds."""


def check_recipe(recipe: Recipe) -> list[str]:
    """The notes on a recipe; `InputError` if its keys contradict one another."""
    raise_problems(list(contradictions(recipe)), lambda path: "")
    return list(notes(recipe))


def contradictions(recipe: Recipe) -> Iterator[Problem]:
    """What cannot be trained as it stands."""
    longest = recipe.model.max_seq_len
    for name in ("seq_len", "target_seq_len"):
        length = getattr(recipe.data, name)
        if length is not None and length > longest:
            yield Problem(("data", name), f"found {length}, expected at most model.max_seq_len ({longest})")
    yield from _one_sided(recipe)
    yield from _odd_vocabularies(recipe)
    yield from _unmet_needs(recipe)
    yield from _mixed_documents(recipe)
    yield from _unfit_implementation(recipe)
    yield from _unfit_teaching(recipe)


def _one_sided(recipe: Recipe) -> Iterator[Problem]:
    """Entries of the data that are more than the objective would read of them."""
    if data_kind(recipe) == "pairs":
        return
    who = " and ".join(objective.kind for objective in recipe.objectives)
    both = recipe.model.encoder is not None and recipe.model.decoder is not None
    hint = f"to learn pairs: {'--objective seq2seq' if both else '--arch transformer'}"
    for part in ("train", "valid"):
        for number, spec in enumerate(getattr(recipe.data, part)):
            path = ("data", part, str(number))
            if spec.target_path is not None:
                text = f"found {spec.target_path}, but {who} does not read pairs: expected null"
                yield Problem((*path, "target_path"), text, hint)
            if spec.prefix:
                text = f"found {spec.prefix!r}, but {who} puts nothing before its texts: expected none"
                yield Problem((*path, "prefix"), text, hint)


def _odd_vocabularies(recipe: Recipe) -> Iterator[Problem]:
    tokenizer = recipe.tokenizer
    if (tokenizer.source_path is None) != (tokenizer.target_path is None):
        missing = "source_path" if tokenizer.source_path is None else "target_path"
        yield Problem(("tokenizer", missing), "missing, expected a file for each side (or tokenizer.path for both)")
    if tokenizer.path is not None and tokenizer.source_path is not None:
        yield Problem(("tokenizer", "path"), "excludes tokenizer.source_path and tokenizer.target_path, found them all")
    elif tokenizer.path is not None and recipe.separate_vocabularies:
        yield Problem(
            ("tokenizer", "path"),
            f"found {tokenizer.path}, expected null where source and target have a vocabulary each",
            "a file for each side: --source-tokenizer FILE --target-tokenizer FILE; one for both: --vocabulary joint",
        )
    both = recipe.model.encoder is not None and recipe.model.decoder is not None
    rows, target_rows = recipe.model.vocab_size, recipe.model.target_vocab_size
    one_table = rows is not None and rows == target_rows  # two tokenizers with the same ids, as Marian's
    if recipe.separate_vocabularies and recipe.model.tie.source_target and both and not one_table:
        path = ("model", "tie", "source_target")
        yield Problem(path, "found true, expected false where source and target have a vocabulary each")


def _unmet_needs(recipe: Recipe) -> Iterator[Problem]:
    heads = tuple(head.kind for head in recipe.model.heads)
    for index, objective in enumerate(recipe.objectives):
        path = ("objectives", str(index), "kind")
        needs = OBJECTIVE_NEEDS[objective.kind]
        for part in needs.parts:
            if getattr(recipe.model, part) is None:
                yield Problem(path, f"{objective.kind} needs model.{part}, found null")
        if needs.data == "labelled" and recipe.model.patches is not None and recipe.model.decoder is not None:
            yield Problem(path, f"{objective.kind} of images needs a model without model.decoder, found one")
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
    metrics = {metric for objective in recipe.objectives for metric in OBJECTIVE_NEEDS[objective.kind].metrics}
    best, key = recipe.training.best_metric, ("training", "best_metric")
    if best not in metrics:
        known = ", ".join(sorted(metrics))
        yield Problem(key, f"found '{best}', expected what the objectives yield: {known}")
    elif best in DECODED_METRICS and not recipe.training.valid_beam_size:
        known = ", ".join(sorted(metrics - DECODED_METRICS))
        text = f"found '{best}', expected {known}: with training.valid_beam_size 0 validation does not decode"
        yield Problem(key, text, "1 is greedy")


def _unfit_head(recipe: Recipe, kind: str) -> Iterator[Problem]:
    if OBJECTIVE_NEEDS[kind].data == "labelled" and recipe.model.decoder is not None:
        for number, head in enumerate(recipe.model.heads):
            if isinstance(head, ClassifierHeadOptions | RegressionHeadOptions) and head.pooling == "cls":
                path = ("model", "heads", str(number), "pooling")
                text = "found cls, the first position, where model.decoder has read nothing: expected eos or mean"
                yield Problem(path, text, "eos is the last position, as in BART's classifier")
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


def _mixed_documents(recipe: Recipe) -> Iterator[Problem]:
    """Documents packed into one row and to be kept apart, by attention that cannot."""
    if not recipe.data.document_mask or recipe.data.packing == "none":
        return
    for side, layer in _layers(recipe):
        if layer.attention.mechanism.one_document:
            text = f"found true, expected false with model.{side}.attention.kind {layer.attention.kind}"
            yield Problem(("data", "document_mask"), text, "it mixes all of a row: data.packing=none keeps them apart")
            return


def _unfit_implementation(recipe: Recipe) -> Iterator[Problem]:
    """FlexAttention, where something has to happen to single scores or weights."""
    for side, layer in _layers(recipe):
        if not layer.attention.fused_only:
            continue
        text, kind = f"found flex, expected auto or blocks with model.{side}", layer.positions.kind
        unfit = f"attention_dropout {layer.attention_dropout:g}" if layer.attention_dropout else ""
        unfit = f"positions.kind {kind}" if kind in SCORED_POSITIONS else unfit
        if unfit:
            yield Problem(("model", side, "attention", "implementation"), f"{text}.{unfit}")
            return


def _layers(recipe: Recipe) -> Iterator[tuple[str, Stack]]:
    """Every layer's own section, with the name of its stack."""
    for side in ("encoder", "decoder"):
        stack = getattr(recipe.model, side)
        if stack is not None:
            for layer in layer_sections(stack, path=f"model.{side}"):
                yield side, layer


def _unfit_teaching(recipe: Recipe) -> Iterator[Problem]:
    """What a teacher cannot teach this objective."""
    teacher = recipe.teacher
    if teacher is None or teacher.path is None:
        return
    kinds = [objective.kind for objective in recipe.objectives]
    if teacher.kind == "sequence":
        if kinds != ["seq2seq"]:
            text = f"found sequence, expected soft with the objective {kinds[0]}: only sources of pairs are decoded"
            yield Problem(("teacher", "kind"), text)
        return
    if "replaced_token" in kinds:
        text = f"found {teacher.path}, expected null with replaced_token, which learns from a generator"
        yield Problem(("teacher", "path"), text)


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
    yield from _idle_teaching(recipe)
    yield from _unused(recipe)


def _idle_teaching(recipe: Recipe) -> Iterator[str]:
    teacher = recipe.teacher
    if teacher is None:
        return
    if teacher.path is None:
        yield "teacher does nothing: teacher.path is null"
        return
    if teacher.kind == "sequence":
        for name in ("temperature", "alpha", "hidden", "attention"):
            value = getattr(teacher, name)
            if value != Teacher.model_fields[name].default:
                yield f"teacher.{name} ({value}) is not used by teacher.kind sequence"
    elif teacher.alpha == 1 and not (teacher.hidden or teacher.attention):
        yield "the teacher has no say: teacher.alpha is 1, and its hidden states and attention have no weight"
    elif (teacher.hidden or teacher.attention) and recipe.training.activation_checkpointing:
        yield "training.activation_checkpointing does nothing beside teacher.hidden or teacher.attention"


def _unused(recipe: Recipe) -> Iterator[str]:
    """Keys that were set, and that no objective of this recipe reads."""
    kinds = [objective.kind for objective in recipe.objectives]
    who = " and ".join(dict.fromkeys(kinds))
    for key in unused_keys(kinds):
        section, _, name = key.rpartition(".")
        owner = attrgetter(section)(recipe) if section else recipe
        value = getattr(owner, name)
        if value != type(owner).model_fields[name].default:
            found = f" ({value})" if isinstance(value, (int, float, str)) else ""
            yield f"{key}{found} is not used by {who}"
