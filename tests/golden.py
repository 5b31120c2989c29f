"""Golden outputs: what tiny models of each family compute and what commands print, to compare two states of the code.

    python -m tests.golden write FOLDER        trains, decodes, exports and reports, into FOLDER
    python -m tests.golden compare BEFORE AFTER

They are written before and after a change that should change no result, on one machine: processors round differently.
Losses and tensors must be equal to 1e-6 of their size, texts and JSON equal, without times, rates, paths and hashes.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import random
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOLERANCE = 1e-6
WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "run", "under", "some", "water")
SMALL = ["model.d_model=32", "model.max_seq_len=64", "data.seq_len=32"]
STACK = ["num_layers=2", "num_heads=2", "feedforward.d_ff=64"]

TRAININGS = {
    "gpt": "--arch gpt --preset mini --data text.txt",
    "llama": "--arch llama --preset mini --data text.txt",
    "bert": "--arch bert --preset mini --data text.txt",
    "classifier": "--arch bert --preset classify --data labels.tsv",
    "electra": "--arch electra --preset mini --data text.txt --set generator.embedding.size=32",
    "t5": "--arch t5 --preset mini --data text.txt",
    "bart": "--arch bart --preset mini --data text.txt",
    "transformer": "--arch transformer --preset tiny --source train.en --target train.de",
    "vit": "--arch vit --preset tiny --data images",
}
"""Arguments of `tformer train` for each run; the models are shrunk by `--set`."""

STACKS = {"transformer": ("encoder", "decoder"), "t5": ("encoder", "decoder"), "bart": ("encoder", "decoder")}
STACKS |= {"gpt": ("decoder",), "llama": ("decoder",)}
"""The stacks of each run; the others have an encoder."""

COMMANDS = {
    "generate-greedy": "generate runs/gpt --prompt 'the cat' --greedy --max-new-tokens 24 --json",
    "generate-sampled": "generate runs/llama --prompt two --seed 3 --top-k 9 --num-samples 3 --logprobs --json",
    "fill-masks": "generate runs/bert --prompt 'the [MASK] sat' --json",
    "translate-beam": "generate runs/transformer --input val.en --beam-size 4 --json",
    "translate-n-best": "generate runs/transformer --prompt 'the cat' --beam-size 3 --n-best 3 --json",
    "translate-greedy": "generate runs/bart --input val.en --greedy --json",
    "generate-int8": "generate runs/gpt --prompt the --greedy --quantize int8 --json",
    "classify": "classify runs/classifier --input val.en --json",
    "classify-image": "classify runs/vit --image images/red/0.png --json",
    "evaluate-lm": "evaluate runs/gpt --data text.txt --json",
    "evaluate-masked": "evaluate runs/bert --data text.txt --json",
    "evaluate-labels": "evaluate runs/classifier --data labels.tsv --json",
    "evaluate-pairs": "evaluate runs/transformer --source val.en --target val.de --json",
    "embed": "embed runs/bert --input val.en -o vectors.jsonl",
    "tokenize": "tokenize runs/llama --text 'the cat saw two dogs' --json",
    "inspect": "inspect runs/transformer --json",
    "inspect-shapes": "inspect runs/gpt --shapes --text 'the cat' --json",
    "inspect-verify": "inspect runs/electra --verify --json",
    "config-show": "config show --arch gpt --preset small --json",
    "config-list": "config list --json",
    "runs-show": "runs show runs/gpt --json",
    "runs-compare": "runs compare runs/gpt runs/llama --json",
    "data": "data labels.tsv --json",
    "lens": "lens --format json runs/gpt --text 'the cat sat'",
    "heads": "heads --format json runs/gpt",
    "attribute": "attribute --format json runs/classifier --text 'the cat sat'",
    "viz-pe": "viz-pe --encoding sinusoidal --format json",
    "viz-attention": "viz-attention runs/gpt --text 'the cat sat' --format json",
    "average": "average runs/gpt --last 2 --out runs/average",
    "generate-average": "generate runs/average --prompt the --greedy --json",
    "prune": "prune runs/llama --keep-layers 0 --out runs/pruned --json",
    "generate-pruned": "generate runs/pruned --prompt the --greedy --json",
}
"""The commands, in order; what each prints is kept."""

EXPORTED = ("gpt", "llama", "bert", "classifier", "bart", "t5", "vit")

CHANGING = re.compile(
    r"second|time|rate|speed|share|sha256|hash|path|folder|run\b|command|version|memory|bytes|date|started|ended|machine"
)
"""Names of values that differ between two runs of the same code, or name where it ran."""


def make_data() -> None:
    """Write a text, labelled texts, aligned pairs and images into the current folder."""
    from PIL import Image

    draw = random.Random(0)
    lines = [" ".join(draw.choices(WORDS, k=draw.randint(3, 9))) for _ in range(300)]
    documents = ["\n".join(lines[start : start + 5]) for start in range(0, len(lines), 5)]
    Path("text.txt").write_text("\n\n".join(documents) + "\n")
    rows = [f"{'animal' if 'cat' in line else 'other'}\t{line}" for line in lines]
    Path("labels.tsv").write_text("\n".join(["label\ttext", *rows]) + "\n")
    for name, part in (("train", lines[:280]), ("val", lines[280:])):
        Path(f"{name}.en").write_text("\n".join(part) + "\n")
        Path(f"{name}.de").write_text("\n".join(" ".join(reversed(line.split())) for line in part) + "\n")
    for colour, value in (("red", (220, 30, 30)), ("blue", (30, 30, 220))):
        Path("images", colour).mkdir(parents=True)
        for number in range(24):
            noisy = [tuple(min(255, part + draw.randint(0, 30)) for part in value) for _ in range(64)]
            image = Image.new("RGB", (8, 8))
            image.putdata(noisy)
            image.save(f"images/{colour}/{number}.png")


def run(*words: str) -> str:
    """What a command prints on standard output. Raises RuntimeError with its messages if it fails."""
    from tformer.cli.app import main

    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(words))
        except SystemExit as ended:
            code = ended.code
    if code:
        raise RuntimeError(f"tformer {' '.join(words)}: exit {code}\n{err.getvalue()}")
    return out.getvalue()


def train(name: str) -> None:
    sets = [*SMALL, "training.precision=fp32", "training.compile=off", "training.log_every=1", "training.save_every=4"]
    for stack in STACKS.get(name, ("encoder",)):
        sets += [f"model.{stack}.{value}" for value in STACK]
    words = [word for value in sets for word in ("--set", value)]
    if name == "vit":
        words = [*words, "--set", "model.patches.image_size=8", "--set", "model.patches.size=4"]
    run(
        "train", *shlex.split(TRAININGS[name]), "--out", f"runs/{name}", "--max-steps", "8", "--batch-size", "8", *words
    )


def losses(name: str) -> list[dict[str, Any]]:
    """What each step and validation logged, without times."""
    lines = Path("runs", name, "metrics.jsonl").read_text().splitlines()
    return [steady(json.loads(line)) for line in lines]


def tensors(name: str) -> dict[str, Any]:
    """Shape, sum and sum of squares of each tensor of the exported folder."""
    from safetensors.torch import load_file

    run("export", f"runs/{name}", "--out", f"exported/{name}")
    found: dict[str, Any] = {}
    for path in sorted(Path("exported", name).glob("*.safetensors")):
        for key, tensor in load_file(path).items():
            exact = tensor.double()
            found[key] = {
                "shape": list(tensor.shape),
                "sum": exact.sum().item(),
                "squares": exact.square().sum().item(),
            }
    return found


def steady(value: Any) -> Any:
    """The document without the values that differ between two runs of the same code."""
    if isinstance(value, dict):
        return {key: steady(inner) for key, inner in value.items() if not CHANGING.search(key)}
    return [steady(inner) for inner in value] if isinstance(value, list) else value


def printed(text: str) -> Any:
    """Parsed JSON documents, one or one a line; else the text."""
    for parse in (lambda: [json.loads(text)], lambda: [json.loads(line) for line in text.splitlines()]):
        with contextlib.suppress(json.JSONDecodeError):
            return steady(parse())
    return text


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    kept = folder.resolve()
    work = kept / "work"
    work.mkdir()
    os.chdir(work)
    os.environ["TFORMER_CACHE"] = str(work / "cache")
    make_data()
    golden: dict[str, Any] = {}
    for name in TRAININGS:
        train(name)
        golden[f"losses of {name}"] = losses(name)
        print(f"trained {name}", file=sys.stderr)
    for name in EXPORTED:
        golden[f"exported {name}"] = tensors(name)
    for name, words in COMMANDS.items():
        golden[name] = printed(run(*shlex.split(words)))
    golden["embed"] = printed(Path("vectors.jsonl").read_text())
    Path(kept, "golden.json").write_text(json.dumps(golden, indent=1, sort_keys=True))


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """One line for each place at which the documents differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            if key not in before or key not in after:
                yield f"{where}/{key}: only {'before' if key in before else 'after'}"
            else:
                yield from differences(before[key], after[key], f"{where}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(old, new, f"{where}/{number}")
    elif isinstance(before, float) and isinstance(after, float):
        if not math.isclose(before, after, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            yield f"{where}: {before!r} before, {after!r} after"
    elif before != after:
        yield f"{where}: {before!r:.200} before, {after!r:.200} after"


def main(command: str, *folders: str) -> int:
    if command == "write":
        write(Path(*folders))
        return 0
    before, after = (json.loads(Path(folder, "golden.json").read_text()) for folder in folders)
    found = list(differences(before, after))
    print("\n".join([*found, f"{len(found)} differences in {len(before)} outputs"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
