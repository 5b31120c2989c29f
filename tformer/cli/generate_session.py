"""The part of `tformer generate` that continues texts: prompts in, completions out, streamed or line by line."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

from tformer.cli.common import StopFlag, console
from tformer.errors import visible

if TYPE_CHECKING:
    from tformer.decoding.output import Write
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
        write: Write,
        *,
        as_json: bool,
        on_terminal: bool,
    ) -> None:
        self.loaded, self.settings, self.flag, self.as_json = loaded, settings, flag, as_json
        self.on_terminal = on_terminal
        self.write = write

    def continue_prompt(self, prompt: str) -> None:
        """One prompt: the prompt and its continuation, each sample after a line of dashes."""
        stream = self.on_terminal and not self.as_json and self.settings.num_samples == 1
        streamed = 0
        if stream:
            self._show(prompt)

        def show_piece(row: int, sample: int, token: int, piece: str) -> None:
            nonlocal streamed
            streamed += len(piece)
            self._show(piece)

        [completions] = self._generate([prompt], first_row=0, on_token=show_piece if stream else None)
        if self.as_json:
            self._write_document(0, prompt, completions)
        elif stream:
            self._show(_text(completions[0])[streamed:] + "\n")
        else:
            texts = [prompt + _text(completion) for completion in completions]
            self._show(f"\n{SAMPLE_SEPARATOR}\n".join(texts) + "\n")
        self._tell_logprobs(completions)
        if self.flag.should_stop():
            raise self.flag.interrupted("interrupted: the text ends where generation was")

    def continue_lines(self, path: str, errors: str, batch_size: int) -> None:
        """Each line of a file: one line of output."""
        from tformer.decoding.prompts import read_lines
        from tformer.decoding.rendering import as_one_line

        lines = read_lines(path, errors="replace" if errors == "replace" else "strict")
        done = 0
        while prompts := list(islice(lines, batch_size)):
            results = self._generate(prompts, first_row=done)
            if self.flag.should_stop():
                raise self.flag.interrupted(f"interrupted after {done} prompts")
            for prompt, completions in zip(prompts, results, strict=True):
                if self.as_json:
                    self._write_document(done, prompt, completions)
                else:
                    self._show(as_one_line(_text(completions[0])) + "\n")
                self._tell_logprobs(completions)
                done += 1

    def _generate(
        self, prompts: list[str], *, first_row: int, on_token: Callable[[int, int, int, str], None] | None = None
    ) -> list[list[Generated]]:
        from tformer.decoding.generate import generate as run_engine
        from tformer.decoding.prompts import encode_prompt

        ids = [encode_prompt(self.loaded.text_tokenizer, prompt) for prompt in prompts]
        limit = self.loaded.model.max_seq_len
        for number, prompt_ids in enumerate(ids, start=first_row + 1):
            if len(prompt_ids) > limit and self.settings.context == "slide":
                console.print(
                    f"prompt {number} has {len(prompt_ids)} tokens, the model's context holds {limit}: "
                    f"only the last {max(1, limit // 2)} are read",
                    markup=False,
                )
        return run_engine(
            self.loaded.model,
            ids,
            self.settings,
            tokenizer=self.loaded.text_tokenizer,
            on_token=on_token,
            should_stop=self.flag.should_stop,
            first_row=first_row,
        )

    def _show(self, text: str) -> None:
        # A model can write anything, control characters included.
        self.write(visible(text) if self.on_terminal else text)

    def _write_document(self, index: int, prompt: str, completions: list[Generated]) -> None:
        import json

        from tformer.checkpoint.logs import finite
        from tformer.decoding.rendering import as_document

        # ASCII alone on a terminal: JSON leaves some control characters as they are.
        document = finite(as_document(index, prompt, completions))
        self.write(json.dumps(document, ensure_ascii=self.on_terminal, allow_nan=False) + "\n")

    def _tell_logprobs(self, completions: list[Generated]) -> None:
        if self.as_json:
            return
        for completion in completions:
            if completion.logprobs:
                total, count = sum(completion.logprobs), len(completion.logprobs)
                console.print(
                    f"log-probability {total:.3f} of {count} tokens, {total / count:.3f} a token", style="dim"
                )


def _text(completion: Generated) -> str:
    assert completion.text is not None
    return completion.text
