"""Checkpoints of a training: saved by all its processes in parallel and in the background, and resumed from.

Every tensor has one process that writes it, whole (`checkpoint/parts.py`). Where the weights are spread, its rows go
from all processes to that one; otherwise all have it. `torch.distributed.checkpoint` is not used: its writer is not
atomic, its files hold pieces of tensors, aliases raise, and scalars are lost.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn

from tformer.checkpoint.background import Saver
from tformer.checkpoint.parts import Companions, Name, divide
from tformer.checkpoint.read import Checkpoint
from tformer.checkpoint.run import RunDirectory
from tformer.checkpoint.save import CheckpointContents, checkpoint_bytes, save_checkpoint
from tformer.model import Transformer
from tformer.optim.shards import TensorShard
from tformer.recipe import recipe_to_yaml
from tformer.support.errors import InputError
from tformer.training.loop import Score, Trainer
from tformer.training.training import Training
from tformer.workers.worker import Worker


class Checkpoints:
    """Saves and restores the parts of a training. All processes make the same calls of `save` and `restore`.

    Attributes:
        recipe_yaml: is saved with the weights.
        saver: writes in the background.
        seconds: for which training has stood still.
    """

    def __init__(self, training: Training, trainer: Trainer, worker: Worker) -> None:
        self.seconds = 0.0
        self._training, self._trainer, self._shards, self._worker = training, trainer, trainer.shards, worker
        self.recipe_yaml = recipe_to_yaml(training.recipe)
        background = training.recipe.training.save_in_background
        self.saver = Saver(in_background=worker.world_size > 1 if background is None else background)
        self._count = 0

    def bytes_needed(self) -> int:
        """Size in bytes of the weights and the optimizer's state on disk."""
        optimizer = {name: piece.outline() for name, piece in self._trainer.optimizer.pieces().items()}
        main = self._trainer.models.main
        own = {name: each for name, each in main.named_parameters() if name not in main.base_names}
        return checkpoint_bytes(own, optimizer)

    def save(self, run: RunDirectory, score: Score | None) -> None:
        """Save a checkpoint, or begin to, after the previous one is on disk.

        Raises:
            StorageError: of this save, or of the previous one.
        """
        began = time.perf_counter()
        self.saver.finish()
        self._worker.share(lambda: None)  # the others wait for the leader without a time limit
        self._count += 1
        pieces = self._pieces()
        division = divide(
            {key: piece.outline() for key, piece in pieces.items()},
            processes=self._worker.world_size,
            owners={key: piece.owner for key, piece in pieces.items() if piece.owner is not None},
        )
        moved = {} if self._shards is None else self._shards.collect(pieces, division.writers)
        here = {key: pieces[key].tensor for key in division.own(self._worker.rank) if key not in moved}
        own = {**moved, **self.saver.hold(here)}
        together = Companions(self._worker, self._count, division, self.saver.gave_up.is_set)
        main, state = self._trainer.models.main, self._trainer.state
        if self._worker.leads:
            tokenizer, target = self._training.data.tokenizer, self._training.data.target_tokenizer
            roles: dict[str, dict[str, Tensor]] = {"weights": {}}
            for (role, name), tensor in own.items():
                roles.setdefault(role, {})[name] = tensor
            contents = CheckpointContents(
                **roles,
                tied={alias: owner for alias, owner in main.tied_names().items() if owner not in main.base_names},
                recipe_yaml=self.recipe_yaml,
                tokenizer_json=None if tokenizer is None else tokenizer.to_json(),
                trainer=state.to_json(),
                score=None if score is None else score[0],
                loss=None if score is None else score[1],
                tokenizer_sha256=None if tokenizer is None else tokenizer.sha256,
                target_tokenizer_json=None if target is None else target.to_json(),
                target_tokenizer_sha256=None if target is None else target.sha256,
            )
            keep, others = self._training.recipe.training.keep_last, together if self._worker.world_size > 1 else None
            self.saver.save(partial(save_checkpoint, run, state.step, contents, keep_last=keep, together=others))
        elif own:
            self.saver.save(partial(together.write_part, run.checkpoints_path, own))
        self.seconds += time.perf_counter() - began

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load optimizer, schedule, loss scale and averages. Where weights are spread, a process reads only its rows.

        Raises:
            InputError: they do not fit, or are damaged.
        """
        trainer = self._trainer
        checkpoint.require_optimizer()
        if self._shards is None:
            trainer.optimizer.load_state_by_name(checkpoint.optimizer())
        else:
            trainer.optimizer.load_rows(checkpoint.specs("optimizer"), partial(self._rows, checkpoint, "optimizer"))
        trainer.schedule.load_state(trainer.state.schedule)
        trainer.scaler.load_state(trainer.state.scaler)
        if trainer.ema is None or checkpoint.recipe.training.ema_decay is None:
            return  # an average that the run did not keep so far begins with the weights as they are
        if not checkpoint.has("ema"):
            raise InputError(
                f"{checkpoint.path} has no averaged weights to resume from: its recipe sets training.ema_decay",
                hint="start a new run from its weights with --init-from",
            )
        if self._shards is None:
            averages = checkpoint.ema() or {}
            trainer.ema.load_state({name: each for name, each in averages.items() if name not in checkpoint.tied})
        else:
            rows = {name: self._shards.rows(spec.shape[0]) for name, spec in checkpoint.specs("ema").items()}
            trainer.ema.load_state(self._rows(checkpoint, "ema", rows))

    def _rows(self, checkpoint: Checkpoint, role: str, wanted: Mapping[str, slice]) -> dict[str, Tensor]:
        return checkpoint.rows(role, wanted, rank=self._worker.rank, processes=self._worker.world_size)

    def _pieces(self) -> dict[Name, TensorShard]:
        """This process's part of every tensor of a checkpoint, in the same order in all processes."""
        models, ema = self._trainer.models, self._trainer.ema
        found = self._weights("weights", models.main)
        found |= {("optimizer", name): piece for name, piece in self._trainer.optimizer.pieces().items()}
        if ema is not None:
            parameters = dict(models.main.named_parameters())
            found |= {("ema", name): self._piece(parameters[name], rows) for name, rows in ema.state().items()}
        return found if models.generator is None else found | self._weights("generator", models.generator)

    def _weights(self, role: str, model: Transformer) -> dict[Name, TensorShard]:
        """Parameters and buffers outside a frozen base, tied ones once. Buffers are equal in all processes."""
        state, left_out = model.state_dict(), model.tied_names().keys() | model.base_names
        own = [(name, parameter) for name, parameter in model.named_parameters() if name not in model.base_names]
        found = {
            (role, name): TensorShard(tensor, tensor.shape) for name, tensor in state.items() if name not in left_out
        }
        return found | {(role, name): self._piece(parameter) for name, parameter in own}

    def _piece(self, parameter: nn.Parameter, tensor: Tensor | None = None) -> TensorShard:
        """This process's part of a parameter, or of a tensor of its shape."""
        if self._shards is not None:
            return self._shards.piece(parameter, tensor)
        whole = parameter if tensor is None else tensor
        return TensorShard(whole.detach(), whole.shape)
