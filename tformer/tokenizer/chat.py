"""Chat templates: messages as the text and the ids that a model was trained on, and which of the ids are answers.

A template is a Jinja program, as published models have it in chat_template.jinja or tokenizer_config.json. It runs in
a sandbox. `TEMPLATES` has two: chatml, for tokenizers with <|im_start|> and <|im_end|>, and plain, whose answers end
with the tokenizer's end of text.

Answers are what stands in `{% generation %}` blocks. In a template without these, an answer is what its message adds
to the text. Both end with the token at which generation stops (`_endings`), which may be the beginning of the next
message. A control token that is typed in a message stays text; the ids of all other texts are those that transformers
gives, with the token that ends the last answer where the template leaves it to the next message.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np

from tformer.support.errors import InputError
from tformer.support.files import read_bounded
from tformer.tokenizer.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""A message: `role`, `content`, and what else a template reads, such as `tool_calls`."""

_TURNS = (
    "{% if tools %}{{ START + 'system' + BETWEEN }}{{ tools | tojson }}{{ END + '\\n' }}{% endif %}"
    "{% for message in messages %}{{ START + message['role'] + BETWEEN }}{% set text = message['content'] or '' %}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ text }}{% for call in message['tool_calls'] or [] %}"
    "{{ '\\n' if text or not loop.first }}<tool_call>\n{{ (call['function'] or call) | tojson }}\n</tool_call>"
    "{% endfor %}{{ END }}{% endgeneration %}{% else %}{{ text + END }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ START + 'assistant' + BETWEEN }}{% endif %}"
)
_MARKERS = {"chatml": ("'<|im_start|>'", r"'\n'", "'<|im_end|>'"), "plain": ("''", "':'", "eos_token")}
TEMPLATES = {
    name: _TURNS.replace("START", start).replace("BETWEEN", between).replace("END", end)
    for name, (start, between, end) in _MARKERS.items()
}
MAX_BYTES = 1 << 18  # of a file, which the recipe holds

TYPED, TYPED_END, ANSWER, ANSWER_END = map(chr, range(0xFDD0, 0xFDD4))
"""Marks in a rendered text, which are no characters in Unicode: around typed control tokens, and around answers."""
_MARK = re.compile(f"([{TYPED}{TYPED_END}{ANSWER}{ANSWER_END}])")
PROBE: tuple[Message, ...] = ({"role": "user", "content": "xxx"}, {"role": "assistant", "content": "yyy"})
_CALLED: dict[str, Any] = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": {"x": "yyy"}}}
CALLS: Message = {"role": "assistant", "content": "", "tool_calls": [_CALLED]}
RESULT: Message = {"role": "tool", "content": "xxx", "name": "f", "tool_call_id": "call00001"}
ROLES = ("system", "user", "assistant", "tool")
OTHER = "name another template: --set tokenizer.chat_template=chatml, or a file .jinja"
TOKENS = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")


@dataclass(frozen=True)
class ChatIds:
    """The ids of a conversation, and whether each is a part of an answer, bool [t]."""

    ids: list[int]
    answers: np.ndarray


class ChatTemplate:
    """A Jinja template with its tokenizer.

    Args:
        template: its text, or a name of `TEMPLATES`, or a file .jinja; None: chatml where the tokenizer has its tokens,
            else plain.

    Attributes: `source`, the text or name. Raises InputError for what is no template, a tokenizer that has no token to
    end an answer with, and (every method) for messages that the template refuses.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None = None) -> None:
        from tformer.tokenizer.sandbox import compile_template

        if template is None:
            has_tokens = None not in map(tokenizer.token_id, ("<|im_start|>", "<|im_end|>"))
            template = "chatml" if has_tokens else "plain"
        if template == "plain" and tokenizer.special.eos is None:
            hint = "train one with --template gpt or chatml (tokenizer.train.template)"
            raise InputError("the tokenizer has no token that ends an answer", hint=hint)
        if template.endswith(".jinja"):
            template = read_template(Path(template))
        elif template not in TEMPLATES and "{" not in template:
            expected = f"{', '.join(TEMPLATES)}, a file .jinja or a Jinja template"
            raise InputError(f"tokenizer.chat_template: found '{template[:40]}', expected {expected}")
        self.tokenizer, self.source = tokenizer, template
        jinja, special = TEMPLATES.get(template, template), tokenizer.special
        self._jinja, self._known = jinja, dict.fromkeys(("user", "assistant"), True)
        self._program, self._reading = compile_template(jinja, marks=(ANSWER, ANSWER_END)), tokenizer.reading_special()
        self._marks_answers = re.search(r"\{%[-+]?\s*generation\b", jinja) is not None
        roles = {role: token for role in TOKENS if (token := getattr(special, role)) is not None}
        names: dict[str, Any] = {f"{role}_token": tokenizer.token(token) for role, token in roles.items()}
        self._names = names | {"tools": None, "documents": None}  # a template may ask whether they are none
        control = [name for number, name in enumerate(tokenizer.tokens) if name and tokenizer.is_special(number)]
        spelled = "|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)"
        self._control = re.compile(f"(?<!{TYPED})(?:{spelled})")
        self._typed = re.compile(f"{TYPED}({spelled}){TYPED_END}")

    def text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """The text of messages. prompt: with the beginning of the next answer."""
        return _MARK.sub("", self._rendered(messages, prompt=prompt))

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids of messages, and of the beginning of the answer to the last one."""
        return self._encoded(self._rendered(messages, prompt=True)).ids

    def with_tools(self, tools: Sequence[Any]) -> ChatTemplate:
        """The same template with these descriptions of tools. Raises InputError if the template writes no tools."""
        if not re.search(r"\btools\b", self._jinja):
            raise InputError("the chat template writes no tools", hint=OTHER)
        found = copy.copy(self)
        found._names = self._names | {"tools": tools}
        return found

    def examples(self, messages: Sequence[Message]) -> list[ChatIds]:
        """The ids of a whole conversation: one example, in which all answers are marked.

        A template may write an answer in another way once others follow it, as those of models that think. What was
        written before is then an example of its own.

        Raises InputError where answers cannot be found, and for roles and tool calls that the template does not know.
        """
        given, form = list(messages), self._call_form
        for number, message in enumerate(messages):
            if not self._knows(message["role"]):
                known = ", ".join(filter(self._knows, ROLES))
                what = f"found the role '{message['role']}', the chat template knows {known}"
                raise InputError(f"message {number + 1}: {what}", hint=f"rename it in the data, or {OTHER}")
            if message.get("tool_calls"):
                if form is None:
                    raise InputError(f"message {number + 1}: the chat template writes no tool calls", hint=OTHER)
                given[number] = _formed(message, *form)
        marked = [self._closed(given)] if self._marks_answers else self._with_answers(given)
        return list(map(self._encoded, marked))

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end an answer: the special token that ends its text, or tool calls, and the end of a text."""
        names = [name for _, closing in self._endings for name in self._control.findall(closing)]
        ids = [*map(self.tokenizer.token_id, names), self.tokenizer.special.eos]
        return tuple(dict.fromkeys(token for token in ids if token is not None))

    @cached_property
    def _endings(self) -> tuple[tuple[str, str], ...]:
        """The endings of a last answer and of an answer with tool calls, as `_ending` returns them."""
        plain = self._ending(PROBE[1], PROBE[0])
        with suppress(InputError):  # no answers of tools, or another form of them
            return plain, plain if self._call_form is None else self._ending(_formed(CALLS, *self._call_form), RESULT)
        return plain, plain

    def _ending(self, answer: Message, reply: Message) -> tuple[str, str]:
        """(text after the last answer, its part up to the token that ends the answer).

        Where no token ends a last answer, the second is the beginning of the next message, else the end of a text.
        """
        texts = (self.text([PROBE[0], answer, *more]) for more in ((), (reply,)))
        after, followed = (text.rpartition("yyy")[2] for text in texts)
        shared, eos = commonprefix([after, followed]), self.tokenizer.special.eos  # noqa: RUF071 (these are no paths)
        # Some templates write one more token after the last turn, or another one.
        for found in [*self._control.finditer(shared)][-1:] or [*self._control.finditer(after)][:1]:
            return after[found.start() :], found[0]
        if (begun := self._control.search(followed)) is not None:
            return after[len(shared) :], followed[len(shared) : begun.end()]
        return "", "" if eos is None or self._marks_answers else self.tokenizer.token(eos)

    @cached_property
    def _call_form(self) -> tuple[bool, str | None] | None:
        """The first arguments of `_formed` with which the template writes tool calls; None: it writes none."""
        for form in product((False, True), (None, "")):
            with suppress(InputError):
                text = self.text([PROBE[0], _formed(CALLS, *form)])
                if "yyy" in text and "None" not in text and "{'x'" not in text:
                    return form
        return None

    def _knows(self, role: str) -> bool:
        """Whether the template writes messages of a role; it must name a role outside `ROLES`."""
        if role not in self._known:
            given = {**RESULT, "role": role, "content": "zzz"}
            self._known[role] = role in ROLES or re.search(f"(['\"]){re.escape(role)}\\1", self._jinja) is not None
            with suppress(InputError):  # which the messages may raise too, with the template's reason
                text = self.text([given, *PROBE] if role == "system" else [PROBE[0], CALLS, given])
                self._known[role] &= "zzz" in text
        return self._known[role]

    def _rendered(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """The text with its marks."""
        given = [self._marked(message) for message in messages]
        return self._program(given, add_generation_prompt=prompt, **self._names)

    def _marked(self, value: Any) -> Any:
        """A value of a message with marks around the control tokens that are typed in it."""
        if isinstance(value, str):
            return self._control.sub(f"{TYPED}\\g<0>{TYPED_END}", _MARK.sub("\N{REPLACEMENT CHARACTER}", value))
        if isinstance(value, Mapping):
            return {key: each if key == "role" else self._marked(each) for key, each in value.items()}
        return [self._marked(each) for each in value] if isinstance(value, list | tuple) else value

    def _with_answers(self, messages: Sequence[Message]) -> list[str]:
        """The texts of examples with marks around answers, for a template without blocks of them."""
        found, spans, done = list[str](), list[list[tuple[int, int]]](), ""
        alone, prompt = (self._rendered(PROBE[:1], prompt=prompt) for prompt in (False, True))
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, text = self._rendered(messages[:number], prompt=True), self._rendered(messages[: number + 1])
            tail, closing = self._endings[bool(message.get("tool_calls"))]
            end = max((match.end() for match in self._control.finditer(text)), default=len(text))
            if text.endswith(tail):
                end = len(text) - len(tail) + len(closing)
                text = text if tail.startswith(closing) else text.removesuffix(tail) + closing
            start = len(commonprefix([before, text]))  # noqa: RUF071 (these are no paths)
            # A prompt may end in another way, as with a thought that the answer of the row has not.
            if before[start:] and not prompt.removeprefix(alone).endswith(before[max(0, start - 1) :]):
                raise InputError(
                    f"the chat template writes the messages before answer {number + 1} in another way than inside the "
                    "whole conversation, so the answer cannot be told apart",
                    hint="put {% generation %} and {% endgeneration %} around answers in the template",
                )
            if found and text.startswith(done):
                found[-1] = text
            else:
                found, spans = [*found, text], [*spans, []]
            spans[-1].append((start, end))
            done = text[:end]
        whole = self._rendered(messages)
        if not found or (messages[-1]["role"] != "assistant" and whole.startswith(done)):
            found, spans = [*found[:-1], whole], spans or [[]]
        return list(map(_marked_spans, found, spans))

    def _closed(self, messages: Sequence[Message]) -> str:
        """The rendered text of a template with blocks of answers, each up to the token that ends it."""
        marked, (tail, closing) = self._rendered(messages), self._endings[bool(messages[-1].get("tool_calls"))]
        if closing in self._rendered(PROBE).rpartition("yyy")[2].partition(ANSWER_END)[0]:
            return marked
        if messages[-1]["role"] == "assistant" and not tail.startswith(closing):
            marked = marked.removesuffix(tail) + closing
        ends = "|".join(re.escape(closing) for _, closing in self._endings)
        return re.sub(f"{ANSWER_END}(\\s*(?:{ends}))", rf"\1{ANSWER_END}", marked)

    def _encoded(self, marked: str) -> ChatIds:
        """The ids of a rendered text, by its marks."""
        ids, answers, inside = list[int](), list[bool](), False
        for number, part in enumerate(self._typed.split(marked)):  # every second part is a typed control token
            text, learned = "", bytearray()
            for piece in _MARK.split(part):
                if piece in (ANSWER, ANSWER_END):
                    inside = piece == ANSWER
                elif piece not in (TYPED, TYPED_END):
                    text, learned = text + piece, learned + bytes([inside]) * len(piece)
            found, spans = (self.tokenizer if number % 2 else self._reading).encode_spans(text)
            ids += found
            answers += [1 in learned[start : max(stop, start + 1)] for start, stop in spans]
        return ChatIds(ids, np.array(answers, dtype=bool))


def _formed(message: Message, as_text: bool, no_text: str | None) -> Message:
    """A message of tool calls with their arguments as a text or an object, and `no_text` where it has no content."""
    calls = list[Any]()
    for call in message["tool_calls"]:
        function = dict(call.get("function", call))
        given: Any = function.get("arguments")
        if isinstance(given, str) != as_text:
            with suppress(ValueError, RecursionError):
                function["arguments"] = json.dumps(given, ensure_ascii=False) if as_text else json.loads(given)
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "content": message.get("content") or no_text, "tool_calls": calls}


def _marked_spans(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """The text with marks around these parts of it."""
    for start, end in reversed(spans):
        text = f"{text[:start]}{ANSWER}{text[start:end]}{ANSWER_END}{text[end:]}"
    return text


def read_template(path: Path) -> str:
    """The text of a file with a template. Raises InputError for one that is no text, or too large."""
    try:
        return read_bounded(path, max_bytes=MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8") from None
