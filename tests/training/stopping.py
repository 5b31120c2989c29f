"""Trainings in this process that are stopped as by a signal."""

from __future__ import annotations

from rich.console import Console

from tformer.support.errors import Interrupted
from tformer.training.options import TrainOptions
from tformer.training.session import run_training
from tformer.workers.work import Work


class Polls:
    """Says stop at the n-th question, as a signal that arrives there would. ended: whether the training did."""

    def __init__(self, stop_at: int | None) -> None:
        self.stop_at, self.count, self.ended = stop_at, 0, False

    def __call__(self) -> bool:
        self.count += 1
        return self.stop_at is not None and self.count >= self.stop_at


def train(options: TrainOptions, *, stop_at: int | None = None) -> Polls:
    polls = Polls(stop_at)
    try:
        run_training(options, console=Console(quiet=True, stderr=True), work=Work(should_stop=polls), began=0.0)
        polls.ended = True
    except Interrupted:
        assert stop_at is not None
    return polls
