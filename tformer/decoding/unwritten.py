"""Tokens that a decoder reads and never writes: padding, and what every text begins with; or those of the recipe.

They are ruled out of the choice, not of the distribution: probabilities are not normalised again without them, so that
what search and sampling report is what force-decoding finds (`score`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tformer.tokenizer.special import DecoderTokens, SpecialIds


def unwritten_tokens(
    special: SpecialIds,
    target: DecoderTokens | None = None,
    *,
    eos: int | None,
    suppressed: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Ids, in increasing order: pad, bos and what a decoder beside an encoder starts from.

    Where one of them ends a text too (BART starts from eos) or is the first of every text (`forced_bos`), it stays.

    target: of the decoder beside an encoder; None: a decoder alone.
    suppressed: these, in the place of all that (`generation.suppress_tokens`: a model from elsewhere may rule out
    others, or none).
    """
    if suppressed is not None:
        return tuple(sorted(set(suppressed)))
    forced = None if target is None else target.forced_bos
    reading = {special.pad, special.bos, None if target is None else target.start} - {eos, forced}
    return tuple(sorted(token for token in reading if token is not None))
