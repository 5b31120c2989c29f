"""From the options of `tformer train` to a training: a new run, a resumed run, or fine-tuning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tformer.checkpoint.read import read_checkpoint
from tformer.checkpoint.run import RunDirectory, is_run, list_runs
from tformer.interop.adapters import open_base
from tformer.interop.opening import open_checkpoint
from tformer.loading import load
from tformer.recipe import Resolved, load_recipe, recipe_from_yaml, recipe_to_data, recipe_to_yaml
from tformer.recipe.body_defaults import follow_body
from tformer.recipe.data_defaults import DataChoice, choose_by_data
from tformer.recipe.places import require_there, start_folder
from tformer.recipe.recipe import Recipe, Teacher
from tformer.recipe.sizes import DEFAULT_MINUTES, MOST_LENGTH, STACKS, ladder_of, sized
from tformer.support.device import products_per_second, resolve_device
from tformer.support.errors import InputError
from tformer.support.files import RUNS
from tformer.support.formatting import in_words
from tformer.tasks.table import survey_of
from tformer.training.fine_tuning import for_new_data, is_imported, preset_for, with_adapters, with_body
from tformer.training.options import TrainOptions
from tformer.training.teacher import (
    check_teacher,
    describe_teacher,
    uses_teacher_tokenizer,
    with_teacher_vocabulary,
)
from tformer.training.training import SizeChoice, Training
from tformer.workers.worker import Worker

LENGTH_KEYS: dict[str, Callable[[float], float]] = {"training.max_steps": round, "training.max_epochs": float}
"""Keys of the length that the data may choose."""

SAME_DATA = "every machine needs the same files"


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


def find_training(
    options: TrainOptions, run: RunDirectory | None = None, worker: Worker | None = None, *, with_teacher: bool = True
) -> Training:
    """A training as its options ask for it: a new run, a resumed run or fine-tuning.

    Args:
        run: that `locked_run` gives.
        worker: this process as one of several, which then all call this function: the leader begins, because it may
            repair the run that is resumed, and its recipe counts, because it chooses a preset that fits the machine.
        with_teacher: load the teacher that the recipe names.

    Raises InputError for anything wrong with recipe, run, checkpoint or teacher.
    """
    if worker is not None and worker.world_size > 1:
        training = worker.after_leader(lambda: find_training(options, run))
        origins = {"--resume": training.resumed, "--init-from": training.weights}
        found = {name: "nothing" if each is None else f"step {each.step}" for name, each in origins.items()}
        worker.require_equal(found, hint=SAME_DATA)
        return replace(training, recipe=recipe_of_leader(training.recipe, worker))
    options.check()
    if options.resume:
        training = _resume(options, run)
    elif options.init_from is not None:
        training = _fine_tuning(options, options.init_from)
    else:
        training = replace(_new(options), out=options.out)
    for each in training.recipe.objectives:
        if each.objective.compares_base and training.recipe.lora is None:
            text = f"{each.kind} compares the model with the frozen base of its adapters, found no adapters"
            raise InputError(text, hint="--init-from MODEL --lora")
    recipe, sizes = _with_folder(training.recipe), training.sizes
    training = replace(
        training,
        recipe=recipe,
        given_labels=recipe.data.labels,
        sizes=replace(sizes, recipes=tuple(map(_with_folder, sizes.recipes))),
        dry_run=options.dry_run,
        run=run,
    )
    teacher = recipe.teacher
    if with_teacher and teacher is not None and teacher.path is not None:
        return _with_teacher(training, teacher, options)
    if with_teacher and options.distil is not None:
        raise InputError("--distil needs a teacher, found none", hint="name one: --teacher RUN")
    return training


def _with_folder(recipe: Recipe) -> Recipe:
    """The recipe with the folder in which its relative paths start."""
    folder = start_folder(recipe_to_data(recipe))
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"folder": folder})})


def recipe_of_leader(recipe: Recipe, worker: Worker) -> Recipe:
    """The leader's recipe, in each of several processes."""
    text = worker.share(lambda: recipe_to_yaml(recipe))
    return recipe if worker.leads else recipe_from_yaml(text, name="the recipe of rank 0")


def _with_teacher(training: Training, section: Teacher, options: TrainOptions) -> Training:
    """The training with the teacher loaded and its vocabulary in the recipe, which names the teacher's checkpoint."""
    recipe = training.recipe
    resumed = (
        "it teaches this run to its end: --teacher names its place, --set teacher.path=null goes on without"
        if training.resumed
        else None
    )
    assert section.path is not None
    try:
        teacher = load(section.path)  # on the CPU
    except InputError as error:
        raise InputError(f"teacher.path: {error.message}", hint=resumed or error.hint) from error
    check_teacher(recipe, teacher)
    if training.resumed is None and training.weights is None:
        given, own = options.recipe_values().get("tokenizer.separate"), teacher.own_target_tokenizer is not None
        if uses_teacher_tokenizer(recipe) and given not in (None, own):
            raise InputError(
                f"--vocabulary: the vocabularies of the teacher {teacher.path} are {'separate' if own else 'joint'}",
                hint="leave it out",
            )
        recipe = with_teacher_vocabulary(recipe, teacher)
    section = section.model_copy(update={"path": str(teacher.path.absolute())})
    notes = (*training.notes, *describe_teacher(section, teacher))
    return replace(training, recipe=recipe.model_copy(update={"teacher": section}), teacher=teacher, notes=notes)


def _resume(options: TrainOptions, run: RunDirectory | None) -> Training:
    out = run.path if run is not None else options.out if options.out is not None else _newest_run(options)
    recipe_file = None if out is None else out / "recipe.yaml"
    notes = []
    if run is not None and not (run.path / "recipe.yaml").exists() and (latest := run.latest()):
        run.write_recipe(read_checkpoint(latest, resumed=True).recipe_text)
        notes.append(f"{run.path} had no recipe.yaml: restored from its checkpoint {latest.name}")
    if out is None or recipe_file is None or not recipe_file.is_file():
        training = _new(options)
        note = f"nothing to resume in {out}: the run starts" if out else "no run to resume: a new one starts"
        return replace(training, notes=(note, *training.notes), out=out, may_exist=out is not None)
    resolved = load_recipe(config=recipe_file, flags=options.recipe_values(), sets=list(options.sets))
    recipe = resolved.recipe
    require_there(
        (*recipe.data.train, *recipe.data.valid), out, "--data, --source, --target and --valid name its place"
    )
    arch, preset = options.named
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
    return Training(
        recipe=recipe,
        notes=(*notes, *resolved.notes),
        out=out,
        may_exist=True,
        tokenizer_file=out / "tokenizer.json",
        resumed=checkpoint,
        weights=base,
        new_time=options.minutes is not None,
    )


def _newest_run(options: TrainOptions) -> Path | None:
    """The run under runs/ with this architecture and preset (if given) that was started or resumed last."""
    if options.config is not None:
        raise InputError("--resume with --config needs --out", hint="name the run: --resume --out runs/NAME")
    wanted = options.named
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


def _fine_tuning(options: TrainOptions, path: Path) -> Training:
    """Fine-tuning: body and tokenizer of a checkpoint, for new data and perhaps with another recipe."""
    checkpoint, values = open_checkpoint(path), options.recipe_values()
    stored, is_named = checkpoint.recipe, any(options.named)
    given = [str(entry["kind"]) for entry in values.get("objectives", ())]
    chosen = None if is_named or options.config else preset_for(checkpoint, given)
    separate = values.get("tokenizer.separate", stored.separate_vocabularies)
    if stored.model.encoder and stored.model.decoder and separate != stored.separate_vocabularies:
        own = "separate" if stored.separate_vocabularies else "joint"
        raise InputError(f"--vocabulary: the vocabularies of {checkpoint.path} are {own}", hint="leave it out")
    own_file = str(checkpoint.path / "recipe.yaml")
    if is_named or chosen is not None:
        resolved = _load(options if chosen is None else replace(options, preset=chosen))
        recipe, taken = with_body(resolved.recipe, stored), "weights, body and tokenizer"
    else:
        base = for_new_data(stored, given or [objective.kind for objective in stored.objectives])
        resolved = load_recipe(
            base_yaml=recipe_to_yaml(base), base_name=own_file, config=options.config, flags=values, sets=options.sets
        )
        recipe, taken = resolved.recipe, "weights, model and tokenizer"
    notes = [f"{taken} from {checkpoint.path} (step {checkpoint.step})"]
    if chosen is not None:
        notes.append(f"training as in preset {chosen}, as neither --preset nor --config was given")
    is_new_task = [each.kind for each in recipe.objectives] != [each.kind for each in stored.objectives]
    imported = is_imported(checkpoint)
    if not is_named and (imported or is_new_task or recipe.lora is not None):
        recipe, said = follow_body(recipe, resolved.origins, imported=imported, own=f"file {own_file}")
        notes += [] if said is None else [said]
    if (vectors := recipe.embeddings.path or recipe.embeddings.target_path) is not None:
        raise InputError(
            f"--init-from and --embeddings exclude each other: the tables of {checkpoint.path} would be replaced, "
            f"found {vectors}"
        )
    recipe = with_adapters(recipe, checkpoint)
    return Training(recipe=recipe, notes=(*notes, *resolved.notes), out=options.out, weights=checkpoint)


def _load(options: TrainOptions, *, more: Mapping[str, Any] = {}, by_data: DataChoice | None = None) -> Resolved:
    """The recipe that the options choose. more: values below their flags. by_data: see `load_recipe`."""
    arch = options.arch
    if arch is None and options.config is None and "/" not in (options.preset or ""):
        arch = "gpt"
    flags = {**more, **options.recipe_values()}
    return load_recipe(
        arch=arch, preset=options.preset, config=options.config, flags=flags, sets=options.sets, by_data=by_data
    )


def _new(options: TrainOptions) -> Training:
    """A new run. Where no preset is named, the data and the time choose.

    Without data, preset and length the training takes `DEFAULT_MINUTES`; so does one on data that no defaults follow.
    """
    resolved = _load(options)
    if resolved.recipe.lora is not None:
        raise InputError("--lora needs a model to adapt, found none", hint="name one: --init-from MODEL")
    if not resolved.preset_by_default:
        return Training(recipe=resolved.recipe, notes=tuple(resolved.notes))
    choice = choose_by_data(resolved.recipe.arch, survey_of(resolved.recipe)) if resolved.has_data else None
    more: dict[str, Any] = {}
    lengths = {key: choice.values[key][0] for key in LENGTH_KEYS if choice is not None and key in choice.values}
    if resolved.length_by_default and not lengths:
        more["training.minutes"] = DEFAULT_MINUTES
    elif options.minutes is not None:
        longest = MOST_LENGTH.get(resolved.recipe.arch, 1.0)
        more |= {key: LENGTH_KEYS[key](length * longest) for key, length in lengths.items()}
    if choice is not None or more:
        resolved = _load(options, by_data=choice, more=more)
    recipe, seconds = resolved.recipe, 60 * (resolved.recipe.training.minutes or 0.0)

    def operations() -> float:
        if not resolved.is_free("tokenizer.path", "tokenizer.train.model", "tokenizer.train.vocab_size"):
            return math.inf
        return seconds * products_per_second(resolve_device(recipe.training.device))

    ladder = ladder_of(recipe, operations) if seconds else None
    if ladder is None:
        return Training(recipe=recipe, notes=tuple(resolved.notes))
    base = choice or DataChoice(None, str(recipe.preset), {})
    sizes: list[Recipe] = []
    for size in ladder.sizes:
        of_size = replace(base, values=base.values | sized(recipe, size))
        length = {} if size.epochs is None else {"training.max_epochs": size.epochs}
        if (found := _load(options, by_data=of_size, more=more | length).recipe) not in sizes:  # flags may fix the size
            sizes.append(found)
    notes = resolved.notes
    if len(sizes) > 1:
        said = f"model size: chosen for {in_words(seconds)} (--preset NAME for a fixed one)"
        notes = [said, *(notes[1:] if choice is None else notes)]  # in place of the note on the default preset
    return Training(
        recipe=sizes[0],
        notes=tuple(notes),
        sizes=SizeChoice(
            tuple(sizes),
            ladder.tokens_per_parameter,
            ladder.dropout if resolved.is_free(*(f"model.{side}.dropout" for side in STACKS)) else None,
        ),
    )
