"""Metrics of models of pairs: loss on given targets; BLEU, chrF and sequence accuracy of decoded outputs.

Loss, accuracy and perplexity are those of teacher forcing. BLEU and chrF compare detokenized outputs with the
references; each score comes with its signature, which makes it comparable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from tformer.data.shards.pair_tokens import PairTokens
from tformer.data.sources.tables import PairRow, RowSource
from tformer.decoding.translate import Translation, Translator
from tformer.evaluation.mistakes import names_of_rows, write_examples
from tformer.evaluation.predict import Tally, tally_objective
from tformer.metrics.text import bleu, chrf, same_text, sequence_accuracy
from tformer.objectives.base import Objective
from tformer.workers.work import QUIET, Work

COMPARED_CHARACTERS = 1 << 18  # of a reference: BLEU and chrF take up to 300 bytes for each


@dataclass(frozen=True)
class Outputs:
    """Sources, references and the best translation of each pair; targets: the references as the model writes them."""

    sources: list[str]
    references: list[str]
    translations: list[Translation]
    targets: list[str]

    @property
    def texts(self) -> list[str]:
        return [translation.text for translation in self.translations]


def evaluate_pairs(
    model: nn.Module,
    objective: Objective,
    pairs: PairTokens,
    *,
    batch_tokens: int,
    batch_size: int | None = None,
    seed: int = 0,
    work: Work = QUIET,
) -> dict[str, float]:
    """The metrics of all pairs. If there are several named tasks, adds the loss of each as `loss.<task>`.

    batch_size: pairs at a time; None: as many as make `batch_tokens` tokens of the longer side.
    """
    parts = {"": pairs}
    if pairs.named_tasks:
        parts = {task: pairs.subset(of_task) for task in pairs.tasks if len(of_task := pairs.of_task(task))}
    total, losses = Tally(), dict[str, float]()
    for task, part in parts.items():
        tally = tally_objective(
            model,
            objective,
            part,
            batch_size=batch_size,
            batch_tokens=batch_tokens,
            seed=seed,
            work=work.piece(total.examples, len(pairs)),
        )
        total.add(tally)
        losses[task] = tally.metrics()["loss"]
    return total.metrics() | {f"loss.{task}": losses[task] for task in pairs.named_tasks}


def output_metrics(
    outputs: Outputs, pairs: PairTokens, *, tokenize: str = "13a", lowercase: bool = False
) -> dict[str, Any]:
    """`translation_metrics` of the outputs. If there are several named tasks, adds the BLEU of each as `bleu.<task>`.

    Compares the first `COMPARED_CHARACTERS` of a reference.
    """
    options: dict[str, Any] = {"tokenize": tokenize, "lowercase": lowercase}
    compared = [reference[:COMPARED_CHARACTERS] for reference in outputs.references]
    metrics = translation_metrics(outputs.texts, compared, outputs.targets, **options)
    for task in pairs.named_tasks:
        texts, references = ([side[n] for n in pairs.of_task(task)] for side in (outputs.texts, compared))
        metrics[f"bleu.{task}"] = bleu(texts, references, **options).score
    return metrics


def translate_pairs(translator: Translator, pairs: PairTokens, *, batch_size: int = 32, work: Work = QUIET) -> Outputs:
    """The best translation of each source; sources longer than the model reads are cut.

    work: reports the finished pairs; translations that it interrupts have the finish reason `interrupted`.
    """
    texts = [pairs.texts(index) for index in range(len(pairs))]
    sources, references = [source for source, _ in texts], [reference for _, reference in texts]
    done = 0

    def count(_row: int, _translations: list[Translation]) -> None:
        nonlocal done
        done += 1
        work.report(done, len(pairs))

    found = translator.translate(
        sources, batch_size=batch_size, should_stop=work.should_stop, on_text=count, too_long="cut", worker=work.worker
    )
    targets = [translator.target_tokenizer.written(reference) for reference in references]
    return Outputs(sources, references, [translations[0] for translations in found], targets)


def translation_metrics(
    hypotheses: Sequence[str],
    references: Sequence[str],
    targets: Sequence[str] | None = None,
    *,
    tokenize: str = "13a",
    lowercase: bool = False,
) -> dict[str, Any]:
    """BLEU and chrF (0 to 100) with their signatures, and the share of outputs equal to their target.

    targets: the references as the model writes them; None: as they are. tokenize: of BLEU;
    InputError for one that is unknown or not installed. lowercase: ignore case in all metrics.
    """
    words = bleu(hypotheses, references, tokenize=tokenize, lowercase=lowercase)
    characters = chrf(hypotheses, references, lowercase=lowercase)
    return {
        "bleu": words.score,
        "bleu_signature": words.signature,
        "chrf": characters.score,
        "chrf_signature": characters.signature,
        "sequence_accuracy": sequence_accuracy(hypotheses, targets or references, lowercase=lowercase),
    }


def wrong_outputs(outputs: Outputs, *, lowercase: bool = False) -> list[int]:
    """Indices of the pairs with an output that differs from the reference, sorted by decreasing score of the output."""
    pairs = zip(outputs.texts, outputs.targets, strict=True)
    wrong = [
        index for index, (text, reference) in enumerate(pairs) if not same_text(text, reference, lowercase=lowercase)
    ]
    return sorted(wrong, key=lambda index: (-outputs.translations[index].score, index))


def write_wrong_outputs(path: Path, outputs: Outputs, sources: Iterable[RowSource], *, lowercase: bool = False) -> int:
    """Write the pairs of `wrong_outputs`, each with its row in the sources, and return their number."""
    wrong = wrong_outputs(outputs, lowercase=lowercase)
    both = list(zip(outputs.sources, outputs.references, strict=True))
    rows: dict[tuple[str, str], list[PairRow]] = {both[index]: [] for index in wrong}
    for row in chain.from_iterable(source.rows() for source in sources):
        if (row.source, row.target) in rows:
            rows[row.source, row.target].append(row)
    of_pair = {index: rows[both[index]].pop(0) for index in sorted(wrong)}  # equal pairs in their order
    columns, named = names_of_rows([of_pair[index] for index in wrong])
    documents = (
        {
            **names,
            "source": outputs.sources[index],
            "reference": outputs.references[index],
            "output": outputs.translations[index].text,
            "score": outputs.translations[index].score,
        }
        for index, names in zip(wrong, named, strict=True)
    )
    write_examples(path, (*columns, "source", "reference", "output", "score"), documents, formats={"score": ".4f"})
    return len(wrong)
