"""The work of `tformer generate` after its options are checked: load the models, answer the prompt or every line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
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
from tformer.decoding.settings import BeamSettings, Generated
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
from tformer.workers.worker import Worker

SAMPLE_SEPARATOR = "---------------"


def run(options: GenerateOptions, flag: StopFlag, output: DataOutput, worker: Worker) -> None:
    """Write the answers of the kind of model and the options: filled masks, samples or searched texts."""
    models = worker.in_turn(lambda: load_models(options))  # the first compiles kernels for all
    first = models[0]
    table = open_table(options, first)
    if fills_masks(first):
        MaskFiller(first, options, flag, output).run(table)
        return
    writer = make_writer(options, models, on_cut=show_cut_prompt)
    how = ""
    if isinstance(writer.settings, BeamSettings):
        how = f", beam {writer.settings.beam_size}"
    elif not writer.settings.greedy:
        how = f", seed {options.seed}"
    paths = ", ".join(str(loaded.path) for loaded in models)
    notes = [note for loaded in models for note in loaded.notes]
    show_notes([f"generating with {paths}{how}", *notes], dim=True)
    session: SamplingSession | SearchSession
    if isinstance(writer, Sampler):
        session = SamplingSession(writer, options, flag, output)
    else:
        show_notes([] if writer.note is None else [writer.note], dim=True)
        session = SearchSession(writer, options, flag, output)
    path = options.input_path or STANDARD_INPUT
    if options.input_path is not None or table is not None:
        session.answer_lines(path, table)
    elif options.prompt is not None or not first.model.is_encoder_decoder:
        session.answer_prompt(options.prompt or "")
    elif sys.stdin.isatty():
        raise InputError(
            "nothing to translate", hint="give --prompt TEXT or --input FILE, or pipe one text a line into the command"
        )
    else:
        session.answer_lines(path)


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


# --- samples of a decoder-only model ----------------------------------------------------------------------------------


class SamplingSession:
    """Continues texts by sampling: prompts in, completions out, streamed on a terminal."""

    def __init__(self, sampler: Sampler, options: GenerateOptions, flag: StopFlag, output: DataOutput) -> None:
        self.sampler, self.options, self.flag, self.output = sampler, options, flag, output

    def answer_prompt(self, prompt: str) -> None:
        """One prompt: the prompt and its continuation, samples with a line of dashes between them."""
        stream = self.output.on_terminal and not self.options.as_json and self.sampler.settings.num_samples == 1
        streamed = 0
        before = "" if self.options.chat else prompt  # an answer stands alone
        if stream:
            self.output.text(before)

        def show_piece(row: int, sample: int, token: int, piece: str) -> None:
            nonlocal streamed
            streamed += len(piece)
            self.output.text(piece)

        [completions] = self._write([prompt], on_token=show_piece if stream else None)
        if self.options.as_json:
            self.output.documents([generated_document(0, prompt, completions)])
        elif stream:
            self.output.text(_text(completions[0])[streamed:] + "\n")
        else:
            texts = [before + _text(completion) for completion in completions]
            self.output.text(f"\n{SAMPLE_SEPARATOR}\n".join(texts) + "\n")
        self._show_logprobs(completions)
        show_notes(self.sampler.reach.notes())
        if self.flag.should_stop():
            raise self.flag.interrupted("interrupted: the text ends where generation was")

    def answer_lines(self, path: str, table: LabelledSource | None = None) -> None:
        """Each line of a file or of standard input: one line of output. Each row of a table: its answers beside it."""
        options, size = self.options, self.sampler.batch_size
        # Processes take a batch at a time; so does one, for log-probabilities of equal batches are equal to the bit.
        size *= 1 if options.devices or options.logprobs else WINDOW_BATCHES
        names, samples = ["output", *(["logprob"] if options.logprobs else [])], self.sampler.settings.num_samples
        columns = answer_columns(names, samples)
        out = Answers(self.output, options, table, inputs=["prompt"], columns=columns)
        windows = prompt_windows(path, reading=options.reading, batch_size=size, rows=out.rows())
        with out.written("lines" if table is None else "rows"):
            for window in self.output.take_turns(windows, self.flag):
                results = self._write(window.sources, first_row=window.first)
                for row, (prompt, completions) in enumerate(zip(window.lines, results, strict=True), window.first):
                    if self.flag.should_stop():
                        raise self.flag.interrupted(f"interrupted after {row} prompts")
                    if out.takes_cells:
                        out.write_cells([([prompt], answer_cells(names, samples, completions))])
                    elif options.as_json:
                        self.output.documents([generated_document(row, prompt, completions)])
                    else:
                        self.output.text(as_one_line(_text(completions[0])) + "\n")
                        self._show_logprobs(completions)
                    out.done += 1
        show_notes(self.sampler.reach.notes(self.output.total))

    def _write(
        self, prompts: Sequence[str], *, first_row: int = 0, on_token: OnToken | None = None
    ) -> Iterator[list[Generated]]:
        return self.sampler.write(prompts, first_row=first_row, on_token=on_token, should_stop=self.flag.should_stop)

    def _show_logprobs(self, completions: Sequence[Generated]) -> None:
        if not self.options.as_json:
            for completion in completions:
                if completion.logprobs:
                    show_logprob(sum(completion.logprobs), len(completion.logprobs))


def _text(completion: Generated) -> str:
    assert completion.text is not None
    return completion.text


def show_cut_prompt(number: int, size: str, limit: int) -> None:
    """Write that the beginning of a prompt is not read."""
    console.print(
        f"prompt {number} has {size}, the model's context holds {limit}: only the last {max(1, limit // 2)} are read",
        markup=False,
    )


def show_logprob(total: float, count: int) -> None:
    console.print(f"log-probability {total:.3f} of {count} tokens, {total / max(1, count):.3f} a token", style="dim")


# --- translations, and beam search of a decoder-only model ------------------------------------------------------------


class SearchSession:
    """Answers texts with translations or searched continuations, best first.

    Prompts of a decoder-only model are shown before their continuation, as in sampling.
    """

    def __init__(self, searcher: Searcher, options: GenerateOptions, flag: StopFlag, output: DataOutput) -> None:
        self.searcher, self.options, self.flag, self.output = searcher, options, flag, output
        self.reader = searcher.reader

    def answer_prompt(self, text: str) -> None:
        """One text: its best answer, or with `--n-best` a line for each; samples with lines of dashes between them."""
        options = self.options
        window = prompt_window(text, task_prefix=self.searcher.task_prefix, prefix=options.target_prefix)
        [answers] = self.searcher.search(window, self.flag.should_stop)
        if options.as_json or options.n_best is not None or options.alignments:
            self._write(window, 0, answers)
        else:
            before = text if self.reader is None else ""
            shown = answers if options.num_samples > 1 else answers[:1]
            self.output.text(f"\n{SAMPLE_SEPARATOR}\n".join(before + answer.text for answer in shown) + "\n")
            self._show_logprobs(answers)
        self._show_cut()
        if self.flag.should_stop():
            raise self.flag.interrupted("interrupted: the text ends where the search was")

    def answer_lines(self, path: str, table: LabelledSource | None = None) -> None:
        """Answer each line, or row of a table, in order. An interrupt keeps the finished ones."""
        options, extra = self.options, ("logprob", "alignment")
        names = ["output", "score", *compress(extra, (options.logprobs, options.alignments))]
        best = options.n_best or options.num_samples
        out = Answers(self.output, options, table, inputs=["prompt"], columns=answer_columns(names, best))
        with out.written("lines" if table is None else "rows"):
            for window in self.output.take_turns(self._windows(path, table, out.rows()), self.flag):
                results = self.searcher.search(window, self.flag.should_stop)
                stopped = self.flag.should_stop()
                done = window.first
                for index, answers in enumerate(results):
                    if stopped and (not answers or any(answer.finish_reason == "interrupted" for answer in answers)):
                        break
                    if out.takes_cells:
                        out.write_cells([([window.lines[index]], answer_cells(names, best, answers))])
                    else:
                        self._write(window, index, answers)
                    done += 1
                if stopped:
                    raise self.flag.interrupted(f"interrupted after {done:,} lines")
                out.done += len(results)
        self._show_cut()

    def _windows(
        self, path: str, table: LabelledSource | None, rows: Iterator[LabelledRow] | None
    ) -> Iterator[LineWindow]:
        options, searcher = self.options, self.searcher
        if searcher.reader is None:
            size = searcher.batch_size
            return prompt_windows(path, reading=options.reading, batch_size=size, rows=rows)
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

    def _write(self, window: LineWindow, index: int, answers: list[Translation]) -> None:
        options = self.options
        if options.as_json:
            document = translation_document(
                window.first + index,
                window.lines[index],
                answers,
                source=window.sources[index],
                target_prefix=None if window.prefixes is None else window.prefixes[index],
                tokenizers=self.searcher.tokenizers if options.alignments else None,
                logprobs=options.logprobs,
            )
            self.output.documents([document])
        else:
            several = options.n_best is not None
            self.output.text(
                translation_lines(window.first + index, answers, n_best=several, alignments=options.alignments)
            )
            self._show_logprobs(answers)

    def _show_logprobs(self, answers: Sequence[Translation]) -> None:
        if self.options.logprobs:
            several = self.options.n_best is not None or self.options.num_samples > 1
            for answer in answers if several else answers[:1]:
                show_logprob(answer.logprob, len(answer.logprobs))

    def _show_cut(self) -> None:
        cut = 0 if self.reader is None else self.output.total(self.reader.cut)
        if cut:
            console.print(f"sources that are longer than the model reads and were cut: {cut:,}")
        show_notes(self.searcher.reach.notes(self.output.total))


# --- masks ------------------------------------------------------------------------------------------------------------


class MaskFiller:
    """Writes the most probable tokens for each mask of a prompt, or of every line."""

    def __init__(self, loaded: Loaded, options: GenerateOptions, flag: StopFlag, output: DataOutput) -> None:
        """Raises InputError for an option that has no meaning for masks, and for neither prompt nor input."""
        self.top = candidates_of_a_mask(options)
        if options.prompt is None and options.input_path is None and not reads_table(options):
            raise InputError(
                f"{loaded.path} fills masks, and there is none to fill", hint='for example --prompt "The [MASK] sat."'
            )
        self.loaded, self.options, self.flag, self.output, self.reach = loaded, options, flag, output, Reach([loaded])

    def run(self, table: LabelledSource | None) -> None:
        """Answer the prompt, or each line of the input on its own line, each row of a table beside its columns.

        Raises InputError for a text without a mask.
        """
        options, path = self.options, self.options.input_path or STANDARD_INPUT
        show_notes([f"filling masks with {self.loaded.path}", *self.loaded.notes], dim=True)
        if options.prompt is not None:
            self._write(0, options.prompt, self._candidates(options.prompt), form=candidate_table)
            show_notes(self.reach.notes())
            return
        columns = answer_columns(["output"], 1)
        out = Answers(self.output, options, table, inputs=["prompt"], columns=columns)
        windows = prompt_windows(path, reading=options.reading, batch_size=1, rows=out.rows())
        with out.written("lines" if table is None else "rows"):
            for window in self.output.take_turns(windows, self.flag):
                [line] = window.lines
                try:
                    masks = self._candidates(line)
                except InputError as error:
                    place = place_of(path, table, window.first)
                    raise InputError(f"{place}: {error.message}", hint=error.hint) from error
                if self.flag.should_stop():
                    raise self.flag.interrupted(f"interrupted after {window.first} prompts")
                if out.takes_cells:
                    out.write_cells([([line], [candidate_line(masks).strip().replace("\t", " ")])])
                else:
                    self._write(window.first, line, masks, form=candidate_line)
                out.done += 1
        show_notes(self.reach.notes(self.output.total))

    def _candidates(self, text: str) -> list[list[Candidate]]:
        return fill_mask(self.loaded.model, self.loaded.text_tokenizer, text, top=self.top, on_read=self.reach.add)

    def _write(
        self, index: int, prompt: str, masks: list[list[Candidate]], *, form: Callable[[list[list[Candidate]]], str]
    ) -> None:
        if not self.options.as_json:
            self.output.text(form(masks))
            return
        answers: list[list[dict[str, Any]]] = [
            [{"token": c.token, "id": c.id, "probability": c.probability, "text": c.text} for c in candidates]
            for candidates in masks
        ]
        self.output.documents([{"index": index, "prompt": prompt, "masks": answers}])


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
