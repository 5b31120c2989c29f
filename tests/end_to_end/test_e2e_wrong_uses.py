"""Wrong uses of the commands: one line that says what was found, exit code 2, and nothing written to disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# (command line, part of the message); LM and TR stand for a decoder and an encoder-decoder, each with random weights.
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
    ("train --log-to paper --data rows.tsv", "--log-to: found 'paper', expected tensorboard, wandb, mlflow"),
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
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of a user."""
    place = tmp_path_factory.mktemp("user")
    (place / "rows.tsv").write_text("label\ttext\n" + "pos\tfed cab\nneg\tbad bed\n" * 10)
    (place / "notes.md").write_text("# notes\n")
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
    done = cli(*({"LM": decoder, "TR": translator}.get(word, word) for word in words.split()))
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert (done.code, done.out, len(errors)) == (2, "", 1) and message in done.err.replace("\n", " "), done.err
    assert "Traceback" not in done.err and state_of(folder) == before
