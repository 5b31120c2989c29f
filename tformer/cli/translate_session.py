"""The part of `tformer generate` that searches with a beam, and all of it for encoder-decoders.

Texts go in, and each comes out as its hypotheses, best first. An encoder-decoder writes what its source becomes; a
decoder alone goes on from the prompt, which is shown before the continuation as in sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from tformer.cli.common import StopFlag, console
from tformer.cli.generate_output import Printer, as_document, as_lines
from tformer.cli.generate_session import SAMPLE_SEPARATOR
from tformer.cli.translate_input import Checks, Lines, line_windows, prompt_windows

if TYPE_CHECKING:
    from tformer.cli.generate_request import Asked
    from tformer.decoding.translation import Translation
    from tformer.tokenizer import Tokenizer


class Searcher(Protocol):
    """`decoding.translate.Translator`, or what goes on from prompts in the same way."""

    def translate(
        self,
        texts: Sequence[str],
        *,
        target_prefixes: Sequence[str] | None = None,
        batch_size: int = 32,
        should_stop: Callable[[], bool] | None = None,
        first_row: int = 0,
    ) -> list[list[Translation]]: ...


class TranslateSession:
    """What searches, what was asked, and where the answers go.

    Args:
        checks: of sources and target prefixes; None: the texts are prompts of a decoder alone.
        tokenizers: of source and target.
        batch_size: lines at a time.
    """

    def __init__(
        self,
        searcher: Searcher,
        asked: Asked,
        flag: StopFlag,
        printer: Printer,
        *,
        checks: Checks | None,
        tokenizers: tuple[Tokenizer, Tokenizer],
        batch_size: int,
    ) -> None:
        self.searcher, self.asked, self.flag, self.printer = searcher, asked, flag, printer
        self.checks, self.tokenizers, self.batch_size = checks, tokenizers, batch_size
        self.done = 0

    def answer_prompt(self, text: str) -> None:
        """One text: its best hypothesis, or with `--n-best` a line for each; samples stand between lines of dashes."""
        prefix = self.asked.target_prefix
        if self.checks is not None:
            self.checks.sources([text], places=["--prompt"])
            if prefix is not None:
                self.checks.prefix(prefix, place="--target-prefix")
        [answers] = self._search([text], None if prefix is None else [prefix])
        if self.asked.as_json or self.asked.n_best is not None or self.asked.alignments:
            self._write(text, answers, prefix)
        else:
            before = text if self.checks is None else ""
            shown = answers if self.asked.num_samples > 1 else answers[:1]
            self.printer.show(f"\n{SAMPLE_SEPARATOR}\n".join(before + answer.text for answer in shown) + "\n")
            self._tell_logprobs(answers)
        if self.flag.should_stop():
            raise self.flag.interrupted("interrupted: the text ends where the search was")

    def answer_lines(self, path: str) -> None:
        """Each line of a file or of standard input, in order. An interrupt keeps the lines that were done."""
        for window in self._windows(path):
            results = self._search(window.sources, window.prefixes)
            stopped = self.flag.should_stop()
            for index, (text, answers) in enumerate(zip(window.sources, results, strict=True)):
                if stopped and (not answers or any(answer.finish_reason == "interrupted" for answer in answers)):
                    break
                self._write(text, answers, None if window.prefixes is None else window.prefixes[index])
            if stopped:
                raise self.flag.interrupted(f"interrupted after {self.done:,} lines")

    def _windows(self, path: str) -> Iterator[Lines]:
        asked = self.asked
        if self.checks is None:
            return prompt_windows(path, errors=asked.utf8, batch_size=self.batch_size)
        return line_windows(
            path,
            errors=asked.utf8,
            batch_size=self.batch_size,
            checks=self.checks,
            prefix=asked.target_prefix,
            prefix_file=asked.target_prefix_file,
        )

    def _search(self, texts: list[str], prefixes: list[str] | None) -> list[list[Translation]]:
        return self.searcher.translate(
            texts,
            target_prefixes=prefixes,
            batch_size=self.batch_size,
            should_stop=self.flag.should_stop,
            first_row=self.done,
        )

    def _write(self, text: str, answers: list[Translation], prefix: str | None) -> None:
        asked = self.asked
        if asked.as_json:
            tokenizers = self.tokenizers if asked.alignments else None
            self.printer.show_document(
                as_document(self.done, text, answers, target_prefix=prefix, tokenizers=tokenizers)
            )
        else:
            several = asked.n_best is not None
            self.printer.show(as_lines(self.done, answers, n_best=several, alignments=asked.alignments))
            self._tell_logprobs(answers)
        self.done += 1

    def _tell_logprobs(self, answers: list[Translation]) -> None:
        if not self.asked.logprobs:
            return
        for answer in answers if self.asked.n_best is not None or self.asked.num_samples > 1 else answers[:1]:
            count = len(answer.ids)
            mean = answer.logprob / max(1, count)
            console.print(f"log-probability {answer.logprob:.3f} of {count} tokens, {mean:.3f} a token", style="dim")
