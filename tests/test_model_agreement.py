"""The one model, given the weights of independent implementations, computes what they compute.

Every parameter of the reference is randomised (fresh biases and gains would hide swapped norms), one row is padded.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tformer.build import build_model
from tformer.model import Transformer
from tformer.recipe.model import Model

VOCABULARY = 29


def randomised(reference: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.normal_(1.0 if "norm" in name.lower() or "ln_" in name else 0.0, 0.2)
    reference.eval()
    return dict(reference.state_dict())


def make(**values: Any) -> Transformer:
    return build_model(Model.model_validate({"vocab_size": VOCABULARY, "max_seq_len": 24, **values})).eval()


def load(model: Transformer, weights: dict[str, Tensor]) -> None:
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= set(model.tied_names())


def assert_logits_agree(ours: Tensor, theirs: Tensor, real: Tensor | None = None) -> None:
    if real is not None:
        ours, theirs = ours[real], theirs[real]
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max().clamp(min=1.0)


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def stacked(weights: dict[str, Tensor], pattern: str, *names: str) -> Tensor:
    return torch.cat([weights[pattern.format(name)] for name in names])


def test_gpt2() -> None:
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=24, n_embd=16, n_layer=2, n_head=4)
    reference = transformers.GPT2LMHeadModel(config)
    theirs = randomised(reference)
    block = {"norm": {"eps": 1e-5}, "feedforward": {"activation": "gelu_tanh"}, "positions": {"kind": "learned"}}
    model = make(d_model=16, decoder={"num_layers": 2, "num_heads": 4, **block})
    names = {
        "ln_1": "self_attention_norm",
        "attn.c_attn": "self_attention.qkv",
        "attn.c_proj": "self_attention.out",
        "ln_2": "feedforward_norm",
        "mlp.c_fc": "feedforward.up",
        "mlp.c_proj": "feedforward.down",
    }
    weights = {
        "embedding.weight": theirs["transformer.wte.weight"],
        "decoder.positions.weight": theirs["transformer.wpe.weight"],
    }
    for kind in ("weight", "bias"):
        weights[f"decoder.final_norm.{kind}"] = theirs[f"transformer.ln_f.{kind}"]
        for layer in range(2):
            for their_name, our_name in names.items():
                value = theirs[f"transformer.h.{layer}.{their_name}.{kind}"]
                transposed = kind == "weight" and ".c_" in their_name  # GPT-2's Conv1D is stored [in, out]
                weights[f"decoder.blocks.{layer}.{our_name}.{kind}"] = value.T if transposed else value
    load(model, weights)
    ids = tokens(3, 11)
    assert_logits_agree(model(ids).logits, reference(ids).logits)
    mask = (torch.arange(11) >= torch.tensor([[0], [3], [6]])).long()  # left padding
    places = (mask.cumsum(1) - 1).clamp(min=0)
    expected = reference(ids, attention_mask=mask, position_ids=places).logits
    assert_logits_agree(model(ids, attention_mask=mask).logits, expected, mask.bool())


@pytest.mark.parametrize("scaled", [False, True])
def test_llama(scaled: bool) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    }
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        max_position_embeddings=24,
        tie_word_embeddings=False,
        rope_parameters={"rope_theta": 500.0, **(scaling if scaled else {"rope_type": "default"})},
    )
    reference = transformers.LlamaForCausalLM(config)
    theirs = randomised(reference)
    ours_scaling = {"factor": 8.0, "original_max_seq_len": 8} if scaled else None
    stack = {
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "positions": {"kind": "rope", "layout": "halves", "base": 500.0, "scaling": ours_scaling},
        "attention": {"kind": "full", "qkv_bias": False, "out_bias": False},
        "feedforward": {"d_ff": 24, "activation": "silu", "gated": True, "bias": False},
        "norm": {"kind": "rmsnorm", "eps": 1e-5},
    }
    model = make(d_model=16, decoder=stack, tie={"output": False})
    weights = {
        "embedding.weight": theirs["model.embed_tokens.weight"],
        "decoder.final_norm.weight": theirs["model.norm.weight"],
        "heads.lm.weight": theirs["lm_head.weight"],
    }
    for layer in range(2):
        their, our = f"model.layers.{layer}.", f"decoder.blocks.{layer}."
        weights |= {
            f"{our}self_attention_norm.weight": theirs[f"{their}input_layernorm.weight"],
            f"{our}self_attention.qkv.weight": stacked(theirs, their + "self_attn.{}_proj.weight", "q", "k", "v"),
            f"{our}self_attention.out.weight": theirs[f"{their}self_attn.o_proj.weight"],
            f"{our}feedforward_norm.weight": theirs[f"{their}post_attention_layernorm.weight"],
            f"{our}feedforward.up.weight": stacked(theirs, their + "mlp.{}_proj.weight", "gate", "up"),
            f"{our}feedforward.down.weight": theirs[f"{their}mlp.down_proj.weight"],
        }
    load(model, weights)
    ids = tokens(2, 20)
    assert_logits_agree(model(ids).logits, reference(ids).logits)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_t5(version: str) -> None:
    gated = version == "1.1"
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=6,
        d_ff=24,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,
        feed_forward_proj="gated-gelu" if gated else "relu",
        tie_word_embeddings=not gated,
        decoder_start_token_id=0,
    )
    reference = transformers.T5ForConditionalGeneration(config)
    theirs = randomised(reference)
    stack = {
        "num_layers": 2,
        "num_heads": 4,
        "head_dim": 6,
        "positions": {"kind": "t5_bias", "buckets": 8, "max_distance": 12},
        "attention": {"kind": "full", "qkv_bias": False, "out_bias": False, "scale": 1.0},
        "feedforward": {"d_ff": 24, "activation": "gelu_tanh" if gated else "relu", "gated": gated, "bias": False},
        "norm": {"kind": "rmsnorm", "eps": 1e-6},
    }
    heads = [{"kind": "lm", "scale": "none" if gated else "inverse_sqrt_d"}]
    model = make(d_model=16, encoder=stack, decoder=stack, heads=heads, tie={"output": not gated})
    weights = {"embedding.weight": theirs["shared.weight"]}
    if gated:
        weights["heads.lm.weight"] = theirs["lm_head.weight"]
    for side in ("encoder", "decoder"):
        table = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        weights |= {f"{side}.positions.weight": theirs[table]}
        weights |= {f"{side}.final_norm.weight": theirs[f"{side}.final_layer_norm.weight"]}
        for layer in range(2):
            their, our = f"{side}.block.{layer}.layer.", f"{side}.blocks.{layer}."
            last = 2 if side == "decoder" else 1
            ups = [f"{their}{last}.DenseReluDense.wi{part}.weight" for part in (("_0", "_1") if gated else ("",))]
            weights |= {
                f"{our}self_attention_norm.weight": theirs[f"{their}0.layer_norm.weight"],
                f"{our}self_attention.qkv.weight": stacked(theirs, their + "0.SelfAttention.{}.weight", "q", "k", "v"),
                f"{our}self_attention.out.weight": theirs[f"{their}0.SelfAttention.o.weight"],
                f"{our}feedforward_norm.weight": theirs[f"{their}{last}.layer_norm.weight"],
                f"{our}feedforward.up.weight": torch.cat([theirs[name] for name in ups]),
                f"{our}feedforward.down.weight": theirs[f"{their}{last}.DenseReluDense.wo.weight"],
            }
            if side == "decoder":
                cross = their + "1.EncDecAttention.{}.weight"
                weights |= {
                    f"{our}cross_attention_norm.weight": theirs[f"{their}1.layer_norm.weight"],
                    f"{our}cross_attention.q.weight": theirs[cross.format("q")],
                    f"{our}cross_attention.kv.weight": stacked(theirs, cross, "k", "v"),
                    f"{our}cross_attention.out.weight": theirs[cross.format("o")],
                }
    load(model, weights)
    source, target = tokens(2, 19), tokens(2, 15, seed=2)  # longer than the last exact bucket
    mask = (torch.arange(19) < torch.tensor([[19], [13]])).long()
    expected = reference(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    assert_logits_agree(model(source, attention_mask=mask, decoder_input_ids=target).logits, expected)


def test_bert() -> None:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=24,
    )
    reference = transformers.BertForPreTraining(config)
    theirs = randomised(reference)
    stack = {
        "num_layers": 2,
        "num_heads": 4,
        "feedforward": {"d_ff": 24, "activation": "gelu"},
        "norm": {"place": "post", "eps": 1e-12},
        "final_norm": False,
    }
    heads = [{"kind": "masked_lm"}, {"kind": "next_sentence"}]
    model = make(d_model=16, encoder=stack, heads=heads, embedding={"norm": True, "token_types": 2})
    names = {
        "self_attention.out": "attention.output.dense",
        "self_attention_norm": "attention.output.LayerNorm",
        "feedforward.up": "intermediate.dense",
        "feedforward.down": "output.dense",
        "feedforward_norm": "output.LayerNorm",
    }
    weights = {
        "embedding.weight": theirs["bert.embeddings.word_embeddings.weight"],
        "embedding.token_types": theirs["bert.embeddings.token_type_embeddings.weight"],
        "encoder.positions.weight": theirs["bert.embeddings.position_embeddings.weight"],
        "heads.masked_lm.bias": theirs["cls.predictions.bias"],
    }
    for kind in ("weight", "bias"):
        weights |= {
            f"embedding.norm.{kind}": theirs[f"bert.embeddings.LayerNorm.{kind}"],
            f"heads.masked_lm.dense.{kind}": theirs[f"cls.predictions.transform.dense.{kind}"],
            f"heads.masked_lm.norm.{kind}": theirs[f"cls.predictions.transform.LayerNorm.{kind}"],
            f"heads.next_sentence.pooler.{kind}": theirs[f"bert.pooler.dense.{kind}"],
            f"heads.next_sentence.project.{kind}": theirs[f"cls.seq_relationship.{kind}"],
        }
        for layer in range(2):
            their, our = f"bert.encoder.layer.{layer}.", f"encoder.blocks.{layer}."
            fused = stacked(theirs, f"{their}attention.self.{{}}.{kind}", "query", "key", "value")
            weights |= {f"{our}self_attention.qkv.{kind}": fused}
            weights |= {f"{our}{ours}.{kind}": theirs[f"{their}{name}.{kind}"] for ours, name in names.items()}
    load(model, weights)
    ids, types = tokens(2, 9), torch.tensor([[0] * 4 + [1] * 5] * 2)
    mask = (torch.arange(9) < torch.tensor([[9], [6]])).long()
    expected = reference(input_ids=ids, attention_mask=mask, token_type_ids=types)
    out = model(ids, attention_mask=mask, token_type_ids=types)
    assert_logits_agree(out.head("masked_lm"), expected.prediction_logits, mask.bool())
    assert_logits_agree(out.head("next_sentence"), expected.seq_relationship_logits)
