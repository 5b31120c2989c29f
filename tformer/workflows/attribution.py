"""The work of `tformer attribute`: which answers of a text or image are explained, their baseline, and the scores."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from tformer.decoding.inference import inference
from tformer.inside.answers import CLASSIFIERS, answer_id, answer_text
from tformer.inside.attribution import Answer, AttributionReport, attribute, subject_of
from tformer.inside.lens import OWN
from tformer.inside.options import AttributeOptions
from tformer.inside.patching import logits_of
from tformer.loading import Loaded
from tformer.support.errors import InputError, require_finite
from tformer.viz.attention.reading import Reading
from tformer.viz.attention.weights import Chosen, compute, kinds_of, rollout
from tformer.viz.lens.report import places_of, read_options
from tformer.workers.work import Work
from tformer.workflows.patching import head_of

MOST_ANSWERS = 128


def attribute_inputs(loaded: Loaded, options: AttributeOptions, work: Work) -> AttributionReport:
    """What mattered for the chosen answers of the model to `options.text` or `options.image`.

    Raises InputError for a model without an answer at one place, tokens, labels, positions or a baseline that it does
    not have, and a text without a token that may change.
    """
    head = head_of(loaded)
    loaded, reading = read_options(loaded, options, head)
    metric = "difference" if options.against is not None else options.metric or "logit"
    if head == "regression" and options.against is None and metric != "logit":
        raise InputError(f"--metric {metric}: {loaded.path} answers with one number", hint="--metric logit")
    device = next(loaded.model.parameters()).device
    inputs = {name: value.to(device) for name, value in reading.inputs.items()}
    answers = _answers(loaded, reading, options, head, inputs)
    baseline, stays, base_inputs = _baseline(loaded, reading, options, inputs)
    several = getattr(loaded.model.heads[head], "label_kind", None) == "labels"
    subject = subject_of(loaded.model, inputs, answers, metric, several=several, stays=stays, baseline=base_inputs)
    methods = options.chosen_methods
    with work.part("attributing", unit="inputs") as part:
        found, values, base_values, steps = attribute(
            subject, methods, steps=options.steps, rule=options.rule, work=part
        )
    if "rollout" in methods:
        found["rollout"] = _rollouts(loaded, reading, answers, head)
    return AttributionReport(
        tokens={name: side.tokens for name, side in reading.sides.items()},
        positions=tuple(each.at for each in answers),
        targets=tuple(answer_text(loaded, head, each.id) for each in answers),
        against=options.against,
        metric=metric,
        baseline=baseline,
        steps=steps,
        rule=options.rule,
        values=values,
        baseline_values=base_values,
        scores={method: _by_side(reading, answers, found[method]) for method in methods},
        texts=reading.texts,
        notes=reading.notes,
        pixels=reading.pixels,
        grid=reading.grid,
    )


def _answers(
    loaded: Loaded, reading: Reading, options: AttributeOptions, head: str, inputs: dict[str, Tensor]
) -> list[Answer]:
    """The answers to explain: by default those that were generated or translated, else the next one."""
    places, targets = places_of(loaded, reading, options, head)
    if head == "lm" and options.positions is None:
        side = reading.sides["decoder"]
        if "encoder" in reading.sides:
            first, end = max(len(list(takewhile(bool, side.special))) - 1, 0), len(side)
        else:
            first, end = len(side) - 1, len(side)
            if side.written_from is not None and side.written_from < end:
                first, end = side.written_from - 1, end - 1
        places, targets = places[first:end], targets[first:end]
    if len(places) > MOST_ANSWERS:
        hint = f"--positions {places[0]}-{places[MOST_ANSWERS - 1]}"
        raise InputError(f"{len(places)} answers to explain, expected at most {MOST_ANSWERS}", hint=hint)
    against = None if options.against is None else answer_id(loaded, head, options.against, option="--against")
    tokens = None if head in CLASSIFIERS else loaded.target_tokenizer.vocab_size  # rows may be more
    found = []
    with inference(loaded.model):
        output = loaded.model(**inputs)
        for place, target in zip(places, targets, strict=True):
            at = None if head in CLASSIFIERS else place
            logits_C = logits_of(output, at)[0, :tokens]
            require_finite(logits_C, "logits")
            found.append(Answer(at, int(logits_C.argmax()) if target == OWN else target, against))
    if all(each.id == against for each in found):
        raise InputError(f"--against {options.against}: it is the answer itself, whose difference is 0")
    return found


def _baseline(
    loaded: Loaded, reading: Reading, options: AttributeOptions, inputs: dict[str, Tensor]
) -> tuple[str, dict[str, list[bool]], dict[str, Tensor] | None]:
    """(name of the baseline; of each side whether its tokens stay; the inputs of the baseline, None: zeros)."""
    stays = {name: list(side.special) for name, side in reading.sides.items()}
    filled: dict[str, dict[str, Tensor]] = {"mask": {}, "pad": {}}
    is_image = loaded.recipe.model.patches is not None
    for name in () if is_image else stays:
        is_target = name == "decoder" and loaded.model.is_encoder_decoder
        tokenizer = loaded.target_tokenizer if is_target else loaded.text_tokenizer
        key = "decoder_input_ids" if is_target else "input_ids"
        pairs = zip(stays[name], inputs[key][0].tolist(), strict=True)
        # An unknown word is a word of the text.
        stays[name] = [(mark or tokenizer.is_special(id)) and id != tokenizer.special.unk for mark, id in pairs]
        for role, found in filled.items():
            if (token := getattr(tokenizer.special, role)) is not None:
                found[key] = torch.full_like(inputs[key], token)
    known = [*(role for role, found in filled.items() if len(found) == len(stays)), "zero"]
    chosen = options.baseline or known[0]
    if chosen not in known:
        what = "an image" if is_image else "the vocabulary"
        raise InputError(f"--baseline {chosen}: {what} has no such token", hint=f"--baseline {' or '.join(known)}")
    if all(all(marks) for marks in stays.values()):
        raise InputError("only special tokens were read, which stay: there is nothing to attribute to")
    return chosen, stays, inputs | filled[chosen] if chosen != "zero" else None


def _rollouts(loaded: Loaded, reading: Reading, answers: Sequence[Answer], head: str) -> np.ndarray:
    """fp64 [N, P]: the row of attention rollout that each answer is read from; of a mean or maximum the mean row."""
    kinds = kinds_of(loaded)
    attentions = compute(loaded, reading, kinds, Chosen())
    shown = [kind for kind in ("cross", "decoder", "encoder") if kind in kinds][: len(reading.sides)]
    rows_TP = np.concatenate([rollout(kind, attentions) for kind in shown], axis=1).astype(np.float64)
    pooled = {"cls": rows_TP[0], "eos": rows_TP[-1]}.get(
        str(getattr(loaded.model.heads[head], "pooling", None)), rows_TP.mean(axis=0)
    )
    return np.stack([pooled if each.at is None else rows_TP[each.at] for each in answers])


def _by_side(reading: Reading, answers: Sequence[Answer], scores_NP: np.ndarray) -> dict[str, np.ndarray]:
    """The scores of each side's tokens; NaN for tokens of the decoder after the answer's place."""
    found, start = {}, 0
    for name, side in reading.sides.items():
        own = scores_NP[:, start : start + len(side)].copy()
        start += len(side)
        for row, each in zip(own, answers, strict=True):
            if name == "decoder" and each.at is not None:
                row[each.at + 1 :] = np.nan
        found[name] = own
    return found
