"""What config.json does not say means what it means to the class: every default is the library's own."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from tformer.interop.architectures import ARCHITECTURES
from tformer.interop.config import Config
from tformer.recipe.model import Model

CLASSES = [
    (name, written)
    for name, architecture in ARCHITECTURES.items()
    if architecture.code is None  # the others are no classes of the library
    for written in architecture.classes
]
WITHOUT_WINDOW = {"mistral": {"sliding_window": None}}  # its own, 4096, would be refused


@pytest.mark.parametrize(("model_type", "class_name"), CLASSES)
def test_a_missing_key_means_the_default_of_the_class(model_type: str, class_name: str) -> None:
    def read(values: dict[str, Any]) -> Model:
        config = Config({**values, "model_type": model_type, **WITHOUT_WINDOW.get(model_type, {})})
        section = ARCHITECTURES[model_type].read(config, class_name)
        config.finish()
        return Model.model_validate(section)

    assert read({}) == read(CONFIG_MAPPING[model_type]().to_dict())
