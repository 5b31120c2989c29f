"""Tiny models with random weights of every family that a lens reads, with an input of one example each."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from tests.viz.attention_models import DECODER, ENCODER, IMAGES, SEQ2SEQ, TEXT, load_of
from tformer.loading import Loaded

POST = ("norm: {place: post}, final_norm: false, positions: {kind: learned}, feedforward:", "feedforward:")
LABELLED = ENCODER.replace("{kind: masked_lm}", "{kind: classifier, pooling: mean}")
LABELLED += "data: {labels: [dull, fine, good]}\n"
RECIPES = {
    "llama": DECODER.replace("num_layers: 2", "num_layers: 2, norm: {kind: rmsnorm}"),
    "parallel": DECODER.replace("num_layers: 2", "num_layers: 2, residual: parallel_one_norm"),
    "gpt": DECODER.replace("rope", "learned").replace("{kind: lm}", "{kind: lm, bias: true, softcap: 20}"),
    "post-norm decoder": DECODER.replace("positions: {kind: rope}, ", "").replace(*reversed(POST)),
    "bert": ENCODER.replace(*reversed(POST)).replace("token_types: 2", "token_types: 2, norm: true, size: 8"),
    "pre-norm encoder": ENCODER.replace("feedforward:", "positions: {kind: sinusoidal}, feedforward:"),
    "t5": SEQ2SEQ.replace("feedforward:", "norm: {kind: rmsnorm}, positions: {kind: t5_bias}, feedforward:").replace(
        "{kind: lm}", "{kind: lm, scale: inverse_sqrt_d}"
    ),
    "bart": SEQ2SEQ.replace(*reversed(POST)),
    "classifier": LABELLED.replace(*reversed(POST)),
    "classifier, attention pooling": LABELLED.replace("pooling: mean", "pooling: attention, pooler: false"),
    "classifier, largest": LABELLED.replace("pooling: mean", "pooling: max"),
    "classifier, norm of the pooler": LABELLED.replace("mean}", "mean, pooler_norm: true, pooler_bias: false}").replace(
        "feedforward:", "layers: {0: {attention_norm: false}}, feedforward:"),
    "several labels": LABELLED.replace("pooling: mean", "pooling: cls, multi_label: true"),
    "convolution": ENCODER.replace(*reversed(POST)).replace("feedforward:", "convolution: 3, feedforward:"),
    "vit": IMAGES,
    "scalenorm": DECODER.replace("num_layers: 2", "num_layers: 2, norm: {kind: scalenorm}"),
    "groupnorm": DECODER.replace("num_layers: 2", "num_layers: 2, norm: {kind: groupnorm, groups: 4}"),
    "batchnorm": ENCODER.replace("feedforward:", "norm: {kind: batchnorm}, feedforward:"),
    "sandwich": DECODER.replace("num_layers: 2", "num_layers: 2, residual_multiplier: 0.7, norm: {kind: rmsnorm, "
                                "place: sandwich, unit_offset: true}, attention: {softcap: 2, qk_norm: unit_offset}"),
    "res_post": DECODER.replace("2, ", "2, norm: {place: res_post}, attention: {qk_norm: width}, ", 1),
    "opt-350m": DECODER.replace("rope", "learned").replace("  dec", "  embedding: {size: 8, project: first}\n  dec"),
    "performer": DECODER.replace("positions: {kind: rope}", "attention: {kind: performer}, positions: {kind: none}"),
    "shaw": ENCODER.replace("feedforward:", "positions: {kind: shaw}, feedforward:"),
}  # fmt: skip


@cache
def loaded_of(family: str) -> Loaded:
    """The model with weights, biases and statistics that all differ from their first values."""
    loaded = load_of(RECIPES[family])
    draws = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=draws)
        for name, buffer in loaded.model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer += torch.rand(buffer.shape, generator=draws)
    return loaded


def head_of(loaded: Loaded) -> str:
    return next(iter(loaded.model.heads))


def inputs_of(loaded: Loaded) -> dict[str, Tensor]:
    """A text of a few tokens, with a target where there is a decoder beside an encoder; or an image."""
    if loaded.recipe.model.patches is not None:
        return {"pixel_values": torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(1))}
    ids = loaded.text_tokenizer.encode(TEXT)[:9]
    inputs = {"input_ids": torch.tensor([ids])}
    return inputs | ({"decoder_input_ids": torch.tensor([ids[2:7]])} if loaded.model.is_encoder_decoder else {})


def length_of(loaded: Loaded) -> int:
    """Number of positions that answer."""
    if head_of(loaded) == "classifier":
        return 1
    return inputs_of(loaded)["decoder_input_ids" if loaded.model.is_encoder_decoder else "input_ids"].shape[1]
