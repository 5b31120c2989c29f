"""The part of `tformer generate` that searches with a beam, and all of it for encoder-decoders.

Texts go in, and each comes out as its hypotheses, best first. An encoder-decoder writes what its source becomes; a
decoder alone goes on from the prompt, which is shown before the continuation as in sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tformer.cli.generate_output import Printer, as_document, as_lines
from tformer.cli.generate_session import SAMPLE_SEPARATOR
from tformer.cli.report import (
    StopFlag,
    console,
)
from tformer.cli.translate_input import Lines, line_windows, prompt_line, prompt_windows

if TYPE_CHECKING:
    from tformer.cli.generate_request import Asked
    from tformer.decoding.sentences import SentenceReader
    from tformer.decoding.translate import Translation
    from tformer.tokenizer import Tokenizer

Search = Callable[[Lines], "list[list[Translation]]"]
"""What becomes of each line, best first."""


class TranslateSession:
    """What searches, what was asked, and where the answers go.

    Args:
        reader: of sources and target prefixes; None: the texts are prompts of a decoder alone.
        task_prefix: what goes before each source.
        tokenizers: of source and target.
        batch_size: lines at a time.
    """

    def __init__(
        self,
        search: Search,
        asked: Asked,
        flag: StopFlag,
        printer: Printer,
        *,
        reader: SentenceReader | None,
        task_prefix: str = "",
        tokenizers: tuple[Tokenizer, Tokenizer],
        batch_size: int,
    ) -> None:
        self.search, self.asked, self.flag, self.printer = search, asked, flag, printer
        self.reader, self.task_prefix = reader, task_prefix
        self.tokenizers, self.batch_size = tokenizers, batch_size
        self.done = 0

    def answer_prompt(self, text: str) -> None:
        """One text: its best hypothesis, or with `--n-best` a line for each; samples stand between lines of dashes."""
        if self.reader is None:
            line = Lines(0, [text], [text], None)
        else:
            line = prompt_line(text, task_prefix=self.task_prefix, prefix=self.asked.target_prefix)
        [answers] = self.search(line)
        if self.asked.as_json or self.asked.n_best is not None or self.asked.alignments:
            self._write(line, 0, answers)
        else:
            before = text if self.reader is None else ""
            shown = answers if self.asked.num_samples > 1 else answers[:1]
            self.printer.show(f"\n{SAMPLE_SEPARATOR}\n".join(before + answer.text for answer in shown) + "\n")
            self._tell_logprobs(answers)
        self._tell_cut()
        if self.flag.should_stop():
            raise self.flag.interrupted("interrupted: the text ends where the search was")

    def answer_lines(self, path: str) -> None:
        """Each line of a file or of standard input, in order. An interrupt keeps the lines that were done."""
        for window in self._windows(path):
            results = self.search(window)
            stopped = self.flag.should_stop()
            for index, answers in enumerate(results):
                if stopped and (not answers or any(answer.finish_reason == "interrupted" for answer in answers)):
                    break
                self._write(window, index, answers)
            if stopped:
                raise self.flag.interrupted(f"interrupted after {self.done:,} lines")
        self._tell_cut()

    def _windows(self, path: str) -> Iterator[Lines]:
        asked = self.asked
        if self.reader is None:
            return prompt_windows(path, errors=asked.utf8, batch_size=self.batch_size)
        return line_windows(
            path,
            errors=asked.utf8,
            batch_size=self.batch_size,
            reader=self.reader,
            task_prefix=self.task_prefix,
            prefix=asked.target_prefix,
            prefix_file=asked.target_prefix_file,
        )

    def _write(self, window: Lines, index: int, answers: list[Translation]) -> None:
        asked = self.asked
        if asked.as_json:
            document = as_document(
                self.done,
                window.lines[index],
                answers,
                source=window.sources[index],
                target_prefix=None if window.prefixes is None else window.prefixes[index],
                tokenizers=self.tokenizers if asked.alignments else None,
            )
            self.printer.show_document(document)
        else:
            several = asked.n_best is not None
            self.printer.show(as_lines(self.done, answers, n_best=several, alignments=asked.alignments))
            self._tell_logprobs(answers)
        self.done += 1

    def _tell_logprobs(self, answers: list[Translation]) -> None:
        if not self.asked.logprobs:
            return
        for answer in answers if self.asked.n_best is not None or self.asked.num_samples > 1 else answers[:1]:
            count = answer.num_scored
            mean = answer.logprob / max(1, count)
            console.print(f"log-probability {answer.logprob:.3f} of {count} tokens, {mean:.3f} a token", style="dim")

    def _tell_cut(self) -> None:
        if self.reader is not None and self.reader.cut:
            console.print(f"sources that are longer than the model reads and were cut: {self.reader.cut:,}")
