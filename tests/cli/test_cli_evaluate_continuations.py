"""`tformer evaluate --score` of decoder-only models: the log-probability of given continuations of prompts."""

from __future__ import annotations

import json
import math

import pytest

from tformer.decoding.prompts import encode_continuation
from tformer.tokenizer import TokenizerOptions, train_tokenizer

PROMPTS = ["abc", "", "fed cab ", "h", "a"]
TARGETS = [" dab", "abc", "g", "", "bcdefgh abcdefgh"]  # the last one fills the context of 16


def write(path, lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def files(tmp_path):
    return ["--source", write(tmp_path / "prompts", PROMPTS), "--target", write(tmp_path / "targets", TARGETS)]


def refusal(outcome):
    assert (outcome.code, outcome.out) == (2, ""), outcome.err
    assert "Traceback" not in outcome.err
    return outcome.err


def scored(cli, *arguments):
    outcome = cli("evaluate", *arguments, "--score", "--json")
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def test_every_continuation_is_scored_as_a_plain_loop_does(cli, random_run, files):
    import torch

    import tformer

    loaded = tformer.load(random_run)
    document = scored(cli, random_run, *files)
    assert (document["step"], document["data"]) == (3, str(files[1]))
    newline = loaded.tokenizer.encode("\n")  # what an empty prompt begins from without a special token
    for prompt, target, score in zip(PROMPTS, TARGETS, document["scores"], strict=True):
        before, after = loaded.tokenizer.encode(prompt) or newline, loaded.tokenizer.encode(target)
        with torch.no_grad():
            ids = [*before, *after][: max(1, len(before) + len(after) - 1)]  # the last one is only predicted
            logprobs = loaded.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = sum(float(logprobs[len(before) - 1 + n, token]) for n, token in enumerate(after))
        assert score["logprob"] == pytest.approx(expected, abs=1e-4) and score["tokens"] == len(target)
    assert document["tokens"] == sum(map(len, TARGETS))
    assert document["logprob"] == pytest.approx(sum(score["logprob"] for score in document["scores"]))
    assert document["perplexity"] == pytest.approx(math.exp(-document["logprob"] / document["tokens"]))


def test_plain_output_is_one_log_probability_a_line(cli, random_run, files):
    lines = cli("evaluate", random_run, *files, "--score").out.splitlines()
    expected = [score["logprob"] for score in scored(cli, random_run, *files)["scores"]]
    assert [float(line) for line in lines] == pytest.approx(expected, abs=1e-5)


def test_a_table_holds_both_sides(cli, random_run, files, tmp_path):
    rows = [f"{prompt}\t{target}" for prompt, target in zip(PROMPTS, TARGETS, strict=True)]
    named = write(tmp_path / "table.tsv", ["source\ttarget", *rows])
    assert scored(cli, random_run, "--data", named)["scores"] == scored(cli, random_run, *files)["scores"]
    other = write(tmp_path / "other.tsv", ["q\ta", *rows])
    columns = ["--source-column", "q", "--target-column", "a"]
    assert scored(cli, random_run, "--data", other, *columns)["scores"] == scored(cli, random_run, *files)["scores"]


def test_the_score_is_what_a_beam_reported(cli, random_run, tmp_path):
    prompts = ["abc", "fed", "h"]
    found = cli("generate", random_run, "--input", write(tmp_path / "p", prompts), "--beam-size", 3, "--json")
    best = [json.loads(line)["completions"][0] for line in found.out.splitlines()]
    table = tmp_path / "own.jsonl"
    pairs = zip(prompts, best, strict=True)
    write(table, [json.dumps({"source": prompt, "target": one["text"]}) for prompt, one in pairs])
    for score, one in zip(scored(cli, random_run, "--data", table)["scores"], best, strict=True):
        assert score["logprob"] == pytest.approx(one["logprob"], abs=1e-4) and score["tokens"] == len(one["ids"])


def test_what_cannot_be_scored_is_one_clear_line(cli, random_run, files, tmp_path):
    assert "--source" in refusal(cli("evaluate", random_run, "--score"))
    assert "--score" in refusal(cli("evaluate", random_run, *files))
    assert "--beam-size" in refusal(cli("evaluate", random_run, *files, "--score", "--beam-size", 3))
    assert "--stride" in refusal(cli("evaluate", random_run, *files, "--score", "--stride", 3))
    long = write(tmp_path / "long", [*TARGETS[:2], "a" * 20, *TARGETS[3:]])
    message = refusal(cli("evaluate", random_run, *files[:3], long, "--score"))
    assert "prompts:3" in message and "28 tokens" in message and "17" in message
    blank = write(tmp_path / "blank", [""] * len(PROMPTS))
    assert "no continuation has a token" in refusal(cli("evaluate", random_run, *files[:3], blank, "--score"))
    short = write(tmp_path / "short", TARGETS[:-1])
    assert "5 lines" in refusal(cli("evaluate", random_run, *files[:3], short, "--score"))


def test_a_continuation_is_spelled_as_inside_its_text():
    options = TokenizerOptions(model="word", template="none", min_frequency=1)
    words = train_tokenizer(lambda: iter(["the cat sat down"]), options)
    assert encode_continuation(words, "the cat", " sat down") == words.encode("the cat sat down")[2:]
    assert encode_continuation(words, "the cat", "sat") == words.encode("sat")  # not the unknown word 'catsat'
    assert encode_continuation(words, "", "the cat") == words.encode("the cat")
    assert encode_continuation(words, "the cat", "") == []
