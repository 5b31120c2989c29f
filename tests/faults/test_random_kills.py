"""Every command that writes is killed (SIGKILL) at random moments and then run again: nothing is lost, nothing differs.

The moments are drawn uniformly over the processor time of an undisturbed run. `TFORMER_KILLS=300 pytest -m slow
tests/faults/test_random_kills.py` sets the number of kills (20 by default), `TFORMER_KILLS_SEED` their seed (0).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.conftest import TINY_RECIPE
from tests.end_to_end.conftest import ENCODER, GENERATOR, IMAGES
from tests.end_to_end.labelled_examples import documents, sentences, write_images, write_table
from tests.faults.killing import Case, Place
from tests.training.pair_makers import RECIPE, english, german

KILLS = int(os.environ.get("TFORMER_KILLS", "20"))
SEED = int(os.environ.get("TFORMER_KILLS_SEED", "0"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")]

STEPS = (
    *("--max-steps", "8", "--set", "training.eval_every=4", "--set", "training.save_every=2"),
    *("--set", "training.log_every=1", "--set", "training.keep_last=2"),
)
SHARES = {"sweep": 0.4, "bench": 0.2}
"""Kills of slow commands, relative to those of the others."""


def write_inputs(home: Path) -> None:
    """Recipes and data that all cases read."""
    joint = RECIPE.replace("vocab_size: 60", "vocab_size: 160").replace("best_metric: bleu", "best_metric: loss")
    recipes = {
        "gpt": TINY_RECIPE,
        "bert": ENCODER,
        "electra": ENCODER + GENERATOR,
        "vit": IMAGES,
        "transformer": RECIPE,
        "t5": joint.replace("template: seq2seq", "template: t5"),
        "bart": joint.replace("template: seq2seq", "template: roberta"),
    }
    for name, text in recipes.items():
        (home / f"{name}.yaml").write_text(text)
    write_table(home / "labelled.tsv", ("label", "text"), [*sentences(80, 0)])
    documents(home / "documents")
    write_images(home / "images", 20)
    texts = english(60)
    (home / "source.txt").write_text("\n".join(texts) + "\n")
    (home / "target.txt").write_text("\n".join(map(german, texts)) + "\n")
    (home / "text.txt").write_text("\n".join(text for _, text in sentences(300, 6)) + "\n")
    (home / "long.txt").write_text("\n".join(text for _, text in sentences(30_000, 7)) + "\n")


def cases_of(home: Path) -> dict[str, Case]:
    """All cases; the runs that some of them read lie in `home`."""

    def train(recipe: str, *words: str, **more: bool) -> Case:
        config = str(home / f"{recipe}.yaml")
        return Case(("train", "--config", config, *words, *STEPS, "--out", "{work}/run"), ("--resume",), **more)

    def write(*words: str, out: str = "{work}/out", **more: bool) -> Case:
        return Case((*words, "--out", out), **more)

    text, long, labelled = (("--data", str(home / name)) for name in ("text.txt", "long.txt", "labelled.tsv"))
    pairs = ("--source", str(home / "source.txt"), "--target", str(home / "target.txt"))
    run = str(home / "run")
    quiet = ("--set", "training.sample_every=0")
    tiny = ("--config", str(home / "gpt.yaml"))
    return {
        "train causal_lm": train("gpt", *text),
        "train with averaged weights": train("gpt", *text, *quiet, "--set", "training.ema_decay=0.9"),
        "train with accumulation": train("gpt", *text, *quiet, "--grad-accum", "2"),
        "train masked_lm,next_sentence": train(
            "bert", "--data", str(home / "documents"), "--objective", "masked_lm,next_sentence"
        ),
        "train replaced_token": train("electra", *text, "--objective", "replaced_token"),
        "train classification": train("bert", *labelled),
        "train seq2seq": train("transformer", *pairs),
        "train span_corruption": train("t5", *text, "--objective", "span_corruption"),
        "train denoising": train("bart", *text, "--objective", "denoising"),
        "train on images": train("vit", "--data", str(home / "images")),
        "train with a teacher": train("bert", *labelled, "--teacher", str(home / "teacher")),
        "tokenize": train("gpt", *long, "--set", "tokenizer.train.model=bpe", "--max-steps", "1", fresh_cache=True),
        "train-tokenizer": write("train-tokenizer", str(home / "long.txt"), "--model", "bpe", out="{work}/t.json"),
        "average": write("average", "--last", "2", run, done=True),
        "export": write("export", run, done=True),
        "import": write("import", str(home / "exported"), done=True),
        "prune": write("prune", run, "--keep", "1", done=True),
        "sweep": write("sweep", *tiny, *text, "--vary", "optimizer.lr=0.01,0.02", "--max-steps", "4", *quiet),
        "bench": Case(("bench", "generate", *tiny, "--prompt-length", "3", "--new-tokens", "4", "--repeats", "1",
                       "--device", "cpu", "--precision", "fp32", "--threads", "1"), compared=False),
    }  # fmt: skip


def cases_of_several_processes(home: Path) -> dict[str, Case]:
    """A training by two processes, of which one is killed, or the command that started them.

    With fsdp and Muon both processes write files of a checkpoint.
    """
    training = cases_of(home)["train causal_lm"]
    kinds = {"ddp": (), "fsdp": ("--parallel", "fsdp", "--set", "optimizer.kind=muon")}
    return {
        f"train --devices 2, {kind}, {victim}": replace(
            training, words=(*training.words, "--devices", "2", *words), kills_worker=victim == "a process"
        )
        for kind, words in kinds.items()
        for victim in ("a process", "the command")
    }


NAMES = tuple(cases_of(Path()))
SHARES_OF_SEVERAL = dict(zip(cases_of_several_processes(Path()), (0.15, 0.05, 0.15, 0.05), strict=True))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("kills")
    (root / "tmp").mkdir()
    (root / "home").mkdir()
    write_inputs(root / "home")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"TFORMER_CACHE": root / "cache", "TMPDIR": root / "tmp", "OMP_NUM_THREADS": 1}.items():
            patch.setenv(name, str(value))
        patch.setattr(tempfile, "tempdir", None)
        place = Place(root)
        cases = cases_of(root / "home")
        for name, of in (("run", "train causal_lm"), ("teacher", "train classification")):
            words = tuple(word.replace("{work}/run", str(root / "home" / name)) for word in cases[of].words)
            place.once(words)
        place.once(("export", str(root / "home" / "run"), "--out", str(root / "home" / "exported")))
        yield place
        for name, kills in place.kills.items():
            print(f"{name}: {kills} kills, {place.runs[name]} runs recovered, {place.seconds[name]:.1f} s undisturbed")


@pytest.mark.parametrize("name", NAMES)
def test_a_command_that_is_killed_at_random_moments_completes_with_equal_outputs(place: Place, name: str) -> None:
    total = sum(SHARES.get(each, 1.0) for each in NAMES)
    survive_kills(place, name, cases_of(place.root / "home")[name], KILLS * SHARES.get(name, 1.0) / total)


@pytest.mark.parametrize("name", SHARES_OF_SEVERAL)
def test_a_training_by_two_processes_that_is_killed_at_random_moments_goes_on_with_equal_outputs(
    place: Place, name: str
) -> None:
    """Weights, optimizer state and records are equal to the bit."""
    case = cases_of_several_processes(place.root / "home")[name]
    survive_kills(place, name, case, KILLS * SHARES_OF_SEVERAL[name])


def survive_kills(place: Place, name: str, case: Case, number: float) -> None:
    draw, kills = Random(f"{SEED} {name}"), 0
    while kills < max(1, round(number)):
        kills += place.survive(name, case, draw)
