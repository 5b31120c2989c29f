"""The recipe: everything that defines a run, in one strict, frozen value; its special ids applied to a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, model_validator

from tformer.objectives import CausalLmOptions, ObjectiveOptions
from tformer.objectives.base import DataKind
from tformer.recipe.model import Model
from tformer.recipe.sections import (
    Data,
    Generation,
    Lora,
    NonNegative,
    NonNegativeFloat,
    Optimizer,
    PositiveFloat,
    Schedule,
    Section,
    Training,
)
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer as LoadedTokenizer
from tformer.tokenizer.options import TokenizerOptions

SCHEMA_VERSION = 1


class SpecialTokens(Section):
    """Ids of special tokens for training and decoding; null: the tokenizer's own."""

    pad: NonNegative | None = None  # padding
    bos: NonNegative | None = None  # begin of a text
    eos: NonNegative | None = None  # end of a text
    unk: NonNegative | None = None  # unknown piece
    cls: NonNegative | None = None  # first token of an encoder's input
    sep: NonNegative | None = None  # between and after texts
    mask: NonNegative | None = None  # hidden token
    decoder_start: NonNegative | None = None  # first input of the decoder
    forced_bos: NonNegative | None = None  # always the first token of an output
    forced_eos: NonNegative | None = None  # the last token at the length limit


class Tokenizer(Section):
    """Existing files (`path`, or one per side), or the options of one trained on the training data."""

    path: str | None = None  # a tokenizer.json; null: train one
    source_path: str | None = None  # tokenizer.json of the source side
    target_path: str | None = None  # tokenizer.json of the target side
    train: TokenizerOptions = TokenizerOptions()
    separate: bool = False  # one vocabulary for the source, another for the target
    # of conversations: chatml, plain, a Jinja template or a file .jinja; null: that of the model, else by its tokens
    chat_template: str | None = None
    special_ids: SpecialTokens = SpecialTokens()


class Embeddings(Section):
    """Files of token vectors, with which the embedding tables of a new run start; a resumed run does not read them."""

    path: str | None = None  # of the input's table: GloVe's or word2vec's text format, or safetensors; null: none
    # of the decoder's own table; where both sides share one, of the tokens that `path` lacks
    target_path: str | None = None


class Teacher(Section):
    """The model that a student learns from, by its soft targets or (pairs) by its translations of the sources."""

    path: str | None = None  # a run, a checkpoint or a Hugging Face folder; null: no teacher
    kind: Literal["soft", "sequence"] = "soft"
    temperature: PositiveFloat = 2.0  # divides both models' logits where they are compared
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5  # share of the labels; 1 - alpha is that of the soft targets
    hidden: NonNegativeFloat = 0.0  # weight of the distance between hidden states; needs the teacher's width
    attention: NonNegativeFloat = 0.0  # weight of the divergence of attention weights; needs the teacher's heads


class Recipe(Section):
    """Everything that defines a run."""

    schema_version: Literal[1] = Field(default=1, alias="schema")  # version of this format
    arch: str = "gpt"  # family, for example gpt
    model_type: str | None = None  # of transformers, where the model came from; export writes it as this type again
    preset: str | None = None  # the shipped recipe that this one started from
    tokenizer: Tokenizer = Tokenizer()
    data: Data = Data()
    model: Model
    generator: Model | None = None  # ELECTRA's second model
    teacher: Teacher | None = None  # null: no distillation
    embeddings: Embeddings = Embeddings()
    lora: Lora | None = None  # null: all weights are trained
    # what the model learns; several are added up
    objectives: tuple[Annotated[ObjectiveOptions, Field(discriminator="kind")], ...] = (CausalLmOptions(),)
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    training: Training = Training()
    generation: Generation = Generation()
    seed: NonNegative = 1337  # random seed of weights, order of the data, dropout and corruption

    @property
    def seq_len(self) -> int:
        """Maximum positions of an example (of pairs: of its source), special tokens included; an image's patches."""
        patches = self.model.patches
        if patches is not None:
            return patches.side**2 + patches.cls
        return self.data.seq_len or self.model.max_seq_len

    @property
    def target_seq_len(self) -> int:
        """Maximum tokens that the decoder beside an encoder reads."""
        return self.data.target_seq_len or min(self.seq_len, self.model.max_target_len or self.seq_len)

    @property
    def data_kind(self) -> DataKind:
        """The kind of training data, from the last objective: one beside another needs more."""
        return self.objectives[-1].objective.data

    @property
    def separate_vocabularies(self) -> bool:
        """Whether source and target have a tokenizer each."""
        tokenizer = self.tokenizer
        return tokenizer.separate or tokenizer.source_path is not None or tokenizer.target_path is not None

    @model_validator(mode="after")
    def _needs_an_objective(self) -> Recipe:
        if not self.objectives:
            raise ValueError("objectives must name at least one objective")
        return self


ROLES = ("pad", "bos", "eos", "unk", "cls", "sep", "mask")
First = TypeVar("First", LoadedTokenizer, LoadedTokenizer | None)


def with_roles(
    ids: SpecialTokens, tokenizer: First, target: LoadedTokenizer | None
) -> tuple[First, LoadedTokenizer | None]:
    """(source's, target's) tokenizer with the special ids of the recipe, which belong to the side that is generated.

    target: None where one tokenizer serves both sides. Raises InputError for an id that the tokenizer does not have.
    """
    if target is not None:
        return tokenizer, with_own_roles(ids, target)
    return (tokenizer if tokenizer is None else with_own_roles(ids, tokenizer)), None


def with_own_roles(ids: SpecialTokens, tokenizer: LoadedTokenizer) -> LoadedTokenizer:
    """The tokenizer with the special ids of the recipe. Raises InputError as `with_roles`."""
    check_special_ids(ids, tokenizer, ROLES)
    named = {role: getattr(ids, role) for role in ROLES}
    changed: dict[str, Any] = {role: token for role, token in named.items() if token is not None}
    return tokenizer.with_special(replace(tokenizer.special, **changed)) if changed else tokenizer


def check_special_ids(ids: SpecialTokens, tokenizer: LoadedTokenizer, names: Sequence[str]) -> None:
    """Raise InputError, naming the key, for an id that the tokenizer does not have."""
    for name in names:
        token = getattr(ids, name)
        if token is not None and token >= tokenizer.vocab_size:
            raise InputError(
                f"tokenizer.special_ids.{name}: found {token}, expected an id of the tokenizer, "
                f"below {tokenizer.vocab_size}"
            )
