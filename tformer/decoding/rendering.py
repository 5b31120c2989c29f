"""How generated text is shown: a model can write anything, control characters included."""

from __future__ import annotations

import re
from typing import Any

from tformer.decoding.settings import Generated

# C0 but for tab and newline, DEL, C1; and the bidirectional controls that can reorder what is shown around them.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def for_terminal(text: str) -> str:
    r"""The text with control characters spelled out (`\x1b`), so that it cannot steer the terminal."""
    return _CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def as_one_line(text: str) -> str:
    r"""The text on one line: newline and carriage return become `\n` and `\r`."""
    return text.replace("\n", "\\n").replace("\r", "\\r")


def as_document(index: int, prompt: str, completions: list[Generated]) -> dict[str, Any]:
    """The JSON of one prompt. `text`, `logprobs` and `finish_reason` are those of the first completion."""
    first = completions[0]
    return {
        "index": index,
        "prompt": prompt,
        "text": first.text,
        "finish_reason": first.finish_reason,
        "logprobs": _listed(first.logprobs),
        "completions": [
            {
                "text": completion.text,
                "ids": list(completion.ids),
                "finish_reason": completion.finish_reason,
                "logprobs": _listed(completion.logprobs),
            }
            for completion in completions
        ],
    }


def _listed(values: tuple[float, ...] | None) -> list[float] | None:
    return None if values is None else list(values)
