"""`tformer evaluate` of every kind of run: metrics as in validation, mistakes, pseudo-perplexity, other lengths."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tformer
from tests.end_to_end.labelled_examples import WORDS, sentences, write_images, write_table
from tests.end_to_end.translate_runs import DECODER, LETTERS, refusal
from tests.end_to_end.translate_runs import SEQ2SEQ as MODEL_OF_PAIRS
from tests.quick import first_is_quick

Cli = Callable[..., Any]
Runs = Callable[[str], Path]
Figures = Callable[..., dict[str, Any]]
MakeRun = Callable[..., Path]


def last_validation(run: Path) -> dict[str, Any]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = [record for record in records if record["split"] == "valid"][-1]
    return found


@first_is_quick("kind", ["single", "pair", "multi", "score", "image", "masked", "sentences", "electra"], quick=2)
def test_without_data_the_figures_are_those_of_the_last_validation(
    kind: str, figures: Figures, encoder_run: Runs
) -> None:
    run = encoder_run(kind)
    found, trained = figures(run, "--checkpoint", "latest"), last_validation(run)
    shared = trained.keys() & found.keys() - {"step"}
    assert "loss" in shared and len(shared) >= 2
    for name in shared:
        assert found[name] == pytest.approx(trained[name], abs=1e-4), name


def test_a_classifiers_report(cli: Cli, figures: Figures, encoder_run: Runs, tmp_path: Path) -> None:
    data = write_table(tmp_path / "test.tsv", ("label", "text"), [*sentences(60, 21), ("tool", "the cat")])
    report = figures(encoder_run("single"), "--data", data)
    assert report["accuracy"] == pytest.approx(60 / 61) and report["examples"] == 61
    low, high = report["intervals"]["accuracy"]
    assert low <= report["accuracy"] <= high
    assert {"f1_macro", "mcc", "ece", "loss"} <= report.keys()
    assert sum(map(sum, report["confusion"])) == 61
    shown = cli("evaluate", encoder_run("single"), "--data", data).out.splitlines()
    assert shown[0].startswith("accuracy 0.98") and "[" in shown[0]
    assert ["class", "precision", "recall", "f1", "support"] in map(str.split, shown)


def test_mistakes_are_written_as_a_table_or_as_json_lines(cli: Cli, encoder_run: Runs, tmp_path: Path) -> None:
    rows = [*sentences(20, 22), ("tool", "the cat and the dog"), ("animal", 'the saw and the axe, "loud"')]
    data = write_table(tmp_path / "test.tsv", ("label", "text"), rows)
    table, lines = tmp_path / "wrong.tsv", tmp_path / "wrong.jsonl"
    for path in (table, lines):
        outcome = cli("evaluate", encoder_run("single"), "--data", data, "--mistakes", path)
        assert outcome.code == 0 and f"{path}: 2 examples" in outcome.err, outcome.err
    with table.open(newline="") as file:
        found = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    documents = [json.loads(line) for line in lines.read_text().splitlines()]
    assert {(row["label"], row["prediction"], row["text"]) for row in found} == {
        ("tool", "animal", "the cat and the dog"),
        ("animal", "tool", 'the saw and the axe, "loud"'),
    }
    assert [one["text"] for one in documents] == [row["text"] for row in found]
    probabilities = [one["probability"] for one in documents]
    assert probabilities == sorted(probabilities, reverse=True)
    assert documents[0]["probabilities"][documents[0]["prediction"]] == pytest.approx(probabilities[0])
    assert {(int(row["row"]), row["text"]) for row in found} == {(n, rows[n][1]) for n in (20, 21)}


def test_mistakes_carry_file_row_and_id_as_csv_too(cli: Cli, encoder_run: Runs, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in "ab":
        path = tmp_path / "folder" / f"{name}.csv"
        path.write_text(f'doc_id,label,text\n{name}0,tool,"a saw,\nan axe"\n{name}1,animal,"a saw,\nan axe"\n')
    out = tmp_path / "wrong.csv"
    assert cli("evaluate", encoder_run("single"), "--data", tmp_path / "folder", "--mistakes", out).code == 0
    with out.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [(Path(row["file"]).name, row["row"], row["id"], row["text"]) for row in found] == [
        (f"{name}.csv", "1", f"{name}1", "a saw,\nan axe") for name in "ab"
    ]
    run = tmp_path / "run"  # a copy: the threshold is stored with it
    shutil.copytree(encoder_run("single"), run)
    assert cli("evaluate", run, "--mistakes", tmp_path / "own.csv", "--threshold", 1).code == 0
    # of the held-out part: the rows of the file, not of the part
    data = (encoder_run("single").parent / "data.tsv").read_text().splitlines()[1:]
    with (tmp_path / "own.csv").open(newline="") as file:
        own = list(csv.DictReader(file))
    assert own and all(data[int(row["row"])] == f"{row['label']}\t{row['text']}" for row in own)


def test_mistakes_of_several_labels_scores_and_images(cli: Cli, encoder_run: Runs, tmp_path: Path) -> None:
    many = write_table(tmp_path / "many.tsv", ("labels", "text"), [(label, "the saw with the axe") for label in WORDS])
    out = tmp_path / "wrong.jsonl"
    assert cli("evaluate", encoder_run("multi"), "--data", many, "--mistakes", out).code == 0
    [mistake] = [json.loads(line) for line in out.read_text().splitlines()]
    assert (mistake["label"], mistake["prediction"]) == (["animal"], ["tool"])

    scores = write_table(tmp_path / "scores.tsv", ("score", "text"), [(1, "the cow"), (9, "the saw"), (3, "the saw")])
    assert cli("evaluate", encoder_run("score"), "--data", scores, "--mistakes", out).code == 0
    documents = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(documents) == 3 and documents[0]["label"] == 9.0
    assert documents[0]["error"] == pytest.approx(9 - documents[0]["prediction"])

    images = write_images(tmp_path / "images", 3)
    (images / "dark" / "0.png").rename(images / "light" / "wrong.png")
    assert cli("evaluate", encoder_run("image"), "--data", images, "--mistakes", out).code == 0
    [mistake] = [json.loads(line) for line in out.read_text().splitlines()]
    assert mistake["image"].endswith("wrong.png") and mistake["label"] == "light"


@pytest.mark.parametrize("data", ["test.csv", "./folder/../test.csv", "link.csv", "t?st.csv", "folder"])
@pytest.mark.parametrize("option", ["--mistakes", "--plot"])
def test_mistakes_and_pictures_never_replace_the_data(
    option: str, data: str, cli: Cli, encoder_run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    errors = tmp_path / ("folder/test.csv" if data == "folder" else "test.csv")
    before = write_table(errors, ("label", "text"), [*sentences(4, 1)]).read_bytes()
    (tmp_path / "link.csv").symlink_to(errors)
    monkeypatch.chdir(tmp_path)
    outcome = cli("evaluate", encoder_run("single"), "--data", data, option, errors)
    assert (outcome.code, outcome.out) == (2, "") and f"{option} {errors} would replace" in outcome.err
    assert errors.read_bytes() == before


def test_mistakes_never_replace_the_runs_own_data(cli: Cli, encoder_run: Runs) -> None:
    data = encoder_run("single").parent / "data.tsv"
    before = data.read_bytes()
    outcome = cli("evaluate", encoder_run("single"), "--mistakes", data)
    assert outcome.code == 2 and f"--mistakes {data} would replace" in outcome.err and data.read_bytes() == before


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a file system that refuses new files")
def test_a_refused_file_of_mistakes_is_named_before_the_evaluation(cli: Cli, encoder_run: Runs) -> None:
    outcome = cli("evaluate", encoder_run("single"), "--mistakes", "/proc/self/wrong.tsv")
    assert (outcome.code, outcome.out) == (3, "") and "cannot write /proc/self/wrong.tsv" in outcome.err
    assert len(outcome.err.splitlines()) == 1, outcome.err  # nothing was loaded or read before


def test_a_regressions_report(cli: Cli, encoder_run: Runs) -> None:
    shown = cli("evaluate", encoder_run("score"))
    names = [line.split()[0] for line in shown.out.splitlines()]
    assert names == ["pearson", "spearman", "mae", "loss", "examples", "baseline"]
    assert "[" in shown.out


def test_pseudo_perplexity(cli: Cli, figures: Figures, encoder_run: Runs) -> None:
    run = encoder_run("masked")
    report = figures(run, "--pseudo-perplexity", "--max-tokens", 40)
    assert report["pseudo_tokens"] == 40 and 1 < report["pseudo_perplexity"] < 60
    shown = cli("evaluate", run, "--pseudo-perplexity", "--max-tokens", 40).out
    assert {"loss", "accuracy", "pseudo_perplexity"} <= {line.split()[0] for line in shown.splitlines()}


def test_a_mask_is_filled(cli: Cli, encoder_run: Runs) -> None:
    run = encoder_run("masked")
    outcome = cli("generate", run, "--prompt", "the [MASK] and the dog")
    assert outcome.code == 0, outcome.err
    rows = [line.split("\t") for line in outcome.out.splitlines()]
    assert len(rows) == 5 and all(len(row) == 3 for row in rows)
    chances = [float(row[1]) for row in rows]
    assert chances == sorted(chances, reverse=True)
    known = {word for words in WORDS.values() for word in words} | {"the", "and"}
    assert rows[0][0] in known and rows[0][0] in rows[0][2]
    assert len(cli("generate", run, "--prompt", "the [MASK]", "--top-k", 2).out.splitlines()) == 2
    document = json.loads(cli("generate", run, "--prompt", "[MASK] [MASK]", "--json").out)
    assert len(document["masks"]) == 2 and document["masks"][0][0].keys() == {"token", "id", "probability", "text"}


def test_a_filled_text_keeps_the_words_that_the_tokenizer_lacks(cli: Cli, encoder_run: Runs) -> None:
    prompt = "The zebra's  [MASK], and the <mask>!"
    document = json.loads(cli("generate", encoder_run("masked"), "--prompt", prompt, "--json").out)
    first, second = (candidates[0] for candidates in document["masks"])
    assert first["text"] == prompt.replace("[MASK]", first["token"])
    assert second["text"] == prompt.replace("<mask>", second["token"])


def test_each_line_with_masks_is_one_line_of_answers(cli: Cli, encoder_run: Runs, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the [MASK]\n[MASK] cat and [MASK] dog\n")
    lines = cli("generate", encoder_run("masked"), "--input", prompts, "--top-k", 2).out.splitlines()
    assert len(lines) == 2 and len(lines[0].split("\t")) == 4 and lines[1].split("\t")[4] == "|"
    prompts.write_text("the [MASK]\nno mask\n")
    outcome = cli("generate", encoder_run("masked"), "--input", prompts)
    assert outcome.code == 2 and f"{prompts}:2" in outcome.err


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


@first_is_quick("recipe", [DECODER, SEQ2SEQ], ids=["text", "pairs"])
@first_is_quick("kind", COMPUTED)
def test_models_read_texts_longer_than_they_were_made_for(
    kind: str, recipe: str, figures: Figures, random_run: MakeRun, text: Path, long_pairs: Path
) -> None:
    """As the same weights do in a model that was made for that length."""
    short, made_for_it = (random_run(with_positions(recipe, kind, max_seq_len=most)) for most in (TRAINED, LONGER))
    decoded = ("--data", long_pairs, "--beam-size", 1, "--max-new-tokens", LONGER)
    options = ("--data", text) if recipe == DECODER else decoded
    found, expected = figures(short, *options, "--seq-len", LONGER), figures(made_for_it, *options)
    own = ("tokens", "seq_len") if recipe == DECODER else ("bleu", "chrf", "examples")
    wanted = ("loss", "accuracy", *own)
    assert [found[name] for name in wanted] == pytest.approx([expected[name] for name in wanted])
    assert found.get("seq_len", LONGER) == LONGER


def test_stride_is_held_against_the_asked_length(cli: Cli, figures: Figures, random_run: MakeRun, text: Path) -> None:
    words = (random_run(with_positions(DECODER, "alibi")), "--data", text, "--seq-len", 40, "--stride")
    found = figures(*words, 20)
    assert (found["stride"], found["seq_len"]) == (20, 40)
    assert "window of 40 tokens, found 41" in refusal(cli("evaluate", *words, 41))


def test_a_learned_table_refuses_windows_past_its_end(cli: Cli, random_run: MakeRun, text: Path) -> None:
    run = random_run(with_positions(DECODER, "learned"))
    assert cli("evaluate", run, "--data", text, "--seq-len", TRAINED).code == 0
    message = refusal(cli("evaluate", run, "--data", text, "--seq-len", TRAINED + 1))
    assert message == "error: --seq-len: found 17, the model has 16 learned positions"


UNTRAINED = (
    "positions 16 and above of model.decoder are learned, and this run did not train them: it read at most 16 tokens"
)


@pytest.mark.parametrize("kind", ["learned", "rope"])
def test_learned_positions_that_were_never_trained_warn_when_they_are_read(
    kind: str, cli: Cli, random_run: MakeRun, text: Path
) -> None:
    """A table of 50 rows, of which a training at 16 tokens reaches 16; what is computed needs no training."""
    recipe = with_positions(DECODER, kind, max_seq_len=LONGER) + f"data: {{seq_len: {TRAINED}}}\n"
    run = random_run(recipe)

    def warns(*words: object) -> bool:
        outcome = cli(*words)
        assert outcome.code == 0, outcome.err
        return UNTRAINED in " ".join(outcome.err.split())

    assert not warns("evaluate", run, "--data", text)
    assert not warns("evaluate", run, "--data", text, "--seq-len", TRAINED)
    assert warns("evaluate", run, "--data", text, "--seq-len", 40) == (kind == "learned")
    for beam in ([], ["--beam-size", 2]):  # the last token that is written is not read
        assert not warns("generate", run, "--prompt", "abcd", "--max-new-tokens", 13, *beam)
        assert warns("generate", run, "--prompt", "abcd", "--max-new-tokens", 14, *beam) == (kind == "learned")


@first_is_quick("how", [[], ["--beam-size", 2], ["--devices", 2]], quick=2, ids=str)
def test_each_prompt_of_a_file_or_a_table_counts(
    how: list[object], cli: Cli, random_run: MakeRun, tmp_path: Path
) -> None:
    run = random_run(with_positions(DECODER, "learned", max_seq_len=LONGER) + f"data: {{seq_len: {TRAINED}}}\n")
    prompts = ["a", "ab" * 8, "abc" * 6, "", "h" * 17]  # the last token that is written is not read
    (tmp_path / "in.txt").write_text("".join(f"{prompt}\n" for prompt in prompts))
    write_table(tmp_path / "in.tsv", ("id", "text"), list(enumerate(prompts)))
    for name in ("in.txt", "in.tsv"):
        words = ["generate", run, "--input", tmp_path / name, "--max-new-tokens", 1, "--device", "cpu", *how]
        said = " ".join(cli(*words).err.split())
        assert said.count("did not train") == 1 and f"{UNTRAINED}; 2 of 5 texts read them" in said, said


def test_both_sides_of_translations_count(cli: Cli, random_run: MakeRun, tmp_path: Path) -> None:
    lengths = f"data: {{seq_len: 8, target_seq_len: {TRAINED}}}\n"
    run = random_run(with_positions(SEQ2SEQ, "learned", max_seq_len=LONGER) + lengths)
    (tmp_path / "in.txt").write_text("a\n\nabcdefghab\nb\n")
    encoder = UNTRAINED.replace("decoder", "encoder").replace("16", "8")

    def said(*words: object) -> list[str]:
        outcome = cli("generate", run, *words)
        assert outcome.code == 0, outcome.err
        return [line for line in outcome.err.splitlines() if "did not train" in line]

    of_file = ("--input", tmp_path / "in.txt", "--max-new-tokens")
    assert said(*of_file, TRAINED) == [f"{encoder}; 1 of 3 texts read them"]
    longer = said(*of_file, 20, "--min-new-tokens", 20)
    assert longer == [f"{encoder}; 1 of 3 texts read them", f"{UNTRAINED}; 3 of 3 texts read them"]
    assert said("--prompt", "a", "--max-new-tokens", 20, "--min-new-tokens", 20, "--temperature", 1) == [UNTRAINED]
    assert said("--prompt", "a", "--max-new-tokens", 4) == []


def test_python_warns_of_them_too(random_run: MakeRun, text: Path) -> None:
    run = tformer.load(random_run(with_positions(DECODER, "learned", max_seq_len=40) + "data: {seq_len: 16}\n"))
    with pytest.warns(UserWarning, match=UNTRAINED):
        run.evaluate(text, seq_len=40)
    with pytest.warns(UserWarning, match=f"^{UNTRAINED}$") as caught:
        run.generate("abcd", max_new_tokens=14)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=f"^{UNTRAINED}; 1 of 2 texts read them$"):
        run.generate(["a", "a" * 17], max_new_tokens=1)


def test_who_reads_cut_sources_hears_of_the_option(cli: Cli, random_run: MakeRun, long_pairs: Path) -> None:
    outcome = cli("evaluate", random_run(with_positions(SEQ2SEQ, "rope")), "--data", long_pairs)
    assert "6 of 6 pairs are longer than 16 tokens and were cut" in outcome.err
    assert "6 sources are longer than the model reads and were cut; --seq-len N reads further" in outcome.err


def output_lengths(cli: Cli, run: Path, pairs: Path, folder: Path, *options: object) -> list[int]:
    errors = folder / "errors.jsonl"
    outcome = cli("evaluate", run, "--data", pairs, "--beam-size", 1, "--mistakes", errors, *options)
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
