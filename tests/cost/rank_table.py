"""Table of bytes of one rank, formula beside a fake process group: `python -m tests.cost.rank_table`, two minutes."""

from __future__ import annotations

from tests.cost.fake_ranks import measure
from tformer.build import build_model
from tformer.cost.memory import MemoryEstimate
from tformer.cost.parallel import Layout, Shards, layout_of, rank_memory, step_traffic
from tformer.optim.optimizers import OPTIMIZERS
from tformer.recipe.load import load_recipe

PRESETS = ("gpt/xl", "llama/8b")
LAYOUTS = [
    layout_of(kind, ranks) for ranks in (8, 64, 256) for kind in ("ddp", "hsdp", "fsdp") if (ranks, kind) != (8, "hsdp")
] + [layout_of("fsdp", 64, weight_bytes=2)]
ADAMW = OPTIMIZERS["adamw"]


def row(preset: str, layout: Layout) -> list[str]:
    """State, peak of weights and gradients, and bytes sent in one micro-batch: formula, and measured."""
    arch, name = preset.split("/")
    section = load_recipe(arch=arch, preset=name).recipe.model
    model = build_model(section, device="meta")
    count = model.num_parameters()
    shards = Shards.of([model], layout)
    whole = MemoryEstimate(4 * count, 4 * count, 4 * ADAMW.moments * count, activations=0)
    memory = rank_memory(whole, shards, ADAMW, ema=False)
    state = memory.weights + memory.gradients + memory.optimizer
    traffic = step_traffic(shards, ADAMW, micro_batches=1)
    peak = memory.total - memory.optimizer - memory.copies
    figures = [(state, 0), (peak, 0), (traffic.sent, 0)]
    if layout.shards > 1:
        found = measure(section, layout)
        sent = sum(
            each.sent_bytes * found.tensors[name] / each.tensor_bytes for name, each in traffic.collectives.items()
        )
        measured = (found.weights + found.gradients + found.optimizer, found.peak, sent)
        figures = [(formula, number) for (formula, _), number in zip(figures, measured, strict=True)]
    cells = [f"{formula / 1e9:.2f} / " + (f"{number / 1e9:.2f}" if number else "-") for formula, number in figures]
    return [preset, str(layout.ranks), layout.kind + (" in bf16" if layout.weight_bytes == 2 else ""), *cells]


if __name__ == "__main__":
    for preset in PRESETS:
        for layout in LAYOUTS:
            print("|", " | ".join(row(preset, layout)), "|", flush=True)
