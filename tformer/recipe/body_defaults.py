"""Defaults that follow the body: optimizer and peak rate of `--init-from` without a given rate, and frozen embeddings.

A body that was pre-trained elsewhere, or a wide one, is trained by AdamW with a rate that falls with its width; so are
adapters (LoRA), which take a larger one. A narrow body of our own keeps the optimizer of its recipe or preset (Muon).
`RULES` holds the two rates; guide/lora.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tformer.recipe.overrides import DEFAULT
from tformer.recipe.recipe import Recipe

RATES = {"kind", "lr", "adam_lr"}
"""Keys that choose the optimizer and its rates."""

NARROW = 256
"""Maximum width of a body of our own that is trained in full with the rates of its recipe or preset."""

EMBEDDINGS = ("embedding.*",)
"""Trained in full beside the adapters of a narrow body of our own that learns labels: after minutes of pre-training the
embeddings have much to learn, and frozen they cost 4 to 14 points of accuracy."""


@dataclass(frozen=True)
class Rule:
    """Peak rate = `at_768` * (768 / width) ** `power`, between `least` and `most`; decay: of the matrices."""

    at_768: float
    power: float
    least: float
    most: float
    decay: float

    def rate(self, width: int) -> float:
        """The peak rate of AdamW for a body of this width, rounded to two digits."""
        return float(f"{min(self.most, max(self.least, self.at_768 * (768 / width) ** self.power)):.1e}")


RULES = {
    "full": Rule(at_768=5e-5, power=1.5, least=1e-5, most=1e-3, decay=0.01),
    "lora": Rule(at_768=5e-4, power=1.0, least=2e-4, most=3e-3, decay=0.0),
    "lora of a narrow body": Rule(at_768=2.4e-3, power=0.5, least=4e-3, most=1e-2, decay=0.0),
}
"""By what is trained: all weights, or adapters. A narrow body of our own was pre-trained for minutes, with large rates,
and its adapters have more to learn. Published for width 768: 2e-5 to 5e-5 (BERT, arXiv 1810.04805), adapters 4e-4 to
5e-4 (RoBERTa, 2106.09685); for width 12,288 adapters 2e-4 (GPT-3, 2106.09685)."""


def follow_body(recipe: Recipe, origins: Mapping[str, str], *, imported: bool, own: str) -> tuple[Recipe, str | None]:
    """The recipe with the values that suit its body, and a line that names them; None if no value changes.

    Args:
        origins: those of `Resolved`. What a flag, `--set` or a file gives stays; where all weights are trained, a given
            rate keeps the whole optimizer, and so does noam, whose factor is no share of a peak.
        imported: whether the body was pre-trained by another library.
        own: start of the labels of the values that the body's recipe gives.
    """
    adapted, width = recipe.lora is not None, recipe.model.d_model
    is_narrow = not imported and width <= NARROW
    rule = RULES["full" if not adapted else "lora of a narrow body" if is_narrow else "lora"]
    values = {
        "kind": "adamw",
        "lr": rule.rate(width),
        "adam_lr": None,
        "betas": (0.9, 0.999),
        "weight_decay": rule.decay,
        "clip_grad_norm": 1.0,
    }
    given = {key for key in values if not origins[f"optimizer.{key}"].startswith((DEFAULT.label, "preset ", own))}
    keeps = recipe.schedule.kind == "noam" or (is_narrow and not adapted)
    lines = []
    if not keeps and not given & RATES - ({"lr"} if adapted else set()):
        changed = {key: value for key, value in values.items() if key not in given}
        recipe = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update=changed)})
        if "lr" not in given:
            what = "adapters of a body" if adapted else "a body"
            rate = f"peak rate {recipe.optimizer.lr:g} (by its width; --lr changes it)"
            lines.append(f"{what} of width {width}: AdamW, {rate}")
    if recipe.lora is not None and is_narrow and _suits_embeddings(recipe, origins, own):
        recipe = recipe.model_copy(update={"lora": recipe.lora.model_copy(update={"train": EMBEDDINGS})})
        lines.append("the embeddings are trained too (--set lora.train=[] freezes them)")
    return recipe, "; ".join(lines) or None


def _suits_embeddings(recipe: Recipe, origins: Mapping[str, str], own: str) -> bool:
    """Whether to train the embeddings too: texts with labels (measured), and no adapters chosen by the user."""
    chosen = (origins[f"lora.{key}"] for key in ("targets", "train"))
    is_default = all(origin.startswith((DEFAULT.label, "preset ", own)) for origin in chosen)
    labels = recipe.objectives[0].objective.head.label_kind
    return is_default and labels is not None and recipe.model.patches is None
