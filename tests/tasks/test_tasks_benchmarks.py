"""`tformer evaluate --tasks`: tasks of lm_eval over local data."""

from __future__ import annotations

import json
import logging
import sys
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import tformer
from tests.interop import tiny_folders as tiny
from tformer.evaluation.options import EvaluationOptions
from tformer.support.errors import InputError
from tformer.tasks.table import TASKS

CHOICES, TEXTS, WRITTEN = 120, 40, 40
TASK_NAMES = ("tiny_choice", "tiny_text", "tiny_writing")
WORDS = tiny.WORDS


def words_at(start: int, count: int) -> str:
    return " ".join(WORDS[(start + 5 * place) % len(WORDS)] for place in range(count))


def task_file(folder: Path, name: str, rows: list[dict[str, Any]], **values: Any) -> Path:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    path = folder / f"{name}.yaml"
    files = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
    path.write_text(json.dumps({"task": name, "dataset_path": "json", "dataset_kwargs": files, **values}))
    return path


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Multiple choice (contexts empty, short, too long, with spaces at the end), perplexity, and generation."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "tasks"
    folder.mkdir()
    choices = [
        {
            "query": words_at(number, count) + (" " if count and number % 3 == 1 else ""),
            "choices": [words_at(number + choice, 1 + choice) for choice in range(3)],
            "gold": number % 3,
        }
        for number, count in ((number, (0, 3, 9, 60)[number % 4]) for number in range(CHOICES))
    ]
    texts = [{"text": words_at(number, 1 + 2 * number)} for number in range(TEXTS)]
    prompts = [{"query": words_at(number, 1 + number), "answer": words_at(number, 2)} for number in range(WRITTEN)]
    generation = {"until": [" a", "\n"], "max_gen_toks": 9, "do_sample": False}
    kept = {"test_split": "test", "num_fewshot": 0}
    return [
        task_file(
            folder,
            "tiny_choice",
            choices,
            **kept,
            output_type="multiple_choice",
            doc_to_text="query",
            doc_to_choice="choices",
            doc_to_target="gold",
            metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
        ),
        task_file(
            folder,
            "tiny_text",
            texts,
            **kept,
            output_type="loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="text",
            metric_list=[{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        ),
        task_file(
            folder,
            "tiny_writing",
            prompts,
            **kept,
            output_type="generate_until",
            doc_to_text="query",
            doc_to_target="answer",
            generation_kwargs=generation,
            metric_list=[{"metric": "exact_match"}],
        ),
    ]


def gpt2(folder: Path) -> Path:
    """GPT-2 with more rows of output than tokens; what they give counts in every share, and is never the largest."""
    path = tiny.gpt2(folder)
    tiny.change_weights(path, lambda tensors: tensors["transformer.wte.weight"][290:].zero_())
    return path


def logprob(run: tformer.Run, context: str, continuation: str) -> float:
    """The log-probability of a continuation, as a share of all rows of the output."""
    read, ids = len(run.encode(context)), run.encode(context + continuation)
    with torch.no_grad():
        logprobs = run.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(float(logprobs[place - 1, ids[place]]) for place in range(read, len(ids)))


def test_every_answer_is_that_of_the_model(files: list[Path], tmp_path: Path) -> None:
    """lm_eval's `hf` backend reads the export: shares of continuations, and texts with the model's own ends."""
    pytest.importorskip("lm_eval")
    run, lines = tformer.load(gpt2(tmp_path / "folder")), tmp_path / "lines.jsonl"
    run.evaluate(tasks=",".join(map(str, files)), limit=12, predictions=lines)
    answers = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    assert [sum(line["task"] == name for line in answers) for name in TASK_NAMES] == [12, 12, 12]
    rows = [json.loads(line) for line in files[0].with_suffix(".jsonl").read_text().splitlines()]
    short = [line for line in answers if line["task"] == "tiny_choice" and line["example"] % 12 in (5, 9)]
    assert len(short) == 2
    for line in short:
        row = rows[line["example"]]
        expected = [logprob(run, row["query"], " " + choice) for choice in row["choices"]]
        assert [found for found, _ in line["answers"]] == pytest.approx(expected, abs=1e-4)
    assert any(line["answers"][0] for line in answers if line["task"] == "tiny_writing")


def test_the_report_has_values_errors_and_sizes(files: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    run = tformer.load(tiny.gpt2(tmp_path / "folder"))
    report = run.evaluate(tasks=str(files[0]), limit=10, num_fewshot=None, batch_size=3)
    assert report["tasks"].keys() == {"tiny_choice"} and report["examples"] == {"tiny_choice": 10}
    values = report["tasks"]["tiny_choice"]
    assert 0 <= values["acc,none"] <= 1 and values["acc_stderr,none"] > 0
    shown = list(TASKS["benchmarks"].lines(report))
    assert shown[0] == f"tiny_choice acc {values['acc,none']:.4f} ± {values['acc_stderr,none']:.4f}"


def test_the_model_in_lm_eval_s_own_functions(files: list[Path], tmp_path: Path) -> None:
    harness = pytest.importorskip("lm_eval")
    from tformer.evaluation.harness_model import HarnessModel

    found = harness.simple_evaluate(
        HarnessModel(tformer.load(tiny.gpt2(tmp_path / "folder"))),
        tasks=[str(files[1])],
        limit=3,
        task_manager=harness.tasks.TaskManager(include_defaults=False),
    )
    assert found["results"]["tiny_text"]["word_perplexity,none"] > 1


def test_log_probabilities_of_a_model_in_bf16_are_summed_in_fp32(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from tformer.evaluation.harness_model import HarnessModel

    run = tformer.load(tiny.gpt2(tmp_path / "folder"))
    request = [(None, run.encode(words_at(0, 3)), run.encode(words_at(3, 6)))]
    [(exact, _)] = HarnessModel(run)._loglikelihood_tokens(request)
    run.model.compute_dtype = torch.bfloat16
    [(half, _)] = HarnessModel(run)._loglikelihood_tokens(request)
    assert half == pytest.approx(exact, rel=0.01) and half != float(torch.tensor(half).bfloat16())


class Backend:
    """Stands in for lm_eval's `hf` backend: the model of transformers in a folder."""

    max_length = 4

    def __init__(self, path: str, **options: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=options["dtype"])

    def tok_decode(self, ids: list[int]) -> str:
        return f"{len(ids)} words"

    def _loglikelihood_tokens(self, requests: list[Any]) -> list[Any]:
        return requests


@pytest.fixture
def harness_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class HarnessModel over `Backend`, with lm_eval or without."""
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", SimpleNamespace(HFLM=Backend))
    for package in ("lm_eval", "lm_eval.models"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    spec = find_spec("tformer.evaluation.harness_model")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)  # beside the one that other tests may have imported
    spec.loader.exec_module(module)
    return module.HarnessModel


def test_the_model_in_memory_is_measured_and_held_once(harness_model: Any, tmp_path: Path) -> None:
    run = tformer.load(tiny.gpt2(tmp_path / "folder"))
    with torch.no_grad():
        run.model.get_parameter("embedding.weight").fill_(0.25)
    assert harness_model(run).model.transformer.wte.weight.unique().tolist() == [0.25]
    assert not run.model.get_parameter("embedding.weight").is_meta
    measured = harness_model(run, keep=False).model
    assert all(parameter.is_meta for parameter in run.model.parameters())
    assert measured.transformer.wte.weight.unique().tolist() == [0.25]


@pytest.mark.parametrize("count", [0, 5])
def test_a_continuation_that_the_context_does_not_hold_is_one_line(
    harness_model: Any, tmp_path: Path, count: int
) -> None:
    """`test_what_cannot_be_run_is_refused` has it as lm_eval asks."""
    model = harness_model(tformer.load(tiny.gpt2(tmp_path / "folder")))
    fits = (("", ""), [1], [1, 2, 3, 4])
    assert model._loglikelihood_tokens([fits]) == [fits]
    with pytest.raises(InputError, match=f"^lm_eval: a continuation, .*, has {count} tokens, expected 1 to 4$"):
        model._loglikelihood_tokens([fits, (("", ""), [1], [1] * count)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": " , "}, "--tasks is empty"),
    ],
)
def test_options_that_contradict_one_another(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        EvaluationOptions(**options).check()


def refused(folder: Path, **options: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        tformer.load(folder).evaluate(**options)
    assert "\n" not in caught.value.message
    return caught.value


def test_what_cannot_be_run_is_refused(files: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    folder, broken = tiny.gpt2(tmp_path / "folder"), tmp_path / "broken.yaml"
    assert "there is no file missing.yaml" in refused(folder, tasks="missing.yaml").message
    broken.write_text('{"task": "broken", "dataset_path": "json", "dataset_kwargs": {"data_files": "none.jsonl"}}')
    assert "none.jsonl" in refused(folder, tasks=str(broken)).message
    long = files[2].read_text().replace('"max_gen_toks": 9', '"max_gen_toks": 32')
    files[2].write_text(long)
    assert "max tokens to generate (32) must be less than" in refused(folder, tasks=str(files[2])).message
    wide = files[0].read_text().replace("tiny_choice.jsonl", "wide.jsonl")
    row = {"query": "a", "choices": [words_at(0, 60), "a"], "gold": 1}
    (files[0].parent / "wide.jsonl").write_text(json.dumps(row) + "\n")
    files[0].write_text(wide)
    assert " tokens, expected 1 to 32" in refused(folder, tasks=str(files[0])).message


# The task file's text, or the keys to change in one that runs -> what the refusal says
WRONG_TASKS: dict[str, tuple[str | dict[str, Any], str]] = {
    "an empty file": ("", "Expected YAML dict"),
    "YAML that is none": ("task: [a\n  b: : c", "while parsing a flow sequence"),
    "a list": ("- a\n- b\n", "Expected YAML dict"),
    "bytes": ("\0\1", "control characters are not allowed"),
    "a file that is not there to include": ("include: nowhere.yaml\ntask: y\n", "No such file or directory"),
    "code that is not there": ("task: x\ndoc_to_text: !function utils.nope\n", "Cannot import module 'utils'"),
    "a group of nothing": ('{"group": "g", "task": ["nothing"]}', "TypeError"),
    "no name": ({"task": None}, "Unknown config shape"),
    "an unknown key": ({"frobnicate": 3}, "unexpected keyword argument 'frobnicate'"),
    "an unknown kind of output": ({"output_type": "frob"}, "Got invalid output_type 'frob'"),
    "an unknown part of the data": ({"test_split": "nothing"}, "KeyError: 'nothing'"),
    "no part of the data": ({"test_split": None}, "must have valid or test docs"),
    "an unknown column": ({"doc_to_text": "{{nothing}}"}, "'nothing' is undefined"),
    "a template that does not end": ({"doc_to_text": "{{ query"}, "unexpected end of template"),
    "more examples before a question than there are": ({"num_fewshot": 500}, "Sample larger than population"),
    "an unknown filter": (
        {"filter_list": [{"name": "x", "filter": [{"function": "frob"}]}]},
        "Unknown filter 'frob'",
    ),
    "data on the hub without a network": ({"dataset_path": "owner/name", "dataset_kwargs": {}}, "on the Hub"),
    "data that are not there": ({"dataset_kwargs": {"data_files": "nothing.jsonl"}}, "nothing.jsonl"),
    "data without examples": ({"dataset_kwargs": {"data_files": {"test": "empty.jsonl"}}}, "the data hold no example"),
    "data that are no JSON": ({"dataset_kwargs": {"data_files": {"test": "junk.jsonl"}}}, "generating the dataset"),
}


@pytest.mark.parametrize("what", WRONG_TASKS)
def test_a_wrong_task_is_one_line(
    what: str, files: list[Path], cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").write_text("")
    Path("junk.jsonl").write_text("{not json\n")
    wrong, words = WRONG_TASKS[what]
    if isinstance(wrong, str):
        files[0].write_text(wrong)
    else:
        tiny.edit_json(files[0], wrong)
    outcome = cli("evaluate", tiny.gpt2(tmp_path / "folder"), "--tasks", files[0])
    error, hint = outcome.err.splitlines()[-2:]
    assert (outcome.code, outcome.out) == (2, "") and words in error
    assert error.startswith(f"error: --tasks {files[0]}: lm_eval: ") and hint == "hint: --debug shows where"


def test_a_bug_in_the_model_is_no_wrong_task(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    from transformers import GPT2LMHeadModel

    monkeypatch.setattr(GPT2LMHeadModel, "forward", lambda *_, **__: [][0])
    with pytest.raises(IndexError):
        tformer.load(tiny.gpt2(tmp_path / "folder")).evaluate(tasks=str(files[0]))


def test_nothing_but_the_answer_is_printed_and_no_data_are_replaced(
    files: list[Path], cli: Any, tmp_path: Path
) -> None:
    pytest.importorskip("lm_eval")
    folder = tiny.gpt2(tmp_path / "folder")
    outcome = cli("evaluate", folder, "--tasks", files[1], "--limit", 2, "--num-fewshot", 1, "--json")
    assert json.loads(outcome.out)["examples"] == {"tiny_text": 2}
    assert outcome.err == "tiny_text keeps its num_fewshot of 0\n"
    data, before = files[1].with_suffix(".jsonl"), files[1].with_suffix(".jsonl").read_text()
    outcome = cli("evaluate", folder, "--tasks", files[1], "--predictions", data)
    assert outcome.code == 2 and "would replace what is read" in outcome.err and data.read_text() == before


def test_bars_and_warnings_of_others_are_as_before(files: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    import datasets

    logger = logging.getLogger("lm_eval")
    logger.setLevel(logging.WARNING)
    datasets.enable_progress_bars()
    tformer.load(tiny.gpt2(tmp_path / "folder")).evaluate(tasks=str(files[1]), limit=1)
    assert logger.level == logging.WARNING and not datasets.are_progress_bars_disabled()


@pytest.mark.parametrize("make", [tiny.bert, tiny.bart])
def test_other_models_are_refused_by_what_they_are(make: Any, files: list[Path], cli: Any, tmp_path: Path) -> None:
    outcome = cli("evaluate", make(tmp_path / "folder"), "--tasks", files[0])
    assert outcome.code == 2 and "--tasks has no meaning here" in outcome.err


def test_other_models_have_no_tasks(tmp_path: Path) -> None:
    folder = tiny.bert(tmp_path / "folder", "SequenceClassification")
    assert "tasks has no meaning here" in refused(folder, tasks="x.yaml").message


@pytest.mark.slow  # lm_eval looks through the files of all its tasks
def test_a_name_that_lm_eval_lacks_has_a_suggestion(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    error = refused(tiny.gpt2(tmp_path / "folder"), tasks="hellaswagg")
    assert "lm_eval has no task 'hellaswagg'" in error.message and "'hellaswag'" in (error.hint or "")


def test_without_the_extra_the_way_to_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    error = refused(tiny.gpt2(tmp_path / "folder"), tasks="x.yaml")
    assert "not installed" in error.message and "tformer[lm-eval]" in (error.hint or "")
