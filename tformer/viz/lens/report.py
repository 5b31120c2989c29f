"""The lens of one text or image with all that outputs need: answers after each layer, parts of logits, words, notes.

decoder             every position; the target is the token that comes next, at the last place the model's answer
masked language     every [MASK]; the target is the model's answer
classifier          one answer; the target is the model's
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from tformer.data.sources.text import open_sources
from tformer.decoding.fill_mask import SPACE_BEFORE_WORD, SPELLINGS
from tformer.decoding.prompts import task_prefix
from tformer.inside import tuned
from tformer.inside.answers import CLASSIFIERS, answer_id, answer_text, label_names
from tformer.inside.lens import OWN, Lens, read_lens
from tformer.inside.logits import Contributions, attribute_logits
from tformer.inside.options import LENS_HEADS, AttributeOptions, LensOptions, ReadOptions
from tformer.loading import Loaded, require_kind
from tformer.support.errors import InputError
from tformer.support.options import parse_numbers
from tformer.viz.attention.reading import Inputs, Reading, read
from tformer.viz.attention.scene import weights_hash
from tformer.workers.work import QUIET, Work

NO_PARTS = "an encoder's layers answer through the decoder, which no sum divides into parts"


@dataclass(frozen=True)
class LensReport:
    """What `tformer lens` shows, and what `Run.lens` returns. Shapes as in `Lens`.

    Attributes:
        lens: the logit lens, or the tuned one that was asked for.
        logit_lens: the logit lens.
        tokens: that were read at the shown positions [N].
        positions: numbers of these positions [N].
        words: texts of the ids of tokens, or names of labels.
        parts: what each part of the model adds to the logits of the targets; None where no sum divides them.
        without_parts: why there are none.
        against: the token whose logit was subtracted; None: the logit itself is divided.
        tuned_kl: nats of each row of the logit lens and of the tuned one on held-out text [2, R - 1].
        pools: there is one answer, of a classifier. every: a terminal shows all positions, else the last.
        stack: whose layers are shown.
        model: name, step and hash.
    """

    lens: Lens
    logit_lens: Lens
    tokens: tuple[str, ...]
    positions: tuple[int, ...]
    words: dict[int, str]
    parts: Contributions | None
    without_parts: str
    against: str | None
    tuned_kl: np.ndarray | None
    pools: bool
    every: bool
    stack: str
    model: dict[str, str | int]
    texts: dict[str, str]
    notes: tuple[str, ...]
    command: str = ""

    @property
    def targets(self) -> list[str]:
        """The words whose probability and rank follow [N]."""
        return [self.words[token] for token in self.lens.targets.tolist()]

    @property
    def top(self) -> np.ndarray:
        """The most probable words after each layer [R, N, K]."""
        return np.vectorize(self.words.__getitem__, otypes=[object])(self.lens.top_ids)


def make_report(loaded: Loaded, options: LensOptions, *, work: Work = QUIET, command: str = "") -> LensReport:
    """Read the input, run the model, and divide the logits into parts; with `--tuned` first train the tuned lens.

    Raises InputError for a model or an input that has no lens.
    """
    require_kind(loaded.path, loaded.recipe, LENS_HEADS)
    model, head = loaded.model, next(name for name in LENS_HEADS if name in loaded.model.heads)
    own = "encoder" if model.decoder is None else "decoder"
    side = options.stack or own
    if side != own and not model.is_encoder_decoder:
        raise InputError(f"--stack {side}: {loaded.path} has only its {own}")
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
    if side == own:
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
        model={"name": str(loaded.path), "step": loaded.step, "sha256": weights_hash(loaded)},
        texts=reading.texts,
        notes=(*reading.notes, *tuned_notes),
        command=command,
    )


def read_options(loaded: Loaded, options: ReadOptions, head: str) -> tuple[Loaded, Reading]:
    """(the model, whose tokenizer may read special tokens, what it reads)."""
    if head == "masked_lm" or options.special_tokens:
        loaded = replace(loaded, tokenizer=loaded.text_tokenizer.reading_special())
    text, notes = _text_of(loaded, options, head)
    given = Inputs(text, options.text2, options.target, options.image, options.max_tokens, options.max_new_tokens)
    reading = read(loaded, given)
    return loaded, replace(reading, notes=(*notes, *reading.notes))


def _text_of(loaded: Loaded, options: ReadOptions, head: str) -> tuple[str | None, tuple[str, ...]]:
    """(the text to read, notes): a source behind its task's prefix, masks in the tokenizer's spelling."""
    text, tokenizer = options.text, loaded.tokenizer
    if text is None or tokenizer is None:
        return text, ()
    if loaded.model.is_encoder_decoder:
        prefix, note = task_prefix(loaded.recipe, options.prefix)
        return prefix + text, () if note is None else (note,)
    if head == "masked_lm" and (mask := tokenizer.special.mask) is not None:
        name = tokenizer.token(mask)
        space = " ?" if tokenizer.kind in SPACE_BEFORE_WORD else ""  # the mask stands for it
        text = re.sub(f"{space}(?:{'|'.join(map(re.escape, {*SPELLINGS, name}))})", lambda _: name, text)
    return text, ()


def places_of(
    loaded: Loaded, reading: Reading, options: LensOptions | AttributeOptions, head: str
) -> tuple[list[int], list[int]]:
    """(the chosen or all positions, the target of each)."""
    chosen, target = parse_numbers(options.positions, "--positions"), OWN
    if options.target_token is not None:
        target = answer_id(loaded, head, options.target_token, option="--target-token")
    if head in CLASSIFIERS:
        if chosen is not None:
            raise InputError(f"--positions: {loaded.path} is a classifier, which answers once")
        return [0], [target]
    ids = reading.inputs["decoder_input_ids" if loaded.model.is_encoder_decoder else "input_ids"][0].tolist()
    places, known = list(range(len(ids))), f"0 to {len(ids) - 1}"
    if head == "masked_lm":
        mask = loaded.text_tokenizer.special.mask
        places = [place for place in places if ids[place] == mask]
        known = ", ".join(map(str, places))
        if not places:
            spelled = SPELLINGS[0] if mask is None else loaded.text_tokenizer.token(mask)
            raise InputError(
                f"the text has no {spelled}: a masked language model answers there",
                hint=f'for example --text "The {spelled} sat."',
            )
    if wrong := [place for place in chosen or () if place not in places]:
        raise InputError(f"--positions: found {wrong[0]}, expected {known}")
    places = places if chosen is None else list(chosen)
    following = [*ids[1:], OWN] if target == OWN and head == "lm" else [target] * len(ids)
    return places, [following[place] for place in places]


def _words(loaded: Loaded, ids: Sequence[int], head: str) -> dict[int, str]:
    """The texts of tokens, or the names of all labels."""
    if head == "classifier":
        return dict(enumerate(label_names(loaded)))
    return {id: answer_text(loaded, head, id) for id in ids}


def _tuned(
    loaded: Loaded, options: LensOptions, head: str, work: Work
) -> tuple[tuned.TunedLens | None, tuple[str, ...]]:
    """(the tuned lens that was asked for, notes); `--tuned` trains and saves it."""
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
