"""Chat templates: messages as the text and the ids that a model was trained on, and which of the ids are answers.

A template is a Jinja program, as published models have it in chat_template.jinja or tokenizer_config.json. It runs in
a sandbox. `TEMPLATES` has two: chatml, for tokenizers with <|im_start|> and <|im_end|>, and plain, whose answers end
with the tokenizer's end of text.

Answers are what stands in `{% generation %}` blocks. In a template without these, an answer is what its message adds
to the text, up to the token that ends its turn. A control token that is typed in a message stays text; the ids of all
other texts are those that transformers gives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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
    "{% for message in messages %}{{ START + message['role'] + BETWEEN }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + END }}{% endgeneration %}"
    "{% else %}{{ message['content'] + END }}{% endif %}{{ '\\n' }}{% endfor %}"
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
ROLES = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")


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
        self._program, self._reading = compile_template(jinja, marks=(ANSWER, ANSWER_END)), tokenizer.reading_special()
        self._marks_answers = re.search(r"\{%[-+]?\s*generation\b", jinja) is not None
        roles = {role: token for role in ROLES if (token := getattr(special, role)) is not None}
        names: dict[str, Any] = {f"{role}_token": tokenizer.token(token) for role, token in roles.items()}
        self._names = names | {"tools": None, "documents": None}  # a template may ask whether they are none
        control = [name for number, name in enumerate(tokenizer.tokens) if name and tokenizer.is_special(number)]
        spelled = "|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)"
        self._control, self._typed = re.compile(spelled), re.compile(f"{TYPED}({spelled}){TYPED_END}")

    def text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """The text of messages. prompt: with the beginning of the next answer."""
        return _MARK.sub("", self._rendered(messages, prompt=prompt))

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids of messages, and of the beginning of the answer to the last one."""
        return self._encoded(self._rendered(messages, prompt=True)).ids

    def encode(self, messages: Sequence[Message]) -> ChatIds:
        """The ids of a whole conversation. Raises InputError where its answers cannot be found."""
        marked = self._rendered(messages)
        return self._encoded(marked if self._marks_answers else self._with_answers(messages, marked))

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The ids that end an answer: the first special token after its text, and the end of a text."""
        # A template may end the last answer in its own way, or leave its end to the message that follows.
        texts = (self._rendered(messages) for messages in (PROBE, (*PROBE, PROBE[0])))
        found = (self._control.search(text.partition(PROBE[1]["content"])[2]) for text in texts)
        end = next(filter(None, found), None)
        ids = (None if end is None else self.tokenizer.token_id(end[0]), self.tokenizer.special.eos)
        return tuple(dict.fromkeys(token for token in ids if token is not None))

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

    def _with_answers(self, messages: Sequence[Message], marked: str) -> str:
        """The rendered text with marks around answers, for a template without blocks of them."""
        parts, done = list[str](), 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, alone = self._rendered(messages[:number], prompt=True), self._rendered(messages[: number + 1])
            # Some templates write one more token after the last turn.
            followed = marked if number + 1 < len(messages) else self._rendered([*messages, PROBE[0]])
            shared = len(commonprefix([alone, followed]))  # noqa: RUF071 (these are no paths)
            ends = [match.end() for match in self._control.finditer(marked, len(before), shared)]
            if not alone.startswith(before) or not marked.startswith(before) or (not ends and shared < len(alone)):
                raise InputError(
                    f"the chat template writes the messages before answer {number + 1} in another way than inside the "
                    "whole conversation, so the answer cannot be told apart",
                    hint="put {% generation %} and {% endgeneration %} around answers in the template",
                )
            end = ends[-1] if ends else shared
            parts += [marked[done : len(before)], ANSWER, marked[len(before) : end], ANSWER_END]
            done = end
        return "".join([*parts, marked[done:]])

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


def read_template(path: Path) -> str:
    """The text of a file with a template. Raises InputError for one that is no text, or too large."""
    try:
        return read_bounded(path, max_bytes=MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8") from None
