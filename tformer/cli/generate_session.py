"""The part of `tformer generate` that continues texts: prompts in, completions out, streamed or line by line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tformer.cli.classify_input import line_blocks
from tformer.cli.generate_output import Printer
from tformer.cli.report import (
    StopFlag,
    console,
)

if TYPE_CHECKING:
    from tformer.data.sources.files import Errors
    from tformer.decoding.settings import Generated, GenerationSettings
    from tformer.loading import Loaded

SAMPLE_SEPARATOR = "---------------"


class Session:
    """A loaded model, how to generate with it, and where the text goes."""

    def __init__(
        self,
        loaded: Loaded,
        settings: GenerationSettings,
        flag: StopFlag,
        printer: Printer,
        *,
        as_json: bool,
    ) -> None:
        self.loaded, self.settings, self.flag, self.printer = loaded, settings, flag, printer
        self.as_json = as_json

    def continue_prompt(self, prompt: str) -> None:
        """One prompt: the prompt and its continuation, each sample after a line of dashes."""
        stream = self.printer.on_terminal and not self.as_json and self.settings.num_samples == 1
        streamed = 0
        if stream:
            self.printer.show(prompt)

        def show_piece(row: int, sample: int, token: int, piece: str) -> None:
            nonlocal streamed
            streamed += len(piece)
            self.printer.show(piece)

        [completions] = self._generate([prompt], first_row=0, on_token=show_piece if stream else None)
        if self.as_json:
            self._write_document(0, prompt, completions)
        elif stream:
            self.printer.show(_text(completions[0])[streamed:] + "\n")
        else:
            texts = [prompt + _text(completion) for completion in completions]
            self.printer.show(f"\n{SAMPLE_SEPARATOR}\n".join(texts) + "\n")
        self._tell_logprobs(completions)
        if self.flag.should_stop():
            raise self.flag.interrupted("interrupted: the text ends where generation was")

    def continue_lines(self, path: str, errors: Errors, batch_size: int) -> None:
        """Each line of a file or of standard input: one line of output."""
        from tformer.formatting import as_one_line

        done = 0
        for prompts in line_blocks(path, errors=errors, size=batch_size):
            results = self._generate(prompts, first_row=done)
            if self.flag.should_stop():
                raise self.flag.interrupted(f"interrupted after {done} prompts")
            for prompt, completions in zip(prompts, results, strict=True):
                if self.as_json:
                    self._write_document(done, prompt, completions)
                else:
                    self.printer.show(as_one_line(_text(completions[0])) + "\n")
                self._tell_logprobs(completions)
                done += 1

    def _generate(
        self, prompts: list[str], *, first_row: int, on_token: Callable[[int, int, int, str], None] | None = None
    ) -> list[list[Generated]]:
        from tformer.decoding.generate import generate as run_engine
        from tformer.decoding.prompts import encode_prompt, unwritten_tokens

        tokenizer, eos = self.loaded.text_tokenizer, self.settings.eos_id
        ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
        limit = self.loaded.model.max_seq_len
        for number, prompt_ids in enumerate(ids, start=first_row + 1):
            if len(prompt_ids) > limit and self.settings.context == "slide":
                tell_cut_prompt(number, length=len(prompt_ids), limit=limit)
        return run_engine(
            self.loaded.model,
            ids,
            self.settings,
            tokenizer=tokenizer,
            never=unwritten_tokens(tokenizer.special, eos=eos, suppressed=self.settings.suppress_tokens),
            on_token=on_token,
            should_stop=self.flag.should_stop,
            first_row=first_row,
        )

    def _write_document(self, index: int, prompt: str, completions: list[Generated]) -> None:
        from tformer.decoding.output import as_document

        self.printer.show_document(as_document(index, prompt, completions))

    def _tell_logprobs(self, completions: list[Generated]) -> None:
        if self.as_json:
            return
        for completion in completions:
            if completion.logprobs:
                total, count = sum(completion.logprobs), len(completion.logprobs)
                console.print(
                    f"log-probability {total:.3f} of {count} tokens, {total / count:.3f} a token", style="dim"
                )


def tell_cut_prompt(number: int, *, length: int, limit: int) -> None:
    """Say that the beginning of a prompt is not read."""
    console.print(
        f"prompt {number} has {length} tokens, the model's context holds {limit}: "
        f"only the last {max(1, limit // 2)} are read",
        markup=False,
    )


def _text(completion: Generated) -> str:
    assert completion.text is not None
    return completion.text
