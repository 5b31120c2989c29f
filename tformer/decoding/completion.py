"""State of one unfinished completion: its tokens, context window, text, and stop rules. A stop text may span tokens, so
the end of the text is held back while it could still become a stop text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tformer.decoding.settings import FinishReason, Generated, GenerationSettings
from tformer.support.decoding import ContextPolicy
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.decoding import StreamDecoder

PRIMING_TOKENS = 32


class TextFollower:
    """Turns token ids into text pieces until a stop text appears.

    `push` and `finish` return the text that has become final; `text` is all of it; `stopped`: a stop text was found (it
    and the text after it are dropped).
    """

    def __init__(self, stream: StreamDecoder, stop_texts: Sequence[str] = ()) -> None:
        self._stream = stream
        self._stop_texts = tuple(stop_texts)
        self._held = ""
        self._pieces: list[str] = []
        self.stopped = False

    @classmethod
    def after_prompt(cls, tokenizer: Tokenizer, prompt: Sequence[int], stop_texts: Sequence[str] = ()) -> TextFollower:
        """A follower of the text after `prompt`: the joint is decoded as inside a text (a leading space stays)."""
        stream = tokenizer.stream()
        for token in prompt[-PRIMING_TOKENS:]:
            stream.push(token)
        return cls(stream, stop_texts)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def push(self, token_id: int) -> str:
        """The text made final by one more token."""
        return self._advance(self._stream.push(token_id), last=False)

    def finish(self) -> str:
        """The rest, when no token follows."""
        return "" if self.stopped else self._advance(self._stream.finish(), last=True)

    def _advance(self, new_text: str, *, last: bool) -> str:
        text = self._held + new_text
        cuts = [position for stop in self._stop_texts if (position := text.find(stop)) >= 0]
        if cuts:
            self.stopped = True
            final, self._held = text[: min(cuts)], ""
        else:
            keep = 0 if last else held_length(text, self._stop_texts)
            final, self._held = text[: len(text) - keep], text[len(text) - keep :]
        if final:
            self._pieces.append(final)
        return final


def held_length(text: str, stop_texts: Sequence[str]) -> int:
    """Length of the longest end of `text` with which a stop text may begin."""
    longest = 0
    for stop in stop_texts:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


OnToken = Callable[[int, int, int, str], None]
"""Called as (row, sample, id, text_piece)."""


class Completion:
    """A prompt and the tokens chosen after it; `finish_reason` is None while it is live."""

    def __init__(
        self,
        prompt: Sequence[int],
        settings: GenerationSettings,
        *,
        row: int,
        sample: int,
        max_seq_len: int,
        limit: int | None = None,
        tokenizer: Tokenizer | None = None,
        on_token: OnToken | None = None,
    ) -> None:
        """`limit`: maximum number of new tokens; None: `settings.max_new_tokens`."""
        self.row = row
        self.sample = sample
        self.ids = list(prompt)
        self.limit = settings.max_new_tokens if limit is None else limit
        self.finish_reason: FinishReason | None = None
        self._prompt_length = len(self.ids)
        self._settings = settings
        self._max_seq_len = max_seq_len
        self._window_start = 0
        self._logprobs: list[float] = []
        self._on_token = on_token
        self._text = None if tokenizer is None else TextFollower.after_prompt(tokenizer, self.ids, settings.stop_texts)

    def window(self) -> list[int]:
        """The ids that the model reads: all while they fit; past that the window slides to the last half context."""
        if len(self.ids) - self._window_start > self._max_seq_len:
            self._window_start = len(self.ids) - max(1, self._max_seq_len // 2)
        return self.ids[self._window_start :]

    @property
    def next_position(self) -> int:
        """The position of the newest token inside the window."""
        return len(self.ids) - 1 - self._window_start

    def take(self, token: int, logprob: float | None) -> str:
        """Append the chosen token, and end the completion where a rule applies. Returns the text that became final."""
        settings = self._settings
        self.ids.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        ended = token in settings.ends
        piece = "" if self._text is None or ended else self._text.push(token)
        if ended:
            self.finish_reason = "eos"
        elif self._text is not None and self._text.stopped:
            self.finish_reason = "stop"
        elif len(self.ids) - self._prompt_length == self.limit:
            self.finish_reason = "length"
        elif settings.context == "error" and len(self.ids) > self._max_seq_len:
            self.finish_reason = "context"
        if self._text is not None and self.finish_reason is not None:
            piece += self._text.finish()
            if self._text.stopped:  # the last bytes completed a stop text
                self.finish_reason = "stop"
        if self._on_token is not None:
            self._on_token(self.row, self.sample, token, piece)
        return piece

    def interrupt(self) -> None:
        """End the completion here, after an interrupt by the user."""
        self.finish_reason = "interrupted"
        if self._text is not None:
            self._text.finish()

    def result(self) -> Generated:
        """The finished completion."""
        assert self.finish_reason is not None
        return Generated(
            ids=tuple(self.ids[self._prompt_length :]),
            text=None if self._text is None else self._text.text,
            logprobs=tuple(self._logprobs) if self._settings.logprobs else None,
            finish_reason=self.finish_reason,
        )


def check_prompts(
    prompts: Sequence[Sequence[int]], *, context: ContextPolicy, max_seq_len: int, first_row: int = 0
) -> None:
    """Raise InputError for a prompt without tokens, or longer than the context when that is an error.

    Messages count prompts from 1, like the lines of a file.
    """
    for number, prompt in enumerate(prompts, start=first_row + 1):
        if not prompt:
            raise InputError(f"prompt {number} has no tokens, expected at least 1", hint="begin from a start token")
        if context == "error" and len(prompt) > max_seq_len:
            raise prompt_too_long(number, f"{len(prompt):,} tokens", max_seq_len)


def prompt_too_long(number: int, size: str, max_seq_len: int) -> InputError:
    """The error for a prompt of this size that does not fit into the context."""
    return InputError(
        f"prompt {number} has {size}, but the model's context holds {max_seq_len}",
        hint=f"shorten it, or read its last {max(1, max_seq_len // 2)} tokens only (--context slide)",
    )
