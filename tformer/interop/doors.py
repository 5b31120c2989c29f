"""The formats in which a model can leave, and what bars the others: the exporters' own checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tformer.checkpoint.read import Checkpoint
from tformer.interop import exporting, to_ctranslate2, to_gguf, to_onnx
from tformer.interop.choose import Choice
from tformer.interop.peft import as_in_peft
from tformer.support.errors import InputError


@dataclass(frozen=True)
class Door:
    """A format of `tformer export --to`: the class that the model is there, or what bars it."""

    to: str
    class_name: str | None = None
    barred: str | None = None

    @property
    def line(self) -> str:
        return f"{self.to:<12} {self.class_name or 'no: ' + str(self.barred)}"


def doors(checkpoint: Checkpoint) -> list[Door]:
    """All formats of a checkpoint."""
    return [_door(checkpoint, to, plan) for to, plan in PLANS.items()]


def _door(checkpoint: Checkpoint, to: str, plan: Callable[[Checkpoint], str]) -> Door:
    try:
        return Door(to, plan(checkpoint))
    except InputError as error:
        return Door(to, barred=error.message)


def _named(choice: Choice) -> str:
    return f"{choice.class_name} (model_type {choice.architecture.model_type})"


PLANS: dict[str, Callable[[Checkpoint], str]] = {
    "huggingface": lambda one: _named(exporting.planned(one.recipe, exporting.tokenizers_of(one))[0]),
    "ctranslate2": lambda one: _named(to_ctranslate2.plan(one)),
    "gguf": lambda one: _named(to_gguf.plan(one)[1]),
    "onnx": lambda one: _named(to_onnx.plan(one)),
    "peft": lambda one: f"adapters of {as_in_peft(one)[0]}",
}
