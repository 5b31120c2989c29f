"""Adapters of peft, both ways: the same logits there and here; what tformer has no adapters for is refused."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import tformer
from tests.interop import tiny_folders as tiny
from tformer.interop.adapters import AdaptedCheckpoint
from tformer.interop.opening import open_checkpoint
from tformer.interop.peft import export_adapters, import_adapters
from tformer.support.errors import InputError, NotFiniteError

TOLERANCE = 1e-5
IDS = torch.tensor([[5, 9, 7, 12, 6], [8, 5, 11, 6, 10]])


def llama(folder: Path, **values: Any) -> Path:
    """A decoder whose keys have fewer heads, with a gated feed-forward."""
    config = transformers.LlamaConfig(
        vocab_size=290, hidden_size=16, intermediate_size=28, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, bos_token_id=0, eos_token_id=0, **values,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    return tiny.write_folder(folder, model, tiny.bytes_tokenizer("<|endoftext|>"), eos_token="<|endoftext|>")


def tied_llama(folder: Path) -> Path:
    return llama(folder, tie_word_embeddings=True)


MAKERS: dict[str, Callable[[Path], Path]] = {
    "gpt2": tiny.gpt2, "llama": llama, "tied llama": tied_llama, "bert": tiny.bert, "t5": tiny.t5,
}  # fmt: skip
AUTO = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}


def opened(kind: str, folder: Path) -> Any:
    auto: Any = getattr(transformers, AUTO.get(kind, "AutoModelForCausalLM"))
    return auto.from_pretrained(folder).eval()


def logits(kind: str, model: Any) -> torch.Tensor:
    extra = {"decoder_input_ids": IDS} if kind == "t5" else {}
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS, **extra).logits
    return found


def loras(kind: str, base: Path, out: Path, **settings: Any) -> Path:
    """A folder as peft writes it, of a model with trained adapters on all its matrices, by this code alone."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=7, **copy.deepcopy(settings))  # peft changes the lists that it is given
    model = peft.get_peft_model(opened(kind, base), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
        elif "magnitude" in name:
            parameter.data.mul_(1.3)
        elif parameter.requires_grad and "lora_A" not in name:  # saved in full
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.eval().save_pretrained(out)
    torch.save(logits(kind, model), out / "logits.pt")
    return out


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2, DoRA of all": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "use_dora": True}),
    "llama": ("llama", {}),
    "llama, all": ("llama", {"target_modules": "all-linear", "use_rslora": True}),
    "llama, gate": ("llama", {"target_modules": ["gate_proj", "k_proj"]}),
    "bert": ("bert", {}),
    "bert, ranks": ("bert", {"use_rslora": True, "rank_pattern": {"key": 3}, "alpha_pattern": {"key": 5},
                             "target_modules": ["query", "key", "attention.output.dense"]}),
    "bert, head": ("bert", {"modules_to_save": ["transform.dense"]}),
    "gpt2, biases": ("gpt2", {"bias": "all"}),
    "gpt2, a layer in full": ("gpt2", {"modules_to_save": ["c_fc", "ln_f"]}),
    "bert, output": ("bert", {"modules_to_save": ["decoder"]}),
    "t5, output": ("t5", {"modules_to_save": ["lm_head"]}),
    **{f"{kind}, {', '.join(names)}{', tied' if ties else ''}":
       (kind, {"modules_to_save": names} | ({"ensure_weight_tying": True} if ties else {}))
       for kind, both in (("gpt2", ["wte", "lm_head"]), ("tied llama", ["embed_tokens", "lm_head"]),
                          ("llama", ["embed_tokens", "lm_head"]), ("bert", ["word_embeddings", "decoder"]))
       for names in (both[:1], both[1:], both) for ties in (False, True)},
    "t5": ("t5", {}),
    "t5, all": ("t5", {"target_modules": ["q", "k", "v", "o", "wi", "wo"], "use_dora": True}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft_in_both_directions(case: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    kind, settings = CASES[case]
    base = MAKERS[kind](tmp_path / "base")
    theirs = loras(kind, base, tmp_path / "adapter", **settings)
    expected = torch.load(theirs / "logits.pt", weights_only=True)
    assert not torch.allclose(expected, logits(kind, opened(kind, base)), atol=1e-3)
    import_adapters(theirs, tmp_path / "run", base=str(base))
    extra = {"decoder_input_ids": IDS} if kind == "t5" else {}
    with torch.no_grad():
        ours = tformer.load(tmp_path / "run").model(input_ids=IDS, **extra).logits
    assert (ours - expected).abs().max() < TOLERANCE
    export_adapters(open_checkpoint(tmp_path / "run"), tmp_path / "back")
    back = peft.PeftModel.from_pretrained(opened(kind, base), tmp_path / "back").eval()
    assert (logits(kind, back) - expected).abs().max() < TOLERANCE


def trained_here(kind: str, cli: Callable[..., Any], tmp_path: Path, *words: object) -> None:
    """Train adapters with the options, export them, and compare the logits in peft with those here."""
    peft = pytest.importorskip("peft")
    base, data = MAKERS[kind](tmp_path / "base"), tmp_path / "data.tsv"
    pairs = [f"{one}\t{other}" for one, other in zip(tiny.SENTENCES, tiny.SENTENCES[1:], strict=False)]
    data.write_text("source\ttarget\n" + "\n".join(pairs) + "\n")
    if kind != "t5":
        data = tmp_path / "data.txt"
        data.write_text("\n".join(tiny.SENTENCES * 3) + "\n")
    common = ("--lora", 3, "--data", data, "--max-steps", 8, "--lr", 0.05, "--precision", "fp32")
    sets = ("--set", "training.valid_beam_size=0", *words)
    outcome = cli("train", "--init-from", base, *common, *sets, "--out", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    outcome = cli("export", tmp_path / "run", "--to", "peft", "--out", tmp_path / "adapter", "--json")
    assert outcome.code == 0 and json.loads(outcome.out)["modules"] > 0, outcome.err
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Found missing adapter keys")  # of modules that have none here
        there = peft.PeftModel.from_pretrained(opened(kind, base), tmp_path / "adapter").eval()
    extra = {"decoder_input_ids": IDS} if kind == "t5" else {}
    with torch.no_grad():
        here = tformer.load(tmp_path / "run").model(input_ids=IDS, **extra).logits
    assert (logits(kind, there) - here).abs().max() < TOLERANCE
    import_adapters(tmp_path / "adapter", tmp_path / "again", base=str(base))
    with torch.no_grad():
        again = tformer.load(tmp_path / "again").model(input_ids=IDS, **extra).logits
    assert (again - here).abs().max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKERS)
def test_adapters_that_are_trained_here_load_in_peft(kind: str, cli: Callable[..., Any], tmp_path: Path) -> None:
    trained_here(kind, cli, tmp_path, "--set", "lora.dora=true" if kind == "llama" else "lora.dropout=0.1")


FACTORS = "has no matrix inside its layers for"


@pytest.mark.parametrize(("kind", "settings", "message"), [
    ("gpt2", {"target_modules": ["c_attn", "wte"]}, f"{FACTORS} transformer.wte"),
    ("gpt2", {"target_modules": ["c_attn", "wte"], "use_dora": True}, f"{FACTORS} transformer.wte"),
    ("llama", {"target_modules": ["q_proj", "lm_head"]}, f"{FACTORS} lm_head"),
    ("tied llama", {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}, f"{FACTORS} lm_head"),
    ("gpt2", {"trainable_token_indices": [3, 5]}, "trainable_token_indices: tformer has no such adapters"),
    ("bert", {"trainable_token_indices": {"word_embeddings": [3]}}, "trainable_token_indices: tformer has no such"),
    ("t5", {"modules_to_save": ["shared"]}, "has shared.weight and encoder.embed_tokens.weight as one tensor, found"),
    ("t5", {"modules_to_save": ["embed_tokens"]}, "has decoder.embed_tokens.weight and shared.weight as one tensor"),
])  # fmt: skip
def test_what_peft_does_to_tables_alone_is_refused_by_name(
    kind: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    base = MAKERS[kind](tmp_path / "base")
    theirs = loras(kind, base, tmp_path / "adapter", **settings)
    with pytest.raises(InputError) as error:
        import_adapters(theirs, tmp_path / "run", base=str(base))
    assert message in error.value.message and not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "train"), [
    *((kind, "embedding.weight") for kind in ("gpt2", "tied llama", "llama", "bert", "t5")),
    ("llama", "heads.lm.weight"), ("bert", "heads.masked_lm.*"), ("bert", "heads.masked_lm.bias"), ("gpt2", "bias"),
])  # fmt: skip
def test_a_run_that_trains_tensors_in_full_is_the_same_in_peft(
    kind: str, train: str, cli: Callable[..., Any], tmp_path: Path
) -> None:
    trained_here(kind, cli, tmp_path, "--set", f"lora.train=[{train}]")


# --- without peft -----------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A hand-written adapter of the values of GPT-2's first layer, and its base in `base`."""
    tiny.gpt2(tmp_path / "base")
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 6}))
    name = "base_model.model.transformer.h.0.attn.c_attn"
    size = open_checkpoint(tmp_path / "base").recipe.model.d_model
    torch.manual_seed(2)
    tensors = {f"{name}.lora_A.weight": torch.randn(2, size), f"{name}.lora_B.weight": torch.randn(3 * size, 2)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_is_the_change_s_b_a_and_comes_back_as_it_was(adapter: Path, tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    report = import_adapters(adapter, run, base=str(base))
    assert (report.class_name, report.modules) == ("GPT2LMHeadModel", 1)
    checkpoint, name = open_checkpoint(run), "decoder.blocks.0.self_attention.qkv.weight"
    assert isinstance(checkpoint, AdaptedCheckpoint)
    tensors = load_file(adapter / "adapter_model.safetensors")
    a, b = (tensors[key] for key in sorted(tensors))
    change = checkpoint.weights()[name] - open_checkpoint(base).weights()[name]
    assert torch.allclose(change, 3.0 * b @ a, atol=1e-5)
    export_adapters(checkpoint, tmp_path / "back")
    back = load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert back.keys() == tensors.keys() and all(torch.equal(back[key], tensors[key]) for key in back)
    config = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["fan_in_fan_out"]) == (2, 6.0, True)


@pytest.mark.parametrize("uses", [("transformer.wte",), ("lm_head",), ("transformer.wte", "lm_head")])
def test_a_saved_use_of_a_tied_table_leaves_the_other_one_as_it_was(
    uses: tuple[str, ...], adapter: Path, tmp_path: Path
) -> None:
    before = open_checkpoint(tmp_path / "base").weights()
    table = before["embedding.weight"] + 1
    file = adapter / "adapter_model.safetensors"
    save_file(load_file(file) | {f"base_model.model.{use}.weight": table.clone() for use in uses}, file)
    edited(adapter, modules_to_save=list(uses))
    import_adapters(adapter, tmp_path / "run", base=str(tmp_path / "base"))
    after = tformer.load(tmp_path / "run").model.state_dict()
    names = {"transformer.wte": "embedding.weight", "lm_head": "heads.lm.weight"}
    assert all(torch.equal(after[name], table if use in uses else before[name]) for use, name in names.items())
    export_adapters(open_checkpoint(tmp_path / "run"), tmp_path / "back")
    back = load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert back.keys() == load_file(file).keys()
    config = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert set(config["modules_to_save"]) == set(uses) and config.get("ensure_weight_tying", False) == (len(uses) == 2)


def test_different_adapters_of_one_module_become_one_of_the_joint_rank(adapter: Path, tmp_path: Path) -> None:
    import_adapters(adapter, tmp_path / "run", base=str(tmp_path / "base"))
    checkpoint = open_checkpoint(tmp_path / "run")
    assert isinstance(checkpoint, AdaptedCheckpoint)
    own = checkpoint.own.weights()
    [first] = [name for name in own if name.endswith("adapter.a")]
    own[first] += torch.randn_like(own[first])
    checkpoint.own.weights = lambda: own  # type: ignore[method-assign]
    export_adapters(checkpoint, tmp_path / "back")
    config = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {"transformer.h.0.attn.c_attn": 6}
    assert config["alpha_pattern"] == {"transformer.h.0.attn.c_attn": 18.0}
    back = load_file(tmp_path / "back" / "adapter_model.safetensors")
    a, b = (back[key] for key in sorted(back))
    name = "decoder.blocks.0.self_attention.qkv.weight"
    change = checkpoint.weights()[name] - open_checkpoint(tmp_path / "base").weights()[name]
    assert torch.allclose(change, 3.0 * b @ a, atol=1e-4)


def edited(adapter: Path, **values: Any) -> None:
    tiny.edit_json(adapter / "adapter_config.json", lambda config: config.update(values))


def with_tensor(adapter: Path, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor of the first layer beside those of an adapter, or in the place of one."""
    file = adapter / "adapter_model.safetensors"
    save_file(load_file(file) | {f"base_model.model.transformer.h.0.{name}": tensor}, file)


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda folder: edited(folder, peft_type="IA3"), "peft_type: found 'IA3', expected 'LORA'"),
    (lambda folder: edited(folder, lora_bias=True), "lora_bias: tformer has no such adapters"),
    (lambda folder: edited(folder, init_lora_weights="pissa_niter_4"), "init_lora_weights: pissa_niter_4 changes the"),
    (lambda folder: edited(folder, r="8"), "adapter_config.json: r: found '8', expected int"),
    (lambda folder: edited(folder, r=64), "lora_A is [2, 16], expected [64, 16]"),
    (lambda folder: edited(folder, rank_pattern={"c_attn": 3}), "lora_A is [2, 16], expected [3, 16]"),
    (lambda folder: edited(folder, r=64, rank_pattern={"c_fc": 2}), "lora_A is [2, 16], expected [64, 16]"),
    (lambda folder: edited(folder, r=None), "adapter_config.json: r: found null, expected a number"),
    (lambda folder: edited(folder, lora_alpha=None), "adapter_config.json: lora_alpha: found null, expected a number"),
    (lambda folder: edited(folder, target_modules=["nothing"]), "target_modules: expected transformer.h.0.attn.c_attn"),
    (lambda folder: edited(folder, target_modules=["attn"]), "target_modules: expected transformer.h.0.attn.c_attn"),
    (lambda folder: edited(folder, modules_to_save=["ln_f"]), "has no tensor transformer.ln_f."),
    (lambda folder: edited(folder, kasa_config={"beta": 1.0}), "kasa_config: tformer has no such adapters"),
    (lambda folder: edited(folder, lora_alpha=0), "lora_alpha: found 0, expected a number above 0"),
    (lambda folder: edited(folder, lora_alpha=1e300), "lora.alpha: found 1e+300, expected at most 3.4e+38"),
    (lambda folder: edited(folder, lora_dropout=1), "lora.dropout: found 1.0, expected less than 1"),
    (lambda folder: edited(folder, alpha_pattern={"(": 3}), "alpha_pattern: found '(', expected names of modules"),
    (lambda folder: edited(folder, alpha_pattern={"(.*)*!": 3}), "alpha_pattern: found '(.*)*!', expected names"),
    (lambda folder: edited(folder, alpha_pattern={".*c_attn": "3"}), "alpha_pattern: .*c_attn: found '3', expected"),
    (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
    (lambda folder: save_file({}, folder / "adapter_model.safetensors"), "has no tensor of an adapter"),
    (lambda folder: save_file({"base_model.model.lm_head.lora_A.weight": torch.ones(2, 3)},
                              folder / "adapter_model.safetensors"), "has no matrix inside its layers for lm_head"),
    (lambda folder: save_file({"base_model.model.transformer.h.0.attn.c_attn.lora_A.weight": torch.ones(2, 3)},
                              folder / "adapter_model.safetensors"), "c_attn has no lora_B"),
    (lambda folder: save_file({f"base_model.model.transformer.h.0.attn.c_attn.lora_{one}.weight": torch.ones(2, 3)
                               for one in "AB"}, folder / "adapter_model.safetensors"), "lora_A is [2, 3], expected ["),
    (lambda folder: save_file({f"base_model.model.transformer.h.0.attn.c_attn.lora_{one}.weight": torch.ones(0, 16)
                               for one in "AB"}, folder / "adapter_model.safetensors"), "lora_A is [0, 16], expected"),
    (lambda folder: edited(folder, use_dora=True), "c_attn has no lora_magnitude_vector"),
    (lambda folder: with_tensor(folder, "attn.c_attn.lora_magnitude_vector", torch.ones(48)),
     "c_attn has a lora_magnitude_vector, and use_dora is False"),
    (lambda folder: with_tensor(folder, "attn.c_attn.weight", torch.ones(16, 48)), "and, in full, the matrix that"),
    (lambda folder: with_tensor(folder, "mlp.c_fc.weight", torch.ones(3)), "c_fc.weight is [3], expected [16, 24]"),
    (lambda folder: with_tensor(folder, "mlp.gate.weight", torch.ones(3)), "has no tensor transformer.h.0.mlp.gate"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused_in_one_line(spoil: Any, message: str, adapter: Path, tmp_path: Path) -> None:
    spoil(adapter)
    with pytest.raises(InputError) as error:
        import_adapters(adapter, tmp_path / "run", base=str(tmp_path / "base"))
    assert message in str(error.value.message) and not (tmp_path / "run").exists()


def test_numbers_that_are_not_finite_are_refused(adapter: Path, tmp_path: Path) -> None:
    with_tensor(adapter, "attn.c_attn.lora_A.weight", torch.full((2, 16), torch.nan))
    with pytest.raises(NotFiniteError, match="lora_A"):
        import_adapters(adapter, tmp_path / "run", base=str(tmp_path / "base"))


PATTERNS = ["c_attn", "attn.c_attn", "c_att", "^transformer.h.0.attn.c_attn$", "^c_attn", "h.0.*", "^transformer.*attn",
            r"transformer\.h\.0\..*", "mlp.*", "c_attn$", "", ".*"]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_of_names_matches_as_in_peft(pattern: str, adapter: Path, tmp_path: Path) -> None:
    path = "transformer.h.0.attn.c_attn"
    is_found = re.match(rf"(.*\.)?({pattern})$", path) is not None  # peft.utils.other.get_pattern_key
    edited(adapter, alpha_pattern={pattern: 30})
    import_adapters(adapter, tmp_path / "run", base=str(tmp_path / "base"))
    name = "decoder.blocks.0.self_attention.qkv.weight"
    change = open_checkpoint(tmp_path / "run").weights()[name] - open_checkpoint(tmp_path / "base").weights()[name]
    tensors = load_file(adapter / "adapter_model.safetensors")
    a, b = (tensors[key] for key in sorted(tensors))
    assert torch.allclose(change, (15.0 if is_found else 3.0) * b @ a, atol=1e-4)


def test_commands_name_the_missing_base_and_refuse_a_whole_model(
    adapter: Path, cli: Callable[..., Any], tmp_path: Path
) -> None:
    outcome = cli("import", adapter, "--out", tmp_path / "run")
    assert outcome.code == 2 and "adapter names no base" in outcome.err
    outcome = cli("generate", adapter, "--prompt", "a")
    assert outcome.code == 2 and "is an adapter of peft, not a run" in outcome.err
    assert f"tformer import {adapter} --base MODEL" in " ".join(outcome.err.split())
    outcome = cli("import", tmp_path / "base", "--base", tmp_path / "base", "--out", tmp_path / "run")
    assert outcome.code == 2 and "--base goes with an adapter of peft" in outcome.err
    for words in (["--dry-run"], ["--dtype", "bf16"], ["--tokenizer", adapter / "none.json"], ["--ignore", "r"]):
        outcome = cli("import", adapter, "--base", tmp_path / "base", "--out", tmp_path / "run", *words)
        assert outcome.code == 2 and f"{words[0]} has no meaning with an adapter" in outcome.err
    outcome = cli("export", tmp_path / "base", "--to", "peft", "--out", tmp_path / "back")
    assert outcome.code == 2 and "has no adapters" in outcome.err
    outcome = cli("import", adapter, "--base", tmp_path / "base", "--out", tmp_path / "run")
    assert outcome.code == 0 and "adapters of 1 module of GPT2LMHeadModel, 2 tensors" in outcome.err + outcome.out
    outcome = cli("generate", tmp_path / "run", "--prompt", "the cat", "--max-new-tokens", 2)
    assert outcome.code == 0, outcome.err
