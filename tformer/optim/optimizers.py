"""Optimizers whose parameters and state have names, and the choice of rate and decay for each parameter.

- adamw: arXiv 1711.05101, decoupled weight decay, torch's fused kernel where there is one.
- adam: arXiv 1412.6980; a weight decay above 0 is torch.optim.Adam's coupled L2 term, which is added to the gradient.
- muon: hidden matrices by Muon (`optim/muon.py`) at `lr`, everything else by AdamW at `adam_lr`.
- normuon: muon with rows of similar size (arXiv 2510.05491); `betas[1]` is the decay of their second moments.
- adafactor: arXiv 1804.04235, factored second moments, rates relative to each matrix's size (`optim/adafactor.py`).

Weight decay applies to parameters of two or more dimensions, embeddings included: nanoGPT's rule. Biases, gains and
other vectors have none, unless a group says so.

Layer decay (arXiv 2003.10555, 2106.08254) multiplies the rate by decay^(num_layers + 1 - l), where l is 0 for the
embeddings and i + 1 for block i; parameters after the blocks (l None) keep the full rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from tformer.optim import adafactor, muon
from tformer.optim.muon import Muon
from tformer.optim.shards import Shards, TensorShard
from tformer.support.errors import InputError, did_you_mean

FUSED_DEVICES = ("cpu", "cuda")
"""Device types with a fused Adam in torch."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Settings of an optimizer: the recipe's `optimizer` section, and facts about the model and the device.

    Attributes:
        groups: the last one that matches a name applies; a frozen one clears `requires_grad`. An explicit weight decay
            applies to all matching parameters, vectors included.
        layer_of: name -> 0 for embeddings, i + 1 for block i, None above the blocks; needed with `layer_decay`.
        hidden_matrices: whether Muon updates this parameter; needed by muon and normuon.
        splits: row counts of the parts of a fused matrix, by name.
        muon_dtype: dtype of the Newton-Schulz iteration.
        shards: of parameters that are DTensors.
        row_splits: `splits` by parameter; `build_optimizer` fills it in.
    """

    kind: OptimizerName
    lr: float
    adam_lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1.0e-8
    weight_decay: float = 0.0
    momentum: float = 0.95
    groups: Sequence[ParameterOverrides] = ()
    layer_decay: float | None = None
    layer_of: Callable[[str], int | None] = lambda name: None
    num_layers: int = 0
    hidden_matrices: Callable[[str, nn.Parameter], bool] = lambda name, parameter: False
    splits: Callable[[str], list[int] | None] = lambda name: None
    muon_dtype: torch.dtype = torch.bfloat16
    device: torch.device | str
    shards: Shards | None = None
    row_splits: Mapping[Tensor, Sequence[int]] = field(default_factory=dict)

    @property
    def fused(self) -> bool:
        return torch.device(self.device).type in FUSED_DEVICES


@dataclass(frozen=True)
class OptimizerKind:
    """A kind of optimizer.

    Attributes:
        make: the optimizer of some parameter groups.
        fresh_state: the state that it would create for a parameter at its first step.
        moments: numbers of state for each number of a matrix; 0 where it has only some for each row and column.
        hidden_only: it takes hidden matrices only, at `lr`; all other parameters use AdamW at `adam_lr`.
        reads_whole: the update of a number depends on others of its tensor, so one process must have the whole tensor.
    """

    make: Callable[[list[dict[str, Any]], OptimizerSettings], torch.optim.Optimizer]
    fresh_state: Callable[[nn.Parameter, OptimizerSettings], dict[str, Tensor]]
    moments: int
    hidden_only: bool = False
    reads_whole: bool = False


def _adam_state(parameter: nn.Parameter, settings: OptimizerSettings) -> dict[str, Tensor]:
    device = parameter.device if settings.fused else torch.device("cpu")  # a fused kernel counts steps on the device
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def _muon(groups: list[dict[str, Any]], settings: OptimizerSettings, row_decay: float | None = None) -> Muon:
    return Muon(
        groups,
        momentum=settings.momentum,
        row_decay=row_decay,
        compute_dtype=settings.muon_dtype,
        row_splits=settings.row_splits,
    )


OPTIMIZERS: dict[str, OptimizerKind] = {
    "adamw": OptimizerKind(
        lambda groups, each: torch.optim.AdamW(groups, betas=each.betas, eps=each.eps, fused=each.fused),
        _adam_state,
        moments=2,
    ),
    "adam": OptimizerKind(
        lambda groups, each: torch.optim.Adam(groups, betas=each.betas, eps=each.eps, fused=each.fused),
        _adam_state,
        moments=2,
    ),
    "muon": OptimizerKind(
        _muon,
        lambda parameter, _: muon.fresh_state(parameter, with_rows=False),
        moments=1,
        hidden_only=True,
        reads_whole=True,
    ),
    "normuon": OptimizerKind(
        lambda groups, each: _muon(groups, each, row_decay=each.betas[1]),
        lambda parameter, _: muon.fresh_state(parameter, with_rows=True),
        moments=1,
        hidden_only=True,
        reads_whole=True,
    ),
    "adafactor": OptimizerKind(
        lambda groups, each: adafactor.Adafactor(groups, row_splits=each.row_splits),
        lambda parameter, each: adafactor.fresh_state(parameter, each.row_splits.get(parameter)),
        moments=0,
        reads_whole=True,
    ),
}


def algorithm_of(kind: str, *, is_hidden: bool) -> str:
    """The kind that updates a parameter; is_hidden: it is one of the matrices that Muon takes."""
    return "adamw" if OPTIMIZERS[kind].hidden_only and not is_hidden else kind


if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]


class ParameterOverrides(Protocol):
    """An entry of the recipe's `optimizer.groups`: overrides for parameters whose names match the glob `match`."""

    match: str
    lr_scale: float
    weight_decay: float | None
    frozen: bool


class Stored(Protocol):
    """A saved tensor, or its shape and dtype as a file states them."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...


class NamedOptimizer:
    """One or more torch optimizers used as one, with state by parameter name and rates relative to a base rate.

    All state exists from the start (zeros), so that a checkpoint never depends on which gradients have occurred.

    Args:
        optimizers: each with the parameters that it updates.
        names: of all trained parameters.
        lr: the base rate.
        shards: of parameters whose rows are spread over processes; None: each process has all.
        elsewhere: state of parameters that another process updates, on the meta device.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        names: Mapping[Tensor, str],
        *,
        lr: float,
        shards: Shards | None = None,
        elsewhere: Mapping[Tensor, dict[str, Tensor]] | None = None,
    ) -> None:
        self.optimizers = list(optimizers)
        self.names: dict[Tensor, str] = dict(names)
        self.shards, self._elsewhere = shards, dict(elsewhere or {})
        self.lr, self._scale = lr, 1.0
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["base_lr"] = group["lr"]

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        if self.shards is not None:
            self.shards.take_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
        if self.shards is not None:
            self.shards.return_weights()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self.shards is not None:
            self.shards.zero_grad()

    def gradients(self) -> list[Tensor]:
        """The existing gradients, in the order of the names; with shards, this process's rows of them."""
        if self.shards is not None:
            return self.shards.gradients()
        return [parameter.grad for parameter in self.names if parameter.grad is not None]

    def clip(self, max_norm: float | None) -> Tensor:
        """Scale all gradients so that their joint L2 norm is at most `max_norm`; returns the norm before that.

        None: no scaling. The norm stays on the device.
        """
        gradients = self.gradients()
        if not gradients:
            return torch.zeros(())
        norm = torch.nn.utils.get_total_norm(gradients) if self.shards is None else self.shards.norm(gradients)
        if max_norm is not None:
            # The coefficient of torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1.
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def set_lr_scale(self, scale: float) -> None:
        """Set every rate to its base rate times `scale`, the value of the schedule."""
        self._scale = scale
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * scale

    def learning_rate(self) -> float:
        """The current rate before group and layer scales, as logged."""
        return self.lr * self._scale

    def state_by_name(self) -> dict[str, Tensor]:
        """`<parameter name>.<slot>` -> tensor (contiguous, not copied), step counters included."""
        return {key: tensor.contiguous() for key, (_, tensor) in self._slots().items()}

    def pieces(self) -> dict[str, TensorShard]:
        """The parts of the same tensors that this process has, in the same order in all processes."""
        shards = self.shards
        if shards is None:
            return {key: TensorShard(tensor, tensor.shape) for key, tensor in self.state_by_name().items()}
        return {key: shards.state_piece(parameter, tensor) for key, (parameter, tensor) in self._slots().items()}

    @torch.no_grad()
    def load_state_by_name(self, state: Mapping[str, Tensor]) -> None:
        """Copy a saved state in, bit for bit. Raises InputError when names, shapes or dtypes differ."""
        pieces = self.pieces()
        _require_fit(state, pieces)
        for key, (_, tensor) in self._slots().items():
            tensor.copy_(state[key])

    @torch.no_grad()
    def load_rows(self, specs: Mapping[str, Stored], read: Callable[[dict[str, slice]], Mapping[str, Tensor]]) -> None:
        """Copy in this process's parts of a saved state. Raises the errors of `load_state_by_name`.

        specs: of the saved state.
        read: the given rows of the saved tensors.
        """
        pieces = self.pieces()
        _require_fit(specs, pieces)
        assert self.shards is not None
        wanted = {key: self.shards.own_part(each) for key, each in pieces.items() if not each.tensor.is_meta}
        for key, rows in read(wanted).items():
            pieces[key].tensor.copy_(rows)

    def _slots(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The parameter and the tensor of every slot, by key; in the same order in all processes."""
        states = {parameter: state for optimizer in self.optimizers for parameter, state in optimizer.state.items()}
        if self.shards is not None:
            states |= self._elsewhere
            states = {parameter: states[parameter] for parameter in self.names}
        return {
            f"{self.names[parameter]}.{slot}": (parameter, tensor)
            for parameter, state in states.items()
            for slot, tensor in state.items()
        }


def build_optimizer(
    model_parameters: Iterable[tuple[str, nn.Parameter]], settings: OptimizerSettings
) -> NamedOptimizer:
    """The optimizer of a recipe's section over `model_parameters`, which are on the settings' device already.

    Raises InputError when a group matches nothing or nothing is left to train.
    """
    named, shards = dict(model_parameters), settings.shards
    chosen = apply_groups(named, settings.groups)

    buckets: dict[tuple[str, float, float], list[nn.Parameter]] = {}  # by kind, rate and decay
    names: dict[Tensor, str] = {}
    for name, parameter in named.items():
        group = chosen.get(name)
        if not parameter.requires_grad:
            continue
        algorithm = algorithm_of(settings.kind, is_hidden=settings.hidden_matrices(name, parameter))
        base_lr = settings.lr if algorithm == settings.kind or settings.adam_lr is None else settings.adam_lr
        scale = 1.0 if group is None else group.lr_scale
        if settings.layer_decay is not None and (layer := settings.layer_of(name)) is not None:
            scale *= settings.layer_decay ** (settings.num_layers + 1 - layer)
        decay = settings.weight_decay if parameter.ndim >= 2 else 0.0
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        own = parameter if shards is None else shards.own(parameter, whole=OPTIMIZERS[algorithm].reads_whole)
        buckets.setdefault((algorithm, base_lr * scale, decay), []).append(own)
        names[own] = name
    if not names:
        raise InputError("optimizer.groups freezes every parameter: nothing is left to train")

    splits = {parameter: rows for parameter, name in names.items() if (rows := settings.splits(name)) is not None}
    settings = replace(settings, row_splits=splits)
    optimizers: list[torch.optim.Optimizer] = []
    elsewhere: dict[Tensor, dict[str, Tensor]] = {}
    for algorithm, optimizer_kind in OPTIMIZERS.items():
        torch_groups: list[dict[str, Any]] = []
        for (kind, lr, decay), parameters in buckets.items():
            if kind != algorithm:
                continue
            here = [parameter for parameter in parameters if shards is None or not parameter.is_meta]
            elsewhere |= {
                parameter: optimizer_kind.fresh_state(parameter, settings)
                for parameter in set(parameters).difference(here)
            }
            if here:
                torch_groups.append({"params": here, "lr": lr, "weight_decay": decay})
        if torch_groups:
            optimizer = optimizer_kind.make(torch_groups, settings)
            for torch_group in torch_groups:
                for parameter in torch_group["params"]:
                    optimizer.state[parameter] = optimizer_kind.fresh_state(parameter, settings)
            optimizers.append(optimizer)
    return NamedOptimizer(optimizers, names, lr=settings.lr, shards=shards, elsewhere=elsewhere)


def apply_groups(
    named: Mapping[str, nn.Parameter], groups: Sequence[ParameterOverrides]
) -> dict[str, ParameterOverrides]:
    """{name: its group}, the last that matches; parameters of frozen groups no longer require a gradient.

    Raises InputError for a group that matches nothing.
    """
    chosen: dict[str, ParameterOverrides] = {}
    for group in groups:
        matching = [name for name in named if fnmatchcase(name, group.match)]
        if not matching:
            raise InputError(
                f"optimizer.groups: no parameter matches '{group.match}'", hint=did_you_mean(group.match, named)
            )
        chosen |= dict.fromkeys(matching, group)
    for name, group in chosen.items():
        if group.frozen:
            named[name].requires_grad_(False)
    return chosen


def _require_fit(state: Mapping[str, Stored], pieces: Mapping[str, TensorShard]) -> None:
    """Raise InputError unless a saved state has these tensors."""
    if state.keys() != pieces.keys():
        missing, unexpected = sorted(pieces.keys() - state.keys()), sorted(state.keys() - pieces.keys())
        raise InputError(
            f"the saved optimizer state does not fit: {_count(missing)} missing, {_count(unexpected)} unexpected",
            hint="resume with the same model and optimizer, or start a new run from the weights (--init-from)",
        )
    for key, piece in pieces.items():
        found, expected = (
            f"{tuple(shape)} {each.dtype}"
            for shape, each in ((state[key].shape, state[key]), (piece.shape, piece.tensor))
        )
        if found != expected:
            raise InputError(f"the saved optimizer state {key} is {found}, expected {expected}")


def _count(keys: list[str]) -> str:
    return f"{len(keys)} tensors" + (f" ({', '.join(keys[:2])}{', ...' if len(keys) > 2 else ''})" if keys else "")
