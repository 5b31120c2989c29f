"""`tformer train-tokenizer` and its report."""

from __future__ import annotations

import gzip
import io
import json
import os
import shlex
import signal
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tformer.cli import train_tokenizer as command
from tformer.support.errors import TformerError
from tformer.tokenizer import Tokenizer, TokenizerOptions
from tformer.tokenizer.report import measure, tokenizer_report
from tformer.tokenizer.train import train_with_facts

app = typer.Typer()
app.command("train-tokenizer")(command.train_tokenizer.for_typer())

LINE = "The quick brown fox jumps over the lazy dog; the low dog, lower.\n"


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "corpus.txt"
    path.write_text(LINE * 200)
    return path


def run(*words: object, stdin: bytes | None = None):
    result = CliRunner().invoke(app, [str(word) for word in words], input=stdin)
    if isinstance(result.exception, Exception) and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_added_tokens_are_given_one_by_one(corpus):
    run(corpus, "--model", "char", "--added-token", "quick", "--added-token", "the")
    tokenizer = Tokenizer.load("tokenizer.json")
    assert [tokenizer.token(token) for token in tokenizer.encode("the quicker quick")][-2:] == [" ", "quick"]
    assert tokenizer.encode("the")[0] == tokenizer.token_id("the")
    run(corpus, "--model", "char", "--added-token", "quick", "--added-token", "the")  # the same file
    with pytest.raises(TformerError, match="already exists"):
        run(corpus, "--model", "char", "--added-token", "other")
    with pytest.raises(TformerError, match=r"^--added-token: found 'a b', expected text without spaces"):
        run(corpus, "--model", "char", "--added-token", "a b")


def test_the_path_is_data_and_the_report_is_talk(corpus):
    result = run(corpus, "--vocab-size", 280)
    assert result.stdout == "tokenizer.json\n"
    for word in ("bytes per token", "unseen text", "special tokens", "sha256", "lossless"):
        assert word in result.stderr
    assert Tokenizer.load("tokenizer.json").vocab_size == 280


def test_json_is_one_document_on_stdout(corpus, tmp_path):
    (tmp_path / "a").mkdir()
    result = run(corpus, "--vocab-size", 280, "--json", "--out", "a/b.json")
    report = json.loads(result.stdout)
    assert report["path"] == "a/b.json" and report["vocab_size"] == 280
    assert report["sha256"] == Tokenizer.load("a/b.json").sha256


@pytest.mark.parametrize("model", ["byte-bpe", "bpe", "wordpiece", "unigram", "word", "char"])
def test_every_model(corpus, model):
    flags = "--vocab-size 300 --template bert --lowercase --digits --unicode nfc"
    run(corpus, "--model", model, *flags.split())
    tokenizer = Tokenizer.load("tokenizer.json")
    assert tokenizer.kind == model
    assert tokenizer.normalize("LOW") == "low"


def test_rows_of_a_table(corpus, tmp_path):
    (tmp_path / "rows.tsv").write_text("label\tbody\nx\tcontent here\n")
    run("rows.tsv", "--text-column", "body", "--model", "char")
    assert Tokenizer.load("tokenizer.json").token_id("x") is None


def test_invalid_utf8_is_refused_or_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.txt").write_bytes(b"fine\n\xff broken\n")
    with pytest.raises(TformerError, match=r"bad\.txt") as caught:
        run("bad.txt", "--model", "char")
    assert caught.value.exit_code == 2 and not (tmp_path / "tokenizer.json").exists()
    run("bad.txt", "--model", "char", "--invalid-utf8", "replace")
    assert Tokenizer.load("tokenizer.json").token_id("\ufffd") is not None


MISTAKES = [
    (("--vocab-size", "0"), "--vocab-size must be 1 to 16,777,216, found 0", ""),
    (("--vocab-size", "100"), "at least 258", "bytes 256"),
    (("--vocab-size", str(2**33)), "must be 1 to 16,777,216", ""),
    (("--model", "word", "--byte-fallback"), "--byte-fallback needs model", ""),
    (("--sample-mb", "-3"), "--sample-mb must be 1 to 4,294,967,296, found -3", ""),
    (("--out", "."), "is a directory", "tokenizer.json"),
]


@pytest.mark.parametrize(
    ("flag", "value", "choice"),
    [
        ("--model", "bpp", "bpe"),
        ("--template", "brt", "bert"),
        ("--unicode", "nfx", "nfc"),
        ("--invalid-utf8", "x", "replace"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_known_ones(corpus, flag, value, choice):
    result = CliRunner().invoke(app, [str(corpus), flag, value])
    assert result.exit_code == 2
    assert all(word in result.output for word in (flag, value, choice))


@pytest.mark.parametrize(("words", "message", "hint"), MISTAKES)
def test_mistakes_are_one_clear_line_and_exit_2(corpus, tmp_path, words, message, hint):
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(TformerError) as caught:
        run(corpus, *words)
    assert caught.value.exit_code == 2
    assert message in caught.value.message and "\n" not in caught.value.message
    assert hint in (caught.value.hint or "")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_missing_empty_and_blank_files(corpus, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n\n")
    for name in ("missing.txt", "empty.txt", "blank.txt"):
        with pytest.raises(TformerError, match=name) as caught:
            run(name)
        assert caught.value.exit_code == 2


def test_a_different_file_is_refused_before_training_and_forced(corpus, monkeypatch):
    run(corpus, "--model", "char")
    run(corpus, "--model", "char")  # the same file again
    before = Path("tokenizer.json").read_text()
    with pytest.raises(TformerError, match="already exists") as caught:
        run(corpus, "--vocab-size", 300)
    assert caught.value.exit_code == 2 and "--force" in (caught.value.hint or "")
    assert Path("tokenizer.json").read_text() == before
    run(corpus, "--vocab-size", 300, "--force")
    assert Tokenizer.load("tokenizer.json").kind == "byte-bpe"
    Path("notes.txt").write_text("mine")
    with pytest.raises(TformerError):
        run(corpus, "--out", "notes.txt")
    assert Path("notes.txt").read_text() == "mine"


@pytest.mark.skipif(os.name != "posix", reason="permissions of posix")
@pytest.mark.parametrize(
    ("out", "message", "code"),
    [("/proc/tokenizer.json", "cannot write /proc", 3), ("sealed/tokenizer.json", "does not exist", 2)],
)
def test_an_output_that_cannot_be_written_is_refused_first(corpus, tmp_path, out, message, code):
    with pytest.raises(TformerError, match=message) as caught:
        run(corpus, "--out", out)
    assert caught.value.exit_code == code
    assert not (tmp_path / "sealed").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_training_without_a_file(corpus, tmp_path, monkeypatch, number, code):
    from tformer.data.sources.text import TextSource

    real = TextSource.documents

    def documents(self):
        while True:  # an endless corpus: only the signal ends it
            os.kill(os.getpid(), number)
            yield from real(self)

    handler = signal.getsignal(number)
    monkeypatch.setattr(TextSource, "documents", documents)
    with pytest.raises(TformerError, match="interrupted") as caught:
        run(corpus)
    assert caught.value.exit_code == code
    assert not (tmp_path / "tokenizer.json").exists()
    assert signal.getsignal(number) is handler


def test_there_are_three_examples():
    assert len(command.EPILOG) == 3


@pytest.mark.parametrize("example", range(3))
def test_the_examples_of_the_help_work(corpus, tmp_path, monkeypatch, example):
    line = command.EPILOG[example].split("tformer train-tokenizer ")[1]
    corpus.write_text("".join(f"{LINE.strip()} word{n} other{n * 7}\n" for n in range(300)))
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").write_text(corpus.read_text())
    (tmp_path / "notes.txt.gz").write_bytes(gzip.compress(corpus.read_bytes()))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(corpus.read_bytes())))
    result = run(*shlex.split(line), stdin=corpus.read_bytes())
    assert result.stdout


def test_no_torch_is_imported(corpus):
    import subprocess
    import sys

    code = (
        "import sys; from tformer.cli import train_tokenizer; "
        "assert not {'torch', 'tokenizers', 'numpy'} & set(sys.modules), 'help must stay light'"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(command.__file__)))
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def _report(text: str, **options):
    chosen = TokenizerOptions(**options)
    tokenizer, facts = train_with_facts(lambda: iter(text.splitlines(keepends=True)), chosen)
    return tokenizer, tokenizer_report(tokenizer, options=chosen, facts=facts)


@pytest.mark.parametrize("model", ["byte-bpe", "bpe", "wordpiece", "unigram", "word", "char"])
def test_the_report_has_every_figure_and_is_json(text, model):
    tokenizer, report = _report(text, model=model, vocab_size=500)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["vocab_size"] == tokenizer.vocab_size
    assert report["requested_vocab_size"] == (None if model == "char" else 500)
    assert report["sha256"] == tokenizer.sha256
    assert report["special_ids"]["<|endoftext|>"] == 0
    assert report["training"]["seen_bytes"] == len(text.encode())
    assert set(report["trained_text"]) == {
        "bytes", "tokens", "bytes_per_token", "tokens_per_word", "vocabulary_used", "unknown_rate",
        "byte_fallback_rate", "encode_mb_per_second", "round_trip_rate", "round_trip_rate_after_normalization",
        "round_trip_failures", "tokens_per_line",
    }  # fmt: skip
    assert (report["unseen_text"] is None) == (model == "char")
    assert ("lossless" in report["round_trip"]) == (model not in ("wordpiece", "word"))


def test_figures_equal_a_recount(make):
    tokenizer = make("word")
    texts = ["the quick zebra\nthe dog", "low, low"]
    figures = measure(tokenizer, texts)
    ids = [i for text in texts for i in tokenizer.encode(text)]
    assert figures["tokens"] == len(ids) == 8
    assert figures["bytes"] == sum(len(text) for text in texts)
    assert figures["bytes_per_token"] == round(figures["bytes"] / 8, 6)
    assert figures["tokens_per_word"] == round(8 / 7, 6)
    assert figures["unknown_rate"] == round(1 / 8, 6)
    assert figures["vocabulary_used"] == round(len(set(ids)) / tokenizer.vocab_size, 6)
    assert figures["tokens_per_line"] == {"p50": 3, "p90": 3, "p95": 3, "p99": 3, "max": 3}
    assert figures["round_trip_rate"] == round(2 / 3, 6)
    assert figures["round_trip_failures"] == [{"text": "the quick zebra", "decoded": "the quick"}]


def test_byte_fallback_is_counted(make):
    figures = measure(make("bpe", byte_fallback=True, vocab_size=600), ["日"])
    assert (figures["byte_fallback_rate"], figures["unknown_rate"]) == (1.0, 0.0)
    assert measure(make("bpe"), ["日"])["unknown_rate"] == 1.0


def test_normalization_is_told_apart_from_loss(text):
    _, report = _report(text, lowercase=True, vocab_size=500)
    assert report["trained_text"]["round_trip_rate"] < 1
    assert report["trained_text"]["round_trip_rate_after_normalization"] == 1
    assert report["round_trip"].endswith("(after the normalization)")
    assert report["probe_failures"] == []


def test_a_vocabulary_below_the_request_is_reported():
    _, report = _report("a b c a b c\n" * 60, model="word", vocab_size=5000)
    assert (report["requested_vocab_size"], report["vocab_size"]) == (5000, 6)


def test_probes_that_fail_are_listed(text):
    _, report = _report(text, model="word", vocab_size=500)
    probes = {failure["probe"] for failure in report["probe_failures"]}
    assert {"double spaces", "newline", "CJK", "emoji with joiner"} <= probes
