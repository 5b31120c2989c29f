"""The Python API: equal to the commands, the same twice, and plain errors."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tformer
from tformer import api
from tformer.nn.classification_heads import POOLINGS
from tformer.support.errors import Caution, InputError

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "run"]
TEXTS = [" ".join(WORDS[start : start + 4]) for start in range(8)] * 6
LABELLED = [(text, "early" if text.startswith(("the", "cat", "sat", "on")) else "late") for text in TEXTS]
PAIRS = [(text, text.upper()) for text in TEXTS]
SIZES = {"d_model": 16, "max_seq_len": 32}
STACK = {"num_layers": 2, "num_heads": 2, "feedforward.d_ff": 32}
QUICK = {"max_steps": 4, "batch_size": 4, "precision": "fp32", "device": "cpu", "quiet": True}


def sizes(*sides: str) -> dict[str, Any]:
    keys = {f"model.{key}": value for key, value in SIZES.items()} | {"data.seq_len": None}
    keys |= {f"model.{side}.{key}": value for side in sides for key, value in STACK.items()}
    return keys | {"tokenizer.train": {"model": "char", "template": "none", "min_frequency": 1}, "model.init.std": 0.5}


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> tformer.Run:
    out = tmp_path_factory.mktemp("lm") / "run"
    return tformer.train(TEXTS, arch="gpt", preset="char-cpu", out=out, set=sizes("decoder"), **QUICK)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tformer.Run:
    out = tmp_path_factory.mktemp("classifier") / "run"
    chosen = {key: value for key, value in sizes("encoder").items() if not key.startswith("tokenizer")}
    return tformer.train(LABELLED, arch="bert", out=out, set=chosen, **QUICK)


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> tformer.Run:
    out = tmp_path_factory.mktemp("translator") / "run"
    chosen = sizes("encoder", "decoder") | {"tokenizer.train.template": "seq2seq", "generation.max_new_tokens": 12}
    chosen |= {"training.valid_beam_size": 0, "training.best_metric": "loss"}
    return tformer.train(PAIRS, arch="transformer", preset="dates", out=out, set=chosen, **QUICK)


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> tformer.Run:
    out = tmp_path_factory.mktemp("masked") / "run"
    chosen = sizes("encoder") | {"tokenizer.train.template": "bert"}
    return tformer.train(TEXTS, arch="bert", preset="pretrain", out=out, set=chosen, **QUICK)


# --- generate, translate, fill_masks ----------------------------------------------------------------------------------

GENERATION = [
    {"greedy": True},
    {"temperature": 0.9, "top_k": 5, "seed": 3},
    {"num_samples": 3, "seed": 5},
    {"beam_size": 3, "n_best": 2},
    {"top_p": 0.7, "min_new_tokens": 4},
]


def flags(options: dict[str, Any]) -> list[str]:
    words = []
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


def documents(cli: Callable[..., Any], *arguments: object) -> list[dict[str, Any]]:
    outcome = cli(*arguments)
    assert outcome.code == 0, outcome.err
    return [json.loads(line) for line in outcome.out.splitlines()]


@pytest.mark.parametrize("options", GENERATION, ids=str)
def test_generate_writes_what_the_command_writes(lm: tformer.Run, cli: Callable[..., Any], options: dict) -> None:
    common = ["generate", lm.path, "--max-new-tokens", 6, "--json", *flags(options)]
    [document] = documents(cli, *common, "--prompt", "the ")
    answer = lm.generate("the ", max_new_tokens=6, **options)
    assert answer.prompt == "the " and answer.text == str(answer) == document["text"]
    assert [list(each.ids) for each in answer.completions] == [each["ids"] for each in document["completions"]]


def test_a_list_of_prompts_gives_the_answers_of_the_lines_of_a_file(
    lm: tformer.Run, cli: Callable[..., Any], tmp_path: Path
) -> None:
    prompts = [f"{word} " for word in WORDS * 2]  # more than one batch
    (tmp_path / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in prompts))
    found = documents(cli, "generate", lm.path, "--input", tmp_path / "prompts.txt", "--max-new-tokens", 5, "--json")
    answers = lm.generate(prompts, max_new_tokens=5)
    assert [answer.text for answer in answers] == [document["text"] for document in found]
    assert [answer.prompt for answer in answers] == prompts


def test_an_empty_prompt_is_the_default(lm: tformer.Run) -> None:
    assert lm.generate(seed=7, max_new_tokens=5) == lm.generate("", seed=7, max_new_tokens=5)


@pytest.mark.parametrize("options", [{}, {"beam_size": 3, "n_best": 2}, {"temperature": 0.8}], ids=str)
def test_translate_gives_what_the_command_gives(
    translator: tformer.Run, cli: Callable[..., Any], tmp_path: Path, options: dict
) -> None:
    sources = TEXTS[:5]
    (tmp_path / "sources.txt").write_text("".join(f"{source}\n" for source in sources))
    found = documents(cli, "generate", translator.path, "--input", tmp_path / "sources.txt", "--json", *flags(options))
    answers = translator.translate(sources, **options)
    for answer, document in zip(answers, found, strict=True):
        assert [each.text for each in answer.completions] == [each["text"] for each in document["completions"]]
        assert [each.logprob for each in answer.completions] == pytest.approx(
            [each["logprob"] for each in document["completions"]], abs=1e-4
        )
    assert translator.generate(sources[0], **options) == translator.translate(sources[0], **options)


def test_fill_masks_gives_the_candidates_of_the_command(masked: tformer.Run, cli: Callable[..., Any]) -> None:
    [document] = documents(cli, "generate", masked.path, "--prompt", "the c[MASK]t", "--top-k", 3, "--json")
    [candidates] = masked.fill_masks("the c[MASK]t", top_k=3)
    assert [each.token for each in candidates] == [each["token"] for each in document["masks"][0]]
    assert [each.probability for each in candidates] == pytest.approx(
        [each["probability"] for each in document["masks"][0]], abs=1e-6
    )
    assert masked.fill_masks(["the c[MASK]t"] * 2, top_k=3) == [[candidates]] * 2


def test_a_cut_prompt_is_a_warning(lm: tformer.Run) -> None:
    with pytest.warns(UserWarning, match="context holds 32: only its end is read"):
        lm.generate("the cat " * 6, max_new_tokens=2)


def test_masks_at_positions_that_were_not_trained_are_a_warning(tmp_path: Path) -> None:
    chosen = sizes("encoder") | {"tokenizer.train.template": "bert", "model.encoder.positions": {"kind": "learned"}}
    run = tformer.train(
        TEXTS, arch="bert", preset="pretrain", out=tmp_path / "run", set=chosen | {"data.seq_len": 8}, **QUICK
    )
    note = "positions 8 and above of model.encoder are learned, .* it read at most 8 tokens; 1 of 2 texts read them$"
    with pytest.warns(UserWarning, match=note) as caught:
        run.fill_masks(["the cat [MASK] on a mat", "[MASK]"], top_k=1)
    assert caught[0].filename == __file__


def test_quantizing_that_does_not_pay_is_a_warning(
    lm: tformer.Run, classifier: tformer.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tformer.decoding.inference._seconds_of_products", lambda *_: (1.0, 3.0))
    note = "^quantize int8 does not pay here: products of this model take 3.0 times as long with it; leave it out$"
    calls = [partial(classifier.classify, "the cat"), partial(classifier.embed, "the cat"), classifier.evaluate]
    for call in [*calls, partial(lm.generate, "the cat", max_new_tokens=2)] * 2:  # prepared once, said each time
        with pytest.warns(UserWarning, match=note) as caught:
            call(quantize="int8")
        assert caught[0].filename == __file__


def test_a_note_is_a_warning_by_its_type_and_not_by_its_words(recwarn: pytest.WarningsRecorder) -> None:
    api._warn(["--quantize int8", Caution("--top-k 3"), "positions 8"], stacklevel=1)
    assert [str(each.message) for each in recwarn] == ["top_k 3"]


def test_a_cut_text_is_a_warning(classifier: tformer.Run) -> None:
    for method in (classifier.classify, classifier.embed):
        with pytest.warns(UserWarning, match="^2 texts are longer than 32 tokens and were cut$") as caught:
            method(["the cat", "the cat " * 50, "a mat " * 50])
        assert caught[0].filename == __file__


# --- classify ---------------------------------------------------------------------------------------------------------


def test_classify_gives_the_labels_and_probabilities_of_the_command(
    classifier: tformer.Run, cli: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "texts.txt").write_text("".join(f"{text}\n" for text in TEXTS[:8]))
    found = documents(cli, "classify", classifier.path, "--input", tmp_path / "texts.txt", "--json")
    answers = classifier.classify(TEXTS[:8])
    assert [answer.label for answer in answers] == [document["label"] for document in found]
    for answer, document in zip(answers, found, strict=True):
        assert list(answer.probabilities) == list(document["probabilities"])
        assert answer.probabilities == pytest.approx(document["probabilities"], abs=1e-6)
    assert classifier.classify([]) == []
    alone = classifier.classify(TEXTS[0])
    assert alone.label == answers[0].label and alone.score is None and alone.labels == ()


def test_classify_takes_rows_data_frames_and_tables_as_evaluate_does(classifier: tformer.Run, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rows: list[dict[str, Any]] = [{"id": n, "text": text} for n, text in enumerate(TEXTS[:4])] + [{"text": None}]
    expected = classifier.classify([*TEXTS[:4], ""])
    frame = pandas.DataFrame({"label": 1.0, "text": [*TEXTS[:4], None]})
    frame.to_csv(tmp_path / "a.csv", sep=";", index=False)
    for given in (rows, iter(rows), frame, tmp_path / "a.csv"):
        assert classifier.classify(given) == expected
    reviews = frame.rename(columns={"text": "review by"})
    assert classifier.classify(reviews, text_column="review by", batch_size=2)[0].label == expected[0].label
    assert classifier.classify(Path(tmp_path / "a.csv"), delimiter=";", encoding="utf-8") == expected


# --- evaluate, score, embed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lm", "classifier", "translator"])
def test_evaluate_gives_the_report_of_the_command(
    name: str, request: pytest.FixtureRequest, cli: Callable[..., Any]
) -> None:
    run = request.getfixturevalue(name)
    [document] = documents(cli, "evaluate", run.path, "--json")
    report = run.evaluate()
    assert report.keys() == document.keys()
    assert without_speed(json.loads(json.dumps(report))) == without_speed(document)


def without_speed(report: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in report.items() if not name.endswith("_per_second")}


def test_evaluate_reads_rows_like_a_file_of_them(classifier: tformer.Run, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in LABELLED[:9]))
    from_rows, from_file = classifier.evaluate(iter(LABELLED[:9])), classifier.evaluate(file)
    assert from_rows.pop("data") == "rows" and from_file.pop("data") == str(file)
    assert without_speed(from_rows) == without_speed(from_file) and from_rows["examples"] == 9


def test_score_is_the_log_probability_of_the_command_and_of_the_model(
    lm: tformer.Run, cli: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text("the \ncat\n")
    (tmp_path / "t.txt").write_text("cat\n sat on\n")
    [document] = documents(
        cli, "evaluate", lm.path, "--score", "--json", "--source", tmp_path / "p.txt", "--target", tmp_path / "t.txt"
    )
    scores = lm.score(["the ", "cat"], ["cat", " sat on"])
    assert [score.logprob for score in scores] == [each["logprob"] for each in document["scores"]]
    assert lm.score("the ", "cat").logprob == pytest.approx(scores[0].logprob, abs=1e-4)
    ids = torch.tensor([lm.encode("the cat")])
    log_probabilities = lm.model(input_ids=ids).logits.log_softmax(-1)[0, 3:6]
    assert scores[0].logprob == pytest.approx(log_probabilities.gather(1, ids[0, 4:, None]).sum().item(), abs=1e-4)
    assert scores[0].tokens == 3


def test_score_of_an_encoder_decoder_counts_the_end(translator: tformer.Run) -> None:
    decoder_input_ids, labels = translator.encode_target("THE CAT")
    logits = translator.model(
        input_ids=torch.tensor([translator.encode("the cat")]), decoder_input_ids=torch.tensor([decoder_input_ids])
    ).logits
    expected = logits.log_softmax(-1)[0].gather(1, torch.tensor(labels)[:, None]).sum().item()
    score = translator.score("the cat", "THE CAT")
    assert score.tokens == len(labels) and score.logprob == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "eos"])
@pytest.mark.parametrize("name", ["lm", "classifier", "translator"])
def test_embed_pools_the_hidden_states(name: str, pooling: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(name)
    inputs = {"input_ids": torch.tensor([run.encode("the cat")])}
    if run.model.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.tensor([run.decoder_tokens.prefix])
    with torch.no_grad():
        output = run.model(**inputs)
    hidden = output.encoder_hidden if run.model.is_encoder_decoder else output.hidden
    vectors = run.embed(["the cat", "a mat and two dogs"], pooling=pooling)
    assert vectors.shape == (2, 16) and vectors.dtype == np.float32
    np.testing.assert_allclose(vectors[0], POOLINGS[pooling].pool(hidden, None)[0], atol=1e-5)
    np.testing.assert_allclose(run.embed("the cat", pooling=pooling), vectors[0], atol=1e-5)


def test_embed_takes_the_states_after_a_layer(classifier: tformer.Run) -> None:
    ids = torch.tensor([classifier.encode("the cat")])
    tap = "encoder.0.hidden"
    assert tap in classifier.tap_names()
    with torch.no_grad():
        hidden = classifier.model(input_ids=ids, taps={tap}).taps[tap]
    for layer in (0, -2):
        found = classifier.embed("the cat", layer=layer, pooling="mean")
        np.testing.assert_allclose(found, hidden.mean(dim=1)[0], atol=1e-5)


def test_embed_reads_a_tuple_as_a_pair(masked: tformer.Run) -> None:
    pair, single = masked.embed(("the cat", "a mat")), masked.embed("the cat")
    assert pair.shape == single.shape and not np.allclose(pair, single)


def test_image_files_are_classified_and_embedded(tmp_path: Path) -> None:
    from PIL import Image

    from tests.interop.exports import checkpoint

    encoder = {"num_layers": 2, "num_heads": 2, "positions": {"kind": "learned"}, "feedforward": {"d_ff": 24}}
    patches = {"image_size": 8, "size": 4, "channels": 1}
    places = [tmp_path / "dark.png", tmp_path / "light.png"]
    for place, value in zip(places, (20, 220), strict=True):
        Image.new("L", (8, 8), value).save(place)

    def opened(name: str, heads: list[dict[str, Any]], labels: list[str]) -> tformer.Run:
        model = {"d_model": 16, "encoder": encoder, "patches": patches, "heads": heads}
        data = {"labels": labels, "image_mean": [0.5], "image_std": [0.5]}
        recipe = {"arch": "vit", "model": model, "data": data, "objectives": [{"kind": "classification"}]}
        checkpoint(tmp_path / name, recipe, tokenizer=None)
        return tformer.load(tmp_path / name)

    run = opened("run", [{"kind": "classifier", "pooling": "cls"}], ["dark", "light"])
    assert [one.label in ("dark", "light") for one in run.classify(places)] == [True, True]
    body = opened("body", [{"kind": "pooler"}], [])
    for each in (run, body):
        pixels = torch.tensor([20, 220]).view(2, 1, 1, 1).expand(2, 1, 8, 8) / 255
        with torch.no_grad():
            hidden = each.model(pixel_values=(pixels - 0.5) / 0.5).hidden
        np.testing.assert_allclose(each.embed(places, pooling="mean"), hidden.mean(dim=1), atol=1e-4)
        np.testing.assert_allclose(each.embed(places[0], pooling="cls"), hidden[0, 0], atol=1e-4)


# --- what stays as it is ----------------------------------------------------------------------------------------------


def test_a_second_call_gives_the_same(lm: tformer.Run, classifier: tformer.Run) -> None:
    assert lm.generate("a ", seed=1) == lm.generate("a ", seed=1)
    np.testing.assert_array_equal(classifier.embed(TEXTS[:3]), classifier.embed(TEXTS[:3]))


def test_the_model_computes_the_same_before_and_after_other_calls(lm: tformer.Run) -> None:
    ids = torch.tensor([lm.encode("the cat sat")])
    with torch.no_grad():
        before = lm.model(input_ids=ids).logits
        lm.generate("the ", precision="bf16", max_new_tokens=3)
        lm.embed("the ", precision="bf16")
        lm.evaluate(["the cat"] * 9)
        after = lm.model(input_ids=ids).logits
    assert torch.equal(before, after) and lm.model.kernels is None
    assert all(parameter.dtype == torch.float32 for parameter in lm.model.parameters())


def test_methods_see_weights_that_were_changed_in_python(lm: tformer.Run) -> None:
    run = tformer.load(lm.path)
    before = run.generate("the ", greedy=True, max_new_tokens=6)
    with torch.no_grad():
        run.model.embedding.weight.mul_(-1)
    assert run.generate("the ", greedy=True, max_new_tokens=6) != before
    assert lm.generate("the ", greedy=True, max_new_tokens=6) == before


def test_a_copy_of_a_run_answers_as_the_run_does(lm: tformer.Run) -> None:
    answer = lm.generate("the ", greedy=True, max_new_tokens=5)
    for again in (copy.deepcopy(lm), pickle.loads(pickle.dumps(lm))):
        assert again.generate("the ", greedy=True, max_new_tokens=5) == answer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_run_loaded_in_another_number_format_answers_too(lm: tformer.Run, dtype: torch.dtype) -> None:
    with torch.inference_mode():  # its tensors count no versions
        run = tformer.load(lm.path, dtype=dtype)
    assert len(run.generate("the ", max_new_tokens=5).completions[0].ids) == 5
    assert run.embed("the cat").dtype == np.float32
    assert run.evaluate(TEXTS[:4])["loss"] == pytest.approx(lm.evaluate(TEXTS[:4])["loss"], rel=0.02)


def test_repr_is_one_line_with_family_parameters_vocabulary_and_step(lm: tformer.Run) -> None:
    text = repr(lm)
    assert "\n" not in text and text.startswith("Run(gpt/char-cpu, ") and "step 4" in text
    assert f"{lm.model.num_parameters():,} parameters" in text and f"vocabulary {lm.tokenizer.vocab_size}" in text


def test_taps_have_the_names_that_tap_names_lists(lm: tformer.Run) -> None:
    names = lm.tap_names()
    assert "decoder.0.self_attention.weights" in names and "decoder.1.hidden" in names
    taps = lm.model(input_ids=torch.tensor([[1, 2, 3]]), taps=set(names)).taps
    assert set(taps) == set(names)
    assert taps["decoder.0.self_attention.weights"].shape == (1, 2, 3, 3)


def test_importing_tformer_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, tformer; print([name for name in ('torch', 'numpy', 'pydantic') if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    for name in tformer.__all__:
        assert getattr(tformer, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        tformer.lode  # noqa: B018


# --- train ------------------------------------------------------------------------------------------------------------


def test_train_returns_the_best_checkpoint_with_the_summary_of_the_command(classifier: tformer.Run) -> None:
    assert str(classifier.path) == classifier.summary["best_checkpoint"]
    assert classifier.step == 4 and classifier.recipe.data.labels == ("early", "late")
    assert set(classifier.summary) >= {"run", "step", "parameters", "valid"}


def test_rows_of_every_form_and_a_file_of_them_train_the_same_model(tmp_path: Path, classifier: tformer.Run) -> None:
    file = tmp_path / "data.jsonl"
    dicts = [{"text": text, "label": label} for text, label in LABELLED]
    file.write_text("".join(json.dumps(row) + "\n" for row in dicts))
    chosen = {key: value for key, value in sizes("encoder").items() if not key.startswith("tokenizer")}
    for number, data in enumerate([iter(dicts), file]):
        run = tformer.train(data, arch="bert", out=tmp_path / str(number), set=chosen, **QUICK)
        assert run.summary["valid"]["loss"] == classifier.summary["valid"]["loss"]


def test_a_run_trained_on_rows_resumes_and_stops_where_the_command_would(tmp_path: Path) -> None:
    options = {"arch": "gpt", "preset": "char-cpu", "out": tmp_path / "run", "set": sizes("decoder"), **QUICK}
    whole = tformer.train(TEXTS, **{**options, "out": tmp_path / "whole", "max_steps": 6})
    tformer.train(TEXTS, **options)
    resumed = tformer.train(resume=True, out=tmp_path / "run", max_steps=6, quiet=True)
    assert resumed.step == whole.step == 6
    again = tformer.train(TEXTS, resume=True, out=tmp_path / "run", quiet=True)  # the same rows are the same data
    assert again.step == 6


def test_quiet_training_shows_nothing_and_else_what_the_command_shows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"arch": "gpt", "preset": "char-cpu", "set": sizes("decoder"), **QUICK, "max_steps": 1}
    tformer.train(TEXTS, valid=TEXTS[:4], out=tmp_path / "quiet", **options)
    assert capfd.readouterr() == ("", "")
    tformer.train(TEXTS, valid=TEXTS[:4], out=tmp_path / "loud", **{**options, "quiet": False})
    shown = capfd.readouterr()
    assert shown.out == "" and "parameters" in shown.err


# --- mistakes ---------------------------------------------------------------------------------------------------------

MISTAKES = [
    ("lm", "generate", ["x"], {"temprature": 1}, "generate has no option 'temprature'", "did you mean 'temperature'"),
    ("lm", "generate", ["x"], {"temperature": "hot"}, "temperature: found 'hot', expected a number", None),
    ("lm", "generate", ["x"], {"top_k": -1}, "top_k", None),
    ("lm", "generate", ["x"], {"greedy": True, "beam_size": 4}, "greedy and beam_size 4 exclude", "beam of 1"),
    ("lm", "generate", ["x"], {"device": "cuda"}, "generate takes no device", "tformer.load"),
    ("lm", "generate", ["x"], {"input": "a.txt"}, "generate takes no input", "list of texts"),
    ("lm", "generate", ["x"], {"length_penalty_type": "sum"}, "expected 'gnmt', 'avg' or 'none'", None),
    (
        "lm",
        "generate",
        ["x"],
        {"target_prefix": "y"},
        "target_prefix is for encoder-decoders",
        "beginning of the output",
    ),
    ("lm", "generate", [3], {}, "the input: found 3, expected a text", None),
    ("lm", "generate", [["x", 3]], {}, "input 1: found 3, expected a text", None),
    ("classifier", "classify", [[("x",)]], {}, "input 0: found ('x',), expected a text, a pair of texts or", None),
    ("classifier", "classify", [Path("a.png")], {}, "the model reads texts, not images", None),
    ("lm", "embed", [[None]], {}, "input 0: found None, expected a text", None),
    ("lm", "score", ["x", 3], {}, "the input: found 3, expected a text", None),
    ("lm", "score", ["x", ""], {}, "data: no continuation has a token", None),
    ("lm", "translate", ["x"], {}, "is no encoder-decoder", "run.generate"),
    ("lm", "fill_masks", ["x"], {}, "is no masked language model", "run.generate"),
    ("masked", "generate", ["x"], {}, "fills masks", "run.fill_masks"),
    ("masked", "fill_masks", ["[MASK]"], {"temperature": 1.0}, "temperature is for models that continue", "top_k"),
    ("masked", "fill_masks", ["none"], {}, "mask", None),
    ("lm", "classify", ["x"], {}, "no head this command can use: found lm", None),
    ("classifier", "classify", [("x", "y")], {}, "trained on single texts, not on pairs", None),
    ("classifier", "classify", ["x"], {"threshold": 1.5}, "threshold must be 0 to 1, found 1.5", None),
    ("classifier", "classify", ["x"], {"text": "y"}, "classify takes no text", "first argument"),
    ("classifier", "classify", [[{"text": "a"}, {"txt": "b"}]], {}, "data[1]: no key 'text'; did you mean 'txt'", None),
    ("classifier", "classify", [[{"text": "a"}, "b"]], {}, "input 0: found {'text': 'a'}, expected a text", None),
    ("classifier", "classify", [Path("no.csv")], {}, "no.csv: no such file", None),
    ("classifier", "classify", ["x"], {"text_column": "y"}, "classify takes no text_column", "given as strings"),
    ("classifier", "generate", ["x"], {}, "generation needs a model with a decoder", None),
    ("lm", "embed", ["x"], {"pooling": "sum"}, "pooling: found 'sum', expected 'cls'", None),
    ("lm", "embed", ["x"], {"layer": 2}, "layer must be between -2 and 1, found 2", None),
    ("lm", "embed", ["x"], {"batch_size": 0}, "batch_size must be at least 1", None),
    ("lm", "score", [["x"], ["y", "z"]], {}, "1 sources and 2 targets", None),
    ("lm", "evaluate", [], {"bleu_tokenize": "char"}, "bleu_tokenize has no meaning here", None),
    ("lm", "evaluate", [], {"strid": 3}, "evaluate has no option 'strid'", "did you mean 'stride'"),
    ("lm", "evaluate", [["a", 3]], {}, "data[1]: found int, expected a dict, a tuple or a string", None),
    ("classifier", "evaluate", [["a text"]], {}, "data[0]: found 'a text', expected (text, label) or", None),
    ("classifier", "evaluate", [[("a", "unknown")]], {}, "data[0]: unknown label 'unknown'", None),
    ("lm", "generate", [None], {}, "the input: found None, expected a text", None),
    ("lm", "generate", [b"a"], {}, "the input: found b'a', expected a text", None),
    ("lm", "generate", [["a", 3]], {}, "input 1: found 3, expected a text", None),
    ("lm", "generate", [{"a": 1}], {}, "the input: found {'a': 1}, expected a text", None),
    ("masked", "fill_masks", [None], {}, "the input: found None, expected a text", None),
    ("classifier", "classify", [None], {}, "the input: found None, expected a text, a pair", None),
    ("classifier", "classify", [("a", "b", "c")], {}, "the input: found ('a', 'b', 'c'), expected", None),
    ("classifier", "classify", [{"text": "a"}], {}, "the input: found {'text': 'a'}, expected a text", None),
    ("lm", "embed", [["a", ("b", 3)]], {}, "input 1: found ('b', 3), expected a text", None),
    ("lm", "score", ["a", None], {}, "the input: found None, expected a text", None),
    ("lm", "encode", [None], {}, "text: found null, expected a text", None),
    ("lm", "decode", [[1.5]], {}, "ids: 'float' object cannot be interpreted as an integer", "whole numbers"),
    ("lm", "decode", [[10**6]], {}, "ids: found 1000000, expected 0 to", None),
]


@pytest.mark.parametrize(("name", "method", "arguments", "options", "message", "hint"), MISTAKES)
def test_a_mistake_is_one_clear_error(
    name: str,
    method: str,
    arguments: list[Any],
    options: dict[str, Any],
    message: str,
    hint: str | None,
    request: pytest.FixtureRequest,
) -> None:
    run = request.getfixturevalue(name)
    with pytest.raises(InputError) as caught:
        getattr(run, method)(*arguments, **options)
    assert message in caught.value.message and "--" not in caught.value.message and str(caught.value)
    assert "\n" not in caught.value.message and (hint is None or hint in (caught.value.hint or ""))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ([3], {}, "path: found 3, expected a path"),
        ([b"runs/x"], {}, "path: found b'runs/x'"),
        (["x"], {"device": "tpu"}, "unknown device 'tpu'"),
        (["x"], {"device": 0}, "device: found 0, expected auto, cpu, cuda"),
        (["x"], {"dtype": "fp32"}, "dtype: found 'fp32', expected a torch.dtype"),
        (["x"], {"which": 3}, "which: found 3, expected best, latest or step-N"),
        (["nowhere"], {}, "nowhere does not exist"),
    ],
)
def test_a_mistake_in_loading_is_one_clear_error(arguments: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        tformer.load(*arguments, **options)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (3, {}, "data: found int, expected a path, rows"),
        ({"text": ["a"]}, {}, "data: found a dict"),
        ([], {}, "data: no rows"),
        ([("a", "b", "c", "d")], {"arch": "bert"}, "expected (text, label) or (text, text2, label)"),
        (["a"], {"archs": "bert"}, "train has no option 'archs'"),
        (["a"], {"dry_run": True}, "train takes no dry_run"),
        (["a"], {"arch": "gtp"}, "gtp"),
        (["a"], {"max_steps": "many"}, "max_steps: found 'many', expected an integer"),
        (["a"], {"set": {"model.d_modl": 4}}, "d_modl"),
        ([{"text": object()}], {}, "data[0]"),
        (["x"], {"arch": "vit"}, "expected the path of a folder, not rows"),
        ("nowhere.txt", {}, "nowhere.txt"),
    ],
)
def test_a_mistake_in_training_is_one_clear_error(
    data: Any, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        tformer.train(data, quiet=True, **options)
    assert message in caught.value.message and not (tmp_path / "runs").exists()


def test_a_list_of_the_name_of_a_file_is_not_taken_for_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(InputError, match="is a file, and a list of strings is a list of texts") as caught:
        tformer.train([str(tmp_path / "a.txt")])
    assert "pathlib.Path" in str(caught.value.hint)


def test_no_call_warns_of_anything_else(lm: tformer.Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.generate("the ", max_new_tokens=2)
        lm.embed("the ")


def test_a_text_that_is_no_unicode_is_named_by_its_number(
    lm: tformer.Run, classifier: tformer.Run, translator: tformer.Run, masked: tformer.Run
) -> None:
    bad, calls = ["ok", "\udcff"], [lm.generate, translator.translate, classifier.classify, classifier.embed]
    for call in (*calls, lambda texts: lm.score(["ok", "ok"], texts), lambda texts: lm.score(texts, ["ok", "ok"])):
        with pytest.raises(InputError, match=r"^text 2 holds half a surrogate pair \(U\+DCFF\) at character 0"):
            call(bad)
    with pytest.raises(InputError, match=r"^text 2 holds .* at character 1"):
        classifier.embed([("a", "b"), ("ok", "c\udcff")])
    with pytest.raises(InputError, match=r"^text 2 holds .* at character 7"):
        masked.fill_masks(["[MASK]", "[MASK] \udcff"])
    with pytest.raises(InputError, match=r"data\[1\]: .* holds half a surrogate pair"):
        translator.evaluate([("a", "b"), ("a", "\udcff")])


def test_no_inputs_have_no_answers(lm: tformer.Run, classifier: tformer.Run) -> None:
    assert lm.generate([]) == lm.score([], []) == classifier.classify([]) == []
    for run in (lm, classifier):
        found = run.embed([])
        assert found.shape == (0, 16) == (0, run.embed("the cat").shape[0]) and found.dtype == np.float32
