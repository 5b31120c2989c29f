"""Attention of viz-attention: inputs, weights, visible cells, merging, rollout and summary measures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.viz.attention_models import (
    DECODER,
    ENCODER,
    IMAGES,
    SEQ2SEQ,
    TEXT,
    attention_of,
    load_of,
    random_attention,
    side,
    tokenizer,
    with_attention,
)
from tformer.decoding.loaded import translator_of
from tformer.inside.reading import Inputs, TokenSequence, read, side_of
from tformer.loading import Loaded
from tformer.support.errors import InputError
from tformer.viz.attention.page import COARSEST, FINEST, ZERO, Packed, pack
from tformer.viz.attention.scene import Scene, divergence, make_scene, summarize
from tformer.viz.attention.text import as_json
from tformer.viz.attention.weights import (
    Changes,
    Chosen,
    Kind,
    changed,
    changed_matrix,
    changed_side,
    modules_of,
    rollout,
)


def test_an_encoder_reads_a_text_inside_its_template() -> None:
    loaded = load_of(ENCODER)
    found = read(loaded, Inputs("the dog"))
    assert found.inputs["input_ids"][0].tolist() == loaded.text_tokenizer.encode("the dog", template=True)
    side = found.sides["encoder"]
    assert side.tokens[0] == "[CLS]" and side.tokens[-1] == "[SEP]"
    assert side.special[0] and side.special[-1] and not any(side.special[1:-1])


def test_a_pair_has_the_types_of_its_template() -> None:
    loaded = load_of(ENCODER)
    found = read(loaded, Inputs("the dog", "the meadow"))
    ids, types = loaded.text_tokenizer.encode_pair("the dog", "the meadow")
    assert found.inputs["input_ids"][0].tolist() == ids and found.inputs["token_type_ids"][0].tolist() == types
    assert found.sides["encoder"].text_of[0] == 0 and found.sides["encoder"].text_of[-2] == 1


def test_a_decoder_reads_the_prompt_and_what_it_writes_after_it() -> None:
    loaded = load_of(DECODER)
    prompt = read(loaded, Inputs("the dog"))
    longer = read(loaded, Inputs("the dog", max_new_tokens=5))
    count = len(prompt.sides["decoder"])
    assert prompt.sides["decoder"].written_from is None and longer.sides["decoder"].written_from == count
    ids = longer.inputs["input_ids"]
    assert ids[0, :count].tolist() == prompt.inputs["input_ids"][0].tolist() and count < ids.shape[1] <= count + 5
    best = loaded.model(input_ids=ids).logits[0, count - 1].argmax()
    assert ids[0, count] == best, "the most probable token"
    assert any("generated greedily" in note for note in longer.notes)
    written = loaded.text_tokenizer.decode(ids[0, count:].tolist())
    assert longer.texts == {"text": "the dog", "continuation": written} and prompt.texts == {"text": "the dog"}


def test_an_encoder_decoder_shows_its_own_translation_or_the_target_given() -> None:
    loaded = load_of(SEQ2SEQ)
    own = read(loaded, Inputs("the dog runs"))
    [[best, *_]] = translator_of(loaded).translate(["the dog runs"])
    ends = loaded.decoder_tokens
    expected = [*ends.prefix, *(token for token in best.ids if token != ends.eos)]
    assert own.inputs["decoder_input_ids"][0].tolist() == expected
    assert own.sides["decoder"].written_from == 1
    assert own.texts == {"text": "the dog runs", "translation": best.text}
    given = read(loaded, Inputs("the dog runs", target="green meadow"))
    assert given.inputs["decoder_input_ids"][0].tolist() == [
        *ends.prefix,
        *loaded.target_tokenizer.encode("green meadow"),
    ]
    assert given.sides["decoder"].written_from is None
    assert given.inputs["input_ids"][0].tolist() == loaded.text_tokenizer.encode("the dog runs", template=True)


def test_a_labelling_decoder_beside_an_encoder_reads_the_text_again() -> None:
    recipe = SEQ2SEQ.replace("{kind: lm}", "{kind: classifier, pooling: eos}") + "data: {labels: [a, b]}\n"
    found = read(load_of(recipe.replace("output: true", "output: false")), Inputs("the dog"))
    source, target = found.inputs["input_ids"][0].tolist(), found.inputs["decoder_input_ids"][0].tolist()
    assert target[1:] == source[:-1]


def test_an_image_becomes_patches_behind_the_class_token(tmp_path: Path) -> None:
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    found = read(load_of(IMAGES), Inputs(image=tmp_path / "a.png"))
    assert found.sides["encoder"].tokens == ("CLS", "0,0", "0,1", "1,0", "1,1") and found.grid == (2, 2)
    assert found.pixels is not None and found.pixels.shape == (8, 8, 3)
    np.testing.assert_array_equal(found.pixels[..., 0], pixels)


def test_a_long_text_is_refused_and_cut_only_when_asked() -> None:
    loaded = load_of(ENCODER)
    text = " ".join([TEXT] * 4)
    with pytest.raises(InputError, match=r"tokens, but the model reads at most 32") as caught:
        read(loaded, Inputs(text))
    assert "--max-tokens 32" in (caught.value.hint or "")
    cut = read(loaded, Inputs(text, max_tokens=10))
    assert len(cut.sides["encoder"]) == 10 and cut.sides["encoder"].tokens[-1] == "[SEP]"
    assert any("first 10" in note for note in cut.notes), "it is said"
    assert len(read(loaded, Inputs(text, text, max_tokens=12)).sides["encoder"]) == 12


def test_a_target_is_as_long_as_the_decoder_reads() -> None:
    loaded = load_of(SEQ2SEQ.replace("max_seq_len: 48", "max_seq_len: 48\n  max_target_len: 5"))
    with pytest.raises(InputError, match=r"the target has .* tokens, but the model reads at most 5"):
        read(loaded, Inputs(TEXT, target=TEXT))
    cut = read(loaded, Inputs(TEXT, target=TEXT, max_tokens=30))
    assert len(cut.sides["decoder"]) == 5 < len(cut.sides["encoder"])


@pytest.mark.parametrize(
    ("recipe", "asked", "words"),
    [
        (DECODER, Inputs("a", target="b"), "--target: runs/tiny/checkpoints/step-00000003 is a decoder-only model"),
        (ENCODER, Inputs("a", target="b"), "--target"),
        (DECODER, Inputs("a", "b"), "--text2"),
        (SEQ2SEQ, Inputs("a", "b"), "--text2"),
        (ENCODER, Inputs("a", max_new_tokens=3), "--max-new-tokens"),
        (ENCODER, Inputs(image=Path("a.png")), "--image"),
        (IMAGES, Inputs("a"), "image model"),
        (ENCODER, Inputs(), "there is no input"),
    ],
)
def test_what_a_model_cannot_take_is_refused(recipe: str, asked: Inputs, words: str) -> None:
    with pytest.raises(InputError) as caught:
        read(load_of(recipe), asked)
    assert words in caught.value.message


def test_tokens_read_as_text_and_know_where_words_begin() -> None:
    words = tokenizer("gpt")
    side = side_of("decoder", words, words.encode("unbelievable dog"))
    assert "".join(side.tokens) == "unbelievable dog"
    assert [text for _, _, text in side.words()] == ["unbelievable", " dog"]
    pieces = tokenizer("bert")
    side = side_of("encoder", pieces, pieces.encode("unbelievable dog", template=True))
    assert [text for _, _, text in side.words()] == ["[CLS]", "unbelievable", "dog", "[SEP]"]
    half = words.encode("é")[:1]
    assert "\ufffd" not in side_of("decoder", words, half).tokens[0], (
        "half a character is spelled as the vocabulary does"
    )


WINDOW = "{kind: sliding_window, window: 4}"
BIGBIRD = "{kind: bigbird, block: 2, window_blocks: 1, global_blocks: 1, random_blocks: 1}"
PERFORMER = "{kind: performer, features: 32}"
LINFORMER = "{kind: linformer, rank: 8}"
RECIPES = {
    "encoder": ENCODER,
    "decoder": DECODER,
    "seq2seq": SEQ2SEQ,
    "global tokens": with_attention(ENCODER, "{kind: sliding_window, window: 4, dilation: 2, global_tokens: 2}"),
    "causal bigbird": with_attention(DECODER.replace("positions: {kind: rope}, ", ""), BIGBIRD),
    "causal performer": with_attention(DECODER.replace("positions: {kind: rope}, ", ""), PERFORMER),
    "alibi": ENCODER.replace("feedforward:", "positions: {kind: alibi}, feedforward:"),
    "t5_bias": SEQ2SEQ.replace("feedforward:", "positions: {kind: t5_bias}, feedforward:"),
    "additive": with_attention(ENCODER, "{kind: additive}"),
    "window": with_attention(ENCODER, WINDOW),
    "causal window": with_attention(DECODER.replace("positions: {kind: rope}, ", ""), WINDOW),
    "bigbird": with_attention(ENCODER, BIGBIRD),
    "performer": with_attention(ENCODER, PERFORMER),
    "linformer": with_attention(ENCODER, LINFORMER),
}


def scene_of(loaded: Loaded, text: str = TEXT, chosen: Chosen = Chosen(), **asked: Any) -> Scene:
    return make_scene(loaded, Inputs(text, **asked), chosen, rollouts=False, max_bytes=None)


def exported(scene: Scene, kind: Kind) -> list[np.ndarray]:
    """The weights of each layer in the JSON export, [H, T, S]; null is NaN."""
    layers = json.loads(as_json(scene, "head"))["attention"][kind]["layers"]
    return [np.array([head["weights"] for head in layer["heads"]], dtype=np.float64) for layer in layers]


def fused_calls(loaded: Loaded, scene: Scene, kind: Kind) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Values and outputs of each layer's attention in a forward pass that asks for no weights."""
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    hooks = [
        module.mechanism.register_forward_hook(lambda _, arguments, out: calls.append((arguments[0].v_BKSv, out[0])))
        for module in modules_of(loaded, kind)
    ]
    with torch.no_grad():
        loaded.model(**scene.reading.inputs)
    for hook in hooks:
        hook.remove()
    return calls


@pytest.mark.parametrize("name", RECIPES)
def test_exported_weights_times_values_are_the_fused_output(name: str) -> None:
    loaded = load_of(RECIPES[name])
    scene = scene_of(loaded)
    for kind in scene.attentions:
        calls = fused_calls(loaded, scene, kind)
        assert len(calls) == len(scene.attentions[kind].layers)
        for weights_HTS, (values, out) in zip(exported(scene, kind), calls, strict=True):
            values_HSv = values[0].repeat_interleave(len(weights_HTS) // values.shape[1], dim=0).numpy()
            np.testing.assert_allclose(np.nan_to_num(weights_HTS) @ values_HSv, out[0].numpy(), atol=1e-5)


def test_with_shaws_positions_the_output_has_their_values_too() -> None:
    loaded = load_of(ENCODER.replace("feedforward:", "positions: {kind: shaw, clip: 4}, feedforward:"))
    scene = scene_of(loaded)
    calls, encoder = fused_calls(loaded, scene, "encoder"), loaded.model.encoder
    assert encoder is not None
    places = torch.arange(len(scene.reading.sides["encoder"])).unsqueeze(0)
    for layer, (weights_HTS, (values, out)) in enumerate(zip(exported(scene, "encoder"), calls, strict=True)):
        weights = torch.from_numpy(weights_HTS).float().unsqueeze(0)
        with torch.no_grad():
            expected = weights @ values + encoder.positions_of(layer).mix(weights, places, places)
        np.testing.assert_allclose(expected.numpy()[0], out[0].numpy(), atol=1e-5)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "linformer"])
def test_rows_sum_to_one_and_forbidden_cells_are_null(name: str) -> None:
    scene = scene_of(load_of(RECIPES[name]))
    for kind, attention in scene.attentions.items():
        for weights_HTS, layer in zip(exported(scene, kind), attention.layers, strict=True):
            np.testing.assert_allclose(np.nansum(weights_HTS, axis=-1), 1, atol=1e-5)
            np.testing.assert_array_equal(np.isnan(weights_HTS), np.broadcast_to(~layer.visible_TS, weights_HTS.shape))
            assert (layer.weights_HTS[:, ~layer.visible_TS] == 0).all()


def test_causal_cells_are_null_and_not_zero() -> None:
    [first, _] = exported(scene_of(load_of(DECODER)), "decoder")
    above = np.triu(np.ones(first.shape[1:], dtype=bool), 1)
    assert np.isnan(first[:, above]).all() and not np.isnan(first[:, ~above]).any()


def test_sparse_kinds_show_their_pattern() -> None:
    window = scene_of(load_of(RECIPES["window"])).attentions["encoder"].layers[0]
    places = np.arange(window.visible_TS.shape[0])
    np.testing.assert_array_equal(window.visible_TS, np.abs(places[:, None] - places) <= 2)
    assert window.pattern == "sliding_window" and (window.weights_HTS[:, window.visible_TS] > 0).all()
    bigbird = scene_of(load_of(RECIPES["bigbird"])).attentions["encoder"].layers
    assert bigbird[0].pattern == "bigbird" and 0.1 < bigbird[0].visible_TS.mean() < 0.9
    assert bigbird[0].visible_TS[:2].all() and bigbird[0].visible_TS[:, :2].all(), "the first block is global"
    assert (bigbird[0].weights_HTS[:, bigbird[0].visible_TS] > 0).all()


def test_effective_weights_of_linformer_say_so() -> None:
    scene = scene_of(load_of(RECIPES["linformer"]))
    assert scene.attentions["encoder"].layers[0].signed
    assert scene.attentions["encoder"].layers[0].weights_HTS.min() < 0
    assert any("may be negative" in note for note in scene.notes)


def test_cross_attention_asks_from_the_decoder_and_looks_at_the_encoder() -> None:
    loaded = load_of(SEQ2SEQ)
    scene = scene_of(loaded, "the brown dog", target="runs across the green meadow")
    cross = scene.attentions["cross"]
    assert cross.queries is scene.reading.sides["decoder"] and cross.keys is scene.reading.sides["encoder"]
    assert cross.layers[0].weights_HTS.shape == (4, len(cross.queries), len(cross.keys))
    assert len(cross.queries) != len(cross.keys) and len(cross.layers) == 3
    assert "".join(cross.queries.tokens[1:]) == "runs across the green meadow"
    assert "".join(cross.keys.tokens[1:-1]) == "the brown dog"
    document = json.loads(as_json(scene, "head"))["attention"]["cross"]
    assert (document["queries"]["side"], document["keys"]["side"]) == ("decoder", "encoder")


def test_layers_and_heads_are_chosen() -> None:
    loaded = load_of(ENCODER)
    whole, part = scene_of(loaded), scene_of(loaded, chosen=Chosen(None, (0, 2), (1,)))
    assert [layer.number for layer in part.attentions["encoder"].layers] == [0, 2]
    for layer in part.attentions["encoder"].layers:
        expected = whole.attentions["encoder"].layers[layer.number].weights_HTS[1:2]
        np.testing.assert_allclose(layer.weights_HTS, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("recipe", "chosen", "words"),
    [
        (ENCODER, Chosen(("decoder",)), "has no decoder self-attention"),
        (DECODER, Chosen(("cross",)), "has no cross-attention"),
        (ENCODER, Chosen(None, (3,)), "--layers: 3 is out of range: the encoder self-attention has 3 layers, 0 to 2"),
        (ENCODER, Chosen(None, None, (0, 2)), "--heads: 2 is out of range"),
        (SEQ2SEQ, Chosen(None, (2,)), "the encoder self-attention has 2 layers"),
    ],
)
def test_what_a_model_does_not_have_is_refused(recipe: str, chosen: Chosen, words: str) -> None:
    with pytest.raises(InputError) as caught:
        scene_of(load_of(recipe), chosen=chosen)
    assert words in caught.value.message and caught.value.exit_code == 2


def test_more_weights_than_can_fit_are_refused_before_they_are_computed() -> None:
    loaded = load_of(ENCODER)
    with pytest.raises(InputError) as caught:
        make_scene(loaded, Inputs(TEXT), Chosen(), rollouts=False, max_bytes=10)
    assert all(flag in (caught.value.hint or "") for flag in ("--layers", "--heads", "--max-tokens", "--max-megabytes"))


WORDS = ["[CLS]", " un", "able", " dog", "s", "[SEP]"]


def softmax(seed: int, *shape: int) -> np.ndarray:
    scores = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (scores * 2).softmax(-1).numpy()


@given(seed=st.integers(0, 999), hide=st.booleans(), merge=st.booleans(), causal=st.booleans())
def test_rows_still_sum_to_one(seed: int, hide: bool, merge: bool, causal: bool) -> None:
    weights = softmax(seed, 1, 2, 6, 6)
    if causal:
        weights = np.tril(weights)
        weights /= weights.sum(-1, keepdims=True)
    found = changed(attention_of(weights, WORDS, kind="decoder" if causal else "encoder"), Changes(hide, merge))
    layer = found.layers[0]
    sums = layer.weights_HTS.sum(-1)
    np.testing.assert_allclose(sums[:, layer.visible_TS.any(-1) & (sums[0] > 0)], 1, atol=1e-5)
    assert (layer.weights_HTS[:, ~layer.visible_TS] == 0).all()
    assert layer.weights_HTS.shape[1:] == (len(found.queries), len(found.keys)) == layer.visible_TS.shape


def test_a_word_sums_its_keys_and_averages_its_queries() -> None:
    weights = softmax(0, 6, 6)
    merged = changed_matrix(weights, side(WORDS), side(WORDS), Changes(merge_subwords=True))
    assert merged.shape == (4, 4)
    np.testing.assert_allclose(merged[1, 2], (weights[1, 3:5].sum() + weights[2, 3:5].sum()) / 2, rtol=1e-5)
    assert changed(attention_of(weights[None, None], WORDS), Changes(False, True)).keys.tokens == (
        "[CLS]", " unable", " dogs", "[SEP]",
    )  # fmt: skip


def test_hidden_tokens_leave_rows_that_are_divided_by_what_is_left() -> None:
    weights = softmax(1, 6, 6)
    hidden = changed_matrix(weights, side(WORDS), side(WORDS), Changes(hide_special=True))
    np.testing.assert_allclose(hidden, weights[1:5, 1:5] / weights[1:5, 1:5].sum(-1, keepdims=True), rtol=1e-5)
    assert "divided by the sum of the rest" in Changes(hide_special=True).notes()[0]


# --- rollout ---------------------------------------------------------------------------------------------------------


def test_rollout_is_the_product_of_halves() -> None:
    weights = softmax(2, 3, 4, 5, 5)
    eye, expected = np.eye(5), np.eye(5)
    for layer in weights:
        expected = (0.5 * layer.mean(0) + 0.5 * eye) @ expected
    found = rollout("encoder", {"encoder": attention_of(weights, list("abcde"))})
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-5)


def test_rollout_of_tokens_that_look_at_themselves_is_the_identity() -> None:
    own = np.broadcast_to(np.eye(4), (2, 3, 4, 4))
    np.testing.assert_allclose(rollout("encoder", {"encoder": attention_of(own, list("abcd"))}), np.eye(4))


def test_rollout_through_cross_attention_keeps_half_a_layer_for_the_decoder() -> None:
    encoder = attention_of(softmax(3, 2, 2, 4, 4), list("abcd"))
    decoder = attention_of(np.broadcast_to(np.eye(3), (2, 1, 3, 3)), list("xyz"), kind="decoder")
    cross = attention_of(softmax(4, 2, 2, 3, 4), list("xyz"), kind="cross", keys=list("abcd"))
    found = rollout("cross", {"encoder": encoder, "decoder": decoder, "cross": cross})
    # Two layers, each keeping half: 1/2 + 1/4 of every row came from the source.
    np.testing.assert_allclose(found.sum(-1), 0.75, atol=1e-5)
    assert found.shape == (3, 4)


# --- summary ---------------------------------------------------------------------------------------------------------


def test_measures_of_heads_made_by_hand() -> None:
    size = 6
    even = np.full((size, size), 1 / size)
    previous = np.eye(size, k=-1)
    previous[0, 0] = 1
    first = np.zeros((size, size))
    first[:, 0] = 1
    rows, divergences = summarize(attention_of(np.stack([even, previous, first, even])[None], WORDS))
    by_head = dict(enumerate(rows))
    assert by_head[0].entropy == pytest.approx(1) and by_head[1].entropy == pytest.approx(0)
    assert by_head[1].previous == pytest.approx(1) and by_head[0].itself == pytest.approx(1 / size)
    assert by_head[2].first == pytest.approx(1) == by_head[2].special, "[CLS] is special"
    assert by_head[0].max == pytest.approx(1 / size) and by_head[2].distance == pytest.approx((size - 1) / 2)
    assert by_head[0].nearest == "L0H3" and by_head[0].nearest_divergence == pytest.approx(0, abs=1e-6)
    np.testing.assert_allclose(divergences.between_NN, divergences.between_NN.T)
    assert (divergences.rows, divergences.of) == (size, size)


def test_entropy_counts_the_keys_that_can_be_seen() -> None:
    even = np.tril(np.ones((5, 5)))
    even /= even.sum(-1, keepdims=True)
    [row], _ = summarize(attention_of(even[None, None], list("abcde"), kind="decoder"))
    assert row.entropy == pytest.approx(1), "even over what is visible"


def test_places_of_two_sequences_are_not_compared() -> None:
    rows, _ = summarize(attention_of(softmax(5, 1, 2, 3, 4), list("xyz"), kind="cross", keys=list("abcd")))
    assert rows[0].distance is None and rows[0].previous is None and rows[0].itself is None


def test_divergence_is_one_bit_between_heads_that_share_no_key() -> None:
    left, right = np.zeros((4, 4)), np.zeros((4, 4))
    left[:, 0] = right[:, 1] = 1
    between = divergence(attention_of(np.stack([left, right])[None], list("abcd"))).between_NN
    np.testing.assert_allclose(between, [[0, 1], [1, 0]], atol=1e-6)


# --- packing ---------------------------------------------------------------------------------------------------------


def unpack(packed: Packed, shape: tuple[int, ...]) -> np.ndarray:
    """The weights that the page shows, fp32 of that shape."""
    places = np.frombuffer(packed.data, dtype=np.uint8).astype(np.float32).reshape(shape)
    roots = (places - ZERO * packed.signed) / packed.steps
    return np.sign(roots) * roots**2 * packed.largest


@pytest.mark.parametrize("steps", [FINEST, 127, COARSEST])
def test_packed_weights_are_near(steps: int) -> None:
    weights = random_attention(2, 2, 40).layers[0].weights_HTS
    near = unpack(pack(weights, steps=steps), weights.shape)
    assert (np.abs(near - weights) <= np.sqrt(weights) / steps + 0.25 / steps**2 + 1e-7).all()


def test_even_attention_over_512_tokens_does_not_vanish() -> None:
    even = np.full((1, 512), 1 / 512, dtype=np.float32)
    assert unpack(pack(even), even.shape)[0, 0] == pytest.approx(1 / 512, rel=0.05)
    assert math.isclose(float(unpack(pack(np.ones((1, 1), np.float32)), (1, 1))[0, 0]), 1)


def test_negative_weights_keep_their_sign() -> None:
    weights = np.array([[-2.0, 0.0, 0.5]], dtype=np.float32)
    near = unpack(pack(weights, signed=True), weights.shape)
    np.testing.assert_allclose(near, weights, atol=0.02)
    assert near[0, 1] == 0


@pytest.mark.parametrize(("hidden", "written_from"), [(False, 2), (True, 1)])
def test_what_is_generated_stays_marked_where_tokens_are_hidden_or_merged(hidden: bool, written_from: int) -> None:
    tokens, special, starts = ("<s>", "a", "b", "c", "d"), (True, *[False] * 4), (True, True, False, True, True)
    side = TokenSequence("decoder", tokens, special, starts, written_from=3)
    found = changed_side(side, Changes(hide_special=hidden, merge_subwords=True))
    assert found.written_from == written_from and found.tokens[written_from:] == ("c", "d")
