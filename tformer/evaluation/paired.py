"""Pairs as token ids, the way a recipe's model reads them: for training, for its validation, and for `evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tformer.data.shards.pair_tokens import (
    PairTokens,
    RowSource,
    tokenise_pairs,
)
from tformer.loading import decoder_tokens_of
from tformer.recipe.recipe import Recipe
from tformer.tokenizer import Tokenizer


def paired_tokens(
    recipe: Recipe,
    source: RowSource,
    tokenizers: tuple[Tokenizer, Tokenizer],
    *,
    keep_all: bool = False,
    whole: bool = False,
    tasks: Sequence[str] = (),
    progress: Callable[..., None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> PairTokens:
    """The pairs of one source, filtered and cut as the recipe says.

    Args:
        tokenizers: of source and target.
        keep_all: for evaluation: no pair is left out; too long ones are cut.
        whole: nothing is cut: both sides may be as long as the model reads, and a longer pair that stays is an error.

    The other arguments and errors are those of `tokenise_pairs`.
    """
    target, longest = decoder_tokens_of(recipe, tokenizers[1]), recipe.model.max_seq_len
    drops = recipe.data.overlong == "drop" and not keep_all  # then nothing is ever cut
    reads_on = whole and not drops
    seq_len, target_seq_len = (longest, longest) if reads_on else (recipe.seq_len, recipe.target_seq_len)
    return tokenise_pairs(
        [source],
        *tokenizers,
        seq_len=seq_len,
        target_seq_len=target_seq_len - (target.forced_bos is not None),  # which the decoder reads too
        eos=target.eos,
        overlong="refuse" if reads_on else recipe.data.overlong,
        max_length_ratio=recipe.data.max_length_ratio,
        keep_all=keep_all,
        tasks=tasks,
        progress=progress,
        should_stop=should_stop,
    )
