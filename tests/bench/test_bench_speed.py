"""From flags to a benchmark, mistakes found before measuring, and the order of measuring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tformer.bench import speed
from tformer.bench.options import (
    BenchGenerateOptions,
    BenchTrainOptions,
    BenchTranslateOptions,
    ModelOptions,
    SpeedOptions,
)
from tformer.bench.speed import CHARACTERS, ContenderSpec, Measurement, SpeedBench, resolve, run_speed
from tformer.bench.workloads.decoding import GenerationWorkload
from tformer.support.errors import InputError

OPTIONS: dict[str, type[SpeedOptions]] = {
    options.work: options for options in (BenchTrainOptions, BenchGenerateOptions, BenchTranslateOptions)
}
CHAR = ModelOptions(arch="gpt", preset="char")
FP32: dict[str, Any] = {"precision": "fp32", "device": "cpu"}


def settled(work: str = "train", **flags: Any) -> SpeedBench:
    return resolve(OPTIONS[work](**{"model": CHAR, **FP32, **flags}))[0]


def test_the_shapes_that_the_issue_names() -> None:
    """nanoGPT's baby shape, and GPT-2 with its 50,257 tokens."""
    baby = settled().recipe.model
    assert baby.decoder is not None and (baby.decoder.num_layers, baby.d_model, baby.vocab_size) == (6, 384, CHARACTERS)
    assert settled().length == 256 and settled().batch_sizes == (16,)
    bench, notes = resolve(BenchTrainOptions(model=ModelOptions(arch="gpt", preset="small"), length=512, **FP32))
    assert bench.recipe.model.vocab_size == 50257 and bench.length == 512
    assert notes[-1] == "model: gpt/small, 124,439,808 parameters"


def test_an_assumed_vocabulary_is_said() -> None:
    _, notes = resolve(BenchTrainOptions(model=CHAR, **FP32))
    assert notes[0].startswith("vocabulary: 65 tokens")
    _, notes = resolve(BenchTrainOptions(model=CHAR, **FP32, sets=("model.vocab_size=96",)))
    assert len(notes) == 1


@pytest.mark.usefixtures("int8")
def test_a_row_for_each_format_all_made_by_the_workload() -> None:
    bench = settled("generate", quantize="none,int8", new_tokens=4)
    assert [entry.label for entry in bench.entries] == ["tformer fp32", "tformer int8"]
    assert bench.workload is GenerationWorkload and len({entry.maker for entry in bench.entries}) == 1


@pytest.mark.parametrize("int8", [False], indirect=True)
@pytest.mark.parametrize("work", ["generate", "translate"])
def test_8_bits_are_refused_ahead_where_there_are_none(int8: None, work: str) -> None:
    flags = {"model": ModelOptions(), "new_tokens": 4}
    with pytest.raises(InputError, match="--quantize int8 needs a CPU with 8-bit products"):
        settled(work, quantize="none,int8", **flags)
    [entry] = settled(work, quantize="none", **flags).entries
    assert entry.label == "tformer fp32"


@pytest.mark.usefixtures("int8")
def test_8_bits_beside_fp16_are_refused_ahead() -> None:
    with pytest.raises(InputError, match="--quantize int8 goes with bf16 or fp32, found fp16"):
        settled("generate", quantize="int8", precision="fp16")


def test_threads_are_the_same_for_all() -> None:
    import torch

    before = torch.get_num_threads()
    try:
        assert settled().threads == before
        assert settled(threads=1).threads == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("work", "flags", "told"),
    [
        ("train", {"model": ModelOptions(arch="gpt", preset="none")}, "none"),
        ("train", {"model": ModelOptions(arch="vit", preset="tiny")}, "image models cannot be benchmarked"),
        ("generate", {"length": 300, "new_tokens": 1}, "--prompt-length: found 300"),
        ("generate", {"model": ModelOptions(arch="bert", preset="tiny")}, "has no decoder"),
    ],
)
def test_mistakes(work: str, flags: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        settled(work, **flags)


def test_a_config_file(tiny_recipe: Path) -> None:
    bench = settled(model=ModelOptions(config=tiny_recipe))
    assert bench.model == str(tiny_recipe) and bench.recipe.model.d_model == 16


Make = Callable[..., SpeedBench]
OURS, PLAIN, HALF = (
    ContenderSpec("tformer", "bf16"),
    ContenderSpec("transformers", "fp32"),
    ContenderSpec("transformers", "bf16"),
)


LIMITS = {"ceilings": {"bytes_per_second": 1.0}, "costs": [None, {"flops": 2.0}, None]}
TIMED = {"seconds": 0.5, "minimum": 0.4, "spread": 0.1, "repeats": 3, "tokens": 64, "memory": {"peak_rss_bytes": 7}}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[Any, ...]]]:
    """`asked(limits, row)`: what is measured, in order; `row(entry)` answers in the place of processes."""

    def use(limits: dict[str, Any], row: Callable[[ContenderSpec], dict[str, Any]]) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []

        def run(measurement: str, given: Mapping[str, Any], **_: Any) -> dict[str, Any]:
            calls.append((given["batch_size"], measurement.partition(":")[2]))
            if "failed" in limits:
                return limits
            count = len(SpeedBench.from_json(given["bench"]).entries)
            return {**limits, "costs": limits["costs"][:count]}

        def race(measurement: str, contenders: Sequence[Mapping[str, Any]], **rules: Any) -> list[Any]:
            entries = [ContenderSpec(*one["entry"]) for one in contenders]
            calls.append((contenders[0]["batch_size"], *entries))
            assert measurement == "tformer.bench.speed:start_contender"
            assert (rules["repeats"], rules["max_seconds"]) == (10, 600.0)
            return [row(entry) for entry in entries]

        monkeypatch.setattr(speed, "run_isolated", run)
        monkeypatch.setattr(speed, "race", race)
        return calls

    return use


def run(bench: SpeedBench) -> list[Measurement]:
    return run_speed(bench, on_row=lambda _: None, should_stop=lambda: False)


def test_ceilings_and_then_all_in_turn_at_every_batch_size(make_speed_bench: Make, asked: Any) -> None:
    calls = asked(LIMITS, lambda _: TIMED)
    rows = run(make_speed_bench(entries=(OURS, PLAIN), batch_sizes=(4, 8)))
    assert calls == [(4, "measure_limits"), (4, OURS, PLAIN), (8, "measure_limits"), (8, OURS, PLAIN)]
    assert [(row.entry, row.batch_size) for row in rows] == [
        (OURS, 4), (PLAIN, 4), (OURS, 8), (PLAIN, 8),
    ]  # fmt: skip
    assert rows[0].tokens_per_second == 128 and rows[0].memory == {"peak_rss_bytes": 7} and rows[0].is_ours
    assert rows[1].cost == {"flops": 2.0} and rows[1].ceilings == {"bytes_per_second": 1.0}


def test_what_fails_is_said_and_the_rest_goes_on(make_speed_bench: Make, asked: Any) -> None:
    asked(LIMITS, lambda entry: {"failed": "out of memory"} if entry == PLAIN else TIMED)
    rows = run(make_speed_bench(entries=(OURS, PLAIN, HALF)))
    assert [row.failed for row in rows] == [None, "out of memory", None]


def test_without_ceilings_nothing_is_timed(make_speed_bench: Make, asked: Any) -> None:
    calls = asked({"failed": "over 3 s"}, lambda _: TIMED)
    assert run(make_speed_bench(entries=(OURS,))) == [Measurement(OURS, 2, 8, failed="over 3 s (ceilings)")]
    assert calls == [(2, "measure_limits")]


def test_a_bench_travels_as_json(make_speed_bench: Make) -> None:
    import json

    bench = make_speed_bench(options={"new_tokens": 3}, batch_sizes=(1, 8))
    assert SpeedBench.from_json(json.loads(json.dumps(asdict(bench)))) == bench
