"""`evaluate --seq-len`: sequences of another length than in training, also longer ones where the positions allow it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.translate_runs import DECODER, LETTERS, refusal
from tests.end_to_end.translate_runs import SEQ2SEQ as MODEL_OF_PAIRS

Cli = Callable[..., Any]
MakeRun = Callable[..., Path]

COMPUTED = ("sinusoidal", "rope", "alibi", "t5_bias", "shaw", "none")
TRAINED, LONGER = 16, 50
SEQ2SEQ = MODEL_OF_PAIRS + "objectives: [{kind: seq2seq}]\n"


def with_positions(recipe: str, kind: str, *, max_seq_len: int = TRAINED) -> str:
    recipe = recipe.replace("num_heads: 2,", f"num_heads: 2, positions: {{kind: {kind}}},")
    return recipe.replace(f"max_seq_len: {TRAINED}", f"max_seq_len: {max_seq_len}")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "valid.txt"
    path.write_text("".join(random.Random(1).choices("abcdefgh ", k=400)) + "\n")
    return path


@pytest.fixture
def long_pairs(tmp_path: Path) -> Path:
    """Sources and targets of 30 to 48 letters."""
    draw = random.Random(2)
    rows = [["".join(draw.choices("abcdefgh", k=draw.randint(30, 48))) for _ in range(2)] for _ in range(6)]
    path = tmp_path / "pairs.tsv"
    path.write_text("source\ttarget\n" + "".join("\t".join(row) + "\n" for row in rows))
    return path


def figures(outcome: Any, *names: str) -> list[float]:
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    return [document[name] for name in names]


@pytest.mark.parametrize("kind", COMPUTED)
def test_a_causal_model_reads_windows_longer_than_it_was_made_for(
    kind: str, cli: Cli, random_run: MakeRun, text: Path
) -> None:
    """As the same weights do in a model that was made for that length."""
    short = random_run(with_positions(DECODER, kind))
    made_for_it = random_run(with_positions(DECODER, kind, max_seq_len=LONGER))
    wanted = ("loss", "accuracy", "tokens", "seq_len")
    found = figures(cli("evaluate", short, "--data", text, "--seq-len", LONGER, "--json"), *wanted)
    assert found == pytest.approx(figures(cli("evaluate", made_for_it, "--data", text, "--json"), *wanted))
    assert found[3] == LONGER


def test_windows_of_another_length_predict_every_token_once(cli: Cli, random_run: MakeRun, text: Path) -> None:
    run = random_run(with_positions(DECODER, "rope"))
    counts = [
        figures(cli("evaluate", run, "--data", text, "--seq-len", length, "--json"), "tokens")
        for length in (1, 7, TRAINED, 40, 10_000)
    ]
    assert len({count for (count,) in counts}) == 1


def test_stride_is_held_against_the_asked_length(cli: Cli, random_run: MakeRun, text: Path) -> None:
    run = random_run(with_positions(DECODER, "alibi"))
    found = figures(
        cli("evaluate", run, "--data", text, "--seq-len", 40, "--stride", 20, "--json"), "stride", "seq_len"
    )
    assert found == [20, 40]
    assert "window of 40 tokens, found 41" in refusal(
        cli("evaluate", run, "--data", text, "--seq-len", 40, "--stride", 41)
    )


def test_a_learned_table_refuses_windows_past_its_end(cli: Cli, random_run: MakeRun, text: Path) -> None:
    run = random_run(with_positions(DECODER, "learned"))
    assert cli("evaluate", run, "--data", text, "--seq-len", TRAINED).code == 0
    message = refusal(cli("evaluate", run, "--data", text, "--seq-len", TRAINED + 1))
    assert message == "error: --seq-len: found 17, the model has 16 learned positions"


@pytest.mark.parametrize("kind", COMPUTED)
def test_pairs_longer_than_in_training_are_measured_whole(
    kind: str, cli: Cli, random_run: MakeRun, long_pairs: Path
) -> None:
    short = random_run(with_positions(SEQ2SEQ, kind))
    made_for_it = random_run(with_positions(SEQ2SEQ, kind, max_seq_len=LONGER))
    options = ("--data", long_pairs, "--beam-size", 1, "--max-new-tokens", LONGER, "--json")
    wanted = ("loss", "accuracy", "bleu", "chrf", "examples")
    found = figures(cli("evaluate", short, *options, "--seq-len", LONGER), *wanted)
    assert found == pytest.approx(figures(cli("evaluate", made_for_it, *options), *wanted))


def test_who_reads_cut_sources_hears_of_the_option(cli: Cli, random_run: MakeRun, long_pairs: Path) -> None:
    outcome = cli("evaluate", random_run(with_positions(SEQ2SEQ, "rope")), "--data", long_pairs)
    assert "6 of 6 pairs are longer than 16 tokens and were cut" in outcome.err
    assert "6 sources are longer than the model reads and were cut; --seq-len N reads further" in outcome.err


def output_lengths(cli: Cli, run: Path, pairs: Path, folder: Path, *options: object) -> list[int]:
    errors = folder / "errors.jsonl"
    outcome = cli("evaluate", run, "--data", pairs, "--beam-size", 1, "--errors", errors, *options)
    assert outcome.code == 0, outcome.err
    return [len(json.loads(line)["output"]) for line in errors.read_text().splitlines()]


def test_generation_may_write_as_long_as_the_longer_targets(
    cli: Cli, random_run: MakeRun, long_pairs: Path, tmp_path: Path
) -> None:
    """A model that never ends on its own shows how long it is allowed to write."""
    from tformer.tokenizer import TokenizerOptions, train_tokenizer

    options = TokenizerOptions(model="char", template="seq2seq", min_frequency=1)
    eos = train_tokenizer(lambda: iter([LETTERS]), options).special.eos
    recipe = with_positions(SEQ2SEQ, "alibi").replace(
        "max_new_tokens: 8", f"max_new_tokens: 8, suppress_tokens: [{eos}]"
    )
    run = random_run(recipe)

    def lengths(*options: object) -> set[int]:
        return set(output_lengths(cli, run, long_pairs, tmp_path, *options))

    assert max(lengths()) <= 8
    assert max(lengths("--max-new-tokens", 12)) in range(9, 13)
    assert min(lengths("--seq-len", LONGER)) >= 48
    assert max(lengths("--seq-len", LONGER, "--max-new-tokens", 20)) <= 20


def test_pairs_of_a_learned_table_are_refused_past_its_end(cli: Cli, random_run: MakeRun, long_pairs: Path) -> None:
    for recipe in (with_positions(SEQ2SEQ, "learned"), with_positions(SEQ2SEQ, "alibi").replace("alibi", "learned", 1)):
        message = refusal(cli("evaluate", random_run(recipe), "--data", long_pairs, "--seq-len", LONGER))
        assert message == "error: --seq-len: found 50, the model has 16 learned positions"


def test_scores_of_longer_targets(cli: Cli, random_run: MakeRun, long_pairs: Path) -> None:
    run = random_run(with_positions(SEQ2SEQ, "rope"))
    assert refusal(cli("evaluate", run, "--data", long_pairs, "--score"))
    outcome = cli("evaluate", run, "--data", long_pairs, "--score", "--seq-len", LONGER)
    assert outcome.code == 0 and len(outcome.out.splitlines()) == 6, outcome.err


def test_masked_and_labelled_texts_have_a_length_too(cli: Cli, encoder_run: Callable[[str], Path]) -> None:
    for kind in ("masked", "single"):
        run = encoder_run(kind)
        data = run.parent / ("text.txt" if kind == "masked" else "data.tsv")
        assert cli("evaluate", run, "--data", data, "--seq-len", 8).code == 0
        message = refusal(cli("evaluate", run, "--data", data, "--seq-len", 25))
        assert message == "error: --seq-len: found 25, the model has 24 learned positions"


@pytest.mark.parametrize("value", [0, -3])
def test_a_length_is_at_least_one(value: int, cli: Cli, random_run: MakeRun, text: Path) -> None:
    run = random_run(with_positions(DECODER, "rope"))
    assert "--seq-len must be at least 1" in refusal(cli("evaluate", run, "--data", text, "--seq-len", value))


def test_new_tokens_have_no_meaning_where_nothing_is_written(
    cli: Cli, random_run: MakeRun, long_pairs: Path, text: Path
) -> None:
    pairs, decoder = random_run(with_positions(SEQ2SEQ, "rope")), random_run(with_positions(DECODER, "rope"))
    for words in ((pairs, "--data", long_pairs, "--no-decode"), (decoder, "--data", text)):
        assert "--max-new-tokens has no meaning" in refusal(cli("evaluate", *words, "--max-new-tokens", 9))
    assert "max_new_tokens must be at least 1, found 0" in refusal(
        cli("evaluate", pairs, "--data", long_pairs, "--max-new-tokens", 0)
    )
