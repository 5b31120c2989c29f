"""The original Transformer: given the weights of `torch.nn.Transformer`, the one model computes what it does.

Every parameter of the reference is randomized and has to be used by the mapping; norms have a large eps, so that a
wrong one shows; source and target differ in length, and a row of each is padded. The classes of `transformers` are
compared in tests/interop, for every family that can be imported.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tformer.build import build_model
from tformer.model import Transformer
from tformer.recipe.model import Model

VOCABULARY, WIDTH, HEADS, HIDDEN, LAYERS, EPS = 29, 16, 4, 24, 2, 0.02
SOURCE_LENGTH, TARGET_LENGTH = 19, 15
Names = dict[str, str]  # ours -> theirs


def randomized(reference: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in reference.named_parameters():
            value.normal_(1.0 if "norm" in name.lower() else 0.0, 0.3)
    return reference.eval()


def make(stack: dict[str, Any], **values: Any) -> Model:
    sizes = {"num_layers": LAYERS, "num_heads": HEADS}
    common = {"d_model": WIDTH, "max_seq_len": 24, "vocab_size": VOCABULARY}
    return Model.model_validate({**common, "encoder": sizes | stack, "decoder": sizes | stack, **values})


def both(modules: dict[str, str]) -> Names:
    """Weight and bias of each module."""
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in modules.items() for kind in ("weight", "bias")}


def real(length: int, second: int) -> Tensor:
    """A mask [2, length]: the second row has `second` real tokens."""
    return (torch.arange(length) < torch.tensor([[length], [second]])).long()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(3, VOCABULARY, (2, SOURCE_LENGTH), generator=generator)
    target = torch.randint(3, VOCABULARY, (2, TARGET_LENGTH), generator=generator)
    mask, target_mask = real(SOURCE_LENGTH, 13), real(TARGET_LENGTH, 9)
    return {
        "input_ids": source.masked_fill(mask == 0, 0),
        "attention_mask": mask,
        "decoder_input_ids": target.masked_fill(target_mask == 0, 0),
        "decoder_attention_mask": target_mask,
    }


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
    weights = {ours: theirs[there] for ours, there in names.items()}
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
    reference = randomized(Original(place=place))
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
        found, expected = model.get_parameter(name).grad, gradients[there].grad
        assert found is not None and expected is not None
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max().clamp(min=0.1), name
