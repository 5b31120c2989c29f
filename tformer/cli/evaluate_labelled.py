"""`tformer evaluate` for classifiers and regressions: of texts, pairs of texts and images."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from tformer.cli.evaluate_mistakes import write_mistakes
from tformer.cli.evaluate_report import report_lines
from tformer.cli.evaluate_request import Request, describe
from tformer.cli.evaluate_text import require_finite
from tformer.cli.process import StopFlag
from tformer.cli.report import console, emit, progress_reporter
from tformer.errors import InputError

if TYPE_CHECKING:
    from tformer.data.shards.labelled_tokens import LabelledTokens
    from tformer.data.sources.images import ImageSet
    from tformer.loading import Loaded

BUILTIN = "builtin:python-packages"  # what a run without data was trained on


def evaluate_labelled(loaded: Loaded, request: Request, flag: StopFlag) -> dict[str, Any]:
    """The report of the model's kind on every example, and the file of mistakes when it was asked for."""
    from tformer.evaluation.classifier import Classifier
    from tformer.evaluation.reports import REPORTS

    classifier = Classifier(loaded, batch_size=request.batch_size, should_stop=flag.should_stop)
    samples: ImageSet | LabelledTokens
    if classifier.reads_images:
        samples, name = read_images(loaded, request, flag)
    else:
        samples, name, classifier.reads_pairs = read_texts(loaded, request, flag)
    if not len(samples):
        raise InputError(f"{name}: no examples to evaluate")
    labels = samples.labels
    assert labels is not None
    began = time.perf_counter()
    with progress_reporter(f"evaluating {name}") as progress:
        scores_NL = classifier.scores(samples, progress=progress)
    if flag.should_stop():
        raise flag.interrupted("interrupted before every example was read")
    seconds = time.perf_counter() - began
    report = REPORTS[loaded.recipe.objectives[0].kind](labels, scores_NL, classifier.labels)
    require_finite(report["loss"])
    if request.errors_file is not None:
        written = write_mistakes(request.errors_file, classifier, samples, scores_NL)
        console.print(f"{request.errors_file}: {written:,} examples", markup=False)
    speed = len(samples) / seconds
    return {**describe(loaded), "data": name, **report, "examples_per_second": speed}


def show_labelled(result: dict[str, Any]) -> None:
    """The figures, a table of the classes and the confusion matrix."""
    for line in report_lines(result):
        emit(line)


def read_texts(loaded: Loaded, request: Request, flag: StopFlag) -> tuple[LabelledTokens, str, bool]:
    """The examples, what they are called, and whether they are pairs."""
    from tformer.data.shards.labelled_tokens import tokenise_labelled
    from tformer.data.sources.labelled import LabelIndex, open_labelled
    from tformer.recipe.sections import SourceSpec

    recipe, data = loaded.recipe, loaded.recipe.data
    kind = recipe.objectives[0].kind
    sources = open_labelled(
        request.specs(loaded) or (SourceSpec(path=BUILTIN),),
        columns=request.columns(loaded),
        errors=request.errors(loaded),
        needs_label=True,
        numeric_label=kind == "regression",
        multi_label=kind == "multi_label",
        separator=data.label_separator,
    )
    for source in sources:
        for note in source.notes:
            console.print(note, markup=False)
        if not loaded.imported and source.has_text2 != (data.columns.text2 is not None):
            found, trained = ("two texts", "single texts") if source.has_text2 else ("one text", "pairs of texts")
            raise InputError(
                f"{source.name} has {found} a row, {loaded.path} was trained on {trained}",
                hint="name the columns with --text-column and --text2-column",
            )
    name = ", ".join(source.name for source in sources)
    index = None
    if kind != "regression":
        index = LabelIndex(data.labels, multi=kind == "multi_label", separator=data.label_separator)
    with progress_reporter(f"tokenising {name}") as progress:
        tokens = tokenise_labelled(
            sources,
            loaded.text_tokenizer,
            seq_len=recipe.seq_len,
            index=index,
            numeric=index is None,
            truncation=data.truncation,
            token_types=recipe.model.embedding.token_types > 1,
            progress=progress,
            should_stop=flag.should_stop,
        )
    for note in tokens.notes:
        console.print(note, markup=False)
    if request.held_out(loaded):
        _, tokens = tokens.split(fraction=data.valid_fraction, how=data.valid_split)
        name = f"{data.valid_fraction:.0%} of {name}, held out"
    return tokens, name, sources[0].has_text2


def read_images(loaded: Loaded, request: Request, flag: StopFlag) -> tuple[ImageSet, str]:
    """The images, and what they are called."""
    from tformer.data.sources.images import open_images

    patches, data = loaded.recipe.model.patches, loaded.recipe.data
    assert patches is not None
    [spec, *more] = request.specs(loaded)
    if more:
        raise InputError(f"{1 + len(more)} sets of images, expected one", hint="put them into one folder")
    with progress_reporter(f"reading {spec.path}") as progress:
        images = open_images(
            spec.path,
            size=patches.image_size,
            channels=patches.channels,
            label_names=data.labels,
            progress=progress,
            should_stop=flag.should_stop,
        )
    for note in images.notes:
        console.print(note, markup=False)
    name = images.name
    if request.held_out(loaded):
        _, images = images.split(fraction=data.valid_fraction, how=data.valid_split)
        name = f"{data.valid_fraction:.0%} of {name}, held out"
    images.seq_len = loaded.recipe.seq_len
    return images, name
