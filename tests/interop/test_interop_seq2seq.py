"""T5, mT5, BART, mBART, Pegasus and Marian, there and back.

Encoder and decoder differ in depth, heads and hidden sizes, source and target in length, and a row of each is padded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.interop.parity import assert_agree, assert_parity, padding, tokens
from tformer.data.shards.corpus import Example
from tformer.objectives.base import ObjectiveContext
from tformer.objectives.labelled import ClassificationOptions, SingleLabel
from tformer.tokenizer.special import DecoderTokens, SpecialIds

VOCABULARY, TARGET_VOCABULARY = 61, 43


def batch(*, source: int = 19, target: int = 14, vocabulary: int = VOCABULARY, left: bool = False) -> dict[str, Tensor]:
    return {
        "input_ids": tokens(3, source, vocabulary=VOCABULARY),
        "attention_mask": padding(source, source, source - 6, 5, left=left),
        "decoder_input_ids": tokens(3, target, vocabulary=vocabulary, seed=2),
        "decoder_attention_mask": padding(target, target - 5, target, 3),
    }


# --- T5 ---------------------------------------------------------------------------------------------------------------


def t5(*, untied: bool = False, name: str = "T5", **values: Any) -> nn.Module:
    """The constructor ties the output in any case; `untied` gives it a matrix of its own, as v1.1's files have."""
    sizes = {"d_model": 20, "d_kv": 6, "d_ff": 28, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 5}
    buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCABULARY, n_positions=40, **{**sizes, **buckets, **values}
    )
    reference: Any = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    if untied:
        reference.lm_head.weight = nn.Parameter(torch.empty(VOCABULARY, 20))
    return reference


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_t5_v1_0_past_its_largest_bucket(tmp_path: Path, left: bool) -> None:
    inputs = batch(source=39, target=31, left=left)
    model, foreign = assert_parity(t5(), inputs, tmp_path, mask=inputs["decoder_attention_mask"])
    assert foreign.model.max_seq_len == 40 and "heads.lm.weight" in model.tied_names()


@pytest.mark.parametrize("proj", ["gated-gelu", "gated-silu", "gated-relu", "silu", "gelu", "gelu_new"])
def test_t5_activations(tmp_path: Path, proj: str) -> None:
    inputs = batch()
    reference = t5(feed_forward_proj=proj, layer_norm_epsilon=0.02)
    assert_parity(reference, inputs, tmp_path, mask=inputs["decoder_attention_mask"])


@pytest.mark.parametrize(
    "values", [{"tie_word_embeddings": False}, {"scale_decoder_outputs": True}], ids=["v1.1", "scaled"]
)
def test_an_untied_output_of_t5_is_found_in_the_file(tmp_path: Path, values: dict[str, Any]) -> None:
    """Whatever config.json says, which `transformers` writes as tied."""
    inputs = batch()
    reference = t5(untied=True, feed_forward_proj="gated-gelu", **values)
    model, foreign = assert_parity(reference, inputs, tmp_path, mask=inputs["decoder_attention_mask"])
    assert foreign.config["tie_word_embeddings"] is True and not foreign.model.tie.output
    assert "heads.lm.weight" not in model.tied_names()


def test_t5_v1_1_without_an_output_in_its_file_is_tied_and_unscaled(tmp_path: Path) -> None:
    inputs = batch()
    reference = t5(tie_word_embeddings=False)
    _, foreign = assert_parity(reference, inputs, tmp_path, mask=inputs["decoder_attention_mask"])
    assert foreign.model.tie.output and foreign.model.heads[0].scale == "none"  # type: ignore[union-attr]


@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
def test_mt5_is_t5_v1_1_that_never_scales(tmp_path: Path, untied: bool) -> None:
    inputs = batch(source=39, target=31)
    reference = t5(name="MT5", untied=untied)
    _, foreign = assert_parity(reference, inputs, tmp_path, mask=inputs["decoder_attention_mask"], model_type="mt5")
    head = foreign.model.heads[0]
    assert (foreign.model.tie.output, getattr(head, "scale", None)) == (not untied, "none")
    assert foreign.model.encoder and foreign.model.encoder.feedforward.gated


@pytest.mark.parametrize("proj", ["gated-gelu", "relu"])
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_umt5_has_biases_in_every_layer_and_scales(tmp_path: Path, left: bool, proj: str) -> None:
    inputs = batch(source=39, target=31, left=left)
    reference = t5(name="UMT5", feed_forward_proj=proj)
    model, foreign = assert_parity(reference, inputs, tmp_path, mask=inputs["decoder_attention_mask"])
    tables = [name for name in model.state_dict() if "layer_positions" in name]
    assert len(tables) == 2 + 3 and foreign.architecture.model_type == "umt5"
    assert foreign.model.heads[0].scale == "inverse_sqrt_d"  # type: ignore[union-attr]


# --- BART and its family ----------------------------------------------------------------------------------------------


def sizes(**values: Any) -> dict[str, Any]:
    encoder = {"encoder_layers": 2, "encoder_attention_heads": 5, "encoder_ffn_dim": 28}
    decoder = {"decoder_layers": 3, "decoder_attention_heads": 2, "decoder_ffn_dim": 36}
    common = {"vocab_size": VOCABULARY, "d_model": 20, "max_position_embeddings": 24, "activation_function": "silu"}
    ids = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2}
    return {**encoder, **decoder, **common, **ids, **values}


FAMILY = {
    "bart": (transformers.BartConfig, transformers.BartForConditionalGeneration),
    "mbart": (transformers.MBartConfig, transformers.MBartForConditionalGeneration),
    "pegasus": (transformers.PegasusConfig, transformers.PegasusForConditionalGeneration),
    "marian": (transformers.MarianConfig, transformers.MarianMTModel),
    "blenderbot": (transformers.BlenderbotConfig, transformers.BlenderbotForConditionalGeneration),
    "blenderbot-small": (transformers.BlenderbotSmallConfig, transformers.BlenderbotSmallForConditionalGeneration),
}


@pytest.mark.parametrize("scale", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("model_type", FAMILY)
def test_a_generator_of_the_family(tmp_path: Path, model_type: str, scale: bool) -> None:
    make_config, make_model = FAMILY[model_type]
    reference = make_model(make_config(**sizes(scale_embedding=scale)))
    inputs = batch(source=24)
    model, foreign = assert_parity(
        reference, inputs, tmp_path, mask=inputs["decoder_attention_mask"], model_type=model_type
    )
    assert foreign.model.embedding.scale is scale
    assert model.get_parameter("heads.lm.bias").abs().min() > 0, "the buffer of the logits' bias is random too"


@pytest.mark.parametrize("window", [6, [4, 8]])
def test_led_is_bart_with_windows_a_global_token_and_fewer_positions_of_the_decoder(
    tmp_path: Path, window: Any
) -> None:
    lengths = {"max_encoder_position_embeddings": 48, "max_decoder_position_embeddings": 15}
    values = {key: value for key, value in sizes(**lengths).items() if key != "max_position_embeddings"}
    reference = transformers.LEDForConditionalGeneration(transformers.LEDConfig(**values, attention_window=window))
    inputs = batch(source=41, target=15)
    first = {"global_attention_mask": (torch.arange(41) == 0).long().expand(3, -1)}
    mask = inputs["decoder_attention_mask"]
    model, foreign = assert_parity(reference, inputs, tmp_path, mask=mask, their_inputs=inputs | first)
    assert (foreign.model.max_seq_len, foreign.model.max_target_len, model.longest_target) == (48, 15, 15)
    assert foreign.model.encoder and list(foreign.model.encoder.layers) == ([] if window == 6 else [1])
    with pytest.raises(ValueError, match="the model has 15 learned positions, the input needs 16"):
        model(**batch(source=41, target=16))


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_new", "swish"])
def test_activations_of_the_family(tmp_path: Path, activation: str) -> None:
    reference = transformers.MarianMTModel(transformers.MarianConfig(**sizes(activation_function=activation)))
    inputs = batch()
    assert_parity(reference, inputs, tmp_path, mask=inputs["decoder_attention_mask"])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("target", [TARGET_VOCABULARY, VOCABULARY], ids=["smaller", "equal"])
def test_marian_with_separate_vocabularies(tmp_path: Path, target: int, tied: bool) -> None:
    config = transformers.MarianConfig(
        **sizes(share_encoder_decoder_embeddings=False, decoder_vocab_size=target, tie_word_embeddings=tied)
    )
    inputs = batch(vocabulary=target)
    _, foreign = assert_parity(
        transformers.MarianMTModel(config), inputs, tmp_path, mask=inputs["decoder_attention_mask"]
    )
    assert foreign.model.target_vocab_size == target and foreign.model.tie.output is tied
    assert not foreign.model.tie.source_target


@pytest.mark.parametrize("num_labels", [1, 3, 4])
def test_a_classifier_that_reads_the_decoder_at_the_last_end_of_sequence(tmp_path: Path, num_labels: int) -> None:
    """Ours is given what BART makes of the source itself: the source shifted right, with the source's mask. Batches of
    labelled texts are made so."""
    config = transformers.BartConfig(**sizes(), num_labels=num_labels)
    reference = transformers.BartForSequenceClassification(config)
    mask = padding(17, 17, 9, 4)
    source = tokens(3, 17, vocabulary=VOCABULARY).masked_fill(mask == 0, 1)
    for row, last in enumerate(mask.sum(1).tolist()):
        source[row, last - 1] = 2  # </s>, at the end alone: tokens() begins after it
    theirs = {"input_ids": source, "attention_mask": mask}
    shifted = torch.cat([torch.full((3, 1), 2), source[:, :-1]], dim=1)
    ours = theirs | {"decoder_input_ids": shifted, "decoder_attention_mask": mask}
    model, foreign = assert_parity(reference, ours, tmp_path, their_inputs=theirs)
    del ours["decoder_attention_mask"]  # the source's mask says where the shifted source ends
    with torch.no_grad():
        assert_agree(model(**ours).logits.view(3, -1), reference(**theirs).logits)
    context = ObjectiveContext(SpecialIds(pad=1), seq_len=24, target=DecoderTokens(start=2, eos=2))
    texts = [Example(row[real.bool()].numpy()) for row, real in zip(source, mask, strict=True)]
    made = SingleLabel(ClassificationOptions(), context).collate(texts, rng=np.random.default_rng(0))
    with torch.no_grad():
        assert_agree(model(**made.model_inputs()).logits.view(3, -1), reference(**theirs).logits)
    assert foreign.model.heads[0].kind == ("regression" if num_labels == 1 else "classifier")
    assert foreign.model.heads[0].pooling == "eos"  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["Bart", "MBart"])
def test_spans_are_read_from_the_decoder(tmp_path: Path, name: str) -> None:
    """Ours is given what these classes make of the text itself: shifted right, MBart's last token in front."""
    reference = getattr(transformers, f"{name}ForQuestionAnswering")(getattr(transformers, f"{name}Config")(**sizes()))
    mask = padding(17, 17, 9, 4)
    text = tokens(3, 17, vocabulary=VOCABULARY).masked_fill(mask == 0, 1)
    theirs = {"input_ids": text, "attention_mask": mask}
    last = text.gather(1, mask.sum(1, keepdim=True) - 1) if name == "MBart" else torch.full((3, 1), 2)
    shifted = torch.cat([last, text[:, :-1]], dim=1)

    def answers(model: Any, inputs: Any) -> Tensor:
        found = model(**inputs)
        return (
            found.logits if "decoder_input_ids" in inputs else torch.stack([found.start_logits, found.end_logits], -1)
        )

    ours = theirs | {"decoder_input_ids": shifted}
    _, foreign = assert_parity(reference, ours, tmp_path, their_inputs=theirs, theirs=answers, ours=answers, mask=mask)
    assert [head.kind for head in foreign.model.heads] == ["span"]


# --- fairseq's translators --------------------------------------------------------------------------------------------


def padded(inputs: dict[str, Tensor], pad: int = 1) -> dict[str, Tensor]:
    """Padding has the token that these classes count positions by."""
    sides = {"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}
    return inputs | {name: inputs[name].masked_fill(inputs[mask] == 0, pad) for name, mask in sides.items()}


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("scale", [False, True], ids=["plain", "scaled"])
def test_m2m100_has_sinusoids_from_the_third_position_on(tmp_path: Path, scale: bool, left: bool) -> None:
    values = {name: value for name, value in sizes(scale_embedding=scale).items() if name != "forced_eos_token_id"}
    reference = transformers.M2M100ForConditionalGeneration(transformers.M2M100Config(**values))
    inputs = padded(batch(source=24, left=left))
    _, foreign = assert_parity(reference, inputs, tmp_path, mask=inputs["decoder_attention_mask"], model_type="m2m_100")
    assert foreign.model.encoder and foreign.model.encoder.positions.kind == "sinusoidal"
    assert foreign.model.encoder.positions.offset == 2 and not foreign.model.heads[0].bias  # type: ignore[union-attr]


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_fsmt_has_two_vocabularies_and_stores_its_sinusoids(tmp_path: Path, tied: bool, left: bool) -> None:
    values = sizes(tie_word_embeddings=tied, src_vocab_size=VOCABULARY)
    values |= {"tgt_vocab_size": VOCABULARY if tied else TARGET_VOCABULARY}
    del values["vocab_size"]
    reference = transformers.FSMTForConditionalGeneration(transformers.FSMTConfig(**values))
    for stack in (reference.model.encoder, reference.model.decoder):
        stack.embed_positions.weight.requires_grad_(False)
    inputs = padded(batch(source=24, vocabulary=values["tgt_vocab_size"], left=left))
    model, foreign = assert_parity(
        reference,
        inputs,
        tmp_path,
        mask=inputs["decoder_attention_mask"],
        theirs=lambda model, inputs: model(**inputs, use_cache=False).logits,
    )
    assert foreign.model.tie.output is tied and ("heads.lm.weight" in model.tied_names()) is tied
