"""`tformer chat`: a conversation with a trained model, on a terminal or through pipes."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tformer.cli.command import examples, takes_options
from tformer.cli.process import StopFlag
from tformer.cli.report import data_output, show_notes, spinner, terminal_width
from tformer.decoding.options import GenerateOptions
from tformer.support.errors import InputError, StorageError
from tformer.support.files import STANDARD_INPUT
from tformer.support.formatting import columns_of
from tformer.support.options import Run, some_of

if TYPE_CHECKING:
    from tformer.decoding.chat import ChatSession
    from tformer.decoding.options import GenerateOptions as ChatOptions
else:
    SHARED = (
        *("system", "temperature", "top_k", "top_p", "min_p", "greedy", "seed", "stop"),
        *("max_new_tokens", "repetition_penalty", "checkpoint", "device", "precision", "quantize"),
    )
    shared = some_of(GenerateOptions, SHARED)
    ChatOptions = make_dataclass("ChatOptions", [("run", Run, None)], bases=(shared,), frozen=True)

EPILOG = examples(
    "`tformer chat runs/gpt-tiny-1`",
    '`tformer chat --system "Answer in one word." --greedy`',
    "`tformer chat runs/gpt-tiny-1 < questions.txt > answers.txt`",
)
COMMANDS: dict[str, Callable[[ChatSession, str], None]] = {
    "/reset": lambda conversation, _: conversation.reset(conversation.sampler.system),
    "/system": lambda conversation, text: conversation.reset(text or None),
    "/save": lambda conversation, name: conversation.save(Path(name)),
}
HINT = f"{', '.join(COMMANDS)}, /exit"


@takes_options
def chat(options: ChatOptions) -> None:
    """Talk with a trained model.

    Each line is a message, which the model answers with those before it in mind. /reset forgets them, /system TEXT
    begins anew with this system prompt, /save FILE adds the conversation to a jsonl file, which `train --objective
    chat` reads, /exit or Ctrl-D ends. Ctrl-C ends an answer, or clears the line.

    A pipe is read line by line, and only the answers are written.
    """
    from tformer.cli.generate_run import show_cut_prompt
    from tformer.decoding.chat import ChatSession
    from tformer.decoding.writers import Sampler, fills_masks, load_models, make_writer
    from tformer.workers.worker import ALONE

    given = dict(vars(options))
    run = given.pop("run")
    settings = GenerateOptions(() if run is None else (run,), "", chat=True, **given)
    settings.check()
    [loaded] = load_models(settings)
    if fills_masks(loaded):
        raise InputError(f"{loaded.path} fills masks, expected a model that writes text")
    sampler = make_writer(settings, [loaded], on_cut=show_cut_prompt)
    assert isinstance(sampler, Sampler) and sampler.template is not None
    conversation, on_terminal = ChatSession(sampler), sys.stdin.isatty()
    how = "greedy" if sampler.settings.greedy else f"seed {settings.seed}"
    notes = [f"chatting with {loaded.path}, {how}", *loaded.notes]
    if loaded.recipe.tokenizer.chat_template is None:
        notes.append(
            f"the model was trained without a chat template; messages are given in '{sampler.template.source}'"
        )
    show_notes([*notes, f"{HINT}; Ctrl-C ends an answer"] if on_terminal else notes, dim=True)
    spinner.end()  # from here on the command waits for lines
    with data_output(None, ALONE) as output:
        for line in _typed_lines() if on_terminal else _piped_lines():
            name, _, rest = line.strip().partition(" ") if line.startswith("/") else ("", "", "")
            if name == "/exit":
                break
            try:
                if name in COMMANDS:
                    COMMANDS[name](conversation, rest.strip())
                elif name:
                    raise InputError(f"unknown command {name}", hint=f"known: {HINT}; a message may begin with a space")
                elif line.strip():
                    _answer(conversation, line, output.text, ends_all=not on_terminal)
            except (InputError, StorageError) as error:
                if not on_terminal:
                    raise
                show_notes([f"{error.message}{f' ({error.hint})' if error.hint else ''}"])


def _typed_lines() -> Iterator[str]:
    """Lines from the keyboard until Ctrl-D."""
    import readline  # noqa: F401 (arrow keys and earlier lines in `input`)

    how_to_leave = ["Ctrl-D or /exit ends the conversation"]
    while True:
        try:
            line = input("> " if sys.stdout.isatty() else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            show_notes(["", *how_to_leave])
            how_to_leave = []
        except UnicodeDecodeError as error:
            show_notes([f"the message is not UTF-8: {error.reason}"])
        else:
            yield line


def _piped_lines() -> Iterator[str]:
    """Lines of a pipe as they arrive."""
    from tformer.decoding.lines import line_blocks
    from tformer.support.file_kinds import KINDS

    for lines in line_blocks(STANDARD_INPUT, errors="strict", size=1, accepts={kind.key for kind in KINDS}):
        yield from lines


def _answer(conversation: ChatSession, message: str, write: Callable[[str], None], *, ends_all: bool) -> None:
    """Write the answer as it arrives. ends_all: Ctrl-C ends the command, not only the answer."""
    with StopFlag() as flag:
        if not ends_all:
            flag.be_patient()
            flag.echo_seconds = float("inf")  # a second Ctrl-C would end the command, and the conversation with it
        lines = WordWrapper(write, terminal_width() or sys.maxsize)
        conversation.answer(message, on_piece=lines.push, should_stop=flag.should_stop)
        lines.push("\n")
        if flag.should_stop() and (ends_all or flag.signal_number != signal.SIGINT):
            raise flag.interrupted("interrupted: the answer ends here")
    if conversation.forgotten:
        show_notes([f"the model no longer reads the first {conversation.forgotten} messages"], dim=True)


class WordWrapper:
    """Writes a stream of text, broken between words at this number of columns."""

    def __init__(self, write: Callable[[str], None], width: int) -> None:
        self._write, self._width, self._used, self._word = write, width, 0, ""

    def push(self, text: str) -> None:
        """Write all but the last word, which may go on; East Asian letters are words."""
        for part in re.findall(r"\s|[\u2e80-\uffef]|[^\s\u2e80-\uffef]+", text):
            if part.isspace() or part >= "\u2e80":
                self._put(self._word)
                self._put(part)
                self._word = ""
            else:
                self._word += part

    def _put(self, part: str) -> None:
        size = columns_of(part)
        if self._used and self._used + size > self._width:  # a space at the end of a full line is left out
            self._write("\n")
            self._used = 0
            part = part.lstrip()
        self._write(part)
        self._used = 0 if part == "\n" else self._used + columns_of(part)
