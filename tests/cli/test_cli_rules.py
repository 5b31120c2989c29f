"""Tables of options that exclude or need one another: every pair is refused and stands in the help."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import pytest

from tformer.cli.app import COMMANDS, help_page
from tformer.cli.command import OptionsCommand
from tformer.decoding.options import GenerateOptions
from tformer.support.errors import InputError
from tformer.support.keywords import flags_as_keywords
from tformer.support.options import (
    Neutral,
    bare_name,
    declared_fields,
    declared_option,
    facts_of,
)
from tformer.support.rules import Checked, Exclude, Need, names_of, sentences_of, tables_of

Cli = Callable[..., Any]
SAMPLES: dict[Any, Any] = {int: 3, float: 0.5, str: "x", Path: Path("x")}


def all_commands() -> Iterator[tuple[str, type[Any]]]:
    """(name, class of options) of every command, those of groups included."""
    for name, command in COMMANDS.items():
        found = command.imported()
        if isinstance(found, OptionsCommand):
            yield name, found.options_type
        else:
            yield from ((f"{name} {inner}", one.options_type) for inner, (one, _) in found.commands.items())


WITH_RULES = {name: options_type for name, options_type in all_commands() if any(tables_of(options_type).values())}


class Sample(NamedTuple):
    """An option with a value that counts as given: its words, the names of its field, and the value."""

    words: list[str]
    path: tuple[str, ...]
    value: Any


def bare(hint: Any) -> Any:
    """The type of a value, without metadata and None; of a tuple that of its items."""
    while hasattr(hint, "__metadata__"):
        hint = hint.__origin__
    if get_origin(hint) is tuple:
        return bare(get_args(hint)[0])
    given = [each for each in get_args(hint) if each is not type(None)]
    return bare(given[0]) if type(None) in get_args(hint) else hint


def sample(options_type: type[Any], name: str) -> Sample:
    """A value for an option, by its name in a rule."""
    for path, field, hint in declared_fields(options_type):
        declared, kind = declared_option(hint), bare(hint)
        flag, _, values = name.partition(" ")
        if name == bare_name(declared) and not declared.flags:
            return Sample(["--", "x"] if name.startswith("--") else ["x"], path, "x")
        if flag in declared.flags:
            if kind is bool:
                return Sample([flag], path, True)
            choices = [each for each in get_args(kind) if each != field.default and Neutral(each) not in facts_of(hint)]
            value = values.partition("|")[0] or (choices[0] if get_origin(kind) is Literal else SAMPLES[kind])
            return Sample([flag, str(value)], path, value)
    raise AssertionError(f"{options_type.__name__} has no option {name}")


def options_with(options_type: type[Any], *names: str) -> Any:
    """Options of a class with these given."""
    needed = {each.name: Path("x") for _, each, _ in declared_fields(options_type) if each.default is MISSING}
    made = options_type(**needed)
    for _, path, value in (sample(options_type, name) for name in names):
        for depth in reversed(range(len(path))):
            inner = made
            for part in path[:depth]:
                inner = getattr(inner, part)
            value = replace(inner, **{path[depth]: value})
        made = value
    return made


def refused(options: Checked) -> str:
    with pytest.raises(InputError) as error:
        Checked.check(options)
    return error.value.message


@pytest.mark.parametrize("options_type", {each: None for one in WITH_RULES.values() for each in tables_of(one)})
def test_every_pair_of_every_table_is_refused(options_type: type[Any]) -> None:
    for rule in getattr(options_type, "RULES", ()):
        if isinstance(rule, Exclude):
            for pair in rule.pairs(options_type):
                first, second = (name.partition("|")[0] for name in pair)
                assert refused(options_with(options_type, *pair)) == f"{first} and {second} exclude each other"
        elif isinstance(rule, Need):
            for name in names_of(rule.term, options_type):
                assert rule.fault(options_with(options_type, name)) == f"{name} {rule.sentence()}"
                assert f"{name} needs " in refused(options_with(options_type, name))
                assert all(rule.fault(options_with(options_type, name, other)) is None for other in rule.any_of)
        else:
            given = rule.any_of if rule.unless is None else (*rule.any_of, rule.unless)
            assert refused(options_with(options_type)).endswith(" is missing")
            assert all(rule.fault(options_with(options_type, name)) is None for name in given)


@pytest.mark.parametrize("command", WITH_RULES)
def test_a_command_refuses_by_its_table_before_anything_is_read(
    command: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last pair of the first rule; `test_every_pair_of_every_table_is_refused` has all of them."""
    monkeypatch.chdir(tmp_path)
    options_type = WITH_RULES[command]
    owner, rule = next((owner, rules[0]) for owner, rules in tables_of(options_type).items() if rules)
    names: tuple[str, ...] = ()
    if isinstance(rule, Exclude):
        names = list(rule.pairs(owner))[-1]
    elif isinstance(rule, Need):
        names = (names_of(rule.term, owner)[-1],)
    arguments = ["x" for _, field, _ in declared_fields(options_type) if field.default is MISSING]
    outcome = cli(*command.split(), *arguments, *(word for name in names for word in sample(owner, name).words))
    assert outcome.code == 2 and not list(tmp_path.iterdir())
    assert f"error: {refused(options_with(options_type, *names))}" in outcome.err.splitlines()


@pytest.mark.parametrize("command", WITH_RULES)
def test_the_help_of_a_command_has_its_table(command: str) -> None:
    page, (needed, excluded) = help_page(command.split()), sentences_of(WITH_RULES[command])
    text = " ".join("\n".join(page.lines(80, everything=True)).split())
    assert all(sentence in text for sentence in excluded)
    for name, sentence in needed.items():
        [entry] = [entry for entry in page.entries if name in entry.name.replace(",", "").split()]
        assert f" N{sentence[1:]}." in entry.text


def test_python_names_keywords() -> None:
    with pytest.raises(InputError, match=r"^stop and beam_size exclude each other$"), flags_as_keywords():
        GenerateOptions(stop=("a",), beam_size=2).check()
