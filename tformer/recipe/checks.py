"""Checks across sections of a recipe: contradictions are errors, keys without effect are notes.

Only the recipes of new runs are checked: a checkpoint that was once trained must load.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from operator import attrgetter

from tformer.nn.classification_heads import POOLINGS
from tformer.objectives import OBJECTIVES, check_combination, unused_keys
from tformer.objectives.base import WINDOWED, Objective
from tformer.optim.optimizers import OPTIMIZERS
from tformer.optim.schedules import READS_VALIDATION_LOSS
from tformer.recipe.model import layer_sections
from tformer.recipe.problems import Problem
from tformer.recipe.recipe import Recipe, Teacher
from tformer.recipe.yaml_text import KeyPath

WIDE_LOGITS = 2.0
"""A larger standard deviation of a tied output's first logits is worth a note; tables of std d_model^-1/2 have 1."""


def contradictions(recipe: Recipe) -> Iterator[Problem]:
    """Problems: keys that contradict one another."""
    model = recipe.model
    target = "max_seq_len" if model.max_target_len is None else "max_target_len"
    for name, limit in (("seq_len", "max_seq_len"), ("target_seq_len", target)):
        length, longest = getattr(recipe.data, name), getattr(model, limit)
        if length is not None and length > longest:
            yield Problem(("data", name), f"found {length}, expected at most model.{limit} ({longest})")
    yield from _unused_sources(recipe)
    yield from _unfit_vocabularies(recipe)
    yield from _unmet_needs(recipe)
    yield from _unfit_attention(recipe)
    yield from _unfit_teaching(recipe)
    yield from _unfit_embeddings(recipe)
    yield from _unfit_adapters(recipe)
    yield from _unfit_regularization(recipe)
    yield from _unfit_clock(recipe)
    yield from _unfit_folds(recipe)


def _unfit_folds(recipe: Recipe) -> Iterator[Problem]:
    """Folds of data that are not labelled, and a fold that is none of them."""
    folds, fold, group = recipe.data.folds, recipe.data.fold, recipe.data.columns.group
    if group is not None and recipe.model.patches is not None:
        yield Problem(("data", "columns", "group"), f"found {group}, expected null: images have no columns")
    elif group is not None and recipe.data.valid_split == "last":
        yield Problem(("data", "columns", "group"), f"found {group}, expected null with data.valid_split last")
    if folds is None:
        return
    if recipe.data_kind != "labelled":
        yield Problem(("data", "folds"), f"found {folds}, expected null: only labelled examples are cut into folds")
    if fold > folds:
        yield Problem(("data", "fold"), f"found {fold}, expected at most data.folds ({folds})")


def _unfit_clock(recipe: Recipe) -> Iterator[Problem]:
    """Schedules that need the number of steps, where the clock decides on it."""
    kind, minutes = recipe.schedule.kind, recipe.training.minutes
    if minutes is not None and kind != "timed":
        text = f"found {kind}, expected timed with training.minutes: the clock decides when the rate falls"
        yield Problem(("schedule", "kind"), text, "leave it out, or give the steps: --max-steps N")
    if minutes is None and kind == "timed" and recipe.schedule.points is None:
        yield Problem(("schedule", "kind"), "timed needs training.minutes, found null", "--minutes N")
    for place, stack in (("encoder", recipe.model.encoder), ("decoder", recipe.model.decoder)):
        if minutes is not None and stack is not None and getattr(stack.drophead, "start", None) is not None:
            text = "found a rate that depends on the number of steps, which training.minutes leaves open"
            yield Problem(("model", place, "drophead"), text, "give one rate, or the steps: --max-steps N")


def _unused_sources(recipe: Recipe) -> Iterator[Problem]:
    """Targets and prefixes of data entries, where the objective does not read pairs."""
    if recipe.data.format not in (None, "text") and recipe.data_kind != "chat":
        text = f"found {recipe.data.format}, but {recipe.objectives[0].kind} reads no conversations: expected null"
        yield Problem(("data", "format"), text, "to train on conversations: --objective chat")
    if recipe.data_kind == "pairs":
        return
    kinds = " and ".join(objective.kind for objective in recipe.objectives)
    hint = f"to train on pairs: {'--objective seq2seq' if recipe.model.is_encoder_decoder else '--arch transformer'}"
    for part in ("train", "valid"):
        for number, spec in enumerate(getattr(recipe.data, part)):
            path = ("data", part, str(number))
            if spec.target_path is not None:
                text = f"found {spec.target_path}, but {kinds} does not read pairs: expected null"
                yield Problem((*path, "target_path"), text, hint)
            if spec.prefix:
                text = f"found {spec.prefix!r}, but {kinds} has no prefixes: expected none"
                yield Problem((*path, "prefix"), text, hint)


def _unfit_vocabularies(recipe: Recipe) -> Iterator[Problem]:
    """Tokenizer files that exclude each other, and tied tables of two vocabularies."""
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
    both = recipe.model.is_encoder_decoder
    rows, target_rows = recipe.model.vocab_size, recipe.model.target_vocab_size
    one_table = rows is not None and rows == target_rows  # two tokenizers with the same ids, as Marian's
    if recipe.separate_vocabularies and recipe.model.tie.source_target and both and not one_table:
        path = ("model", "tie", "source_target")
        yield Problem(path, "found true, expected false where source and target have a vocabulary each")


def _unmet_needs(recipe: Recipe) -> Iterator[Problem]:
    """Parts of the model, heads and metrics that the objectives need or exclude."""
    model = recipe.model
    for index, options in enumerate(recipe.objectives):
        kind, objective, path = options.kind, options.objective, ("objectives", str(index), "kind")
        for part in objective.parts:
            if getattr(model, part) is None:
                yield Problem(path, f"{kind} needs model.{part}, found null")
        without = objective.without if objective.reads_images else (*objective.without, "patches")
        if objective.reads_images and model.patches is not None:
            without = (*without, "decoder")
        for part in without:
            if getattr(model, part) is not None:
                hint = "images have one class each: --objective classification" if objective.head.label_kind else None
                yield Problem(path, f"{kind} needs a model without model.{part}, found one", hint)
        if objective.compares_batch and recipe.training.grad_accum > 1:
            text = f"found {recipe.training.grad_accum}, expected 1 with {kind}, which compares all examples of a batch"
            yield Problem(("training", "grad_accum"), text, f"--set objectives.{index}.chunk_size=N saves the memory")
        width = (model.encoder and model.encoder.d_model) or model.d_model
        if wide := [size for size in getattr(options, "sizes", ()) if size > width]:
            text = f"found {wide[0]}, expected at most {width}, the width of the vectors"
            yield Problem(("objectives", str(index), "sizes"), text)
        yield from _unfit_head(recipe, path, kind, objective)
    yield from _unfit_combination(recipe)
    metrics, decoded = (
        {metric for options in recipe.objectives for metric in getattr(options.objective, name)}
        for name in ("metrics", "decoded_metrics")
    )
    best, key = recipe.training.best_metric, ("training", "best_metric")
    if best not in metrics:
        hint = "of one label per example, micro F1 is the accuracy" if best == "f1_micro" and "mcc" in metrics else None
        yield Problem(key, f"found '{best}', expected a metric of the objectives: {', '.join(sorted(metrics))}", hint)
    elif best in decoded and not recipe.training.valid_beam_size:
        known = ", ".join(sorted(metrics - decoded))
        text = f"found '{best}', expected {known}: with training.valid_beam_size 0 validation does not decode"
        yield Problem(key, text, "1 is greedy")


def _unfit_head(recipe: Recipe, path: KeyPath, kind: str, objective: type[Objective]) -> Iterator[Problem]:
    """A missing head, or one whose pooling or labels do not fit the objective."""
    heads, wanted = recipe.model.heads, objective.head
    if wanted.kind not in [head.kind for head in heads]:
        known = {each.head.kind for each in OBJECTIVES.values()}
        others = [f"{head.kind}{'' if head.kind in known else ', which no objective trains'}" for head in heads]
        found = ", ".join(others) or "none"
        hint = f"--objective {kind} adds it, as --objective NAME the head of another objective"
        yield Problem(path, f"{kind} needs a head of kind {wanted.kind}, found {found}", hint)
    for number, head in enumerate(heads):
        place = ("model", "heads", str(number))
        how = getattr(head, "pooling", None)
        if recipe.model.decoder is not None and wanted.label_kind and how is not None and POOLINGS[how].reads_first:
            text = (
                f"found {how}, {POOLINGS[how].meaning}, where model.decoder has read nothing: expected eos, mean or max"
            )
            yield Problem((*place, "pooling"), text, "eos is the last position, as in BART's classifier")
        if head.kind == wanted.kind and head.label_kind != wanted.label_kind:
            found, expected = (str(each.label_kind == "labels").lower() for each in (head, wanted))
            yield Problem((*place, "multi_label"), f"found {found}, expected {expected} with the objective {kind}")


def _unfit_combination(recipe: Recipe) -> Iterator[Problem]:
    """Objectives that cannot be trained together, and a generator that is missing or not needed."""
    problem = check_combination([options.kind for options in recipe.objectives])
    if problem is not None:
        yield Problem(("objectives",), problem)
    if (recipe.generator is not None) != any(options.objective.needs_generator for options in recipe.objectives):
        found = "null" if recipe.generator is None else "a model"
        expected = "the small masked language model that replaces tokens" if recipe.generator is None else "null"
        kind = recipe.objectives[0].kind
        yield Problem(("generator",), f"found {found}, expected {expected} with the objective {kind}")


def _unfit_attention(recipe: Recipe) -> Iterator[Problem]:
    """`document_mask` with attention that mixes the documents of a row; FlexAttention with changes of single scores."""
    layers = [
        (side, layer)
        for side, stack in recipe.model.stacks.items()
        for layer in layer_sections(stack, path=f"model.{side}")
    ]
    mixing = [(side, layer.attention.kind) for side, layer in layers if layer.attention.mechanism.one_document]
    is_chat = recipe.data_kind == "chat"  # which packs conversations that do not see each other
    if mixing and (recipe.data.document_mask or is_chat) and recipe.data.packing != "none":
        key, found = ("packing", recipe.data.packing) if is_chat else ("document_mask", "true")
        fits = "none" if is_chat else "false"
        text = "found {}, expected {} with model.{}.attention.kind {}".format(found, fits, *mixing[0])
        hint = "it mixes all tokens of a row: --set data.packing=none separates documents"
        yield Problem(("data", key), text, hint)
    for side, layer in layers:
        if not layer.attention.fused_only:
            continue
        text, kind = f"found flex, expected auto or blocks with model.{side}", layer.positions.kind
        unfit = f"attention_dropout {layer.attention_dropout:g}" if layer.attention_dropout else ""
        unfit = f"positions.kind {kind}" if layer.positions.module.changes_scores else unfit
        if unfit:
            yield Problem(("model", side, "attention", "implementation"), f"{text}.{unfit}")
            return


def _unfit_teaching(recipe: Recipe) -> Iterator[Problem]:
    """A teacher from which an objective cannot learn."""
    teacher = recipe.teacher
    if teacher is None or teacher.path is None:
        return
    for options in recipe.objectives:
        if teacher.kind == "sequence" and recipe.data_kind != "pairs":
            text = f"found sequence, expected soft with the objective {options.kind}: only sources of pairs are decoded"
            yield Problem(("teacher", "kind"), text)
            return
        if teacher.kind == "soft" and options.objective.soft_loss is Objective.soft_loss:
            text = f"found {teacher.path}, expected null with {options.kind}, which has no soft targets"
            yield Problem(("teacher", "path"), text)


def _unfit_embeddings(recipe: Recipe) -> Iterator[Problem]:
    """Files of token vectors for tables that the model does not have; n-grams and convolutions without tokens."""
    section, model = recipe.embeddings, recipe.model
    for name, nothing in (("ngram", 1), ("convolution", 0)):
        value = getattr(model.embedding, name)
        if model.patches is not None and value != nothing:
            yield Problem(("model", "embedding", name), f"found {value}, expected {nothing}: the model reads images")
    if section.path is not None and model.patches is not None:
        yield Problem(("embeddings", "path"), f"found {section.path}, expected null: the model reads images")
    if section.target_path is not None and not model.is_encoder_decoder:
        text = f"found {section.target_path}, expected null: only an encoder-decoder has a target side"
        yield Problem(("embeddings", "target_path"), text)


def _unfit_adapters(recipe: Recipe) -> Iterator[Problem]:
    """Adapters where two models are trained, or where processes have some rows of each weight."""
    if recipe.lora is None:
        return
    if recipe.generator is not None:
        text = "found a rank, expected null: the objective trains two models, and adapters change one"
        yield Problem(("lora", "rank"), text)
    kinds = [options.kind for options in recipe.objectives if options.objective.compares_base]
    for key, expected in (("train", "[]"), ("dropout", "0")) if kinds else ():
        if found := getattr(recipe.lora, key):
            text = f"found {found if key == 'dropout' else list(found)}, expected {expected} with {kinds[0]}"
            yield Problem(("lora", key), f"{text}, which compares the adapters with an unchanged base")
    if recipe.training.parallel.kind == "fsdp":
        text = "found fsdp, expected ddp with adapters: each process reads the base"
        yield Problem(("training", "parallel", "kind"), text, "--parallel ddp")


def _unfit_regularization(recipe: Recipe) -> Iterator[Problem]:
    """Subword sampling where the segmentation is fixed, and options of texts for images or of images for texts."""
    if recipe.data.subword_sampling:
        path, text = ("data", "subword_sampling"), f"found {recipe.data.subword_sampling:g}, expected 0 with "
        if recipe.model.patches is not None:
            yield Problem(path, text + "a model that reads images")
        elif recipe.data_kind == "chat":
            yield Problem(path, text + "conversations")
        elif recipe.data_kind in WINDOWED and recipe.data.packing != "none":
            hint = "--set data.packing=none reads one document per example"
            yield Problem(path, f"{text}data.packing {recipe.data.packing}, whose windows have one length", hint)
    reads, other = ("texts", "images") if recipe.model.patches is None else ("images", "texts")
    for number, options in enumerate(recipe.objectives):
        objective = options.objective
        for name in objective.image_options if reads == "texts" else objective.text_options:
            if value := getattr(options, name):
                found, expected = str(value).lower(), str(type(value)()).lower()  # as YAML has them
                text = f"found {found}, expected {expected}: it changes {other}, and the model reads {reads}"
                yield Problem(("objectives", str(number), name), text)


def notes(recipe: Recipe) -> Iterator[str]:
    """Keys that are allowed but have no effect, and schedules that never reach their peak."""
    training, schedule, optimizer = recipe.training, recipe.schedule, recipe.optimizer
    if schedule.warmup_steps > training.max_steps:
        yield (
            f"schedule.warmup_steps ({schedule.warmup_steps}) is more than training.max_steps ({training.max_steps}): "
            "the learning rate never reaches its maximum"
        )
    elif schedule.decay_steps is not None and schedule.warmup_steps >= schedule.decay_steps:
        yield (
            f"schedule.warmup_steps ({schedule.warmup_steps}) is not below schedule.decay_steps "
            f"({schedule.decay_steps}): the learning rate never decays"
        )
    needs_validation = "training.early_stopping" if training.early_stopping else ""
    if schedule.kind in READS_VALIDATION_LOSS:
        needs_validation = f"schedule.kind {schedule.kind}"
    if needs_validation and training.eval_every is not None and training.eval_every >= training.max_steps:
        yield (
            f"{needs_validation} does nothing: training.eval_every ({training.eval_every}) is not below "
            f"training.max_steps ({training.max_steps})"
        )
    if optimizer.adam_lr is not None and not OPTIMIZERS[optimizer.kind].hidden_only:
        owners = " and ".join(kind for kind, found in OPTIMIZERS.items() if found.hidden_only)
        yield f"optimizer.adam_lr does nothing: it belongs to {owners}, and optimizer.kind is {optimizer.kind}"
    if recipe.data.document_mask and recipe.data.packing == "none":
        yield "data.document_mask does nothing: data.packing is none, so documents never see each other anyway"
    yield from _wide_output(recipe)
    yield from _unused_teacher_keys(recipe)
    kinds = [objective.kind for objective in recipe.objectives]
    for key in unused_keys(kinds):
        section, _, name = key.rpartition(".")
        owner = attrgetter(section)(recipe) if section else recipe
        value = getattr(owner, name)
        if value != type(owner).model_fields[name].default:
            found = f" ({value})" if isinstance(value, (int, float, str)) else ""
            yield f"{key}{found} is not used by {' and '.join(kinds)}"


def _wide_output(recipe: Recipe) -> Iterator[str]:
    """A tied output with first logits so spread that the first loss is far above the loss of equal probabilities."""
    model, std = recipe.model, recipe.model.init.embedding_std
    plain = any(head.over_vocabulary and getattr(head, "scale", "none") == "none" for head in model.heads)
    if std is None or not plain or not model.tie.output or model.embedding.fixnorm or model.patches is not None:
        return
    spread = std * sqrt(model.embedding.size or model.d_model)
    if spread > WIDE_LOGITS:
        yield (
            f"model.init.embedding_std ({std:g}) suits a separate output, but the output is tied: the first logits "
            f"have a standard deviation of about {spread:.1f}; null starts with model.init.std ({model.init.std:g})"
        )


def _unused_teacher_keys(recipe: Recipe) -> Iterator[str]:
    """Keys of the teacher section that have no effect."""
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
        yield "the teacher has no effect: teacher.alpha is 1, and its hidden states and attention have no weight"
    elif (teacher.hidden or teacher.attention) and recipe.training.activation_checkpointing:
        yield "training.activation_checkpointing does nothing beside teacher.hidden or teacher.attention"
