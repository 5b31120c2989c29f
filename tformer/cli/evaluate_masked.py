"""`tformer evaluate` for masked language models and ELECTRA: their own losses, under masks that stay the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tformer.cli.evaluate_request import Request, describe
from tformer.cli.evaluate_text import read_corpora, require_finite
from tformer.cli.process import StopFlag
from tformer.cli.report import console, emit, progress_reporter
from tformer.errors import InputError

if TYPE_CHECKING:
    from tformer.evaluation.predict import Samples
    from tformer.loading import Loaded
    from tformer.objectives.base import Objective

MAX_TOKENS = 10_000  # of --pseudo-perplexity, unless --max-tokens says otherwise: each is a sequence of its own


def evaluate_masked(loaded: Loaded, request: Request, flag: StopFlag) -> dict[str, Any]:
    """Loss and accuracy on hidden tokens (replaced ones, next sentences), and the pseudo-perplexity if asked for."""
    from tformer.evaluation.predict import evaluate_objective

    kinds = {objective.kind for objective in loaded.recipe.objectives}
    if request.pseudo_perplexity and "masked_lm" not in kinds:
        raise InputError(f"--pseudo-perplexity: {loaded.path} has no head that predicts masked tokens")
    if "replaced_token" in kinds and loaded.recipe.generator is None:
        raise InputError(
            f"{loaded.path} is a discriminator without its generator: nothing replaces the tokens that it would find",
            hint="its body can be fine-tuned: tformer train --init-from ... --objective classification --data FILE",
        )
    read = read_sentences if "next_sentence" in kinds else read_windows
    samples, name = read(loaded, request, flag)
    with progress_reporter(f"evaluating {name}") as progress:
        figures = evaluate_objective(
            loaded.model,
            masked_objective(loaded),
            samples,
            batch_size=request.batch_size or masked_batch(loaded),
            seed=loaded.recipe.seed,
            should_stop=flag.should_stop,
            progress=progress,
        )
    _stop_here(flag)
    require_finite(figures["loss"])
    result = {**describe(loaded), "data": name, **figures}
    if request.pseudo_perplexity:
        result |= _pseudo_perplexity(loaded, samples, request, flag)
    return result


def _pseudo_perplexity(loaded: Loaded, samples: Samples, request: Request, flag: StopFlag) -> dict[str, Any]:
    from tformer.evaluation.lm import pseudo_perplexity
    from tformer.evaluation.masked import single_sequences

    most = request.max_tokens or MAX_TOKENS
    with progress_reporter("masking every token alone") as progress:
        figures = pseudo_perplexity(
            loaded.model,
            single_sequences(samples, most=most),
            loaded.text_tokenizer.special,
            max_tokens=most,
            should_stop=flag.should_stop,
            progress=progress,
        )
    _stop_here(flag)
    return {
        "pseudo_perplexity": figures["pseudo_perplexity"],
        "pseudo_loss": figures["loss"],
        "pseudo_tokens": figures["tokens"],
    }


def masked_batch(loaded: Loaded) -> int:
    """As many sequences as in a validation during training, so that the masks are the same."""
    from tformer.training.sentence_material import VALIDATION_EXAMPLES
    from tformer.training.text_material import VALIDATION_TOKENS

    recipe = loaded.recipe
    if any(objective.kind == "next_sentence" for objective in recipe.objectives):
        return VALIDATION_EXAMPLES
    return max(1, min(VALIDATION_EXAMPLES, VALIDATION_TOKENS // recipe.seq_len))


def _stop_here(flag: StopFlag) -> None:
    if flag.should_stop():
        raise flag.interrupted("interrupted before the whole text was read")


def masked_objective(loaded: Loaded) -> Objective:
    """The run's objective, with the generator that replaces tokens where it has one."""
    from tformer.objectives import build_objective
    from tformer.training.tokenizers import text_context

    context = text_context(loaded.recipe, loaded.text_tokenizer, generator=_generator(loaded))
    return build_objective(loaded.recipe.objectives, context)


def _generator(loaded: Loaded) -> Any:
    """ELECTRA's second model, which replaces the tokens; None for the others."""
    from tformer.build import build_model
    from tformer.interop.importing import open_checkpoint
    from tformer.loading import load_generator
    from tformer.nn.init import tie_embeddings

    if loaded.recipe.generator is None:
        return None
    device = next(loaded.model.parameters()).device
    generator = build_model(loaded.recipe.generator, vocab_size=loaded.text_tokenizer.vocab_size, device=device)
    load_generator(generator, open_checkpoint(loaded.path))
    tie_embeddings(generator, loaded.model)  # as in training: averaged ones, where the run averages
    generator.compute_dtype = loaded.model.compute_dtype
    return generator.eval()


def read_windows(loaded: Loaded, request: Request, flag: StopFlag) -> tuple[Samples, str]:
    """The text in windows, and what it is called."""
    from tformer.evaluation.masked import masked_samples

    corpora = read_corpora(loaded, request, flag)
    samples = masked_samples(loaded.recipe, [corpus for _, corpus in corpora], loaded.text_tokenizer)
    return samples, ", ".join(name for name, _ in corpora)


def read_sentences(loaded: Loaded, request: Request, flag: StopFlag) -> tuple[Samples, str]:
    """The text in pairs of sentences, and what it is called."""
    from tformer.data.batching.sentences import (
        SentencePairs,
        prepare_sentences,
    )
    from tformer.data.sources.text import open_sources

    recipe = loaded.recipe
    sources = open_sources(request.specs(loaded), columns=request.columns(loaded), errors=request.errors(loaded))
    for source in sources:
        for note in source.notes:
            console.print(note, markup=False)
    name = ", ".join(source.name for source in sources)
    with progress_reporter(f"tokenising {name}") as progress:
        sentences = prepare_sentences(sources, loaded.text_tokenizer, progress=progress, should_stop=flag.should_stop)
    if request.held_out(loaded):
        _, sentences = sentences.split(fraction=recipe.data.valid_fraction)
        name = f"the last {recipe.data.valid_fraction:.0%} of {name}"
    pairs = SentencePairs(
        sentences,
        loaded.text_tokenizer,
        seq_len=recipe.seq_len,
        seed=recipe.seed,
        token_types=recipe.model.embedding.token_types > 1,
    )
    return pairs, name


def show_masked(result: dict[str, Any]) -> None:
    """One figure a line."""
    for name, value in result.items():
        if name not in ("run", "step", "data"):
            emit(f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}")
