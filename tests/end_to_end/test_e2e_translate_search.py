"""`tformer generate` with encoder-decoders, as a user runs it: options of search, n-best, JSON, alignments, samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.translate_runs import LINES, Cli, Run, documents, refusal


def test_the_recipe_gives_the_beam_and_flags_override_it(cli: Cli, translator: Run) -> None:
    common = ("generate", translator, "--prompt", "abc", "--json")
    assert "beam 3" in cli(*common).err
    assert documents(cli(*common)) == documents(cli(*common, "--beam-size", 3))
    assert "beam 5" in cli(*common, "--beam-size", 5).err
    greedy = documents(cli(*common, "--greedy"))
    assert greedy == documents(cli(*common, "--beam-size", 1)) == documents(cli(*common, "--temperature", 0))


def test_greedy_is_the_most_probable_sample(cli: Cli, translator: Run, lines: Path) -> None:
    searched = cli("generate", translator, "--input", lines, "--greedy")
    drawn = cli("generate", translator, "--input", lines, "--top-k", 1)
    assert searched.out == drawn.out != ""


def test_n_best_gives_index_score_and_text_best_first(cli: Cli, translator: Run, lines: Path) -> None:
    outcome = cli("generate", translator, "--input", lines, "--n-best", 3)
    assert outcome.code == 0, outcome.err
    rows = [line.split("\t") for line in outcome.out.splitlines()]
    assert {len(row) for row in rows} == {3}
    assert sorted({int(row[0]) for row in rows}) == list(range(len(LINES)))
    best = cli("generate", translator, "--input", lines).out.splitlines()
    for index, line in enumerate(LINES):
        mine = [row for row in rows if row[0] == str(index)]
        scores = [float(score) for _, score, _ in mine]
        texts = [text for _, _, text in mine]
        assert scores == sorted(scores, reverse=True) and len(set(texts)) == len(texts)
        assert len(texts) == (3 if line.strip() else 1)
        assert texts[0] == best[index].replace("\t", "\\t")


def test_json_holds_all_hypotheses_and_scores(cli: Cli, translator: Run, lines: Path) -> None:
    found = documents(cli("generate", translator, "--input", lines, "--n-best", 2, "--json"))
    assert [document["index"] for document in found] == list(range(len(LINES)))
    assert [document["prompt"] for document in found] == LINES
    for document in found:
        first = document["completions"][0]
        assert (document["text"], document["score"]) == (first["text"], first["score"])
        for one in document["completions"]:
            assert set(one) == {"text", "ids", "score", "logprob", "finish_reason"}
            if one["ids"]:
                length = len(one["ids"])
                assert one["score"] == pytest.approx(one["logprob"] / length, abs=1e-5)


def test_length_options_hold(cli: Cli, translator: Run, lines: Path) -> None:
    def lengths(*more: object) -> list[int]:
        found = documents(cli("generate", translator, "--input", lines, "--json", *more))
        return [len(document["completions"][0]["ids"]) for document in found if document["prompt"].strip()]

    assert max(lengths("--max-new-tokens", 2)) <= 2
    assert min(lengths("--min-new-tokens", 6)) >= 6
    margins = lengths("--length-margin", 1, "--min-new-tokens", 8)
    assert all(found <= len(line) + 1 for found, line in zip(margins, filter(str.strip, LINES), strict=True))


@pytest.mark.parametrize(
    "options",
    [
        ["--length-penalty", "0.6", "--length-penalty-type", "gnmt"],
        ["--length-penalty-type", "none"],
        ["--stopping", "exhaustive"],
        ["--stopping", "heuristic"],
        ["--coverage-penalty", "0.2"],
        ["--beam-size", "4", "--beam-groups", "2", "--diversity-penalty", "0.5"],
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


def test_no_token_twice_when_unigrams_may_not_repeat(cli: Cli, translator: Run) -> None:
    [document] = documents(cli("generate", translator, "--prompt", "abc", "--no-repeat-ngram", 1, "--json"))
    ids = document["completions"][0]["ids"]
    assert len(set(ids)) == len(ids)


def test_samples_are_drawn_by_seed(cli: Cli, translator: Run) -> None:
    common = ("generate", translator, "--prompt", "abc", "--num-samples", 4, "--temperature", 2, "--json")
    [document] = documents(cli(*common))
    assert len(document["completions"]) == 4 and len({one["text"] for one in document["completions"]}) > 1
    assert documents(cli(*common)) == [document] != documents(cli(*common, "--seed", 5))
    assert cli(*common[:-1]).out.count("---------------\n") == 3


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


def test_each_side_may_have_a_vocabulary_of_its_own(cli: Cli, random_run: Callable[..., Run]) -> None:
    outcome = cli("generate", random_run(targets="xyz"), "--prompt", "abc", "--n-best", 3)
    assert outcome.code == 0, outcome.err
    texts = [line.split("\t")[2] for line in outcome.out.splitlines()]
    assert set("".join(texts)) <= set("xyz")


def test_samples_are_drawn_from_a_targets_own_vocabulary(cli: Cli, random_run: Callable[..., Run]) -> None:
    sampled = ("--num-samples", 5, "--temperature", 2, "--json")
    common = ("generate", random_run(targets="xyz"), "--prompt", "abc", *sampled)
    [document] = documents(cli(*common))
    texts = [one["text"] for one in document["completions"]]
    assert len(set(texts)) > 1 and set("".join(texts)) <= set("xyz")
    assert documents(cli(*common)) == [document]


def test_samples_have_the_least_length_too(cli: Cli, translator: Run, lines: Path) -> None:
    common = ("generate", translator, "--input", lines, "--temperature", 1, "--seed", 4, "--json")
    for document in documents(cli(*common, "--min-new-tokens", 6)):
        assert len(document["completions"][0]["ids"]) >= 6 or not document["prompt"].strip()
    assert min(len(document["completions"][0]["ids"]) for document in documents(cli(*common))) < 6
    assert "--min-new-tokens 9 is larger" in refusal(cli(*common, "--min-new-tokens", 9))
