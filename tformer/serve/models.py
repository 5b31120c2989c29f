"""The models of a server, by name: loaded when they are first asked for, within a limit of memory.

A model is prepared in place for inference, so that its weights are held once; adapters share their base
(`serve.bases`). A run that goes on training is loaded again when it has a newer checkpoint.
"""

from __future__ import annotations

import copy
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from tformer.api import Run
from tformer.checkpoint.resolve import newest_checkpoint, resolve_checkpoint
from tformer.checkpoint.run import CHECKPOINTS, is_run
from tformer.decoding.loaded import choose_languages
from tformer.decoding.options import GenerateOptions
from tformer.decoding.scheduler import Scheduler, no_scheduler
from tformer.evaluation.classifier import HEADS as CLASSIFIER_HEADS
from tformer.interop.opening import open_checkpoint
from tformer.loading import Loaded
from tformer.model import Transformer
from tformer.nn.products import EVERY, FEW_FP32_ROWS
from tformer.recipe.recipe import Recipe
from tformer.serve.bases import Bases
from tformer.serve.options import ServeOptions
from tformer.serve.requests import RequestError
from tformer.support.device import resolve_device
from tformer.support.errors import InputError, NotFiniteError
from tformer.support.formatting import decimal_bytes, listed
from tformer.support.options import parse_bytes
from tformer.tokenizer.chat import ChatTemplate

LOOK_AGAIN_SECONDS = 2.0
"""Time between looks for a newer checkpoint of a run."""
BUSY_SECONDS = 5
"""`Retry-After` where no model can make room."""


def _heads(recipe: Recipe) -> set[str]:
    return {head.kind for head in recipe.model.heads}


def _continues(recipe: Recipe) -> bool:
    return recipe.model.encoder is None and "lm" in _heads(recipe)


USES: dict[str, Callable[[Recipe], bool]] = {
    "generate": _continues,
    "chat": _continues,
    "translate": lambda recipe: recipe.model.is_encoder_decoder and "lm" in _heads(recipe),
    "score": lambda recipe: "lm" in _heads(recipe),
    "fill": lambda recipe: recipe.model.decoder is None and "masked_lm" in _heads(recipe),
    "classify": lambda recipe: recipe.model.patches is None and bool(CLASSIFIER_HEADS & _heads(recipe)),
    "embed": lambda recipe: recipe.model.patches is None,
}
"""What a model can be asked for, by its recipe."""


class Served(Run):
    """A run whose model is prepared for inference itself, in place of copies."""

    scheduler: Scheduler | None = None  # None: it cannot be scheduled
    base: Transformer | None = None  # which it shares with other models

    def _ready(self, key: Any, prepare: Any) -> list[Loaded]:
        return [self]

    def _in_fp32(self) -> Loaded:
        return self

    def _decoders(self, options: GenerateOptions) -> list[Loaded]:
        own = copy.copy(self)  # languages belong to a request
        choose_languages(own, options.source_language, options.target_language)
        return [own]

    @cached_property
    def chat(self) -> ChatTemplate:
        """The model's chat template. Raises InputError for a tokenizer without a token that ends an answer."""
        return ChatTemplate(self.text_tokenizer, self.recipe.tokenizer.chat_template)


@dataclass
class ModelEntry:
    """A model that is offered.

    Attributes:
        path: of the run, checkpoint or folder.
        sizes: bytes of its weights in fp32: its own by its name, those that it shares by the name of their base.
        created: seconds since 1970 of its checkpoint.
        served: None until it is asked for.
        used_at, looked_at: of the monotonic clock.
    """

    name: str
    path: Path
    recipe: Recipe
    sizes: dict[str, int]
    created: int
    served: Served | None = None
    used_at: float = 0.0
    looked_at: float = 0.0

    @property
    def uses(self) -> list[str]:
        return [use for use, fits in USES.items() if fits(self.recipe)]


class ModelRegistry:
    """All models of a server. `get` is for the thread that owns the models, the rest for any."""

    def __init__(self, options: ServeOptions) -> None:
        """Raises InputError for a path without a model, and for a model that is larger than the memory allowed."""
        self.options = options
        self.limit = math.inf if options.memory is None else parse_bytes(options.memory, "--memory")
        paths = options.runs or (str(newest_checkpoint(which=options.checkpoint)),)
        found = {path: open_checkpoint(path, options.checkpoint) for path in paths}
        self.bases = Bases(list(found.values()), options.precision, resolve_device(options.device))
        self.entries: dict[str, ModelEntry] = {}
        self._in_use: Counter[str] = Counter()
        self._lock = threading.Lock()
        for path, checkpoint in found.items():
            name = _name(path, taken=self.entries)
            sizes = self.bases.sizes(checkpoint, name)
            if (size := sum(sizes.values())) > self.limit:
                raise InputError(
                    f"{path} has {decimal_bytes(size)} of weights, --memory is {options.memory}",
                    hint="raise --memory, or leave the model out",
                )
            created = int(checkpoint.path.stat().st_mtime)
            self.entries[name] = ModelEntry(name, Path(path).absolute(), checkpoint.recipe, sizes, created)

    def find(self, name: str | None, use: str) -> ModelEntry:
        """A model by its name, the first one for None. Raises RequestError for an unknown one, or of another kind."""
        entry = next(iter(self.entries.values())) if name is None else self.entries.get(name)
        if entry is None:
            known = listed(list(self.entries), 8)
            message = f"there is no model {name[:80]!r}; served: {known}" if name else f"served: {known}"
            raise RequestError(message, 404, param="model", code="model_not_found")
        if use not in entry.uses:
            can = listed(entry.uses, 8) or "nothing of this server"
            message = f"the model {entry.name!r} cannot {use}; it can {can}"
            raise RequestError(message, 422, param="model", code="model_not_suitable")
        return entry

    @contextmanager
    def used(self, entry: ModelEntry) -> Iterator[None]:
        """Keeps a model from making room for another one."""
        with self._lock:
            self._in_use[entry.name] += 1
            entry.used_at = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._in_use[entry.name] -= 1

    def get(self, entry: ModelEntry) -> Served:
        """The model; a newer checkpoint of its run takes its place. Raises RequestError if it cannot be loaded."""
        now = time.monotonic()
        if entry.served is not None and now - entry.looked_at > LOOK_AGAIN_SECONDS:
            entry.looked_at = now
            changes = is_run(entry.path) or entry.path.name == CHECKPOINTS
            with suppress(InputError):  # removed: the loaded model goes on
                if changes and resolve_checkpoint(entry.path, self.options.checkpoint) != entry.served.path:
                    entry.served = None
        if entry.served is None:
            self._make_room(entry)
            try:
                entry.served = self._loaded(entry)
            except (InputError, NotFiniteError) as error:  # of the server, not of the request
                message = f"the model {entry.name!r} cannot be loaded: see the server's log"
                raise RequestError(message, 500, param="model", code="model_failed") from error
            entry.looked_at = now
        return entry.served

    def without_paths(self, text: str) -> str:
        """A message with the names of models in place of where they lie."""
        entries = list(self.entries.values())
        places = {str(each.path): each.name for each in entries}
        places |= {str(each.served.path): each.name for each in entries if each.served is not None}
        for place in sorted(places, key=len, reverse=True):
            text = text.replace(place, places[place])
        return text

    def _make_room(self, entry: ModelEntry) -> None:
        """Forget models that are not in use, those first that were not used for the longest time."""
        with self._lock:
            loaded = [each for each in self.entries.values() if each.served is not None and each is not entry]
            for each in sorted(loaded, key=lambda each: each.used_at):
                if sum(sizes_of([entry, *loaded]).values()) <= self.limit:
                    return
                if not self._in_use[each.name]:
                    each.served = None
                    loaded.remove(each)
            if sum(sizes_of([entry, *loaded]).values()) > self.limit:
                message = f"the models in use leave no memory for {entry.name!r}"
                raise RequestError(message, 503, code="no_memory", retry_after=BUSY_SECONDS)

    def _loaded(self, entry: ModelEntry) -> Served:
        """The prepared model of an entry; for a run in training its current checkpoint."""
        options = self.options
        rows = options.rows if options.rows <= FEW_FP32_ROWS else EVERY
        how: dict[str, Any] = {"precision": options.precision, "quantize": options.quantize, "batch_size": rows}
        checkpoint = open_checkpoint(entry.path, options.checkpoint)
        found, base = self.bases.load(checkpoint, GenerateOptions(compile="off", **how))
        run = Served(**{each.name: getattr(found, each.name) for each in fields(Loaded)})
        run.base = base
        if "generate" in entry.uses and no_scheduler(run.model) is None:
            run.scheduler = Scheduler(run.model, run.text_tokenizer, max_rows=options.rows)
        entry.recipe = run.recipe
        return run


def sizes_of(entries: Iterable[ModelEntry]) -> dict[str, int]:
    """The bytes of the weights of models together, a base that they share once."""
    return {name: size for entry in entries for name, size in entry.sizes.items()}


def _name(path: str, *, taken: dict[str, ModelEntry]) -> str:
    """Name of a model: the last part of its path, or more parts where models have the same name."""
    path = os.fsencode(path).decode(errors="replace")  # it stands in JSON
    parts = [part for part in Path(path).absolute().parts if part != CHECKPOINTS]
    if parts[-1].startswith("step-") and len(parts) > 2:
        parts[-2:] = ["@".join(parts[-2:])]
    for count in range(1, len(parts)):
        if (name := "/".join(parts[-count:])) not in taken:
            return name
    return path
