"""Tiny runs with random weights: enough to generate from, to evaluate and to change, without training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from tformer.checkpoint.save import CheckpointContents
    from tformer.model import Transformer
    from tformer.tokenizer import Tokenizer


def letters_tokenizer(letters: str, template: str, **options: Any) -> Tokenizer:
    """A tokenizer of which each of these letters is a token."""
    from tformer.tokenizer import TokenizerOptions, train_tokenizer

    chosen: dict[str, Any] = {"model": "char", "template": template, "min_frequency": 1, **options}
    return train_tokenizer(lambda: iter([letters]), TokenizerOptions(**chosen))


def random_contents(
    recipe: str,
    *,
    letters: str,
    targets: str | None = None,
    template: str | None = None,
    seed: int = 0,
    step: int = 3,
    change: Callable[[Transformer, Tokenizer], Mapping[str, Tensor] | None] = lambda model, tokenizer: None,
    **options: Any,
) -> CheckpointContents:
    """What a checkpoint of this recipe holds.

    Args:
        letters: the vocabulary; targets: that of the target, if it has its own.
        template: of the tokenizers; None: the one for the recipe's stacks.
        change: changes the model with the (target) tokenizer; returns averaged weights, or None.
        options: of the tokenizers.
    """
    import torch

    from tformer.build import build_model
    from tformer.checkpoint.save import CheckpointContents
    from tformer.recipe.load import recipe_from_yaml

    read = recipe_from_yaml(recipe, name="test")
    sections, labels = read.model, len(read.data.labels) or None
    if template is None:
        template = "none" if sections.encoder is None else "bert" if sections.decoder is None else "seq2seq"
    source = letters_tokenizer(letters, template, **options)
    target = None if targets is None else letters_tokenizer(targets, template, **options)
    torch.manual_seed(seed)
    target_size = None if target is None else target.vocab_size
    sizes = {"vocab_size": source.vocab_size, "target_vocab_size": target_size, "num_labels": labels}
    model = build_model(sections, **sizes)
    averages = change(model, target or source)
    return CheckpointContents(
        weights=model.state_dict(),
        recipe_yaml=recipe,
        tokenizer_json=source.to_json(),
        tokenizer_sha256=source.sha256,
        target_tokenizer_json=None if target is None else target.to_json(),
        target_tokenizer_sha256=None if target is None else target.sha256,
        trainer={"step": step},
        ema=averages,
    )


def random_run(runs: Path, recipe: str, *, arch: str = "test", step: int = 3, **options: Any) -> Path:
    """A run in the folder `runs` with its tokenizer and one checkpoint; `options` of `random_contents`."""
    from tformer.checkpoint.run import RunDirectory
    from tformer.checkpoint.save import save_checkpoint

    run = RunDirectory.create(arch=arch, preset="tiny", runs_dir=runs)
    contents = random_contents(recipe, step=step, **options)
    assert contents.tokenizer_json is not None
    run.write_tokenizer(contents.tokenizer_json, contents.target_tokenizer_json)
    save_checkpoint(run, step, contents)
    return Path(run.path)
