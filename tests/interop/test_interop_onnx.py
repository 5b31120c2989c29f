"""`tformer export --to onnx`: what onnxruntime computes is what tformer computes, for every batch and length."""

from __future__ import annotations

import importlib.util
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.interop.exports import GPT, ORIGINAL, SIZES, checkpoint, letters, nothing_but, random_weights
from tests.interop.parity import imported, randomized, saved
from tformer.build import build_model
from tformer.cli.export import ExportOptions
from tformer.interop import to_onnx
from tformer.interop.exporting import Tokenizers
from tformer.interop.to_onnx import TOLERANCE, export_onnx, graphs_of, refusal, refuse_unwritten, write_graphs
from tformer.loading import load
from tformer.model import Transformer
from tformer.nn.classification_heads import MultipleChoiceHeadOptions, SpanHeadOptions
from tformer.recipe.load import recipe_from_yaml
from tformer.support.errors import InputError

CLASSIFIER: dict[str, Any] = {"kind": "classifier", "num_labels": 3}
BERT: dict[str, Any] = {
    "arch": "bert",
    "model": {
        "d_model": 16,
        "max_seq_len": 24,
        "embedding": {"norm": True, "token_types": 2},
        "encoder": {**SIZES, "norm": {"place": "post"}, "final_norm": False},
        "heads": [CLASSIFIER],
    },
    "objectives": [{"kind": "classification"}],
}


def built(values: dict[str, Any], **model: Any) -> Transformer:
    section = recipe_from_yaml(json.dumps(values), name="test").model
    return build_model(section.model_copy(update=model), vocab_size=12).eval()


def axes(model: Transformer, **options: Any) -> dict[str, tuple[dict[str, tuple[str | int, ...]], list[str]]]:
    """File -> ({input: shape}, outputs)."""
    return {
        name: (dict(zip(graph.names, (each.axes for each in graph.inputs), strict=True)), graph.outputs)
        for name, graph in graphs_of(model, **options).items()
    }


TOKENS = ("batch", "sequence")


def test_an_encoder_is_one_file_with_the_inputs_of_its_tokenizer() -> None:
    inputs = {"input_ids": TOKENS, "attention_mask": TOKENS, "token_type_ids": TOKENS}
    assert axes(built(BERT)) == {"model.onnx": (inputs, ["logits"])}


def test_spans_have_two_outputs_and_choices_an_axis() -> None:
    assert axes(built(BERT, heads=(SpanHeadOptions(),)))["model.onnx"][1] == ["start_logits", "end_logits"]
    [graph] = graphs_of(built(BERT, heads=(MultipleChoiceHeadOptions(),))).values()
    assert {each.axes for each in graph.inputs} == {("batch", "num_choices", "sequence")}
    assert run(graph, {name: torch.ones(2, 3, 5, dtype=torch.long) for name in graph.names})["logits"].shape == (2, 3)


def test_a_decoder_is_one_file_whose_past_may_be_empty() -> None:
    [(name, (inputs, outputs))] = axes(built(GPT)).items()
    assert name == "model.onnx" and inputs["attention_mask"] == ("batch", "total")
    slots = [f"{layer}.{part}" for layer in (0, 1) for part in ("key", "value")]
    past = [f"past_key_values.{slot}" for slot in slots]
    assert list(inputs) == ["input_ids", "attention_mask", "position_ids", *past]
    assert inputs["past_key_values.1.value"] == ("batch", 2, "past", 8)
    assert outputs == ["logits", *(f"present.{slot}" for slot in slots)]
    plain = {"input_ids": TOKENS, "attention_mask": TOKENS, "position_ids": TOKENS}
    assert axes(built(GPT), cache=False) == {"model.onnx": (plain, ["logits"])}


def test_an_encoder_decoder_is_two_parts_and_the_steps_behind_a_past() -> None:
    found = axes(built(ORIGINAL))
    assert found["encoder_model.onnx"] == ({"input_ids": TOKENS, "attention_mask": TOKENS}, ["last_hidden_state"])
    parts = [f"{side}.{part}" for side in ("decoder", "encoder") for part in ("key", "value")]
    slots = [f"{layer}.{part}" for layer in (0, 1) for part in parts]
    first, outputs = found["decoder_model.onnx"]
    assert list(first) == ["encoder_attention_mask", "input_ids", "encoder_hidden_states"]
    assert outputs == ["logits", *(f"present.{slot}" for slot in slots)]
    later, outputs = found["decoder_with_past_model.onnx"]
    assert list(later) == ["encoder_attention_mask", "input_ids", *(f"past_key_values.{slot}" for slot in slots)]
    assert outputs == ["logits", *(f"present.{slot}" for slot in slots if "decoder" in slot)]
    without = axes(built(ORIGINAL), cache=False)
    assert list(without) == ["encoder_model.onnx", "decoder_model.onnx"]
    assert without["decoder_model.onnx"] == (first, ["logits"])


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("values", [GPT, ORIGINAL, BERT], ids=["decoder", "encoder-decoder", "encoder"])
def test_the_function_of_every_graph_is_the_models(values: dict[str, Any], cache: bool) -> None:
    """Without ONNX: steps behind a past give the logits of one pass over all tokens."""
    model = built(values)
    graphs = graphs_of(model, cache=cache)
    generator = torch.Generator().manual_seed(1)
    ids, mask = torch.randint(12, (2, 7), generator=generator), torch.ones(2, 7, dtype=torch.long)
    mask[0, :2] = 0
    source = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        if values is ORIGINAL:
            expected = model(ids, attention_mask=mask, decoder_input_ids=ids).logits
            found = logits_by_steps(graphs, source, ids) if cache else logits_at_once(graphs, source, ids)
        elif values is GPT and cache:
            expected = model(ids, attention_mask=mask).logits
            found = decoder_logits(graphs["model.onnx"], ids, mask)
        else:
            expected = model(ids, attention_mask=mask).logits
            given = {**source, "position_ids": positions(mask), "token_type_ids": torch.zeros_like(ids)}
            found = run(graphs["model.onnx"], given)["logits"]
    assert (found - expected).abs().max() < 1e-5


def positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(dim=1) - 1).clamp(min=0)


def run(graph: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs of a `Graph`, or of a session of onnxruntime."""
    if isinstance(graph, torch.nn.Module):
        return dict(zip(graph.outputs, graph(tuple(given[name] for name in graph.names)), strict=True))
    outputs = [each.name for each in graph.get_outputs()]
    found = graph.run(outputs, {name: given[name].numpy() for name in inputs_of(graph)})
    return {name: torch.from_numpy(array) for name, array in zip(outputs, found, strict=True)}


def inputs_of(graph: Any) -> list[str]:
    return graph.names if isinstance(graph, torch.nn.Module) else [each.name for each in graph.get_inputs()]


def as_past(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("present", "past_key_values"): one for name, one in found.items() if name != "logits"}


def decoder_logits(graph: Any, ids: Tensor, mask: Tensor, *, heads: int = 2, width: int = 8) -> Tensor:
    """A prompt of three tokens behind an empty past, then one token at a time."""
    names = [name for name in inputs_of(graph) if name.startswith("past")]
    past, parts, start = {name: torch.zeros(len(ids), heads, 0, width) for name in names}, [], 0
    for end in range(3, ids.shape[1] + 1):
        given = {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end], **past}
        found = run(graph, given | {"position_ids": positions(mask)[:, start:end]})
        past, start = as_past(found), end
        parts.append(found["logits"])
    return torch.cat(parts, dim=1)


def logits_by_steps(graphs: Any, source: dict[str, Tensor], ids: Tensor) -> Tensor:
    """The first token with the encoder's output, then one at a time with its keys and values."""
    memory = run(graphs["encoder_model.onnx"], source)["last_hidden_state"]
    mask = {"encoder_attention_mask": source["attention_mask"]}
    first = {"input_ids": ids[:, :1], "encoder_hidden_states": memory, **mask}
    found = run(graphs["decoder_model.onnx"], first)
    past, parts = as_past(found), [found["logits"]]
    for at in range(1, ids.shape[1]):
        found = run(graphs["decoder_with_past_model.onnx"], {"input_ids": ids[:, at : at + 1], **mask, **past})
        past |= as_past(found)
        parts.append(found["logits"])
    return torch.cat(parts, dim=1)


def logits_at_once(graphs: Any, source: dict[str, Tensor], ids: Tensor) -> Tensor:
    memory = run(graphs["encoder_model.onnx"], source)["last_hidden_state"]
    given = {"input_ids": ids, "encoder_hidden_states": memory, "encoder_attention_mask": source["attention_mask"]}
    return run(graphs["decoder_model.onnx"], given)["logits"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {**ORIGINAL, "model": {**ORIGINAL["model"], "heads": [CLASSIFIER]}, "objectives": BERT["objectives"]},
            "model.heads: classifier",
        ),
        ({**GPT, "model": {**GPT["model"], "decoder": {**SIZES, "attention": {"kind": "performer"}}}},
            "model.decoder.attention.kind: performer"),
        (GPT, None),
    ],
    ids=["classifier", "performer", "nothing"],
)  # fmt: skip
def test_a_part_that_is_not_written_is_named(values: dict[str, Any], told: str | None) -> None:
    found = refusal(recipe_from_yaml(json.dumps(values), name="test").model)
    assert found == told if told is None else str(found).startswith(told)
    with pytest.raises(InputError, match=f"does not write {told}") if told else nullcontext():
        refuse_unwritten(recipe_from_yaml(json.dumps(values), name="test").model)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"to": "onnx", "dtype": "bf16"}, "of Hugging Face and GGUF only"),
        ({"to": "onnx", "dtype": "q8_0"}, "of GGUF only"),
    ],
)
def test_options_of_other_formats_are_refused(options: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=told):
        ExportOptions(out=tmp_path / "x", **options).check()


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnx" else find(name))
    with pytest.raises(InputError, match="--to onnx needs the package onnx, which is not installed"):
        export_onnx(checkpoint(tmp_path / "run"), tmp_path / "out")


# --- with onnxruntime ------------------------------------------------------------------------------------------------

has_onnx = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
needs_onnx = pytest.mark.skipif(not has_onnx, reason="needs the extra onnx")


def sessions(folder: Path) -> dict[str, Any]:
    import onnxruntime

    return {path.name: onnxruntime.InferenceSession(str(path)) for path in folder.glob("*.onnx")}


@needs_onnx
@pytest.mark.slow
def test_a_folder_holds_the_graph_and_what_transformers_reads(tmp_path: Path) -> None:
    checkpoint(tmp_path / "run", GPT)
    report = export_onnx(load_checkpoint(tmp_path / "run"), tmp_path / "out")
    assert report.how_to_load() == f'optimum.onnxruntime.ORTModelForCausalLM.from_pretrained("{tmp_path / "out"}")'
    assert report.dtype == "fp32" and report.num_bytes == (tmp_path / "out" / "model.onnx").stat().st_size
    assert {"model.onnx", "config.json", "tokenizer.json", "tokenizer_config.json"} <= set(report.files)
    assert nothing_but(tmp_path / "out", *report.files)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "gpt2"
    model = load(tmp_path / "run").model
    ids, mask = torch.randint(10, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
    [session] = sessions(tmp_path / "out").values()
    assert (decoder_logits(session, ids, mask) - expected).abs().max() < TOLERANCE


def load_checkpoint(folder: Path) -> Any:
    from tformer.interop.opening import open_checkpoint

    return open_checkpoint(folder)


@needs_onnx
@pytest.mark.slow
def test_an_encoder_decoder_translates_in_steps(tmp_path: Path) -> None:
    export_onnx(checkpoint(tmp_path / "run", ORIGINAL), tmp_path / "out")
    model = load(tmp_path / "run").model
    source = {"input_ids": torch.randint(10, (3, 6)), "attention_mask": torch.ones(3, 6, dtype=torch.long)}
    source["attention_mask"][1, 4:] = 0
    ids = torch.randint(10, (3, 8))
    with torch.no_grad():
        expected = model(**source, decoder_input_ids=ids).logits
    assert (logits_by_steps(sessions(tmp_path / "out"), source, ids) - expected).abs().max() < TOLERANCE


@needs_onnx
@pytest.mark.slow
def test_eight_bits_are_smaller_and_near(tmp_path: Path) -> None:
    wide = {**BERT, "model": {**BERT["model"], "d_model": 64}}
    drawn = random_weights(wide, Tokenizers(letters(), None))
    weights = {name: one * 0.2 if one.dim() == 2 else one for name, one in drawn.items()}  # scores as after training
    run_ = checkpoint(tmp_path / "run", wide, weights=weights)
    exact = export_onnx(run_, tmp_path / "fp32")
    report = export_onnx(run_, tmp_path / "int8", dtype="int8")
    assert report.dtype == "int8" and report.files == exact.files and report.num_bytes < 0.6 * exact.num_bytes
    ids = torch.randint(10, (4, 9))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    near, far = (run(sessions(tmp_path / name)["model.onnx"], given)["logits"] for name in ("int8", "fp32"))
    assert 0 < (near - far).abs().max() < 0.1 * far.abs().max()


@needs_onnx
@pytest.mark.slow
def test_a_graph_with_other_numbers_is_refused_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_onnx, "TOLERANCE", -1.0)
    with pytest.raises(InputError, match=r"logits of model\.onnx differs by"):
        export_onnx(checkpoint(tmp_path / "run", BERT), tmp_path / "out")
    assert nothing_but(tmp_path, "run")


@needs_onnx
@pytest.mark.slow
def test_the_command_writes_a_folder(cli: Any, tmp_path: Path) -> None:
    checkpoint(tmp_path / "run", GPT)
    options = ("--to", "onnx", "--no-cache", "--out", tmp_path / "out", "--json")
    report = json.loads(cli("export", tmp_path / "run", *options).out)
    assert "use_cache=False" in " ".join(report["notes"]) and "model.onnx" in report["files"]
    assert inputs_of(sessions(tmp_path / "out")["model.onnx"]) == ["input_ids", "attention_mask", "position_ids"]
    assert cli("export", tmp_path / "run", "--to", "onnx", "--out", tmp_path / "out").code == 2


ENCODERS = ("Bert", "Roberta", "DistilBert", "Electra", "Albert", "MPNet", "ModernBert", "DebertaV2", "BigBird")
DECODERS = (
    *("OPT", "Bloom", "GPTNeoX", "GPTJ", "Phi", "StableLm", "Phi3", "SmolLM3", "Falcon", "Olmo", "Olmo2", "Granite"),
    *("GPTNeo", "GPTBigCode", "XGLM", "Gemma", "Gemma2", "Starcoder2"),
)
PAIRS = ("T5", "MT5", "UMT5", "Bart", "MBart", "Pegasus", "Blenderbot", "BlenderbotSmall", "M2M100")
CLASSES: dict[str, tuple[str, dict[str, Any]]] = (
    {f"{name}ForMaskedLM": (name, {}) for name in (*ENCODERS, "Longformer")}
    | {f"BertFor{task}": ("Bert", {}) for task in ("PreTraining", "TokenClassification", "QuestionAnswering")}
    | {f"{name}ForSequenceClassification": (name, {}) for name in ("Bert", "ModernBert", "Longformer")}
    | {"BertForMultipleChoice": ("Bert", {}), "BertModel": ("Bert", {}), "ElectraForPreTraining": ("Electra", {})}
    | {"ViTForImageClassification": ("ViT", {}), "GPT2LMHeadModel": ("GPT2", {})}
    | {f"{name}ForCausalLM": (name, {}) for name in DECODERS}
    | {f"{name}ForCausalLM": (name, {"head_dim": 6}) for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
    | {"Gemma3ForCausalLM": ("Gemma3Text", {}), "MarianMTModel": ("Marian", {})}
    | {"FalconForCausalLM with ALiBi": ("Falcon", {"alibi": True, "new_decoder_architecture": False})}
    | {f"{name}ForConditionalGeneration": (name, {}) for name in PAIRS}
    | {
        "LEDForConditionalGeneration": (
            "LED",
            {f"max_{side}_position_embeddings": 32 for side in ("encoder", "decoder")},
        )
    }
)


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_is_equal_at_lengths_beyond_those_of_the_trace(kind: str, tmp_path: Path) -> None:
    import transformers

    from tests.interop.tiny_models import config_of

    name, values = CLASSES[kind]
    theirs = randomized(getattr(transformers, kind.split()[0])(config_of(name, **values)))
    model, foreign = imported(saved(theirs, tmp_path / "theirs"))
    assert refusal(foreign.model) is None
    model.requires_grad_(False)
    graphs = graphs_of(model)
    (tmp_path / "out").mkdir()
    write_graphs(tmp_path / "out", graphs, exact=tmp_path / "out")
    found = sessions(tmp_path / "out")
    longer = {"batch": 3, "num_choices": 6, "sequence": 13, "past": 7, "total": 20, "source": 17}
    for file, graph in graphs.items():
        inputs = graph.example(longer)
        outputs = run(found[file], dict(zip(graph.names, inputs, strict=True)))
        with torch.no_grad():
            for output, ours in zip(graph.outputs, graph(inputs), strict=True):
                assert (outputs[output] - ours).abs().max() < TOLERANCE * max(1.0, float(ours.abs().max())), output


@needs_onnx
@pytest.mark.slow
def test_buckets_of_far_distances_are_those_of_the_model(tmp_path: Path) -> None:
    """A logarithm that is rounded otherwise would move a distance to another bucket."""
    positions = {"kind": "t5_bias", "buckets": 32, "max_distance": 128}
    section = {**BERT["model"], "max_seq_len": 512, "encoder": {**SIZES, "positions": positions}}
    model = built({**BERT, "model": section})
    with torch.no_grad():
        model.encoder.positions.weight.normal_()  # type: ignore[union-attr]
    graphs = graphs_of(model.requires_grad_(False))
    write_graphs(tmp_path, graphs, exact=tmp_path)
    [graph] = graphs.values()
    inputs = graph.example({"batch": 1, "sequence": 300})
    theirs = run(sessions(tmp_path)["model.onnx"], dict(zip(graph.names, inputs, strict=True)))["logits"]
    with torch.no_grad():
        assert (theirs - graph(inputs)[0]).abs().max() < TOLERANCE
