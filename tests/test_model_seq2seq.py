"""T5, BART, Marian and the original Transformer: given the weights of an independent implementation, the one model
computes what it does.

The references are `transformers`' classes and `torch.nn.Transformer`. Every parameter of theirs is randomised, the
buffer of BART's and Marian's output bias too, and has to be used by the mapping; norms have a large eps, so that a
wrong one shows; source and target differ in length, and a row of each is padded.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tformer.build import build_model
from tformer.model import Transformer
from tformer.recipe.model import Model

VOCABULARY, TARGET_VOCABULARY, WIDTH, HEADS, HIDDEN, LAYERS, EPS = 29, 23, 16, 4, 24, 2, 0.02
SOURCE_LENGTH, TARGET_LENGTH = 19, 15
Names = dict[str, str | tuple[str, ...]]  # ours -> theirs; several are stacked, as in the fused qkv matrix


def randomised(reference: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    trained = {name: value for name, value in reference.named_parameters() if value.requires_grad}
    biases = {name: value for name, value in reference.named_buffers() if name == "final_logits_bias"}
    with torch.no_grad():
        for name, value in (trained | biases).items():
            value.normal_(1.0 if "norm" in name.lower() else 0.0, 0.3)
    return reference.eval()


def make(stack: dict[str, Any], **values: Any) -> Model:
    sizes = {"num_layers": LAYERS, "num_heads": HEADS}
    common = {"d_model": WIDTH, "max_seq_len": 24, "vocab_size": VOCABULARY}
    return Model.model_validate({**common, "encoder": sizes | stack, "decoder": sizes | stack, **values})


def loaded(model: Model, reference: nn.Module, names: Names) -> Transformer:
    """Our model with the reference's weights; no trained parameter of either may be left over."""
    built = build_model(model).eval()
    theirs = dict(reference.state_dict())
    trained = {name for name, value in reference.named_parameters() if value.requires_grad}
    asked = {name: [there] if isinstance(there, str) else list(there) for name, there in names.items()}
    assert {name for parts in asked.values() for name in parts} == trained | (set(theirs) & {"final_logits_bias"})
    assert set(asked) == {name for name, _ in built.named_parameters()}
    with torch.no_grad():
        for name, parts in asked.items():
            parameter, value = built.get_parameter(name), torch.cat([theirs[there] for there in parts])
            assert parameter.numel() == value.numel(), name
            parameter.copy_(value.view(parameter.shape))
    return built


def both(modules: dict[str, str]) -> Names:
    """Weight and bias of each module."""
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in modules.items() for kind in ("weight", "bias")}


def real(length: int, second: int) -> Tensor:
    """A mask [2, length]: the second row has `second` real tokens."""
    return (torch.arange(length) < torch.tensor([[length], [second]])).long()


def batch(*, pad: int = 0, target_vocabulary: int = VOCABULARY, left: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(3, VOCABULARY, (2, SOURCE_LENGTH), generator=generator)
    target = torch.randint(3, target_vocabulary, (2, TARGET_LENGTH), generator=generator)
    mask, target_mask = real(SOURCE_LENGTH, 13), real(TARGET_LENGTH, 9)
    mask = mask.flip(1) if left else mask
    return {
        "input_ids": source.masked_fill(mask == 0, pad),
        "attention_mask": mask,
        "decoder_input_ids": target.masked_fill(target_mask == 0, pad),
        "decoder_attention_mask": target_mask,
    }


def assert_agree(model: Transformer, reference: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Equal logits and equal encoder output wherever a token is real."""
    ours, theirs = model(**inputs), reference(**inputs)
    assert ours.encoder_hidden is not None
    pairs = (
        (ours.encoder_hidden, theirs.encoder_last_hidden_state, inputs["attention_mask"]),
        (ours.logits, theirs.logits, inputs["decoder_attention_mask"]),
    )
    for found, expected, mask in pairs:
        assert found.shape == expected.shape
        found, expected = found[mask.bool()], expected[mask.bool()]
        assert (found - expected).abs().max() <= 2e-5 * expected.abs().max().clamp(min=1.0)


# --- T5 ---------------------------------------------------------------------------------------------------------------


def t5_names(*, gated: bool) -> Names:
    """Each layer is a list of sub-layers, the feed-forward network last; the first layer owns the table of biases."""
    names: Names = {"embedding.weight": "shared.weight"}
    if gated:
        names["heads.lm.weight"] = "lm_head.weight"
    inner = ("wi_0", "wi_1") if gated else ("wi",)
    for side, last in (("encoder", 1), ("decoder", 2)):
        table = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        names |= {f"{side}.positions.weight": table, f"{side}.final_norm.weight": f"{side}.final_layer_norm.weight"}
        for layer in range(LAYERS):
            our, their = f"{side}.blocks.{layer}.", f"{side}.block.{layer}.layer."
            ups = tuple(f"{their}{last}.DenseReluDense.{name}.weight" for name in inner)
            names |= {
                f"{our}self_attention.qkv.weight": tuple(f"{their}0.SelfAttention.{part}.weight" for part in "qkv"),
                f"{our}self_attention.out.weight": f"{their}0.SelfAttention.o.weight",
                f"{our}self_attention_norm.weight": f"{their}0.layer_norm.weight",
                f"{our}feedforward.up.weight": ups,
                f"{our}feedforward.down.weight": f"{their}{last}.DenseReluDense.wo.weight",
                f"{our}feedforward_norm.weight": f"{their}{last}.layer_norm.weight",
            }
            if side == "decoder":
                cross = f"{their}1.EncDecAttention."
                names |= {
                    f"{our}cross_attention.q.weight": f"{cross}q.weight",
                    f"{our}cross_attention.kv.weight": (f"{cross}k.weight", f"{cross}v.weight"),
                    f"{our}cross_attention.out.weight": f"{cross}o.weight",
                    f"{our}cross_attention_norm.weight": f"{their}1.layer_norm.weight",
                }
    return names


def t5_pair(version: str) -> tuple[Transformer, nn.Module]:
    gated = version == "1.1"
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=6,
        d_ff=HIDDEN,
        num_layers=LAYERS,
        num_heads=HEADS,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,  # shorter than the source: the last bucket is used
        layer_norm_epsilon=EPS,
        feed_forward_proj="gated-gelu" if gated else "relu",
        tie_word_embeddings=not gated,
    )
    reference = transformers.T5ForConditionalGeneration(config)
    if gated:  # the constructor ties the head in any case; v1.1's files have one of its own
        reference.lm_head.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH))
    stack = {
        "head_dim": 6,
        "positions": {"kind": "t5_bias", "buckets": 8, "max_distance": 12},
        "attention": {"kind": "full", "qkv_bias": False, "out_bias": False, "scale": 1.0},
        "feedforward": {
            "d_ff": HIDDEN,
            "activation": "gelu_tanh" if gated else "relu",
            "gated": gated,
            "bias": False,
        },
        "norm": {"kind": "rmsnorm", "place": "pre", "eps": EPS},
        "final_norm": True,
    }
    heads = [{"kind": "lm", "scale": "none" if gated else "inverse_sqrt_d"}]
    model = make(stack, heads=heads, tie={"output": not gated})
    return loaded(model, randomised(reference), t5_names(gated=gated)), reference


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_t5_for_conditional_generation(version: str, left: bool) -> None:
    """Relative positions do not care on which side the padding stands."""
    assert_agree(*t5_pair(version), batch(left=left))


# --- BART and Marian --------------------------------------------------------------------------------------------------


def bart_names(*, learned: bool, shared: bool = True) -> Names:
    """`learned` positions come with a norm of the embeddings (BART), formulas without one (Marian)."""
    names: Names = {"heads.lm.bias": "final_logits_bias"}
    if shared:
        names["embedding.weight"] = "model.shared.weight"
    else:
        names["embedding.weight"] = "model.encoder.embed_tokens.weight"
        names["decoder_embedding.weight"] = "model.decoder.embed_tokens.weight"
    for side, embedding in (("encoder", "embedding"), ("decoder", "decoder_embedding")):
        if learned:
            names[f"{side}.positions.weight"] = f"model.{side}.embed_positions.weight"
            names |= both({f"{embedding}.norm": f"model.{side}.layernorm_embedding"})
        for layer in range(LAYERS):
            our, their = f"{side}.blocks.{layer}.", f"model.{side}.layers.{layer}."
            modules = {
                "self_attention.out": "self_attn.out_proj",
                "self_attention_norm": "self_attn_layer_norm",
                "feedforward.up": "fc1",
                "feedforward.down": "fc2",
                "feedforward_norm": "final_layer_norm",
            }
            if side == "decoder":
                modules |= {
                    "cross_attention.q": "encoder_attn.q_proj",
                    "cross_attention.out": "encoder_attn.out_proj",
                    "cross_attention_norm": "encoder_attn_layer_norm",
                }
            names |= both({our + ours: their + theirs for ours, theirs in modules.items()})
            for kind in ("weight", "bias"):
                names[f"{our}self_attention.qkv.{kind}"] = tuple(f"{their}self_attn.{p}_proj.{kind}" for p in "qkv")
                if side == "decoder":
                    parts = tuple(f"{their}encoder_attn.{part}_proj.{kind}" for part in "kv")
                    names[f"{our}cross_attention.kv.{kind}"] = parts
    return names


def bart_sizes(activation: str) -> dict[str, Any]:
    sizes = {"layers": LAYERS, "attention_heads": HEADS, "ffn_dim": HIDDEN}
    both_sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sizes.items()}
    return {
        "vocab_size": VOCABULARY,
        "d_model": WIDTH,
        "max_position_embeddings": 24,
        "activation_function": activation,
        "pad_token_id": 1,
        **both_sides,
    }


def set_eps(reference: nn.Module) -> None:
    """These classes have 1e-5 written in."""
    for module in reference.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = EPS


def post_norm(positions: dict[str, Any], activation: str) -> dict[str, Any]:
    return {
        "positions": positions,
        "feedforward": {"d_ff": HIDDEN, "activation": activation},
        "norm": {"kind": "layernorm", "place": "post", "eps": EPS},
        "final_norm": False,
    }


@pytest.mark.parametrize("scale", [False, True])
def test_bart_for_conditional_generation(scale: bool) -> None:
    config = transformers.BartConfig(**bart_sizes("gelu"), scale_embedding=scale)
    reference = randomised(transformers.BartForConditionalGeneration(config))
    set_eps(reference)
    stack = post_norm({"kind": "learned", "offset": 2}, "gelu")
    model = make(stack, embedding={"norm": True, "scale": scale}, heads=[{"kind": "lm", "bias": True}])
    assert_agree(loaded(model, reference, bart_names(learned=True)), reference, batch(pad=1))


@pytest.mark.parametrize("shared", [True, False], ids=["joint", "separate"])
def test_marian(shared: bool) -> None:
    """Sinusoids in halves, scaled embeddings, swish; separate vocabularies in its newer models."""
    config = transformers.MarianConfig(
        **bart_sizes("swish"),
        scale_embedding=True,
        share_encoder_decoder_embeddings=shared,
        decoder_vocab_size=VOCABULARY if shared else TARGET_VOCABULARY,
        decoder_start_token_id=1,
    )
    reference = randomised(transformers.MarianMTModel(config))
    set_eps(reference)
    model = make(
        post_norm({"kind": "sinusoidal", "layout": "halves"}, "silu"),
        embedding={"scale": True},
        heads=[{"kind": "lm", "bias": True}],
        tie={"source_target": shared, "output": True},
        target_vocab_size=None if shared else TARGET_VOCABULARY,
    )
    names = bart_names(learned=False, shared=shared)
    inputs = batch(pad=1, target_vocabulary=VOCABULARY if shared else TARGET_VOCABULARY)
    assert_agree(loaded(model, reference, names), reference, inputs)


# --- the original -----------------------------------------------------------------------------------------------------


class Original(nn.Module):
    """The paper's model around `torch.nn.Transformer`: scaled embeddings, sinusoids from the formula, a tied output."""

    def __init__(self, *, place: str) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Transformer(
            WIDTH,
            HEADS,
            LAYERS,
            LAYERS,
            HIDDEN,
            dropout=0.0,
            activation="relu",
            layer_norm_eps=EPS,
            batch_first=True,
            norm_first=place == "pre",
        )
        if place == "post":  # the paper has no norm after the last layer's own
            self.body.encoder.norm = self.body.decoder.norm = None

    def embed(self, ids: Tensor) -> Tensor:
        rows = [[0.0] * WIDTH for _ in range(ids.shape[1])]
        for position, row in enumerate(rows):
            for pair in range(WIDTH // 2):
                angle = position / 10000 ** (2 * pair / WIDTH)
                row[2 * pair], row[2 * pair + 1] = math.sin(angle), math.cos(angle)
        return self.shared(ids) * math.sqrt(WIDTH) + torch.tensor(rows)

    def forward(self, **inputs: Tensor) -> Tensor:
        padding, target_padding = inputs["attention_mask"] == 0, inputs["decoder_attention_mask"] == 0
        future = torch.ones(TARGET_LENGTH, TARGET_LENGTH, dtype=torch.bool).triu(1)
        hidden = self.body(
            self.embed(inputs["input_ids"]),
            self.embed(inputs["decoder_input_ids"]),
            tgt_mask=future,
            src_key_padding_mask=padding,
            tgt_key_padding_mask=target_padding,
            memory_key_padding_mask=padding,
        )
        return hidden @ self.shared.weight.T


def torch_names(*, place: str) -> Names:
    """Cross-attention's fused matrix is cut by the caller: torch keeps [q; k; v] in one."""
    names: Names = {"embedding.weight": "shared.weight"}
    for side in ("encoder", "decoder"):
        norms = ["self_attention_norm", "feedforward_norm"]
        if side == "decoder":
            norms.insert(1, "cross_attention_norm")
        if place == "pre":
            names |= both({f"{side}.final_norm": f"body.{side}.norm"})
        for layer in range(LAYERS):
            our, their = f"{side}.blocks.{layer}.", f"body.{side}.layers.{layer}."
            modules = {"self_attention.out": "self_attn.out_proj", "feedforward.up": "linear1"}
            modules |= {"feedforward.down": "linear2"}
            modules |= {norm: f"norm{number}" for number, norm in enumerate(norms, start=1)}
            if side == "decoder":
                modules["cross_attention.out"] = "multihead_attn.out_proj"
            names |= both({our + ours: their + theirs for ours, theirs in modules.items()})
            for kind in ("weight", "bias"):
                names[f"{our}self_attention.qkv.{kind}"] = f"{their}self_attn.in_proj_{kind}"
    return names


def with_torchs_weights(model: Model, reference: Original, *, place: str) -> Transformer:
    built, theirs = build_model(model).eval(), reference.state_dict()
    names = torch_names(place=place)
    weights = {ours: theirs[there] for ours, there in names.items() if isinstance(there, str)}
    used = set(names.values())
    for layer in range(LAYERS):
        for kind in ("weight", "bias"):
            fused = f"body.decoder.layers.{layer}.multihead_attn.in_proj_{kind}"
            q, kv = theirs[fused].split((WIDTH, 2 * WIDTH))
            attention = f"decoder.blocks.{layer}.cross_attention."
            weights |= {f"{attention}q.{kind}": q, f"{attention}kv.{kind}": kv}
            used.add(fused)
    assert used == set(theirs)
    missing, unexpected = built.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) == set(built.tied_names())
    return built


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("place", ["post", "pre"])
def test_the_original_against_torch(place: str) -> None:
    """Logits of real target positions, and every gradient of a loss on them."""
    reference = randomised(Original(place=place))
    stack = {
        "positions": {"kind": "sinusoidal", "layout": "interleaved"},
        "feedforward": {"d_ff": HIDDEN, "activation": "relu"},
        "norm": {"kind": "layernorm", "place": place, "eps": EPS},
        "final_norm": place == "pre",
    }
    model = with_torchs_weights(make(stack, embedding={"scale": True}), reference, place=place)  # type: ignore[arg-type]
    inputs = batch()
    mask = inputs["decoder_attention_mask"].bool()
    ours, theirs = model(**inputs).logits[mask], reference(**inputs)[mask]
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max().clamp(min=1.0)
    labels = torch.randint(0, VOCABULARY, (int(mask.sum()),), generator=torch.Generator().manual_seed(2))
    for logits in (ours, theirs):
        nn.functional.cross_entropy(logits, labels).backward()
    gradients = dict(reference.named_parameters())
    for name, there in torch_names(place=place).items():
        assert isinstance(there, str)
        found, expected = model.get_parameter(name).grad, gradients[there].grad
        assert found is not None and expected is not None
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max().clamp(min=0.1), name
