"""The text of a growing completion: pieces as tokens arrive, and the cut before a stop text.

A stop text may straddle tokens, and may begin in one that looked harmless, so the end of the text that could still
become a stop text is held back until the next tokens decide.
"""

from __future__ import annotations

from collections.abc import Sequence

from tformer.tokenizer import StreamDecoder, Tokenizer

PRIMING_TOKENS = 32


class TextFollower:
    """Turns token ids into text pieces until a stop text appears.

    `push` and `finish` return the text that has become final; `text` is all of it; `stopped` tells that a stop text
    was found (it and what follows is dropped).
    """

    def __init__(self, stream: StreamDecoder, stop_texts: Sequence[str] = ()) -> None:
        self._stream = stream
        self._stop_texts = tuple(stop_texts)
        self._held = ""
        self._pieces: list[str] = []
        self.stopped = False

    @classmethod
    def after_prompt(cls, tokenizer: Tokenizer, prompt: Sequence[int], stop_texts: Sequence[str] = ()) -> TextFollower:
        """A follower of the text after `prompt`: the joint is spelled as inside a text (a leading space stays)."""
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
    """Length of the longest end of `text` that is a proper beginning of a stop text."""
    longest = 0
    for stop in stop_texts:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
