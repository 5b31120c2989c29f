"""The work of `tformer generate` after its options are checked: load the models, answer the prompt or every line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any

from tformer.cli.answers import Answers
from tformer.cli.process import StopFlag
from tformer.cli.report import DataOutput, console, show_notes
from tformer.data.sources.columns import parse_column
from tformer.data.sources.labelled import LabelledSource, open_texts
from tformer.data.sources.tables import LabelledRow
from tformer.decoding.completion import OnToken
from tformer.decoding.fill_mask import Candidate, fill_mask
from tformer.decoding.lines import (
    WINDOW_BATCHES,
    LineWindow,
    place_of,
    prompt_window,
    prompt_windows,
    reads_table,
    source_windows,
)
from tformer.decoding.options import GenerateOptions
from tformer.decoding.output import (
    answer_cells,
    answer_columns,
    generated_document,
    translation_document,
    translation_lines,
)
from tformer.decoding.settings import BeamSettings
from tformer.decoding.translate import Translation
from tformer.decoding.writers import (
    Reach,
    Sampler,
    Searcher,
    candidates_of_a_mask,
    fills_masks,
    load_models,
    make_writer,
)
from tformer.loading import Loaded
from tformer.support.errors import InputError
from tformer.support.files import STANDARD_INPUT
from tformer.support.formatting import as_one_line
from tformer.workers.work import ShouldStop
from tformer.workers.worker import Worker

SAMPLE_SEPARATOR = "---------------"


def run(options: GenerateOptions, flag: StopFlag, output: DataOutput, worker: Worker) -> None:
    """Write the answers of the kind of model and the options: filled masks, samples or searched texts."""
    models = worker.in_turn(lambda: load_models(options))  # the first compiles kernels for all
    first = models[0]
    table = open_table(options, first)
    engine: Engine
    if fills_masks(first):
        engine = MaskEngine(first, options)
        show_notes([f"filling masks with {first.path}", *first.notes], dim=True)
    else:
        writer = make_writer(options, models, on_cut=show_cut_prompt)
        how = ""
        if isinstance(writer.settings, BeamSettings):
            how = f", beam {writer.settings.beam_size}"
        elif not writer.settings.greedy:
            how = f", seed {options.seed}"
        paths = ", ".join(str(loaded.path) for loaded in models)
        notes = [note for loaded in models for note in loaded.notes]
        show_notes([f"generating with {paths}{how}", *notes], dim=True)
        if isinstance(writer, Searcher) and writer.note is not None:
            show_notes([writer.note], dim=True)
        engine = SamplerEngine(writer, options) if isinstance(writer, Sampler) else SearcherEngine(writer, options)
    session = Session(engine, options, flag, output)
    if options.input_path is not None or table is not None:
        session.answer_lines(options.input_path or STANDARD_INPUT, table)
    elif options.prompt is not None or not first.model.is_encoder_decoder:
        session.answer_prompt(options.prompt or "")
    elif sys.stdin.isatty():
        raise InputError(
            "nothing to translate", hint="give --prompt TEXT or --input FILE, or pipe one text a line into the command"
        )
    else:
        session.answer_lines(STANDARD_INPUT)


def open_table(options: GenerateOptions, loaded: Loaded) -> LabelledSource | None:
    """The table of `--input`; None for lines."""
    if not reads_table(options):
        return None
    columns, column = loaded.recipe.data.columns, parse_column(options.text_column)
    trained = columns.source if loaded.model.is_encoder_decoder else columns.text
    path = options.input_path or STANDARD_INPUT
    table = open_texts(path, column=column, trained=trained, reading=options.reading)
    show_notes(table.notes)
    return table


@dataclass(frozen=True)
class FormattedAnswer:
    """The answer to one text, in every form.

    Attributes:
        cells: in the order of the engine's columns. document: its JSON.
        line: a line of output. shown: what is still to be written of the answer to the only prompt.
        logprobs: (log-probability, number of tokens) of each text that is shown with it.
        is_cut: an interrupt cut it.
    """

    cells: list[Any]
    document: dict[str, Any]
    line: str
    shown: str
    logprobs: Sequence[tuple[float, int]] = ()
    is_cut: bool = False


class Session:
    """Answers the prompt, or each line of a file or row of a table, with an engine."""

    def __init__(self, engine: Engine, options: GenerateOptions, flag: StopFlag, output: DataOutput) -> None:
        self.engine, self.options, self.flag, self.output = engine, options, flag, output

    def answer_prompt(self, prompt: str) -> None:
        """One prompt, on a terminal perhaps piece by piece."""
        engine = self.engine
        window = prompt_window(prompt, task_prefix=engine.task_prefix, prefix=self.options.target_prefix)
        if isinstance(engine, SamplerEngine) and self.output.on_terminal and not self.options.as_json:
            engine.stream(prompt, self.output.text)
        [answer] = engine.answer(window, self.flag.should_stop)
        if self.options.as_json:
            self.output.documents([answer.document])
        else:
            self.output.text(answer.shown)
            show_logprobs(answer)
        show_notes(engine.notes(int))
        if self.flag.should_stop():
            raise self.flag.interrupted(f"interrupted: the text ends where {engine.work} was")

    def answer_lines(self, path: str, table: LabelledSource | None = None) -> None:
        """Each line, or row of a table, in order: one line of output. An interrupt keeps those that were done."""
        engine = self.engine
        out = Answers(self.output, self.options, table, inputs=["prompt"], columns=engine.columns)
        with out.written("lines" if table is None else "rows"):
            for window in self.output.take_turns(engine.windows(path, table, out.rows()), self.flag):
                done = window.first
                for line, answer in zip(window.lines, engine.answer(window, self.flag.should_stop), strict=False):
                    if answer.is_cut:
                        break
                    if out.takes_cells:
                        out.write_cells([([line], answer.cells)])
                    elif self.options.as_json:
                        self.output.documents([answer.document])
                    else:
                        self.output.text(answer.line)
                        show_logprobs(answer)
                    done, out.done = done + 1, out.done + 1
                if self.flag.should_stop():
                    raise self.flag.interrupted(f"interrupted after {done:,} lines")
        show_notes(engine.notes(self.output.total))


def show_logprobs(answer: FormattedAnswer) -> None:
    for total, count in answer.logprobs:
        console.print(
            f"log-probability {total:.3f} of {count} tokens, {total / max(1, count):.3f} a token", style="dim"
        )


class SamplerEngine:
    """Continues texts by sampling."""

    task_prefix, work = "", "generation"

    def __init__(self, sampler: Sampler, options: GenerateOptions) -> None:
        self.sampler, self.options = sampler, options
        self.names, self.count = ["output", *(["logprob"] if options.logprobs else [])], sampler.settings.num_samples
        self.columns = answer_columns(self.names, self.count)
        self._on_token: OnToken | None = None
        self._streamed: int | None = None

    def stream(self, prompt: str, write: Callable[[str], None]) -> None:
        """Write the prompt, but not that of a chat, and then the pieces of the next sample, if it is one."""
        if self.count > 1:
            return

        def show_piece(row: int, sample: int, token: int, piece: str) -> None:
            self._streamed = (self._streamed or 0) + len(piece)
            write(piece)

        self._on_token, self._streamed = show_piece, 0
        write("" if self.options.chat else prompt)

    def windows(
        self, path: str, table: LabelledSource | None, rows: Iterator[LabelledRow] | None
    ) -> Iterator[LineWindow]:
        # Processes take a batch at a time; so does one, for log-probabilities of equal batches are equal to the bit.
        batches = 1 if self.options.devices or self.options.logprobs else WINDOW_BATCHES
        size = self.sampler.batch_size * batches
        return prompt_windows(path, reading=self.options.reading, batch_size=size, rows=rows)

    def answer(self, window: LineWindow, should_stop: ShouldStop) -> Iterator[FormattedAnswer]:
        """The answers to a window of texts, each as soon as it is known."""
        how: dict[str, Any] = {"first_row": window.first, "on_token": self._on_token, "should_stop": should_stop}
        samples = self.sampler.write(window.sources, **how)
        for row, (prompt, completions) in enumerate(zip(window.lines, samples, strict=True), window.first):
            texts = [completion.text or "" for completion in completions]
            before = "" if self.options.chat else prompt  # an answer stands alone
            if self._streamed is None:
                shown = f"\n{SAMPLE_SEPARATOR}\n".join(before + text for text in texts)
            else:
                shown = texts[0][self._streamed :]
            yield FormattedAnswer(
                answer_cells(self.names, self.count, completions),
                generated_document(row, prompt, completions),
                as_one_line(texts[0]) + "\n",
                shown + "\n",
                [(sum(found.logprobs), len(found.logprobs)) for found in completions if found.logprobs],
                is_cut=should_stop(),
            )

    def notes(self, total: Callable[[int], int]) -> list[str]:
        return self.sampler.reach.notes(total)


def show_cut_prompt(number: int, size: str, limit: int) -> None:
    """Write that the beginning of a prompt is not read."""
    console.print(
        f"prompt {number} has {size}, the model's context holds {limit}: only the last {max(1, limit // 2)} are read",
        markup=False,
    )


class SearcherEngine:
    """Translates, also by sampling, or continues texts by beam search; best first.

    Prompts of a decoder-only model are shown before their continuation, as in sampling.
    """

    work = "the search"

    def __init__(self, searcher: Searcher, options: GenerateOptions) -> None:
        self.searcher, self.options, self.task_prefix = searcher, options, searcher.task_prefix
        self.names = ["output", "score", *compress(("logprob", "alignment"), (options.logprobs, options.alignments))]
        self.count = options.n_best or options.num_samples
        self.columns = answer_columns(self.names, self.count)

    def windows(
        self, path: str, table: LabelledSource | None, rows: Iterator[LabelledRow] | None
    ) -> Iterator[LineWindow]:
        options, searcher = self.options, self.searcher
        if searcher.reader is None:
            return prompt_windows(path, reading=options.reading, batch_size=searcher.batch_size, rows=rows)
        return source_windows(
            path,
            reading=options.reading,
            batch_size=searcher.batch_size,
            reader=searcher.reader,
            task_prefix=searcher.task_prefix,
            prefix=options.target_prefix,
            prefix_file=options.target_prefix_file,
            table=table,
            rows=rows,
        )

    def answer(self, window: LineWindow, should_stop: ShouldStop) -> Iterator[FormattedAnswer]:
        """The answers to a window of texts, searched together."""
        for index, found in enumerate(self.searcher.search(window, should_stop)):
            yield self._answer(window, index, found)

    def _answer(self, window: LineWindow, index: int, found: Sequence[Translation]) -> FormattedAnswer:
        options, number, prompt = self.options, window.first + index, window.lines[index]
        document = (
            {}
            if not found
            else translation_document(
                number,
                prompt,
                found,
                source=window.sources[index],
                target_prefix=None if window.prefixes is None else window.prefixes[index],
                tokenizers=self.searcher.tokenizers if options.alignments else None,
                logprobs=options.logprobs,
            )
        )
        line = translation_lines(number, found, n_best=options.n_best is not None, alignments=options.alignments)
        several = options.n_best is not None or options.num_samples > 1
        with_logprobs = (found if several else found[:1]) if options.logprobs else []
        shown = line
        if options.n_best is None and not options.alignments:  # samples have lines of dashes between them
            before = prompt if self.searcher.reader is None else ""
            shown = (
                f"\n{SAMPLE_SEPARATOR}\n".join(before + each.text for each in (found if several else found[:1])) + "\n"
            )
        return FormattedAnswer(
            answer_cells(self.names, self.count, found),
            document,
            line,
            shown,
            [(each.logprob, len(each.logprobs)) for each in with_logprobs],
            is_cut=not found or any(each.finish_reason == "interrupted" for each in found),
        )

    def notes(self, total: Callable[[int], int]) -> list[str]:
        cut = 0 if self.searcher.reader is None else total(self.searcher.reader.cut)
        about = [f"sources that are longer than the model reads and were cut: {cut:,}"] if cut else []
        return [*about, *self.searcher.reach.notes(total)]


class MaskEngine:
    """Finds the most probable tokens for each mask of a text."""

    task_prefix, work = "", "generation"

    def __init__(self, loaded: Loaded, options: GenerateOptions) -> None:
        """Raises InputError for an option that has no meaning for masks, and for neither prompt nor input."""
        self.top, self.columns = candidates_of_a_mask(options), answer_columns(["output"], 1)
        if options.prompt is None and options.input_path is None and not reads_table(options):
            raise InputError(
                f"{loaded.path} fills masks, and there is none to fill", hint='for example --prompt "The [MASK] sat."'
            )
        self.loaded, self.options, self.reach = loaded, options, Reach([loaded])
        self._place: Callable[[int], str] | None = None

    def windows(
        self, path: str, table: LabelledSource | None, rows: Iterator[LabelledRow] | None
    ) -> Iterator[LineWindow]:
        self._place = partial(place_of, path, table)
        return prompt_windows(path, reading=self.options.reading, batch_size=1, rows=rows)

    def answer(self, window: LineWindow, should_stop: ShouldStop) -> Iterator[FormattedAnswer]:
        """The answer to the only text of the window. Raises InputError for a text without a mask."""
        [prompt], loaded = window.lines, self.loaded
        try:
            masks = fill_mask(loaded.model, loaded.text_tokenizer, prompt, top=self.top, on_read=self.reach.add)
        except InputError as error:
            if self._place is None:
                raise
            raise InputError(f"{self._place(window.first)}: {error.message}", hint=error.hint) from error
        found: list[list[dict[str, Any]]] = [
            [{"token": c.token, "id": c.id, "probability": c.probability, "text": c.text} for c in candidates]
            for candidates in masks
        ]
        document, line = {"index": window.first, "prompt": prompt, "masks": found}, candidate_line(masks)
        cells = [line.strip().replace("\t", " ")]
        yield FormattedAnswer(cells, document, line, candidate_table(masks), is_cut=should_stop())

    def notes(self, total: Callable[[int], int]) -> list[str]:
        return self.reach.notes(total)


Engine = SamplerEngine | SearcherEngine | MaskEngine
"""A way of answering texts: the columns of an answer, windows of texts, their answers, and notes for the end."""


def candidate_table(masks: list[list[Candidate]]) -> str:
    """A line per candidate: token, probability and text, with tabs between; masks with an empty line between them."""
    return "\n".join(
        "".join(f"{as_one_line(c.token)}\t{c.probability:.4f}\t{as_one_line(c.text)}\n" for c in candidates)
        for candidates in masks
    )


def candidate_line(masks: list[list[Candidate]]) -> str:
    """The tokens and probabilities of all masks on one line, with tabs between, and `|` between masks."""
    cells = ("\t".join(f"{as_one_line(c.token)}\t{c.probability:.4f}" for c in candidates) for candidates in masks)
    return "\t|\t".join(cells) + "\n"
