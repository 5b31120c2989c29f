"""`tformer generate`, as a user runs it: ensembles, and beams of decoders alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.end_to_end.translate_runs import DECODER, LINES, Cli, Run, documents, refusal


def test_an_ensemble_takes_words_commas_and_repeats(cli: Cli, random_run: Callable[..., Run], translator: Run) -> None:
    second, third = random_run(seed=1), random_run(seed=2)
    common = ("--prompt", "abc", "--json")
    ways = [
        cli("generate", "--ensemble", translator, second, third, *common),
        cli("generate", "--ensemble", f"{translator},{second},{third}", *common),
        cli("generate", "--ensemble", translator, "--ensemble", second, "--ensemble", third, *common),
        cli("generate", *common, "--ensemble", translator, second, third),
        cli("generate", "--ensemble", translator, second, third, translator, *common),
    ]
    answers = [documents(way) for way in ways]
    assert all(answer == answers[0] for answer in answers)
    assert all(str(run.name) in ways[0].err for run in (translator, second, third))
    assert answers[0] != documents(cli("generate", translator, *common))
    assert documents(cli("generate", "--ensemble", translator, *common)) == documents(
        cli("generate", translator, *common)
    )


def test_alignments_of_an_ensemble_are_those_of_its_mean_attention(
    cli: Cli, random_run: Callable[..., Run], translator: Run, lines: Path
) -> None:
    common = ("--input", lines, "--alignments", "--json")
    alone = documents(cli("generate", translator, *common))
    assert documents(cli("generate", "--ensemble", translator, *common)) == alone
    found = documents(cli("generate", "--ensemble", translator, random_run(seed=1), *common))
    assert found != alone and len(found) == len(alone)
    for document in found:
        [completion] = document["completions"]
        assert len(completion["alignment"]) == len(completion["tokens"])
        assert all(0 <= source < len(document["prompt"]) for source, _ in completion["alignment"])


def test_an_ensemble_of_decoders_continues(cli: Cli, random_run: Callable[..., Run], decoder: Run) -> None:
    outcome = cli("generate", "--ensemble", decoder, random_run(DECODER, seed=1), "--prompt", "abc", "--beam-size", 3)
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("abc") and len(outcome.out) > 4


def test_an_ensemble_of_different_vocabularies_names_both(
    cli: Cli, random_run: Callable[..., Run], translator: Run, decoder: Run
) -> None:
    other = random_run(letters="xyz")
    message = refusal(cli("generate", "--ensemble", translator, other, "--prompt", "a"))
    assert str(translator) in message and str(other) in message and "different vocabularies" in message
    target = random_run(targets="xyz")
    message = refusal(cli("generate", "--ensemble", target, random_run(targets="vw"), "--prompt", "a"))
    assert "different target vocabularies" in message
    assert "no encoder" in refusal(cli("generate", "--ensemble", translator, decoder, "--prompt", "a"))


# --- decoders alone ---------------------------------------------------------------------------------------------------


def test_a_decoder_alone_continues_its_prompt_with_a_beam(cli: Cli, decoder: Run, lines: Path) -> None:
    shown = cli("generate", decoder, "--prompt", "abc", "--beam-size", 4)
    assert shown.code == 0, shown.err
    assert shown.out.startswith("abc")
    [document] = documents(cli("generate", decoder, "--prompt", "abc", "--beam-size", 4, "--json"))
    assert shown.out == "abc" + document["text"] + "\n"
    answers = cli("generate", decoder, "--input", lines, "--beam-size", 4).out
    assert answers.splitlines()[0] == document["text"].replace("\n", "\\n")
    assert len(answers.splitlines()) == len(LINES)
    rows = cli("generate", decoder, "--input", lines, "--beam-size", 4, "--n-best", 4).out.splitlines()
    assert len(rows) == 4 * len(LINES) and rows[0].split("\t")[2] == document["text"].replace("\t", "\\t")


def test_a_beam_of_one_is_greedy_for_a_decoder_alone(cli: Cli, decoder: Run) -> None:
    assert (
        cli("generate", decoder, "--prompt", "abc", "--beam-size", 1).out
        == cli("generate", decoder, "--prompt", "abc", "--greedy").out
    )


def test_a_beam_ends_with_the_context_and_a_long_prompt_is_cut_or_refused(cli: Cli, decoder: Run) -> None:
    common = ("generate", decoder, "--beam-size", 2, "--json", "--max-new-tokens", 50)
    [document] = documents(cli(*common, "--prompt", "abcabcabc"))
    assert (document["finish_reason"], len(document["completions"][0]["ids"])) == ("length", 8)
    cut = cli(*common, "--prompt", "abc" * 10)
    assert cut.code == 0 and "30 tokens" in cut.err and "last 8" in cut.err
    assert "prompt 1 has 30 tokens" in refusal(cli(*common, "--prompt", "abc" * 10, "--context", "error"))
