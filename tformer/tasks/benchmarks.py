"""Tasks of lm-evaluation-harness (the package lm_eval), run with causal language models (`tformer evaluate --tasks`).

lm_eval knows the tasks by name and reads others from YAML files; it loads their data, builds the prompts, and computes
the metrics from log-probabilities and texts of the model (`tformer.evaluation.harness_model`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tformer.evaluation.options import EvaluationOptions
from tformer.loading import Loaded
from tformer.support.errors import InputError, did_you_mean
from tformer.support.files import open_output
from tformer.tasks.base import ChosenData
from tformer.tasks.text import Text
from tformer.workers.work import Work

RESAMPLES = 1000  # for the errors of metrics that are no means


class Benchmarks(Text):
    """Tasks of lm_eval. Trained and measured like running text."""

    description = "a causal language model, and --tasks runs tasks of lm_eval"
    options = frozenset({"tasks", "num_fewshot", "limit", "predictions"})

    def evaluate(self, loaded: Loaded, data: ChosenData, options: EvaluationOptions, work: Work) -> dict[str, Any]:
        """The metrics of each task and group of tasks under the keys of lm_eval (`acc,none`); `data` is not read."""
        try:
            from lm_eval import simple_evaluate

            from tformer.evaluation.harness_model import HarnessModel
        except ImportError:
            raise InputError(
                "--tasks needs lm_eval, which is not installed", hint="pip install 'tformer[lm-eval]'"
            ) from None
        manager, tasks = _open(options.task_names)
        results = simple_evaluate(
            HarnessModel(loaded, batch_size=options.batch_size, work=work),
            tasks=tasks,
            task_manager=manager,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            bootstrap_iters=RESAMPLES,
            log_samples=options.predictions is not None,
        )
        if options.predictions is not None:
            with open_output(options.predictions) as write:
                for line in _examples(results["samples"]):
                    write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
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


def _open(names: Sequence[str]) -> tuple[Any, list[Any]]:
    """The manager of tasks, and the tasks and groups of these names or YAML files, with their data.

    Raises InputError for an unknown name, and for a file or data that lm_eval does not read.
    """
    from lm_eval.tasks import TaskManager

    files = [name for name in names if Path(name).suffix in (".yaml", ".yml")]
    if missing := [name for name in files if not Path(name).is_file()]:
        raise InputError(f"--tasks: there is no file {missing[0]}")
    manager = TaskManager(include_defaults=len(files) < len(names))
    known = set(manager.all_tasks)
    if unknown := [name for name in names if name not in known and name not in files]:
        raise InputError(f"--tasks: lm_eval has no task '{unknown[0]}'", hint=did_you_mean(unknown[0], known))
    try:
        found = manager.load(list(names))
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"--tasks {','.join(names)}: lm_eval cannot load it: {reason}") from error
    groups = found.get("groups", {})
    inner = {child for children in found.get("group_map", {}).values() for child in children}
    outer = [group for name, group in groups.items() if name not in inner]
    covered = {task.task_name for group in outer for task in group.get_all_tasks()}
    return manager, [*outer, *(task for name, task in found["tasks"].items() if name not in covered)]


def _examples(samples: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """What the model says of each example: the answers are log-probabilities of the choices, or texts."""
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
