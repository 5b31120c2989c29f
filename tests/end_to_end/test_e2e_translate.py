"""`tformer generate` with encoder-decoders: translation, beam search, ensembles, mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.translate_runs import DECODER, LINES, Cli, Run, documents, refusal


def test_every_line_in_gives_one_line_out_in_order_and_empty_gives_empty(
    cli: Cli, translator: Run, lines: Path
) -> None:
    outcome = cli("generate", translator, "--input", lines)
    assert outcome.code == 0, outcome.err
    answers = outcome.out.split("\n")
    assert answers.pop() == "" and len(answers) == len(LINES)
    assert [bool(answer) for answer in answers] == [bool(line.strip()) for line in LINES]
    for line, answer in zip(LINES, answers, strict=True):
        assert cli("generate", translator, "--prompt", line).out == answer + "\n"


def test_an_empty_file_gives_an_empty_output(cli: Cli, translator: Run, tmp_path: Path) -> None:
    (tmp_path / "none.txt").write_text("")
    outcome = cli("generate", translator, "--input", tmp_path / "none.txt")
    assert (outcome.code, outcome.out) == (0, "")


@pytest.mark.slow
def test_standard_input_is_answered_line_by_line(cli: Cli, translator: Run) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tformer", "generate", str(translator)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None and process.stdout is not None
    answers = []
    for line in ("abc", "", "fed cab"):
        process.stdin.write(line + "\n")
        process.stdin.flush()
        answers.append(process.stdout.readline())  # arrives while the pipe stays open
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    assert answers == [cli("generate", translator, "--prompt", line).out for line in ("abc", "", "fed cab")]
    process.stdout.close()
    assert process.stderr is not None
    process.stderr.close()


# --- interrupts -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_interrupt_keeps_the_lines_that_were_done(translator: Run, tmp_path: Path) -> None:
    path, out = tmp_path / "many.txt", tmp_path / "out.jsonl"
    path.write_text("abc def\n" * 20_000)
    arguments = ["generate", str(translator), "--input", str(path), "--output", str(out), "--batch-size", "4"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tformer", *arguments, "--n-best", "3", "--json"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    pending = tmp_path / f".tmp-{out.name}-{process.pid}"
    while process.poll() is None and not (pending.exists() and pending.stat().st_size):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    done = [json.loads(line) for line in out.read_text().splitlines()]
    assert done and f"interrupted after {len(done):,} lines" in err
    assert [document["index"] for document in done] == list(range(len(done)))
    assert {document["finish_reason"] for document in done} <= {"eos", "length"}


def test_an_ensemble_takes_words_commas_and_repeats(cli: Cli, random_run: Callable[..., Run], translator: Run) -> None:
    second, third = random_run(seed=1), random_run(seed=2)
    common = ("--prompt", "abc", "--json")
    ways = [
        cli("generate", "--ensemble", translator, second, third, *common),
        cli("generate", *common, "--ensemble", f"{translator},{second}", "--ensemble", third),
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


def test_an_ensemble_of_different_target_vocabularies_names_both(cli: Cli, random_run: Callable[..., Run]) -> None:
    one, other = random_run(targets="xyz"), random_run(targets="vw")
    message = refusal(cli("generate", "--ensemble", one, other, "--prompt", "a"))
    assert str(one) in message and str(other) in message and "different target vocabularies" in message


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


def test_a_beam_ends_with_the_context_and_a_long_prompt_is_cut_or_refused(cli: Cli, decoder: Run) -> None:
    common = ("generate", decoder, "--beam-size", 2, "--json", "--max-new-tokens", 50)
    [document] = documents(cli(*common, "--prompt", "abcabcabc"))
    assert (document["finish_reason"], len(document["completions"][0]["ids"])) == ("length", 8)
    cut = cli(*common, "--prompt", "abc" * 10)
    assert cut.code == 0 and "30 tokens" in cut.err and "last 8" in cut.err
    assert "prompt 1 has 30 tokens" in refusal(cli(*common, "--prompt", "abc" * 10, "--context", "error"))


@pytest.mark.parametrize(
    "options",
    [
        ["--n-best", 3],
        ["--greedy"],
        ["--temperature", 1, "--num-samples", 3],
        ["--target-prefix", "ba", "--n-best", 2],
    ],
)
def test_json_holds_the_log_probability_of_each_token_of_an_encoder_decoder(
    cli: Cli, translator: Run, lines: Path, options: list[object]
) -> None:
    """One for each id, that of a prefix is null; they sum to the text's."""
    command = ("generate", translator, "--input", lines, "--json", *options)
    found = documents(cli(*command, "--logprobs"))
    for document in found:
        assert document["logprobs"] == document["completions"][0]["logprobs"]
        for one in document["completions"]:
            assert len(one["logprobs"]) == len(one["ids"])
            values = [value for value in one["logprobs"] if value is not None]
            assert one["logprob"] == pytest.approx(sum(values), abs=1e-9) and all(value <= 0 for value in values)
            assert len(one["ids"]) - len(values) == (2 if "--target-prefix" in options and one["ids"] else 0)
        for part in (document, *document["completions"]):
            del part["logprobs"]
    assert found == documents(cli(*command))


def test_json_holds_the_log_probability_of_each_token_of_a_searched_continuation(cli: Cli, decoder: Run) -> None:
    [document] = documents(
        cli("generate", decoder, "--prompt", "ab", "--beam-size", 3, "--n-best", 3, "--logprobs", "--json")
    )
    assert len(document["completions"]) == 3
    for one in document["completions"]:
        assert len(one["logprobs"]) == len(one["ids"]) and sum(one["logprobs"]) == pytest.approx(one["logprob"])


@pytest.mark.parametrize(
    "options",
    [
        ["--length-penalty", "0.6", "--length-penalty-type", "gnmt"],
        ["--length-penalty-type", "none"],
        ["--stopping", "exhaustive"],
        ["--stopping", "heuristic"],
        ["--at-limit", "end"],
        ["--no-repeat-ngram", "1", "--repetition-penalty", "1.5"],
        ["--alignments"],
        ["--temperature", "1.5", "--top-p", "0.9", "--seed", "3"],
        ["--greedy", "--stop", "a"],
        ["--logprobs"],
    ],
)
def test_every_option_decodes(cli: Cli, translator: Run, lines: Path, options: list[str]) -> None:
    outcome = cli("generate", translator, "--input", lines, *options)
    assert outcome.code == 0, outcome.err
    assert len(outcome.out.splitlines()) == len(LINES)


def test_alignments_are_pharaoh_pairs_after_a_tab_and_pairs_in_json(cli: Cli, translator: Run, lines: Path) -> None:
    common = ("generate", translator, "--input", lines, "--alignments")
    found = documents(cli(*common, "--json"))
    for line, document in zip(cli(*common).out.splitlines(), found, strict=True):
        text, _, pairs = line.rpartition("\t")
        [completion] = document["completions"]
        assert text == completion["text"].replace("\t", "\\t")
        assert pairs == " ".join(f"{source}-{target}" for source, target in completion["alignment"])
        if document["prompt"].strip():
            assert document["source_tokens"] == list(document["prompt"])
            assert [target for _, target in completion["alignment"]] == list(range(len(completion["tokens"])))
            assert all(0 <= source < len(document["prompt"]) for source, _ in completion["alignment"])
    assert cli(*common, "--n-best", 2).out.splitlines()[0].count("\t") == 3


@pytest.mark.parametrize("options", [["--n-best", 3], ["--num-samples", 5, "--temperature", 2]], ids=str)
def test_each_side_may_have_its_own_vocabulary(cli: Cli, random_run: Callable[..., Run], options: list[object]) -> None:
    common = ("generate", random_run(targets="xyz"), "--prompt", "abc", "--json", *options)
    [document] = documents(cli(*common))
    texts = [one["text"] for one in document["completions"]]
    assert len(set(texts)) > 1 and set("".join(texts)) <= set("xyz")
    assert documents(cli(*common)) == [document]


def test_a_long_source_loses_its_end_where_that_is_asked_for(cli: Cli, translator: Run, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("abc\n" + "abcdefgh" * 2 + "\n")
    outcome = cli("generate", translator, "--input", path, "--too-long", "cut")
    assert outcome.code == 0 and "were cut: 1" in outcome.err
    kept = [cli("generate", translator, "--prompt", text).out for text in ("abc", "abcdefghabcdef")]
    assert outcome.out == "".join(kept)
    assert cli("generate", translator, "--prompt", "abcdefgh" * 2, "--too-long", "cut").out == kept[1]
