"""Options that exclude or need one another: a table beside the dataclass that declares them.

    @dataclass(frozen=True)
    class GenerateOptions(Checked):
        RULES = (
            exclude("--prompt", "--input"),
            exclude("--prompt", ("--encoding", "--delimiter")),  # the options of a group do not exclude each other
            exclude("--compile on", "--quantize", hint="8-bit matrices cannot be compiled"),
            needs("--system", "--chat"),
            required("--out", unless="--dry-run"),
        )

A term of a rule is a flag, the name of an argument (`RUN`), a flag with values (`--metric logit|loss`), or stands for
several options: a class of options, a `Panel`, or another fact of their declarations. An option counts as given if its
value is neither its default nor neutral. The checks of the commands, their messages and `--help-all` follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, reduce
from itertools import combinations
from typing import Any, ClassVar, cast

from tformer.support.errors import InputError
from tformer.support.options import (
    Neutral,
    Option,
    Panel,
    bare_name,
    declared_fields,
    declared_option,
    facts_of,
    hints_of,
)

Term = Any
"""An option by its name, with values or without; a group (tuple); a class of options, a `Panel` or another fact."""


@dataclass(frozen=True)
class AllBut:
    """A term: the options of a class without these."""

    options_type: type[Any]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Exclude:
    """Options of different terms exclude each other."""

    terms: tuple[Term, ...]
    hint: str | None = None

    def pairs(self, options_type: type[Any]) -> Iterator[tuple[str, str]]:
        """Every pair of options that exclude each other."""
        for first, second in combinations([names_of(term, options_type) for term in self.terms], 2):
            yield from ((one, other) for one in first for other in second)

    def fault(self, options: Any) -> str | None:
        """The first pair that was given, in a sentence."""
        for pair in self.pairs(type(options)):
            if (given := [text for name in pair if (text := as_given(options, name))]) and len(given) == 2:
                return f"{given[0]} and {given[1]} exclude each other"
        return None

    def sentence(self, options_type: type[Any]) -> str:
        """The rule in `--help-all`."""
        first, *others = (names_of(term, options_type) for term in self.terms)
        if all(len(names) == 1 for names in (first, *others)):
            return f"{_joined([*first, *(name for [name] in others)], 'and')} exclude each other."
        them = [name for names in others for name in names]
        return f"{_joined(first, 'and')} exclude{'s' * (len(first) == 1)} {_joined(them, 'and')}."


@dataclass(frozen=True)
class Need:
    """Each option of a term needs one of some others."""

    term: Term
    any_of: tuple[str, ...]
    hint: str | None = None

    def fault(self, options: Any) -> str | None:
        """The first option that was given without any that it needs, in a sentence."""
        given = [text for name in names_of(self.term, type(options)) if (text := as_given(options, name))]
        return f"{given[0]} {self.sentence()}" if given and not _any_given(options, self.any_of) else None

    @property
    def is_of_group(self) -> bool:
        """Whether the term stands for options that are declared elsewhere."""
        return not all(isinstance(each, str) for each in (self.term if isinstance(self.term, tuple) else (self.term,)))

    def sentence(self) -> str:
        return f"needs {_joined(self.any_of, 'or')}"


@dataclass(frozen=True)
class Require:
    """One of some options must be given, unless another one is."""

    any_of: tuple[str, ...]
    unless: str | None = None
    hint: str | None = None

    def fault(self, options: Any) -> str | None:
        """The options of which one is missing, in a sentence."""
        enough = self.any_of if self.unless is None else (*self.any_of, self.unless)
        return None if _any_given(options, enough) else f"{_joined(self.any_of, 'or')} is missing"


Rule = Exclude | Need | Require
Rules = tuple[Rule, ...]


def exclude(*terms: Term, hint: str | None = None) -> Exclude:
    """The rule that options of different terms exclude each other."""
    return Exclude(terms, hint)


def needs(term: Term, *any_of: str, hint: str | None = None) -> Need:
    """The rule that each option of a term needs one of the others."""
    return Need(term, any_of, hint)


def required(*any_of: str, unless: str | None = None, hint: str | None = None) -> Require:
    """The rule that one of these options must be given."""
    return Require(any_of, unless, hint)


class Checked:
    """Base class of options with a table of rules. A subclass with further checks calls `super().check()` first."""

    RULES: ClassVar[Rules] = ()

    def check(self) -> None:
        """Raise InputError for options that exclude each other, for one that lacks another, and for a missing one.

        The rules of nested classes of options are among them.
        """
        nested = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        parts = [*(each for each in nested if isinstance(each, Checked)), self]
        for kind in (Exclude, Need, Require):
            for part in parts:
                for rule in part.RULES:
                    if isinstance(rule, kind) and (fault := rule.fault(part)) is not None:
                        raise InputError(fault, hint=rule.hint)


def tables_of(options_type: type[Any]) -> dict[type[Any], Rules]:
    """The rules of a class of options, and of the classes of its fields."""
    nested = [hint for hint in hints_of(options_type).values() if isinstance(hint, type) and is_dataclass(hint)]
    own = {options_type: getattr(options_type, "RULES", ())}
    return own | {each: rules for inner in nested for each, rules in tables_of(inner).items()}


def sentences_of(options_type: type[Any]) -> tuple[dict[str, str], list[str]]:
    """({option: what it needs}, the rules of pairs and of groups) of a class of options, for its help."""
    needed, others = dict[str, str](), list[str]()
    for owner, rules in tables_of(options_type).items():
        for rule in rules:
            if isinstance(rule, Exclude):
                others.append(rule.sentence(owner))
            elif isinstance(rule, Need) and rule.is_of_group:
                others.append(f"{_joined(names_of(rule.term, owner), 'and')} need {_joined(rule.any_of, 'or')}.")
            elif isinstance(rule, Need):
                needed |= dict.fromkeys(names_of(rule.term, owner), rule.sentence())
    return needed, others


OF_FILES = ("--invalid-utf8", "--encoding", "--delimiter", "--quotes")
"""Options that say how files of texts are read."""

WITH_INPUT = "it says how --input is read"
QUANTIZE_RULE = exclude("--quantize", "--precision fp16", hint="8-bit inputs go with bf16 or fp32")


# --- terms ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Declared:
    """An option of a class: the names of its field from the outside in, its default, declaration and facts."""

    path: tuple[str, ...]
    default: Any
    option: Option
    facts: tuple[Any, ...]

    def has(self, fact: Any) -> bool:
        """Whether the declaration has a fact, or the option stands in a panel."""
        panels = [each.title for each in self.facts if isinstance(each, Panel)] or [self.option.panel or ""]
        return fact.title in panels if isinstance(fact, Panel) else fact in self.facts


@cache
def _declarations(options_type: Any) -> dict[str, _Declared]:
    """Every option of a class by each of its flags, and every argument by its name."""
    found: dict[str, _Declared] = {}
    for path, field, hint in declared_fields(options_type):
        option = declared_option(hint)
        declared = _Declared(path, field.default, option, facts_of(hint))
        found |= dict.fromkeys(option.flags or (bare_name(option),), declared)
    return found


def names_of(term: Term, options_type: Any) -> Sequence[str]:
    """The names of the options that a term stands for."""
    if isinstance(term, str):
        return (term,)
    if isinstance(term, tuple):
        return [name for each in term for name in names_of(each, options_type)]
    if isinstance(term, AllBut):
        return [name for name in names_of(term.options_type, options_type) if name not in term.names]
    is_class = isinstance(term, type)
    own = _declarations(cast(Any, term if is_class else options_type))
    first = {declared.path: name for name, declared in reversed(own.items())}  # of the names of an option the first
    return [name for name in reversed(first.values()) if is_class or own[name].has(term)]


def as_given(options: Any, name: str) -> str | None:
    """An option as it was given, with its value where `name` has values; None if it was not given."""
    known = _declarations(cast(Any, type(options)))
    name, _, values = (name, "", "") if name in known else name.partition(" ")
    declared = known[name]
    value = reduce(getattr, declared.path, options)
    if values:
        return f"{name} {value}" if str(value) in values.split("|") else None
    is_given = value is not None and value != declared.default and Neutral(value) not in declared.facts
    return name if is_given else None


def _any_given(options: Any, names: Sequence[str]) -> bool:
    return any(as_given(options, name) for name in names)


def _joined(names: Sequence[str], word: str) -> str:
    """`a`, `a or b`, `a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last
