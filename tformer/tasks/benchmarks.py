"""Tasks of lm-evaluation-harness (the package lm_eval), run with causal language models (`tformer evaluate --tasks`).

lm_eval knows the tasks by name and reads others from YAML files; it loads their data, builds the prompts, and computes
the metrics from log-probabilities and texts of the model's export (`tformer.evaluation.harness_model`).
"""

from __future__ import annotations

import logging
import random
import sys
import traceback
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from torch.nn.modules import module

from tformer.evaluation.options import EvaluationOptions
from tformer.loading import Loaded
from tformer.support.errors import InputError, TformerError, did_you_mean
from tformer.support.files import open_output, refuse_to_replace
from tformer.support.formatting import json_text
from tformer.tasks.base import ChosenData
from tformer.tasks.text import Text
from tformer.workers.work import Work

RESAMPLES = 1000  # for the errors of metrics that are no means
SEED = 1234  # lm_eval's own


class Benchmarks(Text):
    """Tasks of lm_eval in place of data (--tasks), for models of running text."""

    description = "a causal language model, and --tasks runs tasks of lm_eval"
    options = frozenset({"tasks", "num_fewshot", "limit", "predictions"})

    def evaluate(self, loaded: Loaded, data: ChosenData, options: EvaluationOptions, work: Work) -> dict[str, Any]:
        """The metrics of each task and group of tasks under the keys of lm_eval (`acc,none`); `data` is not read."""
        try:
            import lm_eval.evaluator

            import tformer.evaluation.harness_model as ours
        except ImportError:
            raise InputError(
                "--tasks needs lm_eval, which is not installed", hint="pip install 'tformer[lm-eval]'"
            ) from None
        with _clear_errors(options.task_names, {ours.__file__, module.__file__}), _quiet():
            tasks = _load(options, work)
            model = ours.HarnessModel(loaded, batch_size=options.batch_size, keep=False, work=work)
            results = lm_eval.evaluator.evaluate(
                model,
                tasks,
                limit=options.limit,
                bootstrap_iters=RESAMPLES,
                log_samples=options.predictions is not None,
            )
        if options.predictions is not None:
            with open_output(options.predictions) as write:
                for line in _examples(results["samples"]):
                    write(json_text(line, default=str))
        return {
            "data": ", ".join(options.task_names),
            "tasks": results["results"],
            "examples": {task: sizes["effective"] for task, sizes in results["n-samples"].items()},
            "versions": results["versions"],
        }

    def lines(self, report: dict[str, Any]) -> Iterator[str]:
        """A line for each metric of each task: its value and standard error."""
        for task, values in report["tasks"].items():
            for key, value in values.items():
                metric, _, chosen = key.partition(",")
                if chosen and not metric.endswith("_stderr"):
                    error = values.get(f"{metric}_stderr,{chosen}")
                    shown = f" ± {error:.4f}" if isinstance(error, float) else ""
                    yield f"{task} {metric if chosen == 'none' else key} {value:.4f}{shown}"


def _load(options: EvaluationOptions, work: Work) -> dict[str, Any]:
    """The tasks and groups of --tasks with their data, set up as `lm_eval.simple_evaluate` does it.

    Raises InputError for an unknown name or file, and for predictions that would replace what is read.
    """
    from lm_eval.tasks import TaskManager

    names = options.task_names
    files = [name for name in names if Path(name).suffix in (".yaml", ".yml")]
    if missing := [name for name in files if not Path(name).is_file()]:
        raise InputError(f"--tasks: there is no file {missing[0]}")
    manager = TaskManager(include_defaults=len(files) < len(names))
    known = set(manager.all_tasks)
    if unknown := [name for name in names if name not in known and name not in files]:
        raise InputError(f"--tasks: lm_eval has no task '{unknown[0]}'", hint=did_you_mean(unknown[0], known))
    random.seed(0)  # a task may shuffle its data
    np.random.seed(SEED)
    found: dict[str, Any] = manager.load(list(names))
    for name, task in found["tasks"].items():
        read = [*files, *_texts((task.config.dataset_kwargs or {}).get("data_files"))]
        refuse_to_replace(options.predictions, read, option="--predictions")
        if task.config.num_fewshot == 0 and options.num_fewshot:
            work.note(f"{name} keeps its num_fewshot of 0")
        elif options.num_fewshot is not None:
            task.set_config(key="num_fewshot", value=options.num_fewshot)
        task.set_fewshot_seed(seed=SEED)
    return found


@contextmanager
def _clear_errors(names: Sequence[str], of_model: Set[str]) -> Iterator[None]:
    """Context manager that raises errors of lm_eval and of a task's code and data as InputError.

    of_model: files through which lm_eval calls the model; errors that come from there stay as they are.
    """
    try:
        yield
    except TformerError:
        raise
    except Exception as error:
        if of_model & {frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)}:
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if isinstance(error, StopIteration):
            reason = "the data hold no example"
        raise InputError(f"--tasks {','.join(names)}: lm_eval: {reason}", hint="--debug shows where") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Context manager without warnings of lm_eval and bars of datasets; lm_eval's bars show on a terminal only.

    Prints go to standard error.
    """
    import datasets
    from tqdm import tqdm

    loggers = [logging.getLogger(name) for name in ("lm_eval", "transformers")]
    levels, shows_bars = [logger.level for logger in loggers], not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    start = tqdm.__init__

    def on_a_terminal(self: Any, *args: Any, **options: Any) -> None:
        start(self, *args, **{**options, "disable": None})

    silent = mock.patch.object(tqdm, "__init__", on_a_terminal)
    try:
        with silent, redirect_stdout(sys.stderr):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if shows_bars:
            datasets.enable_progress_bars()


def _texts(value: Any) -> list[str]:
    """The texts in a value of YAML."""
    if isinstance(value, dict | list):
        return [text for each in (value.values() if isinstance(value, dict) else value) for text in _texts(each)]
    return [value] if isinstance(value, str) else []


def _examples(samples: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """A line for each example: its answers are log-probabilities of the choices, or texts."""
    for task, each in samples.items():
        for sample in each:
            yield {
                "task": task,
                "example": sample["doc_id"],
                "truth": sample["target"],
                "answers": sample["filtered_resps"],
                "filter": sample["filter"],
                "metrics": {name: sample[name] for name in sample["metrics"]},
            }
