"""What a `Trainer` reports while it trains, and in which order."""

from __future__ import annotations

from typing import Any

from tests.training.small_steps import Stepper, host_batch, small_recipe
from tformer.training.loop import Events, Score


class Recorded(Events):
    """The events, in order. interrupted_at: the step at which a validation is interrupted."""

    def __init__(self, interrupted_at: int | None = None) -> None:
        self.seen: list[Any] = []
        self._interrupted_at = interrupted_at

    def stepped(self, seconds: float) -> None:
        self.seen.append("step")

    def log(self, record: dict[str, Any]) -> None:
        self.seen.append((record["split"], record["step"]))

    def validate(self, step: int) -> tuple[dict[str, Any], str] | None:
        return None if step == self._interrupted_at else ({"loss": 1.0}, f"sample {step}")

    def sample(self, step: int, text: str) -> None:
        self.seen.append(text)

    def save(self, score: Score | None) -> None:
        self.seen.append(("saved", score is not None))


def stepper() -> Stepper:
    recipe = small_recipe("gpt/tiny", dropout=False)
    steps = {"max_steps": 4, "eval_every": 2, "save_every": 4, "log_every": 2}
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update=steps)})
    stepper = Stepper(recipe)
    stepper.batches.batches = [host_batch(recipe, stepper.objective)]
    return stepper


def test_steps_are_logged_then_validated_then_sampled_then_saved() -> None:
    events = Recorded()
    stepper().trainer.run(events)
    assert events.seen == [
        *("step", "step", ("train", 2), ("valid", 2), "sample 2", ("saved", True)),  # the best so far
        *("step", "step", ("train", 4), ("valid", 4), "sample 4", ("saved", True)),
    ]


def test_an_interrupted_validation_is_saved_as_not_done_and_comes_first_when_the_training_goes_on() -> None:
    trainer = stepper().trainer
    events = Recorded(interrupted_at=2)
    trainer.run(events)
    assert events.seen == ["step", "step", ("train", 2), ("saved", False)]
    assert not trainer.state.validated
    again = Recorded()
    trainer.run(again, stop_at_step=3)
    assert again.seen[:3] == [("valid", 2), "sample 2", ("saved", True)]
    assert trainer.state.step == 3
