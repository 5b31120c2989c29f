"""The Jinja environment of chat templates: what transformers gives them, in a sandbox with a bound on work and time.

A template that came with a model is a program by somebody else. Jinja's sandbox keeps it away from the machine; here it
can neither hang nor fill the memory, because the characters that each operation reads and writes are counted.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from tformer.support.errors import InputError

MOST_SECONDS, MOST_CHARACTERS = 3.0, 1 << 24
"""Processor time and characters of a rendering; published templates take milliseconds for a conversation."""

PASSES, PASSES_OF_MESSAGES = 256, 8
"""More characters, and time in proportion: those of the messages so often, and so often for each message. Published
templates go over all messages for each message, or over each character."""

STEP, STEPS = 16, 1024
"""Characters that an operation costs at least, and operations from one look at the clock to the next."""

FORMATS = {"format", "format_map"}
WIDENS = {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "tojson", "wordwrap", "batch", "slice", "round"}
WIDENS |= {"join", "replace", *FORMATS}
"""Functions whose result may be as long as their text times another argument."""

KEEPS = {
    *("attr", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length", "list", "map", "max"),
    *("min", "random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sort", "unique"),
}
"""Filters that do not write the parts of a value as text."""


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment whose templates raise InputError where they cost more than is `left` in their thread."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, tojson: Callable[..., str], marks: tuple[str, str], **options: Any) -> None:
        written = pass_context(lambda _, value: self.counted(value))  # with a context, constants are counted, too
        super().__init__(trim_blocks=True, lstrip_blocks=True, finalize=written, **options)
        self.left, self.marks = threading.local(), marks
        del self.globals["lipsum"]
        self.filters = {name: self._limited(name, each) for name, each in (self.filters | {"tojson": tojson}).items()}
        # A template cannot name these.
        self.filters |= {"each of": self._each, "made of": self.counted, "joined from": self._joined}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in ("to_bytes", "translate") and super().is_safe_attribute(obj, attr, value)

    def spend(self, characters: int) -> None:
        left = self.left
        left.characters -= STEP + max(characters, 0)
        if left.characters < left.look:
            left.look = left.characters - STEP * STEPS
            if left.characters < 0 or time.thread_time() > left.end:
                hint = "use another one: --set tokenizer.chat_template=chatml, or a file .jinja"
                raise InputError("the chat template takes too long or writes too much for these messages", hint=hint)

    def counted(self, value: Any, *, deep: bool = True) -> Any:
        """Spend the length of a value, and return it. deep: also the lengths of all values in it."""
        if isinstance(value, str):
            self.spend(len(value))
            return value
        self.spend(value.bit_length() // 8 if isinstance(value, int) else len(value) if isinstance(value, Sized) else 0)
        parts = object.__getattribute__(value, "_Namespace__attrs") if isinstance(value, Namespace) else value
        if deep and isinstance(parts, Collection):
            for part in parts:
                self.counted(part)
                if isinstance(parts, Mapping):
                    self.counted(parts[part])
        return value

    def _each(self, values: Iterable[Any], written: int) -> Iterator[Any]:
        """The values of a loop. written: characters of its body."""
        for value in values:
            self.spend(written)
            yield value

    def _joined(self, parts: Sequence[Any]) -> str:
        return "".join(map(str, self.counted(parts)))

    def _spend_on(self, name: str, values: Sequence[Any], *, deep: bool) -> None:
        """Spend the cost of a function. values: the text or list that it changes, and the other arguments."""
        left = self.left.characters
        for value in values:
            self.counted(value, deep=deep)
        if name in WIDENS:
            cost, text, others = left - self.left.characters, str(values[0]), values[1:]
            times = [each if isinstance(each, int) else len(each) for each in others if isinstance(each, int | str)]
            if name == "replace":
                cost = text.count(str(values[1]))
            elif name in FORMATS:
                widths = times if re.search(r"\*|\{[^}]*\{", text) else []
                times = [*widths, *map(int, re.findall(r"\d{4,}", text)), len(re.findall("[{%]", text))]
            self.spend(cost * max(times, default=0))

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def limited(*args: Any, **options: Any) -> Any:
            args = _listed(args) if name == "join" else args
            values = [*args[hasattr(function, "jinja_pass_arg") :], *options.values()]
            self._spend_on(name, values, deep=name not in KEEPS)
            return self.counted(function(*args, **options), deep=False)

        return limited

    def call(self, context: Any, function: Any, /, *args: Any, **options: Any) -> Any:
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str | Collection):
            args, name = _listed(args), function.__name__
            values = [*args, owner] if name == "join" else [owner, *args, *options.values()]
            self._spend_on(name, values, deep=name == "join" or name in FORMATS)
        return self.counted(super().call(context, function, *args, **options), deep=False)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            self._spend_on("format", [left, *(right if isinstance(right, tuple) else [right])], deep=True)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.spend(left.bit_length() * right)
        elif operator == "*" and isinstance(left, Sized) != isinstance(right, Sized):
            self.spend(len(left) * right if isinstance(left, Sized) else left * len(right))
        else:
            self.counted(left, deep=False)
            self.counted(right, deep=False)
        return super().call_binop(context, operator, left, right)


def _listed(values: Sequence[Any]) -> tuple[Any, ...]:
    """The values, with the rest of each iterator as a list, whose length is known."""
    return tuple(list(value) if isinstance(value, Iterator) else value for value in values)


class Counting(NodeTransformer):
    """Puts filters that count where a template loops and where it makes lists and texts."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        written = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "each of", [nodes.Const(written)], [], None, None, lineno=node.lineno)
        return node

    def visit_List(self, node: nodes.Expr, name: str = "made of") -> nodes.Expr:
        self.generic_visit(node)
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        return self.visit_List(node) if node.ctx == "load" else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        return self.visit_List(nodes.List(node.nodes, lineno=node.lineno), "joined from")


class GenerationTag(Extension):
    """Jinja extension that marks the text of a block `{% generation %}`."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller: Callable[[], str]) -> str:
        return caller().join(self.environment.marks)  # type: ignore[attr-defined]


def compile_template(source: str, *, marks: tuple[str, str]) -> Callable[..., str]:
    """A function of messages and other names, which gives the text. Raises InputError, as the function does.

    marks: written around answers.
    """

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    sandbox = Sandbox(tojson, marks, extensions=[GenerationTag, loopcontrols])
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        program = sandbox.from_string(Counting().visit(sandbox.parse(source)))
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"the chat template, line {error.lineno}: {error.message}") from None
    except Exception as error:  # of Python, which limits the depth of blocks and the size of numbers
        raise InputError(f"the chat template cannot be compiled: {_in_words(error)}") from None

    def render(messages: Sequence[Any], **names: Any) -> str:
        left = sandbox.left
        left.characters = MOST_CHARACTERS + (PASSES + PASSES_OF_MESSAGES * len(messages)) * len(str(messages))
        left.end = time.thread_time() + MOST_SECONDS * left.characters / MOST_CHARACTERS
        left.look = left.characters
        try:
            text: str = program.render(messages=messages, **names)
        except InputError:
            raise
        except Exception as error:  # a foreign program may raise anything
            raise InputError(f"the chat template refuses these messages: {_in_words(error)}") from None
        return text

    return render


def _in_words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
