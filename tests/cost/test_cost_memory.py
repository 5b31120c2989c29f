"""The memory estimate: exact where it can be, and tensor by tensor what autograd keeps elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tformer.build import build_model
from tformer.cost.memory import MemoryEstimate, estimate_memory
from tformer.recipe.model import Model

ROWS, LENGTH, TARGET = 3, 24, 16
STACK: dict[str, Any] = {"num_layers": 2, "num_heads": 4}


def section(**changes: Any) -> Model:
    return Model.model_validate({"d_model": 32, "max_seq_len": 64, "vocab_size": 50, **changes})


def stack(**changes: Any) -> dict[str, Any]:
    return {**STACK, **changes}


MODEL = section(decoder=STACK)


def estimate(model: Model = MODEL, **changes: Any) -> MemoryEstimate:
    options: dict[str, Any] = {
        "num_parameters": 1000, "optimizer": 8000, "tokens_per_micro_batch": 64, "dtype": torch.bfloat16,
        "activation_checkpointing": False, "ema": False,
    }  # fmt: skip
    return estimate_memory(model, **{**options, **changes})


def kept(model: Model, dtype: torch.dtype) -> int:
    """Bytes that autograd keeps from a training forward and its loss, weights apart."""
    torch.manual_seed(0)
    built = build_model(model).train()
    built.compute_dtype = dtype
    weights = {parameter.untyped_storage().data_ptr() for parameter in built.parameters()}
    saved: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    inputs = {"input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.long)}
    both = model.encoder is not None and model.decoder is not None
    if both:
        inputs["decoder_input_ids"] = torch.zeros(ROWS, TARGET, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = built(**inputs)
        _ = output.loss_terms("lm", torch.zeros(output.hidden.shape[:2], dtype=torch.long)).loss
    return sum(size for size, _ in saved.values())


def test_parameters_gradients_and_moments_are_fp32() -> None:
    found = estimate()
    assert (found.weights, found.gradients, found.optimizer, found.copies) == (4000, 4000, 8000, 2000)
    assert estimate(dtype=torch.float32).copies == 0
    document = found.to_json()
    assert document["total_bytes"] == sum(size for name, size in document.items() if name != "total_bytes")


def test_an_average_is_another_copy_of_the_weights() -> None:
    assert estimate(ema=True).weights == 2 * estimate().weights


def test_a_teacher_has_weights_and_no_more() -> None:
    assert estimate(teacher_parameters=500).total == estimate().total + 1000


def test_activations_grow_with_tokens_and_bytes_and_shrink_with_checkpointing() -> None:
    deep = section(decoder=stack(num_layers=12))

    def layers(tokens: int = 6400, **changes: Any) -> int:
        empty = section(decoder=stack(num_layers=1))
        options = {"tokens_per_micro_batch": tokens, **changes}
        return estimate(deep, **options).activations - estimate(empty, **options).activations

    base = layers()
    assert layers(12800) == pytest.approx(2 * base)
    assert layers(dtype=torch.float32) == pytest.approx(2 * base, rel=0.4)
    assert layers(activation_checkpointing=True) < base / 4


MODELS = {
    "pre": MODEL,
    "post, relu": section(decoder=stack(norm={"place": "post"}, feedforward={"activation": "relu"}, final_norm=False)),
    "dropouts": section(decoder=stack(dropout=0.1, attention_dropout=0.1, activation_dropout=0.1),
                        embedding={"dropout": 0.1}),
    "rope, kv heads, gated": section(decoder=stack(positions={"kind": "rope"}, num_kv_heads=2, norm={"kind": "rmsnorm"},
                                                   feedforward={"gated": True, "activation": "silu"})),
    "qk_norm, relu2": section(decoder=stack(attention={"kind": "full", "qk_norm": True},
                                            feedforward={"activation": "relu2"})),
    "sandwich": section(decoder=stack(norm={"kind": "rmsnorm", "place": "sandwich", "unit_offset": True})),
    "res_post, qk_norm of the width": section(decoder=stack(norm={"kind": "rmsnorm", "place": "res_post"},
                                                            attention={"qk_norm": "width"})),
    "layer norms of heads": section(decoder=stack(attention={"qk_norm": "groupnorm"}, num_kv_heads=2)),
    "convolution": section(encoder=stack(dropout=0.1, convolution=3)),
    "softcap": section(decoder=stack(attention={"softcap": 5.0})),
    "window, softcap": section(decoder=stack(attention={"kind": "sliding_window", "window": 16, "softcap": 5.0})),
    "t5_bias": section(decoder=stack(positions={"kind": "t5_bias"})),
    "both": section(encoder=stack(), decoder=stack(dropout=0.1)),
    "linformer": section(encoder=stack(attention={"kind": "linformer", "rank": 16}), decoder=stack()),
    "window": section(decoder=stack(attention={"kind": "sliding_window", "window": 64})),
    "own heads": section(decoder=stack(head_dim=8, layers={1: {"num_heads": 1, "feedforward": {"d_ff": 8}}})),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_what_autograd_keeps(name: str, dtype: torch.dtype) -> None:
    model = MODELS[name]
    parameters = build_model(model, device="meta").num_parameters()
    found = estimate(model, num_parameters=parameters, tokens_per_micro_batch=ROWS * LENGTH, dtype=dtype,
                     seq_len=LENGTH, target_seq_len=TARGET, on_cpu=True)  # fmt: skip
    assert found.activations + found.copies == pytest.approx(kept(model, dtype), rel=0.15)


def test_a_token_has_a_width_of_numbers_in_every_norm_and_dropout_around_the_layers() -> None:
    plain = estimate(section(decoder=stack(final_norm=False))).activations
    width = 64 * 32 * 2  # bytes of 64 tokens
    assert estimate(section(decoder=stack(final_norm=True))).activations == plain + width
    embedding = {"norm": True, "dropout": 0.1}
    assert estimate(section(decoder=stack(final_norm=False), embedding=embedding)).activations == plain + 2 * width
    dropped = estimate(section(decoder=stack(final_norm=False, dropout=0.1))).activations
    assert dropped == plain + 2 * 2 * width  # of two functions in two layers


def test_a_text_within_one_block_of_queries_keeps_all_weights_of_a_causal_layer() -> None:
    causal, full = (estimate(section(**{side: STACK}), on_cpu=True).activations for side in ("decoder", "encoder"))
    assert causal == full


def test_the_largest_temporaries_are_the_values_of_a_feedforward_and_their_gradients() -> None:
    classifier = section(encoder=stack(feedforward={"d_ff": 100}), heads=[{"kind": "classifier", "num_labels": 3}])
    assert estimate(classifier).workspace == 2 * 64 * (100 + 32) * 2


def test_memory_is_a_whole_number_of_bytes() -> None:
    long = section(max_seq_len=1001, encoder=stack(num_heads=1), heads=[{"kind": "classifier", "num_labels": 3}])
    found = estimate(long, tokens_per_micro_batch=1001).to_json()
    assert all(isinstance(size, int) for size in found.values())


def of_kind(attention: dict[str, Any], dtype: torch.dtype) -> int:
    return estimate(section(encoder=stack(num_kv_heads=2, attention=attention)), dtype=dtype).activations


@pytest.mark.parametrize("kind", ["additive", "sliding_window", "bigbird"])
def test_kinds_that_make_their_scores_again_keep_queries_keys_values_and_output(kind: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        more = of_kind({"kind": kind}, dtype) - of_kind({"kind": "full"}, dtype)
        small = 2 * 4 * 64 * 64 * (4 + dtype.itemsize % 4)  # additive: the weights of a call as small as this one
        assert more == (small if kind == "additive" else 0)


def test_additive_attention_keeps_no_weights_of_a_call_that_it_computes_in_chunks() -> None:
    plain, additive = (section(encoder=stack(attention={"kind": kind})) for kind in ("full", "additive"))
    large = {"tokens_per_micro_batch": 256 * 64}
    assert estimate(additive, **large).activations == estimate(plain, **large).activations


def test_linformer_keeps_the_projected_keys_and_values_too() -> None:
    more = of_kind({"kind": "linformer", "rank": 32}, torch.float32) - of_kind({"kind": "full"}, torch.float32)
    assert more == 2 * 64 * 4 * (2 * 32 * 16 // 64)


def test_performer_keeps_fp32_copies_where_the_rest_is_narrower() -> None:
    assert of_kind({"kind": "performer"}, torch.float32) == of_kind({"kind": "full"}, torch.float32)
    more = of_kind({"kind": "performer"}, torch.bfloat16) - of_kind({"kind": "full"}, torch.bfloat16)
    assert more == 2 * 64 * 4 * (32 + 2 * 16)


def test_memory_that_the_heap_holds_counts_on_a_cpu_alone() -> None:
    assert estimate(on_cpu=True).held > 0 == estimate(on_cpu=False).held


def test_few_masked_positions_need_few_logits() -> None:
    words = section(vocab_size=5000, encoder=STACK, heads=[{"kind": "masked_lm"}])
    few, all_ = (estimate(words, tokens_per_micro_batch=4096, labelled_share=share) for share in (0.15, 1.0))
    assert few.workspace < all_.workspace / 4
    assert all_.activations - few.activations == (4096 - int(0.15 * 4096)) * 32 * 2  # the gradients of their input
