"""--log-to: what loggers receive, how a resumed run continues its logs, and that no logger ends a training."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tformer.support.errors import InputError
from tformer.training import loggers as module
from tformer.training.loggers import LOGGERS, LOGGERS_FILE, LoggedRun, Logger, Loggers, Status, logger_names

Cli = Callable[..., Any]


class Notebook(Logger):
    """Writes down what it receives; `fails` names the method that fails."""

    package = "json"
    received: ClassVar[list[tuple[Any, ...]]] = []
    fails: ClassVar[str] = ""

    def __init__(self, run: LoggedRun, state: Mapping[str, str] | None) -> None:
        self._note("init", run, state)
        self.place, self.state = "a notebook", {"page": "7"}

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._note("metrics", step, dict(values))

    def sample(self, step: int, text: str) -> None:
        self._note("sample", step, text)

    def close(self, status: Status) -> None:
        self._note("close", status)

    def _note(self, kind: str, *values: Any) -> None:
        if kind == self.fails:
            raise RuntimeError(f"no paper for {kind}")
        self.received.append((kind, *values))


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> type[Notebook]:
    monkeypatch.setitem(LOGGERS, "notebook", Notebook)
    monkeypatch.setattr(Notebook, "received", [])
    return Notebook


@pytest.fixture
def train(cli: Cli, tiny_recipe: Path, text_file: Path, tmp_path: Path) -> Cli:
    def run(name: str, *flags: object) -> Any:
        return cli("train", "--config", tiny_recipe, "--data", text_file, "--out", tmp_path / name, *flags)

    return run


def of_kind(kind: str) -> list[tuple[Any, ...]]:
    return [entry[1:] for entry in Notebook.received if entry[0] == kind]


def numbers(run: Path) -> list[tuple[int, dict[str, float]]]:
    """What the loggers of a run receive, from its metrics.jsonl."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        (
            record["step"],
            {
                f"{record['split']}/{name}": value
                for name, value in record.items()
                if name != "step" and type(value) in (int, float)
            },
        )
        for record in records
    ]


def test_a_logger_receives_recipe_environment_every_record_and_every_sample(
    notebook: type[Notebook], train: Cli, tmp_path: Path
) -> None:
    outcome = train("run", "--log-to", "notebook,notebook")
    assert outcome.code == 0 and outcome.err.count("logging to notebook: a notebook") == 1
    run = tmp_path / "run"
    [(logged, state)] = of_kind("init")
    assert state is None and logged.path == run and logged.first_step == 0
    assert logged.recipe["model"]["d_model"] == 16 and logged.recipe_yaml == (run / "recipe.yaml").read_text()
    assert logged.environment == json.loads((run / "environment.json").read_text())
    assert of_kind("metrics") == numbers(run) and any("valid/loss" in values for _, values in numbers(run))
    samples = (run / "samples.txt").read_text()
    assert of_kind("sample") and all(f"=== step {step} ===\n{text}" in samples for step, text in of_kind("sample"))
    assert of_kind("close") == [("finished",)]
    assert json.loads((run / LOGGERS_FILE).read_text()) == {"notebook": {"page": "7"}}


def test_a_resumed_run_continues_its_logs_without_being_asked(notebook: type[Notebook], train: Cli) -> None:
    train("run", "--max-steps", 6, "--log-to", "notebook")
    first = of_kind("metrics")
    assert train("run", "--resume", "--max-steps", 12).code == 0
    (_, new), (resumed, state) = of_kind("init")
    assert new is None and state == {"page": "7"} and resumed.first_step == 6
    assert [step for step, _ in of_kind("metrics")[len(first) :]] == [9, 12, 12]


def test_a_logger_changes_nothing_of_a_training(notebook: type[Notebook], train: Cli, tmp_path: Path) -> None:
    found = []
    for name, flags in (("plain", ()), ("logged", ("--log-to", "notebook"))):
        assert train(name, *flags).code == 0
        latest = (tmp_path / name / "checkpoints" / "latest").read_text().strip()
        weights = (tmp_path / name / "checkpoints" / latest / "model.safetensors").read_bytes()
        found.append((weights, (tmp_path / name / "samples.txt").read_text()))
    assert found[0] == found[1] and not (tmp_path / "plain" / LOGGERS_FILE).exists()


@pytest.mark.parametrize("fails", ["init", "metrics", "sample", "close"])
def test_a_logger_that_fails_never_ends_a_training(
    fails: str, notebook: type[Notebook], train: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebook, "fails", fails)
    outcome = train("run", "--log-to", "notebook", "--max-steps", 6)
    assert outcome.code == 0
    assert outcome.err.count("notebook failed and logs no more, the training goes on: RuntimeError: no paper") == 1


def test_only_the_first_process_logs(notebook: type[Notebook], tmp_path: Path) -> None:
    run = LoggedRun(tmp_path, 0, {}, "", {})
    Loggers(["notebook"], run, lambda _: None, enabled=False).record({"split": "train", "step": 1, "loss": 2.0})
    assert notebook.received == [] and not (tmp_path / LOGGERS_FILE).exists()


def test_the_log_of_a_package_that_is_gone_ends_with_a_note(
    notebook: type[Notebook], train: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    train("run", "--max-steps", 6, "--log-to", "notebook")
    monkeypatch.setattr(notebook, "package", "no_such_package")
    outcome = train("run", "--resume", "--max-steps", 9)
    assert outcome.code == 0 and "notebook is not installed" in outcome.err


def test_a_damaged_record_of_the_logs_starts_new_ones_and_says_so(
    notebook: type[Notebook], train: Cli, tmp_path: Path
) -> None:
    train("run", "--max-steps", 6, "--log-to", "notebook")
    (tmp_path / "run" / LOGGERS_FILE).write_text("{")
    resumed = train("run", "--resume", "--max-steps", 9, "--log-to", "notebook")
    assert resumed.code == 0 and "the run's logs are not continued" in resumed.err
    assert [state for _, state in of_kind("init")] == [None, None]


def test_an_unknown_logger_is_one_line(train: Cli, tmp_path: Path) -> None:
    outcome = train("run", "--log-to", "tensorbord")
    assert outcome.code == 2 and not (tmp_path / "run").exists()
    error, hint = outcome.err.splitlines()
    assert error == "error: --log-to: found 'tensorbord', expected tensorboard, wandb"
    assert "did you mean 'tensorboard'?" in hint


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_package_is_one_line_with_the_command_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(InputError) as caught:
        logger_names([name])
    assert caught.value.message == f"--log-to {name} needs the package {LOGGERS[name].package}, which is not installed"
    assert caught.value.hint == f"pip install 'tformer[{name}]'"


def test_every_logger_has_an_extra_of_its_name() -> None:
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((Path(module.__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(LOGGERS) <= set(extras["optional-dependencies"])


# The real packages: each log is read back.


@pytest.fixture
def resumed(train: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A run of 6 steps, resumed to 12, that logs to the named logger."""
    monkeypatch.chdir(tmp_path)
    for variable in ("WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(variable, raising=False)

    def run(name: str) -> Path:
        for flags in (("--max-steps", 6, "--log-to", name), ("--resume", "--max-steps", 12)):
            outcome = train("run", *flags)
            assert outcome.code == 0 and f"logging to {name}:" in outcome.err and "failed" not in outcome.err
        return tmp_path / "run"

    return run


@pytest.mark.slow
def test_tensorboard_reads_back_one_series_of_a_resumed_run(resumed: Callable[[str], Path]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = resumed("tensorboard")
    events = accumulator.EventAccumulator(str(run / "tensorboard")).Reload()
    for tag in ("train/loss", "valid/loss"):
        found = [(event.step, event.value) for event in events.Scalars(tag)]
        wanted = [(step, values[tag]) for step, values in numbers(run) if tag in values]
        assert [step for step, _ in found] == [step for step, _ in wanted]
        assert [value for _, value in found] == pytest.approx([value for _, value in wanted])
    texts = {
        tag.split("/")[0]: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        for tag in events.Tags()["tensors"]
    }
    assert texts.keys() == {"recipe", "environment", "sample"}
    assert "    d_model: 16" in texts["recipe"] and "versions" in texts["environment"]


WANDB_BLOCK_BYTES, WANDB_HEADER_BYTES = 32768, 7
WANDB_FULL, WANDB_LAST = 1, 4


def wandb_records(path: Path) -> list[Any]:
    """The records of an offline log: protocol buffers in blocks, each part with checksum, length and kind."""
    protocol = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, place, parts, found = path.read_bytes(), WANDB_HEADER_BYTES, b"", []
    while place + WANDB_HEADER_BYTES <= len(data):
        left = WANDB_BLOCK_BYTES - place % WANDB_BLOCK_BYTES
        if left < WANDB_HEADER_BYTES:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        place += WANDB_HEADER_BYTES + length
        parts += data[place - length : place]
        if kind in (WANDB_FULL, WANDB_LAST):
            record = protocol.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


@pytest.mark.slow
def test_wandb_logs_offline_without_a_key_and_a_resumed_run_keeps_its_id(
    resumed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = resumed("wandb")
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2 and len({file.stem for file in files}) == 1  # one id
    records = [record for file in files for record in wandb_records(file)]
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    tag = "train/loss"
    wanted = [(step, values[tag]) for step, values in numbers(run) if tag in values]
    assert [(row["step"], row[tag]) for row in rows if tag in row] == wanted
    assert any("sample" in key for row in rows for key in row)
    [config, *_] = [record.run.config for record in records if record.WhichOneof("record_type") == "run"]
    values = {item.key: json.loads(item.value_json) for item in config.update}
    assert values["model"]["d_model"] == 16 and "versions" in values["environment"]
