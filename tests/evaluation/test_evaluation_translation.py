"""Evaluation of pairs: the loss of a plain loop, own outputs beside references, mistakes, scores of given targets."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tformer.build import build_model
from tformer.data.shards.pair_tokens import join_pairs, tokenize_pairs
from tformer.data.sources.tables import PairRow
from tformer.decoding.settings import BeamSettings
from tformer.decoding.translate import Translation, Translator
from tformer.evaluation.translation import (
    Outputs,
    evaluate_pairs,
    output_metrics,
    translate_pairs,
    translation_metrics,
    wrong_outputs,
)
from tformer.objectives import build_objective
from tformer.objectives.base import ObjectiveContext
from tformer.objectives.seq2seq import Seq2SeqOptions
from tformer.recipe.model import Model
from tformer.support.errors import InputError
from tformer.tokenizer import TokenizerOptions, train_tokenizer
from tformer.tokenizer.special import decoder_tokens
from tformer.workers.work import Work

CONTEXT = 20
ROWS = [
    ("abc", "cba"),
    ("hgfed", "defgh"),
    ("a b", "b a"),
    ("", ""),
    ("cab", "bac"),
    ("dead beef", "feeb daed"),
    ("h", "h"),
]
TOKENIZER = train_tokenizer(
    lambda: iter(["abcdefgh "]), TokenizerOptions(model="char", template="seq2seq", min_frequency=1)
)
TARGET = decoder_tokens(TOKENIZER.special)


class Rows:
    name = "rows"

    def __init__(self, rows=ROWS, task: str = "") -> None:
        self._rows, self._task = rows, task

    def rows(self):
        return (PairRow(source, target, f"rows:{n}", self._task) for n, (source, target) in enumerate(self._rows, 1))

    def fingerprint(self) -> str:
        return repr(self._rows)

    def size_bytes(self) -> int | None:
        return None


def pairs_of(rows=ROWS, seq_len: int = CONTEXT):
    return tokenize_pairs(
        [Rows(rows)], TOKENIZER, TOKENIZER, seq_len=seq_len, target_seq_len=seq_len, eos=TARGET.eos, keep_all=True
    )


def make():
    torch.manual_seed(0)
    stack = {"num_layers": 1, "num_heads": 2, "feedforward": {"d_ff": 16}, "dropout": 0.3}
    values = {"d_model": 8, "max_seq_len": CONTEXT, "encoder": stack, "decoder": stack, "tie": {"output": False}}
    model = build_model(Model.model_validate(values), vocab_size=TOKENIZER.vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    return model.eval()


def objective(**options):
    context = ObjectiveContext(
        TOKENIZER.special, seq_len=CONTEXT, vocab_size=TOKENIZER.vocab_size, target=TARGET, target_seq_len=CONTEXT
    )
    return build_objective([Seq2SeqOptions(**options)], context)


def translator(model, *, max_source: int = CONTEXT, **settings) -> Translator:
    chosen = BeamSettings(**{"beam_size": 3, "max_new_tokens": 9, **settings})
    return Translator([model], TOKENIZER, TOKENIZER, settings=chosen, target=TARGET, max_source=max_source)


def evaluate_translation(translator, pairs, **options):
    return output_metrics(translate_pairs(translator, pairs), pairs, **options)


def test_the_loss_is_that_of_a_plain_loop_whatever_the_batch():
    model, nll, correct = make(), [], []
    for source, target in ROWS:
        ids = TOKENIZER.encode(target)
        labels = torch.tensor([*ids, TARGET.eos])
        with torch.no_grad():
            logits = model(
                torch.tensor([TOKENIZER.encode(source, template=True)]),
                decoder_input_ids=torch.tensor([[TARGET.start, *ids]]),
            ).logits[0]
        nll.append(F.cross_entropy(logits, labels, reduction="none"))
        correct.append(logits.argmax(1) == labels)
    expected, accuracy = float(torch.cat(nll).mean()), float(torch.cat(correct).float().mean())
    model.train()
    for batch_tokens in (1, 20, 4096):
        figures = evaluate_pairs(model, objective(word_dropout=0.5), pairs_of(), batch_tokens=batch_tokens)
        assert figures["loss"] == pytest.approx(expected, rel=1e-5)
        assert figures["accuracy"] == pytest.approx(accuracy) and figures["examples"] == len(ROWS)
        assert figures["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    smooth = evaluate_pairs(model, objective(label_smoothing=0.3), pairs_of(), batch_tokens=99, batch_size=2)
    assert smooth["loss"] != pytest.approx(expected) and smooth["perplexity"] == pytest.approx(
        math.exp(expected), rel=1e-5
    )


def test_several_tasks_have_a_loss_and_a_bleu_each_and_the_whole_stays():
    parts = [ROWS[:3], ROWS[4:6], ROWS[6:]]
    tasks = [
        tokenize_pairs([Rows(rows, task)], TOKENIZER, TOKENIZER, seq_len=CONTEXT, target_seq_len=CONTEXT,
                       eos=TARGET.eos, keep_all=True)
        for rows, task in zip(parts, ("one", "two", ""), strict=True)
    ]  # fmt: skip
    together, model, seen = join_pairs(tasks), make(), []
    figures = evaluate_pairs(
        model, objective(), together, batch_tokens=60, work=Work(report=lambda done, total: seen.append((done, total)))
    )
    plain = evaluate_pairs(model, objective(), pairs_of([row for rows in parts for row in rows]), batch_tokens=60)
    assert {name: figures[name] for name in plain} == pytest.approx(plain, rel=1e-5)
    assert seen[-1] == (6, 6) and [done for done, _ in seen] == sorted(done for done, _ in seen)
    for task, alone in zip(("one", "two"), tasks[:2], strict=True):
        expected = evaluate_pairs(model, objective(), alone, batch_tokens=60)["loss"]
        assert figures[f"loss.{task}"] == pytest.approx(expected, rel=1e-5)
        outputs = evaluate_translation(translator(model), together)
        assert outputs[f"bleu.{task}"] == pytest.approx(evaluate_translation(translator(model), alone)["bleu"])
    assert not [name for name in (*plain, *evaluate_translation(translator(model), tasks[0])) if "." in name]


def test_metrics_have_signatures_and_count_exact_matches():
    figures = translation_metrics(["A cat.", "no"], ["a cat.", "no"])
    assert figures.keys() == {"bleu", "bleu_signature", "chrf", "chrf_signature", "sequence_accuracy"}
    assert figures["sequence_accuracy"] == 0.5 and "tok:13a" in figures["bleu_signature"]
    lower = translation_metrics(["A cat.", "no"], ["a cat.", "no"], lowercase=True)
    assert lower["sequence_accuracy"] == 1 and lower["chrf"] == pytest.approx(100) and "lc" in lower["chrf_signature"]
    assert "tok:char" in translation_metrics(["a"], ["a"], tokenize="char")["bleu_signature"]
    with pytest.raises(InputError, match="'14a'"):
        translation_metrics(["a"], ["a"], tokenize="14a")


def test_of_a_long_reference_the_beginning_is_compared(monkeypatch):
    model = make()
    rows = [(source, target + " and so on" * 20) for source, target in ROWS]
    short = pairs_of([(source, target[:12]) for source, target in rows])
    expected = evaluate_translation(translator(model), short)
    monkeypatch.setattr("tformer.evaluation.translation.COMPARED_CHARACTERS", 12)
    assert evaluate_translation(translator(model), pairs_of(rows)) == expected


def test_own_outputs_are_compared_with_the_references():
    model, seen = make(), []
    one = translator(model)
    outputs = translate_pairs(one, pairs_of(), work=Work(report=lambda done, total: seen.append((done, total))))
    assert outputs.sources == [source for source, _ in ROWS] and outputs.references == [target for _, target in ROWS]
    assert seen == [(n, len(ROWS)) for n in range(1, len(ROWS) + 1)]
    assert outputs.texts == [ones[0].text for ones in one.translate(outputs.sources)] and outputs.texts[3] == ""
    figures = evaluate_translation(one, pairs_of(), lowercase=True, tokenize="char")
    assert figures == translation_metrics(outputs.texts, outputs.references, lowercase=True, tokenize="char")
    perfect = pairs_of([(source, text) for source, text in zip(outputs.sources, outputs.texts, strict=True)])
    assert evaluate_translation(one, perfect)["sequence_accuracy"] == 1


def test_sources_longer_than_the_model_reads_are_cut_and_counted():
    one = translator(make(), max_source=6)
    outputs = translate_pairs(one, pairs_of())
    assert one.cut == 2 and len(outputs.texts) == len(ROWS)


def test_interruption_leaves_the_rest_undone():
    outputs = translate_pairs(translator(make()), pairs_of(), work=Work(should_stop=lambda: True))
    reasons = [translation.finish_reason for translation in outputs.translations]
    assert reasons.count("interrupted") == len(ROWS) - 1  # the empty one is done


def test_wrong_outputs_come_with_the_surest_first():
    made = [("a", -3.0), ("B", -1.0), ("c", -0.5), ("d", -2.0)]
    translations = [Translation(text, (), score, score, "eos") for text, score in made]
    outputs = Outputs(["s"] * 4, ["x", "b", "c", "y"], translations, ["x", "b", "c", "y"])
    assert wrong_outputs(outputs) == [1, 3, 0] and wrong_outputs(outputs, lowercase=True) == [3, 0]


def test_whole_sequences_are_compared_as_the_model_writes_them():
    """A tokenizer of words writes "vida." for "vida .": that is right, and no mistake; an unknown word stays one."""
    options = TokenizerOptions(model="word", template="seq2seq", min_frequency=1)
    words = train_tokenizer(lambda: iter(["la vida .", "el sol ."]), options)
    outputs = [Translation(text, (), 0.0, 0.0, "eos") for text in ("la vida.", "el sol.", "el")]
    references = ["la vida .", "el sol .", "el otro"]
    found = Outputs(["s"] * 3, references, outputs, list(map(words.written, references)))
    assert wrong_outputs(found) == [2]
    assert output_metrics(found, pairs_of())["sequence_accuracy"] == pytest.approx(2 / 3)
