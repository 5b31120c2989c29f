"""Program that runs every command that makes numbers in the working directory, and prints a hash of each result.

`python -m tests.end_to_end.same_commands SET [--reverse]`: SET is one of `SETS`. With `--reverse` the commands of the
set run in the opposite order, so that no result may depend on what ran before in the process. Attempts to reach a
network, also of forked children, are refused and listed in `network.txt`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import re
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from tests.end_to_end.labelled_examples import sentences, write_table
from tformer.cli.app import main
from tformer.recipe import DEFAULT_PRESETS

CONFIGS = Path(__file__).parents[2] / "configs"
MODELS = ("byte-bpe", "bpe", "wordpiece", "unigram", "word", "char")
# Times, rates, memory and the process: these may differ between two equal commands. manifest.json has the hash of
# trainer.json, which has the seconds; the tables of a sweep are also there as JSON.
UNEQUAL_KEYS = re.compile(r"seconds|.*_seconds|.*_per_second|peak_share|peak_memory_bytes|time s|tokens/s|peak MiB")
UNEQUAL_FILES = {"environment.json", "manifest.json", ".lock", "cells.csv", "table.csv", "table.md", "table.tex"}
UNEQUAL_SUFFIXES = {".log", ".so"}

Job = Callable[[], str]


def write_data() -> None:
    draw = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "saw", "two", "dögs"]
    lines = [" ".join(draw.choices(words, k=8)) for _ in range(150)]
    Path("text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    Path("prompts.txt").write_text("the cat\na mat\n", encoding="utf-8")
    write_table(Path("table.tsv"), ("label", "text"), [tuple(row) for row in sentences(100, 0)])
    Path("source.txt").write_text("\n".join(lines[:80]) + "\n", encoding="utf-8")
    Path("target.txt").write_text("\n".join(line.upper() for line in lines[:80]) + "\n", encoding="utf-8")
    pixels = np.random.default_rng(0)
    for name, level in (("dark", 40), ("light", 200)):
        Path("images", name).mkdir(parents=True)
        for number in range(20):
            image = np.clip(pixels.normal(level, 10, (28, 28)), 0, 255).astype(np.uint8)
            Image.fromarray(image).save(Path("images", name, f"{number}.png"))


def tformer(*words: object) -> str:
    """Standard output of a command; SystemExit with the command where it fails."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            main([str(word) for word in words])
        except SystemExit as end:
            if end.code not in (0, None):
                raise SystemExit(f"{' '.join(map(str, words))}: exit {end.code}") from None
    return out.getvalue()


def tokenizers() -> Iterator[tuple[str, Job]]:
    for model in MODELS:
        words = ("train-tokenizer", "text.txt", "--model", model, "--vocab-size", 300, "--out", f"{model}.json")
        yield model, partial(tformer, *words)


def data_of(arch: str) -> list[str]:
    """Flags for data of the kind that the family's default preset trains on."""
    preset = yaml.safe_load((CONFIGS / arch / f"{DEFAULT_PRESETS[arch]}.yaml").read_text())
    if preset["model"].get("patches"):
        return ["--data", "images"]
    kind = preset.get("objectives", [{"kind": "causal_lm"}])[0]["kind"]
    if kind == "seq2seq":
        return ["--source", "source.txt", "--target", "target.txt"]
    return ["--data", "table.tsv" if kind == "classification" else "text.txt"]


def few_steps(**settings: object) -> list[object]:
    short = {"eval_every": 2, "log_every": 1, "save_every": 1, "sample_every": 0, "threads": 1, **settings}
    words = [f"training.{key}={value}" for key, value in short.items()]
    return ["--max-steps", 2, "--batch-size", 2, "--seed", 3, *(word for each in words for word in ("--set", each))]


def trainings() -> Iterator[tuple[str, Job]]:
    """Every family with its default preset; one of them a second time with two threads and with samples."""
    for arch in DEFAULT_PRESETS:
        decoding = few_steps(valid_sentences=2) if "--source" in data_of(arch) else few_steps()
        yield arch, partial(tformer, "train", "--arch", arch, *data_of(arch), *decoding, "--out", arch)
    two = few_steps(threads=2, sample_every=1)
    two += ["--set", "data.seq_len=32", "--set", "generation.max_new_tokens=8"]
    yield "two-threads", partial(tformer, "train", "--arch", "gpt", *data_of("gpt"), *two, "--out", "two-threads")


def commands() -> Iterator[tuple[str, Job]]:
    """The commands that work with a run: those of a small decoder, classifier and translator, trained first."""
    narrow = ["--set", "model.d_model=32", *few_steps()]
    decoder = ["--set", "model.decoder.num_layers=2", "--set", "model.decoder.num_heads=2"]
    heads = ["--set", "model.encoder.num_heads=4"]
    both = [*decoder, "--set", "model.encoder.num_layers=2", "--set", "model.encoder.num_heads=2"]
    arch, gpt = ["--arch", "gpt", "--data", "text.txt"], ["--set", "data.seq_len=32", *narrow, *decoder]
    tformer("train", *arch, *gpt, "--out", "gpt")
    tformer("train", "--arch", "bert", "--data", "table.tsv", *narrow, *heads, "--out", "bert")
    translator = ["--source", "source.txt", "--target", "target.txt", "--set", "training.valid_sentences=2"]
    tformer("train", "--arch", "transformer", *translator, *narrow, *both, "--out", "translator")
    short, sets = ["--max-new-tokens", 8], [word for word in gpt if "=" in str(word)]
    sets = ["--max-steps", 2, "--", "--batch-size", 2, *(word for each in sets for word in ("--set", each))]
    each: dict[str, tuple[object, ...]] = {
        "evaluate": ("evaluate", "gpt", "--data", "prompts.txt", "--json"),
        "evaluate-labels": ("evaluate", "bert", "--mistakes", "mistakes.jsonl", "--json"),
        "evaluate-pairs": ("evaluate", "translator", *short, "--json"),
        "sample": ("generate", "gpt", "--input", "prompts.txt", "--seed", 5, "--num-samples", 2, *short, "--json"),
        "beam": ("generate", "translator", "--input", "prompts.txt", "--beam-size", 3, *short, "--json"),
        "classify": ("classify", "bert", "--input", "prompts.txt", "--json"),
        "average": ("average", "gpt", "--last", 2, "--out", "averaged"),
        "export": ("export", "gpt", "--out", "exported"),
        "prune": ("prune", "gpt", "--rate", 0.5, "--out", "pruned", "--json"),
        "prune-heads": ("prune", "bert", "--drop-heads", 0.3, "--out", "fewer-heads", "--json"),
        "sweep": ("sweep", *arch, "--vary", "optimizer.lr=1e-3,1e-2", "--seeds", 2, "--out", "swept", "--json", *sets),
        "distil": ("train", "--teacher", "gpt", *arch, *gpt, "--out", "student"),
        "viz-pe": ("viz-pe", "--run", "gpt", "-o", "positions.json"),
        "viz-attention": ("viz-attention", "gpt", "--text", "the cat", "-o", "attention.json"),
        "heads": ("heads", "gpt", "-o", "heads.json"),
        "patch": (
            "patch",
            "gpt",
            "--clean",
            "the cat",
            "--corrupted",
            "the dog",
            "--metric",
            "logit",
            "-o",
            "patch.json",
        ),
        "lens": ("lens", "gpt", "--text", "the cat", "--tuned", "text.txt", "--steps", 5, "-o", "lens.json"),
        "attribute": ("attribute", "gpt", "--text", "the cat", "-o", "attribute.json"),
        "viz-embeddings": ("viz-embeddings", "gpt", "--token", "t", "-o", "vectors.json"),
        "viz-tokens": ("viz-tokens", "gpt", "gpt", "--text", "the cat", "-o", "tokens.json"),
        "plot": ("plot", "gpt", "-o", "curves.svg"),
        "inspect": ("inspect", "gpt", "--shapes", "--json"),
        "tokenize": ("tokenize", "gpt", "--text", "the cat sat", "--json"),
    }
    for name, words in each.items():
        yield name, partial(tformer, *words)


def steady(value: Any) -> Any:
    """A JSON value without its times and rates."""
    if isinstance(value, dict):
        return {key: steady(each) for key, each in value.items() if not UNEQUAL_KEYS.fullmatch(key)}
    return [steady(each) for each in value] if isinstance(value, list) else value


def content(path: Path) -> bytes:
    """The bytes of a file; of JSON those of its value without times and rates."""
    data = path.read_bytes()
    if path.suffix not in (".json", ".jsonl", ".out"):
        return data
    lines = data.decode().splitlines() if path.suffix != ".json" else [data.decode()]
    try:
        return json.dumps([steady(json.loads(line)) for line in lines]).encode()
    except json.JSONDecodeError:
        return data


def refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook. Sockets between own processes (AF_UNIX) are allowed."""
    inside = event == "socket.__new__" and arguments[1] == socket.AF_UNIX
    if event in ("socket.__new__", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request") and not inside:
        with open(NETWORK, "a") as file:
            file.write(f"{event} {arguments}\n")
        raise PermissionError(f"no network here: {event}")


SETS = {"tokenizers": tokenizers, "trainings": trainings, "commands": commands}

if __name__ == "__main__":
    NETWORK = Path("network.txt").absolute()
    sys.addaudithook(refuse_network)
    write_data()
    _, chosen, *order = sys.argv
    sys.argv[1:] = []  # pages and JSON documents name the command line
    jobs = list(SETS[chosen]())
    for name, job in reversed(jobs) if order == ["--reverse"] else jobs:
        Path(f"{name}.out").write_text(job(), encoding="utf-8")
    loaded = {"wandb", "tensorboard", "huggingface_hub"} & sys.modules.keys()
    assert not loaded, f"{loaded} are loaded without being asked for"
    for path in sorted(Path().rglob("*")):
        if path.is_file() and path.name not in UNEQUAL_FILES and path.suffix not in UNEQUAL_SUFFIXES:
            print(path, hashlib.sha256(content(path)).hexdigest())
