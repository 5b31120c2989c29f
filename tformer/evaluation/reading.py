"""The class that answers texts and images with a loaded model, by the model's head."""

from __future__ import annotations

from typing import Any

from tformer.evaluation import classifier
from tformer.evaluation.answerer import Answerer
from tformer.evaluation.tagger import Tagger
from tformer.loading import Loaded

READERS: dict[str, Any] = {
    **dict.fromkeys(classifier.HEADS, classifier.Classifier),
    **{reader.head: reader for reader in (Tagger, Answerer)},
}
"""The class of each head that `classify` reads."""

HEADS = frozenset(READERS)


def reader_of(loaded: Loaded) -> Any:
    """The class for a model: that of the first of its heads that has one."""
    return next(READERS[head.kind] for head in loaded.recipe.model.heads if head.kind in READERS)
