"""Evaluation of any objective: sums over all samples, the same questions every time, training's streams untouched."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tformer.build import build_model
from tformer.data.shards.corpus import Example
from tformer.evaluation.lm import pseudo_perplexity
from tformer.evaluation.predict import GivenSamples, tally_objective
from tformer.objectives import build_objective
from tformer.objectives.base import ObjectiveContext
from tformer.objectives.labelled import ClassificationOptions, RegressionOptions
from tformer.objectives.masked_lm import MaskedLmOptions
from tformer.objectives.next_sentence import NextSentenceOptions
from tformer.objectives.replaced_token import ReplacedTokenOptions
from tformer.recipe.model import Model
from tformer.support.errors import InputError
from tformer.tokenizer.special import SpecialIds
from tformer.workers.work import Work

SPECIAL, VOCAB, SEQ_LEN = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4), 20, 12


def texts_of(count: int = 17, *, score: bool = False) -> GivenSamples:
    rng = np.random.default_rng(0)
    words = [rng.integers(5, VOCAB, size=rng.integers(1, SEQ_LEN - 1)) for _ in range(count)]
    labels = rng.normal(size=count).tolist() if score else rng.integers(0, 2, count).tolist()
    rows = [Example(np.array([2, *row, 3]), label=label) for row, label in zip(words, labels, strict=True)]
    return GivenSamples(rows, SEQ_LEN, np.array(list(map(len, rows))))


def measured(*arguments: Any, **options: Any) -> dict[str, float]:
    return tally_objective(*arguments, **options).metrics()


def build(*heads: str, **options: Any):
    torch.manual_seed(0)
    section = Model(
        d_model=16,
        max_seq_len=SEQ_LEN,
        vocab_size=VOCAB,
        encoder={"num_layers": 1, "num_heads": 2, "positions": {"kind": "learned"}, "dropout": 0.3},
        heads=[{"kind": head, **options} for head in heads],
        init={"std": 0.3},
    )
    return build_model(section, num_labels=2)


def objective_of(*options: Any, generator: Any = None):
    context = ObjectiveContext(SPECIAL, seq_len=SEQ_LEN, vocab_size=VOCAB, generator=generator)
    return build_objective(options, context)


def test_the_loss_is_that_of_all_samples_at_once_whatever_the_batch_size():
    for options, head, score in (
        (ClassificationOptions(word_dropout=0.5), "classifier", False),
        (RegressionOptions(), "regression", True),
    ):
        model, texts = build(head), texts_of(score=score)
        results = [measured(model, objective_of(options), texts, batch_size=size) for size in (1, 4, 100)]
        for result in results:
            assert result == pytest.approx(results[0], rel=1e-5) and result["examples"] == 17
        assert model.training


def test_classification_reports_accuracy_and_no_perplexity():
    model, texts = build("classifier"), texts_of()
    result = measured(model, objective_of(ClassificationOptions()), texts, batch_size=5)
    assert result.keys() == {"loss", "accuracy", "examples"}
    model.eval()
    with torch.no_grad():
        scores = torch.cat([model(torch.tensor(row.ids)[None]).head("classifier") for row in texts.given])
    labels = torch.tensor([row.label for row in texts.given])
    assert result["loss"] == pytest.approx(float(F.cross_entropy(scores, labels)), rel=1e-5)
    assert result["accuracy"] == pytest.approx(float((scores.argmax(1) == labels).float().mean()))


def test_masked_lm_asks_the_same_questions_every_time_and_other_seeds_ask_others():
    model, objective = build("masked_lm"), objective_of(MaskedLmOptions(mask_share=0.3, label_smoothing=0.1))
    first, again, other = (measured(model, objective, texts_of(), batch_size=5, seed=seed) for seed in (1, 1, 2))
    assert first == again and first != other
    assert first.keys() == {"loss", "accuracy", "perplexity", "examples"}
    plain = measured(model, objective_of(MaskedLmOptions(mask_share=0.3)), texts_of(), batch_size=5, seed=1)
    assert first["perplexity"] == pytest.approx(math.exp(plain["loss"]), rel=1e-5)


def test_several_objectives_report_each_term():
    model = build("masked_lm", "next_sentence")
    objective = objective_of(MaskedLmOptions(), NextSentenceOptions(weight=0.5))
    result = measured(model, objective, texts_of(), batch_size=5)
    assert result["loss"] == pytest.approx(result["masked_lm_loss"] + 0.5 * result["next_sentence_loss"])
    assert 0 <= result["next_sentence_accuracy"] <= 1 and "accuracy" in result and "perplexity" in result


def test_replaced_tokens_are_drawn_beside_the_streams_of_training():
    generator = build("masked_lm").eval()
    model = build("replaced_token")
    objective = objective_of(ReplacedTokenOptions(mask_share=0.3), generator=generator)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = measured(model, objective, texts_of(), batch_size=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert measured(model, objective, texts_of(), batch_size=5) == first
    assert first["loss"] == pytest.approx(50 * first["replaced_token_loss"] + first["generator_loss"])
    assert {"accuracy", "generator_accuracy"} <= first.keys() and "perplexity" not in first


def test_interruption_is_polled_before_every_batch():
    seen: list[tuple[int, int]] = []
    answers = iter([False, True])
    result = measured(
        build("classifier"),
        objective_of(ClassificationOptions()),
        texts_of(),
        batch_size=5,
        work=Work(should_stop=lambda: next(answers), report=lambda done, total: seen.append((done, total))),
    )
    assert result["examples"] == 5 and seen == [(5, 17)]
    nothing = measured(
        build("classifier"),
        objective_of(ClassificationOptions()),
        texts_of(),
        batch_size=5,
        work=Work(should_stop=lambda: True),
    )
    assert nothing["examples"] == 0 and math.isnan(nothing["loss"])


def test_no_samples_are_an_error():
    with pytest.raises(InputError, match="0 examples"):
        measured(build("classifier"), objective_of(ClassificationOptions()), texts_of(0), batch_size=5)


@pytest.mark.parametrize("transform", [True, False])
@pytest.mark.parametrize("batch_tokens", [1, 30, 10_000])
def test_pseudo_perplexity_equals_a_plain_loop(transform: bool, batch_tokens: int):
    model = build("masked_lm", transform=transform).eval()
    sequences = [row.ids for row in texts_of(6).given]
    losses = []
    with torch.no_grad():
        for ids in sequences:
            for place in range(1, len(ids) - 1):
                masked = torch.from_numpy(ids.copy())
                masked[place] = SPECIAL.mask
                losses.append(float(F.cross_entropy(model(masked[None]).logits[0, place], torch.tensor(ids[place]))))
    result = pseudo_perplexity(model, sequences, SPECIAL, batch_tokens=batch_tokens)
    assert result["tokens"] == len(losses)
    assert result["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert result["pseudo_perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)


def test_pseudo_perplexity_counts_at_most_the_tokens_asked_for_and_can_be_stopped():
    model, sequences = build("masked_lm"), [row.ids for row in texts_of(6).given]
    assert pseudo_perplexity(model, sequences, SPECIAL, max_tokens=9)["tokens"] == 9
    whole = pseudo_perplexity(model, sequences, SPECIAL)
    assert pseudo_perplexity(model, sequences, SPECIAL, max_tokens=10_000) == whole
    stopped = pseudo_perplexity(model, sequences, SPECIAL, work=Work(should_stop=lambda: True))
    assert stopped["tokens"] == 0 and math.isnan(stopped["pseudo_perplexity"])


def test_pseudo_perplexity_says_what_it_lacks():
    with pytest.raises(InputError, match="mask token"):
        pseudo_perplexity(build("masked_lm"), [np.array([5])], SpecialIds(pad=0))
    with pytest.raises(InputError, match="no tokens"):
        pseudo_perplexity(build("masked_lm"), [np.array([2, 3])], SPECIAL)
