"""The options of `tformer classify`, and the form of its answers.

This module imports no model, so that `--help` is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from tformer.data.sources.reading import ReadsTexts
from tformer.support.bounds import Positive, within
from tformer.support.errors import InputError
from tformer.support.files import STANDARD_INPUT
from tformer.support.formatting import as_cell
from tformer.support.options import (
    IN_ARGUMENT,
    RETURNED,
    AnswerFile,
    Checkpoint,
    Delimiter,
    Device,
    Devices,
    Encoding,
    InputsPerBatch,
    InvalidUtf8,
    Panel,
    Precision,
    Quantize,
    Quotes,
    TableColumn,
    Views,
    argument,
)
from tformer.support.rules import OF_FILES, QUANTIZE_RULE, WITH_INPUT, Checked, exclude, needs

if TYPE_CHECKING:
    import numpy as np

    from tformer.decoding.answer_table import Kind
    from tformer.evaluation.classifier import Classifier
    from tformer.evaluation.scored import Thresholds
    from tformer.evaluation.spans import Marked
    from tformer.nn.classification_heads import LabelKind
    from tformer.recipe.sections import Columns

INPUT, ANSWER = Panel("What to classify"), Panel("The answer")


@dataclass(frozen=True)
class ClassifyOptions(ReadsTexts, Checked):
    """The options of `tformer classify`."""

    RULES = (
        exclude("--text", "--image", "--input"),
        exclude(("--text", "--image"), ("--text-column", "--text2-column", *OF_FILES), hint=WITH_INPUT),
        needs("--text2", "--text"),
        QUANTIZE_RULE,
    )

    arguments: Annotated[
        tuple[str, ...],
        argument(
            "RUN",
            help="Run, checkpoint or Hugging Face folder; after --image further images.",
            default="the newest run",
        ),
    ] = ()
    text: Annotated[str | None, INPUT("--text", help="A text."), IN_ARGUMENT] = None
    text2: Annotated[
        str | None, INPUT("--text2", help="The second text of a pair; the context of a question."), IN_ARGUMENT
    ] = None
    image: Annotated[
        tuple[Path, ...], INPUT("--image", metavar="FILE...", help="An image; more may follow."), IN_ARGUMENT
    ] = ()
    input_path: Annotated[
        str | None,
        INPUT(
            "--input",
            metavar="FILE|-",
            help="Texts, one per line (pairs separated by a tab), or a table (csv, tsv, xlsx, jsonl, parquet), which "
            "comes back with its columns. For image models: paths, one per line, or a folder, zip or IDX file of "
            "images.",
            default="standard input if it is piped",
        ),
        IN_ARGUMENT,
    ] = None
    text_column: Annotated[TableColumn, INPUT] = None
    text2_column: Annotated[str | None, INPUT("--text2-column", metavar="C", help="The second text.", rare=True)] = None
    invalid_utf8: Annotated[InvalidUtf8, INPUT] = "strict"
    encoding: Annotated[Encoding, INPUT] = None
    delimiter: Annotated[Delimiter, INPUT] = None
    quotes: Annotated[Quotes, INPUT] = None
    top: Annotated[Positive | None, ANSWER("--top-k", metavar="K", help="Show the K most probable labels.")] = None
    threshold: Annotated[
        Annotated[float, within(0, 1)] | None,
        ANSWER(
            "--threshold",
            metavar="P",
            help="Several labels, or the second of two classes: given above this probability.",
            default="the run's (evaluate --threshold), else 0.5",
        ),
    ] = None
    views: Annotated[Views, ANSWER] = 1
    output: Annotated[AnswerFile, ANSWER] = None
    as_json: Annotated[
        bool, ANSWER("--json", help="Write one JSON object per input, each on its own line."), RETURNED
    ] = False
    checkpoint: Checkpoint = "best"
    batch_size: InputsPerBatch = None
    device: Device = "auto"
    devices: Devices = None
    precision: Precision = "auto"
    quantize: Quantize = "none"

    def check(self) -> None:
        """Raise InputError for what can be refused before anything is loaded."""
        super().check()
        if self.text is None and not self.image and self.input_path is None and sys.stdin.isatty():
            raise InputError(
                "nothing to classify",
                hint="give --text TEXT, --image FILE or --input FILE, or pipe one text a line into the command",
            )
        if self.output is not None and not self.as_json:
            from tformer.decoding.answer_table import output_format

            output_format(self.output, None)

    def check_model(self, classifier: Classifier) -> None:
        """Raise InputError for inputs and options that the model cannot take."""
        path = classifier.path
        if classifier.reads_images and (self.text is not None or self.text_column or self.text2_column):
            raise InputError(f"{path} classifies images, not texts", hint="give --image FILE")
        if self.image and not classifier.reads_images:
            raise InputError(f"{path} classifies texts, not images", hint="give --text TEXT or --input FILE")
        second = "--text2" if self.text2 is not None else "--text2-column"
        if classifier.reads_pairs is False and (self.text2 is not None or self.text2_column is not None):
            raise InputError(f"{second}: {path} was trained on single texts, not on pairs", hint=f"leave {second} out")
        if classifier.reads_pairs and self.text is not None and self.text2 is None:
            raise InputError(
                f"{path} was trained on pairs of texts, found a single text", hint="give the second with --text2"
            )
        if classifier.kind in ("spans", "answer") and (self.threshold is not None or self.top is not None):
            flag = "--top-k" if self.threshold is None else "--threshold"
            raise InputError(f"{flag}: {path} gives spans of the text, not one label")
        if self.threshold is not None:
            from tformer.evaluation.scored import decided_labels

            decided_labels(classifier.kind, classifier.labels)
        if self.top is not None and classifier.kind == "score":
            raise InputError(f"--top-k: {path} gives a score, not labels")

    @property
    def run(self) -> str | None:
        """The run among the positional arguments; the others are images."""
        runs = [word for word in self.arguments if word not in self._more_images]
        if len(runs) > 1:
            raise InputError(
                f"unexpected argument '{runs[1]}'" + (": no such file" if self.image else ""),
                hint="see 'tformer classify --help'",
            )
        return runs[0] if runs else None

    @property
    def images(self) -> list[Path]:
        """All images: `--image *.png` gives the first as an option and the others as arguments."""
        return [*self.image, *map(Path, self._more_images)]

    @property
    def _more_images(self) -> list[str]:
        return [word for word in self.arguments if self.image and Path(word).is_file()]

    @property
    def files(self) -> list[str]:
        """The inputs as they were written; `-`: standard input."""
        if self.text is not None:
            return []
        return list(map(str, self.images)) or [self.input_path or STANDARD_INPUT]

    def columns(self, trained: Columns) -> Columns:
        """The columns of the training, overridden by those named on the command line."""
        from tformer.data.sources.columns import parse_column

        named = {"text": self.text_column, "text2": self.text2_column}
        updates = {name: parse_column(column) for name, column in named.items() if column is not None}
        return trained.model_copy(update={"label": None, **updates})


@dataclass(frozen=True)
class SpanFormat:
    """The form of labelled spans: [PER Ada Lovelace] inside the text, or a JSON object.

    paint: gives a part of the line its colour, by its label ("": outside of spans).
    """

    columns: ClassVar[list[tuple[str, Kind]]] = [("spans", "list")]
    paint: Callable[[str, str], str] = lambda text, label: text

    def line(self, answer: Marked) -> str:
        """The text in one line, each span in brackets behind its label."""
        parts, done = list[tuple[str, str]](), 0
        for span in answer.spans:
            parts += [(answer.text[done : span.start], ""), (f"[{span.label} {span.text}]", span.label)]
            done = span.end
        return "".join(self.paint(as_cell(part), label) for part, label in [*parts, (answer.text[done:], "")])

    def cells(self, answer: Marked) -> list[Any]:
        """One cell: a list of `LABEL text`."""
        return [[f"{span.label} {span.text}" for span in answer.spans]]

    def document(self, answer: Marked) -> dict[str, Any]:
        """`spans`: start, end (characters), text, label and probability of each."""
        return {"spans": [asdict(span) for span in answer.spans]}


@dataclass(frozen=True)
class FoundFormat(SpanFormat):
    """The form of answers to questions: the answer and its probability; an empty one says that there is none."""

    columns: ClassVar[list[tuple[str, Kind]]] = [("answer", "text"), ("probability", "number")]

    def line(self, answer: Marked) -> str:
        text, probability = self.cells(answer)
        return self.paint(f"{as_cell(text)}\t{probability:.4f}", "")

    def cells(self, answer: Marked) -> list[Any]:
        [span] = answer.spans
        return [span.text, span.probability]


@dataclass(frozen=True)
class AnswerFormat:
    """The form of an answer: a line for people and pipes, or a JSON object.

    Attributes:
        kind: of the model.
        names: of its labels.
        top: number of labels, the most probable first; None: the best class, or the labels above the threshold.
        threshold: labels, or the second of two classes, are given above this probability; None: 0.5.
    """

    kind: LabelKind
    names: tuple[str, ...]
    top: int | None = None
    threshold: Thresholds | float | None = None

    @classmethod
    def of(cls, classifier: Any, options: ClassifyOptions, *, paint: Callable[[str, str], str] | None = None) -> Any:
        """The form of the answers of a classifier, or of a model that labels spans."""
        if form := {"spans": SpanFormat, "answer": FoundFormat}.get(classifier.kind):
            return form() if paint is None else form(paint)
        threshold = classifier.thresholds if options.threshold is None else options.threshold
        return cls(classifier.kind, classifier.labels, top=options.top, threshold=threshold)

    def line(self, values_L: np.ndarray) -> str:
        """Labels and their probabilities in turn, with tabs between them; for a regression the score.

        A multi-label model gives its labels above the threshold, joined by commas, and then their probabilities.

        values_L: probabilities, or the score [1].
        """
        if self.kind == "score":
            return f"{values_L[0]:.4f}"
        if self.kind == "labels" and self.top is None:
            chosen = self._given(values_L)
            names = (as_cell(self.names[index]) for index in chosen)
            return ",".join(names) + "\t" + ",".join(f"{values_L[index]:.4f}" for index in chosen)
        shown = self._given(values_L) if self.top is None else self._best(values_L)
        return "\t".join(f"{as_cell(self.names[index])}\t{values_L[index]:.4f}" for index in shown)

    @property
    def columns(self) -> list[tuple[str, Kind]]:
        """The columns of an answer in a table: the label, its probability, and each class's probability.

        With `top` the K best labels, each with its probability; of several labels a list; of a regression the score.
        """
        if self.kind == "score":
            return [("score", "number")]
        if self.top is not None:
            ranks = range(1, min(self.top, len(self.names)) + 1)
            both: tuple[tuple[str, Kind], ...] = (("label", "text"), ("probability", "number"))
            return [(f"{name}_{rank}", kind) for rank in ranks for name, kind in both]
        first: list[tuple[str, Kind]] = [("label", "text"), ("probability", "number")]
        return [*([("labels", "list")] if self.kind == "labels" else first), *((name, "number") for name in self.names)]

    def cells(self, values_L: np.ndarray) -> list[Any]:
        """An answer in the order of `columns`."""
        values = [float(value) for value in values_L]
        if self.kind == "score":
            return values
        if self.top is not None:
            return [cell for index in self._best(values_L) for cell in (self.names[index], values[index])]
        given = self._given(values_L)
        if self.kind == "labels":
            return [[self.names[index] for index in given], *values]
        return [self.names[given[0]], values[given[0]], *values]

    def document(self, values_L: np.ndarray) -> dict[str, Any]:
        """`label` (or `labels`) and `probabilities`, the highest first; or `score`."""
        if self.kind == "score":
            return {"score": float(values_L[0])}
        probabilities = {self.names[index]: float(values_L[index]) for index in self._best(values_L)}
        labels = [self.names[index] for index in self._given(values_L)]
        return {
            **({"labels": labels} if self.kind == "labels" else {"label": labels[0]}),
            "probabilities": probabilities,
        }

    def _best(self, values_L: np.ndarray) -> list[int]:
        """The numbers of the labels, or of the `top` ones, the most probable first."""
        return [int(index) for index in (-values_L).argsort(kind="stable")[: self.top]]

    def _given(self, values_L: np.ndarray) -> list[int]:
        """Numbers of the predicted labels, the most probable first; one for classes."""
        from tformer.evaluation.scored import decide

        [found] = decide(self.kind, values_L[None], self.threshold)
        return [index for index in self._best(values_L) if found[index]] if self.kind == "labels" else [int(found)]
