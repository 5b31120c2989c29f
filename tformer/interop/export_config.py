"""What config.json says of an exported model, and where its open sizes come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tformer.checkpoint import Checkpoint
from tformer.interop.choose import Choice, label_keys
from tformer.recipe.model import Model
from tformer.recipe.recipe import Recipe
from tformer.tokenizer import Tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# The class that opens a folder -> how the names of the classes it opens end.
AUTO_CLASSES = {
    "AutoModelForCausalLM": ("LMHeadModel", "ForCausalLM"),
    "AutoModelForSeq2SeqLM": ("ForConditionalGeneration", "MTModel"),
    "AutoModelForPreTraining": ("ForPreTraining",),
    "AutoModelForMaskedLM": ("ForMaskedLM",),
    "AutoModelForSequenceClassification": ("ForSequenceClassification",),
    "AutoModelForImageClassification": ("ForImageClassification",),
}


@dataclass(frozen=True)
class Tokenizers:
    """Of a checkpoint: None for a model of images; `target` where the side that is written has its own."""

    source: Tokenizer | None
    target: Tokenizer | None


def tokenizers_of(checkpoint: Checkpoint) -> Tokenizers:
    texts = (checkpoint.tokenizer_json, checkpoint.target_tokenizer_json)
    source, target = (None if text is None else Tokenizer.from_json(text) for text in texts)
    return Tokenizers(source, target)


def resolved(recipe: Recipe, tokenizers: Tokenizers) -> Model:
    """The `model` section with the sizes that tokenizers and labels decide."""
    model = recipe.model
    sizes: dict[str, Any] = {}
    for key, tokenizer in (("vocab_size", tokenizers.source), ("target_vocab_size", tokenizers.target)):
        if getattr(model, key) is None and tokenizer is not None:
            sizes[key] = tokenizer.vocab_size
    heads = model.model_dump(mode="json")["heads"]
    for head in heads:
        if head["kind"] == "classifier" and head["num_labels"] is None:
            head["num_labels"] = len(recipe.data.labels) or None
    return Model.model_validate({**model.model_dump(mode="json"), **sizes, "heads": heads})


def config_of(choice: Choice, recipe: Recipe, keys: Mapping[str, Any], *, dtype: torch.dtype) -> dict[str, Any]:
    """The whole of config.json."""
    return {
        **label_keys(choice.model, recipe.data.labels),
        **choice.config,
        **keys,
        "architectures": [choice.class_name],
        "dtype": str(dtype).removeprefix("torch."),
        "model_type": choice.architecture.model_type,
    }


def auto_class(class_name: str) -> str:
    """The `AutoModel...` that opens a folder of this class."""
    return next(auto for auto, endings in AUTO_CLASSES.items() if class_name.endswith(endings))
