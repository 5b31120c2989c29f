"""Encoders from BERT to ModernBERT, every class there and back.

RoBERTa's padding has a position of its own, so there the logits of padding are compared too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.interop.parity import assert_agree, assert_parity, exported, imported, randomized, saved, tokens
from tests.interop.tiny_models import LEFT, MASK, SIZES, VOCABULARY, batch, make
from tformer.interop.architectures import ARCHITECTURES
from tformer.model import Transformer
from tformer.nn.attention.bigbird_blocks import Blocks

MODEL_TYPES = {"Camembert": "camembert", "XLMRoberta": "xlm-roberta"}  # of classes that others go before
ROBERTAS = ("Roberta", *MODEL_TYPES)
NO_TYPES = ("DistilBert", "MPNet", "ModernBert", "DebertaV2")
UNTIED = {"tie_word_embeddings": False}

# case: (name, task and values of a class)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"bert, {name}": ("Bert", "MaskedLM", {"hidden_act": name}) for name in ("gelu", "relu", "gelu_new", "silu")},
    **{name: (name, "MaskedLM", {}) for name in ROBERTAS},
    "distilbert": ("DistilBert", "MaskedLM", {"activation": "relu"}),
    # The file holds the positions of both kinds.
    "distilbert, sinusoidal": ("DistilBert", "MaskedLM", {"activation": "relu", "sinusoidal_pos_embds": True}),
    "distilbert, untied": ("DistilBert", "MaskedLM", UNTIED),
    "electra, untied": ("Electra", "MaskedLM", {**UNTIED, "embedding_size": 20}),
    "albert": ("Albert", "MaskedLM", {}),
    "albert, one group": ("Albert", "MaskedLM", {"num_hidden_groups": 1, "hidden_act": "relu"}),
    "albert, no shared layers": ("Albert", "MaskedLM", {"num_hidden_groups": 5}),
    "longformer": ("Longformer", "MaskedLM", {}),
    "longformer, one window": ("Longformer", "MaskedLM", {"attention_window": 8}),
    "bigbird": ("BigBird", "MaskedLM", {"rescale_embeddings": True}),
    "bigbird, full": ("BigBird", "MaskedLM", {"attention_type": "original_full", "use_bias": False}),
    "deberta": ("DebertaV2", "MaskedLM", {}),
    "deberta, convolution": ("DebertaV2", "MaskedLM", {"conv_kernel_size": 3, "conv_act": "gelu"}),
    "deberta, own projections": ("DebertaV2", "MaskedLM", {"share_att_key": False, "norm_rel_ebd": "none"}),
    "deberta, c2p, all distances": (
        "DebertaV2",
        "MaskedLM",
        {"pos_att_type": "c2p", "position_buckets": -1, "share_att_key": False, "max_relative_positions": 7},
    ),
    "deberta, p2c": ("DebertaV2", "MaskedLM", {"pos_att_type": ["p2c"], "position_biased_input": True}),
    "deberta, plain attention": (
        "DebertaV2",
        "MaskedLM",
        {"relative_attention": False, "pos_att_type": None, "position_biased_input": True, "norm_rel_ebd": "none"},
    ),
    "modernbert": ("ModernBert", "MaskedLM", {}),
    "modernbert, untied, full layers": (
        "ModernBert",
        "MaskedLM",
        {**UNTIED, "layer_types": ["full_attention"] * 5, "decoder_bias": False, "classifier_activation": "relu"},
    ),
    "modernbert, local first, biases": (
        "ModernBert",
        "MaskedLM",
        {"layer_types": ["sliding_attention", *["full_attention"] * 2, *["sliding_attention"] * 2]}
        | dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)
        | {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 900.0}}},
    ),
    "mpnet": ("MPNet", "MaskedLM", {"max_position_embeddings": 41}),
    # The generator is the smaller model, its embeddings are the discriminator's.
    **{f"generator, {size}": ("Electra", "MaskedLM", {"embedding_size": size}) for size in (8, 20, 32)},
    **{f"discriminator, {size}": ("Electra", "PreTraining", {"embedding_size": size}) for size in (8, 20)},
    "discriminator, relu": ("Electra", "PreTraining", {"embedding_size": 20, "hidden_act": "relu"}),
}


@pytest.mark.parametrize(
    ("case", "left"),
    [(case, left) for case in CASES for left in (False, True) if not (left and case.startswith("distilbert"))],
)
def test_an_encoder_there_and_back(tmp_path: Path, case: str, left: bool) -> None:
    """RoBERTa's padded slots are compared too: they stand in the row of the padding id.

    The others count positions from the left edge, padding or not, and have to be told; DistilBERT cannot be.
    """
    mask = LEFT if left else MASK
    name, task, values = CASES[case]
    inputs = batch(mask, pad=1, types=1 if name in NO_TYPES else 3)
    places = (
        {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        if name in ("Bert", "Electra", "Albert", "BigBird", "DebertaV2")
        else {}
    )
    model, foreign = assert_parity(
        make(name, task, **values),
        inputs,
        tmp_path,
        mask=None if name in ROBERTAS else mask,
        model_type=MODEL_TYPES.get(name),
        their_inputs=inputs | places,
    )
    of_tables = {tied for tied in model.tied_names() if not tied.startswith("encoder.blocks")}
    assert bool(of_tables) == (task == "MaskedLM" and values.get("tie_word_embeddings", True))
    if name in ("ModernBert", "DebertaV2"):
        return
    size = 12 if name == "Albert" else values.get("embedding_size", 20)
    assert foreign.model.embedding.size == (None if size == 20 else size)


@pytest.mark.parametrize(
    ("name", "second"),
    [("Bert", "seq_relationship_logits"), ("BigBird", "seq_relationship_logits"), ("Albert", "sop_logits")],
)
def test_bert_for_pre_training(tmp_path: Path, name: str, second: str) -> None:
    """ALBERT predicts the order of two segments instead of the next sentence, by the same head."""
    reference, inputs = make(name, "PreTraining"), batch(types=3)
    real = MASK.bool()

    def theirs(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        found = model(**inputs)
        return torch.cat([found.prediction_logits[real].flatten(), getattr(found, second).flatten()])

    def ours(model: Transformer, inputs: Mapping[str, Tensor]) -> Tensor:
        found = model(**inputs)
        return torch.cat([found.head("masked_lm")[real].flatten(), found.head("next_sentence").flatten()])

    model, foreign = assert_parity(reference, inputs, tmp_path, theirs=theirs, ours=ours)
    assert [head.kind for head in foreign.model.heads] == ["masked_lm", "next_sentence"]
    with torch.no_grad():
        assert_agree(model(**inputs).head("next_sentence"), getattr(reference(**inputs), second))


def test_bigbird_computes_the_same_beyond_full_attention_where_the_random_blocks_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`transformers` draws none in evaluation: here it has tformer's."""
    reference, ids = make("BigBird", "MaskedLM"), tokens(2, 21, vocabulary=VOCABULARY)

    def drawn(self: Any, num_heads: int, from_seq_length: int, **_: Any) -> list[np.ndarray]:
        count = torch.full((1, 1), from_seq_length // 2)
        options = {"size": 2, "side": 1, "num_global": 1, "num_random": 1, "seed": 0, "causal": False}
        blocks = Blocks(**options, layer=self.seed, offset=torch.zeros(1, 1, dtype=torch.long), count=count)
        index, exists = blocks.random(torch.arange(1, from_seq_length // 2 - 1).unsqueeze(0))
        assert exists.all()
        return [index[0].numpy()] * num_heads

    kind = "transformers.models.big_bird.modeling_big_bird.BigBirdBlockSparseAttention"
    monkeypatch.setattr(f"{kind}._bigbird_block_rand_mask_with_head", drawn)
    _, foreign = assert_parity(reference, {"input_ids": ids}, tmp_path)
    assert reference.bert.attention_type == "block_sparse"
    (note,) = foreign.architecture.differs(foreign.model)
    assert "more than 14 tokens" in note


@pytest.mark.parametrize(
    ("name", "idle", "used"),
    [
        ("Bert", "cls.predictions.bias", "cls.predictions.decoder.bias"),
        ("Roberta", "lm_head.bias", "lm_head.decoder.bias"),
    ],
)
def test_an_untied_output_computes_with_the_bias_of_its_projection(
    tmp_path: Path, name: str, idle: str, used: str
) -> None:
    """The other bias lies idle: an export writes it twice, because the reference's loader wants both."""
    reference = randomized(make(name, "MaskedLM", tie_word_embeddings=False))
    model, foreign = imported(saved(reference, tmp_path / "original"))
    again = exported(foreign, model, tmp_path / "again")
    loaded, report = type(reference).from_pretrained(again, output_loading_info=True)  # type: ignore[attr-defined]
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(loaded.get_parameter(idle), reference.get_parameter(used))
    inputs = batch(pad=1)
    with torch.no_grad():
        expected = reference(**inputs).logits
        assert_agree(model(**inputs).logits, expected, MASK)
        assert_agree(loaded.eval()(**inputs).logits, expected, MASK)
    assert not model.tied_names()


def test_global_tokens_of_longformer_are_those_of_the_mask(tmp_path: Path) -> None:
    chosen = (torch.arange(MASK.shape[1]) % 4 == 1).long() * MASK
    assert_parity(
        make("Longformer", "MaskedLM"), {**batch(pad=1), "global_attention_mask": chosen}, tmp_path, mask=MASK
    )


@pytest.mark.parametrize("tied", [False, True])
def test_the_newer_head_of_deberta_is_read_and_written_as_the_older_one(tmp_path: Path, tied: bool) -> None:
    """`legacy: false` names the same tensors otherwise and multiplies with the embeddings, tied or not."""
    reference = randomized(make("DebertaV2", "MaskedLM", legacy=False, tie_word_embeddings=tied))
    model, foreign = imported(saved(reference, tmp_path / "original"))
    again = exported(foreign, model, tmp_path / "again")
    loaded, report = type(reference).from_pretrained(again, output_loading_info=True)  # type: ignore[attr-defined]
    assert not report["missing_keys"] and not report["unexpected_keys"] and loaded.config.legacy
    with torch.no_grad():
        expected = reference(**batch()).logits
        assert_agree(model(**batch()).logits, expected, MASK)
        assert_agree(loaded.eval()(**batch()).logits, expected, MASK)


CLASSIFIERS = [
    "Bert",
    "DistilBert",
    "Roberta",
    "Camembert",
    "XLMRoberta",
    "Electra",
    "MPNet",
    "Albert",
    "ModernBert",
    "DebertaV2",
    "Longformer",
    "BigBird",
]


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.parametrize("problem", [None, "multi_label_classification", "regression"])
def test_sequence_classification(tmp_path: Path, name: str, problem: str | None) -> None:
    labels = 1 if problem == "regression" else 5
    reference = make(name, "SequenceClassification", num_labels=labels, problem_type=problem)
    types = 1 if name in NO_TYPES else 3
    _, foreign = assert_parity(reference, batch(pad=1, types=types), tmp_path, model_type=MODEL_TYPES.get(name))
    head, *others = foreign.model.heads
    assert [one.kind for one in others] == (["pooler"] if name == "BigBird" else [])  # it has one beside every head
    assert head.kind == ("regression" if problem == "regression" else "classifier")
    assert getattr(head, "multi_label", False) == (problem == "multi_label_classification")


def answers(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """[..., 2]: the logits of where the answer starts and ends."""
    found = model(**inputs)
    if isinstance(model, Transformer):
        return found.logits
    return torch.stack([found.start_logits, found.end_logits], dim=-1)


def pairs_of_choices(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """[N, 1]: the score of each row, which `transformers` takes as the choices of one question."""
    if isinstance(model, Transformer):
        return model(**inputs).logits
    found: Tensor = model(**{name: value.unsqueeze(0) for name, value in inputs.items()}).logits
    return found.squeeze(0).unsqueeze(1)


@pytest.mark.parametrize(
    ("name", "left"),
    [(name, left) for name in CLASSIFIERS for left in (False, True) if not (left and name == "DistilBert")],
)
@pytest.mark.parametrize("task", ["TokenClassification", "QuestionAnswering"])
def test_heads_on_tokens(tmp_path: Path, name: str, left: bool, task: str) -> None:
    """DistilBERT cannot be told the positions under left padding; Longformer's question is given as a mask.

    BigBird's head of answers has further layers, which tformer lacks.
    """
    if (name, task) == ("BigBird", "QuestionAnswering"):
        assert "BigBirdForQuestionAnswering" not in ARCHITECTURES["big_bird"].classes
        return
    mask = LEFT if left else MASK
    inputs = batch(mask, pad=1, types=1 if name in NO_TYPES else 3)
    if (name, task) == ("Longformer", "QuestionAnswering"):
        inputs["global_attention_mask"] = (torch.arange(mask.shape[1]) < 4).long() * mask
    counted = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    of_tokens = task == "TokenClassification"
    read: Any = {} if of_tokens else {"theirs": answers, "ours": answers}
    model, foreign = assert_parity(
        make(name, task, **({"num_labels": 5} if of_tokens else {})),
        inputs,
        tmp_path,
        mask=None if name in ROBERTAS else mask,
        model_type=MODEL_TYPES.get(name),
        their_inputs=inputs | (counted if name in ("Bert", "Electra", "Albert", "BigBird", "DebertaV2") else {}),
        **read,
    )
    head, *others = foreign.model.heads
    assert [one.kind for one in others] == (["pooler"] if name == "BigBird" else [])
    assert foreign.class_name == f"{name}For{task}" and head.kind == ("token_classifier" if of_tokens else "span")
    with torch.no_grad():
        assert model(**inputs).logits.shape == (*MASK.shape, 5 if of_tokens else 2)


@pytest.mark.parametrize("name", ["T5", "MT5"])
def test_tokens_of_the_encoder_of_t5(tmp_path: Path, name: str) -> None:
    reference = make(name, "TokenClassification", num_labels=5, classifier_dropout=0.3)
    model_type = reference.config.model_type
    _, foreign = assert_parity(reference, batch(), tmp_path, mask=MASK, model_type=model_type)
    (head,) = foreign.model.heads
    assert (head.kind, getattr(head, "dropout", None)) == ("token_classifier", 0.3) and foreign.model.decoder is None


@pytest.mark.parametrize("name", ["Bert", "BigBird", *ROBERTAS])
def test_multiple_choice(tmp_path: Path, name: str) -> None:
    _, foreign = assert_parity(
        make(name, "MultipleChoice"),
        batch(pad=1, types=3),
        tmp_path,
        theirs=pairs_of_choices,
        ours=pairs_of_choices,
        model_type=MODEL_TYPES.get(name),
    )
    assert [head.kind for head in foreign.model.heads] == ["multiple_choice"]


@pytest.mark.parametrize(
    ("name", "task", "key", "rate"),
    [
        ("Bert", "TokenClassification", "classifier_dropout", 0.3),
        ("DistilBert", "QuestionAnswering", "qa_dropout", 0.25),
        ("Albert", "TokenClassification", "classifier_dropout_prob", 0.35),
        ("ModernBert", "QuestionAnswering", "classifier_dropout", 0.2),
        ("Bert", "QuestionAnswering", "classifier_dropout", 0.0),
        ("MPNet", "TokenClassification", "hidden_dropout_prob", None),
    ],
)
def test_dropout_of_a_head_on_tokens_is_the_one_of_its_class(
    tmp_path: Path, name: str, task: str, key: str, rate: float | None
) -> None:
    """There and back; None is the dropout of the layers."""
    _, foreign = imported(saved(make(name, task, **{key: 0.4 if rate is None else rate}), tmp_path / "original"))
    assert getattr(foreign.model.heads[0], "dropout", "none") == rate
    written = foreign.architecture.write(foreign.model, foreign.class_name)
    assert written.get(key, 0.0) == (0.4 if rate is None else rate)


def test_a_pooler_that_a_file_holds_beside_a_head_on_tokens_is_kept(tmp_path: Path) -> None:
    reference = make("Bert", "QuestionAnswering")
    reference.bert = type(reference.bert)(reference.config, add_pooling_layer=True)
    _, foreign = imported(saved(randomized(reference), tmp_path / "original"))
    assert [head.kind for head in foreign.model.heads] == ["span", "pooler"] and foreign.skipped == ()


def test_one_label_without_a_problem_type_is_a_regression(tmp_path: Path) -> None:
    _, foreign = assert_parity(make("Bert", "SequenceClassification", num_labels=1), batch(), tmp_path)
    assert foreign.model.heads[0].kind == "regression"


@pytest.mark.parametrize("pad", [0, 2, 9])
@pytest.mark.parametrize("mask", [MASK, LEFT], ids=["right", "left"])
def test_roberta_counts_positions_from_any_padding_id(tmp_path: Path, pad: int, mask: Tensor) -> None:
    reference = make("Roberta", "MaskedLM", pad_token_id=pad)
    inputs = batch(mask, pad=pad)
    inputs["input_ids"][(mask == 1) & (inputs["input_ids"] == pad)] = 10  # real tokens are no padding
    _, foreign = assert_parity(reference, inputs, tmp_path)
    assert foreign.model.max_seq_len == SIZES["max_position_embeddings"] - pad - 1


def test_roberta_reads_as_many_tokens_as_it_has_positions_after_the_padding(tmp_path: Path) -> None:
    reference = make("Roberta", "MaskedLM", max_position_embeddings=14)
    model, _ = assert_parity(reference, {"input_ids": tokens(2, 12, vocabulary=VOCABULARY)}, tmp_path)
    with pytest.raises(ValueError, match="12 learned positions, the input needs 13"):
        model(tokens(2, 13, vocabulary=VOCABULARY))
