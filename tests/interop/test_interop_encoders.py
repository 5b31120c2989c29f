"""BERT, DistilBERT, RoBERTa (CamemBERT, XLM-RoBERTa) and ELECTRA, every class there and back.

RoBERTa's padding has a position of its own, so there the logits of padding are compared too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.interop.parity import assert_agree, assert_parity, exported, imported, randomised, saved, tokens
from tests.interop.tiny_models import LEFT, MASK, SIZES, VOCABULARY, batch, make
from tformer.model import Transformer

ROBERTAS = {"roberta": "Roberta", "camembert": "Camembert", "xlm-roberta": "XLMRoberta"}


def test_bert_for_pre_training(tmp_path: Path) -> None:
    reference, inputs = make("Bert", "PreTraining"), batch(types=3)
    real = MASK.bool()

    def theirs(model: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        found = model(**inputs)
        return torch.cat([found.prediction_logits[real].flatten(), found.seq_relationship_logits.flatten()])

    def ours(model: Transformer, inputs: Mapping[str, Tensor]) -> Tensor:
        found = model(**inputs)
        return torch.cat([found.head("masked_lm")[real].flatten(), found.head("next_sentence").flatten()])

    model, foreign = assert_parity(reference, inputs, tmp_path, theirs=theirs, ours=ours)
    assert [head.kind for head in foreign.model.heads] == ["masked_lm", "next_sentence"]
    with torch.no_grad():
        assert_agree(model(**inputs).head("next_sentence"), reference(**inputs).seq_relationship_logits)


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_new", "silu"])
def test_bert_for_masked_lm_with_any_activation(tmp_path: Path, activation: str) -> None:
    reference = make("Bert", "MaskedLM", hidden_act=activation)
    assert_parity(reference, batch(types=3), tmp_path, mask=MASK)


def test_bert_with_padding_on_the_left(tmp_path: Path) -> None:
    """The reference counts positions from the left edge, padding or not, and has to be told."""
    places = {"position_ids": (LEFT.cumsum(1) - 1).clamp(min=0)}
    inputs = batch(LEFT, types=3)
    assert_parity(make("Bert", "MaskedLM"), inputs, tmp_path, mask=LEFT, their_inputs=inputs | places)


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
    reference = randomised(make(name, "MaskedLM", tie_word_embeddings=False))
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


@pytest.mark.parametrize("name", ["DistilBert", "Electra"])
def test_an_untied_output(tmp_path: Path, name: str) -> None:
    reference = make(
        name, "MaskedLM", tie_word_embeddings=False, **({"embedding_size": 20} if name == "Electra" else {})
    )
    model, _ = assert_parity(reference, batch(), tmp_path, mask=MASK)
    assert not model.tied_names()


CLASSIFIERS = ["Bert", "DistilBert", "Roberta", "Camembert", "XLMRoberta", "Electra"]
MODEL_TYPES = {"Camembert": "camembert", "XLMRoberta": "xlm-roberta"}


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.parametrize("problem", [None, "multi_label_classification", "regression"])
def test_sequence_classification(tmp_path: Path, name: str, problem: str | None) -> None:
    labels = 1 if problem == "regression" else 5
    reference = make(name, "SequenceClassification", num_labels=labels, problem_type=problem)
    types = 1 if name == "DistilBert" else 3
    _, foreign = assert_parity(reference, batch(pad=1, types=types), tmp_path, model_type=MODEL_TYPES.get(name))
    (head,) = foreign.model.heads
    assert head.kind == ("regression" if problem == "regression" else "classifier")
    assert getattr(head, "multi_label", False) == (problem == "multi_label_classification")


def test_one_label_without_a_problem_type_is_a_regression(tmp_path: Path) -> None:
    _, foreign = assert_parity(make("Bert", "SequenceClassification", num_labels=1), batch(), tmp_path)
    assert foreign.model.heads[0].kind == "regression"


@pytest.mark.parametrize("model_type", ROBERTAS)
@pytest.mark.parametrize("mask", [MASK, LEFT], ids=["right", "left"])
def test_roberta_for_masked_lm(tmp_path: Path, model_type: str, mask: Tensor) -> None:
    """Padded slots included: they stand in the row of the padding id."""
    reference = make(ROBERTAS[model_type], "MaskedLM")
    assert_parity(reference, batch(mask, pad=1, types=3), tmp_path, model_type=model_type)


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


@pytest.mark.parametrize("size", [8, 20])
@pytest.mark.parametrize("task", ["PreTraining", "MaskedLM"])
def test_electra_with_narrow_and_with_equal_embeddings(tmp_path: Path, task: str, size: int) -> None:
    reference = make("Electra", task, embedding_size=size)
    _, foreign = assert_parity(reference, batch(types=3), tmp_path, mask=MASK)
    assert foreign.model.embedding.size == (8 if size == 8 else None)


def test_electra_with_embeddings_wider_than_the_generator(tmp_path: Path) -> None:
    """The generator is the smaller model, its embeddings are the discriminator's."""
    reference = make("Electra", "MaskedLM", embedding_size=32)
    assert_parity(reference, batch(types=3), tmp_path, mask=MASK)


def test_the_discriminator_takes_the_activation_of_the_layers(tmp_path: Path) -> None:
    reference = make("Electra", "PreTraining", hidden_act="relu", embedding_size=20)
    assert_parity(reference, batch(), tmp_path, mask=MASK)


@pytest.mark.parametrize("sinusoidal", [False, True], ids=["learned", "sinusoidal"])
def test_distilbert_for_masked_lm(tmp_path: Path, sinusoidal: bool) -> None:
    """The file holds the positions in both cases."""
    reference = make("DistilBert", "MaskedLM", sinusoidal_pos_embds=sinusoidal, activation="relu")
    assert_parity(reference, batch(), tmp_path, mask=MASK)
