"""Two models, one set of embeddings."""

from __future__ import annotations

from typing import Any

import torch

from tformer.build import build_model
from tformer.model import Transformer
from tformer.nn.tying import tie_embeddings
from tformer.recipe.model import Model


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
