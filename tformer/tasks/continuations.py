"""Continuations of prompts, scored by causal language models (`tformer evaluate --score`).

The sources are prompts, read as `generate` reads them, the targets their continuations. A continuation need not be the
end of its text, so no end of sequence is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tformer.data.encoding import encode_prompt
from tformer.data.sources.pairs import open_pairs
from tformer.decoding.prompts import encode_continuation
from tformer.decoding.score import TargetScore, score_continuations
from tformer.evaluation.options import READING, EvaluationOptions
from tformer.loading import Loaded
from tformer.metrics.text import perplexity
from tformer.support.errors import InputError
from tformer.tasks.base import ChosenData, require_finite_loss
from tformer.tasks.text import Text
from tformer.tokenizer.pieces import size_for_message
from tformer.workers.work import Work

PAIR_OPTIONS = READING | {"score", "source", "target", "source_column", "target_column", "seq_len"}
BATCH_TOKENS = 4096


class Continuations(Text):
    """Prompts with given continuations. Trained and measured like running text."""

    description = "a causal language model, and --score reads continuations"
    options = PAIR_OPTIONS
    row_keys = (("source", "target"),)

    def evaluate(self, loaded: Loaded, data: ChosenData, options: EvaluationOptions, work: Work) -> dict[str, Any]:
        """The log-probability of each continuation, their sum and perplexity."""
        if data.given is None:
            raise InputError(
                "--score needs prompts and their continuations",
                hint="name them: --source prompts.txt --target continuations.txt, or a table of both with --data",
            )
        tokenizer, limit = loaded.text_tokenizer, loaded.model.max_seq_len
        sources = open_pairs(data.specs, columns=data.columns, reading=data.reading)
        rows = [row for source in sources for row in source.rows()]
        work.note_all(*sources)
        prompts, targets = list[list[int]](), list[list[int]]()
        for row in rows:
            prompts.append(encode_prompt(tokenizer, row.source, most=limit + 1))
            targets.append(encode_continuation(tokenizer, row.source, row.target, most=limit + 1))
            length = len(prompts[-1]) + len(targets[-1])
            if length - 1 > limit:  # the last token is only predicted
                size = size_for_message(row.source + row.target, length, most=limit + 1)
                raise InputError(
                    f"{row.place}: prompt and continuation have {size}, the model's context has room for {limit + 1:,}"
                )
        name = ", ".join(source.name for source in sources)
        if not any(targets):
            raise InputError(f"{name}: no continuation has a token")
        with work.part("scoring", unit="continuations") as part:
            scores = score_continuations(
                loaded.model, prompts, targets, vocab_size=tokenizer.vocab_size, batch_tokens=BATCH_TOKENS, work=part
            )
        work.raise_if_stopped("before every continuation was read")
        return {"data": name, **score_report(scores)}

    def lines(self, report: dict[str, Any]) -> Iterator[str]:
        """One log-probability per line."""
        return score_lines(report)


def score_report(scores: Sequence[TargetScore]) -> dict[str, Any]:
    """The log-probability of each target, their sum and perplexity."""
    total, tokens = sum(score.logprob for score in scores), sum(len(score.logprobs) for score in scores)
    require_finite_loss(-total)
    return {
        "scores": [{"logprob": score.logprob, "tokens": len(score.logprobs)} for score in scores],
        "logprob": total,
        "tokens": tokens,
        "perplexity": perplexity(-total / tokens),
    }


def score_lines(report: dict[str, Any]) -> Iterator[str]:
    """One log-probability per line."""
    for score in report["scores"]:
        yield f"{score['logprob']:.6f}"
