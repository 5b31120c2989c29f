"""A new optimizer takes one row, beside its functions."""

from __future__ import annotations

from pathlib import Path

from tests.completeness.overlay import overlay

OPTIMIZERS = "OPTIMIZERS: dict[str, OptimizerKind] = {\n"
SGD = """\
def _sgd(groups: list[dict[str, Any]], settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, momentum=settings.momentum)


def _sgd_state(parameter: nn.Parameter, settings: Settings) -> dict[str, Tensor]:
    return {"momentum_buffer": torch.zeros_like(parameter)}


"""

SCRIPT = """
train = ["train", "--config", "{recipe}", "--data", "{text}", "--json", "--set", "model.decoder.dropout=0.1"]
chosen = ["--set", "optimizer.kind=sgd", "--lr", "0.05"]
succeed(*train, *chosen, "--max-steps", "8", "--out", "run")
succeed("train", "--resume", "--out", "run", "--max-steps", "12")
evaluated = json.loads(succeed("evaluate", "run", "--json"))
inspected = json.loads(succeed("inspect", "run", "--json"))
succeed(*train, *chosen, "--dry-run", "--devices", "2", "--parallel", "fsdp")
unknown = command(*train, "--out", "other", "--set", "optimizer.kind=none-such")[0]
report({"loss": evaluated["loss"], "memory": inspected["memory"]["optimizer_bytes"], "unknown": unknown})
"""


def test_a_new_optimizer_takes_one_row(tmp_path: Path, text_file: Path, tiny_recipe: Path) -> None:
    changed = overlay(
        tmp_path,
        files={},
        rows={
            "tformer/optim/optimizers.py": [
                (OPTIMIZERS, f'{SGD}{OPTIMIZERS}    "sgd": OptimizerKind(_sgd, _sgd_state, moments=1),\n')
            ],
        },
    )
    found = changed.run(SCRIPT.replace("{recipe}", str(tiny_recipe)).replace("{text}", str(text_file)), cwd=tmp_path)
    assert 0 < found["loss"] < 6 and found["memory"] > 0 and found["unknown"] == 2
