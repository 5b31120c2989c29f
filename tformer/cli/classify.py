"""`tformer classify`: labels and probabilities (or a score) for texts, pairs of texts and images."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tformer.cli.classify_input import (
    BLOCK_IMAGES,
    STANDARD_INPUT,
    Text,
    blocks,
    is_image_set,
    line_blocks,
    name_of,
    text_blocks,
)
from tformer.cli.classify_output import AnswerFormat
from tformer.cli.classify_request import Asked, sort_out
from tformer.cli.options import (
    Quantize,
    check_quantize,
)
from tformer.cli.report import (
    StopFlag,
    console,
    examples,
    refuse_to_replace,
)
from tformer.errors import InputError, visible

if TYPE_CHECKING:
    import numpy as np

    from tformer.decoding.output import Write
    from tformer.evaluation.classifier import Classifier

INPUT, ANSWER, MODEL = "What to classify", "The answer", "Model and machine"

TRAIN = "train --arch bert --data FILE (or of images: --arch vit)"

EPILOG = examples(
    '`tformer classify --text "Who wrote Hamlet ?"`',
    "`tformer classify runs/bert-tiny-1 --input texts.txt --output labels.tsv --top 3`",
    "`tformer classify runs/vit-mnist-1 --image three.png --json`",
)


def classify(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Run, checkpoint or Hugging Face folder; default: the newest run. After --image: further images.",
        ),
    ] = None,
    text: Annotated[str | None, typer.Option("--text", help="A text.", rich_help_panel=INPUT)] = None,
    text2: Annotated[
        str | None,
        typer.Option("--text2", help="The second text, for a model of pairs.", rich_help_panel=INPUT),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", metavar="FILE...", help="An image; more may follow.", rich_help_panel=INPUT),
    ] = None,
    input_path: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="FILE|-",
            help="One text a line (a pair: parted by a tab), or csv, tsv, jsonl, parquet. Of images: one path a line, "
            "a folder, zip or IDX file. Default: standard input, when something is piped into it.",
            rich_help_panel=INPUT,
        ),
    ] = None,
    text_column: Annotated[
        str | None,
        typer.Option(
            "--text-column", metavar="C", help="Of a table: name or number; default: as trained.", rich_help_panel=INPUT
        ),
    ] = None,
    text2_column: Annotated[
        str | None, typer.Option("--text2-column", metavar="C", help="The second text.", rich_help_panel=INPUT)
    ] = None,
    errors: Annotated[
        str,
        typer.Option("--errors", metavar="strict|replace", help="Invalid UTF-8 in --input.", rich_help_panel=INPUT),
    ] = "strict",
    top: Annotated[
        int | None, typer.Option("--top", metavar="K", help="The K most probable labels.", rich_help_panel=ANSWER)
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            "--threshold",
            metavar="P",
            help="Several labels: those above this probability (default 0.5).",
            rich_help_panel=ANSWER,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="A file instead of standard output.", rich_help_panel=ANSWER)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per input, one a line.", rich_help_panel=ANSWER)
    ] = False,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="best|latest|step-N", help="Of the run.", rich_help_panel=MODEL)
    ] = "best",
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            help="Inputs at a time; default: by their length. Changes speed alone.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda[:i]", rich_help_panel=MODEL)] = "auto",
    precision: Annotated[
        str, typer.Option("--precision", metavar="auto|fp32|bf16|fp16", rich_help_panel=MODEL)
    ] = "auto",
    quantize: Quantize = "none",
) -> None:
    """Label texts, pairs of texts or images with a trained model, one line of output for each, in order.

    A line holds the label and its probability, parted by a tab (with --top K the K best, pair after pair); of a model
    with several labels an input, those that hold, joined by commas; of a regression the score. An empty line is
    answered like any other.
    """
    run, images = sort_out(arguments or [], image or [])
    asked = Asked(text, text2, tuple(images), input_path, text_column, text2_column, errors, top, threshold)
    asked.check(batch_size)
    check_quantize(quantize, precision)
    refuse_to_replace(output, asked.files)
    from tformer.decoding.output import open_output

    with StopFlag() as flag, open_output(output) as write:
        from tformer.decoding.inference import (
            inference_dtype,
            prepare_inference,
        )
        from tformer.device import resolve_device
        from tformer.evaluation.classifier import HEADS, Classifier
        from tformer.loading import load

        place = resolve_device(device)
        try:
            loaded = load(run, device=place, which=checkpoint, kinds=HEADS)
        except InputError as error:  # who looks for runs cannot know which kind is wanted
            error.hint = error.hint and error.hint.replace("train --arch gpt", TRAIN)
            raise
        dtype = inference_dtype(precision, trained_in=loaded.recipe.training.precision, device=place)
        prepare_inference(loaded.model, dtype, quantize=quantize)
        for note in (f"classifying with {loaded.path}", *loaded.notes):
            console.print(note, style="dim", markup=False)
        classifier = Classifier(loaded, batch_size=batch_size, should_stop=flag.should_stop)
        asked.check_model(classifier)
        form = AnswerFormat(
            classifier.kind, classifier.labels, top=top, threshold=0.5 if threshold is None else threshold
        )
        on_terminal = output is None and sys.stdout.isatty()
        _Session(classifier, form, flag, write, as_json=as_json, on_terminal=on_terminal).answer(asked)


class _Session:
    """A classifier, and where its answers go."""

    def __init__(
        self,
        classifier: Classifier,
        form: AnswerFormat,
        flag: StopFlag,
        write: Write,
        *,
        as_json: bool,
        on_terminal: bool,
    ) -> None:
        self.classifier, self.form, self.flag, self.write = classifier, form, flag, write
        self.as_json, self.on_terminal = as_json, on_terminal
        self.done = 0

    def answer(self, asked: Asked) -> None:
        """Every input in its order; blocks are classified and written one after the other."""
        if self.classifier.reads_images:
            for scores_NL, places in self._of_images(asked):
                self._write(self._until_stopped(scores_NL), places=places)
            return
        for texts in self._text_blocks(asked):
            self._write(self._until_stopped(self.classifier.classify(texts)))
        if self.classifier.truncated:
            cut, length = self.classifier.truncated, self.classifier.seq_len
            console.print(f"{cut:,} of {self.done:,} texts are longer than {length} tokens and were cut", markup=False)

    def _text_blocks(self, asked: Asked) -> Iterator[Sequence[Text]]:
        if asked.text is not None:
            return iter([[(asked.text, asked.text2)]])
        return text_blocks(
            asked.input_path or STANDARD_INPUT,
            pairs=True if asked.text2_column is not None else self.classifier.reads_pairs,
            columns=asked.columns(self.classifier.columns),
            by_column=asked.text_column is not None or asked.text2_column is not None,
            errors=asked.utf8,
        )

    def _of_images(self, asked: Asked) -> Iterator[tuple[np.ndarray, Sequence[str]]]:
        """Scores and names of images: those of `--image`, of a set of them, or named line by line."""
        source = asked.input_path or STANDARD_INPUT
        if asked.images:
            for places in blocks(iter(map(str, asked.images)), BLOCK_IMAGES):
                yield self.classifier.classify_images([Path(place) for place in places]), places
        elif source != STANDARD_INPUT and is_image_set(Path(source)):
            images = self.classifier.open_image_set(source)
            for note in images.notes:
                console.print(note, markup=False)
            for start in range(0, len(images), BLOCK_IMAGES):
                part = images.subset(range(start, min(start + BLOCK_IMAGES, len(images))))
                yield self.classifier.scores(part), part.places
        else:
            number = 1
            for places in line_blocks(source, errors=asked.utf8, size=BLOCK_IMAGES):
                lines = [f"{name_of(source)}:{number + index}" for index in range(len(places))]
                yield self.classifier.classify_images([Path(place) for place in places], named_in=lines), places
                number += len(places)

    def _until_stopped(self, scores_NL: np.ndarray) -> np.ndarray:
        if self.flag.should_stop():
            raise self.flag.interrupted(f"interrupted after {self.done:,} inputs")
        self.done += len(scores_NL)
        return self.classifier.probabilities(scores_NL)

    def _write(self, values_NL: np.ndarray, *, places: Sequence[str] | None = None) -> None:
        if self.as_json:
            documents = [self.form.document(values_L) for values_L in values_NL]
            if places is not None:
                documents = [{"image": place, **answer} for place, answer in zip(places, documents, strict=True)]
            # ASCII alone on a terminal: JSON leaves some control characters as they are.
            lines = [json.dumps(answer, ensure_ascii=self.on_terminal, allow_nan=False) for answer in documents]
        else:
            lines = [self.form.line(values_L) for values_L in values_NL]
        block = "".join(f"{line}\n" for line in lines)
        self.write(visible(block) if self.on_terminal else block)
