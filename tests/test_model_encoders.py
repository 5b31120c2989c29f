"""BERT, RoBERTa, ELECTRA and ViT: given the weights of `transformers`' classes, the one model computes what they do.

Every parameter of the reference is randomised and has to be used by the mapping, one row is padded, and the norms' eps
is large, so that a wrong one shows. RoBERTa's padding has a position of its own: there, padded slots are compared too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tformer.build import build_model
from tformer.model import Transformer
from tformer.recipe.model import Model

VOCABULARY, WIDTH, LENGTH, LAYERS, LABELS, EPS, PAD = 29, 16, 12, 2, 3, 0.02, 1
Names = dict[str, str | tuple[str, ...]]  # ours -> theirs; several are stacked, as in the fused qkv matrix

SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "layer_norm_eps": EPS,
    "num_labels": LABELS,
}
TOKENS = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
BERT_BLOCK = {
    "self_attention.out": "attention.output.dense",
    "self_attention_norm": "attention.output.LayerNorm",
    "feedforward.up": "intermediate.dense",
    "feedforward.down": "output.dense",
    "feedforward_norm": "output.LayerNorm",
}
VIT_BLOCK = {
    "self_attention.out": "attention.o_proj",
    "self_attention_norm": "layernorm_before",
    "feedforward.up": "mlp.fc1",
    "feedforward.down": "mlp.fc2",
    "feedforward_norm": "layernorm_after",
}


def randomised(reference: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.normal_(1.0 if "norm" in name.lower() else 0.0, 0.3)
    return reference.eval()


def make(place: str, heads: list[dict[str, Any]], *, positions: dict[str, Any] | None = None, **values: Any) -> Model:
    stack = {
        "num_layers": LAYERS,
        "num_heads": 4,
        "positions": positions or {"kind": "learned"},
        "feedforward": {"d_ff": 24, "activation": "gelu"},
        "norm": {"place": place, "eps": EPS},
        "final_norm": place == "pre",
    }
    return Model.model_validate({"d_model": WIDTH, "encoder": stack, "heads": heads, **values})


def make_bert(heads: list[dict[str, Any]], *, token_types: int = 2, size: int | None = None, **values: Any) -> Model:
    embedding = {"norm": True, "token_types": token_types, "size": size}
    return make("post", heads, embedding=embedding, **{"vocab_size": VOCABULARY, "max_seq_len": LENGTH, **values})


def both(modules: dict[str, str]) -> Names:
    """Weight and bias of each module."""
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in modules.items() for kind in ("weight", "bias")}


def blocks(theirs: str, names: dict[str, str], projection: str, fused: Sequence[str]) -> Names:
    found: Names = {}
    for layer in range(LAYERS):
        our, their = f"encoder.blocks.{layer}.", theirs.format(layer)
        found |= both({our + name: their + there for name, there in names.items()})
        for kind in ("weight", "bias"):
            parts = (f"{their}{projection.format(part)}.{kind}" for part in fused)
            found[f"{our}self_attention.qkv.{kind}"] = tuple(parts)
    return found


def bert_body(prefix: str) -> Names:
    tables = f"{prefix}.embeddings."
    return {
        "embedding.weight": f"{tables}word_embeddings.weight",
        "embedding.token_types": f"{tables}token_type_embeddings.weight",
        "encoder.positions.weight": f"{tables}position_embeddings.weight",
        **both({"embedding.norm": f"{tables}LayerNorm"}),
        **blocks(f"{prefix}.encoder.layer.{{}}.", BERT_BLOCK, "attention.self.{}", ("query", "key", "value")),
    }


def loaded(model: Model, reference: nn.Module, names: Names) -> Transformer:
    """Our model with the reference's weights; no parameter of either may be left over."""
    built, theirs = build_model(model).eval(), dict(reference.named_parameters())  # tied ones once
    asked = {name: [there] if isinstance(there, str) else list(there) for name, there in names.items()}
    assert {name for parts in asked.values() for name in parts} == set(theirs)
    assert set(asked) == {name for name, _ in built.named_parameters()}
    with torch.no_grad():
        for name, parts in asked.items():
            parameter, value = built.get_parameter(name), torch.cat([theirs[there] for there in parts])
            assert parameter.numel() == value.numel(), name
            parameter.copy_(value.view(parameter.shape))
    return built


def assert_agree(ours: Tensor, theirs: Tensor, mask: Tensor | None = None) -> None:
    assert ours.shape == theirs.shape
    if mask is not None:
        ours, theirs = ours[mask.bool()], theirs[mask.bool()]
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max().clamp(min=1.0)


MASK = (torch.arange(9) < torch.tensor([[9], [6]])).long()


def batch(mask: Tensor = MASK) -> dict[str, Tensor]:
    """Two rows, one of them padded; padding has the pad id, which is where RoBERTa looks for it."""
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


def typed_batch() -> dict[str, Tensor]:
    return {**batch(), "token_type_ids": torch.tensor([[0] * 4 + [1] * 5] * 2)}


def test_bert_for_pre_training() -> None:
    reference = randomised(transformers.BertForPreTraining(transformers.BertConfig(**TOKENS)))
    modules = {
        "heads.masked_lm.dense": "cls.predictions.transform.dense",
        "heads.masked_lm.norm": "cls.predictions.transform.LayerNorm",
        "heads.next_sentence.pooler": "bert.pooler.dense",
        "heads.next_sentence.project": "cls.seq_relationship",
    }
    names = {**bert_body("bert"), **both(modules), "heads.masked_lm.bias": "cls.predictions.bias"}
    model = loaded(make_bert([{"kind": "masked_lm"}, {"kind": "next_sentence"}]), reference, names)
    ours, theirs = model(**typed_batch()), reference(**typed_batch())
    assert_agree(ours.head("masked_lm"), theirs.prediction_logits, MASK)
    assert_agree(ours.head("next_sentence"), theirs.seq_relationship_logits)


def test_bert_for_sequence_classification() -> None:
    reference = randomised(transformers.BertForSequenceClassification(transformers.BertConfig(**TOKENS)))
    modules = {"heads.classifier.pooler": "bert.pooler.dense", "heads.classifier.project": "classifier"}
    head = {"kind": "classifier", "num_labels": LABELS}
    model = loaded(make_bert([head]), reference, {**bert_body("bert"), **both(modules)})
    assert_agree(model(**typed_batch()).logits, reference(**typed_batch()).logits)


def roberta_config() -> Any:
    sizes = {**TOKENS, "max_position_embeddings": LENGTH + 2}
    return transformers.RobertaConfig(**sizes, type_vocab_size=1, pad_token_id=PAD)


def make_roberta(head: dict[str, Any]) -> Model:
    positions = {"kind": "learned", "ids": "nonpad_cumsum", "offset": PAD + 1}
    return make_bert([head], token_types=1, positions=positions)


def roberta_for_masked_lm() -> tuple[Transformer, nn.Module]:
    reference = randomised(transformers.RobertaForMaskedLM(roberta_config()))
    modules = {"heads.masked_lm.dense": "lm_head.dense", "heads.masked_lm.norm": "lm_head.layer_norm"}
    names = {**bert_body("roberta"), **both(modules), "heads.masked_lm.bias": "lm_head.bias"}
    return loaded(make_roberta({"kind": "masked_lm"}), reference, names), reference


@pytest.mark.parametrize("mask", [MASK, MASK.flip(1)], ids=["right", "left"])
def test_roberta_for_masked_lm(mask: Tensor) -> None:
    model, reference = roberta_for_masked_lm()
    assert_agree(model(**batch(mask)).logits, reference(**batch(mask)).logits)


def test_roberta_reads_as_many_tokens_as_it_has_positions() -> None:
    model, reference = roberta_for_masked_lm()
    ids = torch.randint(3, VOCABULARY, (2, LENGTH))
    assert_agree(model(ids).logits, reference(ids).logits)
    with pytest.raises(ValueError, match=f"{LENGTH} learned positions, the input needs {LENGTH + 1}"):
        model(torch.randint(3, VOCABULARY, (2, LENGTH + 1)))


def test_roberta_for_sequence_classification() -> None:
    reference = randomised(transformers.RobertaForSequenceClassification(roberta_config()))
    modules = {"heads.classifier.pooler": "classifier.dense", "heads.classifier.project": "classifier.out_proj"}
    head = {"kind": "classifier", "num_labels": LABELS}
    model = loaded(make_roberta(head), reference, {**bert_body("roberta"), **both(modules)})
    assert_agree(model(**batch()).logits, reference(**batch()).logits)


ELECTRA_BRIDGE = {"embedding.project": "electra.embeddings_project"}


def electra_config() -> Any:
    return transformers.ElectraConfig(**TOKENS, embedding_size=8)


def test_electra_for_pre_training() -> None:
    """The discriminator: one logit per token."""
    reference = randomised(transformers.ElectraForPreTraining(electra_config()))
    modules = {
        **ELECTRA_BRIDGE,
        "heads.replaced_token.dense": "discriminator_predictions.dense",
        "heads.replaced_token.project": "discriminator_predictions.dense_prediction",
    }
    names = {**bert_body("electra"), **both(modules)}
    model = loaded(make_bert([{"kind": "replaced_token"}], size=8), reference, names)
    assert_agree(model(**typed_batch()).logits, reference(**typed_batch()).logits, MASK)


def test_electra_for_masked_lm() -> None:
    """The generator: the head goes down to the embeddings' width."""
    reference = randomised(transformers.ElectraForMaskedLM(electra_config()))
    modules = {
        **ELECTRA_BRIDGE,
        "heads.masked_lm.dense": "generator_predictions.dense",
        "heads.masked_lm.norm": "generator_predictions.LayerNorm",
    }
    names = {**bert_body("electra"), **both(modules), "heads.masked_lm.bias": "generator_lm_head.bias"}
    model = loaded(make_bert([{"kind": "masked_lm"}], size=8), reference, names)
    assert_agree(model(**typed_batch()).logits, reference(**typed_batch()).logits, MASK)


def test_electra_for_sequence_classification() -> None:
    """Its pooler's activation is gelu, not BERT's tanh."""
    reference = randomised(transformers.ElectraForSequenceClassification(electra_config()))
    modules = {
        **ELECTRA_BRIDGE,
        "heads.classifier.pooler": "classifier.dense",
        "heads.classifier.project": "classifier.out_proj",
    }
    head = {"kind": "classifier", "num_labels": LABELS, "activation": "gelu"}
    model = loaded(make_bert([head], size=8), reference, {**bert_body("electra"), **both(modules)})
    assert_agree(model(**typed_batch()).logits, reference(**typed_batch()).logits)


@pytest.mark.parametrize("stem", ["conv", "linear"])
def test_vit_for_image_classification(stem: str) -> None:
    images = {"image_size": 12, "patch_size": 4, "num_channels": 3}
    reference = randomised(transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, **images)))
    modules = {"encoder.final_norm": "vit.layernorm", "heads.classifier.project": "classifier"}
    names: Names = {
        "embedding.cls": "vit.embeddings.cls_token",
        "embedding.weight": "vit.embeddings.patch_embeddings.projection.weight",
        "embedding.bias": "vit.embeddings.patch_embeddings.projection.bias",
        "encoder.positions.weight": "vit.embeddings.position_embeddings",
        **both(modules),
        **blocks("vit.layers.{}.", VIT_BLOCK, "attention.{}_proj", "qkv"),
    }
    head = {"kind": "classifier", "num_labels": LABELS, "pooler": False}
    patches = {"image_size": 12, "size": 4, "channels": 3, "stem": stem}
    model = loaded(make("pre", [head], patches=patches), reference, names)
    pixels = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    assert_agree(model(pixel_values=pixels).logits, reference(pixel_values=pixels).logits)
