"""From the options of `tformer train` to the start of a training: a new run, a resumed run, or fine-tuning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tformer.checkpoint.read import Checkpoint, read_checkpoint
from tformer.checkpoint.run import RunDirectory, is_run, list_runs
from tformer.interop.adapters import AdaptedCheckpoint, open_base
from tformer.interop.opening import open_checkpoint
from tformer.loading import load
from tformer.objectives import OBJECTIVES, unused_keys
from tformer.recipe import Resolved, load_recipe, recipe_from_yaml, recipe_to_data, recipe_to_yaml
from tformer.recipe.body_defaults import follow_body
from tformer.recipe.data_defaults import DataChoice, choose_by_data
from tformer.recipe.followers import UNLIMITED_STEPS
from tformer.recipe.places import require_there, start_folder
from tformer.recipe.recipe import Embeddings, Recipe, Teacher, Tokenizer
from tformer.recipe.sections import Columns, LoraBase
from tformer.recipe.sizes import DEFAULT_MINUTES, MOST_LENGTH, STACKS, ladder_of, sized
from tformer.support.device import products_per_second, resolve_device
from tformer.support.errors import InputError
from tformer.support.files import RUNS
from tformer.support.formatting import in_words
from tformer.tasks import survey_of
from tformer.tasks.base import TrainingStart
from tformer.training.options import TrainOptions
from tformer.training.teacher import (
    check_teacher,
    describe_teacher,
    uses_teacher_tokenizer,
    with_teacher_vocabulary,
)
from tformer.workers.worker import Worker

FINE_TUNING = "bert/finetune"
"""Default preset for training a pre-trained encoder on labels."""

LENGTH_KEYS: dict[str, Callable[[float], float]] = {"training.max_steps": round, "training.max_epochs": float}
"""Keys of the length that the data may choose."""

SAME_DATA = "every machine needs the same files"

REGULARIZATION = ("dropout", "attention_dropout", "activation_dropout", "layerdrop", "drophead")
"""Settings of a stack that belong to the training, not to the architecture."""


@dataclass(frozen=True, kw_only=True)
class Start(TrainingStart):
    """Start of a training, and its run directory.

    Attributes:
        out: None: a new default directory.
        may_exist: of --resume: the directory may hold a run.
        run: of --resume: the run, locked since before its checkpoint was read.
        sizes: of a new training by time: its recipe in every size, from the smallest to the largest.
        tokens_per_parameter: the same as in `Ladder`; 0 for a training in one size.
        dropout: the same as in `Ladder`; None: the user has set it.
        new_time: of --resume with --minutes: the time counts from now on.
    """

    notes: tuple[str, ...] = ()
    out: Path | None = None
    may_exist: bool = False
    run: RunDirectory | None = None
    sizes: tuple[Recipe, ...] = ()
    tokens_per_parameter: float = 0.0
    dropout: tuple[int, float] | None = None
    new_time: bool = False


@contextmanager
def locked_run(options: TrainOptions) -> Iterator[RunDirectory | None]:
    """The run that `--resume` continues, locked; None for a new run and a dry run.

    The lock comes first: a checkpoint that is read while another process trains may be removed by it.
    """
    if not options.resume or options.dry_run or options.init_from is not None:
        yield None
        return
    out = options.out if options.out is not None else _newest_run(options)
    if out is None or not is_run(out):
        yield None
        return
    with RunDirectory.open(out, lock=True) as run:
        yield run


def find_start(
    options: TrainOptions, run: RunDirectory | None = None, worker: Worker | None = None, *, with_teacher: bool = True
) -> Start:
    """The start of a training: a new run, a resumed run or fine-tuning.

    Args:
        run: that `locked_run` gives.
        worker: this process as one of several, which then all call this function: the leader begins, because it may
            repair the run that is resumed, and its recipe counts, because it chooses a preset that fits the machine.
        with_teacher: load the teacher that the recipe names.

    Raises InputError for anything wrong with recipe, run, checkpoint or teacher.
    """
    if worker is not None and worker.world_size > 1:
        start = worker.after_leader(lambda: find_start(options, run))
        origins = {"--resume": start.resumed, "--init-from": start.weights}
        found = {name: "nothing" if each is None else f"step {each.step}" for name, each in origins.items()}
        worker.require_equal(found, hint=SAME_DATA)
        return replace(start, recipe=recipe_of_leader(start.recipe, worker))
    if options.resume and options.init_from is not None:
        raise InputError("--resume and --init-from exclude each other", hint="a resumed run has its own weights")
    if options.resume:
        start = _resume(options, run)
    elif options.init_from is not None:
        start = _init_from(options, options.init_from)
    else:
        start = replace(_new(options), out=options.out)
    for each in start.recipe.objectives:
        if each.objective.compares_base and start.recipe.lora is None:
            text = f"{each.kind} compares the model with the frozen base of its adapters, found no adapters"
            raise InputError(text, hint="--init-from MODEL --lora")
    sizes = tuple(map(_with_folder, start.sizes))
    start = replace(start, recipe=_with_folder(start.recipe), sizes=sizes, dry_run=options.dry_run, run=run)
    teacher = start.recipe.teacher
    if with_teacher and teacher is not None and teacher.path is not None:
        return _with_teacher(start, teacher, options)
    if with_teacher and options.distil is not None:
        raise InputError("--distil needs a teacher, found none", hint="name one: --teacher RUN")
    return start


def _with_folder(recipe: Recipe) -> Recipe:
    """The recipe with the folder in which its relative paths start."""
    folder = start_folder(recipe_to_data(recipe))
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"folder": folder})})


def recipe_of_leader(recipe: Recipe, worker: Worker) -> Recipe:
    """The leader's recipe, in each of several processes."""
    text = worker.share(lambda: recipe_to_yaml(recipe))
    return recipe if worker.leads else recipe_from_yaml(text, name="the recipe of rank 0")


def _with_teacher(start: Start, section: Teacher, options: TrainOptions) -> Start:
    """The start with the teacher loaded and its vocabulary in the recipe, which names the teacher's checkpoint."""
    recipe = start.recipe
    resumed = (
        "it teaches this run to its end: --teacher names its place, --set teacher.path=null goes on without"
        if start.resumed
        else None
    )
    assert section.path is not None
    try:
        teacher = load(section.path)  # on the CPU
    except InputError as error:
        raise InputError(f"teacher.path: {error.message}", hint=resumed or error.hint) from error
    check_teacher(recipe, teacher)
    if start.resumed is None and start.weights is None:
        given, own = options.recipe_values().get("tokenizer.separate"), teacher.own_target_tokenizer is not None
        if uses_teacher_tokenizer(recipe) and given not in (None, own):
            raise InputError(
                f"--vocabulary: the vocabularies of the teacher {teacher.path} are {'separate' if own else 'joint'}",
                hint="leave it out",
            )
        recipe = with_teacher_vocabulary(recipe, teacher)
    section = section.model_copy(update={"path": str(teacher.path.absolute())})
    notes = (*start.notes, *describe_teacher(section, teacher))
    return replace(start, recipe=recipe.model_copy(update={"teacher": section}), teacher=teacher, notes=notes)


def _resume(options: TrainOptions, run: RunDirectory | None) -> Start:
    out = run.path if run is not None else options.out if options.out is not None else _newest_run(options)
    recipe_file = None if out is None else out / "recipe.yaml"
    notes = []
    if run is not None and not (run.path / "recipe.yaml").exists() and (latest := run.latest()):
        run.write_recipe(read_checkpoint(latest, resumed=True).recipe_text)
        notes.append(f"{run.path} had no recipe.yaml: restored from its checkpoint {latest.name}")
    if out is None or recipe_file is None or not recipe_file.is_file():
        start = _new(options)
        note = f"nothing to resume in {out}: the run starts" if out else "no run to resume: a new one starts"
        return replace(start, notes=(note, *start.notes), out=out, may_exist=out is not None)
    resolved = load_recipe(config=recipe_file, flags=options.recipe_values(), sets=list(options.sets))
    recipe = resolved.recipe
    require_there(
        (*recipe.data.train, *recipe.data.valid), out, "--data, --source, --target and --valid name its place"
    )
    arch, preset = _named(options)
    for given, own, name in ((arch, recipe.arch, "--arch"), (preset, recipe.preset, "--preset")):
        if given is not None and given != own:
            raise InputError(f"{name} {given}: the run in {out} is {own}", hint="start another run with another --out")
    notes.append(f"resuming {out} with its own recipe")
    if options.config is not None:
        notes.append(f"{options.config} is not read again")
    latest = RunDirectory.open(out).latest() if is_run(out) else None
    checkpoint = None if latest is None else read_checkpoint(latest, resumed=not options.dry_run)
    if checkpoint is None:
        notes.append("it has no checkpoint yet: training starts at step 0")
    elif checkpoint.recipe.embeddings != recipe.embeddings:
        raise InputError(
            f"--embeddings: the tables of the run in {out} have been trained since step 0, so no file can be read now",
            hint="leave the option out, or start another run with another --out",
        )
    elif checkpoint.recipe.lora != recipe.lora:
        has, sets = ({} if each is None else each.model_dump() for each in (checkpoint.recipe.lora, recipe.lora))
        key = next(key for key in has | sets if has.get(key) != sets.get(key))
        raise InputError(
            f"lora.{key}: the run in {out} has {has.get(key, 'no adapters')}, this command sets "
            f"{sets.get(key, 'none')}",
            hint="leave --lora and its settings out, or start another run with another --out",
        )
    base = open_base(recipe, beside=out) if checkpoint is None and recipe.lora is not None else None
    points = recipe.schedule.points
    if options.minutes is not None and points is not None and (checkpoint is None or checkpoint.step >= points[-1][0]):
        # A rate that has fallen to its floor rises again, and the clock decides when it falls.
        recipe = recipe.model_copy(update={"schedule": recipe.schedule.model_copy(update={"points": None})})
    return Start(
        recipe=recipe,
        notes=(*notes, *resolved.notes),
        out=out,
        may_exist=True,
        tokenizer_file=out / "tokenizer.json",
        resumed=checkpoint,
        weights=base,
        new_time=options.minutes is not None,
    )


def _on_base(recipe: Recipe, checkpoint: Checkpoint) -> Recipe:
    """The recipe whose adapters name their base. Raises InputError for a base that is made of adapters itself."""
    if recipe.lora is None:
        return recipe
    if isinstance(checkpoint, AdaptedCheckpoint):
        raise InputError(
            f"--lora: {checkpoint.path} holds adapters itself, expected a whole model",
            hint=f"make it one: tformer merge {checkpoint.path} --out DIR; or train all its weights without --lora",
        )
    specs = checkpoint.specs("weights").items()
    most = max(min(spec.shape) for name, spec in specs if name.startswith(("encoder.", "decoder.")) and spec.shape[1:])
    if (rank := recipe.lora.rank) > most:
        raise InputError(f"--lora: lora.rank: found {rank}, expected at most {most}, the smaller side of the matrices")
    base = LoraBase(path=str(checkpoint.path.absolute()), sha256=checkpoint.sha256)
    return recipe.model_copy(update={"lora": recipe.lora.model_copy(update={"base": base})})


def _named(options: TrainOptions) -> tuple[str | None, str | None]:
    """(arch, preset) of the options; `--preset ARCH/NAME` names both."""
    if options.preset is not None and "/" in options.preset:
        arch, _, preset = options.preset.partition("/")
        return arch, preset
    return options.arch, options.preset


def _newest_run(options: TrainOptions) -> Path | None:
    """The run under runs/ that was started or resumed last, of the given architecture and preset, if any."""
    if options.config is not None:
        raise InputError("--resume with --config needs --out", hint="name the run: --resume --out runs/NAME")
    wanted = _named(options)
    newest: tuple[int, Path] | None = None
    for run in list_runs(RUNS):
        file = run / "recipe.yaml"
        if not file.is_file():
            continue
        if any(wanted):
            recipe = RunDirectory(run).recipe()
            if any(want not in (None, own) for want, own in zip(wanted, (recipe.arch, recipe.preset), strict=True)):
                continue
        newest = max(newest or (0, run), (file.stat().st_mtime_ns, run))
    return None if newest is None else newest[1]


def _init_from(options: TrainOptions, path: Path) -> Start:
    """The start with body and tokenizer of a checkpoint, for new data and perhaps with another recipe."""
    checkpoint = open_checkpoint(path)
    imported = "imported" in checkpoint.trainer  # then its recipe is one for fine-tuning
    stored = checkpoint.recipe
    extra: list[str] = []
    given = [OBJECTIVES[kind] for kind in _given_objectives(options) if kind in OBJECTIVES]
    is_body = not any(each.objective.trains_bodies for each in stored.objectives) and stored.model.decoder is None
    adapts = is_body and any(objective.trains_bodies for objective in given)
    is_named = any(_named(options))
    if adapts and not (imported or is_named or options.config):
        options = replace(options, preset=FINE_TUNING)
        extra.append(f"training as in preset {FINE_TUNING}, as neither --preset nor --config was given")
    separate = options.recipe_values().get("tokenizer.separate", stored.separate_vocabularies)
    if stored.model.encoder and stored.model.decoder and separate != stored.separate_vocabularies:
        own = "separate" if stored.separate_vocabularies else "joint"
        raise InputError(f"--vocabulary: the vocabularies of {checkpoint.path} are {own}", hint="leave it out")
    if any(_named(options)):
        resolved = _loader(options)()
        recipe, taken = _with_body(resolved.recipe, stored), "weights, body and tokenizer"
    else:
        resolved = load_recipe(
            base_yaml=recipe_to_yaml(_with_new_data(stored, options)),
            base_name=str(checkpoint.path / "recipe.yaml"),
            config=options.config,
            flags=options.recipe_values(),
            sets=list(options.sets),
        )
        recipe, taken = resolved.recipe, "weights, model and tokenizer"
    is_new_task = [each.kind for each in recipe.objectives] != [each.kind for each in stored.objectives]
    if not is_named and (imported or is_new_task or recipe.lora is not None):
        own = f"file {checkpoint.path / 'recipe.yaml'}"
        recipe, said = follow_body(recipe, resolved.origins, imported=imported, own=own)
        extra += [] if said is None else [said]
    if (vectors := recipe.embeddings.path or recipe.embeddings.target_path) is not None:
        raise InputError(
            f"--init-from and --embeddings exclude each other: the tables of {checkpoint.path} would be replaced, "
            f"found {vectors}"
        )
    recipe = _on_base(recipe, checkpoint)
    note = f"{taken} from {checkpoint.path} (step {checkpoint.step})"
    return Start(recipe=recipe, notes=(note, *extra, *resolved.notes), out=options.out, weights=checkpoint)


def _given_objectives(options: TrainOptions) -> list[str]:
    return [str(entry["kind"]) for entry in options.recipe_values().get("objectives", ())]


def _with_new_data(stored: Recipe, options: TrainOptions) -> Recipe:
    """The stored recipe for new data and another machine: their settings are reset to defaults."""
    training = stored.training
    schedule = stored.schedule
    if training.minutes is not None:  # the clock decides again
        schedule = schedule.model_copy(update={"points": None})
    if training.max_epochs is not None or training.minutes is not None:  # the steps followed from data and machine
        training = training.model_copy(update={"max_steps": UNLIMITED_STEPS, "eval_every": None, "save_every": None})
    objectives = _given_objectives(options) or [objective.kind for objective in stored.objectives]
    needs_generator = any(OBJECTIVES[kind].needs_generator for kind in objectives if kind in OBJECTIVES)
    opened: dict[str, Any] = {"train": (), "valid": (), "folder": None, "folds": None, "fold": 1, "labels": ()}
    opened |= {"columns": Columns(), "format": None}
    machine = {"precision": "auto", "compile": "auto", "device": "auto", "threads": None}
    sections: dict[str, Any] = {
        "data": stored.data.model_copy(update=opened),
        "training": training.model_copy(update=machine),
        "schedule": schedule,
    }
    if set(objectives) <= OBJECTIVES.keys():  # else loading the recipe raises an error
        sections["generation"] = stored.generation
        for section, _, name in (key.partition(".") for key in unused_keys(objectives)):
            if section in sections and name in type(sections[section]).model_fields:
                default = type(sections[section]).model_fields[name].get_default()
                sections[section] = sections[section].model_copy(update={name: default})
    return stored.model_copy(
        update={
            **sections,
            "tokenizer": _own_tokenizers(stored, {"path": None, "source_path": None, "target_path": None}),
            "generator": stored.generator if needs_generator else None,
            "teacher": None,
            "lora": None,
            "embeddings": Embeddings(),
        }
    )


def _own_tokenizers(stored: Recipe, paths: Mapping[str, str | None]) -> Tokenizer:
    """The stored tokenizer section with other files and the checkpoint's number of vocabularies."""
    return stored.tokenizer.model_copy(update={**paths, "separate": stored.separate_vocabularies})


def _with_body(recipe: Recipe, stored: Recipe) -> Recipe:
    """`recipe` with the stored body: sizes and kinds of the checkpoint, dropout and heads of the recipe."""
    body = stored.model
    stacks = {}
    for side in ("encoder", "decoder"):
        old, new = getattr(body, side), getattr(recipe.model, side)
        if (old is None) != (new is None):
            raise InputError(
                f"--init-from: the checkpoint has {'no ' if old is None else 'a '}{side}, "
                f"{recipe.arch}/{recipe.preset} has {'none' if new is None else 'one'}"
            )
        if old is not None:
            stacks[side] = old.model_copy(update={name: getattr(new, name) for name in REGULARIZATION})
    embedding = body.embedding.model_copy(update={"dropout": recipe.model.embedding.dropout})
    model = body.model_copy(update={**stacks, "embedding": embedding, "heads": recipe.model.heads})
    target_seq_len = recipe.data.target_seq_len
    lengths = {
        "seq_len": min(recipe.seq_len, body.max_seq_len),
        "target_seq_len": None if target_seq_len is None else min(target_seq_len, body.longest_target),
    }
    paths = {name: getattr(recipe.tokenizer, name) for name in ("path", "source_path", "target_path")}
    if recipe.tokenizer.chat_template is not None:
        paths["chat_template"] = recipe.tokenizer.chat_template
    return recipe.model_copy(
        update={
            "arch": stored.arch,
            "model_type": stored.model_type,
            "model": model,
            "data": recipe.data.model_copy(update=lengths),
            "tokenizer": _own_tokenizers(stored, paths),
        }
    )


def _loader(options: TrainOptions) -> Callable[..., Resolved]:
    """`load_recipe` with the choices of a command line. `more`: values below its flags."""
    arch, flags = options.arch, options.recipe_values()
    if arch is None and options.config is None and "/" not in (options.preset or ""):
        arch = "gpt"

    def load(*, more: Mapping[str, Any] | None = None, **choices: Any) -> Resolved:
        given = {**(more or {}), **flags}
        return load_recipe(
            arch=arch, preset=options.preset, config=options.config, flags=given, sets=options.sets, **choices
        )

    return load


def _new(options: TrainOptions) -> Start:
    """The start of a new run. Where no preset is named, the data and the time choose.

    Without data, preset and length the training takes `DEFAULT_MINUTES`; so does one on data that no defaults follow.
    """
    load = _loader(options)
    resolved = load()
    if resolved.recipe.lora is not None:
        raise InputError("--lora needs a model to adapt, found none", hint="name one: --init-from MODEL")
    if not resolved.preset_by_default:
        return Start(recipe=resolved.recipe, notes=tuple(resolved.notes))
    choice = choose_by_data(resolved.recipe.arch, survey_of(resolved.recipe)) if resolved.has_data else None
    more: dict[str, Any] = {}
    lengths = {key: choice.values[key][0] for key in LENGTH_KEYS if choice is not None and key in choice.values}
    if resolved.length_by_default and not lengths:
        more["training.minutes"] = DEFAULT_MINUTES
    elif options.minutes is not None:
        longest = MOST_LENGTH.get(resolved.recipe.arch, 1.0)
        more |= {key: LENGTH_KEYS[key](length * longest) for key, length in lengths.items()}
    if choice is not None or more:
        resolved = load(by_data=choice, more=more)
    recipe, seconds = resolved.recipe, 60 * (resolved.recipe.training.minutes or 0.0)

    def operations() -> float:
        if not resolved.is_free("tokenizer.path", "tokenizer.train.model", "tokenizer.train.vocab_size"):
            return math.inf
        return seconds * products_per_second(resolve_device(recipe.training.device))

    ladder = ladder_of(recipe, operations) if seconds else None
    if ladder is None:
        return Start(recipe=recipe, notes=tuple(resolved.notes))
    base = choice or DataChoice(None, str(recipe.preset), {})
    sizes: list[Recipe] = []
    for size in ladder.sizes:
        of_size = replace(base, values=base.values | sized(recipe, size))
        length = {} if size.epochs is None else {"training.max_epochs": size.epochs}
        if (found := load(by_data=of_size, more=more | length).recipe) not in sizes:  # flags may fix the size
            sizes.append(found)
    if len(sizes) > 1:
        said = f"model size: chosen for {in_words(seconds)} (--preset NAME for a fixed one)"
        resolved.notes[: choice is None] = [said]
    return Start(
        recipe=sizes[0],
        notes=tuple(resolved.notes),
        sizes=tuple(sizes),
        tokens_per_parameter=ladder.tokens_per_parameter,
        dropout=ladder.dropout if resolved.is_free(*(f"model.{side}.dropout" for side in STACKS)) else None,
    )
