"""The work of `tformer patch`: two prompts as inputs with their answers, or the data of an ablation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tformer.decoding.inference import inference
from tformer.inside.answers import CLASSIFIERS, answer_id, answer_text
from tformer.inside.options import ANSWERING_HEADS, MAX_EXAMPLES, PatchOptions, ReadOptions, data_of
from tformer.inside.patching import AblationReport, PatchingExample, PatchReport, ablations, answers, patch
from tformer.inside.reading import ModelInputs, read_options
from tformer.loading import Loaded
from tformer.support.errors import InputError, require_finite
from tformer.tasks.base import require_finite_loss
from tformer.tasks.evaluate import held_out_data
from tformer.workers.work import Work


def patch_prompts(loaded: Loaded, options: PatchOptions, work: Work) -> PatchReport:
    """Patch between the clean and the corrupted prompt or image.

    Raises InputError for a model without an answer at one place, prompts of different numbers of tokens, answers that
    are no token or label, and prompts with the same answer.
    """
    head = head_of(loaded)
    (loaded, clean), (_, corrupted) = (_reading(loaded, each, head) for each in options.prompts)
    work.note_all(clean, corrupted)
    for side, one in clean.sides.items():
        if len(one) != len(corrupted.sides[side]):
            raise InputError(
                f"--clean has {len(one)} tokens, --corrupted {len(corrupted.sides[side])}: positions can be patched "
                "between prompts of equal length only",
                hint="tformer tokenize RUN --text TEXT shows the tokens",
            )
    device = next(loaded.model.parameters()).device
    inputs = [{name: value.to(device) for name, value in each.inputs.items()} for each in (clean, corrupted)]
    at = _place_of_answer(loaded, head, *inputs)
    metric = options.metric or ("logit" if head == "regression" else "difference")
    if head == "regression" and metric != "logit":
        raise InputError(f"--metric {metric}: {loaded.path} answers with one number", hint="--metric logit")
    with inference(loaded.model):
        logits = [answers(loaded.model, each, at)[0] for each in inputs]
    for each in logits:
        require_finite(each, "logits")
    tokens = None if head in CLASSIFIERS else loaded.target_tokenizer.vocab_size  # rows may be more
    own = [int(each[:tokens].argmax()) for each in logits]
    answer = own[0] if options.answer is None else answer_id(loaded, head, options.answer, option="--answer")
    wrong = own[1] if options.wrong is None else answer_id(loaded, head, options.wrong, option="--wrong")
    if metric == "difference" and answer == wrong:
        raise InputError(
            f"both answers are '{answer_text(loaded, head, answer)}', whose difference is 0",
            hint="name the answers with --answer and --wrong, or measure --metric probability",
        )
    several = getattr(loaded.model.heads[head], "label_kind", None) == "labels"
    question = PatchingExample(inputs[0], inputs[1], at, answer, wrong, metric, several)
    with work.part("patching", unit="layers") as part:
        maps, first, second = patch(
            loaded.model,
            question,
            options.chosen_parts,
            noising=options.noising,
            only_estimate=options.estimate,
            work=part,
        )
    return PatchReport(
        {side: one.tokens for side, one in clean.sides.items()},
        answer_text(loaded, head, answer),
        answer_text(loaded, head, wrong) if metric == "difference" else None,
        metric,
        options.noising,
        first,
        second,
        maps,
    )


def head_of(loaded: Loaded) -> str:
    """The first head of a model; raises InputError for one that does not answer with a token, labels or a number."""
    head = next(iter(loaded.model.heads), None)
    if head not in ANSWERING_HEADS:
        known = ", ".join(ANSWERING_HEADS)
        raise InputError(f"{loaded.path} has the head {head}, which answers no prompt; expected {known}")
    return head


def _reading(loaded: Loaded, prompt: ReadOptions, head: str) -> tuple[Loaded, ModelInputs]:
    """`read_options` of a prompt; a translator's decoder reads its start token and the given target."""
    if loaded.recipe.model.patches is None and prompt.image is not None:
        raise InputError(f"--clean-image: {loaded.path} reads text, not images", hint="give --clean TEXT")
    if loaded.recipe.model.patches is not None and prompt.image is None:
        raise InputError(f"--clean: {loaded.path} is an image model: it reads no text", hint="give --clean-image FILE")
    if loaded.model.is_encoder_decoder and head == "lm":
        prompt = replace(prompt, target=prompt.target or "")
    elif prompt.prefix is not None:
        raise InputError(f"--prefix: {loaded.path} is no translator, so a prefix is a part of the prompt")
    return read_options(loaded, prompt, head)


def _place_of_answer(loaded: Loaded, head: str, clean: dict[str, Any], corrupted: dict[str, Any]) -> int | None:
    """The position of the answer: the last one, or the [MASK] of both prompts; None: the model answers once."""
    if head == "lm":
        return -1
    if head != "masked_lm":
        return None
    mask = loaded.text_tokenizer.special.mask
    places = [(each["input_ids"][0] == mask).nonzero().flatten().tolist() for each in (clean, corrupted)]
    if len(places[0]) != 1 or places[0] != places[1]:
        raise InputError(
            f"found [MASK] at {places[0]} in --clean and at {places[1]} in --corrupted, expected one in the same place"
        )
    return int(places[0][0])


def ablate(loaded: Loaded, options: PatchOptions, work: Work) -> AblationReport:
    """The loss on the named or the run's own data without each head and layer."""
    assert options.ablate is not None
    held_out = held_out_data(loaded, data_of(options), work, max_examples=options.max_examples or MAX_EXAMPLES)

    def measure(model: Any) -> dict[str, float]:
        metrics = dict(held_out.measure(model, replace(work, report=lambda *_: None)))
        require_finite_loss(metrics["loss"])
        return metrics

    whole = measure(loaded.model)
    with work.part("ablating", unit="parts") as part:
        found = ablations(loaded.model, options.ablate, measure, work=part)
    return AblationReport(options.ablate, held_out.name, whole, found)
