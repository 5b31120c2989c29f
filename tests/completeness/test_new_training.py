"""A new optimizer and a new consistency of two passes take one row each, beside their functions and classes."""

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

KINDS = "ConsistencyOptions = RDropOptions | SimCutOptions\n"
REVERSED = '''\
class Reversed(Consistency):
    """Two draws of dropout, of which the second learns from the first."""

    weights = (0.0, 1.0)
    learns_both = False


@dataclass(frozen=True)
class ReversedOptions:
    """The second of two draws of dropout should give the predictions of the first."""

    kind: Literal["reversed"] = "reversed"
    alpha: float = 1.0  # weight of the divergence
    cut: float = 0.0  # share of the tokens that the second pass does not see
    objective: ClassVar[type[Consistency]] = Reversed


'''

SCRIPT = """
train = ["train", "--config", "{recipe}", "--data", "{text}", "--json", "--set", "model.decoder.dropout=0.1"]
chosen = ["--set", "optimizer.kind=sgd", "--lr", "0.05", "--set", "training.consistency.kind=reversed"]
succeed(*train, *chosen, "--max-steps", "8", "--out", "run")
succeed("train", "--resume", "--out", "run", "--max-steps", "12")
evaluated = json.loads(succeed("evaluate", "run", "--json"))
inspected = json.loads(succeed("inspect", "run", "--json"))
explained = succeed("config", "explain", "training.consistency")
succeed(*train, *chosen, "--dry-run", "--devices", "2", "--parallel", "fsdp")
unknown = [command(*train, "--out", "other", "--set", text)[0]
           for text in ("optimizer.kind=none-such", "training.consistency.kind=none-such")]
report({"loss": evaluated["loss"], "memory": inspected["memory"]["optimizer_bytes"], "explained": explained,
        "logged": open("run/metrics.jsonl").read(), "unknown": unknown})
"""


def test_a_new_optimizer_and_a_new_consistency_take_one_row_each(
    tmp_path: Path, text_file: Path, tiny_recipe: Path
) -> None:
    changed = overlay(
        tmp_path,
        files={},
        rows={
            "tformer/optim/optimizers.py": [
                (OPTIMIZERS, f'{SGD}{OPTIMIZERS}    "sgd": OptimizerKind(_sgd, _sgd_state, moments=1),\n')
            ],
            "tformer/objectives/consistency.py": [(KINDS, f"{REVERSED}{KINDS[:-1]} | ReversedOptions\n")],
        },
    )
    found = changed.run(SCRIPT.replace("{recipe}", str(tiny_recipe)).replace("{text}", str(text_file)), cwd=tmp_path)
    assert 0 < found["loss"] < 6 and found["memory"] > 0 and "reversed" in found["explained"]
    assert "consistency_loss" in found["logged"] and found["unknown"] == [2, 2]
