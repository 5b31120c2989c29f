"""`tformer evaluate` of models of pairs, as a user runs it: figures, signatures, scores of given targets, mistakes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.random_runs import random_run

LETTERS = "abcdefgh "
SOURCES = ["abc", "hgfed", "a b", "cab", "dead beef", "h"]
TARGETS = ["cba", "defgh", "b a", "bac", "feeb daed", "h"]
RECIPE = """
schema: 1
{data}
model:
  d_model: 8
  max_seq_len: 16
  tie: {{output: false, source_target: false}}
  encoder: {{num_layers: 1, num_heads: 2, feedforward: {{d_ff: 16}}}}
  decoder: {{num_layers: 1, num_heads: 2, feedforward: {{d_ff: 16}}}}
  init: {{std: 0.7}}
objectives: [{{kind: {kind}}}]
generation: {{beam_size: 3, max_new_tokens: 8, length_penalty: 0.0{generation}}}
training: {{precision: fp32}}
"""


@pytest.fixture(scope="module")
def make_pair_run(tmp_path_factory):
    def make(data: str = "", *, kind: str = "seq2seq", target_letters: str | None = None, generation: str = "") -> Path:
        recipe = RECIPE.format(data=data, kind=kind, generation=generation)
        recipe += "tokenizer: {separate: true}\n" if target_letters is not None else ""
        runs, sentinels = tmp_path_factory.mktemp("home") / "runs", 4 * (kind == "span_corruption")
        return random_run(runs, recipe, letters=LETTERS, targets=target_letters, seed=2, sentinels=sentinels)

    return make


@pytest.fixture(scope="module")
def run(make_pair_run):
    return make_pair_run()


def write(path: Path, lines) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def pair(tmp_path):
    return ["--source", write(tmp_path / "a.en", SOURCES), "--target", write(tmp_path / "a.de", TARGETS)]


def refusal(outcome) -> str:
    assert (outcome.code, outcome.out) == (2, ""), outcome.err
    assert "Traceback" not in outcome.err
    return outcome.err


def translations(run, sources, **settings):
    """What the beam writes, by the library."""
    from tformer.decoding.loaded import translator_of
    from tformer.decoding.settings import BeamSettings
    from tformer.loading import load

    loaded = load(run)
    chosen = BeamSettings.from_recipe(loaded.recipe.generation, eos_id=loaded.decoder_tokens.eos, **settings)
    return translator_of(loaded, settings=chosen).translate(sources)


# --- figures ----------------------------------------------------------------------------------------------------------


def test_json_is_one_document_with_every_figure_and_signature(figures, run, pair):
    found = figures(run, *pair)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=1e-5)
    assert 0 <= found["accuracy"] <= 1 and found["examples"] == len(SOURCES)
    assert "tok:13a" in found["bleu_signature"] and "nc:6" in found["chrf_signature"]
    assert {"bleu", "chrf", "sequence_accuracy", "sentences_per_second"} <= found.keys()
    assert (found["step"], found["data"]) == (3, str(pair[1]))


def test_plain_output_is_one_figure_a_line_with_signatures(cli, run, pair):
    lines = cli("evaluate", run, *pair).out.splitlines()
    names = " ".join(line.split()[0] for line in lines)
    assert names == "loss perplexity accuracy sequence_accuracy bleu chrf ter examples baseline"
    signature = next(line.split()[2] for line in lines if len(line.split()) > 2)
    assert signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a")


def test_own_outputs_as_references_are_perfect(figures, run, tmp_path):
    outputs = [ones[0].text for ones in translations(run, SOURCES, beam_size=2)]
    files = ["--source", write(tmp_path / "s", SOURCES), "--target", write(tmp_path / "t", outputs)]
    assert figures(run, *files, "--beam-size", 2)["sequence_accuracy"] == 1
    other = figures(run, *files, "--beam-size", 1, "--length-penalty", 2, "--length-penalty-type", "gnmt")
    assert other["loss"] == pytest.approx(figures(run, *files, "--batch-size", 1)["loss"], abs=1e-5)


def test_outputs_at_their_limit_are_cut_or_ended_as_in_generate(figures, run, tmp_path):
    for how in ("cut", "end"):
        outputs = [ones[0].text for ones in translations(run, SOURCES, max_new_tokens=2, at_limit=how)]
        files = ["--source", write(tmp_path / "s", SOURCES), "--target", write(tmp_path / "t", outputs)]
        found = figures(run, *files, "--max-new-tokens", 2, "--at-limit", how)
        assert found["sequence_accuracy"] == 1


def test_a_table_gives_the_same_as_aligned_files(figures, run, pair, tmp_path):
    rows = [f"{n}\t{target}\t{source}" for n, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True))]
    table = write(tmp_path / "pairs.tsv", ["number\tgerman\tenglish", *rows])
    found = figures(run, "--data", table, "--source-column", "english", "--target-column", "german")
    expected = figures(run, *pair)
    for name in ("loss", "accuracy", "bleu", "chrf", "sequence_accuracy"):
        assert found[name] == pytest.approx(expected[name], abs=1e-6)


def test_each_side_may_have_a_vocabulary_of_its_own(figures, make_pair_run, tmp_path):
    run = make_pair_run(target_letters="uvwxyz")
    files = ["--source", write(tmp_path / "s", SOURCES), "--target", write(tmp_path / "t", ["uvw"] * len(SOURCES))]
    assert figures(run, *files)["examples"] == len(SOURCES)
    assert len(figures(run, *files, "--score")["scores"]) == len(SOURCES)


def test_lowercase_and_the_tokenizer_of_bleu_are_in_the_signature(figures, run, pair):
    found = figures(run, *pair, "--lowercase", "--bleu-tokenize", "char")
    assert "case:lc" in found["bleu_signature"] and "tok:char" in found["bleu_signature"]
    assert "case:lc" in found["chrf_signature"]


def test_no_decode_gives_the_loss_alone(cli, figures, run, pair):
    found = figures(run, *pair, "--no-decode")
    assert "bleu" not in found and found["loss"] == pytest.approx(figures(run, *pair)["loss"], abs=1e-6)
    names = [line.split()[0] for line in cli("evaluate", run, *pair, "--no-decode").out.splitlines()]
    assert names == ["loss", "perplexity", "accuracy", "examples"]


def test_nothing_is_left_out_of_named_data(cli, run, tmp_path):
    sources, targets = write(tmp_path / "s", ["abc", "", "a" * 40]), write(tmp_path / "t", ["c", "a", "b"])
    outcome = cli("evaluate", run, "--source", sources, "--target", targets, "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["examples"] == 3 and "cut" in outcome.err


def test_tokenized_references_are_told_of(cli, run, tmp_path):
    files = ["--source", write(tmp_path / "s", SOURCES), "--target", write(tmp_path / "t", ["a b ."] * len(SOURCES))]
    assert "look tokenized" in cli("evaluate", run, *files).err
    assert "look tokenized" not in cli("evaluate", run, *files, "--bleu-tokenize", "none").err


# --- which data -------------------------------------------------------------------------------------------------------


def test_without_options_the_runs_own_validation_data_is_read(figures, make_pair_run, pair):
    recipe = f'data: {{valid: [{{path: "{pair[1]}", target_path: "{pair[3]}"}}]}}'
    found, expected = figures(make_pair_run(recipe)), figures(make_pair_run(), *pair)
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6) and found["data"] == expected["data"]


def test_without_validation_data_what_training_held_out_is_read(figures, make_pair_run, tmp_path):
    from tformer.data.shards.pair_tokens import tokenize_pairs
    from tformer.data.sources.pairs import open_pairs
    from tformer.loading import load

    rows = [f"{a}{b}\t{b}{a}{a}" for a in "abcdefgh" for b in "abcdefgh"] + ["a" * 30 + "\tb"]  # the last is dropped
    table = write(tmp_path / "train.tsv", rows)
    run = make_pair_run(f'data: {{train: [{{path: "{table}"}}], valid_fraction: 0.2}}')
    loaded = load(run)
    pairs = tokenize_pairs(
        open_pairs(loaded.recipe.data.train, columns=loaded.recipe.data.columns),
        loaded.text_tokenizer,
        loaded.target_tokenizer,
        seq_len=16,
        target_seq_len=16,
        eos=loaded.decoder_tokens.eos,
    )
    rest = pairs.split(fraction=0.2)[1]
    held_out = [rest.texts(index) for index in range(len(rest))]
    named = write(tmp_path / "held_out.tsv", ["\t".join(row) for row in held_out])
    found, expected = figures(run), figures(run, "--data", named)
    assert found["examples"] == len(held_out) and found["data"] == f"20% of {table}, held out"
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)


def test_the_prefix_of_the_runs_task_stands_before_named_sources(figures, make_pair_run, pair, tmp_path):
    recipe = f'data: {{train: [{{path: "{pair[1]}", target_path: "{pair[3]}", prefix: "be "}}]}}'
    files = ["--source", write(tmp_path / "s", [f"be {source}" for source in SOURCES]), *pair[2:]]
    found, expected = figures(make_pair_run(recipe), *pair), figures(make_pair_run(), *files)
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)


def test_named_data_is_read_by_its_own_columns_where_it_lacks_the_runs(figures, make_pair_run, pair, tmp_path):
    run = make_pair_run("data: {columns: {source: english, target: german}}")
    expected = figures(run, *pair)
    rows = [f"{target}\t{source}" for source, target in zip(SOURCES, TARGETS, strict=True)]
    for header in ("german\tenglish", "target\tsource", "translation\tenglish"):
        found = figures(run, "--data", write(tmp_path / "pairs.tsv", [header, *rows]))
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6), header
    turned = write(tmp_path / "turned.tsv", ["english\tgerman", *rows])  # the other direction, on demand
    found = figures(run, "--data", turned, "--source-column", "german", "--target-column", "english")
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)


# --- scores of given targets ------------------------------------------------------------------------------------------


def test_score_agrees_with_what_beam_search_reported(cli, figures, run, tmp_path):
    """Exactness: the log-probability of the beam's own output, force-decoded by the command (1e-4, fp32)."""
    from tformer.loading import load

    tokenizer = load(run).target_tokenizer
    found = translations(run, SOURCES, beam_size=16, n_best=16)
    own = [
        (source, one)
        for source, ones in zip(SOURCES, found, strict=True)
        for one in ones
        if one.finish_reason == "eos" and one.text.strip() and tokenizer.encode(one.text) == list(one.ids[:-1])
    ]
    assert len(own) > 5
    files = ["--source", write(tmp_path / "s", [source for source, _ in own])]
    files += ["--target", write(tmp_path / "t", [one.text for _, one in own])]
    document = figures(run, *files, "--score")
    for score, (_, one) in zip(document["scores"], own, strict=True):
        assert score["logprob"] == pytest.approx(one.logprob, abs=1e-4)
        assert score["tokens"] == len(one.ids)
    assert document["logprob"] == pytest.approx(sum(one.logprob for _, one in own), abs=1e-3)
    assert document["perplexity"] == pytest.approx(math.exp(-document["logprob"] / document["tokens"]))
    lines = cli("evaluate", run, *files, "--score").out.splitlines()
    assert [float(line) for line in lines] == pytest.approx([one.logprob for _, one in own], abs=1e-4)


def test_the_scores_of_all_targets_are_the_loss(figures, run, pair):
    document, found = figures(run, *pair, "--score"), figures(run, *pair, "--no-decode")
    assert -document["logprob"] / document["tokens"] == pytest.approx(found["loss"], abs=1e-5)


def test_a_target_that_would_be_cut_is_not_scored(cli, figures, make_pair_run, tmp_path):
    """Lengths of training do not count: the model reads 16 tokens of each side."""
    run = make_pair_run("data: {seq_len: 6}")
    whole, longer, cut = ["abc abc abc"], ["abcdefghabcdefgh"], ["abc a"]

    def files(sources, targets):
        return ["--source", write(tmp_path / "s", ["a", *sources]), "--target", write(tmp_path / "t", ["a", *targets])]

    [_, score] = figures(run, *files(["ab"], whole), "--score")["scores"]
    assert score["tokens"] == len(whole[0]) + 1
    assert figures(run, *files(["ab"], whole), "--no-decode")["loss"] == pytest.approx(
        figures(run, *files(["ab"], cut), "--no-decode")["loss"]  # as in training
    )
    for sides, told in (((["ab"], longer), "the target has 17 tokens"), ((longer, ["ab"]), "the source has 18 tokens")):
        message = refusal(cli("evaluate", run, *files(*sides), "--score")).replace("\n", " ")
        assert f"s:2: {told}, expected at most 16" in message, message


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_errors_are_written_the_surest_first(cli, run, tmp_path):
    outputs = [ones[0] for ones in translations(run, SOURCES)]
    targets = [outputs[0].text, *["zzz"] * (len(SOURCES) - 1)]
    files = ["--source", write(tmp_path / "s", SOURCES), "--target", write(tmp_path / "t", targets)]
    assert cli("evaluate", run, *files, "--mistakes", tmp_path / "wrong.jsonl").code == 0
    rows = [json.loads(line) for line in (tmp_path / "wrong.jsonl").read_text().splitlines()]
    assert [row["score"] for row in rows] == sorted((row["score"] for row in rows), reverse=True)
    assert {(row["source"], row["output"]) for row in rows} == {
        (source, one.text) for source, one in list(zip(SOURCES, outputs, strict=True))[1:]
    }
    assert all(row["reference"] == "zzz" for row in rows)
    assert {row["row"]: row["source"] for row in rows} == {n: SOURCES[n] for n in range(1, len(SOURCES))}
    assert cli("evaluate", run, *files, "--mistakes", tmp_path / "wrong.tsv").code == 0
    table = (tmp_path / "wrong.tsv").read_text().splitlines()
    assert table[0] == "row\tsource\treference\toutput\tscore" and len(table) == len(rows) + 1
    assert {line.count("\t") for line in table} == {4}


# --- mistakes of the user ---------------------------------------------------------------------------------------------


def test_moses_without_its_package_says_what_to_install(cli, run, pair, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "sacremoses", None)
    assert "pip install sacremoses" in refusal(cli("evaluate", run, *pair, "--bleu-tokenize", "moses"))


@pytest.mark.parametrize("kind", ["span_corruption", "denoising"])
def test_a_model_that_restores_texts_is_evaluated_on_texts(figures, make_pair_run, kind, tmp_path):
    text = write(tmp_path / "text.txt", ["dead beef cab", "abc hgf ed"] * 9)
    found = figures(make_pair_run(kind=kind), "--data", text)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=1e-4)
