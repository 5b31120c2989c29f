"""Loading of a run, a checkpoint or a Hugging Face folder as a model with its tokenizer and recipe (`tformer.load`).

>>> run = load("runs/gpt-tiny-1")
>>> run.model(input_ids=ids).logits

A checkpoint folder alone is enough: nothing outside it is read.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tformer.build import build_model
from tformer.checkpoint.read import Checkpoint, differences
from tformer.checkpoint.resolve import newest_checkpoint, suits
from tformer.data.encoding import TextReader
from tformer.interop.opening import open_checkpoint
from tformer.model import Transformer
from tformer.nn.classification_heads import PoolerHeadOptions
from tformer.nn.heads import HeadOptions
from tformer.nn.init import NoDraws
from tformer.nn.lora import ADAPTER
from tformer.nn.structured_dropout import LEARNED
from tformer.objectives import OBJECTIVES
from tformer.optim.shards import Shards, is_spread, local
from tformer.recipe.recipe import Recipe, check_special_ids, with_roles
from tformer.support.device import bound_products
from tformer.support.errors import Caution, InputError
from tformer.support.formatting import kind_of, listed, short_hash
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.special import DecoderTokens, decoder_tokens

Ready = Callable[[nn.Module], object]  # called with each module when its own tensors are loaded
HEADS = "heads."  # prefix of the names of head tensors
MAX_LABELS = 6  # in a message
BODY = "it is a body: tformer train --init-from gives it a head"
FROM_PYTHON = "no command reads it yet; from Python: tformer.load(RUN).model(input_ids=ids).logits"
TOKEN_TABLE = "embedding.weight"  # one row per token id
TARGET_TABLE = "decoder_embedding.weight"


Identity = dict[str, str | int]
"""What a document says of its model: name (the path), step, and sha256 of the weights."""


@dataclass
class Loaded:
    """A model ready for inference (eval mode), with its tokenizer and recipe.

    `path` is the checkpoint folder; `notes` are messages for the user (averaged weights).
    """

    model: Transformer
    tokenizer: Tokenizer | None  # None for images
    recipe: Recipe
    path: Path
    step: int
    notes: list[str] = field(default_factory=list)
    own_target_tokenizer: Tokenizer | None = None  # None: one vocabulary for both sides
    imported: bool = False  # from another library: its training data are unknown
    fill: Callable[[Ready], None] | None = None  # loads the weights that `load` left out

    @property
    def target_tokenizer(self) -> Tokenizer:
        """The tokenizer of the output: the target side's own, else the common one."""
        return self.text_tokenizer if self.own_target_tokenizer is None else self.own_target_tokenizer

    @property
    def decoder_tokens(self) -> DecoderTokens:
        """Start and end tokens of the decoder of an encoder-decoder."""
        return decoder_tokens_of(self.recipe, self.target_tokenizer)

    @property
    def reader(self) -> TextReader:
        """The model's reader of texts: ids inside their template, with offsets; padded batches."""
        return text_reader(self.recipe, self.text_tokenizer)

    def encode(self, text: str, text2: str | None = None) -> list[int]:
        """The ids that the model reads for a text (of an encoder-decoder: the source) or a pair of texts.

        The special tokens of the model's template are among them; nothing is cut. Raises InputError for a pair where
        the model reads one text.
        """
        _require_texts(text=text, text2="" if text2 is None else text2)
        return list(self.reader.encode(text, text2).ids)

    def encode_target(self, text: str) -> tuple[list[int], list[int]]:
        """(decoder_input_ids, labels) of a target text: the decoder reads the first and predicts the second."""
        _require_texts(text=text)
        ids = target_reader(self.recipe, self.target_tokenizer).encode(text).ids
        return list(ids[:-1]), list(ids[1:])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids that the model wrote, without special tokens. Raises InputError for a value that is no id."""
        tokenizer = self.target_tokenizer
        try:
            numbers = [index(token) for token in ids]
        except TypeError as error:
            raise InputError(f"ids: {error}", hint="decode takes a list of whole numbers") from error
        if wrong := [number for number in numbers if not 0 <= number < tokenizer.vocab_size]:
            raise InputError(f"ids: found {wrong[0]}, expected 0 to {tokenizer.vocab_size - 1}")
        return tokenizer.decode(numbers)

    def untrained_positions(self, length: int, target_length: int | None = None) -> list[Caution]:
        """Notes on the learned positions that a text of this length reads and the run did not train; [] without.

        target_length: the number of tokens that the decoder beside an encoder reads; None: as many.
        """
        recipe, found = self.recipe, list[Caution]()
        for side, stack in recipe.model.stacks.items():
            beside = side == "decoder" and recipe.model.is_encoder_decoder
            trained = recipe.target_seq_len if beside else recipe.seq_len
            read = target_length if beside and target_length is not None else length
            if stack.positions.module.fixed_length and trained < read and recipe.model.patches is None:
                above = f"positions {trained} and above of model.{side} are {stack.positions.kind}"
                found.append(Caution(f"{above}, and this run did not train them: it read at most {trained} tokens"))
        return found

    @property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer; raises InputError for a model of images."""
        if self.tokenizer is None:
            raise InputError(f"{self.path} is a model of images: it reads no text")
        return self.tokenizer

    @property
    def identity(self) -> Identity:
        """Name, step and hash; the hash reads all weights."""
        return {"name": str(self.path), "step": self.step, "sha256": weights_hash(self)}


def weights_hash(loaded: Loaded) -> str:
    """SHA-256 of all parameters, in the order of their names."""
    digest = hashlib.sha256()
    for name, value in sorted(loaded.model.named_parameters()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().float().contiguous().numpy().data)
    return digest.hexdigest()


def _require_texts(**values: object) -> None:
    for name, value in values.items():
        if not isinstance(value, str):
            raise InputError(f"{name}: found {kind_of(value)}, expected a text")


def text_reader(recipe: Recipe, tokenizer: Tokenizer) -> TextReader:
    """The reader of a recipe's model for a text or source; `tokenizer` has the recipe's special ids."""
    reader = TextReader.of_prompts(tokenizer) if reads_prompts(recipe) else TextReader.of_encoder(tokenizer)
    reader = replace(reader, **_padding(recipe), max_length=recipe.seq_len, truncation=recipe.data.truncation)
    return replace(reader, pair=None) if "lm" in _heads(recipe) else reader


def reads_prompts(recipe: Recipe) -> bool:
    """Whether a recipe's model continues texts: a decoder alone, without a head over whole texts."""
    return recipe.model.encoder is None and not any(head.pools for head in recipe.model.heads)


def target_reader(recipe: Recipe, tokenizer: Tokenizer) -> TextReader:
    """The reader of targets for a recipe's encoder-decoder. The decoder's input is all ids but the last.

    Raises InputError for another model.
    """
    if not recipe.model.is_encoder_decoder:
        raise InputError("only an encoder-decoder has a target side, this model has one stack")
    ends = decoder_tokens_of(recipe, tokenizer)
    reader = TextReader.of_target(tokenizer, ends.prefix, ends.eos)
    return replace(reader, **_padding(recipe), max_length=recipe.target_seq_len)


def _padding(recipe: Recipe) -> dict[str, Any]:
    """Padding as in training; on the right if training pads at random."""
    return {"padding_side": "left" if recipe.data.padding == "left" else "right", "pad_to": recipe.data.pad_to}


def load(
    path: str | Path | Checkpoint | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    which: str = "best",
    runs_dir: str | Path = "runs",
    kinds: Collection[str] | None = None,
    usable: Callable[[Recipe], bool] = lambda recipe: True,
    lazily: bool = False,
) -> Loaded:
    """Load a model for inference.

    Args:
        path: a run, checkpoint or Hugging Face folder, or an open checkpoint; None: the run under `runs_dir` that was
            saved to last and has a checkpoint.
        device: where the parameters go.
        dtype: of parameters and activations; None: parameters as trained (fp32).
        which: `best`, `latest` or `step-N` of a run.
        runs_dir: where runs are looked for.
        kinds: heads that the caller can use (`{"lm"}`, …); None: any.
        usable: what else a run must be that is looked for.
        lazily: leave the weights to `fill`, so that `prepare_inference` packs each matrix before the next one is read.

    Averaged weights are taken where the checkpoint has them.

    Raises:
        InputError: nothing to load, damaged files, or parts that do not belong together.
        NotFiniteError: weights are NaN or infinite.
    """
    bound_products()
    if path is None:
        found = partial(suits, is_usable=lambda recipe: _has_head(kinds, recipe) and usable(recipe))
        path = newest_checkpoint(runs_dir, which, usable=found)
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path, which, runs_dir=runs_dir)
    folder = checkpoint.path
    recipe = checkpoint.recipe
    require_kind(folder, recipe, kinds)
    tokenizer, target = load_tokenizers(checkpoint)
    with NoDraws():
        model = build_model(
            recipe.model,
            vocab_size=None if tokenizer is None else tokenizer.vocab_size,
            target_vocab_size=None if target is None else target.vocab_size,
            num_labels=len(recipe.data.labels) or None,
            device=device,
        )
    if dtype is not None:
        convert(model, dtype)  # first: parameters that nothing was written to take no memory
    fill = partial(load_weights, model, checkpoint, ema=checkpoint.has("ema"))
    if not lazily:
        fill()
    notes = list(checkpoint.notes)
    if checkpoint.has("ema"):
        notes.append("averaged weights are used")
    return Loaded(
        model.eval(),
        tokenizer,
        recipe,
        folder,
        checkpoint.step,
        notes,
        target,
        imported="imported" in checkpoint.trainer,
        fill=fill if lazily else None,
    )


def load_tokenizers(checkpoint: Checkpoint) -> tuple[Tokenizer | None, Tokenizer | None]:
    """The tokenizer (None for images) and the target side's own; InputError for others than the model's."""
    recipe, tokenizer, target = checkpoint.recipe, None, None
    if (text := checkpoint.tokenizer_json) is not None:
        tokenizer = Tokenizer.from_json(text, name=str(checkpoint.tokenizer_path("source")))
        _check_tokenizer(checkpoint, recipe, tokenizer)
    elif recipe.model.patches is None:
        raise InputError(f"{checkpoint.path} holds a model of text without its tokenizer.json")
    if (text := checkpoint.target_tokenizer_json) is not None:
        target = Tokenizer.from_json(text, name=str(checkpoint.tokenizer_path("target")))
        _check_tokenizer(checkpoint, recipe, target, side="target")
    return with_roles(recipe.tokenizer.special_ids, tokenizer, target)


Place = Callable[[str, Tensor], None]
"""Takes a tensor of a checkpoint for the model's tensor of this name."""


class _Stored:
    """The tensors of a checkpoint: whole, or on the meta device until `copy` reads each, or its rows in `shards`.

    place: takes each tensor that is read, of a tied one for its first name.
    """

    def __init__(self, checkpoint: Checkpoint, shards: Shards | None, place: Place | None = None) -> None:
        self._checkpoint, self._shards, self._place = checkpoint, shards, place
        self._whole = shards is None and place is None and not checkpoint.streams
        self._places: dict[Tensor, tuple[str, str]] = {}  # (role, name) of each on the meta device

    def tensors(self, role: str) -> dict[str, Tensor]:
        """The tensors of a role by name, tied names included; empty if there are none."""
        checkpoint = self._checkpoint
        if not checkpoint.has(role):
            return {}
        if self._whole:
            whole = {"weights": checkpoint.weights, "ema": checkpoint.ema, "generator": checkpoint.generator}[role]()
            return whole or {}
        found = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
                 for name, spec in checkpoint.specs(role).items()}  # fmt: skip
        self._places |= {tensor: (role, name) for name, tensor in found.items()}
        tied = {} if role == "generator" else checkpoint.tied
        return {alias: found[owner] for alias, owner in tied.items() if owner in found} | found

    def shapes(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A model's tensors to compare with `tensors`: whole shapes."""
        if self._whole:
            return state
        return {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in state.items()}

    @torch.no_grad()
    def copy(
        self,
        tensors: dict[str, Tensor],
        state: dict[str, Tensor],
        copied: Callable[[Sequence[str]], None] = lambda names: None,
    ) -> None:
        """Copy tensors into the tensors of a model's state with the same names, and remove both from the dicts.

        copied: called with the names of each, several where they are tied.
        """
        if self._whole:
            for name in list(state):
                state.pop(name).copy_(tensors.pop(name))
                copied([name])
            return
        if self._shards is None:
            names: dict[tuple[str, str], list[str]] = {}
            for name in state:
                names.setdefault(self._places[tensors[name]], []).append(name)
            for role in dict.fromkeys(role for role, _ in names):
                for stored, tensor in self._checkpoint.each(role):
                    own = names.get((role, stored), [])
                    if self._place is not None and own:
                        self._place(own[0], tensor)
                        own = []
                    for name in own:
                        state.pop(name).copy_(tensor)
                    del tensor  # before the next one is read
                    copied(own)
            return
        shards, whole = self._shards, slice(None)
        wanted: dict[str, dict[str, slice]] = {}
        for name, target in state.items():
            role, stored = self._places[tensors[name]]
            wanted.setdefault(role, {})[stored] = shards.rows(len(target)) if is_spread(target) else whole
        ranks = {"rank": shards.rank, "processes": shards.size}
        rows = {role: self._checkpoint.rows(role, names, **ranks) for role, names in wanted.items()}
        for name, target in state.items():
            role, stored = self._places[tensors[name]]
            (local(target) if is_spread(target) else target).copy_(rows[role][stored])


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    ready: Ready = lambda module: None,
    *,
    ema: bool = False,
    shards: Shards | None = None,
) -> None:
    """Copy a checkpoint's weights into a model: all of them, or none and an InputError.

    From a folder of Hugging Face they come one tensor at a time, and a damaged file shows when it is reached.

    Args:
        model: on any device, in any floating type.
        checkpoint: see `read_checkpoint`.
        ready: may replace the tensors of its module.
        ema: take the averaged weights, and the plain ones only for what has no average.
        shards: of a model that is spread over processes: each reads its rows.

    Of a model with adapters, these are all but the base's.

    Raises:
        InputError: names or shapes differ; lists what is missing, unexpected, and of another shape.
    """
    base: frozenset[str] = getattr(model, "base_names", frozenset())
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in base}
    stored = _Stored(checkpoint, shards)
    weights = stored.tensors("ema") if ema else {}
    if not state.keys() <= weights.keys():
        weights = stored.tensors("weights") | weights
    problems = differences(stored.shapes(state), weights, aliases=checkpoint.tied)
    if problems:
        raise InputError(
            f"{checkpoint.path}: recipe and weights disagree: {'; '.join(problems)}",
            hint="recipe.yaml and model.safetensors must come from the same checkpoint, unedited",
        )
    missing = Counter(model.get_submodule(name.rpartition(".")[0]) for name in state)
    alone = [module for module in model.modules() if module not in missing]  # without own tensors

    def copied(names: Sequence[str]) -> None:
        for name in names:
            module = model.get_submodule(name.rpartition(".")[0])
            missing[module] -= 1
            if not missing[module]:
                ready(module)

    stored.copy(weights, state, copied)
    for module in alone:
        ready(module)


def load_body(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    keep_heads: Collection[str] = (),
    shards: Shards | None = None,
    place: Place | None = None,
) -> list[str]:
    """Copy a checkpoint's weights without heads, except the heads in `keep_heads` with equal shapes.

    Learned LayerDrop rates belong to training: they are copied where both models have them, and else left alone.
    Averaged weights take precedence. Returns the names of the tensors of heads that stay as freshly initialized.
    shards: see `load_weights`. place: takes each tensor instead of the model, whose adapters are left alone.

    Raises:
        InputError: the bodies differ: lists what is missing and what has another shape.
    """
    state = {name: tensor for name, tensor in model.state_dict().items() if ADAPTER not in name}
    stored = _Stored(checkpoint, shards, place)
    weights = stored.tensors("ema")
    if not state.keys() <= weights.keys():
        weights = stored.tensors("weights") | weights
    heads: dict[str, list[str]] = {}
    for name in state:
        if name.startswith(HEADS):
            heads.setdefault(name.split(".")[1], []).append(name)
    fresh = {
        name
        for head, names in heads.items()
        if head not in keep_heads or any(n not in weights or weights[n].shape != state[n].shape for n in names)
        for name in names
    }
    rates = {name for name in state.keys() ^ weights.keys() if name.endswith(LEARNED)}
    body = {name: target for name, target in state.items() if name not in fresh | rates}
    taken = {name: weights[name] for name in weights if name in body or not (name.startswith(HEADS) or name in rates)}
    problems = differences(stored.shapes(body), taken, aliases=checkpoint.tied)
    if problems:
        raise InputError(f"{checkpoint.path}: its body does not fit this model: {'; '.join(problems)}")
    stored.copy(taken, body)
    return sorted(fresh)


def why_new(head: HeadOptions, own: Recipe, stored: Recipe, *, given: tuple[str, ...]) -> str | None:
    """Why training cannot start from a checkpoint's head of this kind; None: it can, if the shapes agree.

    given: label names that the user gave in the order of the checkpoint's. They may name labels without a name of their
    own, such as LABEL_0.
    """
    theirs = next((each for each in stored.model.heads if each.kind == head.kind), None)
    if theirs is None:
        return "the checkpoint has none"
    if not hasattr(head, "num_labels"):
        return None
    for key in ("pooling", "pooler", "activation", "multi_label"):
        before, after = (getattr(each, key, None) for each in (theirs, head))
        if before != after:
            return f"its {key} was {before}, the recipe's is {after}"
    if own.data.labels == stored.data.labels:
        return None
    names = [name for number, name in enumerate(stored.data.labels) if name not in (f"LABEL_{number}", str(number))]
    if given and len(given) == len(stored.data.labels) and not names:
        return None
    were, are = (listed(recipe.data.labels, MAX_LABELS) or "unknown" for recipe in (stored, own))
    return f"its labels were {were}, those of the data are {are}; --labels names them in the order of the checkpoint"


def load_generator(generator: Transformer, checkpoint: Checkpoint, *, shards: Shards | None = None) -> None:
    """Copy ELECTRA's generator from a checkpoint. Raises InputError when names or shapes differ.

    shards: see `load_weights`.
    """
    state, stored = generator.state_dict(), _Stored(checkpoint, shards)
    weights = stored.tensors("generator")
    for alias, owner in generator.tied_names().items():  # tied tensors are stored once
        if alias not in weights and owner in weights:
            weights[alias] = weights[owner]
    problems = differences(stored.shapes(state), weights, aliases={})
    if problems:
        raise InputError(f"{checkpoint.path}: the generator does not fit: {'; '.join(problems)}")
    stored.copy(weights, state)


def _has_head(kinds: Collection[str] | None, recipe: Recipe) -> bool:
    return kinds is None or not set(kinds).isdisjoint(_heads(recipe))


def require_kind(folder: Path, recipe: Recipe, kinds: Collection[str] | None) -> None:
    """Raise InputError for a model without a head of these kinds; None: any."""
    if kinds is not None and not _has_head(kinds, recipe):
        is_body = all(isinstance(head, PoolerHeadOptions) for head in recipe.model.heads)
        trained = {objective.head.kind for objective in OBJECTIVES.values()} & set(_heads(recipe))
        raise InputError(
            f"{folder} has no head this command can use: found {', '.join(_heads(recipe)) or 'none'}, "
            f"expected {' or '.join(sorted(kinds))}",
            hint=None if trained else BODY if is_body else FROM_PYTHON,
        )


def _heads(recipe: Recipe) -> list[str]:
    return [head.kind for head in recipe.model.heads]


def embedding_rows(checkpoint: Checkpoint) -> dict[str, int | None]:
    """Number of rows of the stored embedding tables, by the model section's key for it; None: no such table."""
    specs = checkpoint.specs("weights")
    tables = {"vocab_size": TOKEN_TABLE, "target_vocab_size": TARGET_TABLE}
    return {key: specs[table].shape[0] if table in specs else None for key, table in tables.items()}


def _check_tokenizer(checkpoint: Checkpoint, recipe: Recipe, tokenizer: Tokenizer, *, side: str = "source") -> None:
    """Raise InputError unless a tokenizer is the model's own; `side` is "source" for the only one, too."""
    target = side == "target"
    recorded = checkpoint.target_tokenizer_sha256 if target else checkpoint.tokenizer_sha256
    if recorded is not None and tokenizer.sha256 != recorded:
        raise InputError(
            f"{checkpoint.tokenizer_path(side)} is not the tokenizer this model was trained with: its sha256 is "
            f"{short_hash(tokenizer.sha256)}, the manifest says {short_hash(recorded)}"
        )
    table_name = TARGET_TABLE if target else TOKEN_TABLE
    table = checkpoint.specs("weights").get(table_name) if recipe.model.patches is None else None
    if table is not None and tokenizer.vocab_size > table.shape[0]:
        raise InputError(
            f"{checkpoint.path}: the tokenizer has {tokenizer.vocab_size:,} ids, but the model's embedding only "
            f"{table.shape[0]:,} rows",
            hint="tokenizer.json and model.safetensors must come from the same checkpoint",
        )


def decoder_tokens_of(recipe: Recipe, tokenizer: Tokenizer) -> DecoderTokens:
    """Start and end tokens of a recipe's target side.

    Raises InputError for a tokenizer without an end-of-sequence token, and for an id that it does not have.
    """
    ids = recipe.tokenizer.special_ids
    check_special_ids(ids, tokenizer, ("decoder_start", "forced_bos", "forced_eos", "eos"))
    return decoder_tokens(
        tokenizer.special,
        start=ids.decoder_start,
        eos=ids.eos,
        forced_bos=ids.forced_bos,
        forced_eos=ids.forced_eos,
    )


def convert(model: Transformer, dtype: torch.dtype) -> None:
    """Cast parameters to another number format; tables computed from formulas stay in fp32."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    model.compute_dtype = dtype
