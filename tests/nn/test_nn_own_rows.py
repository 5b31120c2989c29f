"""Models drawn by several processes, each of which keeps some rows: the numbers of one process, and little memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from tests.training.small_steps import PRESETS
from tests.training.worlds import recipe_of
from tformer.nn.own_rows import OwnRows
from tformer.optim.shards import rows_of
from tformer.recipe.recipe import Recipe
from tformer.training.assemble import TrainedModels, make_models

CPU, FP32 = torch.device("cpu"), torch.float32
VARIANTS = {
    "projections drawn apart": ("gpt/small", {"model": {"init": {"kind": "xavier"}}}),
    "projections that start at zero": ("gpt/small", {"model": {"init": {"kind": "scaled", "zero_out": True}}}),
    "learned layerdrop": ("gpt/small", {"model": {"decoder": {"layerdrop": {"rate": 0.4, "learned": True}}}}),
    "untied": ("gpt/small", {"model": {"tie": {"output": False}}}),
    "convolutions": ("vit/tiny", {"model": {"patches": {"stem": "convolutions"}}}),
    "shifted": ("vit/tiny", {"model": {"patches": {"stem": "shifted"}}}),
    "n-grams": ("gpt/small", {"model": {"embedding": {"ngram": 2, "ngram_rows": 50}}}),
    "shaw": ("gpt/small", {"model": {"decoder": {"positions": {"kind": "shaw"}}}}),
}
RECIPES = {preset: (preset, {}) for preset in PRESETS} | VARIANTS


def made_by(recipe: Recipe, rank: int, size: int) -> tuple[TrainedModels, dict[str, torch.Tensor]]:
    """The models as process `rank` of `size` makes them, and its rows."""
    rows = OwnRows(partial(rows_of, rank=rank, size=size))
    models = make_models(recipe, CPU, dtype=FP32, rows=rows)
    return models, rows.take(models.named_parameters())


@pytest.mark.parametrize("name", list(RECIPES))
def test_the_rows_of_all_processes_are_the_weights_of_one_to_the_bit(name: str) -> None:
    recipe = recipe_of(*RECIPES[name])
    one = make_models(recipe, CPU, dtype=FP32)
    draw = torch.rand(3)
    parts = []
    for rank in range(3):
        models, rows = made_by(recipe, rank, 3)
        assert torch.equal(torch.rand(3), draw), "the generator has moved on otherwise"
        assert all(parameter.is_meta for parameter in models.parameters())
        assert models.main.tied_names() == one.main.tied_names()
        assert all(torch.equal(a, b) for a, b in zip(models.buffers(), one.buffers(), strict=True))
        parts.append(rows)
    for parameter, whole in one.named_parameters():
        assert torch.equal(torch.cat([part[parameter] for part in parts]), whole), parameter


def test_a_process_holds_its_rows_and_one_whole_layer_while_it_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, held = recipe_of("gpt/small"), []
    whole = OwnRows.whole

    class Watched(OwnRows):
        def whole(self, module: nn.Module):  # type: ignore[no-untyped-def]
            opened = whole(self, module)

            class Around:
                def __enter__(self) -> None:
                    opened.__enter__()

                def __exit__(_, *error: object) -> None:
                    own = sum(each.numel() for each in module.parameters(recurse=False))
                    held.append((own, own + sum(rows.numel() for rows in self._kept.values())))
                    opened.__exit__(None, None, None)

            return Around()

    rows = Watched(partial(rows_of, rank=0, size=4))
    models = make_models(recipe, CPU, dtype=FP32, rows=rows)
    share = sum(part.numel() for part in rows.take(models.named_parameters()).values())
    total, largest = sum(each.numel() for each in models.parameters()), max(own for own, _ in held)
    assert share < 0.26 * total and max(kept for _, kept in held) <= share + largest
