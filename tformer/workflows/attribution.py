"""The work of `tformer attribute`: which answers of a text or image are explained, their baseline, and the scores."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from tformer.decoding.inference import inference
from tformer.inside.answers import CLASSIFIERS, answer_id, answer_text
from tformer.inside.attribution import STEPS, AttributionReport, Values, attribute, subject_of
from tformer.inside.lens import OWN
from tformer.inside.options import AttributeOptions
from tformer.inside.patching import BATCH_TOKENS, PatchingExample, logits_of
from tformer.inside.reading import ModelInputs, places_of, read_options
from tformer.loading import Loaded
from tformer.support.errors import InputError, require_finite
from tformer.viz.attention.weights import Chosen, compute, kinds_of, rollout
from tformer.workers.work import Work
from tformer.workflows.patching import head_of

MOST_ANSWERS = 128


def attribute_inputs(
    loaded: Loaded,
    options: AttributeOptions,
    work: Work,
    *,
    reading: ModelInputs | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> AttributionReport:
    """Score the inputs of the chosen answers: of the options' text or image, or of `reading`.

    batch_tokens: of the copies that run together; between them `work` is asked whether to stop.

    Raises InputError for a model without an answer at one place, tokens, labels, positions or a baseline that it does
    not have, and a text without a token that may change.
    """
    head, against = head_of(loaded), options.against
    if reading is None:
        loaded, reading = read_options(loaded, options, head)
    model, methods, sides = loaded.model, options.chosen_methods, reading.sides
    metric = "difference" if against is not None else options.metric or "logit"
    if head == "regression" and against is None and metric != "logit":
        raise InputError(f"--metric {metric}: {loaded.path} answers with one number", hint="--metric logit")
    device = next(model.parameters()).device
    inputs = {name: value.to(device) for name, value in reading.inputs.items()}
    places, targets = _places(loaded, reading, options, head)
    wrong = None if against is None else answer_id(loaded, head, against, option="--against")
    baseline, stays, base_inputs = _baseline(loaded, reading, options, inputs)
    several = getattr(model.heads[head], "label_kind", None) == "labels"
    tokens = None if head in CLASSIFIERS else loaded.target_tokenizer.vocab_size  # rows may be more
    changed = sum(not mark for marks in stays.values() for mark in marks)
    slopes = ("gradient" in methods) + (options.steps or STEPS[0]) * ("integrated" in methods)
    done, total = 0, slopes * len(places) + changed * ("occlusion" in methods)
    # The model's evaluation mode, as for inference, but with gradients.
    with inference(model), torch.inference_mode(False), torch.no_grad():
        questions, output = [], model(**inputs)
        for n, place in enumerate(places):
            logits_C = logits_of(output, place)[0, :tokens]
            require_finite(logits_C, "logits")
            targets[n] = int(logits_C.argmax()) if targets[n] == OWN else targets[n]
            other = targets[n] if wrong is None else wrong
            questions.append(PatchingExample(inputs, inputs, place, targets[n], other, metric, several))
        if all(target == wrong for target in targets):
            raise InputError(f"--against {against}: it is the answer itself, whose difference is 0")

        def measure(values: Values) -> Tensor:
            count = len(next(iter(values.values())))
            copies = {name: each.expand(count, *each.shape[1:]) for name, each in inputs.items()}
            output = model(**copies, replace=values)
            return torch.stack([each.metric_of(logits_of(output, each.at)) for each in questions])

        with work.part("attributing", unit="inputs") as part:

            def went(rows: int) -> None:
                nonlocal done
                done += rows
                part.report(done, max(done, total))
                part.raise_if_stopped("while attributing, nothing written")

            subject = subject_of(model, inputs, stays, base_inputs)
            found, values, base_values, steps = attribute(
                measure, subject, methods, steps=options.steps, went=went, batch_tokens=batch_tokens
            )
    if "rollout" in methods:
        found["rollout"] = _rollouts(loaded, reading, places, head)
    for scores_NP in found.values():
        for row_P, place in zip(scores_NP, places, strict=True):
            if "decoder" in sides and place is not None:  # which reads no later tokens
                row_P[row_P.size - len(sides["decoder"]) + place + 1 :] = np.nan
    ends = np.cumsum([len(side) for side in sides.values()])[:-1]
    return AttributionReport(
        tokens={name: side.tokens for name, side in sides.items()},
        positions=tuple(places),
        targets=tuple(answer_text(loaded, head, target) for target in targets),
        against=against,
        metric=metric,
        baseline=baseline,
        steps=steps,
        values=values,
        baseline_values=base_values,
        scores={name: dict(zip(sides, np.split(found[name], ends, axis=1), strict=True)) for name in methods},
        texts=reading.texts,
        notes=reading.notes,
        pixels=reading.pixels,
        grid=reading.grid,
    )


def _places(
    loaded: Loaded, reading: ModelInputs, options: AttributeOptions, head: str
) -> tuple[Sequence[int | None], list[int]]:
    """(places of the answers, their targets): by default of the generated or translated tokens, else of the next."""
    places, targets = places_of(loaded, reading, options, head)
    if head in CLASSIFIERS:
        return [None], targets
    if head == "lm" and options.positions is None:
        side = reading.sides["decoder"]
        first, end = len(side) - 1, len(side)
        if "encoder" in reading.sides:
            first = max(len(list(takewhile(bool, side.special))) - 1, 0)
        elif side.written_from is not None and side.written_from < end:
            first, end = side.written_from - 1, end - 1
        places, targets = places[first:end], targets[first:end]
    if len(places) > MOST_ANSWERS:
        hint = f"--positions {places[0]}-{places[MOST_ANSWERS - 1]}"
        raise InputError(f"{len(places)} answers to explain, expected at most {MOST_ANSWERS}", hint=hint)
    return places, targets


def _baseline(
    loaded: Loaded, reading: ModelInputs, options: AttributeOptions, inputs: dict[str, Tensor]
) -> tuple[str, dict[str, list[bool]], dict[str, Tensor] | None]:
    """(name of the baseline; of each side whether its tokens stay; the inputs of the baseline, None: zeros)."""
    stays = {side: list(each.special) for side, each in reading.sides.items()}
    readers = {} if "pixel_values" in inputs else dict.fromkeys(stays, (loaded.text_tokenizer, "input_ids"))
    if loaded.model.is_encoder_decoder:
        readers["decoder"] = loaded.target_tokenizer, "decoder_input_ids"
    ids = {
        role: {name: getattr(tokenizer.special, role) for tokenizer, name in readers.values()}
        for role in ("mask", "pad")
    }
    known = [*(role for role, own in ids.items() if own and None not in own.values()), "zero"]
    chosen = options.baseline or known[0]
    if chosen not in known:
        what = "the vocabulary" if readers else "an image"
        raise InputError(f"--baseline {chosen}: {what} has no such token", hint=f"--baseline {' or '.join(known)}")
    for side, (tokenizer, name) in readers.items():
        pairs = zip(stays[side], inputs[name][0].tolist(), strict=True)
        # An unknown word is a word of the text.
        stays[side] = [(mark or tokenizer.is_special(id)) and id != tokenizer.special.unk for mark, id in pairs]
    if all(all(marks) for marks in stays.values()):
        raise InputError("only special tokens were read, which stay: there is nothing to attribute to")
    filled = {name: torch.full_like(inputs[name], id) for name, id in ids.get(chosen, {}).items()}
    return chosen, stays, inputs | filled if filled else None


def _rollouts(loaded: Loaded, reading: ModelInputs, places: Sequence[int | None], head: str) -> np.ndarray:
    """The row of attention rollout behind each answer, fp64 [N, P]; the mean row for pooling by mean or maximum."""
    kinds = kinds_of(loaded)
    attentions = compute(loaded, reading, kinds, Chosen())
    shown = [kind for kind in ("cross", "decoder", "encoder") if kind in kinds][: len(reading.sides)]
    rows_TP = np.concatenate([rollout(kind, attentions) for kind in shown], axis=1).astype(np.float64)
    pooled_rows = {"cls": rows_TP[0], "eos": rows_TP[-1]}
    pooled = pooled_rows.get(str(getattr(loaded.model.heads[head], "pooling", None)), rows_TP.mean(axis=0))
    return np.stack([pooled if place is None else rows_TP[place] for place in places])
