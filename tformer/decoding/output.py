r"""The form of generated text: one line per text, or JSON.

Translations and hypotheses of a beam search, one line each with tabs between the columns:

    TEXT                            the default
    TEXT, ALIGNMENT                 with --alignments
    INDEX, SCORE, TEXT, ALIGNMENT   with --n-best N: up to N such lines for each line of input

INDEX is that of the input line, from 0, as in JSON. ALIGNMENT is in Pharaoh's form: `SOURCE-TARGET` pairs of token
positions from 0. Line ends inside a text are written `\n`; where there are columns, tabs inside it are written `\t`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tformer.decoding.answer_table import Kind
from tformer.decoding.settings import Generated
from tformer.decoding.translate import Translation
from tformer.support.formatting import as_cell, as_one_line
from tformer.tokenizer import Tokenizer

NUMBERS = ("score", "logprob")


def generated_document(index: int, prompt: str, completions: list[Generated]) -> dict[str, Any]:
    """The JSON of one prompt. `text`, `logprobs` and `finish_reason` are the first completion's."""
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


def answer_columns(names: Sequence[str], count: int) -> list[tuple[str, Kind]]:
    """Columns of the best answer, or of `count` with their ranks: `output_1`, `score_1`, `output_2`, ..."""
    ranks = [""] if count == 1 else [f"_{rank}" for rank in range(1, count + 1)]
    return [(name + rank, "number" if name in NUMBERS else "text") for rank in ranks for name in names]


def answer_cells(names: Sequence[str], count: int, answers: Sequence[Generated | Translation]) -> list[Any]:
    """Answers in the order of `answer_columns`; empty where there are fewer."""
    cells = [_cell(name, answer) for answer in answers[:count] for name in names]
    return cells + [None] * (count * len(names) - len(cells))


def _cell(name: str, answer: Any) -> str | float | None:
    if name == "logprob":
        return sum(answer.logprobs or ())
    return _pharaoh(answer) if name == "alignment" else getattr(answer, {"output": "text"}.get(name, name))


def _pharaoh(answer: Translation) -> str:
    return " ".join(f"{source}-{target}" for target, source in answer.alignment or ())


def _listed(values: tuple[float, ...] | None) -> list[float] | None:
    return None if values is None else list(values)


def translation_lines(index: int, answers: Sequence[Translation], *, n_best: bool, alignments: bool) -> str:
    """The lines of one input: its best text, or with `n_best` all of them with index and score."""
    lines = []
    for answer in answers if n_best else answers[:1]:
        columns = [as_cell(answer.text) if n_best or alignments else as_one_line(answer.text)]
        if n_best:
            columns = [str(index), f"{answer.score:.4f}", *columns]
        if alignments:
            columns.append(_pharaoh(answer))
        lines.append("\t".join(columns) + "\n")
    return "".join(lines)


def translation_document(
    index: int,
    prompt: str,
    answers: Sequence[Translation],
    *,
    source: str | None = None,
    target_prefix: str | None = None,
    tokenizers: tuple[Tokenizer, Tokenizer] | None = None,
    logprobs: bool = False,
) -> dict[str, Any]:
    """The JSON of one input. `text`, `score`, `finish_reason` and `logprobs` are the best completion's.

    source: what the model read, where that is not the prompt alone.
    logprobs: whether each id has its log-probability; None for the ids of a target prefix.
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
    if logprobs:
        for completion, answer in zip(completions, answers, strict=True):
            completion["logprobs"] = [None] * answer.num_forced + list(answer.logprobs)
        document["logprobs"] = completions[0]["logprobs"]
    if tokenizers is not None:
        reads, writes = tokenizers
        document["source_tokens"] = [reads.token(token) for token in reads.encode(source or prompt)]
        for completion, answer in zip(completions, answers, strict=True):
            # The end token is no part of the text.
            ids = answer.ids[:-1] if answer.finish_reason == "eos" else answer.ids
            completion["tokens"] = [writes.token(token) for token in ids]
            completion["alignment"] = [[place, position] for position, place in answer.alignment or ()]
    return document | {"completions": completions}
