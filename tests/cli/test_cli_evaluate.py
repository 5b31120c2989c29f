"""`tformer evaluate` of causal language models, its report on labelled examples, and scores of continuations."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tformer.decoding.prompts import encode_continuation
from tformer.evaluation.reports import MAX_CLASSES, report_lines, report_of
from tformer.evaluation.scored import Scored
from tformer.tokenizer import TokenizerOptions, train_tokenizer


@pytest.fixture
def valid(tmp_path):
    path = tmp_path / "valid.txt"
    path.write_text("abc fed\ncab gabe\n" * 20 + "é", encoding="utf-8")
    return path


def test_json_is_one_document_with_every_figure(figures, random_run, valid):
    found = figures(random_run, "--data", valid)
    assert found["tokens"] == 20 * 17  # every character but the first is predicted
    assert found["bytes"] == 20 * 17 + 2
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * found["tokens"] / math.log(2) / found["bytes"])
    assert 0 <= found["accuracy"] <= 1 and found["tokens_per_second"] > 0
    assert (found["step"], found["seq_len"], found["stride"]) == (3, 16, 16)


def test_plain_output_is_one_figure_a_line(cli, random_run, valid):
    outcome = cli("evaluate", random_run, "--data", valid)
    names = [line.split()[0] for line in outcome.out.splitlines()]
    assert names == ["loss", "perplexity", "bits_per_byte", "accuracy", "tokens", "tokens_per_second"]


def test_batch_size_changes_nothing_and_stride_and_precision_little(figures, random_run, valid):
    def loss(*more):
        return figures(random_run, "--data", valid, *more)["loss"]

    assert loss("--batch-size", 1) == pytest.approx(loss("--batch-size", 50), abs=1e-6)
    assert loss("--stride", 4) != loss()
    assert loss("--stride", 16) == loss()
    assert loss("--precision", "bf16") == pytest.approx(loss(), rel=0.05)


def test_standard_input_and_folders_are_read(figures, random_run, valid, monkeypatch):
    expected = figures(random_run, "--data", valid)["loss"]
    assert figures(random_run, "--data", valid.parent)["loss"] == expected
    with valid.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        found = figures(random_run, "--data", "-")
    assert (found["loss"], found["data"]) == (expected, "standard input")


def test_a_column_of_a_table_is_read(figures, random_run, tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("number,words\n1,abc fed\n2,cab\n")
    by_name = figures(random_run, "--data", table, "--text-column", "words")
    table.write_text("1,abc fed\n2,cab\n")  # a number means that no row holds names
    by_number = figures(random_run, "--data", table, "--text-column", "1")
    assert by_name["loss"] == by_number["loss"]
    assert by_name["bytes"] == len("abc fed") + len("cab")


def test_the_newest_run_is_the_default_and_its_recipe_names_the_data(figures, make_run, valid, monkeypatch):
    run = run_on(make_run, f'{{valid: [{{path: "{valid}"}}]}}')
    monkeypatch.chdir(run.parents[1])
    assert figures()["loss"] == figures(run, "--data", valid)["loss"]


def run_on(make_run, data):
    return make_run(
        f"""
schema: 1
data: {data}
model:
  d_model: 8
  max_seq_len: 16
  decoder: {{num_layers: 1, num_heads: 2, feedforward: {{d_ff: 16}}}}
  init: {{std: 0.5}}
training: {{precision: fp32}}
"""
    )


def test_without_data_the_held_out_part_of_the_training_text_is_evaluated(figures, make_run, valid, tmp_path):
    run = run_on(make_run, f'{{train: [{{path: "{valid}"}}], valid_fraction: 0.2}}')
    text = valid.read_text(encoding="utf-8")
    rest = tmp_path / "rest.txt"
    rest.write_text(text[int(len(text) * 0.8) :], encoding="utf-8")
    found, expected = figures(run), figures(run, "--data", rest)
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert (found["tokens"], found["bytes"]) == (expected["tokens"], expected["bytes"])
    assert found["data"] == f"the last 20% of {valid}"


def test_without_any_data_in_the_recipe_the_built_in_text_is_split(figures, make_run, valid, monkeypatch):
    from tformer.data.sources.builtin import BUILTINS, DEFAULTS, Builtin

    monkeypatch.setitem(DEFAULTS, "text", "builtin:letters")
    monkeypatch.setitem(BUILTINS, "letters", Builtin("letters", "text", lambda: [valid.read_text(encoding="utf-8")]))
    found = figures(run_on(make_run, "{}"))
    assert found["data"] == "the last 10% of builtin:letters"
    assert found["tokens"] == 341 - int(341 * 0.9) - 1


def test_several_validation_sources_are_one_figure(figures, make_run, valid, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("hhh \nb\n" * 9)
    run = run_on(make_run, f'{{valid: [{{path: "{valid}"}}, {{path: "{other}"}}]}}')
    parts = [figures(run, "--data", path) for path in (valid, other)]
    found = figures(run)
    tokens = sum(part["tokens"] for part in parts)
    assert (found["tokens"], found["bytes"]) == (tokens, sum(part["bytes"] for part in parts))
    assert found["loss"] == pytest.approx(sum(part["loss"] * part["tokens"] for part in parts) / tokens)
    assert found["data"] == f"{valid}, {other}"


def test_without_packing_documents_are_evaluated_alone(figures, make_run, tmp_path):
    rows = tmp_path / "rows.csv"
    rows.write_text("text\nabc fed\ncab\ngab eh\n")

    def loss(data):
        return figures(run_on(make_run, data), "--data", rows)["loss"]

    assert loss("{packing: none}") == loss("{document_mask: true}") != loss("{}")


def test_a_run_trained_on_standard_input_needs_data(cli, make_run):
    outcome = cli("evaluate", run_on(make_run, '{train: [{path: "-"}]}'))
    assert (outcome.code, outcome.out) == (2, "")
    assert "standard input" in outcome.err and "--data" in outcome.err


def test_skipped_binary_files_are_told(cli, random_run, valid):
    (valid.parent / "picture.txt").write_bytes(b"\0\xff\xfe" * 50)
    outcome = cli("evaluate", random_run, "--data", valid.parent, "--json")
    assert "skipped 1" in outcome.err and json.loads(outcome.out)["tokens"] == 20 * 17


def test_an_infinite_perplexity_is_null_in_json(cli, figures, random_run, valid, monkeypatch):
    found = {"loss": 1e4, "perplexity": math.inf, "bits_per_byte": 1.0, "accuracy": 0.0, "tokens": 1, "bytes": 1}
    found["tokens_per_second"] = 1.0
    monkeypatch.setattr("tformer.tasks.text.evaluate_lm", lambda *_args, **_kwargs: found)
    assert figures(random_run, "--data", valid)["perplexity"] is None
    assert "perplexity inf" in cli("evaluate", random_run, "--data", valid).out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["empty"]),
        (b" \n\t\n", ["white space"]),
        (b"a", ["1 token"]),
        (b"abc\nab\xff\n", ["text.txt:2", "byte 6", "--invalid-utf8 replace"]),
    ],
)
def test_text_that_cannot_be_evaluated_is_named(cli, random_run, tmp_path, content, words):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    outcome = cli("evaluate", random_run, "--data", path, "--json")
    assert outcome.code == 2 and json.loads(outcome.out).keys() == {"error", "hint", "code"}
    assert all(word in outcome.err for word in words), outcome.err
    assert "Traceback" not in outcome.err


def test_invalid_utf8_may_be_replaced(cli, random_run, tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"abc\nab\xff\n")
    assert cli("evaluate", random_run, "--data", path, "--invalid-utf8", "replace").code == 0


def test_a_loss_that_is_no_number_is_exit_4(cli, random_run, valid, monkeypatch):
    figures = {"loss": math.nan, "perplexity": math.nan, "bits_per_byte": math.nan, "accuracy": 0.0, "tokens": 1}
    monkeypatch.setattr("tformer.tasks.text.evaluate_lm", lambda *_args, **_kwargs: figures)
    outcome = cli("evaluate", random_run, "--data", valid, "--json")
    assert outcome.code == 4 and json.loads(outcome.out)["error"] == "the loss is nan"


def report(names: list[str], *, examples: int = 60) -> dict:
    draw = np.random.default_rng(0)
    labels = draw.integers(len(names), size=examples)
    scores = draw.normal(size=(examples, len(names))) + 2 * np.eye(len(names))[labels]
    return report_of(Scored("classes", names, labels, scores))


def test_figures_classes_and_confusions_follow_each_other():
    found = report(["cat", "a longer name than the others", "x\ty"])
    lines = list(report_lines(found))
    assert lines[0].startswith("accuracy 0.") and lines[0].endswith("]")
    first = lines.index("")
    assert "examples 60" in lines[:first]
    second = lines.index("", first + 1)
    classes, confusion = lines[first + 1 : second], lines[second + 1 :]
    assert len(classes) == 4 and len(set(map(len, classes))) == 1  # numbers end at one place
    assert classes[2].startswith("a longer name than the …") and classes[3].startswith("x\\ty")
    assert confusion[0].startswith("confusion") and len(set(map(len, confusion[1:]))) == 1
    assert [row.split()[-3:] for row in confusion[2:]] == [list(map(str, row)) for row in found["confusion"]]


def test_many_classes_list_their_largest_confusions_instead():
    names = [f"class {number}" for number in range(MAX_CLASSES + 1)]
    lines = list(report_lines(report(names, examples=2000)))
    place = next(number for number, line in enumerate(lines) if line.startswith("most frequent confusions"))
    counts = [int(line.split()[-1]) for line in lines[place + 2 :]]
    assert 0 < len(counts) <= 20 and counts == sorted(counts, reverse=True)


def test_a_regression_has_no_classes():
    found = {"examples": 3, "loss": 1.0, "mae": 0.5, "pearson": 0.25, "spearman": 0.5}
    lines = list(report_lines({**found, "intervals": {"pearson": [0.1, 0.4]}}))
    assert lines == ["pearson 0.2500 [0.1000, 0.4000]", "spearman 0.5000", "mae 0.5000", "loss 1.0000", "examples 3"]


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


def test_every_continuation_is_scored_as_a_plain_loop_does(figures, random_run, files):
    import torch

    import tformer

    loaded = tformer.load(random_run)
    document = figures(random_run, *files, "--score")
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


def test_plain_output_is_one_log_probability_a_line(cli, figures, random_run, files):
    lines = cli("evaluate", random_run, *files, "--score").out.splitlines()
    expected = [score["logprob"] for score in figures(random_run, *files, "--score")["scores"]]
    assert [float(line) for line in lines] == pytest.approx(expected, abs=1e-5)


def test_a_table_holds_both_sides(figures, random_run, files, tmp_path):
    rows = [f"{prompt}\t{target}" for prompt, target in zip(PROMPTS, TARGETS, strict=True)]
    named = write(tmp_path / "table.tsv", ["source\ttarget", *rows])
    expected = figures(random_run, *files, "--score")["scores"]
    assert figures(random_run, "--data", named, "--score")["scores"] == expected
    other = write(tmp_path / "other.tsv", ["q\ta", *rows])
    columns = ["--source-column", "q", "--target-column", "a"]
    assert figures(random_run, "--data", other, *columns, "--score")["scores"] == expected


def test_the_score_is_what_a_beam_reported(cli, figures, random_run, tmp_path):
    prompts = ["abc", "fed", "h"]
    found = cli("generate", random_run, "--input", write(tmp_path / "p", prompts), "--beam-size", 3, "--json")
    best = [json.loads(line)["completions"][0] for line in found.out.splitlines()]
    table = tmp_path / "own.jsonl"
    pairs = zip(prompts, best, strict=True)
    write(table, [json.dumps({"source": prompt, "target": one["text"]}) for prompt, one in pairs])
    for score, one in zip(figures(random_run, "--data", table, "--score")["scores"], best, strict=True):
        assert score["logprob"] == pytest.approx(one["logprob"], abs=1e-4) and score["tokens"] == len(one["ids"])


def test_what_cannot_be_scored_is_one_clear_line(cli, random_run, files, tmp_path):
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
