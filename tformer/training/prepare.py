"""Everything that can fail for a user's reason, done before anything is written: data, tokenizer, sizes, precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tformer.build import count_parameters, resolve_sizes
from tformer.checkpoint.lock import LOCK_NAME
from tformer.checkpoint.probe import require_writable
from tformer.data.mixture import MixedWindows
from tformer.data.windows import LmWindows
from tformer.errors import InputError
from tformer.metrics import flops_per_token
from tformer.recipe.recipe import Recipe
from tformer.tokenizer import Tokenizer
from tformer.training.assemble import vocabulary_size
from tformer.training.batches import Samples
from tformer.training.corpora import (
    Corpora,
    Progress,
    check_fingerprint,
    check_validation,
    open_text,
    prepare_corpora,
    prepare_tokenizer,
)
from tformer.training.precision import Precision, matmul_flops_per_second, resolve_device, resolve_precision
from tformer.training.request import RUNS, Start


@dataclass
class Prepared:
    """What the loop needs and has not yet built. Every `auto` of `recipe` is resolved."""

    recipe: Recipe
    start: Start
    tokenizer: Tokenizer
    corpora: Corpora
    samples: Samples
    device: torch.device
    precision: Precision
    num_parameters: int
    max_minutes: float | None  # of this command: not part of what defines the run
    notes: list[str]

    @property
    def seq_len(self) -> int:
        return self.recipe.data.seq_len or self.recipe.model.max_seq_len

    @property
    def tokens_per_micro_batch(self) -> int:
        training = self.recipe.training
        return training.batch_tokens or (training.batch_size or 1) * self.seq_len


def check_target(start: Start) -> None:
    """Refuse a run directory that cannot be used, before hours of work go into filling it.

    Errors: InputError for one that is not empty (without --resume); StorageError where nothing can be written.
    """
    target = start.out if start.out is not None else RUNS
    if start.out is not None and not start.may_exist and target.exists():
        if not target.is_dir():
            raise InputError(f"{target} is a file, expected a run directory")
        found = sorted(entry.name for entry in target.iterdir() if entry.name != LOCK_NAME)
        if found:
            raise InputError(
                f"{target} is not empty (it holds {found[0]})",
                hint="continue that run with --resume, or choose another directory with --out",
            )
    require_writable(target)


def prepare(start: Start, *, cache_dir: Path | None, progress: Progress, should_stop: Callable[[], bool]) -> Prepared:
    """Read the data, train or load the tokenizer, resolve sizes and precision. Writes to the cache only."""
    recipe, minutes = start.recipe, start.recipe.training.max_minutes
    device = resolve_device(recipe.training.device)
    if recipe.training.threads is not None:
        torch.set_num_threads(recipe.training.threads)
    train_sources = open_text(recipe.data.train, recipe.data)
    valid_sources = open_text(recipe.data.valid, recipe.data) if recipe.data.valid else []
    checkpoint = start.resumed or start.weights
    if checkpoint is not None:
        tokenizer = _same_tokenizer(recipe, Tokenizer.from_json(checkpoint.tokenizer_json))
    elif start.tokenizer_file is not None:
        tokenizer = _same_tokenizer(recipe, Tokenizer.load(start.tokenizer_file))
    else:
        tokenizer = prepare_tokenizer(recipe, train_sources, progress=progress, should_stop=should_stop)
    corpora = prepare_corpora(
        recipe,
        train_sources,
        valid_sources,
        tokenizer,
        cache_dir=cache_dir,
        progress=progress,
        should_stop=should_stop,
    )
    if start.resumed is not None:
        check_fingerprint(corpora, str(start.resumed.trainer.get("data_fingerprint", "")))
    notes = [note for corpus in (*corpora.train, *corpora.valid) for note in corpus.notes]
    notes = list(dict.fromkeys([*(note for source in train_sources for note in source.notes), *notes]))
    if not recipe.data.train:
        notes.append("no --data: training on the documentation that comes with Python (builtin:python-docs)")
    if len(corpora.train) > 1:
        total = sum(corpora.weights)
        pairs = zip(corpora.train, corpora.weights, strict=True)
        notes.append("mixture: " + ", ".join(f"{corpus.name} {weight / total:.1%}" for corpus, weight in pairs))
    recipe, precision = freeze(recipe, tokenizer, device)
    samples = cut_samples(recipe, corpora)
    check_validation(corpora)
    num_parameters = count_parameters(recipe.model)
    tokens = sum(len(corpus) for corpus in corpora.train)
    held_out = sum(len(corpus) for corpus in corpora.valid)
    notes += [
        f"data: {tokens:,} training tokens, {held_out:,} validation tokens; "
        f"tokenizer: {tokenizer.kind}, {tokenizer.vocab_size:,} ids",
        f"model: {num_parameters:,} parameters",
        f"{precision.name} on {device}, {torch.get_num_threads()} threads: {precision.reason}",
    ]
    return Prepared(recipe, start, tokenizer, corpora, samples, device, precision, num_parameters, minutes, notes)


def _same_tokenizer(recipe: Recipe, own: Tokenizer) -> Tokenizer:
    """The run's own tokenizer. Errors: the recipe or the command line names a file with another one."""
    named = recipe.tokenizer.path
    if named is not None and Path(named).exists() and Tokenizer.load(Path(named)).sha256 != own.sha256:
        raise InputError(f"{named} is not the tokenizer that this model was trained with", hint="leave --tokenizer out")
    return own


def freeze(recipe: Recipe, tokenizer: Tokenizer, device: torch.device) -> tuple[Recipe, Precision]:
    """The recipe with every `auto` replaced by what was chosen, so that a resumed run chooses nothing anew."""
    model = recipe.model.model_copy(update={"vocab_size": vocabulary_size(recipe, tokenizer)})
    training = recipe.training
    rows, d_model, d_ff = product_shape(recipe)
    precision = resolve_precision(training.precision, device, rows=rows, d_model=d_model, d_ff=d_ff)
    updates: dict[str, object] = {"precision": precision.name, "max_minutes": None}
    if training.compile == "auto":
        # On a CPU the compiler takes half a minute and gains a sixth; on a GPU it pays unless the run is very short.
        updates["compile"] = "on" if device.type == "cuda" and training.max_steps >= 200 else "off"
    if device.type == "cpu":
        updates["threads"] = torch.get_num_threads()
    training = training.model_copy(update=updates)
    return recipe.model_copy(update={"model": model, "training": training}), precision


def product_shape(recipe: Recipe) -> tuple[int, int, int]:
    """(rows, d_model, d_ff) of the model's largest ordinary matrix product, for measurements."""
    side = "decoder" if recipe.model.decoder is not None else "encoder"
    stack = recipe.model.decoder or recipe.model.encoder
    assert stack is not None
    d_model = resolve_sizes(recipe.model, side).d_model
    seq_len = recipe.data.seq_len or recipe.model.max_seq_len
    rows = recipe.training.batch_tokens or (recipe.training.batch_size or 1) * seq_len
    return rows, d_model, stack.feedforward.d_ff or 4 * d_model


def measure_peak(prepared: Prepared) -> float:
    """FLOP/s of the model's own feed-forward product in its compute dtype: what throughput is compared with."""
    rows, d_model, d_ff = product_shape(prepared.recipe)
    return matmul_flops_per_second(
        prepared.precision.dtype, prepared.device, rows=min(rows, 8192), inner=d_model, columns=d_ff
    )


def training_flops_per_token(prepared: Prepared, matmul_parameters: int) -> float:
    """6 N + 12 L d T: forward and backward of every matrix product and of attention."""
    stack = prepared.recipe.model.decoder or prepared.recipe.model.encoder
    assert stack is not None
    side = "decoder" if prepared.recipe.model.decoder is not None else "encoder"
    sizes = resolve_sizes(prepared.recipe.model, side)
    return flops_per_token(matmul_parameters, stack.num_layers, sizes.num_heads * sizes.head_dim, prepared.seq_len)


def cut_samples(recipe: Recipe, corpora: Corpora) -> Samples:
    """The training windows. Errors: a corpus shorter than one window."""
    seq_len = recipe.data.seq_len or recipe.model.max_seq_len
    cut = [
        LmWindows(
            corpus, seq_len, packing=recipe.data.packing, seed=recipe.seed, document_mask=recipe.data.document_mask
        )
        for corpus in corpora.train
    ]
    return cut[0] if len(cut) == 1 else MixedWindows(cut, corpora.weights, seed=recipe.seed)
