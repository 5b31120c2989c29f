"""The commands by name, and a Typer app of those that a command line needs.

Each command's module brings dozens of options, which typer takes apart one by one. So only the module of the command
that is called gets imported; the others stand in the list of `tformer --help` with their first sentence, written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import typer


@dataclass(frozen=True)
class Command:
    """`summary`: the first sentence of its help. A group has commands of its own: its module's `app`."""

    module: str  # in tformer.cli; the function has the same name
    summary: str
    is_group: bool = False


COMMANDS = {
    "train-tokenizer": Command("train_tokenizer", "Train a tokenizer on your own text and report what it does to it."),
    "train": Command(
        "train", "Train a Transformer, from scratch, from another run's weights, or on from where a run stopped."
    ),
    "generate": Command("generate", "Continue or translate a text, or each line of a file, with a trained model."),
    "classify": Command(
        "classify", "Label texts, pairs of texts or images with a trained model, one line of output for each, in order."
    ),
    "evaluate": Command("evaluate", "How good a model is, on the run's validation data or on --data."),
    "sweep": Command("sweep", "Train every variant of a recipe, seed after seed, and compare them in one table."),
    "average": Command("average", "Average the weights of checkpoints of one model: often better than each of them."),
    "prune": Command("prune", "Leave out layers or attention heads, and measure what that costs."),
    "inspect": Command(
        "inspect",
        "Show a model's modules, parameters, operations, memory and cache; follow its tensors; draw it; check its "
        "files.",
    ),
    "import": Command("import_", "Make a checkpoint of a Hugging Face folder, exactly or not at all."),
    "export": Command(
        "export",
        "Write a run so that `transformers` loads it with `from_pretrained`: weights, config, tokenizer, labels.",
    ),
    "viz-pe": Command(
        "viz_pe",
        "Show positional encodings: by default a page with every kind, its sizes under sliders, that needs no network.",
    ),
    "plot": Command(
        "plot", "Plot what runs logged: loss, every validation metric, learning rate, throughput, gradient norm."
    ),
    "viz-attention": Command(
        "viz_attention",
        "Show which token looks at which: every layer and head, for any model that is trained here or imported.",
    ),
    "bench": Command("bench", "Measure speed and memory on this machine.", is_group=True),
    "config": Command("config", "Show, check and list recipes: what defines a run.", is_group=True),
    "runs": Command("runs", "List, show and compare runs: what `tformer train` left behind.", is_group=True),
}


def add_commands(app: typer.Typer, words: Sequence[str]) -> None:
    """Register every command, and import the one that `words`, a command line without the program's name, calls."""
    called = next((word for word in words if not word.startswith("-")), None)
    for name, command in COMMANDS.items():
        if name != called:
            app.command(name, help=command.summary)(_never_called)
            continue
        module = import_module(f"tformer.cli.{command.module}")
        if command.is_group:
            app.add_typer(module.app, name=name)
        else:
            app.command(name, epilog=module.EPILOG)(getattr(module, command.module))


def _never_called() -> None:
    """Stands for a command that is listed only."""
