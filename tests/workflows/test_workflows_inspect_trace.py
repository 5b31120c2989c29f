"""The dimension tracker: every shape is the real one, every letter means what it says, and nothing stays behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tformer.build import build_model
from tformer.model import Transformer
from tformer.nn.classification_heads import POOLINGS
from tformer.recipe.model import Model
from tformer.workflows.inspect.trace import Trace, TraceStep, check_shape, empty_inputs, trace_shapes, value_of

STACK: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "feedforward": {"d_ff": 24}}
B, S, T, D, V = 3, 7, 5, 16, 11


def section(**changes: Any) -> Model:
    return Model.model_validate({"d_model": D, "max_seq_len": 32, "vocab_size": V, **changes})


def stack(**changes: Any) -> dict[str, Any]:
    return {**STACK, **changes}


DECODER = section(decoder=stack())
POST = stack(norm={"place": "post"}, final_norm=False)
FAMILIES = {
    "decoder": DECODER,
    "encoder": section(encoder=POST, embedding={"token_types": 2, "norm": True, "size": 8},
                       heads=[{"kind": "masked_lm"}, {"kind": "next_sentence"}]),
    "both": section(encoder=stack(), decoder=stack(num_heads=2, value_dim=4)),
    "images": section(encoder=stack(), patches={"image_size": 8, "size": 4, "channels": 2},
                      heads=[{"kind": "classifier", "num_labels": 3}]),
    "gated": section(decoder=stack(num_kv_heads=2, positions={"kind": "rope"},
                                   feedforward={"d_ff": 24, "gated": True, "activation": "silu"})),
    "projected first": section(decoder=POST, embedding={"size": 8, "project": "first", "norm": True, "scale": 3.0}),
    "sandwich": section(decoder=stack(norm={"place": "sandwich"}, residual_multiplier=0.5)),
    "res_post": section(encoder=stack(norm={"place": "res_post"}), decoder=stack(norm={"place": "res_post"})),
    "modernbert": section(encoder=stack(num_layers=1, layers={0: {"attention_norm": False}}), embedding={"norm": True},
                          heads=[{"kind": "classifier", "num_labels": 3, "pooler_norm": True, "pooler_bias": False}]),
    "shared": section(encoder=stack(layer_groups=1), heads=[{"kind": "masked_lm"}]),
    "target norm": section(encoder=stack(positions={"kind": "learned"}), decoder=stack(positions={"kind": "learned"}),
                           embedding={"norm": True, "target_norm": "tokens"}),
    "replaced": section(encoder=stack(), heads=[{"kind": "replaced_token"}]),
    "tokens": section(encoder=stack(), heads=[{"kind": "token_classifier", "num_labels": 5, "transform": True},
                                              {"kind": "span"}, {"kind": "multiple_choice"}]),
    "regression": section(encoder=stack(), heads=[{"kind": "regression", "pooling": "mean"}]),
}  # fmt: skip
POSITIONS = ["none", "sinusoidal", "learned", "rope", "alibi", "t5_bias", "shaw"]
ATTENTIONS = ["full", "additive", "disentangled", "sliding_window", "bigbird", "linformer", "performer"]


def traced(model: Transformer | Model) -> Trace:
    """The trace of a model, or of one that is built on the meta device."""
    model = build_model(model, device="meta") if isinstance(model, Model) else model
    source = S if model.max_seq_len == 32 else model.max_seq_len
    return trace_shapes(model, empty_inputs(model, batch_size=B, source_length=source, target_length=T))


def steps(trace: Trace, title: str, part: str = "") -> dict[str, tuple[int, ...]]:
    [found] = [section for section in trace.sections if section.title == title][:1]
    return {step.name: step.shape for step in found.steps if step.part in (part, "")}


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_without_memory_are_those_of_the_real_forward_pass(family: str) -> None:
    real, bare = (build_model(FAMILIES[family], device=device) for device in ("cpu", "meta"))
    assert traced(bare) == traced(real)


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_are_those_that_modules_and_taps_have(family: str) -> None:
    """Seen by other means: the model's own taps and outputs, and what each module returned."""
    model = build_model(FAMILIES[family], device="cpu").eval()
    returned: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda _, __, out, name=name: returned.update({name: tuple(out.shape)}) if torch.is_tensor(out) else None
        )
    trace = traced(model)
    side = "decoder" if model.decoder is not None else "encoder"
    attention = steps(trace, side, "self-attention")
    assert attention["projection"] == returned[f"{side}.blocks.0.self_attention"]
    assert attention["QKV product"] == returned[f"{side}.blocks.0.self_attention.qkv"]
    feedforward = steps(trace, side, "feed-forward")
    assert feedforward["up"] == returned[f"{side}.blocks.0.feedforward.up"]
    assert feedforward["down"] == feedforward["residual"] == returned[f"{side}.blocks.0"]
    for head in model.heads:
        assert steps(trace, f"head {head}")["logits"] == returned[f"heads.{head}"]
        assert steps(trace, f"head {head}")["loss"] == ()
    length = T if family == "both" else attention["Q"][2]
    heads = {"both": 2}.get(family, 4)
    assert attention["weights"] == attention["scores"] == (B, heads, length, length)
    if family == "both":
        cross = steps(trace, "decoder", "cross-attention")
        assert cross["weights"] == (B, 2, T, S) and cross["K"] == (B, 2, S, 8) and cross["V"] == (B, 2, S, 4)


def test_the_way_of_a_decoder_is_told_from_ids_to_loss() -> None:
    trace = traced(DECODER)
    names = [(section.title, step.part, step.name) for section in trace.sections for step in section.steps]
    assert [name for _, part, name in names if part == "self-attention"] == [
        "normalized", "QKV product", "Q", "K", "V", "scores", "weights", "heads", "joined", "projection", "residual",
    ]  # fmt: skip
    assert [name for _, part, name in names if part == "feed-forward"] == [
        "normalized", "up", "active", "down", "residual"
    ]  # fmt: skip
    assert names[0][2] == "ids" and names[-1][2] == "loss" and names[-3][2] == "logits"
    [layers] = [section for section in trace.sections if section.layers]
    assert layers.layers == (0, 1)


def test_every_tensor_has_letters_and_a_meaning() -> None:
    for family in FAMILIES.values():
        for part in traced(family).sections:
            for step in part.steps:
                assert len(step.symbols) == len(step.shape) and step.meaning


def test_layers_that_differ_are_told_apart() -> None:
    own = section(decoder=stack(head_dim=4, num_layers=4, layers={2: {"num_heads": 2}}))
    layers = [part for part in traced(own).sections if part.layers]
    assert [part.layers for part in layers] == [(0, 1), (2,), (3,)]
    assert [{step.name: step.shape for step in part.steps}["Q"][1] for part in layers] == [4, 2, 4]


@pytest.mark.parametrize("kind", POSITIONS)
def test_every_position_kind_is_seen_where_it_acts(kind: str) -> None:
    trace = traced(section(decoder=stack(positions={"kind": kind})))
    found = {step.name: step for part in trace.sections for step in part.steps}
    assert ("positions" in found) == (kind in ("sinusoidal", "learned"))
    assert ("bias" in found) == (kind in ("alibi", "t5_bias"))
    assert ("position scores" in found) == ("position values" in found) == (kind == "shaw")
    assert ("turned" in found["Q"].meaning) == (kind == "rope")


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_every_attention_kind_is_followed(kind: str) -> None:
    options = {"linformer": {"rank": 6}, "sliding_window": {"window": 4}, "bigbird": {"block": 2}}.get(kind, {})
    encoder = section(encoder=stack(attention={"kind": kind, **options}))
    trace = traced(encoder)
    found = steps(trace, "encoder", "self-attention")
    assert found["weights"] == (B, 4, S, S) and found["heads"] == (B, 4, S, 4)
    if kind == "linformer":
        assert found["scores"] == (B, 4, S, 6)


def test_a_convolution_beside_a_layer_is_followed() -> None:
    trace = traced(section(encoder=stack(layers={0: {"convolution": 3}})))
    assert steps(trace, "encoder", "convolution") == {"convolved": (B, S, 16), "normalized": (B, S, 16)}


def test_the_model_is_left_as_it_was() -> None:
    model = build_model(section(decoder=stack(positions={"kind": "alibi"})), device="cpu").train()
    before = [dict(module.__dict__) for module in model.modules()]
    traced(model)
    assert model.training
    for module, was in zip(model.modules(), before, strict=True):
        assert module.__dict__.keys() == was.keys()
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_a_wrong_letter_is_an_error() -> None:
    assert value_of("Hh+Kh+Kv", {"H": 4, "K": 2, "h": 3, "v": 5}) == 12 + 6 + 10
    assert value_of("3Hh", {"H": 4, "h": 3}) == 36
    with pytest.raises(AssertionError, match="scores"):
        check_shape((1, 2, 3), ("B", "T", "T"), {"B": 1, "T": 2}, what="scores")


@pytest.mark.parametrize("kind", ["full", "additive", "sliding_window", "bigbird"])
def test_scores_of_long_inputs_are_seen_whole(kind: str) -> None:
    """Work goes through them in chunks: not here, where nothing is stored."""
    model = build_model(section(max_seq_len=9000, encoder=stack(attention={"kind": kind})), device="meta")
    trace = trace_shapes(model, empty_inputs(model, batch_size=2, source_length=9000))
    assert steps(trace, "encoder", "self-attention")["scores"] == (2, 4, 9000, 9000)


def test_global_tokens_with_matrices_of_their_own_have_rows_of_their_own() -> None:
    options = {"kind": "sliding_window", "window": 4, "global_tokens": 2, "global_projections": True}
    found = steps(traced(section(encoder=stack(attention=options))), "encoder", "self-attention")
    assert found["scores"] == (B, 4, S, S) and found["global scores"] == (B, 4, 2, S)


def test_linformer_mixes_positions_into_fewer() -> None:
    options = {"kind": "linformer", "rank": 6}
    found = steps(traced(section(encoder=stack(attention=options))), "encoder", "self-attention")
    assert found["projected K"] == found["projected V"] == (B, 4, 6, 4)


def test_scores_are_told_with_their_formula() -> None:
    for changes, formula in (
        ({}, "Q·Kᵀ/√h: how well each query fits each key, later keys masked"),
        ({"attention": {"kind": "full", "scale": 1.0}}, "Q·Kᵀ: how"),
        ({"attention": {"kind": "additive"}}, "w · tanh(Q + K): how"),
    ):
        trace = traced(section(decoder=stack(**changes)))
        [meaning, *_] = [step.meaning for part in trace.sections for step in part.steps if step.name == "scores"]
        assert meaning.startswith(formula), meaning


@pytest.mark.parametrize("norm", [False, True, "learned", "width", "layernorm"])
@pytest.mark.parametrize("positions", ["none", "rope"])
def test_queries_and_keys_are_told_with_all_that_is_done_to_them(norm: bool | str, positions: str) -> None:
    changes = {"attention": {"kind": "full", "qk_norm": norm}, "positions": {"kind": positions}}
    trace = traced(section(decoder=stack(**changes)))
    steps = {step.name: step.meaning for part in trace.sections for step in part.steps}
    done = {(False, "none"): "", (False, "rope"): ", turned by position",
            (True, "none"): ", normalized", (True, "rope"): ", normalized, then turned by position"}  # fmt: skip
    for name, what in (("Q", "queries"), ("K", "keys")):
        assert steps[name] == f"{what} of each head{done[bool(norm), positions]}"


@pytest.mark.parametrize("kind", [*ATTENTIONS, *POSITIONS])
def test_a_padded_batch_has_the_shapes_of_one_without_padding(kind: str) -> None:
    options = {"linformer": {"rank": 6}, "sliding_window": {"window": 4}, "bigbird": {"block": 2}}.get(kind, {})
    part = "attention" if kind in ATTENTIONS else "positions"
    model = build_model(section(encoder=stack(**{part: {"kind": kind, **options}})), device="meta")
    inputs = empty_inputs(model, batch_size=B, source_length=S)
    padded = trace_shapes(model, {**inputs, "attention_mask": torch.ones(B, S, dtype=torch.bool, device="meta")})
    own = {"position_ids", "positions", "bias"}  # counted from each example's first real token
    found, others = all_steps(padded), all_steps(trace_shapes(model, inputs))
    assert found.keys() == others.keys()
    for step_id, step in found.items():
        is_own = step_id.rpartition(".")[2] in own
        assert step.shape == ((B, *others[step_id].shape[1:]) if is_own else others[step_id].shape)


# --- the graph of tensors --------------------------------------------------------------------------------------------

LINKED = {
    **FAMILIES,
    **{kind: section(decoder=stack(residual=kind)) for kind in ("parallel", "parallel_one_norm")},
    "FixNorm": section(
        encoder=stack(dropout=0.1, attention_dropout=0.2, activation_dropout=0.3, drophead=0.25),
        decoder=stack(dropout=0.1, layerdrop=0.2),
        embedding={"fixnorm": True, "dropout": 0.1},
        tie={"source_target": True, "output": True},
    ),
    **{kind: section(decoder=stack(positions={"kind": kind})) for kind in POSITIONS},
    **{f"{kind} attention": section(encoder=stack(attention={"kind": kind})) for kind in ATTENTIONS[1:3]},
    "performer attention": section(encoder=stack(attention={"kind": "performer"})),
    "linformer": section(encoder=stack(attention={"kind": "linformer", "rank": 6})),
    "global tokens": section(encoder=stack(attention={"kind": "sliding_window", "window": 4, "global_tokens": 2,
                                                      "global_projections": True})),
}  # fmt: skip


def all_steps(trace: Trace) -> dict[str, TraceStep]:
    found = [step for part in trace.sections for step in part.steps]
    assert len({step.id for step in found}) == len(found)
    return {step.id: step for step in found}


@pytest.mark.parametrize("name", LINKED)
def test_every_tensor_is_made_of_others_of_the_trace_and_read_by_one(name: str) -> None:
    found = all_steps(traced(LINKED[name]))
    given = {step_id for step_id, step in found.items() if not step.inputs}
    assert {step_id.rpartition(".")[2] for step_id in given} <= {
        "ids",
        "pixels",
        "segments",
        "position_ids",
        "labels",
        "bias",
    }
    read = {each for step in found.values() for each in step.inputs}
    assert read <= found.keys()
    assert {step_id.rpartition(".")[2] for step_id in found.keys() - read} == {"loss"}


@pytest.mark.parametrize("name", LINKED)
def test_every_parameter_is_seen_where_it_acts(name: str) -> None:
    model = build_model(LINKED[name], device="meta")
    uses = {used.name: used for step in all_steps(traced(model)).values() for used in step.parameters}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    later = [f"{side}.{blocks}.1." for side in ("encoder", "decoder") for blocks in ("blocks", "layer_positions")]
    assert uses.keys() == {key for key in parameters if not key.startswith(tuple(later))}, "layer 1 is as layer 0"
    tied = model.tied_names()
    for key, used in uses.items():
        assert used.shape == tuple(parameters[key].shape)
        assert set(used.tied) == {
            other for other in parameters if other != key and parameters[other] is parameters[key]
        }
        assert bool(used.tied) == (key in tied or key in tied.values())


def test_a_parallel_residual_reads_the_input_of_the_layer_and_joins_the_sum() -> None:
    found = all_steps(traced(LINKED["parallel"]))
    start = found["decoder.0.self_attention.normalized"].inputs
    assert found["decoder.0.feedforward.normalized"].inputs == start
    assert set(found["decoder.0.feedforward.residual"].inputs) == {
        "decoder.0.self_attention.residual", "decoder.0.feedforward.down"
    }  # fmt: skip


def test_a_layer_reads_the_one_before_it() -> None:
    found = all_steps(traced(DECODER))
    first = found["decoder.0.self_attention.normalized"]
    assert first.inputs == ("decoder.embedding.input", "decoder.0.feedforward.residual")
    assert found["decoder.0.self_attention.residual"].inputs == (
        "decoder.embedding.input", "decoder.0.self_attention.projection", "decoder.0.feedforward.residual"
    )  # fmt: skip
    both = all_steps(traced(FAMILIES["both"]))
    assert both["decoder.0.cross_attention.kv"].inputs == ("encoder.final_norm",)


def test_scaling_fixnorm_and_positions_of_the_embedding_are_shown() -> None:
    names = lambda changes: list(steps(traced(section(decoder=stack(), **changes)),  # noqa: E731
                                       "decoder: embedding"))  # fmt: skip
    assert names({"embedding": {"scale": True}})[:3] == ["ids", "tokens", "scaled"]
    assert names({"embedding": {"fixnorm": True}})[:4] == ["ids", "tokens", "unit vectors", "scaled"]
    trace = traced(section(decoder=stack(positions={"kind": "learned"}), embedding={"scale": True}))
    found = all_steps(trace)
    assert found["decoder.embedding.scaled"].meaning == "times √D = 4"
    assert found["decoder.embedding.sum"].inputs == ("decoder.embedding.scaled", "decoder.embedding.positions")


def test_dropout_is_shown_where_training_applies_it() -> None:
    found = all_steps(traced(LINKED["FixNorm"]))
    rates = {step_id: step.meaning for step_id, step in found.items() if step.name == "dropout"}
    for place, share in (
        ("encoder.embedding.sum", 10), ("encoder.0.self_attention.weights", 20), ("encoder.0.feedforward.active", 30),
        ("encoder.0.self_attention.projection", 10), ("encoder.0.feedforward.down", 10),
        ("encoder.0.self_attention.heads", 25), ("decoder.0.feedforward.residual", 20),
    ):  # fmt: skip
        assert rates[f"{place}.dropout"].startswith(f"in training {share} % of"), place
        assert found[f"{place}.dropout"].shape == found[place].shape
    segments = {"token_types": 2, "dropout": 0.1, "size": 8}
    own = section(encoder=stack(positions={"kind": "rope"}), embedding=segments, heads=[{"kind": "masked_lm"}])
    found = all_steps(traced(own))
    dropped = found["encoder.embedding.tokens.dropout"]
    assert dropped.shape == (B, S, 8) and dropped.inputs == ("encoder.embedding.tokens", "encoder.embedding.segments")
    without = all_steps(traced(section(decoder=stack(dropout=0.0))))
    assert not [step for step in without.values() if step.name == "dropout"]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_each_head_says_how_it_pools(pooling: str) -> None:
    head = {"kind": "classifier", "num_labels": 3, "pooling": pooling}
    found = all_steps(traced(section(encoder=stack(), heads=[head])))
    assert found["head.classifier.pooled"].meaning == f"pooling {pooling}: {POOLINGS[pooling].meaning}"
    assert found["head.classifier.pooled"].inputs == ("encoder.final_norm",)


@pytest.mark.parametrize(
    ("head", "shape"),
    [
        ({"kind": "classifier", "num_labels": 3}, (B,)),
        ({"kind": "classifier", "num_labels": 3, "multi_label": True}, (B, 3)),
        ({"kind": "regression"}, (B,)),
        ({"kind": "replaced_token"}, (B, S)),
    ],
)
def test_labels_have_the_shape_that_the_objective_gives_them(head: dict[str, Any], shape: tuple[int, ...]) -> None:
    found = all_steps(traced(section(encoder=stack(), heads=[head])))
    assert found[f"head.{head['kind']}.labels"].shape == shape
