"""What a GPU would be given, without one: every family on a device that is no CPU and holds no numbers.

Fake tensors have shapes, dtypes and devices alone. Two devices that meet in one operation, a number that Python reads
(`.item()`, a condition) and a size that depends on numbers (boolean indexing) all raise: on a GPU each of these is
either an error or a wait for the device in every step. Autograd refuses fake CUDA tensors where there is no GPU, and
a PyTorch made for CPUs alone cannot index them either: then they are on `meta`, which goes the ways of every device
that is no CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import optimizer

from tests.quick import first_is_quick
from tests.test_presets_build import VOCABULARY
from tests.training.small_steps import PRESETS, Stepper, context, host_batch, small_models, small_recipe
from tformer.data.batching.batch import Batch
from tformer.objectives import build_objective
from tformer.optim import optimizers

STEPS = 2
EACH_PRECISION = [
    pytest.param(preset, precision, marks=pytest.mark.slow if (number + offset) % 2 else ())
    for number, preset in enumerate(PRESETS)
    for offset, precision in enumerate(("fp32", "bf16"))
]
"""Every preset in both precisions; the quick tests take every preset in one of them, in turn."""

FORWARD = "cuda" if torch.backends.cuda.is_built() else "meta"


def fake(batch: Batch, mode: FakeTensorMode) -> Batch:
    return batch._map(mode.from_tensor)


def make_fake(model: nn.Module, mode: FakeTensorMode, device: str) -> None:
    """Every parameter and buffer as a fake one on `device`; what was tied stays tied."""
    made: dict[int, Tensor] = {}

    def fresh(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            with mode:
                made[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                if isinstance(tensor, nn.Parameter):
                    made[id(tensor)] = nn.Parameter(made[id(tensor)], requires_grad=tensor.requires_grad)
        return made[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: fresh(tensor) for name, tensor in tensors.items() if tensor is not None})


@pytest.fixture
def counted_before(monkeypatch: pytest.MonkeyPatch) -> Callable[[Stepper, Batch], None]:
    """Labels are counted in host memory, which here holds no numbers: let the counts be known."""

    def known(stepper: Stepper, batch: Batch) -> None:
        counts = stepper.objective.label_count(batch)
        monkeypatch.setattr(stepper.objective, "label_count", lambda _: counts)

    return known


@pytest.fixture(autouse=True)
def fused_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer of a GPU on `meta`, which PyTorch counts among the devices without one."""
    supported = ["meta", *optimizer._get_fused_kernels_supported_devices()]
    monkeypatch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: supported)
    monkeypatch.setattr(optimizers, "FUSED_DEVICES", supported)


@first_is_quick(("preset", "precision"), EACH_PRECISION)
def test_a_training_step_neither_mixes_devices_nor_waits(
    preset: str, precision: str, counted_before: Callable[[Stepper, Batch], None]
) -> None:
    recipe = small_recipe(preset, dropout=True)
    batch = host_batch(recipe, build_objective(recipe.objectives, context(recipe))).counted()
    mode, models = FakeTensorMode(), small_models(recipe, precision)
    make_fake(models, mode, "meta")
    with mode:
        stepper = Stepper(recipe, precision=precision, models=models)
    counted_before(stepper, batch)
    with mode:
        for _ in range(STEPS):
            loss = stepper.step(fake(batch, mode), fake(batch, mode))
    assert loss.device.type == "meta" and loss.shape == () and loss.dtype == torch.float32
    for name, parameter in stepper.models.trained_parameters():
        assert parameter.device.type == "meta" and parameter.dtype == torch.float32, name
    slots = stepper.trainer.optimizer.state_by_name()
    assert all(slot.device.type == "meta" for slot in slots.values())


@first_is_quick("preset", PRESETS)
def test_evaluation_and_decoding_stay_on_a_gpu(preset: str) -> None:
    """The loss of a batch without gradients, and of models with a decoder a prompt and one further token."""
    recipe = small_recipe(preset, dropout=True)
    batch = host_batch(recipe, build_objective(recipe.objectives, context(recipe))).counted()
    mode, models = FakeTensorMode(), small_models(recipe, "bf16")
    make_fake(models, mode, FORWARD)
    models.eval()
    with mode, torch.no_grad():
        stepper = Stepper(recipe, precision="bf16", models=models)
        inputs = batch._map(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=FORWARD))
        result = stepper.objective.loss(models.main, inputs)
        assert all(term.sum.device.type == FORWARD for term in result.terms.values())
        if models.main.decoder is None:
            return
        cache = models.main.new_cache(6, 40)
        both = models.main.encoder is not None
        names = ("decoder_input_ids",) if both else ("input_ids",)
        prompt = models.main(**inputs.model_inputs(), cache=cache).logits_at(-1)
        further = {names[0]: prompt.argmax(-1, keepdim=True)}
        logits = models.main(**further, cache=cache).logits_at(-1)
    assert logits.device.type == FORWARD and logits.shape == (6, VOCABULARY)
