"""What CTranslate2 computes of an export is what tformer computes; left out where CTranslate2 is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.interop.exports import GPT, LETTERS, ORIGINAL, checkpoint, letters
from tformer.decoding.loaded import translator_of
from tformer.decoding.settings import BeamSettings
from tformer.interop.to_ctranslate2 import export_ctranslate2
from tformer.loading import Loaded, load
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer

ctranslate2 = pytest.importorskip("ctranslate2")

NORM = {"eps": 0.02}  # so large that the wrong one shows
SIDE: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "feedforward": {"d_ff": 24, "activation": "gelu"}}
LEARNED = {**SIDE, "positions": {"kind": "learned", "offset": 2}, "norm": {"place": "post"}, "final_norm": False}
PRE = {**LEARNED, "norm": {"place": "pre"}, "final_norm": True}
SINES = {**SIDE, "positions": {"kind": "sinusoidal", "layout": "interleaved"}}
BIASES: dict[str, Any] = {
    **SIDE,
    "positions": {"kind": "t5_bias", "buckets": 8, "max_distance": 12},
    "attention": {"kind": "full", "qkv_bias": False, "out_bias": False, "scale": 1.0},
    "feedforward": {"d_ff": 24, "activation": "relu", "bias": False},
    "norm": {"kind": "rmsnorm", **NORM},
}
GATED = {**BIASES, "feedforward": {"d_ff": 24, "activation": "gelu_tanh", "gated": True, "bias": False}, "head_dim": 6}
ROPE = {
    **SIDE,
    "num_kv_heads": 1,
    "positions": {"kind": "rope", "layout": "interleaved"},
    "attention": {"kind": "full", "qkv_bias": False, "out_bias": False},
    "feedforward": {"d_ff": 24, "activation": "silu", "gated": True, "bias": False},
    "norm": {"kind": "rmsnorm", **NORM},
}


def recipe(arch: str, **model: Any) -> dict[str, Any]:
    return {"arch": arch, "model": {"d_model": 16, "max_seq_len": 24, **model}}


TRANSLATORS = {
    "marian": ORIGINAL,
    "bart": recipe("bart", embedding={"norm": True}, encoder=LEARNED, decoder={**LEARNED, "num_layers": 1}),
    "t5": recipe("t5", encoder=BIASES, decoder=BIASES, heads=[{"kind": "lm", "scale": "inverse_sqrt_d"}]),
    "t5, gated": recipe("t5", encoder=GATED, decoder=GATED, tie={"output": False}),
    "mbart": recipe("bart", embedding={"norm": True}, encoder=PRE, decoder=PRE),
    "pegasus": recipe("transformer", embedding={"scale": True}, encoder=SINES, decoder=SINES),
    "two vocabularies": {
        **ORIGINAL,
        "model": {**ORIGINAL["model"], "tie": {"source_target": False}},
        "tokenizer": {"separate": True},
    },
}
DECODERS = {
    "gpt2": {**GPT, "model": {**GPT["model"], "decoder": {**GPT["model"]["decoder"], "norm": NORM}}},
    "llama": recipe("llama", decoder=ROPE),
}
SOURCES = ["fed cab", "a", "hhh gab de"]
TARGET = letters("seq2seq", "xyz ")


def names(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token(token) for token in ids]


def made(tmp_path: Path, values: dict[str, Any], **options: Any) -> Loaded:
    target = TARGET if "tokenizer" in values else None
    export_ctranslate2(checkpoint(tmp_path / "run", values, target=target), tmp_path / "out", **options)
    return load(tmp_path / "run")


def expected(run: Loaded, source: list[int] | None, written: list[int], start: list[int]) -> list[float]:
    """Log-probabilities of the tokens written, by tformer."""
    read = torch.tensor([[*start, *written[:-1]]])
    given = {"input_ids": read} if source is None else {"input_ids": torch.tensor([source]), "decoder_input_ids": read}
    with torch.no_grad():
        logprobs = run.model(**given).logits.log_softmax(-1)[0, -len(written) :]
    return [float(row[token]) for row, token in zip(logprobs, written, strict=True)]


@pytest.mark.parametrize("kind", TRANSLATORS)
def test_an_encoder_decoder_gives_the_same_probabilities(kind: str, tmp_path: Path) -> None:
    run = made(tmp_path, TRANSLATORS[kind])
    tokenizer, ends = run.target_tokenizer, run.decoder_tokens
    source = run.text_tokenizer.encode("fed cab", template=True)
    written = [*tokenizer.encode("zyx" if tokenizer is not run.text_tokenizer else "abc"), ends.eos]
    translator = ctranslate2.Translator(str(tmp_path / "out"))
    [scored] = translator.score_batch([names(run.text_tokenizer, source)], [names(tokenizer, written[:-1])])
    assert scored.tokens == names(tokenizer, written)
    assert scored.log_probs == pytest.approx(expected(run, source, written, [ends.start]), abs=2e-5)


@pytest.mark.parametrize("kind", DECODERS)
def test_a_decoder_gives_the_same_probabilities(kind: str, tmp_path: Path) -> None:
    run = made(tmp_path, DECODERS[kind])
    tokenizer = run.text_tokenizer
    written = tokenizer.encode("fed cab aaa")
    [scored] = ctranslate2.Generator(str(tmp_path / "out")).score_batch([names(tokenizer, written)])
    assert scored.log_probs == pytest.approx(expected(run, None, written[1:], written[:1]), abs=2e-5)


@pytest.mark.parametrize("beam", [1, 4])
def test_a_translation_has_the_tokens_of_our_beam_search(beam: int, tmp_path: Path) -> None:
    run = made(tmp_path, ORIGINAL)
    settings = BeamSettings(
        beam_size=beam,
        length_penalty_type="avg",
        stopping="beam",  # CTranslate2's rule
        max_new_tokens=12,
        eos_id=run.decoder_tokens.eos,
        suppress_tokens=(),
    )
    ours = translator_of(run, settings=settings).translate(SOURCES)
    batch = [names(run.text_tokenizer, run.text_tokenizer.encode(text, template=True)) for text in SOURCES]
    theirs = ctranslate2.Translator(str(tmp_path / "out")).translate_batch(
        batch, beam_size=beam, length_penalty=1.0, max_decoding_length=12, min_decoding_length=0, return_scores=True
    )
    end = run.decoder_tokens.eos
    for found, reference in zip(ours, theirs, strict=True):
        written = [token for token in found[0].ids if token != end]
        assert names(run.target_tokenizer, written) == reference.hypotheses[0]
        assert reference.scores[0] == pytest.approx(found[0].score, abs=2e-5)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "int8"])
def test_weights_are_stored_in_the_type_asked_for(kind: str, tmp_path: Path) -> None:
    opened = checkpoint(tmp_path / "run", ORIGINAL)
    full = export_ctranslate2(opened, tmp_path / "full")
    small = export_ctranslate2(opened, tmp_path / "small", quantization=kind)
    assert small.dtype == kind and small.num_bytes < full.num_bytes
    assert ctranslate2.Translator(str(tmp_path / "small"), compute_type="float32").translate_batch(
        [["a", "[END]"]], max_decoding_length=8
    )


def test_the_tokenizer_lies_beside_the_model(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path / "run", ORIGINAL)
    report = export_ctranslate2(opened, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == list(report.files)
    assert Tokenizer.load(tmp_path / "out" / "tokenizer.json").sha256 == letters("seq2seq", LETTERS).sha256
    assert report.auto_class == "ctranslate2.Translator"


def test_an_architecture_that_is_not_known_to_agree_is_refused(tmp_path: Path) -> None:
    encoder = recipe("bert", encoder=LEARNED | {"positions": {"kind": "learned"}}, heads=[{"kind": "masked_lm"}])
    encoder["model"]["embedding"] = {"norm": True, "token_types": 2}
    with pytest.raises(InputError, match=r"BertForMaskedLM is not among the models .* gpt2, llama, .* marian"):
        export_ctranslate2(checkpoint(tmp_path / "run", encoder, tokenizer=letters("bert")), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_stacks_with_different_numbers_of_heads_are_refused(tmp_path: Path) -> None:
    values = recipe("bart", embedding={"norm": True}, encoder={**LEARNED, "num_heads": 4}, decoder=LEARNED)
    with pytest.raises(InputError, match=r"found 4 heads in model\.encoder and 2 in model\.decoder"):
        export_ctranslate2(checkpoint(tmp_path / "run", values), tmp_path / "out")


def test_without_ctranslate2_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ctranslate2" else find(name))
    with pytest.raises(InputError, match="needs ctranslate2, which is not installed") as error:
        export_ctranslate2(checkpoint(tmp_path / "run", ORIGINAL), tmp_path / "out")
    assert "tformer[ctranslate2]" in (error.value.hint or "")


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = checkpoint(tmp_path / "run", ORIGINAL)

    def stopped(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tformer.interop.to_ctranslate2._convert", stopped)
    with pytest.raises(KeyboardInterrupt):
        export_ctranslate2(opened, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
