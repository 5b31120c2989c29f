"""`tformer classify`: labels and probabilities (or a score) for texts, pairs of texts and images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tformer.cli.command import examples, takes_options
from tformer.cli.help import has_colours
from tformer.cli.report import DataOutput, console, data_output, show_notes
from tformer.cli.workers import answer_in_workers
from tformer.evaluation.answers import AnswerFormat, ClassifyOptions
from tformer.support.errors import InputError, visible
from tformer.support.files import STANDARD_INPUT

if TYPE_CHECKING:
    import numpy as np

    from tformer.cli.process import StopFlag
    from tformer.data.sources.labelled import LabelledSource
    from tformer.evaluation.classifier import Classifier
    from tformer.loading import Loaded
    from tformer.workers.worker import Worker

BLOCK_IMAGES = 256
TRAIN = "train --arch bert --data FILE (or of images: --arch vit)"

EPILOG = examples(
    '`tformer classify --text "Who wrote Hamlet ?"`',
    "`tformer classify --input texts.csv --output labels.csv --top-k 3`",
    "`tformer classify runs/vit-mnist-1 --image three.png --json`",
)


@takes_options
def classify(options: ClassifyOptions) -> None:
    """Label texts, pairs of texts or images with a trained model.

    Every line gives one line of output, in order: the label and its probability, separated by a tab (with --top-k K:
    the K best labels, each followed by its probability). Multi-label models give the labels above the threshold, joined
    by commas; regressions give the score. A model that labels words gives the text with its labelled spans in brackets,
    [PER Ada Lovelace]; one of questions (--text) and contexts (--text2) the answer. An empty line is classified like
    any other. A table comes back with its columns and, behind them, label, probability and the probability of each
    class.
    """
    run = options.run

    def answer(worker: Worker, flag: StopFlag) -> None:
        from tformer.tasks.readers import reader_of
        from tformer.workers.work import Work

        with data_output(options.output, worker) as output:
            loaded = worker.in_turn(lambda: _load(run, options))  # the first compiles kernels for all
            show_notes([f"classifying with {loaded.path}", *loaded.notes], dim=True)
            work = Work(should_stop=flag.should_stop)
            classifier = reader_of(loaded)(loaded, batch_size=options.batch_size, views=options.views, work=work)
            options.check_model(classifier)
            _ClassifySession(classifier, options, flag, output).run()

    answer_in_workers("classify", options, answer)


def _load(run: str | None, options: ClassifyOptions) -> Loaded:
    from tformer.decoding.inference import prepare_loaded
    from tformer.evaluation.classifier import HEADS
    from tformer.loading import load
    from tformer.support.device import resolve_device

    try:
        loaded = load(run, device=resolve_device(options.device), which=options.checkpoint, kinds=HEADS, lazily=True)
    except InputError as error:  # `load` hints at training a language model
        error.hint = error.hint and error.hint.replace("train --arch gpt", TRAIN)
        raise
    prepare_loaded(loaded, options.precision, options.quantize)
    return loaded


class _ClassifySession:
    """Classifies every input in its order and writes the answers, block after block."""

    def __init__(self, classifier: Classifier, options: ClassifyOptions, flag: StopFlag, output: DataOutput) -> None:
        from tformer.cli.answers import Answers

        self.classifier, self.options, self.flag, self.output = classifier, options, flag, output
        paint = _painted if output.on_terminal and has_colours() and not options.as_json else None
        self.form, images = AnswerFormat.of(classifier, options, paint=paint), classifier.reads_images
        if options.threshold is None and classifier.thresholds is not None:
            show_notes([f"stored with the run: {classifier.thresholds.describe()}"], dim=True)
        self.pairs = True if options.text2_column or options.text2 is not None else classifier.reads_pairs
        self.source = None if images else self._open_table()
        inputs = ["image"] if images else ["text", "text2"] if self.pairs else ["text"]
        columns, separator = self.form.columns, classifier.label_separator
        self.answers = Answers(output, options, self.source, inputs=inputs, columns=columns, separator=separator)

    def run(self) -> None:
        """Answer all inputs, and say how many texts were cut."""
        images, one = self.classifier.reads_images, self.options.text is not None or self.options.image
        unit = "images" if images else "lines" if self.source is None else "rows"
        with self.answers.written("" if one else unit):
            blocks = self._image_blocks() if images else self._text_blocks()
            for score, inputs in self.output.take_turns(blocks, self.flag):
                self._answer(score(), inputs)
        cut, done = self.output.total(self.classifier.truncated), self.output.total(self.answers.done)
        if cut:
            length = self.classifier.seq_len
            console.print(f"{cut:,} of {done:,} texts are longer than {length} tokens and were cut", markup=False)

    def _open_table(self) -> LabelledSource | None:
        from tformer.decoding.lines import open_texts_or_pairs, reads_table

        options, path = self.options, self.options.input_path or STANDARD_INPUT
        if options.text is not None or not reads_table(options):
            return None
        columns = options.columns(self.classifier.columns)
        source = open_texts_or_pairs(path, pairs=self.pairs, columns=columns, reading=options.reading)
        show_notes(source.notes)
        return source

    def _text_blocks(self) -> Iterator[tuple[Callable[[], np.ndarray], Sequence[Sequence[Any]]]]:
        """Blocks of texts from `--text`, a table or lines: (function that returns the scores, texts)."""
        from tformer.decoding.lines import row_blocks, text_blocks

        options, path = self.options, self.options.input_path or STANDARD_INPUT
        if (rows := self.answers.rows()) is not None:
            found = row_blocks(rows)
        elif options.text is not None:
            found = iter([[(options.text, options.text2)]])
        else:
            found = text_blocks(path, pairs=self.pairs, reading=options.reading)
        return ((partial(self.classifier.classify, texts), texts) for texts in found)

    def _image_blocks(self) -> Iterator[tuple[Callable[[], np.ndarray], Sequence[Sequence[Any]]]]:
        """(function that returns the scores, [name] of each) of images: `--image`, a set, or named line by line."""
        from tformer.decoding.lines import blocks, line_blocks, name_of

        source = self.options.input_path or STANDARD_INPUT
        if self.options.images:
            for places in blocks(iter(map(str, self.options.images)), BLOCK_IMAGES):
                yield (
                    partial(self.classifier.classify_images, [Path(place) for place in places]),
                    [[place] for place in places],
                )
        elif source != STANDARD_INPUT and _is_image_set(Path(source)):
            images = self.classifier.open_image_set(source)
            show_notes(images.notes)
            for start in range(0, len(images), BLOCK_IMAGES):
                part = images.subset(range(start, min(start + BLOCK_IMAGES, len(images))))
                yield partial(self.classifier.scores, part), [[place] for place in part.places]
        else:
            number = 1
            for places in line_blocks(source, errors=self.options.reading.errors, size=BLOCK_IMAGES):
                lines = [f"{name_of(source)}:{number + index}" for index in range(len(places))]
                paths = [Path(place) for place in places]
                yield partial(self.classifier.classify_images, paths, named_in=lines), [[place] for place in places]
                number += len(places)

    def _answer(self, scores_NL: np.ndarray, inputs: Sequence[Sequence[Any]]) -> None:
        """Write the answers to a block. After an interrupt the scores are incomplete and are not written."""
        if self.flag.should_stop():
            raise self.flag.interrupted(f"interrupted after {self.answers.done:,} inputs")
        self.answers.done += len(scores_NL)
        values_NL = self.classifier.probabilities(scores_NL)
        if self.options.as_json:
            documents = [self.form.document(values_L) for values_L in values_NL]
            if self.classifier.reads_images:
                documents = [{"image": name, **answer} for [name], answer in zip(inputs, documents, strict=True)]
            self.output.documents(documents)
        elif self.answers.takes_cells:
            self.answers.write_cells(zip(inputs, map(self.form.cells, values_NL), strict=True))
        else:
            lines = "".join(f"{self.form.line(values_L)}\n" for values_L in values_NL)
            self.output.text(lines, is_painted=getattr(self.form, "paint", None) is _painted)


def _painted(text: str, label: str) -> str:
    """A part of a line in the colour of its label; "": none."""
    colour = f"\x1b[{31 + sum(label.encode()) % 6}m"
    return f"{colour}{visible(text)}\x1b[0m" if label else visible(text)


def _is_image_set(path: Path) -> bool:
    """Whether a path holds images itself: a folder, a zip or an IDX file. Any other file names one a line."""
    from tformer.data.sources.image_files import is_idx

    return path.is_dir() or path.suffix.lower() == ".zip" or (path.is_file() and is_idx(path))
