"""`bench train`: optimizer steps of the training loop itself, on batches prepared beforehand.

A step is what `tformer train` does: forward and backward of the recipe's objective, clipping, the recipe's optimizer.
"""

from __future__ import annotations

import math
from typing import Any

from tformer.bench.random_material import Cycle, check_objectives, objective_context, random_batches
from tformer.bench.task import OURS, Cost, Task, Work, synchronise
from tformer.build import build_model
from tformer.metrics import BACKWARD_AND_FORWARD
from tformer.nn.hardware import DTYPES
from tformer.objectives import build_objective
from tformer.recipe.recipe import Recipe
from tformer.training import assemble
from tformer.training.estimate import estimate_memory
from tformer.training.flops import attention_flops_per_token, parameters_per_token
from tformer.training.loop import Components, Hooks, Trainer
from tformer.training.parallel import SingleProcess
from tformer.training.precision import LossScaler
from tformer.training.prepare import product_shape
from tformer.training.state import TrainerState

STEPS = {"cpu": 1, "cuda": 10}
"""Steps of a round: a GPU is waited for after each round, which training does not do after each step."""

WARM_UP_STEPS = 3
NEVER = 10**9
BYTES_PER_PARAMETER = 16  # weight, gradient and both of Adam's moments, in fp32, are read once a step


class Training:
    """The recipe's training, as far as it can be without data."""

    name = OURS

    def __init__(self, task: Task, precision: str) -> None:
        self.task, self.precision = task, precision
        self._steps_left = 0

    def prepare(self) -> None:
        task = self.task
        training = task.recipe.training.model_copy(
            update={"max_steps": NEVER, "eval_every": NEVER, "save_every": NEVER, "save_every_minutes": None}
        )
        recipe = task.recipe.model_copy(update={"training": training})
        models = assemble.make_models(recipe, task.device, dtype=DTYPES[self.precision])
        objective = build_objective(recipe.objectives, objective_context(task))
        self._trainer = Trainer(
            Components(
                model=models,
                forward=assemble.compiled(models.main, wanted=task.compile),
                objective=objective,
                batches=Cycle(random_batches(task, objective)),
                optimizer=assemble.make_optimizer(recipe, models, task.device),
                schedule=assemble.make_schedule(recipe),
                scaler=LossScaler(enabled=self.precision == "fp16"),
                parallel=SingleProcess(),
                device=task.device,
            ),
            Hooks(validate=dict, sample=lambda _: "", save=lambda *_: None, should_stop=self._should_stop),
            _Silent(),
            training=training,
            clip_grad_norm=recipe.optimizer.clip_grad_norm,
            seed=recipe.seed,
            state=TrainerState(),
            warmup_steps=recipe.schedule.warmup_steps,
            deadline=math.inf,
        )
        self._train(WARM_UP_STEPS)

    def run(self) -> int:
        before = self._trainer.state.tokens
        self._train(STEPS[self.task.device.type])
        return self._trainer.state.tokens - before

    def _train(self, steps: int) -> None:
        self._steps_left = steps
        self._trainer.run()
        synchronise(self.task.device)

    def _should_stop(self) -> bool:
        """The loop asks before every step."""
        self._steps_left -= 1
        return self._steps_left < 0


class _Silent:
    """Whom the loop tells."""

    def logged(self, record: dict[str, Any]) -> None: ...
    def validated(self, record: dict[str, Any]) -> None: ...
    def sampled(self, step: int, text: str) -> None: ...
    def skipped(self, step: int) -> None: ...


def cost(task: Task, precision: str) -> Cost:
    """6 N + attention a token, as the log line of training counts: of a head only the tokens that have a label. The
    state of training is read once a step."""
    model = build_model(task.recipe.model, num_labels=len(task.recipe.data.labels) or None, device="meta")
    parameters = parameters_per_token(model, task.recipe, length=task.length)
    both = model.encoder is not None and model.decoder is not None
    attention = attention_flops_per_token(task.recipe.model, source_length=task.length, target_length=task.length)
    flops_per_token = BACKWARD_AND_FORWARD * (2.0 * parameters / (2 if both else 1) + attention)
    steps = STEPS[task.device.type]
    return Cost(
        flops=flops_per_token * steps * task.batch_size * task.length * (2 if both else 1),
        bytes_read=float(BYTES_PER_PARAMETER * model.num_parameters() * steps),
        steps=steps,
        examples=steps * task.batch_size,
        memory=expected_memory(task, precision, model.num_parameters()),
    )


def expected_memory(task: Task, precision: str, num_parameters: int) -> dict[str, int]:
    """Weights, gradients, optimizer and activations of our training, in bytes."""
    training = task.recipe.training
    return estimate_memory(
        task.recipe.model,
        num_parameters=num_parameters,
        optimizer=task.recipe.optimizer.kind,
        tokens_per_micro_batch=task.batch_size * task.length,
        dtype=DTYPES[precision],
        activation_checkpointing=training.activation_checkpointing,
        ema=False,
        seq_len=task.length,
        on_cpu=task.device.type == "cpu",
    ).to_json()


def product(task: Task) -> tuple[int, int, int]:
    """The feed-forward product of a whole batch."""
    training = task.recipe.training.model_copy(update={"batch_size": task.batch_size, "batch_tokens": None})
    return product_shape(task.recipe.model_copy(update={"training": training}), task.length)


def length(recipe: Recipe) -> int:
    return recipe.seq_len


TRAIN = Work("train", "optimizer step", Training, (16,), length, cost, product, check=check_objectives)
