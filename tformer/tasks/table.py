"""The table of tasks, one for each kind of data.

    text           running text for causal language models
    masked_text    running text for models that restore it (masked LM, ELECTRA, T5, BART)
    sentences      documents split into sentences (masked LM + next sentence)
    labelled       labelled texts and pairs of texts
    tagged         sentences of words with tags
    questions      questions whose answer is a part of a context
    images         labelled images
    pairs          sources and targets
    text_pairs     pairs of texts whose vectors are compared
    chat           conversations
    preferences    prompts with a chosen and a rejected answer
    continuations  prompts and given continuations (`evaluate --score`)
    benchmarks     tasks of lm_eval (`evaluate --tasks`)

A new kind of data is a file or a folder with a subclass of `Task` and one row of `TASKS`. The key of the row is the
`data` of the objectives that read it.
"""

from __future__ import annotations

from contextlib import suppress

from tformer.recipe.data_defaults import Survey
from tformer.recipe.recipe import Recipe
from tformer.support.errors import InputError
from tformer.support.files import STANDARD_INPUT
from tformer.tasks.base import Task
from tformer.tasks.benchmarks import Benchmarks
from tformer.tasks.chat import Chat
from tformer.tasks.continuations import Continuations
from tformer.tasks.images import Images
from tformer.tasks.labelled import Labelled
from tformer.tasks.masked_text import MaskedText
from tformer.tasks.pairs import Pairs
from tformer.tasks.preferences import Preferences
from tformer.tasks.questions import Questions
from tformer.tasks.sentences import Sentences
from tformer.tasks.tags.task import Tagged
from tformer.tasks.text import Text
from tformer.tasks.text_pairs import TextPairs

TASKS: dict[str, Task] = {
    "text": Text(),
    "masked_text": MaskedText(),
    "sentences": Sentences(),
    "labelled": Labelled(),
    "tagged": Tagged(),
    "questions": Questions(),
    "images": Images(),
    "pairs": Pairs(),
    "text_pairs": TextPairs(),
    "chat": Chat(),
    "preferences": Preferences(),
    "continuations": Continuations(),
    "benchmarks": Benchmarks(),
}

_SURVEYS: dict[str, Survey | None] = {}
"""Surveys of this process by the recipe's data."""


def task_of(recipe: Recipe) -> Task:
    """The task of a recipe's data: images for models of patches, else what its objectives read."""
    return TASKS["images" if recipe.model.patches is not None else recipe.data_kind]


def survey_of(recipe: Recipe) -> Survey | None:
    """Number and length of the training examples, read once in a process; None for data that no defaults follow.

    Standard input can be read only once. Data that cannot be read is reported by the training itself.
    """
    if any(spec.path == STANDARD_INPUT for spec in recipe.data.train):
        return None
    key = recipe.model_dump_json(include={"data", "objectives"})
    if key not in _SURVEYS:
        with suppress(InputError):
            _SURVEYS[key] = task_of(recipe).survey(recipe)
    return _SURVEYS.get(key)
