"""How generated text is written: on one line, and as JSON."""

from __future__ import annotations

from typing import Any

from tformer.decoding.settings import Generated


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
