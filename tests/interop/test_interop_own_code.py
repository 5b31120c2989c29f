"""Folders that carry `modeling_tformer.py`: what no class of transformers computes, with equal logits and texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.interop.exports import GPT, ORIGINAL, checkpoint, letters
from tests.interop.parity import padding, tokens
from tests.interop.test_interop_exporting import small
from tformer.interop.exporting import ExportReport, export_checkpoint
from tformer.loading import load
from tformer.support.errors import InputError
from tformer.tokenizer import TokenizerOptions, train_tokenizer

TOLERANCE = 2e-5  # of the largest logit
STACK: dict[str, Any] = {
    "num_layers": 2,
    "num_heads": 2,
    "feedforward": {"d_ff": 24},
    "attention": {"kind": "full", "qk_norm": True},
}


@pytest.fixture(autouse=True)
def _modules_in_a_folder_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies the code of a folder into a cache before it runs it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def opened(report: ExportReport) -> Any:
    model = getattr(transformers, report.auto_class).from_pretrained(report.path, trust_remote_code=True)
    return model.eval()


def exported(tmp_path: Path, recipe: dict[str, Any], **named: Any) -> ExportReport:
    return export_checkpoint(checkpoint(tmp_path / "run", recipe, **named), tmp_path / "out")


def inputs(model: dict[str, Any]) -> dict[str, torch.Tensor]:
    mask = padding(9, 9, 6)
    if "encoder" not in model:
        mask = mask.flip(1)  # batches of prompts are padded on the left
    found = {"input_ids": tokens(2, 9, vocabulary=12), "attention_mask": mask}
    if "encoder" in model and "decoder" in model:
        found["decoder_input_ids"] = tokens(2, 7, vocabulary=12)
    return found


def assert_same_logits(path: Path, run: Path, model: dict[str, Any], report: ExportReport) -> None:
    given = inputs(model)
    with torch.no_grad():
        ours = load(run).model(**given).logits
        theirs = opened(report)(**given).logits
    if ours.dim() == 3 and "decoder_input_ids" not in given:
        real = given["attention_mask"].bool()
        ours, theirs = ours[real], theirs[real]
    assert (ours - theirs).abs().max() <= TOLERANCE * ours.abs().max()


def gpt(**decoder: Any) -> dict[str, Any]:
    return {"arch": "gpt", "model": {"d_model": 16, "max_seq_len": 24, "decoder": {**STACK, **decoder}}}


PRESETS = {
    **dict.fromkeys(("gpt/tiny", "gpt/char-6m", "gpt/modern"), ("TformerForCausalLM", "gpt")),
    **dict.fromkeys(("transformer/tiny", "transformer/tears"), ("TformerForConditionalGeneration", "seq2seq")),
    "t5/tiny": ("TformerForConditionalGeneration", "t5"),
    "roberta/tiny": ("TformerForMaskedLM", "roberta"),
    "bert/classify": ("TformerForSequenceClassification", "bert"),
}
QUICK = ("gpt/tiny", "transformer/tiny", "bert/classify")


@pytest.mark.parametrize(
    "preset", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PRESETS]
)
def test_a_preset_that_no_class_computes_opens_with_its_own_code(preset: str, tmp_path: Path) -> None:
    recipe, (class_name, template) = small(preset), PRESETS[preset]
    if preset == "bert/classify":
        recipe["data"] = {"labels": ["cat", "dog", "owl"]}
    report = exported(tmp_path, recipe, tokenizer=letters(template))
    assert (report.class_name, report.model_type) == (class_name, "tformer")
    assert "modeling_tformer.py" in report.files and "trust_remote_code=True" in report.how_to_load()
    assert any("modeling_tformer.py in the folder computes this model" in note for note in report.notes)
    assert_same_logits(report.path, tmp_path / "run", recipe["model"], report)


POSITIONS: tuple[dict[str, Any], ...] = (
    {"kind": "none"},
    *({"kind": "sinusoidal", "layout": layout} for layout in ("interleaved", "halves", "fairseq")),
    {"kind": "learned"},
    {"kind": "learned", "offset": 2, "ids": "nonpad_cumsum"},
    *({"kind": "rope", "layout": layout, "base": 500.0} for layout in ("interleaved", "halves")),
    {"kind": "alibi"},
    {"kind": "t5_bias", "buckets": 8, "max_distance": 12},
)


def positioned(side: str, positions: dict[str, Any]) -> dict[str, Any]:
    stack = {**STACK, "num_heads": 3, "head_dim": 4, "positions": positions}
    heads = [{"kind": "lm" if side == "decoder" else "masked_lm"}]
    return {"arch": "gpt", "model": {"d_model": 16, "max_seq_len": 24, side: stack, "heads": heads}}


def around(head: dict[str, Any], **model: Any) -> dict[str, Any]:
    recipe = gpt()
    recipe["model"] |= {**model, "heads": [head]}
    return recipe | ({"data": {"labels": ["a", "b", "c"]}} if head["kind"] == "classifier" else {})


QK_NORM = {"kind": "full", "qk_norm": True}
PARTS: dict[str, dict[str, Any]] = {
    **{f"{side}: {'-'.join(map(str, one.values()))}": positioned(side, one)
       for side in ("decoder", "encoder") for one in POSITIONS},
    "scalenorm": gpt(norm={"kind": "scalenorm", "place": "post"}, final_norm=False),
    "rmsnorm": gpt(norm={"kind": "rmsnorm", "learned": False}),
    "no biases": gpt(norm={"bias": False, "eps": 1e-3}, attention={**QK_NORM, "qkv_bias": False, "out_bias": False}),
    "grouped heads": gpt(num_heads=4, num_kv_heads=2, head_dim=6, value_dim=5),
    "gated": gpt(feedforward={"d_ff": 20, "activation": "relu2", "gated": True, "bias": False}),
    "scale": gpt(attention={**QK_NORM, "scale": 0.3}),
    "own width": gpt(d_model=12),
    "learned QK-norm": gpt(attention={"kind": "full", "qk_norm": "learned", "qk_norm_eps": 1e-3},
                           feedforward={"d_ff": 24, "activation": "relu2"}),
    "fixnorm": around({"kind": "lm", "softcap": 5.0}, embedding={"fixnorm": True}),
    "fixnorm untied": around({"kind": "lm", "bias": True}, embedding={"fixnorm": True}, tie={"output": False}),
    "narrow": around({"kind": "lm", "scale": 0.25}, embedding={"size": 6, "scale": True, "norm": True}),
    "scale of a decoder of another width": around({"kind": "lm", "scale": "inverse_sqrt_d"}, tie={"output": False},
                                                  decoder={**STACK, "d_model": 12}),
    "sandwich": gpt(norm={"kind": "rmsnorm", "place": "sandwich", "unit_offset": True}, residual_multiplier=0.6,
                    attention={"softcap": 1.5, "qk_norm": "unit_offset"}, positions={"kind": "alibi"}),
    "res_post": gpt(norm={"place": "res_post", "unit_offset": True}, attention={"qk_norm": "width"}, num_kv_heads=1),
    "projected first": around({"kind": "lm"}, embedding={"size": 6, "scale": 1.7, "norm": True, "project": "first"}),
    "rounded": around({"kind": "lm"}, embedding={"scale": "rounded"}),
    "mean": around({"kind": "classifier", "pooling": "mean", "num_labels": 3}, embedding={"token_types": 2}),
    "max": around({"kind": "classifier", "pooling": "max", "num_labels": 3, "pooler": False}),
    "regression": around({"kind": "regression", "pooling": "eos"}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_every_part_of_a_model_is_computed_alike(part: str, tmp_path: Path) -> None:
    report = exported(tmp_path, PARTS[part])
    assert_same_logits(report.path, tmp_path / "run", PARTS[part]["model"], report)


def test_token_types_of_a_decoder_are_read_and_what_is_not_computed_is_an_error(tmp_path: Path) -> None:
    recipe = gpt()
    recipe["model"]["embedding"] = {"token_types": 2}
    model, run = opened(exported(tmp_path, recipe)), load(tmp_path / "run")
    given = {"input_ids": tokens(2, 9, vocabulary=12), "token_type_ids": (torch.arange(9) > 4).long().expand(2, 9)}
    with torch.no_grad():
        ours, theirs = run.model(**given).logits, model(**given).logits
    assert (ours - theirs).abs().max() <= TOLERANCE * ours.abs().max()
    found = [model.generate(**given, max_new_tokens=5, do_sample=False, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*found)
    for name in ("labels", "inputs_embeds", "position_ids", "output_hidden_states"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            model(**given, **{name: given["input_ids"]})


@pytest.mark.slow
@pytest.mark.parametrize("tie", [(True, True), (True, False), (False, True), (False, False)], ids=str)
def test_tables_are_shared_as_in_the_recipe(tie: tuple[bool, bool], tmp_path: Path) -> None:
    side = {**STACK, "d_model": 16}
    model = {"d_model": 16, "max_seq_len": 24, "tie": {"source_target": tie[0], "output": tie[1]}}
    recipe = {"arch": "transformer", "model": {**model, "encoder": side, "decoder": side}}
    report = exported(tmp_path, recipe)
    assert_same_logits(report.path, tmp_path / "run", recipe["model"], report)
    theirs = opened(report)
    shared = theirs.encoder.embedding.weight is theirs.decoder.embedding.weight
    assert (shared, theirs.head.weight is theirs.decoder.embedding.weight) == tie


@pytest.mark.slow
def test_two_vocabularies_have_two_tables(tmp_path: Path) -> None:
    side = {**STACK, "positions": {"kind": "sinusoidal", "layout": "fairseq"}}
    model = {"d_model": 16, "max_seq_len": 24, "tie": {"source_target": False, "output": True}}
    recipe = {"arch": "transformer", "model": {**model, "encoder": side, "decoder": side},
              "tokenizer": {"separate": True}, "objectives": [{"kind": "seq2seq"}]}  # fmt: skip
    report = exported(tmp_path, recipe, tokenizer=letters(), target=letters(text="ijklm "))
    given = inputs(recipe["model"])
    given["decoder_input_ids"] = given["decoder_input_ids"].clamp(max=9)
    with torch.no_grad():
        ours, theirs = load(tmp_path / "run").model(**given).logits, opened(report)(**given).logits
    assert (ours - theirs).abs().max() <= TOLERANCE * ours.abs().max()


@pytest.mark.parametrize(
    "positions",
    [one if one["kind"] == "alibi" else pytest.param(one, marks=pytest.mark.slow) for one in POSITIONS],
    ids=lambda one: "-".join(map(str, one.values())),
)
def test_a_decoder_generates_the_same_with_and_without_a_cache(positions: dict[str, Any], tmp_path: Path) -> None:
    """Prompts of different lengths in one batch, padded on the left; each alone in tformer."""
    from tformer.decoding.generate import generate
    from tformer.decoding.settings import GenerationSettings

    report = exported(tmp_path, gpt(positions=positions))
    model, run = opened(report), load(tmp_path / "run")
    tokenizer = transformers.AutoTokenizer.from_pretrained(report.path, trust_remote_code=True)
    batch = tokenizer(["ab cd", "h"], return_tensors="pt", padding=True)
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "suppress_tokens": None}
    found = [model.generate(**batch, **settings, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*found)
    for row, text in zip(found[0].tolist(), ["ab cd", "h"], strict=True):
        greedy = GenerationSettings(max_new_tokens=12, temperature=0.0, eos_id=None, context="error")
        [[ours]] = generate(run.model, [run.encode(text)], greedy, tokenizer=run.text_tokenizer)
        assert row[-12:] == list(ours.ids)


@pytest.mark.parametrize("beams", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_an_encoder_decoder_generates_what_tformer_does(beams: int, tmp_path: Path) -> None:
    from tformer.decoding.loaded import translator_of

    side = {**ORIGINAL["model"]["encoder"], "positions": {"kind": "sinusoidal", "layout": "fairseq"}}
    generation = {"beam_size": beams, "max_new_tokens": 12, "length_penalty_type": "avg", "length_penalty": 1.0}
    recipe = {**ORIGINAL, "model": {**ORIGINAL["model"], "encoder": side, "decoder": side}, "generation": generation}
    report = exported(tmp_path, recipe)
    model, run = opened(report), load(tmp_path / "run")
    tokenizer = transformers.AutoTokenizer.from_pretrained(report.path, trust_remote_code=True)
    texts = ["ab cd", "hgf"]
    written = model.generate(**tokenizer(texts, return_tensors="pt", padding=True))
    ours = translator_of(run).translate(texts)
    assert tokenizer.batch_decode(written, skip_special_tokens=True) == [best[0].text for best in ours]


def test_the_folder_is_read_again_as_the_same_model(tmp_path: Path) -> None:
    recipe = small("gpt/tiny")
    report = exported(tmp_path, recipe)
    ours, again = load(tmp_path / "run"), load(report.path)
    weights = again.model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in ours.model.state_dict().items())
    given = tokens(2, 9, vocabulary=12)
    assert torch.equal(ours.model(given).logits, again.model(given).logits)


@pytest.mark.slow
def test_transformers_saves_a_folder_that_both_read(tmp_path: Path) -> None:
    report = exported(tmp_path, small("transformer/tiny"), tokenizer=letters("seq2seq"))
    model = opened(report)
    model.save_pretrained(tmp_path / "again")
    transformers.AutoTokenizer.from_pretrained(report.path, trust_remote_code=True).save_pretrained(tmp_path / "again")
    given = inputs(small("transformer/tiny")["model"])
    with torch.no_grad():
        expected = model(**given).logits
        reopened = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
        assert torch.equal(reopened.eval()(**given).logits, expected)
        ours = load(tmp_path / "again").model(**given).logits
    assert (ours - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_the_command_says_how_to_load_the_folder(cli: Callable[..., Any], tmp_path: Path) -> None:
    checkpoint(tmp_path / "run", small("gpt/tiny"))
    outcome = cli("export", tmp_path / "run", "--out", tmp_path / "out", "--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert document["class"] == "TformerForCausalLM" and "modeling_tformer.py" in document["files"]
    assert document["load"].endswith(", trust_remote_code=True)")


def test_the_code_needs_torch_and_transformers_only(tmp_path: Path) -> None:
    report = exported(tmp_path, small("gpt/tiny"))
    lines = (report.path / "modeling_tformer.py").read_text().splitlines()
    roots = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert roots <= {"__future__", "math", "collections", "functools", "typing", "torch", "transformers"}
    assert json.loads((report.path / "config.json").read_text())["auto_map"]["AutoConfig"].startswith(
        "modeling_tformer."
    )


def test_a_class_of_transformers_goes_before_the_own_code(tmp_path: Path) -> None:
    assert exported(tmp_path, GPT).class_name == "GPT2LMHeadModel"
    report = export_checkpoint(checkpoint(tmp_path / "again", GPT), tmp_path / "own", model_type="tformer")
    assert report.class_name == "TformerForCausalLM"
    assert_same_logits(report.path, tmp_path / "again", GPT["model"], report)


@pytest.mark.parametrize(
    ("change", "feature"),
    [
        ({"attention": {"kind": "additive"}}, "model.decoder.attention.kind: additive"),
        ({"norm": {"kind": "batchnorm"}}, "model.decoder.norm.kind: batchnorm"),
        ({"attention": {"qk_norm": "groupnorm"}}, "model.decoder.attention.qk_norm: groupnorm"),
        ({"positions": {"kind": "shaw"}}, "model.decoder.positions.kind: shaw"),
        ({"layers": {"0": {"norm": {"eps": 0.1}}}}, "model.decoder.layers"),
        ({"residual": "parallel"}, "model.decoder.residual: parallel"),
        ({"positions": {"kind": "rope", "share": 0.5}}, "model.decoder.positions.share: 0.5"),
        ({"positions": {"kind": "alibi", "rounded": True}}, "model.decoder.positions.rounded: true"),
        ({"positions": {"kind": "rope", "scaling": {"kind": "linear"}}}, "model.decoder.positions.scaling"),
    ],
    ids=["attention", "norm", "qk_norm", "positions", "layers", "residual", "share", "rounded", "scaling"],
)
@pytest.mark.parametrize("model_type", [None, "tformer"])
def test_what_the_code_lacks_is_refused_by_name(
    change: dict[str, Any], feature: str, model_type: str | None, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as error:
        export_checkpoint(checkpoint(tmp_path / "run", gpt(**change)), tmp_path / "out", model_type=model_type)
    assert f"modeling_tformer.py, the code that export can write, lacks {feature}" in error.value.message
    assert not (tmp_path / "out").exists()


# --- tokenizers of language models ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["char", "word", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bpe", "wordpiece", "unigram"))]
)
def test_a_tokenizer_without_an_end_of_text_gets_what_evaluation_tools_need(kind: str, tmp_path: Path) -> None:
    options: Any = {"model": kind, "template": "none", "vocab_size": 60, "min_frequency": 1}
    tokenizer = train_tokenizer(lambda: iter(["ab cd\nefgh. " * 20]), TokenizerOptions(**options))
    report = exported(tmp_path, GPT, tokenizer=tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(report.path)
    assert theirs.bos_token_id == theirs.eos_token_id == theirs.pad_token_id == tokenizer.special.unk
    assert any("no end of text" in note for note in report.notes)
    text = "ab cd\nef."
    assert theirs(text)["input_ids"] == tokenizer.encode(text)
    batch = theirs([text, "ab"], padding=True, padding_side="right", return_tensors="pt")
    model = getattr(transformers, report.auto_class).from_pretrained(report.path)
    with torch.no_grad():  # as lm-evaluation-harness scores a text after an empty context
        ids = torch.tensor([[theirs.bos_token_id, *theirs(text)["input_ids"]]])
        assert model(ids).logits.isfinite().all()
        alone, padded = model(torch.tensor([theirs("ab")["input_ids"]])).logits, model(**batch).logits[1]
    assert torch.allclose(alone[0], padded[batch["attention_mask"][1].bool()], atol=1e-4)


def test_newlines_of_characters_survive_decoding(tmp_path: Path) -> None:
    options: Any = {"model": "char", "template": "none"}
    tokenizer = train_tokenizer(lambda: iter(["ab\ncd "]), TokenizerOptions(**options))
    theirs = transformers.AutoTokenizer.from_pretrained(exported(tmp_path, GPT, tokenizer=tokenizer).path)
    assert theirs.decode(theirs("ab\ncd")["input_ids"], skip_special_tokens=True) == "ab\ncd"


def test_a_vocabulary_with_an_end_of_text_keeps_its_roles(tmp_path: Path) -> None:
    report = exported(tmp_path, GPT)
    theirs = transformers.AutoTokenizer.from_pretrained(report.path)
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == ("<|endoftext|>", "<|endoftext|>", "<|pad|>")
    assert not any("end of text" in note for note in report.notes)
