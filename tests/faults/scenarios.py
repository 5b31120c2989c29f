"""The commands that write, each on the smallest input that makes it write everything it can."""

from __future__ import annotations

import random
from pathlib import PurePosixPath

from tests.faults.crash import Tree
from tests.faults.harness import Scenario, Workshop

RECIPE = """\
arch: gpt
tokenizer: {train: {model: char, template: none}}
model:
  d_model: 16
  max_seq_len: 16
  decoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}, dropout: 0.1}
optimizer: {lr: 0.01}
training: {max_steps: 2, batch_size: 2, eval_every: 1, save_every: 1, log_every: 1, keep_last: 1, sample_every: 2,
           ema_decay: 0.9, precision: fp32, device: cpu, threads: 1}
"""
CLASSES = """\
arch: bert
tokenizer: {train: {model: word, template: bert, vocab_size: 40, min_frequency: 1}}
model:
  d_model: 16
  max_seq_len: 12
  encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}}
  heads: [{kind: classifier, pooling: mean}]
objectives: [{kind: classification}]
optimizer: {lr: 0.01}
training: {max_steps: 2, batch_size: 4, eval_every: 1, save_every: 1, log_every: 1,
           precision: fp32, device: cpu, threads: 1}
"""
PAIRS = """\
arch: transformer
tokenizer: {train: {model: char, template: seq2seq}}
model:
  d_model: 16
  max_seq_len: 24
  encoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}}
  decoder: {num_layers: 1, num_heads: 2, feedforward: {d_ff: 16}}
objectives: [{kind: seq2seq}]
generation: {max_new_tokens: 6}
optimizer: {lr: 1.0e-6}
training: {max_steps: 2, batch_size: 4, eval_every: 2, save_every: 1, log_every: 1,
           precision: fp32, device: cpu, threads: 1}
"""
TEXT = ("work/text.txt", "work/gpt.yaml")
ROWS = ("work/rows.tsv", "work/bert.yaml")
SIDES = ("work/a.src", "work/a.trg", "work/transformer.yaml")
GPT, BERT, TRANSFORMER = "work/runs/gpt", "work/runs/bert", "work/runs/transformer"
LORA = "work/runs/lora"
TRAIN = ("train", "--config", "gpt.yaml", "--data", "text.txt", "--out", "runs/new")
SWEEP = ("sweep", "--config", "gpt.yaml", "--data", "text.txt", "--vary", "optimizer.lr=0.01,0.02", "--out", "grid")
STUDENT = ("train", "--config", "bert.yaml", "--data", "rows.tsv", "--teacher", "runs/bert", "--out", "runs/new")
TRANSLATOR = ("train", "--config", "transformer.yaml", "--source", "a.src", "--target", "a.trg", "--teacher",
              "runs/transformer", "--set", "teacher.kind=sequence", "--out", "runs/new")  # fmt: skip


def resumed(words: tuple[str, ...]) -> tuple[str, ...]:
    return (*words, "--resume")


SCENARIOS = (
    Scenario("train-tokenizer", ("train-tokenizer", "text.txt", "--model", "char", "--out", "new.json"), TEXT,
             targets=("new.json",)),
    Scenario("train-tokenizer --force", ("train-tokenizer", "text.txt", "--model", "byte-bpe", "--vocab-size", "280",
             "--out", "tokenizer.json", "--force"), (*TEXT, "work/tokenizer.json"), targets=("tokenizer.json",),
             quick=True),
    Scenario("train", TRAIN, TEXT, run="runs/new", again=resumed(TRAIN)),
    Scenario("train --resume", ("train", "--resume", "--out", "runs/gpt", "--max-steps", "3"), (*TEXT, GPT, "cache"),
             run="runs/gpt"),
    Scenario("train --teacher", STUDENT, (BERT, *ROWS), run="runs/new",
             again=resumed(STUDENT)),
    Scenario("train --set teacher.kind=sequence", TRANSLATOR, (TRANSFORMER, *SIDES),
             run="runs/new", again=resumed(TRANSLATOR)),
    Scenario("generate --output", ("generate", "runs/gpt", "--input", "prompts.txt", "--max-new-tokens", "3",
             "--output", "answers.txt"), (GPT, "work/prompts.txt", "work/answers.txt"), targets=("answers.txt",)),
    Scenario("evaluate --mistakes", ("evaluate", "runs/bert", "--data", "rows.tsv", "--mistakes", "mistakes.tsv"),
             (BERT, "work/rows.tsv"), targets=("mistakes.tsv",)),
    Scenario("evaluate", ("evaluate", "runs/gpt", "--data", "text.txt"), (GPT, "work/text.txt")),
    Scenario("classify --output", ("classify", "runs/bert", "--input", "prompts.txt", "--output", "answers.txt"),
             (BERT, "work/prompts.txt", "work/answers.txt"), targets=("answers.txt",)),
    Scenario("embed", ("embed", "runs/gpt", "--input", "prompts.txt", "--output", "v.npy"), (GPT, "work/prompts.txt"),
             targets=("v.npy", "v.npy.jsonl")),
    Scenario("average", ("average", "--last", "2", "runs/bert", "--out", "new/mean"), (BERT,), targets=("new/mean",)),
    Scenario("merge", ("merge", "runs/lora", "--out", "new/merged"), (GPT, LORA), targets=("new/merged",)),
    Scenario("export", ("export", "runs/gpt", "--out", "new/hf"), (GPT,), targets=("new/hf",)),
    Scenario("import", ("import", "hf", "--out", "new/imported"), ("work/hf",), targets=("new/imported",)),
    Scenario("prune", ("prune", "runs/bert", "--drop-heads", "0.5", "--no-evaluate", "--out", "new/small"),
             (BERT, *ROWS), targets=("new/small",)),
    Scenario("data", ("data", "rows.tsv", "--dropped", "dropped.jsonl", "-o", "look.html"), ("work/rows.tsv",),
             targets=("dropped.jsonl", "look.html")),
    Scenario("plot", ("plot", "runs/gpt", "-o", "plot.svg"), (GPT, "work/plot.svg"), targets=("plot.svg",)),
    Scenario("viz-pe", ("viz-pe", "--encoding", "sinusoidal", "-o", "pe.html"), (), targets=("pe.html",)),
    Scenario("viz-attention", ("viz-attention", "runs/gpt", "--text", "a cat", "-o", "attention.html"), (GPT,),
             targets=("attention.html",)),
    Scenario("heads", ("heads", "runs/gpt", "-o", "heads.html"), (GPT,), targets=("heads.html",)),
    Scenario("patch", ("patch", "runs/gpt", "--ablate", "zero", "--data", "text.txt", "-o", "worth.csv"),
             (GPT, "work/text.txt"), targets=("worth.csv",)),
    Scenario("lens", ("lens", "runs/gpt", "--text", "a cat", "-o", "lens.html"), (GPT,), targets=("lens.html",)),
    Scenario("attribute", ("attribute", "runs/gpt", "--text", "a cat", "-o", "attribute.html"), (GPT,),
             targets=("attribute.html",)),
    Scenario("viz-embeddings", ("viz-embeddings", "runs/gpt", "-o", "vectors.html"), (GPT,), targets=("vectors.html",)),
    Scenario("viz-tokens", ("viz-tokens", "runs/gpt", "--text", "a cat", "-o", "tokens.html"), (GPT,),
             targets=("tokens.html",)),
    Scenario("inspect -o", ("inspect", "runs/gpt", "-o", "report.txt"), (GPT,), targets=("report.txt",)),
    Scenario("doctor --clean", ("doctor", "--clean"), ("cache",), results=("cache",)),
    Scenario("sweep", SWEEP, (*TEXT, "work/grid")),
)  # fmt: skip


MAKERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "work/tokenizer.json": (TEXT, ("train-tokenizer", "text.txt", "--model", "byte-bpe", "--vocab-size", "270", "--out",
                            "tokenizer.json")),
    GPT: (TEXT, ("train", "--config", "gpt.yaml", "--data", "text.txt", "--out", "runs/gpt")),
    BERT: (ROWS, ("train", "--config", "bert.yaml", "--data", "rows.tsv", "--out", "runs/bert")),
    TRANSFORMER: (SIDES, ("train", "--config", "transformer.yaml", "--source", "a.src", "--target", "a.trg", "--out",
                  "runs/transformer")),
    LORA: ((*TEXT, GPT), ("train", "--init-from", "runs/gpt", "--lora", "2", "--data", "text.txt", "--out",
           "runs/lora")),
    "work/hf": ((GPT,), ("export", "runs/gpt", "--out", "hf")),
    "work/grid": (TEXT, SWEEP),
    "cache": (TEXT, TRAIN),
}  # fmt: skip
"""What scenarios need beside `texts`: the needs of the command that makes it, and the command."""


class Preparation:
    """Makes what scenarios need, each thing once."""

    def __init__(self, shop: Workshop) -> None:
        self.shop = shop
        self._made: dict[str, Tree] = {
            f"work/{name}": {f"work/{name}": text.encode()} for name, text in texts().items()
        }

    def disk(self, needs: tuple[str, ...]) -> Tree:
        """A disk with these files and folders, and the folders that they are in."""
        found: Tree = {"cache": None, "tmp": None, "work": None}
        for need in needs:
            found |= {str(parent): None for parent in PurePosixPath(need).parents if parent.name} | self._make(need)
        return dict(sorted(found.items()))

    def _make(self, need: str) -> Tree:
        if need not in self._made:
            needs, words = MAKERS[need]
            self.shop.restore(self.disk(needs))
            self.shop.undisturbed(*words)
            tree = self.shop.tree()
            self._made[need] = {path: tree[path] for path in tree if path == need or path.startswith(f"{need}/")}
        return self._made[need]


def texts() -> dict[str, str]:
    """Data and recipes, by file name."""
    draw = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs"]
    lines = [" ".join(draw.choices(words, k=5)) for _ in range(30)]
    return {
        "gpt.yaml": RECIPE,
        "bert.yaml": CLASSES,
        "transformer.yaml": PAIRS,
        "text.txt": "".join(f"{line}\n" for line in lines),
        "rows.tsv": "label\ttext\n" + "".join(f"{'ab'[n % 2]}\t{line}\n" for n, line in enumerate(lines)),
        "a.src": "".join(f"{line[:8]}\n" for line in lines),
        "a.trg": "".join(f"{line[-8:]}\n" for line in lines),
        "prompts.txt": "the cat\na mat\n",
        "answers.txt": "old\n",
        "plot.svg": "old\n",
    }
