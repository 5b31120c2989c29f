"""The lens of one text or image with all that outputs need: answers after each layer, parts of logits, words, notes.

decoder             every position; the target is the token that comes next, at the last place the model's answer
masked language     every [MASK]; the target is the model's answer
classifier          one answer; the target is the model's
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from tformer.data.sources.text import open_sources
from tformer.inside import tuned
from tformer.inside.answers import answer_id, answer_text, label_names
from tformer.inside.lens import LensReport, read_lens
from tformer.inside.logits import attribute_logits
from tformer.inside.options import LENS_HEADS, LensOptions
from tformer.inside.reading import ModelInputs, places_of, read_options
from tformer.loading import Loaded, require_kind, weights_hash
from tformer.support.errors import InputError
from tformer.support.files import require_writable
from tformer.workers.work import QUIET, Work

NO_PARTS = "an encoder's layers answer through the decoder, which no sum divides into parts"


def make_report(
    loaded: Loaded,
    options: LensOptions,
    *,
    work: Work = QUIET,
    command: str = "",
    reading: ModelInputs | None = None,
    with_parts: bool = True,
) -> LensReport:
    """Read the input, run the model, and divide the logits into parts; with `--tuned` first train the tuned lens.

    Args:
        reading: in place of the input that the options name.
        with_parts: divide the logits, which takes gradients.

    Raises InputError for a model or an input that has no lens.
    """
    require_kind(loaded.path, loaded.recipe, LENS_HEADS)
    model, head = loaded.model, next(name for name in LENS_HEADS if name in loaded.model.heads)
    own = "encoder" if model.decoder is None else "decoder"
    side = options.stack or own
    if side != own and not model.is_encoder_decoder:
        raise InputError(f"--stack {side}: {loaded.path} has only its {own}")
    if reading is None:
        loaded, reading = read_options(loaded, options, head)
    places, targets = places_of(loaded, reading, options, head)
    against = None if options.against is None else answer_id(loaded, head, options.against, option="--against")
    maps, tuned_notes = _tuned(loaded, options, head, work)
    device = next(model.parameters()).device
    inputs = {name: value.to(device) for name, value in reading.inputs.items()}
    common: dict[str, Any] = {"side": side, "head": head, "places": places}
    # A classifier has few labels: all are kept, so that outputs can follow each.
    top_k = len(label_names(loaded)) if head == "classifier" else options.top_k
    read_with = partial(read_lens, model, inputs, **common, targets=targets, top_k=top_k)
    logit_lens = read_with()
    lens = logit_lens if maps is None else read_with(translate=maps)
    parts, why = None, NO_PARTS
    if side == own and with_parts:
        others = None if against is None else [against] * len(places)
        try:
            parts = attribute_logits(model, inputs, **common, targets=lens.targets.tolist(), against=others)
        except NotImplementedError as error:
            why = str(error)
    shown = np.concatenate([lens.targets, lens.top_ids.ravel(), logit_lens.top_ids.ravel(), [against or 0]])
    words = _words(loaded, np.unique(shown).tolist(), head)
    return LensReport(
        lens=lens,
        logit_lens=logit_lens,
        tokens=("answer",) if head == "classifier" else tuple(reading.sides[own].tokens[place] for place in places),
        positions=tuple(places),
        words=words,
        parts=parts,
        without_parts="" if parts is not None else why,
        against=None if against is None else words[against],
        tuned_kl=None if maps is None else maps.kl.cpu().numpy(),
        pools=head == "classifier",
        every=head == "masked_lm" or options.positions is not None,
        stack=side,
        model=loaded.identity,
        texts=reading.texts,
        notes=(*reading.notes, *tuned_notes),
        command=command,
    )


def _words(loaded: Loaded, ids: Sequence[int], head: str) -> dict[int, str]:
    """The texts of tokens, or the names of all labels."""
    if head == "classifier":
        return dict(enumerate(label_names(loaded)))
    return {id: answer_text(loaded, head, id) for id in ids}


def _tuned(
    loaded: Loaded, options: LensOptions, head: str, work: Work
) -> tuple[tuned.TunedLens | None, tuple[str, ...]]:
    """(the tuned lens of the options or None, notes); `--tuned` trains and saves it."""
    if options.tuned is None and options.lens != "tuned":
        return None, ()
    if loaded.model.encoder is not None or head != tuned.HEAD:
        flag = "--lens tuned" if options.tuned is None else "--tuned"
        raise InputError(f"{flag}: {loaded.path} is no decoder-only language model, which learns from any text")
    place, sha256 = tuned.file_of(loaded.path), weights_hash(loaded)
    if options.tuned is None:
        if not place.exists():
            raise InputError(f"{loaded.path} has no tuned lens: {place} does not exist", hint="--tuned FILE trains one")
        return tuned.read(place, loaded.model, sha256), ()
    require_writable(place, option="--tuned")
    ids: list[int] = []
    [source] = open_sources([SimpleNamespace(path=options.tuned, weight=None)])
    tokenizer, most = loaded.text_tokenizer, 2 * options.steps * tuned.STEP_TOKENS
    for piece in source.documents():
        ids += tokenizer.encode(piece.text, most=most)
        if piece.ends_document and tokenizer.special.eos is not None:
            ids.append(tokenizer.special.eos)
        if len(ids) >= most:
            break
    length, steps = loaded.recipe.seq_len, options.steps
    maps = tuned.fit(loaded.model, ids[:most], seq_len=length, sha256=sha256, steps=steps, work=work)
    tuned.save(maps, place)
    before, after = maps.kl.mean(dim=1).tolist()
    return maps, (f"saved the tuned lens to {place}: KL {before:.3f} → {after:.3f} nats, the mean of all layers",)
