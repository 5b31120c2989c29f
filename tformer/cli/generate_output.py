r"""How searched texts are written: a line each, columns parted by tabs, or JSON.

    TEXT                            the default
    TEXT, ALIGNMENT                 with --alignments
    INDEX, SCORE, TEXT, ALIGNMENT   with --n-best N: up to N such lines for each line of input

INDEX is that of the input line, from 0, as in JSON. ALIGNMENT is in Pharaoh's form, `SOURCE-TARGET` pairs of token
positions from 0. Line ends inside a text are written `\n`; where there are columns, tabs inside it are written `\t`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tformer.errors import visible
from tformer.formatting import as_cell

if TYPE_CHECKING:
    from tformer.decoding.output import Write
    from tformer.decoding.translate import Translation
    from tformer.tokenizer import Tokenizer


class Printer:
    """Where text goes; on a terminal control characters are spelled out, as a model can write anything."""

    def __init__(self, write: Write, *, on_terminal: bool) -> None:
        self.write, self.on_terminal = write, on_terminal

    def show(self, text: str) -> None:
        self.write(visible(text) if self.on_terminal else text)

    def show_document(self, document: dict[str, Any]) -> None:
        """One JSON document on a line; NaN and infinity become null."""
        from tformer.formatting import finite_or_none

        # ASCII alone on a terminal: JSON leaves some control characters as they are.
        self.write(json.dumps(finite_or_none(document), ensure_ascii=self.on_terminal, allow_nan=False) + "\n")


def as_lines(index: int, answers: Sequence[Translation], *, n_best: bool, alignments: bool) -> str:
    """The lines of one input: its best text, or with `n_best` all of them with index and score."""
    from tformer.formatting import as_one_line

    lines = []
    for answer in answers if n_best else answers[:1]:
        columns = [as_cell(answer.text) if n_best or alignments else as_one_line(answer.text)]
        if n_best:
            columns = [str(index), f"{answer.score:.4f}", *columns]
        if alignments:
            columns.append(" ".join(f"{source}-{target}" for target, source in answer.alignment or ()))
        lines.append("\t".join(columns) + "\n")
    return "".join(lines)


def as_document(
    index: int,
    prompt: str,
    answers: Sequence[Translation],
    *,
    source: str | None = None,
    target_prefix: str | None = None,
    tokenizers: tuple[Tokenizer, Tokenizer] | None = None,
) -> dict[str, Any]:
    """The JSON of one input. `text`, `score` and `finish_reason` are those of the best completion.

    source: what the model read, where that is not the prompt alone.
    tokenizers: of source and target; given, alignments and the tokens that they are about are among the answers.
    """
    best = answers[0]
    document: dict[str, Any] = {"index": index, "prompt": prompt}
    if source is not None and source != prompt:
        document["source"] = source
    if target_prefix is not None:
        document["target_prefix"] = target_prefix
    document |= {"text": best.text, "score": best.score, "finish_reason": best.finish_reason}
    completions: list[dict[str, Any]] = [
        {
            "text": answer.text,
            "ids": list(answer.ids),
            "score": answer.score,
            "logprob": answer.logprob,
            "finish_reason": answer.finish_reason,
        }
        for answer in answers
    ]
    if tokenizers is not None:
        reads, writes = tokenizers
        document["source_tokens"] = [reads.token(token) for token in reads.encode(source or prompt)]
        for completion, answer in zip(completions, answers, strict=True):
            # The end token is no part of the text.
            ids = answer.ids[:-1] if answer.finish_reason == "eos" else answer.ids
            completion["tokens"] = [writes.token(token) for token in ids]
            completion["alignment"] = [[place, position] for position, place in answer.alignment or ()]
    return document | {"completions": completions}
