"""`--embeddings`: tables that start with the token vectors of a file."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.quick import first_is_quick
from tests.training.pair_makers import sides
from tests.training.test_training_devices import assert_same_run, latest
from tests.training.test_training_devices import train as gpt
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer
from tformer.tokenizer.options import TokenizerOptions
from tformer.tokenizer.train import train_tokenizer
from tformer.training.embeddings import Vectors, read_vectors
from tformer.workers.work import Work

__all__ = ["gpt"]  # fixture
Cli = Callable[..., Any]
COLUMNS = 3
LINES = ("the 1 2 3", "Paris 4 5 6", ". . . 7 8 9", "cat -1e-1 .5 2", "the 9 9 9")
EXPECTED = {"the": [1, 2, 3], "paris": [4, 5, 6], "cat": [-0.1, 0.5, 2]}


def words(text: str = "the paris cat dog", **options: Any) -> Tokenizer:
    return train_tokenizer(
        lambda: iter([text]), TokenizerOptions(model="word", vocab_size=50, min_frequency=1, **options)
    )


def written(path: Path, lines: tuple[str, ...] = LINES, *, header: bool = False) -> Path:
    text = "".join(f"{line}\n" for line in ((f"{len(lines)} {COLUMNS}", *lines) if header else lines))
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def read(path: Path, tokenizer: Tokenizer) -> Vectors:
    return read_vectors(path, tokenizer, columns=COLUMNS, work=Work())


def by_token(vectors: Vectors, tokenizer: Tokenizer) -> dict[str, list[float]]:
    return {
        token: pytest.approx(vectors.rows[number].tolist())
        for number, token in enumerate(tokenizer.tokens)
        if vectors.found[number]
    }


@pytest.mark.parametrize("header", [False, True], ids=["GloVe", "word2vec"])
@pytest.mark.parametrize("name", ["vectors.txt", "vectors.vec.gz"])
def test_text_with_and_without_a_header_gives_the_first_vector_of_each_word(
    tmp_path: Path, name: str, header: bool
) -> None:
    tokenizer = words()
    vectors = read(written(tmp_path / name, header=header), tokenizer)
    assert by_token(vectors, tokenizer) == EXPECTED
    assert vectors.coverage() == f"3 of {tokenizer.vocab_size} tokens, 1 of them from a word of another case"


def test_the_same_word_goes_before_one_of_another_case(tmp_path: Path) -> None:
    tokenizer = words("Paris paris ROME")
    vectors = read(written(tmp_path / "v.txt", ("PARIS 1 1 1", "paris 2 2 2", "Rome 3 3 3", "rome 4 4 4")), tokenizer)
    assert by_token(vectors, tokenizer) == {"Paris": [1, 1, 1], "paris": [2, 2, 2], "ROME": [3, 3, 3]}


@pytest.mark.parametrize("model", ["bpe", "byte-bpe"])
def test_tokens_that_begin_a_word_match_without_their_mark(tmp_path: Path, model: Any) -> None:
    options = TokenizerOptions(model=model, vocab_size=300 if model == "byte-bpe" else 60, min_frequency=1)
    tokenizer = train_tokenizer(lambda: iter(["x the für " * 20]), options)
    vectors = read(written(tmp_path / "v.txt", ("the 1 1 1", "für 2 2 2")), tokenizer)
    found = {tokenizer.decode([number]).strip() for number in vectors.found.nonzero()[0].tolist()}
    assert found == {"the", "für"}


def test_safetensors_has_a_row_for_each_id_of_the_tokenizer_beside_it(tmp_path: Path) -> None:
    theirs, ours = words("cat the mouse"), words()
    table = torch.arange(theirs.vocab_size * COLUMNS).reshape(-1, COLUMNS).to(torch.bfloat16)
    save_file({"embedding.weight": table, "other.weight": table.clone()}, tmp_path / "model.safetensors")
    theirs.save(tmp_path / "tokenizer.json")
    found = by_token(read(tmp_path / "model.safetensors", ours), ours)
    assert {"the", "cat"} <= found.keys() and not {"dog", "paris", "mouse"} & found.keys()
    assert found["cat"] == table[theirs.token_id("cat")].tolist()


def test_safetensors_without_a_tokenizer_has_the_rows_of_the_models_own(tmp_path: Path) -> None:
    tokenizer = words()
    table = torch.randn(tokenizer.vocab_size, COLUMNS)
    save_file({"anything": table}, tmp_path / "table.safetensors")
    assert torch.equal(read(tmp_path / "table.safetensors", tokenizer).rows, table)
    save_file({"anything": table[:-1].clone()}, tmp_path / "table.safetensors")
    with pytest.raises(
        InputError, match=r"has \d+ rows, expected one for each of the \d+ ids of the model's tokenizer"
    ):
        read(tmp_path / "table.safetensors", tokenizer)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("the 1 2 3", "cat 1 2"), r"v.txt:2: found 2 numbers, expected 3"),
        (("the 1 2 3", "cat 1 x 3"), r"v.txt:2: found 'x', expected a number"),
        (("the 1 2 3", "cat 1 nan 3"), r"v.txt:2: found a number that is not finite"),
        (("the 1 2 3", ""), r"v.txt:2: found 0 numbers, expected 3"),
        (("5 3", "the 1 2 3", "cat 4 5 6"), r"v.txt:3: the file ends after 2 words, expected 5 as line 1 states"),
        (("the 1 2", "cat 1 2"), r"v.txt: its vectors have 2 numbers, expected 3, the width of the embedding table"),
        (("2 4", "the 1 2 3 4"), r"v.txt: its vectors have 4 numbers, expected 3"),
        (('{"text": "the cat"}',), r"v.txt:1: found no numbers, expected a word and 3 numbers"),
        (("5 0", "the"), r"v.txt:1: found no numbers, expected a word and 3 numbers"),
        (("9" * 5000 + " 3", "the 1 2 3"), r"v.txt: its vectors have 1 numbers, expected 3"),
        (("mouse 1 2 3",), r"v.txt: found no vector for any of the \d+ tokens"),
        ((), r"v.txt: found no vector, expected a word and 3 numbers in each line"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read(written(tmp_path / "v.txt", lines), words())
    assert "binary" not in str(caught.value.hint)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    packed = written(tmp_path / "v.txt.gz")
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(InputError, match=r"v.txt.gz: damaged .gz data"):
        read(packed, words())
    (tmp_path / "v.bin").write_bytes(b"2 3\nthe \xff\xfe\x00\x01\x02\n")
    with pytest.raises(InputError, match=r"v.bin:2: found 0 numbers") as caught:
        read(tmp_path / "v.bin", words())
    assert "binary" in str(caught.value.hint)
    save_file({"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, tmp_path / "v.safetensors")
    with pytest.raises(InputError, match=r"found 2 matrices, expected a single one or one named embedding\.weight"):
        read(tmp_path / "v.safetensors", words())


WORDS = ("--set", "tokenizer.train.model=word", "--set", "tokenizer.train.min_frequency=1")


def table_file(path: Path, *, columns: int, names: str = "the cat sat") -> Path:
    rows = [f"{name} {' '.join([str(number / 4)] * columns)}" for number, name in enumerate(names.split(), start=1)]
    path.write_text("\n".join(rows) + "\n")
    return path


def row(run: str | Path, word: str, table: str = "embedding.weight", tokenizer: str = "tokenizer.json") -> torch.Tensor:
    number = Tokenizer.load(Path(run) / tokenizer).token_id(word)
    return load_file(latest(str(run)) / "model.safetensors")[table][number]


FROZEN = ("--set", "optimizer.groups=[{match: embedding.weight, frozen: true}]")


def test_a_run_starts_with_the_vectors_says_how_many_and_keeps_them_in_a_frozen_group(gpt: Cli, tmp_path: Path) -> None:
    file = table_file(tmp_path / "v.txt", columns=16)
    done = gpt("--out", "run", *WORDS, "--embeddings", file, *FROZEN, "--max-steps", 2)
    assert done.code == 0 and "v.txt: vectors of 3 of 1" in done.err
    assert torch.equal(row("run", "cat"), torch.full((16,), 0.5))
    assert gpt("--out", "plain", *WORDS, *FROZEN, "--max-steps", 2).code == 0
    assert torch.equal(row("run", "dogs"), row("plain", "dogs"))  # a row without a vector keeps its initial value
    assert not torch.equal(row("run", "cat"), row("plain", "cat"))


def test_a_resumed_run_does_not_read_the_file_again(gpt: Cli, tmp_path: Path) -> None:
    words = (*WORDS, "--embeddings", table_file(tmp_path / "v.txt", columns=16))
    assert gpt("--out", "whole", *words, "--max-steps", 4).code == 0
    assert gpt("--out", "run", *words, "--max-steps", 2, "--set", "schedule.decay_steps=4").code == 0
    (tmp_path / "v.txt").unlink()
    assert gpt("--out", "run", *words, "--max-steps", 4, "--resume").code == 0
    weights, others = (load_file(latest(run) / "model.safetensors") for run in ("run", "whole"))
    assert all(torch.equal(weights[name], others[name]) for name in others)
    other = gpt("--out", "run", *WORDS, "--embeddings", "other.txt", "--max-steps", 6, "--resume")
    assert other.code == 2 and "no file can be read now" in other.err


@pytest.mark.slow
def test_two_processes_start_with_the_same_vectors(gpt: Cli, tmp_path: Path) -> None:
    """The quick twin is `test_training_saving.py::test_each_process_writes_whole_tensors_where_weights_are_spread`."""
    words = (*WORDS, "--embeddings", table_file(tmp_path / "v.txt", columns=16), "--max-steps", 3)
    assert gpt("--out", "one", *words).code == 0
    assert gpt("--out", "two", *words, "--devices", 2, "--parallel", "fsdp").code == 0
    assert_same_run("two", "one")


def test_a_narrower_table_takes_narrower_vectors(gpt: Cli, tmp_path: Path) -> None:
    file = table_file(tmp_path / "v.txt", columns=5)
    refused = gpt("--out", "run", *WORDS, "--embeddings", file)
    assert refused.code == 2 and "its vectors have 5 numbers, expected 16" in refused.err
    assert "model.embedding.size=5" in refused.err and not Path("run").exists()
    done = gpt("--out", "run", *WORDS, "--embeddings", file, "--set", "model.embedding.size=5", *FROZEN)
    assert done.code == 0 and torch.equal(row("run", "sat"), torch.full((5,), 0.75))


def test_each_side_of_pairs_has_its_file(train: Cli, aligned: tuple[Path, Path], tmp_path: Path) -> None:
    source = table_file(tmp_path / "en.txt", columns=16, names="red house")
    target = table_file(tmp_path / "de.txt", columns=16, names="haus rot")
    files = ("--embeddings", source, "--target-embeddings", target)
    frozen = ("--set", "optimizer.groups=[{match: '*embedding.weight', frozen: true}]")
    frozen = (*frozen, "--max-steps", 1, "--set", "training.valid_beam_size=0", "--set",
              "training.best_metric=loss", "--set", "training.sample_every=0")  # fmt: skip
    run = train(*sides(aligned), *files, "--vocabulary", "separate", *frozen)
    assert torch.equal(row(run, "house", tokenizer="tokenizer.source.json"), torch.full((16,), 0.5))
    made = row(run, "haus", "decoder_embedding.weight", "tokenizer.target.json")
    assert torch.equal(made, torch.full((16,), 0.25))
    joint = train(*sides(aligned), *files, *frozen)
    assert row(joint, "house")[0] == 0.5 and row(joint, "rot")[0] == 0.5 and row(joint, "haus")[0] == 0.25


def test_an_encoder_starts_with_the_vectors(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "data.tsv").write_text("".join(f"the cat {n}\ta\nthe dog {n}\tb\n" for n in range(20)))
    small = ("--arch", "bert", "--preset", "classify", "--set", "model.d_model=16", "--set",
             "model.encoder.num_layers=1", "--max-steps", 1, "--set", "training.batch_size=4")  # fmt: skip
    file = table_file(tmp_path / "v.txt", columns=16, names="the cat")
    done = cli("train", "--data", tmp_path / "data.tsv", "--out", tmp_path / "run", *small, *WORDS, *FROZEN,
               "--text-column", 0, "--label-column", 1, "--embeddings", file)  # fmt: skip
    assert done.code == 0, done.err
    assert torch.equal(row(tmp_path / "run", "cat"), torch.full((16,), 0.5))


@first_is_quick("arch", ["roberta", "electra", "t5", "bart"])
def test_pre_training_of_every_family_starts_with_the_vectors(arch: str, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog ran to the house\n" * 100)
    file = table_file(tmp_path / "v.txt", columns=16)
    small = ("--preset", "mini", "--set", "model.embedding.size=16", "--max-steps", 1, "--set", "data.seq_len=32",
             "--set", "optimizer.groups=[{match: '*embedding.weight', frozen: true}]")  # fmt: skip
    shared = ("--set", "generator.embedding.size=16") if arch == "electra" else ()
    done = cli("train", "--arch", arch, "--data", tmp_path / "text.txt", "--out", tmp_path / "run", *small, *shared,
               *WORDS, "--embeddings", file)  # fmt: skip
    assert done.code == 0, done.err
    assert torch.equal(row(tmp_path / "run", "cat"), torch.full((16,), 0.5))


def test_files_that_no_table_can_take_are_refused(gpt: Cli, tmp_path: Path) -> None:
    file = table_file(tmp_path / "v.txt", columns=16)
    refused = gpt("--out", "run", *WORDS, "--target-embeddings", file)
    assert refused.code == 2 and "embeddings.target_path" in refused.err
    assert gpt("--out", "run", *WORDS, "--max-steps", 1).code == 0
    refused = gpt("--out", "other", "--init-from", "run", "--embeddings", file)
    assert refused.code == 2 and "exclude each other" in refused.err
    missing = gpt("--out", "other", *WORDS, "--embeddings", "nowhere.txt")
    assert missing.code == 2 and "nowhere.txt: cannot be read" in missing.err
