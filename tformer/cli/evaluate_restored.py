"""`tformer evaluate` for encoder-decoders that restore damaged texts (T5, BART): their own loss, damage that stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tformer.cli.evaluate_request import Request, describe
from tformer.cli.evaluate_text import read_corpora, require_finite
from tformer.cli.process import StopFlag
from tformer.cli.report import progress_reporter

if TYPE_CHECKING:
    from tformer.loading import Loaded


def evaluate_restored(loaded: Loaded, request: Request, flag: StopFlag) -> dict[str, Any]:
    """Loss, perplexity and accuracy on the tokens of the targets, of windows damaged as in a validation."""
    from tformer.evaluation.masked import masked_samples
    from tformer.evaluation.predict import evaluate_objective
    from tformer.objectives import build_objective
    from tformer.training.text_material import validation_batch
    from tformer.training.tokenizers import decoder_context

    recipe, tokenizer = loaded.recipe, loaded.text_tokenizer
    corpora = read_corpora(loaded, request, flag)
    objective = build_objective(recipe.objectives, decoder_context(recipe, tokenizer))
    room = getattr(objective, "room", None)
    name = ", ".join(name for name, _ in corpora)
    with progress_reporter(f"evaluating {name}") as progress:
        figures = evaluate_objective(
            loaded.model,
            objective,
            masked_samples(recipe, [corpus for _, corpus in corpora], tokenizer, room=room),
            # As many as in a validation during training, so that the damage is the same.
            batch_size=request.batch_size or validation_batch(recipe.seq_len),
            seed=recipe.seed,
            should_stop=flag.should_stop,
            progress=progress,
        )
    if flag.should_stop():
        raise flag.interrupted("interrupted before the whole text was read")
    require_finite(figures["loss"])
    return {**describe(loaded), "data": name, **figures}
