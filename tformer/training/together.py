"""The preparation of a training by several processes: the same command, recipe and data in each of them.

One process of each machine prepares first and fills the caches, from which the others read. The leader makes the
choices that depend on measurements: number format, threads, a preset that fits the machine. Versions, options, recipe
file, checkpoint, tokenizer and data of every process must equal the leader's.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

import torch

from tformer.support import __version__
from tformer.support.device import Precision
from tformer.support.errors import InputError
from tformer.support.files import STANDARD_INPUT
from tformer.support.options import flag_of
from tformer.training.options import TrainOptions
from tformer.training.prepare import prepare
from tformer.training.request import SAME_DATA, recipe_of_leader
from tformer.training.training import Training
from tformer.workers.work import Work
from tformer.workers.worker import Worker

SAME_COMMAND = "start the same command with the same tformer on every machine"
OWN = {"devices", "max_restarts", "workers"}
"""Options that may differ between the processes of one training."""


def require_same_command(options: TrainOptions, worker: Worker) -> None:
    """Raise InputError for another version or command line than the leader's, and for data from standard input."""
    paths = [*options.data, *options.valid, *options.source, *options.target]
    if STANDARD_INPUT in [*paths, *options.valid_source, *options.valid_target]:
        raise InputError(
            "standard input can be read by one process only", hint="save the data to a file, which all can read"
        )
    versions = {"version of tformer": __version__, "version of PyTorch": torch.__version__}
    given = {
        flag_of(TrainOptions, name): json.dumps(value, default=str)
        for name, value in asdict(options).items()
        if name not in OWN
    }
    files = {} if options.config is None else {str(options.config): _digest(options.config)}
    worker.require_equal({**versions, **given, **files}, hint=SAME_COMMAND)


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return "no file"  # `find_training` refuses it


def prepare_together(requested: Training, work: Work, worker: Worker) -> Training:
    """`prepare` in each of several processes, with the leader's choices of number format, compilation and threads."""
    for options in requested.recipe.objectives:
        if options.objective.compares_batch and worker.world_size > 1:
            raise InputError(
                f"--devices: {options.kind} compares all examples of a batch, so one process trains it",
                hint="--set objectives.0.chunk_size=N saves memory",
            )
    training = worker.in_turn(lambda: prepare(requested, work, processes=worker.local_size))
    tokenizers = {"tokenizer": training.data.tokenizer, "target tokenizer": training.data.target_tokenizer}
    hashes = {name: "none" if each is None else each.sha256[:16] for name, each in tokenizers.items()}
    vectors = {f"vectors of {table}": each.digest() for table, each in training.vectors.items()}
    worker.require_equal({**hashes, **vectors, "training data": training.data.fingerprint}, hint=SAME_DATA)
    recipe = recipe_of_leader(training.recipe, worker)
    name = recipe.training.precision
    assert name != "auto"
    return replace(training, recipe=recipe, precision=Precision(name, training.precision.reason))
