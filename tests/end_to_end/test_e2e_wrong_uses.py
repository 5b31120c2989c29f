"""Wrong uses of the commands: one line that says what was found, exit code 2, and nothing written to disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.conftest import TINY_RECIPE
from tests.end_to_end.conftest import ENCODER, IMAGES
from tests.end_to_end.labelled_examples import sentences, write_images, write_table

# (command line, message; parts of it with " ... " between). LM and TR are a decoder and an encoder-decoder with random
# weights; the other words in capitals begin a training of a tiny decoder, encoder or image model.
SHORT = {
    "TEXT": "train --config tiny.yaml --out run --data",
    "LABELS": "train --config encoder.yaml --out run --data",
    "IMAGES": "train --config images.yaml --out run",
}
WRONG = [
    ("tokenize nowhere --text a", "nowhere does not exist"),
    ("tokenize notes.md --text a", "notes.md is not a usable tokenizer.json"),
    ("tokenize empty --text a", "empty has no tokenizer"),
    ("tokenize LM --ids 1.5", "--ids: found '1.5', expected whole numbers"),
    ("tokenize LM --ids 4294967296", "id 4294967296 is not in the vocabulary"),
    ("tokenize LM --ids 1 --max-length 3", "--max-length is for texts, and --ids decodes ids"),
    ("tokenize LM --ids 1 --no-template", "--no-template is for texts"),
    ("tokenize LM --text a --max-length 99999999999 --pad max", "must be at most 1,048,576, found 99,999,999,999"),
    ("tokenize TR --text a --text2 b", "there is no template for two texts here"),
    ("tokenize LM --text a --side target", "only an encoder-decoder has a target side"),
    ("config explain model.foo", "model has no key 'foo'"),
    ("config explain seed.more", "seed has no key 'more'"),
    ("config explain training.precision nope", "a recipe has no section 'nope'"),
    ("config show --objective foo", "--objective: objectives.0.kind: found the text 'foo'"),
    ("doctor now", "unexpected extra argument"),
    ("doctor --purge", "No such option: --purge"),
    ("inspect LM -o x.html", "a page is for --shapes, which is missing"),
    ("inspect LM --shapes -o x.pdf", "x.pdf: unknown suffix"),
    ("inspect LM --shapes --text a --text2 b", "--text2: not read by a causal language model"),
    ("inspect TR --shapes --image x.png", "--image: not read by a causal language model"),
    ("inspect LM --shapes --text fed --batch-size 999999999999999", "--batch-size must be at most"),
    ("inspect --arch bert --shapes --text a", "--text needs a run: omit --arch"),
    ("train --arch bert --data rows.tsv --pooling sum", "expected 'cls', 'mean', 'max', 'eos' or 'attention'"),
    ("train --arch gpt --data rows.tsv --pooling cls", "--pooling: found heads of kind lm"),
    ("train --arch gpt --objective classification --pooling cls --data rows.tsv", "expected eos, mean or max"),
    ("train --log-to paper --data rows.tsv", "--log-to: found 'paper', expected tensorboard, wandb"),
    ("train --log-to tensorboard, --data rows.tsv", "--log-to: found ''"),
    ("train --max-steps 0 --data rows.tsv", "--max-steps must be at least 1, found 0"),
    ("train --max-epochs nan --data rows.tsv", "--max-epochs must be a finite number, found nan"),
    ("train --max-minutes -1 --data rows.tsv", "--max-minutes: training.max_minutes: found -1.0"),
    ("train --dry-run --data nowhere.txt", "nowhere.txt: no such file or directory"),
    ("train --dry-run --arch bert --objective regression --data rows.tsv", "'pos' is not a finite number"),
    ("export LM --out hf --as foo", "model type 'foo' is not one of"),
    ("export LM --as tformer", "--out is missing"),
    ("export LM --out empty --as tformer", "empty exists already"),
    ("generate LM --prompt a --at-limit stop", "'stop' is not one of 'cut', 'end'"),
    ("generate LM --prompt a --top-p nan", "--top-p must be a finite number, found nan"),
    ("generate TR --prompt a --beam-size 4 --beam-groups 3", "cannot be divided into 3 groups"),
    ("evaluate LM --data rows.tsv --at-limit end", "--at-limit has no meaning here"),
    ("classify LM --text a", "has no head this command can use: found lm"),
    ("sweep --plan nope", "unknown plan 'nope'"),
    ("sweep --plan positions --seeds 0", "--seeds must be at least 1, found 0"),
    ("explain model.d_model", "No such command 'explain'"),
    ("config show --arch gtp", "--arch: unknown arch 'gtp' ... did you mean 'gpt'?"),
    ("config show --preset smal", "--preset: unknown preset 'smal' of gpt ... did you mean 'small'?"),
    ("config show --set optimizer.lrr=1", "--set: optimizer.lrr: unknown key, did you mean 'lr'?"),
    ("config show --set seed=x", "--set: seed: found the text 'x', expected an integer"),
    ("config show --set training.grad_accum=0", "training.grad_accum: found 0, expected more than 0"),
    ("config show --device gpu", "--device: found 'gpu', expected auto, cpu or cuda"),
    ("config show --archs gpt", "--archs"),
    ("config show none.yaml", "none.yaml: no such file"),
    ("config validate none.yaml", "none.yaml: no such file"),
    ("config list --arch gtp", "--arch: unknown arch 'gtp' ... did you mean 'gpt'?"),
    ("runs list --limit 0", "--limit must be at least 1, found 0"),
    ("runs list --sort colour", "--sort: found 'colour', expected newest, name"),
    ("train --arch gtp --data text.txt", "unknown arch 'gtp' ... did you mean 'gpt'"),
    ("train --arch gpt --preset tinny --data text.txt", "'tinny' ... did you mean 'tiny'"),
    ("train --config broken.yaml --out run", "broken.yaml:2 ... duplicate key 'seed'"),
    ("TEXT text.txt --set model.decoder.num_layer=3", "model.decoder.num_layer ... did you mean 'num_layers'"),
    ("TEXT text.txt --set schedule.kind=cosin", "schedule.kind ... cosin ... cosine"),
    ("TEXT text.txt --set model.d_model=wide", "model.d_model: found the text 'wide'"),
    ("TEXT text.txt --set model.d_model=-16", "model.d_model: found -16"),
    ("TEXT text.txt --set training.batch_size=0", "training.batch_size: found 0"),
    ("TEXT text.txt --set optimizer.lr=.nan", "optimizer.lr: found nan"),
    ("TEXT text.txt --lr nan", "--lr ... nan"),
    ("TEXT text.txt --lr -1", "--lr ... -1"),
    ("TEXT text.txt --set model.decoder.num_heads=3", "num_heads ... 3 ... 16"),
    (
        "TEXT text.txt --set model.d_model=15 --set model.decoder.num_heads=3 "
        "--set model.decoder.positions.kind=sinusoidal",
        "sinusoidal ... even ... 15",
    ),
    ("TEXT text.txt --set tokenizer.train.vocab_size=5000000000", "5000000000"),
    ("TEXT text.txt --precision int3", "precision ... int3 ... bf16"),
    ("TEXT text.txt --device tpu", "tpu"),
    ("TEXT text.txt --device cuda:99", "cuda:99"),
    ("TEXT text.txt --set nonsense", "--set: found 'nonsense', expected key=value"),
    ("TEXT empty.txt", "empty.txt"),
    ("TEXT blank.txt", "blank.txt"),
    ("TEXT short.txt", "short.txt ... 17"),  # 16 tokens and the label of the last
    ("TEXT images", "images"),
    ("LABELS train.tsv --valid plant.tsv", "plant.tsv:3 ... 'plant' ... animal"),
    ("LABELS train.tsv --label-column lable", "no column 'lable' ... label ... text"),
    ("LABELS ragged.tsv", "ragged.tsv:42 ... expected 2 ... found 3"),
    ("LABELS one.tsv", "one class only"),
    ("LABELS train.tsv --valid pairs.tsv", "pairs.tsv ... two"),
    ("LABELS scores.tsv --text-column text --label-column score --objective regression", "scores.tsv:3 ... 'high'"),
    ("LABELS text.txt --objective masked_lm --set tokenizer.train.template=gpt", "mask token"),
    ("LABELS train.tsv --objective classification,regression", "masked_lm, next_sentence"),
    ("LABELS train.tsv --objective replaced_token", "generator"),
    ("IMAGES --data images", "notes.txt"),
    ("IMAGES --data one-class", "class"),
    ("IMAGES", "needs images"),
    ("export LM --out hf --shard-size big", "--shard-size"),
    ("export LM --out hf --shard-size 0GB", "--shard-size"),
    ("export LM --out hf --dtype fp8", "--dtype"),
    ("export LM --out hf --dtype int8", "CTranslate2"),
    ("export LM --out hf --to onnx", "--to"),
    ("export LM --out hf --as opt", "OPTForCausalLM comes nearest: model.decoder.positions.offset"),
    ("export LM --out hf --checkpoint step-99", "step-99"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of a user."""
    place = tmp_path_factory.mktemp("user")
    rows = sentences(40, 0)
    texts = {
        "rows.tsv": "label\ttext\n" + "pos\tfed cab\nneg\tbad bed\n" * 10,
        "notes.md": "# notes\n",
        "tiny.yaml": TINY_RECIPE,
        "encoder.yaml": ENCODER,
        "images.yaml": IMAGES,
        "broken.yaml": "seed: 1\nseed: 2\n",
        "text.txt": "the cat sat on the mat\n" * 50,
        "empty.txt": "",
        "blank.txt": " \n\t\n  ",
        "short.txt": "abcdefgh",
    }
    for name, text in texts.items():
        (place / name).write_text(text)
    tables = {
        "train.tsv": ("label text", rows),
        "plant.tsv": ("label text", [("tool", "the saw"), ("plant", "the oak")]),
        "ragged.tsv": ("label text", [*rows, ("animal", "the cat", "and more")]),
        "one.tsv": ("label text", [("tool", f"the saw {number}") for number in range(20)]),
        "pairs.tsv": ("label text text2", [("tool", "the saw", "the axe"), ("animal", "the cat", "the dog")]),
        "scores.tsv": ("score text", [("1.5", "the saw"), ("high", "the axe")]),
    }
    for name, (columns, content) in tables.items():
        write_table(place / name, tuple(columns.split()), content)
    images = write_images(place / "images", 6)
    next(path for path in images.iterdir() if path.is_dir()).joinpath("notes.txt").write_text("not an image")
    (place / "one-class" / "cat").mkdir(parents=True)
    for number in range(4):
        Image.new("L", (8, 8), number).save(place / "one-class" / "cat" / f"{number}.png")
    (place / "empty").mkdir()
    return place


def state_of(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_a_wrong_use_is_one_line_and_changes_nothing(
    words: str,
    message: str,
    cli: Callable[..., Any],
    folder: Path,
    decoder: Path,
    translator: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    before = state_of(folder)
    first, _, rest = words.partition(" ")
    full = f"{SHORT.get(first, first)} {rest}".split()
    done = cli(*({"LM": decoder, "TR": translator}.get(word, word) for word in full))
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert (done.code, done.out, len(errors)) == (2, "", 1), done.err
    found = done.err.replace("\n", " ")
    assert all(part in found for part in message.split(" ... ")), done.err
    assert "Traceback" not in found and "internal error" not in found and state_of(folder) == before
