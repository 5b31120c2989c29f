"""Initialization, fused projections, and tables shared by two models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tformer.build import build_model
from tformer.model import Transformer
from tformer.nn.init import tie_embeddings
from tformer.recipe.model import Model


def make(init: dict[str, Any], *, both: bool = False, **values: Any) -> Transformer:
    torch.manual_seed(0)
    stack = {"num_layers": 2, "num_heads": 4, **values.pop("stack", {})}
    model = {"d_model": 64, "max_seq_len": 32, "vocab_size": 300, "decoder": stack, "init": init, **values}
    return build_model(Model.model_validate(model | ({"encoder": stack} if both else {})))


def test_normal_with_gpt2s_residual_scale() -> None:
    model = make({"kind": "normal", "std": 0.02})
    block = model.decoder.blocks[0]
    assert block.self_attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.feedforward.up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for output in (block.self_attention.out, block.feedforward.down):
        assert output.weight.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.05)
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.decoder.positions.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert all((p == 0).all() for name, p in model.named_parameters() if name.endswith("bias"))
    assert all((p == 1).all() for name, p in model.named_parameters() if name.endswith("norm.weight"))


def test_residual_scale_counts_the_cross_attention() -> None:
    model = make({"std": 0.02}, both=True)
    down = [stack.blocks[1].feedforward.down.weight.std().item() for stack in (model.encoder, model.decoder)]
    assert down == pytest.approx([0.02 / math.sqrt(4), 0.02 / math.sqrt(6)], rel=0.05)


def test_residual_scale_can_be_switched_off() -> None:
    model = make({"std": 0.02, "residual_scale": False})
    assert model.decoder.blocks[0].feedforward.down.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_zero_out_makes_every_block_the_identity() -> None:
    model = make({"zero_out": True}).eval()
    taps = model(torch.randint(0, 300, (1, 8)), taps=["decoder.embedding", "decoder.1.hidden"]).taps
    assert torch.equal(taps["decoder.embedding"], taps["decoder.1.hidden"])


def test_xavier_treats_fused_projections_one_by_one() -> None:
    stack = {"feedforward": {"gated": True, "d_ff": 96}, "num_kv_heads": 2}
    model = make({"kind": "xavier", "residual_scale": False}, stack=stack)
    block = model.decoder.blocks[0]
    query, key, value = block.self_attention.qkv.weight.split([64, 32, 32])
    bounds = [(query, 64), (key, 32), (value, 32), (block.self_attention.out.weight, 64)]
    bounds += [(part, 96) for part in block.feedforward.up.weight.chunk(2)] + [(block.feedforward.down.weight.T, 96)]
    for weight, rows in bounds:
        limit = math.sqrt(6 / (64 + rows))
        assert weight.abs().max() <= limit
        assert weight.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.06)


def test_scaled_keeps_unit_variance() -> None:
    block = make({"kind": "scaled", "residual_scale": False}).decoder.blocks[0]
    assert block.feedforward.up.weight.std().item() == pytest.approx(1 / 8, rel=0.05)
    assert block.feedforward.down.weight.std().item() == pytest.approx(1 / 16, rel=0.05)


def test_embedding_and_output_std() -> None:
    model = make({"embedding_std": 1.0, "output_std": 0.001}, tie={"output": False})
    assert model.embedding.weight.std().item() == pytest.approx(1.0, rel=0.05)
    assert model.heads["lm"].weight.std().item() == pytest.approx(0.001, rel=0.05)
    assert (make({"output_std": 0.0}, tie={"output": False}).heads["lm"].weight == 0).all()


def test_fixnorm_table_is_uniform_and_small() -> None:
    table = make({}, embedding={"fixnorm": True}).embedding.weight
    assert table.abs().max() <= 0.01
    assert table.std().item() == pytest.approx(0.01 / math.sqrt(3), rel=0.05)


def test_scalenorm_starts_at_root_d() -> None:
    model = make({}, stack={"norm": {"kind": "scalenorm"}})
    assert model.decoder.final_norm.weight.item() == pytest.approx(8.0)


def test_tied_output_keeps_the_embeddings_spread() -> None:
    model = make({"std": 0.05, "output_std": 3.0})
    assert model.heads["lm"].weight.std().item() == pytest.approx(0.05, rel=0.05)


def model(head: str, *, d_model: int = 16, size: int | None = 8, token_types: int = 2, **values: Any) -> Transformer:
    section = {
        "d_model": d_model,
        "max_seq_len": 12,
        "vocab_size": 23,
        "embedding": {"size": size, "token_types": token_types, "norm": True},
        "encoder": {"num_layers": 1, "num_heads": 2, "feedforward": {"d_ff": 16}},
        "heads": [{"kind": head}],
    }
    return build_model(Model.model_validate(section | values))


def test_tables_types_positions_and_the_tied_output_become_the_owners() -> None:
    generator, discriminator = model("masked_lm", d_model=8), model("replaced_token")
    tied = tie_embeddings(generator, discriminator)
    assert tied == {
        "embedding.weight": "embedding.weight",
        "heads.masked_lm.weight": "embedding.weight",
        "embedding.token_types": "embedding.token_types",
        "encoder.positions.weight": "encoder.positions.weight",
    }
    for name, there in tied.items():
        assert generator.get_parameter(name) is discriminator.get_parameter(there)
    shared = {id(p) for p in generator.parameters()} & {id(p) for p in discriminator.parameters()}
    assert len(shared) == 3


def test_what_differs_in_shape_stays_the_followers_own() -> None:
    assert tie_embeddings(model("masked_lm", size=4), model("replaced_token")) == {}
    assert tie_embeddings(model("masked_lm", token_types=1), model("replaced_token")).keys() == {
        "embedding.weight",
        "heads.masked_lm.weight",
        "encoder.positions.weight",
    }
    longer = tie_embeddings(model("masked_lm", max_seq_len=13), model("replaced_token", token_types=0))
    assert longer.keys() == {"embedding.weight", "heads.masked_lm.weight"}


def test_an_output_of_its_own_stays_so() -> None:
    tied = tie_embeddings(model("masked_lm", tie={"output": False}), model("replaced_token"))
    assert "heads.masked_lm.weight" not in tied


def test_the_follower_computes_and_learns_with_the_owners_tables() -> None:
    generator, discriminator = model("masked_lm", d_model=8), model("replaced_token")
    tie_embeddings(generator, discriminator)
    ids = torch.randint(0, 23, (2, 5))
    before = generator(ids).logits
    with torch.no_grad():
        discriminator.embedding.weight.normal_()
    assert (generator(ids).logits - before).abs().max() > 1e-3
    generator(ids).logits.sum().backward()
    assert discriminator.embedding.weight.grad is not None
    assert generator.tied_names() == {"heads.masked_lm.weight": "embedding.weight"}
