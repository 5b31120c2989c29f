"""Model inputs of one text or image: tensors, with the tokens along each axis; and the positions that answer.

    encoder only         the text, or two texts, inside the tokenizer's template; or an image
    decoder only         the text, and optionally its greedy continuation
    encoder-decoder      the source, and the given target or the model's own translation

The decoder reads token t and predicts token t + 1: its rows are named by the token read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tformer.data.encoding import EncodedText, TextReader, encode_prompt, token_text
from tformer.data.sources.image_files import read_image
from tformer.data.sources.images import to_pixels
from tformer.decoding.fill_mask import SPACE_BEFORE_WORD, SPELLINGS
from tformer.decoding.generate import generate
from tformer.decoding.loaded import translator_of
from tformer.decoding.prompts import suppressed_tokens, task_prefix
from tformer.decoding.settings import BeamSettings, GenerationSettings
from tformer.inside.answers import CLASSIFIERS, answer_id
from tformer.inside.lens import OWN
from tformer.inside.options import AttributeOptions, LensOptions, ReadOptions
from tformer.loading import Loaded, reads_prompts
from tformer.nn.patches import PatchEmbedding
from tformer.support.errors import InputError
from tformer.support.options import parse_numbers
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.decoding import word_starts

CONTINUES = "##"


@dataclass(frozen=True)
class TokenSequence:
    """One sequence of tokens.

    Attributes:
        name: "encoder" or "decoder".
        tokens: text of each token, spaces included; of an image "CLS" and "row,column" of each patch.
        special: whether a token comes from a template.
        starts: whether a token begins a word; special ones stand alone.
        text_of: number of the text of each token (1: the second of a pair).
        written_from: index of the first generated token; None: all were given.
    """

    name: str
    tokens: tuple[str, ...]
    special: tuple[bool, ...]
    starts: tuple[bool, ...]
    text_of: tuple[int, ...] = ()
    written_from: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def words(self) -> list[tuple[int, int, str]]:
        """(first token, token after the last, text) of each word; each special token is a separate word."""
        edges = [0]
        for place in range(1, len(self)):
            alone = self.special[place] or self.special[place - 1]
            if alone or self.starts[place]:
                edges.append(place)
        edges.append(len(self))
        return [
            (
                start,
                stop,
                "".join([*self.tokens[start : start + 1], *(token.removeprefix(CONTINUES) for token in rest)]),
            )
            for start, stop in pairwise(edges)
            for rest in [self.tokens[start + 1 : stop]]
        ]


def side_of(
    name: str,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    text_of: Sequence[int] = (),
    special: Sequence[bool] | None = None,
    written_from: int | None = None,
) -> TokenSequence:
    """The tokens of these ids. special: None: the special tokens of the vocabulary."""
    marks = [tokenizer.is_special(token) for token in ids] if special is None else list(special)
    tokens = tuple(token_text(tokenizer, token) for token in ids)
    spelled = [tokenizer.token(token) for token in ids]
    if tokenizer.kind == "char":
        starts = [token.isspace() for token in spelled]  # a space belongs to the word after it
    else:
        starts = word_starts(tokenizer.kind, spelled).tolist()
    return TokenSequence(name, tokens, tuple(marks), tuple(starts), tuple(text_of), written_from)


@dataclass(frozen=True)
class Inputs:
    """The texts or the image given on the command line.

    max_tokens: length to which each text is cut, special tokens included. max_new_tokens: of the generated text;
    None: none after a prompt, and the recipe's limit for a translation.
    """

    text: str | None = None
    text2: str | None = None
    target: str | None = None
    image: Path | None = None
    max_tokens: int | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of a forward pass.

    Attributes:
        inputs: of `Transformer.forward`, one row each.
        sides: "encoder" and "decoder", those that the model has.
        pixels: the resized image before normalization, uint8 [Y, X, 3]; None: text.
        grid: rows and columns of patches.
        notes: messages for the user.
        texts: the given and the generated texts, by name.
    """

    inputs: dict[str, Tensor]
    sides: dict[str, TokenSequence]
    pixels: np.ndarray | None = None
    grid: tuple[int, int] = (0, 0)
    notes: tuple[str, ...] = ()
    texts: dict[str, str] = field(default_factory=dict)


def read(loaded: Loaded, given: Inputs) -> ModelInputs:
    """The inputs as tensors. Raises InputError for inputs of the wrong kind, and for a text that is too long."""
    _check(loaded, given)
    if loaded.recipe.model.patches is not None:
        assert given.image is not None
        return _read_image(loaded, given.image)
    model = loaded.model
    if reads_prompts(loaded.recipe):
        found = _read_prompt(loaded, given)
    elif not model.is_encoder_decoder:
        found = _read_texts(loaded, given)
    elif "lm" in model.heads:
        found = _read_translation(loaded, given)
    else:
        # An encoder-decoder classifier (BART): the decoder reads the text shifted behind its start token.
        found = _read_texts(loaded, given)
        shifted = found.inputs["input_ids"].roll(1, dims=1)
        shifted[:, 0] = loaded.decoder_tokens.start
        side = side_of("decoder", loaded.text_tokenizer, shifted[0].tolist())
        inputs = {**found.inputs, "decoder_input_ids": shifted}
        found = replace(found, inputs=inputs, sides={**found.sides, "decoder": side})
    named = {"text": given.text, "text2": given.text2, "target": given.target}
    texts = {name: text for name, text in named.items() if text is not None}
    return replace(found, texts={**texts, **found.texts})


def _check(loaded: Loaded, given: Inputs) -> None:
    model, path = loaded.model, loaded.path
    if loaded.recipe.model.patches is not None:
        if given.image is None:
            raise InputError(f"{path} is an image model: it reads no text", hint="give --image FILE")
        return
    if given.image is not None:
        raise InputError(f"--image: {path} reads text, not images", hint="give --text TEXT")
    if given.text is None:
        raise InputError("there is no input", hint="give --text TEXT")
    writes = "lm" in model.heads
    if given.target is not None and (model.encoder is None or model.decoder is None or not writes):
        what = "a decoder-only model" if model.encoder is None else "a model that generates no text"
        raise InputError(f"--target: {path} is {what}", hint="give the whole text with --text")
    if given.text2 is not None and (writes or reads_prompts(loaded.recipe)):
        hint = "give the whole text with --text" if model.encoder is None else "give the decoder's text with --target"
        raise InputError(f"--text2: {path} reads one text, not pairs", hint=hint)
    if given.max_new_tokens is not None and not writes:
        raise InputError(f"--max-new-tokens: {path} generates no text", hint="omit it")


# --- one text, a pair, an image --------------------------------------------------------------------------------------


def _read_texts(loaded: Loaded, given: Inputs) -> ModelInputs:
    """One text or two inside their template, for an encoder."""
    tokenizer, recipe = loaded.text_tokenizer, loaded.recipe
    found, notes = _encoded(loaded, given, given.text2)
    name = "decoder" if loaded.model.encoder is None else "encoder"
    inputs = {"input_ids": torch.tensor([found.ids])}
    if recipe.model.embedding.token_types > 1 and (given.text2 is not None or any(found.types)):
        inputs["token_type_ids"] = torch.tensor([found.types])
    parts = () if given.text2 is None else found.parts
    side = side_of(name, tokenizer, found.ids, text_of=parts, special=found.from_template)
    return ModelInputs(inputs, {name: side}, notes=notes)


def _encoded(loaded: Loaded, given: Inputs, text2: str | None = None) -> tuple[EncodedText, tuple[str, ...]]:
    """(the text or pair inside its template, notes); a text that is too long is cut to its beginning."""
    reader, text = TextReader.of_encoder(loaded.text_tokenizer), given.text or ""
    found = reader.encode(text, text2)
    if not found.ids:
        raise InputError("the text has no tokens")
    length = len(found.ids)
    room = _room(loaded, given, length)
    if length <= room:
        return found, ()
    return replace(reader, max_length=room).encode(text, text2, cut=True), (_cut_note(given, length),)


def _read_image(loaded: Loaded, path: Path) -> ModelInputs:
    patches, data, embedding = loaded.recipe.model.patches, loaded.recipe.data, loaded.model.embedding
    assert patches is not None and isinstance(embedding, PatchEmbedding)
    image_CYX = read_image(path, size=patches.image_size, channels=patches.channels)
    pixels = to_pixels(image_CYX[None], data.image_mean, data.image_std)
    shown = np.ascontiguousarray(np.broadcast_to(image_CYX, (3, *image_CYX.shape[1:])).transpose(1, 2, 0))
    grid, has_cls = patches.side, embedding.cls is not None
    tokens = ["CLS"] * has_cls + [f"{row},{column}" for row in range(grid) for column in range(grid)]
    special = [has_cls] + [False] * (len(tokens) - 1)
    side = TokenSequence("encoder", tuple(tokens), tuple(special), (True,) * len(tokens))
    return ModelInputs({"pixel_values": pixels}, {"encoder": side}, shown, (grid, grid), texts={"image": path.name})


# --- prompts, sources and targets ------------------------------------------------------------------------------------


def _read_prompt(loaded: Loaded, given: Inputs) -> ModelInputs:
    """A prompt and its greedy continuation."""
    tokenizer = loaded.text_tokenizer
    ids = encode_prompt(tokenizer, given.text or "")
    limit = _room(loaded, given, len(ids))
    notes: list[str] = []
    texts: dict[str, str] = {}
    if len(ids) > limit:
        notes.append(_cut_note(given, len(ids)))
        ids = ids[:limit]
    count = len(ids)
    new = min(given.max_new_tokens or 0, limit - count)
    if new > 0:
        eos = tokenizer.special.eos
        settings = GenerationSettings(max_new_tokens=new, temperature=0.0, eos_id=eos, context="error")
        suppressed = suppressed_tokens(tokenizer.special, eos=eos, suppressed=loaded.recipe.generation.suppress_tokens)
        [[found]] = generate(loaded.model, [ids], settings, tokenizer=tokenizer, suppressed=suppressed)
        ids = [*ids, *found.ids]
        texts["continuation"] = tokenizer.decode(found.ids)
        notes.append(f"the last {len(ids) - count} tokens were generated greedily by the model")
    side = side_of("decoder", tokenizer, ids, written_from=count if new > 0 else None)
    return ModelInputs({"input_ids": torch.tensor([ids])}, {"decoder": side}, notes=tuple(notes), texts=texts)


def _read_translation(loaded: Loaded, given: Inputs) -> ModelInputs:
    """A source, and the decoder's input for its target."""
    tokenizer, own, ends = loaded.text_tokenizer, loaded.target_tokenizer, loaded.decoder_tokens
    found, cut = _encoded(loaded, given)
    notes, source = list(cut), found.ids
    texts: dict[str, str] = {}
    if given.target is None:
        target = _translated(loaded, given, source)
        texts["translation"] = own.decode(target)
        notes.append("the target is the model's own translation by beam search")
    else:
        target = own.encode(given.target)
    read_ids = [*ends.prefix, *target]
    limit = _room(loaded, given, len(read_ids), what="target")
    if len(read_ids) > limit:
        notes.append(f"the target has {len(read_ids)} tokens, its first {limit} are shown")
        read_ids = read_ids[:limit]
    sides = {
        "encoder": side_of("encoder", tokenizer, source, special=found.from_template),
        "decoder": side_of("decoder", own, read_ids, written_from=len(ends.prefix) if given.target is None else None),
    }
    inputs = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([read_ids])}
    return ModelInputs(inputs, sides, notes=tuple(notes), texts=texts)


def _translated(loaded: Loaded, given: Inputs, source: Sequence[int]) -> list[int]:
    """The ids of the model's own translation, without the token that ends it."""
    ends = loaded.decoder_tokens
    limits = {}
    if given.max_new_tokens is not None:  # a smaller --max-new-tokens also lowers the recipe's minimum length
        limits["min_new_tokens"] = min(loaded.recipe.generation.min_new_tokens, given.max_new_tokens)
    settings = BeamSettings.from_recipe(
        loaded.recipe.generation, eos_id=ends.eos, max_new_tokens=given.max_new_tokens, **limits
    )
    translator = translator_of(loaded, settings=settings, too_long="cut", max_source=len(source))
    [[found, *_]] = translator.translate([given.text or ""])
    return [token for token in found.ids if token not in settings.ends]


# --- lengths --------------------------------------------------------------------------------------------------------


def _room(loaded: Loaded, given: Inputs, length: int, *, what: str = "text") -> int:
    """The largest number of tokens to read. InputError when the text is longer and --max-tokens was not given."""
    longest = loaded.model.longest_target if what == "target" else loaded.model.max_seq_len
    if given.max_tokens is not None:
        return min(given.max_tokens, longest)
    if length > longest:
        raise InputError(
            f"the {what} has {length:,} tokens, but the model reads at most {longest:,}",
            hint=f"--max-tokens {longest} shows its beginning",
        )
    return longest


def _cut_note(given: Inputs, length: int) -> str:
    return f"the text has {length:,} tokens, its first {given.max_tokens:,} are shown (--max-tokens)"


# --- options ---------------------------------------------------------------------------------------------------------


def read_options(loaded: Loaded, options: ReadOptions, head: str) -> tuple[Loaded, ModelInputs]:
    """Read the options: (the model, with special tokens in its tokenizer if wanted, its input)."""
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
    loaded: Loaded, reading: ModelInputs, options: LensOptions | AttributeOptions, head: str
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
