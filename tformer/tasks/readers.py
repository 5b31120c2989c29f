"""The class that answers with a loaded model, apart from the table of tasks, whose import takes longer."""

from __future__ import annotations

from tformer.evaluation.classifier import Classifier, labelled_head
from tformer.evaluation.spans import Answerer
from tformer.loading import Loaded
from tformer.tasks.tags.words import Tagger


def reader_of(loaded: Loaded) -> type[Classifier]:
    """The class that answers with a loaded model, by the model's head."""
    readers = {"token_classifier": Tagger, "span": Answerer}
    return readers.get(labelled_head(loaded.recipe)[0], Classifier)
