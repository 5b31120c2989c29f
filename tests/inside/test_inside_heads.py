"""Scores of attention heads, against formulas written from their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.viz.attention_models import DECODER, ENCODER, IMAGES, SEQ2SEQ, load_of, with_attention
from tformer.inside.answers import answer_text
from tformer.inside.heads import (
    StackTokens,
    attention_maps,
    copying,
    head_scores,
    keys_of,
    printable_ids,
    repeated_tokens,
)
from tformer.loading import Loaded
from tformer.support.errors import InputError
from tformer.tokenizer import Tokenizer

LAYER = "decoder.{}.self_attention.weights"


def weights_of(loaded: Loaded, names: list[str], **inputs: Tensor) -> list[np.ndarray]:
    """The maps [B, H, T, S] of these taps."""
    with torch.inference_mode():
        found = loaded.model(**inputs, taps=names).taps
    return [found[name].double().numpy() for name in names]


def test_scores_on_tokens_that_come_twice_are_means_of_diagonals() -> None:
    """TransformerLens's demos read them off diagonals: q - 1, q - T and q - T + 1."""
    loaded = load_of(DECODER)
    repeated = repeated_tokens(loaded, copies=2, samples=3)
    length, before = repeated.length, repeated.before
    assert (length, before, repeated.ids_BT.shape) == (15, 1, (3, 31))
    assert all(len(set(row[1:16].tolist())) == 15 and row[1:16].equal(row[16:]) for row in repeated.ids_BT)
    scores = head_scores(loaded, [{"input_ids": repeated.ids_BT}])["decoder"]
    maps = weights_of(loaded, [LAYER.format(0), LAYER.format(1)], input_ids=repeated.ids_BT)
    for layer, map_BHTT in enumerate(maps):
        for name, back, start in (("previous", 1, 1), ("duplicate", 15, 16), ("induction", 14, 16)):
            diagonal = np.stack([map_BHTT[:, :, q, q - back] for q in range(start, 31)])
            np.testing.assert_allclose(scores[name][layer], diagonal.mean((0, 1)), atol=1e-6)
        np.testing.assert_allclose(scores["first"][layer], map_BHTT[:, :, 1:, 0].mean((0, 2)), atol=1e-6)


def test_induction_on_tokens_that_come_often_is_prefix_matching() -> None:
    """Olsson et al.: the mean attention from each token of a later copy to the tokens that followed earlier copies."""
    loaded = load_of(DECODER)
    repeated = repeated_tokens(loaded, length=7, copies=4, samples=4, seed=5)
    found = head_scores(loaded, [{"input_ids": rows} for rows in repeated.ids_BT.split(3)])["decoder"]["induction"]
    [map_BHTT, _] = weights_of(loaded, [LAYER.format(0), LAYER.format(1)], input_ids=repeated.ids_BT)
    for head in range(4):
        sums = [sum(map_BHTT[row, head, q, k - 6] for k in range(q, 7, -7)) for row in range(4) for q in range(8, 29)]
        np.testing.assert_allclose(found[0, head], np.mean(sums), atol=1e-6)


def transformer_lens_pattern(ids: list[int], name: str, *, causal: bool = True) -> np.ndarray:
    """The detection patterns of TransformerLens's head detector, from their description."""
    same = np.array([[one == other for other in ids] for one in ids]) & ~np.eye(len(ids), dtype=bool)
    same = np.tril(same) if causal else same
    if name == "previous":
        return np.eye(len(ids), k=-1, dtype=bool)
    if name == "duplicate":
        return same
    return np.concatenate([np.zeros((len(ids), 1), dtype=bool), same[:, :-1]], axis=1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("number", "name"), [(0, "previous"), (2, "duplicate"), (3, "induction")])
def test_counted_keys_are_the_patterns_of_the_head_detector(number: int, name: str, causal: bool) -> None:
    draw = np.random.default_rng(3)
    for _ in range(20):
        ids = draw.integers(0, 4, 9).tolist()
        every = torch.ones(1, 9, dtype=torch.bool)
        keys = keys_of(StackTokens(torch.tensor([ids]), every, every), causal=causal)[number, 0].numpy()
        np.testing.assert_array_equal(keys, transformer_lens_pattern(ids, name, causal=causal))


def test_special_tokens_and_padding_and_other_documents_are_not_counted() -> None:
    ids = torch.tensor([[0, 5, 6, 5, 0, 5, 6, 9]])
    real = torch.tensor([[True] * 7 + [False]])
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    special = torch.zeros(10, dtype=torch.bool).index_fill(0, torch.tensor([0]), True)
    inputs = {"input_ids": ids, "attention_mask": real}
    previous, first, same, after = keys_of(StackTokens.of(inputs, special), causal=True)[:, 0]
    assert first.nonzero().tolist() == [[q, 0] for q in range(1, 7)]
    assert previous.nonzero().tolist() == [[q, q - 1] for q in range(1, 7)]
    assert same.nonzero().tolist() == [[3, 1], [5, 1], [5, 3], [6, 2]]
    assert after.nonzero().tolist() == [[3, 2], [5, 2], [5, 4], [6, 3]]
    alone = keys_of(StackTokens.of(inputs | {"document_ids": documents}, special), causal=True)[2, 0]
    assert alone.nonzero().tolist() == [[3, 1]]


def test_padding_changes_no_score() -> None:
    loaded = load_of(ENCODER)
    ids = [[7, 8, 9, 8, 7, 10], [9, 9, 11]]
    rows = [{"input_ids": torch.tensor([row])} for row in ids]
    together = {
        "input_ids": torch.tensor([ids[0], [0, 0, 0, *ids[1]]]),
        "attention_mask": torch.tensor([[1] * 6, [0] * 3 + [1] * 3]),
        "position_ids": torch.tensor([list(range(6)), [0, 0, 0, 0, 1, 2]]),
    }
    one, other = head_scores(loaded, rows)["encoder"], head_scores(loaded, [together])["encoder"]
    for name, found in one.items():
        np.testing.assert_allclose(other[name], found, atol=1e-5)


def test_an_encoder_reads_the_template_and_counts_both_directions() -> None:
    loaded = load_of(ENCODER)
    repeated = repeated_tokens(loaded, length=4, copies=2, samples=2)
    special = loaded.text_tokenizer.special
    assert {tuple(row[[0, -1]].tolist()) for row in repeated.ids_BT} == {(special.cls, special.sep)}
    found = head_scores(loaded, [{"input_ids": repeated.ids_BT}])["encoder"]["duplicate"]
    [map_BHTT] = weights_of(loaded, ["encoder.2.self_attention.weights"], input_ids=repeated.ids_BT)
    pairs = [(q, q + 4) for q in range(1, 5)] + [(q, q - 4) for q in range(5, 9)]
    np.testing.assert_allclose(found[2], np.mean([map_BHTT[:, :, q, k] for q, k in pairs], axis=(0, 1)), atol=1e-6)


def test_alignment_is_the_largest_weight_and_the_share_of_the_source_that_is_read() -> None:
    loaded = load_of(SEQ2SEQ)
    source = [loaded.encode(text) for text in ("brown dog runs", "the green meadow catches things")]
    target = [loaded.encode_target(text)[0] for text in ("things", "the dog runs")]
    batches = [
        {"input_ids": torch.tensor([one]), "decoder_input_ids": torch.tensor([other])}
        for one, other in zip(source, target, strict=True)
    ]
    scores = head_scores(loaded, batches)
    assert set(scores) == {"encoder", "decoder", "cross"} and set(scores["cross"]) == {"sharpness", "coverage"}
    largest: list[np.ndarray] = []
    read: list[np.ndarray] = []
    for batch, ids in zip(batches, source, strict=True):
        [map_BHTS] = weights_of(loaded, ["decoder.1.cross_attention.weights"], **batch)
        text = [place for place, token in enumerate(ids) if not loaded.text_tokenizer.is_special(token)]
        assert len(text) == len(ids) - 2
        seen_HTS = map_BHTS[0][:, :, text]
        largest += list(seen_HTS.max(-1).T)
        read += list(np.minimum(1, seen_HTS.sum(1)).T)
    np.testing.assert_allclose(scores["cross"]["sharpness"][1], np.mean(largest, axis=0), atol=1e-6)
    np.testing.assert_allclose(scores["cross"]["coverage"][1], np.mean(read, axis=0), atol=1e-6)


def test_a_layer_with_fewer_heads_has_empty_cells() -> None:
    loaded = load_of(
        DECODER.replace("num_heads: 4, num_kv_heads: 2", "num_heads: 4, head_dim: 4, layers: {1: {num_heads: 3}}")
    )
    found = head_scores(loaded, [{"input_ids": repeated_tokens(loaded).ids_BT}])["decoder"]["previous"]
    assert np.isnan(found).tolist() == [[False] * 4, [False] * 3 + [True]]


def test_a_score_without_a_query_is_empty() -> None:
    loaded = load_of(DECODER)
    found = head_scores(loaded, [{"input_ids": torch.tensor([[5, 6, 7, 8]])}])["decoder"]
    assert np.isnan(found["induction"]).all() and np.isfinite(found["previous"]).all()


def test_copying_is_the_loss_of_each_time_without_its_first_token() -> None:
    loaded = load_of(DECODER)
    repeated = repeated_tokens(loaded, length=5, copies=3, samples=2)
    found = copying(loaded.model, repeated)
    with torch.inference_mode():
        logits = loaded.model(repeated.ids_BT).logits
    first, later, right = [], [], []
    for row in range(2):
        for place in range(1, 16):  # of the label; the start token stands at 0
            loss = F.cross_entropy(logits[row, place - 1], repeated.ids_BT[row, place]).item()
            if place in (2, 3, 4, 5):
                first.append(loss)
            elif place not in (1, 6, 11):
                later.append(loss)
                right.append(int(logits[row, place - 1].argmax()) == int(repeated.ids_BT[row, place]))
    assert found["first_loss"] == pytest.approx(np.mean(first), abs=1e-5)
    assert found["repeated_loss"] == pytest.approx(np.mean(later), abs=1e-5)
    assert found["repeated_accuracy"] == pytest.approx(np.mean(right))
    without = copying(loaded.model, repeated, replace={"decoder.1.hidden": torch.zeros_like})
    assert without["repeated_loss"] != found["repeated_loss"]


def test_random_tokens_are_text_and_the_same_for_a_seed() -> None:
    loaded = load_of(DECODER)
    tokenizer = loaded.text_tokenizer
    ids = printable_ids(tokenizer)
    assert not any(tokenizer.is_special(token) for token in ids) and tokenizer.encode("the")[0] in ids
    assert tokenizer.encode("\n")[0] not in ids
    one, same, other = (repeated_tokens(loaded, seed=seed).ids_BT for seed in (1, 1, 2))
    assert one.equal(same) and not one.equal(other) and set(one[:, 1:].flatten().tolist()) <= set(ids)


def test_the_vocabulary_is_listed_at_most_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of 50,000 tokens takes 10 ms: for every token of a vocabulary or of a report these would be minutes."""
    loaded, listed = load_of(DECODER), list[int]()
    spellings = loaded.text_tokenizer.tokens
    monkeypatch.setattr(Tokenizer, "tokens", property(lambda self: listed.append(1) or spellings))
    assert len(printable_ids(loaded.text_tokenizer)) > 2 and len(listed) == 1
    texts = [answer_text(loaded, "lm", token) for token in range(len(spellings) + 1)]
    assert len(listed) == 1 and texts[-1] == f"id {len(spellings)}" and " " in texts


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (IMAGES, "reads images"),
        (with_attention(ENCODER, "{kind: linformer, rank: 4}"), "layer 0 has attention of kind linformer"),
        (with_attention(ENCODER, "{kind: performer}"), "layer 0 has attention of kind performer"),
    ],
)
def test_models_without_maps_over_tokens_are_refused(recipe: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        attention_maps(load_of(recipe))


@pytest.mark.parametrize("options", [{"length": 16, "copies": 2}, {"copies": 16}, {"length": 8}])
def test_more_tokens_than_the_model_reads_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"runs/tiny.* reads 32 tokens"):
        repeated_tokens(load_of(DECODER), **options)
