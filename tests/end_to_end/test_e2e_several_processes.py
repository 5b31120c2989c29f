"""`tformer train` under torchrun and under the variables of srun: one run, and one message where it fails."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="ends its process group")]
LIMIT_SECONDS = 240


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command, whose process group is killed when it takes too long."""
    try:
        out, err = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, out, err


def start(words: Sequence[object], cwd: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*map(str, words)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def words(text_file: Path, tiny_recipe: Path) -> list[object]:
    return ["train", "--config", tiny_recipe, "--data", text_file, "--out", "run"]


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_torchrun_makes_one_run_and_one_summary(words: list[object], tmp_path: Path) -> None:
    code, out, err = finished(start([*TORCHRUN, "-m", "tformer", *words, "--json"], tmp_path, {}))
    assert code == 0, err
    assert json.loads(out)["step"] == 12 and err.count("step 12 ") == 1
    assert "2 processes" in json.loads((tmp_path / "run/environment.json").read_text())["device"]


def test_layerdrop_on_several_processes_shows_no_warning_of_pytorch(words: list[object], tmp_path: Path) -> None:
    """DDP would call the search for unused parameters needless, once for each process."""
    command = [sys.executable, "-m", "tformer", *words, "--devices", 2, "--set", "model.decoder.layerdrop=0.2"]
    code, _, err = finished(start([*command, "--max-steps", 2], tmp_path, {}))
    assert code == 0 and "step 2" in err
    assert "Warning" not in err and "unused" not in err


def test_a_sweep_trains_each_variant_with_several_processes(words: list[object], tmp_path: Path) -> None:
    _, config, recipe, *data, _, _ = words
    command = [sys.executable, "-m", "tformer", "sweep", config, recipe, "--vary", "training.batch_size=2,4"]
    more = ["--out", "sweep", "--", *data, "--max-steps", 2, "--devices", 2]
    code, _, err = finished(start([*command, *more], tmp_path, {}))
    assert code == 0, err
    devices = [json.loads(path.read_text())["device"] for path in (tmp_path / "sweep/runs").glob("*/environment.json")]
    assert len(devices) == 2 and all("2 processes" in device for device in devices)


def test_an_error_under_torchrun_is_one_message(words: list[object], tmp_path: Path) -> None:
    lines = f'exec {sys.executable} -m tformer "$@" --lr 0.0$((RANK + 1))'
    program = tmp_path / "other.sh"
    program.write_text(lines)
    code, _, err = finished(start([*TORCHRUN, "--no-python", "bash", program, *words], tmp_path, {}))
    assert code == 1 and err.count("error: ") == 1, err
    assert "error: rank 1: --lr: found 0.02 in the process of rank 1, 0.01 in that of rank 0" in err
    assert not (tmp_path / "run").exists()


def test_the_variables_of_srun_make_a_group_and_a_signal_to_one_of_it_saves(
    words: list[object], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        variables = {
            "SLURM_PROCID": rank,
            "SLURM_STEP_NUM_TASKS": 2,
            "SLURM_LOCALID": rank,
            "SLURM_NTASKS_PER_NODE": 2,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        command = [sys.executable, "-m", "tformer", *words, "--max-steps", 100_000]
        processes.append(start(command, tmp_path, {name: str(value) for name, value in variables.items()}))
    records = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + LIMIT_SECONDS
    while not records.exists() and time.monotonic() < deadline and processes[0].poll() is None:
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGTERM)
    ended = [finished(process) for process in processes]
    assert [code for code, _, _ in ended] == [130, 143], ended
    messages = "".join(err for _, _, err in ended)
    assert messages.count("error: ") == 1 and "error: interrupted: saved at step" in messages
