"""Preferences: a prompt, the answer that was chosen, and the one that was rejected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import islice
from os.path import commonprefix
from typing import Any, ClassVar

import numpy as np

from tformer.build import build_model
from tformer.data.batching.windows import Windows
from tformer.data.encoding import encode_prompt
from tformer.data.shards.chat_tokens import WholeDocuments
from tformer.data.sources.preferences import KEYS, Preference, PreferenceTable
from tformer.decoding.prompts import encode_continuation
from tformer.interop.adapters import base_of
from tformer.loading import Loaded, load_weights
from tformer.nn.init import NoDraws
from tformer.objectives.dpo import Dpo
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError
from tformer.tasks.base import ChosenData, HeldOut, RowKeys, TrainingSets
from tformer.tasks.chat import Chat, ConversationWindows
from tformer.tasks.text import Corpora
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.chat import ChatIds, ChatTemplate
from tformer.workers.work import Work


class Preferences(Chat):
    """Preferences between two answers to a prompt, of texts or in the chat template."""

    description = "a model of preferences"
    tokenizer_texts = "preferences"
    row_keys: ClassVar[RowKeys] = (KEYS,)
    unit = "preferences"
    table = PreferenceTable
    corpus_type = WholeDocuments

    def fitted(self, sets: TrainingSets) -> Recipe:
        """The recipe with chat's values if the first row has messages."""
        has_messages = any(row.prompt is None for source in sets.sources[:1] for row in islice(source.rows(), 1))
        return super().fitted(sets) if has_messages else sets.recipe

    def encoder(self, tokenizer: Tokenizer, recipe: Recipe) -> tuple[Callable[[Any], Sequence[Any]], str]:
        name = recipe.tokenizer.chat_template
        template = cache(partial(ChatTemplate, tokenizer, name))  # made once, and not for texts
        return lambda row: [answer_sides(row, tokenizer, template)], f"{tokenizer.sha256} {name}"

    def cut(
        self, recipe: Recipe, corpora: Corpora, tokenizer: Tokenizer, *, room: int | None, moves: bool = True
    ) -> Sequence[Windows]:
        """One preference each."""
        return [ConversationWindows(corpus, 2 * recipe.seq_len + 1, packing="none") for corpus in corpora]

    def first_try(self, recipe: Recipe, opening: str) -> tuple[str, ...]:
        return ("generate", "--prompt", opening or "The ") if recipe.tokenizer.chat_template is None else ("chat",)

    def given_row(self, text: str, answer: str) -> Any:
        """A preference with this prompt and chosen answer; the rejected one is empty."""
        return Preference(text, answer, "", "", "--text")

    def held_out(self, loaded: Loaded, data: ChosenData, work: Work) -> HeldOut:
        """The preferences, with the base beside the model. Errors: a model without a base to compare with."""
        checkpoint, vocab_size = base_of(loaded.path), loaded.text_tokenizer.vocab_size
        found, device = super().held_out(loaded, data, work), next(loaded.model.parameters()).device
        with NoDraws():
            base = build_model(loaded.recipe.model, vocab_size=vocab_size, device=device).eval()
        load_weights(base, checkpoint)
        base.compute_dtype = loaded.model.compute_dtype
        assert isinstance(found.objective, Dpo)
        found.objective.base = base
        return found


def answer_sides(row: Preference, tokenizer: Tokenizer, template: Callable[[], ChatTemplate]) -> list[ChatIds]:
    """Both sides, as `generate` reads the prompt and writes the answer and its end.

    Messages are in the chat template, and the answers are those from the first that differs on. Raises InputError,
    with the row's place, for messages that the template refuses, or a tokenizer that has none.
    """
    if row.prompt is not None:
        prompt, end = encode_prompt(tokenizer, row.prompt), tokenizer.special.eos
        ends = [] if end is None else [end]
        texts = [encode_continuation(tokenizer, row.prompt, text) for text in (row.chosen, row.rejected)]
        last = [ChatIds(ids, np.ones(len(ids), dtype=bool)) for ids in ([*prompt, *text, *ends] for text in texts)]
        start = len(prompt)
    else:
        try:
            sides = [template().examples(messages) for messages in (row.chosen, row.rejected)]
        except InputError as error:
            raise InputError(f"{row.place}: {error.message}", hint=error.hint) from error
        last = [examples[-1] for examples in sides]
        if len({tuple(tuple(example.ids) for example in examples[:-1]) for examples in sides}) > 1:
            what = "earlier answers differ, and the chat template rewrites them when more messages follow"
            raise InputError(f"{row.place}: {what}")
        start = len(commonprefix([side.ids for side in last]))  # noqa: RUF071 (these are no paths)
        while start and last[0].answers[start - 1]:
            start -= 1
    for side in last:
        side.answers[:start] = False
    return last
