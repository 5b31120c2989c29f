"""`tformer patch`: formats, prompts of every family, ablation over data, refusals."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tformer
from tests.end_to_end.translate_runs import DECODER, SEQ2SEQ, build_run
from tests.random_runs import random_run
from tests.viz.attention_models import IMAGES
from tformer.inside.patching import AblationReport, PatchReport

Cli = Callable[..., Any]
LETTERS = "abcdefgh \t"
ENCODER = DECODER.replace("decoder:", "encoder:")
PROMPTS = ("--clean", "abcab", "--corrupted", "abdab")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(tmp_path_factory.mktemp("decoder"), DECODER.replace("num_layers: 1", "num_layers: 2"))


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(tmp_path_factory.mktemp("seq2seq"), SEQ2SEQ + "objectives: [{kind: seq2seq}]\n")


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = ENCODER.replace("kind: lm", "kind: masked_lm") + "objectives: [{kind: masked_lm}]\n"
    return random_run(tmp_path_factory.mktemp("masked") / "runs", recipe, letters=LETTERS)


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("abc.txt").write_text("abc abc fed\n" * 20)


def document(cli: Cli, *words: object) -> dict[str, Any]:
    outcome = cli("patch", *words, "--format", "json")
    assert outcome.code == 0, outcome.err
    return dict(json.loads(outcome.out))


@pytest.mark.usefixtures("texts")
def test_patching_in_every_format(decoder: Path, cli: Cli) -> None:
    for name, start in (("p.html", b"<!doctype"), ("p.png", b"\x89PNG"), ("p.svg", b"<?xml"), ("p.json", b"{"),
                        ("p.csv", b"side,part,layer,place,token"), ("p.txt", b"Denoising of")):  # fmt: skip
        made = cli("patch", decoder, *PROMPTS, "-o", name)
        assert made.code == 0 and made.out == "" and f"wrote {name}" in made.err, made.err
        assert Path(name).read_bytes().startswith(start)
        assert "residual stream before each layer (decoder): L" in made.err
    page = Path("p.html").read_text()
    assert len(page) < 300_000 and f"Model: {decoder}" in page and "Command: tformer" in page
    above = page.split('<p class="subtitle" dir="auto">')[1].split("</p>")[0]
    assert above.startswith(f"clean: {PROMPTS[1]} · corrupted: {PROMPTS[3]} · difference of the logits of"), above


def test_numbers_agree_in_json_and_csv(decoder: Path, cli: Cli) -> None:
    found = document(cli, decoder, *PROMPTS)
    assert [each["part"] for each in found["maps"]] == ["residual", "attention", "feedforward", "heads"]
    assert found["tokens"] == {"decoder": list("abcab")} and found["metric"] == "difference"
    assert found["clean"] > 0 > found["corrupted"], "each prompt prefers its own answer"
    cells = {(each["part"], layer, place): value for each in found["maps"]
             for layer, row in enumerate(each["exact"]) for place, value in enumerate(row)}  # fmt: skip
    rows = list(csv.DictReader(io.StringIO(cli("patch", decoder, *PROMPTS, "--format", "csv").out)))
    assert len(rows) == len(cells) == 2 * 5 * 3 + 2 * 2
    for row in rows:
        assert float(row["exact"]) == cells[row["part"], int(row["layer"]), int(row["place"])]
    assert cells["residual", 0, 2] == pytest.approx(1.0, abs=1e-4), "the only token that differs restores everything"


def test_options_choose_what_is_patched_and_measured(decoder: Path, cli: Cli) -> None:
    found = document(cli, decoder, *PROMPTS, "--parts", "heads", "--answer", "a", "--wrong", "b", "--noising")
    assert [each["part"] for each in found["maps"]] == ["heads"] and found["answer"] == "a" and found["noising"]
    assert document(cli, decoder, *PROMPTS, "--estimate", "--metric", "probability")["maps"][0]["exact"] is None


def test_a_translator_and_a_masked_model_are_patched(translator: Path, masked: Path, cli: Cli) -> None:
    found = document(cli, translator, *PROMPTS, "--target", "ab", "--metric", "logit")
    assert found["tokens"]["decoder"][1:] == ["a", "b"]
    assert {(each["side"], each["part"]) for each in found["maps"]} >= {
        ("encoder", "heads"),
        ("decoder", "cross_heads"),
    }
    found = document(cli, masked, "--clean", "ab[MASK]a", "--corrupted", "hb[MASK]a", "--metric", "loss")
    assert found["tokens"]["encoder"] == ["[CLS]", "a", "b", "[MASK]", "a", "[SEP]"]


@pytest.mark.usefixtures("texts")
def test_the_model_is_named_as_in_the_lens(decoder: Path, cli: Cli) -> None:
    found = [
        document(cli, decoder, *PROMPTS, "--estimate"),
        document(cli, decoder, "--ablate", "zero", "--data", "abc.txt"),
    ]
    for command, words in (("lens", ("--text", "abc")), ("heads", ())):
        found.append(json.loads(cli(command, decoder, *words, "--format", "json").out))
    assert found[0]["model"]["step"] == 3 and len(found[0]["model"]["sha256"]) == 64
    assert all(each["model"] == found[0]["model"] for each in found)


def test_a_target_precedes_the_answer_and_a_prefix_the_sources(translator: Path, cli: Cli) -> None:
    plain = document(cli, translator, *PROMPTS, "--metric", "logit", "--estimate")
    longer = document(cli, translator, *PROMPTS, "--metric", "logit", "--estimate", "--target", "ab", "--prefix", "h")
    assert plain["tokens"]["decoder"] == longer["tokens"]["decoder"][:-2] and longer["tokens"]["decoder"][-2:] == [
        "a",
        "b",
    ]
    words = {side: [token for token in found["tokens"]["encoder"] if len(token) == 1]
             for side, found in (("plain", plain), ("longer", longer))}  # fmt: skip
    assert words["longer"] == ["h", *words["plain"]]


def test_a_classifier_of_pairs_is_patched_in_either_text(cli: Cli, tmp_path: Path) -> None:
    recipe = ENCODER.replace("kind: lm, bias: true", "kind: classifier, pooling: mean").replace(
        "d_model", "embedding: {token_types: 2}\n  d_model"
    )
    run = random_run(
        tmp_path / "runs",
        recipe + "data: {labels: [bad, good]}\nobjectives: [{kind: classification}]\n",
        letters=LETTERS,
    )
    words = (run, "--clean", "ab", "--corrupted", "ab", "--text2", "cd", "--corrupted-text2", "fd", "--metric", "logit")
    residual = document(cli, *words)["maps"][0]
    changed = [place for place, value in enumerate(residual["exact"][0]) if abs(value) > 1e-4]
    assert len(changed) == 1, "only one token of the second text differs"


def test_two_images_are_patched_by_patch(cli: Cli, tmp_path: Path) -> None:
    from PIL import Image

    draws = np.random.default_rng(0)
    for name in ("clean.png", "corrupted.png"):
        Image.fromarray(draws.integers(0, 255, (8, 8), dtype=np.uint8)).save(tmp_path / name)
    run = random_run(tmp_path / "runs", IMAGES, letters=LETTERS)
    words = ("--clean-image", tmp_path / "clean.png", "--corrupted-image", tmp_path / "corrupted.png")
    found = document(cli, run, *words, "--metric", "probability")
    assert found["tokens"]["encoder"][:2] == ["CLS", "0,0"]
    assert len(found["maps"][0]["exact"][0]) == len(found["tokens"]["encoder"])
    refused = cli("patch", run, *PROMPTS)
    assert refused.code == 2 and "is an image model: it reads no text" in refused.err
    assert cli("patch", run, *words, "-o", tmp_path / "clean.png").code == 2


@pytest.mark.usefixtures("texts")
def test_an_ablation_is_a_table_of_what_each_part_is_worth(decoder: Path, cli: Cli) -> None:
    words = (decoder, "--data", "abc.txt", "--ablate", "mean")
    found = document(cli, *words)
    assert len(found["parts"]) == 2 * (2 + 2) and found["ablate"] == "mean" and "abc.txt" in found["data"]
    table = cli("patch", *words, "--format", "terminal").out.splitlines()
    assert table[0].split()[:4] == ["part", "stack", "loss", "added"] and table[1].startswith("(whole)")
    added = [float(line.split("decoder")[1].split()[1]) for line in table[2:]]
    assert added == sorted(added, reverse=True) and len(added) == 8
    assert max(each["added_loss"] for each in found["parts"]) == pytest.approx(added[0], abs=1e-4)
    for name in ("w.html", "w.svg", "w.csv"):
        assert cli("patch", *words, "-o", name).code == 0 and Path(name).stat().st_size > 100
    assert document(cli, decoder, "--data", "abc.txt", "--ablate", "zero")["parts"] != found["parts"]


@pytest.mark.usefixtures("texts")
def test_python_returns_what_the_command_prints(decoder: Path, cli: Cli) -> None:
    run = tformer.load(decoder)
    report = run.patch("abcab", "abdab", parts="heads")
    assert isinstance(report, PatchReport)
    [printed] = document(cli, decoder, *PROMPTS, "--parts", "heads")["maps"]
    np.testing.assert_array_equal(report.maps[0].exact, printed["exact"])
    worth = run.patch(ablate="zero", data="abc.txt")
    assert isinstance(worth, AblationReport) and len(worth.parts) == 8
    with pytest.raises(tformer.InputError, match="corrupted or corrupted_image is missing"):
        run.patch("abc")


@pytest.mark.usefixtures("texts")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("RUN", "--clean", "abc", "--corrupted", "ab"), "--clean has 3 tokens, --corrupted 2"),
        (("RUN", "--clean", "abc", "--corrupted", "abc"), "both answers are"),
        (("RUN", "--clean", "abc", "--corrupted", "abc", "--metric", "logit"), "there is nothing to restore"),
        (("RUN", *PROMPTS, "--answer", "ab"), "--answer 'ab': 2 tokens ('a', 'b'), expected one"),
        (("RUN", *PROMPTS, "--wrong", ""), "--wrong '' is not in the vocabulary"),
        (("RUN", *PROMPTS, "--answer", "z"), "--answer 'z' is not in the vocabulary"),
        (("RUN", *PROMPTS, "--metric", "rank"), "--metric"),
        (("RUN", *PROMPTS, "--parts", "heads,mlp"), "--parts heads,mlp: unknown part 'mlp'"),
        (("RUN", *PROMPTS, "--target", "a"), "--target:"),
        (("RUN", *PROMPTS, "--prefix", "a"), "--prefix:"),
        (("RUN", *PROMPTS, "--text2", "a"), "--text2:"),
        (("RUN", "--clean-image", "a.png", "--corrupted-image", "b.png"), "reads text, not images"),
        (("RUN", *PROMPTS, "--max-tokens", "0"), "--max-tokens"),
        (("RUN", "--ablate", "half"), "--ablate"),
        (("RUN", "--ablate", "zero", "--data", "missing.txt"), "missing.txt"),
        (("RUN", *PROMPTS, "-o", "p.pdf"), "p.pdf has the suffix .pdf"),
        (("MASKED", *PROMPTS), "expected one in the same place"),
        (("MASKED", "--clean", "[MASK]a", "--corrupted", "a[MASK]"), "expected one in the same place"),
        (("missing", *PROMPTS), "missing does not exist"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    words: tuple[str, ...], message: str, decoder: Path, masked: Path, cli: Cli
) -> None:
    before = set(Path().iterdir())
    outcome = cli("patch", *({"RUN": decoder, "MASKED": masked}.get(word, word) for word in words))
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert outcome.code == 2 and outcome.out == "" and len(errors) == 1 and message in errors[0], outcome.err
    assert set(Path().iterdir()) == before


def test_rows_of_the_vocabulary_without_a_token_are_no_answer(cli: Cli, tmp_path: Path) -> None:
    """T5 has more rows than tokens."""
    import torch

    def prefer_padding(model: Any, tokenizer: Any) -> None:
        with torch.no_grad():
            model.state_dict()["heads.lm.bias"][tokenizer.vocab_size :] = 50.0

    recipe = DECODER.replace("max_seq_len: 16", "max_seq_len: 16\n  vocab_size: 40")
    run = random_run(tmp_path / "runs", recipe, letters=LETTERS, change=prefer_padding)
    found = document(cli, run, *PROMPTS, "--metric", "logit")
    assert found["answer"] in [*LETTERS, "<unk>"]
