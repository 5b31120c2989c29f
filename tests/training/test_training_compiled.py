"""A compiled model trains as the eager one does: its first loss and gradients, and ten steps with the optimizer."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.quick import first_is_quick
from tests.training.small_steps import Stepper, host_batch, small_models, small_recipe
from tformer.data.batching.batch import Batch
from tformer.nn.lora import adapt, projections

PRESETS = ("gpt/tiny", "gpt/small", "llama/tiny", "bert/tiny", "vit/tiny", "transformer/tiny")
SLOW = ("gpt/small", "transformer/tiny")  # quick: gpt/tiny, and batches of many shapes
STEPS = 10


def steppers(preset: str, precision: str, backend: str) -> tuple[Stepper, Stepper]:
    torch._dynamo.reset()
    recipe = small_recipe(preset, dropout=False)
    compiled = Stepper(
        recipe, precision=precision, wrap=lambda model: torch.compile(model, backend=backend, fullgraph=True)
    )
    return Stepper(recipe, precision=precision), compiled


def batches(stepper: Stepper) -> list[Batch]:
    """All of one shape, so that one graph serves."""
    return [host_batch(stepper.recipe, stepper.objective, seed=seed) for seed in range(2)]


def losses(stepper: Stepper) -> list[float]:
    given = batches(stepper)
    return [float(stepper.step(given[step % 2])) for step in range(STEPS)]


@first_is_quick(
    ("preset", "precision"),
    [
        *(pytest.param(preset, "fp32", marks=pytest.mark.slow if preset in SLOW else ()) for preset in PRESETS),
        *(pytest.param(preset, "bf16", marks=() if preset == "gpt/tiny" else pytest.mark.slow) for preset in PRESETS),
    ],
)
def test_compiled_gradients_and_ten_steps_are_those_of_eager(preset: str, precision: str) -> None:
    compare(preset, precision, "aot_eager")


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs a C++ compiler")
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_generated_code_trains_as_eager_does(precision: str) -> None:
    compare("gpt/tiny", precision, "inductor")


@pytest.mark.slow
def test_batches_of_many_shapes_share_a_graph() -> None:
    """Its quick twin is `test_compiled_gradients_and_ten_steps_are_those_of_eager`."""
    torch._dynamo.reset()
    recipe = small_recipe("transformer/tiny", dropout=False)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    eager = Stepper(recipe)
    compiled = Stepper(recipe, wrap=lambda model: torch.compile(model, backend=backend, dynamic=True, fullgraph=True))
    for cut in range(12):
        whole = host_batch(recipe, eager.objective, seed=cut)
        batch = Batch(**{name: tensor[:, : 20 - cut] for name, tensor in whole.tensors().items()})
        assert float(compiled.step(batch)) == pytest.approx(float(eager.step(batch)), rel=1e-4)
    assert len(graphs) <= 2
    torch._dynamo.reset()


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs a C++ compiler")
@pytest.mark.slow
def test_generated_code_of_adapters_takes_batches_of_many_widths() -> None:
    torch._dynamo.reset()
    recipe = small_recipe("gpt/small", dropout=False)
    models = small_models(recipe, "fp32")
    names = [part.name for _, parts in projections(models.main).values() for part in parts]
    adapt(models.main, targets=names, rank=2, scale=1.0)
    eager = Stepper(recipe, models=models)
    compiled = Stepper(recipe, models=models, wrap=lambda model: torch.compile(model, dynamic=True, fullgraph=True))
    whole = host_batch(recipe, eager.objective)
    for width in (20, 24, 17):
        batch = Batch(**{name: tensor[:, :width] for name, tensor in whole.tensors().items()})
        expected, found = eager.gradients(batch), compiled.gradients(batch)
        assert expected.keys() == found.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()


def compare(preset: str, precision: str, backend: str) -> None:
    eager, compiled = steppers(preset, precision, backend)
    batch = batches(eager)[0]
    expected, found = eager.gradients(batch), compiled.gradients(batch)
    assert expected.keys() == found.keys()
    # bf16 keeps 8 bits of each number, and the two round at different places.
    share = 1e-5 if precision == "fp32" else 0.05
    joint = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= share * (gradient.norm() + 0.1 * joint), name
    assert losses(compiled) == pytest.approx(losses(eager), rel=1e-4 if precision == "fp32" else 0.01)
    torch._dynamo.reset()
