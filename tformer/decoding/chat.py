"""A conversation with a model: its messages, the answers, and what of both the model reads.

Where the messages outgrow the context, the oldest ones are left out, never the system prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tformer.decoding.writers import Sampler
from tformer.support.errors import InputError
from tformer.support.files import require_writable, storage_errors, write_file
from tformer.tokenizer.chat import Message
from tformer.workers.work import ShouldStop, never


class ChatSession:
    """Messages and answers. sampler: with a chat template.

    Attributes: `messages`; `forgotten`, the number of those that the model no longer read for the last answer.
    """

    def __init__(self, sampler: Sampler) -> None:
        assert sampler.template is not None
        self.sampler, self.template = sampler, sampler.template
        self.forgotten = self.turns = 0
        self.reset(sampler.system)

    def reset(self, system: str | None) -> None:
        """Forget the messages, and begin with a system prompt or none."""
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def answer(
        self, text: str, *, on_piece: Callable[[str], None] = lambda piece: None, should_stop: ShouldStop = never
    ) -> str:
        """Answer a message, and keep both. on_piece: called with each written piece of the answer.

        An answer that `should_stop` ends is kept as far as it was written. Raises InputError, and keeps nothing, for a
        message that the template refuses, or that is longer than the model reads.
        """
        asked: list[Message] = [*self.messages, {"role": "user", "content": text}]
        kept, limit = asked, self.sampler.loaded.model.max_seq_len
        room = limit - min(self.sampler.settings.max_new_tokens, limit // 2)
        first = int(asked[0]["role"] == "system")
        while len(ids := self.template.prompt(kept)) > room:
            later = next((n for n in range(first + 1, len(kept)) if kept[n]["role"] == "user"), len(kept))
            if later == len(kept):
                break
            kept = [*kept[:first], *kept[later:]]
        if len(ids) > limit:
            raise InputError(f"the message has {len(ids):,} tokens in its template, the model reads {limit:,}")
        pieces: list[str] = []

        def show(row: int, sample: int, token: int, piece: str) -> None:
            pieces.append(piece)
            on_piece(piece)

        # Each turn draws its own numbers.
        [[found]] = self.sampler.write([kept], first_row=self.turns, on_token=show, should_stop=should_stop)
        answer = found.text or ""
        on_piece(answer[len("".join(pieces)) :])
        self.turns, self.forgotten = self.turns + 1, len(asked) - len(kept)
        self.messages = [*asked, {"role": "assistant", "content": answer.strip()}]
        return answer

    def save(self, path: Path) -> None:
        """Add the conversation to a file of jsonl, which `tformer train --objective chat` reads.

        Raises InputError before the first answer and for a file of another kind, StorageError where nothing is written.
        """
        if all(message["role"] != "assistant" for message in self.messages):
            raise InputError("there is no answer to save")
        target = require_writable(path, option="/save")
        with storage_errors(path):
            before = target.read_bytes() if target.is_file() else b""
        if before.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] not in (b"", b"{"):
            raise InputError(f"/save '{path}' is a file of another kind, expected jsonl")
        joint = b"" if before[-1:] in (b"", b"\n") else b"\n"
        write_file(path, [before, joint, json.dumps({"messages": self.messages}, ensure_ascii=False).encode(), b"\n"])
