"""The weights are those that the model computes with: explicit attention times values is the fused path's output."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from tests.viz.attention_models import DECODER, ENCODER, SEQ2SEQ, TEXT, load_of, with_attention
from tformer.errors import InputError
from tformer.loading import Loaded
from tformer.viz.attention.document import as_json
from tformer.viz.attention.reading import Asked
from tformer.viz.attention.scene import Scene, make_scene
from tformer.viz.attention.weights import Chosen, Kind, modules_of

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
    return make_scene(loaded, Asked(text, **asked), chosen, rollouts=False, max_bytes=None)


def exported(scene: Scene, kind: Kind) -> list[np.ndarray]:
    """The weights of each layer in the JSON export, [H, T, S]; null is NaN."""
    layers = json.loads(as_json(scene, "head"))["attention"][kind]["layers"]
    return [np.array([head["weights"] for head in layer["heads"]], dtype=np.float64) for layer in layers]


def fused_calls(loaded: Loaded, scene: Scene, kind: Kind) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Values and outputs of each layer's attention in a forward pass that asks for no weights."""
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    hooks = [
        module.mechanism.register_forward_hook(lambda _, arguments, out: calls.append((arguments[2], out[0])))
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
        make_scene(loaded, Asked(TEXT), Chosen(), rollouts=False, max_bytes=10)
    assert all(flag in (caught.value.hint or "") for flag in ("--layers", "--heads", "--max-tokens", "--max-megabytes"))
