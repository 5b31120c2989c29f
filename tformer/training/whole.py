"""The trained models in one piece, for validation and checkpoints, where their weights are spread over processes."""

from __future__ import annotations

import copy

import torch

from tformer.optim.shards import local
from tformer.training.assemble import Models
from tformer.training.parallel import Parallel


class WholeModels:
    """Spreads models over the processes, if this kind of parallelism does, and keeps a copy in one piece in process 0.

    All processes must call every method.

    Args:
        trained: the models with their first weights; afterwards a process may have some rows of each weight only.

    Attributes:
        models: in one piece, with the weights of the last `gather`: the trained models themselves where nothing is
            spread. In the other processes their numbers are not to be read.
        shards: of the trained models; None: nothing is spread.
    """

    def __init__(self, trained: Models, parallel: Parallel) -> None:
        self._trained = self.models = trained
        if parallel.spreads_weights and parallel.rank == 0:
            self.models = copy.deepcopy(trained)
        self.shards = parallel.shard(trained)

    @torch.no_grad()
    def gather(self, ending: str = "") -> None:
        """Bring the weights and buffers whose names end so up to date."""
        if self.shards is None:
            return
        targets = dict(self.models.trained_parameters())
        for name, parameter in self._trained.trained_parameters():
            if name.endswith(ending):
                complete = self.shards.complete(local(parameter), parameter.shape)
                if self.models is not self._trained:
                    targets[name].copy_(complete)
        kept = self.models.state_dict()
        for name, buffer in self._trained.named_buffers() if self.models is not self._trained else ():
            if name in kept and name.endswith(ending):
                kept[name].copy_(buffer)
