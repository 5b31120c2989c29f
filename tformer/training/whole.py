"""Whole tensors of models whose weights are spread over processes, for checkpoints. All processes call these."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tformer.model import Transformer
from tformer.optim.ema import Ema
from tformer.optim.shards import Shards, local


def whole_state(model: Transformer, shards: Shards | None) -> dict[str, Tensor]:
    """The tensors of `model.state_dict()`; of spread weights in process 0 only."""
    state: dict[str, Tensor] = model.state_dict()
    if shards is None:
        return state
    parameters = dict(model.named_parameters())
    whole = shards.whole({name: local(each) for name, each in parameters.items()}, parameters.items())
    if not whole:
        return {}
    tied = {alias: whole[owner] for alias, owner in model.tied_names().items()}
    return state | whole | tied


def whole_averages(ema: Ema | None, model: Transformer, shards: Shards | None) -> dict[str, Tensor] | None:
    """The averages of the weights by name; of spread ones in process 0 only."""
    if ema is None or shards is None:
        return None if ema is None else ema.state()
    return shards.whole(ema.state(), model.named_parameters())


def own_averages(averages: Mapping[str, Tensor], shards: Shards | None) -> Mapping[str, Tensor]:
    """What this process keeps of whole averages."""
    return averages if shards is None else shards.own_rows(averages)
