"""`tformer evaluate --score` for decoder-only models: how probable given continuations of prompts are.

The sources are prompts, read as `generate` reads them, the targets their continuations. A continuation need not be the
end of its text, so no end of sequence is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tformer.cli.evaluate_request import Request, describe
from tformer.cli.evaluate_text import require_finite
from tformer.cli.process import StopFlag
from tformer.cli.report import console, progress_reporter
from tformer.errors import InputError

if TYPE_CHECKING:
    from tformer.data.sources.tables import PairRow
    from tformer.loading import Loaded

BATCH_TOKENS = 4096


def evaluate_continuations(loaded: Loaded, request: Request, flag: StopFlag) -> dict[str, Any]:
    """The log-probability of each continuation, and of all: the figures that pairs get."""
    from tformer.data.sources.pairs import open_pairs
    from tformer.decoding.prompts import encode_continuation, encode_prompt
    from tformer.decoding.score import score_continuations
    from tformer.metrics import perplexity

    if not request.reads_files:
        raise InputError(
            "--score needs prompts and their continuations",
            hint="name them: --source prompts.txt --target continuations.txt, or a table of both with --data",
        )
    tokenizer = loaded.text_tokenizer
    sources = open_pairs(request.specs(loaded), columns=request.columns(loaded), errors=request.errors(loaded))
    rows = [row for source in sources for row in source.rows()]
    for note in (note for source in sources for note in source.notes):
        console.print(note, markup=False)
    prompts = [encode_prompt(tokenizer, row.source) for row in rows]
    targets = [encode_continuation(tokenizer, row.source, row.target) for row in rows]
    for row, prompt, target in zip(rows, prompts, targets, strict=True):
        _require_room(row, len(prompt) + len(target) - 1, loaded.model.max_seq_len)
    tokens = sum(map(len, targets))
    name = ", ".join(source.name for source in sources)
    if not tokens:
        raise InputError(f"{name}: no continuation has a token")
    with progress_reporter("scoring") as progress:
        scores = score_continuations(
            loaded.model,
            prompts,
            targets,
            vocab_size=tokenizer.vocab_size,
            batch_tokens=BATCH_TOKENS,
            should_stop=flag.should_stop,
            progress=progress,
        )
    if flag.should_stop():
        raise flag.interrupted("interrupted before every continuation was read")
    total = sum(score.logprob for score in scores)
    require_finite(-total)
    return {
        **describe(loaded),
        "data": name,
        "scores": [{"logprob": score.logprob, "tokens": len(score.logprobs)} for score in scores],
        "logprob": total,
        "tokens": tokens,
        "perplexity": perplexity(-total / tokens),
    }


def _require_room(row: PairRow, length: int, limit: int) -> None:
    """`length` in tokens that are read: the last one is only predicted."""
    if length > limit:
        raise InputError(
            f"{row.place}: prompt and continuation have {length + 1:,} tokens, the model's context has room for "
            f"{limit + 1:,}"
        )
