"""`tformer train --minutes`: the plan, the end on time, and runs that are repeated and resumed exactly."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import TINY_RECIPE, write_text
from tests.quick import first_is_quick
from tests.training.conftest import STEP_SECONDS
from tests.training.pair_makers import metrics, weights_of
from tformer.checkpoint.read import read_checkpoint
from tformer.cli import train
from tformer.cli.app import main
from tformer.optim.schedules import build_schedule
from tformer.recipe import load_recipe, sizes
from tformer.recipe.sizes import LADDERS, SLOW_OPERATIONS, TEXT
from tformer.support.errors import InputError
from tformer.support.formatting import in_words
from tformer.training import clock, plan, reporter, request, session
from tformer.training.loop import Trainer
from tformer.training.options import TrainOptions
from tformer.training.reporter import RunReporter
from tformer.workers.work import Work

Cli = Callable[..., Any]
MINUTES = 0.05
TIME_STEPS = plan._time_steps
PIECES = ("--set", "tokenizer.train.model=byte-bpe")


@pytest.fixture(autouse=True)
def time_counts_from_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes longer to prepare a training than these take in all."""
    count_from_the_first_step(monkeypatch)


def count_from_the_first_step(patch: pytest.MonkeyPatch) -> None:
    make = RunReporter._clock

    def make_now(self: RunReporter) -> Any:
        self.began = time.monotonic()
        return make(self)

    patch.setattr(RunReporter, "_clock", make_now)
    patch.setattr(train, "STARTED", time.monotonic())


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run by time, which no test changes."""
    folder = tmp_path_factory.mktemp("timed")
    (folder / "tiny.yaml").write_text(TINY_RECIPE)
    write_text(folder / "text.txt")
    words = ("--config", folder / "tiny.yaml", "--data", folder / "text.txt", "--out", folder / "run")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setenv("TFORMER_CACHE", str(folder / "cache"))
        patch.setattr(plan, "_time_steps", lambda short, longest: STEP_SECONDS)
        patch.setattr(sizes, "SLOW_OPERATIONS", 0.0)
        count_from_the_first_step(patch)
        main([str(word) for word in ("train", *words, "--minutes", MINUTES)])
    assert ended.value.code == 0
    return folder / "run"


@pytest.fixture
def timed_copy(timed: Path, tmp_path: Path) -> Path:
    """A copy of the run by time, to go on with."""
    return Path(shutil.copytree(timed, tmp_path / "run"))


@pytest.fixture
def start(cli: Cli, tiny_recipe: Path, text_file: Path, tmp_path: Path) -> Callable[..., Path]:
    """Train on a text by time into a folder of this name; the run."""

    def train_by_time(name: str, *words: object, minutes: float | None = MINUTES) -> Path:
        timed = () if minutes is None else ("--minutes", minutes)
        done = cli("train", "--config", tiny_recipe, "--data", text_file, "--out", tmp_path / name, *timed, *words)
        assert done.code == 0, done.err
        return tmp_path / name

    return train_by_time


def recipe_of(run: Path) -> Any:
    return load_recipe(config=run / "recipe.yaml").recipe


def test_it_ends_on_time_with_the_decay_done_and_the_last_step_validated_and_saved(timed: Path) -> None:
    run = timed
    assert metrics(run, "train")[-1]["seconds"] < 60 * MINUTES + 60  # exact ends are tested with a simulated clock
    recipe = recipe_of(run)
    points, last = recipe.schedule.points, recipe.training.max_steps
    assert recipe.schedule.kind == "timed" and points[-1] == (last, recipe.schedule.min_ratio)
    assert metrics(run, "valid")[-1]["step"] == last == metrics(run, "train")[-1]["step"]
    followed = build_schedule(recipe.schedule, total_steps=last, d_model=recipe.model.d_model)
    assert metrics(run, "train")[-1]["lr"] == pytest.approx(recipe.optimizer.lr * followed.scale(last))
    assert read_checkpoint(run / "checkpoints" / f"step-{last:08d}").recipe == recipe


def test_a_run_of_the_recipe_that_it_wrote_repeats_it_to_the_bit_without_a_clock(
    timed: Path, cli: Cli, text_file: Path, tmp_path: Path
) -> None:
    again = cli("train", "--config", timed / "recipe.yaml", "--data", text_file, "--out", tmp_path / "again")
    assert again.code == 0, again.err
    assert weights_of(tmp_path / "again") == weights_of(timed)
    assert metrics(tmp_path / "again", "valid")[-1]["loss"] == metrics(timed, "valid")[-1]["loss"]


def test_a_run_that_is_broken_off_in_its_decay_goes_on_along_the_same_line(
    start: Callable[..., Path], cli: Cli, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, decide = tmp_path / "run", RunReporter.decide

    def decide_and_break_off(self: RunReporter, step: int) -> Any:
        decide(self, step)
        assert self.trainer.clock is not None
        if self.trainer.clock.points:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunReporter, "decide", decide_and_break_off)
        with pytest.raises((KeyboardInterrupt, AssertionError)):
            start("run")
    line = recipe_of(run).schedule.points
    assert line is not None
    assert cli("train", "--resume", "--out", run).code == 0
    recipe = recipe_of(run)
    assert recipe.schedule.points[0] == line[0]
    assert cli("train", "--config", run / "recipe.yaml", "--data", text_file, "--out", tmp_path / "again").code == 0
    assert weights_of(tmp_path / "again") == weights_of(run)


def test_resume_with_minutes_plans_the_rest(timed_copy: Path, cli: Cli) -> None:
    run = timed_copy
    first = recipe_of(run)
    outcome = cli("train", "--resume", "--out", run, "--minutes", MINUTES)
    assert outcome.code == 0 and "plan for" not in outcome.err, "the model is that of the run"
    second = recipe_of(run)
    assert second.training.max_steps > first.training.max_steps == first.schedule.points[-1][0]
    assert second.schedule.points[0][0] > first.training.max_steps  # its rate was high again before it fell


def test_steps_given_later_take_the_place_of_the_clock(timed_copy: Path, cli: Cli) -> None:
    run = timed_copy
    steps = recipe_of(run).training.max_steps + 5
    assert cli("train", "--resume", "--out", run, "--max-steps", steps).code == 0
    recipe = recipe_of(run)
    assert (recipe.training.minutes, recipe.training.max_steps, recipe.schedule.kind) == (None, steps, "wsd")


def test_steps_and_minutes_together_end_at_the_first_that_is_reached(start: Callable[..., Path]) -> None:
    recipe = recipe_of(start("run", "--max-steps", 15))
    assert recipe.training.max_steps == 15 and recipe.schedule.points[-1] == (15, recipe.schedule.min_ratio)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["schedule.kind=cosine"], "schedule.kind: found cosine, expected timed with training.minutes"),
        (["model.decoder.drophead={rate: 0.1, start: 0.3}"], "model.decoder.drophead: .*number of steps"),
    ],
)
def test_what_needs_the_number_of_steps_is_refused(values: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_recipe(arch="gpt", preset="tiny", flags={"training.minutes": 2.0}, sets=values)


def test_a_schedule_that_needs_the_number_of_steps_is_replaced_with_the_same_peak_rate() -> None:
    as_shipped = load_recipe(arch="transformer", preset="base").recipe
    timed = load_recipe(arch="transformer", preset="base", flags={"training.minutes": 9.0}).recipe
    assert (as_shipped.schedule.kind, timed.schedule.kind, timed.schedule.points) == ("noam", "timed", None)
    peak = as_shipped.optimizer.lr * (as_shipped.model.d_model * as_shipped.schedule.warmup_steps) ** -0.5
    assert timed.optimizer.lr == pytest.approx(peak)


def planned(
    cli: Cli, text_file: Path, monkeypatch: pytest.MonkeyPatch, flops: float, minutes: float, *words: object
) -> dict[str, Any]:
    """What a dry run shows for a GPT on a device with this rate."""

    def seconds(key: tuple[Any, ...], measure: Callable[[], float]) -> float:
        model = json.loads(key[0])["model"]
        parameters = 12 * model["decoder"]["num_layers"] * model["d_model"] ** 2 + 2 * 2048 * model["d_model"]
        return 6 * parameters * 4096 / flops

    monkeypatch.setattr(plan, "measured_once", seconds)
    monkeypatch.setattr(train, "STARTED", time.monotonic())
    done = cli("train", "--arch", "gpt", "--data", text_file, "--minutes", minutes, "--dry-run", "--json", *words)
    assert done.code == 0, done.err
    shown: dict[str, Any] = json.loads(done.out)
    return shown | {"said": " ".join(done.err.split())}


@pytest.mark.slow
def test_a_fast_device_and_a_long_time_get_a_larger_model(
    cli: Cli, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU plans for the same minutes as a CPU, with a larger model: simulated rates.

    Its quick twin is `test_a_step_takes_at_most_a_twentieth_of_the_time_and_timing_a_tenth_by_a_smaller_batch`.
    """

    def tried(rate: float, minutes: float) -> int:
        """The last but one of the sizes fits, or the last."""
        return len(planned(cli, text_file, monkeypatch, rate, minutes, *PIECES)["sizes"])

    said = [planned(cli, text_file, monkeypatch, rate, 2.0, *PIECES)["said"] for rate in (1e9, 1e17)]
    assert ["for each parameter; 20 would be usual: give it more minutes" in each for each in said] == [True, False]
    faster = [tried(rate, 2.0) for rate in (1e9, 1e11, 1e12, 1e17)]
    assert faster == sorted(faster) and faster[0] < faster[-1] == len(TEXT.sizes)
    longer = [tried(1e11, minutes) for minutes in (1.0, 10.0, 100.0)]
    assert longer == sorted(longer) and longer[0] < longer[-1]


@first_is_quick(("words", "few", "many"), [((), 0.0, 0.05), (("--set", "model.decoder.dropout=0.01"), 0.01, 0.01)])
def test_data_that_are_read_often_bring_dropout_unless_the_user_sets_it(
    words: tuple[str, ...], few: float, many: float, cli: Cli, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rate, expected in ((1e5, few), (1e14, many)):
        shown = planned(cli, text_file, monkeypatch, rate, 2.0, *words)
        recipe = load_recipe(base_yaml=shown["recipe_yaml"]).recipe
        assert recipe.model.decoder is not None and recipe.model.decoder.dropout == expected


@pytest.fixture
def seconds_of_an_example(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[float]]:
    """Let each example of a timed step take this long by a simulated clock; the seconds of all timed steps."""

    def simulate(seconds: float) -> list[float]:
        steps: list[float] = []
        now = SimpleNamespace(perf_counter=lambda: sum(steps), monotonic=lambda: train.STARTED + sum(steps))
        monkeypatch.setattr(plan, "time", now)
        monkeypatch.setattr(plan, "measured_once", lambda key, measure: measure())
        monkeypatch.setattr(train, "STARTED", time.monotonic())
        monkeypatch.setattr(plan, "_time_steps", TIME_STEPS)
        monkeypatch.setattr(
            Trainer, "train_step", lambda self: steps.append(seconds * plan._batch(self.recipe.training))
        )
        return steps

    return simulate


@pytest.mark.parametrize("batch", [("--batch-size", 256), ("--batch-size", 32, "--set", "training.grad_accum=8")])
@pytest.mark.parametrize("seconds", [0.001, 0.05, 0.4, 3.0])
def test_a_step_takes_at_most_a_twentieth_of_the_time_and_timing_a_tenth_by_a_smaller_batch(
    seconds: float, batch: tuple[object, ...], cli: Cli, tiny_recipe: Path, text_file: Path,
    seconds_of_an_example: Callable[[float], list[float]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(plan, "example_flops", lambda *_, **__: SimpleNamespace(training=seconds / plan.SLOWEST))
    monkeypatch.setattr(plan, "measure_peak", lambda prepared: 1.0)
    steps = seconds_of_an_example(seconds)
    words = ("train", "--config", tiny_recipe, "--data", text_file, "--minutes", 1, "--dry-run", "--json", *batch)
    done = cli(*words)
    assert done.code == 0, done.err
    training = load_recipe(base_yaml=json.loads(done.out)["recipe_yaml"]).recipe.training
    own = plan._batch(training)
    assert own * seconds <= 3.0 and sum(steps) <= 2 * 3.0
    assert own == 256 or 2 * own * seconds > 3.0, "no smaller than needed"
    assert (own == 256) == (seconds == 0.001) == ("batch size" not in done.err)


def test_the_first_step_is_all_that_is_timed_where_it_is_longer_than_operations_say(
    cli: Cli, tiny_recipe: Path, text_file: Path, seconds_of_an_example: Callable[[float], list[float]]
) -> None:
    steps = seconds_of_an_example(1.0)  # about 100,000 times as long as here
    done = cli("train", "--config", tiny_recipe, "--data", text_file, "--minutes", 1, "--dry-run", "--batch-size", 32)
    assert done.code == 0, done.err
    assert steps == [
        32.0
    ] and "batch size 2 instead of 32, so that a step takes at most a twentieth of the time" in " ".join(
        done.err.split()
    )


def test_a_model_too_large_for_the_time_is_refused_before_a_step(
    cli: Cli, tiny_recipe: Path, text_file: Path, seconds_of_an_example: Callable[[float], list[float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(plan, "measure_peak", lambda prepared: 1e4)
    steps = seconds_of_an_example(1.0)
    done = cli("train", "--config", tiny_recipe, "--data", text_file, "--minutes", 1, "--dry-run")
    assert (done.code, steps) == (2, []) and "a step on one example takes at least" in done.err
    assert "hint: choose a smaller model, or --minutes" in " ".join(done.err.split())


def test_data_that_take_most_of_the_time_end_the_command(
    cli: Cli, tiny_recipe: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "PREPARING_SECONDS", 0.0)
    text_file.write_text(text_file.read_text() + "a text that no cache has\n")
    words = ("train", "--config", tiny_recipe, "--data", text_file, "--out", tmp_path / "run", "--minutes", 1e-6)
    done = cli(*words)
    assert done.code == 2 and "tokenizing the data takes nearly all of the time" in " ".join(done.err.split())
    assert not (tmp_path / "run").exists()


def test_a_validation_that_outlasts_the_time_is_broken_off_and_repeated_by_resume(
    start: Callable[..., Path], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never_ends(self: RunReporter, work: Work, share: float | None = None) -> dict[str, Any]:
        while not work.should_stop():
            time.sleep(0.01)
        return {"loss": 0.0}

    monkeypatch.setattr(clock, "LATE_SECONDS", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(RunReporter, "_validate", never_ends)
        run = start("run")
    assert metrics(run, "valid") == [] and (run / "checkpoints" / "latest").exists()
    assert cli("train", "--resume", "--out", run, "--max-steps", metrics(run, "train")[-1]["step"] + 1).code == 0
    assert metrics(run, "valid")


def test_a_validation_is_tried_out_also_in_a_short_training_by_time(
    start: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is known before the last step is chosen; without a clock a short training needs none."""
    tried: list[float] = []
    monkeypatch.setattr(reporter, "expected_seconds", lambda run: tried.append(0.0) or 0.0)
    monkeypatch.setattr(reporter, "FORECAST_SECONDS", 0.0)
    start("steps", minutes=None)
    assert tried == []
    start("time")
    assert tried == [0.0]


def test_what_a_guess_reaches_is_measured_before_the_steps_whose_number_depends_on_the_time_left(
    start: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, run = [], Trainer.run

    def run_then(self: Trainer, events: Any, **options: Any) -> Any:
        found.append((tmp_path / "run" / "baseline.json").is_file())
        return run(self, events, **options)

    monkeypatch.setattr(Trainer, "run", run_then)
    start("run")
    assert found == [True]


@pytest.mark.parametrize(
    ("words", "rate", "pieces", "ngram"),
    [
        ({"arch": "gpt"}, 20e9, 512, 4),
        ({"arch": "llama"}, 20e9, 512, 4),
        ({"arch": "gpt"}, 200e9, 2048, 1),
        ({"arch": "gpt", "minutes": 20.0}, 20e9, 2048, 1),
        ({"arch": "gpt", "sets": ("tokenizer.train.vocab_size=4096",)}, 20e9, 4096, 1),
        ({"arch": "gpt", "sets": ("model.embedding.ngram=2",)}, 20e9, 512, 2),
        ({"arch": "roberta"}, 20e9, 8000, 1),
        ({"arch": "gpt", "preset": "mini", "minutes": 2.0}, 20e9, 2048, 1),
    ],
)
def test_few_operations_are_spent_on_few_pieces_unless_the_user_sets_their_number(
    words: dict[str, Any], rate: float, pieces: int, ngram: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "SLOW_OPERATIONS", SLOW_OPERATIONS)
    monkeypatch.setattr(request, "products_per_second", lambda device: rate)
    start = request.find_training(TrainOptions(**words))
    for recipe in start.sizes.recipes or (start.recipe,):
        assert (recipe.tokenizer.train.vocab_size, recipe.model.embedding.ngram) == (pieces, ngram)
    said = f"model size: chosen for {in_words(60 * words.get('minutes', 2.0))} (--preset NAME for a fixed one)"
    assert (start.notes[:1] == (said,)) == ("preset" not in words)


@pytest.mark.slow
def test_sixty_steps_of_the_smallest_size_are_better_than_a_bigram_table(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread with AVX2 computes them in some 10 s: the first command on a slow machine beats a guess."""
    monkeypatch.setattr(sizes, "SLOW_OPERATIONS", math.inf)
    monkeypatch.setattr(plan, "measured_once", lambda key, measure: 1.0)
    monkeypatch.setattr(train, "STARTED", time.monotonic())
    done = cli(
        "train", "--arch", "gpt", "--out", tmp_path / "run", "--minutes", 60, "--max-steps", 60, "--precision", "fp32"
    )
    assert done.code == 0, done.err
    assert "a bigram table" in done.err and "not yet better" not in done.err


def test_every_ladder_has_sizes_that_grow() -> None:
    for ladder in LADDERS.values():
        assert list(ladder.sizes) == sorted(set(ladder.sizes)) and ladder.tokens_per_parameter > 0


def test_a_forecast_changes_no_weight_and_no_metric(
    start: Callable[..., Path], cli: Cli, tiny_recipe: Path, text_file: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    plain = start("plain", minutes=None)
    monkeypatch.setattr(reporter, "SHORT_TRAINING", 0.0)
    monkeypatch.setattr(reporter, "FORECAST_SECONDS", 0.0)
    done = cli("train", "--config", tiny_recipe, "--data", text_file, "--out", tmp_path / "foreseen")
    assert "expected: " in done.err and "in all, until" in done.err
    assert weights_of(tmp_path / "foreseen") == weights_of(plain)
    losses = [[each["loss"] for each in metrics(run, "valid")] for run in (plain, tmp_path / "foreseen")]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_several_processes_end_together_on_time(start: Callable[..., Path], tmp_path: Path) -> None:
    began = time.monotonic()
    run = start("run", "--devices", 2, minutes=0.4)
    assert time.monotonic() - began < 24 + 60
    recipe = recipe_of(run)
    assert recipe.schedule.points[-1] == (recipe.training.max_steps, 0.1) == (metrics(run, "valid")[-1]["step"], 0.1)
