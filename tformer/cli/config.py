"""`tformer config`: show, validate, explain and list recipes, and print their JSON schema."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tformer.cli.command import CommandGroup, examples, takes_options
from tformer.cli.report import emit, emit_json, emit_lines, in_columns, show_notes
from tformer.support.errors import InputError, InputErrors
from tformer.support.formatting import aligned
from tformer.support.options import Arch, Json, Preset, Sets, argument, option

if TYPE_CHECKING:
    from tformer.recipe.explain import Explanation

app = CommandGroup(
    help="Show, validate, explain and list recipes, which define runs.",
    examples=examples("`tformer config list`", "`tformer config show --arch gpt --origin`", "`tformer config schema`"),
)


@dataclass(frozen=True)
class ConfigShowOptions:
    file: Annotated[Path | None, argument("FILE", help="A recipe file.")] = None
    arch: Arch = None
    preset: Preset = None
    objective: Annotated[
        str | None,
        option("--objective", help="What the model learns, as for `tformer train`; it gets the head that it needs."),
    ] = None
    sets: Sets = ()
    origin: Annotated[bool, option("--origin", help="Show the origin of each value beside it.")] = False
    as_json: Json = False


@dataclass(frozen=True)
class ConfigValidateOptions:
    files: Annotated[tuple[Path, ...], argument("FILE", help="Recipe files, partial or complete.")]
    as_json: Json = False


@dataclass(frozen=True)
class ConfigExplainOptions:
    keys: Annotated[
        tuple[str, ...],
        argument("KEY", help="Keys with dots: model.encoder.norm.place.", default="list all keys"),
    ] = ()
    as_json: Json = False


@dataclass(frozen=True)
class ConfigSchemaOptions:
    """`tformer config schema` takes none."""


@dataclass(frozen=True)
class ConfigListOptions:
    arch: Arch = None
    as_json: Json = False


@app.command(
    epilog=examples(
        "`tformer config show --arch gpt --preset char-cpu`",
        "`tformer config show my.yaml --origin`",
        "`tformer config show --arch llama --set model.decoder.num_layers=4 --json`",
    )
)
@takes_options
def show(options: ConfigShowOptions) -> None:
    """Print the resolved recipe as YAML: defaults < preset < file < --objective < --set."""
    from tformer.recipe import load_recipe, recipe_to_data, recipe_to_yaml
    from tformer.training.options import TrainOptions

    flags = TrainOptions(objective=options.objective).recipe_values()
    resolved = load_recipe(
        arch=options.arch,
        preset=options.preset,
        config=options.file,
        flags=flags,
        sets=options.sets,
    )
    show_notes(f"note: {note}" for note in resolved.notes)
    if options.as_json:
        emit_json({"recipe": recipe_to_data(resolved.recipe), "origins": resolved.origins, "notes": resolved.notes})
    else:
        emit(recipe_to_yaml(resolved.recipe, origins=resolved.origins if options.origin else None).rstrip())


@app.command(
    epilog=examples(
        "`tformer config validate my.yaml`",
        "`tformer config validate runs/gpt-tiny-1/recipe.yaml`",
        "`tformer config validate first.yaml second.yaml --json`",
    )
)
@takes_options
def validate(options: ConfigValidateOptions) -> None:
    """Validate recipe files and the shapes of their models: `ok` for each, or the errors and exit code 2."""
    failures: dict[Path, InputError] = {}
    for file in options.files:
        try:
            notes = _check(file)
        except InputError as error:
            failures[file] = error
            continue
        show_notes(f"note: {file}: {note}" for note in notes)
        if not options.as_json:
            emit(f"{file}: ok")
    if options.as_json:
        problems = {file: {"error": error.message, "hint": error.hint} for file, error in failures.items()}
        emit_json([{"file": str(file), "ok": file not in failures, **problems.get(file, {})} for file in options.files])
        sys.exit(2 if failures else 0)
    if failures:
        # each problem names its file, so that one error can list several files
        raise InputErrors(
            "\n".join(error.message for error in failures.values()), hint=next(iter(failures.values())).hint
        )


@app.command(
    epilog=examples(
        "`tformer config explain model.encoder.norm.place`",
        "`tformer config explain model.decoder.positions training.precision`",
        "`tformer config explain`",
    )
)
@takes_options
def explain(options: ConfigExplainOptions) -> None:
    """Explain keys of the recipe: type, default, meaning, papers, and the presets that set them."""
    from tformer.recipe.explain import explain, explained_keys, preset_values

    if not options.keys:
        if options.as_json:
            emit_json(dict(explained_keys()))
        else:
            emit_lines(in_columns(key, meaning) for key, meaning in explained_keys())
        return
    explained = [(explain(key), preset_values(key)) for key in options.keys]
    if options.as_json:
        emit_json([{"explanations": [one.to_json() for one in ones], "presets": sets} for ones, sets in explained])
        return
    for ones, sets in explained:
        for one in ones:
            emit_lines(in_columns(label, text) for label, text in _facts(one))
        emit_lines(in_columns("presets", f"{value}: {', '.join(names)}") for value, names in sets.items())
        emit("")


@app.command(
    epilog=examples(
        "`tformer config schema`",
        "`tformer config schema > recipe.schema.json`",
        "`tformer config schema | python -m json.tool`",
    )
)
@takes_options
def schema(options: ConfigSchemaOptions) -> None:
    """Print the JSON schema of recipe files, for editors: put `# yaml-language-server: $schema=FILE` in your YAML."""
    from tformer.recipe import json_schema

    emit_json(json_schema())


@app.command(
    "list",
    epilog=examples(
        "`tformer config list`",
        "`tformer config list --arch gpt`",
        "`tformer config list --json`",
    ),
)
@takes_options
def list_(options: ConfigListOptions) -> None:
    """List the shipped presets and their purpose."""
    from tformer.support.errors import did_you_mean
    from tformer.support.shipped import list_presets, preset_summary

    presets = list_presets()
    if options.arch is not None and options.arch not in presets:
        raise InputError(f"--arch: unknown arch '{options.arch}'", hint=did_you_mean(options.arch, presets))
    chosen = [(family, name) for family, names in presets.items() if options.arch in (None, family) for name in names]
    rows = [{"arch": family, "preset": name, "summary": preset_summary(family, name)} for family, name in chosen]
    if options.as_json:
        emit_json(rows)
        return
    emit_lines(aligned([(f"{row['arch']}/{row['preset']}", row["summary"]) for row in rows]))


def _facts(one: Explanation) -> Iterator[tuple[str, str]]:
    """(label, text) of everything that is known of a key."""
    from tformer.recipe.schema import MISSING

    yield one.path, ""
    if one.kinds:
        yield "of kind", ", ".join(one.kinds)
    yield "type", one.type
    yield "default", "none: it must be given" if one.default is MISSING else json.dumps(one.default)
    if one.meaning:
        yield "meaning", one.meaning
    yield from (("kind", f"{kind}: {meaning}") for kind, meaning in one.choices.items())
    if one.keys:
        yield "keys", ", ".join(one.keys)
    yield from (("paper", f"https://arxiv.org/abs/{paper}") for paper in one.papers)


def _check(file: Path) -> list[str]:
    """The notes on a recipe file, after building its model without memory."""
    from tformer.build import build_model
    from tformer.recipe import load_recipe

    resolved = load_recipe(config=file)
    recipe = resolved.recipe
    vocab_size, num_labels = recipe.tokenizer.train.vocab_size, len(recipe.data.labels) or 2
    try:
        build_model(
            recipe.model, vocab_size=vocab_size, target_vocab_size=vocab_size, num_labels=num_labels, device="meta"
        )
    except InputError as error:
        raise InputError(f"{file}: {error.message}", hint=error.hint) from None
    return resolved.notes
