"""Conversations: instruction tuning of decoder-only models on messages, in the chat template of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from tformer.data.batching.windows import LmWindows, Packing, Windows
from tformer.data.shards.chat_tokens import MarkedCorpus, answer_ids, join_sequences, marked_corpus
from tformer.data.shards.corpus import Example, TokenCorpus
from tformer.data.sources.conversations import (
    Conversation,
    ConversationSource,
    ConversationTable,
    open_conversations,
)
from tformer.evaluation.options import READING
from tformer.objectives.base import ObjectiveContext
from tformer.recipe.recipe import Recipe
from tformer.recipe.sections import Data, SourceSpec
from tformer.support.errors import InputError
from tformer.tasks.base import ChosenData, GivenExample, RowKeys, Tokenizers, TrainingSets
from tformer.tasks.masked_text import MaskedText
from tformer.tasks.text import Corpora
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.chat import ChatTemplate
from tformer.workers.work import Work


class ConversationWindows(LmWindows):
    """Windows of a `MarkedCorpus`; the label of a sample is the marks of its ids."""

    def _example(self, start: int, text: np.ndarray) -> Example:
        assert isinstance(self.corpus, MarkedCorpus)
        return replace(super()._example(start, text), label=self.corpus.marks_of(start, start + len(text)))


class Chat(MaskedText):
    """Conversations, or texts that are learned whole. The objective measures them, as for masked text.

    Attributes: `unit`, what rows are; `table`, how they are read; `corpus_type`, of their tokens.
    """

    description = "a model that answers messages"
    options = READING | {"seq_len"}
    tokenizer_texts = "chat"
    row_keys: ClassVar[RowKeys] = ()
    unit: ClassVar[str] = "conversations"
    table: ClassVar[type[ConversationTable]] = ConversationTable
    corpus_type: ClassVar[type[MarkedCorpus]] = MarkedCorpus

    def open(
        self, specs: Sequence[SourceSpec], data: Data | ChosenData, recipe: Recipe
    ) -> Sequence[ConversationSource]:
        """Errors: no data, a file of no known format."""
        if not specs:
            kind = recipe.objectives[0].kind
            raise InputError(f"{kind} has no built-in data", hint=f"give {self.unit}: --data FILE.jsonl")
        return open_conversations(specs, format=recipe.data.format, kind=self.table, reading=data.reading)

    def fitted(self, sets: TrainingSets) -> Recipe:
        """The recipe with the template, and the tokens that end an answer as stop tokens."""
        recipe, tokenizer = sets.recipe, sets.tokenizer
        template = ChatTemplate(tokenizer, recipe.tokenizer.chat_template)
        ends = dict.fromkeys([*recipe.generation.stop_tokens, *template.ends])
        stops = tuple(token for token in ends if token != tokenizer.special.eos)
        recipe = recipe.model_copy(
            update={
                "tokenizer": recipe.tokenizer.model_copy(update={"chat_template": template.source}),
                "generation": recipe.generation.model_copy(update={"stop_tokens": stops}),
            }
        )
        return super().fitted(sets.with_recipe(recipe))

    def encoder(self, tokenizer: Tokenizer, recipe: Recipe) -> tuple[Callable[[Any], Sequence[Any]], str]:
        """(function from a row to the sequences of each example, key of the options it depends on)."""
        template = ChatTemplate(tokenizer, recipe.tokenizer.chat_template)
        return lambda row: [[each] for each in answer_ids(row, template)], f"{tokenizer.sha256} {template.source}"

    def corpus(self, source: Any, tokenizer: Tokenizer, recipe: Recipe, work: Work) -> TokenCorpus:
        """The rows of a source as tokens; rows that are too long are left out or cut. Errors: none is left."""
        (encode, key), unit = self.encoder(tokenizer, recipe), self.unit
        how: dict[str, Any] = {"seq_len": recipe.seq_len, "overlong": recipe.data.overlong}
        with work.part(f"tokenizing {source.name}", unit=unit) as part:
            return marked_corpus(source, encode, key=key, unit=unit, kind=self.corpus_type, work=part, **how)

    def cut(
        self, recipe: Recipe, corpora: Corpora, tokenizer: Tokenizer, *, room: int | None, moves: bool = True
    ) -> Sequence[Windows]:
        """As many whole conversations as fit, or with packing "none" one each."""
        packing: Packing = "none" if recipe.data.packing == "none" else "documents"
        return [ConversationWindows(corpus, recipe.seq_len, packing=packing, document_mask=True) for corpus in corpora]

    def first_try(self, recipe: Recipe, opening: str) -> tuple[str, ...]:
        return ("chat",)

    def sample_of(self, recipe: Recipe, tokenizers: Tokenizers, given: GivenExample) -> tuple[Any, ObjectiveContext]:
        """A sample of a message and its answer; without a target the message is its own answer."""
        given.require("text", may="target", reader=self.description)
        tokenizer, _ = tokenizers
        assert tokenizer is not None and given.text is not None
        encode, _ = self.encoder(tokenizer, recipe)
        sides = encode(self.given_row(given.text, given.text if given.target is None else given.target))[-1]
        if (longest := max(len(side.ids) for side in sides)) > recipe.seq_len + 1:
            raise InputError(f"--text has {longest} tokens, the model reads {recipe.seq_len}")
        ids, marks = join_sequences(sides)
        return Example(ids, np.zeros(len(ids), dtype=np.int64), label=marks), self.context(recipe, tokenizer)

    def given_row(self, text: str, answer: str) -> Any:
        """The row of a message and its answer."""
        sides = {"user": text, "assistant": answer}
        return Conversation([{"role": role, "content": content} for role, content in sides.items()], text, "--text")
