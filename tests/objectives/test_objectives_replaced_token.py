"""ELECTRA: what the generator fills in, what the discriminator has to find, and that both learn together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tformer.build import build_model
from tformer.data.batching.batch import Batch
from tformer.data.shards.corpus import Example
from tformer.model import Transformer
from tformer.nn.init import tie_embeddings
from tformer.nn.losses import IGNORED_LABEL
from tformer.objectives import build_objective
from tformer.objectives.base import ObjectiveContext, total_loss
from tformer.objectives.replaced_token import ReplacedToken, ReplacedTokenOptions, detection_terms, draw_tokens
from tformer.recipe.model import Model
from tformer.tokenizer.special import SpecialIds

CLS, SEP, MASK, VOCAB = 2, 3, 4, 24
SPECIAL = SpecialIds(pad=0, unk=1, cls=CLS, sep=SEP, mask=MASK)


def model(head: str, *, d_model: int = 16, size: int | None = None, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    section = {
        "d_model": d_model,
        "max_seq_len": 16,
        "vocab_size": VOCAB,
        "embedding": {"size": size, "norm": True},
        "encoder": {"num_layers": 1, "num_heads": 2, "feedforward": {"d_ff": 2 * d_model}},
        "heads": [{"kind": head}],
        "init": {"std": 0.1},
    }
    return build_model(Model.model_validate(section))


def make(generator: Any, options: ReplacedTokenOptions = ReplacedTokenOptions()) -> ReplacedToken:
    context = ObjectiveContext(SPECIAL, seq_len=16, vocab_size=VOCAB, generator=generator)
    objective = build_objective([options], context)
    assert isinstance(objective, ReplacedToken)
    return objective


def samples(*lengths: int, seed: int = 0) -> list[Example]:
    rng = np.random.default_rng(seed)
    return [Example(np.array([CLS, *rng.integers(5, VOCAB, size=length), SEP])) for length in lengths]


class Recorder:
    """A model that remembers what it was given."""

    def __init__(self, built: Transformer) -> None:
        self.built, self.seen = built, {}

    def __call__(self, **inputs: Tensor) -> Any:
        self.seen = inputs
        return self.built(**inputs)


def run(*lengths: int, seed: int = 0, **options: Any) -> tuple[Batch, Recorder, Recorder, Any]:
    generator, discriminator = Recorder(model("masked_lm")), Recorder(model("replaced_token", seed=1))
    objective = make(generator, ReplacedTokenOptions(mask_share=0.5, **options))
    batch = objective.collate(samples(*(lengths or (12, 7, 3))), rng=np.random.default_rng(0))
    torch.manual_seed(seed)
    return batch, generator, discriminator, objective.loss(discriminator, batch)


def original(batch: Batch) -> Tensor:
    assert batch.input_ids is not None and batch.labels is not None
    return torch.where(batch.labels != IGNORED_LABEL, batch.labels, batch.input_ids)


def test_the_generator_reads_masks_and_the_discriminator_what_was_filled_in() -> None:
    batch, generator, discriminator, _ = run()
    assert batch.input_ids is not None and batch.labels is not None
    masked = batch.labels != IGNORED_LABEL
    assert torch.equal(generator.seen["input_ids"], batch.input_ids)
    assert (batch.input_ids[masked] == MASK).all() and masked.sum() == 6 + 4 + 2
    filled = discriminator.seen["input_ids"]
    assert torch.equal(filled[~masked], batch.input_ids[~masked])
    assert not torch.equal(filled[masked], batch.labels[masked])
    assert generator.seen.keys() == discriminator.seen.keys() == {"input_ids", "attention_mask"}


def test_the_terms_are_those_of_the_paper() -> None:
    batch, generator, discriminator, result = run(weight=50.0, generator_weight=2.0)
    assert batch.labels is not None and batch.attention_mask is not None
    logits = generator.built(**batch.model_inputs()).logits.flatten(0, 1)
    masked_lm = F.cross_entropy(logits, batch.labels.flatten())
    filled = discriminator.seen["input_ids"]
    scores = discriminator.built(**discriminator.seen).head("replaced_token")
    real, replaced = batch.attention_mask, (filled != original(batch)).float()
    detection = F.binary_cross_entropy_with_logits(scores[real], replaced[real])
    torch.testing.assert_close(total_loss(result.terms), 2.0 * masked_lm + 50.0 * detection)
    assert list(result.terms) == ["replaced_token", "generator"]
    assert list(result.metrics) == ["accuracy", "replaced_accuracy", "generator_accuracy"]
    assert result.metrics["accuracy"].count == batch.num_tokens == real.sum()
    assert result.metrics["accuracy"].sum == ((scores > 0) == replaced.bool())[real].sum()
    assert result.metrics["generator_accuracy"].count == 12
    assert result.metrics["replaced_accuracy"].count == replaced.sum()
    assert not any(metric.sum.requires_grad for metric in result.metrics.values())


def test_equal_seeds_draw_equal_replacements() -> None:
    first, again, other = (run(seed=seed)[2].seen["input_ids"] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_token_that_the_generator_gets_right_counts_as_original() -> None:
    replaced = torch.tensor([[True, False, False, True]])
    mask = torch.tensor([[True, True, True, False]])
    found = detection_terms(torch.tensor([[3.0, -2.0, 1.0, 9.0]]), replaced, mask)
    expected = F.softplus(torch.tensor([-3.0, -2.0, 1.0])).sum()
    torch.testing.assert_close(found.nll, expected)
    assert (found.correct, found.count, found.found) == (2, 3, 1)
    batch, _, discriminator, result = run()
    same = discriminator.seen["input_ids"] == original(batch)
    assert result.metrics["replaced_accuracy"].count == (~same).sum()


def test_no_gradient_goes_through_the_draw() -> None:
    _, generator, discriminator, result = run()
    result.terms["replaced_token"].sum.backward()
    assert all(parameter.grad is None for parameter in generator.built.parameters())
    assert any(parameter.grad is not None for parameter in discriminator.built.parameters())


def test_draws_follow_the_softmax() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, -math.inf, 2.0, -3.0])
    counts = torch.bincount(draw_tokens(logits.expand(20000, 5) + 50.0), minlength=5)
    torch.testing.assert_close(counts / 20000, logits.softmax(0), atol=0.012, rtol=0)
    assert counts[2] == 0 and draw_tokens(torch.zeros(0, 5)).shape == (0,)


def test_draws_in_chunks_are_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tformer.nn.heads.LOGIT_ELEMENTS", 5 * VOCAB)
    built, places = model("masked_lm"), torch.rand(3, 9) < 0.7
    output = built(input_ids=torch.randint(0, VOCAB, (3, 9)))
    parts = list(output.logit_chunks("masked_lm", places))
    assert max(len(part) for part in parts) == 5
    torch.testing.assert_close(torch.cat(parts), output.logits[places])
    assert [len(part) for part in output.logit_chunks("masked_lm", places & False)] == [0]


# --- learning together -----------------------------------------------------------------------------------------------


def test_generator_and_discriminator_learn_together_through_shared_embeddings() -> None:
    """Sentences repeat one word: the generator learns to fill it in, the discriminator to find what does not repeat."""
    generator, discriminator = model("masked_lm", d_model=16, size=16), model("replaced_token", d_model=32, size=16)
    tie_embeddings(generator, discriminator)
    assert generator.heads["masked_lm"].weight is discriminator.embedding.weight
    objective = make(generator, ReplacedTokenOptions(mask_share=0.3))
    shared = {id(parameter): parameter for built in (generator, discriminator) for parameter in built.parameters()}
    optimizer = torch.optim.AdamW(shared.values(), lr=4e-3)
    rng, losses, found = np.random.default_rng(0), [], []
    for _ in range(150):
        rows = np.array([[CLS, *([word] * 10), SEP] for word in rng.integers(5, VOCAB, size=16)])
        result = objective.loss(discriminator, objective.collate(rows, rng=rng))
        optimizer.zero_grad()
        total_loss(result.terms).backward()
        optimizer.step()
        losses.append([(term.sum / term.count).item() for term in result.terms.values()])
        replaced_accuracy = result.metrics["replaced_accuracy"]
        found.append([int(replaced_accuracy.sum), int(replaced_accuracy.count)])
    detection, masked_lm = np.array(losses).T
    assert detection[:3].mean() > 0.5 and detection[-10:].mean() < 0.15
    assert masked_lm[:3].mean() > 2.8 and masked_lm[-10:].mean() < 2.0
    right, replaced = np.sum(found[-10:], axis=0)
    assert replaced > 100 and right / replaced > 0.8  # no constant guess: replaced tokens are found
