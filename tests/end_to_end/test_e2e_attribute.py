"""`attribute` as a user runs it, of every kind of model; and `Run.attribute`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tformer
from tests.quick import first_is_quick
from tformer.inside.reading import Inputs, read
from tformer.support.errors import InputError

Cli = Callable[..., Any]


def show(cli: Cli, run: Path, *arguments: object) -> Any:
    outcome = cli("attribute", run, *arguments)
    assert outcome.code == 0, outcome.err
    return outcome


def document(cli: Cli, run: Path, *arguments: object) -> dict[str, Any]:
    return dict(json.loads(show(cli, run, *arguments, "--format", "json").out))


@first_is_quick(
    ("suffix", "start"),
    [
        ("html", b"<!doctype"),
        ("png", b"\x89PNG"),
        ("svg", b"<?xml"),
        ("csv", b"position,target"),
        ("txt", b"What mattered for"),
        ("json", b'{"mod'),
    ],
    quick=2,
)
def test_every_format(suffix: str, start: bytes, decoder: Path, cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / f"attribute.{suffix}"
    outcome = show(cli, decoder, "--text", "fed cab", "-o", path)
    assert outcome.out == "" and f"wrote {path}" in outcome.err and path.read_bytes().startswith(start)
    assert "with the baseline (" in outcome.err and "integrated gradients miss " in outcome.err
    if suffix == "html":
        page = path.read_text(encoding="utf-8")
        assert "Text: fed cab" in page and "Command: tformer" in page and len(page) < 300_000


def test_numbers_are_those_of_the_logits_and_agree_in_json_and_csv(decoder: Path, cli: Cli) -> None:
    found, run = document(cli, decoder, "--text", "fed cab"), tformer.load(decoder)
    with torch.no_grad():
        logits = run.model(input_ids=torch.tensor([run.encode("fed cab")])).logits[0, -1]
    [answer] = found["answers"]
    assert found["tokens"] == {"decoder": list("fed cab")} and answer["position"] == 6
    assert answer["value"] == pytest.approx(float(logits.max()), abs=1e-5)
    total = sum(score for score in found["scores"]["integrated"]["decoder"][0] if score is not None)
    assert total - (answer["value"] - answer["baseline_value"]) == pytest.approx(answer["gap"], abs=1e-6)
    rows = list(csv.DictReader(io.StringIO(show(cli, decoder, "--text", "fed cab", "--format", "csv").out)))
    assert [row["token"] for row in rows] == list("fed cab")
    for method, by_side in found["scores"].items():
        np.testing.assert_allclose([float(row[method]) for row in rows], by_side["decoder"][0], rtol=1e-6)


def test_options_choose_the_answer_the_metric_and_the_methods(decoder: Path, cli: Cli) -> None:
    found = document(cli, decoder, "--text", "fed cab", "--target-token", "h", "--against", "a", "--positions", "2,6",
                     "--methods", "occlusion,integrated", "--steps", 7)  # fmt: skip
    assert list(found["scores"]) == ["integrated", "occlusion"] and found["steps"] == 7
    assert [each["target"] for each in found["answers"]] == ["h", "h"] and found["metric"] == "difference"
    assert found["scores"]["integrated"]["decoder"][0][3:] == [None] * 4, "later tokens cannot be seen"
    shares = document(cli, decoder, "--text", "fed", "--metric", "probability", "--baseline", "zero")
    assert 0 <= shares["answers"][0]["value"] <= 1 and shares["baseline"] == "zero"


def test_a_terminal_has_a_table_for_one_answer_and_maps_for_several(decoder: Path, translator: Path, cli: Cli) -> None:
    table = show(cli, decoder, "--text", "fed cab", "--format", "terminal").out.splitlines()
    [head] = [number for number, line in enumerate(table) if line.startswith("token ")]
    assert table[head].split() == ["token", "gradient", "integrated", "occlusion", "rollout"]
    assert [line.split()[0] for line in table[head + 1 : head + 8]] == list("fed␣cab")
    maps = show(cli, translator, "--text", "fed", "--target", "abc", "--format", "terminal").out
    assert "integrated gradients, source" in maps and "occlusion, target" in maps


def test_a_translation_is_a_matrix_of_target_and_source(translator: Path, cli: Cli) -> None:
    found = document(cli, translator, "--text", "fed", "--target", "abc", "--steps", 5)
    assert found["tokens"]["decoder"] == ["[START]", *"abc"]
    assert [each["target"] for each in found["answers"]][:3] == list("abc") and len(found["answers"]) == 4
    for by_side in found["scores"].values():
        assert np.array(by_side["encoder"]).shape == (4, len(found["tokens"]["encoder"]))
    assert (
        "own translation" in show(cli, translator, "--text", "fed cab", "--methods", "rollout", "--format", "csv").err
    )


def test_a_decoder_explains_each_token_that_it_generates(decoder: Path, cli: Cli) -> None:
    found = document(cli, decoder, "--text", "abc", "--max-new-tokens", 3, "--methods", "gradient")
    assert [each["target"] for each in found["answers"]] == found["tokens"]["decoder"][3:]


def test_a_masked_language_model_at_each_mask(encoder_run: Callable[[str], Path], cli: Cli) -> None:
    found = document(cli, encoder_run("masked"), "--text", "the [MASK] and the <mask>")
    assert [each["position"] for each in found["answers"]] == [2, 5] and found["baseline"] == "mask"
    for scores in found["scores"]["occlusion"]["encoder"]:
        stays = [score is None for score in scores]
        assert stays == [True, False, True, False, False, True, True], "[CLS], both masks and [SEP]"


@first_is_quick("kind", ["single", "multi", "score", "pair", "image"], quick=2)
def test_labels_and_scores(kind: str, encoder_run: Callable[[str], Path], cli: Cli, tmp_path: Path) -> None:
    run = encoder_run(kind)
    image = next((run.parent / "data").rglob("*.png"), None) if kind == "image" else None
    given = ("--image", image) if image is not None else ("--text", "the saw")
    given += ("--text2", "the axe") if kind == "pair" else ()
    found = document(cli, run, *given)
    [answer] = found["answers"]
    assert answer["position"] is None and found["metric"] == "logit"
    assert abs(answer["gap"]) <= 0.01 * abs(answer["value"] - answer["baseline_value"]) + 1e-5
    loaded = tformer.load(run)
    if kind == "score":
        assert answer["value"] == pytest.approx(loaded.classify("the saw").score, abs=1e-4)
    elif kind in ("single", "image"):
        assert answer["target"] == loaded.classify(image if image is not None else "the saw").label
    assert show(cli, run, *given, "--format", "svg", "-o", "-").out.startswith("<?xml")
    show(cli, run, *given, "--format", "terminal")


FOLDERS: list[Any] = [("gpt2", "ab"), ("bert", "a[MASK]"), ("classifier", "a"), ("bart", "a")]
FOLDERS += [pytest.param("t5", "a", marks=pytest.mark.slow)]  # 1,000 points


@first_is_quick(("name", "text"), FOLDERS)
def test_folders_of_hugging_face(name: str, text: str, folders: Path, cli: Cli) -> None:
    steps = ("--steps", 1000) if name == "t5" else ()  # its vectors pass near zero
    found = document(cli, folders / name, "--text", text, "--methods", "integrated,rollout", *steps)
    for answer in found["answers"]:
        assert abs(answer["gap"]) <= 0.01 * abs(answer["value"] - answer["baseline_value"]) + 1e-5


CLASSES = {
    "gpt2": ("CausalLM", "bed", None),
    "bert": ("MaskedLM", "the [MASK] sat on", None),
    "classifier": ("SequenceClassification", "the cat sat", None),
    "bart": ("Seq2SeqLM", "the cat sat", "on the"),
    "t5": ("Seq2SeqLM", "the cat sat", "on the"),
}


@pytest.mark.parametrize("name", CLASSES)
def test_captum_finds_the_same_in_the_class_of_transformers(name: str, folders: Path) -> None:
    """Gradient x input, integrated gradients and occlusion of `inputs_embeds`, within 1e-4."""
    captum, transformers = pytest.importorskip("captum.attr"), pytest.importorskip("transformers")
    (kind, text, target), run = CLASSES[name], tformer.load(folders / name)
    options = {"methods": "gradient,integrated,occlusion", "baseline": "zero", "steps": 50}
    report = run.attribute(text, **options | ({} if target is None else {"target": target}))
    model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(folders / name).eval()
    ids = read(replace(run, tokenizer=run.tokenizer.reading_special()), Inputs(text, target=target)).inputs
    fixed = {name: each for name, each in ids.items() if not name.endswith("input_ids")}
    names = [name for name in ids if name not in fixed]
    table = model.get_input_embeddings()
    vectors = tuple(table(ids[name]).detach() for name in names)
    stays = [torch.tensor(np.isnan(each[0])) for each in report.scores["integrated"].values()]
    if target is not None:  # of the decoder what stays, not what is later
        stays[1] = torch.tensor([True, *[False] * (len(stays[1]) - 1)])
    base = tuple(torch.where(mark[None, :, None], x, 0.0) for x, mark in zip(vectors, stays, strict=True))
    place = report.positions[-1]

    def logits(*given: torch.Tensor) -> torch.Tensor:
        rows = {name: each.expand(len(given[0]), -1) for name, each in fixed.items()}
        spelled = [name.replace("input_ids", "inputs_embeds") for name in names]
        found = model(**dict(zip(spelled, given, strict=True)), **rows, use_cache=False).logits
        return found if place is None else found[:, place]

    with torch.no_grad():
        missed = (logits(*vectors)[0] - report.values[-1]).abs()
    answer, size = int(missed.argmin()), vectors[0].shape[-1]
    assert missed[answer] < 1e-4
    given = {"target": answer, "baselines": base}
    found = {
        "gradient": captum.InputXGradient(logits).attribute(tuple(x.requires_grad_() for x in vectors), target=answer),
        "integrated": captum.IntegratedGradients(logits).attribute(vectors, n_steps=50, **given),
        "occlusion": captum.Occlusion(logits).attribute(
            vectors, sliding_window_shapes=((1, size),) * len(vectors), **given
        ),
    }
    for method, by_side in report.scores.items():
        for own, other in zip(by_side.values(), found[method], strict=True):
            numbers = (other[0, :, 0] if method == "occlusion" else other[0].sum(-1)).detach().numpy()
            known = np.isfinite(own[-1])
            np.testing.assert_allclose(own[-1][known], numbers[known], atol=1e-4)
            assert known.any()


MONTHS = ("", "January", "", "March", "April", "", "", "", "August", "", "October", "", "December")


@pytest.mark.slow  # 150 s of training
def test_a_translation_follows_the_alignment_of_a_trained_model(cli: Cli, tmp_path: Path) -> None:
    """Dates, whose alignment is known: years come from years, months from months, days from days."""
    run = tmp_path / "dates"
    outcome = cli("train", "--arch", "transformer", "--preset", "dates", "--max-steps", 400, "--out", run)
    assert outcome.code == 0, outcome.err
    loaded, found = tformer.load(run), dict[str, list[bool]]()
    for number, month in enumerate((1, 3, 4, 8, 10, 12, 1, 3, 4, 8)):
        year, day, name = 1917 + 17 * number, 11 + 2 * number, MONTHS[month]
        spelled = f"{day} {name} {year}"
        report = loaded.attribute(spelled)
        assert "".join(report.targets[:10]) == f"{year}-{month:02}-{day}"
        assert report.gaps is not None and (np.abs(report.gaps) <= 0.01 * np.abs(report.changes)).all()
        sources = {0: str(year), 1: str(year), 2: str(year), 3: str(year), 5: name, 6: name, 8: str(day), 9: str(day)}
        letters = report.tokens["encoder"]
        first = letters.index(spelled[0])
        for answer, source in sources.items():
            start = first + spelled.index(source)
            for method, by_side in report.scores.items():
                place = int(np.nan_to_num(by_side["encoder"][answer], nan=-np.inf).argmax())
                found.setdefault(method, []).append(start <= place < start + len(source))
    shares = {method: sum(each) / len(each) for method, each in found.items()}
    assert min(shares.values()) > 0.7, shares


def test_python_returns_the_numbers_of_the_command_as_arrays(decoder: Path, cli: Cli) -> None:
    run, found = tformer.load(decoder), document(cli, decoder, "--text", "fed cab", "--against", "b")
    report = run.attribute("fed cab", against="b")
    for method, by_side in found["scores"].items():
        np.testing.assert_allclose(report.scores[method]["decoder"], by_side["decoder"], atol=1e-6)
    assert report.gaps is not None and report.gaps.tolist() == pytest.approx([each["gap"] for each in found["answers"]])
    with pytest.raises(InputError, match=r"target_token 'zz'( is not|: 2 tokens)"):
        run.attribute("fed", target_token="zz")
    with pytest.raises(InputError, match="attribute takes no output"):
        run.attribute("fed", output="x.html")
    with pytest.raises(InputError, match="steps has no meaning with methods rollout"):
        run.attribute("fed", methods="rollout", steps=3)
