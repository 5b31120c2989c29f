"""What a model costs, against torch's own count of what it multiplies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tformer.nn.heads import VocabularyHead
from tformer.workflows.inspect.flops import flops_of, module_flops
from tformer.workflows.inspect.subject import Question, Subject, read_subject
from tformer.workflows.inspect.tree import build_tree


def counted(subject: Subject, *, training: bool) -> float:
    """By FlopCounterMode, on the meta device; attention by plain products, which the counter knows."""
    model, batch = subject.model.train(training), 1
    inputs: dict[str, Any] = {"input_ids": torch.zeros(batch, subject.source_length, dtype=torch.long, device="meta")}
    if subject.recipe.model.patches is not None:
        p = subject.recipe.model.patches
        inputs = {"pixel_values": torch.zeros(batch, p.channels, p.image_size, p.image_size, device="meta")}
    if subject.has_both:
        length = subject.target_length
        inputs["decoder_input_ids"] = torch.zeros(batch, length, dtype=torch.long, device="meta")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = model(**inputs)
        losses = []
        for name, head in model.heads.items():
            if training and isinstance(head, VocabularyHead) and name == "masked_lm":
                # As many positions as the objective masks; which ones does not matter.
                hidden = output.hidden[:, : round(0.15 * subject.source_length)]
                losses.append(head(hidden).sum())
            elif training and isinstance(head, VocabularyHead):
                labels = torch.zeros(output.hidden.shape[:2], dtype=torch.long, device="meta")
                losses.append(output.loss_terms(name, labels).loss)
            else:
                losses.append(F.log_softmax(output.head(name), dim=-1).sum())
        if training:
            sum(losses[1:], losses[0]).backward()
    return float(counter.get_total_flops())


@pytest.mark.parametrize(
    "arch",
    ["gpt/small", "bert/base", "transformer/base", "vit/small", "llama/tiny", "t5/small", "bart/tiny", "vit/mnist"],
)
@pytest.mark.parametrize("training", [False, True])
def test_agrees_with_the_flop_counter(arch: str, training: bool) -> None:
    name, preset = arch.split("/")
    layers = [f"model.{side}.num_layers=2" for side in ("encoder", "decoder")]
    sides = {"gpt": layers[1:], "llama": layers[1:], "bert": layers[:1], "vit": layers[:1]}.get(name, layers)
    subject = read_subject(Question(arch=name, preset=preset, sets=sides))
    found = flops_of(subject)
    assert (found.training if training else found.forward) == pytest.approx(
        counted(subject, training=training), rel=0.01
    )


@pytest.mark.parametrize("preset", ["gpt/small", "bert/base", "transformer/base", "vit/small"])
def test_agrees_at_full_depth(preset: str) -> None:
    arch, name = preset.split("/")
    subject = read_subject(Question(arch=arch, preset=name))
    assert flops_of(subject).forward == pytest.approx(counted(subject, training=False), rel=0.01)


def test_heads_of_single_layers_shaw_and_kv_heads_count() -> None:
    sets = ["model.d_model=32", "model.max_seq_len=16", "model.decoder.num_layers=2", "model.decoder.num_heads=4",
            "model.decoder.head_dim=8", "model.decoder.positions={kind: shaw, clip: 4}",
            "model.decoder.layers={1: {num_heads: 2}}"]  # fmt: skip
    subject = read_subject(Question(arch="gpt", preset="tiny", sets=sets))
    assert flops_of(subject).forward == pytest.approx(counted(subject, training=False), rel=0.01)


def test_the_tree_adds_up() -> None:
    subject = read_subject(Question(arch="transformer", preset="base"))
    flops = module_flops(subject.model, subject.recipe.model, source_length=8, target_length=4)
    tree = build_tree(subject.model, flops)
    assert tree.parameters == subject.model.num_parameters() == 63_082_496
    assert tree.flops == pytest.approx(sum(flops.values()))


def test_recomputing_layers_costs_another_forward() -> None:
    plain = flops_of(read_subject(Question(arch="gpt", preset="tiny")))
    again = flops_of(read_subject(Question(arch="gpt", preset="tiny", sets=["training.activation_checkpointing=true"])))
    assert plain.forward == again.forward and plain.training < again.training < plain.training * 4 / 3


def test_the_generator_of_electra_counts() -> None:
    subject = read_subject(Question(arch="electra", preset="tiny"))
    alone = sum(
        module_flops(
            subject.model,
            subject.recipe.model,
            source_length=subject.source_length,
            target_length=subject.target_length,
        ).values()
    )
    assert subject.generator is not None and flops_of(subject).forward > alone
